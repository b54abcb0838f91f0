"""What becomes local, what stays, and what is refused."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from parallel_llama import (
    OLD_DTENSORS,
    assert_grads,
    batch,
    full,
    llama,
    make_mesh,
    parallelize,
    plain_grads,
    whole_grads,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from maingrad.ddp import DistributedDataParallel
from maingrad.ddp.plan.model_slice import model_slice_of
from maingrad.ddp.plan.tensor_parallel.localize import is_one_slice, localize, ranks_told, whole_while
from maingrad.fsdp import fully_shard
from maingrad.launch.simulation.simulate import SimulatedRankError, simulate
from maingrad.te_integration import LayerNormLinear, Linear, LinearCrossEntropy, convert_linears, unconvert


def distributed(tensor: Tensor, mesh: Any, placement: Any, **options: Any) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(tensor.detach(), mesh, [placement]), **options)


def test_it_is_idempotent_and_copies_run_by_themselves() -> None:
    def on_each_rank() -> None:
        mesh = make_mesh(1, 2)
        model = parallelize(llama(), mesh["tp"], sequence=True)
        memory = {name: DTensor.to_local(param).data_ptr() for name, param in model.named_parameters()}
        localize(model)
        params = dict(model.named_parameters())
        assert {name: param.data_ptr() for name, param in params.items()} == memory
        localize(model)
        assert all(param is params[name] and type(param) is nn.Parameter for name, param in model.named_parameters())
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for param in twin.parameters():
                param.zero_()
        assert model(*batch(0)) != twin(*batch(0))
        localize(twin)
        assert {name: model_slice_of(param) for name, param in twin.named_parameters()} == {
            name: model_slice_of(param) for name, param in params.items()
        }

    simulate(on_each_rank, 2)


@pytest.mark.in_turn
def test_one_dtensor_of_two_modules_stays_one_parameter() -> None:
    def on_each_rank() -> Tensor:
        mesh = make_mesh(2, 2)
        model = llama()
        convert_linears(model)
        parallelize(model, mesh["tp"], sequence=False)
        model.head.weight = model.embedding.weight
        wrapped = DistributedDataParallel(model, process_group=mesh["dp"])
        assert model.head.weight is model.embedding.weight
        wrapped(*batch(mesh["dp"].get_local_rank())).backward()
        wrapped.finish_grad_sync()
        held = model_slice_of(model.head.weight)
        assert held is not None
        assert held.grad == "slice"
        plain = llama()
        plain.head.weight = plain.embedding.weight
        expected = plain_grads(plain, [batch(0), batch(1)])["embedding.weight"]
        (box,) = held.boxes
        part = expected[box.offsets[0] : box.ends[0]]
        torch.testing.assert_close(model.head.weight.main_grad, part, rtol=1e-5, atol=1e-6)
        return part

    simulate(on_each_rank, 4)


def test_a_tie_that_parallelize_module_has_cut_is_said() -> None:
    def on_each_rank(tied: bool, again: bool = False) -> list[str]:
        mesh = make_mesh(1, 2)
        model = llama()
        if tied:
            model.head.weight = model.embedding.weight
        parallelize(model, mesh["tp"], sequence=False)
        if again:
            model.head.weight = model.embedding.weight
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            localize(model)
        return [str(each.message) for each in caught]

    assert not any(simulate(on_each_rank, 2, False))
    assert not any(simulate(on_each_rank, 2, True, True)), "one parameter again, as the warning asks"
    for (text,) in simulate(on_each_rank, 2, True):
        assert "[64, 16]" in text
        assert "head.weight = embedding.weight" in text


def test_two_heads_that_were_tied_are_said_once() -> None:
    def on_each_rank() -> int:
        mesh = make_mesh(1, 2)["tp"]
        layers = nn.ModuleList([nn.Embedding(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
        for layer in layers:
            layer.weight = distributed(nn.Parameter(torch.ones(4, 4)), mesh, Shard(0))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            localize(layers)
        return sum("equal weights" in str(each.message) for each in caught)

    assert simulate(on_each_rank, 2) == [1, 1]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ranks_without_elements_say_nothing_of_ties(device: str) -> None:
    def on_each_rank() -> list[str]:
        mesh = make_mesh(1, 4)
        with torch.device(device):
            model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
        plan = {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            localize(model)
        return [str(each.message) for each in caught if "equal weights" in str(each.message)]

    assert not any(simulate(on_each_rank, 4))


class Scaled(nn.Module):
    """A parameter, a buffer that each forward writes in place, and one that it assigns."""

    count: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 6))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = self.last + 1
        return x * self.weight + self.last


def test_frozen_parameters_and_buffers_become_local() -> None:
    def on_each_rank() -> None:
        mesh = make_mesh(1, 2)
        model = nn.Sequential(nn.Linear(6, 6), Scaled())
        model[1].weight = distributed(model[1].weight, mesh["tp"], Replicate(), requires_grad=False)
        model[1].count = distribute_tensor(model[1].count, mesh["tp"], [Replicate()])
        model[1].last = distribute_tensor(model[1].last, mesh["tp"], [Replicate()])
        wrapped = DistributedDataParallel(model, process_group=mesh["dp"])
        for _ in range(2):
            x = DTensor.from_local(model[0](torch.ones(3, 6)), mesh["tp"], [Replicate()], run_check=False)
            model[1](x)
        assert not model[1].weight.requires_grad
        assert not any(isinstance(each, DTensor) for each in [*model.parameters(), *model.buffers()])
        assert model[1].count == 2
        assert torch.equal(model[1].last, torch.full((6,), 2.0))
        assert isinstance(model.state_dict()["1.last"], DTensor)
        assert wrapped.records

    simulate(on_each_rank, 2)


def test_marks_of_a_dtensor_are_the_parameters() -> None:
    def on_each_rank() -> None:
        mesh = make_mesh(1, 2)
        layer = nn.Linear(6, 6)
        layer.weight = distributed(layer.weight, mesh["tp"], Shard(0))
        layer.weight.shared_embedding = True  # type: ignore[assignment]
        columns = DTensor.from_local(torch.rand(6, 3).t(), mesh["tp"], [Shard(0)], run_check=False)
        layer.columns = nn.Parameter(columns)
        localize(layer)
        assert layer.weight.shared_embedding is True
        assert layer.columns.is_contiguous(), "kernels of a bucket read rows"
        assert torch.equal(layer.columns, DTensor.to_local(columns))

    simulate(on_each_rank, 2)


def test_a_state_dict_shares_the_memory_of_the_model() -> None:
    """What torch.distributed.checkpoint reads into it, the model has."""

    def on_each_rank() -> None:
        mesh = make_mesh(1, 2)
        layer = nn.Linear(6, 6)
        layer.weight = distributed(layer.weight, mesh["tp"], Shard(0))
        layer.register_buffer("scale", distribute_tensor(torch.ones(6), mesh["tp"], [Replicate()]))
        state = localize(layer).state_dict()
        for name, value in state.items():
            own = layer.get_buffer(name) if name == "scale" else layer.get_parameter(name)
            assert isinstance(value, DTensor) == (name != "bias")
            (value.to_local() if isinstance(value, DTensor) else value).fill_(7.0)
            assert torch.equal(own, torch.full_like(own, 7.0)), name
            assert not value.requires_grad

    simulate(on_each_rank, 2)


def test_copies_of_experts_are_experts() -> None:
    """A copy of a module has lost the mark on its parameters, and its layouts know it."""

    def on_each_rank() -> None:
        mesh = make_mesh(1, 2)
        layer = nn.Linear(6, 6, bias=False)
        layer.weight = distributed(layer.weight, mesh["tp"], Shard(0))
        layer.weight.allreduce = False  # type: ignore[assignment]
        twin = localize(copy.deepcopy(localize(layer)))
        for each in (layer, twin):
            held = model_slice_of(each.weight)
            assert held is not None and held.grad == "expert"
            assert each.weight.allreduce is False

    simulate(on_each_rank, 2)


@pytest.mark.in_turn
@pytest.mark.parametrize("wrapper", ["ddp", "fully_shard"])
def test_an_optimizer_of_before_wrapping_is_refused(wrapper: str) -> None:
    """It would step over DTensors that get no gradients, and train nothing."""

    def on_each_rank() -> None:
        mesh = make_mesh(2, 2)
        model = parallelize(llama(), mesh["tp"], sequence=True)
        own = {"params": [nn.Parameter(torch.zeros(1))]}  # of a head that nobody has cut
        before = torch.optim.SGD([own, {"params": [*model.parameters()]}], lr=0.1)
        if wrapper == "ddp":
            wrapped: Any = DistributedDataParallel(model, process_group=mesh["dp"])
        else:
            wrapped = fully_shard(model, mesh["dp"])
        wrapped(*batch(mesh["dp"].get_local_rank())).backward()
        with pytest.raises(RuntimeError, match=r"SGD was built before the model was wrapped.*after wrapping"):
            before.step()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    simulate(on_each_rank, 4)


def test_states_of_optimizers_have_whole_shapes_and_load_from_whole_tensors() -> None:
    def on_each_rank() -> None:
        mesh = make_mesh(1, 2)
        layer = nn.Linear(6, 6)
        layer.weight, layer.bias = (distributed(each, mesh["tp"], Shard(0)) for each in (layer.weight, layer.bias))
        localize(layer)
        optimizer = torch.optim.AdamW(layer.parameters())
        for given in (torch.ones(6, 6), torch.arange(36.0).view(6, 6)):
            layer.weight.grad = torch.ones_like(layer.weight)  # the bias has no gradient, and no state
            optimizer.step()
            saved = optimizer.state_dict()
            assert list(saved["state"]) == [0]
            moment = saved["state"][0]["exp_avg"]
            assert isinstance(moment, DTensor) and moment.shape == (6, 6)
            saved["state"][0] |= {"exp_avg": given, "step": 5.0}
            optimizer.load_state_dict(saved)
            state = optimizer.state[layer.weight]
            assert type(state["exp_avg"]) is Tensor and state["step"] == 5
            assert torch.equal(state["exp_avg"], given.chunk(2)[dist.get_rank()])
            assert state["exp_avg_sq"].shape == (3, 6)
        assert len(optimizer._optimizer_state_dict_post_hooks) == 1, "two steps"
        plain = nn.Linear(2, 2)
        other = torch.optim.SGD(plain.parameters())
        other.step()
        assert not other._optimizer_state_dict_post_hooks, "of no slices"

    simulate(on_each_rank, 2)


def test_a_forward_that_fails_leaves_local_parameters() -> None:
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.weight, DTensor)
            raise KeyError("out of memory, perhaps")

    def on_each_rank() -> None:
        layer = Failing(6, 6)
        layer.weight = distributed(layer.weight, make_mesh(1, 2)["tp"], Shard(0))
        weight = localize(layer).weight
        with pytest.raises(KeyError, match="perhaps"):
            layer(torch.ones(1, 6))
        assert layer.weight is weight and type(weight) is nn.Parameter

    simulate(on_each_rank, 2)


def test_the_ranks_are_those_of_the_first_that_tells() -> None:
    """What is given, a DTensor, or a slice of an earlier call."""

    def on_each_rank() -> None:
        mesh = make_mesh(2, 2)
        tp, dp = mesh["tp"].get_group(), mesh["dp"].get_group()
        layer = nn.Linear(6, 6)
        assert ranks_told(layer, None) is None
        layer.bias = distributed(layer.bias, mesh["tp"], Shard(0))
        for _ in range(2):
            assert ranks_told(layer, None) is tp
            assert ranks_told(layer, dp) is dp
            assert ranks_told(layer, mesh["dp"]) is dp
            localize(layer)
        on_two_dims(layer, mesh)
        assert ranks_told(layer, None) is tp
        assert not is_one_slice(layer.weight)
        part = DeviceMesh("cpu", [0, 1])
        assert ranks_told(nn.Linear(6, 6), part) is (part.get_group() if dist.get_rank() < 2 else None)
        assert ranks_told(layer, mesh) is tp

    simulate(on_each_rank, 4)


def test_what_torchs_fully_shard_has_made_inside_stays() -> None:
    def on_each_rank() -> None:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        torch_fully_shard(model[1], mesh=init_device_mesh("cpu", (2,)))
        assert isinstance(localize(model)[1].weight, DTensor)
        with pytest.raises(ValueError, match=r"'1.weight' is a DTensor \(torch.distributed.fsdp.fully_shard"):
            DistributedDataParallel(model)

    simulate(on_each_rank, 2)


def test_a_tie_over_two_units_is_refused() -> None:
    """The second unit would find the DTensor that the first has replaced, and train a copy of its own."""

    def on_each_rank() -> None:
        mesh = make_mesh(2, 2)
        model = parallelize(llama(), mesh["tp"], sequence=False)
        model.head.weight = model.embedding.weight
        fully_shard(model.embedding, mesh["dp"])
        with pytest.raises(ValueError, match=r"'head.weight' was sharded by unit 'Embedding'.*one unit of all modules"):
            fully_shard(model, mesh["dp"])

    simulate(on_each_rank, 4)


def on_two_dims(layer: nn.Linear, mesh: Any) -> None:
    weight = distribute_tensor(layer.weight.detach(), mesh, [Replicate(), Shard(0)])
    layer.weight = nn.Parameter(weight)


def with_a_gradient(layer: nn.Linear, mesh: Any) -> None:
    layer.weight = distributed(layer.weight, mesh["tp"], Shard(0))
    layer.weight.grad = torch.zeros_like(layer.weight)


def of_sums(layer: nn.Linear, mesh: Any) -> None:
    layer.weight = nn.Parameter(DTensor.from_local(layer.weight.detach(), mesh["tp"], [Partial()], run_check=False))


REFUSED: dict[str, tuple[Callable[[nn.Linear, Any], None], str]] = {
    "two dims": (on_two_dims, r"'0.weight' is a DTensor on a mesh of 2 dims.*mesh\['tp'\]"),
    "a gradient": (with_a_gradient, r"'0.weight' already has a .grad"),
    "partial sums": (of_sums, "'0.weight' is a DTensor of partial sums"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_become_local_is_refused_before_anything_changes(case: str) -> None:
    cut, text = REFUSED[case]

    def on_each_rank() -> None:
        mesh = make_mesh(2, 2)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        model[1].weight = distributed(model[1].weight, mesh["tp"], Shard(0))
        cut(model[0], mesh)
        with pytest.raises(ValueError, match=text):
            DistributedDataParallel(model, process_group=mesh["dp"])
        assert isinstance(model[1].weight, DTensor)

    simulate(on_each_rank, 4)


def wrap_in_ddp(model: nn.Module, mesh: Any) -> None:
    DistributedDataParallel(model, process_group=mesh["dp"])


def wrap_in_fully_shard(model: nn.Module, mesh: Any) -> None:
    fully_shard(model, mesh["dp"])


@pytest.mark.parametrize("wrap", [wrap_in_ddp, wrap_in_fully_shard])
@pytest.mark.parametrize("case", REFUSED)
def test_what_one_rank_refuses_is_raised_on_all(case: str, wrap: Callable[[nn.Module, Any], None]) -> None:
    """Neither its data-parallel nor its tensor-parallel ranks wait for it in the next collective."""
    cut, text = REFUSED[case]

    def on_each_rank() -> None:
        mesh = make_mesh(2, 2)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        model[1].weight = distributed(model[1].weight, mesh["tp"], Shard(0))
        cut(model[0], mesh)
        if dist.get_rank() != 2:
            model[0] = nn.Linear(6, 6)
        with pytest.raises(ValueError, match=text + r".*\(on rank 2\)"):
            wrap(model, mesh)

    simulate(on_each_rank, 4)


NEED_WHOLE: dict[str, Callable[[], nn.Module]] = {
    "LinearCrossEntropy": lambda: LinearCrossEntropy(6, 8),
    "Linear": lambda: Linear(6, 8, return_bias=True),
    "LayerNormLinear": lambda: LayerNormLinear(6, 8),
}


@pytest.mark.parametrize("name", NEED_WHOLE)
def test_layers_that_need_whole_weights_are_refused(name: str) -> None:
    def on_each_rank() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        layer = NEED_WHOLE[name]()
        layer.weight = distributed(layer.weight, mesh, Shard(0))
        localize(nn.Sequential(layer))

    with pytest.raises(SimulatedRankError, match=rf"'0.weight' is a slice.*{name} computes from.*loss_parallel"):
        simulate(on_each_rank, 2)


class Parallel(nn.Module):
    """A vocabulary-parallel embedding, and a loss over a cut vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embedding(tokens))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def vocabulary_parallel(convert: bool) -> dict[str, int]:
    mesh = make_mesh(2, 2)
    torch.manual_seed(0)
    model, plain = Parallel(), Parallel()
    plain.load_state_dict(model.state_dict())
    if convert:
        convert_linears(model)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(use_local_output=False),
    }
    parallelize_module(model, mesh["tp"], plan)
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"])
    with loss_parallel():
        wrapped(*batch(mesh["dp"].get_local_rank())).backward()
    wrapped.finish_grad_sync()
    expected = plain_grads(plain, [batch(0), batch(1)])
    for name, param in model.named_parameters():
        (box,) = model_slice_of(param).boxes  # type: ignore[union-attr]
        part = expected[name][box.offsets[0] : box.ends[0]]
        torch.testing.assert_close(param.main_grad, part, rtol=1e-5, atol=1e-6)
    return {record.name: record.num_fused_writes for record in wrapped.records}


