"""Permutation by expert: the order of rows, gradients without atomics, and no wait of the host for the device."""

from collections.abc import Callable

import pytest
import torch
from host_syncs import cuda_waits_are_errors
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from maingrad.te_integration import moe_permute, moe_permute_with_probs, moe_unpermute
from maingrad.te_integration.experts.moe_permutation import row_id_map


def choices(tokens: int, experts: int, top_k: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).topk(top_k).indices


def test_rows_are_sorted_by_expert_and_stay_in_the_tokens_order():
    ids = torch.tensor([[2, 0], [0, 1], [2, 1]])
    x = torch.tensor([[10.0], [20.0], [30.0]])
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]])
    rows, row_probs, sorting = moe_permute_with_probs(x, probs, ids, 4)
    assert rows.flatten().tolist() == [10, 20, 20, 30, 10, 30]
    assert torch.equal(row_probs, torch.tensor([0.1, 0.8, 0.2, 0.3, 0.9, 0.7]))
    assert sorting.splits.tolist() == [2, 2, 2, 0]
    assert sorting.splits.dtype == torch.int64
    assert torch.equal(moe_unpermute(rows, sorting), 2 * x)
    plain, again = moe_permute(x, ids, 4)
    assert torch.equal(plain, rows)
    assert torch.equal(again.places, sorting.places)


@given(st.integers(0, 20), st.integers(1, 9), st.data())
def test_the_map_is_a_stable_sort(tokens: int, experts: int, data: st.DataObject):
    top_k = data.draw(st.integers(1, experts))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    ids = choices(tokens, experts, top_k, seed=tokens).to(dtype)
    sorting = row_id_map(ids, experts)
    expected = sorted(range(tokens * top_k), key=lambda copy: int(ids.flatten()[copy]))
    assert sorting.copies.tolist() == expected
    assert sorting.places.flatten()[sorting.copies].tolist() == list(range(tokens * top_k))
    assert sorting.splits.tolist() == torch.bincount(ids.flatten().long(), minlength=experts).tolist()


def test_the_id_behind_the_last_expert_drops_a_copy():
    ids = torch.tensor([[0, 2], [2, 1]])
    _, sorting = moe_permute(torch.ones(2, 3), ids, 2)
    assert sorting.splits.tolist() == [1, 1]
    assert sorting.places.flatten().tolist() == [0, 2, 3, 1]


def test_gradients_in_fp64_of_the_first_and_second_order():
    ids = choices(5, 4, 2)
    x, probs = torch.randn(5, 3).double().requires_grad_(), torch.rand(5, 2).double().requires_grad_()

    def roundabout(x: Tensor, probs: Tensor) -> Tensor:
        rows, row_probs, sorting = moe_permute_with_probs(x, probs, ids, 4)
        return moe_unpermute(rows.square() * row_probs[:, None], sorting)

    assert torch.allclose(roundabout(x, probs), x.square() * probs.sum(1, keepdim=True))
    assert torch.autograd.gradcheck(roundabout, (x, probs))
    assert torch.autograd.gradgradcheck(roundabout, (x, probs))


def test_the_gradient_of_a_token_is_summed_in_fp32():
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    rows, _ = moe_permute(x, torch.tensor([[0, 1, 2]]), 3)
    rows.backward(torch.tensor([[256.0], [1.0], [-256.0]]).bfloat16())
    assert x.grad.item() == 1.0


def test_only_what_needs_a_gradient_gets_one():
    ids = choices(6, 4, 2)
    x, probs = torch.randn(6, 3), torch.rand(6, 2, requires_grad=True)
    rows, row_probs, _ = moe_permute_with_probs(x, probs, ids, 4)
    assert not (rows.requires_grad and rows.grad_fn is None)
    row_probs.sum().backward()
    assert torch.equal(probs.grad, torch.ones(6, 2))


