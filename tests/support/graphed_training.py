"""One training program, run eagerly or as a ``GraphedTrainingStep``: both must give the same numbers, bit for bit."""

import contextlib
import copy
import io
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import maingrad
from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    GradScaler,
    GraphedTrainingStep,
)
from maingrad.te_integration import Embedding, LayerNormMLP, Linear, WgradQueue, delayed_wgrad

__all__ = [
    "CONFIGS",
    "EVENTS",
    "FORMS",
    "LENGTH",
    "STATES",
    "Model",
    "Program",
    "compute_delayed",
    "differences",
    "drawn_batch",
    "train",
]

WIDTH, VOCAB, LENGTH = 16, 32, 6

CONFIGS: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "all-reduce, overlap": {"overlap_grad_reduce": True},
    "ZeRO-1": {"use_distributed_optimizer": True},
    "ZeRO-1, overlap": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "ZeRO-1, released": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "release_grads": True},
}
FOUR_RANKS = {"hybrid": {**CONFIGS["ZeRO-1, overlap"], "num_distributed_optimizer_instances": 2}}
COPY_ENGINES = {**CONFIGS["ZeRO-1, overlap"], "copy_engine_param_gather": True}
STATES: dict[str, dict[str, Any]] = {
    "full": {},
    "compact": {"state": "compact"},
    "on the host": {"offload_state": "host"},
    "compact, on the host": {"state": "compact", "offload_state": "host"},
}
FORMS = ("plain", "fused", "delayed", "queue", "recompute", "compiled", "dropout")
EVENTS = (
    "evaluate",
    "rank 0 reads",
    "state dict",
    "loads weights",
    "loads optimizer",
    "aborts",
    "adversary",
    "eager step",
    "EMA",
    "other decay",
    "other shape",
    "mode",
)


class Block(nn.Module):
    """Fused, plain and normalising layers."""

    def __init__(self, form: str) -> None:
        super().__init__()
        fused = {"fuse_wgrad_accumulation": form != "plain", "delay_wgrad_compute": form == "delayed"}
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Linear(WIDTH, 2 * WIDTH, **fused)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.mlp = LayerNormMLP(WIDTH, 2 * WIDTH, **fused)
        self.dropout = nn.Dropout(0.3 if form == "dropout" else 0.0)
        self.recompute = form == "recompute"

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            y: Tensor = checkpoint(self.compute, x, use_reentrant=False)
            return y
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return x + self.mlp(x)


class Model(nn.Module):
    """(tokens [B, T]) -> logits [B, T, V]. The embedding is tied to the head; one parameter is frozen."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.embedding = Embedding(VOCAB, WIDTH, padding_idx=3, fuse_wgrad_accumulation=form != "plain")
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5), requires_grad=False)
        self.blocks = nn.ModuleList(Block(form) for _ in range(2))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embedding.weight)


def drawn_batch(shape: tuple[int, int, int], draws: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and targets [M, B, T]; the last target of each row is to be ignored."""
    tokens, targets = (torch.randint(0, VOCAB, shape, generator=draws) for _ in range(2))
    targets[..., -1] = -1
    return tokens.to(device), targets.to(device)


