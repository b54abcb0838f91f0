"""Forms of optimizer state between loads that fail, options that change and tensors that a program writes."""

import copy
import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maingrad
from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from maingrad.ddp.optimizer import steps as steps_module

HYPER: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1}
FP32_MOMENTS: dict[str, Any] = {"state": "compact", "moment_dtype": torch.float32}
COMPACT: dict[str, dict[str, Any]] = {
    "compact": {"state": "compact"},
    "compact, fp32 moments": FP32_MOMENTS,
    "compact, on the host": {"state": "compact", "offload_state": "host"},
    "compact, fp32 moments, on the host": {**FP32_MOMENTS, "offload_state": "host"},
}
FORMS = {**COMPACT, "on the host": {"offload_state": "host"}}


def make(form: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> DistributedOptimizer:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 33)).to(dtype)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=1000)
    return DistributedOptimizer(DistributedDataParallel(module, config), **HYPER, **form)


def trained(optimizer: DistributedOptimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(12, 24, generator=torch.Generator().manual_seed(step))
        optimizer.model(x.to(next(optimizer.model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def seen(optimizer: DistributedOptimizer) -> dict[str, list[Tensor]]:
    """Master, moments and step of each parameter."""
    return {
        part.name: [part.master, *part.state().values(), *part.scalars().values()] for part in optimizer.full_slices()
    }


def differences(one: dict[str, list[Tensor]], other: dict[str, list[Tensor]]) -> list[str]:
    return [n for n in one if not all(torch.equal(a, b) for a, b in zip(one[n], other[n], strict=True))]


@pytest.mark.in_turn
@pytest.mark.parametrize("form", COMPACT)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_load_that_failed_does_not_come_back(tmp_path: Path, form: str, steps: int) -> None:
    optimizer, expected = make(COMPACT[form]), make(COMPACT[form])
    trained(optimizer, range(2))
    trained(expected, range(2))
    other = DistributedOptimizer(
        DistributedDataParallel(nn.Linear(24, 40), DistributedDataParallelConfig(use_distributed_optimizer=True))
    )
    save_checkpoint(tmp_path / "other", other.model, other)
    with pytest.raises(ValueError, match="does not fit this model"):
        load_checkpoint(tmp_path / "other", optimizer.model, optimizer)
    for each in (optimizer, expected):
        trained(each, range(2, 2 + steps))
        with torch.no_grad():
            for master in each.param_groups[0]["params"]:
                master.mul_(0.5)
        each.mark_loaded()
    assert not differences(seen(expected), seen(optimizer))


@pytest.mark.parametrize("form", COMPACT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_full_form_is_a_copy(form: str, dtype: torch.dtype) -> None:
    optimizer = make(COMPACT[form], dtype=dtype)
    trained(optimizer, range(2))
    kept, given = seen(optimizer), optimizer.state_dict()
    before = {name: [tensor.clone() for tensor in tensors] for name, tensors in kept.items()}
    trained(optimizer, range(2, 4))
    after = seen(optimizer)
    assert not differences(before, kept)
    for _ in range(2):  # a dict may be loaded twice
        optimizer.load_state_dict(given)
        trained(optimizer, range(2, 4))
        assert not differences(after, seen(optimizer))


@pytest.mark.parametrize("form", COMPACT)
def test_what_was_loaded_is_kept_by_nobody(form: str) -> None:
    optimizer = make(COMPACT[form])
    trained(optimizer, range(1))
    given = optimizer.state_dict()
    master = weakref.ref(given["masters"][0])
    optimizer.load_state_dict(given)
    del given
    gc.collect()
    assert master() is None


@pytest.mark.parametrize("form", FORMS)
def test_maximize_changes_in_mid_training(form: str) -> None:
    optimizer, expected = make(FORMS[form]), make({})
    for each in (optimizer, expected):
        trained(each, range(3))
        each.param_groups[0]["maximize"] = True
        trained(each, range(3, 6))
    masters = {part.name: part.master for part in expected.full_slices()}
    for part in optimizer.full_slices():
        torch.testing.assert_close(part.master, masters[part.name], atol=0.01, rtol=0.05)


@pytest.mark.parametrize("form", FORMS)
def test_amsgrad_in_mid_training_is_refused(form: str) -> None:
    optimizer = make(FORMS[form])
    trained(optimizer, range(1))
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="amsgrad=True, which a group has by now: set it to False"):
        trained(optimizer, range(1, 2))


@pytest.mark.parametrize("form", FORMS)
def test_the_decay_of_the_other_class_is_refused(form: str) -> None:
    """torch's Adam takes ``decoupled_weight_decay=True``, and is AdamW then."""
    words = r"decoupled_weight_decay=True of Adam: take the class AdamW"
    with pytest.raises(ValueError, match=words):
        make({**FORMS[form], "optimizer_class": torch.optim.Adam, "decoupled_weight_decay": True})
    optimizer = make({**FORMS[form], "optimizer_class": torch.optim.Adam})
    trained(optimizer, range(1))
    optimizer.param_groups[0]["decoupled_weight_decay"] = True
    with pytest.raises(ValueError, match=words):
        trained(optimizer, range(1, 2))


@pytest.mark.parametrize("form", FORMS)
def test_a_master_that_a_program_writes_without_a_word_is_refused_at_the_next_forward(form: str) -> None:
    optimizer = make(FORMS[form])
    trained(optimizer, range(1))
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].mul_(2.0)
    with pytest.raises(RuntimeError, match="mark_loaded"):
        trained(optimizer, range(1, 2))
    with pytest.raises(RuntimeError, match="mark_loaded"):
        optimizer.prepare_replay()  # of a graphed step, whose forward runs no Python


@pytest.mark.in_turn
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", ["load_state_dict", "state assigned"])
def test_replaced_state_is_freed_by_the_next_step(form: str, way: str) -> None:
    optimizer = make(FORMS[form])
    trained(optimizer, range(2))
    given = copy.deepcopy(optimizer.state_dict())
    old = [weakref.ref(state["exp_avg"]) for state in optimizer.state.values()]
    assert len(old) > 1
    if way == "load_state_dict":
        optimizer.load_state_dict(given)
    else:
        optimizer.state = {  # type: ignore[assignment]
            master: {key: value.clone() for key, value in state.items()} for master, state in optimizer.state.items()
        }
    trained(optimizer, range(2, 3))
    del given
    gc.collect()
    assert not [each for each in old if each() is not None]


@pytest.mark.parametrize("captured", [False, True])
def test_tables_stay_where_replays_read_them(monkeypatch: pytest.MonkeyPatch, captured: bool) -> None:
    """A load replaces the state, so that other steps have other tables. A later capture finds those of the first."""
    optimizer = make(FP32_MOMENTS)
    steps: Any = optimizer._steps
    trained(optimizer, range(1))
    monkeypatch.setattr(steps_module, "is_capturing", lambda: captured)
    trained(optimizer, range(1, 2))
    monkeypatch.setattr(steps_module, "is_capturing", lambda: False)
    tables = [weakref.ref(update) for _, update in steps._updates.values()]
    state = {master: {**each} for master, each in steps.inner.state.items()}
    optimizer.load_state_dict(optimizer.state_dict())
    trained(optimizer, range(2, 3))
    gc.collect()
    assert tables and [table() is not None for table in tables] == [captured] * len(tables)
    steps.inner.state.update(state)
    trained(optimizer, range(3, 4))
    assert all((update in [table() for table in tables]) == captured for _, update in steps._updates.values())


def test_a_state_dict_that_fails_leaves_the_state() -> None:
    """A hook of the program may raise, while compact state is shown in its full form."""
    optimizer, expected = make(COMPACT["compact"]), make(COMPACT["compact"])
    trained(optimizer, range(1))
    trained(expected, range(2))
    own = optimizer.state

    def fail(*_: Any) -> None:
        raise OSError("no space")

    handle = optimizer.register_state_dict_post_hook(fail)
    with pytest.raises(OSError, match="no space"):
        optimizer.state_dict()
    handle.remove()
    assert optimizer.state is own
    trained(optimizer, range(1, 2))
    assert not differences(seen(optimizer), seen(expected))


def test_what_a_sharded_model_has_not_is_refused_by_name() -> None:
    model = maingrad.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "zero3")
    with pytest.raises(TypeError, match=r"make_optimizer\(skip_nonfinite=...\) .* leave skip_nonfinite out"):
        maingrad.make_optimizer(model, lr=1e-3, skip_nonfinite=True)
    with pytest.raises(ValueError, match=r"moment_dtype=torch\.float32: full moments are fp32"):
        maingrad.make_optimizer(model, lr=1e-3, moment_dtype=torch.float32)


@pytest.mark.parametrize("form", [{}, COMPACT["compact"]], ids=["full", "compact"])
def test_an_assigned_state_is_taken_before_the_next_step(form: dict[str, Any]) -> None:
    """By whatever reads or writes the state first."""
    optimizer = make(form)
    trained(optimizer, range(1))
    own, keys = optimizer.state, ("exp_avg", "exp_avg_sq")
    for value, read in enumerate((optimizer.state_dict, optimizer.mark_loaded)):
        optimizer.state = {  # type: ignore[assignment]
            master: {**state, **{key: torch.full(master.shape, float(value)) for key in keys}}
            for master, state in own.items()
        }
        read()
        assert optimizer.state is own
        assert all((state[key] == value).all() for state in own.values() for key in keys)
    kept = torch.bfloat16 if form else torch.float32
    assert {state[key].dtype for state in own.values() for key in keys} == {kept}


@pytest.mark.parametrize("form", [{}, COMPACT["compact"]], ids=["full", "compact"])
def test_a_step_takes_an_assigned_state(form: dict[str, Any]) -> None:
    optimizer = make(form)
    trained(optimizer, range(1))
    own = optimizer.state
    optimizer.state = {  # type: ignore[assignment]
        master: {**state, "exp_avg": torch.full(master.shape, 8.0)} for master, state in own.items()
    }
    trained(optimizer, range(1, 2))
    assert optimizer.state is own
    for held in optimizer.slices:
        moment = held.state()["exp_avg"].float()
        assert (moment > 4).all() and (moment < 8).all()


@pytest.mark.parametrize("form", COMPACT)
def test_steps_leave_a_state_dict_that_was_loaded(form: str) -> None:
    """A program may load it again, or into another optimizer."""
    source, optimizer = make({}), make(COMPACT[form], seed=1)
    trained(source, range(2))
    given = copy.deepcopy(source.state_dict())
    optimizer.load_state_dict(given)
    trained(optimizer, range(2, 4))
    expected = source.state_dict()
    for index, state in expected["state"].items():
        assert all(torch.equal(value, given["state"][index][key]) for key, value in state.items())
    assert all(map(torch.equal, given["masters"], expected["masters"]))


def test_a_gradient_in_any_of_the_optimizers_own_tensors_is_refused() -> None:
    optimizer = make({})
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    assert len(masters) > 1
    for master in masters:
        master.grad = torch.zeros_like(master)
        with pytest.raises(
            RuntimeError, match=r"a gradient was put into \.grad of a tensor of optimizer\.param_groups"
        ):
            trained(optimizer, range(1))
        master.grad = None
        optimizer.zero_grad()
    trained(optimizer, range(1))


def test_a_state_of_groups_in_another_order_is_refused() -> None:
    """Their tensors are cut alike, and each has the options of the other."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    config = DistributedDataParallelConfig(bucket_size=1)
    optimizers = []
    for names in (("0.*", "1.*"), ("1.*", "0.*")):
        groups = [{"params": name} for name in names]
        optimizers.append(
            DistributedOptimizer(DistributedDataParallel(copy.deepcopy(module), config), param_groups=groups)
        )
    with pytest.raises(ValueError, match="with other parameter groups or another class"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())


def test_a_state_of_another_class_is_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    adam, adamw = (
        DistributedOptimizer(DistributedDataParallel(copy.deepcopy(module)), optimizer_class=cls)
        for cls in (torch.optim.Adam, torch.optim.AdamW)
    )
    with pytest.raises(ValueError, match="with other parameter groups or another class"):
        adamw.load_state_dict(adam.state_dict())


@pytest.mark.parametrize("place", [None, "host"])
@pytest.mark.parametrize("state", ["full", "compact"])
@pytest.mark.parametrize(
    ("option", "value"), [("amsgrad", True), ("maximize", True), ("decoupled_weight_decay", False)]
)
@pytest.mark.sampled(12)
def test_options_that_a_form_lacks_are_refused_where_a_group_gets_them_later(
    option: str, value: bool, state: Any, place: Any
) -> None:
    """Full state beside its parameters takes them, and leaves one pass for torch's."""
    module = nn.Sequential(nn.Linear(24, 4), nn.Linear(4, 4)).bfloat16()
    optimizer = DistributedOptimizer(
        DistributedDataParallel(module), **HYPER, state=state, offload_state=place, param_groups=[{"params": "*.bias"}]
    )
    optimizer.param_groups[1][option] = value
    if (state, place) == ("full", None):
        trained(optimizer, range(1))
        return
    what = 'state="compact"' if place is None else 'offload_state="host"'
    with pytest.raises(ValueError, match=f"^{what}"):
        trained(optimizer, range(1))


def test_before_a_replay_masters_follow_what_was_written() -> None:
    optimizer = make({})
    trained(optimizer, range(1))
    with torch.no_grad():
        for param in optimizer.model.parameters():
            param.fill_(0.25)
    optimizer.prepare_replay()
    assert all((held.master == 0.25).all() for held in optimizer.slices)
    for param in optimizer.model.parameters():
        param.data.fill_(0.5)  # as a replay does, of which no version tells
    optimizer.record_written(range(len(optimizer.slices)))
    optimizer.prepare_replay()
    assert all((held.master == 0.5).all() for held in optimizer.slices)
    DistributedOptimizer(optimizer.model, **HYPER)
    with pytest.raises(RuntimeError, match="this DistributedOptimizer was replaced"):
        optimizer.prepare_replay()


def test_a_gradient_that_somebody_puts_in_before_a_replay_is_refused_by_name() -> None:
    """The replay would not read it."""
    optimizer = make({})
    trained(optimizer, range(1))
    for name, param in optimizer.model.module.named_parameters():
        param.grad = torch.zeros_like(param)
        with pytest.raises(RuntimeError, match=rf"has put a gradient into \.grad of parameter '{re.escape(name)}'"):
            optimizer.prepare_replay()
        param.grad = None
    optimizer.prepare_replay()


@pytest.mark.parametrize("form", [{}, *COMPACT.values()])
def test_a_save_has_what_a_program_has_written_after_the_step(tmp_path: Path, form: dict[str, Any]) -> None:
    """Masters and remainders are those of before."""
    optimizer, other = make(form), make(form, seed=1)
    trained(optimizer, range(1))
    with torch.no_grad():
        for param in optimizer.model.parameters():
            param.fill_(0.25)
    save_checkpoint(tmp_path / "c", optimizer.model, optimizer)
    load_checkpoint(tmp_path / "c", other.model, other)
    assert all((param == 0.25).all() for param in other.model.parameters())
    assert all((held.master == 0.25).all() for held in other.full_slices())


@pytest.mark.parametrize("state", ["full", "compact"])
def test_fp32_parameters_stay_masters_beside_state_on_the_host(state: Any) -> None:
    """Copies of them would take as much memory again."""
    optimizer = make({"state": state, "offload_state": "host"}, dtype=torch.float32)
    for held in optimizer.slices:
        assert held.master.data_ptr() == held.bucket_param.owned.param.data_ptr()
