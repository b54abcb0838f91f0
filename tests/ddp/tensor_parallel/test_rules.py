"""Each rule of ``ddp/plan/tensor_parallel/products.py`` against the plain layer, and what has no rule."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from parallel_llama import OLD_DTENSORS, make_mesh
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.ddp.plan.model_slice import model_slice_of
from maingrad.ddp.plan.tensor_parallel.localize import layouts_of, localize
from maingrad.launch.simulation.simulate import SimulatedRankError, simulate
from maingrad.te_integration import Linear, convert_linears

K, N = 6, 10  # of which 4 ranks have 2, 2, 2, 0 and 3, 3, 3, 1


def plain_layer(bias: bool) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(K, N, bias=bias)


def inputs(micro: int, tp: int) -> torch.Tensor:
    """torch's dispatch flattens no uneven cut, for which two ranks get even ones."""
    shape = (4, 6, K) if tp == 2 else (3, 5, K)
    return torch.randn(shape, generator=torch.Generator().manual_seed(micro))


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() + y.square().sum()


def distribute(layer: nn.Linear, mesh: object, cut: Placement, bias_cut: Placement) -> None:
    for name, placement in (("weight", cut), ("bias", bias_cut)):
        whole = getattr(layer, name)
        if whole is not None:
            setattr(layer, name, nn.Parameter(distribute_tensor(whole.detach(), mesh, [placement])))


def run(at: Placement, cut: Placement, bias_cut: Placement | None, *, convert: bool, tp: int = 4) -> list[int]:
    """Two microbatches of a layer of slices against the plain layer. Returns the numbers of fused writes."""
    mesh = make_mesh(1, tp)
    plain = plain_layer(bias_cut is not None)
    model = nn.Sequential(copy.deepcopy(plain))
    if convert:
        convert_linears(model)
    distribute(model[0], mesh["tp"], cut, bias_cut or Replicate())
    wrapped = DistributedDataParallel(
        model, DistributedDataParallelConfig(overlap_grad_reduce=True), process_group=mesh["dp"]
    )
    for micro in range(2):
        x, plain_x = inputs(micro, tp), inputs(micro, tp).requires_grad_()
        expected = plain(plain_x)
        loss_of(expected).backward()
        given = distribute_tensor(x, mesh["tp"], [at]).requires_grad_()
        if micro == 0:
            with wrapped.no_sync():
                y = wrapped(given)
                loss_of(y.full_tensor()).backward()
        else:
            y = wrapped(given)
            loss_of(y.full_tensor()).backward()
        assert isinstance(y, DTensor)
        torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(given.grad.full_tensor(), plain_x.grad, rtol=1e-5, atol=1e-5)
    wrapped.finish_grad_sync()
    for name, param in model[0].named_parameters():
        grad = layouts_of(model[0])[name].dtensor(param.main_grad.clone()).full_tensor()
        torch.testing.assert_close(grad, getattr(plain, name).grad, rtol=1e-5, atol=1e-5)
    return [record.num_fused_writes for record in wrapped.records if record.name == "0.weight"]


RULES = {
    "columns": (Replicate(), Shard(0), Shard(0)),
    "rows": (Shard(2), Shard(1), Replicate()),
    "sequence": (Shard(1), Replicate(), Replicate()),
    "batch": (Shard(0), Replicate(), Replicate()),
    "copies": (Replicate(), Replicate(), Replicate()),
}


@pytest.mark.parametrize(("rule", "bias"), list(itertools.product(RULES, (True, False))))
def test_a_rule_writes_each_microbatch_into_main_grad(rule: str, bias: bool) -> None:
    at, cut, bias_cut = RULES[rule]
    for writes in simulate(run, 4, at, cut, bias_cut if bias else None, convert=True):
        assert writes == [2]


OTHERS = {
    "columns of a sequence part": (Shard(1), Shard(0), Shard(0)),
    "rows of a whole input": (Replicate(), Shard(1), Replicate()),
    "rows of a part of the batch": (Shard(0), Shard(1), Replicate()),
    "a bias that is no part of the columns": (Replicate(), Shard(0), Replicate()),
    "copies of a part of the features": (Shard(2), Replicate(), Replicate()),
    "rows and a bias that is cut": (Shard(2), Shard(1), Shard(0)),
    "copies and a bias that is cut": (Replicate(), Replicate(), Shard(0)),
}


