"""The training loop: bf16 parameters over fp32 accumulators, microbatches, overlapped reduction, sharded AdamW.

Every rank runs :func:`train`, in its own process or as a simulated rank. Rank 0 writes files and prints.
"""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ...te_integration.recipes import autocast
from ...te_integration.wgrad_queue import drain_modules
from ..config.run import Config
from ..data.batches import Batch, load_corpus
from ..data.bigram import bigram_loss
from ..data.sequences import Sampler
from ..data.tokens import check_tokens
from ..model.hugging_face import HuggingFaceModel, check_documents, save_hugging_face
from .loading import load_model, load_recipe, validation_batch
from .metrics import OPTIMIZER_PHASE, MetricsWriter
from .pace import Pace, lr_factor
from .recording import WGRAD_PHASE, StepRecorder
from .run_state import RunSaver, resume_run, where_to_resume, write_resolved
from .runtime import Runtime, current_runtime, peak_nbytes
from .signals import StopRequest
from .watching.profiling import StepProfiler
from .watching.progress import Display, Status, format_rate
from .watching.trackers import check_packages, trackers_of
from .wrapping import Wrapped

__all__ = ["TrainResult", "Trainer", "train"]

_ROUTER_FIELDS = ("load_balancing_loss", "router_z_loss", "max_expert_load")


class TrainResult(NamedTuple):
    """The result of a run. Losses are equal on all ranks."""

    losses: tuple[float, ...]
    """Cross-entropy of every logged step, averaged over microbatches and ranks, in nats per token."""
    validation_loss: float | None
    """Last validation loss in nats per token; None if the run was interrupted before any."""
    bigram_loss: float | None
    """Loss of the bigram model on the same validation set; None on ranks other than 0 and for other data than
    the standard library's source."""
    steps: int
    """Optimizer steps taken."""
    seconds: float
    """Seconds from the first step to the end of the last validation."""
    interrupted: bool
    """Whether a signal ended the run."""
    is_main: bool
    """Whether this is rank 0, which writes files."""
    model: nn.Module
    """The trained model without ``DistributedDataParallel``, or this rank's stage of it; under ``fsdp`` and ``hsdp`` it
    is fully sharded."""


def train(config: Config, *, stop: StopRequest | None = None, display: Display | None = None) -> TrainResult:
    """Train as ``config`` says. Call it on every rank of the default process group, or without a group on one rank.

    Rank 0 writes ``metrics.jsonl`` and ``resolved_config.json`` to ``config.train.out_dir``. Raises ``ConfigError`` if
    the batch does not divide evenly over ranks, and ``DataError`` for unusable data.
    """
    check_packages(config)
    runtime = current_runtime(config.train.device, config.mesh)
    remedy = 'needs GPUs, which address each other\'s memory; on CPUs set "all_to_all"'
    config.mesh.require(config.mesh.transport != "symmetric" or runtime.device.type == "cuda", "transport", remedy)
    out_dir = Path(config.train.out_dir)
    metrics = MetricsWriter(out_dir / "metrics.jsonl" if runtime.is_main else None)
    display = display or Display(is_main=runtime.is_main)
    kind: type[Trainer] = Trainer
    if config.mesh.pp > 1:
        from .pipelined import PipelinedTrainer

        kind = PipelinedTrainer
    trainer = kind(config, runtime, metrics, stop or StopRequest(), display)
    if runtime.is_main:
        write_resolved(config, runtime.world_size)
    try:
        try:
            return trainer.run()
        finally:
            trainer.profiler.stop("-failed")
    finally:
        trainer.saver.give_up()
        trainer.recorder.close()
        metrics.close()


