"""Wrong set-ups are refused, at construction where possible, with the name of what is wrong and a remedy."""

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from foreign import ForeignProvider
from gloo import run_ranks
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
    weights,
    wrap,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as shard_by_torch
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    clip_grad_norm,
    recorded_backward_order,
)
from maingrad.ddp.buckets.bucket import Phase
from maingrad.ddp.plan.layout import GradPlan
from maingrad.ddp.plan.owned_params import find_owned_params
from maingrad.ddp.wrapper import setup_checks
from maingrad.kernels import wgrad_accumulate
from maingrad.launch import simulate
from maingrad.te_integration import Linear

# ---- Wrapping. ----


def test_wrapping_twice_is_refused_and_harms_nothing() -> None:
    ddp = wrap(make_model())
    for again in (
        ddp,
        ddp.module,
        nn.Sequential(nn.Linear(2, 2), ddp.module),
        nn.Sequential(ddp.module, nn.Linear(2, 2)),
    ):
        with pytest.raises(ValueError, match=r"parameter '.*' already has a main_grad.*wrap a model once"):
            wrap(again)
        for parameter in again.parameters():
            mine = any(parameter is entry.owned.param for entry in ddp.bucket_params)
            assert hasattr(parameter, "main_grad") is mine, "nothing is left half attached"
            assert bool(parameter._post_accumulate_grad_hooks) is mine
    ddp_backward(ddp, make_batches(2))
    assert all(parameter.main_grad.any() for parameter in ddp.parameters())


def test_one_module_for_all_simulated_ranks_is_refused() -> None:
    model = make_model()
    with pytest.raises(RuntimeError, match=r"parameter '.*' already has a main_grad.*wrap a model once"):
        simulate(lambda: wrap(model), 2)


def test_recording_the_order_of_a_wrapped_model_is_refused_and_harms_nothing() -> None:
    ddp = wrap(make_model())
    with pytest.raises(ValueError, match=r"parameter '0.weight' already has a main_grad"):
        recorded_backward_order(ddp.module, lambda model: loss_of(model, make_batches(1)[0]))
    ddp_backward(ddp, make_batches(2))
    assert all(parameter.main_grad.any() for parameter in ddp.parameters())


def test_recording_the_order_leaves_gradients_and_random_numbers_alone() -> None:
    model = nn.Sequential(make_model(fuse=False), nn.Dropout(), nn.Linear(4, 2))
    loss_of(model, make_batches(1)[0]).backward()
    before = [(param.grad, param.grad.clone()) for param in model.parameters()]
    state = torch.get_rng_state()
    order = recorded_backward_order(model, lambda model: loss_of(model, make_batches(1, seed=7)[0]))
    assert sorted(order) == sorted(name for name, _ in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)
    for param, (grad, values) in zip(model.parameters(), before, strict=True):
        assert param.grad is grad
        assert torch.equal(grad, values)
    model.zero_grad()
    loss_of(model, make_batches(1)[0]).backward()
    assert all(param.grad is not None for param in model.parameters()), "no hook is left"


