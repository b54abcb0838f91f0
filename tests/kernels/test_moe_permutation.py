"""Permutation of tokens to rows by expert and back: kernels against plain indexing, also in Triton's interpreter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from maingrad.kernels import permute_rows, unpermute_rows
from maingrad.kernels.permutation.reference import permute_rows_reference, unpermute_rows_reference


def row_ids(tokens: int, top_k: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(tokens * top_k, generator=generator).view(tokens, top_k)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rows_hold_their_tokens_and_tokens_the_sum_of_their_rows(dtype: torch.dtype):
    ids = row_ids(7, 3)
    x = torch.randn(7, 5).to(dtype)
    rows = permute_rows(x, ids)
    for token in range(7):
        for row in ids[token]:
            assert torch.equal(rows[row], x[token])
    rows = torch.randn(21, 5).to(dtype)
    summed = unpermute_rows(rows, ids)
    assert summed.dtype is dtype
    exact = rows.double()[ids].sum(1)
    # A sum of three addends rounds three times at most, in fp32 or wider; then the result rounds once to its dtype.
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    bound = rows.double().abs()[ids].sum(1) * (3 * wide + torch.finfo(dtype).eps / 2)
    assert ((summed.double() - exact).abs() <= bound + 1e-15).all()


def test_the_sum_is_rounded_once():
    rows = torch.tensor([[256.0], [1.0], [-256.0], [0.0]]).bfloat16()
    assert unpermute_rows(rows, torch.tensor([[0, 1, 2, 3]])).item() == 1.0


@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 40), st.sampled_from([torch.float32, torch.float16]))
def test_triton_is_the_reference_bit_for_bit(tokens: int, top_k: int, features: int, dtype: torch.dtype):
    triton_kernels = pytest.importorskip(
        "maingrad.kernels.permutation.triton_kernels", reason="Triton is not installed"
    )
    ids = row_ids(tokens, top_k, seed=features)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Slices of wider tensors: the row stride is larger than the row.
    x, rows = (torch.randn(n, features + 3).to(dtype)[:, :features] for n in (tokens, tokens * top_k))
    for inverse, reference, source, length in (
        (False, permute_rows_reference, x, tokens * top_k),
        (True, unpermute_rows_reference, rows, tokens),
    ):
        expected, memory = (poisoned(rows_of, features, dtype=dtype) for rows_of in (length, length + 1))
        reference(source, ids, expected)
        memory = memory.to(device)
        triton_kernels.permute_triton(source.to(device), ids.to(device), memory[:length], inverse=inverse)
        assert torch.equal(memory[:length].cpu(), expected)
        assert memory[length].isnan().all(), "what lies behind stays"


def test_features_of_several_programs(monkeypatch: pytest.MonkeyPatch):
    """As of more than 2,048: the last program has fewer than its block."""
    triton_kernels = pytest.importorskip(
        "maingrad.kernels.permutation.triton_kernels", reason="Triton is not installed"
    )
    monkeypatch.setattr(triton_kernels, "_MAX_BLOCK", 4)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids, x = row_ids(2, 3).to(device), torch.randn(2, 11, device=device)
    rows, summed = torch.full((6, 11), torch.nan, device=device), torch.full((2, 11), torch.nan, device=device)
    triton_kernels.permute_triton(x, ids, rows, inverse=False)
    assert torch.equal(rows[ids], x[:, None].expand(2, 3, 11))
    triton_kernels.permute_triton(rows, ids, summed, inverse=True)
    assert torch.equal(summed, x + x + x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("features", [1, 100, 2048, 7168])
def test_on_the_gpu_it_is_the_reference_bit_for_bit(dtype: torch.dtype, features: int):
    ids = row_ids(300, 8).cuda()
    x, rows = torch.randn(300, features, device="cuda").to(dtype), torch.randn(2400, features, device="cuda").to(dtype)
    expected = poisoned(2400, features, dtype=dtype).cuda()
    permute_rows_reference(x, ids, expected)
    assert torch.equal(permute_rows(x, ids), expected)
    assert torch.equal(permute_rows(x, ids.int()), expected)
    expected = poisoned(300, features, dtype=dtype).cuda()
    unpermute_rows_reference(rows, ids, expected)
    assert torch.equal(unpermute_rows(rows, ids), expected)


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    """The last row lies behind the first 2^31 elements, where 32-bit addresses wrap."""
    tokens, features = 2**14 + 1, 2**17
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    x = torch.zeros(tokens, features, dtype=torch.bfloat16, device="cuda")
    x[-1] = 1
    ids = torch.arange(tokens, device="cuda")[:, None]
    rows = permute_rows(x, ids)
    assert rows[-1].eq(1).all()
    assert unpermute_rows(rows, ids)[-1].eq(1).all()


def test_what_does_not_fit_is_refused():
    x, ids = torch.randn(4, 3), row_ids(4, 2)
    with pytest.raises(ValueError, match=r"permute_rows needs two dims .* got \(4, 3\) and \(3, 2\)"):
        permute_rows(x, ids[:3])
    with pytest.raises(ValueError, match=r"unpermute_rows needs a row for each entry of row_id_map, 8; got 9"):
        unpermute_rows(torch.randn(9, 3), ids)
    with pytest.raises(ValueError, match=r"int32 or int64 on cpu; got torch.int16"):
        permute_rows(x, ids.short())
    with pytest.raises(ValueError, match=r"int32 or int64 on cpu; got torch.int64 on meta"):
        permute_rows(x, ids.to("meta"))
    for wrong, map_ in ((x, ids[:, :0]), (x[:, None], ids), (x, ids[:, 0]), (x, ids[..., None]), (x[:, 0], ids)):
        with pytest.raises(ValueError, match="needs two dims"):
            permute_rows(wrong, map_)
    for wrong, map_ in ((x, ids[:, :0]), (x, ids[:, 0]), (x, ids[..., None]), (x, ids[:1]), (x[:, None], ids[:2])):
        with pytest.raises(ValueError, match="unpermute_rows needs two dims"):
            unpermute_rows(wrong, map_)
