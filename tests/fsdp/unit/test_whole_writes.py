"""Forwards that write parameters of sharded models: the writes reach the shards, or are refused by name."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from writing_modules import ActNorm, ClampedLinear, Codebook, WritingModel

from maingrad.ddp import WORLD_OF_ONE
from maingrad.fsdp import GraphedTrainingStep, MixedPrecisionPolicy, fully_shard
from maingrad.fsdp.unit import registration
from maingrad.launch import simulate

WAYS = {"zero1": 2, "zero2": 2, "zero3": 3, "hsdp": 4, "hsdp_zero1": 4}
"""Rows of ``PLACEMENTS``, and on how many ranks tests try each."""


def make(**options: Any) -> WritingModel:
    torch.manual_seed(3)
    return WritingModel(**options).double()


def shard(model: nn.Module, way: str, inside: tuple[str, ...] = (), **options: Any) -> Any:
    """The named modules, and the model around them."""
    hybrid = way.startswith("hsdp")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2)) if hybrid else None
    for name in inside:
        fully_shard(model.get_submodule(name), mesh, way, **options)
    return fully_shard(model, mesh, way, **options)


def data_of(rank: int, size: int) -> list[Tensor]:
    """This rank's part of three batches."""
    batches = torch.randint(0, 11, (3, 12), generator=torch.Generator().manual_seed(5))
    return [batch.chunk(size)[rank] for batch in batches]


def train(model: nn.Module, batches: list[Tensor], num_microbatches: int = 1) -> nn.Module:
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.125, momentum=0.9)
    for batch in batches:
        for index, part in enumerate(batch.chunk(num_microbatches)):
            final = index == num_microbatches - 1
            loss = model(part).square().mean() / num_microbatches
            if final or not hasattr(model, "no_sync"):
                loss.backward()
            else:
                with model.no_sync():
                    loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def whole_values(model: Any) -> dict[str, Tensor]:
    with model.unsharded():
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_equal(model: Any, plain: nn.Module, tolerance: float) -> None:
    found = whole_values(model)
    for name, wanted in plain.named_parameters():
        torch.testing.assert_close(
            found[name], wanted, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


PARTS = ("embedding", "norm", "book", "head")


@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("way", ["zero2", "zero3"])
def test_one_rank_writes_without_an_option(way: str, reshard: bool | None) -> None:
    plain = train(make(), data_of(0, 1), 2)

    def on_the_rank() -> None:
        model = shard(make(), way, PARTS, reshard_after_forward=reshard)
        assert_equal(train(model, data_of(0, 1), 2), plain, 1e-12)

    simulate(on_the_rank, 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(1)
def test_writes_of_reduced_statistics_are_declared_alike(way: str) -> None:
    """Each rank has its own data. What ranks write follows from sums over all ranks, and from weights."""
    size = WAYS[way]
    plain = train(make(max_norm=None), data_of(0, 1))

    def on_each_rank() -> None:
        model = shard(make(max_norm=None, reduces=True), way, PARTS, forward_writes="alike")
        assert_equal(train(model, data_of(dist.get_rank(), size)), plain, 1e-12)

    simulate(on_each_rank, size)


@pytest.mark.parametrize("inside", [(), PARTS])
@pytest.mark.sampled(1)
def test_writes_of_equal_batches_are_declared_alike(inside: tuple[str, ...]) -> None:
    plain = train(make(), data_of(0, 1), 2)

    def on_each_rank() -> None:
        model = shard(make(), "zero3", inside, forward_writes="alike")
        assert_equal(train(model, data_of(0, 1), 2), plain, 1e-12)

    simulate(on_each_rank, 2)


def test_an_evaluation_writes_too() -> None:
    tokens = torch.arange(5)
    plain = make()
    for inference in (torch.no_grad, torch.enable_grad):
        with inference():
            plain.eval()(tokens)

    def on_the_rank() -> None:
        model = shard(make(), "zero3", PARTS)
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(tokens), plain(tokens))
        assert_equal(model, plain, 0.0)

    simulate(on_the_rank, 1)


# ---- Refused by name. ----


def rows_of(rank: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))


MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "max_norm": (lambda: nn.Embedding(11, 4, max_norm=0.5), "weight"),
    "codebook": (lambda: Codebook(4, reduces=False), "codes"),
    "first batch": (lambda: ActNorm(4, reduces=False), "(scale|bias)"),
    "clamp_": (lambda: ClampedLinear(4, 4), "weight"),
}


