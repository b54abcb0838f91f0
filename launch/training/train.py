"""The training loop: bf16 parameters over fp32 accumulators, microbatches, overlapped reduction, sharded AdamW.

Every rank runs :func:`train`, in its own process or as a simulated rank. Rank 0 writes files and prints.
"""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ...te_integration.recipes import autocast, recipe_named
from ...te_integration.wgrad_queue import drain_modules
from ..config.run import Config
from ..data.batches import Batch, load_corpus
from ..data.bigram import MAX_VOCAB_SIZE, check_tokens, fit_bigram
from ..model.hugging_face import save_hugging_face
from .loading import load_model, make_sampler, validation_batch
from .metrics import MetricsWriter
from .pace import Pace, lr_factor
from .recording import OPTIMIZER_PHASE, WGRAD_PHASE, StepRecorder
from .run_state import RunSaver, resume_run, where_to_resume, write_resolved
from .runtime import Runtime, current_runtime, peak_nbytes
from .signals import StopRequest
from .watching.profiling import StepProfiler
from .watching.progress import Display, Status, format_rate, make_display
from .watching.trackers import check_packages, trackers_of
from .wrapping import wrap

__all__ = ["TrainResult", "train"]

_ROUTER_FIELDS = ("load_balancing_loss", "router_z_loss", "max_expert_load")


class TrainResult(NamedTuple):
    """The result of a run. Losses are equal on all ranks."""

    losses: tuple[float, ...]
    """Cross-entropy of every logged step, averaged over microbatches and ranks, in nats per token."""
    validation_loss: float | None
    """Last validation loss in nats per token; None if the run was interrupted before any."""
    bigram_loss: float | None
    """Loss of the bigram model on the same validation set; None on ranks other than 0 and for large vocabularies."""
    steps: int
    """Optimizer steps taken."""
    seconds: float
    """Seconds from the first step to the end of the last validation."""
    interrupted: bool
    """Whether a signal ended the run."""
    is_main: bool
    """Whether this is rank 0, which writes files."""
    model: nn.Module
    """The trained model without ``DistributedDataParallel``; under ``fsdp`` and ``hsdp`` it is fully sharded."""


def train(config: Config, *, stop: StopRequest | None = None, display: Display | None = None) -> TrainResult:
    """Train as ``config`` says. Call it on every rank of the default process group, or without a group on one rank.

    Rank 0 writes ``metrics.jsonl`` and ``resolved_config.json`` to ``config.train.out_dir``. Raises ``ConfigError`` if
    the batch does not divide evenly over ranks, and ``DataError`` for unusable data.
    """
    check_packages(config)
    runtime = current_runtime(config.train.device)
    is_main = runtime.rank == 0
    out_dir = Path(config.train.out_dir)
    metrics = MetricsWriter(out_dir / "metrics.jsonl" if is_main else None)
    trainer = _Trainer(config, runtime, metrics, stop or StopRequest(), display or make_display(is_main=is_main))
    if is_main:
        write_resolved(config, runtime.world_size)
    try:
        with trainer.profiler:
            return trainer.run()
    finally:
        trainer.saver.give_up()
        trainer.recorder.close()
        trainer.display.close()
        metrics.close()


