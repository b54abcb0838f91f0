"""What the documentation allows: ``valid(program)`` changes as little as it takes for a program to be one.

Drawing and shrinking need not know what goes with what; they change one thing, and this puts the rest right. Applied
twice it changes nothing more. What the library promises to be right must not be taken out here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import known
from extras import AFTER, FORWARDS, RANK_DEPENDENT, VARIED
from gradients import CANCELS, SLICES, shows
from graphed_steps import FUSED, as_calls, with_exact_rate
from layers import (
    ONCE_DIFFERENTIABLE,
    all_paths,
    block_order,
    expert_paths,
    num_members,
    tied_paths,
    writes_in_forward,
)
from microbatches import ASKS_FOR_INPUTS, BOTH_REDUCED, HEAD_BEHIND, NO_GRADIENT_OF_LOSS, UNDELAYED
from programs import Ddp, Extra, Fsdp, Iteration, Micro, Model, Optimizer, Phase, Program, Ranks, UnitOf
from valid_models import ROUNDED, valid_model

INPUT_PATTERNS = (*ASKS_FOR_INPUTS, "input's gradient", "attack")
ENDS_ITERATIONS = ("unwrapped", "put by hand")
"""Extras after which gradients of the iteration are gone."""
NEEDS_ONE_MODEL = (
    "state_dict",
    "load_state_dict",
    "snapshot",
    "rollback",
    "average",
    "average taken",
    "averaged model",
    "unwrapped",
    "saved beside",
    "gone back to",
)
"""Extras that speak of all parameters, which no rank has where experts differ."""


def valid(program: Program) -> Program:
    """The nearest program that users may write, without what is known."""
    program = _valid(program)
    return _valid(known.without(program))


def _valid(program: Program) -> Program:
    program = replace(program, model=valid_model(program.model, program.dtype))
    program = replace(program, optimizer=_optimizer(program))
    if any(isinstance(phase.wrapper, Fsdp) for phase in program.phases):  # which refuses hooks on parameters
        program = replace(program, model=replace(program.model, hooked=False))
    if program.optimizer.name == "LBFGS":
        program = _for_closures(program)
    phases = [_phase(program, phase) for phase in program.phases]
    if any(phase.graphed for phase in phases):
        program = replace(program, optimizer=with_exact_rate(program.optimizer))
    return replace(program, phases=tuple(_checkpoints(program, phases)))


# ---- Optimizers. ----


def _optimizer(program: Program) -> Optimizer:
    optimizer = program.optimizer
    if optimizer.name == "LBFGS":  # whose steps are made of differences, and of sums over all parameters
        if not _is_precise(program) or expert_paths(program.model):
            return Optimizer("SGD", (("lr", 0.01),))
        options = tuple(each for each in optimizer.options if each[0] in ("lr", "max_iter", "line_search_fn"))
        return replace(optimizer, options=options, groups=False, scaled=False)
    if program.dtype in ROUNDED:
        optimizer = replace(optimizer, scaled=False)
    if dict(optimizer.options).get("fused") and optimizer.name not in ("SGD", "Adam", "AdamW", "Adagrad"):
        optimizer = replace(optimizer, options=tuple(each for each in optimizer.options if each[0] != "fused"))
    return optimizer


def _for_closures(program: Program) -> Program:
    """An optimizer that takes no step without one: torch's own, over gradients that every rank has whole."""
    phases = []
    for phase in program.phases:
        wrapper = phase.wrapper if isinstance(phase.wrapper, Ddp) else Ddp()
        wrapper = replace(wrapper, sharded=False, stock=True, per_token=False)
        iterations = tuple(replace(iteration, way="closure") for iteration in phase.iterations)
        phases.append(replace(phase, wrapper=wrapper, clip=None, iterations=iterations))
    return replace(program, model=replace(program.model, hooked=False), phases=tuple(phases))


# ---- Phases. ----