@pytest.mark.parametrize(
    ("way", "kind"), [*(("zero3", kind) for kind in MODULES), ("zero2", "clamp_"), ("hsdp", "clamp_")]
)
def test_writes_that_are_not_declared_are_refused_by_name(way: str, kind: str) -> None:
    make_layer, local = MODULES[kind]

    def on_each_rank() -> None:
        layer = make_layer()
        first = [] if kind == "max_norm" else [nn.Linear(4, 4)]
        last = str(len(first))
        model = shard(nn.Sequential(*first, layer), way, (last,))
        data = torch.arange(4) + dist.get_rank() if kind == "max_norm" else rows_of(dist.get_rank())
        before = whole_values(model)
        match = (
            rf"parameter '{last}.{local}' was written in the forward.*declare it by "
            rf"fully_shard\(\.\.\., forward_writes=\"alike\"\) of unit '{last}'"
        )
        for grads in (torch.enable_grad, torch.no_grad):
            if kind != "first batch" or grads is torch.enable_grad:
                with grads(), pytest.raises(RuntimeError, match=match):
                    model(data)
        for name, value in whole_values(model).items():
            assert torch.equal(value, before[name]), name

    simulate(on_each_rank, WAYS[way])


def test_ranks_declare_alike_what_they_write() -> None:
    def on_each_rank() -> None:
        with pytest.raises(ValueError, match="forward_writes=alike where rank 1 has forward_writes=refused"):
            shard(nn.Linear(4, 4), "zero3", forward_writes="alike" if dist.get_rank() == 0 else "refused")

    simulate(on_each_rank, 2)


