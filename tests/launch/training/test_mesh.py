"""``[mesh]``: ranks that compute one sample together train what one rank trains."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_run import tiny_config
from torch import nn

from maingrad.launch import simulate
from maingrad.launch.config.run import Config
from maingrad.launch.simulation.simulate import SimulatedRankError
from maingrad.launch.training import train as loop
from maingrad.launch.training.metrics import read_metrics
from maingrad.launch.training.train import Trainer, train

WORDS = {"vocab_size": 257}  # two ranks have other numbers of them
HALVES = {"tp": 2, "sequence_parallel": True}


def records(config: Config, kind: str) -> list[dict[str, Any]]:
    return [r for r in read_metrics(Path(config.train.out_dir) / "metrics.jsonl") if r["kind"] == kind]


def run(folder: Path, parallel: str, ranks: int, **sections: Any) -> tuple[list[float], str]:
    """Losses of the steps and of validations, and the digest of the weights."""
    config = tiny_config(folder, parallel=parallel, **sections)
    config.check_ranks(ranks)
    results = simulate(train, ranks, config)
    for rank in range(0, ranks - 1, 2) if config.mesh.tp > 1 else ():
        assert_copies_are_equal(results[rank].model, results[rank + 1].model)
    losses = [record["loss"] for kind in ("step", "validation") for record in records(config, kind)]
    norms = [record["grad_norm"] for record in records(config, "step")]
    return [*losses, *norms], records(config, "final")[0]["weights_sha256"]


def assert_copies_are_equal(model: nn.Module, other: nn.Module) -> None:
    """Two tensor-parallel ranks have the same norms, bit for bit, and other parts of the rest."""
    for (name, param), (_, of_other) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        own, others = param.detach(), of_other.detach()  # of a sharded parameter the shards
        is_empty = own.numel() == others.numel() == 0
        assert torch.equal(own, others) is (name.endswith("norm.weight") or is_empty), name


def test_tokens_that_travel_by_kernels_need_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 8}
    config = tiny_config(tmp_path, mesh={"ep": 2, "transport": "symmetric"}, model=experts)
    with pytest.raises(SimulatedRankError, match=r"mesh\.transport = 'symmetric': needs GPUs, .* set \"all_to_all\""):
        simulate(train, 2, config)
    assert not (tmp_path / "run").exists(), "before anything is written"

    def goes_on(path: Path | None) -> None:
        raise FileExistsError(path)

    on_gpus = SimpleNamespace(device=torch.device("cuda"), is_main=True)
    monkeypatch.setattr(loop, "current_runtime", lambda device, mesh: on_gpus)
    monkeypatch.setattr(loop, "MetricsWriter", goes_on)
    with pytest.raises(FileExistsError, match=r"metrics\.jsonl"):
        train(config)


@pytest.fixture(scope="module", params=["join", "mask", "pad"])
def plain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[float]]:
    """How documents are read, and the numbers of a rank alone."""
    joined = request.param == "join"
    data = {"documents": request.param} | ({} if joined else {"end_of_document": 10, "order": "epochs"})
    numbers, _ = run(tmp_path_factory.mktemp("plain"), "ddp", 1, data=data, model=WORDS)
    return data, numbers


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("parallel", "ranks", "mesh"),
    [
        ("ddp", 2, {"cp": 2}),
        ("zero1", 4, {"cp": 2, "dp": 2}),
        ("fsdp", 4, {"cp": 4}),
        ("hybrid", 4, {"cp": 2}),
        ("hsdp", 4, {"cp": 4}),
        ("ddp", 2, {"tp": 2}),
        ("ddp", 4, {"cp": 2, "cp_attention": "ring"} | HALVES),
        ("fsdp", 3, {"cp": 3, "cp_attention": "ring"}),
        ("zero1", 4, HALVES),
        ("zero1", 8, {"cp": 2, "dp": 2} | HALVES),
        ("hybrid", 4, {"tp": 2}),
        ("fsdp", 4, HALVES),
        ("hsdp", 8, {"tp": 2, "cp": 2}),
    ],
)
@pytest.mark.in_turn
@pytest.mark.parametrize("fused_loss", [False, True])
def test_ranks_that_share_samples_train_the_same_model(
    tmp_path: Path,
    plain: tuple[dict[str, Any], list[float]],
    parallel: str,
    ranks: int,
    mesh: dict[str, int],
    fused_loss: bool,
):
    """Clipped steps. Copies are equal bit for bit after each of them under a wrapper, and behind the last."""
    data, expected = plain
    if "cp_attention" in mesh and data["documents"] == "mask":
        pytest.skip("a ring knows no masks")
    checks = {} if "sd" in parallel else {"ddp": {"check_replicas_every": 1}}
    model = WORDS | {"fused_loss": fused_loss}
    numbers, _ = run(tmp_path, parallel, ranks, mesh=mesh, data=data, model=model, **checks)
    assert numbers == pytest.approx(expected, rel=2e-6)


@pytest.mark.in_turn
@pytest.mark.parametrize(("ranks", "mesh"), [(4, {"cp": 4}), (2, HALVES)])
@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"compile": True, "compile_backend": "eager"}},
        {"train": {"recompute": "blocks"}, "model": {"delay_wgrad_layers": 2, "dropout": 0.0}},
        {"model": {"fused_loss": True, "num_kv_heads": 2}, "train": {"recompute": "operators"}},
        {"train": {"cuda_graph": True}},
        {"train": {"cuda_graph": True}, "model": {"fused_loss": True}},
    ],
)
def test_ranks_of_a_sample_with_other_settings(
    tmp_path: Path, ranks: int, mesh: dict[str, Any], changes: dict[str, Any]
):
    torch._dynamo.reset()  # simulated ranks share what was compiled, up to a limit
    (tmp_path / "plain").mkdir()
    expected, _ = run(tmp_path / "plain", "ddp", 1)
    numbers, _ = run(tmp_path, "zero1", ranks, mesh=mesh, **changes)
    assert numbers == pytest.approx(expected, rel=2e-6)


@pytest.mark.in_turn
def test_a_run_goes_on_with_another_mesh(tmp_path: Path):
    """Checkpoints have whole parameters: all ranks write one folder, which any mesh reads."""
    model = WORDS | {"num_kv_heads": 4, "tie_embeddings": True}
    every_second = {"save_every": 2, "steps": 6}
    expected, _ = run(tmp_path, "zero1", 4, mesh=HALVES, train=every_second, model=model)
    folder = tmp_path / "run" / "checkpoints"
    for name, step, parallel, ranks, mesh in [
        ("cut otherwise", 2, "zero1", 4, {"tp": 4}),
        ("sequences", 4, "hybrid", 4, {"cp": 2}),
        ("plain", 2, "fsdp", 2, {}),
    ]:
        rest = {"resume": str(folder / f"step-{step:08d}"), "out_dir": str(tmp_path / name)}
        numbers, _ = run(tmp_path, parallel, ranks, mesh=mesh, train=rest, model=model)
        losses, norms = expected[step:6], expected[8 + step :]
        assert numbers == pytest.approx([*losses, *expected[6 + step // 4 : 8], *norms], rel=2e-6)
    back = {"resume": str(folder / "step-00000004"), "out_dir": str(tmp_path / "whole"), "save_every": 2}
    run(tmp_path, "ddp", 1, train=back, model=model)
    rest = {"resume": str(tmp_path / "whole/checkpoints/step-00000006"), "out_dir": str(tmp_path / "back"), "steps": 8}
    numbers, _ = run(tmp_path, "zero1", 4, mesh={"tp": 4}, train=rest, model=model)
    alone, _ = run(tmp_path, "ddp", 1, train=rest, model=model)
    assert numbers == pytest.approx(alone, rel=2e-6)


# ---- Experts. ----

EXPERTS = {
    "num_experts": 4,
    "top_k": 2,
    "expert_ffn_dim": 16,
    "shared_expert_ffn_dim": 16,
    "aux_loss_coefficient": 0.1,
    "router_z_loss_coefficient": 0.01,
}
ROUTERS = ("load_balancing_loss", "router_z_loss", "max_expert_load")


def run_experts(folder: Path, parallel: str, ranks: int, mesh: dict[str, Any], **sections: Any) -> list[float]:
    """Losses, those of the routers too, and norms. One microbatch: balance is over the tokens of one on all ranks."""
    train = {"num_microbatches": 1} | sections.pop("train", {})
    model = EXPERTS | sections.pop("model", {})
    numbers, _ = run(folder, parallel, ranks, mesh=mesh, model=model, train=train, **sections)
    folder = Path(train.get("out_dir", folder / "run"))
    steps = [each for each in read_metrics(folder / "metrics.jsonl") if each["kind"] == "step"]
    return [*numbers, *(step[name] for step in steps for name in ROUTERS)]


@pytest.fixture(scope="module", params=["join", "pad"])
def whole_experts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[float]]:
    """How documents are read, and the numbers of a rank alone."""
    data = {} if request.param == "join" else {"documents": "pad", "end_of_document": 10, "order": "epochs"}
    return data, run_experts(tmp_path_factory.mktemp("whole"), "ddp", 1, {}, data=data)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("parallel", "ranks", "mesh"),
    [
        ("ddp", 2, {}),
        ("ddp", 2, {"ep": 2}),
        ("zero1", 4, {"ep": 2}),
        ("zero1", 4, {"ep": 4, "cp": 2}),
        ("fsdp", 4, {"ep": 2}),
        ("fsdp", 4, {"ep": 4}),
        ("hybrid", 4, {"ep": 2}),
        ("hsdp", 4, {"ep": 2}),
    ],
)
def test_ranks_that_share_out_experts_train_the_same_model(
    tmp_path: Path,
    whole_experts: tuple[dict[str, Any], list[float]],
    parallel: str,
    ranks: int,
    mesh: dict[str, int],
):
    """Routers' losses are those of all ranks' tokens together, and padding counts in none of them."""
    data, expected = whole_experts
    numbers = run_experts(tmp_path, parallel, ranks, mesh, data=data)
    assert numbers[:14] == pytest.approx(expected[:14], rel=2e-6)
    # Records have the mean over ranks, of which those with more padding count as much.
    assert numbers[14:] == pytest.approx(expected[14:], rel=0.05 if data else 2e-6)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("parallel", "changes"),
    [
        ("zero1", {"train": {"compile": True, "compile_backend": "eager", "steps": 4}}),
        ("zero1", {"train": {"recompute": "blocks", "steps": 4}, "model": {"delay_wgrad_layers": 2}}),
        ("fsdp", {"train": {"recompute": "blocks", "steps": 4}, "model": {"delay_wgrad_layers": 2}}),
    ],
)
def test_shared_experts_with_other_settings(tmp_path: Path, parallel: str, changes: dict[str, Any]):
    (tmp_path / "whole").mkdir()
    expected = run_experts(tmp_path / "whole", "ddp", 1, {}, train={"steps": 4})
    assert run_experts(tmp_path, parallel, 4, {"ep": 2}, **changes) == pytest.approx(expected, rel=2e-6)


@pytest.mark.in_turn
def test_experts_move_where_a_run_goes_on(tmp_path: Path):
    """ep 2 -> ep 4 -> a rank with all experts, and fully sharded."""
    expected = run_experts(tmp_path, "zero1", 4, {"ep": 2}, train={"save_every": 2})
    forms: list[tuple[str, str, int, dict[str, int]]] = [
        ("run", "zero1", 4, {"ep": 4}),
        ("4", "ddp", 1, {}),
        ("4", "fsdp", 4, {"ep": 2}),
    ]
    for index, (source, parallel, ranks, mesh) in enumerate(forms):
        name, at = ("4", 2) if index == 0 else (f"from 4, {parallel}", 4)
        folder = tmp_path / source / f"checkpoints/step-{at:08d}"
        rest = {"resume": str(folder), "out_dir": str(tmp_path / name), "save_every": 2}
        numbers = run_experts(tmp_path, parallel, ranks, mesh, train=rest)
        losses, norms, routers = expected[at:6], expected[8 + at : 14], expected[14 + at * len(ROUTERS) :]
        assert numbers == pytest.approx([*losses, *expected[6 + at // 4 : 8], *norms, *routers], rel=2e-6), name


@pytest.mark.in_turn
def test_each_rank_draws_for_its_heads_and_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn: dict[int, list[int]] = {}
    iteration = Trainer._iteration

    def spied(self: Trainer, *args: torch.Tensor) -> torch.Tensor:
        drawn.setdefault(self.runtime.rank, []).append(torch.initial_seed())
        return iteration(self, *args)

    monkeypatch.setattr(Trainer, "_iteration", spied)
    changes = {"model": {"dropout": 0.1}, "train": {"steps": 3, "cuda_graph": False}}
    run(tmp_path, "zero1", 4, mesh={"cp": 2} | HALVES, **changes)
    seeds = [seed for of_rank in drawn.values() for seed in of_rank]
    assert len(set(seeds)) == len(seeds) == 4 * 3


def test_gpus_memory_is_not_looked_for_on_cpus(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"mesh\.transport = .symmetric.: needs GPUs"):
        run_experts(tmp_path, "zero1", 2, {"ep": 2, "transport": "symmetric"})
