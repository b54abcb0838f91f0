"""Weight gradients of captured backwards: what replays leave in ``main_grad`` is what eager backwards do."""

import torch
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel
from maingrad.te_integration import Linear, make_graphed_callables


class Twice(nn.Module):
    """One product, run twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Linear(4, 4, bias=False, fuse_wgrad_accumulation=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


def test_a_weight_is_overwritten_once_where_a_layer_runs_it_twice() -> None:
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        layer = Twice()
        ddp = DistributedDataParallel(layer)
        run = make_graphed_callables([layer], [(x,)], order=[1, -1])[0] if graphed else layer
        for _ in range(2):
            run(x).square().sum().backward()
            ddp.finish_grad_sync()
            found.append(layer.layer.weight.main_grad.clone())
            ddp.zero_grad_buffer()
    assert all(torch.equal(found[0], each) for each in found)
