"""A loop like torchtitan's: meta device, blocks recomputed, compiled and sharded, torch's own checkpoints.

    torchrun --nproc-per-node 4 docs/examples/titan.py runs/titan --replicas 2

Stopped at any time, the same command goes on from the last checkpoint; so does one with another number of replicas.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import maingrad

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path, help="of the checkpoints")
parser.add_argument("--stop-after", type=int, default=40, help="leave the other steps to the next start")
parser.add_argument("--replicas", type=int, default=1, help="of the model, each sharded over as many ranks")
args = parser.parse_args()
STEPS, SAVE_EVERY, SEQUENCES, LENGTH, WIDTH, HEADS = 40, 10, 8, 64, 64, 4
device, rank, ranks = maingrad.init_process_group()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


torch.manual_seed(0)
with torch.device("meta"):
    model = nn.Sequential(nn.Embedding(61, WIDTH), Block(), Block(), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 61))
mesh = init_device_mesh(device.type, (args.replicas, ranks // args.replicas), mesh_dim_names=("replica", "shard"))
blocks = {"units": Block, "recompute": True, "compile": device.type == "cuda"}
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
model = maingrad.parallelize(model, "hsdp", mesh=mesh, param_dtype=dtype, device=device, **blocks)  # initialises it too
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, STEPS, cycle_momentum=False)
parts = {}  # of a checkpoint
complete = sorted(args.folder.glob("*/.metadata"), key=lambda path: int(path.parent.name))
if complete:
    parts["model"], parts["optimizer"] = get_state_dict(model, optimizer)
    dcp.load(parts | {"schedule": schedule}, checkpoint_id=complete[-1].parent)  # in place
    set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])


def train_step(tokens):  # a whole iteration, on a GPU one CUDA graph; at best the loss is log 3
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach() / ranks, norm


train_step = maingrad.graphed(train_step, model, optimizer)
for step in range(schedule.last_epoch, min(STEPS, args.stop_after)):
    torch.manual_seed(step * ranks + rank)  # of data and dropout: a resumed run goes on with the same
    mean, norm = train_step(torch.randint(1, 4, (SEQUENCES, LENGTH + 1)).cumsum(-1).to(device) % 61)
    schedule.step()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step + 1} loss {mean.item():.6f} norm {norm.item():.4f}", flush=True)
    if (step + 1) % SAVE_EVERY == 0:
        parts["model"], parts["optimizer"] = get_state_dict(model, optimizer)
        dcp.save(parts | {"schedule": schedule}, checkpoint_id=args.folder / str(step + 1))
train_step.reset()  # graphs hold the process group's collectives
dist.destroy_process_group()
