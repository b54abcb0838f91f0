"""A causal language model of Hugging Face for ``maingrad train``, from a folder with ``config.json``.

No architecture is named here: ``parallelize`` finds decoder layers the same way.
"""

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ...te_integration import convert_linears
from ...te_integration.dense.linear import LinearModule
from ..config.error import ConfigError
from ..config.mesh import WHOLE, Stage
from ..config.model import ModelConfig
from ..parallelizing.blocks import default_units
from .gpt import GPT, build_model
from .hugging_face_folder import check_weight_files, copy_tokenizer, load_settings, stays_inside, transformers_package
from .loss import find_padding, mean_loss

__all__ = ["HuggingFaceModel", "LanguageModel", "build_language_model", "check_documents", "save_hugging_face"]

_KEY = "model.hugging_face"
_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Names of the auxiliary loss's weight in ``config.json``."""
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
"""The arguments of the function that computes the loss, in most architectures."""


class HuggingFaceModel(nn.Module):
    """Gives a model of ``transformers`` the interface of ``GPT``.

    model       any ``AutoModelForCausalLM``; its parameters keep their names, after ``model.``
    pads        whether rows end with padding. The model then gets an ``attention_mask``, by which its own auxiliary
                loss of routers leaves padding out; attention may take a slower kernel
    fuses_loss  ``model`` was converted with ``fused_loss``
    """

    def __init__(self, model: Any, *, pads: bool = False, fuses_loss: bool = False) -> None:
        super().__init__()
        self.model = model
        self.loss_parts = None
        self.blocks = list(default_units(model))
        """The decoder layers, a list that registers nothing."""
        if not self.blocks:
            raise ConfigError(f"{_KEY}: {type(model).__name__} has no nn.ModuleList of decoder layers to make units of")
        self.pads = pads
        self.fuses_loss = fuses_loss

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def context_length(self) -> int | None:
        """Longest sequence; None: ``config.json`` says none."""
        found = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return None if found is None else int(found)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """``tokens`` [B, T] int64 -> logits [B, T, V], or with ``targets`` [B, T] the mean loss over those that count.

        positions  [B, T] int64, beginning at 0 with each document: attention stays within documents

        In training, the loss includes the model's own auxiliary loss, if ``config.json`` asks for router logits.
        """
        mask = find_padding(targets).logical_not().long() if self.pads and targets is not None else None
        inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, "use_cache": False}
        if targets is None:
            logits: Tensor = self.model(**inputs).logits
            return logits
        with self.model.get_output_embeddings().deferring() if self.fuses_loss else nullcontext():
            outputs = self.model(**inputs)
            loss = mean_loss(outputs.logits, targets)
        auxiliary = getattr(outputs, "aux_loss", None)
        if self.training and isinstance(auxiliary, Tensor):
            loss = loss + self._auxiliary_weight() * auxiliary
        return loss

    def _auxiliary_weight(self) -> float:
        config = self.model.config
        found = [getattr(each, name, None) for each in (config, config.get_text_config()) for name in _WEIGHTS]
        return next((float(value) for value in found if value is not None), 0.0)

    @property
    def counts_padding(self) -> bool:
        """Whether the model's class has an auxiliary loss of its own, which knows no ``attention_mask``."""
        function = getattr(sys.modules[type(self.model).__module__], "load_balancing_loss_func", None)
        knows = function is not None and list(inspect.signature(function).parameters) == _ARGUMENTS
        return bool(getattr(self.model.config.get_text_config(), "output_router_logits", False)) and not knows


LanguageModel = GPT | HuggingFaceModel


def build_language_model(
    config: ModelConfig,
    *,
    seed: int,
    device: torch.device | None = None,
    placeholder: bool = False,
    pads: bool = False,
    stage: Stage = WHOLE,
) -> LanguageModel:
    """The model of ``config`` on ``device``: the same on every rank. On meta nothing is allocated.

    placeholder  a model of Hugging Face is on meta, with the dtypes that stored weights have when they are loaded:
                 another rank gives the values
    pads         whether rows end with padding (``HuggingFaceModel``)
    stage        of the GPT

    Raises ``ConfigError`` for a folder that cannot be read, and if ``transformers`` is missing.
    """
    if config.hugging_face is None:
        return build_model(config, seed=seed, device=device, stage=stage)
    device = torch.device("meta" if placeholder else "cpu" if device is None else device)
    folder = config.hugging_face
    if not Path(folder).is_dir():
        raise ConfigError(f"{_KEY} = {folder!r}: there is no such folder (working directory: {Path.cwd()})")
    try:
        model = _build(config, folder, seed, device, placeholder=placeholder)
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError, KeyError, SafetensorError) as error:
        remedy = "; model.pretrained = false draws new weights from config.json" if config.pretrained else ""
        raise ConfigError(f"{_KEY} = {folder!r}: {error}{remedy}") from None
    except Exception as error:  # transformers raises anything for values that it does not expect
        if config.trust_remote_code or isinstance(error, RuntimeError):  # the folder's own code, or the device
            raise
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{_KEY} = {folder!r}: transformers makes no model of its config.json: {what}") from error
    if config.fuse_wgrad_accumulation:
        conversion = convert_linears(model, fused_loss=config.fused_loss)
        if conversion.unfused_losses:
            raise ConfigError(f"model.fused_loss = true: {'; '.join(conversion.unfused_losses.values())}")
        head = model.get_output_embeddings()
        for module in () if head is None else head.modules():
            if isinstance(module, LinearModule):
                module.ignores_recipes = True  # as the head of the GPT: its errors are the loss's own
    return HuggingFaceModel(model.train(), pads=pads, fuses_loss=config.fused_loss)


