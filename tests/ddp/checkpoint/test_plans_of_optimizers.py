"""How an optimizer takes over saved state: memory for moments, groups and their options. Without files and ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maingrad.ddp.checkpoint.files.boxes import Box
from maingrad.ddp.checkpoint.files.manifest import SavedOptimizer, SavedTensor
from maingrad.ddp.checkpoint.optimizer import describe_optimizer, plan_optimizer
from maingrad.ddp.checkpoint.source import HeldSlice, Holding, ModelTensors

MOMENTS = {"state.exp_avg": torch.float32, "state.exp_avg_sq": torch.float32}
STEP = {"step": {"tensor": 3.0, "dtype": "float32"}}


def entry(shape: tuple[int, ...], group: int | None = 0, **more: Any) -> SavedTensor:
    box = Box((0,) * len(shape), shape)
    given = {"dtypes": {"model": torch.float32, **MOMENTS}, "scalars": STEP, **more}
    return SavedTensor(shape, boxes=((0, box),), group=group, **given)


def held(shape: tuple[int, ...], updated: Tensor | None, offset: int, group: int | None = 0, **more: Any) -> HeldSlice:
    numel = torch.Size(shape).numel()
    memory = torch.zeros(numel) if updated is None else updated.detach().view(-1)[offset : offset + numel]
    given: dict[str, Any] = {"start": 0, "dtype": torch.float32, "param": memory, "master": memory, **more}
    return HeldSlice(shape=shape, group=group, updated=updated, offset=offset, state={}, scalars={}, **given)


class Job:
    """AdamW over a flat tensor of "a" and "b", and over "c" in a group of its own. "frozen" is in no group."""

    def __init__(self, **options: Any) -> None:
        self.flat, self.last = nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(2, 2))
        self.optimizer = torch.optim.AdamW(
            [{"params": [self.flat], **options}, {"params": [self.last], "lr": 0.5, "betas": (0.1, 0.2)}], lr=0.25
        )
        self.slices = {
            "a": held((2, 3), self.flat, 0),
            "b": held((4,), self.flat, 6),
            "c": held((2, 2), self.last, 0, 1),
        }
        self.entries = {"a": entry((2, 3)), "b": entry((4,)), "c": entry((2, 2), 1), "frozen": entry((2,), None)}
        self.saved = describe_optimizer(self.optimizer)

    def plan(self) -> Any:
        params = {name: nn.Parameter(torch.zeros(each.shape)) for name, each in self.entries.items()}
        holding = Holding(ModelTensors(params, {}, {}, set(), {}), self.slices, self.optimizer)
        return plan_optimizer(self.saved, self.entries, holding)

    def refused(self, message: str) -> None:
        before = [dict(group) for group in self.optimizer.param_groups]
        with pytest.raises(ValueError, match=message):
            self.plan()
        assert not self.optimizer.state and before == self.optimizer.param_groups


def test_parameters_of_one_tensor_have_their_parts_of_its_moments() -> None:
    job = Job()
    moments, others, install = job.plan()
    assert others == {} and not job.optimizer.state
    assert {name: sorted(each) for name, each in moments.items()} == {name: sorted(MOMENTS) for name in "abc"}
    for count, (name, key) in enumerate((name, key) for name in "abc" for key in MOMENTS):
        moments[name][key].fill_(count + 1)
    install()
    assert {*job.optimizer.state} == {job.flat, job.last}
    flat, last = job.optimizer.state[job.flat], job.optimizer.state[job.last]
    assert flat["exp_avg"].tolist() == [1.0] * 6 + [3.0] * 4 and flat["exp_avg_sq"].tolist() == [2.0] * 6 + [4.0] * 4
    assert last["exp_avg"].tolist() == [[5.0] * 2] * 2 and last["exp_avg_sq"].tolist() == [[6.0] * 2] * 2
    assert flat["step"] == last["step"] == 3.0 and flat["step"] is not last["step"]
    assert {*flat} == {"exp_avg", "exp_avg_sq", "step"}


def test_memory_of_moments_stays_where_shape_and_dtype_are_the_saved_ones() -> None:
    job = Job()
    kept, short, half = torch.ones(10), torch.ones(9), torch.ones(2, 2).bfloat16()
    job.optimizer.state[job.flat] = {"exp_avg": kept, "exp_avg_sq": short, "step": torch.tensor(9.0), "other": 1}
    job.optimizer.state[job.last] = {"exp_avg": half}
    moments, _, install = job.plan()
    assert moments["b"]["state.exp_avg"].data_ptr() == kept[6:].data_ptr()
    install()
    found = job.optimizer.state[job.flat]
    assert found["exp_avg"] is kept and found["exp_avg_sq"].shape == (10,) and found["step"] == 3.0
    assert "other" not in found
    assert job.optimizer.state[job.last]["exp_avg"].dtype is torch.float32
    for name in "ab":
        job.entries[name] = entry(job.entries[name].shape, dtypes={"model": torch.float32, "state.exp_avg": torch.half})
    job.plan()[2]()
    assert {key: value.dtype for key, value in job.optimizer.state[job.flat].items()} == {
        "exp_avg": torch.half,
        "step": torch.float32,
    }


def test_options_come_from_the_saved_group_of_the_same_parameters() -> None:
    job, other = Job(), Job(lr=0.75, weight_decay=0.5)
    job.saved = describe_optimizer(other.optimizer)
    assert job.saved is not None
    job.saved = SavedOptimizer(job.saved.optimizer_class, job.saved.groups[::-1])
    for name, there in (("a", 1), ("b", 1), ("c", 0)):
        job.entries[name] = entry(job.entries[name].shape, there)
    fused = [group["fused"] for group in job.optimizer.param_groups]
    job.plan()[2]()
    first, second = job.optimizer.param_groups
    assert (first["lr"], first["weight_decay"], first["betas"]) == (0.75, 0.5, (0.9, 0.999))
    assert (second["lr"], second["weight_decay"], second["betas"]) == (0.5, 0.01, (0.1, 0.2))
    assert first["params"][0] is job.flat and second["params"][0] is job.last
    assert [group["fused"] for group in job.optimizer.param_groups] == fused


def test_options_keep_the_kind_that_they_have_here() -> None:
    job = Job()
    assert job.saved is not None
    first, second = job.optimizer.param_groups
    first["lr"] = rate = torch.tensor(0.125)
    second["betas"] = [0.3, 0.4]
    told = {"tensor": 0.0625, "dtype": "float32"}
    job.saved = SavedOptimizer("AdamW", (job.saved.groups[0], {**job.saved.groups[1], "lr": told, "new": told}))
    job.plan()[2]()
    assert first["lr"] is rate and rate == 0.25
    assert type(second["lr"]) is float and second["lr"] == 0.0625
    assert second["betas"] == [0.1, 0.2] and first["betas"] == (0.9, 0.999)
    assert isinstance(second["new"], Tensor) and "new" not in first


@pytest.mark.parametrize(
    ("option", "value"),
    [("lr", "fast"), ("lr", [0.1]), ("lr", float("nan")), ("lr", True), ("betas", [0.1]), ("amsgrad", 1.0)],
    ids=str,
)
@pytest.mark.parametrize("group", [0, 1])
def test_options_of_another_kind_are_refused_with_their_group(group: int, option: str, value: Any) -> None:
    job = Job()
    assert job.saved is not None
    groups = [dict(each) for each in job.saved.groups]
    groups[group][option] = value
    job.saved = SavedOptimizer("AdamW", tuple(groups))
    job.refused(rf"option '{option}' of parameter group {group} is .*, and .* here: another kind of value")
    groups[group] = {**(job.saved.groups[1 - group]), "foreach": False}
    job.saved = SavedOptimizer("AdamW", tuple(groups))
    job.refused(rf"option 'foreach' of parameter group {group} is False")


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    job = Job()
    job.saved = None
    job.refused("saved without an optimizer")
    job = Job()
    for name, there in (("a", 1), ("c", None), ("frozen", 0)):
        kept, job.entries[name] = job.entries[name], entry(job.entries[name].shape, there)
        job.refused(r"parameter '\w+' is .* and was .* when the checkpoint was saved")
        job.entries[name] = kept
    for change in ({"scalars": {"step": {"tensor": 4.0, "dtype": "float32"}}}, {"dtypes": {"model": torch.float32}}):
        kept, job.entries["b"] = job.entries["b"], entry((4,), **change)
        job.refused("parameters 'a' and 'b' are updated together here, and the checkpoint has different states")
        job.entries["b"] = kept
    half = {"model": torch.bfloat16, **MOMENTS}
    for dtypes, message in (
        (half, "updates parameter 'c' in float32, and the saved one did in bfloat16"),
        ({**half, "model": torch.float32, "master": torch.float64}, "in float32, and the saved one did in float64"),
    ):
        kept, job.entries["c"] = job.entries["c"], entry((2, 2), 1, dtypes=dtypes)
        job.refused(message)
        job.entries["c"] = entry((2, 2), 1, dtypes={**half, "master": torch.float32})
        job.plan()
        job.entries["c"] = kept
    assert job.saved is not None
    job.saved = SavedOptimizer("AdamW, SGD", job.saved.groups)
    job.refused("has the state of SGD, and this optimizer is AdamW")


def test_without_an_optimizer_there_is_nothing_to_plan() -> None:
    job = Job()
    holding = Holding(ModelTensors({}, {}, {}, set(), {}), {}, None)
    for saved in (job.saved, None):
        moments, others, install = plan_optimizer(saved, job.entries, holding)
        assert moments == others == {} and install() is None
    assert describe_optimizer(None) is None


def test_groups_without_parameters_are_matched_by_their_place_and_class() -> None:
    job = Job()
    job.optimizer.add_param_group({"params": [], "lr": 7.0})
    assert job.saved is not None
    groups = (*job.saved.groups, {**job.saved.groups[0], "lr": 9.0})
    job.saved = SavedOptimizer("AdamW, AdamW, SGD", groups)
    job.plan()[2]()
    assert job.optimizer.param_groups[2]["lr"] == 7.0, "another class's"
    job.saved = SavedOptimizer("AdamW", groups)
    job.plan()[2]()
    assert job.optimizer.param_groups[2]["lr"] == 9.0
    job.optimizer.add_param_group({"params": [], "lr": 8.0})
    job.plan()[2]()
    assert job.optimizer.param_groups[3]["lr"] == 8.0, "no such group was saved"


def test_a_tensor_without_elements_steps_with_the_others_of_its_dtype() -> None:
    job = Job()
    empty, double, frozen = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(0).double()), torch.zeros(0)
    job.optimizer.param_groups[0]["params"] += [empty, double, frozen]
    job.plan()[2]()
    assert {*job.optimizer.state} == {job.flat, job.last, empty}
    found = job.optimizer.state[empty]
    assert found["exp_avg"].shape == (0, 3) and found["step"] == 3.0


@pytest.mark.parametrize("on_device", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_steps_are_counted_where_the_optimizer_counts_them(on_device: dict[str, bool]) -> None:
    """The device of the parameters, here ``meta``, where a kernel reads the count; else the host."""
    job = Job()
    away = nn.Parameter(torch.zeros(2, 2, device="meta"))
    job.slices["c"] = held((2, 2), away, 0, 1, master=torch.zeros(4))
    job.optimizer.param_groups[1]["params"] = [away]
    job.optimizer.param_groups[1].update(on_device)
    job.plan()[2]()
    state = job.optimizer.state[away]
    assert state["step"].device.type == ("meta" if on_device else "cpu")
    assert state["exp_avg"].device.type == "cpu", "where its master lies"
