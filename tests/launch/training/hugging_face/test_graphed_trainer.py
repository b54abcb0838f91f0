"""``Trainer(cuda_graph=...)``: a step as one graph logs what the eager one logs. On CPUs recorded operations."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from hugging_face_runs import as_launched, build, language_model
from torch import Tensor

from maingrad.hugging_face import Trainer

KEYS = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "total_flos")


def run(
    folder: Path, kind: str, cuda_graph: Any, *, callback: Any = None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    with as_launched():
        trainer = build(kind, folder, {"max_steps": 12, **options}, language_model(), cuda_graph=cuda_graph)
        if callback is not None:
            trainer.add_callback(callback)
        counts: list[int] = []
        trainer.add_callback(_Counting(trainer, counts))
        trainer.train()
    history = trainer.state.log_history
    seen = {key: [float(each[key]) for each in history if key in each] for key in KEYS}
    return max(counts), seen


class _Counting(transformers.TrainerCallback):
    """Notes how many graphs there are."""

    def __init__(self, trainer: Any, counts: list[int]) -> None:
        self.trainer, self.counts = trainer, counts

    def on_step_end(self, *_: Any, **__: Any) -> None:
        step = self.trainer._graph._step
        self.counts.append(0 if step is None else step.num_graphs)


@pytest.mark.parametrize("kind", ["zero1", "fsdp"])
@pytest.mark.parametrize(
    "options", [{"eval_strategy": "steps", "eval_steps": 4}, {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1}]
)
@pytest.mark.sampled(2)
def test_a_graph_logs_what_eager_steps_log(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    none, eager = run(tmp_path / "eager", kind, False, **options)
    some, graphed = run(tmp_path / "graphed", kind, True, **options)
    assert (none, some) == (0, 1)
    assert len(eager["loss"]) == 12
    for key, values in eager.items():  # learning rates are rounded to fp32 in a graph
        assert graphed[key] == pytest.approx(values, rel=1e-4, abs=1e-6), key


class ReadsGradients(transformers.TrainerCallback):
    """Reads gradients between the last backward and the step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.norms.append(sum(float(param.grad.norm()) for param in model.parameters()))


def test_a_callback_that_reads_gradients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = ReadsGradients()
    count, _ = run(tmp_path, "zero1", True, callback=callback, max_steps=6)
    assert count == 0
    assert len(callback.norms) == 6
    assert all(norm > 0 for norm in callback.norms)
    assert "ReadsGradients.on_pre_optimizer_step" in caplog.text


class Counts(Trainer):
    """A program's own loss, with a number on the host."""

    num_losses = 0

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        self.num_losses += 1
        loss: Tensor = super().compute_loss(*args, **options)
        return loss * (1.0 + self.num_losses % 2)


@pytest.mark.in_turn
def test_a_trainer_that_counts_stays_eager(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    losses = []
    for cuda_graph in (False, True):
        with as_launched():
            trainer = build(
                "zero1", tmp_path / str(cuda_graph), {"max_steps": 8}, language_model(), cuda_graph=cuda_graph
            )
            trainer.__class__ = Counts
            trainer.train()
        assert trainer.num_losses >= 8
        losses.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert "num_losses" in caplog.text


def test_on_a_cpu_there_is_no_graph_and_no_word_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    count, _ = run(tmp_path, "zero1", "auto", max_steps=4)
    assert count == 0
    assert "CUDA graph" not in caplog.text
