"""What an argument of the Trainer reaches, in one process: the wrapper, the units, the optimizer, a step, a save."""

import logging
import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hugging_face_runs import Sentences, as_launched, build, language_model
from torch import nn
from torch.utils.data import IterableDataset

from maingrad.ddp import DistributedDataParallelConfig
from maingrad.fsdp import FSDPModule, MixedPrecisionPolicy
from maingrad.launch import simulate
from maingrad.launch.training.hugging_face import Trainer, trainer, wrapping
from maingrad.launch.training.hugging_face.refused import check_optimizer
from maingrad.launch.training.hugging_face.step_graph import _why_not
from maingrad.launch.training.hugging_face.wrapping import shard, whole_weights
from maingrad.te_integration.dense.linear import LinearModule

FORMS = ("ddp", "zero1", "fsdp")
SHARDING: dict[str, Any] = {"use_distributed_optimizer": True}


SMALL_BERT = {
    "vocab_size": 24,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
}


@pytest.fixture(autouse=True)
def launched() -> Iterator[None]:
    with as_launched():
        yield


# ---- The wrapper and the units. ----


def test_a_configuration_of_the_wrapper_is_the_wrappers(tmp_path: Path) -> None:
    given = DistributedDataParallelConfig(**SHARDING, bucket_size=321, grad_reduce_in_fp32=False)
    config = build("zero1", tmp_path, {}, language_model(), ddp_config=given).wrapped_model().ddp_config
    assert config == given


@pytest.mark.parametrize("given", [None, DistributedDataParallelConfig(**SHARDING, keep_matrices_whole=("*lm_head*",))])
def test_matrices_of_muon_are_kept_whole(given: DistributedDataParallelConfig | None, tmp_path: Path) -> None:
    plain = build("zero1", tmp_path, {}, language_model(), ddp_config=given).wrapped_model().ddp_config
    muon = build("zero1", tmp_path, {}, language_model(), ddp_config=given, muon={"lr": 0.02}).wrapped_model()
    own = () if given is None else given.keep_matrices_whole
    assert plain.keep_matrices_whole == own
    found = muon.ddp_config.keep_matrices_whole
    assert found[: len(own)] == own and len(found) - len(own) == 14, "the matrices of two layers"


def test_weight_decay_of_muon_is_that_of_the_arguments_unless_it_is_given(tmp_path: Path) -> None:
    for muon, wanted in (({"lr": 0.02}, 0.25), ({"lr": 0.02, "weight_decay": 0.3}, 0.3)):
        made = build("ddp", tmp_path, {"weight_decay": 0.25}, language_model(), muon=muon).create_optimizer()
        assert {group["weight_decay"] for group in made.param_groups if group["lr"] == 0.02} == {wanted}


@pytest.mark.parametrize("fuse", [True, False])
def test_linear_layers_are_converted_unless_they_are_not_to_be(fuse: bool, tmp_path: Path) -> None:
    for form in FORMS:
        wrapped = build(form, tmp_path, {}, language_model(), fuse_linears=fuse).wrapped_model()
        linears = [module for module in wrapped.modules() if isinstance(module, nn.Linear)]
        assert len(linears) == 15 and {isinstance(each, LinearModule) for each in linears} == {fuse}, form


def test_a_loss_that_cannot_be_fused_is_refused(tmp_path: Path) -> None:
    model = language_model()
    model.loss_function = lambda logits, labels, **others: logits.mean()
    with pytest.raises(ValueError, match=r"fused_loss=True: .*loss_function is"):
        build("zero1", tmp_path, {}, model, fused_loss=True).wrapped_model()


