"""Small runs of Hugging Face's Trainer and of maingrad's, on the ranks of ``run_ranks`` or alone."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may download

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import Dataset, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, TrainingArguments

VOCABULARY, LENGTH = 24, 12


class Sentences(Dataset):
    """A learnable chain: nine of ten tokens are the one before times 5 plus 1. Padding makes lengths differ."""

    def __init__(self, num: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = [torch.randint(VOCABULARY, (num,), generator=generator)]
        for _ in range(LENGTH - 1):
            noise = torch.randint(VOCABULARY, (num,), generator=generator)
            kept = torch.rand(num, generator=generator) < 0.9
            rows.append(torch.where(kept, (5 * rows[-1] + 1) % VOCABULARY, noise))
        self.tokens = torch.stack(rows, dim=1)
        self.lengths = torch.randint(4, LENGTH + 1, (num,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        padding = torch.arange(LENGTH) >= self.lengths[index]
        labels = self.tokens[index].masked_fill(padding, -100)
        return {"input_ids": self.tokens[index], "attention_mask": (~padding).long(), "labels": labels}


class Stream(IterableDataset):
    """Sentences without a length: an epoch ends in the middle of a step."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        sentences = Sentences(42)
        return (sentences[index] for index in range(len(sentences)))


def language_model(
    *, tied: bool = False, experts: bool = False, dropout: float = 0.0, dtype: torch.dtype = torch.float32
) -> Any:
    """A Llama, or a Mixtral: a Llama with experts."""
    torch.manual_seed(3)
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": tied,
        "attention_dropout": dropout,
        "use_cache": False,
    }
    if experts:
        return MixtralForCausalLM(MixtralConfig(**options, num_local_experts=4)).to(dtype)
    return LlamaForCausalLM(LlamaConfig(**options)).to(dtype)


def arguments(folder: Path, **changed: Any) -> Any:
    """20 steps of 8 sequences for all ranks together, fewer in the last step of an epoch."""
    options = {
        "max_steps": 20,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_backend": "gloo" if dist.is_initialized() else None,
        "dataloader_pin_memory": False,
        "seed": 5,
    }
    return TrainingArguments(output_dir=str(folder), **{**options, **changed})


def import_trainers() -> None:
    """A job of its own: imports that take seconds, and minutes where many processes share few cores."""
    import accelerate
    import transformers

    import maingrad.launch.training.hugging_face

    # transformers imports a name's module when it is asked for the name.
    for name in ("LlamaForCausalLM", "MixtralForCausalLM", "Trainer", "TrainingArguments"):
        getattr(transformers, name)
    assert accelerate.Accelerator is not None and maingrad.launch.training.hugging_face.Trainer is not None


@contextmanager
def as_launched() -> Iterator[None]:
    """Environment and state as torchrun leaves them for this rank, with no Accelerator before or after."""
    before = dict(os.environ)
    if dist.is_initialized():
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # asked for, and not used: the group exists
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()


def build(kind: str, folder: Path, options: Mapping[str, Any], model: Any, *, rows: int = 44, **ours: Any) -> Any:
    """A Trainer on this rank, within ``as_launched()``; kind: "plain", "ddp", "zero1" or "fsdp"."""
    import transformers

    from maingrad.launch.training.hugging_face import Trainer

    transformers.utils.logging.disable_progress_bar()
    given = {
        "model": model,
        "args": arguments(folder, **options),
        "train_dataset": Sentences(rows),
        "eval_dataset": Sentences(10, seed=1),
    }
    trainer = transformers.Trainer(**given) if kind == "plain" else Trainer(**given, parallel=kind, **ours)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def train(
    kind: str,
    folder: Path,
    options: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
    resume: str | None = None,
    **ours: Any,
) -> dict[str, list[float]]:
    """Train, and return what was logged in each step: losses, norms of gradients, learning rates, validation losses."""
    with as_launched():
        trainer = build(kind, folder, options, language_model(**(model or {})), **ours)
        trainer.train(resume_from_checkpoint=resume)
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "total_flos")
    return {key: [float(each[key]) for each in trainer.state.log_history if key in each] for key in keys}
