"""``convert_linears(model, fused_loss=True)``: Hugging Face's language models compute their losses without logits."""

import copy
import functools
import inspect
import itertools
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conversion import assert_close_to_exact, converted_iteration, plain_iteration
from language_models import ARCHITECTURES, VOCABULARY, batch, language_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from maingrad.ddp import DistributedDataParallel
from maingrad.ddp.plan.cut import Box
from maingrad.ddp.plan.model_slice import ModelSlice, set_model_slice
from maingrad.kernels.cross_entropy.reference import LossTerms
from maingrad.te_integration import Linear, convert_linears, unconvert
from maingrad.te_integration.conversion.fused_loss import LossHead


def wrapped(name: str = "llama", *, fused_loss: Any = True, **changed: Any) -> Any:
    """The model of ``language_model``, converted, under our wrapper."""
    model = language_model(name, **changed)
    convert_linears(model, fused_loss=fused_loss)
    return DistributedDataParallel(model)


def iteration(model: Any, *arguments: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the microbatches, and gradients of their sum."""
    losses = []
    for number, each in enumerate(arguments):
        with model.no_sync() if number < len(arguments) - 1 else torch.enable_grad():
            loss = model(**each).loss
            loss.backward()
        losses.append(loss.item())
    model.finish_grad_sync()
    return losses, {name: param.main_grad.clone() for name, param in model.module.named_parameters()}


def assert_alike(one: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]) -> None:
    """Up to rounding in fp32: of sums over up to 96 classes, 22 tokens and two layers."""
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    for name, grad in one[1].items():
        torch.testing.assert_close(grad, other[1][name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_its_own_loss(name: str) -> None:
    """Gradients are as close to fp64's as the plain model's, and no logits were computed."""

    def loss(model: Any, index: int) -> Tensor:
        outputs = model(**batch(index))
        assert isinstance(outputs.logits, Tensor) == (model in plain_models)
        return outputs.loss

    class Everything:
        def __contains__(self, model: Any) -> bool:
            return True

    plain_models: Any = Everything()
    model = language_model(name)
    plain, exact = plain_iteration(model, loss), plain_iteration(model, loss, dtype=torch.float64)
    plain_models = ()
    done = converted_iteration(model, loss, fused_loss=True)
    assert done.conversion.unfused_losses == {}
    assert_close_to_exact(done.grads, plain, exact)
    head = done.model.get_output_embeddings().weight
    writes = {name: done.fused_writes[name] for name, param in done.model.named_parameters() if param is head}
    assert list(writes.values()) in ([2], [4], [6])  # one in each microbatch, and one of each tied embedding


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "mixtral", "bart", "t5"])
@pytest.mark.sampled(6)
def test_logits_are_the_plain_models_if_they_are_read(name: str) -> None:
    """Bit for bit, with all that the architecture does to them; so are other outputs."""
    reference, model = wrapped(name, fused_loss=False), wrapped(name)
    plain = reference(**batch())
    outputs = model(**batch())
    logits = outputs.logits
    assert (logits.shape, logits.dtype, logits.device) == (plain.logits.shape, plain.logits.dtype, plain.logits.device)
    assert torch.equal(logits.argmax(-1), plain.logits.argmax(-1))
    assert torch.equal(torch.softmax(logits, -1), torch.softmax(plain.logits, -1))
    assert torch.equal(logits[0, 3:], plain.logits[0, 3:]) and torch.equal(2 - logits, 2 - plain.logits)
    for key, value in plain.items():
        if key not in ("loss", "logits") and isinstance(value, Tensor):
            assert torch.equal(outputs[key], value), key


def test_a_loss_of_logits_beside_the_models_own() -> None:
    """A program's term takes logits: gradients flow through both."""

    def run(model: Any) -> tuple[list[float], dict[str, Tensor]]:
        outputs = model(**batch())
        loss = outputs.loss + 0.1 * outputs.logits.float().logsumexp(-1).square().mean()
        loss.backward()
        model.finish_grad_sync()
        return [loss.item()], {name: param.main_grad.clone() for name, param in model.module.named_parameters()}

    assert_alike(run(wrapped()), run(wrapped(fused_loss=False)))


FORMS_OF_LABELS: dict[str, dict[str, Any]] = {
    "num_items_in_batch, a number": {"num_items_in_batch": 33},
    "num_items_in_batch, a tensor": {"num_items_in_batch": torch.tensor(33)},
    "shift_labels": {"shift_labels": batch(7)["labels"]},
    "logits_to_keep": {"logits_to_keep": 5, "shift_labels": batch(7)["labels"][:, -5:].contiguous()},
    "logits_to_keep, places": {"logits_to_keep": torch.tensor([1, 6]), "shift_labels": batch(7)["labels"][:, [1, 6]]},
    "ignore_index": {"ignore_index": 17},
    "nothing counts": {"labels": torch.full((2, 12), -100), "num_items_in_batch": 1},
    "a tuple": {"return_dict": False},
}


@pytest.mark.parametrize("form", FORMS_OF_LABELS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.sampled(8)
def test_arguments_of_the_loss(name: str, form: str) -> None:
    given = FORMS_OF_LABELS[form]

    def run(model: Any) -> tuple[list[float], dict[str, Tensor]]:
        arguments = {**batch(), **given}
        if "ignore_index" in given:
            arguments["labels"] = arguments["labels"].clamp(min=0)
        outputs = model(**arguments)
        loss = outputs[0]
        loss.backward()
        model.finish_grad_sync()
        return [loss.item()], {name: param.main_grad.clone() for name, param in model.module.named_parameters()}

    assert_alike(run(wrapped(name)), run(wrapped(name, fused_loss=False)))


def test_labels_may_come_by_their_place() -> None:
    model, given = wrapped(), batch()
    places = list(inspect.signature(model.module.forward).parameters)
    by_place = [given.get(name) for name in places[: places.index("labels") + 1]]
    found, expected = model(*by_place), model(**given)
    assert not isinstance(found.logits, Tensor) and torch.equal(found.loss, expected.loss)
    assert isinstance(model(*by_place[:-1]).logits, Tensor), "without labels"


@pytest.mark.in_turn
def test_accumulation_tied_and_frozen() -> None:
    for name, frozen in (("llama, tied", False), ("llama", True)):
        models = [wrapped_with_frozen_head(name, frozen, fused) for fused in (True, False)]
        one, other = (iteration(model, batch(0), batch(1), batch(2)) for model in models)
        assert_alike(one, other)


def wrapped_with_frozen_head(name: str, frozen: bool, fused_loss: bool) -> Any:
    model = language_model(name)
    model.lm_head.requires_grad_(not frozen)
    convert_linears(model, fused_loss=fused_loss)
    ddp = DistributedDataParallel(model)
    if frozen:
        ddp.module.lm_head.weight.main_grad = torch.zeros(())  # for ``iteration``
    return ddp


def test_without_labels_in_evaluation_and_when_asked_everything_is_as_before() -> None:
    plain, fused = wrapped(fused_loss=False).module, wrapped().module
    tokens = {"input_ids": batch()["input_ids"]}
    logits = fused(**tokens).logits
    assert isinstance(logits, Tensor) and torch.equal(logits, plain(**tokens).logits)
    one, other = fused(**batch(), skip_logits=False), plain(**batch())
    assert torch.equal(one.logits, other.logits) and torch.equal(one.loss, other.loss)
    places = inspect.signature(plain.forward).parameters.keys()
    by_place = fused(*[batch().get(name) for name in itertools.takewhile(lambda name: name != "use_cache", places)])
    assert not isinstance(by_place.logits, Tensor), "labels by their place are labels"
    before = [batch().get(name) for name in itertools.takewhile(lambda name: name != "labels", places)]
    for given in (before, [*before, None]):
        by_name = fused(*given[: len(before)], **{"labels": batch()["labels"]} if given is before else {})
        assert isinstance(by_name.logits, Tensor) == (given is not before)
    with torch.no_grad():
        assert isinstance(fused(**batch()).logits, Tensor)
    fused.eval(), plain.eval()
    assert isinstance(fused(**batch()).logits, Tensor)
    with torch.no_grad():
        one, other = fused(**batch()), plain(**batch())
        assert isinstance(one.logits, Tensor) and torch.equal(one.logits, other.logits)
        assert torch.equal(one.loss, other.loss)
        skipped = fused(**batch(), skip_logits=True)
        assert not isinstance(skipped.logits, Tensor)
        torch.testing.assert_close(skipped.loss, other.loss)
        generated = [model.generate(**tokens, max_new_tokens=4, do_sample=False) for model in (fused, plain)]
    assert torch.equal(*generated)


def test_logits_are_refused_once_the_weight_may_have_changed() -> None:
    model = wrapped()
    outputs, kept = model(**batch()), model(**batch())
    read = outputs.logits + 0
    outputs.loss.backward()
    assert torch.equal(outputs.logits + 0, read)  # they were computed before
    with pytest.raises(RuntimeError, match=r"read after a backward.*skip_logits=False"):
        kept.logits.argmax(-1)
    with pytest.raises(RuntimeError, match="read after a backward"):
        F.cross_entropy(kept.logits.view(-1, VOCABULARY), batch()["labels"].view(-1))
    model.zero_grad_buffer()
    weight = model.module.lm_head.weight
    for change in (model.finish_grad_sync, lambda: weight.sum().backward(), lambda: nn.init.zeros_(weight)):
        outputs = model(**batch())
        change()  # a step may follow, or have followed
        with pytest.raises(RuntimeError, match="read after a backward"):
            outputs.logits.sum()
        model.zero_grad_buffer()
    plain = language_model("llama")  # no wrapper at all
    convert_linears(plain, fused_loss=True)
    outputs = plain(**batch())
    with torch.no_grad():
        plain.lm_head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="after the head's weight has changed"):
        outputs.logits.sum()


@pytest.mark.parametrize("name", ["llama, tied", "mixtral"])
def test_names_files_and_copies_are_as_before(name: str, tmp_path: Any) -> None:
    plain, model = language_model(name), language_model(name)
    convert_linears(model, fused_loss=True)
    assert type(model).__name__ == type(plain).__name__ and isinstance(model, type(plain))
    assert list(model.state_dict()) == list(plain.state_dict())
    model.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path)
    assert type(again) is type(plain)
    for key, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    expected = plain(**batch()).loss
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        outputs = copied(**batch())
        torch.testing.assert_close(outputs.loss, expected)
        assert not isinstance(outputs.logits, Tensor)
    if name == "llama, tied":
        assert model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model).__module__ == type(plain).__module__ and model.lm_head.mode == "recompute"
    convert_linears(model, fused_loss="in_forward")  # another mode
    assert model.lm_head.mode == "in_forward"
    assert "lm_head" in unconvert(model)
    assert vars(model.lm_head).keys() == vars(plain.lm_head).keys()
    assert type(model) is type(plain) and type(model.lm_head) is nn.Linear
    assert torch.equal(model(**batch()).loss, expected)
    outer = nn.ModuleDict({"student": nn.Sequential(model)})
    convert_linears(outer, fused_loss="in_forward")
    assert type(model) is not type(plain)
    assert "student.0.lm_head" in unconvert(outer)
    assert type(model) is type(plain) and type(model.lm_head) is nn.Linear


