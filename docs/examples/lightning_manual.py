"""Lightning with manual optimization: Lightning has the loop, callbacks and logs; maingrad all between ranks.

    torchrun --nproc-per-node 2 docs/examples/lightning_manual.py runs/lightning

Each process has a Trainer of one device. Stopped at any time, the same command goes on from the last checkpoint.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torch.nn import functional as F
from torch.utils.data import DataLoader

import maingrad
from maingrad.te_integration import LayerNormMLP, Linear, Sequential

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path, help="of the checkpoint")
parser.add_argument("--stop-after", type=int, default=40, help="leave the other steps to the next start")
args = parser.parse_args()
STEPS, SAVE_EVERY, MICROBATCHES, ROWS, WIDTH = 40, 10, 2, 32, 64

device, rank, ranks = maingrad.init_process_group()
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
torch.manual_seed(0)  # the same weights on all ranks, and in each run


class Counting(lightning.LightningModule):
    """How many of 8 bits are 1?"""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        fused = {"fuse_wgrad_accumulation": True}  # weight gradients are written into the buckets
        net = Sequential(Linear(8, WIDTH, **fused), LayerNormMLP(WIDTH, 2 * WIDTH, **fused), Linear(WIDTH, 9, **fused))
        self.model = maingrad.parallelize(net.to(device, dtype), "zero1")
        self.optimizer = maingrad.make_optimizer(self.model, torch.optim.AdamW, lr=1e-2, max_grad_norm=1.0)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-2, STEPS, cycle_momentum=False)

    def configure_optimizers(self):
        return self.optimizer

    def training_step(self, step):
        torch.manual_seed(step * ranks + rank)  # of data and dropout: a resumed run goes on with the same
        mean = torch.zeros((), device=device)
        for index, bits in enumerate(torch.randint(2, (MICROBATCHES, ROWS, 8)).to(device)):
            with nullcontext() if index == MICROBATCHES - 1 else self.model.no_sync():
                loss = F.cross_entropy(self.model(bits.to(dtype)).float(), bits.sum(1)) / MICROBATCHES
                self.manual_backward(loss)
            mean += loss.detach() / ranks
        self.optimizer.step()  # not self.optimizers().step(), which passes a closure
        self.schedule.step()
        self.optimizer.zero_grad()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1} loss {mean.item():.6f} norm {self.optimizer.grad_norm.item():.4f}", flush=True)
        if (step + 1) % SAVE_EVERY == 0:
            extra = {"step": step + 1, "schedule": self.schedule.state_dict()}
            maingrad.save_checkpoint(args.folder, self.model, self.optimizer, extra=extra)


module, saved = Counting(), {"step": 0}
if args.folder.exists():
    saved = maingrad.load_checkpoint(args.folder, module.model, module.optimizer)
    module.schedule.load_state_dict(saved["schedule"])
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
own = {"accelerator": device.type, "devices": 1 if device.index is None else [device.index], "max_epochs": 1}
trainer = lightning.Trainer(**own, **quiet, plugins=[LightningEnvironment()])  # which knows of no other ranks
trainer.fit(module, DataLoader(range(saved["step"], min(STEPS, args.stop_after)), batch_size=None))
dist.destroy_process_group()
