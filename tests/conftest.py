"""What every test shares: hypothesis profiles, the ``gpu`` marker, and the rule that a run must prove something."""

import gc
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

# Ranks, pytest workers and gloo processes share few cores: one thread each, set before torch reads it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch
from sampling import sample
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

# Triton decides when a kernel is defined: without a GPU its interpreter runs them, on CPU tensors.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A random failure nobody can replay is worth little: examples follow from the test alone. `--hypothesis-profile=full`
# (make test-all) takes more of them, freshly drawn.
hypothesis.settings.register_profile(
    "quick",
    max_examples=10,
    deadline=None,
    derandomize=True,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],  # an example becomes simpler in make test-all
)
hypothesis.settings.register_profile("full", max_examples=1000, deadline=None, print_blob=True)
hypothesis.settings.load_profile("quick")


MOST = 6
"""Combinations of one matrix in ``make test``; ``sampled`` says fewer where one takes long."""


class MadeOn(TorchFunctionMode):
    """Tensors made without a device are made on this one, with the CPU generator's draws where one is given."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _device_constructors() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs).to(self.device)
        return func(*args, **{**kwargs, "device": self.device})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--made-on", default=None, help="device of tensors that tests make without one: cuda")


@pytest.fixture(autouse=True)
def made_on(request: pytest.FixtureRequest) -> Iterator[None]:
    device = request.config.getoption("--made-on")
    with MadeOn(device) if device else nullcontext():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of each matrix without GPUs, ``make test`` runs ``MOST`` combinations, or ``sampled(n)``; the others are slow."""
    matrices: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("gpu") is None and item.get_closest_marker("slow") is None:
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for matrix in matrices.values():
        marker = matrix[0].get_closest_marker("sampled")
        most = marker.args[0] if marker else MOST
        if len(matrix) > most:
            kept = sample([dict(item.callspec.indices) for item in matrix], most)
            for index in set(range(len(matrix))) - kept:
                matrix[index].add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Tests that collect garbage look at what they made, and not at thousands of collected tests and all of torch."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("gpu"):
        needed = marker.args[0] if marker.args else marker.kwargs.get("count", 1)
        if torch.cuda.device_count() < needed:
            pytest.skip(f"needs {needed} CUDA device(s), this machine has {torch.cuda.device_count()}")


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    """What is freed in the test is freed by its last reference."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture(autouse=True)
def process_state_is_left_as_found() -> Iterator[None]:
    """Tests share a process: one that leaves a mode of torch switched on makes another fail, far away."""
    before = _process_state()
    yield
    assert _process_state() == before, "the test left this process's defaults changed"


def _process_state() -> dict[str, object]:
    return {
        "default dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        # torch.set_default_device leaves a mode here, also where the device is the CPU.
        "function modes": torch.overrides._len_torch_function_stack(),
        "threads": torch.get_num_threads(),
    }


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run in which no test passed or failed (all skipped, say) exits as pytest does when it collects nothing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.config.option.collectonly or session.exitstatus != pytest.ExitCode.OK:
        return
    if not reporter.stats.get("passed") and not reporter.stats.get("xfailed"):
        reporter.write_line("No test passed: a run that proves nothing fails.", red=True)
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
