"""A weight in slices, each a parameter with an owner, a hook and a gradient of its own."""

import copy
from typing import Any

import pytest
import torch
from loops import wrap
from torch import Tensor

from maingrad.te_integration import LayerNormLinear, Linear


@pytest.mark.parametrize("kind", [Linear, LayerNormLinear])
@pytest.mark.parametrize("hooked", ["query_weight", "key_weight", "value_weight"])
@pytest.mark.parametrize(("delay", "late"), [(False, False), (True, False), (False, True)])
def test_a_hook_on_any_slice_sees_its_gradient(kind: Any, hooked: str, delay: bool, late: bool) -> None:
    """With ``weight.register_hook``, before or after the forward, autograd has to deliver the gradient to the hook."""
    torch.manual_seed(0)
    split = ("query_", "key_", "value_")
    plain = kind(4, 6, parameters_split=split)
    model = kind(4, 6, parameters_split=split, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    model.load_state_dict(copy.deepcopy(plain.state_dict()))
    ddp = wrap(model, overlap_grad_reduce=True)
    seen: list[Tensor] = []

    def halved(grad: Tensor) -> Tensor:
        seen.append(grad.clone())
        return grad / 2

    x = torch.randn(3, 4)
    if late:
        loss = ddp(x).square().sum()
    model.get_parameter(hooked).register_hook(halved)
    if not late:
        loss = ddp(x).square().sum()
    loss.backward()
    model.backward_dw()
    ddp.finish_grad_sync()
    plain(x).square().sum().backward()
    for name, param in plain.named_parameters():
        assert param.grad is not None
        wanted = param.grad / 2 if name == hooked else param.grad
        torch.testing.assert_close(model.get_parameter(name).main_grad, wanted)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], plain.get_parameter(hooked).grad)


@pytest.mark.parametrize("kind", [Linear, LayerNormLinear])
def test_a_slice_has_memory_of_its_own(kind: Any) -> None:
    """A slice that is saved, shared or freed by itself does not take the others along."""
    module = kind(4, 6, parameters_split=("query_", "key_", "value_"))
    for prefix in ("query_", "key_", "value_"):
        for param in (module.get_parameter(f"{prefix}weight"), module.get_parameter(f"{prefix}bias")):
            assert param.untyped_storage().nbytes() == param.nbytes


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_copy_of_a_module_that_delays_calls_nobody_back(wrapped: bool) -> None:
    """Functions that a provider has registered stay with the original module."""
    calls: list[str] = []
    layer = Linear(4, 4, delay_wgrad_compute=True)
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append("backward_dw"))
    twin = copy.deepcopy(wrap(layer) if wrapped else layer)
    for _ in range(2):
        twin(torch.ones(1, 4)).sum().backward()
        twin.backward_dw()
    assert calls == []
    assert twin.weight.grad is not None
    assert twin.weight.skip_backward_post_hook  # it delays, and says so to its own provider
    layer(torch.ones(1, 4)).sum().backward()
    layer.backward_dw()
    assert calls == ["backward_dw"]


@pytest.mark.parametrize("kind", [Linear, LayerNormLinear])
def test_slices_and_their_biases_lie_in_the_order_of_their_names(kind: Any) -> None:
    torch.manual_seed(0)
    whole = kind(4, 6)
    torch.manual_seed(0)
    split, x = kind(4, 6, parameters_split={"query_": 1, "key_": 2, "value_": 3}), torch.randn(3, 4)
    torch.testing.assert_close(split(x), whole(x))
    assert torch.equal(torch.cat([split.query_bias, split.key_bias, split.value_bias]), whole.bias)
    returning = kind(4, 6, parameters_split=("query_", "key_"), return_bias=True)
    assert torch.equal(returning(x)[1], torch.cat([returning.query_bias, returning.key_bias]))
    for name, param in split.named_parameters():
        torch.nn.init.constant_(param, {"query_bias": 1.0, "key_bias": 2.0, "value_bias": 3.0}.get(name, 0.0))
    assert torch.equal(split(x)[0], torch.tensor([1.0, 2.0, 2.0, 3.0, 3.0, 3.0]))
    split.reset_parameters()
    assert all(param.any() for name, param in split.named_parameters() if name != "layer_norm_bias")
