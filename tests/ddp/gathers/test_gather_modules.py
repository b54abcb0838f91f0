"""Modules that are changed while gathers of their parameters are under way: right results, and plain afterwards."""

import copy
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.launch import simulate

RANKS = 2
WIDTH = 4


class Scaled(nn.Linear):
    """A user's own class."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Scaled(), nn.LayerNorm(WIDTH), nn.LSTM(WIDTH, WIDTH), Scaled())


def call(model: nn.Sequential, x: Tensor) -> Tensor:
    for module in model:
        x = module(x)
        x = x[0] if isinstance(x, tuple) else x
    return x


def batch(step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


class Trained:
    """A model after some steps; with overlap its gathers are under way."""

    def __init__(self, overlap: bool = True, model: nn.Sequential | None = None) -> None:
        self.model = make_model() if model is None else model
        self.dicts = {id(module): module._parameters for module in self.model.modules()}
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_param_gather=overlap, bucket_size=16
        )
        self.ddp = DistributedDataParallel(self.model, config)
        self.optimizer = DistributedOptimizer(self.ddp, lr=0.1)
        self.steps = 0
        self.step()

    def step(self) -> None:
        call(self.ddp.module, batch(self.steps)).square().sum().backward()
        self.ddp.finish_grad_sync()
        self.optimizer.step()
        self.ddp.zero_grad_buffer()
        self.steps += 1

    def in_flight(self) -> int:
        return sum(type(entry.owned.param) is not nn.Parameter for entry in self.ddp.bucket_params)

    def check_plain(self) -> None:
        """Every module is what it was: the same dict, and no hook."""
        assert self.in_flight() == 0
        for module in self.model.modules():
            assert type(module._parameters) is dict
            assert module._parameters is self.dicts.get(id(module), module._parameters)
            assert not module._forward_pre_hooks


# ---- Done by hand. ----


def deep_copy(trained: Trained) -> Any:
    twin = copy.deepcopy(trained.model)
    check_untouched(twin)
    return twin


def deep_copy_of_one(trained: Trained) -> Any:
    twin = copy.deepcopy(trained.model[0])
    check_untouched(twin)
    return twin


def shallow_copy(trained: Trained) -> Any:
    return copy.copy(trained.model[3])


def pickled(trained: Trained) -> Any:
    file = io.BytesIO()
    torch.save(copy.deepcopy(trained.model), file)  # without what the wrapper hangs on parameters
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    check_untouched(twin)
    return twin


def check_untouched(twin: nn.Module, *, dropped: bool = False) -> None:
    """``dropped``: the wrapper is gone, and its modules have a hook that refuses to train."""
    for module in twin.modules():
        assert type(module._parameters) is dict
        assert not module._forward_pre_hooks or dropped
    assert all(type(param) is nn.Parameter for param in twin.parameters())


def state_dict(trained: Trained) -> Any:
    return trained.model.state_dict()


def load_state_dict(trained: Trained) -> Any:
    doubled = {name: value * 2 for name, value in make_model().state_dict().items()}
    trained.model.load_state_dict(doubled)
    return trained.model


def to_the_same(trained: Trained) -> Any:
    return trained.model.to("cpu", torch.float32)


def apply_a_function(trained: Trained) -> Any:
    @torch.no_grad()
    def add_one(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            param.add_(1)

    return trained.model.apply(add_one)


def functional_call(trained: Trained) -> Any:
    module = trained.model[3]
    before = module.weight
    with torch.no_grad():
        output = torch.func.functional_call(module, {"weight": torch.ones(WIDTH, WIDTH)}, (torch.ones(1, WIDTH),))
    assert module.weight is before
    return [output]


def functional_call_over_all(trained: Trained) -> Any:
    module = trained.model[3]
    state = {name: param.detach() * 2 for name, param in module.named_parameters()}
    with torch.no_grad():
        return [torch.func.functional_call(module, state, (torch.ones(1, WIDTH),))]


def register_and_delete(trained: Trained) -> Any:
    module = trained.model[3]
    module.register_parameter("more", nn.Parameter(torch.ones(1), requires_grad=False))
    module.more = None
    assert module._parameters["more"] is None
    del module.more
    assert "more" not in module._parameters and not hasattr(module, "more")
    return module


def replace(trained: Trained) -> Any:
    module = trained.model[3]
    old = module.scale
    module.scale = nn.Parameter(torch.full((WIDTH,), 7.0))
    seen = module.scale.detach().clone()
    module.scale = old
    return [seen, module.scale]


def parametrized(trained: Trained) -> Any:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    module = trained.model[3]
    parametrize.register_parametrization(module, "scale", Twice())
    seen = module.scale.detach().clone()
    parametrize.remove_parametrizations(module, "scale", leave_parametrized=False)
    return [seen, module.scale]


def hooks_of_the_users(trained: Trained) -> Any:
    module, seen = trained.model[0], []
    handle = module.register_forward_pre_hook(lambda *_: seen.append("first"))
    module(torch.ones(1, WIDTH))
    module(torch.ones(1, WIDTH))
    assert seen == ["first", "first"]
    handle.remove()
    module(torch.ones(1, WIDTH))
    assert len(seen) == 2
    return module


def moved_between_modules(trained: Trained) -> Any:
    """A module that was made after wrapping reads the same parameter."""
    other = nn.Linear(WIDTH, WIDTH, bias=False)
    other.weight = trained.model[3].weight
    trained.step()
    trained.model[3].later = other
    trained.step()
    values = [trained.model[3].later.weight.detach().clone()]
    del trained.model[3].later
    return values


def taken_out(trained: Trained) -> Any:
    """A module that is taken out of the model while it waits."""
    module = trained.model[0]
    trained.model[0] = nn.Identity()
    assert trained.in_flight() == 0 or module._forward_pre_hooks
    with torch.no_grad():
        seen = module(torch.ones(1, WIDTH))
    assert type(module._parameters) is dict and not module._forward_pre_hooks
    trained.model[0] = module
    return [seen]


def a_shallow_copy_that_stays(trained: Trained) -> Any:
    twin = copy.copy(trained.model[3])
    trained.optimizer.finish_param_sync()
    trained.step()
    return [twin.weight, *twin.parameters()]


DEEDS: dict[str, Callable[[Trained], Any]] = {
    deed.__name__.replace("_", " "): deed
    for deed in (
        deep_copy, deep_copy_of_one, shallow_copy, pickled, state_dict, load_state_dict, to_the_same, apply_a_function,
        functional_call, functional_call_over_all, register_and_delete, replace, parametrized, hooks_of_the_users,
        moved_between_modules, taken_out, a_shallow_copy_that_stays,
    )
}  # fmt: skip


def values_of(thing: Any) -> list[Tensor]:
    if isinstance(thing, nn.Module):
        return [param.detach().clone() for param in thing.parameters()]
    return [value.detach().clone() for value in (thing.values() if isinstance(thing, dict) else thing)]


def do(deed: str, overlap: bool) -> tuple[int, list[Tensor], list[Tensor]]:
    trained = Trained(overlap)
    waiting = trained.in_flight()
    seen = values_of(DEEDS[deed](trained))
    trained.optimizer.finish_param_sync()
    trained.check_plain()
    trained.step()
    trained.step()
    trained.optimizer.finish_param_sync()
    trained.check_plain()
    return waiting, seen, values_of(trained.model)


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.sampled(3)
def test_what_is_done_in_flight(deed: str) -> None:
    for (waiting, *late), (_, *early) in zip(
        simulate(do, RANKS, deed, True), simulate(do, RANKS, deed, False), strict=True
    ):
        assert waiting == 12, "or the test shows nothing"
        for mine, theirs in zip(late, early, strict=True):
            assert mine
            assert all(map(torch.equal, mine, theirs))
            assert len(mine) == len(theirs)


class OfAList(nn.Module):
    """Registers no parameter itself, but in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(WIDTH, WIDTH)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0] @ self.weights[1]


