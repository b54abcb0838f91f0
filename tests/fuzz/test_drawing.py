"""What is drawn: from the seed alone, valid, and with every value of every table."""

from collections import Counter

import extras
import gradients
import layers
import microbatches
import pytest
import user_checkpoints
import valid
from drawing import OPTIMIZERS, draw, draw_any
from graphed_steps import AS_ONE_CALL
from mesh_programs import CONVERTED, CUTS, MESHES, Meshes, draw_meshes, valid_meshes
from mesh_programs import WRAPPERS as MESH_WRAPPERS
from pipeline_programs import OF_A_ROW, SCHEDULES, Pipeline, draw_pipeline, valid_pipeline
from programs import Program, dimensions, wrapper_kind
from recipe_programs import AMONG, BEFORE, KINDS, WRAPPERS, Recipes, draw_recipes, valid_recipes
from run_programs import PARALLELS, STEPS, Run, draw_run, valid_run
from sources import program_source

from maingrad.fsdp import PLACEMENTS

COUNT = 600


@pytest.fixture(scope="module")
def drawn() -> list[Program]:
    return [draw(seed) for seed in range(COUNT)]


@pytest.mark.in_turn
def test_a_seed_is_a_program(drawn: list[Program]) -> None:
    """In another process too: ``test_seeds.py`` compares."""
    assert len(set(drawn)) == COUNT
    assert drawn[7] == draw(7)


@pytest.mark.in_turn
def test_what_is_valid_stays_as_it_is(drawn: list[Program]) -> None:
    assert all(valid.valid(program) == program for program in drawn)


@pytest.mark.in_turn
def test_every_value_comes(drawn: list[Program]) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for program in drawn:
        counts.update(dimensions(program))
    tables = {
        "block.kind": layers.KINDS,
        "micro.pattern": microbatches.PATTERNS,
        "extra.kind": extras.DURING | extras.AFTER,
        "iteration.reads": gradients.WAYS,
        "iteration.change": ("no", "none", "values clipped", *gradients.CHANGES),
        "optimizer.name": {name for name, _ in OPTIMIZERS.values()},
        "fsdp.placements": set(PLACEMENTS) - {"ddp", "hybrid"},
        "fsdp.meta": ("no", "all", "first"),
        "phase.ranks": ("1", "2", "3", "4", "6"),
        "iteration.way": ("plain", "closure", "two halves", "projected"),
        "iteration.second": ("together", "through", "frozen"),
        "phase.warmups": ("1", "2"),
        "second.wrapper": ("ddp", "zero1", "fsdp"),
        "iteration.outcome": ("step", "skip", "accumulate", "given up", "fails"),
        "model.tie": ("no", "blocks", "embedding"),
        "damage.kind": user_checkpoints.DAMAGES,
        "phase.saves": ("waits", "beside"),
        "program.dtype": ("float64", "float32", "bfloat16", "autocast"),
    }
    missing = [(name, value) for name, values in tables.items() for value in values if not counts[name, value]]
    assert not missing
    booleans = {name for name, value in counts if value in ("True", "False")}
    assert not [name for name in booleans if not (counts[name, "True"] and counts[name, "False"])]


def test_graphed_steps_are_replayed(drawn: list[Program]) -> None:
    """Many of those with a fused optimizer have them, with every pattern that can be captured, under every wrapper."""
    phases = [(program, phase) for program in drawn for phase in program.phases if phase.graphed]
    assert len({program for program, _ in phases}) > COUNT // 20
    assert all(len(phase.graphed) >= 5 for _, phase in phases)
    assert {micro.pattern for _, phase in phases for micro in phase.graphed[0].micros} == set(AS_ONE_CALL)
    kinds = {"ddp", "zero1", "zero1, gather overlapped", "hybrid", "hybrid, gather overlapped"}
    kinds |= {f"fully_shard {placements}" for placements in ("zero1", "zero2", "zero3", "hsdp")}
    assert kinds <= {wrapper_kind(phase.wrapper) for _, phase in phases}
    beside = [each for _, phase in phases for each in phase.iterations if not each.graphed]
    assert {each.outcome for each in beside} == {"step", "skip", "given up", "fails"}
    assert {program.optimizer.scaled for program, _ in phases} == {True, False}


