"""Muon beside torch's, and beside one matrix at a time."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, Lion, Muon
from maingrad.ddp.torch_grads.muon import alike, steps_of, update_flops
from maingrad.fsdp import fully_shard
from maingrad.kernels.optimizer.orthogonal.reference import COEFFICIENTS
from maingrad.launch import simulate


def stepped(make: Any, params: list[Tensor], num_steps: int = 3) -> list[Tensor]:
    """Copies of params after some steps with drawn gradients."""
    mine = [nn.Parameter(param.clone()) for param in params]
    optimizer = make(mine)
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        for param in mine:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [param.detach() for param in mine]


def matrices(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.02, "momentum": 0.8, "nesterov": False, "weight_decay": 0.0},
        {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
        {"adjust_lr_fn": "spectral_unclamped", "ns_coefficients": (3.0, -3.2, 1.2)},
    ],
    ids=str,
)
def test_equals_torch_within_its_bf16(options: dict[str, Any]) -> None:
    """torch rounds iterations to bf16: its error against the exact iterations is up to 4 % here, ours below 1e-5."""
    params = matrices((24, 40), (40, 24), (24, 40), (32, 32))
    if "adjust_lr_fn" in options:
        try:
            torch.optim.Muon(params, adjust_lr_fn=options["adjust_lr_fn"])
        except ValueError as error:  # torch 2.11 knows fewer
            pytest.skip(str(error))
    ours = stepped(lambda held: Muon(held, **options), params)
    theirs = stepped(lambda held: torch.optim.Muon(held, **options), params)
    for before, mine, other in zip(params, ours, theirs, strict=True):
        assert (mine - other).norm() < 0.05 * (other - before).norm()


@pytest.mark.parametrize("options", [{}, {"nesterov": False, "weight_decay": 0.3}, {"ns_steps": 3}], ids=str)
def test_equals_torch_in_fp64(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's iterations in fp64 where it rounds to bf16: what is left is our rounding to fp32, 2^-24 in each of some
    twenty products, amplified by 3.4445 in each step where singular values are small."""
    params = matrices((24, 40), (40, 24), (32, 32))
    ours = stepped(lambda held: Muon(held, **options), params)
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.double)
    theirs = stepped(lambda held: torch.optim.Muon(held, **options), params)
    bound = 20 * 2.0**-24 * 3.4445 ** options.get("ns_steps", 5)
    for before, mine, other in zip(params, ours, theirs, strict=True):
        assert (mine - other).norm() < bound * (other - before).norm()
        assert not torch.equal(mine, before)


@pytest.mark.parametrize(
    "steps", [None, [(3.4445, -4.775, 2.0315), (3.0, -3.2, 1.2), (1.5, -0.5, 0.0)]], ids=["simple", "one by one"]
)
def test_exact_beside_fp64(steps: Any) -> None:
    """By singular values in fp64."""
    (weight,) = matrices((24, 40))
    param = nn.Parameter(weight.clone())
    param.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    Muon([param], lr=1.0, weight_decay=0.0, ns_coefficients=steps).step()
    u, s, v = torch.linalg.svd(param.grad.double(), full_matrices=False)
    s = s / s.norm()
    for a, b, c in steps or [(3.4445, -4.775, 2.0315)] * 5:
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close((weight - param).detach().double(), u @ torch.diag(s) @ v, rtol=0, atol=1e-5)


def test_a_matrix_has_the_same_update_in_each_company() -> None:
    params = matrices((24, 40), (24, 40), (40, 24))
    together = stepped(Muon, params)
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(1)
        alone = nn.Parameter(param.clone())
        optimizer = Muon([alone])
        for _ in range(3):
            for other, each in enumerate(params):
                drawn = torch.randn(each.shape, generator=generator)
                alone.grad = drawn if other == index else alone.grad
            optimizer.step()
        torch.testing.assert_close(alone.detach(), together[index], rtol=1e-6, atol=1e-7)


