"""Checkpoints hold the scales and amaxes of ``DelayedScaling``: a run goes on bit for bit on any ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.te_integration import DelayedScaling, LayerNormMLP, Linear, autocast
from maingrad.te_integration.scaling.amax_history import Roll, select

BF16 = torch.bfloat16
RECIPE = DelayedScaling(amax_history_len=3)
State = dict[str, Tensor]


def build(how: str, seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    module = nn.Sequential(
        LayerNormMLP(16, 24, fuse_wgrad_accumulation=how != "plain", dtype=BF16),
        Linear(16, 16, fuse_wgrad_accumulation=how != "plain", dtype=BF16),
    )
    if how == "plain":
        return module, None
    if how == "zero3":
        fully_shard(module[0])
        model = fully_shard(module)
        return model, torch.optim.SGD(model.parameters(), lr=0.25)
    config = DistributedDataParallelConfig(use_distributed_optimizer=how == "zero1")
    wrapper = DistributedDataParallel(module, config)
    return wrapper, DistributedOptimizer(wrapper, lr=0.25)


def train(model: Any, optimizer: Any, steps: range, recipe: Any = RECIPE, *, divided: bool = False) -> None:
    """Four microbatches an iteration, over all ranks. The loss is a sum, or ``divided`` by a rank's microbatches."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    own = dist.get_rank() if dist.is_initialized() else 0
    for step in steps:
        for number in range(own, 4, ranks):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step * 4 + number)).mul(step + 1).to(BF16)
            with autocast(recipe is not None, recipe=recipe):
                y = model(x)
            loss = y.float().square().sum() / (4 // ranks if divided else 1)
            last = number + ranks >= 4
            if last or optimizer is None:
                loss.backward()
            else:
                with model.no_sync():
                    loss.backward()
        if optimizer is not None:
            model.finish_grad_sync()
            model.zero_grad()  # weights stay: their sums over other ranks would be rounded otherwise


def state_of(model: Any) -> State:
    module = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: value.clone() for name, value in module.state_dict().items() if "fp8_" in name}


def saved(path: Path, how: str, recipe: Any = RECIPE) -> State:
    model, optimizer = build(how)
    train(model, optimizer, range(4), recipe)
    save_checkpoint(path, model)
    train(model, optimizer, range(4, 7), recipe)
    return state_of(model)


def resumed(path: Path, how: str, before: bool) -> tuple[State, State]:
    model, optimizer = build(how, seed=1)
    if before:
        train(model, optimizer, range(20, 22))
    load_checkpoint(path, model)
    loaded = state_of(model)
    train(model, optimizer, range(4, 7))
    return loaded, state_of(model)


@pytest.mark.parametrize(
    ("first", "ranks", "second", "other_ranks"),
    [("zero1", 2, "zero3", 4), ("zero3", 2, "ddp", 1), ("ddp", 1, "zero1", 2), ("plain", 1, "plain", 1)],
)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.sampled(1)
def test_goes_on_bit_for_bit(
    tmp_path: Path, first: str, ranks: int, second: str, other_ranks: int, before: bool
) -> None:
    whole = simulate(saved, ranks, tmp_path / "run", first)[0]
    assert len(whole) == 4
    for loaded, end in simulate(resumed, other_ranks, tmp_path / "run", second, before):
        assert loaded.keys() == end.keys() == whole.keys()
        for name, value in whole.items():
            assert torch.equal(end[name], value), name


def divided(path: Path, resumes: bool) -> State:
    model, optimizer = build("zero1")
    if resumes:
        load_checkpoint(path, model)
    else:
        train(model, optimizer, range(4), divided=True)
        save_checkpoint(path, model)
    train(model, optimizer, range(4, 7), divided=True)
    return state_of(model)


@pytest.mark.in_turn
def test_a_loss_that_other_ranks_divide_otherwise(tmp_path: Path) -> None:
    """Two ranks divide by two microbatches, four by one: gradients, and their scales, are of another size then."""
    whole = simulate(divided, 2, tmp_path / "run", False)[0]
    same, other = (simulate(divided, ranks, tmp_path / "run", True)[0] for ranks in (2, 4))
    for name, value in whole.items():
        assert torch.equal(same[name], value), name
    for name in ("0.fp8_scale", "1.fp8_scale"):
        scales, before = other[name].view(-1, 3), whole[name].view(-1, 3)
        assert torch.equal(scales[:, :2], before[:, :2]), "inputs and weights do not know of the loss"
        torch.testing.assert_close(scales[:, 2], before[:, 2] / 2, rtol=0.1, atol=0)


