"""``ShardedMuon``: Muon over parameters of ``fully_shard``, whose shards cut matrices anywhere.

Momentum is updated where its elements are. Each matrix has an owner, which orthogonalises it::

    rank 0    momentum of its elements  -- U, fp32 -->  owner: whole U, O = orthogonalize(U)  -- O -->  W -= lr s O
    rank 1    momentum of its elements  -- U, fp32 -->                                        -- O -->  W -= lr s O

U goes as it is, so that weights have the bits of the unsharded optimizer. O comes back in the dtype that
``orthogonalize`` returns, fp16 on GPUs: 6 bytes for an element of a matrix that is cut. A matrix that lies on one rank
is this rank's, and nothing travels (``shard_atoms="whole"``, and most experts of a stack). Cut ones go to the ranks
with the least work. While one bucket's matrices are orthogonalised, U of the next bucket is under way, and O of the one
before.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...ddp.plan.cut import Range
from ...ddp.plan.dealing import update_cost
from ...ddp.torch_grads.muon import Muon, alike, part_rows, steps_of, update_ratio
from ...ddp.torch_internals import DisableTorchFunctionSubclass
from ...kernels.optimizer.orthogonal.orthogonalize import dtype_of_results, orthogonalize
from ..tensors.parameter import ShardedParameter
from .held_state import flat_of
from .optimizer_watch import bucket_of

__all__ = ["ShardedMuon"]


class _Part(NamedTuple):
    """One matrix of a parameter, or one part of it by ``split``: consecutive elements."""

    group: int
    param: ShardedParameter
    elements: Range
    """Counted in the parameter."""
    rows: int
    columns: int

    def on_rank(self, rank: int) -> Range:
        """The elements that a rank of the instance has, counted in the parameter."""
        shard = self.param.shard
        size = shard.bucket_numel // shard.grid.inner_size
        return self.elements.intersect(Range(rank * size, (rank + 1) * size).counted_from(shard.place))

    def cut(self, flat: Tensor) -> Tensor:
        """This rank's elements of the part, out of this rank's [numel] elements of the parameter."""
        held = self.on_rank(self.param.shard.grid.inner_rank).counted_from(self.param.shard.start)
        return flat[held.start : held.end]


class _Bucket:
    """The parts in one bucket, each with its owner, and their ways there and back.

    parts   in one order on all ranks
    owners  of each part
    """

    def __init__(self, parts: Sequence[_Part], owners: Sequence[int]) -> None:
        grid = parts[0].param.shard.grid
        self.parts = parts
        self._group, self._rank = grid.inner, grid.inner_rank
        of_owner = [
            [p for p, each in zip(parts, owners, strict=True) if each == rank] for rank in range(grid.inner_size)
        ]
        self._of_owner = of_owner
        self.mine = of_owner[self._rank]
        """The parts that this rank orthogonalises."""
        self._of_rank = [[part.on_rank(rank).numel for part in self.mine] for rank in range(grid.inner_size)]
        """For each rank, its elements of each of ``mine``."""
        self._of_here = [[part.on_rank(self._rank).numel for part in owned] for owned in of_owner]
        """For each owner, this rank's elements of each of the owner's parts."""

    def fetch(self, updates: Mapping[ShardedParameter, Tensor]) -> "_Travel":
        """Send this rank's elements of U to the owners."""
        pieces = [part.cut(updates[part.param]) for owned in self._of_owner for part in owned]
        return _Travel(self._group, pieces, list(map(sum, self._of_here)), list(map(sum, self._of_rank)))

    def whole(self, travel: "_Travel") -> list[Tensor]:
        """U [1, rows, columns] of each of ``mine``."""
        of_ranks = [list(got.split(counts)) for got, counts in zip(travel.wait(), self._of_rank, strict=True)]
        return [
            torch.cat([pieces[place] for pieces in of_ranks]).view(1, part.rows, part.columns)
            for place, part in enumerate(self.mine)
        ]

    def give_back(self, results: Sequence[Tensor], dtype: torch.dtype) -> "_Travel":
        """Send O of each of ``mine`` to the ranks that have its elements."""
        ranges = [
            [part.on_rank(rank).counted_from(part.elements.start) for part in self.mine]
            for rank in range(len(self._of_rank))
        ]
        pieces = [
            each.reshape(-1)[part.start : part.end]
            for of_rank in ranges
            for each, part in zip(results, of_rank, strict=True)
        ] or [torch.empty(0, dtype=dtype, device=self.parts[0].param.device)]
        return _Travel(self._group, pieces, list(map(sum, self._of_rank)), list(map(sum, self._of_here)))

    def arrived(self, travel: "_Travel") -> Iterator[tuple[_Part, Tensor]]:
        """This rank's elements of O of each part."""
        for owned, got, counts in zip(self._of_owner, travel.wait(), self._of_here, strict=True):
            yield from zip(owned, got.split(counts), strict=True)


