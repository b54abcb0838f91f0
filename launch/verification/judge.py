"""One way beside plain PyTorch on the same parts: whether gradients, the global norm and the weights are right."""

import math
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from .comparison import Allowed, Difference, distance, norm_of, total_norm
from .experiments import Comparison
from .findings import Cause, Finding, WayResult
from .plain import Grads
from .ways import RankResult, Way

__all__ = ["Judge"]

_REFUSALS = (ValueError, RuntimeError, TypeError, NotImplementedError, FloatingPointError)
"""What the library raises on purpose. Anything else that it raises is its own fault."""
_PACKAGE = Path(__file__).parents[2]
_ROOMS = ("ddp", "fsdp", "te_integration", "kernels")


class Judge:
    """Runs ways and compares them with the mean of the parts' gradients, which each of them must compute.

    parts       the parts on ranks without a wrapper; each part draws its own random numbers
    grad_error  largest error of a gradient of the parts' mean beside the whole batch
    norm_error  error of the norm of the parts' mean
    """

    def __init__(self, parts: Comparison, *, grad_error: float, norm_error: float) -> None:
        self._parts, self._grad_error, self._norm_error = parts, grad_error, norm_error
        self._mean = parts.mean

    def judge(self, name: str, way: Way) -> tuple[WayResult, Finding | None]:
        """Run one way; its row of the table, and what is wrong with it."""
        comparison = replace(self._parts, way=way)
        try:
            results = comparison.run_way()
        except Exception as error:
            return _failed(name), replace(self._explain_error(comparison, error), ways=(name,))
        grads = comparison.allowed.differences([result.grads for result in results], self._mean)
        weights = self._allowed_weights.differences([result.weights for result in results], self._weights)
        norm = total_norm(self._mean.values())
        norm_error = max(abs(result.norm - norm) for result in results) / max(norm, 1e-30)
        finding = None
        if any(each.is_off for each in grads):
            finding = _explain(comparison, [each for each in grads if each.is_off], results)
        elif norm_error > self._allowed_norm_error:
            finding = Finding(
                cause=Cause.LIBRARY,
                error=norm_error,
                evidence=f"All gradients are right, and the global norm is {results[0].norm:.6g}: off by "
                f"{norm_error:.1e}.",
            )
        elif any(each.is_off for each in weights):
            evidence = (
                "All gradients are right, and the weights after AdamW's step are not those of plain PyTorch's AdamW."
            )
            finding = _about(Finding(cause=Cause.LIBRARY, evidence=evidence), [each for each in weights if each.is_off])
        row = WayResult(
            way=name,
            ok=finding is None,
            grad_error=max(grads[0].error, self._grad_error),
            norm_error=max(norm_error, self._norm_error),
            weight_error=weights[0].error,
            fused_writes=results[0].fused_writes,
        )
        return row, None if finding is None else replace(finding, ways=(name,))

    @property
    def _allowed_norm_error(self) -> float:
        """1e-3, and more if the norm is computed in half precision."""
        params = self._parts.program.make().parameters()
        return max(1e-3, *(4 * torch.finfo(param.dtype).eps for param in params))

    @cached_property
    def _updated(self) -> tuple[Grads, Grads]:
        """The weights before and after one step of plain PyTorch's AdamW, in fp32 or wider."""
        params = dict(self._parts.program.make().named_parameters())
        before = {name: params[name].detach().to(_wide(params[name].dtype)) for name in self._mean}
        masters = {name: nn.Parameter(weight.clone()) for name, weight in before.items()}
        for name, master in masters.items():
            master.grad = self._mean[name].to(master.dtype)
        torch.optim.AdamW(masters.values(), **self._parts.setting.adamw).step()
        return before, {name: master.detach() for name, master in masters.items()}

    @property
    def _weights(self) -> Grads:
        return self._updated[1]

    @cached_property
    def _allowed_weights(self) -> Allowed:
        """Errors are relative to the norm of the update."""
        before, after = self._updated
        params = dict(self._parts.program.make().named_parameters())
        adamw = self._parts.setting.adamw
        slope = adamw["lr"] / adamw["eps"]  # of AdamW's first step where the gradient is zero
        allowed, unit = {}, {}
        for name, weight in after.items():
            update = distance(weight, before[name])
            rounding = 4 * torch.finfo(params[name].dtype).eps * norm_of(weight)
            allowed[name] = 2 * slope * self._parts.allowed.by_name[name] + rounding + 1e-4 * update
            unit[name] = max(update, rounding, 1e-30)
        return Allowed(allowed, unit)

    def _explain_error(self, comparison: Comparison, error: Exception) -> Finding:
        """The way has raised: what in the program made it, or whose error it is."""
        text = f"{type(error).__name__}: {str(error).strip()}"
        named = [name for name in self._mean if f"'{name}'" in text]
        shown = text if len(text) < 600 else f"{text[:600]} ..."
        finding = comparison.find_cause(named)
        if finding is None:
            cause = Cause.LIBRARY if _is_own_error(error) else Cause.REFUSED
            evidence = "Plain PyTorch runs, and this way raises."
            finding = Finding(cause=cause, parameters=tuple(named), evidence=evidence)
        return replace(finding, evidence=f"{finding.evidence} {shown}")


def _explain(comparison: Comparison, off: Sequence[Difference], results: Sequence[RankResult]) -> Finding:
    """The program's mistake that experiments find; the library's fault, if they find none."""
    finding = comparison.find_cause([each.name for each in off])
    if finding is not None:
        errors = {each.name: each.error for each in off}
        return replace(finding, error=max(errors.get(name, 0.0) for name in finding.parameters))
    worst = off[0]
    rank = next(iter(worst.ranks), 0)
    if math.isfinite(worst.error):
        _, rest, words = comparison.contents([piece for piece in results[rank].grads if piece.name == worst.name])
        contents = f"a sum of the parts' gradients: {words}." if rest <= 1e-2 else "no sum of the parts' gradients."
        contents = f"Rank {rank}'s gradient is {contents}"
    else:
        contents = "No rank holds all of it, or it is not finite."
    evidence = (
        "Plain PyTorch computes the right gradient of the same parts on the same ranks without a wrapper, and no "
        f"experiment finds a cause in the program. {contents}"
    )
    return _about(Finding(cause=Cause.LIBRARY, evidence=evidence), off)


def _about(finding: Finding, off: Sequence[Difference]) -> Finding:
    ranks = tuple(sorted({rank for each in off for rank in each.ranks}))
    return replace(finding, parameters=tuple(each.name for each in off), ranks=ranks, error=off[0].error)


def _failed(name: str) -> WayResult:
    return WayResult(
        way=name, ok=False, grad_error=math.inf, norm_error=math.inf, weight_error=math.inf, fused_writes=0
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """fp32 for bf16 and fp16, whose masters are fp32."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _is_own_error(error: BaseException) -> bool:
    """Whether the library has raised what it never raises on purpose."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = bool(frames) and any(Path(frames[-1].filename).is_relative_to(_PACKAGE / room) for room in _ROOMS)
    return inside and not isinstance(error, _REFUSALS)
