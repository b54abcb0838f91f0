"""The mixture of experts: routing and its losses against their definitions, gradients through main_grad, training."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_run import tiny_config
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.launch.config.file import load_config
from maingrad.launch.config.run import ConfigError, ModelConfig
from maingrad.launch.model.gpt import GPT, build_model
from maingrad.launch.model.moe import (
    MixtureOfExperts,
    Router,
    RouterStats,
    load_balancing_loss,
    router_losses,
    router_z_loss,
)
from maingrad.launch.plan.parameter_count import ParameterCount, count_of
from maingrad.launch.simulation.simulate import simulate
from maingrad.launch.training.metrics import read_metrics
from maingrad.launch.training.train import train
from maingrad.te_integration.wgrad_queue import drain_modules

CONFIGS = Path(__file__).resolve().parents[3] / "launch" / "configs"
EXPERTS: dict[str, Any] = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 24}
SHAPE: dict[str, Any] = {
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 48,
    "context_length": 16,
}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**SHAPE, **EXPERTS, **changes})


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def mixture(**changes: Any) -> MixtureOfExperts:
    """One block's mixture in fp64, with weights of order one, so that probabilities differ and no expert is idle."""
    ffn = build_model(config(**changes), seed=0).blocks[0].ffn.double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ffn.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).double() / math.sqrt(32))
    return ffn


def expert_weights(ffn: MixtureOfExperts, expert: int) -> tuple[Tensor, Tensor]:
    weights = dict(ffn.experts.named_parameters())
    if "fc1_weight" in weights:
        return weights["fc1_weight"][expert], weights["fc2_weight"][expert]
    return weights[f"fc1_weight{expert}"], weights[f"fc2_weight{expert}"]


def token_by_token(ffn: MixtureOfExperts, x: Tensor, top_k: int, *, normalize: bool, scale: float) -> Tensor:
    """The definition, one token at a time, without permutation."""
    rows = []
    for token in x:
        probs = (ffn.router.linear.weight @ token).softmax(-1)
        chosen = probs.topk(top_k)
        factors = chosen.values / chosen.values.sum() if normalize else chosen.values
        y = torch.zeros_like(token)
        for factor, expert in zip(factors * scale, chosen.indices.tolist(), strict=True):
            first, second = expert_weights(ffn, expert)
            gate, up = (first @ token).chunk(2)
            y = y + second @ (F.silu(gate) * up * factor)
        if ffn.shared is not None:
            gate, up = (ffn.shared.gate_up.weight @ token).chunk(2)
            y = y + ffn.shared.down.weight @ (F.silu(gate) * up)
        rows.append(y)
    return torch.stack(rows)


# ---- Router and losses. ----


def test_the_router_takes_the_most_probable():
    router = Router(config(), None)
    nn.init.normal_(router.linear.weight)
    x = torch.randn(10, 32)
    routing = router(x)
    expected = F.linear(x, router.linear.weight).softmax(-1)
    assert torch.allclose(routing.all_probs, expected)
    for ids, probs, row in zip(routing.expert_ids, routing.probs, expected, strict=True):
        assert set(ids.tolist()) == set(row.topk(2).indices.tolist())
        assert torch.allclose(probs, row[ids])


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.5])
def test_normalised_and_scaled_probabilities(scale: float):
    x = torch.randn(10, 32)
    plain, changed = Router(config(), None), Router(config(normalize_top_k=True, top_k_scaling_factor=scale), None)
    changed.load_state_dict(plain.state_dict())
    routing = changed(x)
    assert torch.allclose(routing.probs.sum(-1), torch.full((10,), scale))
    ratio = routing.probs / plain(x).probs
    assert torch.allclose(ratio, ratio[:, :1].expand(-1, 2)), "the same factor for all experts of a token"


def test_the_router_stays_in_fp32_under_bf16_parameters():
    model = build_model(config(param_dtype="bfloat16"), seed=0)
    router = model.blocks[0].ffn.router
    assert router.linear.weight.dtype == torch.float32
    assert {p.dtype for name, p in model.named_parameters() if "router" not in name} == {torch.bfloat16}
    routing = router(torch.randn(3, 32).bfloat16())
    assert routing.logits.dtype == routing.probs.dtype == torch.float32
    half = build_model(config(param_dtype="bfloat16", router_dtype="bfloat16"), seed=0).blocks[0].ffn.router
    assert half.linear.weight.dtype == torch.bfloat16
    assert half(torch.randn(3, 32).bfloat16()).logits.dtype == torch.float32