class Doubled(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * 2
        return outputs


def test_other_losses_stay_and_the_report_says_why() -> None:
    def mine(logits: Tensor, labels: Tensor, **others: Any) -> Tensor:
        assert isinstance(logits, Tensor), "a program's kernel may take them"
        return logits.logsumexp(-1).mean()

    model = language_model("llama")
    model.loss_function = mine
    reasons = convert_linears(model, fused_loss=True).unfused_losses
    assert list(reasons) == [""] and "loss_function is" in reasons[""] and "mine" in reasons[""]
    assert isinstance(model(**batch()).logits, Tensor)

    doubled = Doubled(language_model("llama").config)
    assert "forward is not transformers' own" in convert_linears(doubled, fused_loss=True).unfused_losses[""]

    patched = language_model("llama")
    patched.forward = patched.forward
    assert "forward was replaced" in convert_linears(patched, fused_loss=True).unfused_losses[""]

    own_head, silent, compiled, replaced = (language_model("llama") for _ in range(4))
    own_head.lm_head = Linear(32, VOCABULARY)
    assert "head is a Linear, and not an nn.Linear" in convert_linears(own_head, fused_loss=True).unfused_losses[""]
    half = ModelSlice((2 * VOCABULARY, 32), (Box((0, 0), (VOCABULARY, 32)),), 0, None, "slice")
    set_model_slice(silent.lm_head.weight, half)
    assert "head is a slice of tensor parallelism" in convert_linears(silent, fused_loss=True).unfused_losses[""]
    theirs = compiled.loss_function
    compiled.loss_function = functools.wraps(theirs)(lambda *args, **kwargs: theirs(*args, **kwargs))
    compiled.loss_function._torchdynamo_orig_callable = theirs  # as torch.compile leaves it, which imports for seconds
    assert "loss_function is" in convert_linears(compiled, fused_loss=True).unfused_losses[""]
    replaced.lm_head.forward = replaced.lm_head.forward
    assert "head was not converted: see skipped" in convert_linears(replaced, fused_loss=True).unfused_losses[""]

    normed = language_model("llama")
    nn.utils.parametrizations.weight_norm(normed.lm_head)
    assert "head is a Parametrized" in convert_linears(normed, fused_loss=True).unfused_losses[""]

    late = wrapped()  # a loss that comes after the conversion is the program's too
    late.module.loss_function = mine
    outputs = late(**batch())
    assert torch.equal(outputs.loss, outputs.logits.logsumexp(-1).mean())

    inside = nn.ModuleDict({"policy": language_model("llama"), "value": nn.Linear(4, 1)})
    assert convert_linears(inside, fused_loss=True).unfused_losses == {}
    assert not isinstance(inside["policy"](**batch()).logits, Tensor)

    two = nn.ModuleDict({"kept": compiled, "fused": language_model("llama")})
    assert list(convert_linears(two, fused_loss=True).unfused_losses) == ["kept"]
    assert not isinstance(two["fused"](**batch()).logits, Tensor)

    class Classifier(nn.Module):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            return x

    class Headless(Classifier):
        def get_output_embeddings(self) -> None: ...

    for other in (Classifier(), Headless()):
        assert convert_linears(other, fused_loss=True).unfused_losses == {}, "no language model"
    for wrong in ("always", None):
        with pytest.raises(ValueError, match=f"is True, False or one of recompute, in_forward; got {wrong!r}"):
            convert_linears(inside, fused_loss=wrong)  # type: ignore[arg-type]


def test_autocast_and_bf16_follow_the_plain_model() -> None:
    """In bf16, logits have 8 bits: 4 roundings of a loss near 4.6."""
    for dtype, autocasts in ((torch.float32, True), (torch.bfloat16, False)):
        found = []
        for fused in (True, False):
            model = wrapped(fused_loss=fused).module.to(dtype)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
                found.append(model(**batch()).loss)
        assert found[0].dtype == found[1].dtype == torch.float32
        assert abs(found[0] - found[1]).item() < 4 * 2**-8


@pytest.mark.parametrize("count", [None, 33, torch.tensor(33)], ids=["mean", "number", "tensor"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.sampled(3)
def test_in_forward(name: str, count: Any) -> None:
    """``grad_scale`` announces what backward brings to the loss; the losses of routers are added behind it."""
    arguments = [batch(index) | ({} if count is None else {"num_items_in_batch": count}) for index in range(2)]

    def run(fused_loss: Any, scale: float | None = 0.5) -> tuple[list[float], dict[str, Tensor]]:
        model = wrapped(name, fused_loss=fused_loss)
        announced = {"grad_scale": scale} if fused_loss == "in_forward" else {}
        losses = []
        for number, each in enumerate(arguments):
            with model.no_sync() if number == 0 else torch.enable_grad():
                loss = model(**each, **announced).loss
                (loss / 2 if scale else loss).backward()
            losses.append(loss.item())
        model.finish_grad_sync()
        return losses, {name: param.main_grad.clone() for name, param in model.module.named_parameters()}

    assert_alike(run("in_forward"), run(False))
    if name == "llama":
        assert_alike(run("in_forward", None), run(False, None))  # 1 where nothing is announced


@pytest.mark.in_turn
def test_compiled_layers_and_recomputed_ones() -> None:
    expected = iteration(wrapped(fused_loss=False), batch())
    compiled = wrapped()
    for layer in compiled.module.model.layers:
        layer.compile(backend="aot_eager")
    assert_alike(iteration(compiled, batch()), expected)
    recomputed = wrapped()
    recomputed.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_alike(iteration(recomputed, batch()), expected)


@pytest.mark.in_turn
def test_a_whole_compiled_model() -> None:
    expected = iteration(wrapped("gemma2", fused_loss=False), batch())
    model = wrapped("gemma2")
    model.module.compile(backend="aot_eager")
    assert_alike(iteration(model, batch()), expected)
    with pytest.raises(RuntimeError, match="outside the forward, which was compiled"):
        model(**batch()).logits.sum()


def test_logits_in_functions_that_no_loss_needs() -> None:
    """A step that is not known computes the logits: the result is a tensor."""
    model = wrapped().module
    plain = language_model("llama")(**batch()).logits
    assert torch.equal(
        model(**batch()).logits[..., :-1, :].contiguous().view(-1, VOCABULARY) + 0,
        plain[..., :-1, :].reshape(-1, VOCABULARY),
    )
    for function in (
        lambda z: z[..., -1],
        lambda z: z[:, None],
        lambda z: z.view(-1),
        lambda z: z.flatten(0, 1) - 1,
        lambda z: z.transpose(1, 2),
        lambda z: torch.cat([z, z]),
        lambda z: z.tanh().tanh(),
        lambda z: z // 2,
        lambda z: 2 ** (z % 3),
        lambda z: z * torch.arange(VOCABULARY),
        lambda z: F.cross_entropy(z.flatten(0, 1), torch.full((24, VOCABULARY), 1 / VOCABULARY)),
        lambda z: F.cross_entropy(z.transpose(1, 2), batch()["labels"]),
        lambda z: F.cross_entropy(z.flatten(0, 1), batch()["labels"].flatten(), weight=torch.rand(VOCABULARY).fill_(2)),
        lambda z: next(iter(z)),
        lambda z: torch.tensor(len(z)),
    ):
        assert torch.equal(function(model(**batch()).logits) + 0, function(plain))


def test_the_programs_of_the_page() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/fused_loss.md").read_text()
    names: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(block, names)
    assert names["loss"].isfinite()


def test_a_forward_that_raised_leaves_the_head_as_it_was() -> None:
    """As out of memory in a long batch, which the program skips."""
    model = wrapped()

    def fails(module: nn.Module, args: Any) -> None:
        raise MemoryError

    hook = model.module.model.norm.register_forward_pre_hook(fails)
    with pytest.raises(MemoryError):
        model(**batch(0))
    hook.remove()
    head = model.module.get_output_embeddings()
    with pytest.raises(MemoryError), head.deferring():  # as in a wrapper that takes the loss itself
        raise MemoryError
    hidden = torch.randn(3, head.in_features)
    assert type(head(hidden)) is Tensor
    with head.deferring():
        for _ in range(2):
            assert not isinstance(head(hidden), Tensor) and torch.equal(head(hidden) + 0, hidden @ head.weight.T)
            model(**batch(0))  # leaves what the program has asked for
    found = iteration(model, batch(0))
    assert_alike(found, iteration(wrapped(), batch(0)))


def test_what_one_forward_announces_is_not_of_the_next() -> None:
    model = wrapped(fused_loss="in_forward")
    (model(**batch(), grad_scale=0.5).loss / 2).backward()
    (model(**batch(), grad_scale=0.5, num_items_in_batch=33).loss / 2).backward()
    head = model.module.get_output_embeddings()
    for reduction in ("mean", "sum"):
        with head.deferring():
            F.cross_entropy(head(torch.randn(3, head.in_features)), torch.arange(3), reduction=reduction).backward()


def test_a_head_that_is_given_targets_has_torchs_own_loss() -> None:
    head, hidden, targets = LossHead(8, 5), torch.randn(3, 8), torch.arange(3)
    for given, reduction in (({}, "mean"), ({"reduction": "sum"}, "sum"), ({"bias": torch.zeros(5)}, "mean")):
        expected = F.cross_entropy(head(hidden), targets, reduction=reduction)
        torch.testing.assert_close(head(hidden, targets, **given), expected)


class Products(TorchDispatchMode):
    """Counts products with a bias, and the rows of the last one."""

    count = rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.addmm.out:
            self.count, self.rows = self.count + 1, len(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "again"), [("recompute", 2), ("in_forward", 0)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_bias_of_the_architecture_has_the_loss_in_chunks_too(mode: Any, again: int, reduction: Any) -> None:
    torch.manual_seed(0)
    head = LossHead(8, 5, mode=mode, chunk_tokens=4)
    kept = DistributedDataParallel(nn.ModuleList([head, nn.Linear(1, 1)]))
    hidden, targets, bias = torch.randn(12, 8, requires_grad=True), torch.arange(12) % 5, torch.randn(5)
    bias.requires_grad_()
    head.grad_of_mean, head.grad_of_sum = (0.5, 0.25) if mode == "in_forward" else (None, None)
    terms = LossTerms(ignore_index=3, label_smoothing=0.1, logit_softcap=2.0, logit_scale=0.5)
    with Products() as forward:
        loss = head(hidden, targets, terms=terms, reduction=reduction, bias=bias)
    with Products() as backward:
        (found,) = torch.autograd.grad(loss * (0.5 if reduction == "mean" else 0.25), bias, retain_graph=True)
    assert (forward.count, forward.rows, backward.count) == (3, 4, again)
    logits = 2 * torch.tanh((hidden @ head.weight.T + bias) * 0.5 / 2)
    expected = F.cross_entropy(logits, targets, ignore_index=3, label_smoothing=0.1, reduction=reduction)
    torch.testing.assert_close(loss, expected)
    (wanted,) = torch.autograd.grad(expected * (0.5 if reduction == "mean" else 0.25), bias)
    torch.testing.assert_close(found, wanted)
    kept.abandon_iteration()
