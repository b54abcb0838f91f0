"""Training of fully sharded models, and of the data-parallel ones that they must agree with to the bit.

The reference is our ``DistributedDataParallel`` over the ranks of an instance, which reduces as often as the sharded
model does; its reduced gradients are then summed over microbatches, and over instances, in the order that is promised:
microbatches first, each summed inside its instance, then across. Whole parameters are stepped by the same optimizer.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from parity_models import BUCKET_SIZE, Everything, Piece, Trained, Wide, batch, expert_group
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from maingrad.te_integration import Linear, WgradQueue, delayed_wgrad

__all__ = [
    "DELAYS",
    "MODELS",
    "UNITS",
    "Job",
    "Shapes",
    "Sharded",
    "assert_agrees",
    "mesh_of",
    "nbytes_of_sums",
    "pieces_of",
    "reduced_once",
    "reference",
    "shard",
    "train_sharded",
    "whole_of",
]

DELAYS = ("none", "modules", "queue", "modules, lagging", "queue, lagging")
"""Who delays weight gradients, and whether they are computed after each backward or one microbatch later."""


class Shapes(nn.Module):
    """Odd shapes and a scalar, of one dtype throughout."""

    features = 7

    def __init__(self, *, fused: bool, delayed: bool) -> None:
        super().__init__()
        torch.manual_seed(13)
        options: dict[str, Any] = {"fuse_wgrad_accumulation": fused, "delay_wgrad_compute": delayed}
        self.odd = Linear(7, 15, **options)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.plain = nn.Linear(15, 16)
        self.prime = Linear(16, 17, **options)
        self.norm = nn.LayerNorm(17)

    def forward(self, x: Tensor) -> Tensor:
        x = self.odd(x).tanh() * self.scale
        return self.norm(self.prime(self.plain(x).tanh()))

    def backward_dw(self) -> None:
        self.prime.backward_dw()
        self.odd.backward_dw()


UNITS = ("odd", "low", "frozen", "frozen_weight", "unused_layer")
"""Of ``Everything``, one of each kind: plain, of another dtype, frozen wholly, frozen partly, never used. The outermost
unit has the rest, tied and unused parameters and a scalar among them."""

MODELS: dict[str, Callable[..., Any]] = {
    "everything": functools.partial(Everything, experts=False),
    "shapes": Shapes,
    "wide": Wide,
}


class Job(NamedTuple):
    """What is trained, how, and on which ranks."""

    model: str = "everything"
    units: tuple[str, ...] = ()
    """Modules that are units of their own; what they leave is the outermost unit's."""
    placements: str = "zero3"
    instances: int = 1
    inner: int = 1
    """Ranks of an instance."""
    fused: bool = True
    delay: str = "none"
    microbatches: int = 1
    reshard: bool | None = None
    bucket_size: int | None = None
    """Elements at which a unit's buckets are closed."""
    low: bool = False
    """Computation in bf16 over fp32 masters."""
    steps: int = 20
    optimizer: str = "adamw"
    variants: int = 0
    """Of the experts, each on a mesh of its own, rank by rank in turn; 0: there are none."""
    holding: tuple[str, ...] = ()
    """Units that keep whole gradients from one microbatch to the next; empty: the outermost."""

    @property
    def ranks(self) -> int:
        return self.instances * self.inner

    @property
    def lags(self) -> bool:
        return "lagging" in self.delay and self.microbatches > 1

    def build(self) -> Any:
        """The module, fp32 or of mixed dtypes, alike on all ranks; its values fit bf16 where it computes in that."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        experts = {"experts": True, "variant": rank % self.variants} if self.variants else {}
        module = MODELS[self.model](fused=self.fused, delayed="modules" in self.delay, **experts)
        return module.bfloat16().float() if self.low else module

    def make_optimizer(self, params: Sequence[Tensor]) -> torch.optim.Optimizer:
        """One whose bits do not depend on how parameters are cut."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=False)
        return torch.optim.AdamW(params, lr=3e-2, weight_decay=0.1, foreach=False)


class Sharded(NamedTuple):
    """One rank's side of a sharded training."""

    losses: list[float]
    grads: list[dict[str, Piece | None]]
    """This rank's part of every gradient, after every step's backward; None where ``.grad`` is."""
    weights: list[dict[str, Piece]]
    """This rank's part of every parameter, after every step."""


def nbytes_of_sums(grads: Any) -> int:
    """Bytes of the sums of a ``GradShard`` on the reducing device: from the first reduction to the forward after
    ``zero_grad``."""
    tensors = {id(each): each for each in (grads._total, grads._partial, grads._shown) if each is not None}
    return sum(each.nbytes for each in tensors.values() if each.device == grads._device)


def mesh_of(instances: int, inner: int) -> DeviceMesh | None:
    """A mesh of two dims where there are instances; None: all ranks."""
    if instances == 1:
        return None
    return init_device_mesh("cpu", (instances, inner), mesh_dim_names=("outer", "inner"))


