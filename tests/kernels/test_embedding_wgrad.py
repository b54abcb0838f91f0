"""The weight gradient of an embedding: kernel and reference against sums in fp64, also in Triton's interpreter."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from triton_devices import nan_filled_memory

from maingrad.kernels import embedding_wgrad_accumulate
from maingrad.kernels.permutation.reference import embedding_wgrad_reference

HALF = [torch.bfloat16, torch.float16]


def exact(dy: Tensor, tokens: Tensor, before: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
    """The result in fp64, and the sum of all addends' sizes. before: None where the write overwrites."""
    total = torch.zeros(rows, dy.shape[1], dtype=torch.float64) if before is None else before.double().clone()
    size = total.abs()
    for token, row in zip(tokens.tolist(), dy.double(), strict=True):
        if token >= 0:
            total[token] += row
            size[token] += row.abs()
    return total, size


def assert_sum(got: Tensor, dy: Tensor, tokens: Tensor, before: Tensor | None) -> None:
    """An addition in fp32 rounds by at most 2^-24 of what was summed; then the result rounds once to its dtype."""
    total, size = exact(dy.cpu(), tokens.cpu(), None if before is None else before.cpu(), got.shape[0])
    longest = int(tokens[tokens >= 0].bincount().max()) if (tokens >= 0).any() else 0
    bound = size * (longest + 1) * 2.0**-24 + total.abs() * torch.finfo(got.dtype).eps / 2
    assert ((got.cpu().double() - total).abs() <= bound * 1.01).all()


