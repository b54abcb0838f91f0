"""Mistakes of users' programs, one in each model: ``verify`` names the cause, and the parameter or module at fault."""

import copy
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from maingrad.ddp import WORLD_OF_ONE
from maingrad.launch import verify

ROWS, DIM = 8, 6
WAYS = ("ddp", "zero1_converted", "fsdp_converted")


class Net(nn.Module):
    """Two blocks and a head; the mistakes are made in subclasses. The loss of each row is a function of this row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.head = nn.Linear(DIM, 1)

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(self.features(x)) - x.sum(-1, keepdim=True)).square().mean()


class Planted(NamedTuple):
    """What a program does, and what is to be found."""

    make: Callable[[], nn.Module]
    cause: str
    parameter: str = ""
    """One of the finding's parameters."""
    module: str = ""
    """The finding's."""
    is_note: bool = False
    ways: tuple[str, ...] = WAYS
    options: Mapping[str, Any] = {}
    batch: Callable[[], Any] = lambda: torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))


# ---- The loss. ----


class SummedLoss(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * len(x)


class MeanOverTokens(Net):
    """Padding rows are left out of the mean; the parts have different numbers of them."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        errors = (self.head(self.features(x)) - 1).square().squeeze(-1)
        return (errors * mask).sum() / mask.sum()


def masked_batch() -> dict[str, Tensor]:
    x = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
    return {"x": x, "mask": torch.tensor([1.0, 1, 1, 0, 1, 1, 0, 1])}


def batch_with_an_empty_part() -> dict[str, Tensor]:
    return {**masked_batch(), "mask": torch.tensor([1.0, 1, 1, 0, 1, 1, 0, 0])}


class Contrastive(Net):
    """Each row's loss compares it with all rows of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        return F.cross_entropy(y @ y.T + self.head(y).T, torch.arange(len(x)))


class LossOfTheRank(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + dist.get_rank())


class BadGradient(Net):
    """The root has no finite derivative at zero."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.head.bias * 0).sqrt().sum()


# ---- What is random, and what remembers. ----


class ChosenExpert(Net):
    """Each row goes to one of two experts; an expert without rows does not run."""

    def features(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long()
        y = x
        for index, block in enumerate(self.blocks):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, block(x[rows]))
        return y


def batch_of_which_ranks_choose_other_experts() -> Tensor:
    x = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
    x[:, 0] = torch.tensor([1.0, 1, 1, 1, -1, -1, -1, -1])
    return x


class LayerOfSomeBatches(Net):
    """Runs its second layer if the sum over all rows is positive."""

    def features(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x).tanh()
        return self.blocks[1](y).tanh() if x.sum() > 0 else y


def batch_whose_parts_have_other_signs() -> Tensor:
    x = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
    x[:2] += 1
    x[2:] -= 1
    return x


class Dropout(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def features(self, x: Tensor) -> Tensor:
        return self.drop(super().features(x))


class Noise(Net):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x + torch.randn_like(x))


class GeneratorOfItsOwn(Net):
    """Its random state is no copy's and no seed's."""

    generator = torch.Generator()

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * (1 + torch.rand((), generator=self.generator))


class Normalised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(super().features(x))


class Centred(nn.Module):
    """Batch normalisation without buffers."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class CentredRows(Net):
    def __init__(self) -> None:
        super().__init__()
        self.centre = Centred()

    def features(self, x: Tensor) -> Tensor:
        return self.centre(super().features(x))


class Counter(Net):
    """Warm-up by the number of forwards, which is no number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x) / self.num_calls


class CallsOfAllModels(Net):
    """A counter that copies share."""

    calls: list[int] = []  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return super().forward(x) * len(self.calls)


class MovingAverage(Net):
    """A teacher that forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)
        nn.init.zeros_(self.teacher.weight)

    def forward(self, x: Tensor) -> Tensor:
        self.teacher.weight.data.lerp_(self.head.weight.data, 0.5)
        y = self.features(x)
        return (self.head(y) - self.teacher(y)).square().mean()


