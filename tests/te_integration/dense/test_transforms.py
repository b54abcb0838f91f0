"""``torch.func``'s transforms and forward-mode derivatives: ordinary autograd's, or refused by name."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import wrap
from torch import Tensor, nn
from torch.autograd import forward_ad

from maingrad.te_integration import (
    GroupedLinear,
    GroupedMLP,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    ScaledSwiGLU,
    WgradQueue,
    delayed_wgrad,
    moe_permute,
    moe_unpermute,
)

ROWS = 3
X, DX = torch.linspace(-1, 1, 2 * ROWS * 8).view(2, ROWS, 8)


def loss(module: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.func.functional_call(module, params, (x,)).square().sum()


def forward_mode(module: nn.Module) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(module(forward_ad.make_dual(X, DX))).tangent


ASKED: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda m: torch.func.grad(lambda p: loss(m, p, X))(dict(m.named_parameters())),
    "each row's": lambda m: torch.vmap(torch.func.grad(lambda p, x: loss(m, p, x)), (None, 0))(
        dict(m.named_parameters()), X
    ),
    "vmap": lambda m: torch.vmap(m)(torch.stack([X, DX])),
    "jvp": lambda m: torch.func.jvp(m, (X,), (DX,)),
    "jacrev": lambda m: torch.func.jacrev(m)(X),
    "hessian": lambda m: torch.func.hessian(lambda x: m(x).square().sum())(X[0]),
    "forward mode": forward_mode,
}


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kind", [Linear, LayerNormLinear, LayerNormMLP])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.sampled(3)
def test_linear_modules(kind: Any, asked: str, delay: bool) -> None:
    torch.manual_seed(0)
    plain = kind(8, 8)
    model = kind(8, 8, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    model.load_state_dict(plain.state_dict())
    ddp = wrap(model)
    same(ASKED[asked](model), ASKED[asked](plain))
    assert ddp.is_clear  # as with autograd.grad, nothing is written
    assert not model.need_backward_dw()
    with delayed_wgrad(WgradQueue()) as queue:
        same(ASKED[asked](model), ASKED[asked](plain))
        assert not len(queue)


def test_a_backward_through_vmap_counts() -> None:
    """Backward runs after the transform has ended, so its gradients belong to the iteration."""
    torch.manual_seed(0)
    model = Linear(8, 8, fuse_wgrad_accumulation=True)
    plain = nn.Linear(8, 8)
    plain.load_state_dict(model.state_dict())
    ddp = wrap(model, overlap_grad_reduce=True)
    batch = torch.stack([X, DX])
    with ddp.no_sync():
        torch.vmap(model)(batch).square().sum().backward()
    ddp(batch).square().sum().backward()
    ddp.finish_grad_sync()
    (2 * plain(batch).square().sum()).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.main_grad, theirs.grad)


GROUPED = GroupedLinear(2, 8, 8, name="experts")
EXPERTS = GroupedMLP(2, 8, 8)
SORTING = moe_permute(X, torch.zeros(ROWS, 1, dtype=torch.int64), 1)[1]
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "grouped": (lambda x: GROUPED(x, [1, 2]), "experts"),
    "mlp": (lambda x: EXPERTS(x, [1, 2]), r"GroupedMLP\(num_gemms=2"),
    "permute": (lambda x: moe_permute(x, torch.zeros(ROWS, 1, dtype=torch.int64), 1)[0], "moe_permute"),
    "unpermute": (lambda x: moe_unpermute(x, SORTING), "moe_unpermute"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    run, owner = REFUSED[name]
    for transformed in (
        lambda: torch.func.grad(lambda x: run(x).sum())(X),
        lambda: torch.vmap(run)(torch.stack([X, DX])),
        lambda: forward_mode(run),  # type: ignore[arg-type]
    ):
        with pytest.raises(RuntimeError, match=rf"{owner}.* has no rules for torch\.func's transforms.*autograd\.grad"):
            transformed()
    x = X.clone().requires_grad_()
    assert torch.autograd.grad(run(x).square().sum(), x)[0].any()


def test_a_scaled_activation_in_forward_mode() -> None:
    op = ScaledSwiGLU()
    found = forward_mode(lambda x: op(x, torch.ones(ROWS)))  # type: ignore[arg-type, return-value]
    same(found, torch.func.jvp(lambda x: op(x, torch.ones(ROWS)), (X,), (DX,))[1])


def test_transforms_of_a_wrapped_model() -> None:
    """Transforms as meta-learning uses them."""
    torch.manual_seed(0)
    model = nn.Sequential(Linear(8, 8, fuse_wgrad_accumulation=True), nn.Tanh(), nn.Linear(8, 2))
    ddp = wrap(model, overlap_grad_reduce=True)
    plain = copy.deepcopy(model)
    plain[0].fuse_wgrad_accumulation = False
    mine = torch.func.grad(lambda p: loss(model, p, X))(dict(model.named_parameters()))
    same(mine, torch.func.grad(lambda p: loss(plain, p, X))(dict(plain.named_parameters())))
    for asked in ("vmap", "jvp", "jacrev", "hessian", "forward mode"):
        same(ASKED[asked](ddp), ASKED[asked](plain))
    assert ddp.is_clear
