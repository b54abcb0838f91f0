"""``main_grad`` written by the program itself before the iteration's first backward: one rule for all layers."""

import pytest
import torch
from loops import (
    assert_same,
    ddp_backward,
    main_grads,
    make_batches,
    make_model,
    plain_backward,
    plain_grads,
    plain_twin,
    wrap,
)
from torch import nn

from maingrad.ddp import DistributedOptimizer, add_grad
from maingrad.ddp.contract import main_grad
from maingrad.ddp.contract.main_grad import (
    Demand,
    add_to_main_grad,
    attach,
    attach_lazily,
    demand,
    detach,
    former_name,
    has_main_grad,
    is_foreign,
    is_lazy,
    take_grad_of_backward,
)
from maingrad.ddp.contract.record import GradRecord
from maingrad.launch import simulate

FUSED, PLAIN = "0.weight", "2.weight"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", [FUSED, PLAIN])
def test_a_write_before_the_first_backward_is_refused_under_every_layer(name: str, overlap: bool) -> None:
    def on_rank() -> None:
        ddp = wrap(make_model(), use_distributed_optimizer=True, overlap_grad_reduce=overlap)
        optimizer = DistributedOptimizer(ddp)
        for _ in range(2):  # in the first iteration, and after another
            ddp.module.get_parameter(name).main_grad[-1:].add_(1.0)
            with pytest.raises(RuntimeError, match=rf"main_grad of parameter '{name}' was written .* call maingrad"):
                ddp_backward(ddp, make_batches(2))
            ddp.zero_grad_buffer()
            ddp_backward(ddp, make_batches(2))
            optimizer.step()
            ddp.zero_grad_buffer()

    simulate(on_rank, 2)


@pytest.mark.parametrize("name", [FUSED, PLAIN])
def test_add_grad_in_its_place_counts(name: str) -> None:
    ddp, batches = wrap(make_model()), make_batches(2)
    plain = plain_twin(ddp)
    param = ddp.module.get_parameter(name)
    add_grad(param, torch.ones_like(param))
    ddp_backward(ddp, batches)
    plain_backward(plain, batches)
    plain.get_parameter(name).grad.add_(1.0)
    for other, grad in main_grads(ddp).items():
        torch.testing.assert_close(grad, plain.get_parameter(other).grad)


def test_a_program_may_clear_main_grad_by_hand_and_change_it_between_microbatches_and_after_the_last() -> None:
    ddp, batches = wrap(make_model()), make_batches(2)
    plain = plain_twin(ddp)
    for _ in range(2):
        for param in ddp.parameters():
            param.main_grad.zero_()
        ddp_backward(ddp, batches)
        for param in ddp.parameters():
            param.main_grad.mul_(2.0)
        plain.zero_grad()
        plain_backward(plain, batches)
        assert_same({name: grad / 2 for name, grad in main_grads(ddp).items()}, plain_grads(plain))
        ddp.zero_grad_buffer()


def test_zero_grad_buffer_clears_what_was_written_by_hand() -> None:
    ddp, batches = wrap(make_model()), make_batches(2)
    plain = plain_twin(ddp)
    for param in ddp.parameters():
        param.main_grad.fill_(3.0)
    ddp.zero_grad_buffer()
    ddp_backward(ddp, batches)
    plain_backward(plain, batches)
    assert_same(main_grads(ddp), plain_grads(plain))


class WrittenAhead:
    """What a forward has written, and whose backward does not come."""

    def __init__(self) -> None:
        self.writes: list[str] = []

    def before_write(self, record: GradRecord) -> None:
        self.writes.append(record.name)

    def check_all_came(self, record: GradRecord) -> None:
        raise RuntimeError(f"no backward has come for '{record.name}'")


