"""``parallelize`` and ``make_optimizer`` as a program uses them: every form trains what plain PyTorch trains."""

import copy
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import maingrad
from maingrad.launch.parallelizing.blocks import add_recompute

FORMS = ("ddp", "zero1", "zero2", "zero3", "hsdp")
STEPS, MICROBATCHES, ROWS = 3, 2, 8
NO_DECAY = {"params": lambda name, param: param.ndim < 2, "weight_decay": 0.0}
ADAMW = {"lr": 1e-2, "weight_decay": 0.3}
TOLERANCE = 1e-7
"""Of parameters in fp64. The factor of ``DistributedOptimizer``'s clipping is in fp32."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Blocks in a list, and one parameter that no module multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def net_loss(model: nn.Module, step: int, rows: slice) -> Tensor:
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return (model(x[rows]) - 1).square().mean()


def make_llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, use_cache=False, **sizes))
    return model.double().train()


def llama_loss(model: nn.Module, step: int, rows: slice) -> Tensor:
    tokens = torch.randint(32, (ROWS, 6), generator=torch.Generator().manual_seed(step))[rows]
    return model(input_ids=tokens, labels=tokens).loss


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "net": (make_net, net_loss),
    "llama": (make_llama, llama_loss),
}


def mesh_of(form: str) -> Any:
    """Two instances where there are as many ranks."""
    if form != "hsdp":
        return None
    ranks = dist.get_world_size()
    instances = min(2, ranks)
    return init_device_mesh("cpu", (instances, ranks // instances), mesh_dim_names=("outer", "inner"))


def finish(model: Any) -> None:
    model.finish_grad_sync()


def train(make: Callable[[], nn.Module], loss_of: Callable[..., Tensor], form: str, **options: Any) -> Any:
    """This rank's loop: the norms of the steps, and all parameters at the end."""
    optimizer_options = options.pop("optimizer", ADAMW)
    model = maingrad.parallelize(make(), form, mesh=mesh_of(form), **options)
    optimizer = maingrad.make_optimizer(model, **optimizer_options)
    rows = ROWS // dist.get_world_size() // MICROBATCHES
    norms = []
    for step in range(STEPS):
        for number in range(MICROBATCHES):
            first = (dist.get_rank() * MICROBATCHES + number) * rows
            with model.no_sync() if number < MICROBATCHES - 1 else nullcontext():
                (loss_of(model, step, slice(first, first + rows)) / MICROBATCHES).backward()
        finish(model)
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.grad_norm is not None:
            norms.append(float(optimizer.grad_norm))
    return norms, whole(model)


def whole(model: Any) -> dict[str, Tensor]:
    with model.unsharded() if isinstance(model, maingrad.FSDPModule) else nullcontext():
        return {name.removeprefix("module."): param.detach().clone() for name, param in model.named_parameters()}


