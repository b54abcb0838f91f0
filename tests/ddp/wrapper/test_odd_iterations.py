"""Iterations that end in an odd way: read twice, given up late, gone on with when nothing can be added any more."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import assert_same, loss_of, main_grads, make_batches, make_model, plain_grads, plain_twin, weights, wrap
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedOptimizer
from maingrad.ddp.contract.record import GradRecord
from maingrad.ddp.wrapper.parts import parts_of
from maingrad.launch import simulate
from maingrad.te_integration import WgradQueue, delayed_wgrad
from maingrad.te_integration.pipeline import ScheduleExecutor, parse_order


@pytest.mark.parametrize("overlap", [False, True])
def test_finish_grad_sync_behind_a_read_changes_nothing(overlap: bool) -> None:
    """A logger has read a norm, and a loop by Megatron-core's names goes on as ever."""
    ddp = wrap(make_model(), overlap_grad_reduce=overlap)
    for batch in make_batches(2):
        loss_of(ddp, batch).backward()
        norms = [param.grad.norm().item() for param in ddp.parameters()]
        for _ in range(2):
            ddp.finish_grad_sync()
        assert [param.grad.norm().item() for param in ddp.parameters()] == norms
        ddp.zero_grad_buffer()
    loss_of(ddp, batch).backward()
    ddp.finish_grad_sync()
    grads = [param.grad.clone() for param in ddp.parameters()]
    ddp.finish_grad_sync()
    assert all(map(torch.equal, grads, [param.grad for param in ddp.parameters()]))


@pytest.mark.parametrize("begun", [False, True])
def test_a_step_in_a_hook_of_an_activation_is_refused_before_any_gradient_has_come(begun: bool) -> None:
    """What the first backward has brought is there; what the second brings is not."""
    ddp, (first, second) = wrap(make_model()), make_batches(2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if begun:
        loss_of(ddp, first).backward()
    before = weights(ddp)
    out = ddp(second)
    out.register_hook(lambda _: optimizer.step())
    with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) in a hook.*after the backward"):
        out.sum().backward()
    assert_same(weights(ddp), before)
    ddp.zero_grad()
    loss_of(ddp, second).backward()
    optimizer.step()


class Ahead:
    """What a forward has written, whose backward has not come."""

    def before_write(self, record: object) -> None:
        """Other writes may come before."""

    def check_all_came(self, record: object) -> None:
        raise RuntimeError("a backward has not come")


@pytest.mark.parametrize("give_up", ["abandon_iteration", "zero_grad", "unwrap"])
def test_what_forwards_have_written_ahead_may_be_given_up(give_up: str) -> None:
    """``LinearCrossEntropy`` writes in the forward, and its backward did not come: no reduction may miss it."""

    ddp = wrap(make_model(), overlap_grad_reduce=True)
    with ddp.no_sync():
        loss_of(ddp, make_batches(1)[0]).backward()
    for record in ddp.records:
        record.ahead = Ahead()
    getattr(ddp, give_up)()
    assert all(record.ahead is None for record in ddp.records)
    assert {bucket.phase.value for bucket in ddp.buckets} == {"idle"}


def test_zero_grad_gives_up_what_waited_for_a_queue_that_is_gone() -> None:
    """The other ranks wait for nothing. A forward of the next microbatch has written ahead."""

    def on_each_rank() -> dict[str, Tensor]:
        ddp = wrap(make_model(), overlap_grad_reduce=True, bucket_size=1)
        queue, delays = WgradQueue(), dist.get_rank() == 0
        first, second = make_batches(2, seed=dist.get_rank())
        with delayed_wgrad(queue) if delays else nullcontext():
            hidden = ddp.module[0](first)
        ddp.module[1:](hidden).sum().backward()
        assert ("accumulating" in {bucket.phase.value for bucket in ddp.buckets}) is delays
        del queue
        for record in ddp.records:
            record.ahead = Ahead()
        ddp.zero_grad()
        assert {bucket.phase.value for bucket in ddp.buckets} == {"idle"}
        loss_of(ddp, second).backward()
        ddp.finish_grad_sync()
        return main_grads(ddp)

    assert_same(*simulate(on_each_rank, 2))


