"""The pieces of one step by themselves: whose rows a rank reads, how they count, and what is noted of them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_run import tiny_config
from torch import Tensor

from maingrad.launch.config.run import MeshConfig
from maingrad.launch.data.batches import Batch, DataError
from maingrad.launch.training import train as loop
from maingrad.launch.training.pace import Pace
from maingrad.launch.training.recording import _observed_facts
from maingrad.launch.training.runtime import Runtime
from maingrad.launch.training.train import Trainer
from maingrad.launch.training.watching.progress import Status
from maingrad.launch.training.wrapping import HeldParameter


def test_which_rows_and_which_part_of_them_a_rank_reads():
    """Microbatch by microbatch, and in each rank by rank; positions stay whole."""
    asked = list[Any]()

    def batch(step: int, rows: slice) -> Batch:
        asked.append((step, rows.start, rows.stop))
        tokens = torch.arange(8)[None].repeat(rows.stop - rows.start, 1)
        return Batch(tokens, tokens + 1, positions=tokens)

    for rank, data_rank, part in (
        (0, 0, [0, 1, 2, 3]),
        (2, 0, [4, 5, 6, 7]),
        (5, 1, [0, 1, 2, 3]),
        (7, 1, [4, 5, 6, 7]),
    ):
        runtime = Runtime(rank, 8, torch.device("cpu"), MeshConfig(cp=2, tp=2))
        own = SimpleNamespace(own=lambda tensor, dim, part=part: tensor.index_select(dim, torch.tensor(part)))
        trainer: Any = SimpleNamespace(
            runtime=runtime._replace(context=own),  # type: ignore[arg-type]
            rows=3,
            sampler=SimpleNamespace(batch=batch),
            module=SimpleNamespace(vocab_size=9),
        )
        trainer._own_part = lambda batch, trainer=trainer: Trainer._own_part(trainer, batch)
        asked.clear()
        for microbatch in (0, 1):
            found = Trainer._batch(trainer, 4, microbatch)
            assert found.inputs.tolist() == [part] * 3
            assert found.targets.tolist() == [[token + 1 for token in part]] * 3
            assert found.positions is not None and found.positions.tolist() == [[*range(8)]] * 3
        assert asked == [(4, 3 * data_rank, 3 * data_rank + 3), (4, 6 + 3 * data_rank, 9 + 3 * data_rank)]
        trainer.module.vocab_size = 8
        with pytest.raises(DataError, match="token 8 is outside the vocabulary"):
            Trainer._batch(trainer, 4, 0)


def test_losses_of_routers_are_recorded_beside_the_cross_entropy():
    parts = SimpleNamespace(
        cross_entropy=torch.tensor(5.0),
        load_balancing=torch.tensor(1.0),
        router_z=torch.tensor(2.0),
        max_load=torch.tensor(3.0),
    )
    trainer: Any = SimpleNamespace(module=SimpleNamespace(loss_parts=parts), router_sums=torch.zeros(3))
    for count in (1, 2):
        assert Trainer._own_loss(trainer, torch.tensor(9.0)) == 5.0
        sums = dict(zip(loop._ROUTER_FIELDS, trainer.router_sums.tolist(), strict=True))
        assert sums == {"load_balancing_loss": count, "router_z_loss": 2.0 * count, "max_expert_load": 3.0 * count}
    trainer.module.loss_parts = None
    assert Trainer._own_loss(trainer, torch.tensor(9.0)) == 9.0 and trainer.router_sums.tolist() == [2.0, 4.0, 6.0]


def test_a_microbatch_counts_by_its_share_of_a_steps_targets(tmp_path: Path):
    """Times the number of ranks with other tokens, over which gradients are averaged."""
    targets = [torch.tensor([[0, 5, -100]]), torch.tensor([[7, -100, -100]])]
    batches = [Batch(each, each, positions=torch.full((1, 3), place)) for place, each in enumerate(targets)]
    counted = {7: 20, 8: 0}
    trainer: Any = SimpleNamespace(
        runtime=Runtime(0, 8, torch.device("cpu"), MeshConfig(cp=2, tp=2)),
        sampler=SimpleNamespace(counted=counted.get),
        equal_weights=torch.ones(2),
    )

    def arguments(documents: str, step: int = 7, without: bool = False) -> list[Tensor]:
        end = {} if documents == "join" else {"end_of_document": 10}
        order = {"order": "epochs"} if documents == "pad" else {}
        trainer.config = tiny_config(tmp_path, data={"documents": documents} | end | order)
        given = [each._replace(positions=None) for each in batches] if without else batches
        return Trainer._document_arguments(trainer, step, given)

    weights, positions = arguments("mask")
    assert weights.tolist() == [2 * 4 / 20, 1 * 4 / 20] and weights.dtype is torch.float64
    assert positions.tolist() == [[[0] * 3], [[1] * 3]]
    assert [each.tolist() for each in arguments("pad", without=True)] == [weights.tolist()]
    assert arguments("mask", step=8)[0].tolist() == [8.0, 4.0], "finite"
    (equal,) = arguments("join", without=True)
    assert equal is trainer.equal_weights


@pytest.mark.parametrize("delays", [False, True])
def test_each_microbatch_has_its_tokens_and_its_weight(delays: bool, monkeypatch: pytest.MonkeyPatch):
    """And the last one alone is reduced; what is delayed is computed behind each backward."""
    happened = list[Any]()

    @contextmanager
    def noted(what: str) -> Iterator[None]:
        happened.append(what)
        yield
        happened.append(f"end of {what}")

    weight = torch.ones((), requires_grad=True)

    def loss(inputs: Tensor, targets: Tensor, positions: Tensor | None) -> Tensor:
        happened.append([int(each) for each in (inputs, targets, positions) if each is not None])
        return weight * inputs

    monkeypatch.setattr(loop, "drain_modules", lambda module: happened.append(module))
    trainer: Any = SimpleNamespace(
        _loss=loss,
        _own_loss=lambda loss: 10 * loss,
        recorder=SimpleNamespace(forward_ended=lambda: happened.append("forward ended"), phase=noted),
        model=SimpleNamespace(no_sync=lambda: noted("no_sync")),
        module="module",
        config=SimpleNamespace(model=SimpleNamespace(delay_wgrad_layers=int(delays))),
        runtime=SimpleNamespace(device="cpu"),
    )
    inputs, weights = torch.tensor([2.0, 3.0, 5.0]), torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64)
    behind = ["weight gradients", "module", "end of weight gradients"] * delays
    for positions in (None, torch.tensor([7, 8, 9])):
        happened.clear()
        weight.grad = None
        total = Trainer._run_microbatches(trainer, inputs, inputs + 10, weights, positions)
        assert total.item() == 10 * (2 * 0.5 + 3 * 0.25 + 5 * 0.125) and total.dtype is torch.float64
        assert weight.grad is not None and weight.grad.item() == total.item() / 10
        tokens = [[n, n + 10] + ([] if positions is None else [p]) for n, p in ((2, 7), (3, 8), (5, 9))]
        first = [[*("no_sync", each, "forward ended"), *behind, "end of no_sync"] for each in tokens[:2]]
        assert happened == [*first[0], *first[1], tokens[2], "forward ended", *behind]


def test_what_a_step_did_is_counted():
    """From parameters, gradient records and spans; a bucket that is reduced twice is one."""
    cpu = torch.device("cpu")
    half, single = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)
    spans = [("a", "reduce_scatter", 8), ("b", "reduce_scatter", 4), ("a", "all_reduce", 2)]
    buckets = [SimpleNamespace(bucket=name, collective=what, nbytes=nbytes) for name, what, nbytes in spans]
    gathers = [SimpleNamespace(bucket="b", collective="all_gather", nbytes=6)]
    wrapped: Any = SimpleNamespace(
        parameters=[HeldParameter(6, torch.bfloat16, True), HeldParameter(3, torch.float32, False)],
        records=[
            SimpleNamespace(num_fused_writes=writes, num_hook_writes=hooks, view=view)
            for writes, hooks, view in ((2, 0, single), (3, 1, single), (0, 4, half), (0, 1, single))
        ],
    )
    backwards = [SimpleNamespace(synced=synced) for synced in (False, False, False, True)]
    timeline: Any = SimpleNamespace(buckets=buckets, gathers=gathers, backwards=backwards)
    found = _observed_facts(wrapped, timeline, Runtime(0, 3, cpu))
    assert found.pop("versions")["torch"] == torch.__version__
    assert found == {
        "world_size": 3,
        "backend": "none",
        "device": "cpu",
        "num_parameters": 9,
        "parameter_dtypes": {"bfloat16": 1, "float32": 1},
        "main_grad_dtypes": {"bfloat16": 1, "float32": 3},
        "fused_weights": 2,
        "fused_writes": 5,
        "delayed_weights": 1,
        "hook_written_parameters": 3,
        "microbatches_no_sync": 3,
        "microbatches_synced": 1,
        "num_buckets": 2,
        "collectives": {"all_gather": 1, "all_reduce": 1, "reduce_scatter": 2},
        "buckets": [{"bucket": name, "collective": what, "nbytes": nbytes} for name, what, nbytes in spans],
        "gathers": [{"bucket": "b", "collective": "all_gather", "nbytes": 6}],
    }


# ---- Between steps, and after the last one. ----


@pytest.mark.parametrize("experts", [0, 2])
@pytest.mark.parametrize(("asked", "unsaved"), [(False, False), (True, False), (False, True)])
def test_a_record_is_of_all_ranks(experts: int, asked: bool, unsaved: bool, monkeypatch: pytest.MonkeyPatch):
    """Of three steps on two ranks: what the other rank adds is given. One that was asked to stop stops all."""
    happened, written, shown = list[str](), list[Any](), list[Any]()
    added = [2.0, float(asked), 50.0, float(unsaved), 1.5, 2.5, 3.5]
    clock = iter([107.0, 110.0, 120.0])
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(
            train=SimpleNamespace(num_microbatches=2, global_batch_size=4, sequence_length=8),
            model=SimpleNamespace(num_experts=experts),
        ),
        pace=Pace(20, None, step=7),
        logged_step=4,
        log_start=100.0,
        start=77.0,
        loss_sum=torch.tensor(12.0, dtype=torch.float64),
        router_sums=torch.tensor([3.0, 9.0, 15.0], dtype=torch.float64),
        stop=SimpleNamespace(requested=False),
        saver=SimpleNamespace(
            failed=lambda: False, finish=lambda: happened.append("finish"), look=lambda: happened.append("look")
        ),
        wrapped=SimpleNamespace(
            failures=SimpleNamespace(watch=lambda what: nullcontext()),
            optimizer=SimpleNamespace(grad_norm=torch.tensor(0.0)),
        ),
        runtime=SimpleNamespace(
            world_size=2, all_reduce_sum=lambda own: [a + b for a, b in zip(own, added, strict=True)]
        ),
        metrics=SimpleNamespace(write=lambda kind, **fields: written.append((kind, fields))),
        display=SimpleNamespace(update=shown.append),
    )
    assert Trainer._log(trainer, 0.5) == (3.0, asked), "12 / 3 here and 2 there"
    assert trainer.pace.seconds == 40.0, "30 here and 50 there"
    assert happened == ["finish"] * unsaved + ["look"]
    routers = {"load_balancing_loss": 1.0, "router_z_loss": 2.0, "max_expert_load": 3.0}
    record = {
        "step": 7,
        "loss": 3.0,
        "lr": 0.5,
        "grad_norm": 0.0,
        "tokens_per_second": 4 * 8 * 3 / 10.0,
        "seconds_per_step": 10.0 / 3,
        "elapsed": 40.0,
    }
    assert written == [("step", record | (routers if experts else {}))]
    assert shown == [Status(7, 20, 7 / 20, 40.0, 3.0, 0.5, 9.6)]
    assert (trainer.logged_step, trainer.log_start) == (7, 120.0)
    assert trainer.loss_sum == 0.0 and trainer.router_sums.tolist() == [0.0] * 3


@pytest.mark.parametrize("is_main", [True, False])
@pytest.mark.parametrize(
    ("source", "saves", "trusts"), [(None, True, False), ("a", True, False), ("a", True, True), ("a", False, False)]
)
def test_what_a_run_leaves_at_its_end(
    is_main: bool, source: str | None, saves: bool, trusts: bool, monkeypatch: pytest.MonkeyPatch
):
    """All ranks take part in the gathers of a model that is written, and one writes. An interrupted run writes none."""
    asked, said, written = list[Any](), list[str](), list[Any]()
    model = SimpleNamespace(hugging_face=source, save_hugging_face=saves, trust_remote_code=trusts)

    def gathered(what: str) -> Any:
        return lambda wanted: asked.append((what, wanted)) or what

    monkeypatch.setattr(loop, "save_hugging_face", lambda *given: asked.append(given))
    monkeypatch.setattr(loop, "peak_nbytes", lambda device: {"cpu": 99}[device.type])
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(model=model, train=SimpleNamespace(out_dir="runs/x")),
        runtime=SimpleNamespace(is_main=is_main, device=torch.device("cpu")),
        display=SimpleNamespace(message=said.append),
        pace=Pace(9, None, step=7),
        metrics=SimpleNamespace(write=lambda kind, **fields: written.append((kind, fields))),
        wrapped=SimpleNamespace(whole_weights=gathered("weights"), digest=gathered("digest")),
        stop=SimpleNamespace(signal_name="SIGTERM"),
    )
    found = {"step": 7, "seconds": 61.0, "validation_loss": 2.0, "peak_memory_bytes": 99}
    Trainer._conclude(trainer, 2.0, None, 61.0, interrupted=False)
    assert written.pop() == ("final", found | {"weights_sha256": "digest"})
    folder, writes = "runs/x/hugging_face", source is not None and saves
    files = [("weights", source, folder, said.append, trusts)] * is_main
    assert asked == [("weights", is_main), *files] * writes + [("digest", is_main)]
    assert said == [f"the model is in '{folder}'"] * (writes and is_main)
    asked.clear()
    said.clear()
    for name, signal in (("SIGTERM", "SIGTERM"), ("", "another rank's")):
        trainer.stop.signal_name = name
        Trainer._conclude(trainer, 2.0, 2.5, 61.0, interrupted=True)
        assert written.pop() == ("interrupted", found | {"bigram_loss": 2.5, "signal": signal})
        assert said.pop() == "interrupted after step 7; records are in runs/x" and asked == []


@pytest.mark.parametrize(("loss", "gap", "side"), [(2.0, 0.5, "below"), (2.5, 0.0, "below"), (3.0, -0.5, "above")])
def test_the_end_of_the_demonstration_says_how_far_the_bigram_model_is(loss: float, gap: float, side: str):
    said, written = list[str](), list[Any]()
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(
            model=SimpleNamespace(hugging_face=None, save_hugging_face=True), train=SimpleNamespace(out_dir="runs/x")
        ),
        runtime=SimpleNamespace(is_main=True, device=torch.device("cpu")),
        display=SimpleNamespace(message=said.append),
        pace=Pace(9, None, step=7),
        metrics=SimpleNamespace(write=lambda kind, **fields: written.append(fields)),
        wrapped=SimpleNamespace(digest=lambda wanted: "digest"),
    )
    Trainer._conclude(trainer, loss, 2.5, 61.4, interrupted=False)
    assert (written[0]["nats_below_bigram"], written[0]["bigram_loss"]) == (gap, 2.5)
    assert said == [
        f"validation loss {loss:.4f} nats per byte after 7 steps in 61 s: {abs(gap):.4f} {side} the byte-bigram "
        f"model's 2.5000"
    ]
    Trainer._conclude(trainer, None, 2.5, 61.4, interrupted=False)
    assert "nats_below_bigram" not in written[1] and written[1]["bigram_loss"] == 2.5 and len(said) == 1


@pytest.mark.parametrize(
    ("every", "step", "is_over", "saves"),
    [(None, 6, True, False), (3, 6, False, True), (3, 7, False, False), (3, 7, True, True), (7, 3, False, False)],
)
@pytest.mark.parametrize("validated", [True, False])
def test_a_checkpoint_is_due_at_round_steps_and_at_the_end(
    every: int | None, step: int, is_over: bool, saves: bool, validated: bool, monkeypatch: pytest.MonkeyPatch
):
    saved, written = list[Any](), list[Any]()
    clock = iter([10.0, 14.0, 15.0])
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(save_every=every)),
        pace=Pace(20, None, step=step),
        saver=SimpleNamespace(save=lambda *given, **how: saved.append((*given, how))),
        scheduler="schedule",
        digests="digests",
        validated=validated,
        metrics=SimpleNamespace(write=lambda kind, **fields: written.append((kind, fields))),
        log_start=1.0,
    )
    Trainer._save(trainer, is_over=is_over)
    assert saved == [(trainer.pace, "schedule", "digests", {"validated": validated})] * saves
    assert written == [("checkpoint", {"step": step, "seconds": 4.0})] * saves
    assert trainer.log_start == (15.0 if saves else 1.0)


@pytest.mark.parametrize(
    ("step", "seconds", "due"), [(4, 0.0, True), (5, 0.0, False), (5, 30.0, True), (9, 0.0, True), (3, 29.0, False)]
)
def test_a_validation_is_due_at_round_steps_and_at_the_end(step: int, seconds: float, due: bool):
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(eval_every=4)), pace=Pace(9, 30.0, step, seconds)
    )
    assert Trainer._is_validated_here(trainer) is due
