"""One way beside plain PyTorch on the same parts: whether it differs, and which experiment tells why."""

import math
import traceback
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..parallelizing.blocks import add_recompute
from ..simulation.simulate import SimulatedDeadlockError, SimulatedRankError, simulate
from .comparison import allowed_between, allowed_of_both, differences, distance, norm_of, parts_in, total_norm
from .diagnosis import Case, has_grad_hooks, in_words, not_reproducible, remove_grad_hooks
from .findings import Cause, Finding, WayResult
from .first_look import parameter_reads
from .plain import Grads, mean_of, run_parts
from .program import Program
from .ways import LEARNING_RATE, WEIGHT_DECAY, Piece, RankResult, Setting, Way, run_way

__all__ = ["WayJudge"]

_REFUSALS = (ValueError, RuntimeError, TypeError, NotImplementedError, FloatingPointError)
"""What the library raises on purpose. Anything else that it raises is its own fault."""
_PACKAGE = Path(__file__).parents[2]
_ROOMS = ("ddp", "fsdp", "te_integration", "kernels")


class _Off(NamedTuple):
    """A parameter that is not as plain PyTorch has it."""

    name: str
    error: float
    ranks: tuple[int, ...]


class WayJudge:
    """Runs ways of one case and compares them with plain PyTorch."""

    def __init__(self, case: Case, setting: Setting, *, parts_agree: bool) -> None:
        self.case, self.setting = case, setting
        self.parts_agree = parts_agree
        """The parts add up to the whole batch in plain PyTorch."""
        self.parts_mean: Grads = mean_of(case.own_draws)
        """What every way must compute: the mean of the parts' gradients on ranks without a wrapper."""
        self.allowed = case.allowed
        if case.look.draws:  # gradients may be larger than those with each draw at its mean
            self.allowed = allowed_of_both(case.allowed, allowed_between(self.parts_mean, None))
        self.weights, updates = _updated(case.program, self.parts_mean, setting)
        self.update_norms = {name: norm_of(update) for name, update in updates.items()}
        self.weight_norms = {name: norm_of(weight) for name, weight in self.weights.items()}
        self.of_parts = (0.0, 0.0)
        """Of a random program: errors of the parts' gradients and norm beside the whole batch, with equal draws."""
        if case.look.draws:
            same = mean_of(case.same_draws)
            pieces = [Piece(name, 0, grad.reshape(-1)) for name, grad in same.items()]
            self.of_parts = self._errors([pieces], total_norm(same.values()), case.whole)

    def judge(self, name: str, way: Way) -> tuple[WayResult, list[Finding]]:
        """Run one way; its row of the table, and what is wrong with it."""
        results = self._run(way, self.setting)
        if isinstance(results, BaseException):
            return WayResult(
                way=name, ok=False, grad_error=math.inf, norm_error=math.inf, weight_error=math.inf, fused_writes=0
            ), [self._explain_error(name, way, results)]
        off = self._off([result.grads for result in results], self.parts_mean)
        findings = list(self._explain(name, way, off, results))
        norm_error, (weight_errors, largest_weight_error) = self._norm_error(results), self._off_weights(results)
        if not off and norm_error > self._allowed_norm_error and not self._experts:
            evidence = (
                f"All gradients are right, and the global norm is {results[0].norm:.6g}: off by {norm_error:.1e}."
            )
            findings.append(Finding(cause=Cause.LIBRARY, ways=(name,), error=norm_error, evidence=evidence))
        if not off and weight_errors:
            findings.append(
                Finding(
                    cause=Cause.LIBRARY,
                    ways=(name,),
                    parameters=tuple(each.name for each in weight_errors),
                    ranks=weight_errors[0].ranks,
                    error=weight_errors[0].error,
                    evidence="All gradients are right, and the weights after AdamW's step are not those of plain "
                    "PyTorch's AdamW.",
                )
            )
        wanted = self.parts_mean if self.case.look.draws else self.case.whole
        of_way = self._errors([result.grads for result in results], results[0].norm, wanted)
        result = WayResult(
            way=name,
            ok=self.parts_agree and not findings,
            grad_error=max(of_way[0], self.of_parts[0]),
            norm_error=max(of_way[1], self.of_parts[1]),
            weight_error=largest_weight_error,
            fused_writes=results[0].fused_writes,
        )
        return result, findings

    def _run(self, way: Way, setting: Setting) -> list[RankResult] | BaseException:
        case = self.case

        def run() -> RankResult:
            mine = case.parts[dist.get_rank()]
            return run_way(case.program, way, [part.batch for part in mine], [part.draw for part in mine], setting)

        try:
            return simulate(run, len(case.parts))
        except SimulatedRankError as error:
            return error.__cause__ or error
        except SimulatedDeadlockError as error:
            return error

    # ---- Comparing. ----

    def _off(self, ranks: Sequence[Sequence[Piece]], wanted: Grads) -> list[_Off]:
        """The parameters of which a rank holds other gradients than it should, or no rank holds all."""
        errors: dict[str, tuple[float, list[int]]] = {}
        held: dict[str, set[tuple[int, int]]] = {name: set() for name in wanted}
        for rank, pieces in enumerate(ranks):
            for name, start, values in pieces:
                if name not in wanted:
                    continue
                held[name].add((start, start + len(values)))
                of_piece = wanted[name].reshape(-1)[start : start + len(values)]
                for each in differences([(name, values, of_piece)], self.allowed):
                    error, off_ranks = errors.get(name, (0.0, []))
                    errors[name] = (max(error, each.error), [*off_ranks, rank])
        for name, ranges in held.items():
            if not _covers(ranges, wanted[name].numel()):
                errors[name] = (math.inf, list(range(len(ranks))))
        found = [_Off(name, error, tuple(dict.fromkeys(off))) for name, (error, off) in errors.items()]
        return sorted(found, key=lambda each: -each.error)

    def _errors(self, ranks: Sequence[Sequence[Piece]], norm: float, wanted: Grads) -> tuple[float, float]:
        """The largest relative error of a gradient, and that of the global norm."""
        total = total_norm(wanted.values())
        return self._largest(ranks, wanted), abs(norm - total) / max(total, 1e-30)

    def _largest(self, ranks: Sequence[Sequence[Piece]], wanted: Grads) -> float:
        """Largest error of a parameter, relative to its norm or to what is allowed of it where that is more."""
        squares: dict[str, dict[int, float]] = {}  # by parameter, then by piece: several ranks may hold the same piece
        for name, start, values in (piece for pieces in ranks for piece in pieces):
            if name in wanted:
                of_piece = wanted[name].reshape(-1)[start : start + len(values)]
                square = distance(values, of_piece) ** 2
                pieces = squares.setdefault(name, {})
                pieces[start] = max(square, pieces.get(start, 0.0))
        errors = (
            math.sqrt(sum(pieces.values())) / max(norm_of(wanted[name]), 1e3 * self.allowed.by_name[name], 1e-30)
            for name, pieces in squares.items()
        )
        return max(errors, default=math.inf)

    def _norm_error(self, results: Sequence[RankResult]) -> float:
        wanted = total_norm(self.parts_mean.values())
        return max(abs(result.norm - wanted) for result in results) / max(wanted, 1e-30)

    @property
    def _allowed_norm_error(self) -> float:
        """1e-3, and more if the norm is computed in half precision."""
        return max(1e-3, *(4 * torch.finfo(grad.dtype).eps for grad in self.case.whole.values()))

    def _off_weights(self, results: Sequence[RankResult]) -> tuple[list[_Off], float]:
        """The parameters that have other values than they should; the largest error relative to an update's norm."""
        largest = 0.0
        errors: dict[str, tuple[float, list[int]]] = {}
        for rank, result in enumerate(results):
            for name, start, values in result.weights:
                if name not in self.weights:
                    continue
                wanted = self.weights[name].reshape(-1)[start : start + len(values)]
                update = self.update_norms[name]
                error = distance(values, wanted)
                slope = LEARNING_RATE / self.setting.adam_eps  # of AdamW's first step where the gradient is zero
                rounding = 4 * torch.finfo(values.dtype).eps * self.weight_norms[name]
                largest = max(largest, error / max(update, rounding, 1e-30))
                if not error <= 2 * slope * self.allowed.by_name[name] + rounding + 1e-4 * update:
                    worst, ranks = errors.get(name, (0.0, []))
                    errors[name] = (max(worst, error / max(update, 1e-30)), [*ranks, rank])
        found = [_Off(name, error, tuple(ranks)) for name, (error, ranks) in errors.items()]
        return sorted(found, key=lambda each: -each.error), largest

    # ---- Explaining. ----

    def _explain(self, name: str, way: Way, off: Sequence[_Off], results: Sequence[RankResult]) -> Iterator[Finding]:
        """Findings for the parameters that are off, by cause."""
        if not off:
            return
        common = self._common_cause(way)
        by_cause: dict[Cause, tuple[str, list[_Off]]] = {}
        for each in off:
            cause, evidence = common or self._cause_of(each, way, results)
            by_cause.setdefault(cause, (evidence, []))[1].append(each)
        for cause, (evidence, some) in by_cause.items():
            if cause is Cause.LIBRARY:
                evidence = f"{evidence} {self._contents(some[0], results)}"
            yield Finding(
                cause=cause,
                ways=(name,),
                parameters=tuple(each.name for each in some),
                ranks=tuple(sorted({rank for each in some for rank in each.ranks})),
                error=some[0].error,
                evidence=evidence,
            )

    def _common_cause(self, way: Way) -> tuple[Cause, str] | None:
        """A cause that concerns all parameters that are off."""
        again = self._again
        if again is not None:
            return again.cause, again.evidence
        if way.recompute and self._recompute_differs is not None:
            return Cause.NOT_RECOMPUTABLE, self._recompute_differs
        if has_grad_hooks(self.case.program.make()) and self._right_without_hooks(way):
            return Cause.HOOK, (
                "Without the hooks that see gradients this way computes what plain PyTorch computes without them."
            )
        return None

    def _cause_of(self, off: _Off, way: Way, results: Sequence[RankResult]) -> tuple[Cause, str]:
        if off.name in self.case.look.replaced:
            return Cause.REPLACED, "After forward, the model registers another parameter by this name than before."
        if off.name in self._experts:
            own = self._own_ranks_alone(off, results)
            if own is not None:
                return Cause.EXPERT_RANKS, own
        if way.shards_parameters:
            read = self._read_elsewhere.get(off.name)
            if read is not None:
                return Cause.READ_ELSEWHERE, read
        return Cause.LIBRARY, (
            "Plain PyTorch computes the right gradient of the same parts on the same ranks without a wrapper, and no "
            "experiment finds a cause in the program."
        )

    def _explain_error(self, name: str, way: Way, error: BaseException) -> Finding:
        """The way has raised: what in the program made it, or whose error it is."""
        text = f"{type(error).__name__}: {str(error).strip()}"
        named = [each for each in self.parts_mean if f"'{each}'" in text]
        replaced = self.case.look.replaced
        reads = self._read_elsewhere if way.shards_parameters else {}
        if replaced:
            cause, names = Cause.REPLACED, list(replaced)
            evidence = "After forward, the model registers other parameters by these names than before."
        elif way.recompute and self._recompute_differs is not None:
            cause, names, evidence = Cause.NOT_RECOMPUTABLE, named, self._recompute_differs
        elif way.shards_parameters and has_grad_hooks(self.case.program.make()) and "hook" in text:
            cause, names, evidence = Cause.HOOK, named, "This way calls no hooks of parameters."
        elif reads:
            names = [each for each in named if each in reads] or list(reads)
            cause, evidence = Cause.READ_ELSEWHERE, reads[names[0]]
        elif _is_own_error(error):
            cause, names, evidence = Cause.LIBRARY, named, "Plain PyTorch runs, and this way raises."
        else:
            cause, names, evidence = Cause.REFUSED, named, "Plain PyTorch runs, and this way raises."
        shown = text if len(text) < 600 else f"{text[:600]} ..."
        return Finding(cause=cause, ways=(name,), parameters=tuple(names), evidence=f"{evidence} {shown}")

    # ---- Experiments. ----

    @cached_property
    def _again(self) -> Finding | None:
        return not_reproducible(self.case)

    @cached_property
    def _recompute_differs(self) -> str | None:
        """Recompute in plain PyTorch."""
        units = self.setting.units
        try:
            recomputed = run_parts(
                self.case.program, self.case.parts, prepare=lambda model: add_recompute(model, [*units(model)])
            )
        except Exception as error:
            return f"Recompute fails in plain PyTorch too. {type(error).__name__}: {str(error).strip()[:300]}"
        if self.allowed.between(mean_of(recomputed), self.parts_mean):
            return "With recompute, plain PyTorch computes other gradients too: forward is not repeatable."
        return None

    def _right_without_hooks(self, way: Way) -> bool:
        plain = mean_of(run_parts(self.case.program, self.case.parts, prepare=remove_grad_hooks))
        results = self._run(way, self.setting._replace(between=remove_grad_hooks))
        return not isinstance(results, BaseException) and not self._off([each.grads for each in results], plain)

    @cached_property
    def _read_elsewhere(self) -> dict[str, str]:
        """Parameter -> which function gets it while the parameter's unit does not run. Only those that are so read."""
        model = self.case.program.make()
        names = {id(module): found for found, module in model.named_modules()}
        units = {names[id(unit)] for unit in self.setting.units(model)}
        found: dict[str, str] = {}
        for name, reads in parameter_reads(self.case.program, self.case.batch).items():
            # A parameter of the outermost unit is whole in all of forward.
            unit = next((each for each in units if name.startswith(f"{each}.")), None)
            for read in reads if unit is not None else ():
                if unit not in read.modules:
                    reader = read.modules[-1] if read.modules else ""
                    found[name] = (
                        f"{read.function} reads the parameter while {repr(reader) if reader else 'the model'} runs and "
                        f"unit {unit!r}, to which it belongs, does not: outside of its unit's forward it is a shard."
                    )
        for name in self._kept_elsewhere:
            evidence = (
                "When modules register copies of their parameters, this copy gets another gradient: the program reads "
                "the parameter by a reference of its own, which under fully_shard is to the shard."
            )
            found.setdefault(name, evidence)
        return found

    @property
    def _kept_elsewhere(self) -> list[str]:
        """Parameters whose registered copies do not get the whole gradient in plain PyTorch."""
        try:
            copied = mean_of(run_parts(self.case.program, self.case.parts, prepare=_register_copies))
        except Exception:  # the program may insist on its own objects
            return []
        return [each.name for each in self.allowed.between(copied, self.parts_mean)]

    @cached_property
    def _experts(self) -> frozenset[str]:
        """Parameters with the mark of experts."""
        params = self.case.program.make().named_parameters()
        return frozenset(name for name, param in params if getattr(param, "allreduce", True) is False)

    def _own_ranks_alone(self, off: _Off, results: Sequence[RankResult]) -> str | None:
        """Whether each rank's gradient has the parts of some ranks, with the right factor, and none of the others."""
        factors, rest = self._factors(off, results)
        count = len(factors)
        if rest > 1e-2 or any(min(abs(each), abs(each - 1 / count)) > 0.05 / count for each in factors):
            return None
        return (
            f"The parameter is marked as an expert's (allreduce = False), and on rank {off.ranks[0]} its gradient "
            f"lacks the rows of ranks that have the same weights: {in_words(factors, self.case.parts)}."
        )

    def _contents(self, off: _Off, results: Sequence[RankResult]) -> str:
        if not math.isfinite(off.error):
            return "No rank holds all of it, or it is not finite."
        factors, rest = self._factors(off, results)
        if rest > 1e-2:
            return f"Rank {off.ranks[0]}'s gradient is no sum of the parts' gradients."
        return f"Rank {off.ranks[0]}'s gradient is a sum of the parts' gradients: {in_words(factors, self.case.parts)}."

    def _factors(self, off: _Off, results: Sequence[RankResult]) -> tuple[list[float], float]:
        """How often each part is contained in what the first rank holds that is off."""
        flat = [plain.grads[off.name] for of_rank in self.case.own_draws for plain in of_rank]
        pieces = [each for each in results[off.ranks[0]].grads if each.name == off.name]

        def cut(tensor: Tensor, piece: Piece) -> Tensor:
            return tensor.reshape(-1)[piece.start : piece.start + len(piece.values)]

        return parts_in([piece.values for piece in pieces], [[cut(part, piece) for piece in pieces] for part in flat])


