"""One training program over ``fully_shard``, run eagerly or as a graph: the same numbers, bit for bit."""

import contextlib
import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from graphed_training import EVENTS as REPLICATED_EVENTS
from graphed_training import LENGTH, Model, compute_delayed, drawn_batch
from torch import Tensor

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp import GraphedTrainingStep as GraphedOfWrapper
from maingrad.fsdp import GraphedTrainingStep, MixedPrecisionPolicy, fully_shard
from maingrad.te_integration import WgradQueue, delayed_wgrad

__all__ = ["EVENTS", "PLACEMENTS", "ShardedProgram", "train_sharded_program", "train_with_teacher"]

PLACEMENTS = ("zero1", "zero2", "zero3")
EVENTS = (*REPLICATED_EVENTS, "unshards", "scales weights")


@dataclass(frozen=True, kw_only=True)
class ShardedProgram:
    """A program a user would write."""

    placements: str = "zero3"
    form: str = "fused"
    microbatches: int = 2
    clip: float | None = 1.0
    dtype: torch.dtype = torch.float32
    """Of the shards; computation is in bf16."""
    events: tuple[str, ...] = ()
    optimizer: str = "AdamW"
    scaler: bool = False
    reshards: bool | None = None
    every_microbatch: bool | None = None
    steps: int = 7
    device: str = "cpu"
    mesh: Any = None


def train_sharded_program(program: ShardedProgram, *, graphed: bool) -> dict[str, Any]:
    """Run the program on this rank; returns all that a program can see."""
    return _Job(program, graphed).run()


