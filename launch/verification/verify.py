"""``verify``: runs a user's model in every way that the library offers, and compares with plain PyTorch.

The order of things. The whole batch runs once in one process (``first_look.py``). Its parts run on simulated ranks
without a wrapper (``plain.py``): what differs now is the program's own doing, and ``diagnosis.py`` finds out what.
Then each way (``ways.py``) runs the same parts: what differs now lies between the program and the wrapper, or is the
library's fault (``way_diagnosis.py``).
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
from .comparison import Allowed, allowed_between, total_norm
from .diagnosis import Case, explain_parts
from .findings import Cause, Finding, Verification, VerificationError, WayResult
from .first_look import FirstLook, first_look, in_short, look_at_memory, look_at_unreached
from .plain import Part, Parts, alone, draw_of, run_exact, run_one, run_parts
from .program import Loss, Program, Step
from .way_diagnosis import WayJudge
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
    findings += look_at_memory(program)
    params = {name: param for name, param in program.make().named_parameters() if param.requires_grad}
    if not params:
        raise ValueError("the model has no parameter that requires a gradient: there is nothing to verify")
    results: list[WayResult] = []

    def verification() -> Verification:
        return Verification(
            findings=findings,
            results=results,
            num_parameters=len(params),
            num_elements=sum(0 if _is_lazy(param) else param.numel() for param in params.values()),
            ranks=ranks,
            num_microbatches=num_microbatches,
            rows=rows,
        )

    lazy = tuple(name for name, param in params.items() if _is_lazy(param))
    if lazy:
        evidence = "The parameter has no shape before the first forward, and is wrapped before it."
        findings.append(Finding(cause=Cause.REPLACED, parameters=lazy, evidence=evidence))
        return verification()
    look = first_look(program, batch)
    findings += look.findings
    if any(each.cause in (Cause.NOT_FINITE, Cause.OTHER_MODEL) for each in look.findings):
        return verification()
    if look.plain.without:
        findings += look_at_unreached(program, batch, look.plain.without)
    if len(look.plain.without) == len(params):
        return verification()

    case = _case(program, batch, parts, look)
    explained = explain_parts(case)
    if explained is not None:
        findings.append(explained)
        if explained.cause is Cause.NOT_FINITE:
            return verification()
    if look.changed_buffers and (explained is None or explained.cause is not Cause.BATCH_STATISTICS):
        findings += _buffers(case)
    of_ranks = (lambda: experts) if experts is None or experts is WORLD_OF_ONE else experts
    mean = total_norm(look.plain.grads.values()) / math.sqrt(sum(each.numel() for each in params.values()))
    judge = WayJudge(case, Setting(units, of_ranks, max(mean, 1e-20)), parts_agree=explained is None)  # type: ignore[arg-type]
    of_ways: list[Finding] = []
    for name in ways:
        result, wrong = judge.judge(name, WAYS[name])
        results.append(result)
        of_ways += wrong
    shown = {each.cause for each in findings}  # plain PyTorch shows these
    of_ways = [each for each in _merged(of_ways) if not _refuses_what_is_known(each, findings)]
    findings += [each for each in of_ways if each.cause not in shown]
    return verification()


def _case(program: Program, batch: Any, parts: Parts, look: FirstLook) -> Case:
    exact = run_exact(program, batch, look.around)
    allowed: Allowed = allowed_between(look.plain.grads, exact)
    own = run_parts(program, parts)
    same = run_parts(program, parts, around=look.around, same_draw=True) if look.draws else own
    return Case(program, batch, parts, look, allowed, own, same)


def _parts(batch: Any, rows: int, ranks: int, num_microbatches: int) -> Parts:
    """Rows in order: rank 0's microbatches first."""
    size = rows // (ranks * num_microbatches)

    def part(rank: int, index: int) -> Part:
        start = (rank * num_microbatches + index) * size
        return Part(rank, index, cut(batch, rows, start, start + size), draw_of(rank, index))

    return [[part(rank, index) for index in range(num_microbatches)] for rank in range(ranks)]


def _uneven(rows: int, ranks: int, num_microbatches: int) -> Finding:
    return Finding(
        cause=Cause.UNEVEN_BATCH,
        evidence=f"{rows} rows do not divide over {ranks} ranks of {num_microbatches} microbatches: means over parts "
        f"of different sizes are averaged as if the parts were equal. The rows that are too many are left out here.",
    )


def _buffers(case: Case) -> Iterator[Finding]:
    """Buffers that have other values after one rank's rows than after another's."""

    def run(rank: int) -> dict[str, Any]:
        model = case.program.make()
        run_one(case.program, model, own_copy(case.parts[rank][0].batch), around=case.around)
        return dict(model.named_buffers())

    first, last = alone(lambda: (run(0), run(len(case.parts) - 1)))
    names = [name for name in first if name in last and not torch.equal(first[name], last[name])]
    if names:
        evidence = "After a forward of its own rows each rank has other values in these buffers."
        yield Finding(cause=Cause.BUFFERS, module=in_short(names), evidence=evidence)


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for each cause and parameter, with all ways that show it; the worst error and evidence."""
    merged: dict[tuple[Any, ...], Finding] = {}
    for each in findings:
        key = (each.cause, each.module, frozenset(each.parameters))
        known = merged.get(key)
        if known is None:
            merged[key] = each
        else:
            worse = each if each.error > known.error else known
            ranks = tuple(sorted({*known.ranks, *each.ranks}))
            merged[key] = replace(worse, ways=(*known.ways, *each.ways), ranks=ranks)
    return list(merged.values())


def _refuses_what_is_known(finding: Finding, known: Sequence[Finding]) -> bool:
    """Whether a way only refuses by name what plain PyTorch shows to be a mistake: a parameter that forward writes."""
    return finding.cause is Cause.REFUSED and any(
        each.module and f"'{each.module}'" in finding.evidence for each in known
    )


def _is_lazy(param: nn.Parameter) -> bool:
    return nn.parameter.is_lazy(param)