def test_losses_against_their_definitions():
    logits = torch.randn(12, 4).double()
    probs = logits.softmax(-1)
    ids = probs.topk(2).indices
    splits = torch.tensor([(ids == expert).sum() for expert in range(4)])
    expected = sum(4 * float(splits[e]) / 24 * float(probs[:, e].sum()) / 12 for e in range(4))
    assert load_balancing_loss(probs.mean(0), splits).item() == pytest.approx(expected)
    assert router_z_loss(logits).item() == pytest.approx(float(logits.exp().sum(-1).log().square().mean()))


def test_perfect_balance_costs_one_and_one_expert_alone_costs_all():
    even = torch.full((8, 4), 0.25)
    assert load_balancing_loss(even.mean(0), torch.tensor([4, 4, 4, 4])).item() == 1.0
    alone = torch.zeros(8, 4)
    alone[:, 2] = 1.0
    assert load_balancing_loss(alone.mean(0), torch.tensor([0, 0, 8, 0])).item() == 4.0


def test_balancing_lowers_the_probability_of_the_fullest():
    logits = torch.zeros(6, 3, requires_grad=True)
    load_balancing_loss(logits.softmax(-1).mean(0), torch.tensor([10, 1, 1])).backward()
    assert (logits.grad[:, 0] > 0).all()
    assert (logits.grad[:, 1:] < 0).all()


# ---- The block. ----


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalize_top_k": True, "top_k_scaling_factor": 2.0},
        {"shared_expert_ffn_dim": 16},
        {"top_k": 1},
        {"top_k": 4},
        {"num_experts": 1, "top_k": 1},
        {"single_grouped_weight": False},
        {"num_experts": 16, "top_k": 2},  # 6 tokens: some expert gets none
    ],
    ids=str,
)
@pytest.mark.parametrize("fused", [False, True])
def test_the_block_is_its_definition(changes: dict[str, Any], fused: bool):
    """Compares the output and every gradient, the router's included; in fp64, so that any difference is a fault."""
    ffn = mixture(**changes, fuse_wgrad_accumulation=fused)
    options = {"normalize": ffn.router.normalize, "scale": ffn.router.scale}
    reference = mixture(**changes, fuse_wgrad_accumulation=False)
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(2)).double().requires_grad_()
    x_reference = x.detach().clone().requires_grad_()
    dy = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(3)).double()

    expected = token_by_token(reference, x_reference.flatten(0, 1), ffn.top_k, **options).view_as(x)
    expected.backward(dy)
    wrapped = DistributedDataParallel(ffn, DistributedDataParallelConfig(grad_reduce_in_fp32=False))
    y, loss = wrapped(x)
    assert loss is not None
    y.backward(dy)
    wrapped.finish_grad_sync()
    assert torch.allclose(y, expected, atol=1e-12)
    assert torch.allclose(x.grad, x_reference.grad, atol=1e-12)
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert {record.name for record in wrapped.records} == set(theirs)
    for record in wrapped.records:
        gradient = theirs[record.name]  # None: a discrete expert without tokens
        assert torch.allclose(record.view, torch.zeros_like(record.view) if gradient is None else gradient, atol=1e-12)
        assert bool(record.num_fused_writes) is fused, record.name
    router = theirs["router.linear.weight"]
    assert (router.abs().max() > 1e-3) == (ffn.num_experts > 1), "the router learns from the experts"


def test_losses_are_those_of_training_alone():
    ffn, x = mixture(), torch.randn(6, 32).double()
    loss = router_losses([ffn(x)[1]], config(aux_loss_coefficient=0.5, router_z_loss_coefficient=0.25))
    routing = ffn.router(x)
    splits = torch.stack([(routing.expert_ids == expert).sum() for expert in range(4)])
    balance, z = load_balancing_loss(routing.all_probs.mean(0), splits), router_z_loss(routing.logits)
    assert torch.allclose(loss.weighted, 0.5 * balance + 0.25 * z)
    assert torch.equal(loss.load_balancing, balance)
    assert torch.equal(loss.z, z)
    assert loss.max_load.item() == pytest.approx(splits.max().item() / 3)
    assert loss.weighted.requires_grad
    assert not (loss.load_balancing.requires_grad or loss.z.requires_grad)
    ffn.eval()
    assert ffn(x)[1] is None


def test_the_fullest_expert_is_that_of_all_routers():
    rows = [[3, 3, 3, 3], [0, 9, 3, 0], [4, 4, 4, 0]]
    stats = [
        RouterStats(torch.tensor(each), torch.full((4,), 0.25), torch.tensor(2.0 * n)) for n, each in enumerate(rows)
    ]
    loss = router_losses(stats, config())
    assert (loss.max_load.item(), loss.z.item(), loss.load_balancing.item()) == (3.0, 2.0, 1.0)


