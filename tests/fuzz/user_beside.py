"""Models that begin on the meta device. Scripts take sources from here."""

import torch
from torch import nn


def on_meta(model, left_out=None):
    """Moves the model there; returns an ``init_fn`` that writes what it was.

    left_out  number of a tensor that nobody writes (even), or of which only the first half is written (odd)
    """
    values, moved = {}, {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    empty = tensor.detach().to("meta")
                    is_param = isinstance(tensor, nn.Parameter)
                    moved[id(tensor)] = tensor, nn.Parameter(empty, tensor.requires_grad) if is_param else empty
                index = list(moved).index(id(tensor))
                values.setdefault(module, []).append((name, index, tensor.detach().clone()))
                tensors[name] = moved[id(tensor)][1]

    def initialise(module):
        with torch.no_grad():
            for name, index, value in values.get(module, ()):
                kept = value.numel()
                if left_out is not None and index == left_out // 2 % len(moved):
                    kept = kept // 2 if left_out % 2 else 0
                getattr(module, name).view(-1)[:kept] = value.reshape(-1)[:kept]

    return initialise
