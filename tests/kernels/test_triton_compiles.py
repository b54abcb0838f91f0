"""Compiles every kernel for the H100, without a GPU too: the compiler refuses code that the interpreter accepts."""

import functools
import json
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels are Triton's")

# The type of each argument, with the number that divides it ("*bf16/16": a pointer to whole 16 bytes); a list: those of
# a tuple's elements. What is no string, or starts with "=", is a constexpr; "=Config(...)" is evaluated in the kernel's
# module. What follows "#" tells forms apart.
_EXPERT_BIASES = ["*bf16/16", None, "i32/16", "i32", "i32"]
_COPIES = {
    "x": "*bf16/16", "copies": ["*fp8e4nv/16", "*fp32/16", "i32/16", "*fp8e4nv/16", "*fp32/16", "i32/16"],
    "R": "i32/16", "C": "i32/16", "stride": "i32/16", "MAX": 448.0,
}  # fmt: skip
_TILES = {**_COPIES, "largest": None, "PARTIALS": 0, "given": None, "amax": None, "EXPERTS": False, "ALIGNED": False}
_MATRICES = {"x": ["*bf16/16", None, "i32/16", "i32", "i32"], "EXPERTS": True, "ALIGNED": True}
_AMAX = {**_TILES, "partial": "*i32/16", "tiles": "i32"}
_ROWS = {
    **_COPIES, "R": "i32", "amax": "*i32/16", "offsets": "*i64/16", "segments": "*i64/16", "E": "i32", "BLOCK_E": 16,
}  # fmt: skip
_GEMM = {
    "x_ptr": "*bf16/16", "x_desc": "tensordesc<bf16[64,64]>", "x_scale": None,
    "weights": ["*bf16/16", None, "i32/16", "i32", "i32"], "weight_desc": "tensordesc<bf16[1,64,64]>",
    "weight_scale": None, "biases": _EXPERT_BIASES, "bias_scale": "*fp32/16", "out_ptr": "*bf16/16",
    "offsets_ptr": "*i64/16", "E": "i32", "T": "i32", "F": "i32/16", "C": "i32/16", "stride_x": "i32/16",
    "stride_weight": "i32/16", "stride_out": "i32/16", "tiles_f": "i32",
    "CONFIG": "=GemmConfig(64, 64, 64, 4, 3, tma=True)", "BLOCK_E": 16, "TRANSPOSED": True, "ALIGNED": True,
    "BLOCKS": False, "BIAS": True, "PRECISION": "=tf32",
}  # fmt: skip
_SCALED_GEMM = {
    **_GEMM, "x_ptr": "*fp8e4nv/16", "x_desc": "tensordesc<fp8e4nv[128,128]>", "x_scale": "*fp32/16",
    "weights": ["*fp8e4nv/16", None, "i32/16", "i32", "i32"], "weight_desc": "tensordesc<fp8e4nv[1,128,128]>",
    "weight_scale": "*fp32/16", "CONFIG": "=GemmConfig(128, 128, 128, 4, 3, tma=True)",
}  # fmt: skip
_WGRAD = {
    "dy_ptr": "*bf16/16", "x_ptr": "*bf16/16", "dy_desc": "tensordesc<bf16[64,64]>",
    "x_desc": "tensordesc<bf16[64,128]>", "dy_rest": None, "x_rest": None, "dy_last": None, "x_last": None,
    "dy_scale": None, "x_scale": None, "grads": ["*fp32/16", None, "i64/16", "i32", "i32"], "grad_desc": None,
    "betas": "*i64/16", "offsets": "*i64/16", "E": "i32", "T": "i32", "N": "i32/16", "K": "i32/16",
    "stride_dy": "i32/16", "stride_x": "i32/16", "stride_grad": "i32/16", "tiles_n": "i32", "tiles_k": "i32",
    "CONFIG": "=WgradConfig(64, 128, 64, 4, 3, tma=True, parts=2)", "BETA": 2, "ALIGNED": True, "PREFETCH": True,
    "BLOCKS": False, "PRECISION": "=tf32",
}  # fmt: skip
_SCALED_WGRAD = {
    **_WGRAD, "x_ptr": "*fp8e4nv/16", "x_desc": "tensordesc<fp8e4nv[128,128]>",
    "x_rest": "tensordesc<fp8e4nv[128,32]>", "x_last": "tensordesc<fp8e4nv[1,128,32]>", "dy_scale": "*fp32/16",
    "x_scale": "*fp32/16", "CONFIG": "=WgradConfig(64, 128, 128, 4, 3, tma=True, parts=2)",
}  # fmt: skip
_PERMUTATION = {
    "source": "*bf16/16", "row_id_map": "*i32/16", "out": "*bf16/16", "D": "i32/16", "stride_source": "i32/16",
    "stride_out": "i32/16", "TOP_K": 8, "BLOCK": 2048,
}  # fmt: skip
_EXCHANGE = {
    "buffers": "*i64/16", "own": "*u8/16", "num_exchanges": "*i32/16", "num_dropped": "*i64/16", "counts": "*i64/16",
    "plan": "*i32/16", "splits": "*i64/16", "N": "i32/16", "spins": "i32", "start": "i32/16",
    "half_nbytes": "i32/16", "RANK": 1, "RANKS": 8, "L": 16, "BLOCK_E": 128, "BLOCK_L": 16, "BLOCK_RANKS": 8,
    "COUNTS": True, "ARRIVE": True, "WAIT": True,
    "rows": "*i32/16", "W": "i32/16", "S": 128, "ALIGN": 16, "ROWS": 4, "BLOCK": 1024,
}  # fmt: skip
_EMBEDDING_PARTS = {
    "tokens": "*i32/16", "parts": "*fp32/16", "main_grad": "*fp32/16", "T": "i32/16", "D": "i32/16", "CHUNK": 16,
    "PARTS": 16, "BLOCK": 256, "ADD": True,
}  # fmt: skip
_EMBEDDING_CHUNKS = {
    **_EMBEDDING_PARTS, "dy": "*bf16/16", "order": "*i64/16", "stride_dy": "i32/16", "BLOCK": 1024,
}  # fmt: skip
_NUMBERS = {"alpha": "fp32", "limit": "fp32", "offset": "fp32"}
_GLU_TILE = {"FUNCTION": "=gelu", "BLOCK_T": 4, "BLOCK_F": 512}
_ADAM = {
    "table": "*i64/16", "chunks": "*i32/16", "scalars": "*fp32/16", "powers": "*fp32/16", "codes": "*fp32/16",
    "divisor": "*fp32", "found_inf": "*fp32", "GRAD": "=fp32", "EXP_AVG": "=fp32", "EXP_AVG_SQ": "=fp32",
    "PARAM": "=bf16", "RULE": "=adamw", "MAXIMIZE": False, "ALIGNED": True, "TILE_BLOCKS": 2, "CHUNK_TILES": 4,
}  # fmt: skip
_PRODUCT = {
    "a_desc": "tensordesc<fp16[1,128,64]>", "b_desc": "tensordesc<fp16[1,128,64]>", "addend": "*fp16/16",
    "out": "*fp16/16", "tiles": "*i32/16", "M": "i32/16", "K": "i32/16", "stride_row": "i32/16",
    "stride_matrix": "i32/16", "alpha": "fp32", "beta": "fp32", "diagonal": "fp32",
    "CONFIG": "=ProductConfig(128, 128, 64, 4, 3)", "TALL": False,
}  # fmt: skip
_HEAD = {
    "logits": "*bf16/16", "targets": "*i64/16", "grads": None, "lses": "*fp32/16", "losses": "*fp32/16", "V": "i32/16",
    "stride": "i32/16", "stride_grads": "i32", "ignore_index": "i32", "smoothing": None, "z_loss": None, "cap": None,
    "scale": "fp32", "HAS_LSE": False, "BLOCK": 4096,
}  # fmt: skip
_HEAD_TERMS = {"smoothing": "fp32", "z_loss": "fp32", "cap": "fp32"}
KERNELS = {
    "cross_entropy.triton_kernels._cross_entropy_kernel#losses": _HEAD,
    "cross_entropy.triton_kernels._cross_entropy_kernel#losses_of_terms": {**_HEAD, **_HEAD_TERMS},
    "cross_entropy.triton_kernels._cross_entropy_kernel#both": {**_HEAD, "grads": "*fp32"},
    "cross_entropy.triton_kernels._cross_entropy_kernel#both_of_terms": {
        **_HEAD, **_HEAD_TERMS, "grads": "*fp32",
    },
    "cross_entropy.triton_kernels._cross_entropy_kernel#grads": {
        **_HEAD, "grads": "*fp32", "losses": None, "HAS_LSE": True,
    },
    "cross_entropy.triton_kernels._cross_entropy_kernel#grads_of_terms": {
        **_HEAD, **_HEAD_TERMS, "grads": "*fp32", "losses": None, "HAS_LSE": True,
    },
    "optimizer.orthogonal.product_triton._symmetric_kernel": _PRODUCT,
    "optimizer.orthogonal.product_triton._symmetric_kernel#tall": {
        **_PRODUCT, "a_desc": "tensordesc<fp16[1,64,128]>", "b_desc": "tensordesc<fp16[1,64,128]>", "addend": None,
        "diagonal": None, "CONFIG": "=ProductConfig(128, 128, 64, 8, 4)", "TALL": True,
    },
    "optimizer.orthogonal.product_triton._full_kernel": {
        "a_desc": "tensordesc<fp16[1,128,64]>", "b_desc": "tensordesc<fp16[1,64,256]>",
        "out_desc": "tensordesc<fp16[1,128,128]>", "M": "i32/16", "N": "i32/16", "K": "i32/16", "alpha": "fp32",
        "CONFIG": "=ProductConfig(128, 256, 64, 8, 4)",
    },
    "optimizer.orthogonal.elements_triton._momentum_kernel": {
        "buffer": "*fp32/16", "grad": "*fp32/16", "update": "*fp32/16", "length": "i32/16", "stride_buffer": "i32/16",
        "stride_grad": "i32/16", "stride_update": "i32/16", "momentum": "fp32", "rest": "fp32", "NESTEROV": True,
        "BLOCK": 4096,
    },
    "optimizer.orthogonal.elements_triton._apply_kernel": {
        "param": "*fp32/16", "orthogonal": "*fp16/16", "length": "i32/16", "stride_param": "i32/16",
        "stride_orthogonal": "i32/16", "kept": "fp32", "step": "fp32", "BLOCK": 4096,
    },
    "glu.triton_kernels._scaled_glu_kernel": {
        "h": "*bf16/16", "probs": "*fp32/16", "out": "*bf16/16", "T": "i32", "F": "i32/16", "stride_h": "i32/16",
        **_NUMBERS, **_GLU_TILE,
    },
    "glu.triton_kernels._scaled_glu_backward_kernel": {
        "da": "*bf16/16", "h": "*bf16/16", "probs": "*fp32/16", "dh": "*bf16/16", "dprobs": "*fp32/16", "T": "i32",
        "F": "i32/16", "stride_da": "i32/16", "stride_h": "i32/16", **_NUMBERS, **_GLU_TILE,
    },
    "grouped.reductions_triton._bias_grad_chunks_kernel": {
        "dy": "*bf16/16", "scale": "*fp32/16", "offsets": "*i64/16", "partials": "*fp32/16", "T": "i32", "N": "i32/16",
        "E": "i32", "stride_dy": "i32/16", "CHUNK": 128, "BLOCK_T": 32, "BLOCK_N": 128, "BLOCK_E": 64,
    },
    "grouped.reductions_triton._bias_grad_kernel": {
        "partials": "*fp32/16", "offsets": "*i64/16", "out": "*bf16/16", "T": "i32", "N": "i32/16", "CHUNK": 128,
        "BLOCK_S": 16, "BLOCK_N": 128,
    },
    "grouped.reductions_triton._scale_grad_kernel": {
        "dy": "*bf16/16", "bias": "*bf16/16", "offsets": "*i64/16", "out": "*fp32/16", "T": "i32", "N": "i32/16",
        "E": "i32", "stride_dy": "i32/16", "stride_bias": "i32/16", "BLOCK_T": 16, "BLOCK_N": 128, "BLOCK_E": 64,
    },
    "optimizer.triton_kernels.steps_kernel": {
        "steps": "*i64/16", "slots": "*i32/16", "groups": "*i32/16", "numbers": "*fp32/16", "found_inf": "*fp32",
        "scalars": "*fp32/16", "bases": "*fp32/16", "exponents": "*fp32",
    },
    "optimizer.triton_kernels.elements_kernel#parameter": _ADAM,
    "optimizer.triton_kernels.elements_kernel#remainder": {
        **_ADAM, "EXP_AVG": "=bf16", "EXP_AVG_SQ": "=bf16", "PARAM": "=remainder",
    },
    "optimizer.triton_kernels.elements_kernel#bytes": {
        **_ADAM, "EXP_AVG": "=8 bits", "EXP_AVG_SQ": "=8 bits", "PARAM": "=remainder",
        "TILE_BLOCKS": 4, "CHUNK_TILES": 2,
    },
    "permutation.embedding_triton._sum_chunks_kernel": _EMBEDDING_CHUNKS,
    "permutation.embedding_triton._sum_chunks_kernel#overwrite": {**_EMBEDDING_CHUNKS, "ADD": False},
    "permutation.embedding_triton._add_parts_kernel": _EMBEDDING_PARTS,
    "permutation.embedding_triton._add_parts_kernel#overwrite": {**_EMBEDDING_PARTS, "ADD": False},
    "permutation.exchange_triton._meet_kernel": _EXCHANGE,
    "permutation.exchange_triton._copy_kernel#pull": {**_EXCHANGE, "ROUTED": True, "WRITE": False},
    "permutation.exchange_triton._copy_kernel#push": {**_EXCHANGE, "ROUTED": True, "WRITE": True},
    "permutation.exchange_triton._copy_kernel#write": {**_EXCHANGE, "ROUTED": False, "WRITE": True},
    "permutation.exchange_triton._copy_kernel#read": {**_EXCHANGE, "ROUTED": False, "WRITE": False},
    "permutation.triton_kernels._permute_kernel": {**_PERMUTATION, "INVERSE": False},
    "permutation.triton_kernels._permute_kernel#inverse": {**_PERMUTATION, "INVERSE": True},
    "grouped.gemm_triton._grouped_gemm_kernel#bf16": _GEMM,
    "grouped.gemm_triton._grouped_gemm_kernel#experts": {**_SCALED_GEMM, "biases": None, "BIAS": False},
    "grouped.gemm_triton._grouped_gemm_kernel#blocks": {
        **_SCALED_GEMM, "x_desc": "tensordesc<fp8e4nv[64,128]>", "BLOCKS": True,
        "CONFIG": "=GemmConfig(64, 128, 128, 4, 3, tma=True)",
    },
    "grouped.wgrad_triton._grouped_wgrad_kernel#bf16": _WGRAD,
    "grouped.wgrad_triton._grouped_wgrad_kernel#experts": {
        **_SCALED_WGRAD, "dy_ptr": "*fp8e5/16", "dy_desc": "tensordesc<fp8e5[64,128]>",
        "dy_rest": "tensordesc<fp8e5[64,32]>", "dy_last": "tensordesc<fp8e5[1,64,32]>", "betas": None, "BETA": 0,
        "PREFETCH": False,
    },
    "grouped.wgrad_triton._grouped_wgrad_kernel#blocks": {
        **_SCALED_WGRAD, "dy_ptr": "*fp8e4nv/16", "dy_desc": "tensordesc<fp8e4nv[64,128]>",
        "dy_rest": "tensordesc<fp8e4nv[64,32]>", "dy_last": "tensordesc<fp8e4nv[1,64,32]>", "BLOCKS": True,
    },
    "quantized.quantize_kernels.amax_kernel": _AMAX,
    "quantized.quantize_kernels.amax_kernel#matrices": {**_AMAX, **_MATRICES},
    "quantized.quantize_kernels.rows_amax_kernel": {**_ROWS, "CHUNK": 1024},
    "quantized.quantize_kernels.tiles_kernel#tensor": {**_TILES, "largest": "*i32/16", "PARTIALS": 512},
    "quantized.quantize_kernels.tiles_kernel#given": {**_TILES, "given": "*fp32"},
    "quantized.quantize_kernels.tiles_kernel#recorded": {**_TILES, "given": "*fp32", "amax": "*fp32"},
    "quantized.quantize_kernels.tiles_kernel#square": _TILES,
    "quantized.quantize_kernels.tiles_kernel#matrices": {
        **_TILES, **_MATRICES, "largest": "*i32/16", "PARTIALS": 64,
    },
    "quantized.quantize_kernels.tiles_kernel#squares": {**_TILES, **_MATRICES},
    "quantized.quantize_kernels.rows_of_experts_kernel": _ROWS,
    "quantized.quantize_kernels.blocks_kernel": {
        **_COPIES, "offsets": None, "segments": None, "E": None, "BLOCK_E": 1,
    },
    "quantized.quantize_kernels.blocks_kernel#experts": _ROWS,
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

    def type_of(given, path):
        if isinstance(given, list):
            return tuple(type_of(each, (*path, index)) for index, each in enumerate(given))
        if isinstance(given, str) and not given.startswith("="):
            name, _, alignment = given.partition("/")
            if alignment:
                aligned[path] = [["tt.divisibility", int(alignment)]]
            return name
        text = given.removeprefix("=") if isinstance(given, str) else given
        is_call = isinstance(text, str) and text.endswith(")")
        constants[path] = eval(text, vars(importlib.import_module(kernel.fn.__module__))) if is_call else text
        return "constexpr"

    for index, argument in enumerate(kernel.arg_names):
        signature[argument] = type_of(arguments[argument], (index,))
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


@pytest.mark.in_turn
def test_every_kernel_compiles_and_moves_16_bytes_at_a_time() -> None:
    assert compiled().keys() == KERNELS.keys()
    # Kernels need wide accesses for bandwidth. Those of steps and meetings move too little to matter, and whole
    # products move tiles.
    narrow = [path for path, (wide, _, _) in compiled().items() if wide == 0]
    assert narrow == [
        "optimizer.orthogonal.product_triton._full_kernel",
        "optimizer.triton_kernels.steps_kernel",
        "permutation.exchange_triton._meet_kernel",
    ]
    # Copies of 8 bits written byte by byte take the quantiser of experts half as long again. The optimizer writes so
    # the end of a row, which is no whole tile: 8 bytes a thread of each moment.
    bytewise = {path: stores for path, (_, _, stores) in compiled().items() if stores}
    assert bytewise == {"optimizer.triton_kernels.elements_kernel#bytes": 2 * 8}


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("kernel", "sums"), [("gemm_triton._grouped_gemm_kernel", 128), ("wgrad_triton._grouped_wgrad_kernel", 2 * 64)]
)
@pytest.mark.sampled(1)
def test_sums_of_8_bit_products_leave_the_tensor_cores(kernel: str, sums: int) -> None:
    """Hopper's keep 14 bits or so: each sum of the tile, 128 x 128 or 64 x 128, is added by one of 128 threads.

    Weight gradients add those of whole blocks, and those of the rest.
    """
    assert compiled()[f"grouped.{kernel}#experts"][1] >= sums
