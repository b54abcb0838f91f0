"""Every way to ask autograd for gradients: plain PyTorch's result, or refused by name."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from loops import (
    FEATURES,
    assert_same,
    ddp_backward,
    loss_of,
    main_grads,
    make_batches,
    make_model,
    plain_backward,
    plain_grads,
    plain_twin,
    wrap,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from maingrad.ddp import DistributedDataParallel
from maingrad.launch import simulate
from maingrad.te_integration import Linear, WgradQueue, delayed_wgrad


def pair(**config: object) -> tuple[DistributedDataParallel, nn.Module]:
    model = make_model()
    plain = plain_twin(model)
    return wrap(model, **config), plain


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], eps: float = 2.0**-20) -> None:
    """Equal up to a few fp32 roundings: two contributions may be summed in another order than autograd's."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name] - value).norm() <= eps * value.norm(), name


def fused_writes(ddp: DistributedDataParallel) -> int:
    return sum(record.num_fused_writes for record in ddp.records)


# ---- More than one backward. ----


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("bucket_size", [1, None])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.sampled(8)
def test_backwards_outside_no_sync_add_up(ranks: int, overlap: bool, bucket_size: int | None, read: bool) -> None:
    """Also where buckets were reduced between them, because a program has read ``.grad``."""
    batches = make_batches(3 * ranks, torch.float64)

    def run() -> dict[str, Tensor]:
        model = make_model(torch.float64)
        ddp = wrap(model, overlap_grad_reduce=overlap, bucket_size=bucket_size)
        for batch in batches[dist.get_rank() :: ranks]:
            loss_of(ddp, batch).backward()
            if read:
                assert all(param.grad.isfinite().all() for param in model.parameters())
        return plain_grads(model)

    plain = plain_twin(make_model(torch.float64))
    for batch in batches:
        (loss_of(plain, batch) / ranks).backward()
    for found in simulate(run, ranks):
        assert_close(found, plain_grads(plain), 1e-14)


class TwoHeads(nn.Module):
    """The second head's parameters come first in backward order, and its bucket holds back all others."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()
        self.head = Linear(4, 3, fuse_wgrad_accumulation=True)
        self.extra = Linear(4, 3, fuse_wgrad_accumulation=True)

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        hidden = self.body(x)
        return self.head(hidden) + (self.extra(hidden) if extra else 0)


def test_second_backwards_are_right_before_and_after_the_first_launch() -> None:
    model = TwoHeads()
    plain = plain_twin(model)
    first, second, third = make_batches(3)

    def loss(trained: nn.Module, batch: Tensor, extra: bool) -> Tensor:
        return trained(batch, extra).square().mean()

    ddp = wrap(model, overlap_grad_reduce=True, bucket_size=1)
    for batch in (first, second):  # 'extra' is unused in both: every other bucket is ready and waits behind its bucket
        loss(ddp, batch, False).backward()
        loss(plain, batch, False).backward()
    for parameter in plain.extra.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ddp.finish_grad_sync()
    assert_same(main_grads(ddp), plain_grads(plain))
    ddp.zero_grad_buffer()
    plain.zero_grad()

    for batch, extra in ((first, False), (third, True), (second, True)):
        loss(ddp, batch, extra).backward()  # the second launches 'extra', then what waits behind it
        loss(plain, batch, extra).backward()
    assert_close(plain_grads(model), plain_grads(plain))


@pytest.mark.parametrize("find_unused", [False, True])
def test_two_forwards_may_feed_one_backward(find_unused: bool) -> None:
    """A contrastive loss: a parameter that one forward does not use may be used by the other."""
    model = TwoHeads()
    plain = plain_twin(model)
    ddp = wrap(model, overlap_grad_reduce=True, find_unused_parameters=find_unused, bucket_size=1)
    for _ in range(2):
        for trained in (ddp, plain):
            left, right = (trained(batch, extra) for batch, extra in zip(make_batches(2), (True, False), strict=True))
            (left - right).square().mean().backward()
        ddp.finish_grad_sync()
        assert_same(main_grads(ddp), plain_grads(plain))
        ddp.zero_grad_buffer()
        plain.zero_grad()


@pytest.mark.parametrize("overlap", [False, True])
def test_retain_graph_under_no_sync_counts_every_backward(overlap: bool) -> None:
    ddp, plain = pair(overlap_grad_reduce=overlap)
    batch, last = make_batches(2)
    with ddp.no_sync():
        loss = loss_of(ddp, batch)
        loss.backward(retain_graph=True)
        loss.backward()
    loss_of(ddp, last).backward()
    ddp.finish_grad_sync()
    loss = loss_of(plain, batch)
    loss.backward(retain_graph=True)
    loss.backward()
    loss_of(plain, last).backward()
    assert_same(main_grads(ddp), plain_grads(plain))


def test_an_iteration_after_a_failed_backward_starts_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in the first GEMM, caught by the loop: gradients of earlier iterations must not be added to."""
    ddp, plain = pair()
    first, second = make_batches(2)
    ddp_backward(ddp, [first])
    ddp.zero_grad_buffer()

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory for the GEMM")

    with monkeypatch.context() as patch:
        patch.setattr("maingrad.te_integration.dense.products.wgrad_accumulate", fail)
        with pytest.raises(torch.OutOfMemoryError):
            loss_of(ddp, second).backward()
    ddp.zero_grad_buffer()
    ddp_backward(ddp, [second])
    plain_backward(plain, [second])
    assert_same(main_grads(ddp), plain_grads(plain))


