"""torch's private names that the wrappers use: where a torch version lacks one, the test says which one."""

import re
import sys
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable as composable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel
from maingrad.ddp import torch_internals as internals
from maingrad.ddp.contract.delay_blocks import current_checkpoint
from maingrad.ddp.torch_internals import distributed
from maingrad.kernels.compat import private_name

TORCH = f"torch {torch.__version__} broke maingrad.ddp.torch_internals"


class WorklessGroup:
    """Does what NCCL's group does with a collective on the current stream: it is launched, and there is no work."""

    def gather(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> None:
        assert not options.asyncOp
        output.copy_(torch.cat([input, input]))

    def scatter(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> None:
        assert not options.asyncOp and options.reduceOp == dist.ReduceOp.MAX
        output.copy_(2 * input[: output.numel()])

    all_gather_single = _allgather_base = gather
    reduce_scatter_single = _reduce_scatter_base = scatter


def test_a_collective_on_the_current_stream_has_something_to_wait_for() -> None:
    """Who waits for it goes on to what comes after: None would have been taken for "nothing was launched"."""
    group: Any = WorklessGroup()
    flat, shard = torch.zeros(4), torch.ones(2)
    assert distributed.start_all_gather(flat, shard, group, on_stream=True).wait()
    assert flat.tolist() == [1, 1, 1, 1]
    work = distributed.start_reduce_scatter(shard, flat, dist.ReduceOp.MAX, group, on_stream=True)
    assert work.wait()
    assert shard.tolist() == [2, 2]


def test_a_backward_has_a_number_and_says_when_it_ends() -> None:
    x = torch.ones(2, requires_grad=True)
    seen: list[int] = []
    y = x.sin()
    y.register_hook(lambda grad: seen.append(internals.current_backward()))
    y.register_hook(lambda grad: internals.call_when_backward_ends(lambda: seen.append(-2)))
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    first, ended, second, ended_again = seen
    assert (ended, ended_again) == (-2, -2), f"{TORCH}: Variable._execution_engine.queue_callback"
    assert len({first, second, internals.NO_BACKWARD}) == 3, f"{TORCH}: _current_graph_task_id"
    assert internals.current_backward() == internals.NO_BACKWARD


def test_the_engine_says_which_nodes_it_comes_to() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    out = x.sin() + y.sin()
    seen: list[bool] = []
    nodes = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in (x, y)]
    out.register_hook(lambda grad: seen.extend(map(internals.will_execute, nodes)))
    out.sum().backward(inputs=[x])
    assert seen == [True, False], f"{TORCH}: _will_engine_execute_node"


def test_the_forward_of_a_function_is_told_from_no_grad() -> None:
    seen: list[bool] = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(internals.is_forward_ad_enabled())
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(internals.is_forward_ad_enabled())
            return grad

    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda param: seen.append(internals.is_forward_ad_enabled()))
    with torch.no_grad():
        assert internals.is_forward_ad_enabled(), f"{TORCH}: _is_fwd_grad_enabled"
        Asks.apply(x)
    Asks.apply(x).sum().backward()
    assert seen == [False, False, True, True], f"{TORCH}: _is_fwd_grad_enabled"


def test_a_profiler_and_a_compiler_are_seen() -> None:
    assert not internals.is_profiling() and not internals.is_tracing()
    with torch.profiler.profile():
        assert internals.is_profiling(), f"{TORCH}: _profiler_enabled"

    seen: list[bool] = []

    def look() -> None:
        seen.append(internals.is_tracing())

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        look()
        reader = threading.Thread(target=look)
        reader.start()
        reader.join()
        return graph.forward

    torch.compile(torch.sin, backend=backend)(torch.ones(2))
    assert seen == [True, False], f"{TORCH}: CompileContext, of this thread alone"


class Marked(Tensor):
    """A class of tensors, as shards of gradients are."""


def test_foreach_forms_take_a_class_that_was_let_in() -> None:
    internals.let_foreach_take(Marked)
    internals.let_foreach_take(Marked)
    assert _foreach_utils._foreach_supported_types.count(Marked) == 1, f"{TORCH}: torch.utils._foreach_utils"
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.full((2,), 3.0).as_subclass(Marked)
    assert nn.utils.clip_grad_norm_([param], 1.0, foreach=True) == pytest.approx(18**0.5), f"{TORCH}: _foreach_utils"


