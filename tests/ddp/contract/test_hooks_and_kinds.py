"""Hooks on wrapped weights, weights changed after the forward, and complex parameters: as in plain PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.ddp.contract.delayed import DelayedTarget
from maingrad.ddp.contract.grouped_wgrad import GroupedWgrad
from maingrad.ddp.contract.main_grad import WgradTarget, forget_failed_backward, is_fusable, open_for_write
from maingrad.ddp.contract.module import forms_of, has_shard, is_sharded, record_shard
from maingrad.ddp.contract.record import check_accumulator
from maingrad.ddp.contract.torch_wrappers import TorchShardedTarget, TorchShards
from maingrad.launch import simulate
from maingrad.te_integration import GroupedLinear, Linear, WgradQueue


def fused(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    options = {"fuse_wgrad_accumulation": True, **options}
    return nn.Sequential(Linear(5, 8, **options), nn.Tanh(), Linear(8, 3, **options)).double()


def plain_twin(model: nn.Module) -> nn.Sequential:
    twin = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    twin.load_state_dict(model.state_dict())
    return twin


X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# ---- Hooks. ----


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("when", ["before wrapping", "before forward", "after forward"])
def test_a_hook_on_a_fused_weight_sees_and_changes_its_gradient(when: str, layer: int) -> None:
    model = fused()
    twin = plain_twin(model)
    seen: list[Tensor] = []

    def clamped(grad: Tensor) -> Tensor:
        assert isinstance(grad, Tensor), "called without a gradient"
        seen.append(grad)
        return grad.clamp(-0.01, 0.01)

    def register() -> None:
        for net in (model, twin):
            net[layer].weight.register_hook(clamped)

    if when == "before wrapping":
        register()
    wrapped = DistributedDataParallel(model)
    for step in range(2):
        if when == "before forward" and not step:
            register()
        outputs = wrapped(X), twin(X)
        if when == "after forward" and not step:
            register()
        for output in outputs:
            output.square().mean().backward()
        wrapped.finish_grad_sync()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.main_grad, theirs.grad)
        wrapped.zero_grad_buffer()
        twin.zero_grad()
    assert len(seen) == 4
    torch.testing.assert_close(seen[0], seen[1])


def test_a_hook_on_one_experts_weight_sees_its_gradient_whenever_it_was_registered() -> None:
    torch.manual_seed(0)
    model = GroupedLinear(3, 5, 4, bias=False, fuse_wgrad_accumulation=True)
    wrapped = DistributedDataParallel(model)
    seen: list[Tensor] = []
    output = wrapped(torch.ones(6, 5), torch.tensor([1, 2, 3]))
    model.weight1.register_hook(lambda grad: seen.append(grad.clone()))
    output.sum().backward()
    wrapped.finish_grad_sync()
    (grad,) = seen
    torch.testing.assert_close(grad, torch.full((4, 5), 2.0))
    torch.testing.assert_close(
        [p.main_grad for p in model.parameters()], [torch.full((4, 5), n) for n in (1.0, 2.0, 3.0)]
    )


@pytest.mark.parametrize("fuse", [False, True])
def test_a_weight_with_a_hook_is_not_delayed_and_one_that_gets_it_too_late_is_refused(fuse: bool) -> None:
    model = fused(fuse_wgrad_accumulation=fuse, delay_wgrad_compute=True)
    twin = plain_twin(model)
    wrapped = DistributedDataParallel(model)
    seen: list[Tensor] = []
    for net in (model, twin):
        net[0].weight.register_hook(seen.append)
    for call in (wrapped, twin):
        call(X).sum().backward()
    torch.testing.assert_close(*seen)
    for layer in (model[2], model[0]):
        layer.backward_dw()
    wrapped.finish_grad_sync()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.main_grad, theirs.grad)
    wrapped.zero_grad_buffer()
    output = wrapped(X)
    model[2].weight.register_hook(lambda grad: pytest.fail("called"))
    with pytest.raises(RuntimeError, match=r"Linear\(.*hook on the weight.*that is delayed"):
        output.sum().backward()


# ---- Weights that change between forward and backward. ----


@pytest.mark.parametrize("fuse", [False, True])
def test_a_first_layers_weight_may_change_in_place_after_its_forward(fuse: bool) -> None:
    """Backward does not read a first layer's weight, as in ``nn.Linear``; it reads a later layer's."""
    model = fused(fuse_wgrad_accumulation=fuse)
    twin = plain_twin(model)
    wrapped = DistributedDataParallel(model)
    for net, call in ((model, wrapped), (twin, twin)):
        output: Any = call(X)
        with torch.no_grad():
            net[0].weight.mul_(2)
        output.square().mean().backward()
    wrapped.finish_grad_sync()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.main_grad, theirs.grad)
    for net, call in ((model, wrapped), (twin, twin)):
        wrapped.zero_grad_buffer()
        output = call(X)
        with torch.no_grad():
            net[2].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@pytest.mark.parametrize("delayed", [False, True])
def test_a_weight_that_was_freed_before_its_backward_is_named(delayed: bool) -> None:
    weight, queue = nn.Parameter(torch.zeros(2, 2)), WgradQueue()
    options = ([weight], ["weight"], GroupedWgrad([weight]), "layer")
    target = DelayedTarget(*options, fused=True, queue=queue) if delayed else WgradTarget(*options)
    del weight, options
    with pytest.raises(RuntimeError, match="layer, weight: the weight was freed between forward and backward"):
        target.resolve([True])


def test_main_grad_that_is_none_is_no_accumulator() -> None:
    """Some programs clear the attribute so."""
    layer = Linear(5, 8, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = None
    with pytest.raises(RuntimeError, match=r"needs weight\.main_grad, and nobody provided it"):
        layer(torch.ones(1, 5)).sum().backward()
    ddp = DistributedDataParallel(layer)
    ddp(torch.ones(1, 5)).sum().backward()
    assert layer.weight.main_grad.tolist() == [[1] * 5] * 8


def test_a_lazy_provider_of_others_is_asked_in_each_backward() -> None:
    """What it gave in the last one may be freed."""
    layer = Linear(5, 8, bias=False, fuse_wgrad_accumulation=True)
    given: list[Tensor] = []

    def get_main_grad() -> Tensor:
        given.append(torch.zeros(8, 5))
        return given[-1]

    layer.weight.__fsdp_param__, layer.weight.get_main_grad = True, get_main_grad
    for _ in range(2):
        layer(torch.ones(1, 5)).sum().backward()
        assert layer.weight.main_grad is given[-1]
    assert [each.tolist() for each in given] == [[[1] * 5] * 8] * 2
    layer.weight.get_main_grad = lambda: torch.zeros(5, 8)
    with pytest.raises(RuntimeError, match=r"main_grad must be .* got shape \(5, 8\)"):
        layer(torch.ones(1, 5)).sum().backward()


def test_a_product_finds_the_shard_that_stands_for_its_weight() -> None:
    """``fully_shard`` registers it outside of forwards; both count as sharded."""
    whole, shard = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))
    assert list(forms_of(whole)) == [whole]
    record_shard(whole, shard)
    assert has_shard(whole)
    assert not has_shard(shard)
    assert [form is each for form, each in zip(forms_of(whole), (whole, shard), strict=True)] == [True, True]
    assert not is_sharded(whole)
    shard.shard = "the first half"
    assert is_sharded(shard)
    assert is_sharded(whole)
    del shard
    assert [form is whole for form in forms_of(whole)] == [True]


def test_among_weights_of_torchs_fully_shard_others_have_their_own_place() -> None:
    layer = nn.Linear(2, 2, bias=False)
    ddp = DistributedDataParallel(layer)
    target = TorchShardedTarget([layer.weight], ["weight"], GroupedWgrad([layer.weight]), "layer", [None])
    (place,) = target.resolve([True])
    assert place is not None
    assert place.accumulator is ddp.records[0].view


class Subclass(Tensor):
    """As a DTensor: no kernel of ours writes it."""


class GatheredByTorch:
    """FSDP2's record of a weight, with what it sums outside of ``.grad``."""

    def __init__(self, accumulated: Tensor | None) -> None:
        self.unsharded_accumulated_grad = accumulated