def test_options_of_units_are_those_of_fully_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies are those of bf16=True, of a model in bf16, or the user's."""
    given: list[Any] = []

    def spied(model: Any, units: Any, placements: Any, mesh: Any, policy: Any, options: Any) -> None:
        given.append((placements, mesh, policy.param_dtype, dict(options)))

    monkeypatch.setattr(wrapping, "shard_units", spied)
    half, own = torch.bfloat16, MixedPrecisionPolicy(param_dtype=torch.float16)
    for arguments_, dtype, options, wanted in (
        ({}, torch.float32, {}, ("zero3", None, None, {})),
        ({"bf16": True}, torch.float32, {}, ("zero3", None, half, {})),
        ({}, half, {"placements": "zero2", "bucket_size": 9}, ("zero2", None, half, {"bucket_size": 9})),
        ({"bf16": True}, half, {"mixed_precision": own, "mesh": "m"}, ("zero3", "m", torch.float16, {})),
    ):
        given.clear()
        build("fsdp", tmp_path, arguments_, language_model(dtype=dtype), fsdp_options=options).wrapped_model()
        assert given == [wanted]


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_inside_a_block_are_no_units(tied: bool) -> None:
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SMALL_BERT, tie_word_embeddings=tied))

    def units() -> set[str]:
        shard(model, {"BertEmbeddings", "BertLayer"}, {}, MixedPrecisionPolicy())
        return {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}

    inside = (
        {"bert.encoder.layer.0"} if tied else {"bert.encoder.layer.0", "bert.embeddings", "cls.predictions.decoder"}
    )
    assert simulate(units, 1) == [{"", *inside}]


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="a process that sees several GPUs is refused")
def test_a_model_alone_makes_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = Trainer(language_model())
    assert (made.args.output_dir, made.parallel) == ("tmp_trainer", "zero1")


def test_where_nothing_decays_there_is_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build("zero1", tmp_path, {}, language_model())
    monkeypatch.setattr(made, "get_decay_parameter_names", lambda model: [])
    assert [group["weight_decay"] for group in made.create_optimizer().param_groups] == [0.0]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_frozen_is_in_no_group(form: str, tmp_path: Path) -> None:
    model = language_model()
    model.model.embed_tokens.requires_grad_(False)
    made = build(form, tmp_path, {"weight_decay": 0.25}, model, muon={"lr": 0.02})
    groups = made.create_optimizer().param_groups
    trained = [param for param in made.model.parameters() if param.requires_grad]
    assert {group["weight_decay"] for group in groups if group["params"]} == {0.25, 0.0}
    if form == "fsdp":
        assert sum(len(group["params"]) for group in groups) == len(trained) == 20


@pytest.mark.parametrize("form", FORMS)
def test_groups_are_muons_then_those_that_decay_then_the_rest(form: str, tmp_path: Path) -> None:
    """Each trained parameter is in one: layers' matrices, embeddings and head, norms."""
    options = {"weight_decay": 0.25, "learning_rate": 0.5}
    made = build(form, tmp_path, options, language_model(), muon={"lr": 0.02, "weight_decay": 0.125})
    groups = made.create_optimizer().param_groups
    found = [(group["lr"], group["weight_decay"]) for group in groups if group["params"]]
    assert found[-2:] == [(0.5, 0.25), (0.5, 0.0)] and set(found[:-2]) == {(0.02, 0.125)}
    if form == "fsdp":
        numbers = {id(param): number for number, group in enumerate(groups) for param in group["params"]}
        last = len(groups) - 1
        for name, param in made.model.named_parameters():
            wanted = last if "norm" in name else last - 1 if "embed" in name or "lm_head" in name else None
            assert numbers.pop(id(param)) in ([*range(last - 1)] if wanted is None else [wanted]), name
        assert not numbers


def test_an_evaluation_before_training_shards_the_model(tmp_path: Path) -> None:
    """It may not have room for a whole one; the wrappers of the other forms wait for the training."""
    for form in FORMS:
        made = build(form, tmp_path, {}, language_model())
        assert made.evaluate()["eval_loss"] > 0
        assert isinstance(made.model, FSDPModule) is (form == "fsdp")
        assert made.model_wrapped is made.model


@pytest.mark.parametrize("form", ["ddp", "zero1"])
def test_bf16_is_autocast_around_the_wrapped_model(form: str, tmp_path: Path) -> None:
    made = build(form, tmp_path, {"bf16": True}, language_model())
    seen: list[torch.dtype] = []
    wrapped = made.wrapped_model()
    made.model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    wrapped(input_ids=torch.arange(8)[None])
    assert seen == [torch.bfloat16]
    assert {param.dtype for param in made.model.parameters()} == {torch.float32}


# ---- What is refused. ----


def test_a_model_that_a_function_makes_is_checked_too(tmp_path: Path) -> None:
    def cut() -> Any:
        model = language_model()
        model.__class__ = type("Cut", (type(model),), {"tp_size": 2})
        return model

    with pytest.raises(ValueError, match="load it without tp_plan"):
        build("zero1", tmp_path, {}, None, model_init=cut)


