"""Training over a pipeline's stages, in the order of a schedule of ``torch.distributed.pipelining``.

The first stage embeds tokens, and the last one computes the loss. Between them travel activations and their gradients.
Every rank of a pipeline reads the same samples.

torch takes half a second to import its schedules: ``train`` imports this file where there are stages.
"""

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import ScheduleGPipe, schedules

from ...ddp.collectives.rank_grid import RankGrid
from ...te_integration.pipeline import PipelineStage
from ...te_integration.recipes import autocast
from ..config.run import Config
from .runtime import Runtime
from .train import Trainer

__all__ = ["PipelinedTrainer"]


class PipelinedTrainer(Trainer):
    """The state of a run on one rank, which has one stage.

    Losses are 0 on all stages but the last one, where they are multiplied by the number of stages: the mean over all
    ranks is the model's loss.
    """

    def __init__(self, config: Config, runtime: Runtime, *others: Any) -> None:
        super().__init__(config, runtime, *others)
        stage, mesh, settings = runtime.stage, config.mesh, config.train
        # Shapes of a microbatch, known beforehand, so that torch does not run the model to learn them.
        rows, length, width = self.rows, settings.sequence_length // mesh.cp, config.model.dim
        parts = mesh.tp if mesh.sequence_parallel else 1
        tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
        hidden = torch.empty(rows, length // parts, width, dtype=config.model.dtype("param_dtype"), device="meta")
        hidden.requires_grad_()
        loss = torch.empty((), device="meta", requires_grad=True)
        schedule: Any = schedules.get_schedule_class(mesh.pp_schedule)
        alone = issubclass(schedule, schedules.PipelineScheduleSingle)  # those without slots for weight gradients
        made = PipelineStage(
            self.model,
            stage.index,
            stage.count,
            runtime.device,
            average_microbatches=False,  # ``_weighted`` does
            delay_wgrad=not alone,
            group=runtime.pipeline_group,
            input_args=tokens if stage.is_first else hidden,
            output_args=loss if stage.is_last else hidden,
        )
        self._schedule = schedule(made if alone else [made], settings.num_microbatches, _weighted, scale_grads=False)
        self._evaluation = ScheduleGPipe(made, 1, _weighted, scale_grads=False)
        self.model.register_forward_hook(lambda *_: self.recorder.forward_ended())
        failures = self.wrapped.failures
        failures.grids = [*failures.grids, RankGrid(runtime.pipeline_group, None, None)]

    def _run_microbatches(self, inputs: Tensor, targets: Tensor, weights: Tensor, positions: Tensor | None) -> Tensor:
        runtime, losses = self.runtime, list[Tensor]()
        tokens = [inputs.flatten(0, 1)] if runtime.stage.is_first else []
        others = {"targets": targets.flatten(0, 1)}
        if positions is not None:
            others["positions"] = positions.flatten(0, 1)
        run = self._schedule.step if torch.is_grad_enabled() else self._evaluation.eval
        began, failures = time.monotonic(), self.wrapped.failures
        try:
            with autocast(self.recipe is not None, recipe=self.recipe):
                run(*tokens, target=weights, losses=losses, return_outputs=False, **others)
        except RuntimeError as error:
            if error.__cause__ is not None or not failures.active:  # torch has named this stage
                raise
            raise failures.report(error, "tensors of another stage", time.monotonic() - began) from error
        total = torch.zeros((), dtype=torch.float64, device=runtime.device)
        return sum((loss.detach() for loss in losses), total) * runtime.mesh.pp

    def _loss(self, inputs: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        more = (0, 0, 0, self.rows - len(inputs))  # rows that do not count: stages receive tensors of one shape
        whole = F.pad(inputs, more)[None], F.pad(targets, more, value=-100)[None], torch.ones(1, device=inputs.device)
        return self._run_microbatches(*whole, None if positions is None else F.pad(positions, more)[None])


def _weighted(loss: Tensor, weight: Tensor) -> Tensor:
    """The last stage's loss of a microbatch, by its share of the step's."""
    return loss * weight.squeeze().to(loss.dtype)
