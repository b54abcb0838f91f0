"""What a program keeps of whole parameters: it has memory of its own, or its reads raise. None ends the process.

Where a read could end the process, the test would end with it.
"""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from maingrad.ddp.torch_internals import refuses_storage_reads
from maingrad.fsdp import fully_shard
from maingrad.fsdp.module import root_of
from maingrad.launch import simulate

WIDTH = 32
PLACEMENTS = ("zero1", "zero2", "zero3")


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def sharded(placements: str = "zero3", observe: Callable[..., Any] | None = None) -> Any:
    model = plain()
    for layer in (model[0], model[2]):
        fully_shard(layer, placements=placements)
        if observe is not None:
            layer.register_forward_hook(observe)
    return fully_shard(model, placements=placements)


def batch() -> Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


def train(model: Any, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_dicts_of_a_block(placements: str) -> dict[str, dict[str, Any]]:
    model = sharded(placements)
    with model.unsharded():
        found: dict[str, Any] = {
            "state_dict": model.state_dict(),
            "a submodule's": {f"0.{name}": value for name, value in model[0].state_dict().items()},
            "DCP's": get_model_state_dict(model),
            "DCP's, whole": get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
            "detached": {name: param.detach() for name, param in model.named_parameters()},
            "cloned": {name: param.detach().clone() for name, param in model.named_parameters()},
            "numpy": {name: param.detach().numpy() for name, param in model.named_parameters()},
            "rows": {name: list(param.detach()) for name, param in model.named_parameters()},
        }
    if placements == "zero3":
        train(model)  # whole parameters that have memory at rest are views of live weights, as in plain PyTorch
    file = io.BytesIO()
    torch.save(found["state_dict"], file)
    file.seek(0)
    return {**found, "loaded": torch.load(file)}


@pytest.mark.parametrize("placements", PLACEMENTS)
def test_what_is_read_within_unsharded_lives_on(placements: str) -> None:
    expected = plain().state_dict()
    for found in simulate(state_dicts_of_a_block, 2, placements):
        for how, values in found.items():
            for name, value in values.items():
                value = torch.stack(value) if how == "rows" else torch.as_tensor(value)
                assert torch.equal(value, expected[name]), (how, name)
        assert len(found["loaded"]) == 4


def a_state_dict_before_training(placements: str) -> tuple[dict[str, Tensor], Tensor]:
    model = sharded(placements)
    with model.unsharded():
        saved = model.state_dict()
    train(model)
    with model.unsharded():
        return saved, model[0].weight.detach().clone()


@pytest.mark.parametrize("placements", PLACEMENTS)
def test_a_state_dict_does_not_follow_training(placements: str) -> None:
    expected = plain().state_dict()
    for saved, trained in simulate(a_state_dict_before_training, 2, placements):
        for name, value in saved.items():
            assert torch.equal(value, expected[name])
        assert not torch.equal(trained, expected["0.weight"])


READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda kept: kept.sum(),
    "add": lambda kept: kept + 1,
    "add to another": lambda kept: torch.ones(WIDTH, WIDTH) + kept,
    "clone": lambda kept: kept.clone(),
    "numpy": lambda kept: kept.detach().numpy().sum(),
    "tolist": lambda kept: kept.detach().tolist(),
    "equal": lambda kept: torch.equal(kept, kept),
    "stack": lambda kept: torch.stack([kept, kept]),
    "matmul": lambda kept: kept @ kept,
    "row": lambda kept: kept[0].sum(),
    "write": lambda kept: kept.detach().zero_(),
    "save": lambda kept: torch.save(kept, io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "pointer": lambda kept: kept.data_ptr(),
}


def refusals(kept: Tensor) -> Iterator[str]:
    for how, read in READS.items():
        with pytest.raises(RuntimeError) as raised:
            read(kept)
        yield f"{how}: {raised.value}"


def parameters_of_a_block() -> tuple[list[str], list[float]]:
    model = sharded()
    with model.unsharded():
        kept = dict(model.named_parameters())["0.weight"]
        mean = model.state_dict(keep_vars=True)["2.weight"]
    refused = [*refusals(kept), *refusals(mean)]
    assert "0.weight" in repr(kept)
    assert kept.shape == (WIDTH, WIDTH)
    with model.unsharded():
        sums = [kept.sum().item(), mean.sum().item()]
        assert type(kept) is nn.Parameter and not any("freed" in name for name in vars(kept)), "it is as it was"
    train(model)
    return refused, sums


def test_a_kept_parameter_refuses_to_be_read_after_the_block() -> None:
    expected = plain()
    for refused, sums in simulate(parameters_of_a_block, 2):
        assert len(refused) == 2 * len(READS)
        for index, text in enumerate(refused):
            assert ("'0.weight'" if index < len(READS) else "'2.weight'") in text
            assert "clone()" in text
        assert sums == [expected[0].weight.sum().item(), expected[2].weight.sum().item()]


def what_forwards_keep(grad: bool) -> list[str]:
    kept: list[Tensor] = []
    model = sharded(observe=lambda module, args, output: kept.append(module.weight.detach()))
    with torch.set_grad_enabled(grad):
        loss = model(batch()).square().mean()
    refused = [*refusals(kept[0])]
    if grad:
        loss.backward()
        refused += refusals(kept[0])
    return refused


@pytest.mark.skipif(not refuses_storage_reads, reason="this torch has no storages that refuse reads")
@pytest.mark.parametrize("grad", [True, False])
def test_what_a_forward_keeps_refuses_to_be_read(grad: bool) -> None:
    for refused in simulate(what_forwards_keep, 2, grad):
        assert len(refused) == (1 + grad) * len(READS)
        for text in refused:
            # A view is refused by torch, before it looks for the memory.
            assert ("0.bias" in text and "clone()" in text) or "storage of size 0" in text, text


def what_backwards_keep() -> list[str]:
    kept: list[Tensor] = []

    def observe(module: Any, args: Any, output: Tensor) -> None:
        weight = module.weight
        output.register_hook(lambda _: kept.append(weight.get_main_grad()))

    model = sharded(observe=observe)
    model(batch()).square().mean().backward()
    return [*refusals(kept[0])]


@pytest.mark.skipif(not refuses_storage_reads, reason="this torch has no storages that refuse reads")
def test_whole_gradients_that_a_backward_keeps_refuse_to_be_read() -> None:
    for refused in simulate(what_backwards_keep, 2):
        words = "memory of the whole gradients (2.bias .. 2.weight) was freed after their reduction"
        assert any(words in text for text in refused), refused
        assert all(words in text or "storage of size 0" in text for text in refused)


def forwards_around_blocks(interrupt: bool) -> Tensor:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        if interrupt:
            with model.unsharded():
                loss = model(batch()).square().mean()
            with model.unsharded():
                model.state_dict()
        else:
            loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with model.unsharded():
        return model[0].weight.detach()


def test_blocks_between_a_forward_and_its_backward_change_nothing() -> None:
    (expected, _), interrupted = simulate(forwards_around_blocks, 2, False), simulate(forwards_around_blocks, 2, True)
    for weight in interrupted:
        assert torch.equal(weight, expected)


def memory_of_a_block() -> tuple[int, int]:
    model = sharded()
    with model.unsharded():
        pass
    meter = sum(bucket.whole_params.data.untyped_storage().nbytes() for unit in model.units for bucket in unit.buckets)
    with model.unsharded():
        held = sum(
            bucket.whole_params.data.untyped_storage().nbytes() for unit in model.units for bucket in unit.buckets
        )
    return meter, held


def test_the_memory_of_a_block_is_freed() -> None:
    for after, within in simulate(memory_of_a_block, 2):
        assert after == 0
        assert within >= 2 * (WIDTH + 1) * WIDTH * 4


def test_what_is_unsharded_follows_its_shards_from_forward_to_forward() -> None:
    """An optimizer steps within the block, and the next forward does not run all units."""

    def read() -> None:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        shards = list(model.parameters())
        with torch.no_grad(), model.unsharded():
            model(torch.ones(1, 4))
            before = model[1].weight.clone()
            for shard in shards:
                shard.add_(1.0)
            model[0](torch.ones(1, 4))
            assert torch.equal(model[1].weight, before + 1.0)

    simulate(read, 2)


class Allocations(TorchDispatchMode):
    """Notes at each allocation of ``numel`` elements whether ``memory`` is still there."""

    def __init__(self, memory: StorageWeakRef, numel: int) -> None:
        super().__init__()
        self.memory, self.numel = memory, numel
        self.beside: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gone = self.memory.expired()
        result = func(*args, **(kwargs or {}))
        if "empty" in str(func) and result.numel() == self.numel:
            self.beside.append(not gone)
        return result


@pytest.mark.parametrize("keeps", [False, True])
def test_memory_that_was_read_goes_before_the_next_comes(keeps: bool) -> None:
    model = sharded()
    model(batch())
    model[0].unshard()
    memory = model[0].weight.untyped_storage()
    allocations = Allocations(StorageWeakRef(memory), memory.nbytes() // 4)
    kept = model[0].weight.detach() if keeps else None
    del memory
    with allocations:
        model[0].reshard()
    assert allocations.beside == [keeps]
    assert kept is None or torch.equal(kept, plain()[0].weight)


class Detached(nn.Sequential):
    """What it returns has no graph, and what the layers in it compute has one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()  # type: ignore[no-any-return]


def test_outputs_without_a_graph_leave_no_unit_to_a_backward() -> None:
    """The outermost unit's outputs stay without one, and its layers do not wait for a backward."""

    def on_each_rank() -> list[bool]:
        model: Any = Detached(*[nn.Linear(8, 8) for _ in range(3)])
        for layer in model[:2]:
            fully_shard(layer)
        fully_shard(model)
        for _ in range(2):  # the first one learns which unit comes last
            assert not model(torch.ones(2, 8)).requires_grad
        return [unit.gathered for unit in model.units]

    assert simulate(on_each_rank, 2) == [[False] * 3] * 2


def test_outputs_of_frozen_units_need_no_gradient_and_those_of_trained_ones_do() -> None:
    """Backward then enters a trained unit on all ranks, also where this rank has used none of its parameters."""

    def on_each_rank() -> list[bool]:
        model: Any = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), Detached(nn.Linear(8, 8)), nn.Linear(8, 8))
        needed: list[bool] = []
        for module in (model[0], model[1], model):
            fully_shard(module)
        for module in model:
            module.register_forward_pre_hook(lambda _, args: needed.append(args[0].requires_grad))
        model(torch.ones(2, 8)).sum().backward()
        return needed

    assert simulate(on_each_rank, 2) == [[False, False, True]] * 2


@pytest.mark.parametrize("final", [False, True])
def test_what_the_next_microbatch_begins_with_stays_until_the_last_one(final: bool) -> None:
    """The first block, when backward has passed it."""

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
            self.seen: list[bool] = []

        def forward(self, x: Tensor) -> Tensor:
            before = y = self.stem(x)
            for block in self.blocks:
                y = block(y).tanh()
            before.register_hook(lambda _: self.seen.append(root_of(self).units[1].gathered))
            return y

    def on_each_rank() -> list[bool]:
        model: Any = Looks()
        for module in (*model.blocks, model):
            fully_shard(module)
        with nullcontext() if final else model.no_sync():
            model(torch.ones(2, 8)).sum().backward()
        return model.seen

    assert simulate(on_each_rank, 2) == [[not final]] * 2
