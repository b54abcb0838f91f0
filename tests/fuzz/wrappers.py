"""How users wrap a model, and the verbs that each wrapper has for the end of an iteration."""

from collections.abc import Iterator
from itertools import pairwise

from gradients import write_gradients
from layers import attribute, expert_paths, writes_in_forward
from pen import Pen
from programs import Ddp, Fsdp, Iteration, UnitOf


def write_wrapping(pen: Pen) -> None:
    """From the plain ``model`` to the wrapped one, and its optimizer."""
    wrapper = pen.phase.wrapper
    if isinstance(wrapper, Ddp):
        _write_ddp(pen, wrapper)
    else:
        _write_fsdp(pen, wrapper)


# ---- DistributedDataParallel. ----


def _write_ddp(pen: Pen, wrapper: Ddp) -> None:
    experts = expert_paths(pen.program.model)
    for path in experts:
        with pen.inside(f"for param in {attribute(path)}.parameters():"):
            pen("param.allreduce = False")
    options = [f"{name}={value!r}" for name, value in _config(wrapper)]
    options += ['forward_writes="alike"'] if writes_in_forward(pen.program.model) else []
    pen(f"config = DistributedDataParallelConfig({', '.join(options)})")
    arguments = ["model", "config"]
    if wrapper.group == "group":
        pen("group = dist.new_group(list(range(size)))")
        arguments.append("process_group=group")
    if wrapper.group == "mesh":
        shape = f"({wrapper.instances}, size // {wrapper.instances})" if wrapper.instances > 1 else "(size,)"
        pen(f'mesh = init_device_mesh("cpu", {shape})')
        arguments.append("process_group=mesh")
    if experts:
        _write_expert_group(pen)
        arguments.append("expert_process_group=experts")
    if wrapper.recorded_order:
        group = ", group" if wrapper.group == "group" else ""
        pen(f"order = recorded_backward_order(model, lambda model: loss_of(model(batch(0, 0, 99))){group})")
        arguments.append("backward_order=order")
    if not wrapper.init_sync:
        arguments.append("init_sync=False")
    pen(f"model = DistributedDataParallel({', '.join(arguments)})")
    pen(f"optimizer = {_stock_optimizer(pen) if wrapper.stock else _distributed_optimizer(pen, wrapper)}")


def _config(wrapper: Ddp) -> Iterator[tuple[str, object]]:
    given = {
        "use_distributed_optimizer": wrapper.sharded,
        "overlap_grad_reduce": wrapper.overlap,
        "overlap_param_gather": wrapper.gather_overlap,
        "num_distributed_optimizer_instances": wrapper.instances if wrapper.group != "mesh" else 1,
        "bucket_size": wrapper.bucket_size,
        "num_buckets": wrapper.num_buckets,
        "find_unused_parameters": wrapper.find_unused,
        "check_for_nan_in_grad": wrapper.check_nan,
        "keep_params_whole": wrapper.keep_whole,
        "release_grads": wrapper.released,
        "calculate_per_token_loss": wrapper.per_token,
    }
    return ((name, value) for name, value in given.items() if value not in (False, None, 1) or value is True)


def _write_expert_group(pen: Pen) -> None:
    """Ranks that hold the same experts."""
    variants, wrapper = pen.program.model.variants, pen.phase.wrapper
    if wrapper.instances > 1:
        shape = f"({wrapper.instances}, size // {wrapper.instances * variants}, {variants})"
        names = 'mesh_dim_names=("outer", "inner", "variant")'
        pen(f'experts = init_device_mesh("cpu", {shape}, {names})["outer", "inner"]')
        return
    pen(f"groups = [dist.new_group(list(range(first, size, {variants}))) for first in range({variants})]")
    pen(f"experts = groups[rank % {variants}]")


def _stock_optimizer(pen: Pen) -> str:
    wanted = pen.program.optimizer
    params = f"groups_of({pen.owner}, weight_decay=0.0)" if wanted.groups else f"{pen.owner}.parameters()"
    # torch's fused SGD makes momentum in a step that the device skips, and leaves it without values.
    left_out = ("fused",) if pen.plain and wanted.scaled else ()
    options = "".join(f", {name}={value!r}" for name, value in wanted.options if name not in left_out)
    return f"torch.optim.{wanted.name}({params}{options})"


def write_plain_optimizer(pen: Pen) -> None:
    """In plain PyTorch."""
    pen(f"optimizer = {_stock_optimizer(pen)}")
    write_beside_optimizer(pen)