SUMMED: dict[str, tuple[Tensor, bool]] = {
    "fp32": (torch.zeros(2, 3), True),
    "the weight's dtype": (torch.zeros(2, 3, dtype=torch.bfloat16), True),
    "another dtype": (torch.zeros(2, 3, dtype=torch.float16), False),
    "rows apart": (torch.zeros(3, 2).t(), False),
    "a subclass": (torch.zeros(2, 3).as_subclass(Subclass), False),
}


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("kind", SUMMED)
def test_what_torchs_fully_shard_sums_is_an_accumulator_where_a_kernel_can_add_to_it(kind: str, outside: bool) -> None:
    """Outside of ``.grad`` that comes first."""
    found, fits = SUMMED[kind]
    weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    weight.grad_dtype = None
    record = GatheredByTorch(found if outside else None)
    shards = TorchShards(record)
    assert shards.accumulator(weight) is (found if outside and fits else None)
    weight.grad = torch.zeros(2, 3) if outside else found
    assert shards.accumulator(weight) is (found if fits else None)


def test_asking_for_the_gradient_of_a_first_layer_alone() -> None:
    model = fused()
    twin = plain_twin(model)
    wrapped = DistributedDataParallel(model)
    found = torch.autograd.grad(wrapped(X).square().mean(), model[0].weight, create_graph=True)[0]
    wanted = torch.autograd.grad(twin(X).square().mean(), twin[0].weight, create_graph=True)[0]
    torch.testing.assert_close(found, wanted)
    again, expected = (
        torch.autograd.grad(grad.square().sum(), net[2].weight)[0] for grad, net in ((found, model), (wanted, twin))
    )
    torch.testing.assert_close(again, expected)


