"""``Embedding``: its gradient goes into ``main_grad``, and equals what autograd and a hook would leave there."""

import copy
import gc
import io
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from foreign import ForeignProvider, LazyForeignProvider
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import maingrad
from maingrad.ddp import DistributedDataParallel
from maingrad.launch.simulation.simulate import simulate
from maingrad.te_integration import Embedding, Linear, WgradQueue, delayed_wgrad

VOCABULARY, WIDTH, PADDING = 12, 8, 3


class Net(nn.Module):
    """Tokens [B, T] -> loss. The head is tied to the embedding, or has a weight of its own."""

    def __init__(self, *, tied: bool = False, padding: bool = True, fuse: bool = True, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        made: dict[str, Any] = {"fuse_wgrad_accumulation": fuse}
        own = {"padding_idx": PADDING} if padding else {}
        self.embedding = Embedding(VOCABULARY, WIDTH, **own, **options, **made)
        self.blocks = nn.ModuleList(Linear(WIDTH, WIDTH, **made) for _ in range(2))
        self.head = Linear(WIDTH, VOCABULARY, bias=False, **made)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).float().logsumexp(-1).square().mean()


def batches(step: int, rank: int = 0, count: int = 2) -> Tensor:
    """[count, 3, 5]: few ids in each step, other ones in the next; repeated ids, and padding."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(4, (count, 3, 5), generator=generator) + 4 * (step % 2)
    tokens[:, :, -1] = PADDING
    return tokens


def ddp_iteration(net: Net, step: int = 0, **config: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(net, maingrad.DistributedDataParallelConfig(**config))
    accumulate(ddp, batches(step))
    return ddp


def accumulate(ddp: Any, microbatches: Tensor) -> None:
    for tokens in microbatches[:-1]:
        with ddp.no_sync():
            ddp(tokens).backward()
    ddp(microbatches[-1]).backward()


def plain_grads(net: Net, microbatches: Tensor, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    net = copy.deepcopy(net).to(dtype)
    for module in net.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = False
    for tokens in microbatches:
        net(tokens).backward()
    return {name: param.grad for name, param in net.named_parameters()}


# ---- Under every wrapper. ----

WRAPPERS = ("ddp", "zero1", "zero1, hybrid", "zero3", "zero3, once", "hsdp", "none")


def train(wrapper: str, fuse: bool, tied: bool) -> list[Tensor]:
    """Three steps of two microbatches on each rank; the weights."""
    parallel, _, form = wrapper.partition(", ")
    options: dict[str, Any] = {}
    if form == "hybrid" or parallel == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if form == "once":
        options["reduce_every_microbatch"] = False
    if parallel == "none":
        parallel, options["mesh"] = "ddp", maingrad.ddp.WORLD_OF_ONE
    net = Net(tied=tied, fuse=fuse)
    units = [*net.blocks] if tied else [net.embedding, *net.blocks, net.head]
    model: Any = maingrad.parallelize(net, parallel, fuse=False, units=units, **options)
    optimizer = maingrad.make_optimizer(model, torch.optim.SGD, lr=0.5)
    for step in range(3):
        accumulate(model, batches(step, dist.get_rank() if dist.is_initialized() else 0))
        optimizer.step()
        optimizer.zero_grad()
    params = dict(net.named_parameters())
    if wrapper.startswith(("zero3", "hsdp")):
        with model.unsharded():
            return [param.detach().clone() for param in net.parameters()]
    return [params[name].detach().clone() for name in params]


def fused_and_plain(wrapper: str, *, tied: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Each weight of each rank, trained both ways."""
    ranks = 1 if wrapper == "none" else 4
    fused, plain = (simulate(train, ranks, wrapper, fuse, tied) for fuse in (True, False))
    for ours, theirs in zip(fused, plain, strict=True):
        yield from zip(ours, theirs, strict=True)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_training_equals_autograds_bit_for_bit(wrapper: str) -> None:
    for ours, theirs in fused_and_plain(wrapper, tied=False):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_tied_head_adds_to_the_same_sum(wrapper: str) -> None:
    for ours, theirs in fused_and_plain(wrapper, tied=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # additions come in another order


# ---- What is written, and by whom. ----


@pytest.mark.parametrize("tied", [False, True])
def test_each_microbatch_is_one_write_of_each_use(tied: bool) -> None:
    net = Net(tied=tied)
    expected, exact = (plain_grads(net, batches(0), dtype) for dtype in (torch.float32, torch.float64))
    ddp = ddp_iteration(net)
    writes = {record.name: (record.num_fused_writes, record.num_hook_writes) for record in ddp.records}
    assert writes["embedding.weight"] == (4 if tied else 2, 0)
    for name, param in net.named_parameters():
        assert param.grad is not None
        error = (param.grad.double() - exact[name]).norm()
        assert error <= 2 * (expected[name].double() - exact[name]).norm() + 1e-6 * exact[name].norm(), name


def test_rows_without_a_token_are_zero_in_each_iteration() -> None:
    """Steps 0 and 1 have no id in common: what step 0 has left is not step 1's."""
    net = Net()
    ddp = ddp_iteration(net, 0)
    for step in (0, 1):
        if step:
            ddp.zero_grad()
            accumulate(ddp, batches(step))
        used = batches(step)[batches(step) != PADDING].unique()
        unused = torch.ones(VOCABULARY, dtype=torch.bool)
        unused[used] = False
        assert net.embedding.weight.grad[unused].eq(0).all() and unused[PADDING]
        assert net.embedding.weight.grad[used].ne(0).any(1).all()


def test_an_iteration_without_a_token_has_zeros() -> None:
    net = Net()
    ddp = DistributedDataParallel(net)
    for step, shape in enumerate(((2, 3), (0, 3))):
        tokens = torch.ones(shape, dtype=torch.int64)
        loss = net.head(net.embedding(tokens)).sum() if step == 0 else ddp.module.embedding(tokens).sum()
        loss.backward()
        ddp.finish_grad_sync()
        assert net.embedding.weight.grad.eq(0).all() == bool(step)
        ddp.zero_grad()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (2, 3, 4, 5)])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.sampled(4)
