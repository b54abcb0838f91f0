"""Gradients of several losses, of which each gives up what opposes the other: PCGrad."""

from pen import Pen
from programs import Fsdp

LOSSES = ("loss_of({})", "y_of({}).sum(1).square().mean()")


def write_projected(pen: Pen, step: int) -> None:
    """An iteration's backwards: where gradients are sharded, of ``.grad``; under the other wrapper by ``add_grad``."""
    by_hand = not pen.plain and not isinstance(pen.phase.wrapper, Fsdp)
    pen("params = [param for param in model.parameters() if param.requires_grad]", "grads = []")
    for index, loss in enumerate(LOSSES):
        with pen.for_each_rank():
            pen(f"loss = {loss.format(pen.forward(f'batch(rank, {step}, {index})'))}")
            pen.see(f"loss {step}.{index}", "loss.item()")
            if not by_hand:
                pen("(loss / size).backward()" if pen.plain else "loss.backward()")
        if by_hand:
            pen("grads.append(means_over_ranks(torch.autograd.grad(loss, params, allow_unused=True), params))")
        else:
            pen("grads.append([zero_or_copy(param) for param in params])", "optimizer.zero_grad()")
    over_ranks = ", over_ranks=True" if pen.fsdp else ""
    with pen.inside(f"for param, grad in zip(params, projected(*grads{over_ranks})):"):
        pen("add_grad(param, grad)" if by_hand else "param.grad = grad")
