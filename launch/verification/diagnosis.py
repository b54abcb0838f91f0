"""Why a batch's parts on ranks, in plain PyTorch, do not add up to the whole batch: one experiment for each cause."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ddp.torch_internals import is_hooked
from .batches import own_copy
from .comparison import Allowed, Difference, distance, norm_of, parts_in, total_norm
from .findings import Cause, Finding
from .first_look import FirstLook, in_short
from .modules import OutputTrace
from .plain import Around, Grads, Part, Parts, Plain, alone, mean_of, run_one, run_parts
from .program import Program

__all__ = ["Case", "explain_parts", "has_grad_hooks", "in_words", "not_reproducible", "remove_grad_hooks"]

_MAX_ELEMENTS = 2_000_000
"""Of the gradients that are decomposed: parts are compared in memory, in fp64."""
_EXPLAINED = 0.05
"""Share of a difference below which the rest is small: other factors of the parts explain the difference."""


class Case(NamedTuple):
    """A program with what plain PyTorch computes of it."""

    program: Program
    batch: Any
    parts: Parts
    look: FirstLook
    allowed: Allowed
    own_draws: list[list[Plain]]
    """The parts on ranks without a wrapper; each part draws its own random numbers."""
    same_draws: list[list[Plain]]
    """The same with draws that can be compared with the whole batch's; ``own_draws`` where nothing is drawn."""

    @property
    def whole(self) -> Grads:
        """Gradients of the whole batch in one process."""
        return self.look.plain.grads

    @property
    def around(self) -> Around:
        """What makes a whole batch and its parts comparable."""
        return self.look.around

    def whole_again(self, prepare: Callable[[nn.Module], None] = lambda model: None) -> Grads:
        """Gradients of the whole batch, of a changed copy of the model."""

        def run() -> Grads:
            model = self.program.make()
            prepare(model)
            return run_one(self.program, model, own_copy(self.batch), around=self.around).grads

        return alone(run)

    def agrees_after(self, prepare: Callable[[nn.Module], None]) -> bool:
        """Whether the parts add up to the whole batch when each copy of the model is changed first."""
        parts = run_parts(self.program, self.parts, around=self.around, same_draw=True, prepare=prepare)
        return not self.allowed.between(mean_of(parts), self.whole_again(prepare))


def explain_parts(case: Case) -> Finding | None:
    """Why the mean of the parts' gradients is not the whole batch's gradient; None if it is.

    The first experiment that shows a cause ends the search. Those come first that spoil the later ones.
    """
    found = case.allowed.between(mean_of(case.same_draws), case.whole)
    if not found:
        return None
    experiments: Sequence[Callable[[Case], Finding | None]] = (
        _not_finite,
        not_reproducible,
        _state,
        _rank,
        _hooks,
        _weights_of_parts,
        _statistics,
        _mixed_rows,
    )
    finding = next((shown for experiment in experiments if (shown := experiment(case)) is not None), None)
    if finding is None:
        evidence = (
            "The parts' gradients do not add up to the whole batch's in plain PyTorch, and no experiment says why."
        )
        finding = Finding(cause=Cause.UNEXPLAINED, evidence=evidence)
    return _about(finding, found)


def has_grad_hooks(model: nn.Module) -> bool:
    """Whether parameters or modules have hooks that see gradients in backward."""
    return any(map(is_hooked, model.parameters())) or any(map(_has_backward_hooks, model.modules()))


def remove_grad_hooks(model: nn.Module) -> None:
    """Remove the hooks of parameters and modules that see gradients in backward."""
    for param in model.parameters():
        for hooks in (param._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None)):
            if hooks is not None:
                hooks.clear()
    for module in model.modules():
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def not_reproducible(case: Case) -> Finding | None:
    """Fresh copies, the same batch and the same seed: the whole batch three times, and the parts once."""
    runs: Iterator[list[Difference]] = (case.allowed.between(case.whole_again(), case.whole) for _ in range(3))
    again = next((differing for differing in runs if differing), None)
    if again is None:
        parts = run_parts(case.program, case.parts, around=case.around, same_draw=case.look.draws)
        again = case.allowed.between(mean_of(parts), mean_of(case.same_draws))
    if not again:
        return None
    evidence = (
        "Plain PyTorch computes other gradients when a fresh copy of the model runs the same batch from the same seed: "
        "forward depends on something that is neither in the model, nor in the batch, nor in a default generator."
    )
    return _about(Finding(cause=Cause.NOT_REPRODUCIBLE, evidence=evidence), again)


