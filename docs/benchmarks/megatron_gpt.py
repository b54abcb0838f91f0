"""Megatron-core's GPTModel over two tensor-parallel ranks: five steps under its own wrapper, and under maingrad's.

    torchrun --nproc-per-node 2 docs/benchmarks/megatron_gpt.py [--sequence-parallel] [--cpu]

Needs megatron-core, and neither Apex nor Transformer Engine. Both runs start from one seed, take
the same batches, and end an iteration with ``finalize_model_grads``: Megatron-core's, and maingrad's in its place.
Prints losses and norms of both, and how far the weights are apart; exits with 1 where a loss or a norm differs by more
than 1e-5 of it. With ``--cpu`` ranks are gloo processes, for a machine without GPUs.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, clip_grad_norm
from maingrad.te_integration import convert_linears
from maingrad.te_integration.pipeline import finalize_model_grads

WORDS, WIDTH, HEADS, LAYERS, LENGTH, ROWS, MICROBATCHES, STEPS = 256, 64, 4, 2, 32, 2, 2, 5


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Megatron-core allocates on the current GPU, and keeps random states of GPUs for dropout."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    device = mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu"))
    stream = mock.patch.object(torch.cuda, "current_stream")
    with device, stream, mock.patch.object(CudaRNGStatesTracker, "fork", return_value=contextlib.nullcontext()):
        yield


class Norm(nn.LayerNorm):
    """Megatron-core's own needs Apex or Transformer Engine where ranks have parts of the sequence."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def make_model(options: argparse.Namespace, dtype: torch.dtype) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    torch.manual_seed(0)
    if not options.cpu:
        model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        ffn_hidden_size=4 * WIDTH,
        tensor_model_parallel_size=2,
        sequence_parallel=options.sequence_parallel,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
    )
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    blocks = TransformerBlockSubmodules(layer_specs=[layer] * LAYERS, layer_norm=Norm)
    model = GPTModel(config, blocks, WORDS, LENGTH, position_embedding_type="rope")
    return model if options.cpu else model.cuda()


def wrap_theirs(model: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel as Theirs
    from megatron.core.distributed import DistributedDataParallelConfig as Config

    config = Config(grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False)
    return Theirs(model.config, config, model)


def wrap_ours(model: Any) -> Any:
    from megatron.core import parallel_state as state

    convert_linears(model)
    return DistributedDataParallel(
        model,
        DistributedDataParallelConfig(overlap_grad_reduce=True),
        process_group=state.get_data_parallel_group(with_context_parallel=True),
        tensor_parallel_group=state.get_tensor_model_parallel_group(),
    )


def global_norm(model: Any, wrapped: Any, ours: bool) -> float:
    """The norm over all slices, each replicated parameter counted once; gradients are clipped by nothing."""
    if ours:
        return float(clip_grad_norm(wrapped, float("inf")))
    from megatron.core import parallel_state as state

    squares = torch.zeros((), device=next(model.parameters()).device)
    for param in model.parameters():
        if getattr(param, "tensor_model_parallel", False) or state.get_tensor_model_parallel_rank() == 0:
            squares += param.main_grad.float().square().sum()
    dist.all_reduce(squares, group=state.get_tensor_model_parallel_group())
    return float(squares.sqrt())


def train(options: argparse.Namespace, ours: bool, dtype: torch.dtype) -> tuple[list[float], list[float], Any]:
    from megatron.core.distributed import finalize_model_grads as theirs

    model = make_model(options, dtype)
    wrapped = wrap_ours(model) if ours else wrap_theirs(model)
    device = next(model.parameters()).device
    masters = {name: param.detach().float().clone() for name, param in model.named_parameters()}
    losses, norms = [], []
    position = torch.arange(LENGTH, device=device).expand(ROWS, -1)
    mask = torch.ones(ROWS, 1, LENGTH, LENGTH, device=device).triu(1).bool()
    for step in range(STEPS):
        wrapped.zero_grad_buffer()
        total = 0.0
        for micro in range(MICROBATCHES):
            draw = torch.Generator().manual_seed(MICROBATCHES * step + micro)
            tokens = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=draw).to(device)
            with contextlib.nullcontext() if micro == MICROBATCHES - 1 else wrapped.no_sync():
                loss = wrapped(tokens[:, :-1], position, mask, labels=tokens[:, 1:].contiguous()).mean() / MICROBATCHES
                loss.backward()
            total += float(loss.detach())
        (finalize_model_grads if ours else theirs)([wrapped])
        losses.append(total)
        norms.append(global_norm(model, wrapped, ours))
        with torch.no_grad():  # SGD in fp32
            for name, param in model.named_parameters():
                masters[name] -= 0.1 * param.main_grad.float()
                param.copy_(masters[name])
    return losses, norms, masters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    dist.init_process_group("gloo" if options.cpu else "nccl")
    if not options.cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    import megatron.core
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    with on_cpu() if options.cpu else contextlib.nullcontext():
        expected, found = (train(options, ours, dtype) for ours in (False, True))
    apart = max(float((found[2][name] - each).abs().max()) for name, each in expected[2].items())
    wrong = [
        (kind, step, a, b)
        for kind, theirs, ours in zip(("loss", "norm"), expected, found, strict=False)
        for step, (a, b) in enumerate(zip(theirs, ours, strict=True))
        if not abs(a - b) <= 1e-5 * abs(a)
    ]
    if dist.get_rank() == 0:
        print(f"megatron-core {megatron.core.__version__}, torch {torch.__version__}, {options.dtype}")
        for step, row in enumerate(zip(expected[0], found[0], expected[1], found[1], strict=True)):
            print("step {}: loss {:.7f} theirs, {:.7f} ours; norm {:.7f} theirs, {:.7f} ours".format(step, *row))
        print(f"weights are at most {apart:.1e} apart")
        print("equal" if not wrong else f"DIFFERENT: {wrong}")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