def write_beside_optimizer(pen: Pen) -> None:
    """A schedule and a scaler, where the program has them."""
    wanted = pen.program.optimizer
    schedules = {"steps": "StepLR(optimizer, 1, 0.5)", "exponential": "ExponentialLR(optimizer, 0.75)"}
    if wanted.schedule != "no":
        pen(f"schedule = torch.optim.lr_scheduler.{schedules[wanted.schedule]}")
    if wanted.scaled:
        ours = pen.ddp is not None and not pen.ddp.stock
        pen(f'scaler = {"" if ours else "torch.amp."}GradScaler("cpu", init_scale=1024.0, growth_interval=2)')


def _distributed_optimizer(pen: Pen, wrapper: Ddp) -> str:
    wanted = pen.program.optimizer
    arguments = [f"{name}={value!r}" for name, value in wanted.options]
    arguments.insert(1, f"optimizer_class=torch.optim.{wanted.name}")
    if wanted.groups:
        arguments.append('param_groups=[{"params": lambda name, param: param.ndim < 2, "weight_decay": 0.0}]')
    if wrapper.max_grad_norm and pen.phase.clip is not None:
        arguments.append(f"max_grad_norm={pen.phase.clip}")
    return f"DistributedOptimizer(model, {', '.join(arguments)})"


# ---- fully_shard. ----


def _write_fsdp(pen: Pen, wrapper: Fsdp) -> None:
    experts = expert_paths(pen.program.model)
    mesh = ""
    if wrapper.instances > 1:
        pen(f'mesh = init_device_mesh("cpu", ({wrapper.instances}, size // {wrapper.instances}))')
        mesh = ", mesh"
    elif wrapper.group != "default":
        made = "dist.new_group(list(range(size)))" if wrapper.group == "group" else 'init_device_mesh("cpu", (size,))'
        pen(f"mesh = {made}")
        mesh = ", mesh"
    if experts:
        _write_expert_group(pen)
    if pen.half:
        pen("policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)")
    common = f', placements="{wrapper.placements}"' if wrapper.placements != "zero3" else ""
    common += ", mixed_precision=policy" if pen.half else ""
    common += "" if wrapper.init_sync else ", init_sync=False"
    common += ', forward_writes="alike"' if writes_in_forward(pen.program.model) else ""
    if wrapper.meta != "no":
        _write_meta(pen, wrapper)
        common += ', init_fn=init_fn, device="cpu"'
    for unit in wrapper.units:
        own = ", experts" if unit.path in experts else mesh
        pen(f"fully_shard({attribute(unit.path)}{own}{common}{_unit_options(unit)})")
    if wrapper.prefetch:
        blocks = [attribute(unit.path) for unit in wrapper.units if unit.path.count(".") == 1]
        for first, second in pairwise(blocks):
            pen(f"{first}.set_modules_to_forward_prefetch([{second}])")
            pen(f"{second}.set_modules_to_backward_prefetch([{first}])")
    if not wrapper.stepping_hooks:
        pen(f"optimizer = {_stock_optimizer(pen)}")
        if pen.program.optimizer.name == "Adagrad":  # its state dict is taken before a step, and has state then
            pen("translate_state_dicts(optimizer)")
        return
    options = "".join(f", {name}={value!r}" for name, value in pen.program.optimizer.options)
    made = f"torch.optim.{pen.program.optimizer.name}([param]{options})"
    pen(f"optimizers = {{param: {made} for param in model.parameters()}}")
    with pen.inside("for param in model.parameters():"), pen.inside("if param.requires_grad:"):
        pen("param.register_post_accumulate_grad_hook(lambda param: step_and_clear(optimizers[param]))")


def _write_meta(pen: Pen, wrapper: Fsdp) -> None:
    if wrapper.left_out is not None:
        pen("partial = copy.deepcopy(model)", f"init_fn = on_meta(partial, left_out={wrapper.left_out})")
        with pen.inside('with refused("has no value"):'):
            pen('fully_shard(partial, init_fn=init_fn, device="cpu")')
    pen("init_fn = on_meta(model)")
    if wrapper.meta == "first":
        with pen.inside("if rank > 0:"):
            pen("init_fn = lambda module: None")


def _unit_options(unit: UnitOf) -> str:
    options = ""
    if unit.reshard is not None:
        options += f", reshard_after_forward={unit.reshard}"
    if unit.holds:
        options += ", reduce_every_microbatch=False"
    if unit.bucket_size is not None:
        options += f", bucket_size={unit.bucket_size}"
    if unit.atoms != "element":
        options += f", shard_atoms={unit.atoms!r}"
    return options


# ---- The end of an iteration. ----


