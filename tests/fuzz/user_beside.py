"""Models that begin on the meta device, weights that are taken for later use, Megatron-core's marks.

Scripts take sources from here.
"""

import copy
import io
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from user_training import batch, copied, drain, loss_of, refused

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    clip_grad_norm,
    save_checkpoint,
)
from maingrad.fsdp import fully_shard

# ---- The meta device. ----


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


# ---- Weights for later. ----


def state_taken(model, way):
    """What this rank takes of the weights. The values are those of the moment, however training goes on."""
    sharded = hasattr(model, "unsharded")
    module = model if sharded else model.module
    with model.unsharded() if sharded and way.startswith("within") else nullcontext():
        if way.endswith("parameters"):
            state = {name: param.detach().clone() for name, param in module.named_parameters()}
        elif way.endswith("DCP"):
            state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
        else:
            state = model.state_dict()
        names = [name for name, _ in module.named_parameters()]
    if way.endswith("file"):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file)
    if not sharded:  # a replica's are the live weights, as plain PyTorch's are
        state = {name.removeprefix("module."): each.clone() for name, each in state.items() if hasattr(each, "clone")}
    return {name: state[name] for name in names}


def state_values(state):
    """Of whole tensors, as ``values_of`` has them. Collective where there are shards."""
    wholes = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in state.items()}
    return {name: (0, copied(each)) for name, each in wholes.items()}


STATE_WAYS = (
    "state_dict",
    "within: state_dict",
    "within: parameters",
    "file",
    "within: file",
    "DCP",
    "within: DCP",
)
"""How ``state_taken`` takes weights: ``within`` is ``model.unsharded()``, where there are shards."""


# ---- Marks. ----


def wrapped_in(way, model, ranks=None, **config):
    if way == "fsdp":
        return fully_shard(model, ranks)
    config = DistributedDataParallelConfig(use_distributed_optimizer=way == "zero1", **config)
    return DistributedDataParallel(model, config, process_group=ranks)


def loss_of_marked(model, mark, way, folder, step):
    """A wrapper over half of the ranks, of a model with a mark: what is refused, and the loss after the remedy."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = [dist.new_group(list(range(first, size, 2))) for first in range(2)][rank % 2]
    param = next(param for param in model.parameters() if param.requires_grad)
    if mark == "tensor_model_parallel":
        refuse_slices(copy.deepcopy(model), way, ranks, folder, step)
    else:
        setattr(param, mark, True)
        with refused(f"has {mark} = True"):
            wrapped_in(way, model, ranks)
    setattr(param, mark, False)
    wrapped = wrapped_in(way, model, ranks)
    with torch.no_grad():
        return loss_of(wrapped(batch(rank, step, 75))).item()


def refuse_slices(model, way, ranks, folder, step):
    """All that would cover the slices of this rank alone."""
    words = "slice of tensor parallelism"
    param = next(param for param in model.parameters() if param.requires_grad)
    param.tensor_model_parallel = True
    with torch.no_grad():
        param.add_(dist.get_rank() % 2)
    with refused(words):
        wrapped_in(way, model)
    if way != "fsdp":
        with refused(words):
            wrapped_in(way, model, ranks, check_for_nan_in_grad=True)
    model = wrapped_in(way, model, ranks)
    loss_of(model(batch(0, step, 75))).backward()
    drain(model)
    model.finish_grad_sync()
    with refused(words):
        if way == "fsdp":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            clip_grad_norm(model, 1.0)
    if way == "zero1":
        with refused(words):
            DistributedOptimizer(model, lr=1.0, max_grad_norm=1.0)
    with refused(words):
        save_checkpoint(f"{folder}/slices {step}", model)


MARKS = ("tensor_model_parallel", "sequence_parallel", "average_gradients_across_tp_domain", "shared_embedding")
MARKED_WAYS = ("ddp", "zero1", "fsdp")
