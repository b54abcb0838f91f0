"""The way of a gradient in maingrad, by hand: plain PyTorch, each step numbered where it happens.

    python docs/by_hand.py  # two processes train a small model of bytes, and print its loss

You know DistributedDataParallel: hooks count gradients, and a complete bucket is all-reduced while backward goes on to
the layers below. Here, as in Megatron, weights are bf16, and their gradients are summed in fp32 in ``main_grad``, a
view of the bucket. A linear layer's backward adds its weight gradient to ``main_grad`` itself, without a ``.grad``.
Each rank gets the average of its half of a bucket, its shard, and updates this half of the weights alone (ZeRO-1).
"""

import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANKS, STEPS, MICROBATCHES, ROWS, CONTEXT = 2, 40, 2, 64, 4


class Bucket:
    """Some parameters in one bf16 tensor, and their gradients in one fp32 tensor, at the same places.

    params  bf16  | head.bias | head.weight | norm.bias | norm.weight |
    grads   fp32  | main_grad | main_grad   | main_grad | main_grad   |
                  |    shard of rank 0      |    shard of rank 1      |
    """

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = torch.cat([param.detach().flatten() for param in params])
        self.grads = torch.zeros(self.params.numel(), dtype=torch.float32)
        sizes = [param.numel() for param in params]
        # 1. Each parameter becomes a view, gets a main_grad, and a hook that tells when its gradient is there.
        for param, values, grads in zip(params, self.params.split(sizes), self.grads.split(sizes), strict=True):
            param.data, param.main_grad = values.view(param.shape), grads.view(param.shape)
            param.grad_added_to_main_grad = False
            param.register_post_accumulate_grad_hook(lambda param: take_grad(self, param))
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.param_shards, self.grad_shards = list(self.params.chunk(ranks)), list(self.grads.chunk(ranks))
        self.param_shard, self.grad_shard = self.param_shards[rank], self.grad_shards[rank]
        self.master = nn.Parameter(self.param_shard.float())  # fp32: bf16 would round small updates away
        self.num_params = len(params)


class FusedLinear(torch.autograd.Function):
    """y = x W^T + b, with x [T, K], W [N, K], b [N] and y [T, N]."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)  # 2. Forward keeps what the two products of backward need.
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # 3. The weight gradient goes into main_grad, the flag tells the hook so, and autograd gets None. On a GPU this
        #    is one GEMM: torch.addmm(main_grad, dy.t(), x, out_dtype=torch.float32, out=main_grad).
        weight.main_grad += dy.float().t() @ x.float()
        weight.grad_added_to_main_grad = True
        return dy @ weight, None, dy.sum(0)


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return FusedLinear.apply(x, self.weight, self.bias)


def take_grad(bucket: Bucket, param: nn.Parameter) -> None:
    """The hook: autograd calls it once in each backward, when it is done with ``param``, also after a None."""
    if not param.grad_added_to_main_grad:  # 4. Biases, norms and embeddings: autograd has left a .grad, in bf16.
        param.main_grad += param.grad
    param.grad, param.grad_added_to_main_grad = None, False
    bucket.num_ready += 1  # 5. In the last microbatch this parameter's main_grad is complete now.
    if bucket.is_last_microbatch and bucket.num_ready == bucket.num_params:
        bucket.grads /= len(bucket.grad_shards)  # 6. The average over ranks starts, and backward goes on beside it.
        bucket.reduction = dist.reduce_scatter(bucket.grad_shard, bucket.grad_shards, async_op=True)


def train_step(model: nn.Module, buckets: list[Bucket], optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    """Train on ``batch`` [microbatches, rows, context + 1] of bytes; returns the last microbatch's loss.

    Earlier microbatches run 2 to 4 alone. From the last one's forward on:

    compute | 2 forward | 3-5 head, norm | 3-5 linear, embedding |   7 wait   | 8 update | 9 wait   | 10 | 2 forward
    network |           |                | 6 bucket 0 |          | 6 bucket 1 |          | 9 gather |
    """
    for index, rows in enumerate(batch):
        for bucket in buckets:
            bucket.num_ready, bucket.is_last_microbatch = 0, index == len(batch) - 1
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).float(), rows[:, -1])
        (loss / len(batch)).backward()
    for bucket in buckets:
        bucket.reduction.wait()  # 7. Only now: the shard of grads holds the average over ranks.
        bucket.master.grad = bucket.grad_shard
    optimizer.step()  # 8. Each rank updates its shards in fp32: half of the work, and of AdamW's memory.
    for bucket in buckets:
        bucket.param_shard.copy_(bucket.master.detach())  # 9. Shards are rounded to bf16, and each rank gets them all.
        dist.all_gather(bucket.param_shards, bucket.param_shard)
        bucket.grads.zero_()  # 10. The next iteration sums from zero.
    return loss.detach()


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)  # the same weights on all ranks
    layers = [nn.Embedding(256, 16), nn.Flatten(), Linear(64, 128), nn.GELU(), nn.LayerNorm(128), Linear(128, 256)]
    model = nn.Sequential(*layers).to(torch.bfloat16)
    params = list(model.parameters())[::-1]  # backward reaches the head first
    buckets = [Bucket(params[:4]), Bucket(params[4:])]  # so its bucket is reduced beside the rest of backward
    optimizer = torch.optim.AdamW([bucket.master for bucket in buckets], lr=1e-2, fused=True)
    windows = torch.from_file(__file__, size=5_000, dtype=torch.uint8).long().unfold(0, CONTEXT + 1, 1)[rank::RANKS]
    for number in range(STEPS):
        loss = train_step(model, buckets, optimizer, windows[torch.randint(len(windows), (MICROBATCHES, ROWS))])
        if rank == 0:
            print(f"step {number + 1} loss {loss:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(main, (f"file://{folder}/store",), nprocs=RANKS, start_method="fork")
