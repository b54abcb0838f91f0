"""``LinearCrossEntropy``, alone and wrapped: every option against F.cross_entropy of all logits in fp64."""

import copy
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from foreign import ForeignProvider
from host_syncs import NoHostSync
from loops import wrap
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel
from maingrad.kernels.cross_entropy.chunks import head_losses
from maingrad.kernels.cross_entropy.reference import LossTerms
from maingrad.te_integration import (
    DelayedScaling,
    Float8CurrentScaling,
    LinearCrossEntropy,
    WgradQueue,
    autocast,
    delayed_wgrad,
    linear_cross_entropy,
)
from maingrad.te_integration.head.recomputing import HeadWork, head_of

K, V = 8, 33
OPTIONS = [
    dict(zip(("label_smoothing", "z_loss", "logit_softcap", "logit_scale", "bias"), values, strict=True))
    for values in itertools.product((0.0, 0.1), (0.0, 1e-2), (None, 2.0), (1.0, 0.5), (False, True))
]


def data(shape: tuple[int, ...] = (3, 5), dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, K, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(V, shape, generator=generator)
    if targets.numel() > 3:
        targets.view(-1)[1:4] = -100
    return hidden, targets


def plain_losses(head: LinearCrossEntropy, hidden: Tensor, targets: Tensor) -> Tensor:
    """The losses of tokens by torch's own functions, from all logits."""
    z = F.linear(hidden, head.weight, head.bias).reshape(-1, V) * head.logit_scale
    z = z if head.logit_softcap is None else head.logit_softcap * torch.tanh(z / head.logit_softcap)
    flat, options = targets.reshape(-1), {"ignore_index": head.ignore_index, "reduction": "none"}
    losses = F.cross_entropy(z, flat, label_smoothing=head.label_smoothing, **options)
    z_losses = head.z_loss * z.logsumexp(1).square()
    return (losses + torch.where(flat == head.ignore_index, 0.0, z_losses)).view(targets.shape)


def reduced(losses: Tensor, targets: Tensor, reduction: str, ignore_index: int = -100) -> Tensor:
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 5, 100])
@pytest.mark.sampled(24)
def test_against_cross_entropy(options: dict[str, Any], reduction: Any, chunk_tokens: int) -> None:
    torch.manual_seed(1)
    head = LinearCrossEntropy(
        K, V, reduction=reduction, chunk_tokens=chunk_tokens, dtype=torch.float64, ignore_index=7, **options
    )
    hidden, targets = data()
    targets[targets == -100] = 7
    loss = head(hidden, targets)
    expected = reduced(plain_losses(head, hidden, targets), targets, reduction, 7)
    upstream = torch.randn_like(loss)
    torch.testing.assert_close(loss, expected)
    operands = [hidden, *head.parameters()]
    for found, exact in zip(
        torch.autograd.grad(loss, operands, upstream), torch.autograd.grad(expected, operands, upstream), strict=True
    ):
        torch.testing.assert_close(found, exact)
    function = linear_cross_entropy(
        hidden, head.weight, targets, reduction=reduction, chunk_tokens=chunk_tokens, ignore_index=7,
        **{**options, "bias": head.bias},
    )  # fmt: skip
    assert torch.equal(function, loss)


def test_logits_are_those_of_the_loss() -> None:
    head = LinearCrossEntropy(K, V, logit_softcap=2.0, logit_scale=0.5, bias=True, dtype=torch.float64)
    hidden, targets = data()
    logits = head.logits(hidden)
    assert torch.equal(head(hidden), logits)
    torch.testing.assert_close(F.cross_entropy(logits.view(-1, V), targets.view(-1)), head(hidden, targets))


