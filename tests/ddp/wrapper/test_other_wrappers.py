"""Two wrappers over one model, ours and torch's or ours twice: refused with both names, in either order."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from loops import assert_same, make_model, weights
from stock_fsdp2 import Unit, counted_writes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as shard_by_torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel
from maingrad.ddp.contract import torch_wrappers
from maingrad.ddp.contract.grouped_wgrad import GroupedWgrad
from maingrad.ddp.contract.module import is_sharded
from maingrad.ddp.contract.target import choose_target
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.launch.simulation.simulate import SimulatedRankError
from maingrad.te_integration import Linear, WgradQueue, delayed_wgrad


def batch() -> Tensor:
    return torch.ones(3, 8)


def even_model() -> nn.Sequential:
    """Shards have one shape on both ranks, so that torch's wrapper finds nothing odd in them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))


def inside(model: nn.Sequential, wrap: Callable[[Any], Any]) -> nn.Sequential:
    model[0] = wrap(model[0])
    return model


def torch_over(module: nn.Module) -> None:
    TorchDDP(module)


def trained_by_torch(module: nn.Module) -> None:
    wrapper = DistributedDataParallel(module)
    prepared = TorchDDP(module)
    prepared(batch()).sum().backward()
    wrapper.finish_grad_sync()


def sharded_by_torch_after(module: nn.Module, *, part: Callable[[DistributedDataParallel], nn.Module]) -> None:
    wrapper = DistributedDataParallel(module)
    shard_by_torch(part(wrapper))
    wrapper(batch()).sum().backward()


OURS = "around a model in maingrad.ddp.DistributedDataParallel"
UNIT = "of maingrad.fsdp.fully_shard"
DTENSOR = r"parameter '1.\w+' was made a DTensor after wrapping \(torch's fully_shard"

