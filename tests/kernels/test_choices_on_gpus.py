"""What a GPU would be given: which kernel runs, with which configuration and operands. Fake tensors stand for its own.

No kernel runs here: functions that launch are replaced by ones that note their arguments.
"""

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="the choices are Triton's or not")
from maingrad import kernels
from maingrad.kernels import compat, tuning, wgrad
from maingrad.kernels.cross_entropy import cross_entropy
from maingrad.kernels.cross_entropy.reference import LossTerms
from maingrad.kernels.glu import scaled_glu
from maingrad.kernels.grouped import products
from maingrad.kernels.grouped.gemm_triton import GemmConfig, default_gemm_config, default_scaled_gemm_config
from maingrad.kernels.grouped.wgrad_config import WgradConfig, default_wgrad_config
from maingrad.kernels.optimizer import flat_update
from maingrad.kernels.optimizer.adamw import AdamUpdate
from maingrad.kernels.optimizer.lion import LionUpdate
from maingrad.kernels.optimizer.orthogonal import elements
from maingrad.kernels.optimizer.reference import AdamOptions, UpdateRow
from maingrad.kernels.permutation import embedding, permute
from maingrad.kernels.quantized import Element, GroupedQuantized, Quantized, QuantSpec, ScaleForm, operands
from maingrad.kernels.quantized import products as scaled

WHOLE = QuantSpec(Element.E4M3, None, ScaleForm.FP32)
BLOCK = QuantSpec(Element.E4M3, (1, 128), ScaleForm.POWER_OF_TWO)
SQUARE = QuantSpec(Element.E4M3, (128, 128), ScaleForm.POWER_OF_TWO)
MX = QuantSpec(Element.E4M3, (1, 32), ScaleForm.E8M0)


class Gpu:
    """A GPU in words, and what it was asked to run: names of torch's operators and of launching functions."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.ran: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def be(self, name: str, capability: tuple[int, int]) -> None:
        self.patch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        self.patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        self.patch.setattr(torch.version, "hip", None)
        forget()

    def note(self, module: Any, *names: str, returns: Any = None) -> None:
        for name in names:
            self.patch.setattr(
                module, name, lambda *given, _name=name, **how: (self.ran.append((_name, given, how)), returns)[1]
            )

    def only(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        [(name, given, how)] = self.ran
        self.ran.clear()
        return name, given, how


_WITHOUT_FAKE = [torch.ops.aten._scaled_mm.out]
if torch.__version__ < (2, 14):  # seen with 2.11: their fakes raise
    _WITHOUT_FAKE += [torch.ops.aten.mm.dtype_out, torch.ops.aten.addmm.dtype_out]


class Operators(TorchDispatchMode):
    """Notes products among torch's operators."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func):
            self.gpu.ran.append((str(func), args, kwargs or {}))
        if func in _WITHOUT_FAKE:
            return (kwargs or {})["out"]
        return func(*args, **(kwargs or {}))


