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
from maingrad.launch.training import recording
from maingrad.launch.training import train as loop
from maingrad.launch.training.pace import Pace
from maingrad.launch.training.recording import StepRecorder, _observed_facts
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


@pytest.mark.parametrize("graphed", [True, False])
@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_step_is_replayed_unless_it_is_recorded(graphed: bool, is_recorded: bool):
    happened = list[Any]()

    def noted(what: str) -> Any:
        return lambda *given: happened.append((what, *given))

    def run(kind: str) -> Any:
        def iteration(inputs: Tensor, targets: Tensor, *more: Any) -> Tensor:
            happened.append((kind, inputs.tolist(), targets.tolist(), more))
            return torch.ones(())

        return iteration

    def batch(step: int, microbatch: int) -> Batch:
        return Batch(torch.tensor([[step, microbatch]]), torch.tensor([[step, -microbatch]]))

    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(seed=1, num_microbatches=2)),
        recorder=SimpleNamespace(step_begins=noted("begins"), is_recording=is_recorded, step_ended=noted("ended")),
        runtime=SimpleNamespace(rank=0),
        graphed=run("graph") if graphed else None,
        _iteration=run("eager"),
        _batch=batch,
        _document_arguments=lambda step, batches: [step, len(batches)],
    )
    assert Trainer._step(trainer, 5) == 1.0
    kind = "graph" if graphed and not is_recorded else "eager"
    tokens = [[[5, 0]], [[5, 1]]], [[[5, 0]], [[5, -1]]]
    assert happened == [("begins", 5), (kind, *tokens, (5, 2)), ("ended",)]
    drawn = set()
    for seed, step, rank in ((1, 5, 0), (2, 5, 0), (1, 6, 0), (1, 5, 1), (1, 5, 0)):
        trainer.config.train.seed, trainer.runtime.rank = seed, rank
        Trainer._step(trainer, step)
        drawn.add(float(torch.rand(())))
    assert len(drawn) == 4, "of seed, step and rank alone"


def test_an_iteration_updates_what_has_been_reduced():
    happened = list[Any]()

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        happened.append(name)
        yield
        happened.append("end of phase")

    def noted(what: str) -> Any:
        return lambda *given: happened.append(what)

    trainer: Any = SimpleNamespace(
        _run_microbatches=lambda *given: happened.append(given) or "loss",
        model=SimpleNamespace(finish_grad_sync=noted("reduced")),
        recorder=SimpleNamespace(phase=phase),
        wrapped=SimpleNamespace(step=noted("step"), optimizer=SimpleNamespace(zero_grad=noted("zero"))),
    )
    given: Any = ("inputs", "targets", "weights", "positions")
    assert Trainer._iteration(trainer, *given) == "loss"
    assert happened == [given, "reduced", "optimizer", "step", "end of phase", "zero"]


@pytest.mark.parametrize(
    ("first", "count", "observed", "timed"),
    [(0, 14, 0, 10), (0, 12, 0, 10), (0, 11, 0, 9), (7, 7, 7, 12), (0, 4, 0, 2), (3, 3, 3, 3), (0, 1, 0, 0)],
)
def test_which_steps_are_recorded(first: int, count: int, observed: int, timed: int, monkeypatch: pytest.MonkeyPatch):
    """From their beginning to the end of the next forward. A step of which no forward follows ends with the run."""
    opened, written, now = list[Any](), list[Any](), [0]

    @contextmanager
    def record_timeline() -> Iterator[Any]:
        opened.append(("begins", now[0]))
        timeline = SimpleNamespace(phase=lambda name: nullcontext(opened.append((name, now[0]))))
        yield timeline
        opened.append(("ends", now[0]))

    monkeypatch.setattr(recording, "_observed_facts", lambda wrapped, timeline, runtime: {"facts": 1})
    monkeypatch.setattr(recording, "timeline_record", lambda timeline, step: {"step": step})
    wrapped: Any = SimpleNamespace(model=SimpleNamespace(record_timeline=record_timeline))
    metrics: Any = SimpleNamespace(write=lambda kind, **fields: written.append((kind, fields)))
    recorder = StepRecorder(
        wrapped, Runtime(0, 1, torch.device("cpu")), metrics, first_step=first, num_steps=count, unit="byte"
    )
    for now[0] in range(first, first + count):
        recorder.step_begins(now[0])
        for _ in range(2):
            recorder.forward_ended()
        assert recorder.is_recording is (now[0] in (observed, timed))
        with recorder.phase("optimizer"):
            pass
        recorder.step_ended()
    now[0] += 1
    for _ in range(2):
        recorder.close()
    both = [observed] if observed == timed else [observed, timed]
    assert opened == [each for step in both for each in (("begins", step), ("optimizer", step), ("ends", step + 1))]
    assert written == [("observed", {"step": observed, "facts": 1, "unit": "byte"}), ("timeline", {"step": timed})]


