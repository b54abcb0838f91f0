"""Compiles every kernel for the H100, without a GPU too: the compiler refuses code that the interpreter accepts."""

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
    wide = sum(".global.v4.b32" in line for line in ptx.splitlines())
    print(path, wide)
"""


def test_every_kernel_compiles_and_moves_16_bytes_at_a_time() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", _COMPILE, json.dumps(KERNELS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wide = dict(line.split() for line in done.stdout.splitlines())
    assert wide.keys() == KERNELS.keys()
    # Kernels need wide accesses for bandwidth; the offsets kernel moves too little to matter.
    assert [path for path, count in wide.items() if count == "0"] == ["grouped.reductions_triton._group_offsets_kernel"]
