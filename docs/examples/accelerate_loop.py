"""accelerate without its Trainer: accelerate has the processes, data and logs; maingrad the model and optimizer.

    torchrun --nproc-per-node 2 docs/examples/accelerate_loop.py runs/accelerate

Stopped at any time, the same command goes on from the last checkpoint.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import set_seed
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import maingrad
from maingrad.te_integration import LayerNormMLP, Linear, Sequential

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path, help="of the checkpoint")
parser.add_argument("--stop-after", type=int, default=40, help="leave the other steps to the next start")
args = parser.parse_args()
STEPS, SAVE_EVERY, MICROBATCHES, ROWS, WIDTH = 40, 10, 2, 32, 64


class Numbers(Dataset):
    """A number of 8 bits, and how many of them are 1."""

    def __len__(self):
        return 8192

    def __getitem__(self, index):
        bits = torch.tensor([float(bit) for bit in f"{index * 37 % 256:08b}"])
        return bits, int(bits.sum())


accelerator = Accelerator(cpu=not torch.cuda.is_available())  # or processes on CPUs would not know each other
set_seed(0)
loader = accelerator.prepare(DataLoader(Numbers(), batch_size=ROWS, shuffle=True))  # and nothing else
fused = {"fuse_wgrad_accumulation": True}  # weight gradients are written into the buckets
net = Sequential(Linear(8, WIDTH, **fused), LayerNormMLP(WIDTH, 2 * WIDTH, **fused), Linear(WIDTH, 9, **fused))
net.to(accelerator.device, torch.bfloat16 if accelerator.device.type == "cuda" else torch.float32)
model = maingrad.parallelize(net, "zero1")
optimizer = maingrad.make_optimizer(model, torch.optim.AdamW, lr=1e-2, max_grad_norm=1.0)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, STEPS, cycle_momentum=False)

try:
    saved = maingrad.load_checkpoint(args.folder, model, optimizer)
    schedule.load_state_dict(saved["schedule"])
except FileNotFoundError:  # on all ranks: this is a new run
    saved = {"step": 0}

batches = iter(skip_first_batches(loader, saved["step"] * MICROBATCHES))
for step in range(saved["step"], min(STEPS, args.stop_after)):
    mean = torch.zeros((), device=accelerator.device)
    for index in range(MICROBATCHES):
        bits, count = next(batches)
        set_seed(step * MICROBATCHES + index, device_specific=True)  # of dropout, which a resumed run repeats
        with nullcontext() if index == MICROBATCHES - 1 else model.no_sync():
            loss = F.cross_entropy(model(bits.to(net[0].weight.dtype)).float(), count) / MICROBATCHES
            accelerator.backward(loss)
        mean += loss.detach()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    mean = accelerator.reduce(mean, "mean")
    accelerator.print(f"step {step + 1} loss {mean.item():.6f} norm {optimizer.grad_norm.item():.4f}", flush=True)
    if (step + 1) % SAVE_EVERY == 0:
        extra = {"step": step + 1, "schedule": schedule.state_dict()}
        maingrad.save_checkpoint(args.folder, model, optimizer, extra=extra)
accelerator.end_training()
