"""Refusals over models that tensor parallelism has cut: what needs a whole model, and would get this rank's slices."""

from ..plan.owned_params import refuse_slices
from ..wrapper.data_parallel import DistributedDataParallel
from .param_groups import is_elementwise

__all__ = ["check_optimizer_over_slices", "refuse_norm", "refuse_scaler"]


def check_optimizer_over_slices(model: DistributedDataParallel, cls: type, max_grad_norm: float | None) -> None:
    """Raise ``ValueError`` for a class that updates whole parameters, and for clipping, over slices."""
    if max_grad_norm is not None:
        refuse_norm(model, "max_grad_norm")
    if not is_elementwise(cls):
        _refuse(
            model,
            cls.__name__,
            "updates whole parameters, and would take slices for them",
            "use an elementwise class of torch.optim",
        )


def refuse_norm(model: DistributedDataParallel, what: str) -> None:
    """Raise ``ValueError`` for a norm over slices; ``what``: the option or function."""
    _refuse(
        model,
        what,
        "would cover this rank's slices alone, and differ between the ranks that hold one model together",
        "sum the squares of model.reduced_grads() over all of those ranks, and call model.scale_gradients(coefficient)",
    )


def refuse_scaler(model: DistributedDataParallel) -> None:
    """Raise ``ValueError`` for a search for Inf over slices."""
    _refuse(
        model,
        "GradScaler",
        "would look for Inf in this rank's slices alone, and skip other steps than the ranks with the other slices",
        "train in bf16, or scale the loss by a constant and divide by it, model.scale_gradients(1 / scale)",
    )


def _refuse(model: DistributedDataParallel, what: str, consequence: str, remedy: str) -> None:
    if model.grids["dense"].leaves_ranks_out:
        params = ((entry.owned.name, entry.owned.param) for entry in model.bucket_params)
        refuse_slices(params, what, consequence, remedy)