# ---- Between steps, and after the last one. ----


@pytest.mark.parametrize("experts", [0, 2])
@pytest.mark.parametrize(("asked", "unsaved"), [("", ""), ("there", "there"), ("here", "here")])
def test_a_record_is_of_all_ranks(experts: int, asked: str, unsaved: str, monkeypatch: pytest.MonkeyPatch):
    """Of three steps on two ranks: what the other rank adds is given. One that was asked to stop stops all."""
    happened, written, shown = list[str](), list[Any](), list[Any]()
    added = [2.0, float(asked == "there"), 50.0, float(unsaved == "there"), 1.5, 2.5, 3.5]
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
        stop=SimpleNamespace(requested=asked == "here"),
        saver=SimpleNamespace(
            failed=lambda: unsaved == "here",
            finish=lambda: happened.append("finish"),
            look=lambda: happened.append("look"),
        ),
        wrapped=SimpleNamespace(
            failures=SimpleNamespace(watch=lambda what: nullcontext()),
            optimizer=SimpleNamespace(grad_norm=torch.tensor(0.0) if experts else None),
        ),
        runtime=SimpleNamespace(
            world_size=2, all_reduce_sum=lambda own: [a + b for a, b in zip(own, added, strict=True)]
        ),
        metrics=SimpleNamespace(write=lambda kind, **fields: written.append((kind, fields))),
        display=SimpleNamespace(update=shown.append),
    )
    assert Trainer._log(trainer, 0.5) == (3.0, bool(asked)), "12 / 3 here and 2 there"
    assert trainer.pace.seconds == 40.0, "30 here and 50 there"
    assert happened == ["finish"] * bool(unsaved) + ["look"]
    routers = {"load_balancing_loss": 1.0, "router_z_loss": 2.0, "max_expert_load": 3.0}
    record = {
        "step": 7,
        "loss": 3.0,
        "lr": 0.5,
        "grad_norm": 0.0 if experts else None,
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


@pytest.mark.parametrize("documents", ["join", "mask", "pad"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_computes_of_a_validation(documents: str, rank: int, monkeypatch: pytest.MonkeyPatch):
    """Every second row, two at a time, and of each row its part; as many forwards as the other rank, which has more.

    The mean is over the sequences where all targets count, and over the targets elsewhere.
    """
    happened, written, said = list[Any](), list[Any](), list[str]()
    clock = iter([10.0, 14.0, 15.0])
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    tokens = torch.arange(5)[:, None].repeat(1, 4)
    targets = torch.where(torch.arange(4) <= tokens, tokens, -100)  # of row r: r + 1, at most 4
    positions = tokens + 10 if documents == "mask" else None

    def loss(inputs: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        happened.append((inputs.tolist(), targets.tolist(), None if positions is None else positions.tolist()))
        assert not torch.is_grad_enabled()
        return 1.0 + inputs.double().mean()

    def all_reduce_sum(own: list[float]) -> list[float]:
        happened.append(("sum", own))
        return [30.0, 8.0]

    own = SimpleNamespace(own=lambda tensor, dim: tensor.narrow(dim, 1, 2))
    trainer: Any = SimpleNamespace(
        runtime=SimpleNamespace(data_ranks=2, data_rank=rank, context=own, device="cpu", all_reduce_sum=all_reduce_sum),
        config=SimpleNamespace(data=SimpleNamespace(documents=documents)),
        windows=Batch(tokens, targets, positions),
        rows=2,
        model=SimpleNamespace(eval=lambda: happened.append("eval"), train=lambda: happened.append("train")),
        wrapped=SimpleNamespace(failures=SimpleNamespace(watch=lambda what: nullcontext())),
        recorder=SimpleNamespace(forward_ended=lambda: happened.append("forward ended")),
        metrics=SimpleNamespace(write=lambda kind, **fields: written.append((kind, fields))),
        display=SimpleNamespace(message=said.append),
        pace=Pace(20, None, step=7),
        unit="byte",
        validated=False,
        log_start=1.0,
        _loss=loss,
    )
    trainer._own_part = lambda batch: Trainer._own_part(trainer, batch)
    assert Trainer._validate(trainer) == 30.0 / 8.0

    def part(*rows: int) -> Any:
        found = [(targets[row, 1:3].tolist(), [row + 10] * 4) for row in rows]
        inputs = [[row, row] for row in rows]
        return inputs, [each[-2] for each in found], [each[-1] for each in found] if documents == "mask" else None

    forwards = [part(0, 2), part(4)] if rank == 0 else [part(1, 3), part(0)]
    if documents == "join":
        sums = [2 * (1 + 1) + 1 * (1 + 4), 3] if rank == 0 else [2 * (1 + 2), 2]
    else:  # of the targets in the middle: rows have 0, 1, 2, 2 and 2
        sums = [2 * (1 + 1) + 2 * (1 + 4), 4] if rank == 0 else [3 * (1 + 2), 3]
    assert happened == ["eval", forwards[0], "forward ended", forwards[1], "forward ended", "train", ("sum", sums)]
    assert written == [("validation", {"step": 7, "loss": 3.75, "seconds": 4.0})]
    assert said == ["step     7  validation loss 3.7500 nats per byte"]
    assert trainer.validated and trainer.log_start == 15.0


@pytest.mark.parametrize(
    ("step", "seconds", "due"), [(4, 0.0, True), (5, 0.0, False), (5, 30.0, True), (9, 0.0, True), (3, 29.0, False)]
)
def test_a_validation_is_due_at_round_steps_and_at_the_end(step: int, seconds: float, due: bool):
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(eval_every=4)), pace=Pace(9, 30.0, step, seconds)
    )
    assert Trainer._is_validated_here(trainer) is due


class Loop(Trainer):
    """A loop of which each part notes that it runs, in the place of what it does."""

    def __init__(self, pace: Pace, happened: list[Any], **settings: Any) -> None:
        def note(what: str) -> Any:
            return lambda *given, **how: happened.append((what, pace.step))

        given = {"steps": pace.steps, "log_every": 2, "eval_every": 3, "cuda_graph": False, **settings}
        self.config: Any = SimpleNamespace(train=SimpleNamespace(**given))
        self.pace, self.happened = pace, happened
        self.runtime: Any = SimpleNamespace(device=torch.device("cpu"), is_main=True)
        self.scheduler: Any = SimpleNamespace(
            get_last_lr=lambda: [9.0, 10.0 ** -(pace.step + 1)], step=note("schedule")
        )
        self.profiler: Any = SimpleNamespace(step=self._profiled, stop=note("profile ends"))
        self.saver: Any = SimpleNamespace(prepare=note("memory"), finish=note("saved"))
        self.recorder: Any = SimpleNamespace(close=note("recorded"))
        self.saves, self.validated, self.module = True, True, "module"  # type: ignore[assignment]
        self.loss_sum: Any = 0.0
        self.asked_at, self.start, self.log_start = 10**6, 0.0, 0.0

    @contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        self.happened.append(("profile", step))
        yield
        self.happened.append(("end of profile", step))

    def _introduce(self) -> None:
        self.happened.append("introduced")

    def _bigram_loss(self) -> float | None:
        return 2.5

    def _step(self, step: int) -> Any:
        self.happened.append(("step", step))
        return 1.0

    def _log(self, lr: float) -> tuple[float, bool]:
        self.happened.append(("log", self.pace.step, lr, self.loss_sum))
        self.loss_sum = 0.0
        return 5.0 - self.pace.step, self.pace.step >= self.asked_at

    def _validate(self) -> float:
        self.happened.append(("validate", self.pace.step))
        self.validated = True
        return 0.25 * self.pace.step

    def _save(self, *, is_over: bool) -> None:
        self.happened.append(("save", self.pace.step, is_over, self.validated))

    def _conclude(self, loss: float | None, bigram: float | None, seconds: float, *, interrupted: bool) -> None:
        self.happened.append(("end", loss, bigram, interrupted))


def of_a_step(step: int, *beside: Any) -> list[Any]:
    """What happens in the step after ``step`` ones."""
    return [("profile", step), ("step", step), ("end of profile", step), *beside]


def test_what_follows_what_in_a_run():
    """The last step is logged, validated and saved whatever its number; the rate is that of the step."""
    happened = list[Any]()
    result = Loop(Pace(5, None, 0), happened).run()
    assert happened == [
        "introduced",
        *of_a_step(0, ("memory", 1), ("schedule", 1), ("save", 1, False, False)),
        *of_a_step(1, ("log", 2, 1e-2, 2.0), ("schedule", 2), ("save", 2, False, False)),
        *of_a_step(2, ("schedule", 3), ("validate", 3), ("save", 3, False, True)),
        *of_a_step(3, ("log", 4, 1e-4, 2.0), ("schedule", 4), ("save", 4, False, False)),
        *of_a_step(4, ("log", 5, 1e-5, 1.0), ("schedule", 5), ("validate", 5), ("save", 5, True, True)),
        *(("profile ends", 5), ("saved", 5), ("recorded", 5), ("end", 1.25, 2.5, False)),
    ]
    assert result.losses == (3.0, 1.0, 0.0) and (result.validation_loss, result.bigram_loss) == (1.25, 2.5)
    assert (result.steps, result.interrupted, result.is_main, result.model) == (5, False, True, "module")


def test_what_follows_what_in_a_run_that_is_interrupted_and_goes_on():
    """The validation that was due and missed comes first; it is not taken again."""
    happened = list[Any]()
    first = Loop(Pace(9, None, 5), happened, eval_every=6)
    first.asked_at = 6
    assert first.run().interrupted
    logged = [("memory", 6), ("log", 6, 1e-6, 1.0), ("schedule", 6), ("save", 6, True, False)]
    ended = [("profile ends", 6), ("saved", 6), ("recorded", 6)]
    assert happened == ["introduced", *of_a_step(5, *logged), *ended, ("end", None, 2.5, True)]
    for validated in (False, True):
        happened.clear()
        again = Loop(Pace(6, None, 6, 3.0), happened, eval_every=6)
        again.validated = validated
        result = again.run()
        loss = None if validated else 1.5
        missed = [] if validated else [("validate", 6)]
        assert happened == ["introduced", *missed, *ended, ("end", loss, 2.5, False)]
        assert (result.losses, result.steps, result.validation_loss) == ((), 6, loss)
        assert 3.0 <= result.seconds < 1000.0, "with those of before"
    happened.clear()
    no_saves = Loop(Pace(8, None, 7), happened)
    no_saves.saves = no_saves.validated = False
    no_saves.run()
    assert ("memory", 8) not in happened and ("validate", 7) not in happened, "none was due after step 7"