def test_ranks_go_on_together_where_one_has_given_up_what_the_others_have_finished() -> None:
    """Its backward has failed at its first gradient. The others were through with theirs."""

    def fails(grad: Tensor) -> None:
        raise ArithmeticError

    def on_each_rank() -> dict[str, Tensor]:
        ddp = wrap(make_model(), overlap_grad_reduce=True, bucket_size=1)
        for step, batch in enumerate(make_batches(3, seed=dist.get_rank())):
            loss = loss_of(ddp, batch)
            if dist.get_rank() == step:
                loss.register_hook(fails)
                with pytest.raises(ArithmeticError):
                    loss.backward()
                ddp.abandon_iteration()
            else:
                loss.backward()
                ddp.finish_grad_sync()
                ddp.zero_grad()
        loss_of(ddp, make_batches(1, seed=5 + dist.get_rank())[0]).backward()
        ddp.finish_grad_sync()
        return main_grads(ddp)

    first, second = simulate(on_each_rank, 2)
    assert_same(first, second)


def test_gradients_of_a_backward_that_has_failed_are_not_read_as_reduced() -> None:
    """Its first bucket was launched. The others have no memory for this rank's shard."""
    config = {"overlap_grad_reduce": True, "use_distributed_optimizer": True, "release_grads": True}

    def on_each_rank() -> None:
        ddp = wrap(make_model(), bucket_size=1, **config)
        out = ddp.module[0](make_batches(1)[0])
        out.register_hook(lambda _: 1 / 0)
        with pytest.raises(ArithmeticError):
            ddp.module[1:](out).sum().backward()
        assert {bucket.phase.value for bucket in ddp.buckets} == {"reducing", "idle"}
        with pytest.raises(RuntimeError, match=r"reduced_grads\(\) before the reduction"):
            ddp.reduced_grads()
        ddp.abandon_iteration()

    simulate(on_each_rank, 2)


def test_an_iteration_is_not_abandoned_over_the_head_of_a_queue() -> None:
    model = make_model()
    twin = plain_twin(model)
    ddp, queue = wrap(model), WgradQueue()
    first, second = make_batches(2)
    with delayed_wgrad(queue):
        loss = loss_of(ddp, first)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"abandon_iteration\(\) while delayed weight gradients of 2 parameter"):
        ddp.abandon_iteration()
    queue.clear()
    ddp.abandon_iteration()
    loss_of(ddp, second).backward()
    ddp.finish_grad_sync()
    loss_of(twin, second).backward()
    assert_same(main_grads(ddp), plain_grads(twin))


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_added_to_gradients_that_were_divided_by_tokens(overlap: bool) -> None:
    """The sum of both microbatches would be divided by the first one's tokens in part."""
    ddp = wrap(make_model(), calculate_per_token_loss=True, overlap_grad_reduce=overlap)
    first, second = make_batches(2)
    ddp.set_num_tokens(4)
    loss_of(ddp, first).backward()
    before = [param.grad.norm().item() for param in ddp.parameters()]
    for again in (
        lambda: loss_of(ddp, second),
        lambda: ddp.module[0](second).sum(),
    ):  # all, and a layer called directly
        with pytest.raises(RuntimeError, match=r"received a gradient after bucket 0 .* was reduced: run earlier"):
            again().backward()
    ddp.zero_grad()
    ddp.set_num_tokens(4)
    loss_of(ddp, first).backward()
    assert [param.grad.norm().item() for param in ddp.parameters()] == before


@pytest.mark.parametrize("overlap", [False, True])
def test_a_second_backward_before_the_division_by_tokens_is_added(overlap: bool) -> None:
    ddp = wrap(make_model(), calculate_per_token_loss=True, overlap_grad_reduce=overlap)
    twin = plain_twin(ddp.module)
    ddp.set_num_tokens(4)
    for batch in make_batches(2):
        loss_of(ddp, batch).backward()
        loss_of(twin, batch).backward()
    ddp.finish_grad_sync()
    assert_same(main_grads(ddp), {name: grad / 4 for name, grad in plain_grads(twin).items()})


