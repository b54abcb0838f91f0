"""The user's program: copies of the model, and the loss of a batch, as reproducible as seeds can make them."""

import copy
import importlib.util
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...ddp import DistributedDataParallel
from ...ddp.contract.main_grad import has_main_grad
from ...fsdp import FSDPModule
from ...te_integration import unconvert
from .batches import own_copy

__all__ = ["Loss", "Program", "Step", "load_arguments", "set_seed"]

Loss = Callable[[Any, Any], Tensor]
"""``loss(output, batch)``: a scalar, given what the model returned."""
Step = Callable[[Any, Any], Tensor]
"""``step(model, batch)``: a scalar. Calls the model, and no backward."""

_MARK = (bool, int, float, str)
"""Types of attributes that programs put on parameters, such as ``allreduce = False``. ``deepcopy`` drops them."""


class Program:
    """A model, and how it computes the loss of a batch. Each run gets its own copy of the model.

    model  a module, which is copied; or a function without arguments that makes one. All copies get the first one's
           state dict
    loss   None: the output itself, its ``.loss``, or its entry ``"loss"``
    step   instead of ``loss``
    seed   of everything random
    """

    def __init__(
        self, model: nn.Module | Callable[[], nn.Module], loss: Loss | None, step: Step | None, seed: int
    ) -> None:
        if loss is not None and step is not None:
            raise ValueError("loss and step both say what the loss is: pass one of them")
        if isinstance(model, DistributedDataParallel):
            model = model.module
        if isinstance(model, nn.Module) and any(isinstance(each, FSDPModule) for each in model.modules()):
            raise TypeError("the model is fully sharded already: pass it to verify before fully_shard")
        if not callable(model):  # a module is
            raise TypeError(f"model is an nn.Module or a function that makes one, got {type(model).__name__}")
        self.model, self._loss, self._step, self.seed = model, loss, step, seed
        self.means = False
        """Each random draw gives its mean."""
        self._state: Any = None
        """The first model's state dict, where a function makes models."""

    def make(self) -> nn.Module:
        """A plain model of its own on the CPU: the same weights, buffers, marks and hooks each time."""
        made = self._copy(self.model) if isinstance(self.model, nn.Module) else self._build(self.model)
        unconvert(made)
        for param in made.parameters():
            param.grad = None
        return made.cpu()

    def with_means(self) -> "Program":
        """The same program, in which each random draw gives its mean, and all parts draw the same where it has none."""
        program = copy.copy(self)
        program.means = True
        return program

    def loss_of(self, model: Any, batch: Any) -> Tensor:
        """The scalar loss of a batch, which the program may change.

        Raises ``TypeError`` or ``ValueError`` if the program gives no loss.
        """
        if self._step is not None:
            return _checked(self._step(model, batch), "step")
        if isinstance(batch, dict):
            output = model(**batch)
        else:
            output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
        if self._loss is not None:
            return _checked(self._loss(output, batch), "loss")
        if isinstance(output, dict) and "loss" in output:
            output = output["loss"]
        return _checked(getattr(output, "loss", output), "the model")

    def _copy(self, model: nn.Module) -> nn.Module:
        try:
            copied = copy.deepcopy(model)
        except (TypeError, RuntimeError) as error:
            raise TypeError(
                f"{type(model).__name__} cannot be copied ({error}): pass a function that makes the model instead"
            ) from error
        for old, new in zip(model.parameters(), copied.parameters(), strict=True):
            _take_along(old, new)
        return copied

    def _build(self, factory: Callable[[], nn.Module]) -> nn.Module:
        set_seed(self.seed)
        built = factory()
        if not isinstance(built, nn.Module):
            raise TypeError(f"the function that makes the model returned a {type(built).__name__}")
        if self._state is None:
            self._state = own_copy(built.state_dict())
        built.load_state_dict(self._state)
        return built


def set_seed(seed: int) -> None:
    """Seed the default generators of torch, ``random`` and, where it is loaded, numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(seed % 2**32)


def load_arguments(target: str) -> dict[str, Any]:
    """Call ``FUNCTION`` of ``FILE.py:FUNCTION``; what it returned, as arguments of ``verify``.

    The function returns (model, batch), (model, batch, loss), or a dict of arguments. The file may import files beside
    it. Raises ``ValueError`` if there is no such file or function, or if it returns something else.
    """
    file, _, name = target.rpartition(":")
    path = Path(file)
    if not name.isidentifier() or not path.is_file():
        raise ValueError(f"'{target}' is not FILE.py:FUNCTION of a file that is there")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"'{path}' is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look their module up
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"'{path}' has no function {name}")
    returned = function()
    if isinstance(returned, Mapping):
        return {**returned}
    if isinstance(returned, tuple) and len(returned) in (2, 3):
        return dict(zip(("model", "batch", "loss"), returned, strict=False))
    raise ValueError(
        f"{target} returned a {type(returned).__name__}: return (model, batch), (model, batch, loss) or a dict of "
        f"arguments of verify"
    )


def _take_along(old: Tensor, new: Tensor) -> None:
    """What ``deepcopy`` leaves behind: marks and hooks of a parameter."""
    for name, value in vars(old).items():
        if isinstance(value, _MARK):
            setattr(new, name, value)
    if has_main_grad(old):
        return  # the hooks are the wrapper's
    for hook in (getattr(old, "_backward_hooks", None) or {}).values():
        new.register_hook(hook)
    for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
        new.register_post_accumulate_grad_hook(hook)


def _checked(loss: Any, source: str) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"{source} returned a {type(loss).__name__} and no loss: pass loss(output, batch) or step(model, batch)"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"{source} returned a tensor of shape {tuple(loss.shape)} where a loss, one number, is needed: pass "
            f"loss(output, batch) or step(model, batch)"
        )
    return loss.squeeze()