class _Travel:
    """An all-to-all under way.

    sent, received  elements to and from each rank
    """

    def __init__(
        self, group: dist.ProcessGroup | None, pieces: Sequence[Tensor], sent: list[int], received: list[int]
    ) -> None:
        self._out = self._kept = torch.cat(list(pieces))
        self._received = received
        self._handle = None
        if group is not None and group.size() > 1:
            self._out = self._kept.new_empty(sum(received))
            self._handle = dist.all_to_all_single(self._out, self._kept, received, sent, group=group, async_op=True)

    def wait(self) -> tuple[Tensor, ...]:
        """What came from each rank."""
        if self._handle is not None:
            self._handle.wait()
        received: tuple[Tensor, ...] = self._out.split(self._received)
        return received


class ShardedMuon(Muon):
    """``maingrad.ddp.Muon`` over sharded parameters; the state of a rank is its elements of ``momentum_buffer``.

    Owners of matrices follow from shapes and shards alone. A step is collective over each instance. Weights have the
    bits of ``Muon`` over whole parameters where gradients have.

    params   parameters of ``fully_shard``, cut anywhere, each with a gradient on all ranks or on none
    options  of ``Muon``

    Raises ``ValueError`` for other parameters, and where optimizer state is sharded across instances.
    """

    elementwise = True  # what a rank keeps; a step fetches the rest
    optimizer_class = Muon
    """The class that checkpoints name."""

    def __init__(self, params: Iterable[Any], *args: Any, **options: Any) -> None:
        self._buckets: list[_Bucket] = []
        self._planned: list[Any] = []
        super().__init__(params, *args, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``Muon``'s."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            bucket = bucket_of(param)
            if not isinstance(param, ShardedParameter) or bucket is None:
                raise ValueError("ShardedMuon updates parameters of fully_shard; maingrad.ddp.Muon updates plain ones")
            if bucket.shard.device != bucket.device:
                raise ValueError(
                    f"'{param.shard.name}' lies on the host, and ShardedMuon steps on the device: leave "
                    f"offload_to_cpu out"
                )
            if param.dtype is not torch.float32:
                raise ValueError(f"'{param.shard.name}' is {param.dtype}: ShardedMuon updates fp32 shards")
            if param.shard.num_replicas != param.shard.grid.outer_size:
                raise ValueError(
                    f"'{param.shard.name}': ShardedMuon sends momentum inside an instance, and optimizer state is "
                    f'sharded across instances: take other placements than "hsdp_zero1"'
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update momentum and parameters that have gradients. Collective."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        with DisableTorchFunctionSubclass():
            updates = self._update_momentum()
            buckets = self._plan(updates)
            coming = [bucket.fetch(updates) for bucket in buckets[:1]]
            leaving: list[tuple[_Bucket, _Travel]] = []
            for place, bucket in enumerate(buckets):
                coming += [other.fetch(updates) for other in buckets[place + 1 : place + 2]]
                results = self._orthogonalize(bucket.mine, bucket.whole(coming.pop(0)))
                dtype = dtype_of_results(updates[bucket.parts[0].param])
                leaving.append((bucket, bucket.give_back(results, dtype)))
                if place:
                    self._apply(*leaving.pop(0))
            for last in leaving:
                self._apply(*last)
        return loss

    def _update_momentum(self) -> dict[ShardedParameter, Tensor]:
        """What is orthogonalised: this rank's elements of each parameter with a gradient."""
        updates: dict[ShardedParameter, Tensor] = {}
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = flat_of(param.grad)
                state = self.state[param]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(grad).view(param.shape)
                buffer = state["momentum_buffer"].view(-1).lerp_(grad, 1 - group["momentum"])
                updates[param] = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
                flat_of(param).mul_(1 - group["lr"] * group["weight_decay"])
        return updates

    def _plan(self, updates: Mapping[ShardedParameter, Tensor]) -> list[_Bucket]:
        """By bucket, made anew where other parameters have gradients, or groups have changed."""
        stepping = [
            (index, param, group["split"])
            for index, group in enumerate(self.param_groups)
            for param in group["params"]
            if param in updates
        ]
        key = [(index, id(param), str(split)) for index, param, split in stepping]
        if key != self._planned:
            self._buckets, self._planned = _deal(stepping), key
        return self._buckets

    def _orthogonalize(self, parts: Sequence[_Part], whole: Sequence[Tensor]) -> list[Tensor]:
        results: dict[int, Tensor] = {}
        for index, group in enumerate(self.param_groups):
            chosen = [place for place, part in enumerate(parts) if part.group == index]
            for batch in alike([whole[place] for place in chosen]):
                places = [chosen[each] for each in batch]
                found = orthogonalize(torch.cat([whole[place] for place in places]), steps_of(group))
                results |= zip(places, found, strict=True)
        return [results[place] for place in range(len(parts))]

    def _apply(self, bucket: _Bucket, travel: _Travel) -> None:
        for part, piece in bucket.arrived(travel):
            group, target = self.param_groups[part.group], part.cut(flat_of(part.param))
            ratio, lr = update_ratio(group["adjust_lr_fn"], part.rows, part.columns), group["lr"]
            if isinstance(lr, Tensor):
                target.addcmul_(piece.to(target.dtype), lr.to(target.device, target.dtype), value=-ratio)
            else:
                target.add_(piece, alpha=-lr * ratio)


def _deal(stepping: Sequence[tuple[int, ShardedParameter, Any]]) -> list[_Bucket]:
    """Give each part an owner: the rank that has all of it; of cut ones, from the costliest down, the least loaded."""
    parts = [part for group, param, split in stepping for part in _parts_of(group, param, split)]
    grids = {part.param.shard.grid[:2]: part.param.shard.grid for part in parts}  # of experts another one
    loads = {key: [0.0] * grid.inner_size for key, grid in grids.items()}
    owners = [0] * len(parts)
    cut = []
    for place, part in enumerate(parts):
        mine = loads[part.param.shard.grid[:2]]
        having = [rank for rank in range(len(mine)) if part.on_rank(rank).numel]
        if len(having) == 1:
            owners[place] = having[0]
            mine[having[0]] += update_cost((part.rows, part.columns))
        else:
            cut.append(place)
    for place in sorted(cut, key=lambda place: -update_cost((parts[place].rows, parts[place].columns))):
        mine = loads[parts[place].param.shard.grid[:2]]
        owners[place] = mine.index(min(mine))
        mine[owners[place]] += update_cost((parts[place].rows, parts[place].columns))
    buckets: dict[Any, list[int]] = {}
    for place, part in enumerate(parts):
        buckets.setdefault(bucket_of(part.param), []).append(place)
    return [_Bucket([parts[p] for p in places], [owners[p] for p in places]) for places in buckets.values()]


def _parts_of(group: int, param: ShardedParameter, split: Any) -> Iterator[_Part]:
    *stack, rows, columns = param.shard.shape
    for matrix in range(math.prod(stack) if rows * columns else 0):
        for first, end in part_rows(split, rows):
            start = matrix * rows * columns + first * columns
            yield _Part(group, param, Range(start, start + (end - first) * columns), end - first, columns)