def test_who_has_written_in_forward_hears_of_later_writes_and_of_the_reduction() -> None:
    ddp = wrap(nn.Linear(2, 1, bias=False))
    (record,), ahead = ddp.records, WrittenAhead()
    record.ahead = ahead
    with ddp.no_sync():
        ddp(torch.ones(1, 2)).sum().backward()
    assert ahead.writes == ["weight"]
    with pytest.raises(RuntimeError, match="no backward has come for 'weight'"):
        ddp.finish_grad_sync()
    assert not record.closed, "nothing was launched"
    ddp.zero_grad()
    ddp(torch.ones(1, 2)).sum().backward()
    assert torch.equal(record.view, torch.ones(1, 2))


@pytest.mark.parametrize("sharded", [True, False])
def test_a_cast_between_wrapping_and_building_the_optimizer_is_refused(sharded: bool) -> None:
    """Its flat buffers are of the dtypes at wrapping, and would have undone the cast."""

    def on_rank() -> None:
        ddp = wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), use_distributed_optimizer=sharded)
        ddp.to(torch.bfloat16)
        with pytest.raises(RuntimeError, match=r"parameter '1.bias' is torch.bfloat16 .* call .to\(\) before wrapping"):
            DistributedOptimizer(ddp)
        assert ddp.module[0].weight.dtype is torch.bfloat16

    simulate(on_rank, 2)


def test_a_parameter_that_is_replaced_before_the_optimizer_is_built_is_refused() -> None:
    ddp = wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    ddp.module[1].weight = nn.Parameter(torch.zeros(4, 8))
    with pytest.raises(RuntimeError, match=r"parameter '1.weight' was replaced after wrapping"):
        DistributedOptimizer(ddp)


# ---- One record: when a write is refused, overwrites, asks for memory, or opens what was closed. ----


def a_record(*, overwrites: bool = False, shared: bool = False) -> GradRecord:
    return GradRecord("weight", torch.zeros(2), first_write_overwrites=overwrites, shared=shared)


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_when_a_value_in_main_grad_is_one_by_hand(overwrites: bool, shared: bool) -> None:
    """A module of others may share a weight that is not ours alone, and tells of its write to the hook only."""

    def written(**how: bool) -> bool:
        record.view.fill_(3.0)
        return record.open_for_write(**how)

    record = a_record(overwrites=overwrites, shared=shared)
    assert record.open_for_write() is overwrites
    assert written() is False, "in a later write of the iteration the value counts"
    record = a_record(overwrites=overwrites, shared=shared)
    assert written(written_already=True) is overwrites
    record = a_record(overwrites=overwrites, shared=shared)
    record.make_room = list  # memory that is there for some time only has had no values
    assert written() is overwrites
    record = a_record(overwrites=overwrites, shared=shared)
    record.close("its bucket was launched")
    with pytest.raises(RuntimeError, match="'weight' received a gradient after its bucket was launched"):
        written()
    record = a_record(overwrites=overwrites, shared=shared)
    if overwrites or not shared:
        with pytest.raises(RuntimeError, match="'weight' was written to by hand"):
            written()
    else:
        assert written() is False


def test_a_write_asks_for_memory_before_the_first_and_where_it_is_closed() -> None:
    record, asked = a_record(overwrites=True), list[bool]()
    record.make_room = lambda: asked.append(record.written)
    assert [record.open_for_write() for _ in range(3)] == [True, False, False]
    assert asked == [False]
    record.close("its bucket was launched")
    with pytest.raises(RuntimeError, match="received a gradient after its bucket was launched"):
        record.open_for_write()
    assert asked == [False, True]


def test_a_closed_record_is_opened_for_a_write_that_is_to_come_only() -> None:
    record, opened = a_record(overwrites=True), list[bool]()

    def reopen() -> None:
        opened.append(True)
        record.closed = None

    record.reopen = reopen
    record.open_for_write()
    assert not opened
    record.close("its bucket was launched")
    with pytest.raises(RuntimeError, match="received a gradient after its bucket was launched"):
        record.open_for_write(written_already=True)
    assert record.open_for_write() is False
    assert opened == [True]


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("released", [False, True])
def test_what_is_zeroed(overwrites: bool, written: bool, released: bool) -> None:
    """Where memory is there for some time only, an unwritten gradient has none."""

    def made() -> GradRecord:
        record = a_record(overwrites=overwrites)
        record.make_room = list if released else None
        if written:
            record.open_for_write()
        record.view.fill_(1.0)
        return record

    unwanted, unused = made(), made()
    unwanted.zero()
    assert unwanted.view.eq(1.0).all() == (released and not written)
    unused.zero_unwritten()
    assert unused.view.eq(0.0).all() == (overwrites and not written)


