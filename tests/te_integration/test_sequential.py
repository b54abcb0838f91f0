"""``Sequential`` passes extra inputs to the modules that take them, and runs ``backward_dw`` once for each module."""

import copy
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from foreign import ForeignProvider
from loops import wrap
from modules import FEATURES, HIDDEN, error, make
from torch import Tensor, nn

from maingrad.te_integration import LayerNormLinear, LayerNormMLP, Linear, Sequential

OPTIONS = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True}


class AddTo(nn.Module):
    """Takes one extra input."""

    num_extra_inputs = 1

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x + other


class Scale(nn.Module):
    """Each instance says how many extra inputs it takes."""

    def __init__(self, num_extra_inputs: int) -> None:
        super().__init__()
        self.num_extra_inputs = num_extra_inputs

    def forward(self, x: Tensor, *factors: Tensor) -> Tensor:
        for factor in factors:
            x = x * factor
        return x


def batch(seed: int = 1) -> Tensor:
    return torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(seed))


def layers(**options: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        LayerNormLinear(FEATURES, FEATURES, **options),
        nn.Tanh(),
        LayerNormMLP(FEATURES, HIDDEN, **options),
        Linear(FEATURES, FEATURES, **options),
    ]


# ---- Extra inputs. ----


def test_extra_inputs_go_to_those_that_take_them_in_order() -> None:
    x, a, b, c = (batch(seed) for seed in range(4))
    model = Sequential(AddTo(), nn.Tanh(), Scale(2))
    assert model.num_extra_inputs == 3
    assert torch.equal(model(x, a, b, c), (x + a).tanh() * b * c)
    nested = Sequential(Scale(1), Sequential(AddTo(), nn.Sequential(nn.Tanh()), AddTo()), nn.Tanh())
    assert nested.num_extra_inputs == 3
    assert torch.equal(nested(x, a, b, c), ((x * a + b).tanh() + c).tanh())
    assert torch.equal(Sequential()(x), x)
    adds = AddTo()
    assert torch.equal(Sequential(adds, nn.Tanh(), adds)(x, a, b), (x + a).tanh() + b), "one module twice"


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (Sequential(nn.Tanh(), AddTo(), Scale(2)), 1, "got 1 extra inputs, and its modules take 3"),
        (Sequential(nn.Tanh()), 1, "got 1 extra inputs, and its modules take 0"),
        (Sequential(Sequential(AddTo())), 0, "got 0 extra inputs, and its modules take 1"),
    ],
)
def test_another_number_of_extra_inputs_is_refused(model: Sequential, given: int, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        model(batch(), *[batch()] * given)


def test_gradients_reach_extra_inputs() -> None:
    residual = batch(2).requires_grad_()
    model = Sequential(*layers(**OPTIONS), AddTo())
    ddp = wrap(model)
    ddp(batch(), residual).square().sum().backward()
    model.backward_dw()
    ddp.finish_grad_sync()
    torch.testing.assert_close(residual.grad, 2 * model(batch(), residual).detach())


def test_it_is_an_nn_sequential() -> None:
    ops = layers()
    ours, theirs = Sequential(*ops), nn.Sequential(*ops)
    assert isinstance(ours, nn.Sequential)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert torch.equal(ours(batch()), theirs(batch()))
    twin = Sequential(*layers())
    twin.load_state_dict(theirs.state_dict())
    assert type(ours[1:]) is Sequential
    ours.append(AddTo())
    assert ours.num_extra_inputs == 1
    named = Sequential(OrderedDict(norm=ops[0], mlp=ops[2]))
    assert next(iter(named.state_dict())) == "norm.layer_norm_weight"
    assert copy.deepcopy(twin).need_backward_dw() is False


# ---- Delayed weight gradients. ----


def flat(ops: list[nn.Module]) -> Sequential:
    return Sequential(*ops)


def in_sequentials(ops: list[nn.Module]) -> Sequential:
    return Sequential(Sequential(*ops[:2]), Sequential(Sequential(ops[2]), *ops[3:]))


def in_other_containers(ops: list[nn.Module]) -> Sequential:
    return Sequential(nn.Sequential(*ops[:2], Sequential(ops[2])), *ops[3:])


NESTINGS = pytest.mark.parametrize("nest", [flat, in_sequentials, in_other_containers])


@NESTINGS
def test_backward_dw_runs_one_microbatch_of_every_module_last_first(
    nest: Callable[[list[nn.Module]], Sequential],
) -> None:
    ops = layers(**OPTIONS)
    model = nest(ops)
    delaying = [ops[0], ops[2], ops[3]]
    order: list[nn.Module] = []
    for op in delaying:
        op.wgrad_queue.log = []
        op.register_wgrad_accumulation_and_reduce_hooks(lambda op=op: order.append(op))
    ddp = wrap(model)
    assert not model.need_backward_dw()
    model.backward_dw()
    for seed in range(2):
        with ddp.no_sync():
            ddp(batch(seed)).square().sum().backward()
    for done in (1, 2):
        assert model.need_backward_dw()
        order.clear()
        model.backward_dw()
        assert order == [ops[3], ops[2], ops[0]]
        assert [len(op.wgrad_queue.log) for op in delaying] == [done, 2 * done, done]
    assert not model.need_backward_dw()
    ddp.finish_grad_sync()


@NESTINGS
def test_gradients_are_the_undelayed_ones(nest: Callable[[list[nn.Module]], Sequential]) -> None:
    delayed, plain = nest(layers(**OPTIONS)), nest(layers())
    ours, theirs = wrap(delayed, overlap_grad_reduce=True, bucket_size=64), wrap(plain)
    for ddp in (ours, theirs):
        for seed in range(2):
            with ddp.no_sync() if seed == 0 else torch.enable_grad():
                ddp(batch(seed)).square().sum().backward()
        while ddp.module.need_backward_dw():
            ddp.module.backward_dw()
        ddp.finish_grad_sync()
    expected = {record.name: record.view for record in theirs.records}
    for record in ours.records:
        assert error(record.view, expected[record.name].double()) <= 2.0**-20, record.name


@pytest.mark.parametrize("inner", [Sequential, nn.Sequential])
def test_a_module_that_is_there_twice_runs_once(inner: type[nn.Sequential]) -> None:
    """With a lag of one microbatch a second call would run the next microbatch's gradients too early."""
    layer = make("Linear", delay=True)
    model = Sequential(layer, inner(layer, nn.Tanh()), layer)
    ddp = wrap(model)
    for seed in range(2):
        with ddp.no_sync():
            ddp(batch(seed)).sum().backward()
    assert len(layer.wgrad_queue) == 6
    model.backward_dw()
    assert len(layer.wgrad_queue) == 3 and layer.wgrad_queue.pending_microbatches == [1]
    model.backward_dw()
    assert not model.need_backward_dw()


@NESTINGS
def test_a_foreign_provider_registers_with_the_modules_alone(nest: Callable[[list[nn.Module]], Sequential]) -> None:
    """The provider calls the registration method of every module that has it: a container would register twice."""
    ops = layers(**OPTIONS)
    model = nest(ops)
    provider = ForeignProvider(model)
    model(batch()).square().sum().backward()
    delayed = {f"{prefix}.{name}" for prefix, op in model.named_modules() for name in getattr(op, "weight_names", ())}
    assert not {name for name, _ in provider.seen} & delayed
    model.backward_dw()
    called = [name for name, _ in provider.seen if name in delayed]
    assert sorted(called) == sorted(delayed), "each once"
    assert all(flag for name, flag in provider.seen if name in delayed)
    for op in model.modules():
        assert not (isinstance(op, nn.Sequential) and hasattr(op, "register_wgrad_accumulation_and_reduce_hooks"))


def test_modules_that_delay_with_the_verbs_alone_are_run_too() -> None:
    class Foreign(nn.Module):
        pending = 0

        def forward(self, x: Tensor) -> Tensor:
            self.pending += 1
            return x

        def need_backward_dw(self) -> bool:
            return self.pending > 0

        def backward_dw(self) -> None:
            self.pending -= 1

    foreign = Foreign()
    model = Sequential(nn.Sequential(foreign), nn.Tanh())
    model(batch())
    assert model.need_backward_dw()
    model.backward_dw()
    assert not model.need_backward_dw() and foreign.pending == 0


def test_a_wrapped_module_runs_once_and_one_that_waits_is_enough() -> None:
    idle, layer = make("Linear", delay=True), make("Linear", delay=True)
    model = Sequential(wrap(layer), idle)
    for seed in range(2):
        with model[0].no_sync():
            model[0](batch(seed)).sum().backward()
    assert model.need_backward_dw()
    model.backward_dw()
    assert layer.wgrad_queue.pending_microbatches == [1]
    model.backward_dw()
    assert not model.need_backward_dw()