def copy_a_module_whose_parameters_lie_in_a_list() -> tuple[Tensor, Tensor]:
    trained = Trained(model=nn.Sequential(OfAList()))
    with pytest.raises(TypeError, match="wired to gradient buckets and cannot be pickled"):
        torch.save(trained.model[0], io.BytesIO())
    trained.step()
    file = io.BytesIO()
    torch.save(copy.deepcopy(trained.model), file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    x = torch.ones(2, WIDTH)
    seen: list[str] = []
    handle = twin[0].register_forward_pre_hook(lambda *_: seen.append("the user's own hook stays"))
    for _ in range(2):
        found = twin(x)
    assert len(seen) == 2
    handle.remove()
    check_untouched(twin)
    assert not any(module._forward_pre_hooks for module in twin.modules())
    trained.optimizer.finish_param_sync()
    return found, trained.model(x)


def test_copies_of_a_module_whose_parameters_lie_in_a_list_wait_for_nothing() -> None:
    for found, expected in simulate(copy_a_module_whose_parameters_lie_in_a_list, RANKS):
        assert torch.equal(found, expected)


def script_in_flight() -> tuple[str, Tensor, Tensor]:
    trained = Trained(model=nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    with pytest.raises(AttributeError) as caught:
        torch.jit.script(trained.model[0])
    trained.optimizer.finish_param_sync()
    x = torch.ones(2, WIDTH)
    return str(caught.value), torch.jit.script(trained.model[0])(x), trained.model[0](x)


def test_a_module_is_scripted_after_its_gathers() -> None:
    for message, found, expected in simulate(script_in_flight, RANKS):
        assert "call optimizer.finish_param_sync() first" in message
        assert torch.equal(found, expected)


def wait_for_one_bucket_after_another() -> list[int]:
    trained = Trained()
    module = trained.model[2]
    waits = []
    for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0", "bias_hh_l0"):
        waits.append(len(module._forward_pre_hooks))
        getattr(module, name).sum()
    trained.optimizer.finish_param_sync()
    trained.check_plain()
    return waits


def test_a_module_waits_until_its_last_bucket_has_arrived() -> None:
    assert simulate(wait_for_one_bucket_after_another, RANKS) == [[4, 3, 2, 1, 0]] * RANKS


# ---- Lifetimes. ----


def let_go_in_flight() -> list[str]:
    trained = Trained()
    assert trained.in_flight()
    watched = {name: weakref.ref(param) for name, param in vars(trained.ddp)["_modules"].items()}
    memory = {}
    for entry in trained.ddp.bucket_params:
        watched[entry.owned.name] = weakref.ref(entry.owned.param)
        with torch._C.DisableTorchFunctionSubclass():
            memory[entry.owned.name] = StorageWeakRef(entry.owned.param.untyped_storage())
    assert trained.in_flight()
    del entry, trained
    dist.barrier()
    alive = [name for name, reference in watched.items() if reference() is not None]
    return alive + [name for name, reference in memory.items() if not reference.expired()]


@pytest.mark.usefixtures("no_garbage_collector")
def test_a_model_that_is_let_go_in_flight_is_freed_by_its_last_reference() -> None:
    assert simulate(let_go_in_flight, RANKS) == [[], []]


def outlive_the_wrapper(overlap: bool) -> tuple[int, list[Tensor]]:
    trained = Trained(overlap)
    waiting, model = trained.in_flight(), trained.model
    del trained
    file = io.BytesIO()
    torch.save(model[0], file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    check_untouched(saved, dropped=True)
    with torch.no_grad():
        output = call(model, torch.ones(3, WIDTH))
    check_untouched(model, dropped=True)
    return waiting, [output, *values_of(saved), *values_of(model)]


def test_a_model_outlives_its_wrapper_and_its_optimizer_in_flight() -> None:
    for (waiting, late), (_, early) in zip(
        simulate(outlive_the_wrapper, RANKS, True), simulate(outlive_the_wrapper, RANKS, False), strict=True
    ):
        assert waiting
        assert all(map(torch.equal, late, early))


def test_nothing_is_kept_of_the_gathers_of_earlier_steps() -> None:
    """Else each step would add to a list, for as long as the program trains."""

    def train() -> list[int]:
        trained = Trained()
        gather = trained.optimizer.param_sync.gathers[0]
        waiting = len(gather.unhook)
        for _ in range(2):
            trained.step()
        again = len(gather.unhook)
        trained.optimizer.finish_param_sync()
        trained.check_plain()
        return [waiting, again, len(gather.unhook)]

    for waiting, again, after in simulate(train, RANKS):
        assert waiting == again > 0 == after
