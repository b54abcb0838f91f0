"""Ring attention over two GPUs: the GPU's flash kernels, forward and backward."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo import run_ranks
from sharded_on_gpus import here, nccl

from maingrad.launch.parallelizing.exchanges import ContextRanks, ring_attention


def on_two_gpus() -> list[float]:
    """The largest differences from attention over whole sequences, of the output and of three gradients."""
    group, found = nccl(), []
    torch.manual_seed(0)
    whole = [
        torch.randn(2, heads, 256, 64, device=here(), dtype=torch.bfloat16).requires_grad_() for heads in (8, 2, 2)
    ]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    context = ContextRanks(group, ring=True)
    parts = [context.own(x.detach(), 2).requires_grad_() for x in whole]
    y = ring_attention(*parts, group)
    (y * context.own(weight, 2)).sum().backward()
    for part, x in [(y, expected), *((part.grad, x.grad) for part, x in zip(parts, whole, strict=True))]:
        assert part is not None and x is not None
        difference = (part - context.own(x, 2)).float().norm() / x.float().norm()
        found.append(float(difference))
    with pytest.raises(TypeError, match="multiplies bfloat16 or float16 on a GPU"):
        ring_attention(*(part.detach().float() for part in parts), group)
    dist.destroy_process_group(group)
    return found


@pytest.mark.gpu(2)
def test_a_ring_of_two_gpus_is_attention_over_whole_sequences() -> None:
    for found in run_ranks(on_two_gpus, 2):
        assert max(found) < 0.01
