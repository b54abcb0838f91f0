"""What a program is: data. A model, an optimizer, and phases of training with a checkpoint between them.

Every value is a plain one, so that programs can be compared, printed and made simpler. ``sources.py`` and its
neighbours write them down in Python; ``valid.py`` keeps them within what the documentation allows.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """One layer of the model, with a residual around it."""

    kind: str = "linear"
    """Which; ``layers.py`` has them all."""
    library: bool = False
    """Made of the library's modules, where there are some of this kind."""
    fused: bool = True
    delayed: bool = False
    bias: bool = True
    packed: bool = False
    """Experts of a group in one weight."""
    padded: bool = False
    """A group gets rows that belong to no expert; of transformers' experts, some choices are dropped."""
    rms: bool = False
    gated: bool = False
    hidden: int = 4
    frozen: str = "no"
    """Or the "first" weight, "weights", or "all"; of a branch "one way": some ranks may train nothing of it."""
    recompute: str = "no"
    """Of the layer: "reentrant" or "non-reentrant"."""
    single: bool = False
    """fp32 in an fp64 model."""
    penalty: bool = False
    """Returns a part of the loss beside its output."""


@dataclass(frozen=True)
class Model:
    """Blocks between a stem and a head."""

    blocks: tuple[Block, ...] = (Block(),)
    width: int = 5
    stem: str = "linear"
    """Or "lookup": an embedding."""
    tie: str = "no"
    """Or "blocks": two square weights are one; or "embedding": the stem's and the head's."""
    staged: bool = False
    """The last two blocks are one module."""
    repeats: int = 0
    """How often the first block runs again at the end."""
    same_twice: bool = False
    """The first block is registered at the end as well."""
    recompute: str = "no"
    """Of whole blocks: "reentrant" or "non-reentrant"."""
    frozen_stem: bool = False
    converted: bool = False
    """By ``convert_linears``."""
    variants: int = 1
    """Of the experts, which ranks take in turn."""
    hooked: bool = False
    """A hook doubles the gradients of the first block."""


@dataclass(frozen=True)
class Optimizer:
    """A class of ``torch.optim``."""

    name: str = "SGD"
    options: tuple[tuple[str, Any], ...] = ()
    groups: bool = False
    """Norms and biases do not decay."""
    schedule: str = "no"
    scaled: bool = False
    """Under a ``GradScaler``."""


@dataclass(frozen=True)
class Ddp:
    """``DistributedDataParallel``, and who updates."""

    sharded: bool = False
    """``use_distributed_optimizer``."""
    instances: int = 1
    stock: bool = False
    """torch's own optimizer over ``.grad``."""
    overlap: bool = True
    gather_overlap: bool = False
    bucket_size: int | None = None
    num_buckets: int | None = None
    find_unused: bool = False
    check_nan: bool = False
    keep_whole: bool = False
    released: bool = False
    """``release_grads``."""
    per_token: bool = False
    group: str = "default"
    """How ranks are given: "default", "group", "mesh"."""
    init_sync: bool = False
    """Ranks begin with other values, and get the first one's."""
    recorded_order: bool = False
    max_grad_norm: bool = False
    """Clipping is the optimizer's business."""
    clips: str = "torch"
    """Who clips exposed gradients: "torch"; the "library", before, or after where they are
    scaled; or torch "too early", before they are exposed."""
    zero: str = "model.zero_grad_buffer()"
    plain_loop: bool = False
    """The program names no method of the wrapper from the last backward to the next iteration."""


@dataclass(frozen=True)
class UnitOf:
    """One call of ``fully_shard``."""

    path: str
    """Of the module; empty for the outermost."""
    reshard: bool | None = None
    holds: bool = False
    """``reduce_every_microbatch=False``."""
    bucket_size: int | None = None
    atoms: Any = "element"


@dataclass(frozen=True)
class Fsdp:
    """``fully_shard`` of some modules and then of the model."""

    placements: str = "zero3"
    instances: int = 1
    units: tuple[UnitOf, ...] = (UnitOf(""),)
    """From the inside out; the outermost last."""
    group: str = "default"
    init_sync: bool = False
    meta: str = "no"
    """The model is on the meta device before, and its ``init_fn`` writes it on "all" ranks, or the "first" alone."""
    left_out: int | None = None
    """A tensor that is not written, or in part: that is tried before, with another model, and refused."""
    prefetch: bool = False
    stepping_hooks: bool = False
    """Each parameter has an optimizer, which a hook steps when its gradient is complete."""
    zero: str = "optimizer.zero_grad()"


@dataclass(frozen=True)
class Micro:
    """One microbatch: forward and backward."""

    pattern: str = "plain"
    rows: int = 3
    ranks: Ranks | None = None
    """Who has it; None: everybody."""
    skips: int | None = None
    """A block that does not run in it, on any rank."""
    keep: str = "nothing"
    """Or "loss", "output": in a list."""
    keepers: Ranks = ()
    raises: Ranks = ()
    """Who raises after backward, catches it and keeps the exception."""


@dataclass(frozen=True)
class Extra:
    """Something beside training."""

    kind: str
    at: int = 0
    """Before the microbatch of this index; ``len(micros)``: after the last backward; one more: after the step."""
    ranks: Ranks = ()
    """Who keeps what comes of it."""
    where: int = 0
    """The block in which a forward fails, or which variant of the kind it is."""