class _Job:
    def __init__(self, program: ShardedProgram, graphed: bool) -> None:
        self.program = program
        self.device = torch.device(program.device)
        torch.manual_seed(0)
        model = Model(program.form).to(self.device, program.dtype)
        model.seen = model.seen.float()
        if program.form == "compiled":
            for block in model.blocks:
                block.compile(fullgraph=True, backend="inductor" if self.device.type == "cuda" else "aot_eager")
        options: dict[str, Any] = {
            "reshard_after_forward": program.reshards,
            "reduce_every_microbatch": program.every_microbatch,
        }
        for module in (*model.blocks, model):
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            fully_shard(module, program.mesh, program.placements, policy, **options)
        self.model: Any = model
        rest = {"momentum": 0.5} if program.optimizer == "SGD" else {"weight_decay": 0.125}
        norms = [param for name, param in model.named_parameters() if "norm" in name]
        others = [param for name, param in model.named_parameters() if "norm" not in name and param.requires_grad]
        self.optimizer = getattr(torch.optim, program.optimizer)(
            [{"params": others}, {"params": norms, "weight_decay": 0.0}], lr=2**-6, fused=True, **rest
        )
        self.scaler = (
            torch.amp.GradScaler(self.device.type, init_scale=2.0**10, growth_interval=2) if program.scaler else None
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.graphed = GraphedTrainingStep(self.train_step, model, self.optimizer) if graphed else None
        self.step = self.graphed or self.train_step
        self.queue = WgradQueue()
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.draws = torch.Generator().manual_seed(100 + self.rank)
        self.seen: list[Any] = []

    def train_step(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """One iteration: tokens and targets [M, B, T]."""
        losses = []
        for index in range(len(tokens)):
            last = index == len(tokens) - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                delays = delayed_wgrad(self.queue) if self.program.form == "queue" else contextlib.nullcontext()
                with delays:
                    logits = self.model(tokens[index]).float()
                    loss = F.cross_entropy(logits.flatten(0, 1), targets[index].flatten(), ignore_index=-1)
                share = loss / len(tokens)
                (share if self.scaler is None else self.scaler.scale(share)).backward()
            losses.append(loss.detach())
        self.queue.drain()
        compute_delayed(self.model)
        self.model.finish_grad_sync()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        found = {"losses": torch.stack(losses), "last": losses[-1]}
        if self.program.clip is not None:
            found["norm"] = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.program.clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        return found

    def batch(self, rows: int = 2) -> tuple[Tensor, Tensor]:
        return drawn_batch((self.program.microbatches, rows, LENGTH), self.draws, self.device)

    def shards(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}

    def run(self) -> dict[str, Any]:
        kept: list[Any] = []
        replays = 0
        first = copy.deepcopy(self.model.state_dict()) if "loads weights" in self.program.events else {}
        averaged = self.shards()
        torch.manual_seed(7 + self.rank)
        for number in range(self.program.steps):
            kept.append(self.step(*self.batch(3 if "other shape" in self.program.events and number == 4 else 2)))
            replays += self.graphed is not None and self.graphed.num_graphs > 0
            self.scheduler.step()
            if number in (1, 3, 5):
                self._events(number, first, averaged)
        seen = {
            "kept": kept,
            "seen": self.seen,
            "shards": self.shards(),
            "module": {name: value.clone() for name, value in self.model.state_dict().items()},
            "optimizer": {place: dict(self.optimizer.state[param]) for place, param in enumerate(self._stepped())},
            "lr": self.scheduler.get_last_lr(),
            "scale": None if self.scaler is None else self.scaler.state_dict(),
            "averaged": averaged,
            "grads": [param.grad is None for param in self.model.parameters()],
            "generator": torch.get_rng_state() if self.device.type == "cpu" else torch.cuda.get_rng_state(self.device),
        }
        if self.graphed is not None:
            assert replays >= 4, "captures are few"
        return seen

    def _stepped(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _events(self, number: int, first: dict[str, Tensor], averaged: dict[str, Tensor]) -> None:
        """What programs do between steps."""
        events, model, optimizer = self.program.events, self.model, self.optimizer
        if "evaluate" in events:
            model.eval()
            with torch.no_grad():
                self.seen.append(model(self.batch()[0][0]).clone())
            model.train()
        if "rank 0 reads" in events and self.rank == 0:
            self.seen.append(sum(float(param.detach().float().norm()) for param in model.parameters()))
        if "state dict" in events:
            self.seen.append({name: value.clone() for name, value in model.state_dict().items()})
        if "EMA" in events:
            for name, value in self.shards().items():
                averaged[name].lerp_(value, 0.25)
        if "loads weights" in events and number == 3:
            model.load_state_dict(first)
        if "loads optimizer" in events:
            saved = copy.deepcopy(optimizer.state_dict())
            for group in saved["state"].values():
                group.get("exp_avg", torch.zeros(())).mul_(0.5)
            optimizer.load_state_dict(saved)
        if "aborts" in events:
            handle = model.blocks[1].register_forward_hook(_fails_in_backward)
            with contextlib.suppress(ArithmeticError):
                model(self.batch()[0][0]).float().sum().backward()
            handle.remove()
            optimizer.zero_grad()
        if "adversary" in events:
            with model.no_sync():
                model(self.batch()[0][0]).float().square().mean().backward()
            optimizer.zero_grad()
        if "eager step" in events and number == 3:
            self.seen.append(self.train_step(*self.batch()))
        if "other decay" in events and number == 3:
            optimizer.param_groups[0]["weight_decay"] = 0.25
        if "mode" in events and number == 3:
            model.blocks[0].eval()
        if "unshards" in events:
            with model.unsharded():
                self.seen.append({name: value.detach().float().clone() for name, value in model.named_parameters()})
        if "scales weights" in events and number == 3:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)


def _fails_in_backward(module: Any, args: Any, output: Tensor) -> Tensor:
    def fail(grad: Tensor) -> Tensor:
        raise ArithmeticError("the program's own")

    output.register_hook(fail)
    return output


def train_with_teacher(student: str, teacher: str, *, graphed: bool, device: str = "cpu", group: Any = None) -> Any:
    """Distillation: the teacher's weights change between steps. Returns losses and the student's weights.

    student, teacher  placements of ``fully_shard``; "ddp": ZeRO-1 under ``DistributedDataParallel``
    """
    torch.manual_seed(0)
    models: list[Any] = []
    for placements in (student, teacher):
        model: Any = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))).to(device)
        if placements == "ddp":
            config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)
            model = DistributedDataParallel(model, config, process_group=group)
        else:
            for module in (*model, model):
                fully_shard(module, group, placements)
        models.append(model)
    learner, wise = models
    wraps = student == "ddp"
    optimizer: Any = (
        DistributedOptimizer(learner, lr=2**-6)
        if wraps
        else torch.optim.AdamW(learner.parameters(), lr=2**-6, fused=True)
    )
    own = DistributedOptimizer(wise, lr=2**-5) if teacher == "ddp" else None

    def train_step(x: Tensor) -> Tensor:
        with torch.no_grad():
            goal = wise(x)
        loss = F.mse_loss(learner(x), goal)
        loss.backward()
        if wraps:
            learner.finish_grad_sync()
        optimizer.step()
        if wraps:
            learner.zero_grad_buffer()
        else:
            optimizer.zero_grad()
        return loss

    step_class: Any = GraphedOfWrapper if wraps else GraphedTrainingStep
    step = step_class(train_step, learner, optimizer) if graphed else train_step
    draws = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    losses = []
    for number in range(8):
        losses.append(step(torch.randn(4, 8, generator=draws).to(device)).detach())
        if own is not None and number % 2:
            wise(torch.ones(2, 8, device=device)).square().mean().backward()
            wise.finish_grad_sync()
            own.step()
            wise.zero_grad_buffer()
        elif own is None:
            with torch.no_grad():
                for param in wise.parameters():
                    param.mul_(0.75)
    if graphed:
        assert step.num_graphs == 1
    if wraps:
        optimizer.finish_param_sync()
    return {"losses": losses, "weights": [param.detach().clone() for param in learner.parameters()]}