class Trainer:
    """The state of a run on one rank."""

    def __init__(
        self, config: Config, runtime: Runtime, metrics: MetricsWriter, stop: StopRequest, display: Display
    ) -> None:
        self.config, self.runtime, self.metrics, self.stop, self.display = config, runtime, metrics, stop, display
        settings = config.train
        config.check_ranks(runtime.world_size)
        self.rows = settings.sequences_per_microbatch(runtime.data_ranks)

        self.recipe = load_recipe(config, runtime.device)
        count = settings.num_microbatches
        self.equal_weights = torch.full((count,), 1 / count, dtype=torch.float64, device=runtime.device)
        """Weights of a step's microbatches where all targets count."""
        # Data: the same validation set on every rank.
        self.corpus = load_corpus(config.data, sequence_length=settings.sequence_length)
        self.sampler = Sampler(self.corpus.bodies, config.data, settings)
        self.windows = validation_batch(config, self.corpus)
        self.saves = settings.save_every is not None
        needs_digests = self.saves or settings.resume is not None
        self.digests = self.corpus.digests(config.data.documents) if needs_digests else {}
        """Digests of the data at the start of the run."""
        self.unit = "byte" if config.data.is_bytes else "token"

        # Model: weights from the seed alone.
        resume_from = where_to_resume(config)
        self.module = load_model(config, runtime)
        check_tokens(self.windows.largest, self.module.vocab_size)
        self.wrapped = Wrapped(self.module, config, runtime)
        self.model = self.wrapped.model
        if isinstance(self.module, HuggingFaceModel) and config.data.documents == "mask":
            check_documents(self.module, runtime.device)
        self.pace = pace = Pace(settings.steps, settings.max_seconds)
        self.scheduler = LambdaLR(self.wrapped.optimizer, lambda step: lr_factor(config.optimizer, step, pace.fraction))
        self.saver = RunSaver(config, self.wrapped, is_main=runtime.is_main, say=display.message)
        self.profiler = StepProfiler(config, runtime)
        how = False if config.mesh.runs_eagerly else settings.cuda_graph
        self.graphed = self.wrapped.graphed(self._iteration, how)
        self.validated = True
        """False if an interrupted run ended before the validation that was due."""
        if resume_from is not None:
            self.validated = resume_run(resume_from, config, pace, self.wrapped, self.scheduler, self.digests)
            metrics.resumed_at = pace.step
            display.message(f"goes on from '{resume_from}', after step {pace.step}")
            if pace.fraction >= 1.0:
                display.message(
                    f"no step is left: train.steps = {settings.steps}, train.max_seconds = {settings.max_seconds}; "
                    f"raise them to train on"
                )
        if runtime.is_main:
            metrics.trackers = trackers_of(config, None if resume_from is None else pace.step)
        self.recorder = StepRecorder(
            self.wrapped, runtime, metrics, first_step=pace.step, num_steps=settings.steps - pace.step, unit=self.unit
        )

        # Since the last record.
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=runtime.device)
        self.router_sums = torch.zeros(len(_ROUTER_FIELDS), dtype=torch.float64, device=runtime.device)
        """Sums of ``_ROUTER_FIELDS`` over the microbatches; 0 without experts."""
        self.logged_step = pace.step
        self.log_start = self.start = time.monotonic()

    def run(self) -> TrainResult:
        """Run all steps and validations, and write all records."""
        settings, pace = self.config.train, self.pace
        self._introduce()
        bigram = self._bigram_loss()
        losses: list[float] = []
        validation_loss: float | None = None
        interrupted = False
        first_step, self.start = pace.step, time.monotonic() - pace.seconds
        if not self.validated and self._is_validated_here():
            validation_loss = self._validate()
        self.log_start = time.monotonic()
        while pace.fraction < 1.0 and not interrupted:
            lr = float(self.scheduler.get_last_lr()[-1])  # of optimizer.lr: Muon's groups come first
            with self.profiler.step(pace.step):
                self.loss_sum += self._step(pace.step)
            pace.step += 1
            # Nothing may stop the device while a step is captured, which is the third one.
            if pace.step == first_step + (1 if settings.cuda_graph is False else 4) and self.saves:
                self.saver.prepare()
            self.validated = False
            if pace.step % settings.log_every == 0 or pace.step == settings.steps:
                loss, interrupted = self._log(lr)
                losses.append(loss)
            self.scheduler.step()
            if not interrupted and self._is_validated_here():
                validation_loss = self._validate()
            self._save(is_over=pace.fraction >= 1.0 or interrupted)
        seconds = time.monotonic() - self.start
        self.profiler.stop()
        self.saver.finish()
        self.recorder.close()
        self._conclude(validation_loss, bigram, seconds, interrupted=interrupted)
        # Rank 0 alone waited for the last gathers. A process that ends before them leaves rank 0 in them for ever.
        if self.runtime.device.type == "cuda":
            torch.cuda.synchronize(self.runtime.device)
        steps, is_main = pace.step, self.runtime.is_main
        return TrainResult(tuple(losses), validation_loss, bigram, steps, seconds, interrupted, is_main, self.module)

    # ---- One step. ----

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

    def _batch(self, step: int, microbatch: int) -> Batch:
        first = (microbatch * self.runtime.data_ranks + self.runtime.data_rank) * self.rows
        batch = self.sampler.batch(step, slice(first, first + self.rows))
        check_tokens(batch.largest, self.module.vocab_size)
        return self._own_part(batch).to(self.runtime.device)

    def _own_part(self, batch: Batch) -> Batch:
        """This rank's part of the sequences. Positions are whole: they say who may attend to whom."""
        own = self.runtime.context.own
        return batch._replace(inputs=own(batch.inputs, 1), targets=own(batch.targets, 1))

    def _document_arguments(self, step: int, batches: list[Batch]) -> list[Tensor]:
        """Arguments of ``_iteration``: the microbatches' weights, and under ``"mask"`` positions.

        A microbatch's mean counts by its share of the targets of all ranks, which every rank knows from the data alone.
        Gradients are averaged over the ranks with other tokens, so the share is multiplied by their number.
        """
        if self.config.data.documents == "join":  # all targets count
            return [self.equal_weights]
        shares = torch.stack([(each.targets >= 0).sum() for each in batches]).double()
        weights = shares * (self.runtime.loss_ranks / max(1, self.sampler.counted(step)))
        positions = [each.positions for each in batches if each.positions is not None]
        return [weights, torch.stack(positions)] if positions else [weights]

    def _loss(self, inputs: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        """The model's loss of inputs and targets [B, T]."""
        with autocast(self.recipe is not None, recipe=self.recipe):
            loss: Tensor = self.model(inputs, targets) if positions is None else self.model(inputs, targets, positions)
        return loss

    def _iteration(self, inputs: Tensor, targets: Tensor, weights: Tensor, positions: Tensor | None = None) -> Tensor:
        """The work of a step on the device; returns the mean loss.

        Inputs, targets and positions are those of all microbatches, [M, B, T]. ``weights`` [M] fp64 are those of the
        microbatches' means.
        """
        loss = self._run_microbatches(inputs, targets, weights, positions)
        self.model.finish_grad_sync()  # here, because reports count the next phase as computation
        with self.recorder.phase(OPTIMIZER_PHASE):
            self.wrapped.step()
        self.wrapped.optimizer.zero_grad()
        return loss

    def _run_microbatches(self, inputs: Tensor, targets: Tensor, weights: Tensor, positions: Tensor | None) -> Tensor:
        """Forward and backward of one microbatch after the other; returns the mean loss."""
        recorder, num_microbatches = self.recorder, len(inputs)
        total = torch.zeros((), dtype=torch.float64, device=self.runtime.device)
        for microbatch in range(num_microbatches):
            is_last = microbatch == num_microbatches - 1
            with nullcontext() if is_last else self.model.no_sync():
                loss = self._loss(
                    inputs[microbatch], targets[microbatch], None if positions is None else positions[microbatch]
                )
                recorder.forward_ended()
                (loss * weights[microbatch].to(loss.dtype)).backward()
                if self.config.model.delay_wgrad_layers:
                    with recorder.phase(WGRAD_PHASE):
                        drain_modules(self.module)
            total += self._own_loss(loss.detach()) * weights[microbatch]
        return total

    def _own_loss(self, loss: Tensor) -> Tensor:
        """The cross-entropy without router losses, so that records of dense and expert models are comparable."""
        parts = self.module.loss_parts
        if parts is None:
            return loss
        self.router_sums += torch.stack([parts.load_balancing, parts.router_z, parts.max_load])
        return parts.cross_entropy

    # ---- Between steps. ----

    def _log(self, lr: float) -> tuple[float, bool]:
        """Record the steps since the last record; returns their mean loss, and whether a rank was asked to stop.

        Only here the host waits for the device, and ranks wait for each other.
        """
        settings, pace = self.config.train, self.pace
        num_steps = pace.step - self.logged_step
        router_means = (self.router_sums / (num_steps * settings.num_microbatches)).tolist()
        own = [
            float(self.loss_sum) / num_steps,
            float(self.stop.requested),
            time.monotonic() - self.start,
            float(self.saver.failed()),
            *router_means,
        ]
        with self.wrapped.failures.watch("the sum of losses"):
            sums = self.runtime.all_reduce_sum(own)
        loss, stops, pace.seconds, unsaved, *routers = (value / self.runtime.world_size for value in sums)
        if unsaved > 0.0:
            self.saver.finish()  # raises the error
        self.saver.look()
        seconds = time.monotonic() - self.log_start
        rate = settings.global_batch_size * settings.sequence_length * num_steps / seconds
        norm = self.wrapped.optimizer.grad_norm
        self.metrics.write(
            "step",
            step=pace.step,
            loss=loss,
            lr=lr,
            grad_norm=None if norm is None else float(norm),
            tokens_per_second=rate,
            seconds_per_step=seconds / num_steps,
            elapsed=pace.seconds,
            **(dict(zip(_ROUTER_FIELDS, routers, strict=True)) if self.config.model.num_experts else {}),
        )
        self.display.update(Status(pace.step, pace.steps, pace.fraction, pace.seconds, loss, lr, rate))
        self.loss_sum.zero_()
        self.router_sums.zero_()
        self.logged_step, self.log_start = pace.step, time.monotonic()
        return loss, stops > 0.0

    def _is_validated_here(self) -> bool:
        """Whether a validation is due after the current step."""
        return self.pace.fraction >= 1.0 or self.pace.step % self.config.train.eval_every == 0

    @torch.no_grad()
    def _validate(self) -> float:
        """Mean loss over the fixed validation set, whose rows are divided over ranks. Equal on all ranks."""
        began = time.monotonic()
        self.model.eval()
        ranks, joined = self.runtime.data_ranks, self.config.data.documents == "join"
        windows = self._own_part(self.windows)
        batch = windows.rows(slice(self.runtime.data_rank, None, ranks)).to(self.runtime.device)
        total = counted = 0.0
        # All ranks run as many forwards as the first, which has the most rows: those of a sharded model are collective.
        for first in range(0, -(-len(windows.inputs) // ranks), self.rows):
            part = batch.rows(slice(first, first + self.rows))
            # Where all targets count, sequences are counted: each has the same number of targets. No row counts 0.
            weight = float(len(part.inputs) if joined else (part.targets >= 0).sum())
            part = part if len(part.inputs) else windows.rows(slice(0, 1)).to(self.runtime.device)
            loss = float(self._loss(*part))
            total += loss * weight
            counted += weight
            self.recorder.forward_ended()
        self.model.train()
        with self.wrapped.failures.watch("the sum of validation losses"):
            loss_sum, count = self.runtime.all_reduce_sum([total, counted])
        loss = loss_sum / count
        self.validated = True
        self.metrics.write("validation", step=self.pace.step, loss=loss, seconds=time.monotonic() - began)
        self.display.message(f"step {self.pace.step:>5}  validation loss {loss:.4f} nats per {self.unit}")
        self.log_start = time.monotonic()
        return loss

    def _save(self, *, is_over: bool) -> None:
        """Write a checkpoint, if one is due."""
        every = self.config.train.save_every
        if every is None or not (is_over or self.pace.step % every == 0):
            return
        began = time.monotonic()
        self.saver.save(self.pace, self.scheduler, self.digests, validated=self.validated)
        self.metrics.write("checkpoint", step=self.pace.step, seconds=time.monotonic() - began)
        self.log_start = time.monotonic()

    # ---- Before the first step, and after the last. ----

    def _introduce(self) -> None:
        numel = sum(parameter.numel for parameter in self.wrapped.parameters)
        runtime, settings = self.runtime, self.config.train
        self.display.message(
            f"{numel / 1e6:.2f}M parameters in {self.config.model.param_dtype}, {self.wrapped.num_buckets} buckets; "
            f"{runtime.world_size} rank(s) on {runtime.device.type}{runtime.mesh.said}, {settings.num_microbatches} "
            f"microbatches of {self.rows} x {settings.sequence_length} tokens each"
        )
        self.display.message(
            f"data: {self.corpus.description}; {format_rate(len(self.corpus.train))} tokens to train on, "
            f"{format_rate(len(self.corpus.validation))} held back"
        )

    def _bigram_loss(self) -> float | None:
        data = self.config.data
        if not self.runtime.is_main or data.source != "stdlib" or data.documents != "join":
            return None
        loss = bigram_loss(self.corpus.train, self.windows)
        self.display.message(f"byte-bigram model on the same data: {loss:.4f} nats per byte")
        return loss

    def _conclude(self, loss: float | None, bigram: float | None, seconds: float, *, interrupted: bool) -> None:
        settings, is_main, say = self.config, self.runtime.is_main, self.display.message
        found = {"step": self.pace.step, "seconds": seconds, "validation_loss": loss}
        found["peak_memory_bytes"] = peak_nbytes(self.runtime.device)
        if bigram is not None:
            found["bigram_loss"] = bigram
        if interrupted:
            self.metrics.write("interrupted", **found, signal=self.stop.signal_name or "another rank's")
            say(f"interrupted after step {self.pace.step}; records are in {settings.train.out_dir}")
            return
        source, target = settings.model.hugging_face, f"{settings.train.out_dir}/hugging_face"
        if source is not None and settings.model.save_hugging_face:
            weights = self.wrapped.whole_weights(wanted=is_main)
            if is_main:
                save_hugging_face(weights, source, target, say, settings.model.trust_remote_code)
                say(f"the model is in '{target}'")
        digest = self.wrapped.digest(wanted=is_main)
        if bigram is not None and loss is not None:
            found["nats_below_bigram"] = gap = bigram - loss
            say(
                f"validation loss {loss:.4f} nats per byte after {self.pace.step} steps in {seconds:.0f} s: "
                f"{abs(gap):.4f} {'below' if gap >= 0 else 'above'} the byte-bigram model's {bigram:.4f}"
            )
        self.metrics.write("final", **found, weights_sha256=digest)
