"""A whole program in Python: what each rank runs, and what plain PyTorch does instead."""

from collections.abc import Iterator
from contextlib import nullcontext

from extras import DURING, saves_beside, takes_states, write_extra, write_free_disk
from gradients import write_gradients
from graphed_steps import write_call, write_graphed_step, write_remade
from layers import expert_paths, lines_of_model
from mesh_programs import Meshes, meshes_source
from microbatches import write_failing, write_micro
from pen import Pen
from pipeline_programs import Pipeline
from pipeline_sources import pipeline_source
from programs import Iteration, Program
from projections import write_projected
from recipe_programs import Recipes, recipes_source
from run_programs import Run, run_source
from second_model import write_alone, write_end, write_second
from wrappers import (
    write_beside_optimizer,
    write_closure_step,
    write_end_of_closure,
    write_finish,
    write_first_half,
    write_plain_optimizer,
    write_step,
    write_unseen_iteration,
    write_wrapping,
    write_zero,
)


def program_source(program: Program | Pipeline | Run | Recipes | Meshes) -> str:
    """The functions ``make_model``, ``make_plain``, ``train_0`` and so on, and ``plain``."""
    if isinstance(program, Pipeline):
        return pipeline_source(program)
    if isinstance(program, Run):
        return run_source(program)
    if isinstance(program, Recipes):
        return recipes_source(program)
    if isinstance(program, Meshes):
        return meshes_source(program)
    return "\n".join([*_makers(program), *_trainers(program), *_plain(program)])


def tolerance_of(program: Program | Pipeline | Run | Recipes | Meshes) -> float:
    """How far a tensor may be from what plain PyTorch computes, relative to its norm.

    fp64 has 16 digits, sums of other orders cost a few of them, and Adam's kind of step amplifies what is left of a
    gradient that is zero by 1 / eps, a thousand. fp32 has 7; batch norm over three rows that are nearly equal divides
    their roundings by what is left of their differences, step after step. ``max_grad_norm`` rounds its coefficient to
    fp32, since torch's fused kernels take no other. In bf16 the library's products and plain ones are rounded at other
    places, by 1 / 256 each; with a few steps behind them weights are another number's roundings here and there. The
    first step of RMSprop moves each weight by ten times the learning rate, whatever its gradient's size, in a direction
    that roundings decide where gradients are small: behind it gradients of four blocks of experts were 30 % apart, and
    equal in fp64. Plain PyTorch's roundings may be the larger ones: behind two steps one of its losses was 12 % from
    fp32's, and ours 1 %. So what differs is compared with plain PyTorch in fp32 too.
    Gradients of the first iteration, where the library's products have no part in them, differ by sums in fp32 alone:
    1e-4.
    Logged losses of a run are those of fp32 steps; another batch changes them by a hundredth.
    """
    if isinstance(program, Run):
        return 3e-4
    if isinstance(program, Recipes):  # the same kernels
        return 0.0
    if isinstance(program, Meshes):
        return 1e-4
    if isinstance(program, Pipeline):
        return 1e-6 if program.clip is not None else 1e-9
    if program.dtype in ("bfloat16", "autocast"):
        return 0.5 if program.optimizer.name == "RMSprop" else 0.1
    if program.dtype == "float32" or any(block.single for block in program.model.blocks):
        return 1e-2 if any(block.kind == "batch norm" for block in program.model.blocks) else 1e-4
    return 1e-6 if program.clips_in_fp32 else 1e-9


# ---- Models. ----


def _makers(program: Program) -> Iterator[str]:
    experts = expert_paths(program.model)
    variant = ", variant=0" if experts else ""
    fails = any(
        iteration.outcome == "fails" or any(extra.kind == "failed forward" for extra in iteration.extras)
        for phase in program.phases
        for iteration in phase.iterations
    )
    for name, plain in (("make_model", False), ("make_plain", True)):
        yield f"def {name}(seed=0{variant}):"
        yield from ("    " + line for line in lines_of_model(program.model, plain, fails))
        more = f", variant, {tuple(experts)}" if experts else ""
        yield f"    initialise(model, seed{more})"
        yield "    return model"
        yield "\n"


# ---- What each rank runs. ----


def _trainers(program: Program) -> Iterator[str]:
    number = 0
    for index, phase in enumerate(program.phases):
        pen = Pen(program, phase, index, plain=False)
        yield f"def train_{index}(records, folder):"
        pen("rank, size = dist.get_rank(), dist.get_world_size()")
        pen("seen, kept, log, average, averaged = records[rank], [], [], None, None")
        if saves_beside(phase):
            pen("disk = None")
        if takes_states(phase):
            pen("taken = {}")
        _write_model(pen)
        write_wrapping(pen)
        write_beside_optimizer(pen)
        write_second(pen)
        if index:
            _write_load(pen)
        following = program.phases[index + 1].damages if index < len(program.phases) - 1 else ()
        if any(damage.kind == "another step" for damage in following):
            _write_save(pen, "before ")
        if phase.queue:
            pen("queue = WgradQueue()")
        if phase.graphed:
            write_graphed_step(pen)
        for iteration in phase.iterations:
            pen(f"# Iteration {number}")
            _write_iteration(pen, iteration, number)
            number += 1
        _write_end(pen)
        write_free_disk(pen, waits=True)
        if index < len(program.phases) - 1:
            _write_save(pen)
        yield from pen.lines
        yield "\n"


