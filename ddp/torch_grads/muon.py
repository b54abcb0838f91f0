"""Muon with batched orthogonalisation, experts and fused matrices, which torch's class lacks."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...kernels.optimizer.orthogonal.elements import apply_update, update_momentum
from ...kernels.optimizer.orthogonal.flops import orthogonalize_flops
from ...kernels.optimizer.orthogonal.orthogonalize import orthogonalize
from ...kernels.optimizer.orthogonal.reference import COEFFICIENTS, Step

__all__ = ["Muon", "alike", "part_rows", "steps_of", "update_flops", "update_ratio", "whole_shape"]

_BATCH_NUMEL = 2**26
"""Most elements that are orthogonalised at once, one matrix at least: 10 bytes of memory for each beside the Gram
matrices."""


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are orthogonalised: all directions of a weight move equally far. For hidden layers.

    With ``G`` the gradient of a matrix, ``W`` the matrix [rows, columns] and ``M`` its ``momentum_buffer``::

        M = momentum M + (1 - momentum) G
        U = momentum M + (1 - momentum) G         under nesterov; else U = M
        W = W - lr weight_decay W
        W = W - lr s orthogonalize(U)

    The names, the defaults and the arithmetic are those of ``torch.optim.Muon``, but for this: matrices of one shape
    are orthogonalised together, in fp16 and nearer to the exact polynomial (on GPUs with Triton; in fp32 elsewhere);
    parameters [experts, rows, columns] are matrices each; there is no ``eps``, since ``2^k U`` has the result of ``U``.

    params           2 or 3 dims; vectors, embeddings and heads belong to another class
    lr, weight_decay decoupled, of at least 0
    momentum         in [0, 1)
    ns_coefficients  (a, b, c) of all steps; a sequence of such, one for each step; or the name of one:
                     "simple" (None), "polar_express", "deepseek"
    ns_steps         number of steps where ``ns_coefficients`` are one triple, else their own number
    adjust_lr_fn     s: None or "original", sqrt(max(1, rows / columns)); "match_rms_adamw", 0.2 sqrt(max(rows,
                     columns)); "spectral_unclamped", sqrt(rows / columns)
    split            parts of a matrix that are orthogonalised apart, such as query, key and value of one weight: their
                     numbers of rows, or the number of equal parts

    Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.
    """

    per_parameter = per_matrix = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Sequence[float] | Sequence[Sequence[float]] | None = None,
        ns_steps: int | None = None,
        adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] | None = None,
        *,
        split: int | Sequence[int] = 1,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "split": split,
        }
        _check(defaults)
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As after a load: groups of ``torch.optim.Muon`` have no ``split``."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("split", 1)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ``ValueError`` for parameters that are no matrices, or that ``split`` does not fit."""
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check_group(self, group: Mapping[str, Any]) -> None:
        _check(group)
        for param in group["params"]:
            shape = whole_shape(param)  # all ranks raise alike
            if len(shape) not in (2, 3) or param.is_complex():
                raise ValueError(
                    f"Muon updates matrices [rows, columns], or [experts, rows, columns]; got a parameter "
                    f"{list(shape)} of {param.dtype}: give it to another class, such as AdamW"
                )
            part_rows(group["split"], shape[-2])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None and param.numel()]
            for param in params:
                if "momentum_buffer" not in self.state[param]:
                    self.state[param]["momentum_buffer"] = torch.zeros_like(param.grad)
            if params:
                self._step(group, params)
        return loss

    def _step(self, group: Mapping[str, Any], params: list[Tensor]) -> None:
        places = [
            _Place(param, self.state[param]["momentum_buffer"], slice(first, end))
            for param in params
            for first, end in part_rows(group["split"], param.shape[-2])
        ]
        for indices in alike([place.of(place.buffer) for place in places]):
            batch = [places[index] for index in indices]
            parts = [place.of(place.param) for place in batch]
            counts = [len(part) for part in parts]
            updates = batch[0].buffer.new_empty(sum(counts), *parts[0].shape[1:])
            for place, update in zip(batch, updates.split(counts), strict=True):
                buffer, grad = place.of(place.buffer), place.of(place.param.grad)
                update_momentum(buffer, grad, update, group["momentum"], nesterov=group["nesterov"])
            orthogonal = orthogonalize(updates, steps_of(group))
            ratio = update_ratio(group["adjust_lr_fn"], *updates.shape[1:])
            for part, mine in zip(parts, orthogonal.split(counts), strict=True):
                apply_update(part, mine, group["lr"], group["weight_decay"], ratio)


