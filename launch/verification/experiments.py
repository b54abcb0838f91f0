"""Experiments: the program runs again with one change, and what the change does tells the cause.

Two runs must give the same gradients: the parts of a batch and the whole batch in plain PyTorch, and then each way and
the parts. Where they do not, ``Comparison.find_cause`` goes through its experiments. There are two kinds of them:

    mends      both runs have the change, and agree now: what the change takes away is the cause
    otherwise  plain PyTorch itself computes other gradients with the change: the program does not bear it
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...ddp.torch_internals import is_hooked
from ..parallelizing.blocks import add_recompute
from .batches import own_copy
from .comparison import Allowed, Difference, Piece, parts_in
from .findings import Cause, Finding, in_short
from .plain import Grads, Parts, Plain, Prepare, as_it_is, mean_of, on_ranks, run_one, run_parts, run_whole
from .program import Program
from .ways import RankResult, Setting, Way, run_way

__all__ = ["Comparison", "Experiment", "unequal"]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One change, and the cause that it may show."""

    cause: Cause
    evidence: str
    change: Prepare = as_it_is
    """Of each copy of the model, before it runs."""
    in_one_process: bool = False
    """One process runs the parts of all ranks."""
    mends: bool = False
    """The cause is shown if both runs agree with the change. Otherwise, if the change alters plain PyTorch's result."""
    module: str = ""
    """The modules or hooks at fault."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs of one program that must give the same gradients.

    way  None: the parts and the whole batch in plain PyTorch. Otherwise, this way and the parts
    """

    program: Program
    batch: Any
    parts: Parts
    setting: Setting
    allowed: Allowed
    plains: list[list[Plain]]
    """What plain PyTorch computes of the parts."""
    means: bool
    """Each random draw gives its mean, as in ``plains``."""
    way: Way | None = None

    @property
    def mean(self) -> Grads:
        """The mean of the parts' gradients in plain PyTorch."""
        return mean_of(self.plains)

    def run_way(self, change: Prepare = as_it_is) -> list[RankResult]:
        """Each rank's result in this way. Raises what a rank raises."""
        way = self.way
        assert way is not None, "this comparison is of a way"
        return on_ranks(
            lambda: run_way(self.program, way, self.parts[dist.get_rank()], self.setting, change), len(self.parts)
        )

    def find_cause(self, off: Sequence[str]) -> Finding | None:
        """The first experiment that shows a cause.

        off  the parameters that differ, or that an error names
        """
        for experiment in self._experiments():
            shown = self._shown_by(experiment)
            if shown is not None:
                names = [name for name in off if name in shown] or off or shown
                return Finding(
                    cause=experiment.cause,
                    parameters=tuple(names),
                    module=experiment.module,
                    evidence=experiment.evidence,
                )
        return None

    def contents(self, pieces: Sequence[Piece]) -> tuple[list[float], float, str]:
        """How often each part is contained in a gradient, in units of what is right; the rest; and both in words."""
        flat = [plain.grads for of_rank in self.plains for plain in of_rank]

        def cut(grads: Grads, piece: Piece) -> Tensor:
            return grads[piece.name].reshape(-1)[piece.start : piece.start + len(piece.values)]

        found = [piece.values for piece in pieces]
        factors, rest = parts_in(found, [[cut(grads, piece) for piece in pieces] for grads in flat])
        shares = [factor * len(flat) for factor in factors]
        parts = [part for of_rank in self.parts for part in of_rank]
        listed = [f"{round(share, 2) + 0.0:.2f} of {part}" for share, part in zip(shares, parts, strict=True)]
        return shares, rest, f"in units of 1/{len(flat)}, it contains {', '.join(listed)}"

    def _experiments(self) -> Iterator[Experiment]:
        """In this order: those come first that would spoil the later ones."""
        model, way, units = self.program.make(), self.way, self.setting.units
        yield Experiment(
            cause=Cause.NOT_REPRODUCIBLE,
            evidence="Plain PyTorch computes other gradients when fresh copies of the model run the same rows from the "
            "same seed: forward depends on something that is neither in the model, nor in the batch, nor in a default "
            "generator.",
        )
        if way is None:
            yield Experiment(
                cause=Cause.STATE,
                change=lambda model: self._run_before(model),
                evidence="Plain PyTorch computes other gradients when the same copy of the model has run before: "
                "forward changes something that its next call reads.",
            )
            yield Experiment(
                cause=Cause.RANK,
                in_one_process=True,
                evidence="In plain PyTorch without a wrapper, ranks compute other gradients of their rows than one "
                "process does of the same rows from the same seed: the program asks for its rank, or communicates "
                "with other ranks.",
            )
        elif way.recompute:
            yield Experiment(
                cause=Cause.NOT_RECOMPUTABLE,
                change=lambda model: add_recompute(model, [*units(model)]),
                evidence="With recompute, plain PyTorch computes other gradients too, or fails: forward is not "
                "repeatable.",
            )
        hooked = _with_grad_hooks(model)
        if hooked:
            yield Experiment(
                cause=Cause.HOOK,
                change=_remove_grad_hooks,
                mends=True,
                module=in_short(hooked),
                evidence="Without the hooks that see gradients both runs agree; with them they do not. A hook changes "
                "each microbatch's gradient, and not linearly, or this way does not call it.",
            )
        changed = unequal(self.plains[0][0].buffers, dict(model.named_buffers()))
        owners = [*dict.fromkeys(name.rpartition(".")[0] for name in changed)]
        if way is None and owners:
            yield Experiment(
                cause=Cause.BATCH_STATISTICS,
                change=lambda model: _freeze(model, owners),
                mends=True,
                module=in_short(owners),
                evidence="Forward changes this module's buffers. With the module in evaluation mode the parts' "
                "gradients add up to the whole batch's; in training mode each microbatch is normalised by its own "
                "statistics.",
            )
        if way is not None and any(map(_is_expert, model.parameters())):
            yield Experiment(
                cause=Cause.EXPERT_RANKS,
                change=_take_marks_off,
                mends=True,
                evidence="The parameter is marked as an expert's (allreduce = False), and without the mark its "
                "gradient is right: it lacks the rows of ranks that have the same weights.",
            )
        if way is not None and way.shards_parameters:
            yield Experiment(
                cause=Cause.READ_ELSEWHERE,
                change=lambda model: _hide_outside_units(model, [*units(model)]),
                evidence="Plain PyTorch computes another gradient when the parameter is there only while its unit's "
                "forward runs, and by the module's attribute alone. The program reads it elsewhere, or by a reference "
                "of its own, where fully_shard has a shard.",
            )

    def _shown_by(self, experiment: Experiment) -> tuple[str, ...] | None:
        """The parameters for which the cause is shown; () for all that are off, None if it is not shown."""
        change = experiment.change
        if experiment.mends:
            try:
                return None if self._differing(change) else ()
            except Exception:  # the change mends nothing
                return None
        try:
            changed = self._run_parts(change, in_one_process=experiment.in_one_process)
        except Exception:  # plain PyTorch does not run with it
            return ()
        return tuple(each.name for each in self.allowed.between(mean_of(changed), self.mean)) or None

    def _differing(self, change: Prepare) -> list[Difference]:
        """What differs when both runs have the change."""
        parts = mean_of(self._run_parts(change))
        if self.way is None:
            return self.allowed.between(parts, run_whole(self.program, self.batch, change, means=self.means).grads)
        held = [result.grads for result in self.run_way(change)]
        return [each for each in self.allowed.differences(held, parts) if each.is_off]

    def _run_parts(self, change: Prepare, *, in_one_process: bool = False) -> list[list[Plain]]:
        return run_parts(self.program, self.parts, change, means=self.means, in_one_process=in_one_process)

    def _run_before(self, model: nn.Module) -> None:
        run_one(self.program, model, own_copy(self.batch), means=self.means)