def test_recording_an_order_that_fails_leaves_a_plain_model() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = grad = torch.ones(2, 2)
    with pytest.raises(ZeroDivisionError):
        recorded_backward_order(model, lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    assert model.weight.grad is grad
    assert not hasattr(model.weight, "main_grad") and not model.weight._post_accumulate_grad_hooks


class Chain(nn.Module):
    """Its first layer is used by no loss, and the last rank has the others in another order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("unused", "a", "b")})
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = self.layers[name](x)
        return x


def test_the_recorded_order_is_that_of_the_first_of_the_ranks() -> None:
    def on_each_rank() -> list[str]:
        rank = dist.get_rank()
        group = dist.new_group([1, 2])
        ranks = WORLD_OF_ONE if rank == 0 else group
        with torch.no_grad():  # as around the rest of a set-up
            return recorded_backward_order(Chain("ab" if rank < 2 else "ba"), lambda model: model(X).sum(), ranks)

    def of_all_ranks() -> list[str]:
        return recorded_backward_order(Chain("ba" if dist.get_rank() else "ab"), lambda model: model(X).sum())

    X = torch.ones(1, 2)
    for ranks in (on_each_rank, of_all_ranks):
        assert simulate(ranks, 3) == [["layers.b.weight", "layers.a.weight", "layers.unused.weight"]] * 3


def test_the_recorded_order_is_that_of_first_gradients_and_has_what_is_trained() -> None:
    """Under reentrant recompute a layer that is used twice gets its gradient twice."""
    chain = Chain("bab")
    chain.layers["unused"].requires_grad_(False)
    layers = [chain.layers[name] for name in chain.order]

    def loss_of_parts(_: nn.Module) -> Tensor:
        x = torch.ones(1, 2, requires_grad=True)
        x.register_hook(lambda _: kept.extend(layer.weight.grad for layer in layers[1:]))
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x.sum()

    kept: list[Tensor | None] = []
    assert recorded_backward_order(chain, loss_of_parts) == ["layers.b.weight", "layers.a.weight"]
    assert kept == [None, None], "no gradient keeps its memory"


def test_a_model_that_another_provider_owns_is_refused() -> None:
    model = make_model()
    provider = ForeignProvider(model)
    with pytest.raises(ValueError, match=r"parameter '.*' already has a main_grad: it belongs to another"):
        wrap(model)
    assert not provider.seen


def test_a_gradient_from_before_wrapping_is_refused() -> None:
    model = make_model(fuse=False)
    loss_of(model, make_batches(1)[0]).backward()
    with pytest.raises(
        ValueError, match=r"parameter '\d.\w+' already has a .grad.*module.zero_grad\(\) before DistributedDataParallel"
    ):
        wrap(model)
    model.zero_grad()
    wrap(model)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    for model in (make_model().requires_grad_(False), nn.Tanh()):
        with pytest.raises(ValueError, match="no parameter that requires a gradient: there is nothing to reduce"):
            wrap(model)


def test_parameters_on_meta_or_on_two_devices_are_refused() -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"parameter '0.weight' is on the meta device: materialise"):
        wrap(copy.deepcopy(model).to("meta"))
    model[3].to("meta")
    with pytest.raises(ValueError, match=r"parameter '3.weight' is on the meta device"):
        wrap(model)


@pytest.mark.parametrize("kind", ["buffer", "frozen parameter"])
def test_what_init_sync_would_copy_and_is_on_meta_is_refused(kind: str) -> None:
    model = make_model()
    if kind == "buffer":
        model[3].register_buffer("table", torch.ones(3, device="meta"), persistent=False)
    else:
        model[3].register_parameter("table", nn.Parameter(torch.ones(3, device="meta"), requires_grad=False))
    with pytest.raises(ValueError, match=f"{kind} '3.table' is on the meta device, which keeps no values"):
        wrap(model)
    model[3].table = type(model[3].table)(torch.ones(3), requires_grad=False) if kind != "buffer" else torch.ones(3)
    wrap(model)


@pytest.mark.parametrize("kind", ["buffer", "frozen parameter"])
def test_what_init_sync_would_copy_and_torch_has_sharded_is_refused(kind: str) -> None:
    def on_each_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        part = nn.Linear(8, 8).requires_grad_(False) if kind == "frozen parameter" else nn.Tanh()
        model = nn.Sequential(shard_by_torch(part, mesh=mesh), make_model())
        if kind == "buffer":
            model.register_buffer("table", DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False))
        with pytest.raises(ValueError, match=rf"{kind} '[\w.]+' is a DTensor, .*pass init_sync=False"):
            wrap(model)

    simulate(on_each_rank, 2)


@pytest.mark.parametrize("second", ["cuda:1", "cpu"])
def test_parameters_of_two_devices_are_named(second: str) -> None:
    with FakeTensorMode():  # GPUs that need not be there
        model = nn.Sequential(*(nn.Linear(2, 2, device=device) for device in ("cuda:0", second)))
    with pytest.raises(ValueError, match=rf"parameter '1\.\w+' is on {second}, '0\.\w+' on cuda:0: one wrapper, one"):
        setup_checks._check_setup(model, find_owned_params(model), DistributedDataParallelConfig(), [])


@pytest.mark.gpu
def test_parameters_on_two_devices_are_refused() -> None:
    model = make_model()
    model[3].cuda()
    with pytest.raises(
        ValueError, match=r"parameter '3.weight' is on cuda:0, '0.weight' on cpu: one wrapper, one device"
    ):
        wrap(model)


def test_backward_order_must_name_each_trainable_parameter_once() -> None:
    names = [name for name, _ in make_model().named_parameters()]
    for order, complaint in (
        (names[1:], r"missing \['0.weight'\], unknown \[\]"),
        ([*names[1:], "0.wait"], r"missing \['0.weight'\], unknown \['0.wait'\]"),
        ([*names, names[0]], r"missing \[\], unknown \[\], 6 names for 5 parameters"),
    ):
        with pytest.raises(ValueError, match=f"backward_order must name each trainable parameter once; {complaint}"):
            DistributedDataParallel(make_model(), backward_order=order)


# ---- Configuration. ----


@pytest.mark.parametrize("bucket_size", [0, -1])
def test_a_bucket_holds_at_least_one_element(bucket_size: int) -> None:
    with pytest.raises(ValueError, match=rf"bucket_size must be at least 1 element, got {bucket_size}"):
        DistributedDataParallelConfig(bucket_size=bucket_size)


def test_finding_unused_parameters_without_overlap_is_refused() -> None:
    with pytest.raises(ValueError, match="find_unused_parameters has no effect without overlap_grad_reduce"):
        DistributedDataParallelConfig(find_unused_parameters=True)


def averaging_on_gloo() -> str:
    with pytest.raises(ValueError, match="average_in_collective needs NCCL, and the group's backend is") as raised:
        wrap(make_model(), average_in_collective=True)
    return str(raised.value)


def test_average_in_collective_on_gloo_is_refused() -> None:
    assert all("backend is gloo; leave it None" in message for message in run_ranks(averaging_on_gloo, 2))


def test_average_in_collective_needs_nccl_in_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those across instances too."""
    config, model = DistributedDataParallelConfig(average_in_collective=True), nn.Linear(2, 2)
    for backends, refused in (({"gloo", "nccl"}, True), ({"cpu:gloo,cuda:nccl"}, False)):
        monkeypatch.setattr(setup_checks, "backends_of", lambda *_, found=backends: found)
        with pytest.raises(ValueError, match="backend is gloo, nccl; leave it None") if refused else nullcontext():
            setup_checks._check_setup(model, find_owned_params(model), config, [])


@pytest.mark.parametrize(
    ("overlap", "connections", "refused"), [(True, "1", True), (False, "1", False), (True, "8", False)]
)
def test_one_queue_of_a_gpu_is_refused_where_reductions_overlap(
    overlap: bool, connections: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    with FakeTensorMode():  # a GPU that need not be there
        model = nn.Linear(2, 2, device="cuda")
    config, owned = DistributedDataParallelConfig(overlap_grad_reduce=overlap), find_owned_params(model)
    if refused:
        with pytest.raises(ValueError, match=r"CUDA_DEVICE_MAX_CONNECTIONS=1 would queue .*; unset the variable"):
            DistributedDataParallel(model, config)
    else:
        assert setup_checks._check_setup(model, owned, config, []) == torch.device("cuda", 0)


def test_alone_averages_need_no_backend() -> None:
    """A world of one has no collective, in which an average could be taken."""
    ddp, twin = wrap(make_model(), average_in_collective=True), make_model(fuse=False)
    ddp_backward(ddp, make_batches(2))
    plain_backward(twin, make_batches(2))
    assert_same(main_grads(ddp), plain_grads(twin))


# ---- Models that differ between ranks. ----


def other_name(rank: int) -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(3, 3), "b" if rank < 2 else "c": nn.Linear(3, 3)})


