"""Cross-entropy in place of the logits: the reference implementation and the Triton kernel against fp64 autograd."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_devices import LAUNCHER_DTYPES, nan_filled_memory

from maingrad.kernels.cross_entropy.chunks import Head, head_grads
from maingrad.kernels.cross_entropy.cross_entropy import cross_entropy_in_place
from maingrad.kernels.cross_entropy.reference import LossTerms

pytest.importorskip("triton", reason="the launcher is Triton's")
from maingrad.kernels.cross_entropy.triton_kernels import cross_entropy_triton

TERMS = [
    LossTerms(ignore_index, *terms)
    for ignore_index, terms in zip(
        itertools.cycle((-100, 3)), itertools.product((0.0, 0.2), (0.0, 0.05), (None, 1.7), (1.0, 0.6)), strict=False
    )
]
SIZES = [(1, 1), (3, 5), (4, 33), (2, 4100)]


def exact(logits: Tensor, targets: Tensor, grads: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, log-sum-exps and gradients of the logits, by autograd in fp64 over F.cross_entropy."""
    raw = logits.double().requires_grad_()
    z = raw * terms.logit_scale
    z = z if terms.logit_softcap is None else terms.logit_softcap * torch.tanh(z / terms.logit_softcap)
    options = {"ignore_index": terms.ignore_index, "label_smoothing": terms.label_smoothing, "reduction": "none"}
    lse = z.logsumexp(1)
    losses = F.cross_entropy(z, targets, **options)
    losses = losses + torch.where(targets == terms.ignore_index, 0.0, terms.z_loss * lse.square())
    (gradient,) = torch.autograd.grad(losses, raw, grads.double())
    return losses.detach(), lse.detach(), gradient


def operands(rows: int, classes: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * classes)
    logits = 3 * torch.randn(rows, classes + 3, generator=generator)
    targets = torch.randint(classes, (rows,), generator=generator)
    if rows > 1:
        targets[1] = -100 if classes < 10 else 3
    grads = torch.randn(rows, generator=generator)
    # Rows that are apart, as the columns of a larger buffer.
    return logits.to(device, dtype)[:, :classes], targets.to(device), grads.to(device)


def valid(targets: Tensor, terms: LossTerms) -> Tensor:
    """Targets of which each is a class or ignored."""
    return torch.where(targets == -100, terms.ignore_index, targets)


@pytest.mark.parametrize("run", [cross_entropy_in_place, cross_entropy_triton])
@pytest.mark.parametrize(("device", "dtype"), LAUNCHER_DTYPES)
@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.sampled(8)
def test_against_fp64(run: object, device: str, dtype: torch.dtype, terms: LossTerms) -> None:
    assert callable(run)
    for rows, classes in SIZES:
        if terms.ignore_index == 3 and classes < 10:
            continue
        logits, targets, grads = operands(rows, classes, dtype, device)
        targets = valid(targets, terms)
        losses, lse, gradient = exact(logits, targets, grads, terms)
        eps = torch.finfo(dtype).eps
        with nan_filled_memory():
            only_losses, only_lse = run(logits, targets, terms)
            again = logits.clone()
            both_losses, both_lse = run(again, targets, terms, grads=grads)
            nothing, same = run(logits, targets, terms, lse=only_lse, grads=grads)
        for found, expected in ((only_losses, losses), (only_lse, lse)):
            torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)
        assert torch.equal(both_losses, only_losses)
        assert torch.equal(both_lse, only_lse)
        assert nothing is None
        assert same is only_lse
        assert torch.equal(again, logits), "the order of the sums is the same"
        # One rounding of the stored gradient, beside the fp32 arithmetic.
        torch.testing.assert_close(logits.double(), gradient, rtol=eps, atol=2e-5 * float(grads.abs().max()))


