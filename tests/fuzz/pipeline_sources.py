"""A pipeline in Python: what each rank runs, and the same training of the whole model in plain PyTorch."""

from collections.abc import Iterator, Sequence

from layers import IN_FEATURES, layer
from pipeline_programs import ONE_STAGE, SCHEDULES, Pipeline, Step, microbatches_of
from programs import Block

ROWS = 2
"""Of a microbatch."""


def pipeline_source(program: Pipeline) -> str:
    """The functions ``make_stage``, ``make_plain``, ``train_0`` and ``plain``."""
    lines = [*_makers(program), "", "", "def train_0(records, folder):"]
    lines += [f"    {line}" for line in _training(program)]
    lines += ["", "", "def plain(everyones):"]
    lines += [f"    {line}" for line in _plain(program)]
    return "\n".join([*lines, "", ""])


def _makers(program: Pipeline) -> Iterator[str]:
    yield "def make_stage(index):"
    yield "    stages = ["
    yield from (f"        lambda: {_stage(block, plain=False)}," for block in program.blocks)
    yield "    ]"
    yield "    return initialise(stages[index](), seed=index)"
    yield ""
    yield ""
    yield "def make_plain():"
    yield "    stages = ["
    yield from (f"        {_stage(block, plain=True)}," for block in program.blocks)
    yield "    ]"
    yield "    model = nn.Sequential(*[initialise(stage, seed=index) for index, stage in enumerate(stages)])"
    if program.tied:
        yield "    model[-1].layer.weight = model[0].layer.weight"
    yield "    return model"


def _stage(block: Block, plain: bool) -> str:
    recompute = f', recompute="{block.recompute}"' if block.recompute != "no" else ""
    return f"{'Full' if recompute else ''}Residual({layer(block, IN_FEATURES, plain)}{recompute})"


def _stages_of(program: Pipeline, rank: str) -> str:
    last = program.num_stages - 1
    return {
        "one": f"[{rank}]",
        "loop": f"[{rank}, {rank} + {program.pipe_ranks}]",
        "v": f"[{rank}, {last} - {rank}]",
    }[program.layout]


# ---- What each rank runs. ----


def _training(program: Pipeline) -> Iterator[str]:
    ranks, stages = program.pipe_ranks, program.num_stages
    yield "seen = records[dist.get_rank()]"
    yield f'mesh = init_device_mesh("cpu", ({program.replicas}, {ranks}), mesh_dim_names=("dp", "pp"))'
    yield 'replica, rank = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")'
    yield f"parts = {{index: make_stage(index) for index in {_stages_of(program, 'rank')}}}"
    if program.tied:
        holds_both = f"if {stages - 1} in parts and 0 in parts:"
        yield from (holds_both, f"    parts[{stages - 1}].layer.weight = parts[0].layer.weight")
    yield from _wrapping(program)
    if program.mistaken:
        yield from _mistake(program)
    yield "stages = ["
    options = ', group=mesh.get_group("pp")' + (", average_microbatches=False" if program.sums else "")
    yield f'    PipelineStage(part, index, {stages}, torch.device("cpu"){options}) for index, part in parts.items()'
    yield "]"
    yield "loss_fn = Loss()"
    yield "schedules = {"
    for number, name, count in dict.fromkeys(_schedule_of(program, step) for step in program.steps):
        given = "stages[0]" if name in ONE_STAGE else "stages"
        yield f"    ({number}, {count}): {name}({given}, {count}, loss_fn=loss_fn, scale_grads=False),"
    yield "}"
    for number, step in enumerate(program.steps):
        yield f"# Step {number}"
        yield from _step(program, step, number)
    yield 'seen["weights"] = values_of_stages(parts)'


def _mistake(program: Pipeline) -> Iterator[str]:
    """Before 2.13 torch cannot split what autograd functions in Python have made."""
    yield "stages = ["
    options = f'{program.num_stages}, torch.device("cpu"), group=mesh.get_group("pp")'
    yield f"    pipelining.PipelineStage(part, index, {options}) for index, part in parts.items()"
    yield "]"
    yield "schedule = ScheduleInterleavedZeroBubble(stages, 2, loss_fn=Loss(), scale_grads=False)"
    yield 'with refused("this backward was split", "_input_metadata"):'
    inputs, targets = (f"batch(replica, 0, {index}, rows={2 * ROWS})" for index in (8, 9))
    yield f"    schedule.step({inputs}, target={targets}, losses=[])"
    yield from ("for model in models:", "    model.abandon_iteration()", "    model.zero_grad()")


def _schedule_of(program: Pipeline, step: Step) -> tuple[int, str, int]:
    return step.schedule, SCHEDULES[program.layout][step.schedule], microbatches_of(program, step)


def _wrapping(program: Pipeline) -> Iterator[str]:
    name, options = ("AdamW", "lr=0.01, eps=0.001") if program.adam else ("SGD", "lr=0.01, momentum=0.9")
    stock = f"torch.optim.{name}(model.parameters(), {options})"
    if program.wrapper == "none":
        yield "models = [nn.ModuleList(parts.values())]"
    elif program.wrapper == "fsdp":
        yield "for part in parts.values():"
        given = f", bucket_size={program.bucket_size}" if program.bucket_size else ""
        yield f'    fully_shard(part, mesh.get_group("dp"){given})'
        yield "models = list(parts.values())"
    else:
        yield f"config = DistributedDataParallelConfig({', '.join(_config(program))})"
        wrapped = 'DistributedDataParallel({}, config, process_group=mesh.get_group("dp"))'
        if program.whole:
            yield f"models = [{wrapped.format('nn.ModuleList(parts.values())')}]"
        else:
            yield f"parts = {{index: {wrapped.format('part')} for index, part in parts.items()}}"
            yield "models = list(parts.values())"
        if program.wrapper == "zero1":
            stock = f"DistributedOptimizer(model, optimizer_class=torch.optim.{name}, {options})"
    yield f"optimizers = [{stock} for model in models]"


