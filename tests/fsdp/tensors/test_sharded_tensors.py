"""Sharded parameters and gradients: shapes, memory, norms over all ranks, torch's own clipping, scaler and optimizers.

A whole model's parameters are cut as a bucket is: one flat run of all elements, of which each rank has an equal range.
What torch does with whole tensors in one process is the reference.
"""

import copy
import math
import operator
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from grad_functions import answer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from maingrad.ddp.collectives.rank_grid import RankGrid, make_grid
from maingrad.ddp.torch_grads.sharded_grad import ShardedGrad, make_sharded_grad
from maingrad.fsdp.state.optimizer_watch import watch_optimizers
from maingrad.fsdp.tensors.parameter import ShardedParameter, ShardInfo, local_shape, make_sharded
from maingrad.launch import simulate

SHAPES = ((7, 15), (), (16, 17), (5,), (3, 1, 4), (1,), (2, 3), ())
"""Scalars and small parameters lie on one rank, so that other ranks' shards of them are empty."""

INF = math.inf
ALONE = RankGrid(None, None, None)


class Ranks(NamedTuple):
    """The number of ranks and instances, and whether instances are replicas of each other."""

    size: int
    instances: int = 1
    replicated: bool = False

    def grid(self) -> RankGrid:
        return make_grid(None, num_instances=self.instances)

    def place(self, grid: RankGrid) -> tuple[int, int]:
        """Index of this rank's shard, and the number of shards."""
        if self.replicated:
            return grid.inner_rank, grid.inner_size
        return grid.outer_rank * grid.inner_size + grid.inner_rank, grid.size


RANKS = {
    "1": Ranks(1),
    "2": Ranks(2),
    "3": Ranks(3),
    "4": Ranks(4),
    "2x2 replicas": Ranks(4, 2, True),
    "2x2": Ranks(4, 2),
}
every_layout = pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)


def wholes(scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in SHAPES]


