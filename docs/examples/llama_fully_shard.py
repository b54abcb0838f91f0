"""Pretrain a Hugging Face Llama with ZeRO-3: parameters, gradients, masters and moments are all sharded.

    torchrun --nproc-per-node 2 docs/examples/llama_fully_shard.py runs/sharded

Stopped at any time, the same command goes on from the last checkpoint. llama_zero1.py reads the same checkpoints.
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

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
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **sizes))
model.to(device)  # in fp32: the shards are the masters
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
model = maingrad.parallelize(model, "zero3", param_dtype=dtype)  # each layer is gathered for its forward and backward
norms = {"params": lambda name, param: param.ndim < 2, "weight_decay": 0.0}
optimizer = maingrad.make_optimizer(model, torch.optim.AdamW, lr=1e-2, weight_decay=0.1, param_groups=[norms])
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
            loss.backward()  # .grad of all shards is complete after the last one
        mean += loss.detach() / ranks
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # by the norm over all ranks
    optimizer.step()
    optimizer.zero_grad()
    return mean, norm


train_step = maingrad.graphed(train_step, model, optimizer)
for step in range(saved["step"], min(STEPS, args.stop_after)):
    mean, norm = train_step([*microbatches(step)])
    schedule.step()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step + 1} loss {mean.item():.6f} norm {norm.item():.4f}", flush=True)
    if (step + 1) % SAVE_EVERY == 0:
        extra = {"step": step + 1, "schedule": schedule.state_dict()}
        maingrad.save_checkpoint(args.folder, model, optimizer, extra=extra)
train_step.reset()  # graphs hold the process group's collectives
dist.destroy_process_group()
