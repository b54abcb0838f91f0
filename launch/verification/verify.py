"""``verify``: runs a user's model in every way that the library offers, and compares with plain PyTorch.

1. The whole batch runs once in one process, and its parts on simulated ranks without a wrapper (``plain.py``). Some
   mistakes are seen without comparing. 2. The parts' mean is compared with the whole batch: what differs is the
program's own doing. 3. Each way (``ways.py``) runs the same parts (``judge.py``): what differs lies between the program
and the wrapper, or is the library's fault. Experiments find the cause of a difference (``experiments.py``).
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

from ...ddp.collectives.rank_grid import Ranks, WorldOfOne
from ..parallelizing.blocks import default_units
from ..parallelizing.experts import numbers_of_experts
from ..simulation.simulate import frames_outside
from ..simulation.state import ProcessState
from .batches import count_rows, cut, own_copy
from .comparison import Difference, Piece, allowed_between, distance, norm_of, off_in, pieces_of, total_norm
from .experiments import Comparison, about, unequal
from .findings import Cause, Finding, Verification, VerificationError, WayResult
from .judge import judge
from .plain import Part, Plain, mean_of, run_exact, run_parts, run_whole
from .program import Loss, Program, Step
from .ways import WAYS, Cut, Setting, cut_by_tp_plan

__all__ = [
    "Cause",
    "Finding",
    "Verification",
    "VerificationError",
    "WayResult",
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
    muon: Mapping[str, Any] | None = None,
    tensor_parallel: Cut | Literal["tp_plan"] | None = None,
    context_parallel: Cut | None = None,
    accept: Collection[str] = (),
    seed: int = 0,
) -> Verification:
    """Compare one iteration of a model on simulated ranks with one plain PyTorch process, on the CPU.

    Every parameter's gradient, the global norm, and the weights after a step are compared in each way. Where they
    differ, experiments find the cause. The model and the batch stay as they are.

    model                 a module, of which each rank gets a copy; or a function without arguments that makes one,
                          where a module cannot be copied
    batch                 a tensor, ``model(batch)``; a tuple or list, ``model(*batch)``; or a mapping,
                          ``model(**batch)``. Dim 0 of its tensors are its rows, which are divided over ranks and
                          microbatches. Tensors of another dim 0 stay whole
    loss                  ``loss(output, batch)``; None: what the model returns, or its ``.loss``
    step                  ``step(model, batch)``, which calls the model and returns the loss, instead of ``loss``
    ranks                 number of simulated ranks
    num_microbatches      of each rank; all but the last run under ``no_sync``
    ways                  names of ``WAYS``; None: all of them for which there is what they need
    units                 given a model, the modules inside it that ``fully_shard`` makes units, and that recompute
                          recomputes; the default: the members of its outermost ``nn.ModuleList``s, or of its
                          ``nn.Sequential``s if it has no list
    expert_process_group  for parameters with the mark ``allreduce = False``: a function, called on each rank, that
                          returns what ``DistributedDataParallel`` takes by this name; or ``WORLD_OF_ONE``
    muon                  options of ``maingrad.ddp.muon_groups``, perhaps none: the step is then Muon's for matrices
                          and AdamW's for the rest. None: AdamW's
    tensor_parallel       ``tensor_parallel(model, mesh)`` cuts a copy of the model over the ranks of a mesh of one
                          dim, as ``parallelize_module`` does: the ways with ``tp`` in their names have two such ranks
                          for each of ``ranks``. "tp_plan": as transformers does by the model's own plan
    context_parallel      ``context_parallel(model, mesh)`` lets a copy of the model take its rank's part of the tokens
                          of each row, as by ``maingrad.launch.ulysses``: so for the ways with ``cp`` in their names.
                          The batch's tensors have the tokens in dim 1
    accept                causes (``Cause``) that are notes, not errors
    seed                  of everything random

    Ways with ``ep`` in their names share out the experts of models of Hugging Face among two ranks, where these divide
    the numbers of ``ranks`` and experts. Ways with ``tp`` and ``cp`` are left out where forwards draw random numbers.

    Raises ``ValueError`` for an unknown way or cause, for rows that ranks times microbatches do not divide, for an
    output that is no loss, and for a model without trainable parameters. Raises what the program raises in plain
    PyTorch.
    """
    by_plan: Cut | None = cut_by_tp_plan if tensor_parallel == "tp_plan" else tensor_parallel
    state = ProcessState.capture()
    try:
        program = Program(model, loss, step, seed)
        counts = numbers_of_experts(program.make())
        most_ep = math.gcd(ranks, *counts) if counts else 1
        setting = Setting(units, expert_process_group, {}, muon, most_ep, by_plan, context_parallel)
        _check_options(ways, accept, ranks, num_microbatches, setting)
        with torch.enable_grad():
            found = _verify(
                program,
                own_copy(batch),
                ranks,
                num_microbatches,
                ways or [name for name, way in WAYS.items() if setting.fits(way)],
                setting,
            )
    except Exception as error:
        # From the program's first frame on; all frames where the library itself has raised.
        trace = frames_outside(error, "maingrad.", "torch.") or error.__traceback__
        raise error.with_traceback(trace)  # noqa: B904  # its own cause and context stay
    finally:
        state.restore()
    return found.accepting(accept)


def _check_options(
    ways: Collection[str] | None, accept: Collection[str], ranks: int, num_microbatches: int, setting: Setting
) -> None:
    """Raise ``ValueError`` for an unknown way or cause, or too few ways, ranks or microbatches."""
    for what, given, known in (("way", ways or (), list(WAYS)), ("cause", accept, list(Cause))):
        for each in given:
            if each not in known:
                raise ValueError(f"{str(each)!r} is no {what}: choose of {', '.join(known)}")
    for name in ways or ():
        if not setting.fits(WAYS[name]):
            needed = f"{WAYS[name].cut}=, a function of the model and a mesh"
            experts = "experts of Hugging Face, whose number two ranks divide, and an even number of ranks"
            raise ValueError(f"way {name!r} needs {needed if WAYS[name].cut else experts}")
    if ways is not None and not ways:
        raise ValueError("ways names none: leave it None for all")
    if ranks < 1 or num_microbatches < 1:
        raise ValueError(f"ranks and num_microbatches must be at least 1, got {ranks} and {num_microbatches}")


def _verify(
    program: Program, batch: Any, ranks: int, num_microbatches: int, ways: Iterable[str], setting: Setting
) -> Verification:
    """Run the whole batch and its parts, and compare them and the ways where that is possible."""
    setting.matrices(program.make())  # raises for options of Muon that do not fit the model
    rows, count = count_rows(batch), ranks * num_microbatches
    if not rows or rows % count:
        raise ValueError(
            f"a batch of {rows} rows cannot be divided over {ranks} ranks of {num_microbatches} microbatches: means "
            f"over parts of different sizes would be averaged as if the parts were equal. Drop the last rows, or pass "
            f"other numbers"
        )
    size = rows // count
    parts = [  # rank 0 has the first rows
        Part(*divmod(index, num_microbatches), cut(batch, rows, index * size, (index + 1) * size))
        for index in range(count)
    ]

    whole, compared = run_whole(program, batch), program
    findings = []
    if whole.is_random:
        findings.append(
            Finding(
                cause=Cause.RANDOM,
                evidence="A forward has moved a random generator. Ranks and microbatches draw apart, so the ways are "
                "compared with plain PyTorch on the same parts with the same seeds; the whole batch is compared with "
                "its parts in plain PyTorch with each draw replaced by its mean.",
            )
        )
        compared = program.with_means()
        whole = run_whole(compared, batch)
    if not whole.grads:
        raise ValueError("the model has no parameter that requires a gradient: there is nothing to verify")
    plains = run_parts(compared, parts)
    findings += [*_not_finite([whole, *plains]), *_about_parameters(program, whole)]

    total, num_elements = total_norm(whole.grads.values()), sum(grad.numel() for grad in whole.grads.values())
    # AdamW's eps is as large as gradients are: the step does not magnify rounding errors of small ones. A large
    # learning rate changes bf16 weights in one step.
    adamw = {"lr": 0.05, "weight_decay": 0.1, "eps": max(total / math.sqrt(num_elements), 1e-20)}
    results: list[WayResult] = []
    cannot_be_compared = {each.cause for each in findings} & {Cause.NOT_FINITE, Cause.REPLACED}
    if len(whole.without) < len(whole.grads) and not cannot_be_compared:
        comparison = Comparison(
            program=compared,
            batch=batch,
            parts=parts,
            setting=setting._replace(adamw=adamw),
            allowed=allowed_between(whole.grads, run_exact(compared, batch), whole.eps),
            plains=plains,
        )
        results, found = _compare(comparison, whole, program, ways)
        findings += found
    return Verification(
        findings=findings,
        results=results,
        num_parameters=len(whole.grads),
        num_elements=num_elements,
        ranks=ranks,
        num_microbatches=num_microbatches,
        rows=rows,
    )


# ---- What is seen without comparing. ----


def _not_finite(plains: Sequence[Plain]) -> Iterator[Finding]:
    bad = {name: None for plain in plains for name, grad in plain.grads.items() if not bool(grad.isfinite().all())}
    losses = [round(plain.loss, 4) for plain in plains]
    if bad or not math.isfinite(sum(losses)):
        yield Finding(
            cause=Cause.NOT_FINITE,
            parameters=tuple(bad),
            evidence=f"In plain PyTorch, the losses of the whole batch and of its parts are {losses}, and {len(bad)} "
            f"gradients are not finite. A mean over no rows, or no tokens, is such a number.",
        )


def _about_parameters(program: Program, whole: Plain) -> Iterator[Finding]:
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
    model = program.model if isinstance(program.model, nn.Module) else program.make()
    places = sorted(
        (param.data_ptr(), param.data_ptr() + param.nbytes, name)
        for name, param in model.named_parameters()
        if not nn.parameter.is_lazy(param)
    )
    for (_, end, first), (start, _, second) in pairwise(places):
        if start < end:
            yield Finding(
                cause=Cause.SHARED_MEMORY,
                parameters=(first, second),
                evidence="These are two Parameters over one memory. Each gets a gradient and an update of its own; "
                "a wrapper with flat buffers gives each its own memory, and they come apart.",
            )


# ---- What is compared. ----


def _compare(
    comparison: Comparison, whole: Plain, program: Program, ways: Iterable[str]
) -> tuple[list[WayResult], list[Finding]]:
    """The whole batch and its parts, and then the ways.

    comparison  of the whole batch and its parts, with each random draw at its mean
    program     draws
    """
    mean, plains = comparison.mean, comparison.plains
    differences = comparison.allowed.differences([pieces_of(mean)], whole.grads)
    off = off_in(differences)
    findings = [comparison.find_cause(off) or _from_contents(comparison, whole, off)] if off else []
    buffers = unequal(plains[comparison.parts[-1].microbatch].buffers, plains[-1].buffers)  # of two ranks' last parts
    known = [each.cause for each in findings]  # plain PyTorch shows these
    if buffers and Cause.BATCH_STATISTICS not in known:
        findings.append(
            Finding(
                cause=Cause.BUFFERS,
                module=", ".join(buffers),
                evidence="After a forward of its own rows each rank has other values in these buffers.",
            )
        )

    is_random = program is not comparison.program
    if is_random:  # gradients may be larger than those with each draw at its mean
        plains = run_parts(program, comparison.parts)
        allowed = allowed_between(mean_of(plains), None, whole.eps)
        comparison = replace(comparison, program=program, plains=plains, allowed=allowed)
    norm = total_norm(whole.grads.values())
    norm_error = abs(total_norm(mean.values()) - norm) / max(norm, 1e-30)
    results, found = [], dict[Any, dict[str, Finding]]()
    for name in ways:
        if is_random and WAYS[name].cut is not None:
            continue
        row, finding = judge(name, WAYS[name], comparison)
        row = replace(row, ok=row.ok and not off, grad_error=max(row.grad_error, differences[0].error))
        results.append(replace(row, norm_error=max(row.norm_error, norm_error)))
        if finding is not None and finding.cause not in known:
            found.setdefault((finding.cause, frozenset(finding.parameters)), {})[name] = finding
    for by_way in found.values():
        findings.append(replace(max(by_way.values(), key=lambda each: each.error), ways=tuple(by_way)))
    return results, findings


_EXPLAINED = 0.05
"""Share of a difference below which the rest is small: other factors of the parts explain the difference."""


def _from_contents(comparison: Comparison, whole: Plain, off: Sequence[Difference]) -> Finding:
    """The cause that shows in the whole batch's gradient, taken as a sum of the parts' gradients.

    No experiment has shown a cause: the gradient of a part is a function of its rows alone. If the whole batch's
    gradient is a sum of them, the factors are wrong; if it is none, rows act on each other.
    """
    name = max((each.name for each in off), key=lambda each: whole.grads[each].count_nonzero())
    wanted = whole.grads[name].reshape(-1)
    shares, rest, words = comparison.contents(Piece(name, 0, wanted))
    cause = Cause.WEIGHTED_MEAN
    evidence = (
        "So parts with equally many rows count differently: the loss is a mean over something else than rows, such as "
        "unmasked tokens, of which the parts have different numbers."
    )
    if max(shares) - min(shares) < 0.02 * abs(sum(shares) / len(shares)):
        cause, evidence = Cause.SUM, "So the loss is not a mean over rows: it grows with their number."
    evidence = f"The whole batch's gradient is a sum of the parts' gradients in plain PyTorch: {words}. {evidence}"
    if rest * norm_of(wanted) > _EXPLAINED * distance(wanted, comparison.mean[name].reshape(-1)):
        cause = Cause.MIXED_ROWS
        evidence = (
            "The whole batch's gradient is no sum of the parts' gradients in plain PyTorch, and no experiment finds "
            "another cause: a module or the loss compares the rows of a batch with each other, or the loss is not "
            "linear in them."
        )
    return about(off, cause, evidence)
