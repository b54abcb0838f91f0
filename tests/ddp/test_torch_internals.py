"""torch's private names that the wrappers rest on: where a torch does not have them, the test says which one broke."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import torch_internals as internals
from maingrad.ddp.contract.recompute import current_checkpoint

TORCH = f"torch {torch.__version__} broke maingrad.ddp.torch_internals"


class WorklessGroup:
    """Does what NCCL's group does with a collective on the current stream: it is launched, and there is no work."""

    def gather(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> None:
        assert not options.asyncOp
        output.copy_(torch.cat([input, input]))

    def scatter(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> None:
        assert not options.asyncOp
        output.copy_(2 * input[: output.numel()])

    all_gather_single = _allgather_base = gather
    reduce_scatter_single = _reduce_scatter_base = scatter


def test_a_collective_on_the_current_stream_has_something_to_wait_for() -> None:
    """Who waits for it goes on to what comes after: None would have been taken for "nothing was launched"."""
    group: Any = WorklessGroup()
    flat, shard = torch.zeros(4), torch.ones(2)
    assert internals.start_all_gather(flat, shard, group, on_stream=True).wait()
    assert flat.tolist() == [1, 1, 1, 1]
    work = internals.start_reduce_scatter(shard, flat, torch.distributed.ReduceOp.SUM, group, on_stream=True)
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


def test_a_profiler_and_a_compiler_are_seen() -> None:
    assert not internals.is_profiling() and not internals.is_tracing()
    with torch.profiler.profile():
        assert internals.is_profiling(), f"{TORCH}: _profiler_enabled"

    seen: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.append(internals.is_tracing())
        return graph.forward

    torch.compile(torch.sin, backend=backend)(torch.ones(2))
    assert seen == [True], f"{TORCH}: CompileContext"


class Marked(Tensor):
    """A class of tensors, as shards of gradients are."""


def test_foreach_forms_take_a_class_that_was_let_in() -> None:
    internals.let_foreach_take(Marked)
    internals.let_foreach_take(Marked)
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
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert internals.checkpointed_region() is None


def test_hooks_of_a_checkpoint_with_other_names_are_said() -> None:
    def pack(x: Tensor) -> Tensor:
        return x

    pack.__module__ = "torch.utils.checkpoint"
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, pack),
        pytest.raises(RuntimeError, match=re.escape(f"torch {torch.__version__} does not show which checkpointed")),
    ):
        current_checkpoint()