def plain(make: Callable[[], nn.Module], loss_of: Callable[..., Tensor], **options: Any) -> Any:
    """One process, the whole batch, and no maingrad."""
    options = {**ADAMW, **options}
    max_norm, groups = options.pop("max_grad_norm", None), options.pop("param_groups", ())
    cls = options.pop("optimizer_class", torch.optim.AdamW)
    model = make()
    left = dict(model.named_parameters())
    split = []
    for group in groups:
        chosen = {name: param for name, param in left.items() if group["params"](name, param)}
        left = {name: param for name, param in left.items() if name not in chosen}
        split.append({**group, "params": list(chosen.values())})
    optimizer = cls([*split, {"params": list(left.values())}], **options)
    norms = []
    for step in range(STEPS):
        loss_of(model, step, slice(None)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if max_norm is None else max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if max_norm is not None:
            norms.append(float(norm))
    return norms, {name: param.detach() for name, param in model.named_parameters()}


def check_same(found: list[Any], wanted: Any) -> None:
    norms, params = wanted
    for each_norms, each in found:
        assert each_norms == pytest.approx(norms, rel=TOLERANCE)
        assert list(each) == list(params)
        for name, param in params.items():
            torch.testing.assert_close(
                each[name], param, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda said, n=name: n + said
            )


@pytest.mark.in_turn
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.sampled(12)
def test_every_form_trains_what_plain_pytorch_trains(model: str, ranks: int, form: str) -> None:
    """Clipping that takes effect, two groups, and two microbatches."""
    how = {**ADAMW, "max_grad_norm": 0.05, "param_groups": [NO_DECAY]}
    wanted = plain(*MODELS[model], **how)
    assert min(wanted[0]) > 0.05
    check_same(maingrad.simulate(train, ranks, *MODELS[model], form, optimizer=how), wanted)


@pytest.mark.in_turn
@pytest.mark.parametrize("form", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.sampled(6)
def test_recompute_changes_no_number_and_runs_each_block_twice(model: str, form: str) -> None:
    forwards: list[str] = []

    def watched() -> nn.Module:
        made = MODELS[model][0]()
        for name, module in made.named_modules():
            if name.endswith((".linear", ".q_proj")):  # no block's last product, before which a recomputation stops
                module.register_forward_hook(lambda *args, name=name: forwards.append(name))
        return made

    run = lambda **options: maingrad.simulate(train, 2, watched, MODELS[model][1], form, **options)  # noqa: E731
    kept = run()
    once = len(forwards)
    recomputed = run(recompute=True)
    assert len(forwards) - once == 2 * once
    check_same(recomputed, kept[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(5)
def test_sgd_without_clipping_and_unfused(form: str) -> None:
    how = {"optimizer_class": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
    wanted = plain(*MODELS["net"], **how)
    check_same(maingrad.simulate(train, 2, *MODELS["net"], form, optimizer=how, fuse=False), wanted)


def test_zero1_over_a_mesh_of_two_dims_is_a_hybrid() -> None:
    def hybrid(form: str) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        model = maingrad.parallelize(make_net(), "zero1", mesh=mesh)
        optimizer = maingrad.make_optimizer(model, **ADAMW)
        first = dist.get_rank() * 2
        for step in range(STEPS):
            net_loss(model, step, slice(first, first + 2)).backward()
            finish(model)
            optimizer.step()
            optimizer.zero_grad()
        return [], whole(model)

    check_same(maingrad.simulate(hybrid, 4, "zero1"), plain(*MODELS["net"]))


# ---- Dtypes. ----


@pytest.mark.in_turn
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(2)
def test_param_dtype_computes_in_bf16_over_fp32_masters(form: str) -> None:
    """Steps of a size that bf16 weights alone would round away."""

    def run() -> Any:
        torch.manual_seed(0)
        net = Net()
        seen: list[torch.dtype] = []
        net.head.register_forward_hook(lambda module, args, output: seen.extend([args[0].dtype, output.dtype]))
        net.head.weight.data.fill_(1.0)
        model = maingrad.parallelize(net, form, mesh=mesh_of(form), param_dtype=torch.bfloat16)
        optimizer = maingrad.make_optimizer(model, torch.optim.SGD, lr=2e-4)
        for _ in range(150):
            model(torch.ones(2, 8)).sum().backward()  # fp32 inputs
            finish(model)
            optimizer.step()
            optimizer.zero_grad()
        assert set(seen) == {torch.bfloat16}
        return whole(model)["head.weight"].float()

    for weight in maingrad.simulate(run, 2):
        assert (weight - 1).abs().max() > 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_has_fp32_shards(dtype: torch.dtype) -> None:
    """Also beside integers that nothing trains."""

    def run() -> Any:
        net = make_net().to(dtype)
        net.codes = nn.Parameter(torch.arange(4), requires_grad=False)
        model = maingrad.parallelize(net, "zero3")
        assert {param.dtype for param in model.parameters() if param.requires_grad} == {torch.float32}
        return model(torch.ones(2, 8, dtype=dtype)).dtype

    assert maingrad.simulate(run, 2) == [dtype] * 2


def test_ignored_parameters_keep_their_dtype() -> None:
    net = make_net().bfloat16()
    kept = net.head.weight
    once = iter([kept])  # as module.parameters(), which can be read once
    model = maingrad.parallelize(net, "zero3", mesh=maingrad.WORLD_OF_ONE, ignored_params=once)
    assert model.head.weight is kept and kept.dtype is torch.bfloat16
    assert model.scale.dtype is torch.float32


def with_codes() -> Net:
    """Blocks that are frozen in bf16, and integers that nothing trains, as of a base model with adapters."""
    net = make_net().float()
    net.blocks.bfloat16().requires_grad_(False)
    net.codes = nn.Parameter(torch.arange(4), requires_grad=False)
    return net


@pytest.mark.parametrize("form", ["zero1", "zero3"])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.sampled(4)
def test_what_is_frozen_keeps_its_dtype_and_integers_stay_integers(form: str, param_dtype: torch.dtype | None) -> None:
    model = maingrad.parallelize(
        with_codes(), form, units=[], mesh=maingrad.WORLD_OF_ONE, param_dtype=param_dtype, fuse=False
    )
    dtypes = {name.removeprefix("module."): param.dtype for name, param in model.named_parameters()}
    assert dtypes["codes"] is torch.int64
    assert dtypes["blocks.0.linear.weight"] is torch.bfloat16
    assert dtypes["scale"] is (param_dtype if form == "zero1" and param_dtype else torch.float32)


def test_parts_in_half_precision_need_a_name_for_the_dtype() -> None:
    net = make_net().float()
    net.head.bfloat16()
    with pytest.raises(ValueError, match=r"parameters have dtypes torch.bfloat16, torch.float32.*say param_dtype"):
        maingrad.parallelize(net, "zero3", mesh=maingrad.WORLD_OF_ONE)
    net = make_net().bfloat16()
    net.head.float().requires_grad_(False)
    with pytest.raises(ValueError, match="and trained ones in half precision would have no fp32 masters"):
        maingrad.parallelize(net, "zero3", mesh=maingrad.WORLD_OF_ONE)


# ---- Units. ----


def tiny(name: str, config: str, **sizes: Any) -> nn.Module:
    return getattr(transformers, name)(getattr(transformers, config)(**sizes))


def by_number() -> nn.Module:
    """As torchtitan writes layers."""
    model = Block()
    model.layers = nn.ModuleDict({str(number): Block() for number in range(3)})
    model.parts = nn.ModuleDict({"left": nn.Linear(8, 8)})
    return model


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "llama": (make_llama, ["model.layers.0", "model.layers.1"]),
    "gpt2": (
        lambda: tiny("GPT2LMHeadModel", "GPT2Config", vocab_size=32, n_embd=16, n_layer=2, n_head=2),
        ["transformer.h.0", "transformer.h.1"],
    ),
    "t5": (
        lambda: tiny(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=32,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
        ),
        ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    ),
    "torch's transformer": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24), 2, enable_nested_tensor=False),
        ["layers.0", "layers.1"],
    ),
    "layers by number": (by_number, ["layers.0", "layers.1", "layers.2"]),
    "a sequence": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), ["0", "2"]),
}


