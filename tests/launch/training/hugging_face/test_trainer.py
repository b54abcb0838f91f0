"""maingrad's ``Trainer`` logs what Hugging Face's logs, on the same ranks and after a change of their number."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from hugging_face_runs import Sentences, Stream, as_launched, build, import_trainers, language_model, train

FORMS = ("ddp", "zero1", "fsdp")
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {"eval_strategy": "steps", "eval_steps": 8},
    "no clipping": {"max_grad_norm": 0.0},
    "tokens of each rank": {"average_tokens_across_devices": False},
    "smoothed labels": {"label_smoothing_factor": 0.1},
    "recompute": {"gradient_checkpointing": True},
    "noise on embeddings": {"neftune_noise_alpha": 0.5},
    "sgd": {"optim": "sgd", "learning_rate": 0.3, "lr_scheduler_type": "linear", "weight_decay": 0.0},
    "rmsprop": {"optim": "rmsprop", "learning_rate": 1e-3},
    "best": {
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_strategy": "steps",
        "save_steps": 5,
        "load_best_model_at_end": True,
        "save_total_limit": 2,
    },
}
MODELS: dict[str, dict[str, Any]] = {"untied": {}, "tied": {"tied": True}}
SAVING = {"save_strategy": "steps", "save_steps": 10}


@pytest.fixture(autouse=True)
def _imported() -> None:
    """On a busy machine imports take longer than all of a job, whose seconds are limited; ranks that a failed test has
    ended import again."""
    run_ranks(import_trainers, 2, timeout=300.0)


def assert_alike(seen: dict[str, list[float]], expected: dict[str, list[float]], tolerance: float = 1e-5) -> None:
    for key, values in expected.items():
        assert seen[key] == pytest.approx(values, rel=tolerance, abs=tolerance), key


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.sampled(1)
@pytest.mark.slow
def test_every_form_logs_what_the_plain_trainer_logs(options: str, model: str, tmp_path: Path) -> None:
    """44 rows leave 2 of 3 microbatches to the last step of an epoch, with fewer tokens on one rank."""
    plain, *_ = run_ranks(train, 2, "plain", tmp_path / "plain", OPTIONS[options], MODELS[model])
    assert len(plain["loss"]) == 20 and plain["loss"][-1] < plain["loss"][0] - 0.1
    for form in FORMS:
        for seen in run_ranks(train, 2, form, tmp_path / form, OPTIONS[options], MODELS[model]):
            assert_alike(seen, plain)


@pytest.mark.slow
def test_experts(tmp_path: Path) -> None:
    """Small sums in another order choose other experts now and then: only the first steps are compared closely."""
    options, model = {"max_steps": 5}, {"experts": True}
    plain, *_ = run_ranks(train, 2, "plain", tmp_path / "plain", options, model)
    for form in FORMS:
        assert_alike(run_ranks(train, 2, form, tmp_path / form, options, model)[0], plain, tolerance=1e-4)


@pytest.mark.slow
def test_unused_parameters_and_small_buckets(tmp_path: Path) -> None:
    options = {"ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 0.005}
    plain, *_ = run_ranks(train, 2, "plain", tmp_path, {})
    for form in ("ddp", "zero1"):
        assert_alike(run_ranks(train, 2, form, tmp_path, options)[0], plain)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_bf16_follows_fp32(form: str, tmp_path: Path) -> None:
    """autocast over fp32 parameters, bf16 units over fp32 shards, and a model in bf16 with fp32 masters."""
    fp32, mixed, half = (
        run_ranks(train, 2, form, tmp_path, options, model)[0]
        for options, model in (({}, {}), ({"bf16": True}, {}), ({}, {"dtype": torch.bfloat16}))
    )
    assert mixed["loss"] != fp32["loss"]
    if form != "fsdp":
        assert_alike(mixed, run_ranks(train, 2, "plain", tmp_path, {"bf16": True})[0], tolerance=2e-3)
    assert_alike(mixed, fp32, tolerance=2e-2)
    assert_alike(half, fp32, tolerance=2e-2)


def resumed(form: str, folder: Path, checkpoint: str, **changed: Any) -> dict[str, list[float]]:
    return train(form, folder, {**SAVING, **changed}, resume=checkpoint)


@pytest.mark.in_turn
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(1)
def test_resumes_on_another_number_of_ranks(form: str, tmp_path: Path) -> None:
    """One rank with twice the microbatches goes on where two were, and the other way round."""
    whole, *_ = run_ranks(train, 2, form, tmp_path / "whole", SAVING)
    checkpoint = tmp_path / "whole/checkpoint-10"
    alone = {"gradient_accumulation_steps": 4}
    assert_alike(resumed(form, tmp_path / "1", str(checkpoint), **alone), whole)
    first = train(form, tmp_path / "2", {**SAVING, **alone, "max_steps": 20})
    assert_alike(first, whole)
    seen, *_ = run_ranks(resumed, 2, form, tmp_path / "3", str(tmp_path / "2/checkpoint-10"))
    assert_alike(seen, whole)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(1)
def test_one_process_logs_what_the_plain_trainer_logs_and_goes_on(form: str, tmp_path: Path) -> None:
    """Losses and norms of every step show accumulation, clipping and moments; the rate shows the schedule."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.2}
    plain = train("plain", tmp_path / "plain", {**options, "save_strategy": "no"})
    assert min(plain["grad_norm"]) > 0.3 and len(set(plain["learning_rate"])) == 4
    assert_alike(train(form, tmp_path / "whole", options), plain)
    rest = train(form, tmp_path / "rest", options, resume=str(tmp_path / "whole/checkpoint-2"))
    assert_alike(rest, plain)


