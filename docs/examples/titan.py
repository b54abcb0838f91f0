"""A loop like torchtitan's: a model on the meta device, one function that parallelises it, torch's own checkpoints.

    torchrun --nproc-per-node 4 docs/examples/titan.py runs/titan --replicas 2

Stopped at any time, the same command goes on from the last checkpoint; so does one with another number of replicas.
"""

import argparse
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from maingrad import ddp
from maingrad.fsdp import MixedPrecisionPolicy, fully_shard
from maingrad.te_integration import convert_linears

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path, help="of the checkpoints")
parser.add_argument("--stop-after", type=int, default=40, help="leave the other steps to the next start")
parser.add_argument("--replicas", type=int, default=1, help="of the model, each sharded over as many ranks")
args = parser.parse_args()
STEPS, SAVE_EVERY, MICROBATCHES, SEQUENCES, LENGTH, WIDTH, HEADS = 40, 10, 2, 4, 64, 64, 4

device, rank, ranks = ddp.init_process_group()
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def parallelize(model, mesh, dtype):
    convert_linears(model)  # weight gradients are written into what is reduced
    for part in [*model, model]:  # from the inside out
        if isinstance(part, Block):
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)  # recomputed in backward
            part.compile(disable=device.type == "cpu")
        fully_shard(part, mesh, "hsdp", MixedPrecisionPolicy(param_dtype=dtype), device=device)  # initialises it too


with torch.device("meta"):
    head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 61))
    model = nn.Sequential(nn.Embedding(61, WIDTH), Block(), Block(), head)
mesh = init_device_mesh(device.type, (args.replicas, ranks // args.replicas), mesh_dim_names=("replica", "shard"))
parallelize(model, mesh, torch.bfloat16 if device.type == "cuda" else torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, STEPS, cycle_momentum=False)


def state(step):
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    return {**parts, "schedule": schedule.state_dict(), "step": step}


saved, complete = {"step": 0}, sorted(args.folder.glob("*/.metadata"), key=lambda path: int(path.parent.name))
if complete:
    saved = state(0)
    dcp.load(saved, checkpoint_id=complete[-1].parent)  # in place
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])

for step in range(saved["step"], min(STEPS, args.stop_after)):
    torch.manual_seed(step * ranks + rank)  # of data and dropout: a resumed run goes on with the same
    strides = torch.randint(1, 4, (MICROBATCHES, SEQUENCES, LENGTH + 1))
    mean = torch.zeros((), device=device)
    for index, tokens in enumerate(strides.cumsum(-1).to(device) % 61):  # a perfect model has the loss log 3 = 1.0986
        with nullcontext() if index == MICROBATCHES - 1 else model.no_sync():
            loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()) / MICROBATCHES
            loss.backward()
        mean += loss.detach() / ranks
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step + 1} loss {mean.item():.6f} norm {norm.item():.4f}", flush=True)
    if (step + 1) % SAVE_EVERY == 0:
        dcp.save(state(step + 1), checkpoint_id=args.folder / str(step + 1))
dist.destroy_process_group()
