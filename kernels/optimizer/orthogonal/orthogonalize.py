"""``orthogonalize``: Newton-Schulz iterations on a batch of matrices; on GPUs in fp16, with half of the products.

X X^T and its polynomials are symmetric, so that half of each such product is enough. Where the columns n are many,
most of the work moves into the Gram matrix R = X X^T (Gram form): after some steps X is Q X with one matrix Q, which is
a product of polynomials of R. With m <= n, a step of X itself takes 3 m^2 n + m^3 multiplications and additions, one of
R and Q about 4 m^3.

Rounding errors of R grow from step to step, and can bring negative eigenvalues. Q is therefore applied to X after two
steps, and R is computed anew. In bf16 the Gram form is worse than the plain one, in fp16 three to seven times better
than the plain one in bf16 (``tests/kernels/test_orthogonalize.py`` has the bounds). fp16 needs its numbers in
range: X begins at X0 * 2^k with elements of about 1, and R is held as R * 2^10.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...compat import HAS_TRITON, runs_on_triton
from .flops import GRAM_FROM, RESTART
from .reference import COEFFICIENTS, Step, inverse_norms, newton_schulz_reference

if HAS_TRITON:
    from .product_triton import full_product, symmetric_product

__all__ = ["dtype_of_results", "orthogonalize"]

_GRAM_SCALE = 2.0**10


def orthogonalize(matrices: Tensor, steps: Sequence[Step] = COEFFICIENTS["simple"]) -> Tensor:
    """Orthogonalise matrices [B, m, n] or [m, n], in any float dtype, which are not changed.

    Returns matrices of the same shape: in fp16 on CUDA with Triton, where a matrix has the same bits in each batch;
    else, and for fp64, by ``newton_schulz_reference`` in fp32. Both have the result of U for ``2^k U``. Nothing waits
    for the device.

    steps  coefficients of each iteration; ``COEFFICIENTS`` has sets by name

    Raises ``ValueError`` for other shapes, or without steps.
    """
    if matrices.dim() not in (2, 3) or not steps:
        raise ValueError(f"matrices [B, m, n] or [m, n] and at least one step; got {list(matrices.shape)}, {steps}")
    if matrices.dim() == 2:
        return orthogonalize(matrices[None], steps)[0]
    if not (matrices.numel() and runs_on_triton("orthogonalize", matrices)):
        return newton_schulz_reference(matrices, steps)
    x, scale = _normalized(matrices)
    m, n = sorted(matrices.shape[1:])
    return _plain_form(x, scale, steps) if n < GRAM_FROM * m else _gram_form(x, scale, steps)


def dtype_of_results(like: Tensor) -> torch.dtype:
    """The dtype that ``orthogonalize`` returns on the device of ``like``, an fp32 tensor."""
    return torch.float16 if runs_on_triton("orthogonalize", like) else torch.float32


def _normalized(matrices: Tensor) -> tuple[Tensor, float]:
    """X0 = U / |U|_F in fp16, times a power of two that is returned: elements are about 1 in size."""
    rows, columns = matrices.shape[1:]
    scale = 2.0 ** min(15, round(math.log2(rows * columns) / 2))
    x = _matrices_like(matrices, columns)
    torch.mul(matrices, inverse_norms(matrices, scale), out=x)
    return x, scale


def _matrices_like(matrices: Tensor, columns: int) -> Tensor:
    """Memory for fp16 matrices with as many rows, whose rows are whole 16 bytes."""
    count, rows, _ = matrices.shape
    width = -(-columns // 8) * 8
    return matrices.new_empty(count, rows, width, dtype=torch.float16)[:, :, :columns]


def _plain_form(x: Tensor, scale: float, steps: Sequence[Step]) -> Tensor:
    """Iterations of X. x: X0 * scale."""
    gram, polynomial = _squares_like(x), _squares_like(x)
    other = _matrices_like(x, x.shape[2])
    for a, b, c in steps:
        _gram(x, gram, 1 / scale**2)
        symmetric_product(gram, gram, polynomial, alpha=c, beta=b, addend=gram, diagonal=a)
        _apply(polynomial, x, other, 1 / scale)
        x, other, scale = other, x, 1.0
    return x


def _gram_form(x: Tensor, scale: float, steps: Sequence[Step]) -> Tensor:
    """Iterations of R and Q. x: X0 * scale."""
    r, q, z, spare = (_squares_like(x) for _ in range(4))
    other = _matrices_like(x, x.shape[2])
    begins = True
    for index, (a, b, c) in enumerate(steps):
        if begins:
            _gram(x, r, _GRAM_SCALE / scale**2)
        # Z = b R + c R^2, so that a step is X = (Z + a I) X. All are polynomials of R, and symmetric.
        symmetric_product(r, r, z, alpha=c / _GRAM_SCALE**2, beta=b / _GRAM_SCALE, addend=r)
        if begins:
            q.copy_(z)
            q.diagonal(dim1=1, dim2=2).add_(a)
        else:
            symmetric_product(q, z, spare, beta=a, addend=q)
            q, spare = spare, q
        ends = index + 1 in (RESTART, len(steps))
        if ends:
            _apply(q, x, other, 1 / scale)
            x, other, scale = other, x, 1.0
        else:  # R = (Z + a I) R (Z + a I)
            symmetric_product(r, z, spare, beta=a, addend=r)
            symmetric_product(spare, z, r, beta=a, addend=spare)
        begins = ends
    return x


# Where rows are more than columns, X is held as it is, and its transposed matrix is meant: a transposed copy, and the
# update of weights by one, take twice the time of plain passes.


def _is_tall(x: Tensor) -> bool:
    return x.shape[1] > x.shape[2]


def _squares_like(x: Tensor) -> Tensor:
    """Memory for X X^T."""
    size = min(x.shape[1:])
    return _matrices_like(x[:, :size], size)


def _gram(x: Tensor, out: Tensor, alpha: float) -> None:
    """``out = alpha X X^T``."""
    symmetric_product(x, x, out, tall=_is_tall(x), alpha=alpha)


def _apply(q: Tensor, x: Tensor, out: Tensor, alpha: float) -> None:
    """``out = alpha Q X``. q: symmetric."""
    full_product(*((x, q) if _is_tall(x) else (q, x)), out, alpha=alpha)