def test_a_block_of_delayed_gradients_that_raised_is_over() -> None:
    """Later forwards delay nothing, or into the queue of the block around."""
    ddp, plain = pair()
    outer, inner = WgradQueue(), WgradQueue()
    first, second = make_batches(2)
    with delayed_wgrad(outer):
        with pytest.raises(KeyError), delayed_wgrad(inner):
            raise KeyError
        loss = loss_of(ddp, first)
    with pytest.raises(KeyError), delayed_wgrad(inner):
        raise KeyError
    with ddp.no_sync():
        loss.backward()
    assert len(outer) and not len(inner)
    outer.drain()
    loss_of(ddp, second).backward()
    assert not len(outer) and not len(inner)
    ddp.finish_grad_sync()
    for batch in (first, second):
        loss_of(plain, batch).backward()
    assert_same(main_grads(ddp), plain_grads(plain))


def test_a_block_is_of_its_thread() -> None:
    layer, queue, x = Linear(FEATURES, 3), WgradQueue(), make_batches(1)[0]
    with ThreadPoolExecutor(1) as executor, delayed_wgrad(queue):
        executor.submit(lambda: layer(x).sum().backward()).result()
        assert len(queue) == 0
        assert layer.weight.grad is not None


def test_a_flag_left_by_a_failed_backward_drops_nothing() -> None:
    """The GEMM ran, the weight's hook did not: the next use of that weight goes through autograd."""
    layer = Linear(FEATURES, 3, fuse_wgrad_accumulation=True)
    tied = nn.ModuleList([layer, nn.Linear(FEATURES, 3)])
    tied[1].weight = layer.weight
    ddp = wrap(tied)
    batch = make_batches(1)[0]
    record = next(record for record in ddp.records if record.name == "0.weight")
    layer.weight.grad_added_to_main_grad = True
    record.consumer_wrote = record.written = True
    ddp.zero_grad_buffer()
    assert layer.weight.grad_added_to_main_grad is False
    tied[1](batch).sum().backward()
    assert torch.equal(layer.weight.main_grad, torch.ones(3, 5) @ batch)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_penalty_on_the_weights_themselves_counts(overlap: bool) -> None:
    """L1 of a fused layer's weight: part of the gradient comes through autograd, in the same backward."""
    ddp, plain = pair(overlap_grad_reduce=overlap, bucket_size=1)

    def backward(model: nn.Module, batch: Tensor) -> None:
        (loss_of(model, batch) + 0.1 * sum(parameter.abs().sum() for parameter in model.parameters())).backward()

    first, second = make_batches(2)
    for _ in range(2):
        with ddp.no_sync():
            backward(ddp, first)
        backward(ddp, second)
        ddp.finish_grad_sync()
        for batch in (first, second):
            backward(plain, batch)
        assert_close(main_grads(ddp), plain_grads(plain))
        ddp.zero_grad_buffer()
        plain.zero_grad()