def _build(config: ModelConfig, folder: str, seed: int, device: torch.device, *, placeholder: bool) -> Any:
    """The model of ``transformers``. Values are read or drawn on the CPU, so that a seed means the same everywhere."""
    classes = transformers_package().AutoModelForCausalLM
    settings = load_settings(folder, trust_remote_code=config.trust_remote_code)
    options: dict[str, Any] = {"dtype": config.dtype("param_dtype"), "trust_remote_code": config.trust_remote_code}
    if config.attention is not None:
        options["attn_implementation"] = config.attention
    stored = {"config": settings, "local_files_only": True, "use_safetensors": True, **options}
    if config.pretrained and (placeholder or device.type != "meta"):
        check_weight_files(Path(folder))
    if device.type == "meta":
        with torch.device("meta"):
            model = classes.from_config(settings, **options)
        keeps = [getattr(model, f"_keep_in_fp32_modules{kind}", None) for kind in ("", "_strict")]
        # Which modules stay in fp32 is known to ``from_pretrained`` alone.
        if not (placeholder and config.pretrained and any(keeps)):
            return model
        return classes.from_pretrained(folder, device_map="meta", **stored)
    if config.pretrained:
        return classes.from_pretrained(folder, **stored).to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return classes.from_config(settings, **options).to(device)


@torch.no_grad()
def check_documents(model: HuggingFaceModel, device: torch.device) -> None:
    """Raise ``ConfigError`` if the model's attention crosses documents although positions begin anew.

    Runs the model on two rows of two documents that differ in the first document alone.
    """
    was_training = model.training
    model.eval()
    tokens = torch.arange(8, device=device).repeat(2, 1) % model.vocab_size
    tokens[1, :4] = tokens[1, :4].flip(0)
    positions = torch.arange(4, device=device).repeat(2, 2)
    # Sequences of this length are not worth a graph. torch.compile's stance is one for all threads, so for all ranks of
    # a simulation: compiled modules are told one by one.
    compiled = [(each, each._compiled_call_impl) for each in model.modules() if each._compiled_call_impl is not None]
    try:
        for each, _ in compiled:
            each._compiled_call_impl = None
        first, second = model(tokens, positions=positions)[:, 4:].float()
    finally:
        for each, call in compiled:
            each._compiled_call_impl = call
    model.train(was_training)
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-3 * float(first.abs().max())):
        raise ConfigError(
            'data.documents = "mask": the attention of this model does not see from positions where documents begin; '
            'set model.attention = "sdpa", or data.documents = "join" or "pad"'
        )


def save_hugging_face(
    weights: Mapping[str, Tensor],
    source: str,
    target: str | os.PathLike[str],
    say: Callable[[str], None],
    trust_remote_code: bool = False,
) -> None:
    """Write a folder that ``transformers`` loads: ``config.json``, weights as safetensors, and what ``source`` has of a
    generation config and a tokenizer.

    weights            every tensor of ``HuggingFaceModel.state_dict()``, on the CPU
    source             ``model.hugging_face`` of the run
    say                called with a line for each file of ``source`` that lies elsewhere, behind a link: it is left out
    trust_remote_code  whether code of ``source`` may run: a decision of the user, never of a file
    """
    transformers = transformers_package()
    settings = load_settings(source, trust_remote_code=trust_remote_code)
    stored = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    dtype = next(tensor.dtype for tensor in stored.values() if tensor.is_floating_point())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            settings, dtype=dtype, trust_remote_code=trust_remote_code
        )
    model.load_state_dict(stored, strict=False, assign=True)
    model.tie_weights()
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left:
        raise ValueError(f"no weights of '{left[0]}' are there to write to '{target}'")
    generation, left_out = Path(source) / "generation_config.json", list[str]()
    if model.can_generate() and generation.is_file():  # else made of config.json
        if stays_inside(generation):
            model.generation_config = transformers.GenerationConfig.from_pretrained(source, local_files_only=True)
        else:
            left_out.append(generation.name)
    model.save_pretrained(target)
    for name in left_out + copy_tokenizer(Path(source), Path(target)):
        say(f"'{name}' is a link out of '{source}' and was not copied: copy it by hand")