def test_a_schedule_of_before_is_refused(tmp_path: Path) -> None:
    schedule = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(nn.Linear(1, 1).parameters()))
    with pytest.raises(ValueError, match="lr_scheduler_type in TrainingArguments"):
        build("ddp", tmp_path, {}, language_model(), optimizers=(None, schedule))


def test_whole_parameters_take_any_optimizer() -> None:
    """And the refusal says how, in each form."""
    cls = type("Own", (torch.optim.Optimizer,), {"per_parameter": True})
    whole = DistributedDataParallelConfig(**SHARDING, keep_params_whole=True)
    check_optimizer(cls, "zero1", whole, "optim")
    for parallel, remedy in (("zero1", "(?<! and )ddp_config="), ("fsdp", 'parallel="zero1" and ddp_config=')):
        with pytest.raises(ValueError, match=f"Own .*{remedy}"):
            check_optimizer(cls, parallel, None, "optim")


def test_an_optimizer_that_was_made_too_early_is_refused_with_the_one_to_make(tmp_path: Path) -> None:
    """It would update nothing. The remedy is that of the form."""
    ours, torchs = r"DistributedOptimizer\(self\.wrapped_model\(\)", r"the parameters of self\.wrapped_model\(\)"
    for form, remedy in (("ddp", ours), ("zero1", ours), ("fsdp", torchs)):
        made = build(form, tmp_path, {}, language_model())
        made.optimizer = torch.optim.SGD(made.model.parameters())
        with pytest.raises(ValueError, match=rf"Trainer made its optimizer, SGD, before the model .*: .*{remedy}"):
            made.wrapped_model()
        assert made.model_wrapped is made.model and not isinstance(made.model, FSDPModule)


def test_labels_are_shifted_for_causal_models_alone(tmp_path: Path) -> None:
    options = {"label_smoothing_factor": 0.1}
    causal, other = language_model(), transformers.BertForMaskedLM(transformers.BertConfig(**SMALL_BERT))
    for model, shifts in ((causal, True), (other, False)):
        made = build("ddp", tmp_path, options, model)
        assert getattr(made.label_smoother, "keywords", {}).get("shift_labels", False) is shifts


# ---- Steps. ----


