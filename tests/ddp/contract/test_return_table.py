"""The return table of docs/main_grad.md: what ``Linear`` does on each row."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from foreign import ForeignProvider, LazyForeignProvider
from loops import FEATURES, make_batches, wrap
from moves import moves_of_size
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel
from maingrad.ddp.contract import grouped_wgrad
from maingrad.ddp.contract.grouped_wgrad import GroupedWgrad
from maingrad.ddp.contract.main_grad import placeholder
from maingrad.kernels.quantized import Element, QuantSpec, ScaleForm, quantize_grouped
from maingrad.te_integration import Linear

OUT = 4

# ---- What Linear does on every row that does not delay. ----


class Seen(NamedTuple):
    """A gradient on its way to autograd. Holding the tensor itself would make autograd copy it."""

    shape: torch.Size
    dtype: torch.dtype
    data_ptr: int
    all_zeros: bool


class Returns:
    """What each backward of a layer returned to autograd for its weight, and the flag as it left it."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.weight_grads: list[Seen | None] = []
        self.flags: list[Any] = []

    def __call__(self, batch: Tensor) -> None:
        """One forward and backward."""
        output = self.layer(batch)
        node = output.grad_fn
        assert "FusedLinear" in node.name()
        node.register_hook(self._note)
        output.square().sum().backward()

    def _note(self, grad_inputs: tuple[Tensor | None, ...], _: object) -> None:
        grad = grad_inputs[1]
        self.weight_grads.append(
            None if grad is None else Seen(grad.shape, grad.dtype, grad.data_ptr(), not grad.any())
        )
        assert grad_inputs[2] is not None, "the bias gradient never waits and never goes another way"
        self.flags.append(getattr(self.layer.weight, "grad_added_to_main_grad", "absent"))


def make_layer(dtype: torch.dtype = torch.float32, *, fuse: bool = True) -> Linear:
    torch.manual_seed(0)
    return Linear(FEATURES, OUT, dtype=dtype, fuse_wgrad_accumulation=fuse)


