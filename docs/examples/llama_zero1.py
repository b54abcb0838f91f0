"""Pretrain a Hugging Face Llama with ZeRO-1: each rank has whole parameters, and a part of masters and moments.

    torchrun --nproc-per-node 2 docs/examples/llama_zero1.py runs/zero1

Stopped at any time, the same command goes on from the last checkpoint.
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, get_cosine_schedule_with_warmup

import maingrad

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path, help="of the checkpoint")
parser.add_argument("--stop-after", type=int, default=40, help="leave the other steps to the next start")
args = parser.parse_args()
STEPS, WARMUP, SAVE_EVERY, MICROBATCHES, SEQUENCES, LENGTH = 40, 5, 10, 2, 4, 64
device, rank, ranks = maingrad.init_process_group()
torch.manual_seed(0)
sources = sorted(Path(os.__file__).parent.glob("*.py"))  # the data: Python's standard library, as bytes
data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)


def microbatches(step):
    """This rank's part of a step. The step's number decides, so that a resumed run reads what comes next."""
    for index in range(MICROBATCHES):
        torch.manual_seed((step * MICROBATCHES + index) * ranks + rank)  # of data and of dropout
        starts = torch.randint(len(data) - LENGTH, (SEQUENCES,))
        yield torch.stack([data[start : start + LENGTH] for start in starts.tolist()]).long().to(device)


sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **sizes)
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)  # rotary frequencies stay in fp32
model = maingrad.parallelize(model, "zero1")  # weight gradients are written into the buckets
norms = {"params": lambda name, param: param.ndim < 2, "weight_decay": 0.0}
adamw = {"lr": 1e-2, "weight_decay": 0.1, "param_groups": [norms], "max_grad_norm": 1.0}
optimizer = maingrad.make_optimizer(model, torch.optim.AdamW, **adamw)
schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP, STEPS)

try:
    saved = maingrad.load_checkpoint(args.folder, model, optimizer)
    schedule.load_state_dict(saved["schedule"])
except FileNotFoundError:  # on all ranks: this is a new run
    saved = {"step": 0}


def train_step(batch):  # a whole iteration: on a GPU the third call captures it as one CUDA graph
    mean = torch.zeros((), device=device)
    for index, tokens in enumerate(batch):
        with nullcontext() if index == MICROBATCHES - 1 else model.no_sync():
            loss = model(input_ids=tokens, labels=tokens).loss / MICROBATCHES
            loss.backward()  # the last one reduces each bucket as soon as it is complete
        mean += loss.detach() / ranks
    optimizer.step()  # clips, updates this rank's part, and gathers parameters under the next forward
    optimizer.zero_grad()
    return mean


train_step = maingrad.graphed(train_step, model, optimizer)
for step in range(saved["step"], min(STEPS, args.stop_after)):
    mean = train_step([*microbatches(step)])
    schedule.step()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step + 1} loss {mean.item():.6f} norm {optimizer.grad_norm.item():.4f}", flush=True)
    if (step + 1) % SAVE_EVERY == 0:
        extra = {"step": step + 1, "schedule": schedule.state_dict()}
        maingrad.save_checkpoint(args.folder, model, optimizer, extra=extra)
train_step.reset()  # graphs hold the process group's collectives
dist.destroy_process_group()
