"""Cross-entropy in place of the logits: the reference implementation and the Triton kernel against fp64 autograd."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_devices import LAUNCHER_DEVICES, LAUNCHER_DTYPES, nan_filled_memory

from maingrad.kernels.cross_entropy.chunks import Head, head_grads, head_losses
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
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_targets_and_gradients_of_any_strides(run: object, device: str) -> None:
    """One gradient for all tokens, as of a mean, has no memory of its own; targets may be a column of theirs."""
    assert callable(run)
    logits, targets, grads = operands(4, 33, torch.float32, device)
    apart = torch.full((4, 2), 7, device=device)
    apart[:, 0] = targets
    for given in (torch.tensor(0.25, device=device).expand(4), grads.repeat_interleave(2)[::2]):
        one, each = logits.clone(), logits.clone()
        found = run(one, apart[:, 0], LossTerms(), grads=given)
        expected = run(each, targets, LossTerms(), grads=given.contiguous())
        assert torch.equal(one, each) and torch.equal(found[0], expected[0])


@pytest.mark.parametrize("run", [cross_entropy_in_place, cross_entropy_triton])
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_logits_far_from_0_on_either_side(run: object, device: str) -> None:
    """What all logits have more changes no loss: exponentials of differences alone are taken."""
    assert callable(run)
    logits, targets, _ = operands(4, 33, torch.float32, device)
    expected, lse = run(logits, targets, LossTerms())
    for shift in (-500.0, 500.0):
        losses, shifted = run(logits + shift, targets, LossTerms())
        torch.testing.assert_close(losses, expected, rtol=0, atol=2e-4)
        torch.testing.assert_close(shifted, lse + shift, rtol=0, atol=2e-4)


@pytest.mark.parametrize("terms", [LossTerms(), LossTerms(3, 0.2, 0.05, 1.7, 0.6)], ids=str)
def test_fp64_stays_fp64(terms: LossTerms) -> None:
    """Logits, and a head with all of its gradients; the reference runs."""
    logits, targets, grads = operands(4, 33, torch.float64, "cpu")
    targets, grads = valid(targets, terms), grads.double()
    found, gradient = cross_entropy_in_place(logits.clone(), targets, terms), logits.clone()
    cross_entropy_in_place(gradient, targets, terms, lse=found[1], grads=grads)
    for mine, wanted in zip((*found, gradient), exact(logits, targets, grads, terms), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-13, atol=1e-13)
    draws = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=draws).double() for shape in ((4, 5), (33, 5), (33,)))
    head = Head(hidden, weight, bias, targets, terms, 3)
    leaves = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
    losses, lse, gradient = exact(F.linear(*leaves).detach(), targets, grads, terms)
    F.linear(*leaves).backward(gradient)
    main_grad = torch.zeros_like(weight)
    known = head_losses(head)
    made = head_grads(head, grads, None, needs_bias=True, main_grad=main_grad)
    assert made.losses is not None and made.bias is not None and made.hidden is not None
    for mine, wanted in (
        (known[0], losses), (known[1], lse), (made.losses, losses), (made.hidden, leaves[0].grad),
        (main_grad, leaves[1].grad), (made.bias, leaves[2].grad),
    ):  # fmt: skip
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_a_target_out_of_range_is_seen(device: str) -> None:
    """NaN of a kernel, which reads nothing there, and an error of the reference."""
    memory = torch.randn(7, 5, device=device)
    targets = torch.tensor([-1, 5, 6, -101, -100], device=device)
    losses, _ = cross_entropy_triton(memory[1:6], targets, LossTerms())
    assert losses is not None
    assert losses.isnan().tolist() == [True, True, True, True, False] and losses[4] == 0
    for target in (-1, 5, 6):
        with pytest.raises(RuntimeError, match="out of bounds"):
            cross_entropy_in_place(memory[1:2].cpu(), torch.tensor([target]), LossTerms())


@pytest.mark.parametrize("run", [cross_entropy_in_place, cross_entropy_triton])
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_logits_of_ignored_tokens_may_be_anything(run: object, device: str) -> None:
    assert callable(run)
    logits = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0], [0.0, 0.0]], device=device)
    targets = torch.tensor([-100, -100, 1], device=device)
    losses, _ = run(logits, targets, LossTerms(), grads=torch.tensor([float("nan"), 1.0, 1.0], device=device))
    assert losses is not None
    torch.testing.assert_close(losses.cpu(), torch.tensor([0.0, 0.0, 2.0]).log1p().clamp(max=0.6931472))
    torch.testing.assert_close(logits.cpu(), torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.5, -0.5]]))


@pytest.mark.parametrize("run", [cross_entropy_in_place, cross_entropy_triton])
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_what_is_ignored_may_be_a_number_above_all_classes(run: object, device: str) -> None:
    assert callable(run)
    logits, _, grads = operands(4, 5, torch.float32, device)
    found = []
    for ignored in (-100, 1000):
        given, targets = logits.clone(), torch.tensor([4, ignored, 0, ignored], device=device)
        losses, lse = run(given, targets, LossTerms(ignored, 0.2, 0.05), grads=grads)
        found.append((losses, lse, given))
    assert all(map(torch.equal, *found)) and not found[0][2][1::2].any()


def test_refused_arguments() -> None:
    logits, targets = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"needs logits \[T, V\] with adjacent columns"):
        cross_entropy_in_place(logits.t(), torch.zeros(4, dtype=torch.int64), LossTerms())
    with pytest.raises(ValueError, match=r"needs logits \[T, V\]"):
        cross_entropy_in_place(logits, targets[:2], LossTerms())
    with pytest.raises(ValueError, match=r"needs logits \[T, V\]"):
        cross_entropy_in_place(logits[None], targets[:1], LossTerms())
    with pytest.raises(ValueError, match=r"needs logits \[T, V\]"):
        cross_entropy_in_place(logits, targets[:, None], LossTerms())
    with pytest.raises(TypeError, match="needs int64 targets"):
        cross_entropy_in_place(logits, targets.int(), LossTerms())
    losses, lse = cross_entropy_in_place(logits[:0, ::2], targets[:0], LossTerms())  # which has no columns apart
    assert losses is not None and losses.shape == lse.shape == (0,)


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
    tokens: int, accumulator: torch.dtype, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was there before, and also without a token."""
    monkeypatch.setattr(torch, "empty_like", partial(torch.full_like, fill_value=float("nan")))
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


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("form", ["losses known", "first logits known", "losses too"])
@pytest.mark.sampled(6)
def test_a_head_in_chunks_is_the_head_at_once(form: str, biased: bool) -> None:
    """In fp32, with an ignored token, and chunks that the tokens do not fill."""
    draws = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 7, generator=draws).t(), torch.randn(6, 5, generator=draws)
    bias = torch.randn(6, generator=draws) if biased else None
    targets = torch.tensor([0, 5, -100, 2, 2, 1, 4])
    head = Head(hidden, weight, bias, targets, LossTerms(), 3)
    assert [(chunk.start, chunk.stop) for chunk in head.chunks()] == [(0, 3), (3, 6), (6, 7)]
    leaves = [each.clone().requires_grad_() for each in (hidden, weight, *([bias] if biased else []))]
    losses = F.cross_entropy(F.linear(*leaves), targets, reduction="none")
    upstream = torch.randn(7, generator=draws)
    losses.backward(upstream)
    found, lse, memory = head_losses(head)
    torch.testing.assert_close(found, losses.detach())
    assert memory.shape == (3, 6) and torch.allclose(memory, F.linear(hidden, weight, bias)[:3])
    main_grad = torch.full((6, 5), 2.0)
    known = {} if form == "losses too" else {"lse": lse}
    first = {"first_logits": memory} if form == "first logits known" else {}
    grads = head_grads(
        head, upstream, known.get("lse"), **first, needs_bias=biased, main_grad=main_grad, needs_hidden=True
    )
    assert grads.hidden is not None and grads.hidden.is_contiguous(), "however the input lies"
    torch.testing.assert_close(grads.hidden, leaves[0].grad)
    torch.testing.assert_close(main_grad - 2, leaves[1].grad)
    assert (grads.losses is None) is bool(known) and (grads.bias is None) is not biased
    if grads.losses is not None:
        torch.testing.assert_close(grads.losses, losses.detach())
    if grads.bias is not None:
        torch.testing.assert_close(grads.bias, leaves[2].grad)
    nothing = head_grads(head, upstream, lse, needs_hidden=False)
    assert nothing == (None, None, None)
    other = head_grads(head, upstream, lse, first_logits=head_losses(head)[2] + 1.0).hidden
    assert other is not None and torch.equal(other[3:], grads.hidden[3:])
    assert not torch.isclose(other[:2], grads.hidden[:2]).any(), "logits that are known are not computed again"


