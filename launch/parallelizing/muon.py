"""Muon of a configuration: its groups, and the wrapper's option that keeps their matrices whole."""

import dataclasses

from torch import nn

from ...ddp import DistributedDataParallelConfig
from ...ddp.torch_grads.muon_groups import MuonGroups, muon_groups
from ..config.error import ConfigError
from ..config.optimizer import OptimizerConfig

__all__ = ["muon_of", "with_whole_matrices"]


def muon_of(module: nn.Module, settings: OptimizerConfig) -> MuonGroups | None:
    """The matrices of ``module`` for Muon; None where another optimizer is named.

    module  not wrapped yet; may be on meta

    Raises ``ConfigError`` for a fused matrix whose parts are not known, and for a pattern that matches no matrix.
    """
    if not settings.has_muon:
        return None
    try:
        return muon_groups(module, split=settings.muon_split, **settings.muon_options)
    except ValueError as error:
        raise ConfigError(f"optimizer.muon_split: {error}") from None


def with_whole_matrices(
    config: DistributedDataParallelConfig, muon: MuonGroups | None
) -> DistributedDataParallelConfig:
    """``config`` for these groups: where optimizer state is sharded, no border between shards cuts their matrices."""
    if muon is None or not config.use_distributed_optimizer or config.keep_params_whole:
        return config
    return dataclasses.replace(config, keep_matrices_whole=(*config.keep_matrices_whole, *muon.matrices))