@dataclass(frozen=True)
class Iteration:
    """What leads to one step of the optimizer, or to none."""

    micros: tuple[Micro, ...] = (Micro(),)
    extras: tuple[Extra, ...] = ()
    no_sync: str = "backward"
    """What it is around: "backward", "all" of a microbatch, or nothing, where it was "forgotten"."""
    outcome: str = "step"
    """Or "skip": gradients are thrown away; "accumulate": they stay for the next; "fails": in the last backward."""
    way: str = "plain"
    """How it leads to its step: a "closure" that the optimizer calls; the second of "two halves"; or with the
    gradients of two losses, "projected"."""
    second: str = "together"
    """What becomes of the second model's gradients of this one's losses: they are stepped with, "together"; nobody
    wants them, and backward goes "through"; or it is "frozen" meanwhile."""
    alternates: bool = False
    """The second model has a step of its own before."""
    drain: str = "each"
    """When delayed weight gradients are computed: after "each" backward, or at the "end"."""
    finish: str = "finish"
    """Or "start": ``start_grad_sync`` alone; "start, finish"; "nothing"."""
    see: tuple[str, ...] = ()
    """"grads", "weights"."""
    scaled: bool = False
    """Somebody halves the gradients before the step."""
    change: str = "no"
    """What else somebody does to each gradient before it is clipped; ``gradients.py`` has the ways."""
    reads: tuple[str, ...] = ()
    """In which ways gradients are read before they are clipped."""
    overflow: Ranks = ()
    """Whose loss is infinite, under a ``GradScaler``."""
    graphed: bool = False
    """It is a call of the phase's ``GraphedTrainingStep``: all that are run the microbatches of the first."""


@dataclass(frozen=True)
class Damage:
    """What has happened to a copy of a checkpoint; ``user_checkpoints.py`` does it."""

    kind: str = "flipped"
    """One of ``DAMAGES``."""
    seed: int = 0
    """Which file, and where in it."""


@dataclass(frozen=True)
class Second:
    """A second trained model, which judges the first one's outputs."""

    wrapper: str = "ddp"
    """Or "zero1", "fsdp"."""
    library: bool = False
    adam: bool = False


@dataclass(frozen=True)
class Phase:
    """Training by so many ranks, from a checkpoint of the phase before."""

    ranks: int = 2
    wrapper: Ddp | Fsdp = Fsdp()
    iterations: tuple[Iteration, ...] = (Iteration(),)
    clip: float | None = None
    queue: bool = False
    """Forwards run within ``delayed_wgrad(queue)``."""
    garbage: str = "off"
    """When the collector runs: never by itself ("off"), or often."""
    loads: str = "all"
    """What it takes from the checkpoint: "all", or "weights" only."""
    saves: str = "waits"
    """How it saves for the phase after it: training "waits", or goes on "beside" it for steps that nobody sees."""
    damages: tuple[Damage, ...] = ()
    """Of copies of the checkpoint, which it tries to load before."""
    second: Second | None = None
    warmups: int = 2
    """Eager calls of a graphed step before its capture."""

    @property
    def graphed(self) -> tuple[Iteration, ...]:
        """Its iterations that are calls of a graphed step."""
        return tuple(iteration for iteration in self.iterations if iteration.graphed)


@dataclass(frozen=True)
class Program:
    """All of it."""

    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    phases: tuple[Phase, ...] = (Phase(),)
    dtype: str = "float64"
    order: int = 0
    """Seed of the order in which simulated ranks go on."""

    @property
    def clips_in_fp32(self) -> bool:
        """``max_grad_norm`` rounds its coefficient to fp32, since torch's fused kernels take no other."""
        return any(isinstance(phase.wrapper, Ddp) and phase.wrapper.max_grad_norm for phase in self.phases)


def wrapper_kind(wrapper: Ddp | Fsdp) -> str:
    """What users call it."""
    if isinstance(wrapper, Fsdp):
        return f"fully_shard {wrapper.placements}"
    kind = ("hybrid" if wrapper.instances > 1 else "zero1") if wrapper.sharded else "ddp"
    return f"{kind}, gather overlapped" if wrapper.gather_overlap else kind


def dimensions(program: Any) -> Counter[tuple[str, str]]:
    """Every dimension's values, and how often the program, of either family, has each."""
    found: Counter[tuple[str, str]] = Counter()
    _count(program, "", found)
    if not isinstance(program, Program):
        return found
    for phase in program.phases:
        found["wrapper", wrapper_kind(phase.wrapper)] += 1
        found["iterations", str(len(phase.iterations))] += 1
    found["phases", str(len(program.phases))] += 1
    found["blocks", str(len(program.model.blocks))] += 1
    return found


def _count(value: Any, name: str, found: Counter[tuple[str, str]]) -> None:
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _count(getattr(value, field.name), f"{type(value).__name__.lower()}.{field.name}", found)
    elif isinstance(value, tuple) and any(dataclasses.is_dataclass(each) for each in value):
        for each in value:
            _count(each, name, found)
    elif value and isinstance(value, tuple) and all(isinstance(each, str) for each in value):
        found.update((name, each) for each in value)
    elif name not in (
        "program.order",
        "pipeline.order",
        "run.order",
        "recipes.order",
        "meshes.order",
        "unitof.path",
        "extra.where",
        "damage.seed",
    ):
        found[name, _spelt(value)] += 1


def _spelt(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return ", ".join(f"{key}={option}" for key, option in value)
    return str(value)
