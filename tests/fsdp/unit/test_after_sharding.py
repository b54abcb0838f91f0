"""What people do to a model after it was sharded: convert, copy, freeze, replace. Refused by name, or right."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded_twin import Block, Net, batches_of, mean_loss, shard_blocks
from torch import nn
from torch.nn.utils import parametrize

from maingrad.ddp import WORLD_OF_ONE
from maingrad.fsdp import fully_shard
from maingrad.fsdp.tensors.parameter import ShardedParameter
from maingrad.launch import simulate


def step_of(model: nn.Module) -> None:
    mean_loss(model(batches_of(0, 1, dtype=torch.float32)[0])).backward()


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.bfloat16, nn.Module.double])
def test_converting_and_moving(convert: Callable[[nn.Module], Any]) -> None:
    model = nn.Sequential(Net(), nn.Linear(3, 3))
    shard_blocks(model[0])
    for part in (model, model[0], model[0].blocks, model[0].blocks[0], model[0].blocks[0].linear):
        with pytest.raises(
            RuntimeError, match=r"move or convert the module before|convert and move a module before fully"
        ):
            convert(part)
    with pytest.raises(RuntimeError, match="move or convert the module before fully_shard"):
        model.to("meta")
    with model[0].unsharded(), pytest.raises(RuntimeError, match="move or convert the module before fully_shard"):
        convert(model)
    assert model[0].float() is model[0]
    step_of(model[0])


def test_copies_and_pickles() -> None:
    model = nn.Sequential(Net())
    shard_blocks(model[0])
    for part in (model, model[0], model[0].blocks):
        with pytest.raises(
            TypeError, match=r"tied to its process groups and is not copied; build another model and load"
        ):
            copy.deepcopy(part)
        with pytest.raises(TypeError, match=r"a fully sharded module is not pickled; save its state_dict\(\)"):
            pickle.dumps(part)


def test_a_class_is_told_by_its_module_and_its_docstring() -> None:
    """transformers and others choose by ``type(model).__module__`` how they treat a model."""
    model = Net()
    shard_blocks(model)
    for part, cls in ((model, Net), (model.blocks[0], Block)):
        assert isinstance(part, cls)
        assert (type(part).__module__, type(part).__doc__) == (cls.__module__, cls.__doc__)
        assert type(part).__name__.endswith(cls.__name__)
    assert type(model.blocks[0]) is type(model.blocks[1]), "one class for all modules of a class"


def test_methods_of_modules_keep_their_arguments() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].weight = model[1].bias  # one parameter, of two names
    fully_shard(model)
    assert dict(model.named_parameters(prefix="net")).keys() == {"net.0.weight", "net.0.bias", "net.1.weight"}
    assert list(model.named_parameters("net", recurse=False)) == []
    assert len(list(model.named_parameters(remove_duplicate=False))) == 4
    model.register_buffer("scale", torch.ones(()))
    count, scale = model[1].num_batches_tracked, model.scale
    model(torch.ones(3, 2)).sum().backward()
    memory = [param.grad.to_local().data_ptr() for param in model.parameters()]
    model.to_empty(device="cpu")
    assert [param.grad.to_local().data_ptr() for param in model.parameters()] == memory
    count = model[1].num_batches_tracked
    model.to_empty(device="cpu", recurse=False)
    assert model[1].num_batches_tracked is count, "a module inside, and so not emptied"
    assert model.scale is not scale
    units = model.units
    units.clear()
    assert len(model.units) == 1


def test_an_interrupted_forward_or_block_leaves_shards() -> None:
    """Ctrl-C in a notebook, which goes on with the model."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def write(model: Any) -> None:
        with torch.no_grad(), model.unsharded(writeback=True):
            model.weight.zero_()
            interrupt()

    def on_each_rank() -> None:
        model: Any = fully_shard(nn.Linear(4, 4))
        expected = model(torch.ones(1, 4)).detach()
        handle = model.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1, 4))
        assert isinstance(model.weight, ShardedParameter)
        with pytest.raises(KeyboardInterrupt):
            write(model)
        assert isinstance(model.weight, ShardedParameter)
        handle.remove()
        assert torch.equal(model(torch.ones(1, 4)), expected)

    simulate(on_each_rank, 2)