def _checkpoints(program: Program, phases: Sequence[Phase]) -> list[Phase]:
    """An optimizer of torch's under DistributedDataParallel is not saved."""
    found = list(phases)
    for index, phase in enumerate(found):
        before = found[index - 1].wrapper if index else None
        stock = any(isinstance(each, Ddp) and each.stock for each in (before, phase.wrapper))
        loads = "weights" if index and stock else phase.loads if index else "all"
        damages = () if not index or _left_out(found[:index], phase) else phase.damages
        saves = phase.saves if _goes_on(program, phase) and index < len(found) - 1 else "waits"
        found[index] = replace(phase, loads=loads, damages=damages, saves=saves)
    return found


def _goes_on(program: Program, phase: Phase) -> bool:
    """Whether an iteration of the simplest kind may follow the last one."""
    scales = program.optimizer.scaled or (isinstance(phase.wrapper, Ddp) and phase.wrapper.per_token)
    return not (scales or _steps_in_hooks(phase.wrapper) or program.optimizer.name == "LBFGS")


def _left_out(before: Sequence[Phase], phase: Phase) -> bool:
    """Whether the undamaged checkpoint is refused: a step left out one of the parameters that are updated together."""
    some = any(iteration.change == "none" for each in before for iteration in each.iterations)
    return some and isinstance(phase.wrapper, Ddp)


