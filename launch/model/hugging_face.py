"""A causal language model of Hugging Face for ``maingrad train``, from a folder with ``config.json``.

No architecture is named here. The decoder layers are the longest ``nn.ModuleList`` that lies in no other one.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...te_integration import convert_linears
from ...te_integration.dense.linear_module import LinearModule
from ..config.error import ConfigError
from ..config.model import ModelConfig
from .deferred import DeferredValues, stored_tensors
from .gpt import GPT, build_model
from .hugging_face_folder import copy_tokenizer, load_settings, stays_inside, transformers_package
from .hugging_face_routers import RouterLoss
from .loss import mean_loss

__all__ = ["HuggingFaceModel", "LanguageModel", "build_language_model", "check_documents", "save_hugging_face"]

_KEY = "model.hugging_face"


class HuggingFaceModel(nn.Module):
    """Gives a model of ``transformers`` the interface of ``GPT``.

    model  any ``AutoModelForCausalLM``; its parameters keep their names, after ``model.``
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.loss_parts = None
        self.blocks = decoder_layers(model)
        """The decoder layers, a list that registers nothing."""
        self.router_loss = RouterLoss(model)
        """The model's own auxiliary loss."""
        self.values: DeferredValues | None = None
        """Gives values to a model whose tensors are still on meta; None: they have them."""
        self.whole_because: str | None = None
        """Why ``from_pretrained`` has loaded the whole model into host memory, where ``values`` were asked for."""

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def context_length(self) -> int | None:
        """Longest sequence; None: ``config.json`` says none."""
        found = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return None if found is None else int(found)

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Compile every decoder layer in place; call this before the model is wrapped or sharded."""
        for block in self.blocks:
            block.compile(backend=backend)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """``tokens`` [B, T] int64 -> logits [B, T, V], or with ``targets`` [B, T] the mean loss over those that count.

        positions  [B, T] int64, beginning at 0 with each document: attention stays within documents

        In training, the loss includes the model's own auxiliary loss, if ``config.json`` asks for router logits. It
        leaves out padding, the places of a row behind its last target that counts.
        """
        outputs = self.model(input_ids=tokens, position_ids=positions, use_cache=False)
        if targets is None:
            logits: Tensor = outputs.logits
            return logits
        loss = mean_loss(outputs.logits, targets)
        if self.training:
            auxiliary = self.router_loss.of(outputs, targets)
            loss = loss if auxiliary is None else loss + auxiliary
        return loss


LanguageModel = GPT | HuggingFaceModel


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The longest ``nn.ModuleList`` that lies in no other one. Raises ``ConfigError`` if there is none."""
    found: list[list[nn.Module]] = []

    def collect(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                found.append(list(child))
            else:
                collect(child)

    collect(model)
    if not found:
        raise ConfigError(f"{_KEY}: {type(model).__name__} has no nn.ModuleList of decoder layers to make units of")
    return max(found, key=len)


def build_language_model(
    config: ModelConfig, *, seed: int, device: torch.device | None = None, deferred: bool = False
) -> LanguageModel:
    """The model of ``config`` on ``device``: the same on every rank. On meta nothing is allocated.

    deferred  a model of Hugging Face stays on meta, and ``values`` fills it, part by part. If its weights cannot be
              read one by one, the whole model is on the CPU, and ``whole_because`` says why

    Raises ``ConfigError`` for a folder that cannot be read, and if ``transformers`` is missing.
    """
    if config.hugging_face is None:
        return build_model(config, seed=seed, device=device)
    transformers = transformers_package()
    device = torch.device("cpu") if device is None else device
    folder = config.hugging_face
    if not Path(folder).is_dir():
        raise ConfigError(f"{_KEY} = {folder!r}: there is no such folder (working directory: {Path.cwd()})")
    values: DeferredValues | None = None
    whole_because: str | None = None
    try:
        settings = load_settings(folder, trust_remote_code=config.trust_remote_code)
        arguments: dict[str, Any] = {"dtype": config.torch_dtype, "trust_remote_code": config.trust_remote_code}
        if config.attention is not None:
            arguments["attn_implementation"] = config.attention
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(settings, **arguments)
        if device.type != "meta":
            files = stored_tensors(model, folder, config.torch_dtype) if config.pretrained else None
            if isinstance(files, str):
                whole_because = files
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    folder, config=settings, local_files_only=True, use_safetensors=True, **arguments
                )
                if not deferred:
                    model = model.to(device)
            else:
                values = DeferredValues(model, files, seed=seed, device=device)
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError, KeyError) as error:
        remedy = "; model.pretrained = false draws new weights from config.json" if config.pretrained else ""
        raise ConfigError(f"{_KEY} = {folder!r}: {error}{remedy}") from None
    if config.fuse_wgrad_accumulation:
        convert_linears(model)
        _leave_head_unquantised(model)
    found = HuggingFaceModel(model.train())
    found.whole_because = whole_because
    if deferred:
        found.values = values
    elif values is not None:
        values.fill(model.modules())
    return found


def _leave_head_unquantised(model: Any) -> None:
    """Recipes leave the head as it is, as that of the GPT: its errors are the loss's own."""
    head = model.get_output_embeddings()
    for module in () if head is None else head.modules():
        if isinstance(module, LinearModule):
            module.ignores_recipes = True


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