def test_any_shape_of_ids(shape: tuple[int, ...], ids: torch.dtype) -> None:
    module = Embedding(7, 4, padding_idx=-1, fuse_wgrad_accumulation=True)
    plain = nn.Embedding(7, 4, padding_idx=-1)
    plain.load_state_dict(module.state_dict())
    ddp = DistributedDataParallel(module)
    tokens = torch.randint(7, shape).to(ids)
    y, expected = ddp(tokens), plain(tokens)
    assert torch.equal(y, expected)
    (y.cos().sum() + 0 * module.weight.sum()).backward()
    (expected.cos().sum() + 0 * plain.weight.sum()).backward()
    assert torch.equal(module.weight.grad, plain.weight.grad)


def test_the_first_id_may_be_padding() -> None:
    module = Embedding(4, 2, padding_idx=0, fuse_wgrad_accumulation=True)
    ddp = DistributedDataParallel(module)
    ddp(torch.tensor([0, 2, 0, 2])).sum().backward()
    ddp.finish_grad_sync()
    assert ddp.records[0].num_fused_writes == 1
    assert module.weight.main_grad[:, 0].tolist() == [0.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_fp32(dtype: torch.dtype) -> None:
    """Gradients 256, 1 and -256 of one id in one microbatch, and again in the next, leave 2."""
    module = Embedding(3, 1, dtype=dtype, fuse_wgrad_accumulation=True)
    ddp = DistributedDataParallel(module, maingrad.DistributedDataParallelConfig(grad_reduce_in_fp32=True))
    scale = torch.tensor([[256.0], [1.0], [-256.0]], dtype=dtype)
    for context in (ddp.no_sync, torch.enable_grad):
        with context():
            (ddp(torch.tensor([1, 1, 1])) * scale).sum().backward()
    ddp.finish_grad_sync()
    assert module.weight.main_grad.flatten().tolist() == [0.0, 2.0, 0.0]


@pytest.mark.parametrize(
    "options", [{"sparse": True}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}, {"max_norm": 0.5, "norm_type": 1.0}]
)
def test_other_options_are_torchs(options: dict[str, Any]) -> None:
    net = Net(**options)
    expected = plain_grads(net, batches(0))
    ddp = ddp_iteration(net)
    grad = expected["embedding.weight"].to_dense()
    torch.testing.assert_close(net.embedding.weight.grad, grad, rtol=1e-6, atol=1e-7)
    writes = next(record for record in ddp.records if record.name == "embedding.weight").num_fused_writes
    assert writes == (2 if "max_norm" in options else 0)
    if "max_norm" in options:
        norms = net.embedding.weight[batches(0).unique()].norm(options.get("norm_type", 2.0), dim=1)
        assert norms.max() <= 0.5 + 1e-5, "the rows of tokens were renormalised"


def test_frozen_and_evaluated_it_is_an_embedding() -> None:
    net = Net()
    net.embedding.weight.requires_grad_(False)
    ddp = ddp_iteration(net)
    assert net.embedding.weight.grad is None and "embedding.weight" not in {record.name for record in ddp.records}
    with torch.no_grad():
        assert torch.equal(net.embedding(torch.tensor([2])), net.embedding.weight[2:3])


