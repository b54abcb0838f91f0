"""Known faults, brought back one at a time, are noticed by drawn programs."""

import planted
import pytest
from fault import load_faults

SEEDS = "0:60"
NOTICED = ("02a", "03a", "03b", "06b", "07a", "08a", "08d", "09b", "09d", "16q", "16s")
"""Faults that the seeds above show. ``python tests/fuzz/planted.py`` tries all of them."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_faults_are_noticed() -> None:
    faults = planted.faults(NOTICED)
    assert len(faults) == len(NOTICED)
    verdicts = planted.judge_all(faults, SEEDS, jobs=1)
    assert not [verdict.fault.name for verdict in verdicts if not verdict.noticed]


def test_every_fault_is_tried_or_has_its_reason() -> None:
    names = {planted.number_of(fault) for fault in load_faults()}
    assert {planted.number_of(fault) for fault in planted.faults()} | planted.OUT_OF_REACH.keys() == names