def test_what_the_option_cannot_be() -> None:
    with pytest.raises(ValueError, match="forward_writes is 'refused' or 'alike', got 'same'"):
        fully_shard(nn.Linear(4, 4), WORLD_OF_ONE, forward_writes="same")  # type: ignore[arg-type]


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("assigns", [True, False])
def test_a_write_through_data_in_a_first_forward_is_refused(trains: bool, assigns: bool) -> None:
    """No version counter sees it, and later forwards would lose it: a moving average of a momentum encoder does so."""

    class Momentum(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training == trains:
                if assigns:
                    self.weight.data = self.weight.data * 0.9
                else:
                    self.weight.data.mul_(0.9)
            return super().forward(x)

    def on_the_rank() -> None:
        model = shard(nn.Sequential(nn.Linear(4, 4), Momentum(4, 4)), "zero3", ("1",))
        model.train(not trains)
        model(rows_of(0))
        model.train(trains)
        with pytest.raises(RuntimeError, match=r"parameter '1.weight' was written in the forward through \.data"):
            model(rows_of(0))

    simulate(on_the_rank, 1)


@pytest.mark.parametrize("written", ["weight", "bias"])
def test_a_write_through_data_in_a_first_forward_without_gradients_is_refused(written: str) -> None:
    """As of a momentum encoder, whose module stays in training."""

    class Momentum(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                getattr(self, written).data.mul_(0.9)
            return super().forward(x)

    model = fully_shard(Momentum(4, 4), WORLD_OF_ONE)
    model(rows_of(0))
    with torch.no_grad(), pytest.raises(RuntimeError, match=rf"'{written}' was written in the forward through \.data"):
        model(rows_of(0))


# ---- Where else a forward writes. ----


def test_hooks_of_users_write_in_their_units_forward() -> None:
    def clamp(module: nn.Module, *_: Any) -> None:
        with torch.no_grad():
            module.weight.clamp_(-0.2, 0.2)

    def on_each_rank() -> None:
        for register in ("register_forward_pre_hook", "register_forward_hook"):
            torch.manual_seed(0)
            model = shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "zero3", ("1",), forward_writes="alike")
            getattr(model[1], register)(clamp)
            with torch.no_grad():
                model(rows_of(0))
            assert whole_values(model)["1.weight"].abs().max() == 0.2

    simulate(on_each_rank, 2)


class Counting(nn.Module):
    """Counts its forwards in a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.count = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count.add_(1)
        return self.layer(x).tanh()


class Twice(nn.Module):
    """The first of two modules runs twice, perhaps under recompute."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.second = Counting(), Counting()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for module in (self.first, self.second, self.first):
            if self.reentrant is None:
                x = module(x)
            else:
                x = checkpoint(module, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("inside", [(), ("first", "second")])
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.sampled(6)
def test_units_that_run_twice_and_recomputes_write_each_time(reentrant: bool | None, inside: tuple[str, ...]) -> None:
    """In plain PyTorch a recompute writes as well."""

    def on_each_rank() -> None:
        model = shard(Twice(reentrant), "zero3", inside, forward_writes="alike")
        for _ in range(2):
            model(rows_of(0).requires_grad_()).sum().backward()
        found = whole_values(model)
        times = 2 if reentrant is None else 4
        assert found["first.count"].tolist() == [2 * times] * 3
        assert found["second.count"].tolist() == [times] * 3

    simulate(on_each_rank, 2)


def test_elements_that_no_forward_has_written_keep_their_bits_in_masters() -> None:
    """Shards are fp32, and computation is in bf16."""

    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight[1].fill_(0.25)
            return super().forward(x)

    def on_each_rank() -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        torch.manual_seed(0)
        layer = Writes(4, 4)
        wanted = layer.weight.detach().clone()
        wanted[1] = 0.25
        model = shard(layer, "zero3", mixed_precision=policy, forward_writes="alike")
        model(rows_of(0))
        param = model.weight
        assert torch.equal(param.detach(), wanted.view(-1)[param.shard.start : param.shard.end].view(param.shape))

    simulate(on_each_rank, 2)


def test_writes_in_unsharded_are_lost_as_before_and_those_of_its_forwards_are_not() -> None:
    def on_each_rank() -> None:
        model = shard(nn.Sequential(nn.Linear(4, 4), Counting()), "zero3", ("1",), forward_writes="alike")
        before = whole_values(model)
        with torch.no_grad(), model.unsharded():
            model[0].weight.add_(1.0)
            model[1].layer.weight.add_(1.0)
            model(rows_of(0))
        found = whole_values(model)
        assert torch.equal(found["0.weight"], before["0.weight"])
        assert torch.equal(found["1.layer.weight"], before["1.layer.weight"])
        assert found["1.count"].tolist() == [1.0] * 3

    simulate(on_each_rank, 2)


@pytest.mark.parametrize("times", [1, 2])
def test_writes_after_unshard_are_not_held_against_a_forward(times: int) -> None:
    """Where writes of forwards are refused. Blocks may lie in each other."""

    def on_each_rank() -> None:
        model = shard(nn.Sequential(nn.Linear(4, 4)), "zero3", ("0",))
        before = whole_values(model)["0.weight"].clone()
        with torch.no_grad():
            for _ in range(times):
                model[0].unshard()
            model[0].weight.add_(1.0)
            model(rows_of(0))
            for _ in range(times):
                model[0].reshard()
        assert torch.equal(whole_values(model)["0.weight"], before)

    simulate(on_each_rank, 2)


@pytest.mark.parametrize("way", ["zero1", "zero2", "zero3"])
def test_a_refused_forward_leaves_a_model_that_trains_on(way: str) -> None:
    """With the weights of before the write, also where these are whole at rest."""

    def on_each_rank() -> None:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4), ClampedLinear(4, 4))
        plain[1].forward = lambda x: nn.Linear.forward(plain[1], x)
        torch.manual_seed(0)
        model = shard(nn.Sequential(nn.Linear(4, 4), ClampedLinear(4, 4)), way, ("1",))
        with pytest.raises(RuntimeError, match="was written in the forward"):
            model(rows_of(dist.get_rank()))
        model[1].forward = lambda x: nn.Linear.forward(model[1], x)
        assert torch.equal(model(rows_of(5)), plain(rows_of(5)))
        train(model, [rows_of(5)])
        assert_equal(model, train(plain, [rows_of(5)]), 1e-6)

    simulate(on_each_rank, 2)


@pytest.mark.parametrize("way", ["zero1", "zero2", "zero3"])
def test_a_forward_that_writes_and_fails_is_not_held_against_the_next(way: str) -> None:
    """What it has written is gone, also where whole parameters are kept."""

    class FailsOnce(nn.Linear):
        failed = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.failed:
                self.failed = True
                with torch.no_grad():
                    self.weight.mul_(2.0)
                raise KeyError
            return super().forward(x)

    def on_each_rank() -> None:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model = nn.Sequential(nn.Linear(4, 4), FailsOnce(4, 4))
        model.load_state_dict(plain.state_dict())
        shard(model, way, ("1",))
        with pytest.raises(KeyError):
            model(rows_of(0))
        assert torch.equal(model(rows_of(0)), plain(rows_of(0)))

    simulate(on_each_rank, 2)


