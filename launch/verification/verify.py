"""``verify``: runs a user's model in every way that the library offers, and compares with plain PyTorch.

1. The whole batch runs once in one process, and its parts on simulated ranks without a wrapper (``plain.py``). Some
   mistakes are seen without comparing. 2. The parts' mean is compared with the whole batch: what differs is the
program's own doing. 3. Each way (``ways.py``) runs the same parts (``judge.py``): what differs lies between the program
and the wrapper, or is the library's fault. Experiments find the cause of a difference (``experiments.py``).
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ...ddp import WORLD_OF_ONE
from ...ddp.collectives.world import Ranks, WorldOfOne
from ..parallelizing.blocks import default_units
from ..simulation.state import ProcessState
from .batches import count_rows, cut, own_copy
from .comparison import Difference, Piece, allowed_between, distance, total_norm
from .draws import modules_that_draw
from .experiments import Comparison, unequal
from .findings import Cause, Finding, Verification, VerificationError, WayResult, in_short
from .judge import Judge
from .plain import Part, Parts, Plain, alone, draw_of, mean_of, run_exact, run_parts, run_whole
from .program import Loss, Program, Step, set_seed
from .ways import WAYS, Setting

__all__ = [
    "Cause",
    "Finding",
    "Verification",
    "VerificationError",
    "WayResult",
    "check_arguments",
    "check_options",
    "verify",
]


def verify(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    loss: Loss | None = None,
    *,
    step: Step | None = None,
    ranks: int = 2,
    num_microbatches: int = 2,
    ways: Sequence[str] | None = None,
    units: Callable[[nn.Module], Iterable[nn.Module]] = default_units,
    expert_process_group: WorldOfOne | Callable[[], Ranks] | None = None,
    accept: Collection[str] = (),
    seed: int = 0,
) -> Verification:
    """Compare one iteration of a model on simulated ranks with one plain PyTorch process, on the CPU.

    Every parameter's gradient, the global norm, and the weights after a step of AdamW are compared in each way. Where
    they differ, experiments find the cause. The model and the batch stay as they are.

    model                 a module, of which each rank gets a copy; or a function without arguments that makes one,
                          where a module cannot be copied
    batch                 a tensor, ``model(batch)``; a tuple or list, ``model(*batch)``; or a mapping,
                          ``model(**batch)``. Dim 0 of its tensors are its rows, which are divided over ranks and
                          microbatches. Tensors of another dim 0 stay whole
    loss                  ``loss(output, batch)``; None: what the model returns, or its ``.loss``
    step                  ``step(model, batch)``, which calls the model and returns the loss, instead of ``loss``
    ranks                 number of simulated ranks
    num_microbatches      of each rank; all but the last run under ``no_sync``
    ways                  names of ``WAYS``; None: all of them
    units                 given a model, the modules inside it that ``fully_shard`` makes units, and that recompute
                          recomputes; the default: the members of its outermost ``nn.ModuleList``s, or of its
                          ``nn.Sequential``s if it has no list
    expert_process_group  for parameters with the mark ``allreduce = False``: a function, called on each rank, that
                          returns what ``DistributedDataParallel`` takes by this name; or ``WORLD_OF_ONE``
    accept                causes (``Cause``) that are notes, not errors
    seed                  of everything random

    Raises ``ValueError`` for an unknown way or cause, for fewer rows than ranks, for an output that is no loss, and for
    a model without trainable parameters. Raises what the program raises in plain PyTorch.
    """
    check_options(ways, accept, ranks, num_microbatches)
    chosen = list(WAYS) if ways is None else list(ways)
    program = Program(model, loss, step, seed)
    state = ProcessState.capture()
    try:
        with torch.enable_grad():
            found = _verify(program, own_copy(batch), ranks, num_microbatches, chosen, units, expert_process_group)
    except Exception as error:
        raise error.with_traceback(_from_the_program_on(error.__traceback__)) from error.__cause__
    finally:
        state.restore()
    return found.accepting([Cause(each) for each in accept])


def _from_the_program_on(trace: TracebackType | None) -> TracebackType | None:
    """The frames of an error from the program's first on; all of them where the library itself has raised."""
    found = trace
    while found is not None and found.tb_frame.f_globals.get("__name__", "").startswith(("maingrad.", "torch.")):
        found = found.tb_next
    return found or trace


