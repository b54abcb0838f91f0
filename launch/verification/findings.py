"""What ``verify`` found: causes, their remedies, and the report."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from textwrap import fill, shorten

__all__ = ["NOTES", "Cause", "Finding", "Verification", "VerificationError", "WayResult"]


class Cause(StrEnum):
    """Why gradients differ. The value is the name in reports and in ``accept``."""

    remedy: str
    """What to do about it."""

    def __new__(cls, value: str, remedy: str) -> "Cause":
        """The cause whose value is its name."""
        cause = str.__new__(cls, value)
        cause._value_, cause.remedy = value, remedy
        return cause

    # Of the program: plain PyTorch shows them.
    NOT_FINITE = (
        "not_finite",
        "find the operation (torch.autograd.detect_anomaly), or keep such rows out of the batch",
    )
    SUM = (
        "sum",
        "return the mean over the batch; or keep the sum, set calculate_per_token_loss=True and call set_num_tokens(n)",
    )
    WEIGHTED_MEAN = (
        "weighted_mean",
        "return the sum over what is counted (tokens), set calculate_per_token_loss=True and call "
        "set_num_tokens(num_tokens); or divide by the mean number over all ranks and microbatches",
    )
    RANDOM = (
        "random",
        "none needed where each rank is seeded by its number: ranks then draw their own numbers. What ranks "
        "must draw alike takes a generator that all seed alike",
    )
    NOT_REPRODUCIBLE = (
        "not_reproducible",
        "draw from torch's default generators, seeded; keep state in the model's buffers; "
        "torch.use_deterministic_algorithms(True) names operations that are not deterministic",
    )
    STATE = (
        "state",
        "make forward independent of earlier calls, or keep the state in a buffer that changes once a step",
    )
    RANK = (
        "rank",
        "let all ranks compute the same function of their rows; what a rank must know goes into the batch. A "
        "loss over gathered rows is that of the whole batch with num_microbatches=1 alone",
    )
    HOOK = (
        "hook",
        "clip and scale .grad after the last backward, not the gradient of one microbatch in a hook",
    )
    BATCH_STATISTICS = (
        "batch_statistics",
        "use GroupNorm or LayerNorm, or statistics over all ranks (SyncBatchNorm); or accept that "
        "each microbatch has its own: accept=['batch_statistics']",
    )
    MIXED_ROWS = (
        "mixed_rows",
        "let each row's loss depend on this row alone, gather over ranks what a row needs of others, or "
        "accept that it sees the rows of its own microbatch: accept=['mixed_rows']",
    )
    UNUSED = (
        "unused",
        "none needed: the gradient is zero on all ranks, but weight decay still acts, as it does not in a "
        "stock optimizer without .grad. Otherwise connect it to the loss, freeze it, or remove it",
    )
    BUFFERS = (
        "buffers",
        "none needed for gradients. Each rank has its own values, and a checkpoint has the first rank's: "
        "average them over ranks before saving where that matters",
    )
    # Of the program together with a wrapper.
    REPLACED = (
        "replaced",
        "make every parameter in __init__ and change values in place (param.data.copy_) or by functions",
    )
    READ_ELSEWHERE = (
        "read_elsewhere",
        "call the module that owns the parameter, or make one unit (fully_shard) of a module that contains both",
    )
    EXPERT_RANKS = (
        "expert_ranks",
        "take the mark allreduce = False off, or pass as expert_process_group all ranks that hold this expert",
    )
    SHARED_MEMORY = (
        "shared_memory",
        "register one Parameter in both modules: b.weight = a.weight",
    )
    NOT_RECOMPUTABLE = (
        "not_recomputable",
        "make the recomputed forward repeatable: no caches, no state that it changes, no random "
        "state outside torch's default generators",
    )
    # Of neither.
    REFUSED = (
        "refused",
        "do as the message says, or leave this way out (ways=...)",
    )
    LIBRARY = (
        "library",
        "this is a fault of maingrad: please report it with the program",
    )


NOTES = frozenset({Cause.RANDOM, Cause.UNUSED, Cause.BUFFERS})
"""Worth knowing, and no gradient is wrong because of them."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause, and what differs because of it."""

    cause: Cause
    evidence: str
    """What the experiment has shown."""
    parameters: tuple[str, ...] = ()
    """Those that differ, the farthest first; empty if the finding is about none."""
    module: str = ""
    """The modules, buffers or hooks at fault, where that is known."""
    ways: tuple[str, ...] = ()
    """The ways that show it; empty: plain PyTorch shows it, with as many parts and no wrapper."""
    ranks: tuple[int, ...] = ()
    """The ranks that show it; empty: all."""
    error: float = 0.0
    """The largest relative error of a gradient: |found - wanted| / |wanted|."""
    accepted: bool = False
    """The caller accepts this cause."""

    @property
    def parameter(self) -> str:
        """The parameter that is farthest off; '' if the finding is about none."""
        return self.parameters[0] if self.parameters else ""

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return self.cause.remedy

    @property
    def is_note(self) -> bool:
        """Whether the finding leaves ``Verification.ok`` true."""
        return self.accepted or self.cause in NOTES

    def __str__(self) -> str:
        kind = "accepted" if self.accepted else "note" if self.is_note else "error"
        lines = [f"{kind}: {self.cause}{f' in {shorten(self.module, 100)}' if self.module else ''}"]
        if self.parameters:
            more = f" and {len(self.parameters) - 1} more" if len(self.parameters) > 1 else ""
            off = f", off by {self.error:.1e} of its norm" if self.error else ""
            lines.append(f"  parameter  {self.parameter}{more}{off}")
        lines.append(f"  shown by   {', '.join(self.ways) or 'plain PyTorch'}")
        if self.ranks:
            lines.append(f"  ranks      {', '.join(map(str, self.ranks))}")
        for heading, text in (("evidence", self.evidence), ("remedy", self.remedy)):
            lines.append(fill(text, 113, initial_indent=f"  {heading:<10} ", subsequent_indent=" " * 13))
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class WayResult:
    """How one way compares with plain PyTorch."""

    way: str
    ok: bool = False
    grad_error: float = math.inf
    """The largest relative error of a parameter's gradient; infinite if the way has raised an error."""
    norm_error: float = math.inf
    """Relative error of the global norm."""
    weight_error: float = math.inf
    """The largest relative error of a parameter's update."""
    fused_writes: int = 0
    """Weight-gradient products that were written into ``main_grad`` on each rank."""


