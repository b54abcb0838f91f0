"""``unconvert`` turns a converted model back into a plain model of the same objects."""

import copy
import os
import pickle
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may download

import pytest
import torch
from expert_models import tiny
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from maingrad.ddp import DistributedDataParallel
from maingrad.fsdp import fully_shard
from maingrad.te_integration import (
    DelayedScaling,
    GroupedLinear,
    GroupedMLP,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    autocast,
    convert_linears,
    unconvert,
)


def mixed() -> nn.Sequential:
    """A plain linear layer, a frozen one, one of Hugging Face's, and one of ours."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), Conv1D(8, 8), Linear(8, 8))
    model[2].weight.requires_grad_(False)
    return model


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    model.zero_grad()
    model(torch.linspace(-1, 1, 24).view(3, 8)).square().sum().backward()
    return {name: param.grad for name, param in model.named_parameters()}


def test_the_model_is_what_it_was() -> None:
    model = mixed()
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    model[0].weight.register_post_accumulate_grad_hook(lambda _: calls.append("grad"))
    model[0].note = "kept"
    expected = grads(copy.deepcopy(model))
    before = [dict(vars(module)) for module in model]
    classes, params = [type(module) for module in model], dict(model.named_parameters())
    modules = list(model)
    calls.clear()
    converted = convert_linears(model).converted
    assert converted == ("0", "2", "3", "4")
    ddp = DistributedDataParallel(model)
    ddp(torch.ones(2, 8)).sum().backward()  # modules keep what the next forward will need
    ddp.unwrap()
    calls.clear()
    assert unconvert(model) == converted
    assert all(now is then for now, then in zip(model, modules, strict=True))
    assert [type(module) for module in model] == classes
    assert [vars(module).keys() for module in model] == [then.keys() for then in before]
    assert all(param is params[name] for name, param in model.named_parameters())
    found = grads(model)
    assert calls == ["forward", "grad"]
    for name, grad in expected.items():
        assert found[name] is None if grad is None else torch.equal(found[name], grad)  # type: ignore[arg-type]
    assert unconvert(model) == ()
    assert convert_linears(model).converted == converted


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_converted_model(copied: Any) -> None:
    model = mixed()
    expected = grads(copy.deepcopy(model))
    convert_linears(model)
    twin = copied(model)
    unconvert(twin)
    assert [type(module) for module in twin] == [nn.Linear, nn.Tanh, nn.Linear, Conv1D, Linear]
    found = grads(twin)
    assert all(found[n] is g if g is None else torch.equal(g, found[n]) for n, g in expected.items())  # type: ignore[arg-type]
    assert type(model[0]) is Linear and model[0].fuse_wgrad_accumulation


def test_our_own_modules_stay_and_are_unfused() -> None:
    built: dict[str, nn.Module] = {
        "linear": Linear(8, 8, fuse_wgrad_accumulation=True),
        "norm": LayerNormLinear(8, 8),
        "mlp": LayerNormMLP(8, 8),
        "grouped": GroupedLinear(2, 8, 8),
        "experts": GroupedMLP(2, 8, 8),
    }
    model = nn.ModuleDict(built)
    classes = [type(module) for module in model.values()]
    assert convert_linears(model).converted == ("norm", "mlp", "grouped", "experts")
    assert unconvert(model) == tuple(built)
    assert [type(module) for module in model.values()] == classes
    model["linear"](torch.ones(1, 8)).sum().backward()
    model["experts"](torch.ones(4, 8), [1, 3]).sum().backward()
    assert all(param.grad is not None for name in ("linear", "experts") for param in model[name].parameters())


def test_a_single_layer_has_the_name_of_a_model_itself() -> None:
    layer = nn.Linear(8, 8)
    assert convert_linears(layer).converted == unconvert(layer) == ("",)
    assert type(layer) is nn.Linear


def test_an_unfused_grouped_mlp_is_converted() -> None:
    model = nn.Sequential(GroupedMLP(2, 8, 8))
    twin = copy.deepcopy(model)
    assert convert_linears(model).converted == ("0",)
    ddp = DistributedDataParallel(model)
    x, splits = torch.randn(4, 8), [1, 3]
    model[0](x, splits).square().sum().backward()
    ddp.finish_grad_sync()
    twin[0](x, splits).square().sum().backward()
    assert {record.name: record.num_fused_writes for record in ddp.records if "weight" in record.name} == {
        f"0.fc{layer}_weight{expert}": 1 for layer in (1, 2) for expert in (0, 1)
    }
    for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.main_grad, plain.grad)

    class Mine(GroupedMLP):
        pass

    skipped = convert_linears(nn.Sequential(Mine(2, 8, 8))).skipped["0"]
    assert skipped.endswith("Mine is a subclass of GroupedMLP and may use its weight in another way")


def test_layers_that_are_sharded_already_say_so() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[0])
    fully_shard(model)
    assert convert_linears(model).skipped == {
        "0": "FSDPLinear is sharded already (fully_shard): call convert_linears before it"
    }
    with pytest.raises(ValueError, match=r"unconvert: '1' is sharded already; call unconvert\(model\) before"):
        unconvert(model)


def test_refused() -> None:
    with pytest.raises(TypeError, match=r"unconvert takes an nn\.Module, got list"):
        unconvert([nn.Linear(8, 8)])  # type: ignore[arg-type]
    model = mixed()
    convert_linears(model)
    ddp = DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"'module\.0\.weight' has a main_grad.*model\.unwrap\(\)"):
        unconvert(ddp)
    assert type(model[0]) is Linear
    for frozen, trained in (("weight", "bias"), ("bias", "weight")):
        partly = nn.Sequential(nn.Linear(8, 8))
        partly.get_parameter(f"0.{frozen}").requires_grad_(False)
        convert_linears(partly)
        wrapper = DistributedDataParallel(partly)
        with pytest.raises(ValueError, match=rf"'0\.{trained}' has a main_grad"):
            unconvert(partly)
        del wrapper
    late = Linear(8, 8, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    late.weight.main_grad = torch.zeros(8, 8)
    late(torch.ones(1, 8)).sum().backward()
    del late.weight.main_grad
    with pytest.raises(ValueError, match=r"'Linear' has delayed weight gradients; call its backward_dw\(\) first"):
        unconvert(late)
    both = nn.Sequential(Linear(8, 8, fuse_wgrad_accumulation=True), late)
    with pytest.raises(ValueError, match="'1' has delayed weight gradients"):
        unconvert(both)
    assert all(layer.fuse_wgrad_accumulation for layer in both), "the model is as it was"
    (experts,) = models = nn.Sequential(tiny("mixtral", layers=1).model.layers[0].mlp.experts)
    convert_linears(models)
    experts.dispatcher = object()
    with pytest.raises(ValueError, match="'0' has this rank's experts alone, and transformers sends no tokens"):
        unconvert(models)


def test_without_a_provider_the_remedy_helps() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    convert_linears(model)
    with pytest.raises(RuntimeError, match=r"nobody provided it; .*unconvert\(model\)"):
        model(torch.ones(1, 8)).sum().backward()
    unconvert(model)
    model(torch.ones(1, 8)).sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("unwraps", [False, True])
def test_a_backward_after_its_wrapper_is_gone(unwraps: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    convert_linears(model)
    ddp = DistributedDataParallel(model)
    loss = ddp(torch.ones(1, 8)).sum()
    if unwraps:
        ddp.unwrap()
    del ddp
    gone = r"the wrapper that provided it for parameter '0\.weight' is gone .*keep the wrapper.*wrap the model again"
    with pytest.raises(RuntimeError, match=gone):
        loss.backward()
    ddp = DistributedDataParallel(model)  # which is forgotten then
    ddp(torch.ones(1, 8)).sum().backward()
    twin = copy.deepcopy(ddp)
    with pytest.raises(RuntimeError, match="nobody provided it"):
        twin(torch.ones(1, 8)).sum().backward()
    ddp.unwrap()
    twin = pickle.loads(pickle.dumps(model))
    with pytest.raises(RuntimeError, match="nobody provided it"):
        twin(torch.ones(1, 8)).sum().backward()


def test_scales_of_a_recipe_go_with_the_conversion() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).bfloat16()
    names = set(model.state_dict())
    convert_linears(model)
    wrapped = DistributedDataParallel(model)
    with autocast(recipe=DelayedScaling(amax_history_len=2)):
        loss = wrapped(torch.ones(4, 16, dtype=torch.bfloat16)).float().sum()
    loss.backward()
    wrapped.finish_grad_sync()
    assert set(model.state_dict()) > names
    assert unconvert(wrapped.unwrap()) == ("0", "1")
    assert set(model.state_dict()) == names
