"""The microbatches of a step over a pipeline's stages, in the order of a schedule of ``torch.distributed.pipelining``.

The first stage embeds tokens, and the last one computes the loss. Between them travel activations and their gradients.
Every rank of a pipeline reads the same samples.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe, schedules

from ...te_integration.pipeline import PipelineStage
from ...te_integration.recipes import Recipe, autocast
from ..config.mesh import Stage
from ..config.run import Config

__all__ = ["Pipeline"]


class Pipeline:
    """Runs this rank's stage of the GPT.

    model  the stage, wrapped or sharded
    group  the ranks of all stages
    shape  of the tokens of a microbatch here, (B, T)
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        stage: Stage,
        group: dist.ProcessGroup,
        shape: tuple[int, int],
        device: torch.device,
        recipe: Recipe | None,
    ) -> None:
        self._recipe = recipe
        self._first, self._rows, self._count, self._device = stage.is_first, shape[0], stage.count, device
        # Known beforehand, so that torch does not run the model to learn them.
        parts = config.mesh.tp if config.mesh.sequence_parallel else 1
        dtype = config.model.dtype("param_dtype")
        hidden = torch.empty(shape[0], shape[1] // parts, config.model.dim, dtype=dtype, device="meta")
        hidden.requires_grad_()
        tokens = torch.empty(shape, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        schedule: Any = schedules.get_schedule_class(config.mesh.pp_schedule)
        alone = issubclass(schedule, schedules.PipelineScheduleSingle)  # those without slots for weight gradients
        made = PipelineStage(
            model,
            stage.index,
            stage.count,
            device,
            average_microbatches=False,
            delay_wgrad=not alone,
            group=group,
            input_args=tokens if stage.is_first else hidden,
            output_args=loss if stage.is_last else hidden,
        )
        stages, count = made if alone else [made], config.train.num_microbatches
        self._step = schedule(stages, count, self._weighted, scale_grads=False).step
        self._evaluate = ScheduleGPipe(made, 1, self._weighted, scale_grads=False).eval
        self._total = torch.zeros(())

    def run(
        self, inputs: Tensor, targets: Tensor, weights: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Forward and backward of all microbatches [M, B, T]; returns the mean loss, as ``loss`` does.

        weights  [M] fp64, of the microbatches' means; None: 1 / M each
        """
        if weights is None:
            weights = torch.full((len(inputs),), 1.0 / len(inputs), dtype=torch.float64, device=self._device)
        return self._over_stages(self._step, inputs, targets, weights, positions)

    def loss(self, inputs: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        """The loss of at most B sequences, times the number of stages on the last one, and 0 elsewhere: the mean over
        all ranks is the model's."""
        more = (0, 0, 0, self._rows - len(inputs))  # stages receive tensors of one shape
        inputs, targets = F.pad(inputs, more), F.pad(targets, more, value=-100)
        positions = None if positions is None else F.pad(positions, more)[None]
        whole = torch.ones(1, dtype=torch.float64, device=self._device)
        return self._over_stages(self._evaluate, inputs[None], targets[None], whole, positions)

    def _over_stages(
        self, step: Callable[..., Any], inputs: Tensor, targets: Tensor, weights: Tensor, positions: Tensor | None
    ) -> Tensor:
        self._total = torch.zeros((), dtype=torch.float64, device=self._device)
        tokens = [inputs.flatten(0, 1)] if self._first else []
        others = {"targets": targets.flatten(0, 1)}
        if positions is not None:
            others["positions"] = positions.flatten(0, 1)
        with autocast(self._recipe is not None, recipe=self._recipe):
            step(*tokens, target=weights, return_outputs=False, **others)
        return self._total * self._count

    def _weighted(self, loss: Tensor, weight: Tensor) -> Tensor:
        """The last stage's loss of a microbatch, by its share of the step's."""
        self._total += loss.detach() * weight.squeeze()
        return loss * weight.squeeze().to(loss.dtype)
