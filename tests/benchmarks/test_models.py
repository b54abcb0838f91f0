"""docs/benchmarks/models.py: models of Hugging Face by every row, eager and compiled, with the same losses."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from architectures import ARCHITECTURES, Architecture, Shape
from contenders import Row
from models import ROWS, Case, ModelsBench, bench_models, choose, odd_rows, peak_tflops, sections_of, write_report
from ranks import Ranks
from scripts_of_benchmarks import under_torchrun
from tables import Measurement, odd_losses, read_csv
from torch import nn

from maingrad.launch import simulate
from maingrad.launch.parallelizing.blocks import default_units

TINY = ["--model", "tiny", "--backend", "aot_eager", "--num-steps", "2", "--num-rounds", "1", "--num-warmup-steps", "1"]
CPU = torch.device("cpu")
MIXTURE = Architecture(
    name="mixture",
    about="Qwen3-MoE's form, very small",
    config_class="Qwen3MoeConfig",
    sizes={
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 96,
        "tie_word_embeddings": False,
    },
)
GPT2 = dataclasses.replace(
    ARCHITECTURES["gpt2-large"],
    sizes=ARCHITECTURES["gpt2-large"].sizes
    | {
        "vocab_size": 96,
        "n_positions": 16,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
)


def check_rows(rows: list[Measurement], names: set[str], num_ranks: int) -> None:
    assert {row.row for row in rows} == names
    for row in rows:
        assert not row.problem, row
        assert (row.num_ranks, row.shape) == (num_ranks, "2x16")
        assert row.last_loss < row.first_loss
        assert row.tokens_per_second == pytest.approx(32 * row.num_microbatches / row.step_ms * 1e3)
        # One graph of all layers: neither microbatches nor steps compile again.
        assert row.num_graphs == (1 if row.row.endswith("_compiled") else 0)
        assert (row.backend == "aot_eager") == row.row.endswith("_compiled")
    assert odd_rows(rows) == []


@pytest.mark.in_turn
def test_a_row_of_ours_and_one_of_torchs(tmp_path: Path) -> None:
    """One rank; ``slow`` tests have two."""
    assert models.main(["--out-dir", str(tmp_path), *TINY, "--rows", "zero1_compiled", "fsdp2_zero2"]) == 0
    rows = read_csv(tmp_path / "models.csv")
    check_rows(rows, {"zero1_compiled", "fsdp2_zero2"}, num_ranks=1)
    assert rows[0].first_step_s > 0
    table = (tmp_path / "models.md").read_text()
    assert "## tiny, 2x16, 1 rank" in table
    assert "overlap_param_gather" in table
    assert "forward and backward prefetch of 2" in table


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_every_row_that_a_cpu_can_run(tmp_path: Path, num_microbatches: int) -> None:
    gpus = ("copy_engines", "symm_mem", "graphed", "torchao")  # torchao is no extra of the tests'
    tiny = Case(ModelsBench(model="tiny"), ARCHITECTURES["tiny"], Shape(2, 16), 0, 2, CPU)
    names = {name for name, row in ROWS.items() if not any(each in name for each in gpus) and not row.refuse(tiny)}
    names -= {name for name in names if name.startswith("tp_")}  # which train on other tokens
    assert len(names) >= 30
    options = ["--out-dir", str(tmp_path), *TINY, "--num-microbatches", str(num_microbatches), "--rows", *names]
    done = under_torchrun("models.py", *options, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    check_rows(read_csv(tmp_path / "models.csv"), names, num_ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_rows_of_tensor_parallelism(tmp_path: Path, num_microbatches: int) -> None:
    names = {"tp_torch", "tp_torch_compiled", "tp_fsdp2", "tp_modules", "tp_modules_compiled"}
    options = ["--out-dir", str(tmp_path), *TINY, "--num-microbatches", str(num_microbatches), "--rows", *names]
    done = under_torchrun("models.py", *options, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    check_rows(read_csv(tmp_path / "models.csv"), names, num_ranks=2)


@pytest.mark.in_turn
def test_rows_whose_experts_are_spread_train_as_those_that_are_whole() -> None:
    def losses(name: str) -> list[float]:
        step = step_of(MIXTURE, name, num_microbatches=2, rank=dist.get_rank(), num_ranks=2)
        return [step().item() for _ in range(3)]

    expected = simulate(losses, 2, "zero1")
    for name in ("zero1_ep", "zero1_ep_delayed", "zero3_ep", "zero3_ep_delayed"):
        for found, whole in zip(simulate(losses, 2, name), expected, strict=True):
            assert found == pytest.approx(whole, rel=1e-3), name


def test_graphed_rows_with_experts_over_ranks_are_refused_by_reason() -> None:
    def reason(device: str, architecture: Architecture = MIXTURE, **options: object) -> str | None:
        case = Case(ModelsBench(**options), architecture, Shape(2, 16), 0, 2, torch.device(device))
        return ROWS["zero1_ep_graphed_compiled"].refuse(case)

    assert "reads split sizes on the host" in (reason("cuda") or "")
    assert "CUDA devices" in (reason("cpu", transport="symmetric") or "")
    assert "a model that has experts" in (reason("cuda", ARCHITECTURES["tiny"], transport="symmetric") or "")
    for static in ({"transport": "symmetric"}, {"transport": "capacity", "capacity": 4}, {"capacity_factor": 1.5}):
        assert reason("cuda", **static) is None


def step_of(
    architecture: Architecture, name: str, num_microbatches: int = 1, rank: int = 0, num_ranks: int = 1
) -> Callable[[], torch.Tensor]:
    bench = ModelsBench(num_microbatches=num_microbatches, backend="aot_eager")
    case = Case(bench, architecture, Shape(2, 16), rank, num_ranks, CPU)
    return ROWS[name].build(case)


@pytest.mark.in_turn
@pytest.mark.parametrize("tied", [True, False])
def test_fsdp2_with_torchaos_float8_trains(tied: bool) -> None:
    """The head of an untied model is gathered in float8."""
    pytest.importorskip("torchao", reason="torchao is not installed: its row is refused by name")
    tiny = ARCHITECTURES["tiny"]
    sizes = {**tiny.sizes, "tie_word_embeddings": tied}
    with Ranks.alone(CPU).attempt(with_groups=True):
        losses = {}
        for name in ("fsdp2_zero3", "fsdp2_zero3_torchao"):
            step = step_of(dataclasses.replace(tiny, sizes=sizes), name, num_microbatches=2)
            losses[name] = [step().item() for _ in range(3)]
    assert losses["fsdp2_zero3_torchao"] == pytest.approx(losses["fsdp2_zero3"], rel=1e-2)
    assert losses["fsdp2_zero3_torchao"][-1] < losses["fsdp2_zero3_torchao"][0]
    assert losses["fsdp2_zero3_torchao"] != losses["fsdp2_zero3"]


@pytest.mark.in_turn
def test_rows_of_muon_take_the_same_steps() -> None:
    """Within torch's rounding to bf16, of steps of 0.0001 in each direction; AdamW's are others."""
    losses = {}
    for name in ("zero1", "zero1_muon", "zero1_torch_muon", "fsdp2_zero2", "fsdp2_zero2_muon"):
        with Ranks.alone(CPU).attempt(with_groups=True):
            step = step_of(ARCHITECTURES["tiny"], name)
            losses[name] = [step().item() for _ in range(3)]
    assert losses["zero1_torch_muon"] == pytest.approx(losses["zero1_muon"], rel=1e-4)
    assert losses["fsdp2_zero2_muon"] == pytest.approx(losses["zero1_muon"], rel=2e-3)
    for form in ("zero1", "fsdp2_zero2"):
        assert losses[f"{form}_muon"] != pytest.approx(losses[form], rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [MIXTURE, GPT2], ids=lambda each: each.name)
def test_layers_of_other_architectures_compile_whole(architecture: Architecture) -> None:
    losses = {}
    for name in ("zero1", "zero1_compiled", "zero3_compiled"):
        with Ranks.alone(CPU).attempt(with_groups=True):
            step = step_of(architecture, name)
            losses[name] = [step().item() for _ in range(3)]
            torch._dynamo.reset()
    assert losses["zero1"][-1] < losses["zero1"][0]
    for others in losses.values():
        assert others == pytest.approx(losses["zero1"], rel=1e-3)


def test_published_sizes_have_the_parameters_of_their_checkpoints() -> None:
    def billions(name: str) -> tuple[float, float]:
        total, multiplied = ARCHITECTURES[name].count()
        return round(total / 1e9, 2), round(multiplied / 1e9, 2)

    assert billions("llama-1b") == (1.24, 1.24)  # the head is the embedding
    assert billions("gpt2-large") == (0.78, 0.77)
    # 8 of Llama-3-8B's 32 layers: 24 layers of 218 M fewer than 8.03 B. The embedding is looked up.
    assert billions("llama-8b") == (2.80, 2.27)
    # 4 layers of 640 M with 62 M active, twice 311 M for embedding and head.
    total, multiplied = ARCHITECTURES["qwen3-30b-a3b"].count()
    experts = 4 * 128 * 3 * 2048 * 768
    assert total - multiplied == 151936 * 2048 + experts * 120 // 128 + 2048 * (4 * 2 + 1) + 4 * 2 * 128


def test_flops_of_a_token() -> None:
    tiny = ARCHITECTURES["tiny"]
    layer = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48
    assert tiny.flops_per_token(16) == 6 * (3 * layer + 96 * 32) + 6 * 3 * 32 * 16


def test_every_row_starts_from_the_same_weights_and_keeps_rotary_frequencies_in_fp32() -> None:
    tiny = ARCHITECTURES["tiny"]
    torch.manual_seed(1)
    exact, rounded = tiny.make(torch.float32, CPU), tiny.make(torch.bfloat16, CPU)
    for (name, ours), theirs in zip(exact.named_parameters(), rounded.parameters(), strict=True):
        assert torch.equal(ours.bfloat16(), theirs), name
    assert rounded.lm_head.weight is rounded.model.embed_tokens.weight
    assert {buffer.dtype for buffer in rounded.buffers()} == {torch.float32}
    assert list(default_units(rounded)) == list(rounded.model.layers)
    assert torch.equal(tiny.tokens(Shape(2, 4), 3, 1, CPU), tiny.tokens(Shape(2, 4), 3, 1, CPU))
    assert not torch.equal(tiny.tokens(Shape(2, 4), 3, 1, CPU), tiny.tokens(Shape(2, 4), 3, 0, CPU))


@pytest.mark.slow
def test_rows_that_a_cpu_cannot_run_and_rows_that_fail_stay_with_their_reason(tmp_path: Path) -> None:
    def fails(_: Case) -> Callable[[], torch.Tensor]:
        raise ValueError("as told")

    def works(case: Case) -> Callable[[], torch.Tensor]:
        model = case.make(torch.float32)
        tokens = case.tokens()[0]
        return lambda: model(input_ids=tokens, labels=tokens).loss.detach()

    rows = {
        "works": Row("works", works, "nothing set"),
        "fails": Row("fails", fails, "", compiled=True),
        "zero3_copy_engines": ROWS["zero3_copy_engines"],
    }
    bench = ModelsBench(model="tiny", num_layers=2, num_steps=1, num_rounds=1, num_warmup_steps=1, backend="eager")
    saved: list[int] = []
    done = bench_models(bench, Ranks.alone(CPU), rows=rows, save=lambda so_far: saved.append(len(so_far)))
    assert saved == [1, 2, 3]
    assert [row.problem.partition(":")[0] for row in done[:2]] == ["", "ValueError"]
    assert "need CUDA devices" in done[2].problem
    table = write_report(done, tmp_path)
    assert "ValueError: as told" in table
    assert "- works: nothing set." in table
    assert "tiny, 2 layers" in table


def measured(**values: object) -> Measurement:
    about = {"model": "tiny", "shape": "2x16", "num_microbatches": 1, "num_ranks": 2, "row": "a", "label": "a"}
    texts = dict.fromkeys(("options", "backend", "machine"), "")
    unknown = ("spread_ms", "tokens_per_second", "mfu", "peak_tflops", "peak_gib", "first_step_s", "num_graphs")
    numbers = dict.fromkeys(unknown, math.nan) | {"step_ms": 1.0, "first_loss": 4.0, "last_loss": 3.0}
    return Measurement(**(about | texts | numbers | values))


def test_a_row_with_another_loss_is_named() -> None:
    rows = [
        measured(),
        measured(last_loss=3.1),
        measured(row="b", last_loss=3.9),
        measured(row="c", first_loss=math.nan),
    ]
    assert [row.row for row in odd_losses(rows)] == ["c", "b"]
    assert odd_losses([measured(problem="as told")]) == []


def test_sections_of_other_shapes_stay(tmp_path: Path) -> None:
    write_report([measured(), measured(shape="1x8")], tmp_path)
    write_report([measured(step_ms=2.0, mfu=0.5, peak_tflops=100.0)], tmp_path)
    sections = sections_of(read_csv(tmp_path / "models.csv"))
    assert [(section[0].shape, section[0].step_ms) for section in sections] == [("1x8", 1.0), ("2x16", 2.0)]
    assert "MFU is over 100 TFLOP/s a GPU" in (tmp_path / "models.md").read_text()


def test_peaks_and_choices() -> None:
    assert math.isnan(peak_tflops(ModelsBench(), CPU))
    assert peak_tflops(ModelsBench(peak_tflops=7.0), CPU) == 7.0
    assert choose(ModelsBench(rows=("fsdp2_zero2", "zero1"), without=("zero1",)))[2] == ["fsdp2_zero2"]
    assert isinstance(ARCHITECTURES["tiny"].make(torch.float32, CPU), nn.Module)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "llama"], "unknown model 'llama': it is one of llama-1b"),
        (["--rows", "zero9"], "unknown row 'zero9'"),
        (["--shapes", "4096"], "shape '4096' is not like 4x4096"),
    ],
)
def test_mistakes_are_named(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(options) == 2
    assert message in capsys.readouterr().err