def other_shape(rank: int) -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3 + rank // 2)})


def other_dtype(rank: int) -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3, dtype=torch.float64 if rank == 2 else None)})


def other_order(rank: int) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(3, 3) for name in ("ab" if rank < 2 else "ba")})


def fewer_parameters(rank: int) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(3, 3) for name in ("ba" if rank < 2 else "a")})


def other_frozen_shape(rank: int) -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3 + rank // 2)})
    model["b"].requires_grad_(False)
    return model


def other_buffer(rank: int) -> nn.Module:
    model = nn.Linear(3, 3)
    model.register_buffer("b", torch.zeros(3 + rank // 2))
    return model


def frozen_on_one(rank: int) -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight.requires_grad_(rank < 2)
    return model


@pytest.mark.parametrize(
    "build, difference",
    [
        (other_name, r"rank 0 has 'b.bias' torch.float32 \[3\] .* where rank 2 has 'c.bias' torch.float32 \[3\]"),
        (other_shape, r"rank 0 has 'b.bias' torch.float32 \[3\] .* where rank 2 has 'b.bias' torch.float32 \[4\]"),
        (other_dtype, r"rank 0 has 'b.bias' torch.float32 \[3\] .* where rank 2 has 'b.bias' torch.float64 \[3\]"),
        (other_order, r"rank 0 has 'b.bias' .* where rank 2 has 'a.bias'"),
        (fewer_parameters, r"rank 0 has 'b.bias' .* where rank 2 has nothing"),
        (
            other_frozen_shape,
            r"rank 0 has frozen 'b.weight' torch.float32 \[3, 3\] where rank 2 has frozen .* \[4, 3\]",
        ),
        (other_buffer, r"rank 0 has buffer 'b' torch.float32 \[3\] where rank 2 has buffer 'b' torch.float32 \[4\]"),
        (frozen_on_one, r"rank 0 has 'b.weight' .* where rank 2 has 'a.bias'"),
    ],
)
def test_models_that_differ_between_ranks_are_refused_on_every_rank(
    build: Callable[[int], nn.Module], difference: str
) -> None:
    def wrap_mine() -> None:
        with pytest.raises(ValueError, match=rf"the model differs between ranks .*: {difference}"):
            wrap(build(torch.distributed.get_rank()))

    simulate(wrap_mine, 3)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ("end", "bucket 0 of 128 elements torch.float32 in 1 shards where rank 2 has bucket 0 of 256 elements"),
        ("shard_degree", "in 1 shards where rank 2 has .* in 2 shards"),
        ("grad_dtype", "torch.float32 in 1 shards where rank 2 has .* torch.bfloat16"),
    ],
)
def test_plans_that_differ_between_ranks_are_refused_on_every_rank(changed: str, text: str) -> None:
    """As by another version of the library on one host."""

    def compare_mine() -> None:
        ddp = wrap(nn.Linear(2, 2))
        (buffer,), (bucket,) = ddp.plan.buffers, ddp.plan.buckets
        if dist.get_rank() == 2 and changed == "grad_dtype":
            slots = [replace(slot, spec=replace(slot.spec, grad_dtype=torch.bfloat16)) for slot in bucket.slots]
            bucket = replace(bucket, slots=tuple(slots))
        elif dist.get_rank() == 2:
            bucket = replace(bucket, **{changed: 2 * getattr(bucket, changed)})
        plan = GradPlan((replace(buffer, buckets=(bucket,)),))
        with pytest.raises(ValueError, match=rf"the gradient plan differs between ranks .*: rank 0 has .*{text}"):
            setup_checks.check_same_model(plan, [], ddp.grids, ddp.failures)

    simulate(compare_mine, 3)