REFUSED: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "torch's DDP over ours": (lambda m: torch_over(DistributedDataParallel(m)), f"DistributedDataParallel {OURS}"),
    "torch's DDP over ours inside": (
        lambda m: torch_over(inside(m, DistributedDataParallel)),
        f"DistributedDataParallel {OURS}",
    ),
    "torch's DDP over units": (lambda m: torch_over(fully_shard(m)), f"DistributedDataParallel around .*{UNIT}"),
    "torch's DDP over a unit inside": (
        lambda m: torch_over(inside(m, fully_shard)),
        f"DistributedDataParallel around .*{UNIT}",
    ),
    "torch's DDP over a frozen unit inside": (
        lambda m: torch_over(inside(m, lambda part: fully_shard(part.requires_grad_(False)))),
        f"DistributedDataParallel around .*{UNIT}",
    ),
    "torch's DDP beside ours": (
        trained_by_torch,
        "past torch's Python functions|put into .grad by hand",
    ),
    "ours over torch's DDP": (
        lambda m: DistributedDataParallel(TorchDDP(m)),
        r"the module is wrapped in torch.nn.parallel.DistributedDataParallel already.*\.module",
    ),
    "ours over torch's DDP inside": (
        lambda m: DistributedDataParallel(inside(m, TorchDDP)),
        "module '0' is wrapped in torch.nn.parallel.DistributedDataParallel already",
    ),
    "units over torch's DDP": (
        lambda m: fully_shard(TorchDDP(m)),
        "the module is wrapped in torch's DistributedDataParallel already",
    ),
    "torch's fully_shard over ours": (
        lambda m: sharded_by_torch_after(m, part=lambda wrapper: wrapper),
        DTENSOR,
    ),
    "torch's fully_shard within ours": (
        lambda m: sharded_by_torch_after(m, part=lambda wrapper: wrapper.module),
        DTENSOR,
    ),
    "torch's fully_shard over units": (
        lambda m: shard_by_torch(fully_shard(m)),
        "'0.weight'.*is sharded",
    ),
    "torch's fully_shard over a unit inside": (
        lambda m: shard_by_torch(inside(m, fully_shard)),
        "'weight'.*is sharded",
    ),
    "ours over torch's fully_shard": (
        lambda m: DistributedDataParallel(shard_by_torch(m)),
        r"'0.weight' is a DTensor \(torch.distributed.fsdp.fully_shard",
    ),
    "units over torch's fully_shard": (
        lambda m: fully_shard(shard_by_torch(m)),
        r"'0.weight' is a DTensor \(torch.distributed.fsdp.fully_shard",
    ),
    "ours over ours": (
        lambda m: DistributedDataParallel(DistributedDataParallel(m)),
        r"'module.[01].weight' already has a main_grad.*unwrap\(\)",
    ),
    "ours over ours inside": (
        lambda m: DistributedDataParallel(inside(m, DistributedDataParallel)),
        r"'0.module.weight' already has a main_grad.*unwrap\(\)",
    ),
    "units over ours": (
        lambda m: fully_shard(DistributedDataParallel(m)),
        r"'module.0.weight' already has a main_grad.*unwrap\(\)",
    ),
    "ours over units": (
        lambda m: DistributedDataParallel(fully_shard(m)),
        r"'0.weight' is sharded \(maingrad.fsdp.fully_shard\)",
    ),
    "ours over a unit inside": (
        lambda m: DistributedDataParallel(inside(m, fully_shard)),
        r"'0.weight' is sharded \(maingrad.fsdp.fully_shard\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_two_wrappers_of_one_model_are_refused_by_name(case: str) -> None:
    combine, message = REFUSED[case]
    with pytest.raises(SimulatedRankError) as raised:
        simulate(lambda: combine(even_model()), 2)
    assert isinstance(raised.value.__cause__, ValueError | RuntimeError)
    raised.match(message)


def shards_survive(outermost: bool) -> None:
    """torch's wrapper copies the first rank's parameters to all others when it is made: here they are shards."""
    model: Any = even_model()
    whole = weights(model)
    units: Any = fully_shard(model if outermost else model[0])
    with pytest.raises(ValueError, match=r"leave it away.*accelerate"):
        TorchDDP(model)
    with units.unsharded():
        assert_same(weights(model), whole)


@pytest.mark.parametrize("outermost", [True, False])
def test_torch_has_copied_nothing_by_then(outermost: bool) -> None:
    simulate(shards_survive, 2, outermost)


class WithoutNames(nn.Module):
    """Hides its parameters from ``named_parameters``: torch's wrapper is refused in the first forward only."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def entered(wrap: Callable[[nn.Module], nn.Module], trains: bool) -> None:
    """As if torch's wrapper had collected parameters in another way."""
    inner = wrap(even_model())
    model = WithoutNames(inner)
    taken = list(model.parameters())
    wrapper = TorchDDP(nn.Sequential(nn.Linear(8, 8), nn.Identity()))
    wrapper._module_parameters += taken
    wrapper.module[1] = model
    with torch.set_grad_enabled(trains), pytest.raises(RuntimeError, match="which has its ranks already"):
        wrapper(batch())


@pytest.mark.parametrize(
    ("wrap", "trains"), [(DistributedDataParallel, True), (fully_shard, True), (fully_shard, False)]
)
def test_the_first_forward_finds_what_construction_has_missed(
    wrap: Callable[[nn.Module], nn.Module], trains: bool
) -> None:
    run_ranks(entered, 2, wrap, trains)  # torch knows one active wrapper in a process


def ignoring(wrap: Callable[[nn.Module], Any]) -> tuple[list[Tensor], list[Tensor]]:
    """torch's wrapper may have the rest of a model, where it is told to leave ours alone."""
    model = inside(even_model(), wrap)
    names = [name for name, _ in model.named_parameters() if name.startswith("0.")]
    TorchDDP._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapper = TorchDDP(model)
    wrapper(torch.full((3, 8), float(torch.distributed.get_rank()))).sum().backward()
    model[0].finish_grad_sync()
    ours = [param.main_grad if hasattr(param, "main_grad") else param.grad for param in model[0].parameters()]
    return [grad.detach().clone() for grad in ours], [model[1].weight.grad]


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_torch_may_have_the_rest_of_a_model(wrap: Callable[[nn.Module], Any]) -> None:
    (ours, theirs), (also_ours, also_theirs) = simulate(ignoring, 2, wrap)
    assert torch.equal(theirs[0], also_theirs[0])
    assert theirs[0].any()
    if wrap is DistributedDataParallel:
        assert torch.equal(ours[0], also_ours[0])
    mine = ours[0].to_local() if wrap is fully_shard else ours[0]
    assert mine.any()


def test_naming_parameters_works_in_compiled_code() -> None:
    ddp = DistributedDataParallel(make_model())

    @torch.compile(backend="eager", fullgraph=True)
    def total() -> Tensor:
        return sum(param.detach().sum() for _, param in ddp.named_parameters())

    expected = sum(param.detach().sum() for param in ddp.module.parameters())
    torch.testing.assert_close(total(), expected)


def test_fused_products_add_to_what_torchs_fully_shard_sums() -> None:
    """From the second microbatch on. It would not reduce what is delayed."""

    def on_each_rank() -> list[bool]:
        torch.manual_seed(0)
        layer, twin = Linear(4, 4, bias=False, fuse_wgrad_accumulation=True), nn.Linear(4, 4, bias=False)
        twin.load_state_dict(layer.state_dict())
        models = [shard_by_torch(Unit(each)) for each in (layer, twin)]
        x = torch.linspace(-1, 1, 12).view(3, 4) * (1 + dist.get_rank())
        with counted_writes() as written:
            for model in models:
                for microbatch in range(3):
                    model.set_requires_gradient_sync(microbatch == 2)
                    model(x + microbatch).square().sum().backward()
        torch.testing.assert_close(*(model.module.weight.grad.full_tensor() for model in models))
        assert all(is_sharded(model.module.weight) for model in models)
        queue = WgradQueue()
        message = r"a delayed weight gradient under torch\.distributed\.fsdp\.fully_shard"
        with delayed_wgrad(queue), pytest.raises(RuntimeError, match=message):
            models[0](x)
        assert len(queue) == 0
        return written

    assert simulate(on_each_rank, 1) == [[False] * 2]


def delayed_under_torch(ignored: bool, reentrant: bool) -> None:
    model = nn.Sequential(Linear(4, 4, bias=False, delay_wgrad_compute=True), nn.Linear(4, 4))
    if ignored:
        TorchDDP._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    x = torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()  # it has delayed before, where nobody reduces
    model[0].backward_dw()
    model.zero_grad()
    wrapper = TorchDDP(model)
    if reentrant:
        plain = model[0].forward
        model[0].forward = lambda x: checkpoint(plain, x, use_reentrant=True)
    refused = (
        nullcontext() if ignored else pytest.raises(RuntimeError, match=r"a delayed weight gradient under torch\.nn\.")
    )
    with refused:
        wrapper(x).sum().backward()
    assert model[0].weight.grad is None
    if ignored:
        model[0].backward_dw()
        assert model[0].weight.grad.any()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("ignored", [False, True])
def test_torchs_wrapper_reduces_nothing_that_is_delayed(ignored: bool, reentrant: bool) -> None:
    """Refused, unless torch's wrapper was told to leave the parameter alone."""
    simulate(delayed_under_torch, 1, ignored, reentrant)


def delayed_beside_torch(gone: bool) -> None:
    """An evaluation under torch's wrapper, then training with a reentrant recompute, without torch's wrapper."""
    layer = Linear(4, 4, bias=False, delay_wgrad_compute=True)
    wrapper = TorchDDP(layer)
    x = torch.ones(2, 4, requires_grad=True)
    with torch.no_grad():
        wrapper(x)
    layer(x).sum().backward()  # no recompute
    layer.backward_dw()
    layer.zero_grad()
    if gone:
        reference = weakref.ref(wrapper)
        del wrapper
        gc.collect()
        assert reference() is None
    with nullcontext() if gone else pytest.raises(RuntimeError, match="a delayed weight gradient under torch"):
        checkpoint(layer, x, use_reentrant=True).sum().backward()
        layer.backward_dw()
        assert layer.weight.grad.tolist() == [[2] * 4] * 4


@pytest.mark.in_turn
@pytest.mark.parametrize("gone", [False, True])
def test_a_wrapper_of_torch_that_is_gone_reduces_nothing(gone: bool) -> None:
    simulate(delayed_beside_torch, 1, gone)


def test_a_parameter_that_was_sharded_in_another_module_is_refused() -> None:
    def on_each_rank() -> None:
        holder = nn.ParameterList([fully_shard(nn.Linear(4, 4, bias=False)).weight])
        with pytest.raises(ValueError, match=r"parameter '0' is sharded \(maingrad\.fsdp\.fully_shard\)"):
            DistributedDataParallel(holder)

    simulate(on_each_rank, 2)


def a_torch_wrapper() -> TorchDDP:
    return TorchDDP.__new__(TorchDDP)


@pytest.mark.parametrize(("depth", "found"), [(0, True), (2, True), (3, False)])
def test_torchs_constructor_is_found_behind_a_method_and_a_comprehension(depth: int, found: bool) -> None:
    """The names of parameters are asked for in a frame of its own, whose ``self`` may be another object."""
    wrapper = a_torch_wrapper()
    frame: Any = SimpleNamespace(f_locals={"self": wrapper}, f_back=None)
    for number in range(depth):
        frame = SimpleNamespace(f_locals={"self": "another"} if number else {}, f_back=frame)
    assert torch_wrappers._wrapper_of(frame) is (wrapper if found else None)


@pytest.mark.parametrize(("taken", "refused"), [("none yet", True), ("others", False), ("these", True)])
def test_torchs_wrapper_is_refused_around_what_it_takes(
    taken: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its constructor has not said what it takes, that is anything."""
    param, wrapper = nn.Parameter(torch.ones(1)), a_torch_wrapper()
    params = {"none yet": None, "others": [nn.Parameter(torch.ones(1))], "these": [param]}[taken]
    monkeypatch.setattr(torch_wrappers, "active_torch_ddp", lambda: wrapper)
    monkeypatch.setattr(torch_wrappers, "params_of_torch_ddp", lambda _: params)
    for check in (
        lambda: torch_wrappers.check_not_inside([param], "ours"),
        lambda: torch_wrappers.refuse_delay("layer", param),
    ):
        with pytest.raises(RuntimeError, match=r"torch\.nn\.parallel\.D") if refused else nullcontext():
            check()


def test_the_wrapper_of_the_last_forward_counts_in_a_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, wrapper = nn.Linear(1, 1), a_torch_wrapper()
    monkeypatch.setattr(torch_wrappers, "active_torch_ddp", lambda: wrapper)
    monkeypatch.setattr(torch_wrappers, "params_of_torch_ddp", lambda _: None)
    monkeypatch.setattr(torch_wrappers, "current_backward", lambda: 1)
    torch_wrappers.record_without_grad(layer, [])
    wrapper = a_torch_wrapper()
    gc.collect()
    torch_wrappers.refuse_delay_in_recompute(layer, lambda: "layer")  # the first one is gone
    torch_wrappers.record_without_grad(layer, [])
    with pytest.raises(RuntimeError, match="layer: a delayed weight gradient under torch"):
        torch_wrappers.refuse_delay_in_recompute(layer, lambda: "layer")


@pytest.mark.parametrize("gathered", [(0,), (0, 1), ()])
def test_weights_that_torch_has_gathered_are_written_where_it_sums(
    gathered: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others of the same product have an accumulator of their own."""
    weights = [nn.Parameter(torch.zeros(2, 2)) for _ in range(2)]
    sums = torch.ones(2, 2)
    shards: Any = SimpleNamespace(accumulator=lambda weight: sums)
    for number, weight in enumerate(weights):
        if number not in gathered:
            weight.main_grad = torch.zeros(2, 2)
    monkeypatch.setattr(
        torch_wrappers.TorchShards, "of", lambda weight: shards if any(weight is weights[n] for n in gathered) else None
    )
    target = choose_target(weights, ["one", "two"], GroupedWgrad(weights), "layer", fused=True, queue=None)
    assert isinstance(target, torch_wrappers.TorchShardedTarget) is bool(gathered)
    for number, place in enumerate(target.resolve([True, True])):
        assert place is not None
        assert place.accumulator is (sums if number in gathered else weights[number].main_grad)
