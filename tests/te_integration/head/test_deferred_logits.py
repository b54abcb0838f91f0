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
        assert bias is None or bias.dim() == 1
        bias = self.bias if bias is None else bias  # as of LossHead, one of them counts
        logits = hidden @ self.weight.T
        logits = logits if bias is None else logits + bias
        if targets is None:
            return logits
        logits, cap = terms.logit_scale * logits, terms.logit_softcap
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        options = {"ignore_index": terms.ignore_index, "label_smoothing": terms.label_smoothing}
        return F.cross_entropy(logits, targets, reduction=how["reduction"], **options)


class CountingHead(PlainHead):
    """Counts products without targets: logits."""

    num_products = 0

    def __call__(self, hidden: Tensor, targets: Tensor | None = None, **how: Any) -> Tensor:
        self.num_products += targets is None
        return super().__call__(hidden, targets, **how)


OF_CLASSES = torch.linspace(0, 1, 7, dtype=torch.float64)
OF_TOKENS = torch.linspace(0, 1, 42, dtype=torch.float64).view(6, 7).cos()
STEPS: dict[str, Any] = {
    "a bias and a scale": lambda z: (z + OF_CLASSES) * 3.0,
    "a bias behind a scale": lambda z: z / 0.5 + OF_CLASSES,
    "a number of each token and class": lambda z: z + OF_TOKENS,
    "casts": lambda z: z.float().to(torch.float64),
    "a cap": lambda z: torch.tanh(2.0 * z / 3.0) * 3.0,
    "a cap that turns the sign": lambda z: z.tanh() * -3.0,
    "a factor of each class": lambda z: 2.0 * z * OF_CLASSES,
    "a divisor of each class": lambda z: z / (OF_CLASSES + 1.0),
    "a factor in a tensor": lambda z: z * torch.tensor(3.0, dtype=torch.float64),
    "two caps": lambda z: (z.tanh() * 2.0).tanh(),
    "a bias behind a cap": lambda z: F.tanh(z) + OF_CLASSES,
    "a bias with more dims": lambda z: z + OF_CLASSES[None],
    "two biases": lambda z: z + OF_CLASSES + OF_CLASSES,
    "a bias from the left": lambda z: OF_CLASSES + (z + OF_CLASSES),
    "integers between": lambda z: (3.0 * z).to(torch.int64).to(torch.float64),
}
OF_A_LOSS = {"a bias and a scale", "a bias with more dims", "casts", "a cap"}
"""Steps that the head's own loss takes: no logits exist. A second bias is none of them."""


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("bias", [None, OF_CLASSES.sin()], ids=["", "a bias of the head"])
@pytest.mark.sampled(30)
def test_steps_between_logits_and_loss(steps: str, bias: Tensor | None) -> None:
    head, hidden = CountingHead(bias), torch.linspace(-2, 2, 30, dtype=torch.float64).view(6, 5)
    targets = torch.arange(6)
    found = STEPS[steps](DeferredLogits.of_forward(head, hidden))
    expected = STEPS[steps](PlainHead(bias)(hidden))
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(F.cross_entropy(found, targets), F.cross_entropy(expected, targets), rtol=1e-6, atol=0)
    fused = steps in OF_A_LOSS and not (bias is not None and "a bias" in steps)
    assert head.num_products == (0 if fused else 1)
    assert torch.equal(found[expected > 0.1], expected[expected > 0.1]), "a mask of tokens and classes"


def deferred(*leading: int) -> tuple[CountingHead, DeferredLogits, Tensor]:
    """A head, and its logits [..., 7] deferred and computed."""
    hidden = torch.linspace(-2, 2, 30, dtype=torch.float64).view(*leading, 5)
    head = CountingHead()
    return head, DeferredLogits.of_forward(head, hidden), PlainHead()(hidden)