def _updated(program: Program, grads: Grads, setting: Setting) -> tuple[Grads, Grads]:
    """The weights after one step of plain PyTorch's AdamW, and what the step has changed, in fp32 or wider."""
    model = program.make()
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    masters = {name: nn.Parameter(param.detach().to(_wide(param), copy=True)) for name, param in params.items()}
    before = {name: master.detach().clone() for name, master in masters.items()}
    for name, master in masters.items():
        master.grad = grads[name].to(master.dtype)
    torch.optim.AdamW(masters.values(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, eps=setting.adam_eps).step()
    after = {name: master.detach() for name, master in masters.items()}
    return after, {name: after[name] - before[name] for name in after}


def _covers(ranges: Iterable[tuple[int, int]], numel: int) -> bool:
    """Whether ranges [start, end) contain all of [0, numel)."""
    reached = 0
    for start, end in sorted(ranges):
        if start > reached:
            return False
        reached = max(reached, end)
    return reached >= numel


def _register_copies(model: nn.Module) -> None:
    """Let all modules register other Parameters of the same values; what is tied stays tied."""
    copies: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            copied = copies.setdefault(id(param), nn.Parameter(param.detach().clone(), param.requires_grad))
            module.register_parameter(name, copied)


def _wide(param: Tensor) -> torch.dtype:
    """fp32 for bf16 and fp16, whose masters are fp32."""
    return torch.float32 if param.dtype in (torch.bfloat16, torch.float16) else param.dtype


def _is_own_error(error: BaseException) -> bool:
    """Whether the library has raised what it never raises on purpose."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = bool(frames) and any(Path(frames[-1].filename).is_relative_to(_PACKAGE / room) for room in _ROOMS)
    return inside and not isinstance(error, _REFUSALS)