@pytest.mark.parametrize("how", ["zero1", "zero3"])
@pytest.mark.sampled(1)
def test_a_checkpoint_of_before_the_recipe(tmp_path: Path, how: str) -> None:
    """Loads, and scales begin anew."""
    assert simulate(saved, 2, tmp_path / "run", how, None)[0] == {}
    (fresh, first), _ = simulate(resumed, 2, tmp_path / "run", how, False)
    (anew, second), _ = simulate(resumed, 2, tmp_path / "run", how, True)
    assert fresh == {}
    assert all(value.tolist() == [1.0] * len(value) for name, value in anew.items() if name.endswith("scale"))
    for history in (value for name, value in anew.items() if name.endswith("history")):
        assert set(history[0].tolist()) == {-1.0}
        assert not history[1:].any()
    for name, value in first.items():
        assert torch.equal(second[name], value), name


def test_a_state_of_another_module_is_refused(tmp_path: Path) -> None:
    """By name, before the model has changed."""
    wide = DistributedDataParallel(nn.Sequential(Linear(16, 16, fuse_wgrad_accumulation=True, dtype=BF16)))
    wide.module.register_buffer("fp8_scale", torch.ones(3))
    train(wide, DistributedOptimizer(wide, lr=0.1), range(1))
    save_checkpoint(tmp_path / "run", wide)
    model = nn.Sequential(Linear(16, 16, dtype=BF16))
    with pytest.raises(ValueError, match="'fp8_scale' is missing in the model and a buffer of"):
        load_checkpoint(tmp_path / "run", model)
    assert state_of(model) == {}


# ---- Buffers of one module. ----


def with_history(*rows: float) -> Linear:
    """A layer with such a history of its input's amaxes: row 0, then the oldest first."""
    layer = Linear(16, 16, dtype=BF16)
    layer.register_buffer("fp8_scale", torch.tensor([2.0, 3.0, 4.0]))
    layer.register_buffer("fp8_amax_history", torch.tensor(rows)[:, None] * torch.tensor([1.0, 10.0, 100.0]))
    return layer


@pytest.mark.parametrize(
    ("length", "rows"),
    [(1, [9.0]), (2, [9.0, 3.0]), (3, [9.0, 2.0, 3.0]), (4, [9.0, 1.0, 2.0, 3.0]), (6, [9.0, 0.0, 0.0, 1.0, 2.0, 3.0])],
)
def test_a_history_of_another_length_keeps_the_newest_rows(length: int, rows: list[float]) -> None:
    layer = with_history(9.0, 1.0, 2.0, 3.0)
    before = layer.fp8_amax_history
    layer.make_room(length, torch.device("cpu"))
    assert layer.fp8_amax_history[:, 0].tolist() == rows and layer.fp8_scale.tolist() == [2.0, 3.0, 4.0]
    assert torch.equal(layer.fp8_amax_history[:, 2], 100 * layer.fp8_amax_history[:, 0])
    assert (layer.fp8_amax_history is before) is (length == 4)
    layer.make_room(length, torch.device("meta"))
    assert layer.fp8_amax_history.is_meta and layer.fp8_scale.is_meta, "where the forward runs"


def test_what_a_checkpoint_lacks_begins_anew_in_place() -> None:
    layer = with_history(9.0, 1.0, 2.0)
    kept = layer.fp8_scale, layer.fp8_amax_history
    layer.adopt_stored({})
    assert kept[0].tolist() == [1.0] * 3 and kept[1].tolist() == [[-1.0] * 3, [0.0] * 3, [0.0] * 3]
    assert (layer.fp8_scale, layer.fp8_amax_history) == kept
    stored = {"fp8_scale": torch.full((3,), 5.0), "fp8_amax_history": torch.full((2, 3), 7.0)}
    for each in (layer, Linear(16, 16, dtype=BF16)):
        each.adopt_stored(stored)
        assert torch.equal(each.fp8_scale, stored["fp8_scale"])
        assert torch.equal(each.fp8_amax_history, stored["fp8_amax_history"])
        assert each.fp8_scale is not stored["fp8_scale"]
    untouched = Linear(16, 16, dtype=BF16)
    untouched.adopt_stored({})
    assert not dict(untouched.named_buffers())


def test_which_stored_shapes_are_a_modules() -> None:
    layer, mlp = Linear(16, 16), LayerNormMLP(16, 24)
    for width, fits in ((3, (True, False)), (6, (False, True)), (1, (False, False))):
        found = {"fp8_scale": (width,), "fp8_amax_history": (4, width)}
        assert (layer.fits_stored(found), mlp.fits_stored(found)) == fits
    for scales, history in (
        ((3,), (0, 3)),
        ((3,), (3,)),
        ((3,), (4, 6)),
        ((6,), (4, 3)),
        ((3,), (4, 3, 1)),
        ((), (4, 3)),
    ):
        assert not layer.fits_stored({"fp8_scale": scales, "fp8_amax_history": history}), (scales, history)
    assert not layer.fits_stored({"fp8_scale": (3,)}) and not layer.fits_stored({})


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "float"])
def test_casts_of_a_module_leave_its_scales_in_fp32(cast: str) -> None:
    layer = with_history(9.0, 1.0 + 2.0**-20)
    getattr(layer, cast)()
    assert layer.fp8_scale.dtype is layer.fp8_amax_history.dtype is torch.float32
    assert layer.fp8_amax_history[1, 0] == 1.0 + 2.0**-20
    layer.to("meta")
    assert layer.fp8_scale.is_meta and layer.fp8_amax_history.is_meta