# ---- The model. ----


def test_the_loss_in_training_is_cross_entropy_and_routers_losses():
    model = build_model(config(aux_loss_coefficient=0.1, router_z_loss_coefficient=0.01), seed=0)
    x, y = tokens(2, 8), tokens(2, 8, seed=1)
    loss, parts = model(x, y), model.loss_parts
    expected = parts.cross_entropy + 2 * (0.1 * parts.load_balancing + 0.01 * parts.router_z)  # two blocks
    assert torch.allclose(loss.detach(), expected)
    assert 1.0 <= parts.max_load.item() <= 2.0
    assert not any(part.requires_grad for part in parts)
    model.eval()
    assert torch.equal(model(x, y).detach(), parts.cross_entropy)
    assert torch.equal(model(x, y), F.cross_entropy(model(x).flatten(0, 1), y.flatten()))


def test_every_so_many_blocks_have_experts():
    model = build_model(config(num_layers=5, moe_layer_freq=2, fuse_wgrad_accumulation=False), seed=0)
    assert [isinstance(block.ffn, MixtureOfExperts) for block in model.blocks] == [True, False, True, False, True]
    model(tokens(1, 8), tokens(1, 8)).backward()


def test_packed_and_discrete_weights_of_one_seed_are_the_same_model():
    packed, discrete = (build_model(config(single_grouped_weight=single), seed=0) for single in (True, False))
    for mine, theirs in zip(packed.blocks, discrete.blocks, strict=True):
        for expert in range(4):
            pairs = zip(expert_weights(mine.ffn, expert), expert_weights(theirs.ffn, expert), strict=True)
            assert all(torch.equal(one, two) for one, two in pairs)
    x, y = tokens(2, 8), tokens(2, 8, seed=1)
    assert torch.equal(packed(x, y), discrete(x, y))


def test_weights_that_write_to_the_residual_stream_start_smaller():
    block = build_model(config(dim=128, num_layers=8, expert_ffn_dim=64, shared_expert_ffn_dim=64), seed=0).blocks[3]
    first, second = expert_weights(block.ffn, 0)
    for weight, std in (
        (first, 0.02),
        (second, 0.005),
        (block.ffn.shared.gate_up.weight, 0.02),
        (block.ffn.shared.down.weight, 0.005),
        (block.ffn.router.linear.weight, 0.02),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.1)


def test_every_gradient_goes_through_main_grad_fused_and_delayed():
    """Two microbatches of fused gradients, delayed or not, give bit for bit the gradients of the hook."""
    results = []
    for changes in (
        {"fuse_wgrad_accumulation": False},
        {},
        {"delay_wgrad_layers": 1},
        {"delay_wgrad_layers": 2, "fuse_wgrad_accumulation": True},
    ):
        model = build_model(config(shared_expert_ffn_dim=16, **changes), seed=0)
        wrapped = DistributedDataParallel(model, DistributedDataParallelConfig(overlap_grad_reduce=True))
        with wrapped.no_sync():
            wrapped(tokens(2, 8), tokens(2, 8, seed=1)).backward()
            drain_modules(model)
        wrapped(tokens(2, 8, seed=2), tokens(2, 8, seed=3)).backward()
        drain_modules(model)
        wrapped.finish_grad_sync()
        results.append({record.name: record.view.clone() for record in wrapped.records})
        fused = {record.name for record in wrapped.records if record.num_fused_writes}
        matrices = {name for name, p in model.named_parameters() if p.dim() >= 2}
        assert fused == (matrices if changes.get("fuse_wgrad_accumulation", True) else set())
    for other in results[1:]:
        for name, gradient in results[0].items():
            assert torch.equal(other[name], gradient), name


def test_all_weight_gradients_of_a_delayed_layer_wait():
    """Those of the router, of the experts and of the shared feed-forward too."""
    model = build_model(config(shared_expert_ffn_dim=16, delay_wgrad_layers=1, fuse_wgrad_accumulation=False), seed=0)
    model(tokens(2, 8), tokens(2, 8, seed=1)).backward()
    for block, waits in zip(model.blocks, (False, True), strict=True):
        matrices = [parameter for parameter in block.parameters() if parameter.dim() >= 2]
        assert [parameter.grad is None for parameter in matrices] == [waits] * len(matrices)
    drain_modules(model)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_router_learns_from_the_experts_and_from_its_own_losses():
    def router_grad(**changes: Any) -> Tensor:
        model = build_model(config(num_layers=1, **changes), seed=0)
        wrapped = DistributedDataParallel(model)
        wrapped(tokens(2, 8), tokens(2, 8, seed=1)).backward()
        wrapped.finish_grad_sync()
        return next(record.view for record in wrapped.records if "router" in record.name)

    alone = router_grad(aux_loss_coefficient=0.0)
    assert alone.abs().max() > 0
    balanced = router_grad(aux_loss_coefficient=1.0)
    twice = router_grad(aux_loss_coefficient=2.0)
    assert not torch.equal(alone, balanced)
    assert torch.allclose(twice - alone, 2 * (balanced - alone), atol=1e-6)