def cut(ranks: Ranks, grid: RankGrid, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ShardInfo]]:
    """This rank's flat range of each tensor, in memory of its own."""
    place, size = ranks.place(grid)
    total = sum(tensor.numel() for tensor in tensors)
    share = -(-total // size)
    padded = F.pad(torch.cat([tensor.reshape(-1) for tensor in tensors]), (0, share * size - total))
    flat = padded[place * share : (place + 1) * share].clone()
    first = 0
    for index, tensor in enumerate(tensors):
        start, end = (min(max(place * share + shift - first, 0), tensor.numel()) for shift in (0, share))
        offset = first + start - place * share if end > start else 0
        replicas = grid.outer_size if ranks.replicated else 1
        info = ShardInfo(f"p{index}", tuple(tensor.shape), start, end, grid, replicas, "block", grid)
        yield flat[offset : offset + end - start], info
        first += tensor.numel()


def sharded_grads(ranks: Ranks, tensors: Sequence[Tensor], grid: RankGrid | None = None) -> list[ShardedGrad]:
    return [make_sharded_grad(flat, info) for flat, info in cut(ranks, grid or ranks.grid(), tensors)]


def sharded_params(
    ranks: Ranks, tensors: Sequence[Tensor], grads: Sequence[Tensor], grid: RankGrid | None = None
) -> list[ShardedParameter]:
    grid = grid or ranks.grid()
    params = [make_sharded(flat, info, True) for flat, info in cut(ranks, grid, tensors)]
    for param, grad in zip(params, sharded_grads(ranks, grads, grid), strict=True):
        param.grad = grad
    return params


def local(shard: Tensor) -> Tensor:
    return shard.to_local() if isinstance(shard, ShardedGrad) else shard.detach()


def joined(shards: Sequence[Tensor]) -> list[Tensor]:
    """Whole tensors from every rank's shards, ``shards`` being this rank's."""
    pieces: list[Any] = [None] * dist.get_world_size()
    mine = [(shard.shard.start, local(shard).reshape(-1).tolist()) for shard in shards]  # type: ignore[attr-defined]
    dist.all_gather_object(pieces, mine)
    found = []
    for index, shape in enumerate(SHAPES):
        whole = torch.full((math.prod(shape),), math.nan, dtype=shards[0].dtype)
        for piece in pieces:
            start, values = piece[index]
            whole[start : start + len(values)] = torch.tensor(values, dtype=shards[0].dtype)
        found.append(whole.view(shape))
    return found


def plain_params(tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[nn.Parameter]:
    params = [nn.Parameter(tensor.clone()) for tensor in tensors]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return params


def info_of(shape: tuple[int, ...], start: int, end: int, **changes: Any) -> ShardInfo:
    return ShardInfo("layers.0.weight", shape, start, end, ALONE, 1, "layers.0", ALONE)._replace(**changes)


def one(shape: tuple[int, ...] = (4, 3), start: int = 3, end: int = 9, requires_grad: bool = True) -> ShardedParameter:
    return make_sharded(torch.arange(float(end - start)), info_of(shape, start, end), requires_grad)


# ---- Shapes and memory. ----


@pytest.mark.parametrize(
    ("shape", "start", "end", "expected"),
    [
        ((4, 3), 0, 12, (4, 3)),
        ((4, 3), 3, 9, (2, 3)),
        ((4, 3), 4, 9, (5, 1)),
        ((4, 3), 3, 8, (5, 1)),
        ((4, 3), 5, 5, (0, 3)),
        ((2, 3, 4), 12, 24, (1, 3, 4)),
        ((2, 3, 4), 4, 8, (4, 1, 1)),
        ((2, 3, 4), 0, 0, (0, 3, 4)),
        ((7,), 2, 5, (3,)),
        ((7,), 0, 0, (0,)),
        ((), 0, 1, ()),
        ((), 0, 0, (0,)),
        ((4, 0), 0, 0, (0, 0)),
        ((0, 4), 0, 0, (0, 4)),
    ],
)
def test_shards_keep_the_number_of_dims(shape: Any, start: int, end: int, expected: Any) -> None:
    info = info_of(shape, start, end)
    assert local_shape(info) == expected
    flat = torch.arange(float(end - start))
    param, grad = make_sharded(flat, info, True), make_sharded_grad(flat.clone(), info)
    assert param.shape == grad.shape == expected
    param.grad = grad
    assert param.grad is grad and param.shard is info


def test_a_shard_of_another_size_is_refused() -> None:
    flat, info = torch.zeros(5), info_of((4, 3), 3, 9)
    with pytest.raises(ValueError, match=r"one dim of 6, got \(5,\)"):
        make_sharded(flat, info, True)
    with pytest.raises(RuntimeError, match="input of size 5"):
        make_sharded_grad(flat, info)


def test_shards_share_memory_and_version_with_the_flat_tensor() -> None:
    flat, flat_grad = torch.zeros(10), torch.ones(10)
    param = make_sharded(flat[2:8], info_of((4, 3), 3, 9), True)
    param.grad = make_sharded_grad(flat_grad[2:8], param.shard)
    updates: list[Callable[[], Any]] = [
        lambda: param.add_(1),
        lambda: torch._foreach_add_([param], 1),
        lambda: param.copy_(torch.ones(2, 3)),
        lambda: param.data.mul_(2),
        lambda: param.detach().sub_(5),
        torch.optim.AdamW([param], foreach=True).step,
        torch.optim.AdamW([param], foreach=False).step,
        torch.optim.SGD([param], fused=True).step,  # torch counts no versions for these, whatever the parameter
    ]
    for update in updates:
        before, version = flat.clone(), flat._version
        with torch.no_grad():
            update()
        assert param._version == flat._version and (flat._version > version or update is updates[-1])
        assert torch.equal(flat[:2], before[:2]) and torch.equal(flat[8:], before[8:])
        assert torch.equal(flat[2:8], param.detach().view(-1)) and not torch.equal(flat, before)
    version = flat_grad._version
    param.grad.mul_(3)
    assert flat_grad._version > version and flat_grad.tolist() == [1, 1, 3, 3, 3, 3, 3, 3, 1, 1]
    flat_grad.zero_()
    assert param.grad.to_local().eq(0).all()


def test_a_frozen_shard_asks_for_no_gradient_and_keeps_its_place_among_parameters() -> None:
    module = holding(one(requires_grad=False))
    assert isinstance(module.weight, nn.Parameter) and not module.weight.requires_grad
    assert [param is module.weight for param in module.parameters()] == [True]


def test_gradients_may_be_wider_than_their_parameters() -> None:
    param = make_sharded(torch.zeros(6, dtype=torch.bfloat16), info_of((4, 3), 3, 9), True)
    param.grad_dtype = torch.float32
    param.grad = make_sharded_grad(torch.ones(6), param.shard)
    assert param.grad.dtype is torch.float32 and type(param.grad) is ShardedGrad


# ---- Use outside the unit. ----

USES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "linear": (r"linear\(\)", lambda p: F.linear(torch.ones(2, 3), p)),
    "a keyword": (r"linear\(\)", lambda p: F.linear(torch.ones(2, 3), weight=p)),
    "matmul": (r"__matmul__\(\)|matmul\(\)", lambda p: p @ torch.ones(3)),
    "on the right": (r"__rmul__\(\)|mul\(\)", lambda p: torch.ones(3) * p),
    "times": (r"mul\(\)", lambda p: p * 2),
    "a sum": (r"sum\(\)", lambda p: p.sum()),
    "a list": (r"cat\(\)", lambda p: torch.cat([torch.ones(1, 3), p])),
    "transposed": (r"Tensor\.T", lambda p: p.T),
    "a view": (r"view\(\)", lambda p: p.view(-1)),
    "an index": (r"__getitem__\(\)", lambda p: p[0]),
    "in place": (r"add_\(\)", lambda p: p.add_(1)),
    "a number": (r"item\(\)", lambda p: p.item()),
    "a truth": (r"__bool__\(\)", lambda p: bool(p)),
    "an embedding": (r"embedding\(\)", lambda p: F.embedding(torch.tensor([0]), p)),
    "a layer norm": (r"layer_norm\(\)", lambda p: F.layer_norm(torch.ones(3), (3,), p)),
    "kaiming": (r"kaiming_uniform_\(\)", lambda p: nn.init.kaiming_uniform_(p)),
    "a norm": (r"norm\(\)", lambda p: torch._foreach_norm([p])),
    "beside its gradient": (r"mul\(\)", lambda p: make_sharded_grad(torch.zeros(6), p.shard) * p),
    "among gradients": (r"norm\(\)", lambda p: torch._foreach_norm([make_sharded_grad(torch.zeros(6), p.shard), p])),
}


@pytest.mark.parametrize(
    ("what", "use"),
    [
        (r"mul\(\)", lambda p: p * 2),
        (r"t\(\)", lambda p: p.t()),
        (r"detach\(\)", lambda p: p.detach()),
        (r"Tensor\.data", lambda p: p.data),
        (r"data_ptr\(\)", lambda p: p.data_ptr()),  # so do kernels of Triton
    ],
)
@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_function_of_autograd_refuses_what_leads_to_values(
    what: str, use: Callable[[Any], Any], grad_mode: bool, requires_grad: bool
) -> None:
    """``apply`` switches grad mode off, and asks its tensors nothing."""

    class Uses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, param: Tensor) -> Tensor:
            assert param.shape and param.dtype and param.device and param.numel()
            use(param)
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad, None

    param = one(requires_grad=requires_grad)
    with torch.set_grad_enabled(grad_mode):
        match = (
            rf"^({what}), in the forward of a torch.autograd.Function, uses the parameter 'layers\.0\.weight' outside"
        )
        with pytest.raises(RuntimeError, match=match) as caught:
            Uses.apply(torch.ones(2), param)
        assert "give the function param.detach()" in str(caught.value)
        assert Uses.apply(torch.ones(2), param.detach()).sum() == 2
    with torch.inference_mode():
        use(param)


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_use_outside_its_unit_is_refused_by_name(name: str, requires_grad: bool) -> None:
    what, use = USES[name]
    param = one(requires_grad=requires_grad)
    with pytest.raises(RuntimeError, match=rf"({what}) uses the parameter 'layers\.0\.weight' outside") as caught:
        use(param)
    for part in ("unit 'layers.0'", "only elements 3 to 9 of (4, 3)", "torch.no_grad()", "unsharded()"):
        assert part in str(caught.value)
    param.shard = param.shard._replace(name="new", unit="")
    with pytest.raises(RuntimeError, match="'new' outside the forward of the outermost unit"):
        use(param)