@pytest.mark.in_turn
def test_muon_updates_matrices_in_every_form(tmp_path: Path) -> None:
    """All forms log the same, and go on from a checkpoint; other losses than without."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    plain = train("plain", tmp_path / "plain", {"max_steps": 4})
    muon = {"lr": 0.2}
    first = train("ddp", tmp_path / "ddp", options, muon=muon)
    assert first["loss"][-1] != pytest.approx(plain["loss"][-1], rel=1e-4)
    for form in FORMS[1:]:
        assert_alike(train(form, tmp_path / form, options, muon=muon), first, tolerance=1e-4)
        rest = train(form, tmp_path / "rest", options, resume=str(tmp_path / "ddp/checkpoint-2"), muon=muon)
        assert_alike(rest, first, tolerance=1e-4)


def resumed_with_dropout(folder: Path, checkpoint: str | None) -> dict[str, list[float]]:
    return train("zero1", folder, SAVING, {"dropout": 0.2}, resume=checkpoint)


@pytest.mark.slow
def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    whole, *_ = run_ranks(resumed_with_dropout, 2, tmp_path / "whole", None)
    seen, *_ = run_ranks(resumed_with_dropout, 2, tmp_path / "2", str(tmp_path / "whole/checkpoint-10"))
    assert seen == whole


@pytest.mark.slow
@pytest.mark.parametrize("into", FORMS)
@pytest.mark.parametrize("out_of", FORMS)
def test_resumes_in_another_form(out_of: str, into: str, tmp_path: Path) -> None:
    whole, *_ = run_ranks(train, 2, out_of, tmp_path / "whole", SAVING)
    seen, *_ = run_ranks(resumed, 2, into, tmp_path / "resumed", str(tmp_path / "whole/checkpoint-10"))
    assert_alike(seen, whole)


def final_weights(form: str, folder: Path, model: dict[str, Any]) -> dict[str, torch.Tensor]:
    with as_launched():
        trainer = build(form, folder, {"max_steps": 3}, language_model(**model))
        trainer.train()
        trainer.save_model()
    state = trainer.model.state_dict()
    return {name: getattr(value, "full_tensor", lambda value=value: value)().clone() for name, value in state.items()}


@pytest.mark.in_turn
@pytest.mark.parametrize("model", [*MODELS, "bf16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(2)
def test_saved_models_are_hugging_faces(form: str, model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.bfloat16} if model == "bf16" else MODELS[model]
    trained, *_ = run_ranks(final_weights, 2, form, tmp_path, options)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert type(loaded).__name__ == "LlamaForCausalLM"
    # Shards are fp32 masters, which are saved as they are.
    assert loaded.dtype is (torch.float32 if form == "fsdp" else options.get("dtype", torch.float32))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is (model == "tied")
    weights = loaded.state_dict()
    assert set(weights) == set(trained)
    for name, value in trained.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=0)


def trained_twice(form: str, folder: Path) -> list[float]:
    """An evaluation first, then two trainings with one Trainer."""
    with as_launched():
        trainer = build(form, folder, {"max_steps": 4}, language_model())
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        between = trainer.evaluate()["eval_loss"]
        trainer.train()
        return [before, between, trainer.evaluate()["eval_loss"]]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_evaluates_before_training_and_trains_again(form: str, tmp_path: Path) -> None:
    losses, others = run_ranks(trained_twice, 2, form, tmp_path)
    assert losses == others
    assert losses[0] > losses[1] > losses[2]


def made_by_a_function(form: str, folder: Path) -> list[float]:
    with as_launched():
        trainer = build(form, folder, {"max_steps": 4}, None, model_init=lambda: language_model())
        losses = [trainer.train().training_loss for _ in range(2)]
        assert trainer.state.global_step == 4
        return losses


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_a_function_makes_is_wrapped_each_time(form: str, tmp_path: Path) -> None:
    for first, second in run_ranks(made_by_a_function, 2, form, tmp_path):
        assert first == second


def of_a_stream(form: str, folder: Path) -> list[float]:
    with as_launched():
        trainer = build(form, folder, {}, language_model())
        trainer.train_dataset = Stream()
        trainer.train()
        return [each["loss"] for each in trainer.state.log_history if "loss" in each]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_an_epoch_may_end_in_the_middle_of_a_step(form: str, tmp_path: Path) -> None:
    """What a step without its last microbatch has accumulated counts in the next one, as in the plain Trainer."""
    plain, *_ = run_ranks(of_a_stream, 2, "plain", tmp_path)
    assert len(plain) == 20
    assert run_ranks(of_a_stream, 2, form, tmp_path)[0] == pytest.approx(plain, abs=1e-5)


class Doubled(torch.nn.Module):
    """A model that is not transformers': it takes no ``num_items_in_batch``, so that microbatches count alike."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(12, 12), torch.nn.Linear(12, 12)])
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = input_ids / 10
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return {"loss": (x - labels.clamp(min=0) / 5).square().mean()}