def write_finish(pen: Pen, iteration: Iteration) -> None:
    """Gradients are complete, on all ranks."""
    if pen.ddp and pen.ddp.plain_loop:
        if pen.sums:
            pen("model.set_num_tokens(tokens)")
    elif pen.ddp:
        if "start" in iteration.finish:
            pen("model.start_grad_sync()")
        if iteration.finish != "start":
            pen(f"model.finish_grad_sync({'tokens' if pen.sums else ''})")
    elif pen.fsdp and iteration.finish == "finish":
        pen("model.finish_grad_sync()")


def write_zero(pen: Pen, complete: bool = True) -> None:
    """Gradients are cleared; those of an iteration that has not come to its end by the model alone."""
    if pen.plain:
        pen("optimizer.zero_grad()")
        return
    if not complete:
        pen("model.zero_grad()")
        return
    pen(pen.phase.wrapper.zero)
    if pen.exposes and not pen.ddp.zero.startswith("model"):
        pen("model.zero_grad_buffer()")


def write_step(pen: Pen, iteration: Iteration, name: str) -> None:
    """Reading and changing of gradients, clipping, the optimizer's step, the schedule's."""
    wanted, clip, ddp = pen.program.optimizer, pen.phase.clip, pen.ddp
    if pen.fsdp and pen.fsdp.stepping_hooks:
        return
    clips_late = ddp is None or ddp.clips == "torch" or wanted.scaled  # unscaled where they are exposed
    if pen.exposes and clips_late:
        pen("model.expose_grads()")
    write_gradients(pen, iteration, name)
    if iteration.way == "two halves":
        pen(f"descend({pen.owner}, ground)")
    if clip is not None and not (ddp and ddp.max_grad_norm):
        if wanted.scaled:
            pen("scaler.unscale_(optimizer)")
        ours = ddp is not None and not ((ddp.stock or ddp.plain_loop) and ddp.clips != "library")
        called = "clip_grad_norm(model" if ours else f"torch.nn.utils.clip_grad_norm_({pen.owner}.parameters()"
        pen(f"norm = {called}, {clip})")
    if pen.exposes and not clips_late:
        pen("model.expose_grads()")
    if wanted.scaled:
        pen("scaler.step(optimizer)", "scaler.update()")
    else:
        pen("optimizer.step()")
    optimizers = ddp is not None and ddp.max_grad_norm
    if pen.captured:
        if clip is not None and not optimizers:
            pen.see(f"norm {name}", "norm.item()")
        return
    if clip is not None and not iteration.overflow:
        pen.see_on_all(f"norm {name}", "optimizer.grad_norm.item()" if optimizers else "norm.item()")
    if wanted.schedule != "no":
        pen("schedule.step()")


def write_unseen_iteration(pen: Pen, data: str) -> None:
    """One of which nothing is noted, and that plain PyTorch does not run."""
    pen.backward(f"loss_of({pen.forward(data)})")
    if pen.delays:
        pen.drain()
    if pen.ddp and pen.ddp.plain_loop:
        pass
    elif not pen.fsdp or pen.delays:
        pen("model.finish_grad_sync()")
    if pen.exposes:
        pen("model.expose_grads()")
    pen("optimizer.step()")
    if pen.program.optimizer.schedule != "no":
        pen("schedule.step()")
    write_zero(pen)


def write_first_half(pen: Pen, step: int) -> None:
    """Sharpness-aware minimisation: a backward that moves the weights, to which the step's gradients belong."""
    with pen.for_each_rank():
        pen(f"loss = loss_of({pen.forward(f'batch(rank, {step}, 60)')})")
        pen("(loss / size).backward()" if pen.plain else "loss.backward()")
    if pen.delays:
        pen.drain()
    if pen.ddp and not pen.exposes:
        pass
    elif pen.ddp:
        pen("model.finish_grad_sync()", "model.expose_grads()")
    elif pen.delays:
        pen("model.finish_grad_sync()")
    elif pen.plain:
        pen(f"zeros_where_none({pen.owner})")
    pen(f"ground = climb({pen.owner})")
    write_zero(pen)


def write_end_of_closure(pen: Pen, iteration: Iteration) -> None:
    """What a closure has to have done when it returns."""
    write_finish(pen, iteration)
    if pen.plain:
        pen(f"zeros_where_none({pen.owner})")
    if pen.exposes:
        pen("model.expose_grads()")
    if not pen.searches:
        pen("return loss")
    elif pen.plain:
        pen("return total")
    else:
        pen("dist.all_reduce(total)", "return total / size")


def write_closure_step(pen: Pen) -> None:
    """The optimizer calls the closure."""
    pen("optimizer.step(closure)")
    if pen.plain and pen.half:
        pen("masters.give()")
    if pen.program.optimizer.schedule != "no":
        pen("schedule.step()")
