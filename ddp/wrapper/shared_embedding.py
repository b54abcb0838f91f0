"""A parameter of which pipeline stages hold copies: an embedding that is the head's weight too.

Each stage has a part of its gradient. The copies begin equal, get the sum of the parts, and so stay equal::

    first stage, data-parallel ranks 0 1     average of their parts  --+
                                                                      sum
    last stage, data-parallel ranks 6 7      average of their parts  --+     rank 0 with 6, and 1 with 7

The parameter lies in a bucket of its own (``ParamSpec.own_bucket``), so that its shards are cut alike on all stages.
The sum comes last in an iteration: the last stage completes its part long before the first one does.
"""

from collections.abc import Sequence

import torch.distributed as dist

from ..buckets.bucket import BucketParam
from ..collectives.failure_report import FailureReporter
from ..collectives.rank_grid import RankGrid, group_size
from ..plan.owned_params import ModelTensor
from .setup_checks import broadcast_tensors, compare_between_ranks

__all__ = ["SharedEmbedding"]


class SharedEmbedding:
    """This rank's copy.

    bucket_params  of the wrapper, of which one has the mark
    group          the ranks that hold a copy each, one of each stage

    Raises ``ValueError`` unless one parameter has the mark, and where the copies do not fit each other.
    """

    def __init__(
        self, bucket_params: Sequence[BucketParam], group: dist.ProcessGroup, failures: FailureReporter
    ) -> None:
        marked = [entry for entry in bucket_params if entry.slot.spec.own_bucket]
        if len(marked) != 1:
            raise ValueError(
                f"embedding_group is for one trained parameter with the mark shared_embedding = True, and "
                f"{len(marked)} have it: leave the group out on stages without a copy"
            )
        (entry,) = marked
        self.bucket, self._param, self._failures = entry.bucket, entry.owned, failures
        self._ranks, self.num_copies = RankGrid(group, None, group), group_size(group)
        spec, layout = entry.slot.spec, entry.bucket.layout
        own = f"{list(spec.shape)} {spec.param_dtype} with {spec.grad_dtype} gradients in {layout.shard_degree} shards"
        compare_between_ranks({"shared embedding": [own]}, self._ranks.axes, failures)

    def broadcast(self) -> None:
        """Copy the first stage's values to the others."""
        copy = ModelTensor(self._param.name, self._param.param, "copies", is_buffer=False)
        broadcast_tensors([copy], {"copies": self._ranks}, self._failures)

    def sum(self) -> None:
        """Add the stages' reduced gradients."""
        with self._failures.watch("the sum of a shared embedding's gradients over pipeline stages"):
            self._ranks.sum(self.bucket.reduced)
