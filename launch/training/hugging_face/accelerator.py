"""accelerate's ``Accelerator``, which leaves wrapping and reductions to maingrad."""

from contextlib import AbstractContextManager
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from ....ddp import DistributedDataParallel
from ....fsdp import FSDPModule
from .wrapping import whole_weights

__all__ = ["ModelLeavingAccelerator"]


class ModelLeavingAccelerator(accelerate.Accelerator):  # type: ignore[misc]  # accelerate has no annotations
    """Data loaders, devices, logging and autocast are accelerate's; wrappers and ``no_sync`` are maingrad's."""

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Put autocast around a plain model's forward if accelerate's mixed precision asks for it; wrap nothing."""
        if isinstance(model, DistributedDataParallel | FSDPModule):
            if model not in self._models:
                self._models.append(model)
            return model
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)  # type: ignore[no-any-return]

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Let accelerate step the optimizer, and leave its state: moving it would go through this rank's state dict."""
        if isinstance(optimizer, AcceleratedOptimizer):
            self._optimizers.append(optimizer)
            return optimizer
        return super().prepare_optimizer(optimizer, device_placement=False)

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The module in the wrapper. transformers asks for its class, for labels that are shifted."""
        if isinstance(model, DistributedDataParallel):
            model = model.module
        return super().unwrap_model(model, *args, **kwargs)  # type: ignore[no-any-return]

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """The model's own, also in a world of one. The Trainer enters it for a step's microbatches but the last."""
        return model.no_sync()  # type: ignore[operator,no-any-return]

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The state dict with whole tensors, on the CPU. Collective where the model is sharded; alike on all ranks."""
        return whole_weights(self.unwrap_model(model) if unwrap else model, keep=True)
