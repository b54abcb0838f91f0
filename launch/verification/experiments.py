"""Experiments: the program runs again with one change, and what the change does tells the cause.

Two runs must give the same gradients: the parts of a batch and the whole batch in plain PyTorch, and then each way and
the parts. Where they do not, ``Comparison.find_cause`` goes through its experiments. There are two kinds of them:

    mends      both runs have the change, and agree now: what the change takes away is the cause
    otherwise  plain PyTorch itself computes other gradients with the change: the program does not bear it
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..parallelizing.blocks import add_recompute
from .batches import own_copy
from .comparison import Allowed, Difference, Piece, off_in, parts_in
from .findings import Cause, Finding
from .plain import Grads, Parts, Plain, Prepare, as_it_is, mean_of, on_ranks, run_one, run_parts, run_whole
from .program import Program
from .ways import RankResult, Setting, Way, run_way

__all__ = ["Comparison", "about", "unequal"]


class Experiment(NamedTuple):
    """One change, and the cause that it may show."""

    cause: Cause
    evidence: str
    change: Prepare = as_it_is
    """The change of each copy of the model, before it runs."""
    in_one_process: bool = False
    """One process runs the parts of all ranks."""
    setting: Mapping[str, Any] = {}
    """Other values in the setting of the way."""
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
    plains: list[Plain]
    """What plain PyTorch computes of the parts."""
    way: Way | None = None

    @property
    def mean(self) -> Grads:
        """The mean of the parts' gradients in plain PyTorch."""
        return mean_of(self.plains)

    def run_way(self, way: Way, setting: Setting, change: Prepare = as_it_is) -> list[RankResult]:
        """Each rank's result. Raises what a rank raises."""

        def run() -> RankResult:
            mine = [part for part in self.parts if part.rank == dist.get_rank() // way.ranks_of_row]
            return run_way(self.program, way, mine, setting, change)

        return on_ranks(run, (1 + self.parts[-1].rank) * way.ranks_of_row)

    def find_cause(self, off: Sequence[Difference]) -> Finding | None:
        """The first experiment that shows a cause.

        off  the parameters that differ, or that an error names
        """
        for each in self._experiments():
            shown = self._shown_by(each)
            if shown is not None:
                return about(off or shown, each.cause, each.evidence, each.module)
        return None

    def contents(self, piece: Piece) -> tuple[list[float], float, str]:
        """How often each part is contained in a gradient, in units of what is right; the rest; and both in words."""
        count, of_parts = len(self.parts), [piece.of(plain.grads[piece.name]) for plain in self.plains]
        factors, rest = parts_in(piece.values, of_parts)
        shares = [factor * count for factor in factors]
        listed = [f"{round(share, 2) + 0.0:.2f} of {part}" for share, part in zip(shares, self.parts, strict=True)]
        return shares, rest, f"in units of 1/{count}, it contains {', '.join(listed)}"

    def _experiments(self) -> Iterator[Experiment]:
        """In this order: those come first that would spoil the later ones."""
        model, way, units = self.program.make(), self.way, self.setting.units
        yield Experiment(
            Cause.NOT_REPRODUCIBLE,
            "Plain PyTorch computes other gradients when fresh copies of the model run the same rows from the same "
            "seed: forward depends on something that is neither in the model, nor in the batch, nor in a default "
            "generator.",
        )
        hooked = [*dict.fromkeys(name for name, hooks in _grad_hooks(model) if hooks)]
        if hooked:
            yield Experiment(
                Cause.HOOK,
                "Without the hooks that see gradients both runs agree; with them they do not. A hook changes each "
                "microbatch's gradient, and not linearly, or this way does not call it.",
                change=_remove_grad_hooks,
                mends=True,
                module=", ".join(hooked),
            )
        if way is None:
            yield Experiment(
                Cause.STATE,
                "Plain PyTorch computes other gradients when the same copy of the model has run before: forward "
                "changes something that its next call reads.",
                change=lambda model: run_one(self.program, model, own_copy(self.batch)),
            )
            yield Experiment(
                Cause.RANK,
                "In plain PyTorch without a wrapper, ranks compute other gradients of their rows than one process "
                "does of the same rows from the same seed: the program asks for its rank, or communicates with other "
                "ranks.",
                in_one_process=True,
            )
            changed = unequal(self.plains[0].buffers, dict(model.named_buffers()))
            owners = [*dict.fromkeys(name.rpartition(".")[0] for name in changed)]
            if owners:
                yield Experiment(
                    Cause.BATCH_STATISTICS,
                    "Forward changes this module's buffers. With the module in evaluation mode the parts' gradients "
                    "add up to the whole batch's; in training mode each microbatch is normalised by its own "
                    "statistics.",
                    change=lambda model: [model.get_submodule(owner).eval() for owner in owners],
                    mends=True,
                    module=", ".join(owners),
                )
            return
        recompute: Prepare = (lambda model: add_recompute(model, [*units(model)])) if way.recompute else as_it_is
        if way.recompute:
            yield Experiment(
                Cause.NOT_RECOMPUTABLE,
                "With recompute, plain PyTorch computes other gradients too, or fails: forward is not repeatable.",
                change=recompute,
            )
        if self.setting.experts is not None:
            yield Experiment(
                Cause.EXPERT_RANKS,
                "The parameter is marked as an expert's (allreduce = False), and its gradient is right when it is "
                "reduced over all ranks: over expert_process_group it lacks the rows of ranks that have the same "
                "weights.",
                setting={"experts": None},
                mends=True,
            )
        if way.shards_parameters:
            yield Experiment(
                Cause.READ_ELSEWHERE,
                "When modules register copies of their parameters, a copy gets another gradient in plain PyTorch: the "
                "program reads the parameter by a reference of its own, which under fully_shard is to the shard.",
                change=_register_copies,
            )
            yield Experiment(
                Cause.READ_ELSEWHERE,
                "Gradients are right when fully_shard makes one unit of the whole model: the program reads a parameter "
                "while the forward of its unit does not run, where it is a shard.",
                change=recompute,  # as the way does it, which recomputes units
                setting={"units": lambda model: ()},
                mends=True,
            )

    def _shown_by(self, each: Experiment) -> Sequence[Difference] | None:
        """The parameters for which the cause is shown; () for all that are off, None if it is not shown."""
        try:
            parts = mean_of(run_parts(self.program, self.parts, each.change, in_one_process=each.in_one_process))
            if not each.mends:
                return self.allowed.between(parts, self.mean) or None
            if self.way is None:
                off = self.allowed.between(parts, run_whole(self.program, self.batch, each.change).grads)
            else:
                results = self.run_way(self.way, self.setting._replace(**each.setting), each.change)
                off = off_in(self.allowed.differences([result.grads for result in results], parts))
            return None if off else ()
        except Exception:  # a change that should mend does not; any other one is more than the program bears
            return None if each.mends else ()


def about(off: Sequence[Difference], cause: Cause, evidence: str, module: str = "") -> Finding:
    """The finding that this is why these parameters are off."""
    return Finding(
        cause=cause,
        evidence=evidence,
        module=module,
        parameters=tuple(each.name for each in off),
        ranks=tuple(sorted({rank for each in off for rank in each.ranks})),
        error=max((each.error for each in off), default=0.0),
    )


def unequal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors in ``one`` that ``other`` has not, or has with other values."""
    return [name for name, tensor in one.items() if name not in other or not torch.equal(tensor, other[name])]


# ---- Changes of a copy of the model. ----


def _grad_hooks(model: nn.Module) -> Iterator[tuple[str, dict[int, Any]]]:
    """The hooks that see gradients in backward, with the name of the parameter or module."""
    for name, param in model.named_parameters():
        yield name, param._backward_hooks or {}
        yield name, getattr(param, "_post_accumulate_grad_hooks", None) or {}
    for name, module in model.named_modules():
        yield name, module._backward_hooks
        yield name, module._backward_pre_hooks


def _remove_grad_hooks(model: nn.Module) -> None:
    for _, hooks in _grad_hooks(model):
        hooks.clear()


def _register_copies(model: nn.Module) -> None:
    """Let all modules register other Parameters of the same values; what is tied stays tied."""
    copies: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            copied = copies.setdefault(id(param), nn.Parameter(param.detach().clone(), param.requires_grad))
            module.register_parameter(name, copied)