def regions(reentrant: bool) -> list[tuple[Any, bool] | None]:
    seen = []

    def run(x: Tensor) -> Tensor:
        seen.append(internals.checkpointed_region())
        return x.sin().sin()

    checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=reentrant).sum().backward()
    seen.append(internals.checkpointed_region())
    return seen


def test_a_checkpointed_region_and_its_recompute_are_seen() -> None:
    first, again, outside = regions(reentrant=False)
    assert first is not None and again is not None, f"{TORCH}: saved-tensor hooks of torch.utils.checkpoint"
    assert not first[1] and again[1] and first[0] is again[0], f"{TORCH}: frame, target_frame_ref"
    assert outside is None
    assert regions(reentrant=True) == [None, None, None]


def test_hooks_of_others_are_no_region() -> None:
    assert not internals.are_saves_packed()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert internals.checkpointed_region() is None
        assert internals.are_saves_packed()
    assert not internals.are_saves_packed()


def test_hooks_of_a_checkpoint_with_other_names_are_said() -> None:
    def pack(x: Tensor) -> Tensor:
        return x

    pack.__module__ = "torch.utils.checkpoint"
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, pack),
        pytest.raises(RuntimeError, match=re.escape(f"torch {torch.__version__} does not show which checkpointed")),
    ):
        current_checkpoint()


def test_a_backward_says_whether_it_delivers_to_all_leaves() -> None:
    x = torch.ones(2, requires_grad=True)
    seen: list[bool] = []
    y = x.sin()
    y.register_hook(lambda grad: seen.append(internals.delivers_to_all()))
    y.sum().backward(retain_graph=True)
    y.sum().backward(inputs=[x], retain_graph=True)
    torch.autograd.grad(y.sum(), [x])
    assert seen == [True, False, False], f"{TORCH}: _is_checkpoint_valid"


def test_hooks_of_a_tensor_are_seen() -> None:
    x = torch.ones(2, requires_grad=True)
    assert not internals.has_tensor_hooks(x) and not internals.is_hooked(x)
    late = x.register_post_accumulate_grad_hook(lambda param: None)
    assert not internals.has_tensor_hooks(x)
    assert internals.is_hooked(x), f"{TORCH}: _post_accumulate_grad_hooks"
    late.remove()
    early = x.register_hook(lambda grad: None)
    assert internals.has_tensor_hooks(x) and internals.is_hooked(x), f"{TORCH}: _backward_hooks"
    assert internals.hook_keys([torch.ones(2, requires_grad=True), x]) == [early.id]
    late = x.register_post_accumulate_grad_hook(lambda param: None)
    assert internals.hook_keys([x]) == [early.id, late.id]
    late.remove()
    early.remove()
    assert not internals.is_hooked(x) and internals.hook_keys([x]) == []


class MarkedParameter(nn.Parameter):
    """A class of parameters, as masters and shards are."""


def test_a_subclass_shares_memory_and_optimizers_take_it() -> None:
    flat = torch.ones(4)
    param = internals.make_subclass(MarkedParameter, flat, True)
    assert type(param) is MarkedParameter and param.is_leaf and param.requires_grad, f"{TORCH}: _make_subclass"
    assert param.data_ptr() == flat.data_ptr(), f"{TORCH}: _make_subclass"
    assert internals.make_subclass(MarkedParameter, flat.data, True)._version == 0, f"{TORCH}: _make_subclass, data"
    known = torch_optimizer._foreach_supported_types
    before = list(known)
    try:
        internals.let_optimizers_take(MarkedParameter)
        internals.let_optimizers_take(MarkedParameter)
        assert known == [*before, MarkedParameter], f"{TORCH}: torch.optim.optimizer._foreach_supported_types"
    finally:
        known[:] = before


def test_the_gradient_of_a_tensor_is_a_descriptor() -> None:
    x = torch.ones(2, requires_grad=True)
    x.sum().backward()
    assert internals.grad_of_tensor.__get__(x).tolist() == [1, 1], f"{TORCH}: TensorBase.grad"