def in_words(factors: Sequence[float], parts: Parts) -> str:
    """How often each part is contained in a gradient, beside how often it should be."""
    flat = [part for of_rank in parts for part in of_rank]
    listed = [
        f"{round(factor * len(flat), 2) + 0.0:.2f} of rank {part.rank}'s microbatch {part.microbatch}"
        for part, factor in zip(flat, factors, strict=True)
    ]
    return f"in units of 1/{len(flat)}, it contains {', '.join(listed)}"


def _about(finding: Finding, differing: Sequence[Difference]) -> Finding:
    """The finding with the parameters and the error of what it explains, unless it has its own."""
    if finding.parameters:
        return finding
    return replace(finding, parameters=tuple(each.name for each in differing), error=differing[0].error)


def _not_finite(case: Case) -> Finding | None:
    for of_rank, parts in zip(case.same_draws, case.parts, strict=True):
        for plain, part in zip(of_rank, parts, strict=True):
            bad = tuple(name for name, grad in plain.grads.items() if not bool(grad.isfinite().all()))
            if bad or not math.isfinite(plain.loss):
                evidence = (
                    f"The whole batch's loss is {case.look.plain.loss:.4g}; that of rank {part.rank}'s microbatch "
                    f"{part.microbatch} alone is {plain.loss:g} in plain PyTorch. A mean over no rows, or no tokens, "
                    f"is such a number."
                )
                return Finding(cause=Cause.NOT_FINITE, parameters=bad, ranks=(part.rank,), evidence=evidence)
    return None


def _state(case: Case) -> Finding | None:
    """The same copy, batch and seed a second time."""

    def run() -> tuple[Grads, list[str]]:
        model = case.program.make()
        run_one(case.program, model, own_copy(case.batch), around=case.around)
        before = _state_of(model)
        again = run_one(case.program, model, own_copy(case.batch), around=case.around).grads
        after = _state_of(model)
        first = _state_of(case.program.make())
        return again, [name for name in after if after[name] != before.get(name) or after[name] != first.get(name)]

    again, changed = alone(run)
    differing = case.allowed.between(again, case.whole)
    if not differing:
        return None
    evidence = (
        f"Plain PyTorch computes other gradients when the same copy of the model runs the same batch from the same "
        f"seed for the second time. Forward has changed {in_short(changed) or 'something outside of the model'}."
    )
    return _about(Finding(cause=Cause.STATE, module=in_short(changed), evidence=evidence), differing)


def _rank(case: Case) -> Finding | None:
    """All parts in one process."""
    one = run_parts(case.program, case.parts, on=1, around=case.around, same_draw=case.look.draws)
    ranks, worst = [], []
    for rank, (here, there) in enumerate(zip(one, case.same_draws, strict=True)):
        differing = [each for a, b in zip(here, there, strict=True) for each in case.allowed.between(b.grads, a.grads)]
        if differing:
            ranks.append(rank)
            worst.extend(differing)
    if not ranks:
        return None
    evidence = (
        "In plain PyTorch without a wrapper, these ranks compute other gradients of their rows than one process does "
        "of the same rows from the same seed: the program asks for its rank, or communicates with other ranks."
    )
    finding = Finding(cause=Cause.RANK, ranks=tuple(ranks), evidence=evidence)
    names = dict.fromkeys(each.name for each in sorted(worst, key=lambda each: -each.error))
    return _about(finding, [Difference(name, max(e.error for e in worst if e.name == name)) for name in names])


def _hooks(case: Case) -> Finding | None:
    if not has_grad_hooks(case.program.make()) or not case.agrees_after(remove_grad_hooks):
        return None
    model = case.program.make()
    hooked = [name for name, param in model.named_parameters() if is_hooked(param)]
    modules = [name for name, each in model.named_modules() if _has_backward_hooks(each)]
    evidence = (
        "Without the hooks that see gradients, the parts' gradients add up to the whole batch's; with them they do "
        "not: a hook changes each microbatch's gradient, and not linearly."
    )
    return Finding(cause=Cause.HOOK, module=in_short(modules), parameters=tuple(hooked), evidence=evidence)


def _weights_of_parts(case: Case) -> Finding | None:
    """Whether the whole batch's gradient is a sum of the parts' gradients with other factors than 1 / parts."""
    flat = [plain.grads for of_rank in case.same_draws for plain in of_rank]
    names: list[str] = []
    room = _MAX_ELEMENTS
    for each in case.allowed.between(mean_of(case.same_draws), case.whole):
        room -= case.whole[each.name].numel()
        if names and room < 0:
            break
        names.append(each.name)
    wanted, mean = [case.whole[name] for name in names], mean_of(case.same_draws)
    factors, rest = parts_in(wanted, [[grads[name] for name in names] for grads in flat])
    difference = math.sqrt(sum(distance(case.whole[name], mean[name]) ** 2 for name in names))
    if rest * total_norm(wanted) > _EXPLAINED * difference:
        return None
    shares = [factor * len(flat) for factor in factors]
    words = in_words(factors, case.parts)
    words = f"The whole batch's gradient is a sum of the parts' gradients in plain PyTorch: {words}."
    if max(shares) - min(shares) < 0.02 * abs(sum(shares) / len(shares)):
        return Finding(
            cause=Cause.SUM,
            evidence=f"{words} So the loss is not a mean over rows: it grows with their number.",
        )
    return Finding(
        cause=Cause.WEIGHTED_MEAN,
        evidence=f"{words} So parts with equally many rows count differently: the loss is a mean over something else "
        f"than rows, such as unmasked tokens, of which the parts have different numbers.",
    )