@pytest.mark.in_turn
def test_pipelines_are_drawn_and_valid() -> None:
    """One in eight seeds is one."""
    assert [isinstance(draw_any(seed), Pipeline) for seed in range(16)] == [seed % 8 == 7 for seed in range(16)]
    found = [draw_pipeline(seed) for seed in range(COUNT)]
    assert len(set(found)) == COUNT
    assert all(valid_pipeline(program) == program for program in found)
    counts: Counter[tuple[str, str]] = Counter()
    for program in found:
        counts.update(dimensions(program))
    missing = [kind for kind in OF_A_ROW if not counts["block.kind", kind]]
    assert not missing
    ways = {(program.layout, step.schedule, program.wrapper) for program in found for step in program.steps}
    assert len(ways) == 4 * sum(map(len, SCHEDULES.values()))
    outcomes = {(step.outcome, program.wrapper) for program in found for step in program.steps}
    assert len(outcomes) == 11  # nothing is abandoned without a wrapper
    assert {program.tied for program in found if program.whole} == {True, False}


def test_runs_are_drawn_and_valid() -> None:
    """One in 24 seeds is one. Legs follow each other, or go on from an earlier checkpoint, up to the last step."""
    assert [isinstance(draw_any(seed), Run) for seed in range(48)] == [seed % 24 == 22 for seed in range(48)]
    found = [draw_run(seed) for seed in range(COUNT)]
    assert all(valid_run(run) == run for run in found)
    for run in found:
        assert run.ranges[0][0] == 0 and run.ranges[-1][1] == STEPS
        assert all(start < end and not start % run.log_every for start, end in run.ranges)
        ends = [end for _, end in run.ranges]
        assert all(start in ends[:index] for index, (start, _) in enumerate(run.ranges) if index)
    legs = [leg for run in found for leg in run.legs]
    assert {leg.parallel for leg in legs} == set(PARALLELS)
    assert {leg.ranks for leg in legs} == {1, 2, 3}
    assert {(leg.tp, leg.cp) for leg in legs} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert {(run.source, run.documents) for run in found} == {
        (source, documents) for source in ("text", "tokens", "megatron") for documents in ("join", "mask", "pad")
    }
    assert sum(leg.older for leg in legs) > COUNT // 30


def test_programs_under_recipes_are_drawn_and_valid() -> None:
    """One in 24 seeds is one; all that may come between is drawn."""
    assert [isinstance(draw_any(seed), Recipes) for seed in range(48)] == [seed % 24 == 18 for seed in range(48)]
    found = [draw_recipes(seed) for seed in range(COUNT)]
    assert all(valid_recipes(program) == program for program in found)
    iterations = [each for program in found for each in program.iterations]
    assert {each.before for each in iterations} == set(BEFORE)
    assert {each.among for each in iterations} == set(AMONG)
    assert {(program.wrapper, program.kind) for program in found} == {(w, k) for w in WRAPPERS for k in KINDS}


def test_programs_on_meshes_are_drawn_and_valid() -> None:
    """One in 24 seeds is one; each cut comes with each wrapper on each mesh."""
    assert [isinstance(draw_any(seed), Meshes) for seed in range(48)] == [seed % 24 == 12 for seed in range(48)]
    found = [draw_meshes(seed) for seed in range(COUNT)]
    assert all(valid_meshes(program) == program for program in found)
    assert {(each.wrapper, each.cut, each.mesh) for each in found} == {
        (wrapper, cut, mesh) for wrapper in MESH_WRAPPERS for cut in CUTS for mesh in MESHES
    }
    assert {(each.converted, each.sequence) for each in found} == {(c, s) for c in CONVERTED for s in (False, True)}
    assert {(each.hidden, each.clip, each.adam) for each in found} == {
        (hidden, clip, adam) for hidden in (7, 8) for clip in (None, 0.3) for adam in (False, True)
    }


@pytest.mark.slow
def test_programs_are_written_as_python(drawn: list[Program]) -> None:
    for program in [
        *drawn,
        *map(draw_pipeline, range(COUNT)),
        *map(draw_run, range(COUNT)),
        *map(draw_recipes, range(COUNT)),
        *map(draw_meshes, range(COUNT)),
    ]:
        compile(program_source(program), "<program>", "exec")