def units_in(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, maingrad.FSDPModule) and name]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.sampled(len(ARCHITECTURES))
def test_blocks_are_found_and_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, wanted = ARCHITECTURES[name]
    caplog.set_level(logging.INFO, "maingrad")
    model = maingrad.parallelize(make(), "zero3", mesh=maingrad.WORLD_OF_ONE)
    assert units_in(model) == wanted
    assert all(unit in caplog.text for unit in wanted)


def test_blocks_that_share_a_parameter_with_others_are_no_units() -> None:
    """Only a unit around both can shard it; what else such a block has is no reason."""
    net = make_net()
    mine = next(net.blocks[1].parameters())
    net.tied = nn.ParameterList([mine])
    maingrad.parallelize(net, "zero3", mesh=maingrad.WORLD_OF_ONE)
    assert len(list(net.blocks[1].parameters())) > 1
    assert units_in(net) == ["blocks.0", "blocks.2"]


def test_a_model_without_blocks_is_one_unit_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = maingrad.parallelize(Block(), "zero3", mesh=maingrad.WORLD_OF_ONE)
    assert units_in(model) == []
    assert "Block: no repeated blocks" in caplog.text


def test_where_nothing_is_gathered_blocks_are_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    for form in ("ddp", "zero1"):
        maingrad.parallelize(Block(), form, mesh=maingrad.WORLD_OF_ONE)
    assert not caplog.records


@pytest.mark.parametrize(
    "name",
    [lambda net: Block, lambda net: (Block,), lambda net: net.blocks, lambda net: iter([*net.blocks, net.blocks[0]])],
)
def test_units_named_by_hand(name: Callable[[Net], Any]) -> None:
    net = make_net()
    maingrad.parallelize(net, "zero3", mesh=maingrad.WORLD_OF_ONE, units=name(net))
    assert units_in(net) == ["blocks.0", "blocks.1", "blocks.2"]


def test_units_of_two_classes_come_from_the_inside_out() -> None:
    net = make_net()
    maingrad.parallelize(net, "zero3", mesh=maingrad.WORLD_OF_ONE, units=(Block, nn.Linear))
    inside = [f"blocks.{number}{part}" for number in range(3) for part in ("", ".linear")]
    assert units_in(net) == [*inside, "head"]
    net_loss(net, 0, slice(None)).backward()


