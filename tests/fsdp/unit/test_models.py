"""Whatever a model is made of: its gradients and weights are a plain model's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_twin import (
    KINDS,
    WIDTH,
    Block,
    Net,
    assert_same_grads,
    assert_same_weights,
    batches_of,
    both,
    mean_loss,
    options_of,
    rank_and_size,
    shard_blocks,
    train_beside,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from maingrad.ddp import WORLD_OF_ONE, DistributedDataParallel, load_checkpoint, save_checkpoint
from maingrad.fsdp import MixedPrecisionPolicy, fully_shard
from maingrad.launch import simulate

every_kind = pytest.mark.parametrize("kind", KINDS)


def some_kinds(test: Callable[..., None]) -> Callable[..., None]:
    """A matrix of which ``make test`` takes a part."""
    kinds = pytest.mark.parametrize("kind", ["zero3", "hsdp_zero1", "zero1"])
    return pytest.mark.sampled(3)(kinds(test))


def test_a_model_whose_wrapper_was_let_go_is_sharded() -> None:
    """``DistributedDataParallel`` has left a refusal to train on each of its modules."""

    def on_each_rank() -> None:
        model: Any = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        DistributedDataParallel(model)
        with pytest.raises(RuntimeError, match="the wrapper was let go"):
            model[1](torch.ones(2, 5))
        fully_shard(model)
        model(torch.ones(2, 5)).sum().backward()
        assert all(param.grad.full_tensor().any() for param in model.parameters())

    simulate(on_each_rank, 2)


@every_kind
@pytest.mark.sampled(2)
def test_a_model_of_blocks(kind: str) -> None:
    train_beside(kind, microbatches=3)


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
@pytest.mark.sampled(1)
def test_a_group_of_one_rank(kind: str) -> None:
    train_beside(kind, ranks=1)
    train_beside(kind, ranks=0)


@pytest.mark.in_turn
def test_a_mesh_of_one_instance_and_instances_of_one_rank() -> None:
    for shape in ((1, 2), (2, 1)):
        for row in ("hsdp", "hsdp_zero1", "hybrid"):
            if row == "hsdp_zero1" and shape[0] == 1:
                continue

            def shard(model: nn.Module, row: str = row, shape: tuple[int, int] = shape, **_: Any) -> None:
                shard_blocks(model, placements=row, mesh=torch.distributed.init_device_mesh("cpu", shape))

            train_beside("zero3", shard=shard, ranks=2)


@pytest.mark.in_turn
@pytest.mark.parametrize("shape", [(3, 1), (3, 2)])
@pytest.mark.parametrize("row", ["hsdp", "hsdp_zero1", "hybrid"])
@pytest.mark.sampled(3)
def test_three_instances(row: str, shape: tuple[int, int]) -> None:
    """Training, and state dicts to and from whole tensors."""

    def shard(model: nn.Module, **_: Any) -> None:
        shard_blocks(model, placements=row, mesh=torch.distributed.init_device_mesh("cpu", shape), bucket_size=20)
        state = model.state_dict()
        values = {name: value.full_tensor() for name, value in state.items()}
        torch.manual_seed(0)
        plain = Net().double().state_dict()
        assert all(torch.equal(values[name], value) for name, value in plain.items())
        model.load_state_dict({name: value * 2.0 for name, value in plain.items()})
        for name, value in model.state_dict().items():
            assert torch.equal(value.full_tensor(), plain[name] * 2.0), name
        model.load_state_dict(state)

    train_beside("zero3", shard=shard, ranks=shape[0] * shape[1])


# ---- Parameters. ----


class Tiny(nn.Module):
    """Parameters of so few elements that most ranks have none of them, and scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.5]))
        self.row = nn.Parameter(torch.randn(1, 5))
        self.inner = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.row * self.scale + self.shift)


def shard_inner(model: nn.Module, **options: Any) -> None:
    fully_shard(model.inner, **options)
    fully_shard(model, **options)


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", ["zero3", "zero1", "zero2", "hsdp_zero1", "hsdp"])
@pytest.mark.sampled(1)
def test_more_ranks_than_elements(kind: str) -> None:
    train_beside(kind, Tiny, shard_inner, ranks=8)