def test_other_readers_of_the_gradient_get_it() -> None:
    """autograd.grad, a second derivative and a hook on the weight: ordinary gradients, and nothing is written."""
    net = Net()
    DistributedDataParallel(net)
    tokens = torch.tensor([[1, 2, PADDING, 1]])
    (grad,) = torch.autograd.grad(net.embedding(tokens).square().sum(), net.embedding.weight, create_graph=True)
    expected = torch.zeros(VOCABULARY, WIDTH)
    for token, times in ((1, 2), (2, 1)):
        expected[token] = 2 * times * net.embedding.weight[token].detach()
    assert torch.equal(grad, expected)
    (second,) = torch.autograd.grad(grad.square().sum() / 2, net.embedding.weight)
    # Of row 1: (4 w)^2 / 2 -> 16 w, of which one factor is the sum over its two tokens.
    torch.testing.assert_close(second[1], 16 * net.embedding.weight[1])
    assert not any(record.written for record in maingrad_records(net))


def maingrad_records(net: nn.Module) -> list[Any]:
    return [param._maingrad_record for param in net.parameters() if hasattr(param, "_maingrad_record")]


def test_a_hook_on_the_weight_sees_the_gradient() -> None:
    net = Net()
    seen = []
    net.embedding.weight.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    expected = plain_grads(Net(), batches(0))["embedding.weight"]
    ddp = ddp_iteration(net)
    assert len(seen) == 2
    torch.testing.assert_close(net.embedding.weight.grad, 2 * expected)
    assert [record.num_hook_writes for record in ddp.records if record.name == "embedding.weight"] == [2]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_it_writes_once(reentrant: bool) -> None:
    net = Net()
    expected = plain_grads(net, batches(0))
    ddp = DistributedDataParallel(net)
    real = torch.ones((), requires_grad=True)  # reentrant recompute needs an input with a gradient

    def look_up(tokens: Tensor, real: Tensor) -> Tensor:
        return net.embedding(tokens) * real

    for index, tokens in enumerate(batches(0)):
        with ddp.no_sync() if index == 0 else torch.enable_grad():
            x = checkpoint(look_up, tokens, real, use_reentrant=reentrant)
            for block in net.blocks:
                x = torch.tanh(block(x))
            net.head(x).logsumexp(-1).square().mean().backward()
    ddp.finish_grad_sync()
    assert torch.equal(net.embedding.weight.grad, expected["embedding.weight"])


def test_blocks_that_delay_leave_the_embedding_in_backward() -> None:
    net = Net()
    expected = plain_grads(net, batches(0))
    ddp, queue = DistributedDataParallel(net), WgradQueue()
    for index, tokens in enumerate(batches(0)):
        with ddp.no_sync() if index == 0 else torch.enable_grad(), delayed_wgrad(queue):
            ddp(tokens).backward()
    assert len(queue) == 6, "of two microbatches: two blocks and the head"
    queue.drain()
    ddp.finish_grad_sync()
    for name, param in net.named_parameters():
        assert torch.equal(param.grad, expected[name]), name


@pytest.mark.parametrize("provider", [ForeignProvider, LazyForeignProvider])
def test_foreign_providers_get_the_sum(provider: Any) -> None:
    net = Net()
    expected = plain_grads(net, batches(0))
    foreign = provider(net)
    for tokens in batches(0):
        net(tokens).backward()
        if isinstance(foreign, LazyForeignProvider):
            foreign.start_microbatch(net)
    torch.testing.assert_close(foreign.main_grad_of(net.embedding.weight), expected["embedding.weight"])
    assert ("embedding.weight", True) in foreign.seen


def test_without_a_provider_it_is_refused_by_name() -> None:
    module = Embedding(5, 2, fuse_wgrad_accumulation=True, name="words")
    with pytest.raises(RuntimeError, match=r"words, weight: fuse_wgrad_accumulation=True needs weight\.main_grad"):
        module(torch.tensor([1])).sum().backward()
    assert "Embedding(5, 2, fuse_wgrad_accumulation=True)" in repr(module)


def test_a_copy_a_pickle_and_from_pretrained_are_modules_of_their_own() -> None:
    net = Net()
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        expected = plain_grads(other, batches(0))
        ddp = ddp_iteration(other)
        assert ddp.records[-1].num_fused_writes == 2
        assert torch.equal(other.embedding.weight.grad, expected["embedding.weight"])
    assert net.embedding.weight.grad is None
    pretrained = Embedding.from_pretrained(torch.eye(3), freeze=False, padding_idx=1)
    assert type(pretrained) is Embedding and pretrained.padding_idx == 1 and not pretrained.fuse_wgrad_accumulation
    assert torch.equal(pretrained(torch.tensor([2])), torch.eye(3)[2:])


def test_a_vocabulary_may_grow_before_wrapping() -> None:
    module = Embedding(3, 2, fuse_wgrad_accumulation=True)
    DistributedDataParallel(module).unwrap()
    module.weight = nn.Parameter(torch.randn(6, 2))
    ddp = DistributedDataParallel(module)
    ddp(torch.tensor([5, 5])).sum().backward()
    assert torch.equal(module.weight.grad, torch.tensor([0.0] * 5 + [2.0])[:, None].expand(6, 2))