@pytest.mark.parametrize("overlap", [False, True])
def test_a_wrapper_inside_a_recomputed_region_gives_nothing_up(overlap: bool) -> None:
    """Its forward runs again while the backward is under way, which has not failed."""
    ddp = wrap(make_model(), overlap_grad_reduce=overlap)
    twin = plain_twin(ddp.module)
    first, second = make_batches(2)
    with ddp.no_sync():
        loss_of(ddp, first).backward()
    (checkpoint(ddp, second, use_reentrant=False) - 1).square().mean().backward()
    ddp.finish_grad_sync()
    assert ddp.iteration == 0
    for batch in (first, second):
        loss_of(twin, batch).backward()
    assert_same(main_grads(ddp), plain_grads(twin))


@pytest.mark.parametrize("fuse", [False, True])
def test_no_first_write_of_an_iteration_reads_what_lies_there(fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would have to be waited for. Only what the program has written by hand is looked at."""
    monkeypatch.setattr(GradRecord, "_check_zero", lambda record: pytest.fail(f"{record.name} was read"))
    ddp = wrap(make_model(fuse=fuse))
    for batch in make_batches(3):
        loss_of(ddp, batch).backward()
        ddp.finish_grad_sync()
        ddp.zero_grad()


class Looks(torch.optim.Optimizer):
    """Notes the dtypes of the gradients that its step is given."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.seen: set[torch.dtype] = set()

    def step(self, closure: Any = None) -> None:
        self.seen = {param.grad.dtype for group in self.param_groups for param in group["params"]}


@pytest.mark.parametrize("chosen", [torch.float32, None])
def test_a_stock_step_has_the_dtype_that_the_program_has_chosen(chosen: torch.dtype | None) -> None:
    ddp = wrap(make_model(torch.bfloat16))
    optimizer = Looks(ddp.parameters())
    (batch,) = make_batches(1, torch.bfloat16)
    for _ in range(2):
        loss_of(ddp, batch).backward()
        if chosen is not None:
            ddp.expose_grads(chosen)
        optimizer.step()
        assert optimizer.seen == {chosen or torch.bfloat16}
        optimizer.zero_grad()


def test_a_difference_in_the_imaginary_part_parts_replicas() -> None:
    """``check_replicas_every`` compares both halves of complex numbers, and the last elements of a long parameter."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))
            self.long = nn.Parameter(torch.randn(1500))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.turn).abs().sum() + self.long.sum()

    def on_each_rank(change: str) -> None:
        ddp: Any = wrap(Net(), check_replicas_every=1)
        rank = torch.distributed.get_rank()
        with torch.no_grad():
            if change == "turn":
                ddp.module.turn[3] += 1j * rank
            else:
                ddp.module.long[1499] += rank
        ddp(torch.ones(4)).backward()
        with pytest.raises(
            RuntimeError, match=f"replicas have parted: parameter '{change}' has other values on rank 1"
        ):
            ddp.finish_grad_sync()

    for change in ("turn", "long"):
        simulate(on_each_rank, 2, change)


@pytest.mark.parametrize("at", [0, 1])
def test_a_schedule_that_failed_leaves_the_wrapper_as_it_was(at: int) -> None:
    """A loss raises in its backward, in the first microbatch or in the last: a plain iteration reduces all the same."""
    batches = [torch.full((2, 4), float(number)) for number in range(1, 3)]

    def fails(grad: Tensor) -> None:
        raise ArithmeticError("as a debugging hook does")

    def loss_fn(output: Tensor, *, microbatch: int) -> Tensor:
        loss = output.sum()
        if microbatch == at:
            loss.register_hook(fails)
        return loss

    def on_rank() -> list[Tensor]:
        torch.manual_seed(0)
        ddp = wrap(nn.Linear(4, 2), overlap_grad_reduce=True)
        with pytest.raises(ArithmeticError):
            ScheduleExecutor(parse_order([1, -1, 1, -1]), [ddp]).run(batches, loss_fn)
        assert ddp.require_backward_grad_sync
        ddp.abandon_iteration()
        ddp(batches[dist.get_rank()]).sum().backward()
        return [param.grad.clone() for param in ddp.parameters()]

    for weight, bias in simulate(on_rank, 2):
        assert (weight == 3).all()  # the mean over ranks of two rows of 1, and of 2
        assert (bias == 2).all()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_module_that_is_called_without_its_wrapper_begins_an_iteration_too(overlap: bool) -> None:
    """Where every ``.grad`` was set to None: the gradients of before are gone."""
    model = make_model(fuse=False)
    twin = plain_twin(model)
    ddp = wrap(model, overlap_grad_reduce=overlap)
    first, second = make_batches(2)
    loss_of(ddp, first).backward()
    assert all(param.grad.norm() > 0 for param in ddp.parameters())
    for param in ddp.parameters():
        param.grad = None
    loss_of(ddp.module, second).backward()
    loss_of(twin, second).backward()
    assert_same({name: param.grad.clone() for name, param in ddp.module.named_parameters()}, plain_grads(twin))


def test_a_module_that_is_called_without_its_wrapper_adds_to_gradients_that_are_left() -> None:
    model = make_model(fuse=False)
    twin = plain_twin(model)
    ddp = wrap(model)
    first, second = make_batches(2)
    for each, wrapper in ((model, ddp), (twin, twin)):
        loss_of(wrapper, first).backward()
        loss_of(each, second).backward()
    assert_same({name: param.grad.clone() for name, param in model.named_parameters()}, plain_grads(twin))


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("cleared", ["3.weight", "0.bias"])
@pytest.mark.sampled(4)
def test_some_gradients_are_not_discarded_behind_the_wrappers_back(cleared: str, replaced: bool) -> None:
    """What was discarded would come back with the sum."""
    ddp = wrap(make_model(fuse=False))
    first, second = make_batches(2)
    loss_of(ddp, first).backward()
    param = ddp.module.get_parameter(cleared)
    param.grad = torch.ones_like(param) if replaced else None
    with pytest.raises(RuntimeError, match=rf"\.grad of parameter '{cleared}' was set to None or replaced, and others"):
        loss_of(ddp.module, second).backward()


def test_a_fused_layer_that_is_called_without_its_wrapper_may_have_added_already() -> None:
    ddp = wrap(make_model())
    first, second = make_batches(2)
    loss_of(ddp, first).backward()
    for param in ddp.parameters():
        param.grad = None
    with pytest.raises(RuntimeError, match=r"parameter '3.weight' got a gradient after every .grad was set to None"):
        loss_of(ddp.module, second).backward()


def test_gradients_are_discarded_when_all_parts_have_given_the_iteration_up() -> None:
    ddp = wrap(make_model())
    parts, (first, *_, last) = ddp.grad_parts, ddp.module
    for part in (first, last, first):  # the first of two steps has failed
        parts.begin(part, part.parameters())
    assert (parts.num_begun, parts.num_open) == (1, 1)
    parts.begin(last, last.parameters())
    assert (parts.num_begun, parts.num_open) == (2, 2)
    with parts.backward(first, final=False):
        loss_of(ddp, make_batches(1)[0]).backward()
    iteration = parts.iteration
    assert not parts.is_clear
    parts.abandon(first)
    assert not parts.is_clear
    parts.abandon(last)
    assert parts.is_clear
    assert parts.num_open == 0
    assert parts.iteration == iteration + 1


def test_a_part_of_a_changed_model_begins_no_step() -> None:
    """It may run past the wrapper's forward, which would refuse."""
    ddp = wrap(make_model())
    ddp.module[0].weight = nn.Parameter(ddp.module[0].weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"parameter '0\.weight' was replaced after wrapping"):
        ddp.grad_parts.begin(ddp.module[0], ddp.module[0].parameters())


def test_other_parts_do_not_wait_for_one_that_has_failed() -> None:
    ddp = wrap(make_model(), overlap_grad_reduce=True)
    parts, (first, *_, last) = ddp.grad_parts, ddp.module
    for part in (first, last):
        parts.begin(part, ddp.module.parameters())
    parts.leave(first)
    assert (parts.num_begun, parts.num_open) == (2, 1)
    with parts.backward(last, final=True):
        loss_of(ddp, make_batches(1)[0]).backward()
    parts.end(last)
    assert {bucket.phase.value for bucket in ddp.buckets} == {"reducing"}


def test_a_bucket_that_is_ready_and_waits_for_its_turn_may_be_discarded() -> None:
    ddp = wrap(make_model(), overlap_grad_reduce=True, bucket_size=1)
    parts, (first, *_, last) = ddp.grad_parts, ddp.module
    for part in (first, last):
        parts.begin(part, part.parameters())
    with parts.backward(first, final=True):
        loss_of(ddp, make_batches(1)[0]).backward()
    assert "ready" in {bucket.phase.value for bucket in ddp.buckets}
    ddp.zero_grad()
    assert {bucket.phase.value for bucket in ddp.buckets} == {"idle"}


@pytest.mark.parametrize("around", ["no_sync", "a part's backward", "a part's last backward"])
def test_an_error_in_a_block_ends_the_block(around: str) -> None:
    ddp = wrap(make_model(), overlap_grad_reduce=True)
    parts, (first, *_) = ddp.grad_parts, ddp.module
    parts.begin(first, first.parameters())
    block = ddp.no_sync() if around == "no_sync" else parts.backward(first, final="last" in around)
    with pytest.raises(KeyError), block:
        raise KeyError
    parts.leave(first)
    loss_of(ddp, make_batches(1)[0]).backward()
    assert all(param.grad is not None for param in ddp.parameters())


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_are_shown_when_all_parts_have_ended(overlap: bool) -> None:
    ddp = wrap(make_model(), overlap_grad_reduce=overlap)
    twin = plain_twin(ddp.module)
    parts, (first, *_, last) = ddp.grad_parts, ddp.module
    for part in (first, last):
        parts.begin(part, ddp.module.parameters())
    for part, batch in zip((first, last), make_batches(2), strict=True):
        assert all(param.grad is None for param in ddp.parameters())
        with parts.backward(part, final=True):
            loss_of(ddp, batch).backward()
        parts.end(part)
        loss_of(twin, batch).backward()
    assert [param.grad.norm() for param in ddp.parameters()] == [param.grad.norm() for param in twin.parameters()]


def test_the_end_of_a_part_launches_what_its_backward_has_not_reached() -> None:
    ddp = wrap(make_model(), overlap_grad_reduce=True, bucket_size=1)
    parts, net = ddp.grad_parts, ddp.module
    parts.begin(net, net.parameters())
    with parts.backward(net, final=True):
        net[0](make_batches(1)[0]).sum().backward()
    assert {bucket.phase.value for bucket in ddp.buckets} != {"reducing"}
    parts.end(net)
    assert {bucket.phase.value for bucket in ddp.buckets} == {"reducing"}


@pytest.mark.parametrize("inner_is_final", [False, True])
def test_a_parts_backward_inside_anothers_last_one_ends_with_itself(inner_is_final: bool) -> None:
    """What follows still completes the outer part alone."""
    ddp = wrap(make_model(), overlap_grad_reduce=True, bucket_size=1)
    parts, (first, *_, last) = ddp.grad_parts, ddp.module
    for part in (first, last):
        parts.begin(part, part.parameters())
    with parts.backward(first, final=True):
        with parts.backward(last, final=inner_is_final):
            pass
        loss_of(ddp, make_batches(1)[0]).backward()
    assert {entry.owned.name for entry in ddp.bucket_params if entry.record.ready} == {"0.weight", "0.bias"}


def test_parts_launch_nothing_without_overlap_before_the_reduction() -> None:
    ddp = wrap(make_model())
    parts, net = ddp.grad_parts, ddp.module
    parts.begin(net, net.parameters())
    with parts.backward(net, final=True):
        loss_of(ddp, make_batches(1)[0]).backward()
    parts.end(net)
    assert {bucket.phase.value for bucket in ddp.buckets} == {"accumulating"}


def test_a_part_that_runs_past_the_wrapper_launches_tied_weights_in_its_backward() -> None:
    """It may have frozen parameters as well, which no bucket has."""
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8).requires_grad_(False))
    net[1].weight = net[0].weight
    ddp = wrap(net, overlap_grad_reduce=True)
    ddp.grad_parts.begin(net, net.parameters())
    with ddp.grad_parts.backward(net, final=True):
        loss_of(net, make_batches(1)[0]).backward()
    assert {bucket.phase.value for bucket in ddp.buckets} == {"reducing"}
    ddp.grad_parts.end(net)