def _config(program: Pipeline) -> Sequence[str]:
    given = {
        "use_distributed_optimizer": program.wrapper == "zero1",
        "overlap_grad_reduce": program.overlap,
        "overlap_param_gather": program.gather_overlap,
        "bucket_size": program.bucket_size,
        "find_unused_parameters": program.find_unused,
    }
    return [f"{name}={value}" for name, value in given.items() if value]


def _step(program: Pipeline, step: Step, number: int) -> Iterator[str]:
    index, _, count = _schedule_of(program, step)
    last = program.num_stages - 1
    schedule = f"schedules[{index}, {count}]"
    if step.evaluates:
        yield from _given(program, number, count, 2)
        yield f"{schedule}.eval(*inputs, **options)"
        yield f"if {last} in parts:"
        yield f"    seen[\"evaluation {number}\"] = torch.stack(options['losses']).detach()"
    yield from _given(program, number, count, 0)
    if step.outcome == "fails":
        yield f"loss_fn.fails_in = {(count + 1) // 2}"
        yield "try:"
        yield f"    {schedule}.step(*inputs, **options)"
        yield "except BadBatch:"
        yield "    loss_fn.fails_in = None"
    else:
        yield f"{schedule}.step(*inputs, **options)"
        yield f"if {last} in parts:"
        yield f"    seen[\"losses {number}\"] = torch.stack(options['losses']).detach()"
    if step.outcome == "step":
        yield from _optimizing(program, number)
    else:
        yield "for stage in stages:"
        yield "    stage.abandon_step()"


def _given(program: Pipeline, number: int, count: int, index: int) -> Iterator[str]:
    """What a step is called with: the first stage has inputs, the last one targets."""
    inputs, targets = (f"batch(replica, {number}, {which}, rows={count * ROWS})" for which in (index, index + 1))
    yield f"inputs = [{inputs}] if 0 in parts else []"
    yield "options = {}"
    yield f"if {program.num_stages - 1} in parts:"
    yield f'    options = {{"target": {targets}, "losses": []}}'


def _optimizing(program: Pipeline, number: int) -> Iterator[str]:
    ddp = program.wrapper in ("ddp", "zero1")
    if program.wrapper != "none":
        yield "for model in models:"
        yield "    model.finish_grad_sync()"
    if program.clip is not None:
        yield f'norm = clip_grad_norm(models, {program.clip}, pipeline_group=mesh.get_group("pp"))'
        yield f'seen["norm {number}"] = norm.item()'
    if program.wrapper == "ddp":
        yield "for model in models:"
        yield "    model.expose_grads()"
    yield "for optimizer in optimizers:"
    yield "    optimizer.step()"
    if ddp:
        yield "for model in models:"
        yield "    model.zero_grad_buffer()"
    else:
        yield "for optimizer in optimizers:"
        yield "    optimizer.zero_grad()"


# ---- Plain PyTorch. ----


def _plain(program: Pipeline) -> Iterator[str]:
    ranks, replicas = program.pipe_ranks, program.replicas
    last = 0 if program.layout == "v" else ranks - 1
    name, options = ("AdamW", "lr=0.01, eps=0.001") if program.adam else ("SGD", "lr=0.01, momentum=0.9")
    yield "records = everyones[0]"
    yield "model, loss_fn = make_plain(), Loss()"
    yield f"optimizer = torch.optim.{name}(model.parameters(), {options})"
    for number, step in enumerate(program.steps):
        count = microbatches_of(program, step)
        divisor = replicas if program.sums else replicas * count
        yield f"# Step {number}"
        yield f"for replica in range({replicas}):"
        yield f"    seen = records[replica * {ranks} + {last}]"
        if step.evaluates:
            yield from (f"    {line}" for line in _losses(number, count, 2))
            yield f'    seen["evaluation {number}"] = torch.stack(losses).detach()'
        if step.outcome != "fails":
            yield from (f"    {line}" for line in _losses(number, count, 0))
            yield f'    seen["losses {number}"] = torch.stack(losses).detach()'
        if step.outcome == "step":
            yield f"    (sum(losses) / {divisor}).backward()"
        if step.outcome != "step":
            continue
        if program.wrapper != "none":
            yield "zeros_where_none(model)"
        if program.clip is not None:
            yield f"norm = torch.nn.utils.clip_grad_norm_(model.parameters(), {program.clip})"
            yield from ("for seen in records:", f'    seen["norm {number}"] = norm.item()')
        yield from ("optimizer.step()", "optimizer.zero_grad()")
    yield from ("for seen in records:", '    seen["weights"] = values_of_stages(dict(enumerate(model)))')


def _losses(number: int, count: int, index: int) -> Iterator[str]:
    inputs, targets = (
        f"batch(replica, {number}, {which}, rows={count * ROWS}).chunk({count})" for which in (index, index + 1)
    )
    yield f"pairs = zip({inputs}, {targets})"
    yield "losses = [loss_fn(model(x), target) for x, target in pairs]"
