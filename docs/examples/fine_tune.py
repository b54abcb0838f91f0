"""Fine-tune local weights with ZeRO-1 on answers alone: every answer's token of a step counts alike, on all ranks.

    torchrun --nproc-per-node 2 docs/examples/fine_tune.py runs/base runs/tuned

runs/base is a folder that save_pretrained has written. The tuned model is written to runs/tuned/model, for
from_pretrained. Stopped at any time, the same command goes on from the last checkpoint.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup

import maingrad

parser = argparse.ArgumentParser()
parser.add_argument("weights", type=Path, help="folder with config.json and safetensors")
parser.add_argument("folder", type=Path, help="of the checkpoint and the tuned model")
parser.add_argument("--stop-after", type=int, default=40, help="leave the other steps to the next start")
args = parser.parse_args()
STEPS, WARMUP, SAVE_EVERY, MICROBATCHES, SEQUENCES = 40, 5, 10, 2, 8

device, rank, ranks = maingrad.init_process_group()


def microbatches(step):
    """Questions and answers: a word, and the same word in capitals. Labels of -100 take no part in the loss."""
    for index in range(MICROBATCHES):
        torch.manual_seed((step * MICROBATCHES + index) * ranks + rank)  # of data and of dropout
        length = int(torch.randint(2, 9, ()))
        question = torch.randint(ord("a"), ord("z") + 1, (SEQUENCES, length))
        tokens = torch.cat([question, torch.full((SEQUENCES, 1), ord(":")), question - 32], dim=1)
        labels = tokens.masked_fill(torch.arange(tokens.shape[1]) <= length, -100)
        yield tokens.to(device), labels.to(device)


dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
model = AutoModelForCausalLM.from_pretrained(args.weights, dtype=dtype, trust_remote_code=False).to(device)
model = maingrad.parallelize(model, "zero1", calculate_per_token_loss=True)
optimizer = maingrad.make_optimizer(model, torch.optim.AdamW, lr=5e-3, max_grad_norm=1.0)
schedule = get_linear_schedule_with_warmup(optimizer, WARMUP, STEPS)

try:
    saved = maingrad.load_checkpoint(args.folder / "checkpoint", model, optimizer)
    schedule.load_state_dict(saved["schedule"])
except FileNotFoundError:  # on all ranks: this is a new run
    saved = {"step": 0}


def train_step(batch):  # a whole iteration: on a GPU a CUDA graph for each of the most frequent lengths
    sums = torch.zeros(2, device=device)  # of losses, and of tokens
    for index, (tokens, labels) in enumerate(batch):
        with nullcontext() if index == MICROBATCHES - 1 else model.no_sync():
            loss = model(input_ids=tokens, labels=labels, num_items_in_batch=1).loss  # the sum over tokens
            loss.backward()
        sums += torch.stack([loss.detach(), (labels[:, 1:] != -100).sum()])
    model.set_num_tokens(sums[1])  # gradients are divided by the tokens of all ranks and microbatches
    optimizer.step()
    optimizer.zero_grad()
    return sums


train_step = maingrad.graphed(train_step, model, optimizer)
for step in range(saved["step"], min(STEPS, args.stop_after)):
    sums = train_step([*microbatches(step)])
    schedule.step()
    dist.all_reduce(sums)
    if rank == 0:
        print(f"step {step + 1} loss {(sums[0] / sums[1]).item():.6f} tokens {int(sums[1])}", flush=True)
    if (step + 1) % SAVE_EVERY == 0:
        extra = {"step": step + 1, "schedule": schedule.state_dict()}
        maingrad.save_checkpoint(args.folder / "checkpoint", model, optimizer, extra=extra)
if rank == 0:
    model.module.save_pretrained(args.folder / "model")
train_step.reset()  # graphs hold the process group's collectives
dist.destroy_process_group()