def test_linear_layers_are_fused_unless_told_otherwise() -> None:
    for fuse in (True, False):
        model = maingrad.parallelize(make_net(), "ddp", mesh=maingrad.WORLD_OF_ONE, fuse=fuse)
        net_loss(model, 0, slice(None)).backward()
        written = {record.name for record in model.records if record.num_fused_writes}
        assert written == ({"head.weight", *(f"blocks.{n}.linear.weight" for n in range(3))} if fuse else set())


@pytest.mark.parametrize("form", ["ddp", "zero3"])
@pytest.mark.sampled(1)
def test_blocks_are_compiled(form: str) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    net = make_net()
    model = maingrad.parallelize(net, form, mesh=maingrad.WORLD_OF_ONE, compile={"backend": backend})
    loss = net_loss(model, 0, slice(None))
    assert graphs
    torch.testing.assert_close(loss, net_loss(make_net(), 0, slice(None)))


def test_a_block_that_is_recomputed_already_is_recomputed_once() -> None:
    """A model that a trainer has prepared is given to another one."""
    net = make_net()
    calls: list[int] = []
    net.blocks[0].norm.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        add_recompute(net, net.blocks)
    net_loss(net, 0, slice(None)).backward()
    assert len(calls) == 2
    with torch.no_grad():
        net_loss(net, 0, slice(None))
    assert len(calls) == 3


def test_foreach_takes_the_fused_kernels_place() -> None:
    model = maingrad.parallelize(make_net(), "zero3", mesh=maingrad.WORLD_OF_ONE)
    for given, expected in (({"foreach": True}, None), ({}, True), ({"fused": False}, False)):
        assert maingrad.make_optimizer(model, lr=0.1, **given).defaults["fused"] is expected


def test_a_step_clips_what_has_a_gradient() -> None:
    """A frozen layer's parameters are in no group; ``grad_norm`` is None before the first step."""
    model = maingrad.parallelize(make_net(), "zero3", mesh=maingrad.WORLD_OF_ONE)
    optimizer = maingrad.make_optimizer(model, torch.optim.SGD, lr=0.0, max_grad_norm=1e-3)
    assert optimizer.grad_norm is None
    net_loss(model, 0, slice(None)).backward()
    model.scale.grad = None
    grads = [param.grad.to_local().clone() for param in model.parameters() if param.grad is not None]
    optimizer.step()
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    torch.testing.assert_close(optimizer.grad_norm.to(norm), norm)
    clipped = [param.grad.to_local() for param in model.parameters() if param.grad is not None]
    for after, before in zip(clipped, grads, strict=True):
        torch.testing.assert_close(after, before * (1e-3 / (norm + 1e-6)), rtol=1e-6, atol=0)


def test_a_copy_of_a_recomputed_model_computes_with_its_own_weights() -> None:
    net = make_net()
    model = maingrad.parallelize(net, "ddp", mesh=maingrad.WORLD_OF_ONE, recompute=True, fuse=False)
    average = copy.deepcopy(model)
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    torch.testing.assert_close(net_loss(average, 0, slice(None)), net_loss(make_net(), 0, slice(None)))


