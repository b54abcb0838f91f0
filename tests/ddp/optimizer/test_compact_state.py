"""``DistributedOptimizer(state="compact")``: masters of 32 bits in a bf16 parameter and 16 bits beside it. And state
that lies on the host, ``offload_state="host"``, in either form."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import maingrad
from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, GradScaler
from maingrad.ddp.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from maingrad.ddp.optimizer.host_state import HostState
from maingrad.kernels.optimizer.adamw import AdamUpdate
from maingrad.kernels.optimizer.reference import AdamOptions, UpdateRow, split_master
from maingrad.launch import simulate
from maingrad.launch.safetensors_io import export_safetensors

HYPER: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1}
BF16 = torch.bfloat16


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 5)).to(BF16)


def wrap(model: nn.Module, sharded: bool = True, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(
        model, DistributedDataParallelConfig(use_distributed_optimizer=sharded, bucket_size=1000, **options)
    )


def backward(model: nn.Module, step: int, rank: int = 0, size: int = 12) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(size, 24, generator=generator).to(BF16)
    model(x).float().square().mean().backward()


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def compact(model: DistributedDataParallel, **options: Any) -> DistributedOptimizer:
    return DistributedOptimizer(model, **{**HYPER, "state": "compact", **options})


def masters_of(optimizer: DistributedOptimizer) -> dict[str, Tensor]:
    return {part.name: part.master.clone() for part in optimizer.full_slices()}


# ---- Bits. ----


class Masters:
    """AdamW on fp32 masters of one rank's slices."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self.masters = {held.name: held.param.float() for held in optimizer.slices}
        self.steps = {name: torch.zeros(()) for name in self.masters}
        self.moments = {name: [torch.zeros_like(master) for _ in range(2)] for name, master in self.masters.items()}

    def step(self, optimizer: DistributedOptimizer, grads: dict[str, Tensor], divisor: Tensor | None) -> None:
        rows = [
            UpdateRow(grads[name], *self.moments[name], self.steps[name], master, None, None, None, None)
            for name, master in self.masters.items()
        ]
        group = optimizer.param_groups[0]
        options = AdamOptions(group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        AdamUpdate(rows)([options], divisor=divisor)


COMPACT = {"state": "compact", "moment_dtype": torch.float32}


def trains_as_masters(sharded: bool, clip: float | None, hybrid: int | None, form: dict[str, Any]) -> int:
    config = {"num_distributed_optimizer_instances": hybrid} if hybrid else {}
    ddp = wrap(make_model(), sharded, **config)
    optimizer = DistributedOptimizer(ddp, **HYPER, **form, max_grad_norm=clip)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    reference = Masters(optimizer)
    below = 0
    for step in range(12):
        backward(ddp, step, rank())
        ddp.finish_grad_sync()
        grads = {held.name: held.grad.clone() for held in optimizer.slices}
        if step == 7:  # a program writes a parameter
            with torch.no_grad():
                ddp.module[0].weight.mul_(0.5)
            held = next(held for held in optimizer.slices if held.name.endswith("0.weight"))
            reference.masters[held.name] = held.param.float()
        optimizer.step()
        divisor = None
        if clip is not None:
            assert optimizer.grad_norm is not None
            divisor = (clip / (optimizer.grad_norm + 1e-6)).clamp(max=1.0).reciprocal().float()
        reference.step(optimizer, grads, divisor)
        schedule.step()
        found = masters_of(optimizer)
        for name, master in reference.masters.items():
            assert torch.equal(found[name].view(torch.int32), master.view(torch.int32)), (step, name)
        for held in optimizer.slices:
            master = reference.masters[held.name]
            assert torch.equal(held.param, split_master(master)[0] if "state" in form else master.to(BF16))
            below += int((held.param.float() != reference.masters[held.name]).sum())
        optimizer.zero_grad()
    return below


@pytest.mark.in_turn
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_masters_have_the_bits_of_fp32_masters(ranks: int, sharded: bool, clip: float | None) -> None:
    for below in simulate(trains_as_masters, ranks, sharded, clip, None, COMPACT):
        assert below > 100  # masters have bits that no parameter shows


@pytest.mark.in_turn
def test_hybrid_instances_too() -> None:
    assert all(below > 100 for below in simulate(trains_as_masters, 4, True, None, 2, COMPACT))


@pytest.mark.in_turn
@pytest.mark.parametrize("form", [{}, COMPACT], ids=["full", "compact"])
@pytest.mark.parametrize("sharded", [False, True])
def test_state_on_the_host_has_the_same_bits(form: dict[str, Any], sharded: bool) -> None:
    on_host = {**form, "offload_state": "host"}
    assert all(below > 100 for below in simulate(trains_as_masters, 2, sharded, 0.05, None, on_host))


@pytest.mark.in_turn
@pytest.mark.parametrize("form", [{}, COMPACT], ids=["full", "compact"])
@pytest.mark.parametrize("place", [None, "host"])
def test_state_on_the_host_alone_passes_through_the_device(
    form: dict[str, Any], place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = DistributedOptimizer(wrap(make_model()), **HYPER, **form, offload_state=place)
    passed: list[int] = []
    visits = HostState.visits
    monkeypatch.setattr(HostState, "visits", lambda self, *given: passed.append(1) or visits(self, *given))
    trained(optimizer, range(1))
    assert bool(passed) is (place == "host")


def test_replicas_and_ranks_stay_equal_and_moments_are_bf16() -> None:
    def train(sharded: bool) -> tuple[dict[str, Tensor], set[torch.dtype]]:
        ddp = wrap(make_model(), sharded)
        optimizer = compact(ddp, max_grad_norm=1.0)
        for step in range(6):
            backward(ddp, step)
            optimizer.step()
            optimizer.zero_grad()
        dtypes = {value.dtype for state in optimizer.state.values() for key, value in state.items() if key != "step"}
        return {name: param.detach().clone() for name, param in ddp.module.named_parameters()}, dtypes

    expected, dtypes = simulate(train, 1, True)[0]
    assert dtypes == {BF16, torch.int16}
    for ranks, sharded in [(2, True), (3, True), (2, False)]:
        for weights, _ in simulate(train, ranks, sharded):  # every rank has the same batches
            for name, weight in weights.items():
                assert torch.equal(weight, expected[name]), (ranks, sharded, name)


@pytest.mark.in_turn
def test_training_is_as_good_as_with_full_state() -> None:
    losses = {}
    for state in ("full", "compact"):
        ddp = wrap(make_model())
        optimizer = DistributedOptimizer(ddp, lr=1e-3, state=state)  # type: ignore[arg-type]
        x = torch.randn(64, 24, generator=torch.Generator().manual_seed(0)).to(BF16)
        for _ in range(200):
            loss = (ddp(x).float() - x[:, :5].float()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[state] = loss.item()
    assert losses["compact"] < 1.03 * losses["full"] < 0.5


def test_a_rank_that_has_nothing_of_a_group_steps_with_the_options_of_the_other() -> None:
    def train() -> list[bool]:
        net = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False)).to(BF16)
        ddp = wrap(net, keep_params_whole=True)
        optimizer = compact(ddp, param_groups=[{"params": "0.weight", "lr": 0.0}])
        assert len({held.group for held in optimizer.slices if held.segment is not None}) == 1
        before = {name: param.clone() for name, param in net.named_parameters()}
        backward(ddp, 0, rank())
        optimizer.step()
        return [not torch.equal(param, before[name]) for name, param in net.named_parameters()]

    assert simulate(train, 2) == [[False, True]] * 2


# ---- Skips, writes, loads. ----


def test_a_step_that_is_skipped_changes_nothing() -> None:
    ddp = wrap(make_model())
    optimizer = compact(ddp, skip_nonfinite=True)
    scaler = GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        before = masters_of(optimizer)
        x = torch.full((2, 24), float("nan") if step == 2 else 0.5).to(BF16)
        scaler.scale(ddp(x).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = masters_of(optimizer)
        assert all(torch.equal(before[name], after[name]) for name in before) == (step == 2)
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}
    assert optimizer.num_skipped_steps == 1


def test_a_tensor_of_param_groups_that_a_program_writes_is_its_own_master() -> None:
    """And the others keep their remainders."""
    ddp = wrap(make_model())
    optimizer = compact(ddp, param_groups=[{"params": "*.weight"}])
    backward(ddp, 0)
    optimizer.step()
    optimizer.zero_grad()
    before = masters_of(optimizer)
    assert all((part.master != part.param.float()).any() for part in optimizer.full_slices())
    with torch.no_grad():
        for master in optimizer.param_groups[0]["params"]:
            master.mul_(2.0)
    optimizer.mark_loaded()
    for part in optimizer.full_slices():
        assert torch.equal(part.master, part.param.float() if part.group == 0 else before[part.name])


def test_masters_that_are_loaded_after_the_weights_keep_all_bits_in_the_next_step() -> None:
    """A program loads weights, as other programs save them, and then what it has kept of the optimizer."""
    optimizer = compact(wrap(make_model()), lr=0.0, weight_decay=0.0)
    trained(optimizer, range(1))
    with torch.no_grad():
        for param in optimizer.model.parameters():
            param.zero_()
        kept = {}
        for part in optimizer.full_slices(to_load=True):
            part.master.copy_(torch.linspace(1.0, 2.0, part.master.numel()).view_as(part.master))
            kept[part.name] = part.master.clone()
    optimizer.mark_loaded(from_full=True)
    trained(optimizer, range(1, 2))
    masters = masters_of(optimizer)
    assert all(torch.equal(masters[name], kept[name]) for name in kept)


def trained(optimizer: DistributedOptimizer, steps: range) -> None:
    for step in steps:
        backward(optimizer.model, step)
        optimizer.step()
        optimizer.zero_grad()


def full_state(optimizer: DistributedOptimizer) -> dict[str, list[Tensor]]:
    return {part.name: [part.master, *part.state().values()] for part in optimizer.full_slices()}


def saves(path: Path, state: str, options: dict[str, Any]) -> list[Any]:
    optimizer = DistributedOptimizer(wrap(make_model()), **HYPER, state=state, **options)  # type: ignore[arg-type]
    trained(optimizer, range(4))
    save_checkpoint(path, optimizer.model, optimizer)
    trained(optimizer, range(4, 7))
    return [(part.name, part.start, part.master) for part in optimizer.full_slices()]


def loads(path: Path, state: str, options: dict[str, Any]) -> list[Any]:
    optimizer = DistributedOptimizer(wrap(make_model(1)), **HYPER, state=state, **options)  # type: ignore[arg-type]
    load_checkpoint(path, optimizer.model, optimizer)
    trained(optimizer, range(4, 7))
    return [(part.name, part.start, part.master) for part in optimizer.full_slices()]


def whole(parts: list[list[Any]]) -> dict[str, Tensor]:
    names: dict[str, dict[int, Tensor]] = {}
    for name, start, master in (each for of_rank in parts for each in of_rank):
        if master.numel():
            names.setdefault(name, {})[start] = master
    return {name: torch.cat([found[start] for start in sorted(found)]) for name, found in names.items()}


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1)])
@pytest.mark.parametrize("moments", [torch.float32, BF16])
@pytest.mark.parametrize("place", [None, "host"])
def test_training_goes_on_on_other_ranks_with_the_same_bits(
    tmp_path: Path, before: int, after: int, moments: torch.dtype, place: str | None
) -> None:
    options = {"moment_dtype": moments, "offload_state": place}
    expected = whole(simulate(saves, before, tmp_path / "saved", "compact", options))
    found = whole(simulate(loads, after, tmp_path / "saved", "compact", options))
    for name, master in expected.items():
        assert torch.equal(found[name], master), name