ROWS = torch.tensor([[True, False, True], [False, False, True]])
WITHOUT_LOGITS: dict[str, Any] = {
    "sizes": lambda z: torch.tensor([*z.size(), z.size(0), z.size(1), z.size(-1), z.dim(), z.ndim, z.numel()]),
    "device": lambda z: z.to(z.device),
    "contiguous": lambda z: z.contiguous(),
    "fp32": lambda z: z.float(),
    "the last cast": lambda z: z.float().to(torch.bfloat16),
    "a scale": lambda z: 3 * z * 0.5 / 4,
    "caps": lambda z: torch.tanh(F.tanh(z.tanh())),
    "a bias": lambda z: z + OF_CLASSES[None, None],
    "view": lambda z: z.view(-1, 7),
    "view by a tuple": lambda z: z.view((3, 2, 7)),
    "reshape": lambda z: z.reshape(6, z.size(-1)),
    "flatten": lambda z: z.flatten(0, 1),
    "flatten from behind": lambda z: z.flatten(0, -2),
    "a shift": lambda z: z[..., :-1, :].contiguous(),
    "a shift of the second dim": lambda z: z[:, 1:],
    "a row": lambda z: z[1, -1],
    "all": lambda z: z[...],
    "a mask of rows": lambda z: z[ROWS],
    "rows": lambda z: z[torch.tensor([1, 0, 1])],
}
WITH_LOGITS: dict[str, Any] = {
    "view into other sizes": lambda z: z.view(7, 6),
    "view as a vector": lambda z: z.reshape(-1),
    "flatten all": lambda z: z.flatten(),
    "flatten classes": lambda z: z.flatten(1),
    "flatten classes by both dims": lambda z: z.flatten(1, 2),
    "some classes": lambda z: z[..., :3],
    "one class": lambda z: z[..., 0],
    "an element": lambda z: z[1, 2, 3],
    "a new dim": lambda z: z[None],
    "a list": lambda z: z[[1, 0]],
    "a mask": lambda z: z[ROWS[..., None].expand(2, 3, 7)],
    "a truth": lambda z: z[True],
    "dtype and device": lambda z: z.to(torch.float32, copy=True),
    "device by name": lambda z: z.to("cpu"),
    "device and dtype": lambda z: z.to(z.device, torch.float32),
    "device, and dtype by name": lambda z: z.to(z.device, dtype=torch.float32),
    "dtype by name": lambda z: z.to(dtype=torch.float32),
    "a number first": lambda z: 1 + 2 * z - z / 4,
    "a number from the left": lambda z: (1 - z) + 2 / (3 + z * z),
    "itself": lambda z: z * z + z / (2 + z * z) + z,
    "powers": lambda z: -(z**2) + abs(z) + 2**z,
    "a truth as a number": lambda z: z * True,
    "comparisons": lambda z: (z > 0) & (z <= 1) | (z == z[0, 0, 0]) | (z != 1),
    "more comparisons": lambda z: (z < 0.5) & (z >= -1),
    "remainders": lambda z: (+z % 3) + 2 % (z + 9) + z // 2 + 3 // (z + 9),
    "a product": lambda z: z @ torch.ones(7, 2, dtype=torch.float64),
    "a product from the left": lambda z: torch.ones(3, 3, dtype=torch.float64) @ z,
    "a function": lambda z: torch.cat([z, torch.softmax(z, dim=-1)]),
    "a function by keyword": lambda z: torch.softmax(input=z, dim=-1),
    "a method": lambda z: z.topk(2).values,
    "iteration": lambda z: torch.stack([*z])[: len(z)],
    "one number": lambda z: torch.tensor([float(z[0, 0, :1]), int(z[1, 2, 6:]), bool(z[0, 0, :1])]),
}


@pytest.mark.parametrize("read", [*WITHOUT_LOGITS, *WITH_LOGITS])
def test_all_that_is_done_to_logits_is_what_a_tensor_gives(read: str) -> None:
    """Before the logits are computed, and once they are."""
    for is_computed in (False, True):
        head, z, expected = deferred(2, 3)
        if is_computed:
            z.sum()
        found, wanted = ({**WITHOUT_LOGITS, **WITH_LOGITS}[read](each) for each in (z, expected))
        assert read in WITH_LOGITS or head.num_products == is_computed, "no logits"
        for each in (found, found.values() if isinstance(found, DeferredLogits) else found):
            assert (each.dtype, each.shape, each.requires_grad) == (wanted.dtype, wanted.shape, wanted.requires_grad)
        torch.testing.assert_close(each, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("trained", ["hidden", "weight", ""])
@pytest.mark.sampled(12)
def test_modes_are_those_of_the_forward(autocasts: bool, grad: bool, trained: str) -> None:
    """What is known without logits, the logits, and their loss: read in other modes than the forward's."""
    head, hidden, targets = CountingHead(), torch.linspace(-2, 2, 30).view(6, 5), torch.arange(6)
    hidden.requires_grad_(trained == "hidden")
    head.weight = PlainHead.weight.float().requires_grad_(trained == "weight")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts), torch.set_grad_enabled(grad):
        z, other = (DeferredLogits.of_forward(head, hidden) for _ in range(2))
        expected = head(hidden)
        loss, plain_loss = (F.cross_entropy(logits, targets) for logits in (other, expected))
    assert (loss.dtype, loss.requires_grad) == (plain_loss.dtype, plain_loss.requires_grad)
    with torch.autocast("cpu", torch.bfloat16, enabled=not autocasts), torch.set_grad_enabled(not grad):
        for logits in (z, z.values()):
            assert (logits.dtype, logits.requires_grad) == (expected.dtype, grad and bool(trained))
        assert torch.equal(z.values(), expected)