@pytest.mark.parametrize(
    ("option", "first", "second"),
    [
        ("pad_buckets_for_high_nccl_busbw", False, True),
        ("bucket_size", None, 64),
        ("keep_matrices_whole", (), ("*.weight",)),
        ("copy_engine_param_gather", False, "auto"),
    ],
)
def test_settings_that_differ_between_ranks_are_refused_on_every_rank(option: str, first: Any, second: Any) -> None:
    def wrap_mine() -> None:
        words = f"rank 0 has {option} = {first} where rank 1 has {option} = {second}"
        options = {"use_distributed_optimizer": True, "overlap_param_gather": True}
        with pytest.raises(ValueError, match=rf"the config differs between ranks .*: {re.escape(words)}"):
            wrap(make_model(), **options, **{option: second if dist.get_rank() == 1 else first})

    simulate(wrap_mine, 2)


@pytest.mark.parametrize("dim", ["replicate", "shard"])
def test_settings_that_differ_along_one_dim_of_a_mesh_are_refused_on_every_rank(dim: str) -> None:
    """Along the other dim all ranks have the same."""

    def wrap_mine() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        checks = mesh.get_local_rank(dim) == 1
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, check_for_nan_in_grad=checks)
        with pytest.raises(
            ValueError, match=r"the config differs .* has check_\w+ = False where .* has check_\w+ = True"
        ):
            DistributedDataParallel(make_model(), config, process_group=mesh)

    simulate(wrap_mine, 4)


