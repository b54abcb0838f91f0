"""Parameters whose gradient no rank of the wrapper has in whole: experts of other ranks, slices of tensor parallelism.

A norm over one rank's gradients would differ between ranks, and so would a search for Inf. So ``.grad`` of such models
shows each rank's part (``torch_grads/shown_grad.py``). Its norms are those over all ranks, and are refused for slices.
"""

from collections.abc import Iterable, Mapping

from ..buckets.bucket_params import BucketParam
from ..collectives.rank_grid import RankGrid
from ..plan.parallel_marks import is_slice

__all__ = ["record_own_ranks"]


def record_own_ranks(bucket_params: Iterable[BucketParam], grids: Mapping[str, RankGrid]) -> None:
    """Set ``all_ranks`` in the records of experts that not all ranks hold, and ``sliced`` in those of slices."""
    all_ranks = grids["dense"]
    for entry in bucket_params:
        if all_ranks.leaves_ranks_out and is_slice(entry.owned.param):
            entry.record.sliced = True
        if grids[entry.bucket.layout.grid_name].size < all_ranks.size:
            entry.record.all_ranks = all_ranks
