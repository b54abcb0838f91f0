"""``train.recompute``: the same bits from fewer kept activations."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import tiny_config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from maingrad.launch import simulate
from maingrad.launch.config.run import Config, ConfigError
from maingrad.launch.model import recompute as module_of_recompute
from maingrad.launch.model.gpt import build_model
from maingrad.launch.model.recompute import recompute_blocks
from maingrad.launch.training.metrics import read_metrics
from maingrad.launch.training.train import train

EXPERTS = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 32}
MODES: list[dict[str, Any]] = [
    {"recompute": "blocks"},
    {"recompute": "blocks", "recompute_every": 2},
    {"recompute": "attention"},
    {"recompute": "operators"},
]
RUNS: dict[str, dict[str, Any]] = {
    "dropout": {"model": {"param_dtype": "bfloat16", "dropout": 0.2}},
    "experts": {"model": EXPERTS},
    "delayed weight gradients": {"model": {"delay_wgrad_layers": 2}},
    "unfused": {"model": {"fuse_wgrad_accumulation": False}},
    "sharded": {"model": {"dropout": 0.2}, "parallel": "fsdp"},
    "sharded experts": {"model": EXPERTS, "parallel": "fsdp"},
    "graph": {"train": {"cuda_graph": True}},
    "sharded graph": {"train": {"cuda_graph": True}, "parallel": "fsdp"},
    "float8": {"model": {"param_dtype": "bfloat16", "dim": 128, "ffn_dim": 128}, "train": {"recipe": "float8_delayed"}},
}


def config_of(folder: Path, run: str, mode: dict[str, Any]) -> Config:
    out = folder / "-".join(map(str, mode.values())) if mode else folder / "kept"
    given = RUNS[run]
    return tiny_config(
        folder,
        parallel=given.get("parallel", "zero1"),
        model=given.get("model", {}),
        train={**given.get("train", {}), **mode, "steps": 4, "out_dir": str(out)},
    )


def outcome(config: Config, ranks: int = 1) -> tuple[tuple[float, ...], str]:
    result = simulate(train, ranks, config)[0] if ranks > 1 else train(config)
    return result.losses, str(read_metrics(Path(config.train.out_dir) / "metrics.jsonl")[-1]["weights_sha256"])


@pytest.mark.in_turn
@pytest.mark.parametrize("mode", range(len(MODES)))
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.sampled(1)
def test_the_same_bits(run: str, mode: int, tmp_path: Path):
    assert outcome(config_of(tmp_path, run, MODES[mode])) == outcome(config_of(tmp_path, run, {}))


@pytest.mark.slow
@pytest.mark.parametrize("mode", range(len(MODES)))
def test_the_same_bits_on_two_ranks(mode: int, tmp_path: Path):
    kept, again = (outcome(config_of(tmp_path, "sharded", settings), ranks=2) for settings in ({}, MODES[mode]))
    assert kept == again


@pytest.mark.slow
@pytest.mark.parametrize("mode", [0, 1, 3])
def test_the_same_bits_compiled(mode: int, tmp_path: Path):
    def compiled(settings: dict[str, Any]) -> Config:
        torch._dynamo.reset()
        how = {"compile": True, "compile_backend": "aot_eager", "steps": 3, "out_dir": str(tmp_path / str(settings))}
        return tiny_config(tmp_path, model={"num_layers": 12, "dim": 16}, train=how | settings)

    assert outcome(compiled(MODES[mode])) == outcome(compiled({}))


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Products(nn.Module):
    """A block with each kind of product, and a step between that is cheap."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.biased = nn.Linear(16, 16, bias=False), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(torch.sin(x))
        x = self.biased(torch.sin(x))
        x = torch.bmm(torch.sin(x)[None], self.linear.weight[None])[0]
        experts = torch.stack([self.linear.weight, self.biased.weight]).bfloat16()
        ends = torch.tensor([8, 16], dtype=torch.int32)
        return torch.sin(torch._grouped_mm(torch.sin(x).bfloat16(), experts, offs=ends))


def test_no_product_is_computed_again_where_operators_are_kept(tmp_path: Path):
    counts: list[Counter[str]] = []
    for mode in ({}, MODES[3], MODES[0]):
        block = Products()
        recompute_blocks([block], tiny_config(tmp_path, train=mode))
        y = block(torch.randn(16, 16).requires_grad_())
        with Operators() as operators:
            y.float().sum().backward()
        counts.append(operators.count)
    plain, kept, whole = ([count[name] for name in ("mm", "addmm", "bmm", "_grouped_mm")] for count in counts)
    assert kept == plain and [a - b for a, b in zip(whole, plain, strict=True)] == [1, 1, 1, 1]
    assert counts[1]["sin"] > counts[0]["sin"], "what is cheap is computed again"


