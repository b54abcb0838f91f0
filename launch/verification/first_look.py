"""One forward and backward of the whole batch in plain PyTorch, and all that it shows before anything is compared."""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .batches import own_copy, same_batch
from .comparison import allowed_between
from .draws import DrawnMeans, modules_that_draw, random_state
from .findings import Cause, Finding
from .modules import Connected, OutputTrace, ParamReads, Read
from .plain import Around, Plain, alone, run_one
from .program import Program, set_seed

__all__ = [
    "FirstLook",
    "first_look",
    "in_short",
    "look_at_memory",
    "look_at_unreached",
    "parameter_reads",
    "replaced_in_forward",
]


class FirstLook(NamedTuple):
    """What one plain forward and backward of the whole batch has done."""

    plain: Plain
    """With draws replaced by their means if there are any."""
    draws: bool
    """The program draws from default generators."""
    changed_buffers: tuple[str, ...]
    replaced: tuple[str, ...]
    """Parameters that are other objects after forward, or that were not there before."""
    findings: list[Finding]

    @property
    def around(self) -> Around:
        """What makes a whole batch and its parts comparable: draws are replaced where there are any."""
        return DrawnMeans if self.draws else nullcontext


def first_look(program: Program, batch: Any) -> FirstLook:
    """Run the whole batch once, and look for what needs no comparison."""
    findings: list[Finding] = []
    before = _grads_of(program.model)

    def run() -> tuple[Plain, bool, tuple[str, ...], tuple[str, ...], Any]:
        model, mine = program.make(), own_copy(batch)
        params, buffers = dict(model.named_parameters()), {name: each.clone() for name, each in model.named_buffers()}
        set_seed(program.seed)
        state = random_state()
        plain = run_one(program, model, mine)
        return (
            plain,
            random_state() != state,
            tuple(name for name, each in model.named_buffers() if not _equal(each, buffers.get(name))),
            replaced_in_forward(params, model),
            mine,
        )

    plain, draws, changed, replaced, used = alone(run)
    if _put_back(program.model, before):
        findings.append(
            Finding(
                cause=Cause.OTHER_MODEL,
                evidence="Backward of a copy of the model has left gradients in the model that verify was given, which "
                "no run touches.",
                parameters=plain.without,
            )
        )
    if draws:
        names = alone(lambda: _drawing(program, batch))
        with_means = alone(lambda: run_one(program, program.make(), own_copy(batch), around=DrawnMeans))
        plain = with_means
        findings.append(
            Finding(
                cause=Cause.RANDOM,
                module=in_short([name or "the program" for name in names]),
                evidence="A forward has moved a random generator. Ranks and microbatches draw apart, so the ways are "
                "compared with plain PyTorch on the same parts with the same seeds; the whole batch is compared with "
                "its parts in plain PyTorch with each draw replaced by its mean.",
            )
        )
    if replaced:
        evidence = (
            "After forward, the model registers another parameter by this name than before: the one that a wrapper or "
            "an optimizer has got is in the model no more, or was not there."
        )
        findings.append(Finding(cause=Cause.REPLACED, parameters=replaced, evidence=evidence))
    if not same_batch(batch, used):
        findings.extend(_edited_batch(program, used, plain, DrawnMeans if draws else nullcontext))
    found = _look_for_nan(program, batch, plain)
    return FirstLook(plain, draws, changed, replaced, [*findings, *found])