def test_meta_device_allocates_nothing():
    model = GPT(config(shared_expert_ffn_dim=16), torch.device("meta"))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


# ---- Configuration and counts. ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "model.top_k = 2: has no effect without model.num_experts"),
        ({"num_experts": -1}, "model.num_experts = -1: must not be negative"),
        ({"top_k": 0}, "model.top_k = 0: must be at least 1"),
        ({"top_k": 5}, "model.top_k = 5: must be at most model.num_experts = 4"),
        ({"expert_ffn_dim": 0}, "model.expert_ffn_dim = 0: must be at least 1"),
        ({"shared_expert_ffn_dim": -1}, "model.shared_expert_ffn_dim = -1: must not be negative"),
        ({"aux_loss_coefficient": -0.1}, "model.aux_loss_coefficient = -0.1: must not be negative"),
        ({"top_k": 1, "normalize_top_k": True}, "model.normalize_top_k = True: makes the one probability 1"),
        ({"top_k_scaling_factor": 0.0}, "model.top_k_scaling_factor = 0.0: must be positive"),
        ({"moe_layer_freq": 3}, "model.moe_layer_freq = 3: must be at most model.num_layers = 2"),
        ({"router_dtype": "bfloat16"}, "model.router_dtype = 'bfloat16': must be \"float32\" or model.param_dtype"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_its_key(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as refused:
        config(**changes)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "key",
    [
        "top_k",
        "expert_ffn_dim",
        "shared_expert_ffn_dim",
        "moe_layer_freq",
        "aux_loss_coefficient",
        "router_z_loss_coefficient",
        "top_k_scaling_factor",
    ],
)
def test_a_dense_model_takes_no_key_of_experts(key: str):
    with pytest.raises(ConfigError, match=f"model.{key} = 3: has no effect without model.num_experts"):
        ModelConfig(**SHAPE, **{key: 3})


def count_parameters(settings: ModelConfig) -> ParameterCount:
    return count_of(build_model(settings, seed=0, device=torch.device("meta")))


def test_active_parameters_by_hand():
    count = count_parameters(config(shared_expert_ffn_dim=16, num_layers=3, moe_layer_freq=2))
    expert = 3 * 32 * 24
    assert count.experts == 2 * 4 * expert
    assert count.routers == 2 * 4 * 32
    assert count.shared_experts == 2 * 3 * 32 * 16
    assert count.total - count.active == 2 * 2 * expert
    dense = count_parameters(ModelConfig(**SHAPE))
    assert dense.active == dense.total


def test_the_shipped_pair_differs_in_its_feed_forwards_alone():
    sparse, dense = (load_config(CONFIGS / f"{name}.toml") for name in ("moe", "moe_dense"))
    assert (sparse.data, sparse.optimizer) == (dense.data, dense.optimizer)
    assert {
        key for key in sparse.train.__dataclass_fields__ if getattr(sparse.train, key) != getattr(dense.train, key)
    } == {"out_dir"}
    assert sparse.train.max_seconds is None, "a slower machine would take fewer steps of one of them"
    assert not dense.model.num_experts
    mine, twin = count_parameters(sparse.model), count_parameters(dense.model)
    assert mine.active <= twin.active <= 1.005 * mine.active


# ---- Training. ----


@pytest.mark.in_turn
def test_a_run_learns_and_records_its_routers(tmp_path: Path):
    experts = {**EXPERTS, "router_z_loss_coefficient": 1e-3, "shared_expert_ffn_dim": 16}
    settings = tiny_config(tmp_path, model=experts, train={"steps": 12, "log_every": 3})
    result = train(settings)
    assert result.losses[-1] < result.losses[0]
    steps = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "step"]
    for record in steps:
        assert 1.0 <= record["load_balancing_loss"] < 1.5
        assert record["router_z_loss"] > 0
        assert 1.0 <= record["max_expert_load"] <= 4.0
    observed = next(r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "observed")
    assert observed["fused_weights"] == 2 * (2 + 1 + 2 + 2) + 2, (
        "attention, router, experts, shared; embedding and head"
    )