def compute_delayed(model: nn.Module) -> None:
    """All weight gradients that the modules have delayed."""
    for module in model.modules():
        if getattr(module, "wgrad_queue", None) is not None:
            while module.need_backward_dw():
                module.backward_dw()


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program a user would write."""

    config: str = "ZeRO-1, overlap"
    form: str = "fused"
    microbatches: int = 2
    clip: float | None = 1.0
    dtype: torch.dtype = torch.bfloat16
    events: tuple[str, ...] = ()
    optimizer: str = "AdamW"
    state: str = "full"
    """Of the optimizer: a key of ``STATES``."""
    per_token: bool = False
    scaler: bool = False
    steps: int = 7
    auto: bool = False
    """By ``maingrad.graphed``, which would stay eager without an error."""
    device: str = "cpu"


def train(program: Program, *, graphed: bool, group: Any = None) -> dict[str, Any]:
    """Run the program on this rank; returns all that a program can see."""
    return _Job(program, graphed, group).run()


def differences(eager: dict[str, Any], graphed: dict[str, Any]) -> list[str]:
    """Names of the results that are not equal bit for bit."""
    assert eager.keys() == graphed.keys()
    return [name for name in eager if not _equal(eager[name], graphed[name])]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype is b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


class _Job:
    def __init__(self, program: Program, graphed: bool, group: Any) -> None:
        self.program = program
        self.device = torch.device(program.device)
        torch.manual_seed(0)
        module = Model(program.form).to(self.device, program.dtype)
        if program.form == "compiled":
            for block in module.blocks:
                block.compile(fullgraph=True, backend="inductor" if self.device.type == "cuda" else "aot_eager")
        options = {
            **(CONFIGS | FOUR_RANKS).get(program.config, COPY_ENGINES),
            "bucket_size": 600,
            "calculate_per_token_loss": program.per_token,
        }
        self.model = DistributedDataParallel(module, DistributedDataParallelConfig(**options), process_group=group)
        rest = {"momentum": 0.5} if program.optimizer == "SGD" else {"weight_decay": 0.125}
        self.optimizer = DistributedOptimizer(
            self.model,
            lr=2**-6,  # exact in fp32
            optimizer_class=getattr(torch.optim, program.optimizer),
            **STATES[program.state],
            max_grad_norm=program.clip,
            param_groups=[{"params": "*norm*", "weight_decay": 0.0}],
            **rest,
        )
        self.scaler = GradScaler(self.device.type, init_scale=2.0**10, growth_interval=2) if program.scaler else None
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.graphed: Any = None
        if graphed and program.auto:
            self.graphed = maingrad.graphed(self.train_step, self.model, self.optimizer, record_on_cpu=True)
        elif graphed:
            self.graphed = GraphedTrainingStep(self.train_step, self.model, self.optimizer)
        self.step = self.graphed or self.train_step
        self.queue = WgradQueue()
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.rank = rank
        self.draws = torch.Generator().manual_seed(100 + rank)
        self.observed: list[Any] = []

    def train_step(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """One iteration: tokens and targets [M, B, T]."""
        losses = []
        for index in range(len(tokens)):
            last = index == len(tokens) - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                delays = delayed_wgrad(self.queue) if self.program.form == "queue" else contextlib.nullcontext()
                with delays:
                    logits = self.model(tokens[index]).float()
                    loss = F.cross_entropy(
                        logits.flatten(0, 1),
                        targets[index].flatten(),
                        reduction="sum" if self.program.per_token else "mean",
                        ignore_index=-1,
                    )
                share = loss if self.program.per_token else loss / len(tokens)
                (share if self.scaler is None else self.scaler.scale(share)).backward()
            losses.append(loss.detach())
        self.queue.drain()
        compute_delayed(self.model)
        self.model.finish_grad_sync((targets >= 0).sum() if self.program.per_token else None)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.model.zero_grad_buffer()
        return {"losses": torch.stack(losses), "last": losses[-1]}

    def batch(self, rows: int = 2) -> tuple[Tensor, Tensor]:
        return drawn_batch((self.program.microbatches, rows, LENGTH), self.draws, self.device)

    def run(self) -> dict[str, Any]:
        kept: list[Any] = []
        norms: list[Any] = []
        first = copy.deepcopy(self.model.module.state_dict())
        averaged = {name: value.float().clone() for name, value in first.items()}
        torch.manual_seed(7 + self.rank)
        for number in range(self.program.steps):
            kept.append(self.step(*self.batch(3 if "other shape" in self.program.events and number == 4 else 2)))
            norms.append(self.optimizer.grad_norm)
            self.scheduler.step()
            if number in (1, 3, 5):
                self._events(number, first, averaged)
        self.optimizer.finish_param_sync()
        state = self.optimizer.state_dict()
        seen = {
            "kept": kept,
            "norms": norms,
            "seen": self.observed,
            "module": {name: value.clone() for name, value in self.model.module.state_dict().items()},
            "optimizer": dict(state["state"]),
            "masters": state["masters"],
            "iteration": self.model.iteration,
            "lr": self.scheduler.get_last_lr(),
            "scale": None if self.scaler is None else self.scaler.state_dict(),
            "averaged": averaged,
            "phases": [bucket.phase.value for bucket in self.model.buckets],
            "flags": [getattr(param, "grad_added_to_main_grad", None) for param in self.model.module.parameters()],
            "grads": [param.grad is None for param in self.model.module.parameters()],
            "generator": torch.get_rng_state() if self.device.type == "cpu" else torch.cuda.get_rng_state(self.device),
        }
        if self.graphed is not None:
            assert self.graphed.num_graphs >= 1, getattr(self.graphed, "why_eager", "it never got to its capture")
        return seen

    def _events(self, number: int, first: dict[str, Tensor], averaged: dict[str, Tensor]) -> None:
        """What programs do between steps."""
        events, model, optimizer = self.program.events, self.model, self.optimizer
        if "evaluate" in events:
            model.eval()
            with torch.no_grad():
                self.observed.append(model(self.batch()[0][0]).clone())
            model.train()
        if "rank 0 reads" in events and self.rank == 0:
            self.observed.append(sum(float(param.detach().float().norm()) for param in model.module.parameters()))
        if "state dict" in events:
            file = io.BytesIO()
            torch.save(model.module.state_dict(), file)
            file.seek(0)
            self.observed.append(torch.load(file, map_location="cpu"))
        if "EMA" in events:
            for name, value in model.module.state_dict().items():
                averaged[name].lerp_(value.float(), 0.25)
        if "loads weights" in events and number == 3:
            model.module.load_state_dict(first)
        if "loads optimizer" in events:
            saved = copy.deepcopy(optimizer.state_dict())
            for group in saved["state"].values():
                group.get("exp_avg", torch.zeros(())).mul_(0.5)
            optimizer.load_state_dict(saved)
        if "aborts" in events:
            model(self.batch()[0][0]).float().sum().backward()
            model.abandon_iteration()
        if "adversary" in events:
            with model.no_sync():
                model(self.batch()[0][0]).float().square().mean().backward()
            model.zero_grad_buffer()
        if "eager step" in events and number == 3:
            self.observed.append(self.train_step(*self.batch()))
        if "other decay" in events and number == 3:
            optimizer.param_groups[-1]["weight_decay"] = 0.25
        if "mode" in events and number == 3:
            model.module.blocks[0].eval()