def test_experts_are_matrices_each() -> None:
    (weights,) = matrices((3, 8, 16))
    (packed,) = stepped(Muon, [weights], 1)
    param = nn.Parameter(weights.clone())
    grad = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1))
    for expert in range(3):
        alone = nn.Parameter(weights[expert].clone())
        alone.grad = grad[expert]
        Muon([alone]).step()
        torch.testing.assert_close(alone.detach(), packed[expert], rtol=1e-6, atol=1e-7)
    assert param.shape == packed.shape


@pytest.mark.parametrize("split", [(8, 4, 4), 2], ids=str)
def test_split_parts_are_matrices_each(split: Any) -> None:
    (weight,) = matrices((16, 12))
    (whole,) = stepped(lambda held: Muon(held, split=split), [weight], 1)
    grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    first = 0
    for rows in (8, 8) if split == 2 else split:
        alone = nn.Parameter(weight[first : first + rows].clone())
        alone.grad = grad[first : first + rows]
        Muon([alone]).step()
        torch.testing.assert_close(alone.detach(), whole[first : first + rows], rtol=1e-6, atol=1e-7)
        first += rows


def test_powers_of_two_and_zeros() -> None:
    """A loss scale that nobody divided by changes nothing; a gradient of zeros leaves the weight but for its decay."""
    (weight,) = matrices((24, 40))
    grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    results = []
    for scale in (1.0, 2.0**-70, 2.0**60):
        param = nn.Parameter(weight.clone())
        param.grad = grad * scale
        Muon([param]).step()
        results.append(param.detach())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    param.data.copy_(weight)
    param.grad = torch.zeros_like(weight)
    Muon([param], lr=0.5, weight_decay=0.5).step()
    assert torch.equal(param.detach(), weight * 0.75)


def test_a_gradient_that_stays_zero() -> None:
    """As an expert's without tokens. Momentum decays to numbers whose norm has no inverse in fp32."""
    (weight,) = matrices((4, 8))
    param = nn.Parameter(weight.clone())
    optimizer = Muon([param], momentum=0.5, weight_decay=0.0)
    param.grad = torch.ones_like(weight)
    param.grad[:, 0] = 0
    optimizer.step()
    param.grad = torch.zeros_like(weight)
    for _ in range(160):
        before = param.detach().clone()
        optimizer.step()
    torch.testing.assert_close(param.detach(), before)
    assert optimizer.state[param]["momentum_buffer"].isfinite().all()


def test_a_state_dict_of_torch_steps_on() -> None:
    params = [nn.Parameter(param) for param in matrices((8, 16))]
    params[0].grad = torch.ones_like(params[0])
    theirs = torch.optim.Muon(params, lr=0.25)
    theirs.step()
    ours = Muon(params)
    ours.load_state_dict(theirs.state_dict())
    before = params[0].detach().clone()
    ours.step()
    assert ours.param_groups[0]["lr"] == 0.25 and not torch.equal(params[0], before)