def _statistics(case: Case) -> Finding | None:
    """Modules whose buffers forward changes, in evaluation mode."""
    owners = tuple(dict.fromkeys(name.rpartition(".")[0] for name in case.look.changed_buffers))

    def freeze(model: nn.Module) -> None:
        for owner in owners:
            model.get_submodule(owner).eval()

    if not owners or not case.agrees_after(freeze):
        return None
    evidence = (
        "Forward changes this module's buffers. With the module in evaluation mode the parts' gradients add up to the "
        "whole batch's; in training mode each microbatch is normalised by its own statistics."
    )
    return Finding(cause=Cause.BATCH_STATISTICS, module=in_short(owners), evidence=evidence)


def _mixed_rows(case: Case) -> Finding | None:
    """The first module that computes other rows of the whole batch than of its parts, from the same rows."""

    def trace(batches: Sequence[Any]) -> list[OutputTrace]:
        traces = []
        for batch in batches:
            model = case.program.make()
            with OutputTrace(model) as outputs, case.around():
                case.program.loss_of(model, own_copy(batch))
            traces.append(outputs)
        return traces

    flat: list[Part] = [part for of_rank in case.parts for part in of_rank]
    whole, *parts = alone(lambda: trace([case.batch, *(part.batch for part in flat)]))
    module = ""
    for index, call in enumerate(whole.calls):
        of_parts = [each.calls[index] for each in parts if index < len(each.calls)]
        if len(of_parts) < len(parts) or any(each.module != call.module for each in of_parts):
            return None  # another number of modules runs: nothing can be said
        # Rows may lie in another order inside a module (tokens sorted by expert): then inputs differ as well.
        if not _rows_agree(call.outputs, [each.outputs for each in of_parts]) and _rows_agree(
            call.inputs, [each.inputs for each in of_parts]
        ):
            module = call.module
            break
    if not module:  # whatever differs inside of a module that puts out the same is gone outside of it
        evidence = (
            "Every module inside computes the same rows of the whole batch and of its parts. The loss of the whole "
            "batch is not the mean of the parts' losses: it compares rows with each other, or is not linear in them."
        )
        return Finding(cause=Cause.MIXED_ROWS, evidence=evidence)
    evidence = (
        "This module computes other rows from the whole batch than from the same rows in parts: it mixes the rows of "
        "a batch."
    )
    return Finding(cause=Cause.MIXED_ROWS, module=module, evidence=evidence)


def _rows_agree(whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> bool:
    """Whether each tensor is its parts in a row, along the dim in which they are shorter; a scalar their mean."""
    return all(
        _is_cat(tensor, [part[index] for part in parts])
        for index, tensor in enumerate(whole)
        if all(index < len(part) for part in parts)
    )


def _is_cat(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    if any(part.dim() != whole.dim() for part in parts):
        return False
    if not whole.dim():
        return _close(whole, torch.stack([part.double() for part in parts]).mean())
    for dim in range(whole.dim()):
        rest = [part.shape[:dim] + part.shape[dim + 1 :] for part in parts]
        if sum(part.size(dim) for part in parts) == whole.size(dim) and all(
            shape == whole.shape[:dim] + whole.shape[dim + 1 :] for shape in rest
        ):
            return _close(whole, torch.cat(list(parts), dim))
    return all(part.shape == whole.shape and _close(whole, part) for part in parts)


def _close(one: Tensor, other: Tensor) -> bool:
    return distance(one, other) <= 1e-3 * max(norm_of(one), 1e-12)


def _state_of(model: nn.Module) -> dict[str, Any]:
    """Norms of parameters and buffers, and attributes of Python's types, by name."""
    tensors: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    found: dict[str, Any] = {name: norm_of(each) for name, each in tensors}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, bool | int | float | str | list | dict) and not name.startswith("_"):
                if isinstance(value, list | dict) and name in ("_modules", "_parameters", "_buffers"):
                    continue
                found[f"{prefix}.{name}" if prefix else name] = repr(value) if isinstance(value, list | dict) else value
    return found