class SystemRandom(Net):
    """Another number in each call, whatever the seed."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.SystemRandom().uniform(1, 2)


# ---- The graph. ----


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(DIM, DIM)


class Detached(Net):
    def features(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x).tanh().detach()
        return self.blocks[1](x).tanh()


class WithoutGrad(Net):
    def features(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[0](x).tanh()
        return self.blocks[1](x).tanh()


def with_harmless_hook() -> nn.Module:
    """Scales a gradient, which is linear; fully_shard calls no hook of a parameter."""
    net = Net()
    net.head.weight.register_hook(lambda grad: 2 * grad)
    return net


def with_hook() -> nn.Module:
    """Clips each microbatch's gradient."""
    net = Net()
    net.blocks[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return net


def with_hook_after_accumulation() -> nn.Module:
    def clip(param: Tensor) -> None:
        param.grad.clamp_(-0.01, 0.01)

    net = Net()
    net.blocks[0].weight.register_post_accumulate_grad_hook(clip)
    return net


def with_hook_before_a_modules_backward() -> nn.Module:
    net = Net()
    net.blocks[1].register_full_backward_pre_hook(lambda module, grads: tuple(grad / grad.norm() for grad in grads))
    return net


class Hooked(Net):
    """Clips the gradient of an activation, by a module's hook."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_full_backward_hook(_normalise)


def _normalise(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    return tuple(None if grad is None else grad / grad.norm() for grad in grad_input)


# ---- Parameters. ----


class MakesParameter(Net):
    """Makes a parameter anew in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())
        return super().forward(x)


class ReadsElsewhere(Net):
    """Uses a block's weight outside of the block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.blocks[0].weight).square().mean()


class OnceLinear(nn.Linear):
    """Its forward does not run within a backward, as a recomputed one would."""

    def forward(self, x: Tensor) -> Tensor:
        assert torch._C._current_graph_task_id() == -1, "within a backward"
        return super().forward(x)


class ReadsElsewhereOnce(ReadsElsewhere):
    """A cause that is found without recompute, which this program does not bear."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(2):
            once = OnceLinear(DIM, DIM)
            once.load_state_dict(self.blocks[index].state_dict())
            self.blocks[index] = once


class OnceLinearNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OnceLinear(DIM, DIM) for _ in range(2))


class KeepsWeight(Net):
    """Has a list of weights beside its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.head.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(self.features(x), self.weights[0]).square().mean()


class AddsLayer(Net):
    """Makes a layer in the first forward."""

    def features(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(DIM, DIM)
        return self.late(super().features(x))


class OneMemory(Net):
    """Two parameters over one memory, meant to be tied."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].weight = nn.Parameter(self.blocks[0].weight.data)


def wrong_expert_group() -> nn.Module:
    """All ranks have this layer alike, and its gradient is reduced over each rank alone."""
    net = Net()
    for param in net.blocks[1].parameters():
        param.allreduce = False
    return net


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(1)


PLANTED: dict[str, Planted] = {
    "loss is a sum": Planted(SummedLoss, "sum", "head.weight"),
    "mean over tokens": Planted(MeanOverTokens, "weighted_mean", "head.bias", batch=masked_batch),
    "a part without tokens": Planted(MeanOverTokens, "not_finite", "head.bias", batch=batch_with_an_empty_part),
    "rows compared in the loss": Planted(Contrastive, "mixed_rows", "head.weight"),
    "loss of the rank": Planted(LossOfTheRank, "rank", "head.weight"),
    "gradient is not finite": Planted(BadGradient, "not_finite", "head.bias"),
    "dropout": Planted(Dropout, "random", is_note=True),
    "noise": Planted(Noise, "random", is_note=True),
    "a generator of its own": Planted(GeneratorOfItsOwn, "not_reproducible", "head.weight"),
    "batch normalisation": Planted(Normalised, "batch_statistics", "norm.weight", module="norm"),
    "a layer of some batches": Planted(
        LayerOfSomeBatches, "mixed_rows", "blocks.1.bias", batch=batch_whose_parts_have_other_signs, ways=("ddp",)
    ),
    "an expert that some ranks run": Planted(
        ChosenExpert, "refused", batch=batch_of_which_ranks_choose_other_experts, ways=("zero1", "fsdp", "fsdp_delayed")
    ),
    "rows centred": Planted(CentredRows, "mixed_rows", "head.weight"),
    "a counter": Planted(Counter, "state", "head.weight"),
    "a counter of all models": Planted(CallsOfAllModels, "not_reproducible", "head.weight"),
    # fully_shard refuses the write to the teacher's weight by name.
    "an average that forward updates": Planted(MovingAverage, "state", "head.weight", ways=("ddp", "zero1_converted")),
    "the system's random numbers": Planted(SystemRandom, "not_reproducible", "head.weight"),
    "unused": Planted(Unused, "unused", "extra.weight", is_note=True),
    "detached": Planted(Detached, "unused", "blocks.0.weight", is_note=True),
    "no_grad": Planted(WithoutGrad, "unused", "blocks.0.bias", is_note=True),
    "hook that a way does not call": Planted(with_harmless_hook, "hook", "head.weight", ways=("ddp", "fsdp")),
    "hook of a parameter": Planted(with_hook, "hook", "blocks.0.weight", ways=("ddp", "zero1_converted")),
    "hook of a module": Planted(Hooked, "hook", module="blocks.1"),
    "hook before a module's backward": Planted(
        with_hook_before_a_modules_backward, "hook", module="blocks.1", ways=("ddp",)
    ),
    "hook after accumulation": Planted(with_hook_after_accumulation, "hook", "blocks.0.weight", ways=("ddp",)),
    "parameter made in forward": Planted(MakesParameter, "replaced", "head.weight"),
    "weight read elsewhere": Planted(
        ReadsElsewhere, "read_elsewhere", "blocks.0.weight", ways=(*WAYS, "fsdp_recompute")
    ),
    "weight of a layer that runs once": Planted(
        ReadsElsewhereOnce, "read_elsewhere", "blocks.0.weight", ways=("ddp", "fsdp")
    ),
    "a layer that runs once": Planted(OnceLinearNet, "not_recomputable", ways=("ddp", "fsdp", "ddp_recompute")),
    "weight in a list": Planted(KeepsWeight, "read_elsewhere", "head.weight"),
    "layer made in forward": Planted(AddsLayer, "replaced", "late.weight"),
    "two parameters, one memory": Planted(OneMemory, "shared_memory", "blocks.1.weight"),
    "expert in the wrong group": Planted(
        wrong_expert_group,
        "expert_ranks",
        "blocks.1.weight",
        ways=("ddp", "zero1_converted"),
        options={"expert_process_group": WORLD_OF_ONE},
    ),
    "lazy": Planted(Lazy, "replaced", "head.weight"),
}


