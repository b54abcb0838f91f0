"""Training under a recipe as users write it, with what users do between iterations. Scripts take sources from here."""

import dataclasses

import torch
import torch.distributed as dist
from torch import nn

import maingrad.te_integration as te_integration
from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, GradScaler
from maingrad.fsdp import fully_shard
from maingrad.kernels.quantized import Element, QuantSpec, ScaleForm
from maingrad.te_integration import DelayedScaling, LayerNormMLP, Linear, Recipe


def powers_of_two(operand, height):
    return QuantSpec(Element.E4M3, (height if operand == "weight" else 1, 16), ScaleForm.POWER_OF_TWO)


class OwnByAttribute(Recipe):
    def __init__(self, height):
        super().__init__()
        self.height = height

    def spec(self, operand, *, columns):
        return powers_of_two(operand, self.height)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnByField(Recipe):
    height: int

    def spec(self, operand, *, columns):
        return powers_of_two(operand, self.height)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnByUncompared(Recipe):
    height: int = dataclasses.field(compare=False)

    def spec(self, operand, *, columns):
        return powers_of_two(operand, self.height)


def recipe_of(kind, height):
    own = {"attribute": OwnByAttribute, "field": OwnByField, "uncompared": OwnByUncompared}
    return DelayedScaling(amax_history_len=3) if kind == "delayed" else own[kind](height=height)


class UnderRecipe:
    """A model in a wrapper, its optimizer, and a batch for each seed."""

    def __init__(self, wrapper, kind):
        torch.manual_seed(0)
        module = nn.Sequential(
            LayerNormMLP(16, 24, fuse_wgrad_accumulation=True, dtype=torch.bfloat16),
            Linear(16, 16, fuse_wgrad_accumulation=True, dtype=torch.bfloat16),
        )
        with torch.no_grad():
            module[1].weight[::2] *= 2.0**-12  # a scale for all rows rounds these to 0
        self.kind, self.module, self.is_sharded = kind, module, wrapper in ("zero2", "zero3")
        if self.is_sharded:
            fully_shard(module[0], placements=wrapper)
            self.model = fully_shard(module, placements=wrapper)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        else:
            config = DistributedDataParallelConfig(use_distributed_optimizer=wrapper == "zero1")
            self.model = DistributedDataParallel(module, config)
            self.optimizer = (
                torch.optim.SGD(self.model.parameters(), lr=0.01)
                if wrapper == "stock"
                else DistributedOptimizer(self.model, lr=0.01, optimizer_class=torch.optim.SGD)
            )
        self.exposes = wrapper == "stock"
        self.scaler = GradScaler("cpu", init_scale=4.0)
        self.kept = []

    def loss(self, seed, height=1, size=1.0):
        draws = torch.Generator().manual_seed(100 * seed + dist.get_rank())
        self.x = (torch.randn(4, 16, generator=draws) * size).to(torch.bfloat16).requires_grad_()
        with te_integration.autocast(recipe=recipe_of(self.kind, height)):
            self.y = self.model(self.x)
        return self.y.float().square().mean()

    def reduce(self):
        self.model.finish_grad_sync()
        if self.exposes:
            self.model.expose_grads()

    def clear(self):
        if not self.is_sharded:
            self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self, by_scaler):
        self.reduce()
        if by_scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update(4.0)
        else:
            self.optimizer.step()
        self.clear()

    def disturb(self, what, seed):
        """What leaves no trace. All but the first few need an iteration that has not begun."""
        if what == "look":
            self.loss(seed, size=64.0)
        elif what == "kept":
            self.kept.append(self.loss(seed, size=64.0))
        elif what == "input's gradient":
            torch.autograd.grad(self.loss(seed, size=64.0) * 64.0, self.x)
        elif what == "evaluation":
            with torch.no_grad():
                self.loss(seed, size=64.0)
        elif what == "frozen":
            self.model.requires_grad_(False)
            (self.loss(seed, size=64.0) * 64.0).backward()
            self.model.requires_grad_(True)
        elif what == "given up":
            with self.model.no_sync():
                (self.loss(seed, size=64.0) * 64.0).backward()
            self.clear()
        elif what == "raises":
            loss = self.loss(seed, size=64.0)
            self.x.register_hook(self.fail)
            try:
                (loss * 64.0).backward()
            except KeyError:
                self.clear()
        elif what == "skipped":
            (self.loss(seed, size=64.0) * 64.0).backward()
            self.reduce()
            self.clear()
        elif what == "overflow":
            self.scaler.scale(self.loss(seed) * torch.inf).backward()
            self.step(by_scaler=True)

    def fail(self, grad):
        raise KeyError("a hook of the program's own")


def recipe_run(wrapper, kind, iterations, disturbed):
    """What a rank sees. Each iteration: its microbatches, which of them is disturbed by what, and whether by a scaler.

    kind  of the recipe; undisturbed, a program's own has a field that is compared
    """
    run = UnderRecipe(wrapper, kind if disturbed or kind == "delayed" else "field")
    seen = {}
    for number, (heights, before, among, by_scaler) in enumerate(iterations):
        if disturbed:
            run.disturb(before, 50 + number)
        for index, height in enumerate(heights):
            loss = run.loss(10 * number + index, height)
            seen[f"output {number}.{index}"] = run.y.detach().float()
            loss = run.scaler.scale(loss) if by_scaler else loss
            if index == len(heights) - 1:
                loss.backward()
                continue
            with run.model.no_sync():
                loss.backward()
            if disturbed:
                run.disturb(among, 70 + number)
        run.step(by_scaler)
    scales = [value.flatten() for name, value in run.module.state_dict().items() if "fp8_" in name]
    return seen | {"scales": torch.cat(scales) if scales else torch.zeros(0)}