# ---- The iteration. ----


@pytest.mark.parametrize("overlap", [False, True])
def test_finish_grad_sync_twice_reduces_once(overlap: bool) -> None:
    def twice() -> None:
        ddp = wrap(make_model(), overlap_grad_reduce=overlap)
        ddp_backward(ddp, make_batches(2))
        reduced = [record.view.clone() for record in ddp.records]
        ddp.finish_grad_sync()
        assert all(torch.equal(record.view, grad) for record, grad in zip(ddp.records, reduced, strict=True))

    simulate(twice, 2)


def test_sharded_gradients_are_not_exposed() -> None:
    ddp = wrap(make_model(), use_distributed_optimizer=True)
    ddp_backward(ddp, make_batches(2))
    with pytest.raises(
        RuntimeError, match=r"expose_grads\(\) needs whole gradients.*use maingrad.ddp.DistributedOptim"
    ):
        ddp.expose_grads()


def test_a_stock_step_over_sharded_gradients_is_refused() -> None:
    ddp = wrap(make_model(), use_distributed_optimizer=True)
    ddp_backward(ddp, make_batches(2))
    before = weights(ddp)
    with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) needs whole gradients"):
        torch.optim.SGD(ddp.parameters(), lr=0.1).step()
    assert_same(weights(ddp), before)


@pytest.mark.parametrize("max_norm", [0, -1.0])
def test_clipping_needs_a_positive_norm(max_norm: float) -> None:
    ddp = wrap(make_model())
    ddp_backward(ddp, make_batches(2))
    with pytest.raises(ValueError, match=f"max_norm must be positive, got {max_norm}"):
        clip_grad_norm(ddp, max_norm)
    with pytest.raises(ValueError, match=f"max_grad_norm must be positive, or None for no clipping; got {max_norm}"):
        DistributedOptimizer(ddp, max_grad_norm=max_norm)


