"""Which form ``orthogonalize`` takes for a shape, and how much work that is: what plans that deal matrices out need."""

__all__ = ["GRAM_FROM", "RESTART", "orthogonalize_flops"]

RESTART = 2
"""Steps of the Gram form before Q is applied to X."""
GRAM_FROM = 1.5
"""The Gram form takes less from so many columns for a row on."""


def orthogonalize_flops(rows: int, columns: int, num_steps: int = 5) -> float:
    """FLOPs of one matrix's iterations, those of half of a symmetric product counted."""
    m, n = sorted((float(rows), float(columns)))
    if n < GRAM_FROM * m:
        return num_steps * (3 * m * m * n + m**3)
    if num_steps <= RESTART:
        return 3 * m * m * n + (4 * num_steps - 3) * m**3
    return 6 * m * m * n + (3 + 4 * (num_steps - 1) - 5) * m**3