def test_what_forward_has_left_gathered_is_freed_by_hand() -> None:
    """Any number of times, and ``unshard()`` counts from there."""

    def on_each_rank() -> None:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0], reshard_after_forward=False)
        fully_shard(model)
        unit, memory = model.units[1], []
        model[0].register_forward_hook(lambda module, *_: memory.append(module.weight.detach().untyped_storage()))
        loss = model(torch.ones(2, 4)).sum()
        assert unit.gathered and memory[0].nbytes() > 0
        for _ in range(2):
            model[0].reshard()
            assert not unit.gathered
            assert memory[0].nbytes() == 0, "the graph, which keeps the parameter, keeps no memory"
        model[0].unshard()
        model[0].unshard()
        model[0].reshard()
        assert unit.gathered
        assert model[0].weight.shape == (4, 4)
        model[0].reshard()
        assert not unit.gathered
        assert isinstance(model[0].weight, ShardedParameter)
        loss.backward()
        assert model[0].weight.grad is not None

    simulate(on_each_rank, 2)


def test_what_a_forward_computes_with_is_not_freed_by_hand() -> None:
    def on_each_rank() -> None:
        torch.manual_seed(0)
        plain = nn.Linear(4, 4)
        model: Any = nn.Sequential(nn.Linear(4, 4))
        model[0].load_state_dict(plain.state_dict())
        for module in (model[0], model):
            fully_shard(module)
        model[0].register_forward_pre_hook(lambda module, _: module.reshard())
        x = torch.ones(2, 4)
        output = model(x)
        assert torch.equal(output, plain(x))
        output.sum().backward()
        assert model[0].weight.grad is not None

    simulate(on_each_rank, 2)


def replace(model: nn.Module) -> None:
    model.blocks[1].linear.weight = nn.Parameter(torch.zeros(7, 7))


def parametrized(model: nn.Module) -> None:
    parametrize.register_parametrization(model.blocks[1].linear, "weight", nn.Identity())


def delete(model: nn.Module) -> None:
    model.blocks[1].linear.bias = None


def freeze(model: nn.Module) -> None:
    model.blocks[1].linear.weight.requires_grad_(False)


def freeze_while_whole(model: nn.Module) -> None:
    with model.unsharded():
        model.blocks[1].linear.weight.requires_grad_(False)


def unfreeze(model: nn.Module) -> None:
    model.blocks[0].requires_grad_(True)


def add_a_parameter(model: nn.Module) -> None:
    model.blocks[1].linear.extra = nn.Parameter(torch.zeros(7))


def add_a_module(model: nn.Module) -> None:
    model.blocks.append(Block())


def wrap_a_module(model: nn.Module) -> None:
    model.blocks[1].linear = nn.Sequential(model.blocks[1].linear, nn.Linear(7, 7))


@pytest.mark.filterwarnings("ignore:.*non-leaf")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (replace, r"parameter 'blocks.1.linear.weight' was replaced after fully_shard"),
        (delete, r"parameter 'blocks.1.linear.bias' was replaced after fully_shard"),
        (freeze, r"parameter 'blocks.1.linear.weight' was frozen \(requires_grad_\) after fully_shard"),
        (freeze_while_whole, r"parameter 'blocks.1.linear.weight' was frozen \(requires_grad_\) after fully_shard"),
        (unfreeze, r"parameter 'blocks.0.\w+.\w+' was unfrozen \(requires_grad_\) after fully_shard"),
        (add_a_parameter, r"parameter 'linear.extra' of unit 'blocks.1' was not there at fully_shard"),
        (add_a_module, r"parameter 'blocks.3.norm.weight' of the outermost unit was not there at fully_shard"),
        (wrap_a_module, r"parameter 'linear.1.weight' of unit 'blocks.1' was not there at fully_shard"),
    ],
)
@pytest.mark.parametrize("placements", ["zero3", "zero1"])
def test_changes_of_the_model_are_seen_in_the_next_iteration(
    placements: str, change: Callable[[nn.Module], None], match: str
) -> None:
    model = Net()
    model.blocks[0].requires_grad_(False)
    shard_blocks(model, placements=placements)
    for _ in range(2):
        step_of(model)
    change(model)
    with pytest.raises(RuntimeError, match=match):
        step_of(model)


def test_a_weight_replaced_between_evaluations_is_not_passed_over() -> None:
    model = Net()
    shard_blocks(model)
    with torch.no_grad():
        model(torch.ones(2, 5))
        replace(model)
        with pytest.raises(RuntimeError, match=r"parameter 'blocks.1.linear.weight' was replaced"):
            model(torch.ones(2, 5))


