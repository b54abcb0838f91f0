"""Compiles every kernel for the H100, without a GPU too: the compiler refuses code that the interpreter accepts."""

import functools
import json
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels are Triton's")

# The type of each argument, with the number that divides it ("*bf16/16": a pointer to whole 16 bytes). What is no
# string, or starts with "=", is a constexpr; "=tl." is one of Triton's dtypes. What follows "#" tells forms apart.
_NUMBERS = {"alpha": "fp32", "limit": "fp32", "offset": "fp32"}
_GROUPED = {
    "weight_ptr": "*bf16/16", "weight_desc": "tensordesc<bf16[1,64,64]>", "weight_table": None,
    "offsets_ptr": "*i64/16",
    "E": "i32", "T": "i32", "F": "i32/16", "C": "i32/16", "stride_expert": "i32/16", "stride_weight": "i32/16",
    "first": "i32", "step": "i32", "tiles_f": "i32", "DTYPE": "=tl.bfloat16", "BLOCK_E": 64, "BLOCK_M": 64,
    "BLOCK_F": 64, "BLOCK_C": 64, "GROUP": 8, "TMA_WEIGHT": True, "SCATTERED": False, "ALIGNED": True,
    "PRECISION": "=tf32",
}  # fmt: skip
_QUANTISED = {
    "x": "*bf16/16",
    "by_rows": "*fp8e4nv/16",
    "row_scales": "*fp32/16",
    "by_columns": "*fp8e4nv/16",
    "column_scales": "*fp32/16",
    "rows": "i32/16",
    "columns": "i32/16",
    "stride": "i32/16",
    "rows_stride": "i32/16",
    "columns_stride": "i32/16",
    "MAX": 448.0,
    "EXPONENT": 8,
    "ROWS": True,
    "COLUMNS": True,
}
_EXPERTS = {
    "x": "*bf16/16", "offsets": "*i64/16", "amax": "*i32/16", "by_rows": "*fp8e4nv/16", "by_columns": "*fp8e4nv/16",
    "scales": "*fp32/16", "row_scales": "*fp32/16", "column_scales": "*fp32/16", "segments": "*i64/16",
    "base": "*bf16/16", "table": None, "first": "i32", "step": "i32", "stride_expert": "i32/16", "tiles": "i32",
    "DTYPE": "=tl.bfloat16", "SCATTERED": False, "ALIGNED": True, "E": "i32", "T": "i32", "R": "i32/16", "C": "i32/16",
    "stride": "i32/16", "rows_stride": "i32/16", "columns_stride": "i32/16", "ROWS": True, "COLUMNS": True,
    "MAX": 448.0, "EXPONENT": 8, "BLOCK_E": 16, "GROUPS": 8, "LANES": 32,
}  # fmt: skip
_AMAX = {"HEIGHT": 8, "WIDTH": 256, "CHUNK": 1024}
_SCALED_GEMM = {
    "x_desc": "tensordesc<fp8e4nv[128,128]>", "x_scale": "*fp32/16", "weight_desc": "tensordesc<fp8e4nv[1,128,128]>",
    "weight_scale": "*fp32/16", "bias_ptr": "*bf16/16", "bias_table": None, "bias_scale": "*fp32/16",
    "out_ptr": "*bf16/16", "offsets_ptr": "*i64/16", "E": "i32", "T": "i32", "F": "i32/16", "C": "i32/16",
    "stride_x_scale": "i32", "stride_weight_scale": "i32", "stride_bias": "i32/16", "stride_out": "i32/16",
    "bias_first": "i32", "bias_step": "i32", "tiles_f": "i32", "DTYPE": "=tl.bfloat16", "BLOCK_E": 16, "BLOCK_M": 128,
    "BLOCK_F": 128, "BLOCK_C": 128, "GROUP": 8, "BIAS": True, "BIAS_SCATTERED": False, "BIAS_SCALE": True,
}  # fmt: skip
_SCALED_WGRAD = {
    "x_desc": "tensordesc<fp8e4nv[128,128]>", "x_rest": "tensordesc<fp8e4nv[128,32]>",
    "x_last": "tensordesc<fp8e4nv[1,128,32]>", "dy_scale": "*fp32/16", "x_scale": "*fp32/16", "grad_ptr": "*fp32/16",
    "table_ptr": None, "beta_ptr": "*i64/16", "offsets_ptr": "*i64/16", "N": "i32/16", "K": "i32/16",
    "stride_expert": "i64/16", "stride_grad": "i32/16", "first": "i32", "step": "i32", "tiles_n": "i32",
    "tiles_k": "i32", "DTYPE": "=tl.float32", "BLOCK_N": 64, "BLOCK_K": 128, "GROUP": 8, "PARTS": 2, "BETA": 2,
    "SCATTERED": False, "ALIGNED": True,
}  # fmt: skip
_GLU_TILE = {"FUNCTION": "=gelu", "CLAMPED": True, "SCALED": True, "BLOCK_T": 4, "BLOCK_F": 512}
KERNELS = {
    "glu.triton_kernels._scaled_glu_kernel": {
        "h": "*bf16/16", "probs": "*fp32/16", "out": "*bf16/16", "T": "i32", "F": "i32/16", "stride_h": "i32/16",
        **_NUMBERS, **_GLU_TILE,
    },
    "glu.triton_kernels._scaled_glu_backward_kernel": {
        "da": "*bf16/16", "h": "*bf16/16", "probs": "*fp32/16", "dh": "*bf16/16", "dprobs": "*fp32/16", "T": "i32",
        "F": "i32/16", "stride_da": "i32/16", "stride_h": "i32/16", **_NUMBERS, **_GLU_TILE,
    },
    "grouped.reductions_triton._group_offsets_kernel": {
        "splits": "*i32/16", "offsets": "*i64/16", "E": "i32", "BLOCK": 64,
    },
    "grouped.reductions_triton._bias_grad_chunks_kernel": {
        "dy": "*bf16/16", "scale": "*fp32/16", "offsets": "*i64/16", "partials": "*fp32/16", "T": "i32", "N": "i32/16",
        "E": "i32", "stride_dy": "i32/16", "SCALED": True, "CHUNK": 128, "BLOCK_T": 32, "BLOCK_N": 128, "BLOCK_E": 64,
    },
    "grouped.reductions_triton._bias_grad_kernel": {
        "partials": "*fp32/16", "offsets": "*i64/16", "out": "*bf16/16", "T": "i32", "N": "i32/16", "CHUNK": 128,
        "BLOCK_S": 16, "BLOCK_N": 128,
    },
    "grouped.reductions_triton._scale_grad_kernel": {
        "dy": "*bf16/16", "bias": "*bf16/16", "offsets": "*i64/16", "out": "*fp32/16", "T": "i32", "N": "i32/16",
        "E": "i32", "stride_dy": "i32/16", "stride_bias": "i32/16", "BLOCK_T": 16, "BLOCK_N": 128, "BLOCK_E": 64,
    },
    "permutation.triton_kernels._permute_rows_kernel": {
        "x": "*bf16/16", "row_id_map": "*i32/16", "out": "*bf16/16", "D": "i32/16", "stride_x": "i32/16",
        "stride_out": "i32/16", "TOP_K": 8, "BLOCK": 2048,
    },
    "permutation.triton_kernels._unpermute_rows_kernel": {
        "rows": "*bf16/16", "row_id_map": "*i32/16", "out": "*bf16/16", "D": "i32/16", "stride_rows": "i32/16",
        "stride_out": "i32/16", "TOP_K": 8, "BLOCK": 2048,
    },
    "quantized.quantize_triton._amax_kernel": {
        "x": "*bf16/16", "partial": "*i32/16", "rows": "i32/16", "columns": "i32/16", "stride": "i32/16",
        "tiles": "i32", "HEIGHT": 32, "WIDTH": 256,
    },
    "quantized.quantize_triton._tile_kernel#tensor": {
        **_QUANTISED, "partial": "*i32/16", "PARTIALS": 512, "given": None, "amax": None, "HEIGHT": 128, "WIDTH": 64,
    },
    "quantized.quantize_triton._tile_kernel#given": {
        **_QUANTISED, "partial": None, "PARTIALS": 0, "given": "*fp32", "amax": None, "HEIGHT": 128, "WIDTH": 64,
    },
    "quantized.quantize_triton._tile_kernel#recorded": {
        **_QUANTISED, "partial": None, "PARTIALS": 0, "given": "*fp32", "amax": "*fp32", "HEIGHT": 128, "WIDTH": 64,
    },
    "quantized.quantize_triton._tile_kernel#square": {
        **_QUANTISED, "partial": None, "PARTIALS": 0, "given": None, "amax": None, "HEIGHT": 128, "WIDTH": 128,
    },
    "quantized.grouped_gemm_triton._scaled_gemm_kernel#experts": {
        **_SCALED_GEMM, "BLOCKS": False, "bias_ptr": None, "BIAS": False, "bias_scale": None, "BIAS_SCALE": False,
    },
    "quantized.grouped_gemm_triton._scaled_gemm_kernel#blocks": {
        **_SCALED_GEMM, "x_desc": "tensordesc<fp8e4nv[64,128]>", "BLOCK_M": 64, "BLOCKS": True,
    },
    "quantized.grouped_quantize_triton._rows_amax_kernel": {**_EXPERTS, **_AMAX},
    "quantized.grouped_quantize_triton._rows_of_experts_kernel": _EXPERTS,
    "quantized.grouped_quantize_triton._blocks_of_experts_kernel": _EXPERTS,
    "quantized.grouped_quantize_triton._matrices_amax_kernel": {**_EXPERTS, **_AMAX},
    "quantized.grouped_quantize_triton._matrices_kernel#whole": {
        **_EXPERTS, "WHOLE": True, "HEIGHT": 128, "WIDTH": 64,
    },
    "quantized.grouped_quantize_triton._matrices_kernel#squares": {
        **_EXPERTS, "amax": None, "WHOLE": False, "HEIGHT": 128, "WIDTH": 128,
    },
    "quantized.grouped_wgrad_triton._scaled_wgrad_kernel#experts": {
        **_SCALED_WGRAD, "dy_desc": "tensordesc<fp8e5[64,128]>", "dy_rest": "tensordesc<fp8e5[64,32]>",
        "dy_last": "tensordesc<fp8e5[1,64,32]>", "BLOCKS": False,
        "beta_ptr": None, "BETA": 0,
    },
    "quantized.grouped_wgrad_triton._scaled_wgrad_kernel#blocks": {
        **_SCALED_WGRAD, "dy_desc": "tensordesc<fp8e4nv[64,128]>", "dy_rest": "tensordesc<fp8e4nv[64,32]>",
        "dy_last": "tensordesc<fp8e4nv[1,64,32]>", "BLOCKS": True,
    },
    "quantized.quantize_triton._rows_kernel": {**_QUANTISED, "GROUPS": 8, "LANES": 32},
}  # fmt: skip

