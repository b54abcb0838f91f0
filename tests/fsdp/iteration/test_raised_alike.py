"""A check that fails on one rank alone: all ranks raise, and nobody waits in the collective behind it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from loops import assert_same
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from maingrad.ddp import WORLD_OF_ONE, save_checkpoint
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate

OFFENDER = 1


def offends() -> bool:
    return dist.get_rank() == OFFENDER


def outcome(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def check(errors: list[str], message: str, *, one: bool = True) -> None:
    """All ranks raise one error; ``one``: only one rank has the cause, and the error names this rank."""
    assert len(set(errors)) == 1, errors
    assert message in errors[0], errors[0]
    assert (f"(on rank {OFFENDER})" in errors[0]) == one, errors[0]


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))


def trained() -> tuple[Any, torch.optim.Optimizer]:
    """A model and its optimizer after one step."""
    model: Any = make_net()
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def whole(model: Any) -> dict[str, Tensor]:
    with model.unsharded():
        return {name: param.detach().clone() for name, param in model.named_parameters()}


# ---- The file that one rank saved, loaded on every rank. ----


def load_rank_0s_everywhere(folder: Path) -> tuple[str, str, str]:
    model, optimizer = trained()
    torch.save((model.state_dict(), optimizer.state_dict()), folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    before = whole(model)
    weights, moments = torch.load(folder / "rank0.pt", weights_only=False)
    errors = outcome(model.load_state_dict, weights), outcome(optimizer.load_state_dict, moments)
    assert_same(whole(model), before)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    weights, moments = torch.load(folder / f"rank{dist.get_rank()}.pt", weights_only=False)
    model.load_state_dict(weights)
    mine = outcome(optimizer.load_state_dict, moments)
    assert_same(whole(model), before)
    return *errors, mine


@pytest.mark.filterwarnings("ignore:.*torch.load.*:FutureWarning")
def test_dtensors_of_another_rank_are_refused_on_all(tmp_path: Path) -> None:
    """Over gloo: elements of another rank fit in shape, and would be loaded as this rank's."""
    found = run_ranks(load_rank_0s_everywhere, 2, tmp_path)
    why = "the DTensor has the elements of the rank at (0,) of its mesh, and this rank is at (1,): each rank loads"
    check([weights for weights, _, _ in found], f"0.weight: {why}")
    check([moments for _, moments, _ in found], f"ValueError: 'exp_avg' of '0.weight': {why}")
    assert [remedy for _, _, remedy in found] == ["nothing was raised"] * 2


# ---- State dicts that differ between ranks. ----


def without_weights() -> str:
    model, _ = trained()
    state = model.state_dict()
    return outcome(model.load_state_dict, {} if offends() else state, strict=False)


def of_another_shape() -> str:
    model, _ = trained()
    state = model.state_dict()
    if offends():
        state["0.weight"] = torch.zeros(3, 3)
    return outcome(model.load_state_dict, state)


def without_moments() -> str:
    _, optimizer = trained()
    state = optimizer.state_dict()
    return outcome(optimizer.load_state_dict, {**state, "state": {}} if offends() else state)


def other_groups() -> str:
    _, optimizer = trained()
    state = optimizer.state_dict()
    return outcome(optimizer.load_state_dict, {**state, "param_groups": []} if offends() else state)


def lost_moments() -> str:
    _, optimizer = trained()
    if offends():
        optimizer.state.clear()
    return outcome(optimizer.state_dict)


STATES: dict[str, tuple[Callable[[], str], str, bool]] = {
    "no weights": (
        without_weights,
        "rank 0 has 0.weight (a DTensor of these ranks), where rank 1 has nothing",
        False,
    ),
    "another shape": (of_another_shape, "0.weight: size mismatch, of shape [3, 3], and the whole", True),
    "no moments": (
        without_moments,
        "'exp_avg' of '0.weight' (a DTensor of these ranks), where rank 1 has nothing",
        False,
    ),
    "other groups": (other_groups, "has groups of [] parameters, and this optimizer has groups of [4]", True),
    "lost moments": (lost_moments, "rank 0 has 'exp_avg' of '0.weight', where rank 1 has nothing", False),
}


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (lambda weight: weight.full_tensor(), "a whole tensor"),
        (lambda weight: weight.redistribute(placements=[Replicate()]), "a DTensor of other ranks"),
    ],
)
def test_ranks_that_bring_one_weight_in_different_forms_are_refused_on_all(form: Any, words: str) -> None:
    """A DTensor of these ranks is exchanged among them, and what another rank brings is not."""

    def load() -> str:
        model, _ = trained()
        state = model.state_dict()
        other = form(state["0.weight"])
        return outcome(model.load_state_dict, {**state, "0.weight": other} if offends() else state)

    message = f"rank 0 has 0.weight (a DTensor of these ranks), where rank 1 has 0.weight ({words})"
    check(simulate(load, 2), message, one=False)