def unequal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors in ``one`` that ``other`` has not, or has with other values."""
    return [name for name, tensor in one.items() if name not in other or not torch.equal(tensor, other[name])]


# ---- Changes of a copy of the model. ----


def _with_grad_hooks(model: nn.Module) -> list[str]:
    """Parameters and modules with hooks that see gradients in backward."""
    params = [name for name, param in model.named_parameters() if is_hooked(param)]
    return params + [name for name, each in model.named_modules() if each._backward_hooks or each._backward_pre_hooks]


def _remove_grad_hooks(model: nn.Module) -> None:
    for param in model.parameters():
        for hooks in (param._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None)):
            if hooks is not None:
                hooks.clear()
    for module in model.modules():
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()


def _freeze(model: nn.Module, modules: Sequence[str]) -> None:
    for name in modules:
        model.get_submodule(name).eval()


def _is_expert(param: nn.Parameter) -> bool:
    return getattr(param, "allreduce", True) is False


def _take_marks_off(model: nn.Module) -> None:
    for param in filter(_is_expert, model.parameters()):
        param.allreduce = True  # type: ignore[attr-defined]


def _hide_outside_units(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Let each unit's parameters be there only while the unit runs, as under ``fully_shard``.

    All modules register copies of their parameters (what is tied stays tied): who reads a parameter by a reference of
    its own gives the copy no gradient. While the model runs and a unit does not, frozen twins stand in for the unit's
    copies: they have the values and take no gradient.
    """
    copies: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            copied = copies.setdefault(id(param), nn.Parameter(param.detach().clone(), param.requires_grad))
            module.register_parameter(name, copied)
    running: list[nn.Module] = []  # the model, while its forward runs

    def hide(unit: nn.Module) -> None:
        places = [
            (each, name, param) for each in unit.modules() for name, param in each.named_parameters(recurse=False)
        ]

        def show(shown: bool) -> None:
            for module, name, param in places:
                twin = nn.Parameter(param.detach(), requires_grad=False)
                module._parameters[name] = param if shown else twin

        unit.register_forward_pre_hook(lambda *_: show(True))
        unit.register_forward_hook(lambda *_: show(not running))
        model.register_forward_pre_hook(lambda *_: show(False))
        model.register_forward_hook(lambda *_: show(True))

    model.register_forward_pre_hook(lambda *_: running.append(model))
    model.register_forward_hook(lambda *_: running.clear())
    for unit in units:
        hide(unit)
