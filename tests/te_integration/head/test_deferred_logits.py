"""Logits of a model whose loss is fused: those of its forward, whenever they are read."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from language_models import batch, language_model
from torch import Tensor

from maingrad.ddp import DistributedDataParallel
from maingrad.te_integration import convert_linears
from maingrad.te_integration.conversion.deferred_logits import DeferredLogits


def wrapped(name: str = "llama", *, fused_loss: Any = True, dtype: torch.dtype = torch.float32) -> Any:
    """The model of ``language_model``, converted, under our wrapper."""
    model = language_model(name).to(dtype)
    convert_linears(model, fused_loss=fused_loss)
    return DistributedDataParallel(model)


def test_logits_that_are_read_later_are_of_the_modes_of_the_forward() -> None:
    """Autocast ends with the forward, and a metric reads first, without grad: gradients are the plain model's."""

    def run(fused_loss: bool, mode: Any) -> tuple[Tensor, list[float], dict[str, Tensor]]:
        model = wrapped(fused_loss=fused_loss)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(**batch())
        assert outputs.logits.dtype == torch.bfloat16
        with mode():
            assert outputs.logits.requires_grad
            best = outputs.logits.argmax(-1)
        (loss := outputs.logits.float().square().mean()).backward()
        model.finish_grad_sync()
        grads = {name: param.main_grad.clone() for name, param in model.module.named_parameters()}
        return best, [loss.item()], grads

    for mode in (torch.no_grad, torch.inference_mode):
        (best, *found), (expected_best, *expected) = run(True, mode), run(False, mode)
        assert torch.equal(best, expected_best)
        assert found[0] == expected[0]
        assert all(torch.equal(grad, expected[1][name]) for name, grad in found[1].items())


def test_gradients_of_logits_are_refused() -> None:
    for name in ("retain_grad", "register_hook"):
        with pytest.raises(RuntimeError, match=rf"logits\.{name}.*skip_logits=False"):
            getattr(wrapped()(**batch()).logits, name)


def test_logits_beside_a_loss_that_writes_in_forward() -> None:
    """Another forward has written too."""
    model = wrapped(fused_loss="in_forward")
    with model.no_sync():
        first = model(**batch(0))
        second = model(**batch(1))
        plain = language_model("llama")
        assert torch.equal(first.logits + 0, plain(**batch(0)).logits)
        assert torch.equal(second.logits + 0, plain(**batch(1)).logits)
        third = model(**batch(2))
        (first.loss + second.loss).backward()
    with pytest.raises(RuntimeError, match="read after a backward"):
        third.logits.sum()


@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_of_a_narrow_dtype_rounds_the_announced_gradient(name: str, dtype: torch.dtype) -> None:
    """Neither model casts logits to fp32: backward brings 1/3 in 8 or 11 bits."""

    def run(fused_loss: Any, **announced: Any) -> dict[str, Tensor]:
        model = wrapped(name, fused_loss=fused_loss, dtype=dtype)
        loss = model(**batch(), **announced).loss
        assert loss.dtype is dtype
        (loss / 3).backward()
        model.finish_grad_sync()
        return {name: param.main_grad.clone() for name, param in model.module.named_parameters()}

    expected = run(True)
    for scale in (1 / 3, torch.tensor(1 / 3)):
        for key, grad in run("in_forward", grad_scale=scale).items():
            torch.testing.assert_close(grad, expected[key], rtol=2**-6, atol=1e-3, msg=key)


class PlainHead:
    """A head with logits: steps on ``DeferredLogits`` in its forward must be those steps on its logits."""

    mode, defers, out_features = "recompute", True, 7
    weight = torch.linspace(-1, 1, 35, dtype=torch.float64).view(7, 5).sin()

    def __init__(self, bias: Tensor | None = None) -> None:
        self.bias = bias

    def __call__(self, hidden: Tensor, targets: Tensor | None = None, **how: Any) -> Tensor:
        terms, bias = how.get("terms"), how.get("bias")
        bias = self.bias if bias is None else bias  # as of LossHead, one of them counts
        logits = hidden @ self.weight.T
        logits = logits if bias is None else logits + bias
        if targets is None:
            return logits
        assert terms.logit_softcap is None
        logits = terms.logit_scale * logits
        return F.cross_entropy(logits, targets, reduction=how["reduction"])


OF_CLASSES = torch.linspace(0, 1, 7, dtype=torch.float64)
OF_TOKENS = torch.linspace(0, 1, 42, dtype=torch.float64).view(6, 7).cos()
STEPS: dict[str, Any] = {
    "a bias and a scale": lambda z: (z + OF_CLASSES) * 3.0,
    "a bias behind a scale": lambda z: z / 0.5 + OF_CLASSES,
    "a number of each token and class": lambda z: z + OF_TOKENS,
    "casts": lambda z: z.float().to(torch.float64),
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("bias", [None, OF_CLASSES.sin()], ids=["", "a bias of the head"])
@pytest.mark.sampled(8)
def test_steps_between_logits_and_loss(steps: str, bias: Tensor | None) -> None:
    head, hidden = PlainHead(bias), torch.linspace(-2, 2, 30, dtype=torch.float64).view(6, 5)
    targets = torch.arange(6)
    found = STEPS[steps](DeferredLogits.of_forward(head, hidden))
    expected = STEPS[steps](head(hidden))
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(F.cross_entropy(found, targets), F.cross_entropy(expected, targets), rtol=1e-6, atol=0)
    assert torch.equal(found[expected > 0.1], expected[expected > 0.1]), "a mask of tokens and classes"