def test_the_optimizer_refuses_what_it_cannot_do() -> None:
    with pytest.raises(TypeError, match="DistributedOptimizer needs a DistributedDataParallel model, got Sequential"):
        DistributedOptimizer(make_model())
    ddp = wrap(make_model())
    optimizer = DistributedOptimizer(ddp)
    with pytest.raises(RuntimeError, match=r"optimizer.step\(\) before a backward: there are no"):
        optimizer.step()
    ddp_backward(ddp, make_batches(2))
    with pytest.raises(RuntimeError, match="takes no further group: give the constructor param_groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        DistributedOptimizer(ddp, lr=-1)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("before", [False, True], ids=["hook after wrapping", "hook before wrapping"])
@pytest.mark.parametrize("again", [False, True], ids=["first backward", "second backward"])
@pytest.mark.sampled(8)
def test_an_optimizer_steps_after_the_backward_and_not_in_its_hooks(sharded: bool, before: bool, again: bool) -> None:
    model, twin = make_model(), wrap(make_model())
    optimizers: list[torch.optim.Optimizer] = []
    handles: list[Any] = []

    def step(_: Tensor) -> None:
        for each in optimizers:
            each.step()

    def step_in_hooks() -> None:
        handles.extend(param.register_post_accumulate_grad_hook(step) for param in model.parameters())

    if before:
        step_in_hooks()
    ddp = wrap(model, use_distributed_optimizer=sharded)
    optimizer = DistributedOptimizer(ddp) if sharded else torch.optim.AdamW(ddp.parameters())
    if again:
        loss_of(ddp, make_batches(1)[0]).backward()
    if not before:
        step_in_hooks()
    optimizers.append(optimizer)
    with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) in a hook.*after the backward.*fully_shard"):
        loss_of(ddp, make_batches(1)[0]).backward()
    assert_same(weights(ddp), weights(twin))
    for handle in handles:
        handle.remove()
    optimizer.zero_grad()
    for net, steps in ((ddp, optimizer), (twin, torch.optim.AdamW(twin.parameters()))):
        loss_of(net, make_batches(1)[0]).backward()
        steps.step()
    torch.testing.assert_close(weights(ddp), weights(twin))


def test_a_step_in_a_hook_of_a_backward_past_the_wrapper() -> None:
    ddp = wrap(make_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    before = weights(ddp)
    next(ddp.parameters()).register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) in a hook.*after the backward.*fully_shard"):
        loss_of(ddp.module, make_batches(1)[0]).backward()
    assert_same(weights(ddp), before)


# ---- A fused layer's accumulator. ----


def linear_with(main_grad: Any) -> Linear:
    layer = Linear(FEATURES, 4, fuse_wgrad_accumulation=True)
    if main_grad is not Ellipsis:
        layer.weight.main_grad = main_grad
    return layer


@pytest.mark.parametrize("main_grad", [..., None], ids=["absent", "None"])
def test_a_missing_main_grad_names_the_layer_and_the_remedy(main_grad: Any) -> None:
    layer = linear_with(main_grad)
    with pytest.raises(
        RuntimeError,
        match=r"Linear\(in_features=8, out_features=4\), weight: fuse_.* needs weight.main_grad.*fuse_.*=False",
    ):
        layer(make_batches(1)[0]).sum().backward()


@pytest.mark.parametrize(
    "main_grad, got",
    [
        (torch.zeros(FEATURES, 4), r"got shape \(8, 4\)"),
        (torch.zeros(FEATURES, 4).t(), r"got shape \(4, 8\), stride \(1, 4\)"),
        (torch.zeros(8, FEATURES)[::2], r"got shape \(4, 8\), stride \(16, 1\)"),
        (torch.zeros(4, FEATURES, dtype=torch.bfloat16), r"torch.bfloat16 on cpu"),
        (torch.zeros(4, FEATURES, device="meta"), r"torch.float32 on meta"),
    ],
    ids=["shape", "transposed", "strided", "dtype", "device"],
)
def test_an_unusable_main_grad_is_refused_before_anything_is_written(main_grad: Tensor, got: str) -> None:
    layer = linear_with(main_grad)
    with pytest.raises(
        RuntimeError, match=rf"Linear\(.*\), weight: main_grad must be contiguous, of .* \(4, 8\).*{got}"
    ):
        layer(make_batches(1)[0]).sum().backward()
    assert main_grad.is_meta or not main_grad.any()


