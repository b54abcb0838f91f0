"""Helpers of the Triton kernels: device functions, and properties of tensors and GPUs."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .compat import capability_of
from .experts import Experts

__all__ = [
    "Launches",
    "dot_precision",
    "expert_pointer",
    "experts_descriptor",
    "is_interpreted",
    "kinds_of",
    "num_multiprocessors",
    "prefetch_to_l2",
    "takes_tma",
    "tile_of",
    "tiles_of_experts",
]


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), without inline assembly."""
    return bool(triton.knobs.runtime.interpret)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 2 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


class Launches:
    """Launches of a kernel whose compiled forms a key of the caller's tells apart.

    Triton looks at each argument of each launch for that, which takes the host 8 to 12 us: four times what is left.

    kernel   a ``triton.jit`` function
    counts   names of arguments that stay arguments where they are 1. Triton makes constants of those, and 3.6 then
             wrote elements of a quantised copy that were not the kernel's
    options  of the compiler, in all launches
    """

    def __init__(self, kernel: Any, counts: Sequence[str] = (), **options: int) -> None:
        self._kernel, self._counts, self._options = kernel, counts, options
        self._compiled: dict[Any, Any] = {}

    def __call__(self, key: Any, grid: tuple[int, int, int], *arguments: Any, **options: int) -> None:
        """Launch on the current device and stream.

        key        the device, and of the arguments all integers, constants and dtypes; of each pointer whether 16
                   divides it, where Triton may look and memory is not new
        arguments  all of the kernel's, constants too, by position
        options    of the compiler, in this launch; the key tells them apart too
        """
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*arguments)
            return
        is_one = any(arguments[self._kernel.arg_names.index(name)] == 1 for name in self._counts)
        kernel = self._with_counts if is_one else self._kernel
        compiled = kernel[grid](*arguments, **self._options, **options)
        if compiled is not None:  # the interpreter compiles nothing
            if len(self._compiled) >= _MOST_FORMS:
                self._compiled.clear()
            self._compiled[key] = compiled

    @functools.cached_property
    def _with_counts(self) -> Any:
        return triton.jit(self._kernel.fn, do_not_specialize=list(self._counts))


def kinds_of(*tensors: Tensor | None) -> tuple[tuple[torch.dtype, bool] | None, ...]:
    """For a key of ``Launches``: dtypes, and whether 16 divides addresses."""
    return tuple([None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors])


_MOST_FORMS = 4096
"""Keys that ``Launches`` remembers: sizes may differ in each launch."""


def takes_tma(tensor: Tensor) -> bool:
    """Whether the tensor memory accelerator can address ``tensor`` [..., columns]: sm90, 16-byte rows, 16 or 8 bits.

    The interpreter supports descriptors on every device.
    """
    size = tensor.element_size()
    if (
        size > 2
        or not tensor.numel()
        or tensor.data_ptr() % 16
        or any(stride * size % 16 for stride in tensor.stride()[:-1])
    ):
        return False
    capability = capability_of(tensor.device)
    return is_interpreted() or (capability is not None and capability >= (9, 0))


def dot_precision() -> str:
    """Precision of products of fp32 operands, as set by ``torch.set_float32_matmul_precision``."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def experts_descriptor(experts: Experts, num_experts: int, block: list[int]) -> TensorDescriptor:
    """Evenly spaced matrices as one tensor [experts, rows, columns].

    An access outside a matrix reads 0 and writes nothing, even if another matrix lies there.
    """
    rows, columns = experts.base.shape
    # The stride of a single packed expert is arbitrary.
    stride = experts.stride if num_experts > 1 else rows * experts.base.stride(0)
    return TensorDescriptor(experts.base, [num_experts, rows, columns], [stride, experts.base.stride(0), 1], block)


@triton.jit
def tile_of(index: tl.tensor, tiles_rows: tl.tensor, tiles_columns: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """Row and column of the tile ``index``: groups of GROUP rows of tiles, column by column within a group.

    Tiles that run at the same time then share operands in L2.
    """
    width = GROUP * tiles_columns
    first = index // width * GROUP
    height = tl.maximum(min(tiles_rows - first, GROUP), 1)  # programs without a tile come here too
    return first + index % width % height, index % width // height


@triton.jit
def expert_pointer(experts: tl.tuple, expert: tl.tensor, ALIGNED: tl.constexpr) -> tl.tensor:
    """Address of the expert's tensor. experts: ``Experts.argument``."""
    base, table, stride, first, step = experts
    if table is not None:
        pointer = tl.load(table + expert).to(base.dtype)
        if ALIGNED:
            pointer = tl.multiple_of(pointer, 16)
    else:
        pointer = base + (first + step * expert).to(tl.int64) * stride
    return pointer


@triton.jit
def tiles_of_experts(
    program: tl.tensor,
    offsets: tl.tensor,
    E: tl.tensor,
    T: tl.tensor,
    across: tl.tensor,
    BLOCK_E: tl.constexpr,
    HEIGHT: tl.constexpr,
) -> tl.tensor:
    """The expert of a program: each expert's rows are cut into tiles of HEIGHT rows, and ``across`` tiles lie abreast.

    Also [BLOCK_E] of the experts: numbers, first rows, ends of rows, tiles along the rows, and those up to the expert's
    end. Expert E stands for the rows behind the last expert. A program without a tile gets an expert above E.
    """
    groups = tl.arange(0, BLOCK_E)
    starts = tl.load(offsets + groups, mask=groups <= E, other=0).to(tl.int32)
    ends = tl.load(offsets + groups + 1, mask=groups < E, other=0).to(tl.int32)
    ends = tl.where(groups == E, T, ends)
    tiles = tl.where(groups <= E, (ends - starts + HEIGHT - 1) // HEIGHT, 0)
    tiles_until = tl.cumsum(tiles, 0)
    expert = tl.sum((tiles_until * across <= program).to(tl.int32), 0)
    return expert, groups, starts, ends, tiles, tiles_until


@triton.jit
def prefetch_to_l2(pointers: tl.tensor) -> None:
    """Prefetch the cache lines at ``pointers`` into L2 (PTX)."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