def _phase(program: Program, phase: Phase) -> Phase:
    ranks, variants = phase.ranks, program.model.variants
    wrapper = phase.wrapper
    instances = _instances(wrapper)
    if ranks % (instances * variants):
        ranks = instances * variants * max(1, min(ranks // (instances * variants), 6 // (instances * variants)))
    if any(block.recompute != "no" for block in program.model.blocks) or program.model.recompute != "no":
        phase = replace(phase, queue=False)
    if not any(block.library for block in program.model.blocks) and not program.model.converted:
        phase = replace(phase, queue=False)
    phase = replace(phase, ranks=ranks)
    made = _ddp(program, phase, wrapper) if isinstance(wrapper, Ddp) else _fsdp(program, wrapper)
    sums = isinstance(made, Ddp) and made.per_token
    if phase.queue or sums or program.optimizer.scaled or program.dtype in ROUNDED:  # which would be the second's too
        phase = replace(phase, second=None)
    phase = replace(phase, wrapper=made, clip=None if _steps_in_hooks(made) else phase.clip)
    phase = replace(phase, iterations=as_calls(program, phase))
    phase = replace(phase, warmups=phase.warmups if phase.graphed else 2)
    iterations: list[Iteration] = []
    for iteration in phase.iterations:
        begins = not iterations or iterations[-1].outcome != "accumulate"
        iterations.append(_iteration(program, phase, iteration, begins))
    if iterations and iterations[-1].outcome == "accumulate":
        begins = len(iterations) == 1 or iterations[-2].outcome != "accumulate"
        iterations[-1] = _iteration(program, phase, replace(iterations[-1], outcome="step"), begins)
    return replace(phase, iterations=tuple(_with_states(iterations)))


def _instances(wrapper: Ddp | Fsdp) -> int:
    if isinstance(wrapper, Ddp):
        return wrapper.instances if wrapper.sharded else 1
    return max(2, wrapper.instances) if wrapper.placements.startswith("hsdp") else 1


def _ddp(program: Program, phase: Phase, wrapper: Ddp) -> Ddp:
    half, delays = program.dtype == "bfloat16", _delays(program, phase)
    if not wrapper.sharded:
        wrapper = replace(wrapper, instances=1, gather_overlap=False, keep_whole=False, released=False)
    if wrapper.sharded or half:
        wrapper = replace(wrapper, stock=False)
    if wrapper.num_buckets is not None:
        wrapper = replace(wrapper, bucket_size=None)
    if program.optimizer.scaled:
        wrapper = replace(wrapper, per_token=False, check_nan=False)
    if wrapper.stock or phase.clip is None:
        wrapper = replace(wrapper, max_grad_norm=False)
    if not wrapper.stock or phase.clip is None:
        wrapper = replace(wrapper, clips="torch")
    elif program.model.variants > 1 and not wrapper.plain_loop:
        wrapper = replace(wrapper, clips="library")  # torch's norm is of what one rank holds, and refused
    elif program.optimizer.scaled and wrapper.clips == "too early":
        wrapper = replace(wrapper, clips="torch")
    if half or delays or program.model.variants > 1 or writes_in_forward(program.model):  # it runs a forward more
        wrapper = replace(wrapper, recorded_order=False)
    if wrapper.instances > 1 and wrapper.group == "group":
        wrapper = replace(wrapper, group="default")
    zeros = ("model.zero_grad_buffer()", "model.zero_grad()", "optimizer.zero_grad()")
    zero = wrapper.zero if wrapper.zero in zeros else zeros[0]
    if wrapper.plain_loop:
        zero = zeros[-1]
        wrapper = replace(wrapper, clips="torch" if wrapper.clips == "too early" else wrapper.clips)
    return replace(wrapper, find_unused=wrapper.find_unused and wrapper.overlap, zero=zero)


def _delays(program: Program, phase: Phase) -> bool:
    return phase.queue or any(block.delayed for block in program.model.blocks)


def _fsdp(program: Program, wrapper: Fsdp) -> Fsdp:
    wanted = {unit.path: unit for unit in wrapper.units}
    for path in expert_paths(program.model):
        wanted.setdefault(path, UnitOf(path))
    wanted.setdefault("", UnitOf(""))
    allowed = [path for path in all_paths(program.model) if not _cuts_a_tie(program.model, path)]
    units = tuple(_unit(wanted[path], wrapper.placements) for path in (*allowed, "") if path in wanted)
    zeros = ("optimizer.zero_grad()", "model.zero_grad()", "optimizer.zero_grad(set_to_none=False)")
    zero = wrapper.zero if wrapper.zero in zeros else zeros[0]
    optimizer = program.optimizer
    simple = not (optimizer.groups or optimizer.scaled or optimizer.schedule != "no") and len(program.phases) == 1
    hooks = wrapper.stepping_hooks and simple
    zero = "model.zero_grad()" if hooks else zero
    meta = "all" if wrapper.meta != "no" and (not wrapper.init_sync or program.model.variants > 1) else wrapper.meta
    left_out = None if meta == "no" else wrapper.left_out
    wrapper = replace(wrapper, meta=meta, left_out=left_out)
    return replace(wrapper, units=units, instances=_instances(wrapper), zero=zero, stepping_hooks=hooks)


def _steps_in_hooks(wrapper: Ddp | Fsdp) -> bool:
    """There is no moment between gradients and step."""
    return isinstance(wrapper, Fsdp) and wrapper.stepping_hooks


def _cuts_a_tie(model: Model, path: str) -> bool:
    """A parameter belongs to one unit."""
    return any(_is_inside(first, path) != _is_inside(second, path) for first, second in tied_paths(model))


def _is_inside(path: str, of: str) -> bool:
    return f"{path}.".startswith(f"{of}.")


def _unit(unit: UnitOf, placements: str) -> UnitOf:
    if placements in ("zero1", "zero2") and unit.reshard:
        unit = replace(unit, reshard=None)
    if placements == "zero1":
        unit = replace(unit, holds=False)
    return unit


# ---- Iterations. ----


def _iteration(program: Program, phase: Phase, iteration: Iteration, begins: bool) -> Iteration:
    """``begins``: there are no gradients of an earlier one."""
    wrapper, count = phase.wrapper, len(iteration.micros)
    ddp = isinstance(wrapper, Ddp)
    delays = _delays(program, phase)
    micros = tuple(
        _micro(program, phase, micro, begins and index == 0, index == count - 1)
        for index, micro in enumerate(iteration.micros)
    )
    outcome = iteration.outcome
    if (outcome == "accumulate" and ddp) or (outcome == "fails" and delays):
        outcome = "step"
    if outcome == "fails" and writes_in_forward(program.model):  # plain PyTorch does not run what fails
        outcome = "step"
    if _steps_in_hooks(wrapper):
        outcome = "step" if outcome in ("skip", "accumulate") else outcome
        iteration = replace(iteration, change="no", reads=(), see=_without_grads(iteration), way="plain")
    iteration = replace(iteration, alternates=iteration.alternates and phase.second is not None)
    judges = phase.second is not None and outcome not in ("given up", "fails") and program.optimizer.name != "LBFGS"
    micros = tuple(_judged(micro, judges) for micro in micros)
    if not any(micro.pattern == "judged" for micro in micros):
        iteration = replace(iteration, second="together")
    no_sync = iteration.no_sync
    early = wrapper.overlap if isinstance(wrapper, Ddp) else delays or wrapper.stepping_hooks
    if isinstance(wrapper, Ddp) and wrapper.plain_loop:
        early = wrapper.overlap and (delays or any(micro.ranks is not None for micro in micros))  # reduced by all
    if no_sync == "forgotten" and (early or outcome in ("given up", "fails")):
        no_sync = "backward"
    overflow = _some(iteration.overflow, phase.ranks) if program.optimizer.scaled and outcome == "step" else ()
    scaled = iteration.scaled and outcome == "step" and not program.optimizer.scaled and not _steps_in_hooks(wrapper)
    drain = iteration.drain if delays and outcome in ("step", "skip", "accumulate") else "each"
    iteration = replace(
        iteration, micros=micros, outcome=outcome, no_sync=no_sync, drain=drain, scaled=scaled, overflow=overflow
    )
    iteration = replace(iteration, finish=_finish(program, phase, iteration))
    change = iteration.change if _changes_grads(program, phase, iteration) else "no"
    iteration = replace(iteration, change=change, way=_way(program, phase, iteration, begins))
    if iteration.way == "closure":
        iteration = replace(iteration, change="no", scaled=False)
    if iteration.way == "projected":
        micros, count = (Micro(),), 1
        finish = iteration.finish if ddp else "nothing"
        iteration = replace(iteration, micros=micros, no_sync="backward", finish=finish)
    reads = tuple(dict.fromkeys(_reads(program, phase, iteration)))
    see = tuple(what for what in iteration.see if what != "grads" or _shows_grads(program, phase, iteration))
    alike = _launches_alike(program, phase) and all(micro.ranks is None for micro in micros)
    alike = alike and iteration.way != "projected"  # whose losses are several
    stay = [each for each in iteration.extras if outcome != "accumulate" or each.kind not in ENDS_ITERATIONS]
    extras = [_extra(program, phase, extra, count, alike) for extra in stay]
    if iteration.way == "closure":
        see, reads = (), ()
        extras = [extra for extra in extras if extra is not None and extra.at > count]
    return replace(iteration, see=see, reads=reads, extras=tuple(extra for extra in extras if extra is not None))


def _judged(micro: Micro, judges: bool) -> Micro:
    if micro.pattern != "judged":
        return micro
    return replace(micro, ranks=None) if judges else replace(micro, pattern="plain")


def _without_grads(iteration: Iteration) -> tuple[str, ...]:
    return tuple(what for what in iteration.see if what != "grads")


def _finish(program: Program, phase: Phase, iteration: Iteration) -> str:
    wrapper = phase.wrapper
    if isinstance(wrapper, Fsdp):
        if iteration.outcome == "fails":  # it is refused after a backward that raised
            return "nothing"
        # What was delayed is over when the optimizer steps, or .grad has gone, or the model says so.
        stays = iteration.outcome == "accumulate" or wrapper.zero.endswith("(set_to_none=False)")
        steps = iteration.outcome not in ("accumulate", "skip") and not iteration.overflow  # where a scaler skips it
        if stays and not steps and _delays(program, phase):
            return "finish"
        return "finish" if iteration.finish == "finish" else "nothing"
    if wrapper.plain_loop:
        return "finish"
    if iteration.finish == "start" and (
        wrapper.stock
        or wrapper.per_token
        or program.optimizer.scaled
        or iteration.scaled
        or (phase.clip is not None and not wrapper.max_grad_norm)
        or iteration.outcome != "step"
    ):
        return "start, finish"
    return "finish" if iteration.finish == "nothing" else iteration.finish


def _shows_grads(program: Program, phase: Phase, iteration: Iteration) -> bool:
    if program.optimizer.scaled or iteration.outcome not in ("step", "accumulate"):
        return False
    return isinstance(phase.wrapper, Fsdp) or not (phase.wrapper.sharded or iteration.finish == "start")


def _way(program: Program, phase: Phase, iteration: Iteration, begins: bool) -> str:
    wrapper, way = phase.wrapper, iteration.way
    if not begins or iteration.outcome != "step" or program.optimizer.scaled:
        return "plain"
    if any(micro.pattern == "judged" for micro in iteration.micros):
        return "plain"
    if way == "projected":
        return "projected" if _projects(program, phase) else "plain"
    if isinstance(wrapper, Ddp) and (not wrapper.stock or wrapper.per_token or wrapper.clips != "torch"):
        return "plain"
    if way == "closure" and phase.clip is not None:
        return "plain"
    if way == "two halves" and (program.dtype in ROUNDED or program.model.variants > 1):
        return "plain"
    return way


def _projects(program: Program, phase: Phase) -> bool:
    """``autograd.grad`` has the gradients of all parameters, on all ranks."""
    wrapper = phase.wrapper
    if isinstance(wrapper, Ddp) and (wrapper.per_token or wrapper.find_unused or wrapper.plain_loop):
        return False
    if _steps_in_hooks(wrapper) or _delays(program, phase) or "reentrant" in _recomputes(program.model):
        return False
    return program.dtype not in ROUNDED and program.model.variants == 1


def _changes_grads(program: Program, phase: Phase, iteration: Iteration) -> bool:
    wrapper = phase.wrapper
    if not shows(iteration, wrapper) or program.optimizer.scaled:
        return False
    if iteration.change == "none" and isinstance(wrapper, Ddp) and not wrapper.stock:
        return False  # None is zero there: decay and momentum go on
    if iteration.change == "sign" and (not _is_precise(program) or program.clips_in_fp32):
        return False
    if iteration.change == "normalised":  # norms of experts' gradients cover all ranks' experts
        return program.model.variants == 1
    if iteration.change == "none" and program.model.variants > 1:  # which may be one of all ranks' experts
        return False
    options = dict(program.optimizer.options)
    # torch's fused SGD cannot begin the momentum of some parameters later than that of others.
    return not (iteration.change == "none" and options.get("fused") and options.get("momentum"))


def _is_precise(program: Program) -> bool:
    return program.dtype == "float64" and not any(block.single for block in program.model.blocks)


def _reads(program: Program, phase: Phase, iteration: Iteration) -> Iterator[str]:
    """Those of the iteration that there are for its gradients."""
    wrapper, one_model = phase.wrapper, program.model.variants == 1
    if iteration.overflow or program.optimizer.scaled:
        return
    if not shows(iteration, wrapper):
        reduced = iteration.outcome == "step" and iteration.finish != "start"
        if reduced and isinstance(wrapper, Ddp) and wrapper.sharded and one_model and iteration.reads:
            yield SLICES
        return
    precise = _is_precise(program) and not program.clips_in_fp32
    for way in iteration.reads:
        if way == SLICES or (way in CANCELS and not precise) or not one_model:
            continue
        yield way


def _recomputes(model: Model) -> set[str]:
    return {model.recompute, *(block.recompute for block in model.blocks)}


def _pattern(program: Program, phase: Phase, micro: Micro, first: bool, last: bool) -> str:
    """``first``: no gradients are there; ``last``: of the iteration."""
    model, wrapper, pattern = program.model, phase.wrapper, micro.pattern
    if pattern == "method" and program.dtype in ROUNDED:  # whose inputs are cast outside
        return "plain"
    if pattern in UNDELAYED and (program.optimizer.scaled or program.dtype in ROUNDED or _delays(program, phase)):
        return "plain"
    if pattern == "attack" and not first:
        return "plain"
    if pattern in NO_GRADIENT_OF_LOSS and program.optimizer.name == "LBFGS":  # which searches along the loss
        return "plain"
    if pattern == "added" and (isinstance(wrapper, Fsdp) or (last and (wrapper.find_unused or wrapper.plain_loop))):
        return "plain"
    if pattern in HEAD_BEHIND and (
        isinstance(wrapper, Fsdp)  # a module runs within the forward of its unit
        or program.dtype == "autocast"  # which is around the wrapper's forward alone
        or any(block.penalty for block in model.blocks)
        or wrapper.find_unused  # which asks that forward returns all that the loss uses
    ):
        return "plain"
    if pattern in BOTH_REDUCED and ((last and _delays(program, phase)) or _steps_in_hooks(wrapper)):
        return "two backwards"  # what the first backward delays comes behind it; or the first would step
    recomputes = _recomputes(model)
    if pattern in INPUT_PATTERNS and (model.stem == "lookup" or program.dtype in ROUNDED):
        pattern = "plain"
    if pattern in (*ASKS_FOR_INPUTS, "attack", "added") and "reentrant" in recomputes:
        pattern = "plain"
    if pattern in ASKS_FOR_INPUTS and not last and isinstance(phase.wrapper, Ddp) and phase.wrapper.find_unused:
        pattern = "plain"  # what asks counts as a backward: unused parameters would be found before the last microbatch
    if pattern in ASKS_FOR_INPUTS and last and isinstance(phase.wrapper, Fsdp) and _delays(program, phase):
        pattern = "plain"  # and another one would come after the iteration's last
    kinds = {block.kind for block in model.blocks}
    if pattern == "penalty" and (kinds & set(ONCE_DIFFERENTIABLE) or _delays(program, phase)):
        pattern = "plain"
    return pattern


def _micro(program: Program, phase: Phase, micro: Micro, first: bool, last: bool) -> Micro:
    model, pattern = program.model, _pattern(program, phase, micro, first, last)
    keepers = _some(micro.keepers, phase.ranks)
    keep = micro.keep if keepers else "nothing"
    if keep == "output" and pattern != "named output":
        keep = "loss"
    only = None if last or isinstance(phase.wrapper, Fsdp) or micro.ranks is None else _some(micro.ranks, phase.ranks)
    only = None if not only or len(only) == phase.ranks else only
    only = None if writes_in_forward(model) else only  # ranks write alike, so all run the same layers
    raises = _some(micro.raises, phase.ranks)
    skips = micro.skips if micro.skips is not None and micro.skips < len(block_order(model)) else None
    return replace(
        micro,
        pattern=pattern,
        keep=keep,
        keepers=keepers if keep != "nothing" else (),
        ranks=only,
        skips=skips if num_members(model) > 1 else None,
        raises=raises,
    )


def _some(ranks: Ranks, size: int) -> Ranks:
    return tuple(rank for rank in ranks if rank < size)


def _extra(program: Program, phase: Phase, extra: Extra, count: int, alike: bool) -> Extra | None:
    """``alike``: all ranks have launched the same reductions when the last backward ends."""
    kind, fsdp = extra.kind, isinstance(phase.wrapper, Fsdp)
    if kind in (("deepcopy", "averaged model") if fsdp else ("kept gathered",)):
        return None
    if kind == "decay raised" and (len(program.phases) > 1 or program.optimizer.name not in FUSED):
        return None  # of a checkpoint options are those of the new optimizer
    if kind == "decay raised" and _steps_in_hooks(phase.wrapper):
        return None
    if kind == "put by hand" and program.model.frozen_stem and program.model.tie == "embedding":
        return None  # the head's weight is not trained
    if kind == "put by hand" and not fsdp and phase.wrapper.plain_loop:
        return None  # behind a backward it is the gradient, as in plain PyTorch
    if kind == "unwrapped" and program.dtype == "bfloat16":  # whose masters go with the wrapper
        return None
    if kind in ("snapshot", "rollback") and _steps_in_hooks(phase.wrapper):
        return None
    if kind in ("saved beside", "gone back to") and not _saves_all(program, phase):
        return None
    if kind in ("averaged model", "attributes") and program.dtype in ROUNDED:
        return None
    if kind == "gone through" and (program.model.stem == "lookup" or program.dtype in ROUNDED):
        return None
    if kind == "gone through" and "reentrant" in _recomputes(program.model):  # whose outputs may require no gradient
        return None
    if program.dtype == "bfloat16" and kind in ("load_state_dict", "snapshot", "rollback"):
        return None  # masters follow in a way of their own
    if kind in ("whole norms", "state taken", "state_dict", "load_state_dict") and writes_in_forward(program.model):
        return None  # plain PyTorch reads a later rank's norms and state after an earlier rank's forward has written
    if kind == "marks" and (phase.ranks == 1 or writes_in_forward(program.model)):  # no others to have parts
        return None
    if kind in NEEDS_ONE_MODEL and program.model.variants > 1:
        return None
    if kind in AFTER:
        at = count + 1
    elif kind == "mean loss":
        if not alike:  # a collective of the user's own would come before others there
            return None
        at = count
    else:
        at = min(extra.at, count + 1)
        if at == count and kind in FORWARDS and fsdp and _delays(program, phase):
            at += 1  # from the last backward to the reductions there is no other forward
        if at == count and kind == "state_dict" and fsdp and not _launches_alike(program, phase):
            at += 1  # it is a collective, and a rank that has delayed nothing has reduced already
        if at == count and kind in (*FORWARDS, "state_dict") and _steps_in_hooks(phase.wrapper):
            at += 1  # the last backward has updated the weights, and plain PyTorch updates them after this place
    ranks = _some(extra.ranks, phase.ranks) if kind in RANK_DEPENDENT else ()
    if kind in ("gc.collect", "forgetting") and not ranks:
        ranks = (0,)
    where = extra.where if kind in VARIED else 0
    frozen = any(block.frozen == "all" and block.kind != "nothing" for block in program.model.blocks)
    if kind == "changed and back" and where == 3 and not frozen:
        where = 0  # nothing is frozen for sure
    if kind in ("failed forward", "layer dropped"):
        where = min(extra.where, num_members(program.model) - 1)
    return replace(extra, at=at, ranks=ranks, where=where)


def _saves_all(program: Program, phase: Phase) -> bool:
    """Whether a checkpoint has the optimizer, and plain PyTorch's state dicts have all that it has."""
    stock = isinstance(phase.wrapper, Ddp) and phase.wrapper.stock
    return not stock and not _steps_in_hooks(phase.wrapper) and program.dtype != "bfloat16"


def _launches_alike(program: Program, phase: Phase) -> bool:
    """Whether ranks that run the same microbatches do."""
    uses_differ = any("branch" in block.kind for block in program.model.blocks)
    early = isinstance(phase.wrapper, Fsdp) or phase.wrapper.overlap
    return not (uses_differ and early and _delays(program, phase))  # else a backward's end has launched the rest


def _with_states(iterations: Sequence[Iteration]) -> list[Iteration]:
    """What is loaded was taken before: what comes too early is taken then."""
    pairs = {
        "load_state_dict": "state_dict",
        "rollback": "snapshot",
        "average taken": "average",
        "gone back to": "saved beside",
    }
    taken: set[str] = set()
    found = []
    for iteration in iterations:
        extras = []
        for extra in sorted(iteration.extras, key=lambda extra: extra.at):
            wanted = pairs.get(extra.kind, extra.kind)
            extras.append(extra if wanted == extra.kind or wanted in taken else replace(extra, kind=wanted))
            taken.add(extras[-1].kind)
        found.append(replace(iteration, extras=tuple(extras)))
    return found
