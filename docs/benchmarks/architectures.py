"""The models of ``models.py``, built from their configs with random weights, and the arithmetic of one token.

Nothing is downloaded. The configs in ``architectures.toml`` are those of the published checkpoints; some have fewer
layers, so that one GPU holds the model with its optimizer.
"""

import importlib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from harness import ConfigError
from torch import nn

from maingrad.launch.model.hugging_face_folder import transformers_package

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@dataclass(frozen=True, slots=True)
class Shape:
    """One microbatch of one rank."""

    batch: int
    length: int
    """Tokens of a sequence."""

    @classmethod
    def parse(cls, text):
        """From "4x4096", batch x tokens. Raises ``ConfigError`` for other texts."""
        batch, _, length = text.partition("x")
        if not (batch.isdecimal() and length.isdecimal() and int(batch) and int(length) > 1):
            raise ConfigError(f"shape '{text}' is not like 4x4096: sequences of a microbatch, tokens of a sequence")
        return cls(int(batch), int(length))

    def __str__(self):
        return f"{self.batch}x{self.length}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One model by its config."""

    name: str
    about: str
    config_class: str
    """Name of a class in ``transformers``."""
    sizes: Mapping[str, Any]
    """Arguments of the class."""
    shapes: Sequence[str] = ("1x4096", "1x1024")
    """Shapes that are measured if none are asked for."""

    def with_layers(self, count):
        """The same with ``count`` decoder layers, under a name that says so."""
        sizes = {**self.sizes, "n_layer" if "n_layer" in self.sizes else "num_hidden_layers": count}
        return replace(self, name=f"{self.name}, {count} layers", about=f"{self.name}, {count} layers", sizes=sizes)

    def make(self, dtype, device):
        """The model in training mode. Weights are the same on every call and rank: drawn in fp32, rounded to ``dtype``.

        Buffers stay in fp32: a model in bf16 keeps the frequencies of rotary positions in fp32.
        """
        transformers = transformers_package()
        config = getattr(transformers, self.config_class)(**self.sizes, use_cache=False)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=_sdpa_without_mask(transformers), dtype=torch.float32
            )
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return model.train()

    def tokens(self, shape, num_microbatches, rank, device):
        """[M, B, T] int64, the same for every row and step, different on each rank."""
        generator = torch.Generator(device=device).manual_seed(rank)
        size = (num_microbatches, shape.batch, shape.length)
        return torch.randint(0, self.sizes["vocab_size"], size, device=device, generator=generator)

    def count(self):
        """Elements of all parameters, and elements that one token is multiplied with.

        The second number leaves out lookups (embeddings) and vectors, and counts the chosen experts alone.
        """
        model = self.make(torch.float32, torch.device("meta"))
        head = model.get_output_embeddings().weight
        lookups = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        total, multiplied = 0, head.numel()
        for parameter in model.parameters():
            total += parameter.numel()
            if parameter.dim() == 3:  # packed experts
                multiplied += parameter.numel() * model.config.num_experts_per_tok // model.config.num_experts
            elif parameter.dim() == 2 and parameter is not head and id(parameter) not in lookups:
                multiplied += parameter.numel()
        return total, multiplied

    def flops_per_token(self, length):
        """FLOPs of forward and backward for one token: 6 for each element it is multiplied with, and attention's.

        Attention is counted as the causal half: 6 x layers x heads x head width x length (PaLM, Chowdhery et al., 2022,
        appendix B, counts the whole square: 12). Recomputation does not count.
        """
        _, multiplied = self.count()
        config = getattr(transformers_package(), self.config_class)(**self.sizes)
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        attention = 6.0 * config.num_hidden_layers * width * length
        return 6.0 * multiplied + attention


def architecture_named(name):
    """The inverse of ``Architecture.name``: "llama-1b", or "llama-1b, 4 layers"."""
    base, _, layers = name.partition(", ")
    architecture = ARCHITECTURES[base]
    return architecture.with_layers(int(layers.partition(" ")[0])) if layers else architecture


def transformers_version():
    """Like "transformers 5.17.0". Raises ``ConfigError`` if transformers is not installed."""
    return f"transformers {transformers_package().__version__}"


def _sdpa_without_mask(transformers):
    """``scaled_dot_product_attention`` with ``is_causal``, under a name for which transformers makes no mask.

    Under "sdpa" each forward asks on the host whether sequences are packed. In a CUDA graph's capture it does not ask:
    it makes a mask, and attention takes another and slower kernel.
    """
    name = "maingrad_sdpa"
    sdpa = importlib.import_module("transformers.integrations.sdpa_attention")
    transformers.AttentionInterface.register(name, sdpa.sdpa_attention_forward)
    return name


with Path(__file__).with_suffix(".toml").open("rb") as _file:
    ARCHITECTURES = {each["name"]: Architecture(**each) for each in tomllib.load(_file)["architecture"]}
