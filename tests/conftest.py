"""What every test shares: hypothesis profiles, the ``gpu`` marker, and the rule that a run must prove something."""

import functools
import gc
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

# Ranks, pytest workers and gloo processes share few cores: one thread each, set before torch reads it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch
from fault import load_faults
from gloo import fork_server_here
from interpreted import (
    patch_fma_rounds_once,
    patch_language_once,
    patch_overflow_is_not_sought_in_vain,
    patch_types_are_remembered,
)
from quick_compiles import compile_without_measuring_guards
from sampling import is_its_turn, sample
from seeding import seed_without_stacks
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

# Imports and collection make objects that stay: looking for garbage among them takes seconds of each worker.
gc.disable()

# Triton decides when a kernel is defined: without a GPU its interpreter runs them, on CPU tensors.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton"):
        patch_language_once()
        patch_types_are_remembered()
        patch_overflow_is_not_sought_in_vain()
        patch_fma_rounds_once()
    seed_without_stacks()
    compile_without_measuring_guards()

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
    parser.addoption(
        "--turn", default="0/1", metavar="K/N", help="of tests marked in_turn and of matrices, those of turn K of N"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked ``in_turn`` whose turn it is not. The tests of a known fault run in the fault's turn too.

    ``.ci/run`` brings every twelfth fault back in the same turn, and takes it that their tests pass without them.
    """
    turn = config.getoption("--turn")
    number, turns = map(int, turn.split("/"))
    always = {nodeid for fault in load_faults()[number % turns :: turns] for nodeid in fault.tests}
    left_out = set[pytest.Item]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        has_turns = item.get_closest_marker("in_turn") and always.isdisjoint((test, item.nodeid))
        if has_turns and not is_its_turn(test, turn):
            left_out.add(item)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [each for each in items if each not in left_out]


@pytest.fixture(autouse=True)
def made_on(request: pytest.FixtureRequest) -> Iterator[None]:
    device = request.config.getoption("--made-on")
    with MadeOn(device) if device else nullcontext():
        yield


@functools.cache
def noticers() -> frozenset[str]:
    """Combinations that alone notice a known fault."""
    return frozenset(nodeid for fault in load_faults() for nodeid in fault.quick)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Of each matrix without GPUs, ``make test`` runs as many combinations as its longest axis has values, so that each
    value of each axis runs once; or ``sampled(n)``, where that takes long. With each commit it runs others, up to four
    times as many in all. The rest is slow.

    Combinations without which a known fault would go unnoticed come on top.
    Slow combinations are not even collected where ``-m`` leaves slow tests out: there are ten thousand.
    """
    yield
    own = {marker.name for marker in metafunc.definition.iter_markers()}
    combinations = metafunc._calls
    if not combinations:
        return
    left_out = {name for name in ("gpu", "slow") if f"not {name}" in metafunc.config.option.markexpr}
    if own & {"gpu", "slow"}:
        if own & left_out:
            del combinations[1:]
        return

    def has(combination: Any, *names: str) -> bool:
        return any(marker.name in names for marker in combination.marks)

    quick = [each for each in combinations if not has(each, "gpu", "slow")]
    sampled = metafunc.definition.get_closest_marker("sampled")
    most = sampled.args[0] if sampled else _longest_axis([each.indices for each in quick])
    if len(quick) > most:
        kept = sample([dict(each.indices) for each in quick], most, metafunc.config.getoption("--turn"))
        name = metafunc.definition.nodeid
        kept |= {index for index, each in enumerate(quick) if f"{name}[{each.id}]" in noticers()}
        for index in set(range(len(quick))) - kept:
            quick[index].marks.append(pytest.mark.slow.mark)
    if "slow" in left_out:
        # pytest takes an empty list for a test without parameters.
        combinations[:] = [each for each in combinations if not has(each, "slow")] or combinations[:1]


def _longest_axis(places: Sequence[Mapping[str, int]]) -> int:
    """Number of values of a matrix's longest axis; ``places`` have the number of each axis's value."""
    return max((len({place[axis] for place in places}) for axis in (places[0] if places else ())), default=1)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    parallel = session.config.getoption("dist", "no") != "no"
    if parallel and os.path.exists("/proc/self/fd") and not torch.cuda.is_available():
        from forked_workers import fork_workers

        fork_workers(session.config)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Tests that collect garbage look at what they made, and not at thousands of collected tests and all of torch.

    Python looks every 700 objects, and after ``freeze`` often at all of them: a quarter of the time of all tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    # Processes of tests begin with what test modules import: they name what takes seconds.
    if not torch.cuda.is_available():
        fork_server_here()
    gc.enable()


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