def _write_model(pen: Pen) -> None:
    wrapper = pen.phase.wrapper
    arguments = ["seed=rank"] if wrapper.init_sync else []
    if pen.program.model.variants > 1:
        # An expert's first rank has its own number as the rank.
        arguments = [f"seed=rank // {pen.program.model.variants}"] if wrapper.init_sync else []
        arguments.append(f"variant=rank % {pen.program.model.variants}")
    made = f"make_model({', '.join(arguments)})"
    # A model that fully_shard computes with in bf16 stays fp32 at rest.
    pen(f"model = {made}{'.bfloat16()' if pen.half and pen.ddp else ''}")


def _write_save(pen: Pen, when: str = "") -> None:
    following = pen.program.phases[pen.number + 1]
    arguments = [f'f"{{folder}}/{when}{pen.number}"', "model"]
    if following.loads == "all":
        arguments.append("optimizer")
        if pen.program.optimizer.schedule != "no":
            arguments.append('extra={"schedule": schedule.state_dict()}')
    if when or pen.phase.saves == "waits":
        pen(f"save_checkpoint({', '.join(arguments)})")
        return
    pen("disk = busy_disk()")
    if arguments[-1].startswith("extra="):
        pen(f"notes = {arguments.pop().removeprefix('extra=')}")
        arguments.append("extra=notes")
    pen(f"saving = save_checkpoint({', '.join(arguments)}, background=True)")
    if arguments[-1] == "extra=notes":
        pen("notes.clear()")
    for index in range(2):
        write_unseen_iteration(pen, f"batch(rank, 0, {90 + index})")
    pen("dist.barrier()", "disk.set()", "saving.wait()")


def _write_load(pen: Pen) -> None:
    arguments = [f'f"{{folder}}/{pen.number - 1}"', "model"]
    if pen.phase.loads == "all":
        arguments.append("optimizer")
    scheduled = pen.phase.loads == "all" and pen.program.optimizer.schedule != "no"
    for damage in pen.phase.damages:
        other = f', other=f"{{folder}}/before {pen.number - 1}"' if damage.kind == "another step" else ""
        pen(f'loaded, extra = load_damaged("{damage.kind}", {damage.seed}, {", ".join(arguments)}{other})')
    with pen.inside("if not loaded:" if pen.phase.damages else None):
        pen(f"{'extra = ' if scheduled else ''}load_checkpoint({', '.join(arguments)})")
    if scheduled:
        pen('schedule.load_state_dict(extra["schedule"])')


def _write_end(pen: Pen) -> None:
    if any(extra.kind == "average" for iteration in pen.phase.iterations for extra in iteration.extras):
        pen.see_on_all("average", f"pieces_like({pen.owner}, average)")
    if takes_states(pen.phase) and not pen.plain:
        pen("seen.update({what: state_values(state) for what, state in taken.items()})")
    _write_values(pen, "weights", "values_of")
    if pen.phase.second is not None:
        pen.see_on_all("weights of the second", "values_of(critic)")


def _write_values(pen: Pen, name: str, reads: str) -> None:
    """Notes weights or gradients: in plain PyTorch those of each rank's model."""
    if not pen.plain:
        pen.see(name, f"{reads}(model)")
        return
    owner = "model" if pen.owner == "everything" else pen.owner
    with pen.for_each_rank():
        pen.see(name, f"{reads}({owner})")


# ---- One iteration, for a rank or in plain PyTorch. ----


def _write_iteration(pen: Pen, iteration: Iteration, number: int) -> None:
    if iteration.alternates:
        write_alone(pen, number)
    if iteration.graphed and not pen.plain:
        write_call(pen, iteration, number)
        if "weights" in iteration.see:
            _write_values(pen, f"weights {number}", "values_of")
        _write_extras(pen, iteration, number, len(iteration.micros) + 1)
        return
    if pen.sums:
        pen("tokens = 0")
    if iteration.way == "two halves":
        write_first_half(pen, number)
    with pen.inside("def closure():" if iteration.way == "closure" else None):
        if iteration.way == "closure":
            write_zero(pen)
        if pen.searches:
            pen("total = torch.zeros(())")
        _write_backwards(pen, iteration, number)
        pen.write_means()
        if pen.delays and iteration.drain == "end":
            pen.drain()
        if iteration.way == "closure":
            write_end_of_closure(pen, iteration)
    write_end(pen, iteration)
    _write_outcome(pen, iteration, number)
    _write_extras(pen, iteration, number, len(iteration.micros) + 1)