def frozen(choose: Callable[[str], bool]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Net()
        for name, param in model.named_parameters():
            param.requires_grad_(not choose(name))
        return model

    return make


@some_kinds
@pytest.mark.parametrize(
    "choose",
    [
        lambda name: name.endswith("bias"),
        lambda name: name.startswith("blocks.1"),
        lambda name: not name.startswith("blocks"),
        lambda name: name.startswith(("stem", "blocks.0", "blocks.1")),
        lambda name: name != "scale",
    ],
    ids=["every bias", "a unit", "the outermost unit", "the first layers", "all but a scalar"],
)
@pytest.mark.sampled(2)
def test_frozen_parameters(kind: str, choose: Callable[[str], bool]) -> None:
    train_beside(kind, frozen(choose))


@some_kinds
def test_all_parameters_frozen_and_a_gradient_for_the_input(kind: str) -> None:
    def on_each_rank() -> None:
        model, twin = both(frozen(lambda _: True), lambda model: shard_blocks(model, **options_of(kind)))
        for any in (model, twin):
            any.input = batches_of(0, 1)[0].requires_grad_()
            mean_loss(any(any.input)).backward()
        torch.testing.assert_close(model.input.grad, twin.input.grad)
        assert all(param.grad is None for param in model.parameters())

    simulate(on_each_rank, KINDS[kind])


class Mixed(nn.Module):
    """Layers in bf16 between fp32 norms, and a table of integers, which is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 4, dtype=torch.bfloat16)
        self.codes = nn.Parameter(torch.arange(8, dtype=torch.int32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.bfloat16()).float()) + self.codes
        return self.last(x.bfloat16()).float()


@some_kinds
def test_dtypes_that_differ_within_a_unit(kind: str) -> None:
    """Autograd rounds gradients of bf16 layers once, in both models."""

    def on_each_rank() -> None:
        rank, size = rank_and_size()
        model, twin = both(Mixed, lambda model: fully_shard(model, **options_of(kind)), None)
        mean_loss(model(batches_of(rank, 1, dtype=torch.float32)[0])).backward()
        sums: dict[str, Any] = {}
        for other in range(size):
            twin.zero_grad()
            mean_loss(twin(batches_of(other, 1, dtype=torch.float32)[0])).backward()
            for name, param in twin.named_parameters():
                if param.grad is not None:
                    sums[name] = sums.get(name, 0.0) + param.grad.float() / size
        for name, param in model.named_parameters():
            assert param.dtype is dict(twin.named_parameters())[name].dtype, name
            assert name == "codes" or param.grad.dtype is param.dtype
        tolerance = 2**-8  # of .grad in bf16
        assert_same_grads(model, {"codes": None, **sums}, tolerance)

    simulate(on_each_rank, KINDS[kind])


@some_kinds
def test_integers_stay_integers_where_the_rest_is_gathered_in_bf16(kind: str) -> None:
    seen: list[Any] = []

    class Looks(Mixed):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.codes.dtype, self.norm.weight.dtype, self.codes.tolist()))
            return self.last(self.norm(self.first(x)) + self.codes.bfloat16())

    def on_each_rank() -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = fully_shard(Looks(), mixed_precision=policy, **options_of(kind))
        mean_loss(model(batches_of(0, 1)[0])).backward()

    simulate(on_each_rank, KINDS[kind])
    assert set(map(str, seen)) == {str((torch.int32, torch.bfloat16, list(range(8))))}


class Tied(nn.Module):
    """One weight of three modules, one of which has it under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.again = nn.Linear(5, 5, bias=False)
        self.again.weight = self.first.weight
        self.block = Block()
        self.other = nn.Module()
        self.other.matrix = self.first.weight
        self.wide = nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.first(x).tanh()) @ self.other.matrix
        return self.block(self.wide(x))


@every_kind
@pytest.mark.sampled(3)
def test_tied_parameters_within_a_unit(kind: str) -> None:
    train_beside(kind, Tied)


class Nested(nn.Module):
    """Units in units. One has no parameter of its own, and one no parameter at all."""

    def __init__(self) -> None:
        super().__init__()
        self.group = nn.Sequential(nn.Linear(5, WIDTH), nn.Sequential(Block(), Block()))
        self.nothing = nn.Tanh()
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.nothing(self.group(x)))


def shard_nested(model: nn.Module, **options: Any) -> None:
    pair = model.group[1]
    for module in (pair[0], pair[1], pair, model.group, model.nothing, model.last, model):
        fully_shard(module, **options)


@pytest.mark.in_turn
@every_kind
@pytest.mark.sampled(2)
def test_nested_units_some_of_them_without_parameters(kind: str) -> None:
    train_beside(kind, Nested, shard_nested)


@some_kinds
def test_a_model_whose_units_are_its_layers_and_that_is_none_itself(kind: str) -> None:
    def shard(model: nn.Module, **options: Any) -> None:
        for layer in model:
            fully_shard(layer, **options)

    train_beside(kind, lambda: nn.Sequential(nn.Linear(5, WIDTH), Block(), nn.Linear(WIDTH, 2)), shard)