class DropoutAndMeanOverTokens(MeanOverTokens):
    def features(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().features(x), 0.5)


def test_the_table_of_a_random_program_shows_the_error_that_is_found() -> None:
    found = verify(DropoutAndMeanOverTokens(), masked_batch(), ways=("ddp", "fsdp"))
    (error,) = [finding for finding in found.findings if not finding.is_note]
    assert error.cause == "weighted_mean"
    for result in found.results:
        assert not result.ok
        assert result.grad_error == pytest.approx(error.error, rel=1e-3)
        assert result.norm_error > 1e-3


@pytest.mark.in_turn
@pytest.mark.sampled(len(PLANTED))
@pytest.mark.parametrize("name", PLANTED)
def test_the_cause_is_named(name: str) -> None:
    planted = PLANTED[name]
    found = verify(planted.make(), planted.batch(), ways=planted.ways, **planted.options)
    causes = {str(finding.cause): finding for finding in found.findings}
    assert planted.cause in causes, str(found)
    finding = causes[planted.cause]
    assert not planted.parameter or planted.parameter in finding.parameters, str(found)
    assert not planted.module or planted.module == finding.module, str(found)
    assert finding.is_note == planted.is_note
    assert found.ok == planted.is_note, str(found)
    notes = {"random", "unused"}  # of forwards that draw weights, or leave a layer out
    assert causes.keys() - notes == {planted.cause} - notes, f"one mistake, and several causes: {found}"


def test_the_memory_of_a_functions_models_is_looked_at() -> None:
    found = verify(OneMemory, torch.randn(ROWS, DIM), ways=("ddp",))
    assert "shared_memory" in [str(finding.cause) for finding in found.findings]


def test_parameters_side_by_side_in_one_memory_are_none_of_the_others() -> None:
    """As in a flat buffer; and all that overlap are named, wherever they lie in it."""

    def make(overlap: int = 0) -> nn.Module:
        model, memory = nn.ParameterList(), torch.arange(1.0, 9.0)
        for place in (0, 4, 6 - overlap):
            model.append(nn.Parameter(memory[place : place + (4 if place == 0 else 2)]))
        return model

    def step(model: Any, batch: Tensor) -> Tensor:
        return (batch.mean() * sum(param.sum() for param in model.parameters())).square()

    assert verify(make, torch.ones(ROWS, 1), step=step, ways=("ddp",)).ok
    found = verify(lambda: make(1), torch.ones(ROWS, 1), step=step, ways=("ddp",))
    assert [each.parameters for each in found.findings if each.cause == "shared_memory"] == [("1", "2")], str(found)