def test_a_block_of_no_sync_inside_another_ends_with_the_outer_one() -> None:
    """A helper of the program has a block of its own, and is called in one."""
    ddp = wrap(make_model(), overlap_grad_reduce=True)
    with ddp.no_sync():
        with ddp.no_sync():
            pass
        assert not ddp.require_backward_grad_sync
        loss_of(ddp, make_batches(1)[0]).backward()
    assert {bucket.phase.value for bucket in ddp.buckets} == {"accumulating"}
    assert ddp.require_backward_grad_sync


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_behind_a_second_backward_reduces_what_it_has_added(overlap: bool) -> None:
    """The first was read. Each rank has data of its own."""

    def train(reads: bool) -> dict[str, Tensor]:
        ddp = wrap(make_model(), overlap_grad_reduce=overlap, use_distributed_optimizer=True)
        optimizer = DistributedOptimizer(ddp, lr=0.1)
        for index, batch in enumerate(make_batches(2, seed=torch.distributed.get_rank())):
            with nullcontext() if reads or index else ddp.no_sync():
                loss_of(ddp, batch).backward()
            if reads and not index:
                assert all(param.grad.norm() > 0 for param in ddp.parameters())
        optimizer.step()
        return weights(ddp)

    for found, expected in zip(simulate(train, 2, True), simulate(train, 2, False), strict=True):
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name])