def of_ones_own(form: str, folder: Path, **ours: Any) -> list[float]:
    options = {} if form == "fsdp" else {"ddp_find_unused_parameters": True}
    with as_launched():
        trainer = build(form, folder, options, Doubled(), **ours)
        trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


@pytest.mark.slow
def test_models_of_ones_own(tmp_path: Path) -> None:
    plain, *_ = run_ranks(of_ones_own, 2, "plain", tmp_path)
    assert run_ranks(of_ones_own, 2, "ddp", tmp_path)[1] == pytest.approx(plain, abs=1e-5)
    assert run_ranks(of_ones_own, 2, "zero1", tmp_path)[1] == pytest.approx(plain, abs=1e-5)


def test_the_program_of_the_page_trains_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).resolve().parents[4] / "docs/hugging_face.md"
    names: dict[str, Any] = {}
    with as_launched():
        exec(page.read_text().partition("```python\n")[2].partition("```")[0], names)
    logs = [each for each in names["trainer"].state.log_history if "loss" in each]
    assert len(logs) == 10 and all({"grad_norm", "learning_rate"} <= set(each) for each in logs)
    assert logs[-1]["loss"] < logs[0]["loss"]
    assert (tmp_path / "runs/trainer/checkpoint-10/maingrad/maingrad.json").exists()


def test_other_trainers_take_part_by_inheritance(tmp_path: Path) -> None:
    """``class SFT(maingrad's, another's)``: what is maingrad's comes first."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    from maingrad.ddp import DistributedDataParallel
    from maingrad.launch.training.hugging_face import Trainer

    class Both(Trainer, Seq2SeqTrainer):
        pass

    args = Seq2SeqTrainingArguments(str(tmp_path), max_steps=2, report_to=[], disable_tqdm=True, use_cpu=True)
    with as_launched():
        trainer = Both(language_model(), args, train_dataset=Sentences(8), parallel="ddp")
        trainer.train()
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    fused = {record.name for record in trainer.model_wrapped.records if record.num_fused_writes}
    assert "lm_head.weight" in fused and len(fused) == 16


@pytest.mark.in_turn
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.sampled(3)
def test_a_fused_loss_logs_what_the_plain_trainer_logs(form: str, model: str, tmp_path: Path) -> None:
    """Two microbatches a step, divided by the tokens of both; evaluation takes logits."""
    options = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    plain = train("plain", tmp_path / "plain", options, MODELS[model])
    assert_alike(train(form, tmp_path / form, options, MODELS[model], fused_loss=True), plain)


def test_a_fused_loss_that_has_no_effect_is_refused(tmp_path: Path) -> None:
    with as_launched():
        with pytest.raises(ValueError, match="label_smoothing_factor takes logits"):
            build("zero1", tmp_path, {"label_smoothing_factor": 0.1}, language_model(), fused_loss=True)
        with pytest.raises(ValueError, match="needs fuse_linears=True"):
            build("zero1", tmp_path, {}, language_model(), fused_loss=True, fuse_linears=False)