def forget() -> None:
    for cached in (tuning.gpu_name, compat.capability_of, tuning.config_of, tuning.tuned_config):
        cached.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu(monkeypatch)
    made.be("NVIDIA H200", (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with FakeTensorMode(), Operators(made):
        yield made
    forget()


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


# ---- Dense weight gradients. ----


def test_a_dense_weight_gradient_runs_as_the_table_has_measured(gpu: Gpu) -> None:
    gpu.note(wgrad, "grouped_wgrad_triton")
    main_grad = on_gpu(4096, 4096, dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16):  # fp16 has no rows of its own
        few, many = on_gpu(512, 4096, dtype=dtype), on_gpu(4096, 4096, dtype=dtype)
        kernels.wgrad_accumulate(few, few, main_grad)
        name, (dy, x, target, offsets, overwrite, config), _ = gpu.only()
        assert name == "grouped_wgrad_triton" and (dy is few) and (x is few) and (offsets, overwrite) == (None, False)
        assert target.shape == (1, 4096, 4096) and config == WgradConfig(128, 128, 64, 8, 3, tma=True, parts=2)
        # cuBLAS is faster for more rows, and where nothing is read.
        for operand, overwrite, product in ((many, False, "aten.addmm.dtype_out"), (few, True, "aten.mm.dtype_out")):
            kernels.wgrad_accumulate(operand, operand, main_grad, overwrite=overwrite)
            name, given, how = gpu.only()
            assert name == product and how["out"] is main_grad and (overwrite or given[0] is main_grad)
    gpu.patch.setattr(wgrad, "_kernel_for", lambda *_: config)  # as of a table of the user's
    for overwrite in (True, False):
        kernels.wgrad_accumulate(few, few, main_grad, overwrite=overwrite)
        assert gpu.only()[1][4] is overwrite


@pytest.mark.parametrize("other", ["GPU", "dy by columns", "x by columns", "far shape", "without Triton"])
def test_a_dense_weight_gradient_is_cublas_where_the_kernel_was_not_measured(gpu: Gpu, other: str) -> None:
    gpu.note(wgrad, "grouped_wgrad_triton")
    dy, x = on_gpu(512, 4096), on_gpu(512, 4096)
    if other == "GPU":
        gpu.be("NVIDIA H100 80GB HBM3", (9, 0))
    elif other == "without Triton":
        gpu.patch.setattr(wgrad, "HAS_TRITON", False)
    elif other == "far shape":
        dy = on_gpu(512, 64)
    else:
        by_columns = on_gpu(4096, 512).t()
        dy, x = (by_columns, x) if other.startswith("dy") else (dy, by_columns)
    kernels.wgrad_accumulate(dy, x, on_gpu(dy.shape[1], 4096, dtype=torch.float32))
    assert gpu.only()[0].startswith("aten.addmm.dtype")


def test_accumulators_of_the_operands_dtype_take_one_product_and_others_the_reference(gpu: Gpu) -> None:
    half, wide = on_gpu(8, 16), on_gpu(8, 16, dtype=torch.float32)
    for operand in (half, wide):
        main_grad = on_gpu(16, 16, dtype=operand.dtype)
        for overwrite, expected in ((False, "aten.addmm.out"), (True, "aten.mm.out")):
            kernels.wgrad_accumulate(operand, operand, main_grad, overwrite=overwrite)
            name, _, how = gpu.only()
            assert name == expected and how["out"] is main_grad
    gpu.note(wgrad, "wgrad_accumulate_reference")
    kernels.wgrad_accumulate(wide, wide, on_gpu(16, 16, dtype=torch.float64))
    kernels.wgrad_accumulate(half.double(), half.double(), on_gpu(16, 16, dtype=torch.float32))
    assert [(name, how) for name, _, how in gpu.ran] == [("wgrad_accumulate_reference", {"overwrite": False})] * 2


# ---- Products of experts. ----


def test_grouped_products_take_the_row_of_their_shape_and_operation(gpu: Gpu) -> None:
    """8 experts of 1,024 rows. Each operation has rows of its own in the table."""
    gpu.note(products, "grouped_gemm_triton", "grouped_wgrad_triton")
    x, dy, offsets = on_gpu(8192, 2048), on_gpu(8192, 4096), on_gpu(9, dtype=torch.int64)
    weights, grads = on_gpu(8, 4096, 2048), on_gpu(8, 4096, 2048, dtype=torch.float32)

    def measured(op: str, kind: Any, *sizes: int) -> Any:
        found = tuning.tuned_config("NVIDIA H200", tuning.Problem(op, "bfloat16", *sizes))
        assert isinstance(found, dict)
        return kind(**found)

    sizes = 8, 8192, 4096, 2048
    kernels.grouped_linear(x, weights, offsets)
    _, (given, matrices, at, out, config), how = gpu.only()
    assert given is x and matrices is weights and at is offsets and out.shape == (8192, 4096)
    assert config == measured("grouped_linear", GemmConfig, *sizes)
    assert how == {"transposed": True, "bias": None, "bias_scale": None}
    kernels.grouped_dgrad(dy, weights, offsets)
    _, (given, matrices, _, out, config), how = gpu.only()
    assert given is dy and matrices is weights and out.shape == (8192, 2048) and not how["transposed"]
    assert config == measured("grouped_dgrad", GemmConfig, *sizes)
    for overwrite, op in (
        (False, "grouped_wgrad_accumulate"),
        (True, "grouped_wgrad_overwrite"),
        ([True] * 8, "grouped_wgrad_overwrite"),
        ([True] * 7 + [False], "grouped_wgrad_accumulate"),
    ):
        kernels.grouped_wgrad_accumulate(dy, x, grads, offsets, overwrite=overwrite)
        _, (*tensors, bits, config), _ = gpu.only()
        assert all(map(lambda a, b: a is b, tensors, (dy, x, grads, offsets))) and bits == overwrite
        assert config == measured(op, WgradConfig, *sizes)


def test_other_gpus_and_dtypes_take_the_default_of_theirs(gpu: Gpu) -> None:
    gpu.note(products, "grouped_gemm_triton", "grouped_wgrad_triton")
    offsets = on_gpu(3, dtype=torch.int64)
    for name, capability in (("other", (9, 0)), ("other", (8, 0)), ("NVIDIA H200", (9, 0))):
        gpu.be(name, capability)
        for dtype in (torch.bfloat16, torch.float32):
            if (name, dtype) == ("NVIDIA H200", torch.bfloat16):
                continue
            for rows in (100, 1000, 4000):
                x = on_gpu(rows, 64, dtype=dtype)
                kernels.grouped_linear(x, on_gpu(2, 64, 64, dtype=dtype), offsets)
                assert gpu.only()[1][-1] == default_gemm_config(dtype, capability, rows / 2)
                kernels.grouped_wgrad_accumulate(x, x, on_gpu(2, 64, 64, dtype=torch.float32), offsets)
                assert gpu.only()[1][-1] == default_wgrad_config(dtype, capability, rows / 2)


def test_measurements_of_half_precision_are_not_those_of_fp32(gpu: Gpu) -> None:
    gpu.note(products, "grouped_gemm_triton")
    offsets, weights = on_gpu(9, dtype=torch.int64), on_gpu(8, 4096, 2048)
    configs = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        kernels.grouped_linear(on_gpu(8192, 2048, dtype=dtype), weights.to(dtype), offsets)
        configs.append(gpu.only()[1][-1])
    assert configs[0] == configs[1] != configs[2] == default_gemm_config(torch.float32, (9, 0), 1024)


def test_kernels_get_operands_that_they_can_address(gpu: Gpu) -> None:
    """Adjacent columns, weights and biases of one stride; accumulators of unlike layouts by launches of their own."""
    gpu.note(products, "grouped_gemm_triton", "grouped_wgrad_triton", "grouped_bias_grad_triton")
    gpu.note(products, "grouped_scale_grad_triton")
    offsets, by_columns = on_gpu(3, dtype=torch.int64), on_gpu(16, 10).t()
    weights = [on_gpu(8, 16), on_gpu(8, 32)[:, ::2]]
    scale = on_gpu(20, dtype=torch.float32)[::2]
    kernels.grouped_linear(by_columns, weights, offsets, bias=[on_gpu(8), on_gpu(16)[::2]], bias_scale=scale)
    _, (x, aligned, *_), how = gpu.only()
    assert x.stride() == (16, 1) and {each.stride() for each in aligned} == {(16, 1)}
    assert {each.stride() for each in how["bias"]} == {(1,)} and how["bias_scale"].stride() == (1,)
    grads = [on_gpu(16, 16, dtype=torch.float32), on_gpu(16, 16)]
    kernels.grouped_wgrad_accumulate(by_columns, by_columns, grads, offsets, overwrite=[False, True])
    assert [len([each for each in given[2] if each is not None]) for _, given, _ in gpu.ran] == [1, 1]
    assert all(given[0].stride() == given[1].stride() == (16, 1) for _, given, _ in gpu.ran)
    gpu.ran.clear()
    assert kernels.grouped_bias_grad(by_columns, offsets, scale=scale, dtype=torch.float32).dtype is torch.float32
    assert kernels.grouped_scale_grad(by_columns, on_gpu(2, 16), offsets).dtype is torch.float32
    assert [name for name, *_ in gpu.ran] == ["grouped_bias_grad_triton", "grouped_scale_grad_triton"]
    assert gpu.ran.pop(0)[2]["scale"] is scale
    gpu.ran.clear()
    gpu.note(products, "grouped_bias_grad_reference", "grouped_scale_grad_reference")
    kernels.grouped_bias_grad(by_columns.double(), offsets)
    kernels.grouped_scale_grad(by_columns.double(), on_gpu(2, 16), offsets)
    assert [name for name, *_ in gpu.ran] == ["grouped_bias_grad_reference", "grouped_scale_grad_reference"]


# ---- Rows. ----


def test_embeddings_sort_ids_of_32_bits_where_they_fit(gpu: Gpu) -> None:
    gpu.note(embedding, "embedding_wgrad_triton", "embedding_wgrad_reference")
    tokens = on_gpu(6, dtype=torch.int64)
    for rows, dtype in ((2**31 - 1, torch.int32), (2**31, torch.int64)):
        kernels.embedding_wgrad_accumulate(on_gpu(6, 2), tokens, on_gpu(rows, 2), overwrite=True)
        name, (_, ids, _), how = gpu.only()
        assert (name, ids.dtype, how) == ("embedding_wgrad_triton", dtype, {"overwrite": True})
    for dy, main_grad in ((torch.float64, torch.float32), (torch.bfloat16, torch.float64)):
        kernels.embedding_wgrad_accumulate(on_gpu(6, 2, dtype=dy), tokens.int(), on_gpu(9, 2, dtype=main_grad))
        name, (_, ids, _), how = gpu.only()
        assert (name, ids.dtype, how) == ("embedding_wgrad_reference", torch.int64, {"overwrite": False})


def test_permutations_read_adjacent_columns(gpu: Gpu) -> None:
    gpu.note(permute, "permute_triton", "permute_rows_reference", "unpermute_rows_reference")
    ids = on_gpu(2, 6, dtype=torch.int32).t()
    for run, rows, length in ((kernels.permute_rows, 6, 12), (kernels.unpermute_rows, 12, 6)):
        run(on_gpu(16, rows).t(), ids)
        name, (source, map_, out), how = gpu.only()
        assert name == "permute_triton" and source.stride() == (16, 1) and map_.is_contiguous()
        assert out.shape == (length, 16) and how == {"inverse": rows == 12}
        run(on_gpu(rows, 16, dtype=torch.float64), ids)
        assert gpu.only()[0].endswith("rows_reference")


def test_what_autograd_records_runs_as_the_reference(gpu: Gpu) -> None:
    gpu.note(scaled_glu, "scaled_glu_triton", "scaled_glu_reference")
    gpu.note(scaled_glu, "scaled_glu_backward_triton", "scaled_glu_backward_reference", returns=(None, None))
    h, da, probs = on_gpu(4, 8), on_gpu(4, 4), on_gpu(4, dtype=torch.float32)
    for recorded in (None, h, probs, da):
        if recorded is not None:
            recorded.requires_grad_()
        kernels.scaled_glu(h, probs)
        kernels.scaled_glu_backward(da, h, probs)
        with torch.no_grad():
            kernels.scaled_glu(h, probs)
            kernels.scaled_glu_backward(da, h, probs)
        forward = "reference" if recorded is h or recorded is probs else "triton"
        backward = "triton" if recorded is None else "reference"
        expected = [f"scaled_glu_{forward}", f"scaled_glu_backward_{backward}"]
        assert [name for name, *_ in gpu.ran] == [*expected, "scaled_glu_triton", "scaled_glu_backward_triton"]
        gpu.ran.clear()
        if recorded is not None:
            recorded.requires_grad_(False)


def test_cross_entropy_is_one_kernel(gpu: Gpu) -> None:
    gpu.note(cross_entropy, "cross_entropy_triton", "token_losses_reference", returns=(None, None))
    targets, lse, grads = on_gpu(4, dtype=torch.int64), on_gpu(4, dtype=torch.float32), on_gpu(4, dtype=torch.float32)
    logits = on_gpu(4, 8)
    cross_entropy.cross_entropy_in_place(logits, targets, LossTerms(), lse=lse, grads=grads)
    name, (first, second, _), how = gpu.only()
    assert name == "cross_entropy_triton" and first is logits and second is targets
    assert how["lse"] is lse and how["grads"] is grads
    cross_entropy.cross_entropy_in_place(logits.double(), targets, LossTerms())
    assert gpu.only()[0] == "token_losses_reference"


def test_kernels_are_launched_on_the_device_of_their_operands(gpu: Gpu) -> None:
    gpu.patch.setattr(torch.cuda, "device", lambda device: f"made current: {device}")
    for device, expected in (("cuda:1", "made current: cuda:1"), ("cuda:0", None), ("cpu", None)):
        found = compat.device_of(torch.empty(1, device=device))
        assert isinstance(found, nullcontext) if expected is None else found == expected


# ---- Quantised operands. ----


@pytest.mark.parametrize(
    ("spec", "experts", "from_", "until"),
    [
        (WHOLE, False, (8, 9), None),
        (WHOLE, True, (9, 0), (9, 0)),
        (BLOCK, False, (9, 0), (9, 0)),
        (SQUARE, True, (9, 0), (9, 0)),
        (MX, False, None, None),
        (QuantSpec(Element.E4M3, None, ScaleForm.POWER_OF_TWO), False, None, None),
        (QuantSpec(Element.E4M3, (1, 64), ScaleForm.POWER_OF_TWO), False, None, None),
        (QuantSpec(Element.E4M3, (1, 128), ScaleForm.FP32), False, None, None),
    ],
)
def test_gpus_that_have_kernels_of_a_spec(gpu: Gpu, spec: QuantSpec, experts: bool, from_: Any, until: Any) -> None:
    device = torch.device("cuda", 0)
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        gpu.be("any", capability)
        has = from_ is not None and from_ <= capability <= (until or capability)
        assert operands.has_kernels(spec, device, experts=experts) is has
        assert (operands.lacking(spec, device, experts=experts) is None) is has
        emulated = QuantSpec(spec.element, spec.block, spec.scale, emulated=True)
        assert not operands.has_kernels(emulated, device, experts=experts)
    gpu.patch.setattr(operands, "HAS_TRITON", False)
    assert not operands.has_kernels(spec, device, experts=experts)
    assert operands.lacking(spec, torch.device("cpu")) == "an NVIDIA GPU and Triton"


def test_matrices_that_the_quantisers_kernel_takes(gpu: Gpu) -> None:
    gpu.note(operands, "quantize_triton", "quantize_grouped_triton", "quantize_experts_triton", returns=("a", "b"))
    gpu.note(operands, "quantize", "quantize_grouped", "_stacked")
    both = functools.partial(operands.quantize_both, on_gpu(4, 6))
    scale, amax = on_gpu(dtype=torch.float32), on_gpu(dtype=torch.float32)
    assert both(WHOLE, WHOLE, scale=scale, amax=amax) == ("a", "b")
    name, (_, rows, columns, *numbers), _ = gpu.only()
    assert (name, rows, columns) == ("quantize_triton", WHOLE, WHOLE)
    assert numbers[0] is scale and numbers[1] is amax
    for rows, columns in ((WHOLE, None), (None, BLOCK), (BLOCK, replace(BLOCK))):
        both(rows, columns)
        assert gpu.only()[1][1:3] == (rows, columns)
    operands.quantize_both(on_gpu(4, 6, dtype=torch.float16), WHOLE, WHOLE)
    assert gpu.only()[0] == "quantize_triton"
    operands.quantize_both(on_gpu(2, 4, 6), WHOLE, None)
    operands.quantize_grouped_both(on_gpu(2, 4, 6), WHOLE, None, on_gpu(3, dtype=torch.int64))
    assert [name for name, *_ in gpu.ran] == ["quantize", "quantize_grouped"], "which refuse it"
    gpu.ran.clear()
    for run in (
        lambda: both(WHOLE, BLOCK),
        lambda: operands.quantize_both(on_gpu(1, 6), WHOLE, WHOLE),
        lambda: operands.quantize_both(on_gpu(6, 1), WHOLE, WHOLE),
        lambda: operands.quantize_both(on_gpu(4, 6, dtype=torch.float32), WHOLE, WHOLE),
        lambda: both(BLOCK, BLOCK, scale=scale),
    ):
        run()
        assert [name for name, *_ in gpu.ran] == ["quantize", "quantize"]
        assert gpu.ran[1][1][0].stride(0) == 1, "the transposed matrix"
        gpu.ran.clear()
    gpu.be("B200", (10, 0))
    both(WHOLE, WHOLE)
    operands.quantize_grouped_both(on_gpu(4, 6), WHOLE, None, on_gpu(3, dtype=torch.int64))
    operands.quantize_experts(on_gpu(1, 4, 6), WHOLE, None)
    assert [name for name, *_ in gpu.ran] == ["quantize_triton", "quantize_grouped", "quantize", "_stacked"]
    gpu.ran.clear()
    gpu.be("H200", (9, 0))
    offsets = on_gpu(3, dtype=torch.int64)
    operands.quantize_grouped_both(on_gpu(4, 6), BLOCK, BLOCK, offsets)
    operands.quantize_grouped_both(on_gpu(4, 6, dtype=torch.float32), BLOCK, BLOCK, offsets)
    operands.quantize_experts(on_gpu(1, 4, 6, dtype=torch.float32), SQUARE, None)
    operands.quantize_experts(on_gpu(2, 4, 6), SQUARE, None)
    operands.quantize_experts([on_gpu(4, 6), on_gpu(4, 12)[:, ::2]], SQUARE, None)
    names = ["quantize_grouped_triton", "quantize_grouped", "quantize_grouped", "quantize", "_stacked"]
    names += ["quantize_experts_triton"] * 2
    assert [name for name, *_ in gpu.ran] == names
    assert gpu.ran[2][2] == {"transposed": True} and gpu.ran[1][2] == {}
    assert {each.stride() for each in gpu.ran[-1][1][0]} == {(6, 1)}


def test_a_compiler_is_told_of_copies_as_kernels_leave_them(gpu: Gpu) -> None:
    for spec, shape, dtype, has_kernel in (
        (WHOLE, (20, 200), torch.bfloat16, True),
        (BLOCK, (20, 200), torch.float16, True),
        (BLOCK, (20, 200), torch.float32, False),  # as the reference does
        (WHOLE, (1, 200), torch.bfloat16, False),
    ):
        x = on_gpu(*shape, dtype=dtype)
        copy = operands.empty_copy(x, spec, transposed=True) if has_kernel else operands.quantize(x.t(), spec)
        found = operands.quantized_like(x.t(), spec)
        assert [(each.shape, each.stride()) for each in found] == [(each.shape, each.stride()) for each in copy.tensors]


def quantized(rows: int, columns: int, spec: QuantSpec) -> Quantized:
    """As the kernels leave one on a GPU."""
    return operands.empty_copy(on_gpu(rows, columns), spec, transposed=False)


@pytest.mark.parametrize("spec", [WHOLE, BLOCK])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 32, 512), (5, 7, 130), (1, 1, 1), (4, 24, 128)])
def test_cublas_is_given_what_it_takes(gpu: Gpu, spec: QuantSpec, m: int, n: int, k: int) -> None:
    """Torch's own checks of shapes, strides and scales run here as on a GPU."""
    a, b = quantized(m, k, spec), quantized(n, k, SQUARE if spec is BLOCK else spec)
    bias = on_gpu(n)
    for dtype, fast in ((torch.bfloat16, True), (torch.float32, False)):
        found = scaled.scaled_product(a, b, dtype, bias if dtype is torch.bfloat16 else None, fast=fast)
        name, given, how = gpu.only()
        assert found.shape == (m, n) and found.dtype is dtype and found.is_contiguous()
        left, right, left_scale, right_scale, given_bias, _, out_dtype, use_fast = (*given, *[None] * 8)[:8]
        assert "_scaled_mm" in name and (out_dtype or how.get("out_dtype")) is dtype
        assert left.shape[0] % 4 == 0 and right.shape[1] % 16 == 0 and left.shape[1] == right.shape[0]
        assert left.shape[1] % 16 == 0 and left.stride(1) == right.stride(0) == 1
        assert bool(use_fast or how.get("use_fast_accum")) is (fast and spec is WHOLE)
        assert (given_bias is None) is (dtype is torch.float32)
        assert given_bias is None or given_bias.shape[0] == right.shape[1]
        if spec is BLOCK:
            assert left_scale.shape == (left.shape[0], left.shape[1] // 128) and left_scale.stride(0) == 1
            assert right_scale.shape == (left.shape[1] // 128, -(-right.shape[1] // 128)) and right_scale.stride(0) == 1


@pytest.mark.parametrize("squares", [False, True])
def test_copies_of_other_widths_are_padded_for_cublas(gpu: Gpu, squares: bool) -> None:
    """As the reference leaves them, and rows of a larger matrix: scales of squares come in fours of 128 columns."""

    def unpadded(rows: int, columns: int, spec: QuantSpec) -> Quantized:
        assert spec.block is not None
        scale = on_gpu(-(-rows // spec.block[0]), -(-columns // 128), dtype=torch.float32)
        return Quantized(on_gpu(rows, columns, dtype=torch.float8_e4m3fn), scale, None, spec, columns)

    a, b = unpadded(6, 200, BLOCK), unpadded(20, 200, SQUARE if squares else BLOCK)
    assert scaled.scaled_product(a, b, torch.bfloat16).shape == (6, 20)
    name, (left, right, left_scale, right_scale, *_), _ = gpu.only()
    width = 512 if squares else 256
    assert "_scaled_mm" in name and left.shape == (8, width) and right.shape == (width, 32)
    assert left_scale.shape == (8, width // 128) and left_scale.stride() == (1, 8)
    assert right_scale.shape == (width // 128, 1 if squares else 32)
    assert right_scale.stride() == ((1, width // 128) if squares else (32, 1))
    scaled.scaled_product(unpadded(20, 300, SQUARE), unpadded(6, 300, BLOCK), torch.bfloat16)  # the other way round
    _, (left, _, left_scale, right_scale, *_), _ = gpu.only()
    assert left.shape == (20, 512) and left_scale.shape == (1, 4) and right_scale.shape == (4, 16)
    narrow, wide = unpadded(8, 100, BLOCK), quantized(32, 100, BLOCK)  # of 512 columns
    for one, other in ((narrow, wide), (wide, narrow)):
        scaled.scaled_product(one, other, torch.bfloat16)
        _, (left, right, *_), _ = gpu.only()
        assert left.shape[1] == right.shape[0] == 512


def test_products_that_cublas_takes_whole(gpu: Gpu) -> None:
    """The bias too, where it has the result's dtype; fp32 biases, and dtypes that cuBLAS lacks, come after it."""
    gpu.note(scaled, "dequantize", returns=on_gpu(16, 16, dtype=torch.float32))
    a, b = quantized(16, 32, WHOLE), quantized(16, 32, replace(WHOLE, element=Element.E5M2))
    half, single, wide = torch.bfloat16, torch.float32, torch.float64
    for dtype, bias, first, inside in (
        (half, None, half, False),
        (half, half, half, True),
        (half, single, single, False),
        (half, torch.float16, single, False),
        (single, single, single, False),
        (wide, None, single, False),
    ):
        given = None if bias is None else on_gpu(16, dtype=bias)
        assert scaled.scaled_product(a, b, dtype, given).dtype is dtype
        name, arguments, how = gpu.only()
        dtypes = {each for each in (*arguments, *how.values()) if isinstance(each, torch.dtype)}
        assert dtypes == {first}
        assert "_scaled_mm" in name and ((arguments[4] if len(arguments) > 4 else None) is not None) is inside
    squares, blocks = quantized(16, 32, SQUARE), quantized(16, 32, BLOCK)
    emulated = quantized(16, 32, replace(WHOLE, emulated=True))
    for one, other in ((squares, squares), (a, blocks), (a, emulated), (emulated, a)):
        scaled.scaled_product(one, other, half)
        assert [name for name, *_ in gpu.ran[:2]] == ["dequantize", "dequantize"]
        gpu.ran.clear()
    gpu.be("NVIDIA A100", (8, 0))
    scaled.scaled_product(a, b, half)
    assert gpu.ran[0][0] == "dequantize"


def test_first_weight_gradients_are_written_straight_into_accumulators(gpu: Gpu) -> None:
    dy, x = quantized(8, 32, WHOLE), quantized(16, 32, WHOLE)
    main_grad = on_gpu(8, 16, dtype=torch.float32)
    scaled.scaled_wgrad_accumulate(dy, x, main_grad, overwrite=True)
    assert gpu.only()[2]["out"] is main_grad
    for grad, overwrite in (
        (main_grad, False),
        (main_grad.bfloat16(), True),
        (on_gpu(16, 8, dtype=torch.float32).t(), True),
    ):
        scaled.scaled_wgrad_accumulate(dy, x, grad, overwrite=overwrite)
        assert "out" not in gpu.only()[2]
    for rows, columns in ((6, 16), (8, 24)):
        grad = on_gpu(rows, columns, dtype=torch.float32)
        scaled.scaled_wgrad_accumulate(quantized(rows, 32, WHOLE), quantized(columns, 32, WHOLE), grad, overwrite=True)
        assert "out" not in gpu.only()[2]
    as_emulated = [each._replace(spec=replace(WHOLE, emulated=True)) for each in (dy, x)]
    scaled.scaled_wgrad_accumulate(*as_emulated, main_grad, overwrite=True)
    assert gpu.only()[0] == "aten.mm.default", "the reference's"
    with pytest.raises(ValueError, match="contracts the last dims"):
        scaled.scaled_wgrad_accumulate(dy, quantized(16, 64, WHOLE), main_grad)
    with pytest.raises(ValueError, match="both rotated or none"):
        scaled.scaled_product(dy, x._replace(spec=replace(WHOLE, rotated=True)), torch.bfloat16)


def test_products_of_quantised_experts(gpu: Gpu) -> None:
    gpu.note(scaled, "grouped_gemm_triton", "grouped_wgrad_triton", "grouped_wgrad_accumulate")
    gpu.note(scaled, "rows_of_experts", returns=(None, None))
    offsets = on_gpu(3, dtype=torch.int64)
    rows = GroupedQuantized(quantized(10, 32, BLOCK), offsets, transposed=False)
    columns = GroupedQuantized(quantized(10, 32, BLOCK), on_gpu(5, dtype=torch.int64), transposed=True)
    one = quantized(16, 32, SQUARE)
    weights = one._replace(data=one.data[None].expand(2, -1, -1), scale=one.scale[None].expand(2, -1, -1))
    out, by_columns = on_gpu(10, 16), on_gpu(16, 10).t()
    bias = [on_gpu(16), on_gpu(32)[::2]]
    half = torch.bfloat16
    assert scaled.scaled_grouped_product(rows, weights, half, bias=bias, out=out) is out
    _, given, how = gpu.only()
    assert given[3] is out and how["transposed"] and {each.stride() for each in how["bias"]} == {(1,)}
    assert how["scales"][0] is rows.matrix.scale and how["scales"][1] is weights.scale
    assert scaled.scaled_grouped_product(rows, weights, half, out=by_columns) is by_columns
    assert gpu.only()[1][3].stride() == (16, 1), "and copied"
    apart, scale = on_gpu(10, 24)[:, :16], on_gpu(20, dtype=torch.float32)[::2]
    assert scaled.scaled_grouped_product(rows, weights, half, bias=bias, bias_scale=scale, out=apart) is apart
    _, given, how = gpu.only()
    assert given[3] is apart and how["bias_scale"].stride() == (1,)
    for spec, length in ((WHOLE, 2000), (WHOLE, 2100), (BLOCK, 2100)):
        many = GroupedQuantized(quantized(length, 32, spec), offsets, transposed=False)
        scaled.scaled_grouped_product(many, weights, half)
        assert gpu.only()[1][4] == default_scaled_gemm_config(length / 2, blocks=spec is BLOCK)
    fits = on_gpu(10, 10, dtype=torch.float32)
    for grads, kernel in (
        ([fits, None], True),
        (on_gpu(2, 10, 10), True),
        ([fits, fits.double()], False),
        ([fits, on_gpu(10, 20)[:, ::2]], False),
    ):
        scaled.scaled_grouped_wgrad_accumulate(columns, columns, grads)
        names = {name for name, *_ in gpu.ran}
        assert ("grouped_wgrad_triton" in names) is kernel and ("rows_of_experts" in names) is not kernel
        gpu.ran.clear()


# ---- Optimizers. ----


def test_passes_of_muon_that_have_kernels(gpu: Gpu) -> None:
    """fp32 beside fp32 and fp16, each matrix's elements side by side; torch's operations read a rate in a tensor."""
    gpu.note(elements, "apply_on_triton", "momentum_on_triton", "increment_version")
    single, half = on_gpu(2, 4, 8, dtype=torch.float32), on_gpu(2, 4, 8, dtype=torch.float16)
    elements.update_momentum(single, single, single, 0.9, nesterov=True)
    (name, given, how), (_, versions, _) = gpu.ran
    assert name == "momentum_on_triton" and given[3] == 0.9 and how == {"nesterov": True}
    assert [each is single for each in versions[0]] == [True, True], "what was written"
    gpu.ran.clear()
    elements.apply_update(single, half, 0.5, 0.1, 3.0)
    (name, given, _), (_, versions, _) = gpu.ran
    assert name == "apply_on_triton" and given[2:] == (0.95, -1.5) and versions[0] is single
    gpu.ran.clear()
    stack = on_gpu(2, 6, 8, dtype=torch.float32)[:, :4]
    elements.apply_update(stack, half, 0.5, 0.1, 3.0)
    assert gpu.ran[0][0] == "apply_on_triton", "what lies between matrices is no matter"
    gpu.ran.clear()
    bf16, wide = on_gpu(2, 4, 8), on_gpu(2, 8, 4, dtype=torch.float32).transpose(1, 2)
    for param, orthogonal, lr in (
        (bf16, half, 0.5),
        (single, bf16, 0.5),
        (wide, half, 0.5),
        (single, half.transpose(1, 2).contiguous().transpose(1, 2), 0.5),
        (stack[0].t(), half[0].t(), 0.5),
        (single[:0], half[:0], 0.5),
        (single, half, torch.ones((), device="cuda")),
    ):
        elements.apply_update(param, orthogonal, lr, 0.1, 3.0)
    for buffer, grad, update in (
        (bf16, bf16, bf16.clone()),
        (wide, single, single.clone()),
        (single, wide, single.clone()),
        (single, single, wide),
    ):
        elements.update_momentum(buffer, grad, update, 0.9, nesterov=False)
    assert not gpu.ran


def test_optimizers_are_kernels_unless_a_row_is_fp64(gpu: Gpu) -> None:
    gpu.note(flat_update, "TritonUpdate", returns=lambda *given: gpu.ran.append(("step", given, {})))
    gpu.note(flat_update, "update_reference")
    single, step = on_gpu(8, dtype=torch.float32), on_gpu(dtype=torch.float32)
    row = UpdateRow(single, single, single, step, master=single)
    wide = UpdateRow(*(each.double() for each in (single, single, single)), step, master=single.double())
    gpu.patch.setattr(flat_update, "_kind_of", lambda grad: grad.numel())
    options = [AdamOptions(0.1, 0.9, 0.99, 1e-8, 0.1)]
    for rule, make in (("adamw", AdamUpdate), ("lion", LionUpdate)):
        rows = [row if rule == "adamw" else row._replace(exp_avg_sq=None)]
        make(rows)(options)
        (name, given, _), (ran, numbers, _) = gpu.ran
        assert (name, given[1:], ran) == ("TritonUpdate", (rule, False, False), "step") and numbers[1:] == (None, None)
        gpu.ran.clear()
        make(rows, maximize=True)
        assert gpu.only()[1][1:3] == (rule, True)
    AdamUpdate([row], decoupled=False, grads_move=True)
    assert gpu.only()[1][1:] == ("adam", False, True)
    AdamUpdate([row, wide])(options)
    name, _, how = gpu.only()
    assert name == "update_reference" and how["rule"] == "adamw" and how["maximize"] is False