@pytest.mark.parametrize("run", [cross_entropy_in_place, cross_entropy_triton])
@pytest.mark.parametrize(("device", "dtype"), LAUNCHER_DTYPES)
@pytest.mark.parametrize(
    "terms", [LossTerms(), LossTerms(ignore_index=-7, logit_softcap=1.7, logit_scale=0.6)], ids=str
)
@pytest.mark.parametrize("start", [1, 20])
def test_classes_in_two_parts(run: object, device: str, dtype: torch.dtype, terms: LossTerms, start: int) -> None:
    """With the log-sum-exp of all classes the parts' gradients are those of the whole."""
    assert callable(run)
    logits, targets, grads = operands(6, 33, dtype, device)
    targets = torch.where(targets == 3, terms.ignore_index, targets)
    targets[0], targets[2] = start - 1, start
    losses, lse, gradient = exact(logits, targets, grads, terms)
    of_target = torch.zeros_like(lse)
    for part, first in ((logits[:, :start], 0), (logits[:, start:], start)):
        own = targets - first
        own = torch.where((own < 0) | (own >= part.shape[1]), part.shape[1], own)
        own = torch.where(targets == terms.ignore_index, terms.ignore_index, own)
        found, own_lse = run(part, own, terms._replace(in_part=True))
        of_target += own_lse - found
        run(part, own, terms._replace(in_part=True), lse=lse.float(), grads=grads)
    counted = targets != terms.ignore_index
    torch.testing.assert_close((lse - of_target)[counted], losses[counted], rtol=2e-5, atol=4e-5)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(logits.double(), gradient, rtol=eps, atol=2e-5 * float(grads.abs().max()))


def test_a_gradient_for_all_tokens_has_no_memory_of_its_own() -> None:
    logits, targets, _ = operands(4, 33, torch.float32, "cpu")
    one, each = logits.clone(), logits.clone()
    cross_entropy_in_place(one, targets, LossTerms(), grads=torch.tensor(0.25).expand(4))
    cross_entropy_in_place(each, targets, LossTerms(), grads=torch.full((4,), 0.25))
    assert torch.equal(one, each)


def test_logits_of_ignored_tokens_may_be_anything() -> None:
    logits = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0], [0.0, 0.0]])
    targets = torch.tensor([-100, -100, 1])
    losses, _ = cross_entropy_in_place(logits, targets, LossTerms(), grads=torch.tensor([float("nan"), 1.0, 1.0]))
    assert losses is not None
    torch.testing.assert_close(losses, torch.tensor([0.0, 0.0, 2.0]).log1p().clamp(max=0.6931472))
    torch.testing.assert_close(logits, torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.5, -0.5]]))


def test_refused_arguments() -> None:
    logits, targets = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"needs logits \[T, V\] with adjacent columns"):
        cross_entropy_in_place(logits.t(), torch.zeros(4, dtype=torch.int64), LossTerms())
    with pytest.raises(ValueError, match=r"needs logits \[T, V\]"):
        cross_entropy_in_place(logits, targets[:2], LossTerms())
    with pytest.raises(TypeError, match="needs int64 targets"):
        cross_entropy_in_place(logits, targets.int(), LossTerms())


# ---- A head, chunk of tokens by chunk. ----


def head_of(tokens: int, dtype: torch.dtype, chunk_tokens: int) -> Head:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 8, generator=generator).to(dtype) for rows in (tokens, 33))
    targets = torch.randint(33, (tokens,), generator=generator)
    return Head(hidden, weight, None, targets, LossTerms(), chunk_tokens)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("accumulator", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 11])
@pytest.mark.sampled(8)
def test_chunks_add_to_the_weights_accumulator_or_write_it(
    tokens: int, accumulator: torch.dtype, overwrite: bool
) -> None:
    """Whatever was there before, and also without a token."""
    head = head_of(tokens, torch.bfloat16, chunk_tokens=4)
    before = torch.full((33, 8), 0.5, dtype=accumulator)
    main_grad = torch.full_like(before, float("nan")) if overwrite else before.clone()
    head_grads(head, torch.full((tokens,), 0.125), None, main_grad=main_grad, overwrite=overwrite)
    hidden, weight = head.hidden.double(), head.weight.double().requires_grad_()
    (0.125 * F.cross_entropy(hidden @ weight.t(), head.targets, reduction="sum")).backward()
    assert weight.grad is not None
    expected = weight.grad if overwrite else weight.grad + 0.5
    # Logits and their gradients are rounded to bf16: 2^-8 of each.
    torch.testing.assert_close(main_grad.double(), expected, rtol=2**-6, atol=2**-6)