@pytest.mark.parametrize(
    ("given", "ranks", "shared"), [(None, 2, True), (True, 2, True), (False, 2, False), (None, 1, False)]
)
def test_buffers_are_shared_unless_arguments_say_no(
    given: bool | None, ranks: int, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, buffers = build("ddp", tmp_path, {}, language_model(), cuda_graph=False), list[Any]()
    monkeypatch.setattr(trainer, "share_buffers", buffers.append)
    monkeypatch.setattr(transformers.Trainer, "get_batch_samples", lambda self, *loop: ([], None))
    made.args = types.SimpleNamespace(ddp_broadcast_buffers=given, world_size=ranks, gradient_accumulation_steps=1)
    assert made.get_batch_samples() == ([], None)
    assert bool(buffers) is shared


def test_accelerate_leaves_the_state_of_an_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state dict would be collective, and one rank's."""
    made = build("zero1", tmp_path, {}, language_model())
    optimizer, read = made.create_optimizer(), list[Any]()
    monkeypatch.setattr(type(optimizer), "state_dict", lambda self: read.append(self))
    prepared = made.accelerator.prepare_optimizer(optimizer, device_placement=True)
    assert prepared.optimizer is optimizer and read == []
    assert made.accelerator.prepare_optimizer(prepared) is prepared


def test_a_microbatch_after_which_no_step_follows_reduces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of a stream, where transformers' loop takes it for the last one of a step."""
    made, entered = build("zero1", tmp_path, {}, language_model()), list[bool]()
    wrapped = made.wrapped_model()
    monkeypatch.setattr(type(wrapped), "no_sync", lambda self: entered.append(steps) or nullcontext())
    monkeypatch.setattr(Trainer, "run_microbatch", lambda *given: torch.zeros(()))
    for steps in (True, False):
        made.accelerator.gradient_state._set_sync_gradients(steps)
        made.training_step(wrapped, {})
    assert entered == [False]


class Short(IterableDataset):
    """Rows without a number of them: two whole steps and a half one in each epoch."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        sentences = Sentences(10)
        return (sentences[index] for index in range(10))


def losses_of_a_stream(kind: str, folder: Path, **ours: Any) -> list[float]:
    made = build(kind, folder, {"max_steps": 8}, language_model(), **ours)
    made.train_dataset = Short()
    made.train()
    if ours:
        assert made._graph._step.num_graphs == 0, "memory of graphs goes with the training"
    return [each["loss"] for each in made.state.log_history if "loss" in each]


@pytest.mark.in_turn
@pytest.mark.parametrize(("form", "cuda_graph"), [("zero1", False), ("fsdp", False), ("zero1", True)])
def test_a_stream_that_ends_in_the_middle_of_a_step(form: str, cuda_graph: bool, tmp_path: Path) -> None:
    """What it has accumulated counts in the next step, as in the plain Trainer."""
    ours: Any = {"cuda_graph": cuda_graph} if cuda_graph else {}
    plain = losses_of_a_stream("plain", tmp_path)
    assert losses_of_a_stream(form, tmp_path, **ours) == pytest.approx(plain, rel=1e-4)


@pytest.mark.in_turn
def test_a_model_that_a_function_makes_anew_gets_a_graph_of_its_own(tmp_path: Path) -> None:
    losses, steps = [], set()
    for cuda_graph in (True, False):
        made = build(
            "zero1", tmp_path, {"max_steps": 4}, None, model_init=lambda: language_model(), cuda_graph=cuda_graph
        )
        for _ in range(2):
            losses.append(made.train().training_loss)
            steps.add(made._graph._step)
    assert losses == pytest.approx(losses[:1] * 4, rel=1e-5)
    assert len(steps) == 3, "one for each model, and none"


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["training_step", "compute_loss"])
@pytest.mark.parametrize("library", [True, False])
def test_a_librarys_own_step_stays_eager(
    name: str, library: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A library's code may keep numbers on the host; a program's own is looked into."""
    module: Any = types.ModuleType("their_trainers")
    module.__file__ = str(tmp_path / ("site-packages" if library else "program") / "their_trainers.py")
    monkeypatch.setitem(sys.modules, "their_trainers", module)

    def own(self: Any, *args: Any, **options: Any) -> Any:
        return getattr(Trainer, name)(self, *args, **options)

    made = build("zero1", tmp_path, {"max_steps": 1}, language_model(), cuda_graph=True)
    made.__class__ = type("Theirs", (Trainer,), {name: own, "__module__": "their_trainers"})
    with caplog.at_level(logging.INFO):
        made.train()
    assert (f"their_trainers.Theirs.{name} may keep numbers on the host" in caplog.text) is library
    made.__class__ = type("Mine", (type(made),), {name: own, "__module__": __name__})
    assert (_why_not(made) is not None) is library, "a program's own calls the library's"


def test_microbatches_of_any_kind_wait_for_the_last_one(tmp_path: Path) -> None:
    """Those that are no dicts too, which a program's own ``_prepare_inputs`` may give; a number becomes a tensor."""
    made, ran = build("ddp", tmp_path, {}, language_model()), list[Any]()
    graph: Any = made._graph

    def step(batches: list[Any], num_items: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ran.append((batches, num_items))
        return torch.tensor(7.0), torch.tensor(8.0)

    graph._step = step
    for _ in range(2):
        assert float(graph.microbatch([torch.ones(2)], 5, last=False)) == 0.0
        assert float(graph.microbatch({"input_ids": torch.ones(3)}, 5, last=True)) == 7.0
        assert float(graph.norm) == 8.0 and not made.accelerator.sync_gradients
    for batches, num_items in ran:
        assert [type(batch) for batch in batches] == [list, dict]
        assert isinstance(num_items, torch.Tensor) and int(num_items) == 5
    assert len(ran) == 2


@pytest.mark.in_turn
@pytest.mark.parametrize("form", ["fsdp", "zero1", "ddp"])
@pytest.mark.sampled(2)
def test_a_trainer_trains_again(form: str, tmp_path: Path) -> None:
    """With the model as it is by then, and an optimizer of its own."""
    made = build(form, tmp_path, {"max_steps": 3, "warmup_steps": 0}, language_model(), cuda_graph=False)
    first, second = (made.train().training_loss for _ in range(2))
    assert second < first - 0.05 and made.state.global_step == 3


def test_a_training_that_fails_frees_its_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, freed = build("zero1", tmp_path, {}, language_model()), list[bool]()

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("of the loop")

    monkeypatch.setattr(transformers.Trainer, "train", fail)
    monkeypatch.setattr(made._graph, "reset", lambda: freed.append(True))
    with pytest.raises(RuntimeError, match="of the loop"):
        made.train()
    assert freed == [True]


# ---- Generation and saves. ----


@pytest.mark.in_turn
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(1)
def test_recomputed_layers_noise_on_embeddings_and_the_best_weights_at_the_end(form: str, tmp_path: Path) -> None:
    """The rate grows until the model is worse: the best checkpoint is not the last one, and stays though one may."""
    options = {"max_steps": 6, "learning_rate": 1.0, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 6}
    options |= {"gradient_checkpointing": True, "neftune_noise_alpha": 5.0, "load_best_model_at_end": True}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    found = []
    for kind in ("plain", form):
        with as_launched():
            made = build(kind, tmp_path / kind, options | {"save_total_limit": 1}, language_model())
            made.train()
            at_the_end = made.evaluate()["eval_loss"]
        logged = [each for each in made.state.log_history if "loss" in each or "eval_loss" in each]
        best = min(each["eval_loss"] for each in logged if "eval_loss" in each)
        assert at_the_end == pytest.approx(best, rel=1e-5) and "eval_loss" in logged[-1]
        assert best < logged[-2]["eval_loss"], "of the last step"
        kept = {path.name for path in (tmp_path / kind).glob("checkpoint-*")}
        assert Path(made.state.best_model_checkpoint).name in kept
        found.append([each[key] for each in logged for key in ("loss", "grad_norm", "eval_loss") if key in each])
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_the_schedule_of_a_checkpoint_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build("ddp", tmp_path, {}, language_model())
    made.lr_scheduler = types.SimpleNamespace(load_state_dict=lambda state: None)
    monkeypatch.setattr(trainer, "load_checkpoint", lambda *given: None)
    torch.save({"path": tmp_path}, tmp_path / "scheduler.pt")
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        made._load_optimizer_and_scheduler(str(tmp_path))


def test_encoders_that_generate_calls_alone_have_whole_weights() -> None:
    """On each rank as many forwards run as on the longest; behind it nothing stays gathered."""
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 24}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)

    def model() -> Any:
        torch.manual_seed(0)
        return transformers.T5ForConditionalGeneration(config).eval()

    prompt = torch.tensor([[3, 4, 5]])
    expected = model().generate(prompt, max_new_tokens=4).tolist()

    def generated() -> tuple[Any, bool, bool]:
        made: Any = shard(model(), {"T5Block"}, {}, MixedPrecisionPolicy())
        found = made.generate(prompt, max_new_tokens=4).tolist()
        marked = all(module._is_fsdp_managed_module for module in made.modules())
        assert made.shared.weight.numel() < 24 * 8
        with pytest.raises(ValueError, match="max_new_tokens"):
            made.generate(prompt, max_new_tokens=0)
        return found, marked, made.shared.weight.numel() == 24 * 8

    assert simulate(generated, 2) == [(expected, True, False)] * 2


