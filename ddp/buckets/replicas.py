"""Keeps replicas of parameters equal: finds writes in a forward, and compares parameters between ranks on demand.

Ranks begin with equal parameters and apply equal updates, so their replicas stay equal. A forward that writes a
parameter (``nn.Embedding(max_norm=...)``, a codebook, ActNorm's first batch) writes what follows from the rank's own
data, and replicas part. torch counts the in-place writes of each tensor in ``_version``, except writes through
``.data`` and under ``torch.inference_mode()``.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..collectives.failure_report import FailureReporter, gather
from ..collectives.rank_grid import RankGrid
from ..config import DistributedDataParallelConfig
from ..plan.owned_params import find_owned_params, grid_name_of
from ..torch_internals import DisableTorchFunctionSubclass

__all__ = ["Replicas", "bits_of", "check_equal", "find_parted", "written_from_local_data"]


class Replicas:
    """The replicas of a wrapped model: finds writes in its forwards, and compares parameters in some iterations.

    module    the wrapped model
    grids     by name: the ranks that hold the same values
    failures  reports a comparison that fails
    config    ``forward_writes`` and ``check_replicas_every``
    tensor_ranks  the tensor-parallel ranks, of which each has slices of its own

    Buffers are neither watched nor compared: statistics of BatchNorm are each rank's own.
    """

    def __init__(
        self,
        module: nn.Module,
        grids: Mapping[str, RankGrid],
        failures: FailureReporter,
        config: DistributedDataParallelConfig,
        tensor_ranks: RankGrid | None,
    ) -> None:
        self._module = module
        self._grids = grids
        self._tensor_ranks = tensor_ranks
        self._failures = failures
        self._every = config.check_replicas_every
        self._num_iterations = 0
        watched = [entry for entry in find_owned_params(module, tensor_ranks) if grids[entry.grid_name].size > 1]
        if config.forward_writes == "alike":
            watched = []
        trained = [entry for entry in watched if entry.param.requires_grad]
        frozen = [entry for entry in watched if not entry.param.requires_grad]
        self._names = [entry.name for entry in (*trained, *frozen)]
        self._trained = [entry.param for entry in trained]  # the wrapper refuses other objects in their places
        self._frozen = [(owner._parameters, local) for owner, local in (entry.owners[0] for entry in frozen)]

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward. Raises ``RuntimeError`` if it has written to a parameter that has replicas."""
        if not self._names:
            return module(*args, **kwargs)
        before, iteration = self._look(), self._num_iterations
        outputs = module(*args, **kwargs)
        if iteration == self._num_iterations:  # otherwise the forward holds a whole iteration, with its update
            self._check(before)
        return outputs

    @torch.compiler.disable
    def _look(self) -> list[object]:
        """The present state of all watched parameters, which a write changes. Takes about 0.05 us a parameter."""
        with DisableTorchFunctionSubclass():  # no value is read, so that no read waits for a gather
            state: list[object] = [param._version for param in self._trained]
            for parameters, local in self._frozen:
                param = parameters.get(local)
                state.append((id(param), None if param is None else param._version))
        return state

    @torch.compiler.disable
    def _check(self, before: list[object]) -> None:
        now = self._look()
        if now != before:
            name = next(name for name, old, new in zip(self._names, before, now, strict=True) if old != new)
            raise written_from_local_data(name, 'DistributedDataParallelConfig(forward_writes="alike")')

    def end_iteration(self) -> None:
        """Call once in each iteration on all ranks, before the update: compares parameters if it is their turn.

        Raises ``RuntimeError`` on all ranks if two ranks' bits of a parameter differ.
        """
        due = self._every is not None and self._num_iterations % self._every == 0
        self._num_iterations += 1
        if due:
            for grid in {id(grid): grid for grid in self._grids.values()}.values():
                params = [(each, grid_name_of(each[1], self._tensor_ranks)) for each in self._module.named_parameters()]
                own = [each for each, grid_name in params if self._grids[grid_name] is grid]
                check_equal(own, grid.axes, self._failures)


def written_from_local_data(name: str, declaration: str) -> RuntimeError:
    """The error for a write in a forward, if the program has not declared that ranks write alike.

    declaration  the call that declares it
    """
    return RuntimeError(
        f"parameter '{name}' was written in the forward (max_norm, a codebook, a first batch's statistics, clamp_): "
        f"each rank writes what follows from its own data, and replicas part. If all ranks write the same values, "
        f"because these follow from weights alone or are reduced over ranks first, declare it by {declaration}; "
        f"otherwise write between iterations, on all ranks alike"
    )


@torch.no_grad()
def check_equal(
    tensors: Iterable[tuple[str, Tensor]], axes: Iterable[dist.ProcessGroup], failures: FailureReporter
) -> None:
    """Raise ``RuntimeError`` on all ranks of ``axes`` unless each tensor has the same bits on all of them. Collective.

    tensors  by name, in the same order on all ranks
    """
    parted = find_parted(tensors, axes, failures)
    if not parted:
        return
    name, bits = next(iter(parted.items()))
    first = next(iter(bits))
    others = ", ".join(str(rank) for rank, theirs in bits.items() if theirs != bits[first])
    more = f", and so have {len(parted) - 1} other parameters" if len(parted) > 1 else ""
    raise RuntimeError(
        f"replicas have parted: parameter '{name}' has other values on rank {others} than on rank {first}{more}. "
        f"Something has changed it on each rank by itself (a write from local data, a write through .data, an update "
        f"that ranks compute differently): change parameters on all ranks alike"
    )


def find_parted(
    tensors: Iterable[tuple[str, Tensor]], axes: Iterable[dist.ProcessGroup], failures: FailureReporter
) -> dict[str, dict[int, int]]:
    """The tensors whose bits differ between ranks, by name: each rank's checksum. All ranks get the same. Collective.

    tensors  by name, in the same order on all ranks
    """
    held, axes = list(tensors), list(axes)
    if not (axes and held):
        return {}
    mine = bits_of([tensor for _, tensor in held])
    what = "the comparison of values between ranks"
    if len(set(gather(hash(tuple(mine)), axes, failures, what).values())) == 1:
        return {}
    everyone = gather(mine, axes, failures, what)
    found = {name: {rank: bits[index] for rank, bits in everyone.items()} for index, (name, _) in enumerate(held)}
    return {name: bits for name, bits in found.items() if len(set(bits.values())) > 1}


@torch.no_grad()
def bits_of(tensors: Sequence[Tensor]) -> list[int]:
    """A checksum of each tensor's bits, the place of each element included. The host waits for the device."""
    if not tensors:
        return []
    sums = [_checksum(tensor.detach()) for tensor in tensors]
    return torch.stack(sums).tolist()


_ROW = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _checksum(values: Tensor) -> Tensor:
    """0-dim int64: the sum of all elements' bits, each times the number of its row plus that of its column."""
    flat = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    whole = bits.numel() // _ROW * _ROW
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in (bits[:whole].view(-1, _ROW), bits[whole:].view(1, -1)):
        for dim in (0, 1):
            sums = part.sum(dim, dtype=torch.int64)
            total = total + (sums * (torch.arange(sums.numel(), device=bits.device) * 2 + 1)).sum()
    return total