@pytest.mark.parametrize("wrapped", [False, True])
def test_logits_have_the_gradients_of_a_linear_layer(wrapped: bool) -> None:
    """Into ``main_grad`` under a wrapper, and to autograd without; a block that delays leaves them in backward."""
    head = LinearCrossEntropy(K, V, logit_softcap=2.0, bias=True)
    twin = copy.deepcopy(head)
    ddp: Any = wrap(head) if wrapped else head
    hidden, targets = data(dtype=torch.float32)
    with delayed_wgrad(queue := WgradQueue()):
        loss = F.cross_entropy(ddp(hidden).view(-1, V), targets.view(-1))
    loss.backward()
    assert not len(queue)
    (plain_losses(twin, hidden.detach(), targets).sum() / (targets != -100).sum()).backward()
    for name, param in head.named_parameters():
        found = param.main_grad if wrapped else param.grad
        torch.testing.assert_close(found, twin.get_parameter(name).grad, msg=name)
    assert not wrapped or [record.num_fused_writes for record in ddp.records if record.name == "weight"] == [1]


def test_num_tokens_divides_the_sum() -> None:
    head = LinearCrossEntropy(K, V, dtype=torch.float64, chunk_tokens=4)
    hidden, targets = data()
    total = head(hidden, targets, reduction="sum")
    for count in (20, torch.tensor(20)):
        torch.testing.assert_close(head(hidden, targets, num_tokens=count), total / 20)
        torch.testing.assert_close(linear_cross_entropy(hidden, head.weight, targets, num_tokens=count), total / 20)
    assert head(hidden, targets, num_tokens=torch.tensor(0)).isinf(), "a count of ranks without a token is theirs too"
    with pytest.raises(ValueError, match="num_tokens divides"):
        head(hidden, targets, num_tokens=3, reduction="sum")


@pytest.mark.parametrize("mode", ["recompute", "in_forward"])
def test_a_call_may_have_a_reduction_and_an_ignored_class_of_its_own(mode: Any) -> None:
    head = LinearCrossEntropy(K, V, dtype=torch.float64, ignore_index=7, reduction="sum", mode=mode)
    hidden, targets = data()
    targets[targets == -100] = 9
    targets[0, 0] = 7
    for ignored in (0, 9):
        targets[2, 4] = ignored
        logits = head.logits(hidden).view(-1, V)
        expected = F.cross_entropy(logits, targets.view(-1), ignore_index=ignored)
        torch.testing.assert_close(head(hidden, targets, reduction="mean", ignore_index=ignored), expected)
    expected = F.cross_entropy(logits, targets.view(-1), ignore_index=7, reduction="sum")
    torch.testing.assert_close(head(hidden, targets), expected, msg="the module's own are as before")


def test_weights_for_each_token() -> None:
    """As in reinforcement learning: the gradient of a token's log-probability is known after the forward."""
    head = LinearCrossEntropy(K, V, reduction="none", chunk_tokens=4)
    twin = copy.deepcopy(head)
    ddp = wrap(head)
    hidden, targets = data(dtype=torch.float32)
    again = hidden.detach().clone().requires_grad_()

    def objective(log_probs: Tensor) -> Tensor:
        return ((log_probs - log_probs.detach() + 0.1).exp() * torch.linspace(-1, 1, 15).view(3, 5)).sum()

    objective(-ddp(hidden, targets)).backward()
    objective(-plain_losses(twin, again, targets)).backward()
    torch.testing.assert_close(head.weight.main_grad, twin.weight.grad)
    torch.testing.assert_close(hidden.grad, again.grad)


@pytest.mark.parametrize("mode", ["recompute", "in_forward"])
def test_all_tokens_ignored_and_no_tokens(mode: Any) -> None:
    head = LinearCrossEntropy(K, V, mode=mode, reduction="sum")
    ddp = wrap(head)
    hidden, targets = data(dtype=torch.float32)
    loss = ddp(hidden, torch.full_like(targets, -100))
    loss.backward()
    assert loss == 0
    assert not hidden.grad.any()
    assert not head.weight.main_grad.any()
    ddp.zero_grad()
    head.weight.main_grad.fill_(0)
    mean = ddp(hidden, torch.full_like(targets, -100), reduction="mean")
    mean.backward()
    assert mean.isnan(), "as F.cross_entropy"
    assert not head.weight.main_grad.any()
    ddp.zero_grad()
    none, no_targets = data((0,), torch.float32)
    empty = ddp(none, no_targets)
    empty.backward()
    assert empty == 0
    assert none.grad.shape == (0, K)
    assert not head.weight.main_grad.any(), "the first write of an iteration overwrites"