# ---- What is refused. ----


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("fsdp",), "parallel is one of ddp, zero1, zero2, zero3, hsdp; got 'fsdp'"),
        (("hsdp",), '"hsdp" needs a mesh of two dims'),
        (("ddp", {"units": "all"}), 'units is "auto", a class, a tuple of classes'),
        (("ddp", {"units": [Block()]}), "units: Block is not in the model"),
        (("ddp", {"units": nn.Conv2d}), "the model has no Conv2d inside it; its classes are Block, LayerNorm, Linear"),
        (("ddp", {"units": (Block, nn.Conv2d)}), "the model has no Conv2d inside it"),
        (("ddp", {"units": Net}), "the model has no Net inside it"),
        (("ddp", {"units": [], "recompute": True}), "nothing to recompute or compile: name them, units=Block"),
        (("ddp", {"param_dtype": torch.int8}), "param_dtype is a floating-point dtype"),
        (("ddp", {"use_distributed_optimizer": True}), 'follows from the second argument of parallelize, "ddp"'),
        (("zero3", {"placements": "zero2"}), 'follows from the second argument of parallelize, "zero3"'),
        (("zero3", {"overlap_grad_reduce": True}), 'no option under "zero3"; it is one of ddp, zero1'),
        (("zero1", {"reshard_after_forward": True}), 'no option under "zero1"; it is one of zero2, zero3, hsdp'),
        (("zero3", {"bucket_size": 9, "num_buckets": 2}), 'num_buckets is no option under "zero3"'),
        (("ddp", {"bucket_size": 9, "shard_atoms": "row", "num_buckets": 2}), 'shard_atoms is no option under "ddp"'),
        (
            ("ddp", {"overlap_param_gather": True}),
            "overlap_param_gather has no effect without use_distributed_optimizer",
        ),
        (
            ("ddp", {"config": maingrad.DistributedDataParallelConfig(), "num_buckets": 2}),
            "config and num_buckets both",
        ),
        (
            ("zero1", {"config": maingrad.DistributedDataParallelConfig()}),
            "use_distributed_optimizer=False, which is not",
        ),
        (
            ("ddp", {"config": maingrad.DistributedDataParallelConfig(use_distributed_optimizer=True)}),
            "use_distributed_optimizer=True, which is not",
        ),
        (
            ("zero3", {"param_dtype": torch.bfloat16, "mixed_precision": maingrad.MixedPrecisionPolicy()}),
            "param_dtype and mixed_precision both name dtypes",
        ),
    ],
)
@pytest.mark.sampled(20)
def test_what_does_not_go_together_is_refused_before_the_model_changes(arguments: Any, said: str) -> None:
    form, options = (*arguments, {})[:2]
    net = make_net()
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        maingrad.parallelize(net, form, **{"mesh": maingrad.WORLD_OF_ONE, **options})
    assert {type(module) for module in net.modules()} == {Net, nn.ModuleList, Block, nn.LayerNorm, nn.Linear}


def test_a_mesh_of_two_dims_has_no_effect_under_ddp() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
        with pytest.raises(ValueError, match='"ddp" shards nothing'):
            maingrad.parallelize(make_net(), "ddp", mesh=mesh)
        with pytest.raises(ValueError, match='"hsdp" needs a mesh of two dims'):
            maingrad.parallelize(make_net(), "hsdp", mesh=mesh["outer"])

    maingrad.simulate(run, 2)


@pytest.mark.parametrize("form", ["ddp", "zero1", "zero3"])
def test_the_ranks_are_those_of_the_mesh(form: str) -> None:
    """Each rank alone: gradients are of its own rows."""

    def run() -> list[float]:
        losses = []
        for mesh in (maingrad.WORLD_OF_ONE, None):
            model = maingrad.parallelize(make_net(), form, mesh=mesh)
            optimizer = maingrad.make_optimizer(model, torch.optim.SGD, lr=0.1, max_grad_norm=1e9)
            net_loss(model, dist.get_rank(), slice(None)).backward()
            optimizer.step()
            losses.append(float(optimizer.grad_norm))
        return losses

    (first, both), (second, same) = maingrad.simulate(run, 2)
    assert abs(first - second) > 1e-3
    assert both == pytest.approx(same, rel=1e-6)


@pytest.mark.parametrize("form", ["ddp", "zero3"])
def test_a_model_is_wrapped_once(form: str) -> None:
    model = maingrad.parallelize(make_net(), form, mesh=maingrad.WORLD_OF_ONE)
    with pytest.raises(ValueError, match="already: give parallelize the plain model"):
        maingrad.parallelize(model, form, mesh=maingrad.WORLD_OF_ONE)