@pytest.mark.in_turn
@pytest.mark.parametrize("convert", [True, False])
def test_vocabulary_parallel_embedding_and_loss(convert: bool) -> None:
    """In processes: ``loss_parallel`` changes a table of the process, and simulated ranks leave it at other times."""
    for writes in run_ranks(vocabulary_parallel, 4, convert):
        assert writes == {"embedding.weight": 0, "head.weight": int(convert), "head.bias": 0}


def test_conversion_may_be_undone_between() -> None:
    def on_each_rank() -> None:
        mesh = make_mesh(1, 2)
        model = llama()
        convert_linears(model)
        parallelize(model, mesh["tp"], sequence=False)
        localize(model)
        loss = model(*batch(0))
        unconvert(model)
        assert type(model.head) is nn.Linear
        torch.testing.assert_close(model(*batch(0)), loss)
        assert not convert_linears(model).skipped
        torch.testing.assert_close(model(*batch(0)), loss)
        torch.testing.assert_close(full(model.state_dict()["head.weight"]), llama().head.weight)

    simulate(on_each_rank, 2)


def test_a_forward_that_the_user_has_replaced_is_not_converted() -> None:
    def on_each_rank() -> None:
        mesh = make_mesh(1, 2)
        for replaced in ("", "before", "after"):
            model = nn.Sequential(nn.Linear(6, 6))
            parallelize_module(model[0], mesh["tp"], ColwiseParallel())
            if replaced == "before":
                model[0].forward = lambda x: 2 * x
            localize(model)
            if replaced == "after":
                model[0].forward = lambda x: 2 * x
            skipped = convert_linears(model).skipped
            assert bool(skipped) == bool(replaced)
            assert all("forward was replaced on this instance" in reason for reason in skipped.values())

    simulate(on_each_rank, 2)


