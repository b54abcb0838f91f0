"""``DistributedOptimizer(state="compact", moment_dtype=torch.uint8)``: moments in blocks of 256 elements."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, Lion
from maingrad.ddp.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from maingrad.kernels.optimizer.eight_bits import dequantize_moment, quantize_moment
from maingrad.launch import simulate

HYPER: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "state": "compact", "moment_dtype": torch.uint8}
CLASSES: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.95)},
    "sgd": {"optimizer_class": torch.optim.SGD, "momentum": 0.9, "nesterov": True},
    "lion": {"optimizer_class": Lion, "lr": 1e-3},
}


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 50)).bfloat16()


def make(seed: int = 0, *, sharded: bool = True, atom: int = 256, **options: Any) -> DistributedOptimizer:
    fields = {"use_distributed_optimizer": True, "shard_atom": atom} if sharded else {}
    # Equal gradients of bf16 parameters are summed exactly, and divided by as many tokens; averages of three are not.
    config = DistributedDataParallelConfig(bucket_size=2000, calculate_per_token_loss=True, **fields)
    return DistributedOptimizer(DistributedDataParallel(make_model(seed), config), **{**HYPER, **options})


def train(optimizer: DistributedOptimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(12, 24, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.model(x).float().square().mean().backward()  # every rank has the same batches
        if optimizer.model.ddp_config.calculate_per_token_loss:
            optimizer.model.set_num_tokens(1)
        optimizer.step()
        optimizer.zero_grad()


Parts = dict[str, dict[int, list[Tensor]]]


def parts_of(optimizer: DistributedOptimizer) -> Parts:
    """Masters and moments of this rank's slices, by name and first element."""
    return {
        part.name: {part.start: [part.master, *part.state().values()]}
        for part in optimizer.full_slices()
        if part.master.numel()
    }


def joined(of_ranks: list[Parts]) -> dict[str, list[Tensor]]:
    names: Parts = {}
    for parts in of_ranks:
        for name, by_start in parts.items():
            names.setdefault(name, {}).update(by_start)
    return {
        name: [torch.cat(each) for each in zip(*(found[start] for start in sorted(found)), strict=True)]
        for name, found in names.items()
    }


def assert_same(one: dict[str, list[Tensor]], other: dict[str, list[Tensor]]) -> None:
    assert one.keys() == other.keys()
    for name, tensors in one.items():
        assert len(tensors) == len(other[name])
        assert all(torch.equal(a, b) for a, b in zip(tensors, other[name], strict=True)), name


def trained_from_scratch(options: dict[str, Any]) -> Parts:
    optimizer = make(**options)
    train(optimizer, range(6))
    return parts_of(optimizer)


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("place", [None, "host"])
def test_ranks_change_no_bit(kind: str, place: str | None) -> None:
    options = {**CLASSES[kind], "offload_state": place}
    expected = joined(simulate(trained_from_scratch, 1, options))
    assert len(expected) == 6 and all(len(tensors) == (3 if kind == "adamw" else 2) for tensors in expected.values())
    for ranks in (2, 3, 8):
        assert_same(expected, joined(simulate(trained_from_scratch, ranks, options)))
    assert_same(expected, joined(simulate(trained_from_scratch, 2, {**options, "sharded": False})))


def saves(path: Path, options: dict[str, Any]) -> Parts:
    optimizer = make(**options)
    train(optimizer, range(4))
    save_checkpoint(path, optimizer.model, optimizer)
    train(optimizer, range(4, 7))
    return parts_of(optimizer)


def loads(path: Path, options: dict[str, Any]) -> Parts:
    optimizer = make(1, **options)
    load_checkpoint(path, optimizer.model, optimizer)
    train(optimizer, range(4, 7))
    return parts_of(optimizer)


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
@pytest.mark.sampled(6)
def test_training_goes_on_on_other_ranks_with_the_same_bits(tmp_path: Path, kind: str, before: int, after: int) -> None:
    path, options = tmp_path / "saved", CLASSES[kind]
    expected = joined(simulate(saves, before, path, options))
    assert_same(expected, joined(simulate(loads, after, path, {**options, "offload_state": "host"})))