def test_what_does_not_fit_is_refused():
    x, ids = torch.randn(4, 3), choices(4, 4, 2)
    with pytest.raises(ValueError, match=r"needs tokens \[T, D\] and expert_ids \[T, k\]; got \(4, 3\), \(3, 2\)"):
        moe_permute(x, ids[:3], 4)
    with pytest.raises(ValueError, match=r"probs \(4, 1\), expert_ids \(4, 2\)"):
        moe_permute_with_probs(x, torch.rand(4, 1), ids, 4)
    with pytest.raises(ValueError, match=r"probs \(2, 4\), expert_ids \(4, 2\)"):
        moe_permute_with_probs(x, torch.rand(2, 4), ids, 4)
    with pytest.raises(ValueError, match=r"torch\.float32, num_experts=4"):
        moe_permute(x, ids.float(), 4)
    with pytest.raises(ValueError, match="num_experts=0"):
        moe_permute(x, ids, 0)
    for shape in ((4,), (4, 0), (4, 2, 1)):
        with pytest.raises(ValueError, match=r"row_id_map needs integer expert_ids \[tokens, k\]"):
            moe_permute(x, torch.zeros(shape, dtype=torch.int64), 4)
    with pytest.raises(ValueError, match=r"needs tokens \[T, D\] .* got \(4, 3, 1\)"):
        moe_permute(x[:, :, None], ids, 4)


@pytest.mark.parametrize("experts", [2**15 - 1, 2**15, 2**16 + 1])
def test_as_many_experts_as_keys_of_a_sort_can_number(experts: int):
    """The last expert, the id behind it that drops a copy, and the first one."""
    sorting = row_id_map(torch.tensor([[experts - 1], [experts], [0]]), experts)
    assert sorting.copies.tolist() == [2, 0, 1]
    assert sorting.splits.sum() == 2 and sorting.splits[0] == sorting.splits[-1] == 1


def round_trip(x: Tensor, probs: Tensor, ids: Tensor) -> Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Forward and backward of both, as a function of the contents of its arguments."""

    def run() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, row_probs, sorting = moe_permute_with_probs(x, probs, ids, 16)
        y = moe_unpermute(rows * row_probs[:, None].to(rows.dtype), sorting)
        d_x, d_probs = torch.autograd.grad(y.float().square().sum(), (x, probs))
        return y.detach(), sorting.splits, d_x, d_probs

    return run


def gpu_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(500, 96, device="cuda", generator=generator).bfloat16().requires_grad_()
    probs = torch.rand(500, 4, device="cuda", generator=generator).requires_grad_()
    return x, probs, choices(500, 16, 4, seed).cuda()


@pytest.mark.gpu
def test_on_the_gpu_the_host_waits_for_nothing():
    run = round_trip(*gpu_inputs(0))
    expected = run()  # compiles
    torch.cuda.synchronize()
    with cuda_waits_are_errors():
        again = run()
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True)), "not the same twice"


@pytest.mark.gpu
def test_on_the_gpu_it_is_the_cpus_result():
    x, probs, ids = gpu_inputs(0)
    on_gpu = round_trip(x, probs, ids)()
    on_cpu = round_trip(x.detach().cpu().requires_grad_(), probs.detach().cpu().requires_grad_(), ids.cpu())()
    for mine, reference in zip(on_gpu[:3], on_cpu[:3], strict=True):
        assert torch.equal(mine.cpu(), reference)
    # Sums over 96 features in another order, of terms of order one.
    assert torch.allclose(on_gpu[3].cpu(), on_cpu[3], rtol=2e-2, atol=0.5)


@pytest.mark.gpu
def test_a_captured_graph_follows_other_choices():
    x, probs, ids = gpu_inputs(0)
    run = round_trip(x, probs, ids)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in (1, 2):
        with torch.no_grad():
            for old, new in zip((x, probs, ids), gpu_inputs(seed), strict=True):
                old.copy_(new)
        graph.replay()
        for mine, eager in zip(captured, run(), strict=True):
            assert torch.equal(mine, eager)


def test_rows_that_nothing_uses_bring_no_gradient():
    x, probs = torch.ones(3, 2, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    _, row_probs, _ = moe_permute_with_probs(x, probs, choices(3, 4, 2), 4)
    row_probs.sum().backward()
    assert x.grad is None and probs.grad.eq(1).all()


def test_transforms_of_functions_are_refused_by_name():
    x, ids = torch.ones(3, 2), choices(3, 4, 2)
    rows, sorting = moe_permute(x, ids, 4)
    for name, function, tensor in (
        ("moe_permute", lambda x: moe_permute(x, ids, 4)[0].sum(), x),
        ("moe_unpermute", lambda rows: moe_unpermute(rows, sorting).sum(), rows),
    ):
        with pytest.raises(RuntimeError, match=f"{name} has no rules for torch.func's transforms"):
            torch.func.grad(function)(tensor)
