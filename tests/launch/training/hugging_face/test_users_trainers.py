"""Trainers and models as users bring them: methods of their own, running statistics, generation, encoders."""

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from hugging_face_runs import VOCABULARY, Sentences, arguments, as_launched, import_trainers, language_model

FORMS = ("ddp", "zero1", "fsdp")


@pytest.fixture(autouse=True)
def _imported() -> None:
    """On a busy machine imports take longer than all of a job, whose seconds are limited."""
    run_ranks(import_trainers, 2, timeout=300.0)


def train(kind: str, base: Any, model: Any, args: Any, **given: Any) -> tuple[Any, list[float]]:
    """Train by ``base``, or by maingrad's Trainer before it, and return what is logged with the final weights' sums."""
    import transformers

    from maingrad.launch.training.hugging_face import Trainer

    transformers.utils.logging.disable_progress_bar()
    given = {"train_dataset": Sentences(44), "eval_dataset": Sentences(10, seed=1), **given}
    if kind == "plain":
        trainer = base(model, args, **given)
    else:
        first = () if issubclass(base, Trainer) else (Trainer,)
        trainer = type("Both", (*first, base), {})(model, args, parallel=kind, **given)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    logged = [
        each[key] for each in trainer.state.log_history for key in ("loss", "grad_norm", "eval_loss") if key in each
    ]
    return trainer, logged


class Normalised(torch.nn.Module):
    """Running statistics, which each rank's forward writes from its own rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = torch.nn.BatchNorm1d(12)
        self.linear = torch.nn.Linear(12, 12)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.linear(self.norm(input_ids / 10)) - labels.clamp(min=0) / 5).square().mean()}


def with_statistics(kind: str, folder: Path, shared: bool | None) -> list[float]:
    import transformers

    options = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "ddp_broadcast_buffers": shared}
    ours: dict[str, Any] = {"fsdp_units": ["Linear"]} if kind == "fsdp" else {}
    with as_launched():
        trainer, logged = train(kind, transformers.Trainer, Normalised(), arguments(folder, **options), **ours)
    norm = trainer.model.norm
    return [*logged, *norm.running_mean.tolist(), *norm.running_var.tolist(), float(norm.num_batches_tracked)]


@pytest.mark.in_turn
@pytest.mark.parametrize("shared", [None, False])
@pytest.mark.sampled(1)
def test_running_statistics(shared: bool | None, tmp_path: Path) -> None:
    """Evaluations read the first rank's statistics, or each rank's own, as under torch's wrapper."""
    plain = run_ranks(with_statistics, 2, "plain", tmp_path, shared)
    for form in FORMS:
        for seen, expected in zip(run_ranks(with_statistics, 2, form, tmp_path, shared), plain, strict=True):
            assert seen == pytest.approx(expected, abs=1e-5)


def with_a_step_of_ones_own(kind: str, folder: Path) -> list[float]:
    import transformers

    class OwnStep(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
            return loss.detach()

    from maingrad.launch.training.hugging_face import Trainer

    # The user's method comes first, as in a subclass of maingrad's Trainer.
    base = OwnStep if kind == "plain" else type("Own", (Trainer,), {"training_step": OwnStep.training_step})
    with as_launched():
        return train(kind, base, language_model(), arguments(folder, max_steps=8))[1]


@pytest.mark.in_turn
def test_a_training_step_of_ones_own(tmp_path: Path) -> None:
    """Its microbatches accumulate, and the last one's gradients are waited for, with no word of maingrad's in it."""
    plain, *_ = run_ranks(with_a_step_of_ones_own, 2, "plain", tmp_path)
    for form in FORMS:
        assert run_ranks(with_a_step_of_ones_own, 2, form, tmp_path)[1] == pytest.approx(plain, abs=1e-5)


def with_groups_of_ones_own(kind: str, folder: Path) -> list[float]:
    import transformers

    from maingrad.launch.training.hugging_face import Trainer

    class Plain(transformers.Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                wrapped = self.wrapped_model() if isinstance(self, Trainer) else self.model
                named = dict(wrapped.named_parameters())
                head = {"params": [named.pop("lm_head.weight")], "lr": 3e-2}
                self.optimizer = torch.optim.AdamW([{"params": list(named.values())}, head], lr=1e-2)
            return self.optimizer

    names: dict[str, Any] = {"Trainer": Trainer}
    page = Path(__file__).resolve().parents[4] / "docs/hugging_face.md"
    exec(page.read_text().rpartition("```python\n")[2].partition("```")[0], names)
    base = {"plain": Plain, "fsdp": type("Own", (Trainer,), {"create_optimizer": Plain.create_optimizer})}
    with as_launched():
        return train(kind, base.get(kind, names["Grouped"]), language_model(), arguments(folder, max_steps=5))[1]


@pytest.mark.slow
def test_groups_of_ones_own(tmp_path: Path) -> None:
    """The page's ``create_optimizer`` updates as torch's optimizer with the same groups does."""
    plain, *_ = run_ranks(with_groups_of_ones_own, 2, "plain", tmp_path)
    for form in FORMS:
        assert run_ranks(with_groups_of_ones_own, 2, form, tmp_path)[0] == pytest.approx(plain, abs=1e-5)


def generating(kind: str, folder: Path) -> list[Any]:
    """T5 has tied embeddings, and ``generate`` calls its encoder alone; each rank ends when its own rows have."""
    from transformers import (
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
        TrainerCallback,
    )

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1))
    model.generation_config.max_length = 9
    seen: list[Any] = []

    class Sample(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
            prompt = torch.tensor([[1, 2, 3]])
            seen.append(model.eval().generate(prompt, max_new_tokens=2 + 3 * args.process_index).tolist())

    def remember(predicted: Any) -> dict[str, float]:
        seen.append(predicted.predictions.tolist())
        return {}

    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1, "seed": 5}
    where = {"use_cpu": True, "ddp_backend": "gloo", "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    evaluated = {"predict_with_generate": True, "eval_strategy": "steps", "eval_steps": 2}
    given = {"compute_metrics": remember, "callbacks": [Sample()]}
    with as_launched():
        args = Seq2SeqTrainingArguments(str(folder), max_steps=4, learning_rate=1e-2, **options, **where, **evaluated)
        return [*train(kind, Seq2SeqTrainer, model, args, **given)[1], seen]


@pytest.mark.slow
def test_ranks_generate_different_lengths(tmp_path: Path) -> None:
    """Under "fsdp" each forward gathers: ranks run as many, and an encoder that is called alone has whole weights."""
    plain = run_ranks(generating, 2, "plain", tmp_path)
    assert len(plain[0][-1][-1][0]) != len(plain[1][-1][-1][0]), "both ranks generated the same length"
    for form in ("zero1", "fsdp"):
        for seen, expected in zip(run_ranks(generating, 2, form, tmp_path), plain, strict=True):
            assert seen[:-1] == pytest.approx(expected[:-1], abs=1e-5)
            assert seen[-1] == expected[-1]


def of_bert(kind: str, folder: Path) -> list[float]:
    """Its embeddings are a block, which holds the input embedding; that one is tied to the output's decoder."""
    from transformers import BertConfig, BertForMaskedLM, Trainer

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16}
    logged: list[float] = []
    for tied in (True, False):
        model = BertForMaskedLM(BertConfig(**sizes, num_attention_heads=2, tie_word_embeddings=tied))
        with as_launched():
            logged += train(kind, Trainer, model, arguments(folder, max_steps=3))[1]
    return logged


