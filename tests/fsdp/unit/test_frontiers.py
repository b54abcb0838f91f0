"""What sharded parameters cannot do is refused with a remedy, and the remedy helps.

Each row of the table *Frontiers* of docs/reference/full_sharding.md is here.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.launch.simulation.schedule import SimulatedDeadlockError
from maingrad.launch.simulation.simulate import SimulatedRankError
from maingrad.te_integration import convert_linears


def plain_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def unit_of_each_layer(**options: Any) -> Any:
    model = plain_net()
    fully_shard(model[0], **options)
    fully_shard(model[2], **options)
    return fully_shard(model, **options)


X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


def tangent() -> None:
    model = unit_of_each_layer()
    torch.func.jvp(lambda x: model(x), (X,), (torch.ones_like(X),))


def gradients_of_each_row() -> None:
    model = unit_of_each_layer()
    model(X)
    params = dict(plain_net().named_parameters())

    def loss(params: dict[str, Tensor], row: Tensor) -> Tensor:
        return model(row[None]).sum() + params["0.bias"].sum()

    torch.func.vmap(torch.func.grad(loss), (None, 0))(params, X)


def outputs_of_each_row() -> None:
    model = unit_of_each_layer()
    with torch.no_grad():
        torch.func.vmap(lambda row: model(row[None]))(X)


def swapped() -> None:
    model = unit_of_each_layer()
    with model.unsharded():
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
        torch.func.functional_call(model, weights, (X,))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (tangent, "a transform of torch.func over .*: it would take no gradient .*give torch.func a plain model"),
        (gradients_of_each_row, "a transform of torch.func over the outermost unit"),
        (outputs_of_each_row, "a transform of torch.func over .*: it would take no gradient"),
        (swapped, r"'0.bias' was replaced .*torch.func.*torch.func takes a plain copy"),
    ],
)
@pytest.mark.sampled(4)
def test_torch_func_over_shards_is_refused(use: Callable[[], None], message: str) -> None:
    with pytest.raises(SimulatedRankError, match=message) as raised:
        simulate(use, 2)
    assert isinstance(raised.value.__cause__, RuntimeError)


def gradients_of_a_copy() -> dict[str, Tensor]:
    """The remedy."""
    model, copy = unit_of_each_layer(), plain_net()
    with model.unsharded():
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}

    def loss(params: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(copy, params, (row[None],)).sum()

    return torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, X)  # type: ignore[no-any-return]


def test_a_plain_copy_takes_torch_func() -> None:
    for found in simulate(gradients_of_a_copy, 2):
        for index, row in enumerate(X):
            net = plain_net()
            net(row[None]).sum().backward()
            for name, param in net.named_parameters():
                torch.testing.assert_close(found[name][index], param.grad)


def with_penalty(model: Any, *, penalty_first: bool) -> list[Tensor]:
    def penalty() -> Tensor:
        real = X.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(real).sum(), real, create_graph=True)
        return grad.norm()

    parts = [penalty, lambda: model(X + 1).square().sum()]
    torch.stack([part() for part in (parts if penalty_first else parts[::-1])]).sum().backward()
    return [grad.full_tensor() if hasattr(grad := param.grad, "full_tensor") else grad for param in model.parameters()]


def test_a_penalty_before_another_forward_names_what_helps() -> None:
    with pytest.raises(SimulatedRankError, match="run all forwards, or use placements='zero2'"):
        simulate(lambda: with_penalty(unit_of_each_layer(), penalty_first=True), 2)
    expected = with_penalty(plain_net(), penalty_first=True)
    remedies: list[Callable[[], list[Tensor]]] = [
        lambda: with_penalty(unit_of_each_layer(), penalty_first=False),
        lambda: with_penalty(unit_of_each_layer(placements="zero2"), penalty_first=True),
    ]
    for remedy in remedies:
        for found in simulate(remedy, 2):
            torch.testing.assert_close(found, expected)


INITIALISERS: dict[str, Callable[[Tensor], Any]] = {
    "normal_": nn.init.normal_,
    "uniform_": nn.init.uniform_,
    "trunc_normal_": nn.init.trunc_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "a method": lambda weight: weight.exponential_(),
}


def initialised(model: Any, initialise: Callable[[Tensor], Any]) -> list[Tensor]:
    """Initialise the matrices of ``model`` from one seed, and return copies of them."""
    torch.manual_seed(1)
    matrices = [param for param in model.parameters() if param.ndim == 2]
    with torch.no_grad():
        for weight in matrices:
            initialise(weight)
    return [weight.detach().clone() for weight in matrices]


def test_shards_take_constants() -> None:
    def on_rank() -> bool:
        model = fully_shard(plain_net())
        for param in model.parameters():
            nn.init.constant_(param, 2.0)
        with model.unsharded():
            return all((param == 2.0).all() for param in model.parameters())

    assert simulate(on_rank, 2) == [True, True]


@pytest.mark.parametrize("name", INITIALISERS)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_shards_are_not_initialised_by_draws(name: str) -> None:
    """Ranks of one seed would draw equal numbers for different rows, with bounds from the shard's shape."""

    def draw() -> None:
        initialised(fully_shard(plain_net()), INITIALISERS[name])

    match = r"_\(\) on the parameter '0.weight' \(4, 4\) .*by init_fn, or with model.unsharded\(writeback=True\)"
    with pytest.raises(SimulatedRankError, match=match):
        simulate(draw, 2)

    def remedy() -> list[Tensor]:
        model = unit_of_each_layer()
        with model.unsharded(writeback=True):
            initialised(model, INITIALISERS[name])
        with model.unsharded():
            return [param.detach().clone() for param in model.parameters() if param.ndim == 2]

    expected = initialised(plain_net(), INITIALISERS[name])
    for found in simulate(remedy, 2):
        assert all(map(torch.equal, found, expected))