@pytest.mark.parametrize("cuda_graph", ["auto", False])
@pytest.mark.parametrize("how", ["blocks", "attention", "operators"])
def test_the_same_units_are_dropped_again(how: str, cuda_graph: Any, tmp_path: Path):
    gradients, tokens = [], torch.arange(48).view(2, 24)
    for recompute in ("none", how):
        settings = {"recompute": recompute, "cuda_graph": cuda_graph}
        config = tiny_config(tmp_path, model={"dropout": 0.3, "fuse_wgrad_accumulation": False}, train=settings)
        model = build_model(config.model, seed=0)
        recompute_blocks(model.blocks, config)
        torch.manual_seed(0)
        loss = model(tokens, tokens)
        torch.manual_seed(1)
        loss.backward()
        gradients.append([param.grad for param in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_blocks_without_one_attention_are_named(tmp_path: Path):
    config = tiny_config(tmp_path, train={"recompute": "attention"})
    both = nn.Module()
    both.attention, both.attn = nn.Linear(1, 1), nn.Linear(1, 1)
    for block in (nn.Linear(1, 1), both):
        with pytest.raises(ConfigError, match=rf"{type(block).__name__} has no module attention or self_attn or attn"):
            recompute_blocks([block], config)


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    "mode, attentions, kept_less",
    [({}, 2, False), (MODES[0], 4, True), (MODES[1], 3, True), (MODES[2], 4, True), (MODES[3], 2, True)],
)
def test_what_is_computed_again(mode: dict[str, Any], attentions: int, kept_less: bool, tmp_path: Path):
    """In forward and backward of two blocks; and that less is kept from one to the other."""
    config = tiny_config(tmp_path, model={"fuse_wgrad_accumulation": False}, train=mode)
    kept: list[int] = []
    for made in (config, tiny_config(tmp_path, model={"fuse_wgrad_accumulation": False})):
        model = build_model(config.model, seed=0)
        recompute_blocks(model.blocks, made)
        tokens = torch.arange(48).view(2, 24)
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model(tokens, tokens)
        kept.append(sum(saved.values()))
        with Operators() as operators:
            loss.backward()
        if made is config:
            assert 2 + operators.count[ATTENTION] == attentions, operators.count
    if mode.get("recompute") != "operators":  # what this one keeps, no hook sees
        assert (kept[0] < kept[1]) == kept_less


@pytest.mark.parametrize(
    "train, model, message",
    [
        ({"recompute": "attention", "compile": True}, {}, "train.recompute = 'attention': does not go with train.comp"),
        ({"recompute": "blocks", "cuda_graph": True}, {"dropout": 0.1}, "train.recompute = 'blocks': does not go with"),
        ({"recompute_every": 2}, {}, "train.recompute_every = 2: has no effect without train.recompute"),
        ({"recompute": "blocks", "recompute_every": 0}, {}, "train.recompute_every = 0: must be at least 1"),
    ],
)
def test_what_does_not_go_together_is_refused(
    train: dict[str, Any], model: dict[str, Any], message: str, tmp_path: Path
):
    with pytest.raises(ConfigError, match=message):
        tiny_config(tmp_path, train=train, model=model)


@pytest.mark.parametrize(
    ("model", "cuda_graph", "kept"),
    [({}, False, True), ({}, "auto", False), ({"dropout": 0.1}, "auto", True), ({"dropout": 0.1}, False, True)],
)
def test_states_of_generators_are_put_back_where_that_is_needed_or_costs_nothing(
    tmp_path: Path, model: dict[str, Any], cuda_graph: Any, kept: bool, monkeypatch: pytest.MonkeyPatch
):
    """A captured graph cannot: it is for models that draw nothing."""
    given: list[Any] = []
    monkeypatch.setattr(module_of_recompute, "recompute", lambda region, **how: given.append(how))
    for mode in ("blocks", "attention", "operators"):
        config = tiny_config(tmp_path, model=model, train={"recompute": mode, "cuda_graph": cuda_graph})
        recompute_blocks(build_model(config.model, seed=0).blocks, config)
        assert [how["preserve_rng_state"] for how in given] == [kept] * 2
        assert all(("context_fn" in how) is (mode == "operators") for how in given)
        given.clear()
