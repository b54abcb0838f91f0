"""What a rank has seen, beside what plain PyTorch has computed."""

import contextlib
import math

import torch


class Differs(AssertionError):
    """A rank has seen something else than plain PyTorch."""


def compare(found, expected, tolerance, exact=None):
    """What each rank has noted, by name, with what it should have. What is "first" has no steps' roundings in it.

    exact  what plain PyTorch computes in fp32, where the program is in bf16: its own roundings may be the larger ones,
           so that a piece may be as near to this
    """
    for rank, (mine, wanted) in enumerate(zip(found, expected, strict=True)):
        for what, value in mine.items():
            allowed = min(tolerance, 1e-4) if what.startswith("first ") else tolerance
            wholes = [wanted[what]] if exact is None else [wanted[what], exact[rank][what]]
            if isinstance(value, dict):
                floors = [smallest_scale(whole, allowed) for whole in wholes]
                for name, piece in value.items():
                    by_name = [(whole[name], floor) for whole, floor in zip(wholes, floors, strict=True)]
                    compare_with_one(f"rank {rank}: {what}: {name}", piece, by_name, allowed)
            else:
                pairs = [((0, whole), 1e-3) for whole in wholes]
                compare_with_one(f"rank {rank}: {what}", (0, value), pairs, allowed)
        missing = [what for what in wanted if what not in mine]
        if missing:
            raise Differs(f"rank {rank}: {missing[0]}: missing")


def compare_with_one(what, piece, wholes, tolerance):
    """The piece agrees with one of the wholes; the error tells how it differs from the first."""
    for whole, floor in wholes[1:]:
        with contextlib.suppress(Differs):
            return compare_piece(what, piece, whole, tolerance, floor)
    whole, floor = wholes[0]
    return compare_piece(what, piece, whole, tolerance, floor)


def smallest_scale(wholes, tolerance):
    """What an error is relative to at least. In bf16 the large parts of a model bring the errors of its small ones."""
    norms = [float(torch.as_tensor(whole[1]).double().norm()) for whole in wholes.values() if whole is not None]
    largest = max((norm for norm in norms if math.isfinite(norm)), default=0.0)
    return max(1e-3, largest / 10 if tolerance > 0.01 else 0.0)


def compare_piece(what, piece, whole, tolerance, floor=1e-3):
    """``tolerance`` is relative to the norm of the whole, or to ``floor`` where the norm is smaller."""
    if piece is None or whole is None:
        if piece is not whole:
            raise Differs(f"{what}: {piece} where {whole} was expected")
        return
    start, values = piece
    values, all_of_it = (torch.as_tensor(each, dtype=torch.float64).reshape(-1) for each in (values, whole[1]))
    wanted = all_of_it[start : start + len(values)]
    if len(values) != len(wanted):
        raise Differs(f"{what}: {len(values)} elements where {len(wanted)} were expected")
    if not torch.isfinite(wanted).all():
        if torch.isfinite(values).all():
            raise Differs(f"{what}: {values.tolist()} where {wanted.tolist()} was expected")
        return
    scale = all_of_it[torch.isfinite(all_of_it)]  # the other ranks' parts may have overflowed
    if float(scale.abs().max() if len(scale) else 0.0) > 1e6:
        return  # training has diverged, and steps make more of every rounding
    error, norm = float((values - wanted).norm()), max(float(scale.norm()), floor)
    if not error <= tolerance * norm:
        raise Differs(f"{what}: off by {error / norm:.1e}: {values.tolist()} where {wanted.tolist()} was expected")
