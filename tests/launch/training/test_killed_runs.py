"""Runs that are killed at random moments, with saves under way in the background, end as if they never were."""

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ending_ranks import Ended, run_to_the_end
from tiny_run import tiny_config

from maingrad.launch.config.run import Config
from maingrad.launch.training.metrics import read_metrics
from maingrad.launch.training.train import train

Moment = tuple[int, float]
"""So many seconds after so many steps."""


class DiesLater:
    """A display that kills this process at a moment of the run; None: never."""

    def __init__(self, moment: Moment | None) -> None:
        self._moment, self._steps = moment, 0

    def update(self, status: Any) -> None:
        self._steps += 1
        if self._moment is not None and self._steps == self._moment[0]:
            timer = threading.Timer(self._moment[1], os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


def attempt(config: Config, deaths: dict[int, Moment]) -> int:
    """A job for a rank: one call of train."""
    return train(config, display=DiesLater(deaths.get(dist.get_rank()))).steps


def config_of(folder: Path, out: str, parallel: str, steps: int) -> Config:
    """Dropout, bf16 over masters, and a checkpoint after every step, so that one is always under way."""
    return tiny_config(
        folder,
        parallel=parallel,
        model={"param_dtype": "bfloat16", "dropout": 0.1, "num_layers": 1},
        train={"out_dir": str(folder / out), "steps": steps, "eval_every": 20, "save_every": 1, "resume": "auto"},
        checkpoint={"keep_last": 2, "keep_every": 5},
    )


def records_of(folder: Path, out: str) -> list[tuple[Any, ...]]:
    """Everything that does not depend on time."""
    return [
        (record["kind"], record["step"], record.get("loss"), record.get("lr"), record.get("weights_sha256"))
        for record in read_metrics(folder / out / "metrics.jsonl")
        if record["kind"] in ("step", "validation", "final")
    ]


def die_again_and_again(folder: Path, parallel: str, *, kills: int, steps: int) -> None:
    chance = random.Random(kills)  # each attempt takes a few steps: a run without a kill would end too early
    whole = run_to_the_end(attempt, 2, config_of(folder, "whole", parallel, steps), {}, limit=60.0)
    assert [rank.returned for rank in whole] == [steps, steps], whole[0].output
    config = config_of(folder, "killed", parallel, steps)
    for number in range(kills):
        moment = (chance.randint(1, 3), chance.uniform(0.0, 0.05))
        deaths = {0: moment, 1: moment} if number % 3 else {chance.randrange(2): moment}
        ended = run_to_the_end(attempt, 2, config, deaths, limit=60.0)
        assert all(ended[rank].exit_code == -signal.SIGKILL for rank in deaths), what_was_said(ended)
    rest = run_to_the_end(attempt, 2, config, {}, limit=60.0)
    assert [rank.returned for rank in rest] == [steps, steps], what_was_said(rest)
    assert records_of(folder, "killed") == records_of(folder, "whole")
    kept = sorted(path.name for path in (folder / "killed" / "checkpoints").iterdir())
    assert kept == sorted(path.name for path in (folder / "whole" / "checkpoints").iterdir())


def what_was_said(ended: list[Ended]) -> str:
    return "\n".join(f"rank {rank}, {one.exit_code}:\n{one.output}" for rank, one in enumerate(ended))


@pytest.mark.in_turn
@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
@pytest.mark.sampled(1)
def test_two_kills(tmp_path: Path, parallel: str):
    """One of one rank, and one of both."""
    die_again_and_again(tmp_path, parallel, kills=2, steps=11)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
def test_twenty_kills(tmp_path: Path, parallel: str):
    die_again_and_again(tmp_path, parallel, kills=20, steps=160)