def expected_grads(batches: list[Tensor], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The weight's and the bias's, from nn.Linear in fp64."""
    plain = nn.Linear(FEATURES, OUT, dtype=torch.float64)
    plain.load_state_dict(make_layer(dtype).state_dict())
    for batch in batches:
        plain(batch.double()).square().sum().backward()
    return plain.weight.grad, plain.bias.grad


def assert_near(actual: Tensor, exact: Tensor, eps: float = 2.0**-20) -> None:
    assert (actual.double() - exact).norm() <= eps * exact.norm()


def test_row_plain() -> None:
    batches = make_batches(2)
    layer = make_layer(fuse=False)
    layer.weight.main_grad = torch.full((OUT, FEATURES), torch.nan)
    layer.weight.grad_added_to_main_grad = False
    for batch in batches:
        layer(batch).square().sum().backward()
    assert_near(layer.weight.grad, expected_grads(batches)[0])
    assert layer.weight.main_grad.isnan().all(), "an unfused layer has nothing to do with main_grad"
    assert layer.weight.grad_added_to_main_grad is False


def test_row_plain_through_the_hook_of_our_provider() -> None:
    batches = make_batches(2)
    layer = make_layer(fuse=False)
    ddp = wrap(layer)
    for batch in batches:
        ddp(batch).square().sum().backward()
    assert_near(layer.weight.main_grad, expected_grads(batches)[0])
    assert layer.weight.grad_added_to_main_grad is False
    assert [record.num_fused_writes for record in ddp.records] == [0, 0]
    assert [record.num_hook_writes for record in ddp.records] == [2, 2]
    assert torch.equal(layer.weight.grad, layer.weight.main_grad)


def test_row_main_grad_of_a_provider_without_the_flag() -> None:
    batches = make_batches(3)
    layer = make_layer()
    ForeignProvider(layer, flag=False)
    returns = Returns(layer)
    for batch in batches:
        returns(batch)
    assert returns.weight_grads == [None] * 3
    assert returns.flags == ["absent"] * 3
    assert layer.weight.grad is None
    weight, bias = expected_grads(batches)
    assert_near(layer.weight.main_grad, weight)
    assert_near(layer.bias.grad, bias)


@pytest.mark.parametrize("provider", [ForeignProvider, LazyForeignProvider])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_main_grad_of_a_foreign_provider_with_the_flag(
    provider: Callable[[nn.Module], ForeignProvider], dtype: torch.dtype
) -> None:
    batches = make_batches(3, dtype)
    layer = make_layer(dtype)
    kept = provider(layer)
    returns = Returns(layer)
    for batch in batches:
        returns(batch)
        assert layer.weight.grad is None
        if isinstance(kept, LazyForeignProvider):
            kept.start_microbatch(layer)
    assert returns.flags == [True] * 3
    scratch = placeholder(layer.weight).data_ptr()  # shared: a placeholder costs nothing
    assert returns.weight_grads == [Seen(layer.weight.shape, dtype, scratch, True)] * 3
    delivered = [(name, grad.data_ptr()) for name, grad in kept.placeholders]
    assert delivered == [("weight", scratch)] * 3, "autograd took it over without a copy"
    assert layer.weight.main_grad.dtype is torch.float32
    weight, bias = expected_grads(batches, dtype)
    eps = 2.0**-20 if dtype is torch.float32 else 2.0**-7  # dy was rounded to bf16
    assert_near(layer.weight.main_grad, weight, eps)
    assert_near(layer.bias.main_grad, bias, eps)


def test_row_main_grad_of_our_provider() -> None:
    batches = make_batches(3)
    layer = make_layer()
    ddp = wrap(layer)
    returns = Returns(layer)
    for batch in batches:
        returns(batch)
        assert layer.weight.grad.shape == layer.weight.shape
        assert layer.weight.grad_added_to_main_grad is False, "the hook ran on None, and reset the flag"
    assert returns.weight_grads == [None] * 3
    assert returns.flags == [True] * 3
    by_name = {record.name: record for record in ddp.records}
    assert (by_name["weight"].num_fused_writes, by_name["weight"].num_hook_writes) == (3, 0)
    assert (by_name["bias"].num_fused_writes, by_name["bias"].num_hook_writes) == (0, 3)
    assert torch.equal(layer.weight.grad, layer.weight.main_grad)
    weight, bias = expected_grads(batches)
    assert_near(layer.weight.main_grad, weight)
    assert_near(layer.bias.main_grad, bias)


@pytest.mark.parametrize("provider", [wrap, ForeignProvider])
def test_row_frozen(provider: Callable[[nn.Module], object]) -> None:
    batches = make_batches(2)
    layer = make_layer()
    layer.weight.requires_grad_(False)
    if provider is ForeignProvider:
        layer.weight.main_grad = torch.full((OUT, FEATURES), torch.nan)
    kept = provider(nn.ParameterDict({"bias": layer.bias}) if provider is ForeignProvider else layer)
    for batch in batches:
        layer(batch).square().sum().backward()
    assert layer.weight.grad is None
    if provider is ForeignProvider:
        assert layer.weight.main_grad.isnan().all()
    else:
        assert isinstance(kept, DistributedDataParallel)
        assert not hasattr(layer.weight, "main_grad")
    assert_near(layer.bias.main_grad, expected_grads(batches)[1])


# ---- What autograd adds to the GEMM. ----


@pytest.fixture
def gemm_does_nothing(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    called: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        "maingrad.te_integration.dense.products.wgrad_accumulate", lambda dy, x, grad, **_: called.append(grad.shape)
    )
    return called


@pytest.mark.parametrize("provider", ["ours", "foreign", "lazy", "foreign without a flag"])
def test_a_fused_backward_passes_over_the_weights_gradient_nowhere_but_in_the_gemm(
    provider: str, gemm_does_nothing: list[tuple[int, ...]]
) -> None:
    shape = (OUT, FEATURES)
    layer = make_layer()
    if provider == "ours":
        kept: object = wrap(layer)
    else:
        kept = (LazyForeignProvider if provider == "lazy" else ForeignProvider)(
            layer, flag=not provider.endswith("flag")
        )
    batches = make_batches(3)
    layer(batches[0]).sum().backward()  # allocates the scratch, where there is one
    for batch in batches[1:]:
        output = layer(batch).sum()
        assert moves_of_size(output.backward, shape) == []
    assert gemm_does_nothing == [shape] * 3
    assert kept is not None


def test_the_count_of_passes_sees_those_of_an_unfused_layer() -> None:
    layer = make_layer(fuse=False)
    wrap_kept = wrap(layer)
    batches = make_batches(2)
    with wrap_kept.no_sync():
        layer(batches[0]).sum().backward()
        assert moves_of_size(layer(batches[1]).sum().backward, (OUT, FEATURES)) == ["aten::add_"]
    assert wrap_kept.records


# ---- What products of experts deliver. ----

OFFSETS = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
DY, X = torch.arange(15.0).view(5, 3) - 7, torch.arange(20.0).view(5, 4) / 8 - 1
PARTS = [DY[first:end].T @ X[first:end] for first, end in ((0, 2), (2, 2), (2, 5))]
WEIGHTS = [torch.zeros(3, 4) for _ in PARTS]


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, True), (False, True, False), (False,) * 3])
def test_each_expert_that_is_wanted_gets_its_gradient(wanted: tuple[bool, ...]) -> None:
    """One without rows gets zeros."""
    found = GroupedWgrad(WEIGHTS).gradients(wanted, torch.float32, DY, X, OFFSETS)
    assert [each is not None for each in found] == list(wanted)
    for part, each in zip(PARTS, found, strict=True):
        assert each is None or torch.equal(each, part)


@pytest.mark.parametrize(
    ("operands", "wanted"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_sums_of_experts_are_rounded_once_to_the_dtype_that_is_wanted(
    packed: bool, operands: torch.dtype, wanted: torch.dtype
) -> None:
    dy, x = (DY / 3).to(operands), (X / 3).to(operands)
    exact = [dy[first:end].double().T @ x[first:end].double() for first, end in ((0, 2), (2, 2), (2, 5))]
    product = GroupedWgrad([torch.zeros(3, 3, 4)] if packed else WEIGHTS)
    found = product.gradients([True] * (1 if packed else 3), wanted, dy, x, OFFSETS)
    parts = found[0].unbind() if packed and found[0] is not None else found
    for part, expected in zip(parts, exact, strict=True):
        assert part is not None
        assert part.dtype is wanted
        eps = torch.finfo(wanted).eps
        torch.testing.assert_close(part.double(), expected, rtol=eps, atol=eps)


def test_a_packed_weight_has_one_gradient() -> None:
    product = GroupedWgrad([torch.zeros(3, 3, 4)])
    (found,) = product.gradients([True], torch.bfloat16, DY, X, OFFSETS)
    assert found is not None
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, torch.stack(PARTS).bfloat16())
    main_grad = torch.ones(3, 3, 4)
    product.accumulate([main_grad], [False], DY, X, OFFSETS)
    assert torch.equal(main_grad, torch.stack(PARTS) + 1)
    product.accumulate([main_grad], [True], DY, X, OFFSETS)
    assert torch.equal(main_grad, torch.stack(PARTS))


EXACT = QuantSpec(Element.E4M3, (1, 32), ScaleForm.POWER_OF_TWO)  # for the numbers of DY and X


def test_quantised_operands_of_experts_give_the_same() -> None:
    dy, x = (quantize_grouped(each, EXACT, OFFSETS, transposed=True) for each in (DY, X))
    discrete, packed = GroupedWgrad(WEIGHTS), GroupedWgrad([torch.zeros(3, 3, 4)])
    first, none, last = discrete.gradients((True, False, True), torch.float32, dy, x, OFFSETS)
    assert first is not None
    assert last is not None
    assert none is None
    assert torch.equal(torch.stack([first, torch.zeros(3, 4), last]), torch.stack(PARTS))
    (found,) = packed.gradients([True], torch.bfloat16, dy, x, OFFSETS)
    assert found is not None
    assert torch.equal(found, torch.stack(PARTS).bfloat16())
    main_grads = [torch.ones(3, 4) for _ in PARTS]
    discrete.accumulate([*main_grads[:2], None], [False, True, True], dy, x, OFFSETS)
    assert torch.equal(torch.stack(main_grads), torch.stack([PARTS[0] + 1, PARTS[1], torch.ones(3, 4)]))


def test_experts_add_or_overwrite_each_by_itself() -> None:
    main_grads = [torch.ones(3, 4) for _ in PARTS]
    GroupedWgrad(WEIGHTS).accumulate([main_grads[0], main_grads[1], None], [False, True, True], DY, X, OFFSETS)
    assert torch.equal(main_grads[0], PARTS[0] + 1)
    assert main_grads[1].count_nonzero() == 0
    assert torch.equal(main_grads[2], torch.ones(3, 4))


def test_experts_that_share_a_weight_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel would write the same memory twice at once: each expert has a kernel of its own."""
    written: list[int] = []

    def kernel(dy: Tensor, x: Tensor, main_grads: Sequence[Tensor | None], *more: Any, **options: Any) -> None:
        written.append(sum(each is not None for each in main_grads))
        accumulate(dy, x, main_grads, *more, **options)

    accumulate = grouped_wgrad.grouped_wgrad_accumulate
    monkeypatch.setattr(grouped_wgrad, "grouped_wgrad_accumulate", kernel)
    shared, own = torch.ones(3, 4), torch.ones(3, 4)
    tied = GroupedWgrad([WEIGHTS[0], WEIGHTS[1], WEIGHTS[0]])
    tied.accumulate([shared, own, shared], [True, False, False], DY, X, OFFSETS)
    assert torch.equal(shared, PARTS[0] + PARTS[2])
    assert torch.equal(own, torch.ones(3, 4))
    assert written == [1, 1, 1]