def check_arguments(target: str, arguments: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for an argument that ``verify`` does not have.

    target  what has returned the arguments
    """
    unknown = sorted(set(arguments) - set(inspect.signature(verify).parameters))
    if unknown:
        raise ValueError(f"{target} returned a dict with '{unknown[0]}', which is no argument of verify")


def check_options(ways: Collection[str] | None, accept: Collection[str], ranks: int, num_microbatches: int) -> None:
    """Raise ``ValueError`` for an unknown way or cause, or too few ways, ranks or microbatches."""
    for what, given, known in (("way", ways or (), list(WAYS)), ("cause", accept, [each.value for each in Cause])):
        for each in given:
            if each not in known:
                raise ValueError(f"{str(each)!r} is no {what}: choose of {', '.join(known)}")
    if ways is not None and not ways:
        raise ValueError(f"ways names none: leave it None for all, or choose of {', '.join(WAYS)}")
    if ranks < 1 or num_microbatches < 1:
        raise ValueError(f"ranks and num_microbatches must be at least 1, got {ranks} and {num_microbatches}")


def _verify(
    program: Program,
    batch: Any,
    ranks: int,
    num_microbatches: int,
    ways: Sequence[str],
    units: Callable[[nn.Module], Iterable[nn.Module]],
    experts: WorldOfOne | Callable[[], Ranks] | None,
) -> Verification:
    findings: list[Finding] = []
    rows = count_rows(batch)
    if rows < ranks:
        raise ValueError(f"a batch of {rows} rows cannot be divided over {ranks} ranks")
    if rows % (ranks * num_microbatches):
        findings.append(_uneven(rows, ranks, num_microbatches))
        num_microbatches = min(num_microbatches, max(1, rows // ranks))
        batch = cut(batch, rows, 0, rows - rows % (ranks * num_microbatches))
        rows -= rows % (ranks * num_microbatches)
    parts = _parts(batch, rows, ranks, num_microbatches)

    drawing = alone(lambda: _drawing(program, batch))
    whole = run_whole(program, batch, means=bool(drawing))
    if not whole.grads and not whole.without:
        raise ValueError("the model has no parameter that requires a gradient: there is nothing to verify")
    plains = run_parts(program, parts, means=bool(drawing))
    findings += [*_random(drawing), *_seen(program, whole), *_not_finite(whole, plains, parts)]

    results: list[WayResult] = []
    if len(whole.without) < len(whole.grads) and not {each.cause for each in findings} & _IN_THE_WAY:
        mean = total_norm(whole.grads.values()) / math.sqrt(sum(grad.numel() for grad in whole.grads.values()))
        of_ranks = (lambda: experts) if experts is None or experts is WORLD_OF_ONE else experts
        comparison = Comparison(
            program=program,
            batch=batch,
            parts=parts,
            setting=Setting(units, of_ranks, max(mean, 1e-20)),  # type: ignore[arg-type]
            allowed=allowed_between(whole.grads, run_exact(program, batch, means=bool(drawing))),
            plains=plains,
            means=bool(drawing),
        )
        results, found = _compare(comparison, whole, ways)
        findings += found
    return Verification(
        findings=findings,
        results=results,
        num_parameters=len(whole.grads),
        num_elements=sum(grad.numel() for grad in whole.grads.values()),
        ranks=ranks,
        num_microbatches=num_microbatches,
        rows=rows,
    )


def _parts(batch: Any, rows: int, ranks: int, num_microbatches: int) -> Parts:
    """Rows in order: rank 0's microbatches first."""
    size = rows // (ranks * num_microbatches)

    def part(rank: int, index: int) -> Part:
        start = (rank * num_microbatches + index) * size
        return Part(rank, index, cut(batch, rows, start, start + size), draw_of(rank, index))

    return [[part(rank, index) for index in range(num_microbatches)] for rank in range(ranks)]


def _drawing(program: Program, batch: Any) -> list[str]:
    model, mine = program.make(), own_copy(batch)
    set_seed(program.seed)  # loss_of does so too, and then changes nothing
    return modules_that_draw(model, lambda: program.loss_of(model, mine))


# ---- What is seen without comparing. ----

_IN_THE_WAY = {Cause.NOT_FINITE, Cause.REPLACED}
"""Where these are, nothing can be compared."""


def _uneven(rows: int, ranks: int, num_microbatches: int) -> Finding:
    return Finding(
        cause=Cause.UNEVEN_BATCH,
        evidence=f"{rows} rows do not divide over {ranks} ranks of {num_microbatches} microbatches: means over parts "
        f"of different sizes are averaged as if the parts were equal. The rows that are too many are left out here.",
    )


def _random(drawing: Sequence[str]) -> Iterator[Finding]:
    if drawing:
        yield Finding(
            cause=Cause.RANDOM,
            module=in_short([name or "the program" for name in drawing]),
            evidence="A forward has moved a random generator. Ranks and microbatches draw apart, so the ways are "
            "compared with plain PyTorch on the same parts with the same seeds; the whole batch is compared with "
            "its parts in plain PyTorch with each draw replaced by its mean.",
        )


def _seen(program: Program, whole: Plain) -> Iterator[Finding]:
    """What the parameters show."""
    if whole.replaced:
        yield Finding(
            cause=Cause.REPLACED,
            parameters=whole.replaced,
            evidence="After forward, the model registers another parameter by this name than before, or the parameter "
            "had no shape before: the one that a wrapper or an optimizer has got is in the model no more, or was not "
            "there.",
        )
    elif whole.without:
        yield Finding(
            cause=Cause.UNUSED,
            parameters=whole.without,
            evidence="Autograd gives the trainable parameter no gradient: the loss does not depend on it, or forward "
            "cuts it off (torch.no_grad, detach, .data), or step calls another model than the one that it is given.",
        )
    model = program.model if program.model is not None else program.make()
    params = [(name, each) for name, each in model.named_parameters() if not nn.parameter.is_lazy(each)]
    at = sorted((each.data_ptr(), each.data_ptr() + each.nbytes, name) for name, each in params if not each.is_meta)
    for (_, end, first), (start, _, second) in zip(at, at[1:], strict=False):
        if start < end:
            yield Finding(
                cause=Cause.SHARED_MEMORY,
                parameters=(first, second),
                evidence="These are two Parameters over one memory. Each gets a gradient and an update of its own; "
                "a wrapper with flat buffers gives each its own memory, and they come apart.",
            )


def _not_finite(whole: Plain, plains: Sequence[Sequence[Plain]], parts: Parts) -> Iterator[Finding]:
    """The whole batch, or the first of its parts that has such numbers."""
    named = [(f"{part} alone", plain) for of_rank in zip(plains, parts, strict=True) for plain, part in zip(*of_rank)]
    for name, plain in [("the whole batch", whole), *named]:
        bad = tuple(name for name, grad in plain.grads.items() if not bool(grad.isfinite().all()))
        if bad or not math.isfinite(plain.loss):
            yield Finding(
                cause=Cause.NOT_FINITE,
                parameters=bad,
                evidence=f"In plain PyTorch, the loss of {name} is {plain.loss:g}, and {len(bad)} gradients are not "
                f"finite. The loss of the whole batch is {whole.loss:g}. A mean over no rows, or no tokens, is such a "
                f"number.",
            )
            return


# ---- What is compared. ----


def _compare(comparison: Comparison, whole: Plain, ways: Sequence[str]) -> tuple[list[WayResult], list[Finding]]:
    """The whole batch and its parts, and the ways."""
    findings: list[Finding] = []
    mean = comparison.mean
    differing = comparison.allowed.differences([[Piece(name, 0, mean[name].reshape(-1)) for name in mean]], whole.grads)
    off = [each for each in differing if each.is_off]
    if off:
        findings.append(_explain(comparison, whole, off))
    buffers = unequal(comparison.plains[0][0].buffers, comparison.plains[-1][0].buffers)
    if buffers and Cause.BATCH_STATISTICS not in {each.cause for each in findings}:
        evidence = "After a forward of its own rows each rank has other values in these buffers."
        findings.append(Finding(cause=Cause.BUFFERS, module=in_short(buffers), evidence=evidence))

    parts = comparison
    if comparison.means:  # ways draw, and their gradients may be larger than those with each draw at its mean
        plains = run_parts(comparison.program, comparison.parts, means=False)
        allowed = allowed_between(mean_of(plains), None)
        parts = replace(comparison, plains=plains, means=False, allowed=allowed)
    norm = total_norm(whole.grads.values())
    norm_error = abs(total_norm(mean.values()) - norm) / max(norm, 1e-30)
    judge = Judge(parts, grad_error=differing[0].error, norm_error=norm_error)
    results, of_ways = [], []
    for name in ways:
        result, finding = judge.judge(name, WAYS[name])
        results.append(replace(result, ok=result.ok and not off))
        of_ways += [] if finding is None else [finding]
    shown = {each.cause for each in findings}  # plain PyTorch shows these
    return results, findings + [each for each in _merged(of_ways) if each.cause not in shown]


def _explain(comparison: Comparison, whole: Plain, off: Sequence[Difference]) -> Finding:
    """Why the mean of the parts' gradients is not the whole batch's gradient."""
    names = [each.name for each in off]
    finding = comparison.find_cause(names) or _by_contents(comparison, whole, names)
    errors = {each.name: each.error for each in off}
    return replace(finding, error=max(errors.get(name, 0.0) for name in finding.parameters))


_MAX_ELEMENTS = 2_000_000
"""Of the gradients that are decomposed: parts are compared in memory, in fp64."""
_EXPLAINED = 0.05
"""Share of a difference below which the rest is small: other factors of the parts explain the difference."""


def _by_contents(comparison: Comparison, whole: Plain, names: Sequence[str]) -> Finding:
    """Which cause the whole batch's gradient shows, given as a sum of the parts' gradients.

    No experiment has shown a cause: the gradient of a part is a function of its rows alone. If the whole batch's
    gradient is a sum of them, the factors are wrong; if it is none, rows act on each other.
    """
    pieces: list[Piece] = []
    room = _MAX_ELEMENTS
    for name in names:
        room -= whole.grads[name].numel()
        if not pieces or room >= 0:
            pieces.append(Piece(name, 0, whole.grads[name].reshape(-1)))
    shares, rest, words = comparison.contents(pieces)
    difference = math.sqrt(sum(distance(each.values, comparison.mean[each.name].reshape(-1)) ** 2 for each in pieces))
    words = f"The whole batch's gradient is a sum of the parts' gradients in plain PyTorch: {words}."
    if rest * total_norm(each.values for each in pieces) > _EXPLAINED * difference:
        cause = Cause.MIXED_ROWS
        words = (
            "The whole batch's gradient is no sum of the parts' gradients, and no experiment finds another cause: a "
            "module or the loss compares the rows of a batch with each other, or the loss is not linear in them."
        )
    elif max(shares) - min(shares) < 0.02 * abs(sum(shares) / len(shares)):
        cause = Cause.SUM
        words = f"{words} So the loss is not a mean over rows: it grows with their number."
    else:
        cause = Cause.WEIGHTED_MEAN
        words = (
            f"{words} So parts with equally many rows count differently: the loss is a mean over something else than "
            f"rows, such as unmasked tokens, of which the parts have different numbers."
        )
    return Finding(cause=cause, parameters=tuple(names), evidence=words)


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for each cause and parameter, with all ways that show it; the worst error and evidence."""
    merged: dict[tuple[Any, ...], Finding] = {}
    for each in findings:
        key = (each.cause, frozenset(each.parameters))
        known = merged.get(key, each)
        worse = each if each.error > known.error else known
        ways = tuple(dict.fromkeys((*known.ways, *each.ways)))
        merged[key] = replace(worse, ways=ways, ranks=tuple(sorted({*known.ranks, *each.ranks})))
    return list(merged.values())