def test_parts_under_no_sync_add_and_launch_nothing() -> None:
    """A schedule runs several times for one step, as for microbatches that do not fit at once."""
    ddp = wrap(make_model(), overlap_grad_reduce=True)
    twin, parts, net = plain_twin(ddp.module), ddp.grad_parts, ddp.module

    def run(batch: Tensor) -> None:
        parts.begin(net, net.parameters())
        with parts.backward(net, final=True):
            loss_of(ddp, batch).backward()
        parts.end(net)
        loss_of(twin, batch).backward()

    first, second = make_batches(2)
    with ddp.no_sync():
        run(first)
    assert {bucket.phase.value for bucket in ddp.buckets} == {"accumulating"}
    run(second)
    ddp.finish_grad_sync()
    assert_same(main_grads(ddp), plain_grads(twin))


def test_the_end_of_a_part_refuses_what_no_hook_has_seen() -> None:
    """A gradient that a schedule of others has computed, and put into ``.grad``."""
    ddp = wrap(make_model(), overlap_grad_reduce=True)
    net = ddp.module
    ddp.grad_parts.begin(net, net.parameters())
    net[0].weight.grad = torch.ones_like(net[0].weight)
    with pytest.raises(RuntimeError, match=r"the end of a stage's step: a gradient of parameter '0\.weight' was put"):
        ddp.grad_parts.end(net)


