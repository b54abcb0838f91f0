"""Data, losses, and what a rank notes of a model. Scripts take the sources of what they use from here."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


class NotAsPromised(AssertionError):
    """Something was not refused, or otherwise than the documentation says."""


@contextmanager
def refused(*words):
    """What raises, with one of these in its message."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not any(each in str(error) for each in words):
            raise NotAsPromised(f"refused otherwise: {error}") from error
    else:
        raise NotAsPromised(f"not refused: {words[0]}")


def batch(rank, step, index, rows=3, features=5):
    """The rows that one rank sees in one microbatch."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * index + rank)
    return torch.randn(rows, features, generator=generator, dtype=torch.float64).to(torch.get_default_dtype())


def loss_of(outputs):
    """A mean over everything in the outputs."""
    if isinstance(outputs, dict):
        return loss_of(outputs["y"]) + sum(penalty.mean() for penalty in outputs["penalties"])
    return (outputs.float() if outputs.dtype is torch.bfloat16 else outputs).sub(1.0).square().mean()


def numbered(noted, step):
    """What a graphed step has returned, by the names that it has in the step of this number."""
    return {name.replace("N", str(step)): value for name, value in noted.items()}


def y_of(outputs):
    return outputs["y"] if isinstance(outputs, dict) else outputs


def groups_of(model, **options):
    """Parameter groups as everybody has them: norms and biases do not decay."""
    small = [param for param in model.parameters() if param.ndim < 2]
    large = [param for param in model.parameters() if param.ndim >= 2]
    return [{"params": small, **options}, {"params": large}]


def autocast(model, *arguments):
    """A forward in bf16, as far as autocast goes."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(*arguments)


def scale_grads(model, factor):
    """In place."""
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(factor)


def means_over_ranks(grads, params):
    """What ``autograd.grad`` has found here, over all ranks; zeros for what is not used."""
    found = [torch.zeros_like(param) if grad is None else grad for grad, param in zip(grads, params, strict=True)]
    for grad in found:
        dist.all_reduce(grad.div_(dist.get_world_size()))
    return found


def zero_or_copy(param):
    """Of its gradient; of a shard, those elements that this rank has."""
    grad = torch.zeros_like(param) if param.grad is None else param.grad
    return (grad.to_local() if hasattr(grad, "to_local") else grad).detach().clone()


def projected(first, second, over_ranks=False):
    """The sum of both, each without what opposes the other."""
    pairs = [(first, second), (first, first), (second, second)]
    sums = torch.stack([sum((a * b).sum() for a, b in zip(*pair, strict=True)) for pair in pairs])
    if over_ranks:
        dist.all_reduce(sums)
    dot, square, other = sums
    away, back = dot.clamp(max=0) / other, dot.clamp(max=0) / square
    return [a - away * b + b - back * a for a, b in zip(first, second, strict=True)]


def step_and_clear(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def climb(model):
    """Moves the weights a little way up along their gradients; what they were is returned."""
    params = [param for param in model.parameters() if param.grad is not None]
    norm = torch.nn.utils.get_total_norm([param.grad for param in params]) + 0.1
    ground = [param.detach().clone() for param in params]
    with torch.no_grad():
        torch._foreach_add_(params, torch._foreach_mul([param.grad.detach() for param in params], 0.05 / norm))
    return ground


def descend(model, ground):
    """Back to what they were."""
    params = [param for param in model.parameters() if param.requires_grad]
    with torch.no_grad():
        torch._foreach_copy_(params, ground)


def drain(model):
    """Compute the weight gradients that modules have delayed, last module first."""
    for module in reversed(list(model.modules())):
        while isinstance(module, nn.Module) and getattr(module, "wgrad_queue", None) and module.need_backward_dw():
            module.backward_dw()


def values_of(model):
    """What this rank has of each parameter: name -> (its first element, values)."""
    module = getattr(model, "module", model)
    with torch.no_grad():
        return {name: (first_of(param), copied(param)) for name, param in module.named_parameters()}


def values_of_stages(stages):
    """Likewise of stages of a pipeline, by their indices."""
    return {f"{index}.{name}": piece for index, part in stages.items() for name, piece in values_of(part).items()}


def grads_of(model):
    """The same of gradients, where they are whole or this rank's shard of them; None for a parameter without."""
    module = getattr(model, "module", model)
    found = {}
    for name, param in module.named_parameters():
        if param.requires_grad:
            kept = None if hasattr(param, "get_main_grad") else getattr(param, "main_grad", None)
            grad = param.grad if param.grad is not None else kept
            found[name] = None if grad is None else (first_of(param), copied(grad))
    return found


def read_each(model, read):
    """What somebody makes of each gradient, by name."""
    module = getattr(model, "module", model)
    grads = {name: param.grad for name, param in module.named_parameters() if param.requires_grad}
    return {name: None if grad is None else (0, float(read(grad))) for name, grad in grads.items()}


def read_all(model, read):
    """Likewise of all gradients together."""
    return float(read([param.grad for param in model.parameters() if param.grad is not None]))


def norms_of_slices(optimizer, instances):
    """Norms of gradients where each rank has slices of them, by name."""
    squares = torch.stack([part.grad.square().sum() for part in optimizer.slices])
    dist.all_reduce(squares)
    norms = (squares / instances).sqrt()
    return {part.name: (0, float(norm)) for part, norm in zip(optimizer.slices, norms, strict=True)}


def whole_weights(model):
    """The state dict of a sharded model, of whole tensors."""
    state = model.state_dict()
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def pieces_like(model, tensors):
    """Tensors that follow ``model.parameters()``, as ``values_of`` has them."""
    module = getattr(model, "module", model)
    named = module.named_parameters()
    return {name: (first_of(param), copied(each)) for (name, param), each in zip(named, tensors, strict=True)}


def first_of(param):
    return param.shard.start if hasattr(param, "shard") else 0


def copied(tensor):
    """Its values; of a shard of a gradient, those that this rank has."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.detach().reshape(-1).clone().double()