class VerificationError(AssertionError):
    """A model is not trained as in plain PyTorch. The message is the report."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of ``verify``. ``str()`` of it is the report."""

    findings: Sequence[Finding]
    """Errors first, then notes."""
    results: Sequence[WayResult]
    num_parameters: int
    """Trainable ones, as tensors."""
    num_elements: int
    ranks: int
    num_microbatches: int
    rows: int
    """Rows of the batch that was used."""

    @property
    def ok(self) -> bool:
        """Whether ways were compared, and no finding is an error."""
        return bool(self.results) and all(finding.is_note for finding in self.findings)

    def raise_if_failed(self) -> "Verification":
        """Raise ``VerificationError`` with the report unless ``ok``; returns the verification itself."""
        if not self.ok:
            raise VerificationError(str(self))
        return self

    def accepting(self, causes: Collection[str]) -> "Verification":
        """The same with findings of these causes as notes."""
        found = [replace(each, accepted=each.cause in causes) for each in self.findings]
        return replace(self, findings=sorted(found, key=lambda each: each.is_note))

    def __str__(self) -> str:
        lines = [
            f"{self.num_parameters} trainable parameters, {self.num_elements:,} elements; {self.rows} rows on "
            f"{self.ranks} ranks, {self.num_microbatches} microbatches each, beside one plain PyTorch process"
        ]
        if self.results:
            lines += ["", f"{'way':<18} {'gradients':>10} {'norm':>10} {'weights':>10} {'fused':>6}"]
        for each in self.results:
            errors = (each.grad_error, each.norm_error, each.weight_error)
            cells = " ".join(f"{error:>10.1e}" for error in errors)
            lines.append(f"{each.way:<18} {cells} {each.fused_writes:>6}  {'ok' if each.ok else 'DIFFERS'}")
        for finding in self.findings:
            lines += ["", str(finding)]
        count = sum(not finding.is_note for finding in self.findings)
        failed = f"{count} error{'s' if count > 1 else ''}" if count else "nothing could be compared"
        lines += ["", "verified" if self.ok else failed]
        return "\n".join(lines)
