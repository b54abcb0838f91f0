"""Delayed and undelayed modules have the same bits after three steps, for every module and every option."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from loops import wrap
from modules import ALL_FACTORIES, FEATURES, make
from stepping import Stack, assert_bitwise, train

from maingrad.launch import simulate
from maingrad.te_integration import WgradQueue, delayed_wgrad

VARIANTS = [
    {"tied": tied, "frozen": frozen, "bias": bias} for tied, frozen, bias in itertools.product([False, True], repeat=3)
]


@pytest.mark.parametrize("kind", ALL_FACTORIES)
@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 3])  # one is within three
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.sampled(2)
def test_delayed_is_bitwise_undelayed(kind: str, microbatches: int, fuse: bool, variant: dict[str, bool]) -> None:
    """The test checks that the queue is used, unless every weight is frozen and nothing is delayed."""
    all_frozen = variant["tied"] and variant["frozen"] and kind != "LayerNormMLP"

    def run(how: str) -> list:
        def one_rank() -> object:
            return train(Stack(kind, fuse=fuse, delay=how == "module", **variant), microbatches, how)

        return simulate(one_rank, 2)

    plain = run("now")
    for how in ("module",) if all_frozen else ("module", "queue"):
        for one, other in zip(plain, run(how), strict=True):
            assert_bitwise(one, other, same_buckets=how == "queue")


@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
@pytest.mark.parametrize("shape", [(3, FEATURES), (2, 3, FEATURES)], ids=str)
def test_what_waits_is_not_read_after_it_was_overwritten(kind: str, shape: tuple[int, ...]) -> None:
    """An input buffer that is overwritten between backward and backward_dw would silently give a wrong gradient."""
    module = make(kind, delay=True)
    module.normalize = lambda x: x  # so that the MLP's first product reads the buffer, too
    ddp = wrap(module)
    buffer = torch.randn(shape)
    ddp(buffer).square().sum().backward()
    buffer.copy_(torch.randn(shape))
    with pytest.raises(RuntimeError, match=kind + r"\(.*was changed in place before it was computed"):
        module.backward_dw()
    assert module.need_backward_dw()
    module.wgrad_queue.clear()
    ddp.zero_grad_buffer()


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", ALL_FACTORIES)
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.sampled(1)
def test_a_compiled_forward_notices_the_block_it_runs_in(kind: str, fuse: bool) -> None:
    torch.compiler.reset()
    module = make(kind, fuse=fuse)
    ddp = wrap(module)
    compiled = torch.compile(module, backend="aot_eager")
    queue, x = WgradQueue(), torch.randn(3, FEATURES)
    for inside in (False, True, False):
        with ddp.no_sync(), delayed_wgrad(queue) if inside else nullcontext():
            loss = compiled(x).square().sum()
        with ddp.no_sync():  # in a later one torch.compile would read .grad, which finishes the iteration
            loss.backward()
        products = 2 if kind.endswith("MLP") else 1
        assert len(queue) == (products if inside else 0)
        queue.drain()
    torch.compiler.reset()


@pytest.mark.parametrize("kind", ALL_FACTORIES)
@pytest.mark.parametrize("shape", [(3, FEATURES), (2, 3, FEATURES)], ids=str)
def test_a_gradient_that_autograd_hands_on_is_not_shared_with_what_waits(kind: str, shape: tuple[int, ...]) -> None:
    """A leaf that is added to the output gets the same gradient tensor, and adds the next microbatch's to it."""
    delayed, plain = make(kind, fuse=False, delay=True), make(kind, fuse=False)
    for module in (delayed, plain):
        leaf = torch.zeros(shape, requires_grad=True)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            x, factor = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
            for output in (module(x) + leaf, leaf + module(x)):
                (output * factor).sum().backward()
        while module.need_backward_dw():
            module.backward_dw()
    for name in delayed.weight_names:
        torch.testing.assert_close(getattr(delayed, name).grad, getattr(plain, name).grad)