def compiled(whole_graph: bool) -> None:
    torch._dynamo.reset()
    mesh = make_mesh(1, 2)
    model = parallelize(llama(layers=1), mesh["tp"], sequence=True)
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"])
    model.blocks[0].compile(backend="aot_eager", fullgraph=whole_graph)
    if whole_graph:
        with pytest.raises(Exception, match=r"compiles no module with a replicated DTensor.*compile with torch 2\.14"):
            wrapped(*batch(0))
        return
    wrapped(*batch(0)).backward()
    wrapped.finish_grad_sync()
    assert_grads(whole_grads(model), plain_grads(llama(layers=1), [batch(0)]))


@pytest.mark.skipif(not OLD_DTENSORS, reason="newer torch compiles them")
@pytest.mark.parametrize("whole_graph", [False, True])
def test_old_torch_compiles_no_replicated_dtensors(whole_graph: bool) -> None:
    run_ranks(compiled, 2, whole_graph)


class Heads(nn.Module):
    """A norm over each head, of which tensor-parallel ranks have parts."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.norm, self.out = nn.Linear(8, 12), nn.RMSNorm(3), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.q(x).unflatten(-1, (-1, 3))).flatten(-2))


def layer_that_gathers_its_input() -> None:
    mesh = make_mesh(1, 2)
    rank = mesh["tp"].get_local_rank()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 12))
    model = copy.deepcopy(plain)
    convert_linears(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(input_layouts=Shard(0))})
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"])
    x = torch.linspace(-1, 2, 4 * 8).view(4, 8)
    found, expected = wrapped(x.chunk(2)[rank]), plain(x)
    torch.testing.assert_close(found, expected.chunk(2, 1)[rank])
    found.square().sum().backward()
    wrapped.finish_grad_sync()
    expected.square().sum().backward()
    torch.testing.assert_close(model[0].weight.main_grad, plain[0].weight.grad.chunk(2)[rank], rtol=1e-5, atol=1e-5)


def test_a_part_of_the_input_is_gathered_where_a_plan_says_so() -> None:
    simulate(layer_that_gathers_its_input, 2)


def norm_of_heads() -> None:
    mesh = make_mesh(2, 2)
    torch.manual_seed(0)
    model, plain = Heads(), Heads()
    plain.load_state_dict(model.state_dict())
    style = SequenceParallel(sequence_dim=1, use_local_output=True)
    parallelize_module(model, mesh["tp"], {"q": ColwiseParallel(), "norm": style, "out": RowwiseParallel()})
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"])
    x = torch.linspace(-1, 2, 2 * 5 * 8).view(2, 5, 8)
    wrapped(x[mesh["dp"].get_local_rank()]).square().mean().backward()
    wrapped.finish_grad_sync()
    plain(x).square().mean().backward()
    torch.testing.assert_close(model.norm.weight.main_grad, plain.norm.weight.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.in_turn
def test_norms_of_heads_count_all_heads() -> None:
    simulate(norm_of_heads, 4)


def test_slices_get_their_parts_of_whole_initial_values() -> None:
    """As wide as a model that is not cut draws them; what has values already stays."""

    def on_each_rank() -> Tensor:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        layer = nn.Linear(2, 4)
        for name in ("weight", "bias"):
            setattr(layer, name, distributed(getattr(layer, name), mesh, Shard(0)))
            assert is_one_slice(getattr(layer, name))
        layer.register_buffer("scale", distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
        localize(layer)
        assert not is_one_slice(layer.weight)
        weight, bias, given = layer.weight, layer.bias, layer.bias.detach().clone()
        with whole_while(layer, ["weight", "scale"], lambda part, shape: torch.empty(shape, dtype=part.dtype)):
            assert layer.weight.shape == (4, 2)
            assert isinstance(layer.weight, nn.Parameter)
            assert layer.bias is bias
            with torch.no_grad():
                layer.weight.copy_(torch.arange(8.0).view(4, 2))
                layer.scale.copy_(torch.arange(4.0))
        assert layer.weight is weight
        assert torch.equal(layer.scale, torch.arange(4.0).chunk(2)[dist.get_rank()])
        assert torch.equal(layer.bias, given)
        return weight.detach()

    def of_integers() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        layer = nn.Linear(2, 4, bias=False)
        layer.weight = distributed(torch.zeros(4, 2, dtype=torch.uint8), mesh, Shard(0), requires_grad=False)
        localize(layer)
        with whole_while(layer, ["weight"], lambda part, shape: torch.empty(shape, dtype=part.dtype)):
            assert not layer.weight.requires_grad
            layer.weight.copy_(torch.arange(8).view(4, 2))
        assert torch.equal(layer.weight, torch.arange(8).view(4, 2).chunk(2)[dist.get_rank()])

    simulate(of_integers, 2)
    assert torch.equal(torch.cat(simulate(on_each_rank, 2)), torch.arange(8.0).view(4, 2))