FORMS: dict[str, dict[str, Any]] = {
    "full": {},
    "compact": COMPACT,
    "full on the host": {"offload_state": "host"},
    "compact on the host": {**COMPACT, "offload_state": "host"},
}


def make(form: str, seed: int = 0) -> DistributedOptimizer:
    return DistributedOptimizer(wrap(make_model(seed)), **HYPER, **FORMS[form])


def assert_same_state(one: DistributedOptimizer, other: DistributedOptimizer) -> None:
    expected, found = full_state(one), full_state(other)
    for name, tensors in expected.items():
        assert len(tensors) == len(found[name]) == 3
        assert all(torch.equal(a, b) for a, b in zip(tensors, found[name], strict=True)), name


@pytest.mark.parametrize("saved", FORMS)
@pytest.mark.parametrize("loaded", FORMS)
def test_each_form_reads_what_the_others_have_saved(tmp_path: Path, saved: str, loaded: str) -> None:
    optimizer = make(saved)
    trained(optimizer, range(3))
    save_checkpoint(tmp_path / "saved", optimizer.model, optimizer)
    other, from_dict = make(loaded, 1), make(loaded, 2)
    load_checkpoint(tmp_path / "saved", other.model, other)
    from_dict.load_state_dict(optimizer.state_dict())
    assert_same_state(optimizer, other)
    assert_same_state(optimizer, from_dict)
    trained(other, range(3, 5))
    trained(from_dict, range(3, 5))
    assert_same_state(other, from_dict)


