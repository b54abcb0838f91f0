"""``[train]``: length, batch and bookkeeping of a run."""

from dataclasses import dataclass
from typing import Literal

from .table import Count, Natural, Positive, Table

__all__ = ["TrainConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(Table):
    """Length, batch and bookkeeping of a run."""

    steps: Count = 100
    """Optimizer steps."""
    max_seconds: Positive | None = None
    """End training after this many seconds. The schedule then ends at this time: a slower machine takes fewer steps of
    the same schedule. None: only ``steps`` ends the run."""
    global_batch_size: Count = 16
    """Sequences per optimizer step, over all microbatches and ranks."""
    num_microbatches: Count = 1
    """Forward and backward passes per optimizer step; all but the last run under ``no_sync``."""
    sequence_length: Count = 256
    """Tokens per sequence; at most ``model.context_length``."""
    eval_every: Count = 100
    """Steps between validations. There is one more after the last step."""
    eval_sequences: Count = 64
    """Sequences in the fixed validation set, evenly spread over the validation data."""
    log_every: Count = 1
    """Steps between records in ``metrics.jsonl``. Ranks react to Ctrl-C only at these steps."""
    save_every: Count | None = None
    """Steps between checkpoints in ``out_dir``, a multiple of ``log_every``. There is one more after the last step, or
    after Ctrl-C. None: no checkpoints."""
    resume: str | None = None
    """Folder of a checkpoint to resume from, with any number of ranks and any ``parallel``. ``auto``: the newest
    checkpoint in ``out_dir``, if any. None: start a new run."""
    resume_with_other_data: bool = False
    """Allow ``resume`` although ``data`` or the contents of its files have changed since the checkpoint."""
    seed: Natural = 0
    """Seed of weights, data order and dropout."""
    compile: bool = False
    """Compile each block of the model with ``torch.compile``. A block of the GPT compiles whole, with experts too.
    Losses change by rounding, and with ``model.dropout`` by other random masks."""
    compile_backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """Backend of ``compile``. ``inductor`` makes fast code, and needs Triton on a GPU and a C++ compiler on a CPU. The
    other two are for tests and for the search of errors."""
    recipe: Literal["none", "float8_current", "float8_delayed", "float8_block", "mxfp8", "nvfp4"] = "none"
    """How the operands of linear layers are quantised (``docs/recipes.md``). Needs ``model.param_dtype = "bfloat16"``,
    and does not go with ``compile``. A router in fp32 stays in fp32, and a warning says so."""
    emulate_recipe: bool = False
    """On a GPU without kernels for the recipe: quantise, and multiply in fp32. On a CPU this is always so."""
    recompute: Literal["none", "blocks", "attention", "operators"] = "none"
    """Which activations backward computes again instead of keeping them (``docs/training.md``). ``blocks``: all of a
    block. ``attention``: the attention of a block. ``operators``: of a block all but the results of matrix products and
    of attention."""
    recompute_every: Count = 1
    """Recompute every so many-th block, beginning with the first; 1: each."""
    cuda_graph: Literal["auto", True, False] = "auto"
    """Capture each step as one CUDA graph, after two eager steps. ``auto``: on a GPU, where that is right; a line of
    the log says why not (``maingrad.graphed``). True: or raise an error (``GraphedTrainingStep``); not with
    ``fsdp.offload_to_cpu``, ``fsdp.copy_engine_gather``, ``ddp.check_for_nan_in_grad`` or ``ddp.check_replicas_every``.
    On a CPU recorded operations then stand in for the graph, for tests."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA if there is a GPU."""
    out_dir: str = "runs/default"
    """Folder for metrics, resolved configuration, pictures and checkpoints. A new run replaces the files of an earlier
    run in it, except checkpoints."""

    def check(self) -> None:
        remedy = f"must be a multiple of train.log_every = {self.log_every}, so that a resumed run logs the same steps"
        self.require(self.save_every is None or self.save_every % self.log_every == 0, "save_every", remedy)
        remedy = "has no effect without train.recompute"
        self.require(self.recompute != "none" or self.recompute_every == 1, "recompute_every", remedy)
        remedy = f"must be a multiple of train.num_microbatches = {self.num_microbatches}"
        self.require(self.global_batch_size % self.num_microbatches == 0, "global_batch_size", remedy)
        remedy = "does not go with train.compile"
        self.require(self.recipe == "none" or not self.compile, "recipe", remedy)
        remedy = 'does not go with train.compile, which would compile each block anew; use "blocks" or "operators"'
        self.require(self.recompute != "attention" or not self.compile, "recompute", remedy)

    def sequences_per_microbatch(self, world_size: int) -> int:
        """Sequences per microbatch and rank. Raises ``ConfigError`` if the batch does not divide evenly."""
        parts = self.num_microbatches * world_size
        remedy = (
            f"must be a multiple of train.num_microbatches * ranks = {self.num_microbatches} * {world_size} = {parts}, "
            f"such as {-(-self.global_batch_size // parts) * parts}"
        )
        self.require(self.global_batch_size % parts == 0, "global_batch_size", remedy)
        return self.global_batch_size // parts
