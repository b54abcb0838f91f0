"""A Llama under torch's tensor parallelism and our wrappers against plain PyTorch over all data."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel_llama import Llama, assert_grads, batch, full, llama, make_mesh, parallelize, plain_grads, whole_grads
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp.plan.model_slice import model_slice_of
from maingrad.fsdp import fully_shard
from maingrad.launch.simulation.simulate import simulate
from maingrad.te_integration import WgradQueue, convert_linears, delayed_wgrad

PLANS = ["tp", "tp and sequence"]
ORDERS = ["convert first", "tp first", "not converted"]


def make(plan: str, order: str, mesh: Any, **options: Any) -> Llama:
    model = llama(**options)
    if order == "convert first":
        assert not convert_linears(model).skipped
    parallelize(model, mesh["tp"], sequence=plan != "tp")
    if order == "tp first":
        assert not convert_linears(model).skipped
    return model


def backwards(wrapped: Any, micro: int, dp: int) -> None:
    for index in range(micro):
        tokens, labels = batch(dp * micro + index)
        if index + 1 < micro:
            with wrapped.no_sync():
                (wrapped(tokens, labels) / micro).backward()
        else:
            (wrapped(tokens, labels) / micro).backward()


def gradients(plan: str, order: str, micro: int, overlap: bool) -> dict[str, int]:
    mesh = make_mesh()
    model = make(plan, order, mesh)
    config = DistributedDataParallelConfig(overlap_grad_reduce=overlap, bucket_size=1000)
    wrapped = DistributedDataParallel(model, config, process_group=mesh["dp"])
    backwards(wrapped, micro, mesh["dp"].get_local_rank())
    wrapped.finish_grad_sync()
    assert_grads(whole_grads(model), plain_grads(llama(), [batch(index) for index in range(2 * micro)]))
    return {record.name: record.num_fused_writes for record in wrapped.records}


@pytest.mark.in_turn
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.sampled(8)
def test_gradients_are_those_of_the_whole_model(plan: str, order: str, micro: int, overlap: bool) -> None:
    for writes in simulate(gradients, 4, plan, order, micro, overlap):
        linear = {name for name in writes if name.startswith("blocks") or name == "head.weight"}
        linear = {name for name in linear if name.endswith(".weight") and "norm" not in name}
        fused = {name for name, count in writes.items() if count == micro}
        assert fused == (set() if order == "not converted" else linear)
        assert {name: writes[name] for name in writes if name not in fused} == dict.fromkeys(set(writes) - fused, 0)


def trained(plan: str, order: str, zero1: bool) -> dict[str, torch.Tensor]:
    mesh = make_mesh()
    model = make(plan, order, mesh)
    config = DistributedDataParallelConfig(use_distributed_optimizer=zero1, overlap_grad_reduce=True, bucket_size=1000)
    wrapped = DistributedDataParallel(model, config, process_group=mesh["dp"])
    if zero1:
        optimizer: Any = DistributedOptimizer(wrapped, lr=0.05, optimizer_class=torch.optim.SGD, max_grad_norm=0.3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        tokens, labels = batch(2 * step + mesh["dp"].get_local_rank())
        wrapped(tokens, labels).backward()
        if not zero1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    assert all(isinstance(value, DTensor) for name, value in state.items() if "norm" not in name)
    return {name: full(value).clone() for name, value in state.items()}


def trained_plainly() -> dict[str, torch.Tensor]:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        for tokens, labels in (batch(2 * step), batch(2 * step + 1)):
            (model(tokens, labels) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.in_turn
@pytest.mark.parametrize("zero1", [True, False])
@pytest.mark.parametrize("order", ["convert first", "tp first"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.sampled(4)
def test_five_clipped_steps_leave_equal_replicas_of_the_plain_model(plan: str, order: str, zero1: bool) -> None:
    first, *others = simulate(trained, 4, plan, order, zero1)
    for name, expected in trained_plainly().items():
        torch.testing.assert_close(first[name], expected, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(first[name], other[name]) for other in others)


# ---- What a backward may be cut into. ----


def delayed(plan: str, recompute: bool) -> None:
    mesh = make_mesh()
    model = make(plan, "tp first", mesh)
    if recompute:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1000)
    wrapped = DistributedDataParallel(model, config, process_group=mesh["dp"])
    queue, dp = WgradQueue(), mesh["dp"].get_local_rank()
    for index in range(2):
        tokens, labels = batch(dp * 2 + index)
        if recompute:
            loss = wrapped(tokens, labels) / 2
        else:
            with delayed_wgrad(queue):
                loss = wrapped(tokens, labels) / 2
        if index == 0:
            with wrapped.no_sync():
                loss.backward()
        else:
            loss.backward()
        assert recompute or len(queue) > 0
        queue.drain()
    wrapped.finish_grad_sync()
    assert_grads(whole_grads(model), plain_grads(llama(), [batch(index) for index in range(4)]))
    writes = {record.num_fused_writes for record in wrapped.records if record.name.endswith("w2.weight")}
    assert writes == {2}


@pytest.mark.in_turn
@pytest.mark.parametrize("recompute", [False, True], ids=["delayed", "recomputed"])
@pytest.mark.parametrize("plan", PLANS)
def test_weight_gradients_may_wait_and_activations_be_computed_again(plan: str, recompute: bool) -> None:
    simulate(delayed, 4, plan, recompute)


# ---- State dicts. ----


def saved_and_loaded(plan: str, path: Path) -> None:
    mesh = make_mesh()
    model = make(plan, "convert first", mesh)
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"])
    state = model.state_dict()
    whole = llama().state_dict()
    assert state.keys() == whole.keys()
    for name, value in state.items():
        assert torch.equal(full(value), whole[name])
    # A DTensor shares the parameter's memory, as that of torch's tensor parallelism does.
    with torch.no_grad():
        model.head.weight.add_(1)
    assert torch.equal(full(state["head.weight"]), whole["head.weight"] + 1)
    dcp.save(model.state_dict(), checkpoint_id=path)

    # Into a model that is cut in another way, from DTensors, from whole tensors, and by torch.distributed.checkpoint.
    other = make("tp" if plan != "tp" else "tp and sequence", "tp first", mesh, seed=1)
    DistributedDataParallel(other, process_group=mesh["dp"])
    other.load_state_dict(whole)
    assert_equal_states(other, whole)
    cut = {name for name, value in other.state_dict().items() if isinstance(value, DTensor)}
    other.load_state_dict({n: value if n in cut else full(value) for n, value in model.state_dict().items()})
    assert_equal_states(other, model.state_dict())
    other.load_state_dict(llama(seed=2).state_dict())
    into = other.state_dict()
    dcp.load(into, checkpoint_id=path)
    other.load_state_dict(into)
    assert_equal_states(other, model.state_dict())

    # torch's own functions, and a model of whole tensors.
    everything = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert torch.equal(everything["head.weight"], whole["head.weight"] + 1)
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
    assert_equal_states(model, whole)
    plain = llama(seed=2)
    into = plain.state_dict()
    dcp.load(into, checkpoint_id=path)
    assert torch.equal(into["head.weight"], whole["head.weight"] + 1)
    # The wrapper's parameters are the ones that were loaded.
    backwards(wrapped, 1, mesh["dp"].get_local_rank())
    wrapped.finish_grad_sync()
    assert_grads(whole_grads(model), plain_grads(llama(), [batch(0), batch(1)]))


def assert_equal_states(model: Llama, expected: dict[str, Any]) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), full(expected[name])), name


@pytest.mark.in_turn
@pytest.mark.parametrize("plan", PLANS)
def test_state_dicts_have_dtensors_and_take_what_torch_saves(plan: str, tmp_path: Path) -> None:
    simulate(saved_and_loaded, 4, plan, tmp_path)


def states_of_units() -> None:
    mesh = make_mesh()
    model = fully_shard(make("tp", "tp first", mesh), mesh["dp"])
    assert_equal_states(model, llama().state_dict())
    own = {name: value.clone() for name, value in model.state_dict().items()}
    other = llama(seed=1).state_dict()
    for given, expected in ((other, other), (own, llama().state_dict())):
        model.load_state_dict(given)
        assert_equal_states(model, expected)


@pytest.mark.in_turn
def test_a_unit_translates_the_states_of_its_slices() -> None:
    simulate(states_of_units, 4)


def wrong_state() -> None:
    mesh = make_mesh()
    model = make("tp", "tp first", mesh)
    DistributedDataParallel(model, process_group=mesh["dp"])
    state = {name: full(value).clone() for name, value in model.state_dict().items()}
    head = state["head.weight"]
    for wrong, shape in ((head[:32], r"\[32, 16\]"), (head.t(), r"\[16, 64\]")):
        with pytest.raises(RuntimeError, match=f"size mismatch for head.weight: {shape}"):
            model.load_state_dict({**state, "head.weight": wrong})


def test_a_slice_is_no_state_of_the_whole() -> None:
    simulate(wrong_state, 4)


def state_of_the_other_axis() -> None:
    mesh = make_mesh()
    model = make("tp", "tp first", mesh)
    DistributedDataParallel(model, process_group=mesh["dp"])
    state: dict[str, Any] = llama(seed=1).state_dict()
    for name, value in model.state_dict().items():
        if isinstance(value, DTensor):
            state[name] = distribute_tensor(state[name], mesh["dp"], value.placements)
    model.load_state_dict(state)
    assert_equal_states(model, llama(seed=1).state_dict())


@pytest.mark.in_turn
def test_state_that_is_cut_alike_over_other_ranks_is_told_apart() -> None:
    simulate(state_of_the_other_axis, 4)


@pytest.mark.in_turn
def test_slices_of_a_unit_are_no_state_of_another_rank() -> None:
    """Hooks of ``fully_shard`` see each DTensor as it was saved, and that another rank has saved it."""
    saved: dict[int, Any] = {}

    def swap() -> None:
        mesh, rank = make_mesh(), dist.get_rank()
        model: Any = fully_shard(make("tp", "tp first", mesh), mesh["dp"])
        saved[rank] = {name: value.clone() for name, value in model.state_dict().items()}
        dist.barrier()
        with pytest.raises((RuntimeError, ValueError), match="each rank loads the file that it saved itself"):
            model.load_state_dict(saved[rank ^ 1])

    simulate(swap, 4)


# ---- Groups. ----


def group_forgotten() -> None:
    mesh = make_mesh()
    model = make("tp", "tp first", mesh)
    with pytest.raises(ValueError, match="tensor"):
        DistributedDataParallel(model)


def test_a_data_parallel_group_with_tensor_parallel_ranks_is_refused() -> None:
    simulate(group_forgotten, 4)


def cut_behind_the_wrapper(wrap: Callable[[Llama, Any], Any]) -> str:
    mesh = make_mesh()
    model = llama()
    wrapped = wrap(model, mesh["dp"])
    parallelize_module(model.blocks[0], mesh["tp"], {"mlp.w1": ColwiseParallel()})
    with pytest.raises(RuntimeError) as raised:
        wrapped(*batch(0)).backward()
    return str(raised.value)


@pytest.mark.parametrize(
    ("wrap", "text"),
    [
        (lambda model, dp: DistributedDataParallel(model, process_group=dp), "was made a DTensor after wrapping"),
        (fully_shard, "was replaced after fully_shard"),
    ],
    ids=["ddp", "fully_shard"],
)
def test_a_cut_behind_the_wrapper_is_refused(wrap: Callable[[Llama, Any], Any], text: str) -> None:
    for found in simulate(cut_behind_the_wrapper, 4, wrap):
        assert "'blocks.0.mlp.w1." in found
        assert text in found


# ---- Optimizers. ----


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Slices are in the second one."""
    params = [*model.parameters()]
    return [
        {"params": [each for each in params if each.dim() == 1], "weight_decay": 0.0},
        {"params": [each for each in params if each.dim() > 1]},
    ]


