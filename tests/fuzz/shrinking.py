"""Makes a program simpler, as long as the same kind of thing is found.

Every way to make one simpler is a function that yields programs; ``valid`` puts right what does not go with it. The
first that still shows the finding is taken, and all ways are tried again, until none does.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from mesh_programs import Meshes, simpler_meshes, valid_meshes
from pipeline_programs import Pipeline, simpler_pipelines, valid_pipeline
from programs import Block, Ddp, Extra, Fsdp, Iteration, Micro, Model, Optimizer, Phase, Program, Second, UnitOf
from recipe_programs import Recipes, simpler_recipes, valid_recipes
from run_programs import Run, simpler_runs, valid_run
from valid import valid

T = TypeVar("T", Program, Pipeline, Run, Recipes, Meshes)
Way = Callable[[Program], Iterator[Program]]


def shrink(program: T, same: Callable[[T], bool], *, seconds: float = 60.0) -> T:
    """The simplest program that was found within the time for which ``same`` still holds."""
    ends = time.monotonic() + seconds
    tried: set[Any] = {program}
    again = True
    while again:
        again = False
        for candidate in simpler(program):
            candidate = _valid(candidate)
            if candidate in tried or size_of(candidate) >= size_of(program):
                continue
            if time.monotonic() > ends:
                break
            tried.add(candidate)
            if same(candidate):
                program, again = candidate, True
                break
    return program


def _valid(program: T) -> T:
    if isinstance(program, Pipeline):
        return valid_pipeline(program)
    if isinstance(program, Recipes):
        return valid_recipes(program)
    if isinstance(program, Meshes):
        return valid_meshes(program)
    return valid_run(program) if isinstance(program, Run) else valid(program)


def size_of(program: Any) -> float:
    """What has to be read: every value that is not its default, every part that there is, and ranks."""
    width = program.model.width if isinstance(program, Program) else 0
    return _size(program) + 0.1 * sum(phase.ranks for phase in program.phases) + 0.01 * width


def _size(value: Any) -> float:
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return 1.0 + sum(_size_of_field(getattr(value, field.name), field.default) for field in fields)
    return 1.0


def _size_of_field(value: Any, default: Any) -> float:
    if isinstance(value, tuple) and any(dataclasses.is_dataclass(each) for each in value):
        return sum(_size(each) for each in value)
    if dataclasses.is_dataclass(value):
        return _size(value) + (0.0 if type(value) is type(default) else 1.0)
    if isinstance(value, tuple) and all(isinstance(each, str) for each in value):
        return float(len(value))
    return 0.0 if value == default else 1.0


def simpler(program: Any) -> Iterator[Any]:
    """Large steps first."""
    if isinstance(program, Pipeline):
        yield from simpler_pipelines(program)
        return
    if isinstance(program, Run):
        yield from simpler_runs(program)
        return
    if isinstance(program, Meshes):
        yield from simpler_meshes(program)
        return
    if isinstance(program, Recipes):
        yield from simpler_recipes(program)
        return
    for way in (
        _fewer_phases,
        _fewer_iterations,
        _much_simpler,
        _fewer_micros,
        _fewer_extras,
        _fewer_blocks,
        _fewer_ranks,
        _defaults,
    ):
        yield from way(program)


def _much_simpler(program: Program) -> Iterator[Program]:
    """Whole parts are what they are where nobody says anything."""
    plain = tuple(Block(block.kind, library=block.library) for block in program.model.blocks)
    yield replace(program, model=replace(Model(), blocks=plain, variants=program.model.variants), dtype="float64")
    yield replace(program, optimizer=Optimizer("SGD", (("lr", 0.01),)))
    for index, phase in enumerate(program.phases):
        for wrapper in _simpler_wrappers(phase.wrapper):
            yield _with_phase(program, index, replace(phase, wrapper=wrapper))
        yield _with_phase(program, index, replace(phase, clip=None, queue=False, garbage="off"))
    for phase, index, iteration in _iterations(program):
        micros = tuple(Micro(pattern=micro.pattern) for micro in iteration.micros)
        yield _with_iteration(program, phase, index, replace(Iteration(), micros=micros))
        yield _with_iteration(program, phase, index, replace(iteration, extras=()))


def _simpler_wrappers(wrapper: Ddp | Fsdp) -> Iterator[Ddp | Fsdp]:
    if isinstance(wrapper, Ddp):
        yield Ddp()
        yield Ddp(sharded=True)
    else:
        yield replace(Fsdp(), units=tuple(UnitOf(unit.path) for unit in wrapper.units))


def _without(parts: tuple[Any, ...], *, least: int = 1) -> Iterator[tuple[Any, ...]]:
    """Without one of them; first without half of them."""
    if len(parts) <= least:
        return
    half = len(parts) // 2
    if half >= max(least, 2):
        yield parts[:half]
        yield parts[half:]
    for index in range(len(parts)):
        yield parts[:index] + parts[index + 1 :]


def _with_phase(program: Program, index: int, phase: Phase) -> Program:
    return replace(program, phases=(*program.phases[:index], phase, *program.phases[index + 1 :]))


def _with_iteration(program: Program, phase: int, index: int, iteration: Iteration) -> Program:
    before = program.phases[phase]
    iterations = (*before.iterations[:index], iteration, *before.iterations[index + 1 :])
    return _with_phase(program, phase, replace(before, iterations=iterations))


def _iterations(program: Program) -> Iterator[tuple[int, int, Iteration]]:
    for number, phase in enumerate(program.phases):
        for index, iteration in enumerate(phase.iterations):
            yield number, index, iteration


def _fewer_phases(program: Program) -> Iterator[Program]:
    for phases in _without(program.phases):
        yield replace(program, phases=phases)


def _fewer_iterations(program: Program) -> Iterator[Program]:
    for index, phase in enumerate(program.phases):
        for iterations in _without(phase.iterations, least=1 if len(program.phases) == 1 else 0):
            yield _with_phase(program, index, replace(phase, iterations=iterations))


def _fewer_micros(program: Program) -> Iterator[Program]:
    for phase, index, iteration in _iterations(program):
        for micros in _without(iteration.micros):
            yield _with_iteration(program, phase, index, replace(iteration, micros=micros))


def _fewer_extras(program: Program) -> Iterator[Program]:
    for phase, index, iteration in _iterations(program):
        for extras in _without(iteration.extras, least=0):
            yield _with_iteration(program, phase, index, replace(iteration, extras=extras))


def _fewer_ranks(program: Program) -> Iterator[Program]:
    for index, phase in enumerate(program.phases):
        for ranks in range(1, phase.ranks):
            yield _with_phase(program, index, replace(phase, ranks=ranks))


def _fewer_blocks(program: Program) -> Iterator[Program]:
    model = program.model
    for blocks in _without(model.blocks):
        yield replace(program, model=replace(model, blocks=blocks))
    yield replace(program, model=replace(model, width=3))


def _defaults(program: Program) -> Iterator[Program]:
    """One value of one part at a time is what it is where nobody says anything."""
    for part in _back_to_defaults(program.model, Model()):
        yield replace(program, model=part)
    for index, block in enumerate(program.model.blocks):
        for part in _back_to_defaults(block, Block()):
            blocks = (*program.model.blocks[:index], part, *program.model.blocks[index + 1 :])
            yield replace(program, model=replace(program.model, blocks=blocks))
    yield replace(program, optimizer=Optimizer("SGD", (("lr", 0.01),)))
    yield from (replace(program, optimizer=part) for part in _back_to_defaults(program.optimizer, Optimizer(), "name"))
    for drop in range(len(program.optimizer.options)):
        options = tuple(
            each for index, each in enumerate(program.optimizer.options) if index != drop or each[0] == "lr"
        )
        yield replace(program, optimizer=replace(program.optimizer, options=options))
    for index, phase in enumerate(program.phases):
        for part in _simpler_phases(phase):
            yield _with_phase(program, index, part)
    for phase, index, iteration in _iterations(program):
        for part in _simpler_iterations(iteration):
            yield _with_iteration(program, phase, index, part)
    yield replace(program, dtype="float64")
    yield replace(program, order=0)


def _simpler_phases(phase: Phase) -> Iterator[Phase]:
    yield from _back_to_defaults(phase, Phase(), "ranks", "wrapper", "iterations")
    if phase.second is not None:
        yield from (replace(phase, second=part) for part in _back_to_defaults(phase.second, Second()))
    yield from (replace(phase, damages=damages) for damages in _without(phase.damages))
    wrapper = phase.wrapper
    yield from (replace(phase, wrapper=part) for part in _back_to_defaults(wrapper, type(wrapper)(), "units"))
    if isinstance(wrapper, Ddp):
        return
    for units in _without(wrapper.units):
        yield replace(phase, wrapper=replace(wrapper, units=units))
    for index, unit in enumerate(wrapper.units):
        for part in _back_to_defaults(unit, UnitOf(unit.path), "path"):
            units = (*wrapper.units[:index], part, *wrapper.units[index + 1 :])
            yield replace(phase, wrapper=replace(wrapper, units=units))


def _simpler_iterations(iteration: Iteration) -> Iterator[Iteration]:
    yield from _back_to_defaults(iteration, Iteration(), "micros", "extras")
    yield from (replace(iteration, reads=reads) for reads in _without(iteration.reads))
    for index, micro in enumerate(iteration.micros):
        for part in _back_to_defaults(micro, Micro()):
            yield replace(iteration, micros=(*iteration.micros[:index], part, *iteration.micros[index + 1 :]))
    for index, extra in enumerate(iteration.extras):
        for part in _back_to_defaults(extra, Extra(extra.kind), "kind"):
            yield replace(iteration, extras=(*iteration.extras[:index], part, *iteration.extras[index + 1 :]))
        if len(extra.ranks) > 1:
            one = replace(extra, ranks=extra.ranks[:1])
            yield replace(iteration, extras=(*iteration.extras[:index], one, *iteration.extras[index + 1 :]))


def _back_to_defaults(part: Any, default: Any, *but: str) -> Iterator[Any]:
    for field in dataclasses.fields(part):
        wanted = getattr(default, field.name)
        parts = wanted if isinstance(wanted, tuple) else (wanted,)
        if field.name in but or any(dataclasses.is_dataclass(each) for each in parts):
            continue
        if getattr(part, field.name) != wanted:
            yield replace(part, **{field.name: wanted})