def triton(dy: Tensor, tokens: Tensor, main_grad: Tensor, **options: bool) -> None:
    module = pytest.importorskip("maingrad.kernels.permutation.embedding_triton", reason="Triton is not installed")
    module.embedding_wgrad_triton(dy, tokens, main_grad, **options)


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
@pytest.mark.parametrize("ids", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.sampled(8)
def test_rows_get_the_sums_of_their_tokens(ids: torch.dtype, dtype: torch.dtype, overwrite: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(7, (40,), generator=generator).to(ids)
    dy = torch.randn(40, 6, generator=generator).to(dtype)
    into = torch.promote_types(dtype, torch.float32)
    before = torch.randn(9, 6, generator=generator).to(into)
    main_grad = torch.full_like(before, torch.nan) if overwrite else before.clone()
    embedding_wgrad_accumulate(dy, tokens, main_grad, overwrite=overwrite)
    assert_sum(main_grad, dy, tokens.long(), None if overwrite else before)
    assert torch.equal(main_grad[7:], torch.zeros(2, 6) if overwrite else before[7:])


@pytest.mark.parametrize("overwrite", [True, False])
def test_without_tokens_only_a_first_write_writes(overwrite: bool) -> None:
    main_grad = torch.ones(3, 2)
    embedding_wgrad_accumulate(torch.empty(0, 2), torch.empty(0, dtype=torch.int64), main_grad, overwrite=overwrite)
    assert torch.equal(main_grad, torch.full((3, 2), 0.0 if overwrite else 1.0))


def test_the_reference_is_autograd_and_an_addition_bit_for_bit() -> None:
    tokens = torch.randint(5, (3, 50))
    weight, main_grad = torch.randn(5, 8, requires_grad=True), torch.randn(5, 8)
    dy = torch.randn(3, 50, 8)
    torch.nn.functional.embedding(tokens, weight).backward(dy)
    expected = main_grad + weight.grad
    embedding_wgrad_accumulate(dy.view(-1, 8), tokens.view(-1), main_grad)
    assert torch.equal(main_grad, expected)


@given(
    st.lists(st.integers(-2, 5), min_size=1, max_size=80),
    st.integers(1, 40),
    st.sampled_from([torch.float32, *HALF]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_triton_sums_exactly(
    tokens: list[int], features: int, dtype: torch.dtype, into: torch.dtype, overwrite: bool
) -> None:
    """Small integers: every sum is exact, so that a row lost or added twice shows. Segments cross chunks of 16 rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.tensor(tokens, dtype=torch.int32)
    # A slice of a wider tensor: the row stride is larger than the row.
    dy = torch.randint(-1, 2, (len(tokens), features + 3)).to(dtype)[:, :features]
    before = torch.randint(-3, 4, (6, features)).to(into)
    expected = before.clone()
    embedding_wgrad_reference(dy, ids.long(), expected, overwrite=overwrite)
    main_grad = (torch.full_like(before, torch.nan) if overwrite else before.clone()).to(device)
    triton(dy.to(device), ids.to(device), main_grad, overwrite=overwrite)
    assert torch.equal(main_grad.cpu(), expected)


@pytest.mark.in_turn
@pytest.mark.parametrize("length", [15, 16, 17, 33, 160, 600])
@pytest.mark.sampled(3)
def test_one_id_in_all_places_is_summed_once(length: int) -> None:
    """With chunks of 16 rows 600 rows have 38 parts, three times as many as are added at once."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    main_grad = torch.full((3, 4), 5.0, device=device)
    triton(
        torch.ones(length, 4, device=device), torch.ones(length, dtype=torch.int32, device=device), main_grad,
        overwrite=False,
    )  # fmt: skip
    assert torch.equal(main_grad.cpu(), torch.tensor([5.0, 5.0 + length, 5.0])[:, None].expand(3, 4))


def test_an_id_may_end_where_a_chunk_ends() -> None:
    """Chunks of 16 rows: the first one's id does not go on, and the last one continues none.

    Their places among the parts are left as they were.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.tensor([0] * 16 + [1] * 32 + [2] * 16, dtype=torch.int32, device=device)
    main_grad = torch.zeros(3, 4, device=device)
    with nan_filled_memory():
        triton(torch.ones(64, 4, device=device), ids, main_grad, overwrite=False)
    assert torch.equal(main_grad.cpu(), torch.tensor([16.0, 32.0, 16.0])[:, None].expand(3, 4))


def test_padding_of_many_chunks_adds_nothing() -> None:
    """Nor is it written in front of the accumulator, where row -1 would lie."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    memory = torch.full((5, 4), 7.0, device=device)
    ids = torch.tensor([-1] * 40 + [1] * 3 + [-2] * 20, dtype=torch.int32, device=device)
    with nan_filled_memory():
        triton(torch.ones(63, 4, device=device), ids, memory[2:], overwrite=False)
    assert memory[:, 0].tolist() == [7.0, 7.0, 7.0, 10.0, 7.0]


@pytest.mark.parametrize("runs_triton", [True, False], ids=["triton", "as called"])
def test_gradients_of_padding_may_be_anything(runs_triton: bool) -> None:
    device = "cuda" if torch.cuda.is_available() and runs_triton else "cpu"
    dy, main_grad = torch.ones(3, 4, device=device), torch.zeros(2, 4, device=device)
    dy[1], ids = torch.nan, torch.tensor([1, -1, 0], dtype=torch.int32, device=device)
    (triton if runs_triton else embedding_wgrad_accumulate)(dy, ids, main_grad, overwrite=False)
    assert (main_grad == 1).all()


@pytest.mark.parametrize("form", ["by columns", "each second column", "one row for all", "each second row"])
@pytest.mark.parametrize("runs_triton", [True, False], ids=["triton", "as called"])
def test_gradients_and_ids_of_any_strides(runs_triton: bool, form: str) -> None:
    """As from a transposed output, or from a sum's ``expand``; ids are each second one of a longer tensor."""
    device = "cuda" if torch.cuda.is_available() and runs_triton else "cpu"
    dy = {
        "by columns": torch.arange(20.0).view(4, 5).t(),
        "each second column": torch.arange(40.0).view(5, 8)[:, ::2],
        "one row for all": torch.arange(4.0).expand(5, 4),
        "each second row": torch.arange(40.0).view(10, 4)[::2],
    }[form].to(device)
    ids = torch.tensor([1, 0, 0, 0, 1, 0, 2, 0, 1, 0], dtype=torch.int32, device=device)[::2]
    main_grad = torch.ones(3, 4, device=device)
    (triton if runs_triton else embedding_wgrad_accumulate)(dy, ids, main_grad, overwrite=False)
    expected = torch.stack((dy[1], dy[0] + dy[2] + dy[4], dy[3])) + 1
    assert torch.equal(main_grad, expected)


def test_features_of_several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of more than 1,024 features, or of 256 for the parts of sums: the last program has fewer than its block."""
    module = pytest.importorskip("maingrad.kernels.permutation.embedding_triton", reason="Triton is not installed")
    monkeypatch.setattr(module, "_BLOCK_OF_PARTS", 4)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.tensor([0] * 20 + [1] * 20 + [2], dtype=torch.int32, device=device)
    dy = torch.randint(-3, 4, (41, 11)).float().to(device)
    main_grad = torch.full((3, 11), torch.nan, device=device)
    module.embedding_wgrad_triton(dy, ids, main_grad, overwrite=True, block=4)
    assert torch.equal(main_grad, torch.stack((dy[:20].sum(0), dy[20:40].sum(0), dy[40])))


def test_rows_of_an_id_are_added_in_the_order_of_their_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a sort that need not be stable turns equal ids round, as a GPU's may."""
    sort = torch.sort

    def turned(ids: Tensor, *, stable: bool = False) -> tuple[Tensor, Tensor]:
        found, order = sort(ids if stable else ids.flip(0), stable=True)
        return found, order if stable else len(ids) - 1 - order

    monkeypatch.setattr(torch, "sort", turned)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dy = torch.tensor([[1.0], [5.0], [2.0**30], [-(2.0**30)]], device=device)
    main_grad = torch.zeros(2, 1, device=device)
    triton(dy, torch.tensor([1, 0, 1, 1], dtype=torch.int32, device=device), main_grad, overwrite=False)
    assert main_grad.flatten().tolist() == [5.0, 0.0], "1 is lost beside 2^30"


@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
def test_half_precision_is_summed_in_fp32(into: torch.dtype) -> None:
    dy = torch.tensor([[256.0], [1.0], [-256.0]]).bfloat16()
    for run in (triton, embedding_wgrad_accumulate):
        device = "cuda" if torch.cuda.is_available() and run is triton else "cpu"
        main_grad = torch.zeros(1, 1, dtype=into, device=device)
        run(dy.to(device), torch.zeros(3, dtype=torch.int32, device=device), main_grad, overwrite=False)
        assert main_grad.item() == 1.0


def test_an_accumulator_in_fp64_takes_sums_in_fp64() -> None:
    main_grad = torch.zeros(1, 1, dtype=torch.float64)
    dy = torch.tensor([[2.0**30], [1.0]])
    embedding_wgrad_accumulate(dy, torch.zeros(2, dtype=torch.int64), main_grad)
    assert main_grad.item() == 2.0**30 + 1


def test_what_does_not_fit_is_refused() -> None:
    dy, tokens, main_grad = torch.randn(4, 3), torch.zeros(4, dtype=torch.int64), torch.zeros(5, 3)
    shapes = (dy, tokens[:3], main_grad), (dy, tokens, main_grad[:, :2]), (dy[None], tokens, main_grad)
    for wrong in (*shapes, (dy, tokens, main_grad[None]), (dy, tokens[:, None], main_grad)):
        with pytest.raises(ValueError, match=r"needs dy \[T, D\], tokens \[T\] and main_grad \[V, D\]; got"):
            embedding_wgrad_accumulate(*wrong)
    for wrong_ids in (tokens.float(), tokens.bool(), tokens.to(torch.complex64)):
        with pytest.raises(ValueError, match=r"tokens that are integers; got torch\.(float32|bool|complex64)"):
            embedding_wgrad_accumulate(dy, wrong_ids, main_grad)


# ---- On a GPU. ----


def zipf(count: int, vocabulary: int) -> Tensor:
    weights = 1 / torch.arange(1, vocabulary + 1, device="cuda")
    return torch.multinomial(weights, count, replacement=True)


@pytest.mark.gpu
@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("into", ["fp32", "own"])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "features"), [(1, 8), (37, 100), (4096, 2048), (70_000, 64)])
def test_on_the_gpu_sums_are_right_and_repeat(
    count: int, features: int, dtype: torch.dtype, into: str, overwrite: bool
) -> None:
    torch.manual_seed(0)
    tokens = zipf(count, 1000)
    tokens[tokens == 3] = -1
    dy = torch.randn(count, features, device="cuda").to(dtype)
    accumulator = torch.float32 if into == "fp32" and dtype is not torch.float64 else dtype
    before = torch.randn(1000, features, device="cuda").to(accumulator)
    results = []
    for _ in range(2):
        main_grad = torch.full_like(before, torch.nan) if overwrite else before.clone()
        embedding_wgrad_accumulate(dy, tokens, main_grad, overwrite=overwrite)
        results.append(main_grad)
    assert torch.equal(*results)
    total = torch.zeros_like(before, dtype=torch.float64) if overwrite else before.double()
    size = total.abs()
    kept = tokens >= 0
    total.index_add_(0, tokens[kept], dy[kept].double())
    size.index_add_(0, tokens[kept], dy[kept].double().abs())
    # Parts of a sum are at most 128 additions long, and up to 1,024 parts are added 16 at a time; torch's own in fp64.
    rounding = count * 2.0**-52 if dtype is torch.float64 else min(count, 256) * 2.0**-24
    bound = size * rounding + total.abs() * torch.finfo(accumulator).eps / 2
    assert ((main_grad.double() - total).abs() <= bound * 1.01).all()


@pytest.mark.gpu
def test_the_host_waits_for_nothing_and_a_graph_takes_it() -> None:
    dy, tokens = torch.randn(5000, 256, device="cuda"), zipf(5000, 3000)
    main_grad = torch.zeros(3000, 256, device="cuda")
    embedding_wgrad_accumulate(dy, tokens, main_grad, overwrite=True)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            embedding_wgrad_accumulate(dy, tokens, main_grad, overwrite=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        embedding_wgrad_accumulate(dy, tokens, main_grad, overwrite=True)
        embedding_wgrad_accumulate(dy, tokens, main_grad)
    for seed in range(3):
        torch.manual_seed(seed)
        dy.normal_()
        tokens.copy_(zipf(5000, 3000))
        graph.replay()
        expected = torch.empty_like(main_grad)
        embedding_wgrad_accumulate(dy, tokens, expected, overwrite=True)
        embedding_wgrad_accumulate(dy, tokens, expected)
        assert torch.equal(main_grad, expected)


@pytest.mark.gpu
def test_an_id_that_comes_100_000_times_is_as_fast_as_others() -> None:
    dy = torch.randn(100_000, 1024, device="cuda", dtype=torch.bfloat16)
    main_grad = torch.zeros(100_000, 1024, device="cuda")

    def milliseconds(tokens: Tensor) -> float:
        times = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(3_000_000)
            start.record()
            embedding_wgrad_accumulate(dy, tokens, main_grad)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)

    one = milliseconds(torch.full((100_000,), 3, device="cuda"))
    assert one <= 2 * milliseconds(torch.randperm(100_000, device="cuda"))


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31() -> None:
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    rows, features = 2**15 + 1, 2**16
    main_grad = torch.zeros(rows, features, dtype=torch.bfloat16, device="cuda")
    dy = torch.ones(rows, features, dtype=torch.bfloat16, device="cuda")
    embedding_wgrad_accumulate(dy, torch.arange(rows, device="cuda"), main_grad)
    assert main_grad[-1].eq(1).all() and main_grad[0].eq(1).all()
    assert main_grad.sum(dtype=torch.float64).item() == rows * features