def holding(param: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.weight = param
    return module


PROPERTIES = """
    shape dtype device layout ndim requires_grad grad grad_fn is_leaf retains_grad data itemsize nbytes is_cpu is_cuda
    is_meta is_sparse is_quantized is_nested _version _backward_hooks _base
"""
METHODS = """
    size stride numel nelement dim element_size storage_offset is_contiguous is_floating_point is_complex get_device
    is_pinned is_shared data_ptr untyped_storage detach __len__ is_inference
"""
QUESTIONS: dict[str, Callable[[Any], Any]] = {
    **{name: operator.attrgetter(name) for name in PROPERTIES.split()},
    **{name: operator.methodcaller(name) for name in METHODS.split()},
    "size(0)": lambda p: p.size(0),
    "repr": repr,
    "format": lambda p: f"{p}",
    "hash": lambda p: p in {p},
    "setting grad": lambda p: setattr(p, "grad", torch.zeros(2, 3)),
    "deleting grad": lambda p: delattr(p, "grad"),
    "setting requires_grad": lambda p: setattr(p, "requires_grad", False),
    "requires_grad_": lambda p: p.requires_grad_(False),
    "a hook": lambda p: p.register_post_accumulate_grad_hook(lambda param: None).remove(),
    "new_zeros": lambda p: p.new_zeros(3),
    "zeros_like": torch.zeros_like,
    "torch.numel": torch.numel,
    "is_floating_point": torch.is_floating_point,
    "a deep copy": copy.deepcopy,
    "a module": lambda p: nn.Linear(2, 2).register_parameter("other", p),
    "Adagrad": lambda p: torch.optim.Adagrad([p]),
    "module.float": lambda p: holding(p).float(),
    "module.to": lambda p: holding(p).to("cpu"),
    "module.state_dict": lambda p: holding(p).state_dict(keep_vars=True),
    "module.zero_grad": lambda p: holding(p).zero_grad(),
    "its own data": lambda p: setattr(p, "data", p.data),
    "uniform_": nn.init.uniform_,
    "zeros_": nn.init.zeros_,
    "an attribute": lambda p: setattr(p, "allreduce", False),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_about_a_shard_are_answered(name: str) -> None:
    plain, param = nn.Parameter(one().detach().clone()), one()
    expected, answer = QUESTIONS[name](plain), QUESTIONS[name](param)
    if isinstance(expected, (int, bool, torch.Size, torch.dtype, tuple, type(None))) and "ptr" not in name:
        assert answer == expected
    if isinstance(answer, Tensor) and name not in ("a deep copy", "requires_grad_", "uniform_", "zeros_"):
        assert type(answer) is Tensor


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize(
    "moved",
    [
        lambda p: setattr(p, "data", p.data.clone()),
        lambda p: setattr(p, "data", nn.Parameter(torch.zeros(2, 3))),
        lambda p: setattr(p, "data", p.data.as_strided(p.shape, (1, 2))),
        lambda p: holding(p).half(),
        lambda p: holding(p).to_empty(device="cpu"),
        lambda p: holding(p).double(),
    ],
)
def test_a_shard_is_not_moved_out_of_its_units_memory(moved: Callable[[Any], Any], grad_mode: bool) -> None:
    flat = torch.zeros(6)
    param = make_sharded(flat, info_of((4, 3), 3, 9), True)
    with torch.set_grad_enabled(grad_mode), pytest.raises(RuntimeError, match=r"layers\.0\.weight.*before fully_shard"):
        moved(param)
    param.data.copy_(torch.ones(2, 3))
    param.data.mul_(2)
    assert flat.eq(2).all() and param.dtype is torch.float32


@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_a_shard_is_a_plain_tensor(without_grad: Any) -> None:
    param = one()
    with without_grad():
        assert param.sum() == 15 and (param * 2).tolist() == [[0, 2, 4], [6, 8, 10]]
        assert type(param * 2) is Tensor and type(torch._foreach_add([param], 1)[0]) is Tensor
        torch._foreach_lerp_([param], [torch.ones(2, 3)], 1.0)
        assert param.mul_(2) is param and param.tolist() == [[2, 2, 2], [2, 2, 2]]
        assert param.cpu().tolist() == param.tolist()


# ---- Copies and text. ----


def test_a_deep_copy_is_a_shard_of_its_own_memory() -> None:
    param = one((), 0, 1)
    param.grad = make_sharded_grad(torch.ones(1), param.shard)
    for original in (param, param.grad, one((4, 3), 4, 9), one(requires_grad=False)):
        first, second = copy.deepcopy([original, original])
        assert first is second and first is not original and type(first) is type(original)
        assert first.shard is original.shard and first.requires_grad == original.requires_grad
        with torch.no_grad():
            assert torch.equal(local(first), local(original))
            first.add_(1)
            assert not torch.equal(local(first), local(original))


def test_shards_are_not_pickled() -> None:
    param = one()
    param.grad = make_sharded_grad(torch.ones(6), param.shard)
    for copied in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match=r"elements 3 to 9 of 'layers\.0\.weight' \(4, 3\).*state_dict"):
            copied(param)
        with pytest.raises(TypeError, match=r"elements 3 to 9 of 'layers\.0\.weight' \(4, 3\).*grad\.to_local\(\)"):
            copied(param.grad)
    assert pickle.loads(pickle.dumps(param.detach())).tolist() == param.detach().tolist()


def test_text_says_which_elements_of_what() -> None:
    param = one()
    assert "elements 3 to 9 of 'layers.0.weight' (4, 3)" in repr(param) and "[3., 4., 5.]" in repr(param)
    grad = make_sharded_grad(torch.zeros(0), info_of((), 0, 0))
    assert "ShardedGrad(elements 0 to 0 of 'layers.0.weight' ())" in repr(grad)


# ---- Norms. ----

ORDERS = (2, 1, 3, 0.5, INF)

NORMS: dict[str, Callable[[Any, float], list[Tensor]]] = {
    "foreach": lambda grads, ord: list(torch._foreach_norm(grads, ord)),
    "foreach in fp64": lambda grads, ord: list(torch._foreach_norm(grads, ord, dtype=torch.float64)),
    "vector_norm": lambda grads, ord: [torch.linalg.vector_norm(grad, ord) for grad in grads],
    "torch.norm": lambda grads, ord: [torch.norm(grad, ord) for grad in grads],
    "Tensor.norm": lambda grads, ord: [grad.norm(p=ord) for grad in grads],
}


def norms_on(ranks: Ranks, tensors: Sequence[Tensor]) -> dict[tuple[str, float], list[Tensor]]:
    grads = sharded_grads(ranks, tensors)
    return {(name, ord): norms(grads, ord) for name, norms in NORMS.items() for ord in ORDERS}


@every_layout
@pytest.mark.sampled(1)
def test_norms_are_those_of_whole_gradients(ranks: Ranks) -> None:
    tensors = wholes(0.01)
    by_rank = simulate(norms_on, ranks.size, ranks, tensors)
    for (name, ord), norms in by_rank[0].items():
        dtype = torch.float64 if "fp64" in name else torch.float32
        expected = [torch.linalg.vector_norm(tensor.double(), ord) for tensor in tensors]
        for norm, whole in zip(norms, expected, strict=True):
            assert type(norm) is Tensor and norm.dtype is dtype and norm.shape == ()
            torch.testing.assert_close(norm.double(), whole, rtol=1e-6 if dtype is torch.float32 else 1e-12, atol=0)
        for other in by_rank[1:]:
            assert all(map(torch.equal, other[name, ord], norms))


def test_norms_of_lower_precision_and_complex_gradients() -> None:
    complexes = [torch.view_as_complex(torch.randn(9, 2)).view(3, 3)]

    def on_rank() -> list[Tensor]:
        halves = sharded_grads(RANKS["2"], wholes(dtype=torch.bfloat16))
        return [*torch._foreach_norm(halves), *torch._foreach_norm(sharded_grads(RANKS["2"], complexes), 3)]

    expected = [*torch._foreach_norm(wholes(dtype=torch.bfloat16)), torch.linalg.vector_norm(complexes[0], 3)]
    for norms in simulate(on_rank, 2):
        for norm, whole in zip(norms, expected, strict=True):
            assert norm.dtype is whole.dtype
            torch.testing.assert_close(norm, whole)


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_nan_and_inf_of_one_rank_are_in_every_ranks_norm(bad: float, rank: int) -> None:
    def on_rank() -> list[Tensor]:
        grads = sharded_grads(RANKS["3"], [torch.ones(9)])
        if dist.get_rank() == rank:
            grads[0].to_local()[1] = bad
        return [torch._foreach_norm(grads, ord)[0] for ord in (2, 1, 3, INF)]

    for norms in simulate(on_rank, 3):
        for norm in norms:
            torch.testing.assert_close(norm, torch.tensor(abs(bad)), equal_nan=True)


def test_lists_of_several_grids_and_plain_tensors() -> None:
    """Two grids of two ranks each, one of all four, and tensors that each rank has for itself."""
    schedule: list[tuple[int, str]] = []

    def on_rank() -> tuple[list[Tensor], list[Tensor]]:
        pair = make_grid(dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0])
        which = dist.get_rank() // 2
        everyone = sharded_grads(RANKS["4"], [torch.ones(3, 3), torch.full((5,), 2.0)])
        mine = sharded_grads(RANKS["2"], [torch.full((7,), 3.0 + which)], pair)
        alone = nn.Parameter(torch.full((2,), 5.0 + dist.get_rank()))
        schedule.append((dist.get_rank(), "here"))
        found = torch._foreach_norm([everyone[0], alone, mine[0], everyone[1]])
        assert found[1].requires_grad
        expected = [torch.ones(9), torch.full((2,), 5.0 + dist.get_rank()), torch.full((7,), 3.0 + which)]
        return [norm.detach() for norm in found], [*(whole.norm() for whole in expected), torch.full((5,), 2.0).norm()]

    for found, expected in simulate(on_rank, 4, schedule=schedule):
        torch.testing.assert_close(found, expected)
    for rank in range(4):
        events = [event for index, event in schedule if index == rank]
        launched = [event for event in events[events.index("here") :] if event.startswith("launch")]
        assert len(launched) == 2, launched