def _write_backwards(pen: Pen, iteration: Iteration, number: int) -> None:
    """All of them, and what comes between."""
    count = len(iteration.micros)
    if iteration.way == "projected":
        with pen.for_each_rank():
            _write_extras(pen, iteration, number, 0)
        write_projected(pen, number)
        with pen.for_each_rank():
            _write_extras(pen, iteration, number, count)
        return
    with pen.for_each_rank():
        for index in range(count):
            _write_extras(pen, iteration, number, index)
            write_micro(pen, iteration, number, index)
        _write_extras(pen, iteration, number, count)


def _write_extras(pen: Pen, iteration: Iteration, number: int, at: int) -> None:
    between_steps = at > len(iteration.micros)
    for index, extra in enumerate(iteration.extras):
        if extra.at == at:
            with pen.for_each_rank() if between_steps and extra.kind in DURING else nullcontext():
                write_extra(pen, extra, f"{number}.{index}", number)
            if pen.phase.graphed and not pen.plain:
                write_remade(pen, extra)


def _write_outcome(pen: Pen, iteration: Iteration, number: int) -> None:
    """From the last backward to the next iteration."""
    outcome, counts = iteration.outcome, iteration.outcome in ("step", "accumulate")
    if iteration.way == "closure":
        write_closure_step(pen)
        write_zero(pen)
        return
    if outcome == "fails" and not pen.plain:
        write_failing(pen, number, iteration.micros[-1].keepers)
    if outcome != "given up":
        write_finish(pen, iteration)
    if counts:
        if pen.plain:
            pen(f"zeros_where_none({pen.owner})")
            if pen.sums:
                with pen.inside(f"for param in {pen.owner}.parameters():"), pen.inside("if param.requires_grad:"):
                    pen("param.grad /= tokens")
        if "grads" in iteration.see:
            first = number == 0 and _rounds_alike(pen.program)
            _write_values(pen, f"{'first ' if first else ''}gradients {number}", "grads_of")
    if iteration.scaled:
        pen("model.scale_gradients(0.5)" if pen.ddp else f"scale_grads({pen.owner}, 0.5)")
    if outcome == "step":
        write_step(pen, iteration, str(number))
        if pen.plain and pen.half:
            pen("masters.give()")
    else:
        write_gradients(pen, iteration, str(number))
    if outcome != "accumulate":
        write_zero(pen, complete=outcome not in ("given up", "fails"))
    if "weights" in iteration.see:
        _write_values(pen, f"weights {number}", "values_of")


def _rounds_alike(program: Program) -> bool:
    """A bf16 model whose gradients are rounded at the same places in plain PyTorch, until the first step.

    There they are divided by the number of ranks before they are rounded, which changes nothing by powers of two.
    """
    model = program.model
    if program.phases[0].ranks not in (1, 2, 4):
        return False
    ours = any(block.library or block.recompute != "no" for block in model.blocks)
    return program.dtype == "bfloat16" and not (ours or model.converted or model.recompute != "no")


# ---- Plain PyTorch. ----


def _plain(program: Program) -> Iterator[str]:
    yield "def plain(everyones):"
    number = 0
    for index, phase in enumerate(program.phases):
        pen = Pen(program, phase, index, plain=True)
        pen(
            f"# Phase {index}",
            f"records, size, average, averaged = everyones[{index}], {phase.ranks}, None, None",
            "kept, log = [], []",
        )
        if index == 0:
            _write_plain_model(pen)
        else:
            _write_attributes(pen, program)
        if index == 0 or phase.loads == "weights":
            write_plain_optimizer(pen)
        write_second(pen)
        for iteration in phase.iterations:
            pen(f"# Iteration {number}")
            _write_iteration(pen, iteration, number)
            number += 1
        _write_end(pen)
        yield from pen.lines
    yield "\n"


def _write_attributes(pen: Pen, program: Program) -> None:
    """Those that a new model has: in the wrapped run that of this phase is another one."""
    iterations = [iteration for phase in program.phases for iteration in phase.iterations]
    kinds = {extra.kind for iteration in iterations for extra in iteration.extras}
    if "layer dropped" in kinds:
        pen.set_order(None, between_steps=True)
    if "attribute set" in kinds:
        pen(f"for each in {'models' if program.model.variants > 1 else '[model]'}:", "    each.temperature = 1.0")


def _write_plain_model(pen: Pen) -> None:
    model = pen.program.model
    if model.variants > 1:
        pen(f"models = [make_plain(variant=variant) for variant in range({model.variants})]")
        pen(f"share(models, {tuple(expert_paths(model))})", "everything = AllOf(*models)")
        return
    pen(f"model = make_plain(){'.bfloat16()' if pen.half else ''}")
    if pen.half:
        pen("masters = Masters(model)")
