"""Batch scripts for SLURM: ``maingrad train`` on several nodes, saved and queued again before its time ends.

    sbatch ── batch shell, first node ── srun ── torchrun, one a node ── maingrad train, one a GPU
                   USR1, before the end  ───TERM──────────────────────>  saves, status 130
                   scontrol requeue      <── all ended

SLURM's signal reaches the batch shell, which passes SIGTERM on through srun to every process of the step. torchrun
leaves SIGTERM alone (``--signals-to-handle``): it would kill its ranks 30 s later, in the middle of a save.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.error import ConfigError, require

if TYPE_CHECKING:  # the command line's help imports this file, and waits for no torch
    from ..config.run import Config

__all__ = ["SlurmJob", "render_slurm"]

_LARGEST = 65535
"""Port, and number of seconds before the end at which SLURM can send a signal."""

_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={{ job.job_name }}
#SBATCH --nodes={{ job.nodes }}
#SBATCH --ntasks-per-node=1
{% if gpus %}
#SBATCH --gpus-per-node={{ job.gpus_per_node }}
{% endif %}
{% if job.cpus_per_node %}
#SBATCH --cpus-per-task={{ job.cpus_per_node }}
{% endif %}
#SBATCH --exclusive
#SBATCH --time={{ job.time }}
{% if job.partition %}
#SBATCH --partition={{ job.partition }}
{% endif %}
{% if job.account %}
#SBATCH --account={{ job.account }}
{% endif %}
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@{{ job.seconds_to_save }}

# {{ ranks }} ranks, {{ rows }} sequence(s) a rank in each of {{ microbatches }} microbatch(es).
set -u -o pipefail
export PYTHONSAFEPATH=1                       # no folder of the working directory hides a package of its name
unset CUDA_DEVICE_MAX_CONNECTIONS             # the value 1 would queue collectives and compute behind each other
export TORCH_NCCL_DUMP_ON_TIMEOUT=1           # after a hang, torch's flight recorder tells which rank is missing
export TORCH_NCCL_TRACE_BUFFER_SIZE=2000
export MASTER_PORT={{ port }}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR

# On each node. SIGTERM is for the ranks, which save: torchrun ignores it, or it would kill them 30 s later.
on_each_node() {
    trap '' TERM
    exec {{ python }} -m torch.distributed.run \\
        --nnodes={{ job.nodes }} --nproc-per-node={{ job.gpus_per_node }} --node-rank="$SLURM_NODEID" \\
        --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --signals-to-handle=SIGINT,SIGHUP,SIGQUIT \\
        -m maingrad train {{ arguments }}
}

# {{ job.seconds_to_save }} s before the time ends, USR1 comes to this shell: ranks save, and the job queues again.
stopping=no
trap 'stopping=yes; trap "" USR1; kill -TERM "$step"' USR1
srun {{ srun }} bash -c "$(declare -f on_each_node); on_each_node" &
step=$!
status=0
wait "$step" || status=$?
if [ "$stopping" = yes ]; then # the signal has ended the wait, and not the step
    status=0
    wait "$step" || status=$?
    if [ "$status" -ne 0 ]; then
        scontrol requeue "$SLURM_JOB_ID"
        exit 0
    fi
fi
exit "$status"
"""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What a batch script asks SLURM for."""

    nodes: int
    """number of nodes"""
    gpus_per_node: int = 8
    """ranks on each node: one a GPU, or with train.device = "cpu" processes"""
    cpus_per_node: int | None = None
    """processor cores on each node; None: as the cluster has it"""
    time: str = "24:00:00"
    """longest time until the job is saved and queued again, as SLURM writes it"""
    partition: str | None = None
    """partition; None: the cluster's default"""
    account: str | None = None
    """account to charge; None: the user's default"""
    job_name: str = "maingrad"
    """name of the job and of its log, NAME-JOBID.log"""
    seconds_to_save: int = 300
    """seconds before the end at which ranks are told to save: longer than train.log_every steps and a save take"""
    master_port: int | None = None
    """port of the first node on which ranks meet; None: one that follows from the job's number"""


def render_slurm(job: SlurmJob, config_file: Path, overrides: Sequence[str] = ()) -> str:
    """The batch script, as text.

    overrides   arguments after ``maingrad train CONFIG.toml``

    Raises ``ConfigError`` if the batch or the instances do not divide evenly over the ranks, if no checkpoints are
    saved, and if a job that is queued again would not go on from its own newest checkpoint.
    """
    import jinja2

    from ..config.file import load_config

    config = load_config(config_file, overrides)
    _check(job, config)
    ranks = job.nodes * job.gpus_per_node
    config.check_ranks(ranks)
    arguments = [str(config_file), *overrides]
    if config.train.resume is None:
        arguments += ["--train.resume", "auto"]
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    return environment.from_string(_SCRIPT).render(
        job=job,
        # srun does not take the number of cores from the batch job's header.
        srun=" ".join(["--kill-on-bad-exit=0"] + [f"--cpus-per-task={job.cpus_per_node}"] * bool(job.cpus_per_node)),
        gpus=config.train.device != "cpu",
        port=job.master_port or "$((20000 + SLURM_JOB_ID % 10000))",
        python=shlex.quote(sys.executable),
        arguments=shlex.join(arguments),
        ranks=ranks,
        rows=config.train.sequences_per_microbatch(ranks),
        microbatches=config.train.num_microbatches,
    )


def _check(job: SlurmJob, config: "Config") -> None:
    for option in ("nodes", "gpus_per_node", "cpus_per_node", "seconds_to_save", "master_port"):
        value = getattr(job, option)
        if value is not None and value < 1:
            raise ConfigError(f"--{option.replace('_', '-')} must be at least 1, got {value}")
    for option in ("seconds_to_save", "master_port"):
        value = getattr(job, option)
        if value is not None and value > _LARGEST:
            raise ConfigError(f"--{option.replace('_', '-')} must be at most {_LARGEST}, got {value}")
    for option in ("time", "partition", "account", "job_name"):
        value = getattr(job, option)
        if value is not None and (not value or any(character.isspace() for character in value)):
            raise ConfigError(f"--{option.replace('_', '-')} {value!r}: must be one word, as #SBATCH takes it")
    require(
        config.train.save_every is not None,
        "train.save_every",
        None,
        "a job that is queued again goes on from a checkpoint: set the number of steps between two",
    )
    require(
        config.train.resume in (None, "auto"),
        "train.resume",
        config.train.resume,
        'a job that is queued again must go on from its own newest checkpoint: set "auto", after copying this '
        "checkpoint into train.out_dir/checkpoints",
    )