def shard(module: Any, units: Sequence[str], *, holding: Collection[str] = (), **options: Any) -> Any:
    """``module``, fully sharded from the inside out; ``holding``: units that reduce once in an iteration."""
    for name in (*units, ""):
        how = {"reduce_every_microbatch": False} if name in holding else {}
        fully_shard(module.get_submodule(name), **how, **options)
    return module


def pieces_of(model: nn.Module) -> tuple[dict[str, Piece | None], dict[str, Piece]]:
    """This rank's gradients and parameters."""
    grads: dict[str, Piece | None] = {}
    weights = {}
    for name, param in model.named_parameters():
        assert param.shard.name == name
        weights[name] = Piece(param.shard.start, param.detach().clone().view(-1))
        grads[name] = None
        if param.grad is not None:
            assert param.grad.shape == param.shape
            grads[name] = Piece(param.shard.start, param.grad.to_local().clone().view(-1))
    return grads, weights


def run_microbatches(
    model: FSDPModule, job: Job, step: int, queue: WgradQueue, batch_of: Callable[..., Tensor] = batch
) -> list[float]:
    """The forwards and backwards of one iteration, each weight gradient when ``job.delay`` says; their losses."""
    losses = []

    def drain() -> None:
        queue.drain_oldest_microbatch() if "queue" in job.delay else model.backward_dw()

    for index in range(job.microbatches):
        with nullcontext() if index == job.microbatches - 1 else model.no_sync():
            with delayed_wgrad(queue) if "queue" in job.delay else nullcontext():
                loss = loss_of(model, batch_of(step, index, model.features), job.microbatches)
            loss.backward()
            if index or not job.lags:
                drain()
        losses.append(loss.item())
    if job.lags:
        drain()
    queue.check_empty()
    return losses


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor, microbatches: int) -> Tensor:
    return (model(x).float() - 1).square().mean() / microbatches


