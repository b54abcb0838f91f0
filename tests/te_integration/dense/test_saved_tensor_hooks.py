"""Everything that unpacks saved tensors: recompute of both kinds, offload, hooks that return other objects.

The weight is found through the weak reference that forward took, with its attributes; what comes out of
``ctx.saved_tensors`` is data only.
"""

import itertools

import pytest
import torch
from foreign import ForeignProvider, LazyForeignProvider
from modules import ALL_FACTORIES, ALL_WEIGHTS, error, exact, make
from stepping import AROUND, Stack, assert_bitwise, train
from torch import Tensor

ROUNDING = 2.0**-19


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().sum()


# An unfused module saves other tensors in a delayed_wgrad block than in its recompute outside. Of a reentrant
# recompute, only the part outside is in the block.
CASES = [
    (fuse, how, around)
    for fuse, how, around in itertools.product([True, False], ["now", "module", "queue"], AROUND)
    if around != "nothing" and not (how == "queue" and "recompute" in around and (not fuse or "reentrant" in around))
]


@pytest.mark.parametrize("kind", ALL_FACTORIES)
@pytest.mark.parametrize(("fuse", "how", "around"), CASES)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.sampled(3)
def test_training_is_bitwise_the_plain_one(kind: str, fuse: bool, how: str, around: str, microbatches: int) -> None:
    twice = "reentrant" not in around  # a nested backward adds the two uses in another order
    plain = train(Stack(kind, fuse=fuse, twice=twice), microbatches, "now")
    other = train(Stack(kind, around, fuse=fuse, twice=twice, delay=how == "module"), microbatches, how)
    assert_bitwise(plain, other, same_buckets=how != "module")


@pytest.mark.in_turn
@pytest.mark.parametrize("around", [each for each in AROUND if "reentrant" not in each])
@pytest.mark.parametrize("variant", [{"tied": True}, {"frozen": True}, {"bias": False}], ids=str)
@pytest.mark.parametrize("how", ["now", "module"])
@pytest.mark.sampled(1)
def test_ties_and_frozen_weights_too(around: str, variant: dict[str, bool], how: str) -> None:
    for kind in ALL_FACTORIES:
        plain = train(Stack(kind, **variant), 2, "now")
        assert_bitwise(plain, train(Stack(kind, around, delay=how == "module", **variant), 2, how), same_buckets=False)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("how", ["now", "module"])
@pytest.mark.parametrize("fuse", [True, False])
def test_an_mlp_that_recomputes_itself_inside_all_of_them(around: str, how: str, fuse: bool) -> None:
    twice = "reentrant" not in around
    plain = train(Stack("LayerNormMLP", fuse=fuse, twice=twice), 2, "now")
    model = Stack("LayerNormMLP", around, fuse=fuse, twice=twice, delay=how == "module", checkpoint=True)
    assert_bitwise(plain, train(model, 2, how), same_buckets=how == "now")


@pytest.mark.parametrize("kind", ALL_FACTORIES)
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.sampled(2)
def test_reentrant_recompute_of_a_module_that_runs_outside_too(kind: str, fuse: bool, tied: bool) -> None:
    """Its nested backward belongs to the microbatch around it: ``train`` calls ``backward_dw()`` once for each.

    The uses are added in another order than in the plain run, and the steps amplify the difference in rounding.
    """
    plain = train(Stack(kind, fuse=fuse, tied=tied), 2, "now")
    around = "reentrant recompute"
    now = train(Stack(kind, around, fuse=fuse, tied=tied), 2, "now")
    delayed = train(Stack(kind, around, fuse=fuse, tied=tied, delay=True), 2, "module")
    for name, weight in plain.weights.items():
        torch.testing.assert_close(now.weights[name], weight, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(delayed.weights[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "name"), ALL_WEIGHTS)
@pytest.mark.parametrize("around", ["save_on_cpu", "fresh tensors"])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("provider", [ForeignProvider, LazyForeignProvider])
def test_20_flag_and_overwrite_bit_are_the_weights_own(
    kind: str, name: str, around: str, delay: bool, provider: type[ForeignProvider]
) -> None:
    """A hook would not see a flag on the unpacked object, and without the overwrite bit the sum would be NaN."""
    module = make(kind, delay=delay)
    batches = [torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    expected = exact(module, batches, loss_of)[2]
    kept = provider(module)
    for x in batches:
        with AROUND[around]():
            output = module(x)
        loss_of(output).backward()
        module.backward_dw()
        if isinstance(kept, LazyForeignProvider):
            kept.start_microbatch(module)
    assert [flag for owner, flag in kept.seen if owner == name] == [True, True]
    assert error(getattr(module, name).main_grad, expected[name]) <= ROUNDING


@pytest.mark.parametrize("kind", ALL_FACTORIES)
@pytest.mark.parametrize("delay", [False, True])
def test_nothing_keeps_the_weight_alive_but_its_module(kind: str, delay: bool) -> None:
    """A graph under saved-tensor hooks holds data, the queue holds a weak reference."""
    module = make(kind, fuse=False, delay=delay)
    with AROUND["fresh tensors"]():
        output = module(torch.randn(3, 8))
    references = [torch.utils.weak.TensorWeakRef(getattr(module, name)) for name in module.weight_names]
    loss_of(output).backward()
    queue = module.wgrad_queue
    del module, output
    assert all(reference() is None for reference in references)
    if delay:
        with pytest.raises(RuntimeError, match="the weight was freed"):
            queue.drain()