# ---- Complex parameters. ----


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.waves = nn.Parameter(torch.randn(30, 9, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(9))

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.scale).to(torch.complex64) @ self.waves.t()).abs().square().mean()


CONFIGS: dict[str, Callable[[], DistributedDataParallelConfig]] = {
    "ddp": DistributedDataParallelConfig,
    "sharded": lambda: DistributedDataParallelConfig(use_distributed_optimizer=True),
    "bf16 on the wire": lambda: DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_wire_dtype=torch.bfloat16
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_complex_gradients_are_reduced_whatever_the_wire(name: str) -> None:
    batches = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(1))
    twin = Waves()
    (sum(twin(x) for x in batches) / 2).backward()

    def reduce() -> list[int]:
        model = DistributedDataParallel(Waves(), CONFIGS[name]())
        model(batches[dist.get_rank()]).backward()
        model.finish_grad_sync()
        found = []
        for entry in model.bucket_params:
            bucket, record = entry.bucket, entry.record
            first, last = model.owned_range(bucket.layout)
            start = record.view.storage_offset() - bucket.grad_data.storage_offset()
            low, high = max(first - start, 0), min(last - start, record.view.numel())
            wanted = dict(twin.named_parameters())[record.name].grad
            tolerance = {"rtol": 2e-2, "atol": 1e-2} if "wire" in name else {}
            torch.testing.assert_close(
                record.view.reshape(-1)[low : max(high, low)], wanted.reshape(-1)[low : max(high, low)], **tolerance
            )
            found.append(max(high - low, 0))
        return found

    by_rank = simulate(reduce, 2)
    assert sum(map(sum, by_rank)) == (2 if name == "ddp" else 1) * (30 * 9 + 9)


# ---- Which tensors may be ``main_grad`` of a weight, as a provider of others gives them. ----

WEIGHT = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
FLAT = torch.zeros(200)
FIT = {
    "fp32": torch.zeros(2, 3, 4),
    "the weight's dtype": torch.zeros(2, 3, 4, dtype=torch.bfloat16),
}
ROWS_APART = {
    "rows apart": FLAT.as_strided((2, 3, 4), (24, 8, 1)),
    "matrices apart": FLAT.as_strided((2, 3, 4), (20, 4, 1)),
    "matrices between rows": FLAT.as_strided((2, 3, 4), (4, 8, 1)),
}
UNFIT = {
    "another shape": torch.zeros(3, 2, 4),
    "another dtype": torch.zeros(2, 3, 4, dtype=torch.float64),
    "another device": torch.zeros(2, 3, 4, device="meta"),
    "columns apart": FLAT.as_strided((2, 3, 4), (24, 8, 2)),
    "rows that overlap": FLAT.as_strided((2, 3, 4), (12, 3, 1)),
    "one matrix for all": torch.zeros(1, 3, 4).expand(2, 3, 4),
}