def test_what_a_part_has_queued_is_computed_by_its_schedule() -> None:
    """A hook of the schedule's looks at a gradient. Without parts, a look computes what is queued."""
    ddp, queue = wrap(make_model()), WgradQueue()
    net = ddp.module
    for in_parts in (True, False):
        if in_parts:
            ddp.grad_parts.begin(net, net.parameters())
        with delayed_wgrad(queue):
            loss = loss_of(ddp, make_batches(1)[0])
        loss.backward()
        if in_parts:
            with pytest.raises(RuntimeError, match="a look while delayed weight gradients of 2 parameter"):
                ddp.finish_reduction("a look")
            queue.drain()
            ddp.grad_parts.end(net)
        ddp.finish_reduction("a look")
        ddp.zero_grad()


def test_nothing_is_added_to_gradients_that_were_exposed() -> None:
    """By a backward that passes the wrapper by, which would make them parts again."""
    ddp = wrap(make_model())
    first, second = make_batches(2)
    loss_of(ddp, first).backward()
    ddp.expose_grads()
    before = [param.grad.clone() for param in ddp.parameters()]
    with pytest.raises(RuntimeError, match=r"received a gradient after bucket 0 .* was reduced: run earlier"):
        loss_of(ddp.module, second).backward()
    assert all(map(torch.equal, before, [param.grad for param in ddp.parameters()]))