def test_a_reset_record_is_as_a_new_one() -> None:
    record = a_record(overwrites=True)
    record.open_for_write()
    record.view.fill_(1.0)
    record.ahead, record.ready, record.awaits_delayed = WrittenAhead(), True, True
    record.close("its bucket was launched")
    record.of_weight = "a quantised copy"
    record.reset()
    assert (record.written, record.ready, record.awaits_delayed) == (False, False, False)
    assert (record.ahead, record.closed, record.of_weight) == (None, None, None)
    assert record.open_for_write(), "what the iteration before has left is nothing by hand"
    record.of_weight = "a quantised copy"
    record.close("its bucket was launched")
    assert record.of_weight is None, "the weight may change now"


def test_who_asks_for_a_lazy_main_grad_gets_zeros_or_the_sum_so_far() -> None:
    """Memory that was taken for a first write which overwrites holds anything."""
    param = nn.Parameter(torch.zeros(2))
    record = GradRecord("weight", torch.full((2,), torch.nan), first_write_overwrites=True, shared=False)
    record.make_room = lambda: None
    attach_lazily(param, record)
    assert not hasattr(param, "main_grad")
    assert param.get_main_grad().tolist() == [0, 0]
    param.get_main_grad().add_(3)
    assert param.get_main_grad().tolist() == [3, 3]
    assert has_main_grad(param) and is_lazy(param) and not is_foreign(param)
    detach(param, "layer.weight")
    assert vars(param) == {}
    assert former_name(param) == "layer.weight"
    attach(param, record)
    assert former_name(param) is None, "the wrapper that it has now is not gone"


def test_what_a_foreign_module_that_delays_leaves_in_grad() -> None:
    """A part of a gradient, which its ``backward_dw`` reads; a placeholder and a tied weight's part do not wait."""

    def left(flag: bool, shared: bool, grad: bool = True) -> tuple[bool, bool, list[float]]:
        param, record = nn.Parameter(torch.zeros(2)), a_record(shared=shared)
        attach(param, record)
        record.foreign_delayer = "Theirs"
        param.grad = torch.ones(2) if grad else None
        param.zero_out_wgrad = False
        param.grad_added_to_main_grad = flag
        take_grad_of_backward(param, record)
        (pending,) = record.pending
        assert pending.owner == "Theirs"
        return param.grad is not None, pending.part_in_grad, record.view.tolist()

    assert left(False, False) == (True, True, [0, 0])
    assert left(False, False, grad=False) == (False, False, [0, 0])
    assert left(True, False) == (False, False, [0, 0])
    assert left(False, True) == (False, False, [1, 1])


@pytest.mark.parametrize("overwrites", [False, True])
def test_a_sparse_gradient_is_added_or_copied_as_a_dense_one(overwrites: bool) -> None:
    record = a_record(overwrites=overwrites)
    indices, values = torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0])
    sparse = torch.sparse_coo_tensor(indices, values, (2,), check_invariants=True)
    for times in (1, 2):
        add_to_main_grad(record, sparse)
        assert record.view.tolist() == [0, 5 * times]


def test_a_gradient_with_a_graph_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted, expected in ((True, Demand.ACCUMULATE), (False, Demand.NOTHING)):
        monkeypatch.setattr(main_grad, "will_execute", lambda node, wanted=wanted: wanted)
        with torch.no_grad():
            assert demand(None) is expected
        with torch.enable_grad():
            assert demand(None) is Demand.RETURN