def test_a_rank_alone_initialises_its_shards() -> None:
    expected = initialised(plain_net(), nn.init.xavier_normal_)
    assert all(map(torch.equal, initialised(unit_of_each_layer(), nn.init.xavier_normal_), expected))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules_have_a_forward_first() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    assert list(convert_linears(lazy).skipped) == ["0"]
    for wrap, name in ((DistributedDataParallel, "DistributedDataParallel"), (fully_shard, "fully_shard")):
        with pytest.raises(ValueError, match=f"'0.weight' has no shape yet: run a forward .* before {name}"):
            wrap(lazy)
    lazy(torch.ones(2, 5))
    assert convert_linears(lazy).converted == ("0",)
    DistributedDataParallel(lazy)


class Shares(nn.Module):
    """Uses one layer's weight in another place, or in a part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, penalty: float = 0.0) -> Tensor:
        y = F.linear(self.second(self.first(x)), self.first.weight)
        return y.sum() + penalty * self.first.weight.square().sum()


def test_weights_stay_in_their_unit_and_one_unit_may_use_them_everywhere() -> None:
    x = X.float()

    def another_unit() -> None:
        model = Shares()
        for unit in (model.first, model.second, model):
            fully_shard(unit)
        model(x)

    def the_programs_loss() -> None:
        model = fully_shard(Shares())
        (model(x) + model.first.weight.square().sum()).backward()

    for use in (another_unit, the_programs_loss):
        with pytest.raises(SimulatedRankError, match=r"uses the parameter 'first.weight' outside .*one unit of all"):
            simulate(use, 2)
    plain = Shares()
    plain(x, penalty=0.5).backward()

    def remedy() -> list[Tensor]:
        model = fully_shard(Shares())
        model(x, penalty=0.5).backward()
        return [param.grad.full_tensor() for param in model.parameters()]  # type: ignore[union-attr]

    for found in simulate(remedy, 2):
        torch.testing.assert_close(found, [param.grad for param in plain.parameters()])


def test_other_numbers_of_microbatches_deadlock_and_a_loss_times_0_does_not() -> None:
    def uneven() -> None:
        model = unit_of_each_layer()
        for _ in range(1 + dist.get_rank()):
            model(X).sum().backward()

    with pytest.raises(SimulatedDeadlockError, match=r"rank 1 waits for .*missing ranks: 0"):
        simulate(uneven, 2)

    def remedy() -> list[Tensor]:
        model, rank = unit_of_each_layer(), dist.get_rank()
        with model.no_sync():
            model(X + rank).sum().backward()
        (model(X - rank).sum() * rank).backward()  # rank 0 has no second one
        return [param.grad.full_tensor() for param in model.parameters()]

    plain = plain_net()
    for x in (X, X + 1, X - 1):
        (plain(x).sum() / 2).backward()  # the mean over ranks
    for found in simulate(remedy, 2):
        torch.testing.assert_close(found, [param.grad for param in plain.parameters()])


def test_whole_tensors_are_copied_within_unsharded_or_loaded() -> None:
    whole = {name: torch.full_like(param, 2.0) for name, param in plain_net().named_parameters()}

    def copied() -> None:
        model = unit_of_each_layer()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(whole[name])

    with pytest.raises(
        SimulatedRankError, match=r"copy_\(\) of a whole tensor .* '\w+', .*unsharded\(writeback=True\)"
    ):
        simulate(copied, 2)

    def remedies() -> list[bool]:
        within, loaded, averaged = unit_of_each_layer(), unit_of_each_layer(), unit_of_each_layer()
        with within.unsharded(writeback=True), torch.no_grad():
            for name, param in within.named_parameters():
                param.copy_(whole[name])
        loaded.load_state_dict(whole)
        with torch.no_grad():  # of a rank's elements, as averages of weights are
            for mean, param in zip(averaged.parameters(), loaded.parameters(), strict=True):
                mean.copy_(param).lerp_(param + 2.0, 0.5)
        found = []
        for model, value in ((within, 2.0), (loaded, 2.0), (averaged, 3.0)):
            with model.unsharded():
                found += [bool((param == value).all()) for param in model.parameters()]
        return found

    for found in simulate(remedies, 2):
        assert all(found)


def test_copies_and_averages_are_refused_and_a_second_model_follows() -> None:
    for copy_of in (copy.deepcopy, torch.optim.swa_utils.AveragedModel):
        with pytest.raises(TypeError, match=r"is not copied; build another model and load state_dict\(\) .*lerp_"):
            copy_of(unit_of_each_layer())

    def remedy() -> tuple[list[Tensor], list[Tensor]]:
        model, mean = unit_of_each_layer(), unit_of_each_layer()
        before = {name: param.detach().clone() for name, param in plain_net().named_parameters()}
        mean.load_state_dict(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(X).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for average, param in zip(mean.parameters(), model.parameters(), strict=True):
                average.lerp_(param, 0.5)
        with model.unsharded(), mean.unsharded():
            expected = [before[name].lerp(param, 0.5) for name, param in model.named_parameters()]
            return expected, [param.detach().clone() for param in mean.parameters()]

    for expected, found in simulate(remedy, 2):
        torch.testing.assert_close(found, expected)


def test_gradients_of_sparse_embeddings_are_dense_and_sparse_steps_are_refused() -> None:
    ids = torch.tensor([1, 2, 1])

    def step(optimizer_class: type[torch.optim.Optimizer]) -> Tensor:
        torch.manual_seed(0)
        model = fully_shard(nn.Embedding(6, 4, sparse=True))
        optimizer = optimizer_class(model.parameters(), lr=1.0)  # type: ignore[call-arg]
        model(ids).sum().backward()
        optimizer.step()
        return model.weight.grad.full_tensor()  # type: ignore[union-attr]

    expected = torch.tensor([0.0, 2.0, 1.0, 0.0, 0.0, 0.0])[:, None].expand(6, 4)
    for found in simulate(lambda: step(torch.optim.SGD), 2):
        assert torch.equal(found, expected)
    with pytest.raises(SimulatedRankError, match=r"SparseAdam cannot update sharded parameters.* elementwise class"):
        simulate(lambda: step(torch.optim.SparseAdam), 2)


def test_a_graph_that_is_kept_over_a_step_has_the_new_weights() -> None:
    """As under torch's fused optimizers, which raise no version either."""

    def kept(*, sharded: bool) -> list[Tensor]:
        model = unit_of_each_layer() if sharded else plain_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
        loss = model(X).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        loss.backward()
        return [param.grad.full_tensor() if sharded else param.grad for param in model.parameters()]

    expected = kept(sharded=False)
    for found in simulate(lambda: kept(sharded=True), 2):
        torch.testing.assert_close(found, expected)
