"""On a GPU: a language model whose head computes the loss takes less memory, and trains as before."""

from typing import Any

import pytest
import torch
import transformers

import maingrad
from maingrad.ddp import WORLD_OF_ONE

pytestmark = pytest.mark.gpu
VOCABULARY, LENGTH = 65536, 2048


def train(fused_loss: Any) -> tuple[list[float], float]:
    """Losses of three steps of two microbatches in bf16, and GiB at the most above what the model itself takes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **sizes)
    model: Any = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    model = maingrad.parallelize(model, "zero1", mesh=WORLD_OF_ONE, fused_loss=fused_loss)
    optimizer = maingrad.make_optimizer(model, torch.optim.AdamW, lr=1e-3)
    announced = {"grad_scale": 0.5} if fused_loss == "in_forward" else {}
    losses, peak = [], 0.0
    for step in range(3):
        for number in range(2):
            generator = torch.Generator("cuda").manual_seed(2 * step + number)
            tokens = torch.randint(VOCABULARY, (4, LENGTH), device="cuda", generator=generator)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with model.no_sync() if number == 0 else torch.enable_grad():
                loss = model(input_ids=tokens, labels=tokens, **announced).loss
                (loss / 2).backward()
            peak = max(peak, (torch.cuda.max_memory_allocated() - before) / 2**30)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, peak


def test_losses_and_memory() -> None:
    """8,192 tokens of 65,536 classes: 1 GiB in bf16, 2 GiB in fp32; a chunk has a quarter."""
    losses, peak = train(False)
    for mode in ("recompute", "in_forward"):
        seen, smaller = train(mode)
        assert seen == pytest.approx(losses, rel=2**-8), mode  # logits in bf16
        assert smaller < peak - 3.0, mode
