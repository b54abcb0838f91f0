"""One way beside plain PyTorch on the same parts: whether gradients, the global norm and the weights are right."""

import math
import traceback
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ...ddp.torch_grads.muon import Muon, part_rows, steps_of, update_ratio
from ...ddp.torch_grads.muon_groups import MuonGroups
from .comparison import Allowed, Difference, distance, norm_of, off_in, total_norm
from .experiments import Comparison, about
from .findings import Cause, Finding, WayResult
from .plain import Grads
from .ways import RankResult, Way

__all__ = ["judge"]


def judge(name: str, way: Way, parts: Comparison) -> tuple[WayResult, Finding | None]:
    """Run one way; its row of the table, and what is wrong with it."""
    comparison = replace(parts, way=way)
    try:
        results = comparison.run_way(way, parts.setting)
    except Exception as error:
        return WayResult(way=name), _explain_error(comparison, error)
    mean = comparison.mean
    norm = total_norm(mean.values())
    norm_error = max(abs(result.norm - norm) for result in results)
    allowed_norm_error = math.hypot(*comparison.allowed.by_name.values())
    grads = comparison.allowed.differences([result.grads for result in results], mean)
    updated, allowed = _updated_weights(comparison, mean)
    weights = allowed.differences([result.weights for result in results], updated)
    off, finding = off_in(grads), None
    if off:
        finding = comparison.find_cause(off) or _blame_library(comparison, off, results)
    elif norm_error > allowed_norm_error and comparison.setting.experts is None:
        finding = Finding(
            cause=Cause.LIBRARY, evidence=f"All gradients are right, and the global norm is {results[0].norm:.6g}."
        )
    elif off_in(weights):
        finding = about(
            off_in(weights),
            Cause.LIBRARY,
            "All gradients are right, and the weights after the step are not those of the optimizer in one process.",
        )
    result = WayResult(
        way=name,
        ok=finding is None,
        grad_error=grads[0].error,
        norm_error=norm_error / max(norm, 1e-30),
        weight_error=weights[0].error,
        fused_writes=results[0].fused_writes,
    )
    return result, finding


def _updated_weights(comparison: Comparison, mean: Grads) -> tuple[Grads, Allowed]:
    """The weights after one step in one process, and errors that are relative to the step."""
    module = comparison.program.make()
    params, muon = dict(module.named_parameters()), comparison.setting.matrices(module)
    masters = {name: nn.Parameter(params[name].detach().to(grad.dtype, copy=True)) for name, grad in mean.items()}
    for name, grad in mean.items():
        masters[name].grad = grad
    adamw = comparison.setting.adamw
    for group in muon.groups:
        options = {key: value for key, value in group.items() if key not in ("params", "optimizer")}
        Muon([masters[name] for name in group["params"]], **options).step()
    torch.optim.AdamW([master for name, master in masters.items() if name not in muon.matrices], **adamw).step()
    # Of AdamW's first step where the gradient is zero; of Muon's where singular values are small.
    slopes = dict.fromkeys(masters, adamw["lr"] / adamw["eps"]) | _slopes_of(muon, mean)
    by_name, unit = {}, {}
    for name, master in masters.items():
        step = distance(master, params[name])
        rounding = 4 * torch.finfo(params[name].dtype).eps * norm_of(master)
        by_name[name] = 2 * slopes[name] * comparison.allowed.by_name[name] + rounding + 1e-4 * step
        unit[name] = max(step, rounding, 1e-30)
    return masters, Allowed(by_name, unit)


def _slopes_of(muon: MuonGroups, grads: Grads) -> dict[str, float]:
    """How much Muon's first step magnifies an error of a gradient, at most: a ``split`` matrix by its smallest part."""
    slopes = {}
    for group in muon.groups:
        slope = math.prod(step.a for step in steps_of(group))
        for name in group["params"]:
            *_, rows, columns = grads[name].shape
            stack = grads[name].view(-1, rows, columns)
            parts = part_rows(group["split"], rows)
            norms = [float(matrix[first:end].norm()) for matrix in stack for first, end in parts]
            scale = max(update_ratio(group.get("adjust_lr_fn"), end - first, columns) for first, end in parts)
            slopes[name] = group.get("lr", 1e-3) * scale * slope / max(min(norms), 1e-30)
    return slopes


def _blame_library(comparison: Comparison, off: Sequence[Difference], results: Sequence[RankResult]) -> Finding:
    """The program is right, and this way's gradients are not: what the farthest gradient is made of."""
    worst = off[0]
    rank = next(iter(worst.ranks), 0)
    contents = "No rank holds all of it, or it is not finite."
    if math.isfinite(worst.error):
        piece = next(piece for piece in results[rank].grads if piece.name == worst.name)
        _, rest, words = comparison.contents(piece)
        found = f"a sum of the parts' gradients: {words}." if rest <= 1e-2 else "no sum of the parts' gradients."
        contents = f"Rank {rank}'s gradient is {found}"
    evidence = (
        "Plain PyTorch computes the right gradient of the same parts on the same ranks without a wrapper, and no "
        "experiment finds a cause in the program."
    )
    return about(off, Cause.LIBRARY, f"{evidence} {contents}")


_REFUSALS = (ValueError, RuntimeError, TypeError, FloatingPointError)
"""What the library raises on purpose. Anything else that it raises is its own fault."""
_COLLECTIVES = ("maingrad.ddp.collectives.", "maingrad.launch.simulation.")
"""Modules that raise where ranks call different collectives."""


def _explain_error(comparison: Comparison, error: Exception) -> Finding:
    """The way has raised: what in the program made it, or whose error it is."""
    text = f"{type(error).__name__}: {str(error).strip()}"
    named = [Difference(name, 0.0, True, ()) for name in comparison.allowed.by_name if f"'{name}'" in text]
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    raised_in = frame.f_globals.get("__name__", "")
    if isinstance(error, RuntimeError) and raised_in.startswith(_COLLECTIVES):  # one unit would hide it
        evidence = (
            "Ranks call different collectives: under fully_shard all ranks must run the same units in the same order. "
            "Let each rank run all of them, or make one unit of the modules between which a rank chooses."
        )
        finding = about((), Cause.REFUSED, evidence)
    else:
        finding = comparison.find_cause(named) or about(
            named,
            Cause.LIBRARY if raised_in.startswith("maingrad.") and not isinstance(error, _REFUSALS) else Cause.REFUSED,
            "Plain PyTorch runs, and this way raises.",
        )
    return replace(finding, evidence=f"{finding.evidence} {text[:600]}")