def test_saved_weights_do_not_follow_the_training(tmp_path: Path) -> None:
    for form in FORMS:
        made = build(form, tmp_path, {}, language_model())
        made.wrapped_model()
        weights = whole_weights(made.model, keep=True)
        before = {name: value.clone() for name, value in weights.items()}
        with torch.no_grad():
            for param in made.model.parameters():
                param.add_(1.0)
        assert all(torch.equal(weights[name], value) for name, value in before.items()), form


@pytest.mark.in_turn
def test_a_model_is_pushed_where_a_program_saves_it_and_not_with_each_checkpoint(tmp_path: Path) -> None:
    made = build("ddp", tmp_path, {}, language_model())
    pushed: list[Any] = []
    made.push_to_hub = lambda **how: pushed.append(how)
    made.args.hub_revision = "a branch"
    for internal, wanted in ((True, 0), (False, 1)):
        for push in (False, True):
            made.args.push_to_hub = push
            made.save_model(str(tmp_path / "saved"), _internal_call=internal)
        assert len(pushed) == wanted
    assert pushed[0]["revision"] == "a branch"


def test_updated_parameters_have_arrived_before_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build("zero1", tmp_path, {"max_steps": 2}, language_model())
    made.train()
    order: list[str] = []
    monkeypatch.setattr(type(made._inner_optimizer()), "finish_param_sync", lambda self: order.append("arrived"))
    monkeypatch.setattr(trainer, "whole_weights", lambda model, keep: order.append("read") or {})
    monkeypatch.setattr(type(made), "_save", lambda *args, **how: None)
    made.save_model(str(tmp_path))
    assert order == ["arrived", "read"]