@pytest.fixture
def default_group() -> Iterator[dist.ProcessGroup]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_a_group_gives_away_its_store_its_backend_and_its_timeout(default_group: dist.ProcessGroup) -> None:
    assert distributed.default_store is not None and distributed.backend_on is not None, TORCH
    distributed.default_store().set("maingrad", "here")
    assert distributed.default_store().get("maingrad") == b"here", f"{TORCH}: _get_default_store"
    cpu = torch.device("cpu")
    assert type(distributed.backend_on(default_group, cpu)).__name__ == "ProcessGroupGloo", f"{TORCH}: _get_backend"
    assert distributed.timeout_on(default_group, cpu) == timedelta(seconds=77), f"{TORCH}: options._timeout"


def test_groups_of_their_members_have_names_of_their_own(default_group: dist.ProcessGroup) -> None:
    """Whatever groups a program makes of the same ranks before and after, which are counted as without them."""
    own = [dist.new_group([0], use_local_synchronization=True) for _ in range(2)]
    made = [distributed.new_group_of_members([0]) for _ in range(3)]
    own += [dist.new_group([0], use_local_synchronization=True) for _ in range(2)]
    assert len({group.group_name for group in (*own, *made)}) == 7, f"{TORCH}: _world.group_count"
    with pytest.raises(TypeError):
        distributed.new_group_of_members([0], no_such_option=True)
    own.append(dist.new_group([0], use_local_synchronization=True))
    assert len({group.group_name for group in (*own, *made)}) == 8


def test_an_all_gather_and_a_reduce_scatter_are_started_below_the_public_functions(
    default_group: dist.ProcessGroup,
) -> None:
    output = torch.zeros(2)
    distributed.start_all_gather(output, torch.ones(2), default_group).wait()
    assert output.tolist() == [1, 1], f"{TORCH}: all_gather_single, _allgather_base"
    distributed.start_reduce_scatter(output, torch.full((2,), 3.0), dist.ReduceOp.SUM, default_group).wait()
    assert output.tolist() == [3, 3], f"{TORCH}: reduce_scatter_single, _reduce_scatter_base"
    both = torch.zeros(2, dtype=torch.complex64)
    distributed.start_all_gather(both, torch.full((2,), 1 + 2j), default_group).wait()
    assert both.tolist() == [1 + 2j] * 2
    distributed.start_reduce_scatter(both, torch.full((2,), 3 + 4j), dist.ReduceOp.SUM, default_group).wait()
    assert both.tolist() == [3 + 4j] * 2


def test_collectives_below_the_public_functions_are_told_how_to_reduce_and_who_waits() -> None:
    told: list[Any] = []

    def note(output: Tensor, input: Tensor, options: Any) -> None:
        told.append((output, input, getattr(options, "reduceOp", None), options.asyncOp))

    assert distributed._GATHER is not None and distributed._SCATTER is not None, TORCH
    group: Any = SimpleNamespace(**{distributed._GATHER: note, distributed._SCATTER: note})
    output, input, op = torch.zeros(2), torch.ones(2), dist.ReduceOp.MAX
    for on_stream in (True, False):
        assert distributed.start_all_gather(output, input, group, on_stream=on_stream).wait()
        assert distributed.start_reduce_scatter(output, input, op, group, on_stream=on_stream).wait()
        for at, reduced in enumerate((None, op)):
            to, of, *options = told[at]
            assert to is output and of is input and options == [reduced, not on_stream]
        told.clear()


class Watched(nn.Linear):
    """Notes which of torch's wrappers runs around its forward."""

    def forward(self, input: Tensor) -> Tensor:
        self.around = distributed.active_torch_ddp()
        return super().forward(input)


def test_torch_ddp_shows_what_it_reduces_and_that_it_runs(default_group: dist.ProcessGroup) -> None:
    inside = Watched(2, 2)
    wrapper = TorchDDP(inside)
    params = distributed.params_of_torch_ddp(wrapper)
    assert params is not None and set(map(id, params)) == set(map(id, inside.parameters())), (
        f"{TORCH}: DDP's parameters"
    )
    assert distributed.active_torch_ddp() is None
    wrapper(torch.ones(1, 2))
    assert inside.around is wrapper, f"{TORCH}: _active_ddp_module"


