"""``maingrad train --dry-run``: checks all that a run would check, and plans it for any number of ranks, alone.

No process group, no parameter and no gradient is made. The data are opened.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.table import Table

from ..config.run import Config
from ..data.batches import load_corpus
from ..data.sequences import Sampler
from ..data.tokens import check_tokens
from ..model.hugging_face import LanguageModel, build_language_model
from ..model.hugging_face_folder import check_weight_files
from ..training.loading import check_model, validation_batch
from ..training.run_state import check_resume, where_to_resume
from ..training.watching.profiling import check_profile
from ..training.watching.trackers import check_packages
from .plan import RunPlan, plan_run
from .tables import format_bytes, numbers, plan_tables, table_of, texts
from .units import states_of

__all__ = ["DryRun", "dry_run", "dry_run_tables"]


class DryRun(NamedTuple):
    """A run, before it is begun."""

    plan: RunPlan
    train_tokens: int
    """Tokens of the training data."""
    checkpoint_bytes: int
    """Bytes of all tensors of one checkpoint. The files are larger by about a kilobyte for each tensor and rank."""
    resumes_from: Path | None
    """The checkpoint from which the run would go on."""


def dry_run(config: Config, ranks: int) -> DryRun:
    """Check and plan the run of ``config`` on ``ranks`` ranks.

    Raises ``ConfigError`` and ``DataError``, as ``train`` does on so many ranks.
    """
    check_packages(config)
    check_profile(config.profile, ranks, config.train.device)
    plan = plan_run(config, ranks)
    settings = config.train
    corpus = load_corpus(config.data, sequence_length=settings.sequence_length)
    Sampler(corpus.bodies, config.data, settings)
    model = build_language_model(config.model, seed=0, device=torch.device("meta"))
    check_model(config, model)
    check_tokens(validation_batch(config, corpus).largest, model.vocab_size)
    if config.model.hugging_face is not None and config.model.pretrained:
        check_weight_files(Path(config.model.hugging_face))
    resumes_from = where_to_resume(config)
    if resumes_from is not None:
        check_resume(resumes_from, config, corpus.digests(config.data.documents))
    return DryRun(
        plan,
        len(corpus.train),
        _checkpoint_bytes(config, model),
        resumes_from,
    )


def _checkpoint_bytes(config: Config, model: LanguageModel) -> int:
    """Each parameter, its fp32 master where it is in half precision, and its optimizer state."""
    states = states_of(config, model, config.optimizer.muon_of(model))
    return sum(
        parameter.nbytes + 4 * parameter.numel() * (states[name] + (parameter.dtype is not torch.float32))
        for name, parameter in model.named_parameters()
    )


def dry_run_tables(run: DryRun) -> Iterator[Table]:
    """The tables of ``maingrad plan``, and one about the run as a whole."""
    yield from plan_tables(run.plan)
    config, ranks = run.plan.config, run.plan.ranks
    settings = config.train
    tokens = settings.global_batch_size * settings.sequence_length
    rows = settings.sequences_per_microbatch(config.mesh.data_ranks(ranks))
    said = {
        "parameters": f"{run.plan.parameters.total:,}",
        "bytes on each rank, at rest": format_bytes(run.plan.rank_bytes.total),
        "microbatches of a step": f"{settings.num_microbatches} of {rows} x {settings.sequence_length:,}",
        "tokens of a step": f"{tokens:,}",
        "tokens of the training data": f"{run.train_tokens:,}",
        "steps of an epoch": f"{run.train_tokens / tokens:,.1f}",
        "epochs of the run": f"{settings.steps * tokens / run.train_tokens:,.2f}",
        "bytes of a checkpoint": format_bytes(run.checkpoint_bytes),
    }
    if settings.save_every is not None:
        writers = ranks // config.num_instances
        said["written by a rank"] = format_bytes(math.ceil(run.checkpoint_bytes / writers))
        said["checkpoints on disk, at most"] = _kept(run)
    if run.resumes_from is not None:
        said["goes on from"] = str(run.resumes_from)
    columns = texts("what", list(said)), numbers("value", list(said.values()))
    yield table_of(f"the run: {settings.steps:,} steps on {ranks:,} rank(s)", *columns)


def _kept(run: DryRun) -> str:
    """While a new one is written, the older ones are there."""
    settings, keep = run.plan.config.train, run.plan.config.checkpoint
    assert settings.save_every is not None
    written = math.ceil(settings.steps / settings.save_every)
    count = written
    if keep.keep_last is not None:
        apart = math.lcm(settings.save_every, keep.keep_every) if keep.keep_every else settings.steps + 1
        count = min(written, keep.keep_last + 1 + settings.steps // apart)
    return f"{count:,}: {format_bytes(count * run.checkpoint_bytes)}"