def test_learning_rate_in_a_tensor_and_missing_gradients() -> None:
    params = matrices((8, 16), (8, 16))
    given = stepped(lambda held: Muon(held, lr=torch.tensor(0.25)), params)
    number = stepped(lambda held: Muon(held, lr=0.25), params)
    for mine, other in zip(given, number, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
    held = [nn.Parameter(param.clone()) for param in params]
    held[0].grad = torch.ones_like(held[0])
    Muon(held).step()
    assert torch.equal(held[1], params[1]) and not torch.equal(held[0], params[0])


def test_a_closure_computes_gradients_and_its_loss_is_returned() -> None:
    """As in every optimizer of torch."""
    for cls in (Muon, Lion):
        param = nn.Parameter(torch.ones(4, 4))
        optimizer = cls([param], lr=0.5)

        def closure(param: nn.Parameter = param) -> Any:
            loss = param.square().sum()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        assert loss is not None and loss.item() == 16
        assert not torch.equal(param.detach(), torch.ones(4, 4))


def test_momentum_is_summed_in_the_gradients_dtype() -> None:
    param = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    param.grad_dtype = torch.float32
    param.grad = torch.full((4, 4), 1 + 2**-12)
    optimizer = Muon([param], momentum=0.5)
    optimizer.step()
    assert torch.equal(optimizer.state[param]["momentum_buffer"], param.grad / 2)


def test_state_dicts_go_to_and_from_torch() -> None:
    params = [nn.Parameter(param) for param in matrices((8, 16))]
    ours = Muon(params)
    params[0].grad = torch.ones_like(params[0])
    ours.step()
    saved = copy.deepcopy(ours.state_dict())
    theirs = torch.optim.Muon(params)
    theirs.load_state_dict({**theirs.state_dict(), "state": saved["state"]})
    assert torch.equal(theirs.state[params[0]]["momentum_buffer"], ours.state[params[0]]["momentum_buffer"])
    again = Muon(params)
    again.load_state_dict(saved)
    assert torch.equal(again.state[params[0]]["momentum_buffer"], ours.state[params[0]]["momentum_buffer"])


@pytest.mark.parametrize(
    ("shape", "options", "word"),
    [
        ((8,), {}, "another class"),
        ((2, 2, 4, 4), {}, "another class"),
        ((8, 4), {"split": (3, 4)}, "rows"),
        ((8, 4), {"split": 3}, "rows"),
        ((8, 4), {"split": 0}, "rows"),
        ((8, 4), {"ns_coefficients": "simpel"}, "polar_express"),
        ((8, 4), {"ns_coefficients": (1.0, 2.0)}, "ns_coefficients"),
        ((8, 4), {"ns_coefficients": "simple", "ns_steps": 4}, "ns_steps"),
        ((8, 4), {"ns_steps": 0}, "ns_steps"),
        ((8, 4), {"adjust_lr_fn": "orignal"}, "adjust_lr_fn"),
        ((8, 4), {"momentum": 1.0}, "momentum"),
        ((8, 4), {"momentum": -0.1}, "momentum"),
        ((8, 4), {"lr": math.nan}, "lr"),
        ((8, 4), {"weight_decay": math.nan}, "weight_decay"),
        ((8, 4), {"lr": -1.0}, "lr"),
        ((8, 4), {"weight_decay": -0.1}, "weight_decay"),
        ((8, 4), {"split": (8, 0)}, "rows"),
    ],
    ids=str,
)
def test_refusals(shape: tuple[int, ...], options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Muon([nn.Parameter(torch.zeros(shape))], **options)


def test_steps_and_work_of_an_update() -> None:
    """One triple is taken ``ns_steps`` times; each matrix of a stack is one more."""
    group: dict[str, Any] = {"ns_coefficients": (3.0, -4.0, 2.0), "ns_steps": 3, "split": 1}
    assert len(steps_of(group)) == 3
    assert update_flops((4, 8, 6), group) == 4 * update_flops((8, 6), group)
    Muon([nn.Parameter(torch.zeros(8, 6))], ns_coefficients=(3.0, -4.0, 2.0), ns_steps=3)
    for name, named in COEFFICIENTS.items():
        (given,) = Muon([nn.Parameter(torch.zeros(8, 6))], ns_coefficients=name).param_groups
        assert steps_of(given) == named


def test_momentum_has_the_dtype_of_the_gradients() -> None:
    """fp32, where a program sums gradients of half precision in it."""
    param = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    param.grad_dtype = None
    param.grad = torch.full((4, 4), 1 + 2**-12)
    optimizer = Muon([param], momentum=0.5)
    optimizer.step()
    (state,) = optimizer.state.values()
    assert state["momentum_buffer"].dtype is torch.float32
    assert torch.equal(state["momentum_buffer"], param.grad / 2)


def test_options_of_a_group_and_complex_matrices_are_refused() -> None:
    with pytest.raises(ValueError, match="lr"):
        Muon([{"params": [nn.Parameter(torch.zeros(8, 4))], "lr": -1.0}])
    with pytest.raises(ValueError, match=r"complex64: give it to another class"):
        Muon([nn.Parameter(torch.zeros(8, 4, dtype=torch.complex64))])
    with pytest.raises(ValueError, match=r"\[3\] of torch.float32: give it to another class"):
        Muon([nn.Parameter(torch.zeros(8, 4)), nn.Parameter(torch.zeros(3))])


def test_matrices_share_a_batch_up_to_its_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one shape and dtype. One matrix is a batch of its own, however large it is."""
    monkeypatch.setattr("maingrad.ddp.torch_grads.muon._BATCH_NUMEL", 32)
    small = [torch.zeros(1, 4, 4) for _ in range(5)]
    assert list(alike([*small, torch.zeros(1, 8, 8)])) == [[0, 1], [2, 3], [4], [5]]
    assert list(alike([torch.zeros(1, 8, 8)] * 2)) == [[0], [1]]
    assert list(alike([small[0], small[1].bfloat16(), small[2]])) == [[0, 2], [1]]


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 48, bias=False), nn.Tanh(), nn.Linear(48, 16, bias=False))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        model(torch.randn(8, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_sharded_whole_matrices() -> None:
    """Ranks hold matrices that others do not."""
    plain = make_net()
    train(plain, Muon([{"params": [plain[0].weight], "split": 3}, {"params": [plain[2].weight]}], lr=0.02))

    def on_each_rank() -> list[Tensor]:
        model = make_net()
        fully_shard(model, shard_atoms="whole")
        train(model, Muon([{"params": [model[0].weight], "split": 3}, {"params": [model[2].weight]}], lr=0.02))
        with model.unsharded():
            return [param.detach().clone() for param in model.parameters()]

    for params in simulate(on_each_rank, 4):
        for mine, expected in zip(params, plain.parameters(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("atoms", ["element", "row"])
def test_matrices_that_shards_cut_are_refused(atoms: Any) -> None:
    def on_each_rank() -> None:
        model = make_net()
        fully_shard(model, shard_atoms=atoms)
        with pytest.raises(RuntimeError, match=r"Muon updates whole parameters.*shard_atoms=\"whole\""):
            train(model, Muon(model.parameters()))

    simulate(on_each_rank, 3)


@pytest.mark.parametrize(
    "group", [{"params": [nn.Parameter(torch.zeros(3))]}, {"params": [nn.Parameter(torch.zeros(4, 4))], "split": 3}]
)
def test_a_group_that_is_refused_leaves_nothing(group: Any) -> None:
    optimizer = Muon([nn.Parameter(torch.zeros(4, 4))])
    with pytest.raises(ValueError, match=r"Muon updates matrices|split=3 does not cut 4 rows"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("wrapper", ["zero1", "fsdp"])
def test_a_split_that_does_not_fit_is_refused_on_all_ranks(wrapper: str) -> None:
    """One rank alone has the matrix."""

    def on_each_rank() -> None:
        net = make_net()
        refused = pytest.raises(ValueError, match="split=5 does not cut 48 rows")
        if wrapper == "fsdp":
            fully_shard(net, shard_atoms="whole")
            with refused:
                Muon([{"params": [net[0].weight], "split": 5}, {"params": [net[2].weight]}])
        else:
            config = DistributedDataParallelConfig(use_distributed_optimizer=True, keep_params_whole=True)
            model = DistributedDataParallel(net, config)
            with refused:
                DistributedOptimizer(model, optimizer_class=Muon, param_groups=[{"params": "0.*", "split": 5}])

    simulate(on_each_rank, 3)


def test_a_scaler_on_a_rank_without_matrices() -> None:
    """torch's searches for Inf where gradients are; the error has the remedy."""

    def on_each_rank() -> None:
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, keep_params_whole=True)
        model = DistributedDataParallel(make_net(), config)
        optimizer = DistributedOptimizer(model, optimizer_class=Muon)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(2, 16)).sum()).backward()
        scaler.step(optimizer)

    with pytest.raises(RuntimeError, match=r"use maingrad\.ddp\.GradScaler"):
        simulate(on_each_rank, 3)