# In a process of its own, since Triton decides between compiler and interpreter when it is imported.
_COMPILE = """
import importlib, json, os, sys
os.environ["TRITON_INTERPRET"] = "0"
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for path, arguments in json.loads(sys.argv[1]).items():
    module, _, name = path.partition("#")[0].rpartition(".")
    kernel = getattr(importlib.import_module(f"maingrad.kernels.{module}"), name)
    signature, constants, aligned = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        given = arguments[argument]
        if isinstance(given, str) and not given.startswith("="):
            signature[argument], _, alignment = given.partition("/")
            if alignment:
                aligned[(index,)] = [["tt.divisibility", int(alignment)]]
        else:
            signature[argument] = "constexpr"
            text = given.removeprefix("=") if isinstance(given, str) else given
            dtype = isinstance(text, str) and text.startswith("tl.")
            constants[(index,)] = getattr(triton.language, text[3:]) if dtype else text
    ptx = triton.compile(ASTSource(kernel, signature, constants, aligned), target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    wide = sum(".global." in line and ".v4.b32" in line for line in ptx.splitlines())
    sums = sum(" add" in line and ".f32" in line for line in ptx.replace("\\t", " ").splitlines())
    bytewise = sum("st.global" in line and ".b8" in line for line in ptx.splitlines())
    print(path, wide, sums, bytewise)
"""