def test_a_number_of_each_of_as_many_tokens_as_classes_is_no_bias() -> None:
    head, hidden, targets = CountingHead(), torch.linspace(-2, 2, 35, dtype=torch.float64).view(7, 5), torch.arange(7)
    found, expected = DeferredLogits.of_forward(head, hidden), PlainHead()(hidden)
    for other in (OF_CLASSES[:, None], OF_TOKENS[:1].T, torch.ones((), dtype=torch.float64)):
        torch.testing.assert_close(found + other, expected + other)
    torch.testing.assert_close(
        F.cross_entropy(found + OF_CLASSES[:, None], targets), F.cross_entropy(expected, targets)
    )


def test_autocast_leaves_fp64_as_it_is() -> None:
    head, hidden, targets = PlainHead(), torch.linspace(-2, 2, 30, dtype=torch.float64).view(6, 5), torch.arange(6)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = DeferredLogits.of_forward(head, hidden), head(hidden)
        for change in (lambda z: z, lambda z: z.double(), lambda z: z.float(), lambda z: z.bfloat16()):
            losses = [F.cross_entropy(change(logits), targets) for logits in (found, expected)]
            assert found.dtype is expected.dtype and losses[0].dtype is losses[1].dtype


def test_a_private_name_that_somebody_looks_for_is_not_there() -> None:
    """A tensor has other ones; no logits are computed to look."""
    head, z, _ = deferred(2, 3)
    assert not hasattr(z, "_of_a_program") and not hasattr(z, "__array_interface__") and not hasattr(z, "_version")
    with pytest.raises(AttributeError, match="DeferredLogits has no attribute '_of_a_program'"):
        z._of_a_program  # noqa: B018
    assert head.num_products == 0


def test_logits_are_computed_once_and_may_be_written() -> None:
    head, z, expected = deferred(2, 3)
    assert z.to(torch.device("meta")).is_meta
    assert z.values() is z.values() and head.num_products == 1
    z[0] = expected[0] = 5.0
    for each in (z, z.view(6, 7), z.float(), z + OF_CLASSES, z[..., :-1, :]):
        assert not isinstance(each, DeferredLogits) or each is z, "what was written is in it"
    assert torch.equal(z.flatten(0, 1), expected.flatten(0, 1)) and head.num_products == 1
    losses = [F.cross_entropy(logits.reshape(6, 7), torch.arange(6)) for logits in (z, expected)]
    assert torch.equal(*losses)
    _, z, expected = deferred(6)
    z[0] = expected[0] = 5.0
    assert torch.equal(F.cross_entropy(z, torch.arange(6)), F.cross_entropy(expected, torch.arange(6)))


PROBABILITIES = torch.linspace(0, 1, 42, dtype=torch.float64).view(6, 7).softmax(-1)
LOSSES: dict[str, tuple[Any, bool]] = {
    "plain": (lambda z, t: F.cross_entropy(z, t), True),
    "a sum": (lambda z, t: F.cross_entropy(z, t, reduction="sum"), True),
    "of each token": (lambda z, t: F.cross_entropy(z, t, reduction="none"), True),
    "an ignored class": (lambda z, t: F.cross_entropy(z, t, ignore_index=3), True),
    "smoothing": (lambda z, t: F.cross_entropy(z, t, label_smoothing=0.2), True),
    "weights of classes": (lambda z, t: F.cross_entropy(z, t, OF_CLASSES), False),
    "weights, and all else": (
        lambda z, t: F.cross_entropy(z, t, OF_CLASSES, ignore_index=3, reduction="sum", label_smoothing=0.2),
        False,
    ),
    "probabilities": (lambda z, t: F.cross_entropy(z, PROBABILITIES), False),
    "torch's former sum": (lambda z, t: F.cross_entropy(z, t, size_average=False), False),
    "torch's former losses": (lambda z, t: F.cross_entropy(z, t, reduce=False), False),
    "classes in the second dim": (lambda z, t: F.cross_entropy(z.view(2, 3, 7).transpose(1, 2), t.view(2, 3)), False),
    "a module": (lambda z, t: torch.nn.CrossEntropyLoss(reduction="sum")(z, t), True),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_logits(loss: str) -> None:
    (compute, fused), targets = LOSSES[loss], torch.arange(6)
    head, z, expected = deferred(6)
    torch.testing.assert_close(compute(z, targets), compute(expected, targets))
    assert head.num_products == (0 if fused else 1)


def test_losses_that_a_head_cannot_compute_ahead_read_the_logits() -> None:
    """Of each token where the head writes in forward, and of a head whose model's forward is over."""
    forms = (({"mode": "in_forward"}, "none", 1), ({"mode": "in_forward"}, "mean", 0), ({"defers": False}, "mean", 1))
    for options, reduction, reads in forms:
        head, z, expected = deferred(6)
        vars(head).update(options)
        targets = torch.arange(6)
        losses = [F.cross_entropy(logits, targets, reduction=reduction) for logits in (z, expected)]
        torch.testing.assert_close(*losses)
        assert head.num_products == reads