def test_a_dense_run_records_no_routers(tmp_path: Path):
    train(tiny_config(tmp_path, train={"steps": 3}))
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert not any("load_balancing_loss" in record for record in records)


def test_routers_balance_the_tokens_of_all_ranks_whose_losses_are_averaged():
    """Each rank has other tokens, and the numbers of one microbatch of both."""

    def parts(together: bool) -> list[float]:
        model = build_model(config(num_layers=1, init_std=0.5), seed=0)
        model.loss_group = dist.group.WORLD if together else None
        inputs = tokens(2, 8, seed=dist.get_rank())
        model(inputs, inputs)
        return [float(model.loss_parts.max_load), float(model.loss_parts.load_balancing)]

    (one, _), (other, _) = simulate(parts, 2, True)
    assert one == other
    loads = [found[0] for found in simulate(parts, 2, False)]
    assert loads[0] != loads[1], "each rank's own are others"


def test_shared_out_experts_have_one_queue_where_they_delay():
    for delayed in (0, 2):
        model = GPT(config(delay_wgrad_layers=delayed), torch.device("meta"))
        model.share_experts(2)
        experts = [block.ffn.experts for block in model.blocks]
        assert [each.num_gemms for each in experts] == [experts[0].num_gemms] * 2
        queues = {id(each.wgrad_queue) for each in experts if each.wgrad_queue is not None}
        assert len(queues) == (1 if delayed else 0)
        assert all(block.ffn.has_part for block in model.blocks)


def test_delayed_weight_gradients_of_experts_are_computed_while_rows_travel():
    """Experts over ranks leave one of all theirs behind the last exchange: its half of the first block's two."""

    def pending(ranks: int) -> list[int]:
        model = build_model(config(delay_wgrad_layers=2, fuse_wgrad_accumulation=False), seed=0)
        if ranks > 1:
            model.share_experts(dist.init_device_mesh("cpu", (ranks,)))
        batch = tokens(2, 17, seed=dist.get_rank())
        model(batch[:, :-1], batch[:, 1:]).backward()
        queues = dict.fromkeys(block.ffn.experts.wgrad_queue for block in model.blocks)
        counts = [len(queue) for queue in queues]
        drain_modules(model)
        assert all(param.grad is not None for param in model.parameters())
        return counts

    assert simulate(pending, 1, 1) == [[2, 2]]
    assert simulate(pending, 2, 2) == [[1]] * 2


@pytest.mark.in_turn
@pytest.mark.parametrize("changes", [{}, {"delay_wgrad_layers": 2}, {"single_grouped_weight": False}], ids=str)
@pytest.mark.sampled(1)
def test_two_ranks_train_and_agree(tmp_path: Path, changes: dict[str, Any]):
    settings = tiny_config(tmp_path, model={**EXPERTS, "param_dtype": "bfloat16", **changes})
    first, second = simulate(train, 2, settings)
    assert first.losses == second.losses
    assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))
    assert first.losses[-1] < first.losses[0]


# ---- On a GPU. ----


def on_gpu() -> tuple[MixtureOfExperts, Tensor, Tensor]:
    """A block in bf16, its input and the gradient of its output."""
    sizes = {"dim": 64, "num_experts": 16, "top_k": 4, "expert_ffn_dim": 32, "shared_expert_ffn_dim": 32}
    model = build_model(config(**sizes, param_dtype="bfloat16"), seed=0, device=torch.device("cuda"))
    x, dy = (torch.randn(300, 64, device="cuda").bfloat16() for _ in range(2))
    return model.blocks[0].ffn, x.requires_grad_(), dy


@pytest.mark.gpu
def test_on_the_gpu_the_host_waits_for_nothing():
    ffn, x, dy = on_gpu()
    wrapped = DistributedDataParallel(ffn)

    def microbatch() -> None:
        y, stats = wrapped(x)
        torch.autograd.backward([y, router_losses([stats], config()).weighted], [dy, None])

    with wrapped.no_sync():
        microbatch()  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            microbatch()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(record.view.abs().max() > 0 for record in wrapped.records)


@pytest.mark.gpu
def test_a_captured_block_follows_other_tokens():
    ffn, x, dy = on_gpu()
    ffn.requires_grad_(False)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        y, stats = ffn(x)
        loss = router_losses([stats], config())
        (dx,) = torch.autograd.grad([y, loss.weighted], x, [dy, None])
        return y.detach(), dx, loss.max_load

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for shift in (0.0, 1.0):  # a shift of all tokens sends most of them to the same experts
        with torch.no_grad():
            x.copy_(torch.randn_like(x) + shift)
        graph.replay()
        for mine, eager in zip(captured, run(), strict=True):
            assert torch.equal(mine, eager)