def test_without_a_provider_autograd_delivers() -> None:
    head = LinearCrossEntropy(K, V, chunk_tokens=4)
    hidden, targets = data(dtype=torch.float32)
    for _ in range(2):
        head(hidden, targets).backward()
    expected = torch.autograd.grad(2 * plain_losses(head, hidden, targets).sum() / 12, head.weight)[0]
    torch.testing.assert_close(head.weight.grad, expected)


def test_bf16_is_no_less_exact_than_the_unfused_path() -> None:
    torch.manual_seed(2)
    head = LinearCrossEntropy(64, 512, chunk_tokens=16, dtype=torch.bfloat16)
    ddp = wrap(head, grad_reduce_in_fp32=True)
    hidden = torch.randn(128, 64, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(512, (128,))
    ddp(hidden, targets).backward()

    def of(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x, w = (each.detach().to(dtype).requires_grad_() for each in (hidden, head.weight))
        logits = F.linear(x, w)
        F.cross_entropy(logits.float() if dtype is torch.bfloat16 else logits, targets).backward()
        return x.grad, w.grad

    for found, unfused, exact in zip(
        (hidden.grad, head.weight.main_grad), of(torch.bfloat16), of(torch.float64), strict=True
    ):
        error, theirs = (float((each.double() - exact).norm() / exact.norm()) for each in (found, unfused))
        assert error <= 1.02 * theirs


def test_chunks_of_a_bf16_gradient_are_summed_in_fp32() -> None:
    """256, 1 and -256 are chunks of one accumulator: 1 is lost where each is rounded to bf16."""
    head = LinearCrossEntropy(1, 2, reduction="sum", chunk_tokens=1, dtype=torch.bfloat16)
    with torch.no_grad():
        head.weight.zero_()
    hidden = torch.tensor([[512.0], [2.0], [-512.0]], dtype=torch.bfloat16)
    head(hidden, torch.zeros(3, dtype=torch.int64)).backward()
    assert head.weight.grad.tolist() == [[-1.0], [1.0]]
    head.zero_grad()
    ddp = wrap(head, grad_reduce_in_fp32=False)
    assert head.weight.main_grad.dtype is torch.bfloat16
    ddp(hidden, torch.zeros(3, dtype=torch.int64)).backward()
    assert head.weight.main_grad.tolist() == [[-1.0], [1.0]]


def test_autocast_casts_as_a_linear_layer() -> None:
    head = LinearCrossEntropy(K, V, bias=True)
    hidden, targets = data(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = head(hidden, targets)
        assert torch.equal(head(hidden.bfloat16(), targets), loss)
        logits = head.logits(hidden)
    assert logits.dtype is torch.bfloat16
    torch.testing.assert_close(loss, F.cross_entropy(logits.float().view(-1, V), targets.view(-1)))
    loss.backward()
    assert {each.grad.dtype for each in (hidden, head.weight, head.bias)} == {torch.float32}


def test_a_frozen_head_computes_no_weight_gradient() -> None:
    head = LinearCrossEntropy(K, V, chunk_tokens=4)
    head.weight.requires_grad_(False)
    hidden, targets = data(dtype=torch.float32)
    for mode in ("recompute", "in_forward"):
        head.mode = mode
        hidden.grad = None
        head(hidden, targets).backward()
        expected = torch.autograd.grad(plain_losses(head, hidden, targets).sum() / 12, hidden)[0]
        torch.testing.assert_close(hidden.grad, expected)
        assert head.weight.grad is None


def test_a_hook_on_the_weight_sees_its_gradient() -> None:
    for mode in ("recompute", "in_forward"):
        head = LinearCrossEntropy(K, V, mode=mode)
        ddp, seen = wrap(head), []
        head.weight.register_hook(seen.append)
        hidden, targets = data(dtype=torch.float32)
        ddp(hidden, targets).backward()
        assert len(seen) == 1
        assert torch.equal(head.weight.main_grad, seen[0])


def test_inputs_alone_and_weights_alone() -> None:
    head = LinearCrossEntropy(K, V)
    ddp = wrap(head)
    hidden, targets = data(dtype=torch.float32)
    loss = ddp(hidden, targets)
    (dw,) = torch.autograd.grad(loss, head.weight, retain_graph=True)
    (dx,) = torch.autograd.grad(loss, hidden)
    expected = torch.autograd.grad(plain_losses(head, hidden, targets).sum() / 12, [hidden, head.weight])
    torch.testing.assert_close((dx, dw), tuple(expected))
    assert ddp.records[0].num_fused_writes == 0


@pytest.mark.parametrize("mode", ["recompute", "in_forward"])
def test_transforms_and_second_derivatives(mode: Any) -> None:
    options: Any = {"label_smoothing": 0.1, "z_loss": 0.01, "logit_softcap": 2.0, "logit_scale": 0.5}
    head = LinearCrossEntropy(K, V, bias=True, dtype=torch.float64, mode=mode, **options)
    hidden, targets = data()
    ddp = wrap(head)
    found = torch.func.grad(lambda x: head(x, targets))(hidden.detach())
    torch.testing.assert_close(found, torch.autograd.grad(head(hidden, targets), hidden)[0])
    narrow = LinearCrossEntropy(K, V, bias=True, mode=mode, **options)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.func.grad(lambda x: narrow(x, targets))(hidden.detach())
        torch.testing.assert_close(found, torch.autograd.grad(narrow(hidden, targets), hidden)[0])
    with pytest.raises(RuntimeError, match="second derivatives"):
        head(hidden, targets).backward(create_graph=True)
    ddp.abandon_iteration()


class LargestTensor(TorchDispatchMode):
    """The most elements that any result of an operation has."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.most = max(self.most, result.numel())
        return result


@pytest.mark.parametrize("mode", ["recompute", "in_forward"])
def test_no_more_logits_than_a_chunk(mode: Any) -> None:
    head = LinearCrossEntropy(2, 64, chunk_tokens=8, mode=mode)
    ddp = wrap(head)
    hidden, targets = torch.randn(64, 2, requires_grad=True), torch.randint(64, (64,))
    with LargestTensor() as seen:
        ddp(hidden, targets).backward()
    assert seen.most == 8 * 64


def test_the_host_reads_nothing() -> None:
    head = LinearCrossEntropy(K, V, chunk_tokens=4, label_smoothing=0.1, z_loss=0.1)
    ddp = wrap(head)
    hidden, targets = data(dtype=torch.float32)
    ddp(hidden, targets).backward()
    ddp.zero_grad()
    with NoHostSync():
        loss = ddp(hidden, targets)
        loss.backward()


def test_delayed_blocks_leave_it_in_backward() -> None:
    head = LinearCrossEntropy(K, V)
    ddp, queue = wrap(head), WgradQueue()
    hidden, targets = data(dtype=torch.float32)
    with delayed_wgrad(queue):
        loss = ddp(hidden, targets)
    loss.backward()
    assert len(queue) == 0
    assert ddp.records[0].num_fused_writes == 1


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), DelayedScaling()], ids=repr)
def test_recipes_quantise_no_head(recipe: Any) -> None:
    head = LinearCrossEntropy(32, 64, dtype=torch.bfloat16)
    hidden, targets = torch.randn(32, 32, dtype=torch.bfloat16, requires_grad=True), torch.arange(32)
    logits, loss = head.logits(hidden), head(hidden, targets)
    with autocast(recipe=recipe):
        assert torch.equal(head.logits(hidden), logits) and torch.equal(head(hidden, targets), loss)
    assert not list(head.buffers())


def test_a_tied_weight_is_summed() -> None:
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self, by_function: bool) -> None:
            super().__init__()
            self.embedding = nn.Embedding(V, K)
            self.head = None if by_function else LinearCrossEntropy(K, V, chunk_tokens=4)
            if self.head is not None:
                self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            hidden = self.embedding(tokens)
            if self.head is None:
                return linear_cross_entropy(hidden, self.embedding.weight, targets, chunk_tokens=4)
            loss: Tensor = self.head(hidden, targets)
            return loss

    tokens, targets = torch.randint(V, (2, 7)), torch.randint(V, (2, 7))
    for by_function in (False, True):
        model = Tied(by_function)
        weight = model.embedding.weight.detach().clone().requires_grad_()
        ddp = wrap(model)
        with ddp.no_sync():
            ddp(tokens, targets).backward()
        ddp(tokens, targets).backward()
        logits = F.linear(F.embedding(tokens, weight), weight)
        (2 * F.cross_entropy(logits.view(-1, V), targets.view(-1))).backward()
        torch.testing.assert_close(model.embedding.weight.main_grad, weight.grad)
        assert ddp.records[0].num_fused_writes == 2


def test_refused_arguments() -> None:
    for options, match in (
        ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1"),
        ({"label_smoothing": -0.1}, "label_smoothing must be from 0 to 1"),
        ({"logit_softcap": 0.0}, "logit_softcap must be above 0"),
        ({"logit_softcap": -2.0}, "logit_softcap must be above 0"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1"),
        ({"mode": "now"}, "mode must be one of recompute, in_forward"),
        ({"reduction": "max"}, "reduction must be one of mean, sum, none"),
        ({"reduction": "none", "mode": "in_forward"}, "leaves the gradient of each token open"),
    ):
        with pytest.raises(ValueError, match=match):
            LinearCrossEntropy(K, V, **options)
        with pytest.raises(ValueError, match=match):
            linear_cross_entropy(torch.randn(3, K), torch.randn(V, K), torch.zeros(3, dtype=torch.int64), **options)
    head = LinearCrossEntropy(K, V, name="lm_head")
    hidden, targets = data(dtype=torch.float32)
    with pytest.raises(ValueError, match="linear_cross_entropy takes 8 features"):
        linear_cross_entropy(hidden[..., :4], head.weight, targets)
    with pytest.raises(ValueError, match="reduction must be one of mean, sum, none; got 'max'"):
        head(hidden, targets, reduction="max")
    with pytest.raises(ValueError, match="leaves the gradient of each token open"):
        LinearCrossEntropy(K, V, mode="in_forward")(hidden, targets, reduction="none")
    with pytest.raises(ValueError, match="lm_head takes 8 features"):
        head(hidden[..., :4], targets)
    with pytest.raises(ValueError, match=r"lm_head takes 8 features in the last dim, got \(\)"):
        head(torch.tensor(1.0), targets)
    for other in (targets[:2], targets.T, targets.flatten()):
        with pytest.raises(ValueError, match=r"needs targets \(3, 5\)"):
            head(hidden, other)
    for dtype in (torch.float32, torch.complex64, torch.bool):
        with pytest.raises(ValueError, match="needs integers as targets"):
            head(hidden, targets.to(dtype))
    with pytest.raises(ValueError, match="cast one or use autocast"):
        head(hidden.double(), targets)


def test_names_and_state_are_those_of_a_linear_layer() -> None:
    head = LinearCrossEntropy(K, V, bias=True, z_loss=0.5)
    linear = nn.Linear(K, V)
    linear.load_state_dict(head.state_dict())
    assert isinstance(head, nn.Linear)
    assert torch.equal(copy.deepcopy(head).weight, linear.weight)
    sizes = f"in_features={K}, out_features={V}, bias=True, reduction=mean"
    assert f"{sizes}, mode=recompute, chunk_tokens=2048, z_loss=0.5" in repr(head)
    assert "bias=False" in repr(LinearCrossEntropy(K, V))
    options: Any = {"ignore_index": 0, "label_smoothing": 0.1, "z_loss": 0.5, "logit_softcap": 2.0, "logit_scale": 0.25}
    assert ", ".join(f"{name}={value}" for name, value in options.items()) in repr(LinearCrossEntropy(K, V, **options))
    made = LinearCrossEntropy(K, V, bias=True, params_dtype=torch.bfloat16, device="meta")
    assert all(param.is_meta and param.dtype is torch.bfloat16 for param in made.parameters())


def test_options_at_their_bounds() -> None:
    head = LinearCrossEntropy(K, V, label_smoothing=1.0, chunk_tokens=1)
    hidden, targets = data(dtype=torch.float32)
    torch.testing.assert_close(head(hidden, targets, reduction="sum"), plain_losses(head, hidden, targets).sum())


def test_targets_of_other_integers() -> None:
    head = LinearCrossEntropy(K, V, label_smoothing=0.1)
    hidden, targets = data(dtype=torch.float32)
    assert torch.equal(head(hidden, targets.int()), head(hidden, targets))
    longer = torch.cat([targets, targets], 1)
    assert torch.equal(head(hidden, longer[:, :5]), head(hidden, targets)), "a view, as labels[:, 1:] is"


@pytest.mark.parametrize("mode", ["recompute", "in_forward"])
def test_a_head_that_does_not_fuse_has_its_gradient_by_autograd(mode: Any) -> None:
    """So that any gradient may come."""
    head = LinearCrossEntropy(K, V, fuse_wgrad_accumulation=False, mode=mode)
    ddp = wrap(head)
    hidden, targets = data(dtype=torch.float32)
    (3 * ddp(hidden, targets)).backward()
    expected = torch.autograd.grad(plain_losses(head, hidden, targets).sum() / 4, head.weight)
    torch.testing.assert_close(head.weight.main_grad, *expected)
    assert ddp.records[0].num_fused_writes == 0


def test_recomputed_uses_of_a_weight_are_one_backward_to_a_foreign_provider() -> None:
    """It asks for the first write of a backward to overwrite; each block of a reentrant checkpoint runs its own."""
    heads = nn.ModuleList(LinearCrossEntropy(K, V, chunk_tokens=4) for _ in range(2))
    weight = heads[1].weight = heads[0].weight
    provider = ForeignProvider(heads)
    weight.main_grad.fill_(torch.nan)
    weight.overwrite_main_grad = True
    hidden, targets = data(dtype=torch.float32)
    sum(checkpoint(head, hidden, targets, use_reentrant=True) for head in heads).backward()
    expected = torch.autograd.grad(plain_losses(heads[0], hidden, targets).sum() / 6, weight)
    torch.testing.assert_close(weight.main_grad, *expected)
    assert provider.seen


def test_init_method_initialises_the_weight() -> None:
    layer = LinearCrossEntropy(3, 4, bias=True, init_method=lambda weight: nn.init.constant_(weight, 0.5))
    assert layer.weight.eq(0.5).all() and not layer.bias.any()


class _Products(TorchDispatchMode):
    """Counts products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out)
        return func(*args, **(kwargs or {}))


def test_logits_of_one_chunk_are_not_computed_again() -> None:
    """15 tokens in chunks of 4: four chunks, whose backward has dx, dW and all logits but those of the first chunk."""
    head = LinearCrossEntropy(K, V, dtype=torch.float64, chunk_tokens=4)
    hidden, targets = data()
    found = []
    loss = head(hidden, targets)
    for _ in range(2):
        with _Products() as products:
            loss.backward(retain_graph=True)
        assert head.weight.grad is not None and hidden.grad is not None
        found.append((products.count, head.weight.grad.clone(), hidden.grad.clone()))
        head.weight.grad = hidden.grad = None
    (first, *grads), (second, *again) = found
    assert (first, second) == (11, 12), "a second backward computes all logits"
    assert all(map(torch.equal, grads, again))


@pytest.mark.parametrize("mode, early", [("recompute", 0), ("in_forward", 1)])
def test_products_of_gradients_that_nobody_needs_are_left_out(mode: Any, early: int) -> None:
    """Four chunks, of which backward computes the logits of three again."""
    for needs_dx, needs_dw in itertools.product((False, True), repeat=2):
        head = LinearCrossEntropy(K, V, mode=mode, chunk_tokens=4).requires_grad_(needs_dw)
        ddp = DistributedDataParallel(nn.ModuleList([head, nn.Linear(1, 1)]))
        hidden, targets = data(dtype=torch.float32)
        hidden = hidden.detach().requires_grad_(needs_dx)
        with _Products() as forward:
            loss = head(hidden, targets)
        with _Products() as backward:
            if loss.requires_grad:
                loss.backward()
        grads = 4 * (needs_dx + needs_dw)
        again = 3 if grads and not early else 0
        assert (forward.count, backward.count) == (4 + early * grads, (1 - early) * grads + again)
        with torch.no_grad(), _Products() as evaluation:
            head(hidden, targets)
        assert evaluation.count == 4
        ddp.zero_grad()


def test_a_second_pass_computes_the_weight_gradient_alone() -> None:
    """As where a captured backward has computed the other gradients before it."""
    hidden, targets = data((15,))
    weight = torch.randn(V, K, dtype=torch.float64, requires_grad=True)
    F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum").backward()
    head = head_of(hidden.detach(), weight.detach(), None, targets, LossTerms(), 4)
    ones, lse = torch.ones(15, dtype=torch.float64), head_losses(head)[1]
    first = F.linear(head.hidden[:4], head.weight)
    logits = weakref.ref(first)
    work = HeadWork(head, ones, lse, first, needs_hidden=True, needs_bias=False)
    del first
    main_grad = torch.full_like(weight, torch.nan).detach()
    found = work.run().hidden
    torch.testing.assert_close(found, hidden.grad)
    assert logits() is None, "a capture keeps the work"
    assert work.run(main_grad, overwrite=True).hidden is found
    torch.testing.assert_close(main_grad, weight.grad)
    work.run(main_grad)
    torch.testing.assert_close(main_grad, 2 * weight.grad)


def test_forwards_whose_backwards_come_later_keep_one_chunk() -> None:
    """As in a pipeline that fills first, or a sum of losses: logits of each forward would be gigabytes."""
    heads = [LinearCrossEntropy(K, V, dtype=torch.float64, chunk_tokens=4) for _ in range(2)]
    hidden, targets = data()
    losses = [heads[number % 2](hidden, targets) for number in range(4)]
    nodes: list[Any] = [loss.grad_fn for loss in losses]
    for number, node in enumerate(nodes):
        while not hasattr(node, "first_logits"):
            node = node.next_functions[0][0]
        nodes[number] = node
    assert [node.first_logits is not None for node in nodes] == [False, False, False, True]
    torch.stack(losses).sum().backward()
    grads = [torch.autograd.grad(2 * head(hidden, targets), head.weight)[0] for head in heads]
    for head, expected in zip(heads, grads, strict=True):
        torch.testing.assert_close(head.weight.grad, expected)


def test_a_loss_that_is_let_go_keeps_nothing() -> None:
    head = LinearCrossEntropy(K, V, dtype=torch.float64, chunk_tokens=4)
    rows, targets = data((15,))
    hidden = rows * 2
    kept = weakref.ref(hidden)
    loss = head(hidden, targets)
    del hidden, loss
    assert kept() is None


@pytest.mark.in_turn
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_region_keeps_no_logits(use_reentrant: bool) -> None:
    head = LinearCrossEntropy(K, V, dtype=torch.float64, chunk_tokens=4)
    hidden, targets = data()
    before = {id(each) for each in gc.get_objects() if isinstance(each, Tensor)}
    loss = checkpoint(head, hidden, targets, use_reentrant=use_reentrant)
    made = [each for each in gc.get_objects() if isinstance(each, Tensor) and id(each) not in before]
    assert not [each for each in made if each.shape == (4, V)]
    loss.backward()
    expected = torch.autograd.grad(head(hidden, targets), head.weight)
    torch.testing.assert_close(head.weight.grad, *expected)