def in_short(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def replaced_in_forward(before: dict[str, nn.Parameter], model: nn.Module) -> tuple[str, ...]:
    """Names of parameters that are not the objects they were, or are new, or gone."""
    after = dict(model.named_parameters())
    return tuple(name for name in {**before, **after} if after.get(name) is not before.get(name))


def parameter_reads(program: Program, batch: Any) -> dict[str, list[Read]]:
    """Which torch functions get each parameter in a forward, and which modules run at that time."""

    def run() -> dict[str, list[Read]]:
        model = program.make()
        with ParamReads(model) as reads:
            program.loss_of(model, own_copy(batch))
        return reads.reads

    return alone(run)


def look_at_unreached(program: Program, batch: Any, without: tuple[str, ...]) -> Iterator[Finding]:
    """Why these trainable parameters get no gradient: runs in which nothing is without a graph, then nothing detaches.

    A parameter that has a gradient in such a run is cut off from the loss by the program. Any other is unused.
    """
    left = list(without)
    by_no_grad = _reached(program, batch, left, attached=False)
    by_detach = [name for name in _reached(program, batch, left, attached=True) if name not in by_no_grad]
    unused = tuple(name for name in left if name not in by_no_grad and name not in by_detach)
    if by_no_grad:
        yield Finding(
            cause=Cause.NO_GRAD,
            parameters=tuple(by_no_grad),
            evidence="The trainable parameter gets no gradient, and gets one in a run in which torch.no_grad() has no "
            "effect.",
        )
    if by_detach:
        yield Finding(
            cause=Cause.DETACHED,
            parameters=tuple(by_detach),
            evidence="The trainable parameter gets no gradient, and gets one in a run in which detach() and .data "
            "detach nothing.",
        )
    if unused:
        yield Finding(
            cause=Cause.UNUSED,
            parameters=unused,
            evidence="Autograd gives the trainable parameter no gradient, and none where nothing is detached: the "
            "loss does not depend on it, or forward freezes it.",
        )


def look_at_memory(program: Program) -> Iterator[Finding]:
    """Parameters of the user's own model that are one memory, or have one value, without being one parameter."""
    model = program.model if program.model is not None else program.make()
    owners = {id(param): type(module) for module in model.modules() for param in module.parameters(recurse=False)}
    seen: list[tuple[str, nn.Parameter]] = []
    for name, param in model.named_parameters():
        if nn.parameter.is_lazy(param) or not param.numel() or param.is_meta:
            continue
        for other_name, other in seen:
            if _overlap(param, other):
                yield Finding(
                    cause=Cause.SHARED_MEMORY,
                    parameters=(name, other_name),
                    evidence="These are two Parameters over one memory. Each gets a gradient and an update of its own; "
                    "a wrapper with flat buffers gives each its own memory, and they come apart.",
                )
            elif owners[id(param)] is not owners[id(other)] and param.dim() > 1 and _same_values(param, other):
                yield Finding(
                    cause=Cause.BROKEN_TIE,
                    parameters=(name, other_name),
                    evidence="Two Parameters of modules of different classes have the same values, and are not one "
                    "Parameter: the first step makes them differ.",
                )
        seen.append((name, param))


def _drawing(program: Program, batch: Any) -> list[str]:
    model, mine = program.make(), own_copy(batch)
    set_seed(program.seed)  # loss_of does so too, and then changes nothing
    return modules_that_draw(model, lambda: program.loss_of(model, mine))


def _edited_batch(program: Program, used: Any, plain: Plain, around: Around) -> Iterator[Finding]:
    """Nothing where a second run over the batch, which the first has changed, computes the same gradients."""
    again = alone(lambda: run_one(program, program.make(), own_copy(used), around=around))
    worst = allowed_between(plain.grads, None).between(again.grads, plain.grads)
    if worst:
        yield Finding(
            cause=Cause.BATCH_EDITED,
            parameters=tuple(each.name for each in worst),
            error=worst[0].error,
            evidence="Forward has changed a tensor of the batch in place, and a second run over this batch computes "
            "other gradients.",
        )


def _look_for_nan(program: Program, batch: Any, plain: Plain) -> Iterator[Finding]:
    bad = tuple(name for name, grad in plain.grads.items() if not bool(grad.isfinite().all()))
    if not bad and math.isfinite(plain.loss):
        return

    def trace() -> str:
        model = program.make()
        with OutputTrace(model) as outputs:
            program.loss_of(model, own_copy(batch))
        for call in outputs.calls:
            if any(each.is_floating_point() and not bool(each.isfinite().all()) for each in call.outputs):
                return call.module
        return ""

    module = alone(trace)
    where = f"The first module whose output is not finite is {module!r}." if module else "All modules' outputs are."
    yield Finding(
        cause=Cause.NOT_FINITE,
        parameters=bad,
        module=module,
        evidence=f"In plain PyTorch, over the whole batch, the loss is {plain.loss:g} and {len(bad)} gradients are not "
        f"finite. {where}",
    )


def _reached(program: Program, batch: Any, names: list[str], *, attached: bool) -> list[str]:
    def run() -> list[str]:
        model = program.make()
        plain = run_one(program, model, own_copy(batch), around=lambda: Connected(attached=attached))
        return [name for name in names if name in plain.grads and name not in plain.without]

    try:
        return alone(run)
    except Exception:  # what the program does under no_grad may be impossible with a graph: nothing is shown
        return []


def _grads_of(model: nn.Module | None) -> list[Tensor | None]:
    grads = [] if model is None else [param.grad for param in model.parameters()]
    for param in () if model is None else model.parameters():
        param.grad = None
    return grads


def _put_back(model: nn.Module | None, grads: list[Tensor | None]) -> bool:
    """Give the user's model its gradients back; whether it had got others."""
    params = [] if model is None else list(model.parameters())
    written = any(param.grad is not None for param in params)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return written


def _equal(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one, other)


def _same_values(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other) and bool(one.min() != one.max())


def _overlap(one: Tensor, other: Tensor) -> bool:
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    starts = [each.storage_offset() * each.element_size() for each in (one, other)]
    return bool(starts[0] < starts[1] + other.nbytes and starts[1] < starts[0] + one.nbytes)