def test_sums_that_are_under_way_are_not_scaled() -> None:
    ddp = wrap(make_model(), overlap_grad_reduce=True)
    loss_of(ddp, make_batches(1)[0]).backward()
    ddp.start_grad_sync()
    ddp.shown.hide()
    with pytest.raises(RuntimeError, match=r"scale_gradients\(\) while bucket 0 .* is being reduced"):
        ddp.scale_gradients(2.0)


def test_a_gradient_that_no_hook_has_seen_may_be_given_up() -> None:
    """Nothing else has come in this iteration."""
    ddp = wrap(make_model())
    weight = ddp.module[0].weight
    weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match=r"a gradient of parameter '0\.weight' was put into \.grad by hand"):
        ddp.start_grad_sync()
    assert not ddp.is_clear
    ddp.zero_grad()
    assert weight.grad is None
    assert ddp.is_clear


def test_sums_that_were_started_alone_are_shown_as_they_are() -> None:
    """A program that starts the reduction itself waits for it itself."""
    ddp = wrap(make_model(), overlap_grad_reduce=True)
    loss_of(ddp, make_batches(1)[0]).backward()
    ddp.start_grad_sync()
    assert len(ddp.reduced_grads()) == len(ddp.buckets) and not ddp.is_reduced
    ddp.finish_grad_sync()
    assert ddp.is_reduced


def test_a_step_behind_one_whose_parts_have_all_ended_begins_with_its_first_part() -> None:
    """Which may be another one."""
    ddp = wrap(make_model())
    parts, (first, _, norm, last) = ddp.grad_parts, ddp.module
    for part in (first, last):
        parts.begin(part, part.parameters())
    for part in (first, last):
        parts.end(part)
    assert (parts.num_begun, parts.num_open) == (2, 0)
    parts.begin(norm, norm.parameters())
    assert (parts.num_begun, parts.num_open) == (1, 1)


def test_parts_begin_a_new_iteration_where_the_program_has_cleared_grad() -> None:
    """A part may run past the wrapper's forward, which would do so."""
    ddp = wrap(make_model())
    loss_of(ddp, make_batches(1)[0]).backward()
    assert all(param.grad is not None for param in ddp.parameters())
    for param in ddp.parameters():
        param.grad = None
    ddp.grad_parts.begin(ddp.module, ddp.module.parameters())
    assert ddp.is_clear
    assert ddp.grad_parts.iteration == 1


def test_parts_of_modules_around_wrappers_and_inside() -> None:
    first, second = (wrap(make_model()) for _ in range(2))
    around = nn.ModuleList([first, nn.Linear(2, 2), second])
    assert parts_of([around]) == [first.grad_parts, second.grad_parts]
    assert parts_of([second.module[0], second.module, first.module[3]]) == [second.grad_parts, first.grad_parts]
    assert parts_of([nn.ModuleList([first.module[0]])]) == [first.grad_parts], "a layer inside of one, inside of a list"
    assert parts_of([nn.ModuleList([first.module[0], second.module[0]])]) == [first.grad_parts, second.grad_parts]
    assert parts_of([nn.Linear(2, 2)]) == []
    sharded: Any = nn.Linear(2, 2)
    sharded.grad_parts = parts = object()  # as a unit of fully_shard has, whose parameters say nothing
    assert parts_of([nn.Sequential(nn.Tanh(), sharded)]) == [parts]
    assert parts_of([nn.Sequential(sharded, first.module[0], nn.Linear(2, 2))]) == [parts, first.grad_parts]
