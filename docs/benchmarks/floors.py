"""Floors of ``data_parallel.py``: the same work as its rows without a collective."""

from typing import Any

import torch
from contenders import LEARNING_RATE
from gpt import AddmmLinear
from harness import accumulate
from torch import nn

import maingrad
from maingrad.ddp.contract.main_grad import absorb_grad, attach
from maingrad.ddp.contract.record import GradRecord
from maingrad.ddp.graphs.capture import CapturedGraph, GraphPool


def build_floor(case, *, compiled=False, graphed=False):
    """Our wrapper and modules in a world of one.

    AdamW updates a rank's shard of each bucket; then the shard is rounded to bf16.
    """
    model = case.make(torch.bfloat16)
    if compiled:
        model.compile_loss()
    options: dict[str, Any] = {"mesh": maingrad.WORLD_OF_ONE, "overlap_grad_reduce": False}
    ddp = maingrad.parallelize(model, "ddp", units=case.units(model), compile=compiled, **options)
    shards = [bucket.grad_data[: bucket.grad_data.numel() // case.num_ranks] for bucket in ddp.buckets]
    masters = [nn.Parameter(torch.zeros_like(shard)) for shard in shards]
    rounded = [torch.empty_like(shard, dtype=torch.bfloat16) for shard in shards]  # in place of the parameters
    for master, shard in zip(masters, shards, strict=True):
        master.grad = shard
    adamw = torch.optim.AdamW(masters, lr=LEARNING_RATE, fused=True, capturable=graphed)
    tokens = case.tokens()

    def step():
        ddp.zero_grad_buffer()
        loss = accumulate(case.loss_of(ddp), tokens, not_last=ddp.no_sync)
        ddp.finish_grad_sync()
        adamw.step()
        for master, place in zip(masters, rounded, strict=True):
            place.copy_(master.detach())
        return loss

    return _replayed(step, case.device) if graphed else step


def _replayed(step, device):
    """The step as one graph: captured in its third call, and nothing but kernels afterwards."""
    pool = GraphPool(device)
    graph = CapturedGraph(pool)
    losses: list[torch.Tensor] = []  # of the eager calls, then of the capture

    def run():
        with pool.on_stream():
            if len(losses) < 2:
                losses.append(step())
                return losses[-1]
            if not graph.is_captured:
                with graph.capture():
                    losses.append(step())
            graph.replay()
        return losses[-1]

    return run


def build_peer_floor(case):
    """No wrapper: ``addmm`` into one accumulator for each parameter; AdamW on one tensor of a rank's share."""
    model = case.make(torch.bfloat16, AddmmLinear.make)
    totals = []
    for name, parameter in model.named_parameters():
        totals.append(torch.zeros(parameter.shape, device=case.device))
        record = GradRecord(name, totals[-1], first_write_overwrites=False, shared=False)
        attach(parameter, record)
        parameter.register_post_accumulate_grad_hook(lambda weight, record=record: absorb_grad(weight, record))
    share = sum(total.numel() for total in totals) // case.num_ranks
    master = nn.Parameter(torch.zeros(share, device=case.device))
    master.grad = torch.zeros(share, device=case.device)
    adamw = torch.optim.AdamW([master], lr=LEARNING_RATE, fused=True)
    tokens = case.tokens()

    def step():
        for total in totals:
            total.zero_()
        loss = accumulate(case.loss_of(model), tokens)
        adamw.step()
        return loss

    return step
