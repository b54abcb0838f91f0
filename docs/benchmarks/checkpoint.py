"""Time to save and load: maingrad's checkpoints against plain torch.distributed.checkpoint (DCP), with equal bytes.

ZeRO-1           a ``DistributedDataParallel`` model and its ``DistributedOptimizer``
fully sharded    a ``fully_shard`` model and ``torch.optim.AdamW``
DCP              tensors of the same number and shapes: weights whole on every rank (ZeRO-1) or as DTensors, moments as
                 DTensors sharded by rows; no metadata (groups, steps, an id), and no check of a checksum

Run by torchrun. Each round saves and loads maingrad's checkpoint, then DCP's; the file system's cache is warm for both.
"""

import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree

import torch
import torch.distributed as dist
from harness import ConfigError, Options, log, run_script
from tables import Measurement, machine, table, write_table
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import maingrad
from maingrad.ddp import load_checkpoint, save_checkpoint
from maingrad.launch.training.runtime import process_group_from_env


@dataclass(frozen=True, kw_only=True)
class CheckpointBench(Options):
    """The size of the saved model: a chain of square layers in fp32, with both moments of Adam."""

    dim: int = 1020
    """Rows and columns of a layer."""
    num_layers: int = 12
    """Number of layers; each has a bias."""
    num_rounds: int = 9
    """Measured rounds, after one warm-up round."""
    folder: Path | None = None
    """Folder for the checkpoints, which are removed at the end; all ranks must see it. None: a new temporary folder."""

    def model(self):
        """The whole model."""
        return nn.Sequential(*(nn.Linear(self.dim, self.dim) for _ in range(self.num_layers)))


COLUMNS = [
    ("model", "{row.name}"),
    ("", "{row.verb}"),
    ("MB", "{row.megabytes:.0f}"),
    ("s", "{row.seconds:.3f}"),
    ("DCP, s", "{row.dcp_seconds:.3f}"),
    ("over DCP", "{row.ratio:.2f}"),
    ("processor time over DCP", "{row.cpu_ratio:.2f}"),
]


def bench_checkpoint(bench):
    """Measure on all ranks of the default group (collective). Times are rank-local: report those of rank 0.

    seconds, dcp_seconds  median over the rounds of the seconds from one barrier to the next: ours, DCP's
    ratio                 median over the rounds of maingrad's seconds divided by DCP's in the same round
    cpu_ratio             the same for the processor time of rank 0, which other programs on the machine disturb less
    """
    if not dist.is_initialized():
        raise ConfigError("checkpoint.py compares ranks that save together: run it under torchrun --nproc-per-node 2")
    folder = [tempfile.mkdtemp(dir=bench.folder) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    place = Path(folder[0])
    rows = []
    try:
        for name, form in (("ZeRO-1", "zero1"), ("fully sharded", "zero3")):
            log(f"{name} ...")
            rows += _measure(name, _trained(bench, form), _torchs(bench, whole=form == "zero1"), bench, place)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            rmtree(place)
    return rows


def write_report(rows, bench):
    """Write ``checkpoint.csv`` and ``checkpoint.md``; returns the Markdown."""
    return write_table(
        bench.out_dir,
        "checkpoint",
        rows,
        "Saving and loading",
        f"{machine()}. {bench.num_layers} layers of {bench.dim} x {bench.dim} in fp32 with Adam's moments; "
        f"{dist.get_world_size()} ranks, {dist.get_backend()}; ours beside plain torch.distributed.checkpoint of "
        f"tensors of the same shapes, in pairs, medians of {bench.num_rounds} rounds. Ours compares checksums when it "
        f"loads. Made by `torchrun --nproc-per-node {dist.get_world_size()} docs/benchmarks/checkpoint.py`.",
        table(rows, COLUMNS),
    )


def _trained(bench, form):
    """The whole model under "zero1" with our optimizer, or sharded as one unit with AdamW, after one step."""
    model = bench.model() if form == "zero1" else maingrad.fully_shard(bench.model())
    if form == "zero1":
        config = maingrad.DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = maingrad.DistributedDataParallel(model, config)
    optimizer = maingrad.make_optimizer(model)
    model(torch.ones(2, bench.dim)).sum().backward()
    optimizer.step()
    return model, optimizer


def _measure(name, ours, tensors, bench, place):
    calls = {
        "save": (lambda: save_checkpoint(place / "ours", *ours), lambda: save(tensors, checkpoint_id=place / "dcp")),
        "load": (lambda: load_checkpoint(place / "ours", *ours), lambda: load(tensors, checkpoint_id=place / "dcp")),
    }
    times: dict[str, list] = {verb: [] for verb in calls}
    for index in range(bench.num_rounds + 1):
        dist.barrier()
        if dist.get_rank() == 0:
            for left in ("ours", "dcp"):
                rmtree(place / left, ignore_errors=True)
        for verb, (our_call, their_call) in calls.items():
            measured = (*_timed(our_call), *_timed(their_call))
            if index:
                times[verb].append(measured)
    megabytes = 12e-6 * sum(param.numel() for param in bench.model().parameters())
    return [
        Measurement(
            name=name,
            verb=verb,
            megabytes=megabytes,
            seconds=statistics.median(ours for ours, _, _, _ in each),
            dcp_seconds=statistics.median(theirs for _, _, theirs, _ in each),
            ratio=statistics.median(ours / theirs for ours, _, theirs, _ in each),
            cpu_ratio=statistics.median(ours / theirs for _, ours, _, theirs in each),
        )
        for verb, each in times.items()
    ]


def _timed(call):
    """Run ``call``; returns (seconds from a barrier to the next, processor seconds of this rank)."""
    dist.barrier()
    began, busy = time.perf_counter(), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call()
    busy = time.process_time() - busy
    dist.barrier()
    return time.perf_counter() - began, busy


def _torchs(bench, whole):
    """Weights and moments as a user of DCP holds them.

    whole  every rank holds all weights; otherwise weights are DTensors like the moments
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {
        f"{kind}.{name}": torch.randn_like(param)
        for kind in ("model", "exp_avg", "exp_avg_sq")
        for name, param in bench.model().named_parameters()
    }
    return {
        name: tensor if whole and name.startswith("model.") else distribute_tensor(tensor, mesh, [Shard(0)])
        for name, tensor in tensors.items()
    }


def run(bench):
    with process_group_from_env("cpu"):
        rows = bench_checkpoint(bench)
        if dist.get_rank() == 0:
            log(write_report(rows, bench))


main = partial(run_script, CheckpointBench, run)

if __name__ == "__main__":
    sys.exit(main())
