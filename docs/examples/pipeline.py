"""Pretrain over a pipeline of two ranks, in as many replicas as there are pairs of ranks, with ZeRO-1 in each stage.

    torchrun --nproc-per-node 2 docs/examples/pipeline.py runs/pipeline

Four stages lie in a V, and delayed weight gradients fill the waits. Stopped at any time, the same command goes on.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import ScheduleZBVZeroBubble
from torch.nn import functional as F

import maingrad
from maingrad.te_integration import LayerNormMLP, Linear
from maingrad.te_integration.pipeline import PipelineStage

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path, help="of the checkpoint")
parser.add_argument("--stop-after", type=int, default=40, help="leave the other steps to the next start")
args = parser.parse_args()
STEPS, SAVE_EVERY, MICROBATCHES, ROWS, CONTEXT, WIDTH = 40, 10, 4, 64, 4, 64

device, rank, ranks = maingrad.init_process_group()
mesh = init_device_mesh(device.type, (ranks // 2, 2), mesh_dim_names=("dp", "pp"))
replica, replicas, place = mesh.get_local_rank("dp"), mesh.size(0), mesh.get_local_rank("pp")

sources = sorted(Path(os.__file__).parent.glob("*.py"))  # the data: Python's standard library, as bytes
data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)


def stage_module(index):
    torch.manual_seed(index)
    first = [nn.Embedding(256, WIDTH // CONTEXT), nn.Flatten()] if index == 0 else []
    last = [nn.LayerNorm(WIDTH), Linear(WIDTH, 256, fuse_wgrad_accumulation=True)] if index == 3 else []
    stage = nn.Sequential(*first, LayerNormMLP(WIDTH, 4 * WIDTH, fuse_wgrad_accumulation=True), *last)
    return stage.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


indices, dp, pp = (place, 3 - place), mesh.get_group("dp"), mesh.get_group("pp")  # stages 0 and 3, or 1 and 2
here = nn.ModuleList(stage_module(index) for index in indices)
model = maingrad.parallelize(here, "zero1", mesh=dp, overlap_param_gather=False)  # both stages, over all replicas
stages = [PipelineStage(*pair, 4, device, group=pp) for pair in zip(here, indices, strict=True)]
schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, lambda y, to: F.cross_entropy(y.float(), to), scale_grads=False)
optimizer = maingrad.make_optimizer(model, torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, STEPS, cycle_momentum=False)

path = args.folder / f"stages-of-rank-{place}"  # each rank of the pipeline has its own parameters
try:
    saved = maingrad.load_checkpoint(path, model, optimizer)
    rate.load_state_dict(saved["rate"])
except FileNotFoundError:  # on all ranks: this is a new run
    saved = {"step": 0}

for step in range(saved["step"], min(STEPS, args.stop_after)):
    torch.manual_seed(step * replicas + replica)  # of data and dropout: a resumed run goes on with the same
    starts = torch.randint(len(data) - CONTEXT, (MICROBATCHES * ROWS,))
    rows = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()]).long().to(device)
    losses = []
    schedule.step(*([rows[:, :-1].contiguous()] if place == 0 else []), target=rows[:, -1], losses=losses)
    norm = maingrad.clip_grad_norm(model, 1.0, pipeline_group=pp)  # by the norm over all stages
    optimizer.step()
    rate.step()
    optimizer.zero_grad()
    if place == 0:  # the first rank has the last stage too
        mean = torch.stack(losses).mean() / replicas
        dist.all_reduce(mean, group=dp)
        if rank == 0:
            print(f"step {step + 1} loss {mean.item():.6f} norm {norm.item():.4f}", flush=True)
    if (step + 1) % SAVE_EVERY == 0:
        maingrad.save_checkpoint(path, model, optimizer, extra={"step": step + 1, "rate": rate.state_dict()})
dist.destroy_process_group()