@pytest.mark.slow
def test_embeddings_inside_a_block(tmp_path: Path) -> None:
    plain, *_ = run_ranks(of_bert, 2, "plain", tmp_path)
    assert run_ranks(of_bert, 2, "fsdp", tmp_path)[0] == pytest.approx(plain, abs=1e-5)


class ProductAndLoss(torch.autograd.Function):
    """The sum of cross-entropies of ``x @ weight.T``, whose gradients are made in the forward, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        log_probs = (x @ weight.t()).log_softmax(-1)
        counted = (labels != -100).unsqueeze(-1)
        slope = (log_probs.exp() - torch.nn.functional.one_hot(labels.clamp(min=0), len(weight))) * counted
        ctx.save_for_backward(slope @ weight, slope.t() @ x)
        return torch.nn.functional.nll_loss(log_probs, labels, reduction="sum")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        of_x, of_weight = ctx.saved_tensors
        return of_x * grad, of_weight * grad, None


def with_a_fused_loss(kind: str, folder: Path, adapters: bool) -> list[float]:
    """A Trainer of another library puts a forward on the model, whose loss takes the weight of the last product."""
    import transformers

    class Fused(transformers.Trainer):
        def __init__(self, model: Any, loss: str, args: Any, **options: Any) -> None:
            assert loss == "sum"
            inner = model.get_base_model() if hasattr(model, "get_base_model") else model

            def forward(self: Any, input_ids: Any, labels: Any, attention_mask: Any, **rest: Any) -> dict[str, Any]:
                hidden = self.model(input_ids=input_ids, attention_mask=attention_mask)[0][:, :-1]
                flat = hidden.reshape(-1, hidden.shape[-1]), self.lm_head.weight, labels[:, 1:].reshape(-1)
                return {"loss": ProductAndLoss.apply(*flat) / 16}

            inner.forward = types.MethodType(forward, inner)
            super().__init__(model, args, **options)

        def get_train_dataloader(self) -> Any:
            """Batches are lists, from which each step's inputs are made."""
            return [[batch] for batch in super().get_train_dataloader()]

        def _prepare_inputs(self, inputs: Any) -> Any:
            return super()._prepare_inputs(inputs[0] if isinstance(inputs, list) else inputs)

    model = language_model()
    if adapters:
        import peft

        torch.manual_seed(4)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    with as_launched():
        given = {"train_dataset": Sentences(44), "args": arguments(folder, max_steps=4), "model": model, "loss": "sum"}
        if kind == "plain":
            trainer = Fused(**given)
        else:
            from maingrad.launch.training.hugging_face import Trainer

            trainer = type("Both", (Trainer, Fused), {})(**given, parallel=kind)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return [each[key] for each in trainer.state.log_history for key in ("loss", "grad_norm") if key in each]


@pytest.mark.in_turn
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.sampled(2)
def test_a_loss_that_is_fused_with_the_last_product(adapters: bool, tmp_path: Path) -> None:
    """Its Trainer takes another second argument than ``args``, and makes inputs of lists."""
    plain, *_ = run_ranks(with_a_fused_loss, 2, "plain", tmp_path, adapters)
    assert len(plain) == 8
    for form in FORMS:
        assert run_ranks(with_a_fused_loss, 2, form, tmp_path, adapters)[0] == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize("replaced", [False, True])
def test_output_embeddings_are_a_unit_unless_a_forward_may_take_their_weight(replaced: bool) -> None:
    from maingrad.fsdp import FSDPModule, MixedPrecisionPolicy
    from maingrad.launch import simulate
    from maingrad.launch.training.hugging_face.wrapping import shard

    def units() -> set[str]:
        model = language_model()
        if replaced:
            model.forward = model.forward
        shard(model, {"LlamaDecoderLayer"}, {}, MixedPrecisionPolicy())
        return {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}

    blocks = {"", "model.layers.0", "model.layers.1", "model.embed_tokens"}
    assert simulate(units, 1) == [blocks if replaced else {*blocks, "lm_head"}]