class CountsAndFails(nn.Linear):
    """Counts its forwards in its bias, and fails when it is told to."""

    fails = True

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.bias.add_(1.0)
        if self.fails:
            raise KeyError
        return super().forward(x)


def test_served_writes_of_a_forward_that_fails_stay() -> None:
    """As in plain PyTorch."""

    def on_each_rank() -> None:
        model = shard(nn.Sequential(nn.Linear(4, 4), CountsAndFails(4, 4)), "zero3", ("1",), forward_writes="alike")
        before = whole_values(model)["1.bias"]
        with pytest.raises(KeyError):
            model(rows_of(0))
        assert torch.equal(whole_values(model)["1.bias"], before + 1.0)

    simulate(on_each_rank, 2)


def test_values_that_change_between_a_forward_that_failed_and_the_next_are_no_write_of_it() -> None:
    class FailsOnce(CountsAndFails):
        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                self.fails = False
                raise KeyError
            return nn.Linear.forward(self, x)

    def on_each_rank() -> None:
        model = shard(FailsOnce(4, 4), "zero3")
        with pytest.raises(KeyError):
            model(rows_of(0))
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
        model(rows_of(0))

    simulate(on_each_rank, 2)


@pytest.mark.parametrize("raises", [False, True])
def test_writes_in_unsharded_come_back_unless_its_block_raises(raises: bool) -> None:
    def write(model: Any) -> None:
        with torch.no_grad(), model.unsharded(writeback=True):
            model[1].weight.add_(1.0)
            if raises:
                raise KeyError

    def on_each_rank() -> None:
        model = shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "zero3", ("1",))
        before = whole_values(model)["1.weight"]
        with pytest.raises(KeyError) if raises else nullcontext():
            write(model)
        assert torch.equal(whole_values(model)["1.weight"], before if raises else before + 1.0)

    simulate(on_each_rank, 2)


@pytest.mark.parametrize(("way", "size"), [("zero3", None), ("zero2", 1)])
def test_writes_in_unsharded_are_not_held_against_the_next_forward(way: str, size: int | None) -> None:
    """They are lost, in each bucket, also where whole parameters stay at rest."""

    def on_each_rank() -> None:
        model = shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), way, ("1",), bucket_size=size)
        expected = model(rows_of(0)).detach()
        with torch.no_grad(), model.unsharded():
            model[1].weight.add_(1.0)
            model[1].bias.add_(1.0)
        assert torch.equal(model(rows_of(0)), expected)

    simulate(on_each_rank, 2)


def test_experts_of_one_rank_write_by_themselves() -> None:
    def on_each_rank() -> None:
        model = nn.Sequential(nn.Linear(4, 4), Counting())
        fully_shard(model[1], WORLD_OF_ONE)
        fully_shard(model, dist.group.WORLD)
        for _ in range(dist.get_rank() + 1):
            with torch.no_grad():
                model[1](rows_of(0))
        assert whole_values(model)["1.count"].tolist() == [dist.get_rank() + 1.0] * 3

    simulate(on_each_rank, 2)


def test_values_are_compared_behind_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checksum is read on the host, and a capture refuses it: the first forward outside of one compares."""
    model: Any = fully_shard(Swapping(), WORLD_OF_ONE)
    with monkeypatch.context() as captured:
        captured.setattr(registration, "is_capturing", lambda: True)
        model(torch.ones(4))
    with pytest.raises(RuntimeError, match=r"'weight' was written in the forward through \.data"):
        model(torch.ones(4))


@pytest.mark.in_turn
def test_a_graphed_step_replays_declared_writes() -> None:
    plain = train(make(), data_of(0, 1))

    def on_each_rank() -> None:
        model = shard(make(), "zero3", PARTS, forward_writes="alike")
        optimizer = torch.optim.SGD(model.parameters(), 0.125, momentum=0.9, fused=True)

        def step(batch: Tensor) -> Tensor:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        graphed = GraphedTrainingStep(step, model, optimizer, num_warmup_steps=1)
        for batch in data_of(0, 1):
            graphed(batch)
        assert_equal(model, plain, 1e-12)

    simulate(on_each_rank, 2)


class Swapping(nn.Module):
    """Gives its weight other memory with the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clone()
        return x * self.weight


def test_other_memory_of_a_whole_parameter_is_refused() -> None:
    """Later gathers write to the memory of before."""
    with pytest.raises(RuntimeError, match=r"'weight' was written in the forward through \.data"):
        fully_shard(Swapping(), WORLD_OF_ONE)(torch.ones(4))