def test_what_forward_does_not_return_is_taken_for_unused_and_the_error_says_so() -> None:
    class Keeps(TwoHeads):
        def forward(self, x: Tensor, extra: bool = False) -> Tensor:
            hidden = self.body(x)
            self.kept = self.extra(hidden)
            return self.head(hidden)

    model = Keeps()
    ddp = wrap(model, overlap_grad_reduce=True, find_unused_parameters=True, bucket_size=1)
    loss = ddp(make_batches(1)[0]).sum() + model.kept.sum()
    with pytest.raises(
        RuntimeError, match=r"parameter 'extra.\w+' received .* return from forward all that the loss uses"
    ):
        loss.backward()


# ---- create_graph. ----


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_create_graph_is_refused_by_backward_and_the_next_iteration_is_right(fuse: bool) -> None:
    model = make_model(fuse=fuse)
    plain = plain_twin(model)
    ddp = wrap(model)
    batch = make_batches(1)[0]
    with pytest.raises(RuntimeError, match=r"parameter '\d.\w+': backward\(create_graph=True\).*torch.autograd.grad"):
        loss_of(ddp, batch).backward(create_graph=True)
    ddp.zero_grad_buffer()
    ddp_backward(ddp, [batch])
    plain_backward(plain, [batch])
    assert_same(main_grads(ddp), plain_grads(plain))


def test_second_derivatives_from_autograd_grad_are_plain_pytorchs_and_write_nothing() -> None:
    ddp, plain = pair()
    batch = make_batches(1)[0]

    def second_derivative(model: nn.Module) -> list[Tensor]:
        parameters = list(model.parameters())
        first = torch.autograd.grad(loss_of(model, batch), parameters, create_graph=True)
        return list(torch.autograd.grad(sum(grad.square().sum() for grad in first), parameters))

    for ours, theirs in zip(second_derivative(ddp), second_derivative(plain), strict=True):
        assert (ours - theirs).norm() <= 2.0**-18 * theirs.norm()
    assert fused_writes(ddp) == 0
    assert all(not parameter.main_grad.any() for parameter in ddp.parameters())


