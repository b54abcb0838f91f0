"""A second trained model beside the first, as in adversarial training: it judges what the first one puts out."""

from layers import IN_FEATURES, OUT_FEATURES
from pen import Pen
from programs import Iteration, Program


def write_second(pen: Pen) -> None:
    """The model, its wrapper and its optimizer."""
    second = pen.phase.second
    if second is None:
        return
    layer = "Linear" if second.library and not pen.plain else "nn.Linear"
    options = ", fuse_wgrad_accumulation=True" if layer == "Linear" else ""
    layers = f"{layer}({outputs_of(pen.program)}, 4{options}), nn.Tanh(), {layer}(4, 1{options})"
    pen(f"critic = initialise(nn.Sequential({layers}), 1)")
    name, options = ("Adam", "lr=0.01, eps=0.001") if second.adam else ("SGD", "lr=0.01, momentum=0.9")
    made = f"torch.optim.{name}(critic.parameters(), {options})"
    if pen.plain:
        pass
    elif second.wrapper == "fsdp":
        pen("fully_shard(critic[0])", "fully_shard(critic)")
    else:
        sharded = second.wrapper == "zero1"
        config = "use_distributed_optimizer=True, overlap_param_gather=True" if sharded else "bucket_size=5"
        pen(f"critic = DistributedDataParallel(critic, DistributedDataParallelConfig({config}))")
        if sharded:
            made = f"DistributedOptimizer(critic, optimizer_class=torch.optim.{name}, {options})"
    pen(f"critic_optimizer = {made}")


def outputs_of(program: Program) -> int:
    """The number of the first model's."""
    return IN_FEATURES if program.model.tie == "embedding" else OUT_FEATURES


def write_alone(pen: Pen, step: int) -> None:
    """The second model's own step: it learns to tell data from what the first one makes."""
    features = outputs_of(pen.program)
    with pen.for_each_rank():
        with pen.inside("with torch.no_grad():"):
            pen(f"made = y_of({pen.forward(f'batch(rank, {step}, 65)')})")
        real = f"batch(rank, {step}, 66, features={features})"
        pen(f"judgement = F.softplus(-critic({real})).mean() + F.softplus(critic(made)).mean()")
        pen("(judgement / size).backward()" if pen.plain else "judgement.backward()")
        pen.see(f"judgement {step}", "judgement.item()")
    _write_step(pen)


def write_end(pen: Pen, iteration: Iteration) -> None:
    """What becomes of the second model's gradients of the first one's microbatches."""
    if not any(micro.pattern == "judged" for micro in iteration.micros):
        return
    if iteration.second == "together":
        _write_step(pen)
    elif iteration.second == "through":
        pen("critic_optimizer.zero_grad()" if pen.plain else "critic.zero_grad()")


def _write_step(pen: Pen) -> None:
    second = pen.phase.second
    assert second is not None
    if not pen.plain and second.wrapper != "fsdp":
        pen("critic.finish_grad_sync()")
        if second.wrapper == "ddp":
            pen("critic.expose_grads()")
    pen("critic_optimizer.step()", "critic_optimizer.zero_grad()" if pen.plain else "critic.zero_grad()")
