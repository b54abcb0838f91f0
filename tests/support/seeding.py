"""``torch.manual_seed`` without the stacks that it formats for devices that are not here."""

import traceback
from types import SimpleNamespace

import torch.cuda
import torch.mtia
import torch.xpu

__all__ = ["seed_without_stacks"]


def seed_without_stacks() -> None:
    """A device that is not initialized keeps each seed for later, with the stack of who gave it, for an error's text.

    Three devices format it at each seed: six milliseconds under pytest, a twentieth of the time of all tests.
    """
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if hasattr(device, "traceback"):
            device.traceback = SimpleNamespace(**{**vars(traceback), "format_stack": lambda *_: []})