@pytest.mark.parametrize("what", STATES)
@pytest.mark.sampled(3)
def test_state_dicts_that_differ_between_ranks_are_refused_on_all(what: str) -> None:
    case, message, one = STATES[what]
    check(simulate(case, 3), message, one=one)


def test_the_last_of_three_ranks_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "OFFENDER", 2)
    errors = simulate(without_weights, 3)
    check(errors, "rank 0 has 0.weight (a DTensor of these ranks), where rank 2 has nothing", one=False)


@pytest.mark.parametrize("ranks", [(0, 1), (1, 2), (0, 1, 2)])
def test_a_rank_is_named_unless_all_ranks_have_the_cause(ranks: tuple[int, ...]) -> None:
    def load() -> str:
        model, _ = trained()
        state = model.state_dict()
        if dist.get_rank() in ranks:
            state["0.weight"] = torch.zeros(3, 3)
        return outcome(model.load_state_dict, state)

    first, *others = simulate(load, 3)
    assert others == [first] * 2
    assert "0.weight: size mismatch, of shape [3, 3]" in first
    assert (f"(on rank {ranks[0]})" in first) == (len(ranks) < 3), first


def test_a_ranks_own_elements_are_no_state_of_the_whole() -> None:
    """As a program has them that saves ``param.detach()``."""

    def load() -> str:
        model, _ = trained()
        return outcome(model.load_state_dict, {**model.state_dict(), "0.weight": model[0].weight.detach().clone()})

    check(simulate(load, 2), "0.weight: size mismatch, of shape [", one=False)


@pytest.mark.parametrize("what", ["no moments", "other groups"])
def test_ranks_with_experts_of_their_own_compare_what_they_share(what: str) -> None:
    """State of the experts comes first, over which no other rank is asked."""

    def load() -> str:
        model: Any = make_net()
        fully_shard(model[0], mesh=WORLD_OF_ONE)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        given = optimizer.state_dict()
        if offends() and what == "no moments":
            del given["state"][2]
        elif offends():
            given["param_groups"] = []
        return outcome(optimizer.load_state_dict, given)

    message = "rank 0 has 'exp_avg' of '1.weight'" if what == "no moments" else "has groups of [] parameters"
    assert all(message in error for error in simulate(load, 2))


@pytest.mark.parametrize("group", [0, 1])
def test_an_optimizer_of_another_model_on_one_rank(tmp_path: Path, group: int) -> None:
    """Its parameters may come behind this model's, in their group or in a group of their own."""

    def save() -> str:
        model, optimizer = trained()
        if offends():
            mine, others = [*model.parameters()], [*make_net().parameters()]
            groups = [mine, others] if group else [mine + others]
            optimizer = torch.optim.AdamW([{"params": params} for params in groups])
        return outcome(save_checkpoint, tmp_path / "c", model, optimizer)

    errors = simulate(save, 3)
    check(errors, "ValueError: this optimizer belongs to another model")
    assert f"in its group {group}" in errors[0]
    assert not (tmp_path / "c").exists()


# ---- Modules that one rank cannot shard. ----


def with_grad(model: nn.Module) -> dict[str, Any]:
    model[0].weight.grad = torch.zeros(6, 4)
    return {}


def with_hook(model: nn.Module) -> dict[str, Any]:
    model[0].weight.register_hook(lambda grad: grad)
    return {}


def with_complex(model: nn.Module) -> dict[str, Any]:
    model.more = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    return {}


def sharded_before(model: nn.Module) -> dict[str, Any]:
    fully_shard(model, mesh=dist.new_group([OFFENDER], use_local_synchronization=True))
    return {}


def other_atoms(model: nn.Module) -> dict[str, Any]:
    return {"shard_atoms": "rows"}


def other_placements(model: nn.Module) -> dict[str, Any]:
    return {"placements": "zero7"}


def that_cannot_be_initialised(model: nn.Module) -> dict[str, Any]:
    def fail(module: nn.Module) -> None:
        raise OSError("the weights cannot be read")

    model.to("meta")
    return {"init_fn": fail, "device": "cpu"}


MODULES: dict[str, tuple[Callable[[nn.Module], dict[str, Any]], str]] = {
    "a gradient": (with_grad, "ValueError: parameter '0.weight' already has a .grad"),
    "a hook": (with_hook, "ValueError: parameter '0.weight' has hooks"),
    "complex": (with_complex, "ValueError: parameter 'more' is torch.complex64"),
    "sharded": (sharded_before, "is fully sharded already"),
    "atoms": (other_atoms, "an atom is 'element', 'block', 'row', 'whole' or a number of rows, got 'rows'"),
    "placements": (other_placements, "placements 'zero7' is none of ddp"),
    "init_fn": (that_cannot_be_initialised, "OSError: the weights cannot be read"),
}


@pytest.mark.parametrize("what", MODULES)
def test_a_module_that_one_rank_cannot_shard_is_refused_on_all(what: str) -> None:
    def shard() -> str:
        model = make_net()
        options = MODULES[what][0](model) if offends() else {}
        return outcome(fully_shard, model, **options)

    check(simulate(shard, 3), MODULES[what][1])