def test_sums_over_chunks_of_a_bf16_head_are_fp32() -> None:
    """Gradients of two classes are opposite: those of 256, 1 and -256 times half a token leave half of 1."""
    hidden, weight = torch.ones(3, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    head = Head(hidden, weight, torch.zeros(2, dtype=torch.bfloat16), torch.tensor([0, 0, 0]), LossTerms(), 1)
    assert [each.dtype for each in head_losses(head)] == [torch.float32, torch.float32, torch.bfloat16]
    upstream = torch.tensor([256.0, 1.0, -256.0])
    found = head_grads(head, upstream, None, needs_bias=True)
    assert found.bias is not None and found.bias.tolist() == [-0.5, 0.5] and found.bias.dtype is torch.float32
    main_grad = torch.full((2, 1), float("nan"), dtype=torch.bfloat16)
    for overwrite in (True, False):  # what bf16 has before is added once, to the sum of all chunks
        head_grads(head, upstream, None, main_grad=main_grad, overwrite=overwrite)
        assert main_grad.flatten().tolist() == ([-0.5, 0.5] if overwrite else [-1.0, 1.0])
    assert found.losses is not None and found.losses.dtype is torch.float32
    assert found.hidden is not None and found.hidden.dtype is torch.bfloat16


def test_a_head_without_tokens() -> None:
    head = Head(torch.zeros(0, 4), torch.zeros(3, 4), None, torch.zeros(0, dtype=torch.int64), LossTerms(), 8)
    losses, lse, memory = head_losses(head)
    assert losses.shape == lse.shape == (0,) and memory.shape == (0, 3) and not head.chunks()
    found = head_grads(head, torch.zeros(0), lse, needs_bias=True, overwrite=True)
    assert found.hidden is not None and found.hidden.shape == (0, 4)
    assert found.bias is not None and found.bias.tolist() == [0.0] * 3


def test_the_bias_gradient_of_a_bf16_head_is_summed_in_fp32() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 16).bfloat16(), torch.randn(24, 16).bfloat16()
    bias, targets = torch.randn(24).bfloat16(), torch.randint(24, (64,))
    head = Head(hidden, weight, bias, targets, LossTerms(), 64)
    db = head_grads(head, torch.ones(64), None, needs_bias=True).bias
    logits = torch.addmm(bias, hidden, weight.t())
    cross_entropy_in_place(logits, targets, LossTerms(), grads=torch.ones(64))
    assert db is not None and db.dtype is torch.float32
    torch.testing.assert_close(db, logits.double().sum(0).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("tokens", "sizes"), [(17, [6, 6, 5]), (16, [8, 8]), (3, [3]), (0, [])])
def test_chunks_are_as_even_as_can_be(tokens: int, sizes: list[int]) -> None:
    head = Head(torch.empty(tokens, 2), torch.empty(5, 2), None, torch.empty(tokens), LossTerms(), 8)
    assert [chunk.stop - chunk.start for chunk in head.chunks()] == sizes
    assert head.memory().shape == (max(sizes, default=0), 5)
