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
from ...kernels.optimizer.orthogonal.elements import apply_update, update_momentum
from ...kernels.optimizer.orthogonal.orthogonalize import dtype_of_results, orthogonalize
from ..tensors.parameter import ShardedParameter, flat_of
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


_Moved = tuple[Tensor, Tensor, Mapping[str, Any]]
"""Flat gradient and momentum of a parameter on this rank, and its group."""


class _Held(NamedTuple):
    """This rank's elements of one part."""

    part: _Part
    here: slice
    """Their place in the parameter's elements on this rank."""
    sent: slice
    """Their place in what goes to the owner, and in what comes back."""


class _Piece(NamedTuple):
    """One rank's elements of a part that this rank owns."""

    place: int
    """The part's, among those of this rank."""
    elements: slice
    """Counted in the part."""
    sent: slice
    """Their place in what comes from the rank, and in what goes back."""


class _Bucket:
    """The parts in one bucket, each with its owner, and what goes to owners and back: counted once, for all steps.

    parts   in one order on all ranks
    owners  rank in the instance of each part's owner
    """

    def __init__(self, parts: Sequence[_Part], owners: Sequence[int]) -> None:
        grid = parts[0].param.shard.grid
        here, ranks = grid.inner_rank, range(grid.inner_size)
        of_owner = [[part for part, owner in zip(parts, owners, strict=True) if owner == rank] for rank in ranks]
        travels = any(
            part.on_rank(owner).numel != part.elements.numel for part, owner in zip(parts, owners, strict=True)
        )
        self.parts = parts
        self.groups = {part.param: part.group for part in parts}
        """Each parameter, with its group."""
        self.mine = of_owner[here]
        """The parts that this rank orthogonalises."""
        self.group = grid.inner if travels else None
        """Ranks between which elements travel; None: nothing does."""
        self._held: list[list[_Held]] = []
        """By owner."""
        self._to_owners: list[int] = []
        """Number of elements."""
        for owned in of_owner:
            held, end = [], 0
            for part in owned:
                own = part.on_rank(here).counted_from(part.param.shard.start)
                if own.numel:
                    held.append(_Held(part, slice(*own), slice(end, end + own.numel)))
                    end += own.numel
            self._held.append(held)
            self._to_owners.append(end)
        self._pieces: list[list[_Piece]] = []
        """By rank."""
        self._from_ranks: list[int] = []
        """Number of elements."""
        for rank in ranks:
            pieces, end = [], 0
            for place, part in enumerate(self.mine):
                theirs = part.on_rank(rank).counted_from(part.elements.start)
                if theirs.numel:
                    pieces.append(_Piece(place, slice(*theirs), slice(end, end + theirs.numel)))
                    end += theirs.numel
            self._pieces.append(pieces)
            self._from_ranks.append(end)

    def fetch(self, moved: Mapping[ShardedParameter, _Moved]) -> "_Travel":
        """Update momentum of this rank's elements, and send U of these to the owners."""
        updates = moved[self.parts[0].param][0].new_empty(sum(self._to_owners))
        for held, sent in zip(self._held, updates.split(self._to_owners), strict=True):
            for each in held:
                grad, buffer, group = moved[each.part.param]
                of_grad, of_buffer = grad[each.here], buffer[each.here]
                update_momentum(of_buffer, of_grad, sent[each.sent], group["momentum"], nesterov=group["nesterov"])
        return _Travel(self.group, updates, self._to_owners, self._from_ranks)

    def whole(self, travel: "_Travel") -> list[Tensor]:
        """Wait; returns U [1, rows, columns] of each of ``mine``."""
        found: list[list[Tensor]] = [[] for _ in self.mine]
        for got, pieces in zip(travel.wait(), self._pieces, strict=True):
            for piece in pieces:
                found[piece.place].append(got[piece.sent])
        return [_joined(each).view(1, part.rows, part.columns) for each, part in zip(found, self.mine, strict=True)]

    def give_back(self, results: Sequence[Tensor], like: Tensor) -> "_Travel":
        """Send O of each of ``mine`` to the ranks that have its elements.

        like  no elements, of the dtype and device of results, of which a rank may have none
        """
        flat = [each.reshape(-1) for each in results]
        pieces = [flat[place][elements] for pieces in self._pieces for place, elements, _ in pieces]
        return _Travel(self.group, _joined(pieces) if pieces else like, self._from_ranks, self._to_owners)

    def arrived(self, travel: "_Travel") -> Iterator[tuple[_Part, slice, Tensor]]:
        """Wait; yields each part, the place in the parameter's elements here, and O of these elements."""
        for got, held in zip(travel.wait(), self._held, strict=True):
            yield from ((each.part, each.here, got[each.sent]) for each in held)


