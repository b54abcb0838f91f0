"""The rule table of linear layers whose weight is a slice: which products of local tensors make which DTensor.

===================  ===========  ============  ==============================  ============
x                    W [N, K]     y             dx                              dW
===================  ===========  ============  ==============================  ============
Replicate            Shard(0)     Shard(last)   Partial: a sum over the ranks   slice
Shard(last)          Shard(1)     Partial       Shard(last)                     slice
Shard(another dim)   Replicate    as x          as x                            partial
Replicate            Replicate    Replicate     Replicate                       partial
===================  ===========  ============  ==============================  ============

In the last row each rank has all rows, and multiplies its part of them for dW. Everything else goes through torch's
dispatch, and autograd delivers the weight gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ...contract.module import FusedWgradModule
from .hugging_face import calls_inner_forward
from .layouts import from_local, layouts_of, to_local

__all__ = ["multiplies", "multiply"]


def multiplies(module: nn.Module) -> bool:
    """Whether ``multiply`` may serve forwards of this module."""
    return isinstance(module, FusedWgradModule) and module.slices == "local"


def multiply(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward's output from local tensors; None: no rule applies.

    Raises ``TypeError`` for a plain input, of which nobody says what it is of the whole.
    """
    x, layouts = args[0] if args else None, layouts_of(module)
    if isinstance(x, Tensor) and not isinstance(x, DTensor):
        if calls_inner_forward(module):  # transformers unwraps the input of a module that is to run on local tensors
            return type(module).forward(module, *args, **kwargs)
        raise TypeError(
            f"{module.describe()}: its weight is a slice of tensor parallelism, and its input a plain tensor: call the "
            f"module as parallelize_module has prepared it, which makes a DTensor of the input"
        )
    if x is None or len(args) > 1 or kwargs or "weight" not in layouts:
        return None
    at: Placement
    out: Placement
    (at,) = x.placements
    weight, mesh, last = layouts["weight"], layouts["weight"].mesh, x.dim() - 1
    bias, cut = module.bias, weight.placement
    bias_cut = Replicate() if bias is None or "bias" not in layouts else layouts["bias"].placement
    if at == Replicate() and cut == Shard(0) and (bias is None or bias_cut == Shard(0)):
        y, out = module.multiply_slice(to_local(x, Partial()), bias), Shard(last)
    elif bias_cut != Replicate():
        return None
    elif at == Shard(last) and cut == Shard(1):
        # The sum over the ranks has the bias once. A factor keeps it in each rank's graph, by a gradient of zeros.
        once = None if bias is None else bias * float(mesh.get_local_rank() == 0)
        y, out = module.multiply_slice(to_local(x, at), once), Partial()
    elif cut == Replicate() and at == Replicate():
        y, out = _multiply_part(module, to_local(x, at), mesh), at
    elif cut == Replicate() and isinstance(at, Shard) and at.dim != last:
        y, out = module.multiply_slice(to_local(x, at), bias), at
    else:
        return None
    return from_local(y, mesh, out, (*x.shape[:-1], weight.shape[0]))


def _multiply_part(module: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The product of all rows, of which this rank's part alone reaches the weight's gradient."""
    rows = x.reshape(-1, x.shape[-1])
    count, rank = -(-rows.shape[0] // mesh.size()), mesh.get_local_rank()
    before, mine, after = rows[: rank * count], rows[rank * count :][:count], rows[(rank + 1) * count :]
    weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
    y = [F.linear(before, weight, bias), module.multiply_slice(mine, module.bias), F.linear(after, weight, bias)]
    return torch.cat(y).view(*x.shape[:-1], weight.shape[0])