def test_fsdp2_shows_what_it_gathered_and_what_it_sums(default_group: dist.ProcessGroup) -> None:
    module = nn.Linear(2, 2, bias=False)
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    seen: list[tuple[Any, Tensor]] = []
    module.register_forward_pre_hook(lambda *_: seen.extend(distributed.gathered_by_fsdp2()))
    module.set_requires_gradient_sync(False)
    for _ in range(2):
        module(torch.ones(1, 2)).sum().backward()
    records = {id(record): record for record, weight in seen if weight.shape == (2, 2)}
    assert len(records) == 1, f"{TORCH}: _module_state_mapping, _fsdp_param_groups, fsdp_params, _unsharded_param"
    (record,) = records.values()
    weight = seen[-1][1]
    summed = distributed.accumulated_by_fsdp2(record)
    summed = weight.grad if summed is None else summed
    assert summed is not None and summed.flatten().tolist() == [2, 2, 2, 2], f"{TORCH}: unsharded_accumulated_grad"


def test_other_composable_wrappers_of_torch_gather_nothing() -> None:
    composable.checkpoint(nn.Linear(2, 2))
    list(distributed.gathered_by_fsdp2())


def test_parameters_are_registered_in_a_dict() -> None:
    """TorchScript's table is a dict by name only."""

    class Table:
        def items(self) -> list[tuple[str, None]]:
            return [("bias", None)]

    assert internals.registered_params(SimpleNamespace(_parameters=Table())) == {"bias": None}  # type: ignore[arg-type]


def test_a_weak_method_ends_with_what_it_refers_to() -> None:
    class Owner:
        def add(self, one: Tensor, two: int) -> Tensor:
            return one + two

    owner, tensor = Owner(), torch.ones(1)
    call = internals.weak_method(owner.add, tensor)
    assert call(2) == 3
    del tensor
    assert call(2) is None
    call = internals.weak_method(owner.add)
    assert call(torch.ones(1), two=2) == 3
    del owner
    assert call(torch.ones(1), two=2) is None


@pytest.mark.gpu
def test_a_current_stream_has_an_address() -> None:
    index, stream = torch.cuda.current_device(), torch.cuda.Stream()
    assert internals.current_raw_stream(index) == torch.cuda.current_stream().cuda_stream
    with torch.cuda.stream(stream):
        assert internals.current_raw_stream(index) == stream.cuda_stream, f"{TORCH}: _cuda_getCurrentRawStream"


@pytest.mark.gpu
def test_nccl_has_a_scaled_sum_and_says_whether_gathers_can_leave_the_multiprocessors_free() -> None:
    assert distributed.premultiplied_sum is not None and distributed.premultiplied_sum(0.5) is not None, (
        f"{TORCH}: _make_nccl_premul_sum"
    )
    knows = hasattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO")
    assert (distributed.zero_cta_options() is not None) == knows, f"{TORCH}: NCCL_CTA_POLICY_ZERO, config.cta_policy"