def test_a_vocabulary_may_grow_in_place() -> None:
    """As transformers' ``resize_token_embeddings`` does, between two gradients that a program asks for."""
    module = Embedding(3, 2, fuse_wgrad_accumulation=True)
    for size in (3, 6):
        module.weight.data = torch.randn(size, 2)
        (grad,) = torch.autograd.grad(module(torch.tensor([size - 1])).sum(), module.weight)
        assert torch.equal(grad, torch.tensor([0.0] * (size - 1) + [1.0])[:, None].expand(size, 2))


def test_it_is_freed_by_reference_count() -> None:
    gc.disable()
    try:
        net = Net()
        ddp = ddp_iteration(net)
        alive = weakref.ref(net.embedding)
        ddp.zero_grad()
        del net, ddp
        assert alive() is None
    finally:
        gc.enable()


# ---- Compiled. ----


@pytest.mark.in_turn
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"padding": False}])
@pytest.mark.sampled(1)
def test_compiled_whole_it_is_eagers(options: dict[str, Any]) -> None:
    """One graph for all microbatches and iterations, whose ids repeat; rows that nobody names are zeros."""
    torch.compiler.reset()
    results = []
    for compiled in (False, True):
        net = Net(**options)
        ddp = DistributedDataParallel(net)
        forward: Any = torch.compile(net, backend="aot_eager", fullgraph=True) if compiled else net
        grads = []
        for step in range(3):
            for index, tokens in enumerate(batches(step)):
                with ddp.no_sync() if index == 0 else torch.enable_grad():
                    forward(tokens).backward()
            ddp.finish_grad_sync()
            grads += [param.grad.clone() for param in net.parameters()]
            ddp.zero_grad()
        results.append((grads, [record.num_fused_writes for record in ddp.records]))
    (eager, writes), (found, compiled_writes) = results
    assert writes == compiled_writes and min(writes[-1:]) > 0
    for ours, theirs in zip(found, eager, strict=True):
        assert torch.equal(ours, theirs)
    torch.compiler.reset()


def test_compiled_with_max_norm_it_leaves_the_graph() -> None:
    torch.compiler.reset()
    net = Net(max_norm=0.5)
    expected = plain_grads(net, batches(0))
    net.embedding.compile(backend="aot_eager")
    ddp = ddp_iteration(net)
    assert ddp.records[-1].num_fused_writes == 2
    assert torch.equal(net.embedding.weight.grad, expected["embedding.weight"])
    torch.compiler.reset()


# ---- On a GPU. ----


def test_an_embedding_from_pretrained_weights_is_frozen_as_torchs_is() -> None:
    weight = torch.randn(VOCABULARY, WIDTH)
    for freeze in (True, False):
        made = Embedding.from_pretrained(weight, freeze=freeze, padding_idx=PADDING)
        assert torch.equal(made.weight, weight) and made.weight.requires_grad is not freeze
        assert made.padding_idx == PADDING


class Wide(nn.Module):
    """Tokens [T] -> loss, in bf16."""

    def __init__(self, *, tied: bool, fuse: bool, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "fuse_wgrad_accumulation": fuse}
        self.embedding = Embedding(500, 256, padding_idx=PADDING, **options)
        self.head = Linear(256, 500, bias=False, **options)
        if tied:
            self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.embedding(tokens))
        return F.cross_entropy(logits.to(torch.promote_types(torch.float32, logits.dtype)), tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_on_the_gpu_it_is_as_close_to_fp64_as_autograd_and_repeats(tied: bool, compiled: bool) -> None:
    torch.compiler.reset()
    tokens = torch.randint(331, (2, 3000), device="cuda")
    tokens[:, ::7] = PADDING

    def grads(*, fuse: bool = True) -> list[Tensor]:
        model: Any = Wide(tied=tied, fuse=fuse, dtype=torch.bfloat16)
        ddp = DistributedDataParallel(model, maingrad.DistributedDataParallelConfig(grad_reduce_in_fp32=True))
        if compiled and fuse:
            model.compile(fullgraph=True)
        accumulate(ddp, tokens)
        ddp.finish_grad_sync()
        return [param.main_grad.clone() for param in model.parameters()]

    for one, other in zip(grads(), grads(), strict=True):
        assert torch.equal(one, other)
    double = Wide(tied=tied, fuse=False, dtype=torch.float64)
    for microbatch in tokens:
        double(microbatch).backward()
    exact = [param.grad for param in double.parameters()]
    for ours, theirs, reference in zip(grads(), grads(fuse=False), exact, strict=True):
        error, plain_error = ((each.double() - reference).norm() for each in (ours, theirs))
        assert error <= 1.05 * plain_error