def test_the_kernel_refuses_operands_that_do_not_fit() -> None:
    dy, x = torch.ones(5, 4), torch.ones(5, FEATURES)
    for operands in ((dy, x, torch.zeros(FEATURES, 4)), (dy[:3], x, torch.zeros(4, FEATURES)), (dy[0], x, x)):
        with pytest.raises(ValueError, match=r"needs dy \[T, N\], x \[T, K\] and main_grad \[N, K\]; got"):
            wgrad_accumulate(*operands)
    with pytest.raises(TypeError, match=r"dy and x of one dtype; got torch.float32 and torch.bfloat16"):
        wgrad_accumulate(dy, x.bfloat16(), torch.zeros(4, FEATURES))


def test_a_lazy_module_has_no_shapes_yet() -> None:
    with pytest.raises(ValueError, match=r"'0\.weight' has no shape yet: run a forward of the lazy module"):
        wrap(nn.Sequential(nn.LazyLinear(2)))
    with pytest.raises(ValueError, match="'weight' has no shape yet"):
        wrap(nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match=r"'1\.running_mean' has no shape yet"):
        wrap(nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False)))


def test_a_fused_layer_without_a_wrapper_is_named() -> None:
    layer = Linear(4, 2, name="layer", fuse_wgrad_accumulation=True)
    with pytest.raises(RuntimeError, match=r"layer, weight: .* needs weight.main_grad, and nobody provided it"):
        layer(torch.ones(1, 4)).sum().backward()
    ddp = wrap(layer)
    with pytest.raises(RuntimeError, match="cannot go from idle to reduced"):
        ddp.buckets[0].phase = Phase.REDUCED
    y = layer(torch.ones(1, 4))
    ddp.unwrap()
    with pytest.raises(RuntimeError, match="the wrapper that provided it for parameter 'weight' is gone"):
        y.sum().backward()


def test_norms_of_no_wrapper_are_refused() -> None:
    with pytest.raises(ValueError, match="clip_grad_norm: no wrapper was given"):
        clip_grad_norm([], 1.0)


# ---- What ranks may have of their own, and what not. ----


def of_rank(what: str) -> nn.Module:
    rank = dist.get_rank()
    if what == "dtype":
        return nn.Linear(2, 2, dtype=torch.bfloat16 if rank else torch.float32)
    model = nn.Linear(*((3, 2) if rank else (2, 3)), bias=False) if what == "shape" else nn.Linear(2, 2)
    if what == "buffer":
        model.register_buffer("steps", torch.zeros(1 + rank))
    return model


@pytest.mark.parametrize(("what", "text"), [("dtype", "'bias' torch.float32"), ("shape", r"'weight' .*\[3, 2\]")])
def test_parameters_that_only_look_alike_in_their_bucket_are_refused(what: str, text: str) -> None:
    """Their gradients have one dtype and one number of elements."""

    def wrap_it() -> None:
        with pytest.raises(ValueError, match=rf"the model differs between ranks .*{text}"):
            DistributedDataParallel(of_rank(what))

    simulate(wrap_it, 2)


def test_buffers_of_each_rank_stay_without_init_sync() -> None:
    def wrap_it() -> None:
        with pytest.raises(ValueError, match=r"the model differs between ranks .*buffer 'steps'"):
            DistributedDataParallel(of_rank("buffer"))
        model = DistributedDataParallel(of_rank("buffer"), init_sync=False).module
        assert len(model.steps) == 1 + dist.get_rank()

    simulate(wrap_it, 2)


def test_frozen_experts_are_experts() -> None:
    def wrap_it() -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
        for param in model[1].parameters():
            param.allreduce = False
            nn.init.constant_(param, dist.get_rank())
        DistributedDataParallel(model, expert_process_group=WORLD_OF_ONE)
        assert model[1].weight.eq(dist.get_rank()).all()

    simulate(wrap_it, 2)
