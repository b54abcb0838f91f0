"""Random state as in a new process, and ``torch.manual_seed`` without the stacks that it formats for absent devices."""

import random
import traceback
from types import SimpleNamespace

import numpy as np
import torch.cuda
import torch.mtia
import torch.xpu

__all__ = ["seed_as_in_a_new_process", "seed_without_stacks"]


def seed_without_stacks() -> None:
    """A device that is not initialized keeps each seed for later, with the stack of who gave it, for an error's text.

    Three devices format it at each seed: six milliseconds under pytest, a twentieth of the time of all tests.
    """
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if hasattr(device, "traceback"):
            device.traceback = SimpleNamespace(**{**vars(traceback), "format_stack": lambda *_: []})


def seed_as_in_a_new_process() -> None:
    """Random state that no other rank has, and no other run: a program that forgets its seed then shows it.

    ``run_ranks`` seeds all ranks alike, and simulated ranks begin with the random state of the process.
    """
    torch.seed()
    random.seed()
    np.random.seed()