@some_kinds
def test_a_model_without_parameters(kind: str) -> None:
    def on_each_rank() -> None:
        model = fully_shard(nn.Sequential(nn.Tanh()), **options_of(kind))
        x = torch.ones(2, requires_grad=True)
        model(x).sum().backward()
        model.finish_grad_sync()
        assert x.grad is not None

    simulate(on_each_rank, KINDS[kind])


# ---- Modules that do something about their parameters. ----


class Recurrent(nn.Module):
    """``nn.LSTM`` keeps a list of its parameters beside the registered ones."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x[None])[0])


class Mirrors(nn.Linear):
    """Keeps what is set beside the registered parameters, and computes with that: recurrent layers did so."""

    def __init__(self) -> None:
        super().__init__(5, 2)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__.setdefault("mirror", {})[name] = value

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.mirror["bias"], x, self.mirror["weight"].t())


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(5)) for _ in range(3)])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.ones(5)), "shift": nn.Parameter(torch.zeros(5))})

    def forward(self, x: Tensor) -> Tensor:
        for row in self.rows:
            x = (x * row).tanh() * self.named["scale"] + self.named["shift"]
        return x


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(5, WIDTH))
        self.last = nn.utils.weight_norm(nn.Linear(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.wide(x)[None])


@pytest.mark.in_turn
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@some_kinds
@pytest.mark.parametrize("make", [Recurrent, Lists, Parametrized, Attention])
def test_modules_that_have_their_own_ways_with_parameters(kind: str, make: Callable[[], nn.Module]) -> None:
    def shard(model: nn.Module, **options: Any) -> None:
        for child in list(model.children())[:1]:
            if not isinstance(child, nn.ParameterList):
                fully_shard(child, **options)
        fully_shard(model, **options)

    train_beside(kind, make, shard)


def test_a_class_that_sets_its_parameters_in_two_places() -> None:
    train_beside("zero3", Mirrors, fully_shard, ranks=2)


@some_kinds
def test_buffers_are_each_ranks_own(kind: str) -> None:
    def on_each_rank() -> None:
        rank, _ = rank_and_size()
        make = lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))  # noqa: E731
        model, twin = both(make, lambda model: fully_shard(model, **options_of(kind)))
        for step in range(2):
            for batch in batches_of(rank, 2, step=step):
                torch.testing.assert_close(model(batch), twin(batch))
        assert model[1].num_batches_tracked == 4
        torch.testing.assert_close(model[1].running_mean, twin[1].running_mean)
        model.eval(), twin.eval()
        torch.testing.assert_close(model(batch), twin(batch))

    simulate(on_each_rank, KINDS[kind])


# ---- What is not sharded, and where values come from. ----


@some_kinds
def test_ignored_parameters_stay_what_they_are(kind: str) -> None:
    def on_each_rank() -> None:
        rank, _ = rank_and_size()
        torch.manual_seed(0)
        model = Net().double()
        ours = model.blocks[1].linear.bias
        with torch.no_grad():
            ours.fill_(float(rank))
        for block in model.blocks:
            fully_shard(block, ignored_params=[ours], **options_of(kind))
        fully_shard(model, **options_of(kind))
        assert model.blocks[1].linear.bias is ours
        assert type(ours) is nn.Parameter
        assert ours[0] == rank, "not broadcast"
        mean_loss(model(batches_of(rank, 1)[0])).backward()
        assert ours.grad.any() and ours.grad.shape == ours.shape
        assert not any(pair.sharded is ours for unit in model.units for pair in unit.pairs)

    simulate(on_each_rank, KINDS[kind])


def test_attributes_of_a_parameter_are_those_of_both_of_its_forms() -> None:
    """Except for the name by which a sharded one says what it is."""
    layer: Any = nn.Linear(4, 4)
    layer.weight.note, layer.weight.shard = "kept", "a program's own"
    model = fully_shard(layer, WORLD_OF_ONE)
    assert (model.weight.note, model.weight.shard.name) == ("kept", "weight")
    with model.unsharded():
        assert (model.weight.note, model.weight.shard) == ("kept", "a program's own")


def test_a_module_of_two_names_is_broadcast_once() -> None:
    """Each of its parameters and buffers."""
    schedule: list[tuple[int, str]] = []

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            norm = nn.BatchNorm1d(5)
            self.first, self.second = nn.Sequential(nn.Linear(5, 5), norm), nn.Sequential(nn.Linear(5, 5), norm)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    simulate(lambda: fully_shard(Shared()), 2, schedule=schedule)
    broadcasts = [word for rank, word in schedule if rank == 0 and word.startswith("launch broadcast")]
    assert len(broadcasts) == 2 * 2 + 5


def test_ignored_parameters_may_be_given_as_an_iterator() -> None:
    """``ignored_params=module.parameters()``, which can be read once."""

    def on_each_rank() -> None:
        model = Net()
        kept = list(model.blocks[1].parameters())
        fully_shard(model, ignored_params=model.blocks[1].parameters())
        assert all(now is before for now, before in zip(model.blocks[1].parameters(), kept, strict=True))

    simulate(on_each_rank, 2)


@some_kinds
def test_weights_are_the_first_ranks_unless_told_otherwise(kind: str) -> None:
    def on_each_rank(init_sync: bool) -> None:
        rank, _ = rank_and_size()
        torch.manual_seed(rank)
        model = Net()
        model.register_buffer("counter", torch.tensor(float(rank)))
        model.register_buffer("by_columns", torch.full((2, 3), float(rank)).t())
        model.stem.weight.data = model.stem.weight.data.t().contiguous().t()
        torch.manual_seed(0)
        first = Net()
        shard_blocks(model, init_sync=init_sync, **options_of(kind))
        for buffer in (model.counter, model.by_columns):
            assert (buffer == (0 if init_sync else rank)).all()
        if init_sync:
            assert_same_weights(model, first)

    for init_sync in (False, True):
        simulate(on_each_rank, KINDS[kind], init_sync)


class Looks(nn.Module):
    """Notes the dtypes of its arguments, and an attribute that the program has set on its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.weight.note = "the program's"
        self.weight.shard = "the program's too"
        self.seen: list[Any] = []

    def forward(self, x: Tensor, index: Tensor, *, mask: Tensor, pair: Any) -> Any:
        self.seen = [x.dtype, index.dtype, mask.dtype, *(each.dtype for each in pair), self.weight.note]
        return (x * self.weight)[index], {"index": index, "half": pair[0]}