@pytest.mark.parametrize("overlap, find_unused", [(False, False), (True, False), (True, True)])
def test_gradient_penalty_is_plain_pytorchs(overlap: bool, find_unused: bool) -> None:
    ddp, plain = pair(overlap_grad_reduce=overlap, find_unused_parameters=find_unused, bucket_size=32)

    def backward(model: nn.Module, batch: Tensor) -> None:
        inputs = batch.clone().requires_grad_()
        outputs = model(inputs)
        (penalty,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        (outputs.square().mean() + penalty.square().sum()).backward()

    first, second = make_batches(2)
    for _ in range(2):
        with ddp.no_sync():
            backward(ddp, first)
        backward(ddp, second)
        ddp.finish_grad_sync()
        backward(plain, first)
        backward(plain, second)
        assert_close(main_grads(ddp), plain_grads(plain))
        ddp.zero_grad_buffer()
        plain.zero_grad()


# ---- Gradients that are not asked for. ----


@pytest.mark.parametrize("wanted", ["inputs", "weights"])
def test_autograd_grad_returns_plain_gradients_and_leaves_main_grad_untouched(wanted: str) -> None:
    ddp, plain = pair(overlap_grad_reduce=True, bucket_size=1)
    batch, other = make_batches(2)
    with ddp.no_sync():
        loss_of(ddp, other).backward()
    before, writes = main_grads(ddp), fused_writes(ddp)
    inputs = batch.clone().requires_grad_()

    def gradients(model: nn.Module) -> tuple[Tensor, ...]:
        of = [inputs] if wanted == "inputs" else list(model.parameters())
        return torch.autograd.grad(loss_of(model, inputs), of)

    for ours, theirs in zip(gradients(ddp), gradients(plain), strict=True):
        assert torch.equal(ours, theirs)
    assert_same(main_grads(ddp), before)
    assert fused_writes(ddp) == writes
    assert all(parameter.grad is None and not parameter.grad_added_to_main_grad for parameter in ddp.parameters())

    loss_of(ddp, batch).backward()  # and the iteration goes on as if nothing had been asked
    ddp.finish_grad_sync()
    for each in (other, batch):
        loss_of(plain, each).backward()
    assert_same(main_grads(ddp), plain_grads(plain))


def test_backward_of_some_inputs_delivers_to_these_alone() -> None:
    ddp, plain = pair()
    batch = make_batches(1)[0].requires_grad_()
    chosen = [ddp.module[0].weight, batch]
    loss_of(ddp, batch).backward(inputs=chosen)
    expected, of_batch = torch.autograd.grad(loss_of(plain, batch), [plain[0].weight, batch])
    assert torch.equal(chosen[0].main_grad, expected)
    assert torch.equal(batch.grad, of_batch)
    assert fused_writes(ddp) == 1
    ddp.finish_grad_sync()
    assert all(not grad.any() for name, grad in main_grads(ddp).items() if name != "0.weight")


# ---- Weights that are not plain parameters, gradients that are not plain tensors. ----


@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings_with_sparse_gradients_accumulate(sparse: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, FEATURES, sparse=sparse), make_model())
    plain = copy.deepcopy(plain_twin(model))
    plain[0].sparse = False
    ddp = wrap(model, overlap_grad_reduce=True)
    batches = [torch.tensor([[1, 1, 3], [0, 3, 3]]), torch.tensor([[3, 11], [5, 5]])]
    ddp_backward(ddp, batches)
    plain_backward(plain, batches)
    assert_close(main_grads(ddp), plain_grads(plain))


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning):
        return weight_norm(layer)


@pytest.mark.parametrize("kind", [Linear, nn.Linear])
@pytest.mark.parametrize(
    "parametrize",
    [parametrizations.weight_norm, parametrizations.spectral_norm, old_weight_norm, nn.utils.spectral_norm],
)
def test_parametrized_weights_get_plain_gradients(
    kind: type[nn.Linear], parametrize: Callable[[nn.Module], nn.Module]
) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        options = {"fuse_wgrad_accumulation": True} if kind is Linear else {}
        return nn.Sequential(parametrize(kind(FEATURES, 8, **options)), nn.Tanh(), kind(8, 2, **options))

    trained, plain = build(), build()
    for name, tensor in plain.state_dict().items():
        tensor.copy_(trained.state_dict()[name])
    for module in plain.modules():
        if isinstance(module, Linear):
            module.fuse_wgrad_accumulation = False
    ddp = wrap(trained, overlap_grad_reduce=True)
    batches = make_batches(3)
    ddp_backward(ddp, batches)
    plain_backward(plain, batches)
    assert_same(main_grads(ddp), plain_grads(plain))
    assert fused_writes(ddp) == (3 if kind is Linear else 0)  # the layer without a parametrization


def test_a_hook_on_a_weight_sees_its_gradient_and_may_change_it() -> None:
    """For instance clamping through ``weight.register_hook``: a fused layer leaves such a weight to autograd."""
    model = make_model()
    plain = plain_twin(model)
    for each in (model, plain):
        each[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    ddp = wrap(model)
    batches = make_batches(2)
    ddp_backward(ddp, batches)
    plain_backward(plain, batches)
    assert_same(main_grads(ddp), plain_grads(plain))