class _Trainer:
    """The state of a run on one rank."""

    def __init__(
        self, config: Config, runtime: Runtime, metrics: MetricsWriter, stop: StopRequest, display: Display
    ) -> None:
        self.config, self.runtime, self.metrics, self.stop, self.display = config, runtime, metrics, stop, display
        settings = config.train
        config.check_ranks(runtime.world_size)
        self.rows = settings.sequences_per_microbatch(runtime.world_size)

        # Data: the same validation set on every rank.
        self.corpus = load_corpus(
            config.data, sequence_length=settings.sequence_length, cache_dir=Path(settings.out_dir) / "tokens"
        )
        self.sampler = make_sampler(config, self.corpus)
        self.windows = validation_batch(config, self.corpus)
        keeps = settings.save_every is not None or settings.resume is not None
        self.digests = self.corpus.digests(config.data.documents) if keeps else {}
        """Digests of the data at the start of the run."""
        self.unit = "byte" if config.data.is_bytes else "token"

        # Model: weights from the seed alone.
        resume_from = where_to_resume(config)
        self.module = load_model(config, runtime.device, display.message)
        check_tokens(self.windows.largest, self.module.vocab_size)
        self.wrapped = wrap(self.module, config, runtime.device)
        self.model = self.wrapped.model
        self.router_sums: Tensor | None = None
        """Sums of ``_ROUTER_FIELDS`` over the microbatches since the last record; None without experts."""
        if config.model.num_experts:
            self.router_sums = torch.zeros(len(_ROUTER_FIELDS), dtype=torch.float64, device=runtime.device)
        self.recipe = recipe_named(settings.recipe, emulate=settings.emulate_recipe)
        self.pace = pace = Pace(settings.steps, settings.max_seconds)
        self.scheduler = LambdaLR(self.wrapped.optimizer, lambda step: lr_factor(config.optimizer, step, pace.fraction))
        self.saver = RunSaver(config, self.wrapped, is_main=runtime.rank == 0, say=display.message)
        self.profiler = StepProfiler(config, runtime)
        self.graphed = self.wrapped.graphed(self._iteration) if settings.cuda_graph else None
        self.validated = True
        """False if an interrupted run ended before the validation that was due."""
        if resume_from is not None:
            self.validated = resume_run(resume_from, config, pace, self.wrapped, self.scheduler, self.digests)
            metrics.resume(pace.step)
            display.message(f"goes on from '{resume_from}', after step {pace.step}")
            if pace.fraction >= 1.0:
                display.message(
                    f"no step is left: train.steps = {settings.steps}, train.max_seconds = {settings.max_seconds}; "
                    f"raise them to train on"
                )
        if runtime.rank == 0:
            metrics.trackers = trackers_of(config, None if resume_from is None else pace.step)
        self.recorder = StepRecorder(
            self.wrapped, runtime, metrics, first_step=pace.step, num_steps=settings.steps - pace.step, unit=self.unit
        )

    def run(self) -> TrainResult:
        """Run all steps and validations, and write all records."""
        settings, pace = self.config.train, self.pace
        self._introduce()
        bigram_loss = self._bigram_loss()
        losses: list[float] = []
        validation_loss: float | None = None
        interrupted = False
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.runtime.device)
        since_log, start, first_step = 0, time.monotonic() - pace.seconds, pace.step
        if not self.validated and self._is_validated_here():
            validation_loss = self._validate()
        log_start = time.monotonic()
        while pace.fraction < 1.0 and not interrupted:
            lr = float(self.scheduler.get_last_lr()[0])
            with self.profiler.step(pace.step):
                loss_sum += self._step(pace.step)
            pace.step += 1
            if pace.step == first_step + 1 and settings.save_every is not None:
                self.saver.prepare()
            self.validated = False
            since_log += 1
            if since_log == settings.log_every or pace.step == settings.steps:
                # Only here the host waits for the device, and ranks wait for each other.
                elapsed, stopping = time.monotonic() - start, float(self.stop.requested)
                unsaved = float(self.saver.failed())
                with self.wrapped.failures.watch("the sum of losses"):
                    sums = self.runtime.all_reduce_sum(
                        [float(loss_sum) / since_log, stopping, elapsed, unsaved, *self._router_means(since_log)]
                    )
                means = [value / self.runtime.world_size for value in sums]
                mean_loss, stops, pace.seconds, any_unsaved = means[:4]
                if any_unsaved > 0.0:
                    self.saver.finish()  # raises the error
                self.saver.look()
                interrupted = stops > 0.0
                losses.append(mean_loss)
                routers = dict(zip(_ROUTER_FIELDS, means[4:], strict=False))
                self._log(mean_loss, lr, since_log, time.monotonic() - log_start, routers)
                since_log, log_start = 0, time.monotonic()
                loss_sum.zero_()
            self.scheduler.step()
            if not interrupted and self._is_validated_here():
                validation_loss = self._validate()
                log_start = time.monotonic()
            over = pace.fraction >= 1.0
            if settings.save_every is not None and (over or interrupted or pace.step % settings.save_every == 0):
                self._save()
                log_start = time.monotonic()
        seconds = time.monotonic() - start
        self.saver.finish()
        self.recorder.close()
        self._conclude(validation_loss, bigram_loss, seconds, interrupted=interrupted)
        return TrainResult(
            tuple(losses),
            validation_loss,
            bigram_loss,
            pace.step,
            seconds,
            interrupted,
            self.runtime.rank == 0,
            self.module,
        )

    def _step(self, step: int) -> Tensor:
        """One optimizer step; returns this rank's mean loss over its microbatches, on the device."""
        settings, recorder = self.config.train, self.recorder
        recorder.step_begins(step)
        # Seed, step and rank determine dropout, so a checkpoint needs no random state.
        entropy = np.random.SeedSequence([settings.seed, step, self.runtime.rank])
        torch.manual_seed(int(entropy.generate_state(1, np.uint64)[0]))
        batches = [self._batch(step, microbatch) for microbatch in range(settings.num_microbatches)]
        inputs = torch.stack([each.inputs for each in batches])
        targets = torch.stack([each.targets for each in batches])
        iteration = self.graphed
        if iteration is None or recorder.is_recording:
            iteration = self._iteration
        loss = iteration(inputs, targets, *self._document_arguments(step, batches))
        recorder.step_ended()
        return loss

    def _document_arguments(self, step: int, batches: list[Batch]) -> list[Tensor]:
        """Of ``_iteration``: nothing where all targets count, else weights, and under ``documents = "mask"`` positions.

        A microbatch's mean counts by its share of the targets of all ranks, which every rank knows from the data alone.
        Gradients are averaged over ranks, so the share is multiplied by their number.
        """
        if self.config.data.documents == "join":
            return []
        shares = torch.stack([(each.targets >= 0).sum() for each in batches]).double()
        weights = shares * (self.runtime.world_size / max(1, self.sampler.counted(step)))
        positions = [each.positions for each in batches if each.positions is not None]
        return [weights, torch.stack(positions)] if positions else [weights]

    def _loss(self, inputs: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        """The model's loss of inputs and targets [B, T]."""
        with autocast(self.recipe is not None, recipe=self.recipe):
            loss: Tensor = self.model(inputs, targets) if positions is None else self.model(inputs, targets, positions)
        return loss

    def _iteration(
        self, inputs: Tensor, targets: Tensor, weights: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """The work of a step on the device; returns the mean loss.

        Inputs, targets and positions are those of all microbatches, [M, B, T]. ``weights`` [M] fp64 are those of the
        microbatches' means; None: 1 / M each.
        """
        wrapped, recorder = self.wrapped, self.recorder
        num_microbatches = len(inputs)
        total = torch.zeros((), dtype=torch.float64, device=self.runtime.device)
        for microbatch in range(num_microbatches):
            is_last = microbatch == num_microbatches - 1
            with nullcontext() if is_last else wrapped.no_sync():
                loss = self._loss(
                    inputs[microbatch], targets[microbatch], None if positions is None else positions[microbatch]
                )
                recorder.forward_ended()
                (loss / num_microbatches if weights is None else loss * weights[microbatch].to(loss.dtype)).backward()
                if self.config.model.delay_wgrad_layers:
                    with recorder.phase(WGRAD_PHASE):
                        drain_modules(self.module)
            own = self._own_loss(loss.detach())
            total += own if weights is None else own * weights[microbatch]
        wrapped.model.finish_grad_sync()  # here, because reports count the next phase as computation
        with recorder.phase(OPTIMIZER_PHASE):
            wrapped.step()
        wrapped.optimizer.zero_grad()
        return total / num_microbatches if weights is None else total

    def _is_validated_here(self) -> bool:
        """Whether a validation is due after the current step."""
        return self.pace.fraction >= 1.0 or self.pace.step % self.config.train.eval_every == 0

    def _save(self) -> None:
        began = time.monotonic()
        self.saver.save(self.pace, self.scheduler, self.digests, validated=self.validated)
        self.metrics.write("checkpoint", step=self.pace.step, seconds=time.monotonic() - began)

    def _own_loss(self, loss: Tensor) -> Tensor:
        """The cross-entropy without router losses, so that records of dense and expert models are comparable."""
        parts = self.module.loss_parts
        if self.router_sums is None or parts is None:
            return loss
        self.router_sums += torch.stack([parts.load_balancing, parts.router_z, parts.max_load])
        return parts.cross_entropy

    def _router_means(self, num_steps: int) -> list[float]:
        """Means over the microbatches of so many steps on this rank; starts anew."""
        if self.router_sums is None:
            return []
        means = self.router_sums / (num_steps * self.config.train.num_microbatches)
        self.router_sums.zero_()
        return [float(value) for value in means.tolist()]

    def _batch(self, step: int, microbatch: int) -> Batch:
        first = (microbatch * self.runtime.world_size + self.runtime.rank) * self.rows
        batch = self.sampler.batch(step, slice(first, first + self.rows))
        check_tokens(batch.largest, self.module.vocab_size)
        return batch.to(self.runtime.device)

    @torch.no_grad()
    def _validate(self) -> float:
        """Mean loss over the fixed validation set, whose rows are divided over ranks. Equal on all ranks."""
        began = time.monotonic()
        self.model.eval()
        ranks, joined = self.runtime.world_size, self.config.data.documents == "join"
        batch = self.windows.rows(slice(self.runtime.rank, None, ranks)).to(self.runtime.device)
        total = counted = 0.0
        # All ranks run as many forwards as the first, which has the most rows: those of a sharded model are collective.
        for first in range(0, -(-len(self.windows.inputs) // ranks), self.rows):
            part = batch.rows(slice(first, first + self.rows))
            # Where all targets count, sequences are counted: each has the same number of targets. No row counts 0.
            weight = float(len(part.inputs) if joined else (part.targets >= 0).sum())
            part = part if len(part.inputs) else self.windows.rows(slice(0, 1)).to(self.runtime.device)
            loss = float(self._loss(*part))
            total += loss * weight if weight else 0.0  # the mean over no target may be NaN
            counted += weight
            self.recorder.forward_ended()
        self.model.train()
        with self.wrapped.failures.watch("the sum of validation losses"):
            loss_sum, count = self.runtime.all_reduce_sum([total, counted])
        loss = loss_sum / count
        self.validated = True
        self.metrics.write("validation", step=self.pace.step, loss=loss, seconds=time.monotonic() - began)
        self.display.message(f"step {self.pace.step:>5}  validation loss {loss:.4f} nats per {self.unit}")
        return loss

    def _log(
        self,
        loss: float,
        lr: float,
        num_steps: int,
        seconds: float,
        routers: Mapping[str, float],
    ) -> None:
        settings, pace = self.config.train, self.pace
        rate = settings.global_batch_size * settings.sequence_length * num_steps / seconds
        norm = self.wrapped.grad_norm
        self.metrics.write(
            "step",
            step=self.pace.step,
            loss=loss,
            lr=lr,
            grad_norm=None if norm is None else float(norm),
            tokens_per_second=rate,
            seconds_per_step=seconds / num_steps,
            elapsed=self.pace.seconds,
            **routers,
        )
        self.display.update(Status(pace.step, pace.steps, pace.fraction, pace.seconds, loss, lr, rate))

    def _introduce(self) -> None:
        numel = sum(parameter.numel for parameter in self.wrapped.parameters())
        runtime, settings = self.runtime, self.config.train
        self.display.message(
            f"{numel / 1e6:.2f}M parameters in {self.config.model.param_dtype}, {self.wrapped.num_buckets} buckets; "
            f"{runtime.world_size} rank(s) on {runtime.device.type}, {settings.num_microbatches} microbatches of "
            f"{self.rows} x {settings.sequence_length} tokens each"
        )
        self.display.message(
            f"data: {self.corpus.description}; {format_rate(len(self.corpus.train))} tokens to train on, "
            f"{format_rate(len(self.corpus.validation))} held back"
        )

    def _bigram_loss(self) -> float | None:
        vocab_size, joined = self.module.vocab_size, self.config.data.documents == "join"
        if self.runtime.rank != 0 or vocab_size > MAX_VOCAB_SIZE or not joined:
            return None
        loss = fit_bigram(self.corpus.train, vocab_size).loss(self.windows)
        self.display.message(f"{self.unit}-bigram model on the same data: {loss:.4f} nats per {self.unit}")
        return loss

    def _conclude(self, loss: float | None, bigram: float | None, seconds: float, *, interrupted: bool) -> None:
        common = {"step": self.pace.step, "seconds": seconds, "validation_loss": loss, "bigram_loss": bigram}
        if interrupted:
            peak, signal = peak_nbytes(self.runtime.device), self.stop.signal_name or "another rank's"
            self.metrics.write("interrupted", **common, peak_memory_bytes=peak, signal=signal)
            self.display.message(f"interrupted after step {self.pace.step}; records are in {self.config.train.out_dir}")
            return
        source = self.config.model.hugging_face
        if source is not None and self.config.model.save_hugging_face:
            weights, target = self.wrapped.whole_weights(wanted=self.runtime.rank == 0), self.config.train.out_dir
            if self.runtime.rank == 0:
                target, trusts = f"{target}/hugging_face", self.config.model.trust_remote_code
                save_hugging_face(weights, source, target, self.display.message, trusts)
                self.display.message(f"the model is in '{target}'")
        below = None if loss is None or bigram is None else bigram - loss
        digest = self.wrapped.digest(wanted=self.runtime.rank == 0)
        self.metrics.write(
            "final",
            **common,
            nats_below_bigram=below,
            peak_memory_bytes=peak_nbytes(self.runtime.device),
            weights_sha256=digest,
        )
        if below is not None:
            self.display.message(
                f"validation loss {loss:.4f} nats per {self.unit} after {self.pace.step} steps in {seconds:.0f} s: "
                f"{abs(below):.4f} {'below' if below >= 0 else 'above'} the {self.unit}-bigram model's {bigram:.4f}"
            )