def test_a_change_of_any_unit_between_forward_and_backward_is_seen() -> None:
    """When backward begins, which is in the outermost unit then."""
    model = Net()
    shard_blocks(model)
    for change, words in (
        (lambda: model.blocks[0].norm.weight.requires_grad_(False), "'blocks.0.norm.weight' was frozen"),
        (lambda: model.blocks[2].norm.bias.requires_grad_(False), "'blocks.2.norm.bias' was frozen"),
    ):
        loss = mean_loss(model(torch.ones(2, 5)))
        change()
        with pytest.raises(RuntimeError, match=words):
            loss.backward()
        for param in model.parameters():
            param.requires_grad_(True)
    step_of(model)
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("after", ["an evaluation", "a backward"])
def test_a_change_is_seen_by_the_first_unit_that_trains(after: str) -> None:
    """Also where the program calls units by themselves, and the change is in another unit."""
    model = Net()
    shard_blocks(model)
    step_of(model)
    with torch.set_grad_enabled(after == "a backward"):
        output = model.blocks[0](torch.ones(2, 7))
    if after == "a backward":
        output.sum().backward()
    replace(model)
    with pytest.raises(RuntimeError, match=r"parameter 'blocks.1.linear.weight' was replaced"):
        model.blocks[0](torch.ones(2, 7))


def test_a_change_between_two_forwards_of_the_whole_model_is_seen_by_the_second() -> None:
    model = Net()
    shard_blocks(model)
    for _ in range(2):
        model(torch.ones(2, 5))
    replace(model)
    with pytest.raises(RuntimeError, match=r"parameter 'blocks.1.linear.weight' was replaced"):
        model(torch.ones(2, 5))


def test_a_change_of_another_unit_is_seen_by_an_evaluation_of_one_unit() -> None:
    model = Net()
    shard_blocks(model)
    step_of(model)
    model.blocks[0](torch.ones(2, 7))
    replace(model)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"parameter 'blocks.1.linear.weight' was replaced"):
        model.blocks[0](torch.ones(2, 7))


def test_modules_without_parameters_may_come_and_go() -> None:
    model = Net()
    shard_blocks(model)
    step_of(model)
    model.blocks[0].linear = nn.Sequential(model.blocks[0].linear, nn.Dropout(0.0))
    model.blocks[1] = torch.nn.Sequential(model.blocks[1])
    step_of(model)
    step_of(model)


def test_the_parameter_of_before_sharding_is_none_of_the_models_any_more() -> None:
    """It has no memory, and no unit reduces its gradient; registered by another name it is refused."""
    model = Net()
    before = model.blocks[1].linear.weight
    shard_blocks(model)
    step_of(model)
    model.blocks[1].linear.former = before
    with pytest.raises(RuntimeError, match=r"'linear.former' of unit 'blocks.1' was not there at fully_shard"):
        step_of(model)


def test_a_parameter_that_is_added_frozen_is_the_programs_own() -> None:
    model = Net()
    shard_blocks(model)
    model.blocks[1].extra = nn.Parameter(torch.ones(7), requires_grad=False)
    step_of(model)
    assert torch.equal(model.blocks[1].extra, torch.ones(7)) and model.blocks[1].extra.grad is None


def test_replacing_a_parameter_of_a_model_that_was_frozen_before() -> None:
    """It trains nothing, and its forwards gather all the same."""
    model = nn.Sequential(Block()).requires_grad_(False)
    fully_shard(model)
    model(torch.ones(2, 7))
    model[0].linear.weight = nn.Parameter(torch.zeros(7, 7), requires_grad=False)
    with pytest.raises(RuntimeError, match=r"parameter '0.linear.weight' was replaced after fully_shard"):
        model(torch.ones(2, 7))


def test_ranks_that_come_after_sharding() -> None:
    """A model that was sharded as a world of one trains no more once there are others, and may be evaluated."""
    alone, meant = fully_shard(Block()), fully_shard(Block(), WORLD_OF_ONE)
    x = torch.ones(2, 7)

    def on_each_rank() -> None:
        if torch.distributed.get_rank():
            return
        with pytest.raises(RuntimeError, match=r"was made before torch.distributed.init_process_group\(\)"):
            alone(x)
        with torch.no_grad():
            assert alone(x).shape == (2, 7)
        meant(x).sum().backward()

    simulate(on_each_rank, 2)