def test_every_checkpointed_region_is_found_the_innermost_first() -> None:
    """Behind the hooks of others, which stay."""
    seen: list[list[tuple[Any, bool]]] = []

    def inner(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            seen.append(internals.checkpointed_regions())
            assert internals.checkpointed_regions() == seen[-1], "hooks are back in their order"
            return (x * 2).sin()

    def outer(x: Tensor) -> Tensor:
        return checkpoint(inner, x, use_reentrant=False).exp()  # type: ignore[no-any-return]

    x = torch.ones(2, requires_grad=True)
    assert internals.checkpointed_regions() == []
    checkpoint(outer, x, use_reentrant=False).sum().backward()
    assert [[recomputes for _, recomputes in regions] for regions in seen] == [[False] * 2, [False, True]]
    (first, around), (again, recomputed) = ([region for region, _ in regions] for regions in seen)
    assert recomputed is around
    assert len({id(first), id(around), id(again)}) == 3
    assert torch.allclose(x.grad, 2 * (2 * x).cos() * (2 * x).sin().exp())


# ---- Where this torch lacks a name, or has it elsewhere. ----


def test_collectives_start_by_the_public_functions_where_the_others_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    group, output, input = object(), torch.zeros(2), torch.ones(2)
    called: list[Any] = []

    def gather(*given: Any, async_op: bool) -> Any:
        called.append((*given, async_op))
        return "work" if async_op else None

    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    monkeypatch.setattr(dist, "reduce_scatter_tensor", gather)
    scatter = (distributed.start_reduce_scatter, dist.ReduceOp.MAX)
    for name, (start, *more) in {
        "_GATHER": (distributed.start_all_gather,),
        "_GatherOptions": (distributed.start_all_gather,),
        "_SCATTER": scatter,
        "_ScatterOptions": scatter,
    }.items():
        with monkeypatch.context() as older:
            older.setattr(distributed, name, None)
            assert start(output, input, *more, group) == "work"  # type: ignore[arg-type]
            assert start(output, input, *more, group, on_stream=True).wait()  # type: ignore[arg-type]
        assert called == [(output, input, *more, group, True), (output, input, *more, group, False)], name
        called.clear()


class WithPolicy:
    """``ProcessGroupNCCL`` of a torch whose gathers can leave the multiprocessors free."""

    NCCL_CTA_POLICY_ZERO = 2

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace()


class WithoutConfig(WithPolicy):
    Options = object  # type: ignore[assignment]


class ThatTakesArguments(WithPolicy):
    class Options:  # type: ignore[assignment]
        def __init__(self, timeout: float) -> None: ...


def test_options_of_nccl_are_those_that_this_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for nccl in (None, SimpleNamespace(Options=WithPolicy.Options), WithoutConfig, ThatTakesArguments):
        monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
        assert distributed.zero_cta_options() is None, nccl
    monkeypatch.setattr(dist, "ProcessGroupNCCL", WithPolicy, raising=False)
    assert distributed.zero_cta_options().config.cta_policy == 2


def test_a_timeout_that_no_backend_says_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    group, device = object(), torch.device("cuda", 1)
    options = {(group, device): SimpleNamespace(_timeout=timedelta(seconds=7))}
    backends: list[Any] = [None, lambda *_: object(), lambda *_: SimpleNamespace(options=object())]
    for backend in backends:
        monkeypatch.setattr(distributed, "backend_on", backend)
        assert distributed.timeout_on(group, device) is None  # type: ignore[arg-type]
    monkeypatch.setattr(distributed, "backend_on", lambda *asked: SimpleNamespace(options=options[asked]))
    assert distributed.timeout_on(group, device) == timedelta(seconds=7)  # type: ignore[arg-type]


class FSDPState:
    """FSDP2's record of a module."""

    def __init__(self, **groups: Any) -> None:
        vars(self).update(groups)


def fsdp2_group(*gathered: Tensor | None) -> SimpleNamespace:
    params = [SimpleNamespace() if each is None else SimpleNamespace(_unsharded_param=each) for each in gathered]
    return SimpleNamespace(fsdp_params=params)


def test_fsdp2_has_one_group_for_a_module_or_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 and later ones. Units without parameters have none, and those that are gone leave a reference."""
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    states = [
        FSDPState(_fsdp_param_group=fsdp2_group(one, None)),
        FSDPState(_fsdp_param_group=None),
        None,
        FSDPState(_fsdp_param_groups=[fsdp2_group(two), fsdp2_group(None, three)]),
    ]
    table = {index: lambda state=state: state for index, state in enumerate(states)}
    registry = SimpleNamespace(_module_state_mapping=table)
    monkeypatch.setitem(sys.modules, "torch.distributed._composable_state", registry)
    found = [*distributed.gathered_by_fsdp2()]
    assert all(record._unsharded_param is weight for record, weight in found)
    assert [weight.numel() for _, weight in found] == [1, 2, 3]
    names = ["_module_state_mapping", "_fsdp_param_groups", "fsdp_params"]
    changes: list[Any] = [{}, {0: lambda: FSDPState()}, {0: lambda: FSDPState(_fsdp_param_groups=[object()])}]
    for name, table in zip(names, changes, strict=True):
        renamed = SimpleNamespace(_module_state_mapping=table) if table else SimpleNamespace()
        monkeypatch.setitem(sys.modules, "torch.distributed._composable_state", renamed)
        with pytest.raises(RuntimeError, match=rf"does not show which weights .* has gathered \(no {name}\)"):
            list(distributed.gathered_by_fsdp2())
    monkeypatch.delitem(sys.modules, "torch.distributed._composable_state")
    assert not list(distributed.gathered_by_fsdp2()), "FSDP2 was never imported"


def test_a_wrapper_of_torchs_that_does_not_say_what_it_reduces() -> None:
    assert distributed.params_of_torch_ddp(SimpleNamespace()) is None  # type: ignore[arg-type]
    assert distributed.accumulated_by_fsdp2(SimpleNamespace()) is None


NEEDED = (
    "current_backward", "call_when_backward_ends", "has_tensor_hooks", "hook_keys", "DisableTorchFunctionSubclass",
    "make_subclass", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten",
)  # fmt: skip


def test_wrappers_are_refused_where_a_name_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of training wrongly."""
    internals.check_wrappers_can_run(internals.delivers_to_all)
    monkeypatch.setattr("maingrad.kernels.compat.requested_names", {})
    with pytest.warns(RuntimeWarning, match=r"has no torch\.gone"):
        gone = private_name("torch.gone", loss="it trains wrongly")
    for name in NEEDED:
        with monkeypatch.context() as other:
            other.setattr(internals, name, gone)
            with pytest.raises(RuntimeError, match=r"has no torch\.gone: it trains wrongly"):
                DistributedDataParallel(nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match=r"has no torch\.gone: it trains wrongly"):
        internals.check_wrappers_can_run(internals.delivers_to_all, gone)


def test_an_engine_that_does_not_say_which_nodes_it_comes_to_is_asked_for_no_more_than_it_says() -> None:
    x = torch.ones(2, requires_grad=True)
    seen: list[bool | str] = []

    def ask(grad: Tensor) -> None:
        try:
            seen.append(internals._executes_all(None))
        except RuntimeError as error:
            seen.append(str(error))

    y = x.sin()
    y.register_hook(ask)
    y.sum().backward(retain_graph=True)
    y.sum().backward(inputs=[x])
    assert seen == [True, "the engine does not say which nodes it executes"]


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_a_node_of_a_watched_function_remembers_a_prehook() -> None:
    internals.watch_prehooks(Doubles)
    x = torch.ones(2, requires_grad=True)
    first, second = Doubles.apply(x), Doubles.apply(x)
    handle = first.grad_fn.register_prehook(lambda grads: (3 * grads[0],))
    assert first.grad_fn.has_prehook and not hasattr(second.grad_fn, "has_prehook")
    (first + second).sum().backward()
    assert x.grad.tolist() == [8, 8]
    handle.remove()
    internals._warn_of_prehooks.cache_clear()
    try:
        for other in (SimpleNamespace(), SimpleNamespace(_backward_cls=object)):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                internals.watch_prehooks(other)
            said = [str(each.message) for each in warned]
            assert len(said) == (not hasattr(other, "_backward_cls")), "once"
            assert all("schedules over torch's own PipelineStage are not refused" in each for each in said)
    finally:
        internals._warn_of_prehooks.cache_clear()


def test_memory_is_named_to_torch_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds without CUDA, and versions before 2.14, lack what would take it."""
    called: list[Any] = []

    def note(*given: Any) -> None:
        called.append(given)

    for end, known in ((None, False), (note, True)):
        monkeypatch.setattr(internals, "_end_allocations", end)
        monkeypatch.setattr(internals, "refuses_storage_reads", known)
        monkeypatch.setattr(internals, "_refuse_storage", end)
        monkeypatch.setattr(internals, "_allow_storage", end)
        internals.end_allocations(torch.device("cuda", 3), (1, 2))
        internals.refuse_storage_reads(77, "it was let go")
        internals.allow_storage_reads(78)
    assert called == [(3, (1, 2)), (77, "it was let go"), (78,)]


def test_one_hook_is_told_from_several() -> None:
    param = nn.Parameter(torch.ones(2))
    assert not internals.has_one_hook(param)
    assert not internals.is_hooked(param)
    param.register_post_accumulate_grad_hook(lambda _: None)
    assert internals.has_one_hook(param)
    assert internals.is_hooked(param)
    handle = param.register_hook(lambda _: None)
    assert not internals.has_one_hook(param)
    handle.remove()
    param.register_post_accumulate_grad_hook(lambda _: None)
    assert not internals.has_one_hook(param)
    other = nn.Parameter(torch.ones(2))
    other.register_hook(lambda _: None)
    assert internals.is_hooked(other)
