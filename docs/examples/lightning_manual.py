"""Lightning with manual optimization: Lightning has the loop, callbacks and logs; maingrad all between ranks.

    torchrun --nproc-per-node 2 docs/examples/lightning_manual.py runs/lightning

Each process has a Lightning Trainer of one device. Stopped at any time, the same command goes on from the last
checkpoint.
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torch.nn import functional as F
from torch.utils.data import DataLoader

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from maingrad.te_integration import LayerNormMLP, Linear, Sequential

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path, help="of the checkpoint")
parser.add_argument("--stop-after", type=int, default=40, help="leave the other steps to the next start")
args = parser.parse_args()
STEPS, SAVE_EVERY, MICROBATCHES, ROWS, WIDTH = 40, 10, 2, 32, 64

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
dtype = torch.bfloat16 if cuda else torch.float32


def batch(step):
    """Numbers of 8 bits, MICROBATCHES times ROWS of them, drawn by the step's number."""
    return torch.randint(2, (MICROBATCHES * ROWS, 8), generator=torch.Generator().manual_seed(step * ranks + rank))


class Counting(lightning.LightningModule):
    """How many of the bits are 1?"""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        fused = {"fuse_wgrad_accumulation": True}  # weight gradients are written into the buckets
        net = Sequential(Linear(8, WIDTH, **fused), LayerNormMLP(WIDTH, 2 * WIDTH, **fused), Linear(WIDTH, 9, **fused))
        overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, **overlap)
        self.model = DistributedDataParallel(net.to(device, dtype), config)
        self.optimizer = DistributedOptimizer(self.model, lr=1e-2, max_grad_norm=1.0)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-2, STEPS, cycle_momentum=False)
        self.first = 0
        if args.folder.exists():
            saved = load_checkpoint(args.folder, self.model, self.optimizer)
            self.schedule.load_state_dict(saved["schedule"])
            self.first = saved["step"]

    def configure_optimizers(self):
        return self.optimizer

    def training_step(self, bits, index):
        mean, step = torch.zeros((), device=device), self.first + index + 1
        for number, rows in enumerate(bits.chunk(MICROBATCHES)):
            with nullcontext() if number == MICROBATCHES - 1 else self.model.no_sync():
                scores = self.model(rows.to(dtype)).float()
                loss = F.cross_entropy(scores, rows.sum(1)) / MICROBATCHES
                self.manual_backward(loss)
            mean += loss.detach() / ranks
        self.model.finish_grad_sync()
        self.optimizer.step()  # not self.optimizers().step(), which passes a closure
        self.schedule.step()
        self.model.zero_grad()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f} norm {self.optimizer.grad_norm.item():.4f}", flush=True)
        if step % SAVE_EVERY == 0:
            extra = {"step": step, "schedule": self.schedule.state_dict()}
            save_checkpoint(args.folder, self.model, self.optimizer, extra=extra)


module = Counting()
alone = {"accelerator": "gpu" if cuda else "cpu", "devices": [device.index] if cuda else 1, "max_epochs": 1}
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(**alone, **quiet, plugins=[LightningEnvironment()])  # which knows of no other ranks
steps = range(module.first, min(STEPS, args.stop_after))
trainer.fit(module, DataLoader(steps, batch_size=None, collate_fn=batch))
dist.destroy_process_group()