@pytest.mark.parametrize(
    "norm",
    [
        lambda g: torch.linalg.vector_norm(g, 2, dim=0),
        lambda g: torch.norm(g, dim=1),
        lambda g: torch.norm(g, 2, 1, True, torch.zeros(3, 1)),
        lambda g: g.norm(2, -1, True),
        lambda g: torch.linalg.norm(g, 2),
        lambda g: torch.linalg.norm(g, "nuc"),
        lambda g: g.norm(0),
        lambda g: torch.linalg.vector_norm(g, -INF),
        lambda g: torch._foreach_norm([g], -1),
        lambda g: torch.linalg.norm(g, ord=1),
        lambda g: torch.linalg.norm(input=g, ord=2, dim=(0, 1)),
        lambda g: torch.linalg.matrix_norm(g),
        lambda g: torch.norm(g, "nuc"),
        lambda g: g.norm(p="nuc"),
        lambda g: torch.linalg.vector_norm(g, out=torch.zeros(())),
        lambda g: g.flatten().norm(dim=0),
    ],
)
@every_layout
def test_norms_of_rows_and_of_matrices_name_the_whole_gradient(ranks: Ranks, norm: Callable[[Any], Tensor]) -> None:
    matrix = torch.arange(12.0).view(3, 4)

    def on_rank() -> Tensor:
        return answer(norm, sharded_grads(ranks, [matrix, torch.ones(5)])[0], on_shards=False)  # type: ignore[no-any-return]

    for found in simulate(on_rank, ranks.size):
        torch.testing.assert_close(found, norm(matrix))