def resumed(path: Path, full_state: bool) -> None:
    """AdamW by torch's functions: saved after two steps, and loaded into other ranks' slices of another model."""
    options = StateDictOptions(full_state_dict=full_state)
    mesh, found = make_mesh(), []
    for seed in (0, 1):
        model = make("tp and sequence", "tp first", mesh, seed=seed)
        wrapped = DistributedDataParallel(model, process_group=mesh["dp"])
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
        for step in range(2 - seed):
            one_step(wrapped, optimizer, step, mesh)
        weights, state = get_state_dict(model, optimizer, options=options)
        if seed == 0:
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
        else:
            loaded = {"model": weights, "optimizer": state}
            dcp.load(loaded, checkpoint_id=path)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=loaded["model"],
                optim_state_dict=loaded["optimizer"],
                options=options,
            )
        one_step(wrapped, optimizer, 2, mesh)
        found.append({name: full(value) for name, value in model.state_dict().items()})
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


def one_step(wrapped: Any, optimizer: torch.optim.Optimizer, step: int, mesh: Any) -> None:
    wrapped(*batch(2 * step + mesh["dp"].get_local_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.in_turn
@pytest.mark.parametrize("full_state", [False, True])
def test_state_of_torchs_optimizers_resumes(full_state: bool, tmp_path: Path) -> None:
    """A plain tensor of one rank's slice would be saved once, and loaded on all tensor-parallel ranks."""
    simulate(resumed, 4, tmp_path / "saved", full_state)


def given_before_the_first_step() -> None:
    mesh = make_mesh()
    states: list[dict[str, Any]] = []
    for seed in (0, 1):
        model = make("tp", "tp first", mesh, seed=seed)
        wrapped = DistributedDataParallel(model, process_group=mesh["dp"])
        optimizer = torch.optim.SGD(groups_of(model), lr=0.01, momentum=0.9)
        if seed:
            optimizer.load_state_dict(states[0])
        one_step(wrapped, optimizer, seed, mesh)
        states.append(optimizer.state_dict())
        for param in model.parameters():
            assert type(optimizer.state[param]["momentum_buffer"]) is torch.Tensor
    optimizer.load_state_dict(states[0])
    of_slices = [each for each in states[0]["state"].values() if isinstance(each["momentum_buffer"], DTensor)]
    assert len(of_slices) == sum(model_slice_of(param) is not None for param in model.parameters()), (
        "it stays as it was"
    )
    last = max(states[1]["state"])
    assert isinstance(states[1]["state"][last]["momentum_buffer"], DTensor)


@pytest.mark.in_turn
def test_state_may_be_loaded_before_the_first_step() -> None:
    simulate(given_before_the_first_step, 4)
