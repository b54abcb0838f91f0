"""What ``parallelize`` hands on: to units and to the whole model, to ``compile``, and to the inputs of a forward."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import maingrad
from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, Muon
from maingrad.ddp.torch_grads.muon_groups import MuonGroups
from maingrad.fsdp import ShardedAdamW
from maingrad.fsdp.state.sharded_optimizer import ShardedOptimizer
from maingrad.launch import simulate
from maingrad.launch.parallelizing import parallelize as module_of_parallelize
from maingrad.launch.parallelizing.blocks import default_units, recompute
from maingrad.launch.parallelizing.exchanges import ulysses
from maingrad.launch.parallelizing.muon import with_whole_matrices

ALONE = maingrad.WORLD_OF_ONE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * self.scale)
        return x


def names(model: nn.Module, modules: Any) -> list[str]:
    by_id = {id(module): name for name, module in model.named_modules()}
    return [by_id[id(module)] for module in modules]


# ---- Blocks. ----


def test_a_block_that_stands_twice_in_a_list_is_one_unit():
    net = Net()
    net.blocks.append(net.blocks[0])
    assert names(net, default_units(net)) == ["blocks.0", "blocks.1"]
    net.more = nn.ModuleList([net.blocks[1], Block()])
    assert names(net, default_units(net)) == ["blocks.0", "blocks.1", "more.1"], "nor in two lists"


def test_members_without_a_forward_or_parameters_are_no_units():
    net = Net()
    net.inner = nn.ModuleList([nn.ModuleList([Block()]), nn.Tanh(), Block()])
    net.empty, net.named = nn.ModuleDict(), nn.ModuleDict({"a": Block(), "1": Block()})
    assert names(net, default_units(net)) == ["blocks.0", "blocks.1", "inner.2"]
    net.named = nn.ModuleDict({"1": Block(), "5": Block()})
    assert names(net, default_units(net)) == ["blocks.0", "blocks.1", "inner.2", "named.1", "named.5"], "by numbers"


def test_an_empty_list_hides_no_sequence():
    model = nn.Sequential(Block(), Block())
    model.register_module("none", nn.ModuleDict())
    assert names(model, default_units(model)) == ["0", "1"]


def test_lists_inside_of_blocks_are_no_lists_of_blocks():
    net = Net()
    for block in net.blocks:
        block.experts = nn.ModuleList([Block(), Block()])
    net.steps = nn.Sequential(Block())
    assert names(net, default_units(net)) == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize("how", [True, {"backend": "eager", "fullgraph": True}])
def test_units_are_compiled_as_is_said(how: Any, monkeypatch: pytest.MonkeyPatch):
    compiled: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: compiled.append((module, options)))
    net = Net()
    maingrad.parallelize(net, "ddp", mesh=ALONE, compile=how)
    assert compiled == [(block, {} if how is True else how) for block in net.blocks]
    with pytest.raises(ValueError, match=r"Block has no repeated blocks .* nothing to recompute or compile"):
        maingrad.parallelize(Block(), "ddp", mesh=ALONE, compile=how)


@pytest.mark.parametrize("name", ["activation_checkpointing_enable", "gradient_checkpointing_enable"])
def test_a_model_that_recomputes_its_layers_itself_is_told_to(name: str):
    """By the name that its version of transformers has; reentrant checkpoints would run backwards in backwards."""
    told: list[Any] = []
    net = Net()
    net.supports_gradient_checkpointing = True
    net.gradient_checkpointing_enable = lambda how: told.append("the older name")
    setattr(net, name, told.append)
    forwards = [block.forward for block in net.blocks]
    maingrad.parallelize(net, "ddp", mesh=ALONE, recompute=True)
    assert told == [{"use_reentrant": False}]
    assert [block.forward for block in net.blocks] == forwards


def test_a_recomputed_module_passes_on_how_it_is_to_be():
    entered: list[str] = []

    class Entered(nullcontext):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

    block = Block()
    recompute(block, context_fn=lambda: (Entered("forward"), Entered("recomputation")))
    block(torch.rand(2, 4)).sum().backward()
    assert entered == ["forward", "recomputation"]


# ---- Options of units and of the whole model. ----


def test_units_and_the_whole_model_get_what_is_theirs(monkeypatch: pytest.MonkeyPatch):
    """The outermost unit stays gathered; gathers by copy engines are an option of the whole model."""
    given: list[tuple[nn.Module, dict[str, Any]]] = []
    shard = module_of_parallelize.fully_shard

    def watched(module: nn.Module, mesh: Any, placements: Any, **options: Any) -> Any:
        given.append((module, {**options, "placements": placements}))
        return shard(module, mesh, placements, **{k: v for k, v in options.items() if k != "copy_engine_gather"})

    monkeypatch.setattr(module_of_parallelize, "fully_shard", watched)
    net = Net()
    options = {"reshard_after_forward": False, "copy_engine_gather": True, "bucket_size": 10}
    ignored = [net.scale]
    maingrad.parallelize(net, "zero2", mesh=ALONE, ignored_params=iter(ignored), **options)
    assert names(net, (module for module, _ in given)) == ["blocks.0", "blocks.1", ""]
    for module, found in given:
        assert found["ignored_params"] == ignored and found["placements"] == "zero2" and found["bucket_size"] == 10
        assert ("reshard_after_forward" in found) is (module is not net)
        assert ("copy_engine_gather" in found) is (module is net)


@pytest.mark.parametrize("form", ["ddp", "zero1"])
def test_reductions_overlap_unless_they_are_told_not_to(form: str):
    config = maingrad.parallelize(Net(), form, mesh=ALONE).ddp_config
    assert (config.overlap_grad_reduce, config.overlap_param_gather) == (True, form == "zero1")
    config = maingrad.parallelize(Net(), form, mesh=ALONE, overlap_grad_reduce=False, bucket_size=7).ddp_config
    assert (config.overlap_grad_reduce, config.bucket_size) == (False, 7)
    own = DistributedDataParallelConfig(use_distributed_optimizer=form == "zero1", bucket_size=9)
    assert maingrad.parallelize(Net(), form, mesh=ALONE, config=own).ddp_config.bucket_size == 9


def test_floating_point_inputs_are_cast_by_name_and_place_and_others_are_not():
    seen: list[torch.dtype] = []

    class Takes(Net):
        def forward(self, x: Tensor, index: Tensor, *, more: Tensor, inside: list[Tensor]) -> Tensor:
            seen.extend(each.dtype for each in (x, index, more, inside[0]))
            return super().forward(x)

    model = maingrad.parallelize(Takes(), "ddp", mesh=ALONE, param_dtype=torch.bfloat16)
    model(torch.rand(2, 4), torch.arange(2), more=torch.rand(2), inside=[torch.rand(1, dtype=torch.float64)])
    assert seen == [torch.bfloat16, torch.int64, torch.bfloat16, torch.bfloat16]
    assert all(param.dtype is torch.bfloat16 for param in model.parameters())


@pytest.mark.parametrize("form", ["ddp", "zero1"])
def test_what_a_hook_of_before_returns_is_cast_too(form: str):
    """It sees the inputs as they come, and what it makes of them is computed in ``param_dtype``."""
    net, seen = Net(), list[torch.dtype]()

    def double(module: nn.Module, args: tuple[Tensor]) -> Tensor:
        seen.append(args[0].dtype)
        return args[0].double() * 2

    net.register_forward_pre_hook(double)
    model = maingrad.parallelize(net, form, mesh=ALONE, param_dtype=torch.bfloat16)
    x = torch.rand(2, 4)
    assert model(x).dtype is torch.bfloat16 and seen == [torch.float32]


@pytest.mark.parametrize("form", ["zero2", "zero3"])
def test_a_policy_of_the_users_own_leaves_parameters_in_their_dtypes(form: str):
    policy = maingrad.MixedPrecisionPolicy(param_dtype=torch.float16)
    model = maingrad.parallelize(Net().bfloat16(), form, mesh=ALONE, mixed_precision=policy)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert model(torch.rand(2, 4)).dtype is torch.float16


@pytest.mark.parametrize("form", ["ddp", "zero1"])
def test_the_wrapper_gets_the_arguments_that_are_its_own(form: str, monkeypatch: pytest.MonkeyPatch):
    given: dict[str, Any] = {}

    class Watched(DistributedDataParallel):
        def __init__(self, module: nn.Module, **arguments: Any) -> None:
            given.update(arguments)
            super().__init__(module, **arguments)

    monkeypatch.setattr(module_of_parallelize, "DistributedDataParallel", Watched)
    order = [
        "blocks.1.linear.bias",
        "blocks.1.linear.weight",
        "blocks.0.linear.bias",
        "blocks.0.linear.weight",
        "scale",
    ]
    own = {"backward_order": order, "init_sync": False, "expert_process_group": ALONE}
    net = Net()
    net.scale.allreduce = False  # type: ignore[attr-defined]  # an expert's
    maingrad.parallelize(net, form, mesh=ALONE, **own, bucket_size=7)
    assert {name: value for name, value in given.items() if name in own} == own
    assert given["process_group"] is ALONE and given["config"].bucket_size == 7
    assert set(given) == {*own, "process_group", "config"}


def llama(**options: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=32, use_cache=False, **sizes, **options)
    return transformers.LlamaForCausalLM(config).train()


def test_the_loss_of_a_language_model_inside_of_a_model_is_fused():
    """One of two may be such that it cannot be. The mode of the head is the one that is said."""
    for modes in (True, "recompute", "in_forward"):
        models = nn.ModuleDict({"own": llama(), "inner": llama()})
        models["own"].forward = models["own"].forward  # this one's loss stays as it is
        maingrad.parallelize(models, "ddp", mesh=ALONE, units=[], fused_loss=modes)
        assert models["inner"].lm_head.mode == ("recompute" if modes is True else modes)
        assert not isinstance(models["own"].lm_head, type(models["inner"].lm_head))


def test_a_fused_loss_needs_a_head_that_is_fused():
    with pytest.raises(ValueError, match="fused_loss needs fuse=True"):
        maingrad.parallelize(Net(), "ddp", mesh=ALONE, fused_loss=True, fuse=False)
    with pytest.raises(ValueError, match="fused_loss has no effect: Net has no language model of Hugging Face"):
        maingrad.parallelize(Net(), "ddp", mesh=ALONE, fused_loss="recompute")
    own = llama()
    own.forward = own.forward
    with pytest.raises(ValueError, match=r"fused_loss has no effect: .*forward"):
        maingrad.parallelize(own, "ddp", mesh=ALONE, fused_loss=True)
    tokens = torch.arange(12).view(2, 6)
    losses = []
    for fused_loss in (False, True):
        model = maingrad.parallelize(llama(), "ddp", mesh=ALONE, fused_loss=fused_loss)
        outputs = model(input_ids=tokens, labels=tokens)
        assert (type(outputs.logits) is not Tensor) is fused_loss, "the logits are computed if they are read"
        losses.append(float(outputs.loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_matrices_of_muon_are_whole_beside_those_that_are_named():
    muon = MuonGroups([{"params": ["a.weight"]}], {})
    sharded = DistributedDataParallelConfig(use_distributed_optimizer=True, keep_matrices_whole=("b.*",))
    assert set(with_whole_matrices(sharded, muon).keep_matrices_whole) == {"a.weight", "b.*"}
    for config in (
        DistributedDataParallelConfig(),
        DistributedDataParallelConfig(use_distributed_optimizer=True, keep_params_whole=True),
    ):
        assert with_whole_matrices(config, muon) is config


# ---- The optimizer, graphs, and a rank alone. ----


def test_what_is_no_option_over_shards_is_refused():
    model = maingrad.parallelize(Net(), "zero3", mesh=ALONE)
    with pytest.raises(TypeError, match=r"skip_nonfinite=\.\.\.\) is for models under DistributedDataParallel"):
        maingrad.make_optimizer(model, skip_nonfinite=True)
    groups = [{"params": "scale", "optimizer": torch.optim.SGD}]
    with pytest.raises(ValueError, match=r"are for Adam and AdamW over a sharded model, .* a group has SGD"):
        maingrad.make_optimizer(model, param_groups=groups, state="compact")
    with pytest.raises(TypeError, match=r"graphed takes the model that parallelize\(\)"):
        maingrad.graphed(lambda: None, Net(), maingrad.make_optimizer(model))


@pytest.mark.parametrize(
    ("form", "cls", "moments"),
    [
        ({}, torch.optim.AdamW, torch.float32),
        ({"state": "compact"}, ShardedAdamW, torch.bfloat16),
        ({"state": "compact", "moment_dtype": torch.uint8}, ShardedAdamW, torch.uint8),
        ({"state": "compact", "moment_dtype": torch.float32}, ShardedAdamW, torch.float32),
        ({"offload_state": "host"}, ShardedAdamW, torch.float32),
    ],
)
def test_the_form_of_state_over_shards(form: dict[str, Any], cls: type, moments: torch.dtype):
    """Options of the class stay beside it; and state dicts have state of whole parameters in their order."""
    net = Net().bfloat16() if "state" in form else Net()
    net.blocks[0].linear.bias.requires_grad_(False)
    policy = maingrad.MixedPrecisionPolicy()
    model = maingrad.parallelize(net, "zero3", mesh=ALONE, mixed_precision=policy)
    optimizer = maingrad.make_optimizer(model, lr=0.1, betas=(0.8, 0.9), **form)
    assert type(optimizer) is cls
    (group,) = (group for group in optimizer.param_groups if group["params"])
    assert (group["lr"], group["betas"]) == (0.1, (0.8, 0.9))
    assert [id(param) for param in group["params"]] == [id(p) for p in model.parameters() if p.requires_grad]
    model(torch.rand(2, 4, dtype=net.scale.dtype)).sum().backward()
    optimizer.step()
    (found,) = {state["exp_avg"].dtype for state in optimizer.state.values()}
    assert found is moments
    saved = optimizer.state_dict()["state"]
    assert [tuple(saved[index]["exp_avg"].shape) for index in range(4)] == [(4,), (4, 4), (4, 4), (4,)]


def test_state_dicts_of_optimizers_over_shards_are_of_whole_parameters():
    """From the first on: Adagrad has state before it steps."""

    def shapes() -> list[tuple[int, ...]]:
        model = maingrad.parallelize(Net(), "zero3")
        before = maingrad.make_optimizer(model, torch.optim.Adagrad, lr=0.1).state_dict()["state"]
        assert all(isinstance(before[index]["sum"], DTensor) for index in range(5))
        optimizer = maingrad.make_optimizer(model, lr=0.1)
        model(torch.rand(2, 4)).sum().backward()
        optimizer.step()
        saved = optimizer.state_dict()["state"]
        return [tuple(saved[index]["exp_avg"].shape) for index in range(5)]

    assert maingrad.simulate(shapes, 2) == [[(4,), (4, 4), (4,), (4, 4), (4,)]] * 2


def test_each_group_over_shards_has_its_class():
    def steps(sharded: bool) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        groups = [{"params": "1.weight", "optimizer": torch.optim.SGD, "lr": 0.5}]
        if sharded:
            model = maingrad.parallelize(net, "zero3", mesh=ALONE, units=[])
            optimizers = [maingrad.make_optimizer(model, lr=0.01, param_groups=groups)]
        else:
            model = net
            first, second = net.parameters()
            optimizers = [torch.optim.AdamW([first], lr=0.01), torch.optim.SGD([second], lr=0.5)]
        for _ in range(2):
            model(torch.ones(2, 4)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with model.unsharded() if sharded else nullcontext():
            return optimizers[0], [param.detach().clone() for param in model.parameters()]

    (optimizer, found), (_, expected) = steps(sharded=True), steps(sharded=False)
    torch.testing.assert_close(found, expected)
    assert not any("optimizer" in group for group in optimizer.param_groups)
    matrices = maingrad.parallelize(nn.Sequential(nn.Linear(4, 4, bias=False)), "zero3", mesh=ALONE)
    with pytest.raises(ValueError, match="a group has Muon"):
        maingrad.make_optimizer(matrices, Muon, lr=0.1, offload_state="host")
    optimizer = maingrad.make_optimizer(matrices, Muon, lr=0.1)
    assert isinstance(optimizer, ShardedOptimizer)


@pytest.mark.parametrize("form", ["zero1", "zero3"])
def test_a_step_on_a_cpu_stays_what_it_is(form: str):
    model = maingrad.parallelize(Net(), form, mesh=ALONE)
    optimizer = maingrad.make_optimizer(model, torch.optim.SGD, lr=0.1)
    calls: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        calls.append(x)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    graphed = maingrad.graphed(step, model, optimizer)
    losses = [graphed(torch.ones(2, 4)).item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 5
    assert len(calls) == 5, "no operation is recorded for replays"


def test_a_step_is_captured_after_two_calls_of_its_kind_for_as_many_kinds_as_are_said():
    """Operations are recorded in place of a graph."""
    model = maingrad.parallelize(Net(), "zero1", mesh=ALONE)
    optimizer = maingrad.make_optimizer(model, torch.optim.SGD, lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    graphed = maingrad.graphed(step, model, optimizer, max_graphs=1, record_on_cpu=True)
    counts = []
    for rows in (2, 2, 2, 2, 3, 3, 3, 3):
        graphed(torch.ones(rows, 4))
        counts.append(graphed.num_graphs)
    assert counts == [0, 0, 1, 1, 1, 1, 1, 1] and graphed.why_eager is None


@pytest.mark.parametrize("form", ["zero1", "zero3"])
def test_a_step_that_cannot_be_captured_stays_eager_and_says_why(form: str):
    model = maingrad.parallelize(Net(), form, mesh=ALONE)
    other = maingrad.parallelize(Net(), form, mesh=ALONE)
    optimizer = maingrad.make_optimizer(other, torch.optim.SGD, lr=0.1)
    graphed = maingrad.graphed(lambda x: model(x), model, optimizer, record_on_cpu=True)
    assert graphed.why_eager is not None and "optimizer" in graphed.why_eager
    assert graphed(torch.ones(2, 4)).shape == (2, 4)
    stock = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert maingrad.graphed(lambda x: model(x), model, stock, record_on_cpu=True).why_eager is not None


def test_a_rank_alone_exchanges_nothing():
    x = torch.rand(1, 2, 3, 4)
    assert ulysses(lambda q, k, v: q + k + v, x, x, x, None).equal(3 * x)


def test_groups_over_shards_are_chosen_by_whole_parameters():
    """By name, shape and dtype of the whole, though this rank has a part of it, or none."""
    shapes = {name: tuple(param.shape) for name, param in Net().named_parameters()}

    def grouped() -> tuple[dict[str, Any], list[tuple[float, int]]]:
        seen: dict[str, Any] = {}

        def matrices(name: str, param: Tensor) -> bool:
            seen[name] = tuple(param.shape)
            return param.ndim == 2

        model = maingrad.parallelize(Net(), "zero3")
        groups = [{"params": matrices, "weight_decay": 0.5}]
        made = maingrad.make_optimizer(model, torch.optim.AdamW, weight_decay=0.0, param_groups=groups)
        return seen, [(group["weight_decay"], len(group["params"])) for group in made.param_groups]

    assert simulate(grouped, 2) == [(shapes, [(0.5, 2), (0.0, 3)])] * 2