class OfTorch(nn.parallel.DistributedDataParallel):
    """Without the process group that torch's wrapper would need here."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def test_parts_of_a_model_are_wrapped_once_and_not_by_torch() -> None:
    alone = {"mesh": maingrad.WORLD_OF_ONE}
    with pytest.raises(ValueError, match="the model is a OfTorch already"):
        maingrad.parallelize(OfTorch(make_net()), "zero1", **alone)
    for form in ("ddp", "zero3"):
        net = make_net()
        net.blocks[1] = maingrad.parallelize(net.blocks[1], form, **alone, units=[])
        with pytest.raises(ValueError, match=r"module 'blocks\.1' is a \w+ already"):
            maingrad.parallelize(net, "zero1", **alone)


def test_the_whole_model_is_no_unit_of_its_own() -> None:
    net = make_net()
    with pytest.raises(ValueError, match="units: Net is the model itself; name modules inside Net"):
        maingrad.parallelize(net, "zero3", mesh=maingrad.WORLD_OF_ONE, units=[net.blocks[0], net])


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"parallelize takes an nn.Module, got str"):
        maingrad.parallelize("model", "ddp")
    net = make_net()
    for units in (3, [3], (Block, net.head), [Block]):  # a module beside classes would be left out
        with pytest.raises(TypeError, match="give a class, a tuple of classes, or modules"):
            maingrad.parallelize(net, "ddp", units=units)


# ---- The optimizer. ----


def test_an_optimizer_needs_a_wrapped_model() -> None:
    with pytest.raises(TypeError, match=r'Net is neither: model = maingrad.parallelize\(model, "zero1"\) first'):
        maingrad.make_optimizer(make_net(), torch.optim.AdamW)


@pytest.mark.parametrize("form", ["ddp", "zero3"])
@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm must be positive"),
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm must be positive"),
        ({"optimizer_class": "adamw"}, TypeError, "optimizer.class is a subclass of torch.optim.Optimizer"),
        ({"param_groups": [{"params": "*.weigth"}]}, ValueError, "no trainable parameter is called '\\*.weigth'"),
        ({"param_groups": [{"params": "*", "lrr": 1.0}]}, TypeError, "param_groups\\[0\\]: .*'lrr'"),
        ({"optimizer_class": Block}, TypeError, "optimizer.class is a subclass of torch.optim.Optimizer"),
        ({"param_groups": [{"params": "scale", "optimizer": torch.optim.SGD, "lrr": 1.0}]}, TypeError, "'lrr'"),
        ({"betaz": 1.0, "param_groups": [{"params": "scale", "optimizer": torch.optim.SGD}]}, TypeError, "'betaz'"),
    ],
)
@pytest.mark.sampled(16)
def test_options_of_the_optimizer_are_checked(
    form: str, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    model = maingrad.parallelize(make_net(), form, mesh=maingrad.WORLD_OF_ONE)
    with pytest.raises(error, match=said):
        maingrad.make_optimizer(model, **options)


@pytest.mark.in_turn
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(5)
def test_the_first_group_that_selects_a_parameter_has_it(form: str) -> None:
    """By name, by pattern, and by the shape of the whole: that of a shard differs between ranks."""
    square = {"params": lambda name, param: param.shape == (8, 8) or name == "scale", "lr": 0.2}
    by_name = {"params": lambda name, param: name.startswith("head") or name == "scale", "lr": 0.1}
    how = {"optimizer_class": torch.optim.SGD, "lr": 0.3, "weight_decay": 0.0}
    wanted = plain(*MODELS["net"], **how, param_groups=[by_name, square])
    ours = {**how, "param_groups": [{**by_name, "params": ["head.*", "scale"]}, square]}
    check_same(maingrad.simulate(train, 2, *MODELS["net"], form, optimizer=ours), wanted)


def test_groups_keep_their_order_with_the_rest_last() -> None:
    model = maingrad.parallelize(make_net(), "zero3", mesh=maingrad.WORLD_OF_ONE)
    groups = [{"params": "head.*", "lr": 1.0}, {"params": "*", "lr": 2.0}]
    optimizer = maingrad.make_optimizer(model, param_groups=groups, lr=3.0)
    assert [(group["lr"], len(group["params"])) for group in optimizer.param_groups] == [(1.0, 1), (2.0, 13), (3.0, 0)]


def test_clipping_comes_after_the_closure_of_a_step() -> None:
    model = maingrad.parallelize(make_net(), "zero3", mesh=maingrad.WORLD_OF_ONE)
    optimizer = maingrad.make_optimizer(model, torch.optim.SGD, lr=1.0, max_grad_norm=1e-3)
    before = whole(model)

    def closure() -> Tensor:
        loss = net_loss(model, 0, slice(None))
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    moved = torch.stack([(param - before[name]).norm() for name, param in whole(model).items()]).norm()
    assert float(moved) == pytest.approx(1e-3, rel=1e-3)
    assert float(optimizer.grad_norm) > 1e-2


@pytest.mark.parametrize("fused", [True, False])
def test_clipping_is_of_unscaled_gradients_under_torchs_grad_scaler(fused: bool) -> None:
    def run(scaled: bool) -> Any:
        model = maingrad.parallelize(make_net().float(), "zero3", mesh=maingrad.WORLD_OF_ONE)
        optimizer = maingrad.make_optimizer(model, torch.optim.SGD, lr=0.1, max_grad_norm=0.05, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))
        scaler.scale((model(x) - 1).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        return float(optimizer.grad_norm), whole(model)

    norm, params = run(scaled=False)
    assert norm > 0.05
    scaled_norm, scaled_params = run(scaled=True)
    assert scaled_norm == pytest.approx(norm, rel=1e-5)
    torch.testing.assert_close(scaled_params, params)
