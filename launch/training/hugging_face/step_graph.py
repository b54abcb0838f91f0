"""``StepGraph``: a step of Hugging Face's ``Trainer`` as one function, so that ``graphed`` can capture it.

transformers' loop calls ``training_step`` for each microbatch, and then clips, steps and zeroes gradients itself. Here
microbatches wait for the last one of their step. The function then runs all of them, clips, steps and zeroes, and the
loop finds that nothing is left to do: its clipping gets the norm, and accelerate's optimizer does not step.
"""

import contextlib
import functools
import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ....ddp.graphs.auto_step import AutoStep
from ...parallelizing.graphed import graphed

__all__ = ["StepGraph"]

logger = logging.getLogger(__name__)
_CAUSAL = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
_OF_MICROBATCHES = ("training_step", "compute_loss")


class StepGraph:
    """The steps of ``trainer``, an instance of ``Trainer``.

    mode  as ``Trainer``'s ``cuda_graph``
    """

    def __init__(self, trainer: Any, mode: Any) -> None:
        self._trainer, self._mode = trainer, mode
        self._step: AutoStep[..., tuple[Tensor, Tensor]] | None = None
        self._built_for: Any = None
        self._is_active = False
        self._waiting: list[Any] = []
        self.norm: Tensor | None = None
        """The norm of the gradients of a step that has run; None: the loop steps itself."""

    def begin(self, num_microbatches: int) -> None:
        """A step of so many microbatches begins."""
        self.norm = None
        self._waiting.clear()
        # The loop may not step at all after the microbatches that are left at the end of a stream.
        whole = num_microbatches == self._trainer.args.gradient_accumulation_steps
        self._is_active = whole and self._mode is not False and self._may_replay()

    @property
    def is_active(self) -> bool:
        """Whether the microbatches of this step wait for the last one."""
        return self._is_active

    def microbatch(self, inputs: Any, num_items: Tensor | int | None, *, last: bool) -> Tensor:
        """In place of ``training_step``: the loss of the whole step with the last microbatch, zero with all others."""
        trainer = self._trainer
        device = trainer.args.device
        inputs = trainer._prepare_inputs(inputs)
        self._waiting.append(_without_whole_mask(inputs, trainer.model) if isinstance(inputs, Mapping) else inputs)
        if not last:
            return torch.zeros((), device=device)
        if isinstance(num_items, int):
            num_items = torch.tensor(num_items, device=device)
        batches, self._waiting = self._waiting, []
        assert self._step is not None, "made when the step began"
        loss, self.norm = self._step(batches, num_items)
        trainer.accelerator.gradient_state._set_sync_gradients(False)  # accelerate's optimizer then does not step
        return loss

    def reset(self) -> None:
        """Free the graphs."""
        if self._step is not None:
            self._step.reset()

    def _may_replay(self) -> bool:
        trainer = self._trainer
        on_gpu = trainer.args.device.type == "cuda"
        if not (on_gpu or self._mode is True):
            return False
        if self._built_for is not trainer.model_wrapped:  # model_init makes another
            self.reset()
            self._built_for = trainer.model_wrapped
            self._step = graphed(
                functools.partial(_run, trainer),
                trainer.model_wrapped,
                trainer._inner_optimizer(),
                record_on_cpu=not on_gpu,
            )
            if (why := _why_not(trainer)) is not None:
                self._step.stop(why)
        return self._step is not None and self._step.why_eager is None


def _without_whole_mask(inputs: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Leave out a mask without padding, which a causal model reads on the host to no other effect.

    The loop waits for the device after each step in any case.
    """
    found, mask = {**inputs}, inputs.get("attention_mask")
    causal = any(kind.__name__ in _CAUSAL for kind in type(model).__mro__)
    if causal and isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.all()):
        del found["attention_mask"]
    return found


def _run(trainer: Any, batches: list[Any], num_items: Tensor | None) -> tuple[Tensor, Tensor]:
    """A whole iteration: the sum of the microbatches' losses, and the norm of the gradients."""
    model: Any = trainer.model_wrapped
    total: Any = None
    for index, inputs in enumerate(batches):
        with contextlib.nullcontext() if index == len(batches) - 1 else model.no_sync():
            loss = trainer.run_microbatch(model, inputs, num_items)
        total = loss if total is None else total + loss
    norm = trainer.clipped_norm(model, trainer.args.max_grad_norm or float("inf"))
    trainer._inner_optimizer().step()
    trainer._inner_optimizer().zero_grad()
    return total, norm


def _why_not(trainer: Any) -> str | None:
    """What reads gradients between the last backward and the step, or has code of a library that nobody can follow."""
    for callback in trainer.callback_handler.callbacks:
        if type(callback).on_pre_optimizer_step is not transformers.TrainerCallback.on_pre_optimizer_step:
            return f"{type(callback).__name__}.on_pre_optimizer_step reads gradients, which a graphed step has not kept"
    for name in _OF_MICROBATCHES:
        for kind in (kind for kind in type(trainer).__mro__ if name in vars(kind)):
            top = kind.__module__.partition(".")[0]
            file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
            if top not in ("maingrad", "transformers") and "site-packages" in file:
                return f"{kind.__module__}.{kind.__name__}.{name} may keep numbers on the host, which no replay would"
    return None
