"""The wrapper's option that keeps matrices whole for Muon."""

import dataclasses

from ...ddp import DistributedDataParallelConfig
from ...ddp.torch_grads.muon_groups import MuonGroups

__all__ = ["with_whole_matrices"]


def with_whole_matrices(config: DistributedDataParallelConfig, muon: MuonGroups) -> DistributedDataParallelConfig:
    """``config`` for these groups: where optimizer state is sharded, no border between shards cuts their matrices."""
    if not config.use_distributed_optimizer or config.keep_params_whole:
        return config
    return dataclasses.replace(config, keep_matrices_whole=(*config.keep_matrices_whole, *muon.matrices))
