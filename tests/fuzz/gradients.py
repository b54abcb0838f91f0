"""What users do with gradients between an iteration's last backward and the step: they read them, and change them.

To add a way, add an expression to ``READS`` or ``READS_OF_ALL``, or lines to ``CHANGES``.
"""

from pen import Pen
from programs import Ddp, Iteration

WHOLE = "(grad.full_tensor() if hasattr(grad, 'full_tensor') else grad)"
"""What needs all elements is refused on a shard, and right here."""

READS = {
    "norm": "grad.norm()",
    "torch.norm": "torch.norm(grad, 1)",
    "vector_norm": "torch.linalg.vector_norm(grad, math.inf)",
    "data": "grad.data.norm()",
    "detach": "grad.detach().norm(3)",
    "clone": "grad.clone().norm()",
    "view": f"{WHOLE}.view(-1).norm()",
    "flatten": f"{WHOLE}.flatten().abs().max()",
    "double": "grad.double().norm()",
    "product": "(grad * 0.5).norm()",
    "negated": "(0.5 * -grad / 2).norm(1)",
    "in place": "grad.clone().mul_(0.5).norm()",
    "root of squares": f"{WHOLE}.square().sum().sqrt()",
    "power": f"({WHOLE}**2).mean()",
    "maximum": f"{WHOLE}.abs().max()",
    "finite": f"{WHOLE}.isfinite().all()",
    "small ones": f"({WHOLE}.abs() < 1e-12).any() & {WHOLE}.isnan().any()",
    "whole": f"{WHOLE}.reshape(-1)[:2].norm()",
    "sum": f"{WHOLE}.sum()",
    "mean": f"{WHOLE}.mean()",
    "extrema": f"{WHOLE}.max() - {WHOLE}.min()",
    "products": f"({WHOLE} * {WHOLE}.detach() + {WHOLE}).sum()",
    "deviation": f"{WHOLE}.std(unbiased=False)",
}
"""Of one gradient. What cancels is in ``CANCELS``."""
CANCELS = ("sum", "mean", "products", "deviation")

READS_OF_ALL = {
    "total norm": "torch.nn.utils.get_total_norm(grads)",
    "norm of norms": "torch.stack([grad.norm() for grad in grads]).norm()",
    "foreach": "torch.stack(torch._foreach_norm(grads)).max()",
    "squares": f"sum({WHOLE}.pow(2).sum() for grad in grads) ** 0.5",
    "foreach of products": "torch.stack(torch._foreach_norm(torch._foreach_mul(grads, 0.5))).max()",
    "vector": f"torch.nn.utils.parameters_to_vector([{WHOLE} for grad in grads]).norm()",
}
"""Of all gradients at once."""

SLICES = "slices"
"""What a ``DistributedOptimizer`` has of gradients, which is the one way to read them there."""

WAYS = (*READS, *READS_OF_ALL, SLICES)

CHANGES = {
    "product": ("param.grad = param.grad * 0.5",),
    "data": ("param.grad.data = param.grad.data * 0.5",),
    "clone": ("grad = param.grad.clone()", "grad.mul_(0.5)", "param.grad = grad"),
    "data in place": ("param.grad.data.mul_(0.5)",),
    "operator": ("param.grad /= 2",),
    "limited": ("param.grad = param.grad.clamp(-0.05, 0.05)",),
    "limited in place": ("param.grad.clamp_(-0.05, 0.05)",),
    "normalised": ("param.grad = param.grad / (1 + param.grad.norm())",),
    "sign": ("param.grad = torch.where(param.grad.abs() < 1e-9, torch.zeros_like(param.grad), param.grad.sign())",),
    "ones": ("param.grad = torch.ones_like(param.detach())",),
    "decay": ("param.grad = param.grad + 0.1 * param.detach()",),
}
"""Of each gradient; "no", "none" and "values clipped" beside them."""


def shows(iteration: Iteration, wrapper: object) -> bool:
    """Whether ``.grad`` is there to be read, before it is clipped."""
    if isinstance(wrapper, Ddp):
        return (
            (wrapper.stock or (wrapper.plain_loop and not wrapper.sharded))
            and wrapper.clips == "torch"
            and iteration.outcome == "step"
        )
    return iteration.outcome in ("step", "accumulate")


def write_gradients(pen: Pen, iteration: Iteration, name: str) -> None:
    """Before clipping: what is changed, and then what is read."""
    _write_change(pen, iteration.change)
    for way in iteration.reads:
        _write_read(pen, way, f"{way} of gradients {name}")


def _write_change(pen: Pen, change: str) -> None:
    if change == "no":
        return
    if change == "values clipped":
        pen(f"torch.nn.utils.clip_grad_value_({pen.owner}.parameters(), 0.05)")
        return
    if change == "none":
        pen(f"first = next(param for param in {pen.owner}.parameters() if param.requires_grad)", "first.grad = None")
        return
    with pen.inside("with torch.no_grad():"), pen.inside(f"for param in {pen.owner}.parameters():"):
        with pen.inside("if param.requires_grad:"):
            pen(*CHANGES[change])


def _write_read(pen: Pen, way: str, what: str) -> None:
    if way == SLICES and not pen.plain:
        wrapper = pen.phase.wrapper
        pen.see(what, f"norms_of_slices(optimizer, {wrapper.instances if isinstance(wrapper, Ddp) else 1})")
        return
    owner = "model" if pen.owner == "everything" else pen.owner
    with pen.for_each_rank():
        if way in READS_OF_ALL:
            pen.see(what, f"read_all({owner}, lambda grads: {READS_OF_ALL[way]})")
        else:
            pen.see(what, f"read_each({owner}, lambda grad: {READS.get(way, 'grad.norm()')})")