class _Travel:
    """An all-to-all under way.

    flat            the elements, one rank's after the other's
    sent, received  their number, to and from each rank
    """

    def __init__(self, group: dist.ProcessGroup | None, flat: Tensor, sent: list[int], received: list[int]) -> None:
        self._out = self._kept = flat
        self._received = received
        self._handle = None
        if group is not None:
            self._out = self._kept.new_empty(sum(received))
            self._handle = dist.all_to_all_single(self._out, self._kept, received, sent, group=group, async_op=True)

    def wait(self) -> tuple[Tensor, ...]:
        """Wait; returns what came from each rank, flat."""
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

    Raises ``ValueError`` for other parameters, for slices of tensor parallelism, and where optimizer state is sharded
    across instances.
    """

    elementwise = True  # what a rank keeps; a step fetches the rest
    optimizer_class = Muon
    """The class that checkpoints name."""

    def __init__(self, params: Iterable[Any], *args: Any, **options: Any) -> None:
        self._buckets: list[_Bucket] = []
        self._planned: list[Any] = []
        super().__init__(params, *args, **options)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        for param in group["params"]:
            bucket = bucket_of(param)
            if not isinstance(param, ShardedParameter) or bucket is None:
                raise ValueError("ShardedMuon updates parameters of fully_shard; maingrad.ddp.Muon updates plain ones")
            if param.shard.is_cut:
                raise ValueError(
                    f"'{param.shard.name}' is a slice of tensor parallelism, and no matrix that Muon could "
                    f"orthogonalise: update it by another class, in a group of maingrad.make_optimizer"
                )
            if bucket.shard.device != bucket.device:
                raise ValueError(
                    f"'{param.shard.name}' lies on the host, and ShardedMuon steps on the device: leave "
                    f"offload_to_cpu out"
                )
            if param.dtype is not torch.float32:
                raise ValueError(
                    f"'{param.shard.name}' is {param.dtype}: ShardedMuon updates fp32 shards; shard the module in "
                    f"fp32, with MixedPrecisionPolicy(param_dtype={param.dtype}) to compute as before"
                )
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
            buckets = self._plan()
            coming = [self._fetch(bucket) for bucket in buckets[:1]]
            leaving: list[tuple[_Bucket, _Travel]] = []
            for place, bucket in enumerate(buckets):
                coming += [self._fetch(following) for following in buckets[place + 1 : place + 2]]
                results = self._orthogonalize(bucket.mine, bucket.whole(coming.pop(0)))
                like = flat_of(bucket.parts[0].param)
                leaving.append((bucket, bucket.give_back(results, like.new_empty(0, dtype=dtype_of_results(like)))))
                if place:
                    self._apply(*leaving.pop(0))
            for last in leaving:
                self._apply(*last)
        return loss

    def _plan(self) -> list[_Bucket]:
        """The buckets of this step, made anew where other parameters have gradients, or groups have changed."""
        stepping = [
            (index, param, group["split"])
            for index, group in enumerate(self.param_groups)
            for param in group["params"]
            if param.grad is not None
        ]
        key = [(index, id(param), str(split)) for index, param, split in stepping]
        if key != self._planned:
            self._buckets, self._planned = _deal(stepping), key
        return self._buckets

    def _fetch(self, bucket: _Bucket) -> _Travel:
        """Update momentum; then U of the bucket is under way."""
        moved: dict[ShardedParameter, _Moved] = {}
        for param, index in bucket.groups.items():
            assert param.grad is not None, "as _plan has found"
            grad, state = flat_of(param.grad), self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(grad).view(param.shape)
            moved[param] = grad, state["momentum_buffer"].view(-1), self.param_groups[index]
        return bucket.fetch(moved)

    def _orthogonalize(self, parts: Sequence[_Part], whole: Sequence[Tensor]) -> list[Tensor]:
        """O of each part: U of one shape and one group is orthogonalised together."""
        results: dict[int, Tensor] = {}
        for index, group in enumerate(self.param_groups):
            chosen = [place for place, part in enumerate(parts) if part.group == index]
            for batch in alike([whole[place] for place in chosen]):
                places = [chosen[each] for each in batch]
                found = orthogonalize(_joined([whole[place] for place in places]), steps_of(group))
                results |= zip(places, found, strict=True)
        return [results[place] for place in range(len(parts))]

    def _apply(self, bucket: _Bucket, travel: _Travel) -> None:
        """Decay this rank's weights, and subtract its elements of O."""
        for part, here, orthogonal in bucket.arrived(travel):
            group = self.param_groups[part.group]
            ratio = update_ratio(group["adjust_lr_fn"], part.rows, part.columns)
            apply_update(flat_of(part.param)[here], orthogonal, group["lr"], group["weight_decay"], ratio)


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    """One tensor of several; a single one as it is."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _deal(stepping: Sequence[tuple[int, ShardedParameter, Any]]) -> list[_Bucket]:
    """Give each part an owner: the rank that has all of it; of cut ones, from the costliest down, the least loaded."""
    parts = [part for group, param, split in stepping for part in _parts_of(group, param, split)]
    costs = [update_cost((part.rows, part.columns)) for part in parts]
    grids = [part.param.shard.grid for part in parts]  # of experts another one
    loads = {grid.inner: [0.0] * grid.inner_size for grid in grids}
    owners = [0] * len(parts)
    cut = []
    for place, part in enumerate(parts):
        load = loads[grids[place].inner]
        having = [rank for rank in range(len(load)) if part.on_rank(rank).numel]
        if len(having) == 1:
            owners[place] = having[0]
            load[having[0]] += costs[place]
        else:
            cut.append(place)
    for place in sorted(cut, key=lambda place: -costs[place]):
        load = loads[grids[place].inner]
        owners[place] = load.index(min(load))
        load[owners[place]] += costs[place]
    buckets: dict[Any, list[int]] = {}
    for place, part in enumerate(parts):
        buckets.setdefault(bucket_of(part.param), []).append(place)
    return [_Bucket([parts[p] for p in places], [owners[p] for p in places]) for places in buckets.values()]


def _parts_of(group: int, param: ShardedParameter, split: Any) -> Iterator[_Part]:
    """Cut a parameter into its matrices, and these by ``split``."""
    *stack, rows, columns = param.shard.shape
    for matrix in range(math.prod(stack) if rows * columns else 0):
        for first, end in part_rows(split, rows):
            start = matrix * rows * columns + first * columns
            yield _Part(group, param, Range(start, start + (end - first) * columns), end - first, columns)