FORMS: dict[str, dict[str, Any]] = {
    "8 bits": {},
    "full": {"state": "full", "moment_dtype": None},
    "bf16": {"moment_dtype": torch.bfloat16},
    "8 bits on the host": {"offload_state": "host"},
}


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("saved", FORMS)
@pytest.mark.parametrize("loaded", FORMS)
@pytest.mark.sampled(48)
def test_each_form_reads_what_the_others_have_saved(tmp_path: Path, kind: str, saved: str, loaded: str) -> None:
    one, other, third = (
        make(seed, **CLASSES[kind], **FORMS[form]) for seed, form in enumerate((saved, loaded, loaded))
    )
    train(one, range(3))
    save_checkpoint(tmp_path / "saved", one.model, one)
    load_checkpoint(tmp_path / "saved", other.model, other)
    third.load_state_dict(one.state_dict())
    expected, found = joined([parts_of(one)]), joined([parts_of(other)])
    assert_same(found, joined([parts_of(third)]))
    for name, (master, *moments) in expected.items():
        assert torch.equal(found[name][0], master)
        for index, (moment, read) in enumerate(zip(moments, found[name][1:], strict=True)):
            if "8 bits" in loaded:
                signed = index == 0
                moment = dequantize_moment(*quantize_moment(moment, signed=signed), signed=signed)
            elif loaded == "bf16":
                moment = moment.bfloat16().float()
            assert torch.equal(read, moment), name
    train(other, range(3, 5))
    train(third, range(3, 5))
    assert_same(joined([parts_of(other)]), joined([parts_of(third)]))


class ManyVectors(nn.Module):
    """A bucket of many vectors, each with a block of its own, and one of a matrix with more elements in fewer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vectors = nn.ParameterList(torch.randn(8) for _ in range(80))
        self.matrix = nn.Linear(24, 640, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix(x).view(-1, 80, 8) * torch.stack(list(self.vectors))


@pytest.mark.in_turn
def test_a_bucket_with_fewer_elements_may_have_more_blocks() -> None:
    found = []
    for place in (None, "host"):
        config = DistributedDataParallelConfig(bucket_size=2000, calculate_per_token_loss=True)
        model = DistributedDataParallel(ManyVectors().bfloat16(), config)
        optimizer = DistributedOptimizer(model, **HYPER, offload_state=place)
        train(optimizer, range(3))
        found.append(joined([parts_of(optimizer)]))
    assert_same(*found)


@pytest.mark.parametrize("place", [None, "host"])
def test_what_nobody_has_loaded_keeps_its_codes(place: str | None) -> None:
    optimizer = make(offload_state=place)
    train(optimizer, range(2))
    state = {master: {key: value.clone() for key, value in each.items()} for master, each in optimizer.state.items()}
    optimizer.mark_loaded()
    for master, each in optimizer.state.items():
        assert each.keys() == state[master].keys()
        assert all(torch.equal(value, state[master][key]) for key, value in each.items())


def test_bytes_of_the_state() -> None:
    optimizer = make()
    train(optimizer, range(1))
    state = [value for values in optimizer.state.values() for key, value in values.items() if key != "step"]
    numel = sum(segment.master.numel() for segment in optimizer.segments)
    blocks = sum(-(-(held.end - held.start) // 256) for held in optimizer.slices)
    assert sum(value.nbytes for value in state) == (1 + 1 + 2) * numel + 2 * 4 * blocks


def test_a_layout_that_cuts_blocks_is_refused_on_all_ranks() -> None:
    def build() -> str:
        with pytest.raises(ValueError, match=r"cuts such a block of '.*': .*shard_atom=256") as caught:
            make(atom=1)
        return str(caught.value)

    assert len(set(simulate(build, 3))) == 1
    train(make(atom=1), range(1))  # one rank has no borders

    def build_between() -> None:
        """The border is in the middle one of three parameters, and of three buckets."""
        for bucket_size in (None, 1):
            vectors = nn.ParameterList(torch.ones(numel).bfloat16() for numel in (512, 700, 512))
            fields = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=bucket_size)
            with pytest.raises(ValueError, match=r"cuts such a block of '1'"):
                DistributedOptimizer(DistributedDataParallel(vectors, fields), **HYPER)

    simulate(build_between, 2)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, keep_params_whole=True)

    def build_whole() -> None:
        train(DistributedOptimizer(DistributedDataParallel(make_model(), config), **HYPER), range(1))

    simulate(build_whole, 3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"shard_atom": 0}, "at least 1 element"),
        ({"shard_atom": 256, "use_distributed_optimizer": False}, "shard_atom has no effect without"),
        ({"shard_atom": 256, "keep_params_whole": True}, "shard_atom has no effect with keep_params_whole"),
    ],
)
def test_atoms_without_effect_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DistributedDataParallelConfig(**{"use_distributed_optimizer": True, **fields})


@pytest.mark.in_turn
def test_training_is_as_good_as_with_full_state() -> None:
    losses = {}
    for name, form in FORMS.items():
        optimizer = make(**{"betas": (0.9, 0.95), "lr": 1e-3, "weight_decay": 0.01, **form})
        x = torch.randn(64, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
        for _ in range(200):
            loss = (optimizer.model(x).float()[:, :5] - x[:, :5].float()).square().mean()
            loss.backward()
            optimizer.model.set_num_tokens(1)
            optimizer.step()
            optimizer.zero_grad()
        losses[name] = loss.item()
    assert losses["8 bits"] == losses["8 bits on the host"] < 1.05 * losses["full"] < 0.5