class _Place(NamedTuple):
    """Some rows of a parameter's matrices."""

    param: Tensor
    buffer: Tensor
    rows: slice

    def of(self, tensor: Tensor | None) -> Tensor:
        """The rows of a tensor in the parameter's shape: [matrices, rows, columns]."""
        assert tensor is not None, "a gradient, as step has found"
        return (tensor if tensor.dim() == 3 else tensor[None])[:, self.rows]


def alike(matrices: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of tensors [matrices, rows, columns] that are orthogonalised together: matrices of one shape."""
    by_shape: dict[Any, list[int]] = {}
    for index, each in enumerate(matrices):
        by_shape.setdefault((each.shape[1:], each.dtype, each.device), []).append(index)
    for indices in by_shape.values():
        batch: list[int] = []
        numel = 0
        for index in indices:
            if batch and numel + matrices[index].numel() > _BATCH_NUMEL:
                yield batch
                batch, numel = [], 0
            batch.append(index)
            numel += matrices[index].numel()
        yield batch


def whole_shape(param: Any) -> torch.Size:
    """The shape of a parameter, or of that which ``fully_shard`` has cut: equal on all ranks."""
    shape: torch.Size = param.shard.shape if hasattr(param, "shard") else param.shape
    return shape


def update_ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """The factor of a matrix's learning rate: ``s`` of ``Muon``."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if adjust_lr_fn == "spectral_unclamped":
        return math.sqrt(rows / columns)
    return math.sqrt(max(1, rows / columns))


def steps_of(group: Mapping[str, Any]) -> tuple[Step, ...]:
    """The iterations of one update, with the options of a group, which may lack those that have defaults."""
    given, count = group.get("ns_coefficients"), group.get("ns_steps")
    if given is None or isinstance(given, str):
        named = COEFFICIENTS[given or "simple"]
        return named if given else (named[0],) * (5 if count is None else count)
    if len(given) == 3 and not isinstance(given[0], Sequence):
        return (Step(*given),) * (5 if count is None else count)
    return tuple(Step(*each) for each in given)


def update_flops(shape: Sequence[int], group: Mapping[str, Any]) -> float:
    """FLOPs of the iterations of one update of a parameter, with the options of its group."""
    parts = part_rows(group["split"], shape[-2])
    steps = len(steps_of(group))
    return math.prod(shape[:-2]) * sum(orthogonalize_flops(end - first, shape[-1], steps) for first, end in parts)


def part_rows(split: int | Sequence[int], rows: int) -> list[tuple[int, int]]:
    """First row and end of each part. Raises ``ValueError`` where ``split`` does not cut ``rows``."""
    counts = [rows // max(split, 1)] * split if isinstance(split, int) else list(split)
    if sum(counts) != rows or not all(count > 0 for count in counts):
        raise ValueError(f"split={split!r} does not cut {rows} rows into parts: give their numbers of rows")
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [(end - count, end) for count, end in zip(counts, ends, strict=True)]


def _check(group: Mapping[str, Any]) -> None:
    if not group["lr"] >= 0 or not group["weight_decay"] >= 0:
        raise ValueError(f"Muon needs lr and weight_decay of at least 0, got {group['lr']} and {group['weight_decay']}")
    if not 0 <= group["momentum"] < 1:
        raise ValueError(f"Muon needs a momentum in [0, 1), got {group['momentum']}")
    known = (None, "original", "match_rms_adamw", "spectral_unclamped")
    if group["adjust_lr_fn"] not in known:
        raise ValueError(f"adjust_lr_fn is one of {known}, got {group['adjust_lr_fn']!r}")
    name = group["ns_coefficients"]
    if isinstance(name, str) and name not in COEFFICIENTS:
        raise ValueError(f"ns_coefficients has no set '{name}': one of {', '.join(COEFFICIENTS)}, or (a, b, c)")
    try:
        steps = steps_of(group)
    except TypeError:
        steps = ()
    if not steps or (group["ns_steps"] is not None and group["ns_steps"] != len(steps)):
        raise ValueError(
            f"ns_coefficients are (a, b, c), such triples for each step, or a name; ns_steps is their number; got "
            f"{name!r} and {group['ns_steps']!r}"
        )