def test_a_file_of_weights_has_the_masters(tmp_path: Path) -> None:
    optimizer = compact(wrap(make_model()))
    trained(optimizer, range(3))
    save_checkpoint(tmp_path / "saved", optimizer.model, optimizer)
    export_safetensors(tmp_path / "saved", tmp_path / "weights.safetensors", dtype=torch.float32)
    found = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(found[name].flatten(), master) for name, master in masters_of(optimizer).items())


def test_a_write_to_a_parameter_is_taken_once() -> None:
    """The next steps keep the remainders that they have made since."""
    optimizer = compact(wrap(make_model()), lr=1e-6)
    with torch.no_grad():
        for param in optimizer.model.parameters():
            param.mul_(2)
    assert optimizer.written_since()
    trained(optimizer, range(1))
    first = masters_of(optimizer)
    assert not optimizer.written_since()
    optimizer.refresh_masters()
    assert all(torch.equal(first[name], master) for name, master in masters_of(optimizer).items())
    assert any((master != part.param).any() for part in optimizer.slices for master in [first[part.name]])


def test_loaded_weights_are_masters() -> None:
    optimizer = compact(wrap(make_model()))
    trained(optimizer, range(2))
    optimizer.model.module.load_state_dict(make_model(3).state_dict())
    backward(optimizer.model, 2)
    optimizer.model.scale_gradients(0.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    given = dict(make_model(3).named_parameters())
    assert all(
        torch.equal(part.master, given[part.name.removeprefix("module.")].flatten()) for part in optimizer.full_slices()
    )


# ---- Bytes, and what is refused. ----


def test_state_takes_six_bytes_a_parameter() -> None:
    optimizer = compact(wrap(make_model()))
    trained(optimizer, range(1))
    numel = sum(segment.master.numel() for segment in optimizer.segments)
    state = [value for values in optimizer.state.values() for key, value in values.items() if key != "step"]
    assert sum(value.nbytes for value in state) == 6 * numel
    for flat in optimizer._flats:
        assert flat.master.data_ptr() == flat.owned_params.data_ptr()


@pytest.mark.parametrize("state", ["full", "compact"])
def test_what_reads_state_on_the_host_waits_for_the_last_steps_copies(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a replay of a captured step is prepared for."""
    ddp = wrap(make_model())
    optimizer = compact(ddp, state=state, offload_state="host")
    trained(optimizer, range(1))
    told: list[str] = []
    for name in ("wait", "prepare_replay"):
        monkeypatch.setattr(HostState, name, lambda _, name=name: told.append(name))
    saved = copy.deepcopy(optimizer.state_dict())

    def write_a_parameter() -> None:
        with torch.no_grad():
            ddp.module[0].weight.mul_(2)
        optimizer.refresh_masters()

    for call, expected in (
        (optimizer.state_dict, "wait"),
        (optimizer.full_slices, "wait"),
        (write_a_parameter, "wait"),
        (optimizer.mark_loaded, "wait"),
        (lambda: optimizer._steps.load(saved["masters"], {}), "wait"),
        (optimizer.prepare_replay, "prepare_replay"),
    ):
        told.clear()
        call()
        assert expected in told


class SubclassOfAdamW(torch.optim.AdamW):
    """May do anything."""

    elementwise = True


SGD_OF_BIASES: dict[str, Any] = {"params": "*.bias", "optimizer": torch.optim.SGD}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"state": "small"}, "compact"),
        ({"state": "compact", "moment_dtype": torch.float16}, "moment_dtype"),
        ({"state": "full", "moment_dtype": BF16}, "moment_dtype"),
        ({"state": "compact", "optimizer_class": torch.optim.NAdam}, "NAdam"),
        ({"offload_state": "disk"}, "offload_state"),
        ({"offload_state": "host", "optimizer_class": torch.optim.NAdam}, "NAdam"),
        ({"state": "compact", "offload_state": "host", "optimizer_class": torch.optim.NAdam}, 'state="compact" is for'),
        ({"state": "compact", "optimizer_class": SubclassOfAdamW}, 'state="compact" is for .*not SubclassOfAdamW'),
        ({"offload_state": "host", "optimizer_class": SubclassOfAdamW}, "not SubclassOfAdamW"),
        ({"state": "compact", "amsgrad": True}, "amsgrad"),
        *(
            ({"state": "compact", "param_groups": [{"params": "*.bias", key: value}]}, words)
            for key, value, words in (
                ("amsgrad", True, "amsgrad"),
                ("maximize", True, "maximize"),
                ("betas", (torch.tensor(0.9), torch.tensor(0.95)), "betas"),
            )
        ),
        ({"state": "compact", "maximize": True}, "maximize"),
        ({"offload_state": "host", "maximize": True}, "does not go with maximize"),
        ({"state": "compact", "param_groups": [{**SGD_OF_BIASES, "maximize": True}]}, "maximize"),
        ({"state": "compact", "param_groups": [SGD_OF_BIASES], "amsgrad": True}, "amsgrad"),
        (
            {"state": "compact", "optimizer_class": torch.optim.Adam, "decoupled_weight_decay": True},
            "take the class AdamW",
        ),
        ({"state": "compact", "betas": (torch.tensor(0.9), torch.tensor(0.95)), "lr": torch.tensor(0.1)}, "betas"),
    ],
)
def test_what_compact_state_lacks_is_refused(options: dict[str, Any], words: str) -> None:
    ddp = wrap(make_model())
    with pytest.raises(ValueError, match=words):
        DistributedOptimizer(ddp, **options)
    trained(DistributedOptimizer(ddp), range(1))  # nothing has changed


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("amsgrad", True, "amsgrad=True, which a group has by now"),
        ("maximize", True, "maximize alike in all groups"),
        ("decoupled_weight_decay", False, "take the class Adam,"),
    ],
)
@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("form", [{}, {"state": "full", "offload_state": "host"}], ids=["compact", "on the host"])
@pytest.mark.sampled(12)
def test_what_compact_state_lacks_is_refused_where_a_group_gets_it_later(
    form: dict[str, Any], group: int, option: str, value: bool, words: str
) -> None:
    optimizer = compact(wrap(make_model()), param_groups=[{"params": "*.bias"}], **form)
    optimizer.param_groups[group][option] = value
    of = 'offload_state="host"' if form else 'state="compact"'
    with pytest.raises(ValueError, match=f"^{of}.*{words}"):
        trained(optimizer, range(1))


def test_fp16_parameters_are_refused_and_fp32_ones_are_masters() -> None:
    with pytest.raises(ValueError, match="float16"):
        compact(wrap(make_model().half()))
    with pytest.raises(ValueError, match="float64"):
        compact(wrap(make_model().double()))
    for layer in (0, 2, 4):
        mixed = make_model()
        mixed[layer].half()
        with pytest.raises(ValueError, match=rf"parameter '{layer}\..*' is torch\.float16"):
            compact(wrap(mixed))
    model = nn.Sequential(nn.Linear(24, 8).to(BF16), nn.Linear(8, 4))
    model.forward = lambda x: model[1](model[0](x).float())  # type: ignore[method-assign]
    optimizer = compact(wrap(model), moment_dtype=torch.float32)
    trained(optimizer, range(3))
    for part in optimizer.full_slices():
        assert part.master.dtype is torch.float32
        assert torch.equal(part.master, part.param) == (part.param.dtype is torch.float32)
    taken = full_state(optimizer)
    kept = copy.deepcopy(taken)
    trained(optimizer, range(3, 4))
    for name, tensors in taken.items():
        assert all(map(torch.equal, tensors, kept[name])), "copies, which a step leaves alone"


def test_parallelize_and_make_optimizer_take_it() -> None:
    model = maingrad.parallelize(make_model(), "zero1")
    optimizer = maingrad.make_optimizer(model, lr=1e-3, state="compact")
    trained(optimizer, range(2))
    assert {state["remainder"].dtype for state in optimizer.state.values()} == {torch.int16}