def test_a_norm_keeps_dims_and_its_default_is_the_second() -> None:
    grad = make_sharded_grad(torch.ones(9), info_of((3, 3), 0, 9))
    assert torch.linalg.vector_norm(grad, keepdim=True).tolist() == [[3.0]]
    for norm in (grad.norm(), torch.norm(grad), torch.linalg.norm(grad), torch.linalg.norm(grad, "fro"), grad.norm(2)):
        assert norm == 3


# ---- torch's clipping. ----


def clipped(
    ranks: Ranks, norm_type: float, foreach: bool | None, max_norm: float, apart: bool
) -> tuple[Tensor, list[Tensor]]:
    params = sharded_params(ranks, wholes(), wholes())
    if not apart:
        total = clip_grad_norm_(params, max_norm, norm_type, foreach=foreach, error_if_nonfinite=True)
    else:
        total = get_total_norm([param.grad for param in params], norm_type, foreach=foreach)
        clip_grads_with_norm_(params, max_norm, total, foreach=foreach)
    return total, joined([param.grad for param in params])


@every_layout
@pytest.mark.parametrize("norm_type", [1, 2, 3, INF])
def test_clipping_is_that_of_one_process(ranks: Ranks, norm_type: float) -> None:
    for foreach, apart, max_norm in ((None, False, 0.5), (True, True, 0.5), (False, False, 1e6)):
        reference = plain_params(wholes(), wholes())
        expected = clip_grad_norm_(reference, max_norm, norm_type, foreach=foreach)
        by_rank = simulate(clipped, ranks.size, ranks, norm_type, foreach, max_norm, apart)
        for total, grads in by_rank:
            assert type(total) is Tensor and torch.equal(total, by_rank[0][0])
            torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
            torch.testing.assert_close(grads, [param.grad for param in reference], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("error_if_nonfinite", [True, False])
def test_clipping_meets_inf_of_another_rank(error_if_nonfinite: bool) -> None:
    def on_rank() -> str:
        params = sharded_params(RANKS["2"], [torch.zeros(8)], [torch.ones(8)])
        if dist.get_rank() == 1:
            params[0].grad.to_local()[0] = INF
        try:
            return str(clip_grad_norm_(params, 1.0, error_if_nonfinite=error_if_nonfinite).item())
        except RuntimeError as error:
            return str(error)

    for outcome in simulate(on_rank, 2):
        assert ("is non-finite" in outcome) if error_if_nonfinite else outcome == "inf"


@pytest.mark.parametrize(("name", "collectives"), [("4", 1), ("2x2", 2), ("2x2 replicas", 2)])
def test_clipping_takes_one_collective_an_axis(name: str, collectives: int) -> None:
    ranks = RANKS[name]
    schedule: list[tuple[int, str]] = []

    def on_rank() -> None:
        params = sharded_params(ranks, wholes(), wholes())
        schedule.append((dist.get_rank(), "here"))
        clip_grad_norm_(params, 1.0)

    simulate(on_rank, ranks.size, schedule=schedule)
    for rank in range(ranks.size):
        events = [event for index, event in schedule if index == rank]
        launched = [event for event in events[events.index("here") :] if event.startswith("launch")]
        assert len(launched) == collectives, launched


def clipped_with_nan(bad: float) -> tuple[float, float, float]:
    params = sharded_params(RANKS["2"], wholes(), wholes())
    total = clip_grad_norm_(params, 0.5)
    if dist.get_rank() == 0:
        params[0].grad.to_local().view(-1)[0] = bad
    found_inf = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([p.grad for p in params], found_inf, torch.ones(()))
    return total.item(), get_total_norm([param.grad for param in params], INF).item(), found_inf.item()


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_real_ranks_clip_and_find_nan_as_one_process(bad: float) -> None:
    expected = get_total_norm(wholes()).item()
    for total, largest, found_inf in run_ranks(clipped_with_nan, 2, bad):
        assert total == pytest.approx(expected, rel=1e-6) and found_inf == 1
        assert math.isnan(largest) if math.isnan(bad) else largest == bad


# ---- torch's scaler. ----


def scaled_steps(ranks: Ranks, options: dict[str, Any], bad_rank: int) -> tuple[list[Tensor], list[float]]:
    """Three steps. In the second, one rank's shard has an Inf."""
    watch_optimizers()
    params = sharded_params(ranks, wholes(), wholes())
    optimizer = torch.optim.AdamW(params, lr=0.1, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    scaler.scale(torch.ones(()))
    scales = []
    for step in range(3):
        for param, grad in zip(params, sharded_grads(ranks, wholes(), params[0].shard.grid), strict=True):
            param.grad.copy_(grad).mul_(scaler.get_scale())
        if step == 1 and dist.get_rank() == bad_rank:
            next(param.grad for param in params if param.numel()).to_local().view(-1)[-1] = INF
        if step == 2:
            scaler.unscale_(optimizer)
            clip_grad_norm_(params, 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return joined(params), scales


@pytest.mark.parametrize("name", ["1", "3", "2x2", "2x2 replicas"])
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
@pytest.mark.sampled(2)
def test_every_rank_skips_the_step_of_an_inf(name: str, options: dict[str, Any]) -> None:
    reference = plain_params(wholes(), wholes())
    optimizer = torch.optim.AdamW(reference, lr=0.1, **options)
    optimizer.step()
    clip_grad_norm_(reference, 0.5)
    optimizer.step()
    ranks = RANKS[name]
    for bad_rank in range(ranks.size):
        for weights, scales in simulate(scaled_steps, ranks.size, ranks, options, bad_rank):
            assert scales == [8, 4, 4]
            torch.testing.assert_close(weights, [param.detach() for param in reference], rtol=1e-6, atol=1e-6)


# ---- torch's optimizers. ----

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, foreach=False),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, foreach=True, amsgrad=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True),
    "Adam, coupled decay": lambda params: torch.optim.Adam(params, weight_decay=0.1, foreach=True),
    "SGD": lambda params: torch.optim.SGD(params, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, foreach": lambda params: torch.optim.SGD(params, momentum=0.9, weight_decay=0.1, foreach=True),
    "SGD, fused": lambda params: torch.optim.SGD(params, momentum=0.9, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, foreach=True),
    "Adagrad, fused": lambda params: torch.optim.Adagrad(params, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, foreach=True, centered=True, momentum=0.9),
    "NAdam": lambda params: torch.optim.NAdam(params, foreach=True),
    "Adamax": lambda params: torch.optim.Adamax(params, foreach=True),
    "Rprop": lambda params: torch.optim.Rprop(params, foreach=False),
}


def stepped(ranks: Ranks, name: str) -> tuple[list[Tensor], int]:
    watch_optimizers()
    params = sharded_params(ranks, wholes(), wholes())
    optimizer = OPTIMIZERS[name](params)
    for step in range(3):
        for param in params:
            param.grad.mul_(1 - 0.3 * step)
        optimizer.step()
    for param in params:
        for value in optimizer.state[param].values():
            assert not isinstance(value, Tensor) or type(value) is Tensor
    optimizer.zero_grad(set_to_none=False)
    assert all(type(param.grad) is ShardedGrad and local(param.grad).eq(0).all() for param in params)
    optimizer.zero_grad()
    assert all(param.grad is None for param in params)
    return joined(params), len(optimizer.state_dict()["state"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_update_shards_as_whole_parameters(name: str) -> None:
    reference = plain_params(wholes(), wholes())
    optimizer = OPTIMIZERS[name](reference)
    for step in range(3):
        for param in reference:
            param.grad.mul_(1 - 0.3 * step)
        optimizer.step()
    for weights, num_states in simulate(stepped, 3, RANKS["3"], name):
        assert num_states == len(SHAPES)
        torch.testing.assert_close(weights, [param.detach() for param in reference], rtol=1e-6, atol=1e-7)