@functools.cache
def compiled() -> dict[str, tuple[int, int, int]]:
    """Of each kernel: accesses of 16 bytes, additions of fp32 in a thread, and stores of single bytes."""
    done = subprocess.run([sys.executable, "-P", "-c", _COMPILE, json.dumps(KERNELS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {path: (int(wide), int(sums), int(bytewise)) for path, wide, sums, bytewise in lines}


def test_every_kernel_compiles_and_moves_16_bytes_at_a_time() -> None:
    assert compiled().keys() == KERNELS.keys()
    # Kernels need wide accesses for bandwidth; the offsets kernel moves too little to matter.
    narrow = [path for path, (wide, _, _) in compiled().items() if wide == 0]
    assert narrow == ["grouped.reductions_triton._group_offsets_kernel"]
    # Copies of 8 bits written byte by byte take the quantiser of experts half as long again.
    assert [path for path, (_, _, bytewise) in compiled().items() if bytewise] == []


@pytest.mark.parametrize(
    ("kernel", "sums"), [("gemm_triton._scaled_gemm_kernel", 128), ("wgrad_triton._scaled_wgrad_kernel", 2 * 64)]
)
def test_sums_of_8_bit_products_leave_the_tensor_cores(kernel: str, sums: int) -> None:
    """Hopper's keep 14 bits or so: each sum of the tile, 128 x 128 or 64 x 128, is added by one of 128 threads.

    Weight gradients add those of whole blocks, and those of the rest.
    """
    assert compiled()[f"quantized.grouped_{kernel}#experts"][1] >= sums
