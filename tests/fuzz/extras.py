"""What users do beside training: each kind writes its lines, alike for the wrapped run and for plain PyTorch.

To add one, add a function to ``DURING`` (between microbatches; every rank runs it, and in plain PyTorch it runs once
for each rank) or to ``AFTER`` (between steps; in plain PyTorch it runs once, and changes the one model).
"""

from collections.abc import Callable

from pen import Pen
from programs import Ddp, Extra, Fsdp, Phase
from user_beside import MARKED_WAYS, MARKS, STATE_WAYS
from wrappers import write_beside_optimizer, write_plain_optimizer, write_wrapping, write_zero

Writer = Callable[[Pen, Extra, str, int], None]
"""Called with the pen, the extra, a name that no other has, and the iteration's number."""


def _data(step: int) -> str:
    return f"batch(rank, {step}, 70)"


def _keep(pen: Pen, extra: Extra, what: str) -> None:
    if extra.ranks:
        with pen.inside(pen.on(extra.ranks)):
            pen(f"kept.append({what})")


# ---- Between microbatches. ----


def _dropped_forward(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """With grad mode, and no backward."""
    pen(pen.forward(_data(step)))


def _kept_forward(pen: Pen, extra: Extra, name: str, step: int) -> None:
    pen(f"output = {pen.forward(_data(step))}")
    _keep(pen, extra, "output")
    pen("del output")


def _failed_forward(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """It raises on all ranks; some keep the exception, and with it the frames of the forward."""
    with pen.inside("try:"):
        pen(pen.forward(_data(step), str(extra.where)))
    with pen.inside("except BadBatch as error:"):
        _keep(pen, extra, "error")


def _no_backward(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """Something raises between forward and backward, on all ranks."""
    with pen.inside("try:"):
        pen(f"interrupt({pen.forward(_data(step))})")
    with pen.inside("except BadBatch as error:"):
        _keep(pen, extra, "error")


def _evaluation(pen: Pen, extra: Extra, name: str, step: int, mode: str = "no_grad") -> None:
    with pen.inside(f"with torch.{mode}():"):
        pen.see(f"evaluation {name}", f"loss_of({pen.forward(_data(step))}).item()")


def _inference(pen: Pen, extra: Extra, name: str, step: int) -> None:
    _evaluation(pen, extra, name, step, "inference_mode")


def _collection(pen: Pen, extra: Extra, name: str, step: int) -> None:
    if pen.plain:
        return
    with pen.inside(pen.on(extra.ranks)):
        pen("gc.collect()")


def _freezing(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """What there is by now is never collected."""
    if not pen.plain:
        pen("gc.freeze()")


def _forgetting(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """What was kept goes, on some ranks."""
    with pen.inside(pen.on(extra.ranks)):
        pen("kept.clear()")


def _log_norms(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """All ranks compute, the first one looks. Of shards these are norms of shards, which are not compared."""
    with pen.inside("with torch.no_grad():"):
        pen("norms = [float(param.norm()) for param in model.parameters()]")
    with pen.inside("if rank == 0:"):
        pen("log.append(max(norms))")


def _whole_norms(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """Norms of whole parameters, by all ranks."""
    with pen.inside("with torch.no_grad():"):
        with pen.inside("with model.unsharded():" if pen.fsdp else None):
            pen.see(f"norms {name}", "[float(param.norm()) for param in model.parameters()]")


def _gone_through(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """The model is frozen while somebody else asks for the gradient of what goes into it."""
    pen("trained = [param for param in model.parameters() if param.requires_grad]")
    pen("for param in trained:", "    param.requires_grad_(False)")
    pen(f"x = {_data(step)}.requires_grad_()")
    pen(f"loss_of({pen.forward('x')}).backward()")
    pen.see(f"gradient of {name}", "x.grad")
    pen("for param in trained:", "    param.requires_grad_(True)")


def _state_dict(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """To be loaded later, or never."""
    pen("state = {name: value.clone() for name, value in model.state_dict().items()}")


def _state_taken(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """Weights that are looked at when the phase is over."""
    if pen.plain:
        pen.see(f"state {name}", "values_of(model)")
    else:
        way = STATE_WAYS[extra.where % len(STATE_WAYS)]
        pen(f'taken["state {name}"] = state_taken(model, "{way}")')


def _copy_of_the_model(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """Evaluated and dropped. A sharded model is not copied."""
    if pen.fsdp:
        return
    pen("twin = copy.deepcopy(model)")
    with pen.inside("with torch.no_grad():"):
        data = f"{_data(step)}.bfloat16()" if pen.half else _data(step)
        pen.see(f"copy {name}", f"loss_of(twin({data})).item()")
    pen("del twin")


def _mean_loss(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """A collective of the user's own, over the default group."""
    if pen.plain:
        pen.see(f"mean of {name}", "loss.item()")
        pen.means.append(f"mean of {name}")
        return
    pen("mean = loss.detach().clone()", "dist.all_reduce(mean)")
    pen.see(f"mean of {name}", "float(mean) / size")


def _attributes(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """Read through the wrapper; a method of the model's runs it."""
    pen.see(f"attributes {name}", '[model.temperature, model.sharpness, model.config["blocks"], len(model.blocks)]')
    pen("model.seen_by = rank")
    pen.see(f"number {name}", "model.seen_by")
    if extra.ranks:
        pen("del model.seen_by")
    pen.see(f"generated {name}", f"model.generate({_data(step)}, {1 + extra.where % 2})")


def _changed_and_back(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """A change of the model, which the next forward refuses, is undone: training goes on exactly."""
    if pen.plain:
        return
    words, undone = ("not there",), "del model.head.late"
    if extra.where == 0:
        pen("model.head.late = nn.Parameter(torch.ones(1))")
    elif extra.where == 1:
        words, undone = ("was replaced after", "not there"), "model.head.weight = weight"
        pen("weight = model.head.weight", "model.head.weight = nn.Parameter(torch.zeros(1, 1))")
    elif extra.where == 2:
        pen("trained = next(param for param in model.parameters() if param.requires_grad)")
        pen("trained.requires_grad_(False)", "trained.requires_grad_(True)")
        return
    else:
        words, undone = ("and was frozen", "was unfrozen"), "frozen.requires_grad_(False)"
        pen("frozen = next(param for param in model.parameters() if not param.requires_grad)")
        pen("frozen.requires_grad_(True)")
    with pen.inside(f"with refused({', '.join(map(repr, words))}):"):
        pen(pen.forward(_data(step)))
    pen(undone)


DURING: dict[str, Writer] = {
    "changed and back": _changed_and_back,
    "dropped forward": _dropped_forward,
    "kept forward": _kept_forward,
    "failed forward": _failed_forward,
    "no backward": _no_backward,
    "no_grad": _evaluation,
    "inference_mode": _inference,
    "gc.collect": _collection,
    "gc.freeze": _freezing,
    "forgetting": _forgetting,
    "norms logged": _log_norms,
    "whole norms": _whole_norms,
    "gone through": _gone_through,
    "state_dict": _state_dict,
    "deepcopy": _copy_of_the_model,
    "mean loss": _mean_loss,
    "attributes": _attributes,
    "state taken": _state_taken,
}


# ---- Between steps. ----


def _load_state_dict(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """Back to where ``state`` was taken."""
    pen("model.load_state_dict(state)")


def _snapshot(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """Model and optimizer, in memory."""
    pen("snapshot = copy.deepcopy((model.state_dict(), optimizer.state_dict()))")


def _rollback(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """Back to it."""
    pen("model.load_state_dict(snapshot[0])")
    pen("optimizer.load_state_dict(copy.deepcopy(snapshot[1]))")


def _layer_dropped(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """From here on no rank runs one of the blocks."""
    pen.set_order(extra.where, between_steps=True)


def _kept_gathered(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """The user's mind has changed."""
    if pen.fsdp:
        pen("model.set_reshard_after_forward(False)")


def _average(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """An exponential moving average over what the rank has of the parameters."""
    with pen.inside("with torch.no_grad():"):
        pen(f"now = [param.detach() for param in {pen.owner}.parameters()]")
        with pen.inside("if average is None:"):
            pen("average = [each.clone() for each in now]")
        with pen.inside("for mean, each in zip(average, now):"):
            pen("mean.lerp_(each, 0.1)")


def _average_taken(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """Training goes on from the average."""
    with pen.inside("with torch.no_grad():"):
        pen(f"torch._foreach_copy_(list({pen.owner}.parameters()), average)")
    if pen.plain and pen.half:
        pen("masters.give()")


def _averaged_model(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """torch's copy of a model, whose weights are means. A sharded model is not copied."""
    if isinstance(pen.phase.wrapper, Fsdp):
        return
    with pen.inside("if averaged is None:"):
        pen("averaged = torch.optim.swa_utils.AveragedModel(model)")
    pen("averaged.update_parameters(model)")
    pen.see_on_all(f"averaged model {name}", "values_of(averaged)")


def _rescale(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """Parameters are changed in place by somebody else than the optimizer."""
    half = pen.plain and pen.half
    rounded = half and isinstance(pen.phase.wrapper, Ddp)  # its parameters are bf16; shards are fp32
    with pen.inside("with torch.no_grad():"):
        with pen.inside(f"for param in {'model' if rounded else pen.owner}.parameters():"):
            pen("param.mul_(0.75)")
    if half:
        pen("masters.follow()" if rounded else "masters.give()")


def _write_back(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """The same through whole parameters, where they are sharded."""
    if pen.fsdp:
        with pen.inside("with torch.no_grad(), model.unsharded(writeback=True):"):
            with pen.inside("for param in model.parameters():"):
                pen("param.mul_(0.75)")
    else:
        _rescale(pen, extra, name, step)


def _zero_again(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """Once more than needed, or of gradients that were to stay."""
    write_zero(pen)


def _unwrapped(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """The model comes out of its wrapper, is trained by plain PyTorch, every rank with all rows, and wrapped anew.

    A sharded model does not come out: another one takes its weights over.
    """
    if pen.ddp:
        pen("model = model.unwrap()")
    elif pen.fsdp:
        pen("weights = whole_weights(model)", "attributes = attributes_of(model)", "model = make_model()")
        pen("model.load_state_dict(weights)", "vars(model).update(attributes)")
    if not pen.plain:
        pen("unconvert(model)")
    pen("by_hand = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)")
    for index in range(1 + extra.where % 2):
        with pen.inside("for each in range(size):"):
            pen(f"(loss_of({pen.forward(f'batch(each, {step}, {80 + index})')}) / size).backward()")
        if not pen.plain and any(block.library and block.delayed for block in pen.program.model.blocks):
            pen("drain(model)")
        pen("by_hand.step()", "by_hand.zero_grad()")
    if pen.plain:
        write_plain_optimizer(pen)
        return
    if extra.where < 3 or pen.phase.queue:
        pen("convert_linears(model)")
    write_wrapping(pen)
    write_beside_optimizer(pen)


def _attribute_set(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """An attribute of the model, which its forwards read; by a method or by assignment, through the wrapper."""
    several = pen.plain and pen.program.model.variants > 1
    with pen.inside("for each in models:" if several else None):
        value = (0.5, 2.0)[extra.where % 2]
        owner = "each" if several else "model"
        pen(f"{owner}.set_temperature({value})" if extra.where > 1 else f"{owner}.temperature = {value}")
    if pen.ddp:
        pen.see(f"temperature {name}", "model.module.temperature")
    else:
        pen.see_on_all(f"temperature {name}", f"{'models[0]' if several else 'model'}.temperature")


def _put_by_hand(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """A gradient where no hook sees it, before the reduction: refused, thrown away, and training goes on."""
    if pen.plain:
        return
    param = "model.head.weight"
    if pen.fsdp:
        param = "wholes[0]"
        pen("wholes = []", "hook = lambda module, inputs: wholes.append(module.weight)")
        pen("handle = model.head.register_forward_pre_hook(hook)")
        with pen.inside("with torch.no_grad():"):
            pen(pen.forward(_data(step)))
        pen("handle.remove()")
    pen(f"{param}.grad = torch.ones_like({param})")
    with pen.inside('with refused("was put into .grad by hand"):'):
        pen(f"model.finish_grad_sync({'1' if pen.sums else ''})")
    pen("model.zero_grad()")


def _decay_raised(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """An option of the optimizer that no scheduler of torch's has."""
    with pen.inside("for group in optimizer.param_groups:"):
        pen('group["weight_decay"] += 0.125')


def _saved_beside(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """A checkpoint in the background: it is written while training goes on."""
    if pen.plain:
        pen("beside = copy.deepcopy((model.state_dict(), optimizer.state_dict()))")
        return
    write_free_disk(pen, waits=_waits_by_itself(pen))
    if extra.where % 2:
        pen("prepare_background_saves(model, optimizer)")
    pen("disk = busy_disk()")
    pen('saving = save_checkpoint(f"{folder}/beside", model, optimizer, background=True)')


def _gone_back_to(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """A load waits for the save; a model in another wrapper has to ask for it."""
    if pen.plain:
        pen("model.load_state_dict(beside[0])")
        pen("optimizer.load_state_dict(copy.deepcopy(beside[1]))")
        return
    write_free_disk(pen, waits=extra.where % 2 == 1 or _waits_by_itself(pen))
    pen('load_checkpoint(f"{folder}/beside", model, optimizer)')


def _waits_by_itself(pen: Pen) -> bool:
    """Whether the next save or load may be of a model in another wrapper, which knows of no save before."""
    return any(extra.kind == "unwrapped" for iteration in pen.phase.iterations for extra in iteration.extras)


def _marks(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """Another model, with one of Megatron-core's marks, over half of the ranks."""
    pen(f"marked = {'make_plain' if pen.plain else 'make_model'}()")
    with pen.for_each_rank():
        if pen.plain:
            pen.see(f"marked {name}", f"loss_of(marked(batch(rank, {step}, 75))).item()")
            return
        mark = MARKS[extra.where % len(MARKS)]
        way = "ddp" if pen.program.model.hooked else MARKED_WAYS[extra.where % len(MARKED_WAYS)]
        pen.see(f"marked {name}", f'loss_of_marked(marked, "{mark}", "{way}", folder, {step})')


def write_free_disk(pen: Pen, *, waits: bool) -> None:
    """All that is to be saved in the background may be written now."""
    if not pen.plain and saves_beside(pen.phase):
        with pen.inside("if disk is not None:"):
            pen("dist.barrier()", "disk.set()", *(["saving.wait()"] if waits else []))


def saves_beside(phase: Phase) -> bool:
    """Whether something is saved in the background between iterations."""
    return any(extra.kind == "saved beside" for iteration in phase.iterations for extra in iteration.extras)


def takes_states(phase: Phase) -> bool:
    """Whether weights are taken that are looked at later."""
    return any(extra.kind == "state taken" for iteration in phase.iterations for extra in iteration.extras)


AFTER: dict[str, Writer] = {
    "load_state_dict": _load_state_dict,
    "snapshot": _snapshot,
    "rollback": _rollback,
    "layer dropped": _layer_dropped,
    "kept gathered": _kept_gathered,
    "average": _average,
    "average taken": _average_taken,
    "averaged model": _averaged_model,
    "rescaled": _rescale,
    "written back": _write_back,
    "zeroed again": _zero_again,
    "unwrapped": _unwrapped,
    "attribute set": _attribute_set,
    "put by hand": _put_by_hand,
    "decay raised": _decay_raised,
    "saved beside": _saved_beside,
    "gone back to": _gone_back_to,
    "marks": _marks,
}

FORWARDS = (
    "changed and back",
    "dropped forward",
    "kept forward",
    "failed forward",
    "no backward",
    "no_grad",
    "inference_mode",
    "whole norms",
    "gone through",
    "attributes",
    "state taken",
)
"""Kinds that run the model, or gather its weights."""
RANK_DEPENDENT = ("kept forward", "failed forward", "no backward", "gc.collect", "forgetting", "attributes")
"""Kinds that look at ``Extra.ranks``."""

VARIED = ("changed and back", "unwrapped", "attributes", "attribute set", "gone back to", "state taken", "marks")
"""Kinds that ``Extra.where`` makes one of several variants of."""


def write_extra(pen: Pen, extra: Extra, name: str, step: int) -> None:
    """One of either kind."""
    (DURING | AFTER)[extra.kind](pen, extra, name, step)
