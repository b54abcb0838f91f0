"""A check fails on one rank: all ranks raise, and no rank waits in the next collective."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from loops import assert_same, ddp_backward, make_batches, make_model, weights, wrap
from refusals import refusal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from maingrad.ddp.collectives.failure_report import FailureReporter, run_and_gather, run_on_all_ranks
from maingrad.ddp.collectives.rank_grid import make_grid, make_grids
from maingrad.ddp.collectives.step_check import StepCheck
from maingrad.ddp.collectives.streams import capturing
from maingrad.launch import simulate

ZERO1 = DistributedDataParallelConfig(use_distributed_optimizer=True)
OFFENDER = 1


def offends() -> bool:
    return dist.get_rank() == OFFENDER


def outcome(fn: Callable[..., Any], *args: Any) -> str:
    try:
        fn(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def check(errors: list[str], message: str) -> None:
    """All ranks raise the same error, which names the failing rank."""
    assert len(set(errors)) == 1, errors
    assert message in errors[0], errors[0]
    assert f"(on rank {OFFENDER})" in errors[0]


# ---- The state that one rank saved, loaded on every rank. ----


def build(**config: Any) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    ddp = wrap(make_model(), **config)
    return ddp, DistributedOptimizer(ddp, lr=0.1)


def load_rank_0s_everywhere(folder: Path, config: dict[str, Any]) -> tuple[str, str]:
    """The error on all ranks, and the result after the remedy that the error names."""
    ddp, optimizer = build(**config)
    ddp_backward(ddp, make_batches(1))
    optimizer.step()
    ddp.zero_grad_buffer()
    torch.save(optimizer.state_dict(), folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    expected = weights(ddp)
    ddp, optimizer = build(**config)
    before = weights(ddp)
    error = outcome(lambda: optimizer.load_state_dict(torch.load(folder / "rank0.pt")))
    assert_same(weights(ddp), before)
    assert not optimizer.state
    mine = outcome(lambda: optimizer.load_state_dict(torch.load(folder / f"rank{dist.get_rank()}.pt")))
    assert_same(weights(ddp), expected)
    return error, mine


@pytest.mark.parametrize("run", [simulate, run_ranks])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.sampled(2)
def test_the_state_of_rank_0_is_refused_on_all_ranks(run: Any, overlap: bool, tmp_path: Path) -> None:
    found = run(
        load_rank_0s_everywhere, 2, tmp_path, {"use_distributed_optimizer": True, "overlap_param_gather": overlap}
    )
    check([error for error, _ in found], "that of shard 1 of 2, and this rank has shard 2 of 2: each rank loads what")
    assert [remedy for _, remedy in found] == ["nothing was raised"] * 2


def test_where_ranks_hold_the_same_it_is_taken(tmp_path: Path) -> None:
    """Ranks of plain data parallelism, and ranks at the same position of other instances, hold the same."""

    def load_one() -> str:
        ddp, optimizer = build()
        ddp_backward(ddp, make_batches(1))
        optimizer.step()
        states = [optimizer.state_dict()]
        dist.broadcast_object_list(states, 0)
        ddp, optimizer = build()
        return outcome(lambda: optimizer.load_state_dict(states[0]))

    assert simulate(load_one, 2) == ["nothing was raised"] * 2


SPOILT: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "masters": (
        lambda state: state.pop("masters"),
        "this optimizer state is not as it was saved: 'masters'",
    ),
    "groups": (lambda state: state["param_groups"].clear(), "not as it was saved: 'param_groups' is missing, or cut"),
    "all of it": (lambda state: state.clear(), "with another bucket plan, rank or number of ranks"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_state_that_is_spoilt_on_one_rank_is_refused_on_all(what: str) -> None:
    def load() -> str:
        _, optimizer = build(use_distributed_optimizer=True)
        state = optimizer.state_dict()
        if offends():
            SPOILT[what][0](state)
        return outcome(optimizer.load_state_dict, state)

    check(simulate(load, 3), SPOILT[what][1])


# ---- Wrapping. ----


def with_grad(model: nn.Module) -> None:
    model[0].weight.grad = torch.zeros_like(model[0].weight)


def on_meta(model: nn.Module) -> None:
    model.to("meta")


def frozen(model: nn.Module) -> None:
    model.requires_grad_(False)


def wrapped_before(model: nn.Module) -> None:
    own = dist.new_group([OFFENDER], use_local_synchronization=True)
    model.kept = [DistributedDataParallel(model, process_group=own)]  # in a list, so that it is no submodule


MODELS: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "a gradient": (with_grad, "parameter '0.weight' already has a .grad"),
    "meta": (on_meta, "parameter '0.weight' is on the meta device"),
    "frozen": (frozen, "the model has no parameter that requires a gradient"),
    "wrapped": (wrapped_before, "parameter '0.weight' already has a main_grad"),
}


@pytest.mark.parametrize("what", MODELS)
def test_a_model_that_one_rank_cannot_wrap_is_refused_on_all(what: str) -> None:
    def wrap_it() -> str:
        model = make_model()
        if offends():
            MODELS[what][0](model)
        return outcome(DistributedDataParallel, model, ZERO1)

    check(simulate(wrap_it, 3), MODELS[what][1])


def test_a_model_that_one_rank_of_a_mesh_cannot_wrap_is_refused_on_all() -> None:
    """Half of the ranks have the failing one neither in their instance nor among their replicas."""

    def wrap_it() -> str:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = make_model()
        if offends():
            frozen(model)
        return outcome(lambda: DistributedDataParallel(model, ZERO1, process_group=mesh))

    check(simulate(wrap_it, 4), MODELS["frozen"][1])


def test_a_backward_order_that_is_wrong_on_one_rank() -> None:
    def wrap_it() -> str:
        model = make_model()
        names = [name for name, _ in model.named_parameters()]
        order = names[1:] if offends() else names[::-1]
        return outcome(lambda: DistributedDataParallel(model, ZERO1, backward_order=order))

    check(simulate(wrap_it, 3), "backward_order must name each trainable parameter once; missing ['0.weight']")


# ---- Paths. ----

VERBS: dict[str, Callable[[Any, DistributedDataParallel, DistributedOptimizer], Any]] = {
    "save_checkpoint": save_checkpoint,
    "load_checkpoint": load_checkpoint,
}


class Unreadable:
    """A path whose user raises an error of a class that other ranks do not know."""

    def __fspath__(self) -> str:
        raise ArithmeticError("no path today")


def test_an_error_of_any_class_is_a_runtime_error_on_all_ranks(tmp_path: Path) -> None:
    def call() -> str:
        ddp, optimizer = build(use_distributed_optimizer=True)
        return outcome(save_checkpoint, Unreadable() if offends() else tmp_path / "c", ddp, optimizer)

    check(simulate(call, 3), "RuntimeError: no path today")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.sampled(1)
def test_a_path_that_only_the_other_ranks_have(verb: str, tmp_path: Path) -> None:
    """As after a forgotten broadcast."""

    def call() -> str:
        ddp, optimizer = build(use_distributed_optimizer=True)
        return outcome(VERBS[verb], None if offends() else tmp_path / "c", ddp, optimizer)

    check(simulate(call, 3), "TypeError: expected str, bytes or os.PathLike object, not NoneType")
    assert not list(tmp_path.iterdir())


# ---- Which error all ranks raise. ----

RAISED: dict[str, tuple[list[Exception | None], str]] = {
    "one on all": ([ValueError("bad")] * 3, "ValueError: bad"),
    "on some": ([None, TypeError("bad"), TypeError("bad")], "TypeError: bad (on rank 1)"),
    "another on each": ([ValueError("a"), ValueError("b"), ValueError("c")], "ValueError: a (on rank 0)"),
    "of another class on one": ([OSError("bad"), ValueError("bad"), OSError("bad")], "OSError: bad (on rank 0)"),
    "of a narrow class": ([None, None, FileNotFoundError("gone")], "FileNotFoundError: gone (on rank 2)"),
    "of a class that is not sent": ([None, ZeroDivisionError("by 0"), None], "RuntimeError: by 0 (on rank 1)"),
    "without a text": ([None, AssertionError(), None], "RuntimeError: AssertionError (on rank 1)"),
}


@pytest.mark.parametrize("what", RAISED)
def test_all_ranks_raise_the_first_ranks_error(what: str) -> None:
    errors, expected = RAISED[what]

    def on_each_rank() -> str:
        error = errors[dist.get_rank()]

        def action() -> None:
            if error is not None:
                raise type(error)(*error.args)

        with pytest.raises(Exception, match=r".") as raised:
            run_on_all_ranks(action, make_grid(None).axes, None, "a look")
        cause = raised.value.__cause__
        assert type(cause) is type(error), "a rank's own error is the cause"
        return f"{type(raised.value).__name__}: {raised.value}"

    assert simulate(on_each_rank, 3) == [expected] * 3


def test_what_one_rank_cannot_tell_of_its_result_is_raised_on_all() -> None:
    def telling(result: int) -> int:
        if offends():
            raise ValueError("the result has no name")
        return result

    def on_each_rank() -> str:
        return outcome(run_and_gather, dist.get_rank, telling, make_grid(None).axes, None, "a look")

    check(simulate(on_each_rank, 3), "ValueError: the result has no name")


def test_alone_an_error_stays_what_it_is() -> None:
    """Of a class too that other ranks would not know."""
    error = KeyError("mine")

    def action() -> None:
        raise error

    with pytest.raises(KeyError) as raised:
        run_on_all_ranks(action, make_grid(None).axes, None, "a look")
    assert raised.value is error


def test_who_interrupts_a_rank_does_not_raise_an_error_on_the_others() -> None:
    """``KeyboardInterrupt`` ends the process: nothing may take it for a failed action."""

    def action() -> None:
        raise KeyboardInterrupt

    def on_each_rank() -> type[BaseException] | None:
        try:
            run_on_all_ranks(action, make_grid(None).axes, None, "a look")
        except BaseException as error:
            return type(error)
        return None

    assert simulate(on_each_rank, 2) == [KeyboardInterrupt] * 2


# ---- Steps that ranks compare, by what each has counted. ----


def after_one_iteration() -> StepCheck:
    steps = StepCheck(make_grid(None), FailureReporter(), torch.device("cpu"), None)
    steps.start()
    steps.finish()
    steps.next_iteration()
    return steps


def test_a_captured_iteration_is_not_compared() -> None:
    """What its Python has counted, replays do not do again."""

    def on_each_rank() -> str:
        steps = after_one_iteration()
        with capturing():
            for _ in range(dist.get_rank()):
                steps.record_update()
            steps.start()
            steps.finish()
        steps.next_iteration()
        steps.start()
        return refusal(steps.finish)

    assert simulate(on_each_rank, 2) == ["nothing was raised"] * 2


def test_captured_iterations_have_no_number() -> None:
    """Also those that are reduced twice: later ones are compared as before, and named by their own number."""

    def on_each_rank() -> str:
        steps = after_one_iteration()
        with capturing():
            steps.start(again=True)
            steps.go_on()
            steps.start()
            steps.finish()
        steps.next_iteration()
        for _ in range(dist.get_rank()):
            steps.record_update()
        steps.start()
        return refusal(steps.finish)

    for text in simulate(on_each_rank, 2):
        assert "different numbers of optimizer steps before iteration 2: 0 on rank 0, 1 on rank 1" in text


def test_iterations_that_are_reduced_again_have_one_number_and_begin_with_one_reduction() -> None:
    def on_each_rank() -> tuple[str, str]:
        steps = StepCheck(make_grid(None), FailureReporter(), torch.device("cpu"), None)
        for _ in range(2):
            steps.start(again=True)
            steps.finish()
            steps.go_on()
            steps.start()
            steps.finish()
            steps.next_iteration()
        steps.start(again=True)
        steps.finish()
        steps.go_on()
        steps.start(again=dist.get_rank() == 0)
        again = refusal(steps.finish)
        steps.next_iteration()
        steps.start()
        return again, refusal(steps.finish)

    for again, after in simulate(on_each_rank, 2):
        assert "backwards outside no_sync() in iteration 3: at least 3 on rank 0, 2 on rank 1" in again
        assert after == "nothing was raised"


def counted(*programs: Callable[[StepCheck], None]) -> list[str]:
    """What each rank is told of its program, which runs behind a first comparison."""

    def on_each_rank() -> str:
        steps = StepCheck(make_grid(None), FailureReporter(), torch.device("cpu"), None)
        steps.start()
        steps.finish()
        programs[dist.get_rank()](steps)
        steps.start()
        with capturing():
            steps.read()  # in the middle of a capture nothing is said
        return refusal(steps.finish)

    return simulate(on_each_rank, len(programs))


def test_ranks_may_use_different_numbers_of_forwards() -> None:
    """One has a microbatch without a loss; another computes once more after the reduction."""

    def nothing(steps: StepCheck) -> None:
        steps.next_iteration()

    def after_the_reduction(steps: StepCheck) -> None:
        steps.record_forward()
        steps.record_use()
        steps.next_iteration()

    def two_forwards(steps: StepCheck) -> None:
        steps.next_iteration()
        steps.record_forward()
        steps.record_forward()
        steps.record_use()

    def two_uses(steps: StepCheck) -> None:
        two_forwards(steps)
        steps.record_use()

    def updates(steps: StepCheck) -> None:
        steps.record_update()
        steps.next_iteration()

    assert counted(nothing, after_the_reduction) == ["nothing was raised"] * 2
    assert counted(two_forwards, two_uses) == ["nothing was raised"] * 2
    for text in counted(nothing, updates):
        assert "different numbers of optimizer steps before iteration 2: 0 on rank 0, 1 on rank 1" in text


def test_a_forward_behind_an_iteration_that_was_given_up_counts() -> None:
    """A rank that had come to its backward before has not used it."""

    def on_each_rank() -> str:
        steps = StepCheck(make_grid(None), FailureReporter(), torch.device("cpu"), None)
        steps.start()
        steps.finish()
        steps.next_iteration()
        if dist.get_rank() == 1:
            steps.record_forward()
            steps.record_use()
        steps.record_given_up()
        if dist.get_rank() == 0:
            steps.record_forward()
        steps.start()
        return refusal(steps.finish)

    for text in simulate(on_each_rank, 2):
        assert "ranks have skipped different batches before iteration 2" in text
        assert "1 on rank 0, 0 on rank 1" in text


def test_each_comparison_travels_with_the_gathers_of_its_ranks() -> None:
    """At the end of a backward another wrapper's reductions may be under way on one rank alone."""

    def on_each_rank() -> None:
        first = dist.get_rank() % 2
        experts = dist.new_group([first, first + 2], use_local_synchronization=True)
        grids = make_grids(None, experts, has_experts=True, num_instances=1, separate_gather=True)
        steps = StepCheck(grids["dense"], FailureReporter(), torch.device("cpu"), None, grids.values())
        for kind in ("dense", "expert"):
            log = steps.log_of(grids[kind].inner)
            assert log is not None and log.over is grids[kind].gather, kind

    simulate(on_each_rank, 4)