def skip_what_torch_cannot(at: Placement) -> None:
    if OLD_DTENSORS and at == Shard(1):
        pytest.skip("torch flattens no dim behind one that is cut")


@pytest.mark.parametrize("case", OTHERS)
def test_any_other_placement_is_right_by_autograd(case: str) -> None:
    skip_what_torch_cannot(OTHERS[case][0])
    for writes in simulate(run, 2, *OTHERS[case], convert=True, tp=2):
        assert writes == [0]


@pytest.mark.parametrize("case", [*RULES, *OTHERS])
@pytest.mark.sampled(4)
def test_an_unconverted_layer_is_right_by_autograd(case: str) -> None:
    skip_what_torch_cannot((RULES | OTHERS)[case][0])
    for writes in simulate(run, 2, *(RULES | OTHERS)[case], convert=False, tp=2):
        assert writes == [0]


def test_a_slice_says_which_elements_of_the_whole_it_is() -> None:
    def elements(placement: Placement) -> list[int]:
        mesh = make_mesh(1, dist.get_world_size())
        layer = plain_layer(False)
        index = torch.arange(K * N, dtype=torch.float32).view(N, K)
        layer.weight = nn.Parameter(distribute_tensor(index, mesh["tp"], [placement], src_data_rank=None))
        DistributedDataParallel(layer, process_group=mesh["dp"], init_sync=False)
        held = model_slice_of(layer.weight)
        assert held is not None
        assert held.shape == (N, K)
        parts = [index[tuple(map(slice, box.offsets, box.ends))] for box in held.boxes]
        expected = parts[0] if held.dim is None else torch.cat(parts, held.dim)
        assert torch.equal(layer.weight, expected)
        assert torch.equal(held.part_of(index), expected)
        return [len(held.boxes), int(expected.numel())]

    assert simulate(elements, 4, Shard(0)) == [[1, 18], [1, 18], [1, 18], [1, 6]]
    assert simulate(elements, 4, Shard(1)) == [[1, 20], [1, 20], [1, 20], [1, 0]]
    assert simulate(elements, 4, _StridedShard(0, split_factor=2)) == [[2, 24], [2, 24], [2, 12], [2, 0]]
    assert simulate(elements, 2, _StridedShard(1, split_factor=3)) == [[3, 30]] * 2
    assert simulate(elements, 4, Replicate()) == [[1, 60]] * 4


def test_a_plain_input_is_refused() -> None:
    def plain_input() -> None:
        mesh = make_mesh(1, 2)
        layer = Linear(K, N, fuse_wgrad_accumulation=True)
        distribute(layer, mesh["tp"], Shard(0), Shard(0))
        DistributedDataParallel(layer, process_group=mesh["dp"])(inputs(0, 2))

    with pytest.raises(SimulatedRankError, match="its input a plain tensor: call the module as parallelize_module"):
        simulate(plain_input, 2)


def test_a_partial_input_is_no_rule() -> None:
    """A sum that nobody has taken: torch's dispatch takes it."""
    for cut in (Shard(0), Replicate()):
        for writes in simulate(run, 2, Partial(), cut, None, convert=True, tp=2):
            assert writes == [0]


@pytest.mark.parametrize("at", [Shard(1), Replicate()])
def test_no_backward_sums_the_gradient_of_a_copy(at: Placement) -> None:
    """Each rank keeps its part: of its rows, or on the first rank of all rows."""

    def on_each_rank() -> tuple[torch.Tensor, torch.Tensor]:
        mesh = make_mesh(1, 2)
        layer = nn.LayerNorm(K)
        plain = copy.deepcopy(layer)
        distribute(layer, mesh["tp"], Replicate(), Replicate())
        localize(layer)
        x = inputs(0, 2)
        plain(x).square().sum().backward()
        layer(distribute_tensor(x, mesh["tp"], [at])).to_local().square().sum().backward()
        return layer.weight.grad, plain.weight.grad

    schedule: list[tuple[int, str]] = []
    (first, whole), (second, _) = simulate(on_each_rank, 2, schedule=schedule)
    torch.testing.assert_close(first + second, whole)
    assert not [event for _, event in schedule if "all_reduce" in event or "reduce_scatter" in event]