@pytest.mark.parametrize("kind", [*FIT, *ROWS_APART, *UNFIT])
@pytest.mark.parametrize("rows_apart", [False, True])
def test_a_kernel_can_add_to_what_is_taken(kind: str, rows_apart: bool) -> None:
    main_grad = {**FIT, **ROWS_APART, **UNFIT}[kind]
    if kind in FIT or (rows_apart and kind in ROWS_APART):
        check_accumulator("layer", WEIGHT, main_grad, rows_apart)
        return
    with pytest.raises(RuntimeError, match="layer: main_grad must") as raised:
        check_accumulator("layer", WEIGHT, main_grad, rows_apart)
    assert f"shape {tuple(main_grad.shape)}, stride {tuple(main_grad.stride())}" in str(raised.value)


def test_dims_of_one_element_may_have_any_stride() -> None:
    weight, flat = torch.zeros(1, 3, 1), torch.zeros(20)
    check_accumulator("layer", weight, flat.as_strided((1, 3, 1), (0, 2, 1)), True)
    overlapping = flat.as_strided((2, 1, 4), (3, 2, 1))
    with pytest.raises(RuntimeError, match="adjacent columns"):
        check_accumulator("layer", torch.zeros(2, 1, 4), overlapping, True)


# ---- Which weights' gradients a module may write itself. ----


def of_leaf(**options: Any) -> Tensor:
    return torch.zeros(2, 2, **{"requires_grad": True, **options})


def with_a_hook() -> Tensor:
    weight = of_leaf()
    weight.register_hook(lambda grad: grad)
    return weight


def computed(provided: bool) -> Tensor:
    weight = of_leaf() * 2
    if provided:
        weight.main_grad = torch.zeros(2, 2)  # type: ignore[attr-defined]
    return weight


WRITTEN: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "plain": (of_leaf, True),
    "bf16": (lambda: of_leaf(dtype=torch.bfloat16), True),
    "frozen": (lambda: of_leaf(requires_grad=False), False),
    "complex": (lambda: of_leaf(dtype=torch.complex64), False),
    "with a hook": (with_a_hook, False),
    "computed": (lambda: computed(provided=False), False),
    "computed, and whoever computes it provides": (lambda: computed(provided=True), True),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_which_gradients_a_module_writes_itself(kind: str) -> None:
    make, fusable = WRITTEN[kind]
    assert is_fusable(make()) is fusable


# ---- What is left on weights. ----


def test_a_foreign_overwrite_is_for_the_first_write_of_each_backward() -> None:
    weight = of_leaf()
    assert not open_for_write(weight, None, 1)
    weight.overwrite_main_grad = True  # type: ignore[attr-defined]
    assert [open_for_write(weight, None, backward) for backward in (2, 2, 3, 3)] == [True, False, True, False]


def test_a_failed_backward_leaves_nothing_on_its_weights() -> None:
    layer = nn.Linear(2, 2)
    ddp = DistributedDataParallel(layer)
    record = ddp.records[0]
    param = ddp.bucket_params[0].owned.param
    record.consumer_wrote, record.late_sum, param.grad_added_to_main_grad = True, torch.ones(2), True
    assert forget_failed_backward(param)
    assert (record.consumer_wrote, record.late_sum, param.grad_added_to_main_grad) == (False, None, False)
    assert not forget_failed_backward(param)


def test_what_was_computed_from_a_weight_is_kept_while_gradients_are_summed() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    (record, _), ahead = ddp.records, object()
    record.of_weight, record.ahead = "a quantised copy", ahead
    record.close("was launched")
    assert record.of_weight is None
    record.of_weight = "another one"
    record.reset()
    assert record.of_weight is None
    assert record.ahead is None