def train_sharded(job: Job, observe: Callable[[FSDPModule, int], None] | None = None) -> Sharded:
    """Train on the ranks of the default group, or alone without one; ``observe(model, step)`` runs after each step."""
    options: dict[str, Any] = {
        "placements": job.placements,
        "reshard_after_forward": job.reshard,
        "bucket_size": job.bucket_size,
    }
    if job.instances > 1:
        options["mesh"] = mesh_of(job.instances, job.inner)
    if job.low:
        options["mixed_precision"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    module = job.build()
    if job.variants:
        for name, expert in module.experts.named_children():
            how = {"reduce_every_microbatch": False} if f"experts.{name}" in job.holding else {}
            fully_shard(expert, **{**options, "mesh": expert_group(job.variants)}, **how)
    model = shard(module, job.units, holding=job.holding, **options)
    optimizer = job.make_optimizer([param for param in model.parameters() if param.requires_grad])
    queue = WgradQueue()
    trained = Sharded([], [], [])
    for step in range(job.steps):
        trained.losses.extend(run_microbatches(model, job, step, queue))
        if step % 2:  # it is complete anyway
            model.finish_grad_sync()
        grads, _ = pieces_of(model)
        optimizer.step()
        optimizer.zero_grad()
        trained.grads.append(grads)
        trained.weights.append(pieces_of(model)[1])
        if observe is not None:
            observe(model, step)
    return trained


# ---- The reference. ----


def reference(job: Job, once: Collection[str]) -> Trained:
    """Train whole parameters on the ranks of the default group.

    job   whose ``units``, ``placements``, ``delay`` and ``reshard`` are of no account
    once  parameters whose microbatches are summed before they are reduced; the others' are reduced each
    """
    module = job._replace(delay="none").build()
    weights = {name: param.detach().clone() for name, param in module.named_parameters()}
    optimized = {name: weights[name] for name, param in module.named_parameters() if param.requires_grad}
    optimizer = job.make_optimizer(list(optimized.values()))
    # Where gradients of both kinds are wanted, they come from twins of the same weights.
    kinds = [True, False] if 0 < len(once) < len(optimized) else [not once]
    engines = {each: _Engine(job) for each in kinds}
    trained = Trained([], [], [])
    for step in range(job.steps):
        for each, engine in engines.items():
            losses, grads = engine.run(step, each)
            for name in grads:
                if (name not in once) is each or len(engines) == 1:
                    optimized[name].grad = grads[name].to(weights[name].dtype)
        trained.losses.extend(losses)
        trained.grads.append({n: Piece(0, p.grad.flatten()) for n, p in optimized.items() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
        trained.weights.append({name: weight.clone() for name, weight in weights.items()})
        for engine in engines.values():
            for name, param in engine.module.named_parameters():
                param.data.copy_(weights[name])
    return trained


class _Engine:
    """One data-parallel model and its gradients."""

    def __init__(self, job: Job) -> None:
        self.job = job
        module = job._replace(delay="none").build()
        self.module = module.bfloat16() if job.low else module
        mesh = mesh_of(job.instances, job.inner)
        self.outer = None if mesh is None else mesh.get_group(0)
        group = None if mesh is None else mesh.get_group(1)
        config = DistributedDataParallelConfig(bucket_size=BUCKET_SIZE)
        self.ddp = DistributedDataParallel(
            self.module,
            config,
            process_group=group,
            expert_process_group=expert_group(job.variants) if job.variants else None,
        )

    def run(self, step: int, each: bool) -> tuple[list[float], dict[str, Tensor]]:
        """Losses and reduced gradients of one iteration, reduced after each microbatch or once."""
        losses: list[float] = []
        sums: dict[str, Tensor] = {}
        for index in range(self.job.microbatches):
            x = batch(step, index, self.module.features)
            final = each or index == self.job.microbatches - 1
            with nullcontext() if final else self.ddp.no_sync():
                loss = loss_of(self.ddp, x.bfloat16() if self.job.low else x, self.job.microbatches)
                loss.backward()
            losses.append(loss.item())
            if final:
                self.ddp.finish_grad_sync()
                for name, param in self._trainable():
                    sums[name] = sums[name] + param.main_grad if name in sums else param.main_grad.clone()
                self.ddp.zero_grad_buffer()
        if self.outer is not None:
            for total in sums.values():
                total.mul_(1 / self.job.instances)
                dist.all_reduce(total, group=self.outer)
        return losses, sums

    def _trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, param) for name, param in self.module.named_parameters() if param.requires_grad)


def reduced_once(job: Job) -> frozenset[str]:
    """Parameters whose microbatches are summed before they are reduced: those of units that hold them, those that
    modules delay, and all that run where a queue delays some."""
    module = job.build()
    names = frozenset(name for name, param in module.named_parameters() if param.requires_grad)
    if job.placements in ("zero1", "hybrid") or "queue" in job.delay:
        return names
    if not (job.holding or "modules" in job.delay):
        return frozenset()
    experts = [f"experts.{name}" for name, _ in module.experts.named_children()] if job.variants else []
    model = shard(module, (*experts, *job.units), placements="zero3")
    for unit in model.units:
        for bucket in unit.buckets if unit.name not in job.holding else ():
            late = [pair for pair in bucket.pairs if any(_delays(owner(), local) for owner, local in pair.places)]
            if not ("modules" in job.delay and late):
                names -= {pair.sharded.shard.name for pair in bucket.pairs}
    return names


def _delays(owner: nn.Module | None, local: str) -> bool:
    return isinstance(owner, Linear) and local == "weight"


# ---- Comparison. ----


def whole_of(pieces: Sequence[Piece], shape: torch.Size, instances: int) -> Tensor:
    """The parameter or gradient that all ranks hold together: every element ``instances`` times, alike."""
    numel = shape.numel()
    times = torch.zeros(numel, dtype=torch.int64)
    whole = torch.full((numel,), torch.nan, dtype=pieces[0].values.dtype)
    for start, values in pieces:
        held = times[start : start + len(values)] > 0
        assert torch.equal(whole[start : start + len(values)][held], values[held]), "replicas differ"
        times[start : start + len(values)] += 1
        whole[start : start + len(values)] = values
    assert (times == instances).all(), "some elements are nobody's, or of too many ranks"
    return whole.view(shape)


def assert_agrees(
    sharded: Sequence[Sharded],
    whole: Sequence[Trained],
    *,
    replicas: int = 1,
    same: Callable[[Tensor, Tensor], bool] = torch.equal,
    holders: Callable[[str], Sequence[Sequence[int]]] | None = None,
) -> None:
    """Losses rank by rank; gradients and weights put together from the parts of all ranks that share them.

    replicas  how many ranks hold each element
    same      how a tensor of ours and one of the reference must agree
    holders   by name: sets of ranks, each of which holds a parameter of its own; None: all ranks hold one
    """
    for ours, theirs in zip(sharded, whole, strict=True):
        assert same(torch.tensor(ours.losses), torch.tensor(theirs.losses)), (ours.losses, theirs.losses)
        assert len(set(theirs.losses)) == len(theirs.losses), "a loss came twice: nothing was trained"
    for step, weights in enumerate(whole[0].weights):
        assert all(ours.weights[step].keys() == weights.keys() for ours in sharded)
        for name in weights:
            for ranks in [range(len(sharded))] if holders is None else holders(name):
                parts = [sharded[rank] for rank in ranks]
                _assert_parameter_agrees(name, step, parts, whole[ranks[0]], replicas, same)


def _assert_parameter_agrees(
    name: str,
    step: int,
    parts: Sequence[Sharded],
    whole: Trained,
    replicas: int,
    same: Callable[[Tensor, Tensor], bool],
) -> None:
    weight = whole.weights[step][name]
    put_together = whole_of([part.weights[step][name] for part in parts], weight.shape, replicas)
    assert put_together.dtype == weight.dtype
    assert same(put_together, weight), f"{name} after step {step}"
    pieces = [part.grads[step][name] for part in parts]
    expected = whole.grads[step].get(name)
    if expected is None:
        assert pieces == [None] * len(pieces), f"gradient of {name} in step {step}"
        return
    grad = whole_of([piece for piece in pieces if piece is not None], weight.shape, replicas)
    assert grad.dtype == expected.values.dtype
    assert same(grad.view(-1), expected.values), f"gradient of {name} in step {step}"