def rolled(*amaxes: float, length: int = 3) -> tuple[Roll, Tensor, Tensor]:
    history = torch.zeros(length, 3)
    history[0] = torch.tensor(amaxes)
    scales = torch.full((3,), 2.0)
    return Roll(DelayedScaling(amax_history_len=length), [history], [scales]), history, scales


def test_a_roll_takes_what_is_known_and_may_be_taken_back() -> None:
    """Elements of gradients have more range than those of the others. -1: there was no amax."""
    for found_inf, undone in (
        (None, True),
        (torch.tensor(1.0), True),
        (torch.tensor(2.0), True),
        (torch.tensor(0.0), False),
    ):
        roll, history, scales = rolled(7.0, -1.0, 14.0)
        assert history.tolist() == [[-1.0, -1.0, -1.0], [0.0, 0.0, 0.0], [7.0, 0.0, 14.0]]
        assert scales.tolist() == [448.0 / 7, 2.0, 57344.0 / 14]
        after = history.clone()
        roll.undo(found_inf)
        expected = torch.tensor([[-1.0] * 3, [0.0] * 3, [0.0] * 3]) if undone else after
        assert torch.equal(history, expected) and (scales[0] == 2.0) == undone


@pytest.mark.parametrize("loaded", ["history", "scales"])
def test_a_roll_is_not_taken_back_from_what_was_loaded_since(loaded: str) -> None:
    roll, history, scales = rolled(7.0, 3.0, 14.0)
    (history if loaded == "history" else scales).fill_(5.0)
    before = history.clone(), scales.clone()
    roll.undo()
    assert torch.equal(history, before[0]) and torch.equal(scales, before[1])


def test_two_rolls_without_a_step_are_taken_back_together() -> None:
    earlier, history, scales = rolled(7.0, 7.0, 7.0)
    history[0] = 14.0
    later = Roll(DelayedScaling(amax_history_len=3), [history], [scales])
    later.go_back_to(earlier)
    other, *_ = rolled(1.0, 1.0, 1.0)
    later.go_back_to(other)
    later.undo()
    assert scales.tolist() == [2.0] * 3 and history.tolist() == [[-1.0] * 3, [0.0] * 3, [0.0] * 3]


def test_rows_of_an_iteration() -> None:
    """One without a graph goes with the others of its forward; alone, with the iteration, if it has trained at all."""

    class Row:
        def __init__(self, forward: int, *, has_graph: bool, trained: bool = False) -> None:
            self.forward, self.has_graph, self.trained = forward, has_graph, trained

        def is_in(self, _: Any) -> bool:
            return self.trained

    def chosen(rows: list[Row], trained: set[int]) -> set[Row]:
        found: Any = select(iter(rows), trained)  # type: ignore[arg-type]
        return set(found)

    kept = [Row(1, has_graph=True, trained=True), Row(1, has_graph=False), Row(3, has_graph=False)]
    others = [Row(2, has_graph=True), Row(2, has_graph=False), Row(1, has_graph=True)]
    assert chosen([*kept, *others], {5}) == set(kept)
    assert not chosen([*others, kept[2]], set())


def test_a_column_without_an_amax_stays_as_it_is() -> None:
    """Of the second product's input, which has an older amax; its gradient's limit is that of gradients."""
    history, scales = torch.zeros(2, 6), torch.full((6,), 2.0)
    history[0] = torch.tensor([7.0, 7.0, 7.0, -1.0, 14.0, 14.0])
    history[1, 3] = 5.0
    Roll(DelayedScaling(amax_history_len=2), [history], [scales])
    assert scales.tolist() == [64.0, 64.0, 57344 / 7, 2.0, 32.0, 4096.0]
    assert history[:, 3].tolist() == [-1.0, 5.0] and history[1, 4] == 14.0


def test_a_state_with_scales_for_a_module_whose_weight_is_computed() -> None:
    """There is no weight that says where scales would be: they are named as what nothing takes."""
    stored, module = Linear(16, 16, dtype=torch.bfloat16), Linear(16, 16, dtype=torch.bfloat16)
    with autocast(recipe=DelayedScaling(amax_history_len=2)):
        stored(torch.ones(2, 16, dtype=torch.bfloat16))
    nn.utils.parametrize.register_parametrization(module, "weight", nn.Identity())
    unexpected = module.load_state_dict(stored.state_dict(), strict=False).unexpected_keys
    assert {"fp8_scale", "fp8_amax_history"} <= set(unexpected)
    assert not dict(module.named_buffers())