def test_casts_of_a_policy_leave_integers_alone_and_parameters_keep_what_the_program_set() -> None:
    """Wherever they stand in the arguments and in what forward returns; both forms of a parameter have attributes."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model: Any = fully_shard(Looks(), mixed_precision=policy)
    index, mask = torch.tensor([0, 2]), torch.tensor([True, False])
    rows, rest = model(torch.ones(6), index, mask=mask, pair=[torch.ones(2, dtype=torch.float16), index.int()])
    assert model.seen == [torch.bfloat16, torch.int64, torch.bool, torch.bfloat16, torch.int32, "the program's"]
    assert (rows.dtype, rest["index"].dtype, rest["half"].dtype) == (torch.float64, torch.int64, torch.float64)
    assert model.weight.note == "the program's"
    assert model.weight.shard.name == "weight"  # ours, under a name that the program has used


def test_each_unit_casts_what_it_takes_and_returns_by_its_own_policy() -> None:
    layers: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    seen: list[torch.dtype] = []
    for layer in layers:
        layer.register_forward_hook(lambda _, args, output: seen.extend((args[0].dtype, output.dtype)))
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    fully_shard(layers[0], mixed_precision=low)
    fully_shard(layers[1], mixed_precision=MixedPrecisionPolicy(param_dtype=torch.float16))
    fully_shard(layers)
    assert layers(torch.ones(2, 4)).dtype is torch.float16
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float16, torch.float16]
    assert layers[0](torch.ones(2, 4)).dtype is torch.float64


def test_f_linear_over_a_units_own_parameters_works_in_its_forward() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.inner.weight, self.inner.bias * 2)

    train_beside("zero3", Functional, lambda model, **options: fully_shard(model, **options))


def test_a_rank_of_padding_alone_gathers_with_the_others_after_a_load(tmp_path: Path) -> None:
    def on_each_rank() -> float:
        model: Any = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        fully_shard(model, placements="zero1")
        save_checkpoint(tmp_path / "c", model)
        with torch.no_grad():
            model.weight.zero_()
            model(torch.ones(1, 1))
        load_checkpoint(tmp_path / "c", model)
        return model(torch.ones(1, 1)).item()  # type: ignore[no-any-return]

    assert simulate(on_each_rank, 2) == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["zero1", "zero2"])
def test_a_rank_of_padding_alone_gathers_with_the_others_after_a_step_by_hand(kind: str) -> None:
    def on_each_rank() -> list[float]:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        for layer in model:
            nn.init.ones_(layer.weight)
            fully_shard(layer, placements=kind)
        fully_shard(model, placements=kind)
        seen = []
        for _ in range(3):
            y = model(torch.ones(1, 1))
            y.sum().backward()
            seen.append(y.item())
            with torch.no_grad():
                for local, grad in ((param.data, param.grad.to_local()) for param in model.parameters()):
                    if local.numel():
                        local.sub_(grad, alpha=0.25)
            model.zero_grad()
        return seen

    assert simulate(on_each_rank, 2) == [[1.0, 0.75**2, (0.75 - 0.25 * 0.75) ** 2]] * 2
