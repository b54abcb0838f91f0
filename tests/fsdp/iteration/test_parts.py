"""Sharded units that a schedule runs by turns, each turn with a backward of its own: ``model.grad_parts``."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from sharded_twin import options_of, ranks_of
from torch import Tensor, nn

from maingrad.fsdp import fully_shard
from maingrad.fsdp.iteration.rounds import State
from maingrad.fsdp.module import root_of, unit_of
from maingrad.launch import simulate

WIDTH = 4
MICROBATCHES = 2
KINDS = ["zero2", "hsdp"]


def make_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(2)]


def rows(step: int, microbatch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def plain_grads(steps: list[int]) -> dict[str, Tensor]:
    """Mean over ranks of the sums over the microbatches of these steps."""
    model, size = nn.Sequential(*make_layers()), dist.get_world_size()
    for step in steps:
        for rank in range(size):
            for microbatch in range(MICROBATCHES):
                (model(rows(step, microbatch, rank)).square().sum() / size).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def states_of(layer: nn.Module) -> set[State]:
    rounds = [bucket.round() for bucket in unit_of(layer).buckets if bucket.round is not None]
    return {each.state for each in rounds if each is not None}


class Schedule:
    """Two layers of one model, each a part: all forwards, then the backwards of the second, then of the first."""

    def __init__(self, kind: str) -> None:
        # A bucket for the weight and one for the bias, and one for both.
        sizes = (1, None)
        self.layers = [
            fully_shard(layer, bucket_size=size, **options_of(kind))
            for layer, size in zip(make_layers(), sizes, strict=True)
        ]
        self.model = fully_shard(nn.Sequential(*self.layers), **options_of(kind))
        self.parts = self.model.grad_parts
        self.keys = [nn.Identity(), nn.Identity()]
        self.sent: list[list[bool]] = []
        """For each part that has ended: which layers' gradients were sent over all ranks by then."""

    def run(self, step: int, *, fails_after: int | None = None, says_final: bool = True) -> None:
        """The backwards of a step, or ``fails_after`` of them."""
        for key, layer in zip(self.keys, self.layers, strict=True):
            self.parts.begin(key, layer.parameters())
        passed, backwards = [], []
        for microbatch in range(MICROBATCHES):
            hidden = self.layers[0](rows(step, microbatch, dist.get_rank()))
            cut = hidden.detach().requires_grad_()
            passed.append((hidden, cut, self.layers[1](cut).square().sum()))
        for index in (1, 0):
            backwards += [(index, microbatch) for microbatch in range(MICROBATCHES)]
        for index, microbatch in backwards[:fails_after]:
            hidden, cut, loss = passed[microbatch]
            last = microbatch == MICROBATCHES - 1
            with self.parts.backward(self.keys[index], final=last and says_final):
                loss.backward() if index else hidden.backward(cut.grad)
            if last:
                self.parts.end(self.keys[index])
                self.sent.append([State.SENT in states_of(layer) for layer in self.layers])

    def check(self, *steps: int) -> None:
        self.model.finish_grad_sync()
        assert self.parts.is_clear, "what .grad keeps is the user's"
        expected = plain_grads(list(steps))
        for name, param in self.model.named_parameters():
            assert param.grad is not None, name
            torch.testing.assert_close(param.grad.full_tensor(), expected[name], rtol=1e-9, atol=1e-12)
        self.model.zero_grad()


def trains(schedule: Schedule) -> None:
    assert schedule.parts.host is schedule.model
    for step in range(2):
        assert schedule.parts.is_clear
        schedule.run(step)
        assert schedule.sent[-2] == [False, False], "the other part is open"
        schedule.check(step)


def ends_alone(schedule: Schedule) -> None:
    """No backward is said to be the last: ``end`` of the last part sends all gradients."""
    schedule.run(0, says_final=False)
    assert schedule.sent == [[False, False], [True, True]]
    assert any(bucket.is_launched for bucket in root_of(schedule.model).buckets), "and waits for none"
    schedule.check(0)


def sums(schedule: Schedule) -> None:
    with schedule.parts.no_sync():
        schedule.run(0)
    assert schedule.sent == [[False, False]] * 2
    assert not schedule.parts.is_clear
    schedule.run(1)
    schedule.check(0, 1)


def clears(schedule: Schedule) -> None:
    with schedule.parts.no_sync():
        schedule.run(0)
    schedule.model.zero_grad()
    assert schedule.parts.is_clear
    schedule.run(1)
    schedule.check(1)


def abandons(schedule: Schedule) -> None:
    """After each number of backwards. The first part that gives up discards nothing, as the other one may go on."""
    for fails_after in range(1, 2 * MICROBATCHES):
        schedule.run(0, fails_after=fails_after)
        for key in schedule.keys:
            assert not schedule.parts.is_clear
            schedule.parts.abandon(key)
        assert schedule.parts.is_clear and schedule.parts.num_open == 0
        schedule.model.finish_grad_sync()  # nothing is left to be sent
        assert all(param.grad is None for param in schedule.model.parameters())
    schedule.run(1)
    schedule.check(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", [trains, ends_alone, sums, clears, abandons])
@pytest.mark.sampled(10)
def test_parts_of_a_sharded_model(program: Callable[[Schedule], None], kind: str) -> None:
    simulate(lambda: program(Schedule(kind)), ranks_of(kind))
