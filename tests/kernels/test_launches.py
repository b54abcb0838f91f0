"""``Launches``: a compiled form is asked for once a key, and launched with the arguments of each call; and what kernels
are told of tensors and devices."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="the launches are Triton's")
from maingrad.kernels import experts, triton_support
from maingrad.kernels.experts import locate_experts
from maingrad.kernels.triton_support import Launches

GRID = 3, 2, 1


class Compiled:
    def __init__(self, log: list[Any], number: int) -> None:
        self.log, self.number = log, number

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.log.append((self.number, grid, arguments))


class Kernel:
    """Like ``triton.jit``'s: it launches, and returns the compiled form; the interpreter returns none."""

    def __init__(self, compiles: bool) -> None:
        self.log: list[Any] = []
        self.asked: list[Any] = []
        self.compiles = compiles
        self.arg_names: list[str] = []
        self.fn: object = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, num_warps: int) -> Compiled | None:
            compiled = Compiled(self.log, len(self.asked))
            self.asked.append((arguments, num_warps))
            compiled[grid](*arguments)
            return compiled if self.compiles else None

        return run


def test_a_form_is_asked_for_once_a_key() -> None:
    kernel = Kernel(compiles=True)
    launch = Launches(kernel, num_warps=4)
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("b", 4)):
        launch(key, GRID, value, None)
    assert kernel.asked == [((1, None), 4), ((2, None), 4)]
    assert kernel.log == [(0, GRID, (1, None)), (1, GRID, (2, None)), (0, GRID, (3, None)), (1, GRID, (4, None))]


def test_a_launch_has_options_of_its_own() -> None:
    kernel = Kernel(compiles=True)
    launch = Launches(kernel)
    for warps in (8, 1, 8):
        launch(warps, GRID, "x", num_warps=warps)
    assert kernel.asked == [(("x",), 8), (("x",), 1)]
    assert [number for number, *_ in kernel.log] == [0, 1, 0]


def test_counts_of_one_are_no_constants() -> None:
    """On this device; the compiler's form of such a launch is tested with the kernels."""
    kernel = Kernel(compiles=True)
    kernel.arg_names, kernel.fn = ["x", "rows"], object()
    other = Kernel(compiles=True)
    with mock.patch.object(triton_support.triton, "jit", mock.Mock(return_value=other)) as jit:
        launch = Launches(kernel, ["rows"], num_warps=4)
        launch("a", GRID, 1, 2)
        assert not jit.called
        launch("b", GRID, 2, 1)
        launch("b", GRID, 3, 1)
        launch("c", GRID, 4, 1)
    jit.assert_called_once_with(kernel.fn, do_not_specialize=["rows"])
    assert (len(kernel.asked), len(other.asked), len(other.log)) == (1, 2, 3)


def test_the_interpreter_has_no_forms() -> None:
    kernel = Kernel(compiles=False)
    launch = Launches(kernel, num_warps=4)
    for value in (1, 2):
        launch("a", GRID, value)
    assert [arguments for arguments, _ in kernel.asked] == [(1,), (2,)]


def test_keys_without_end_are_forgotten() -> None:
    kernel = Kernel(compiles=True)
    launch = Launches(kernel, num_warps=4)
    with mock.patch.object(triton_support, "_MOST_FORMS", 2):
        for key in (1, 2, 3, 3, 1):
            launch(key, GRID, key)
    assert [arguments for arguments, _ in kernel.asked] == [(1,), (2,), (3,), (1,)]
    assert len(kernel.log) == 5


# ---- What kernels are told of tensors. ----


def test_matrices_that_the_accelerator_can_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 or 8 bits, whole rows of 16 bytes, from whole 16 bytes on; on sm90 and newer, and in the interpreter."""
    half = torch.zeros(4 * 32 + 8, dtype=torch.bfloat16)
    whole = half[:128].view(4, 32)
    fits = (whole, whole[:, :17], half[8:136].view(4, 32), half[:128].view(2, 2, 32), torch.zeros(2, 16).char())
    for on_gpu, capability in ((False, None), (True, (9, 0)), (True, (10, 0))):
        monkeypatch.setattr(triton_support, "is_interpreted", lambda on_gpu=on_gpu: not on_gpu)
        monkeypatch.setattr(triton_support, "capability_of", lambda _, found=capability: found)
        assert all(map(triton_support.takes_tma, fits))
        off = half[1:129].view(4, 32), half[4:132].view(4, 32)  # by 2 bytes, and by 8
        unfit = *off, half[:124].view(4, 31), whole.float(), whole[:0], half[:120].view(2, 3, 20)
        assert not any(map(triton_support.takes_tma, unfit))
    for capability in (None, (8, 9)):
        monkeypatch.setattr(triton_support, "capability_of", lambda _, found=capability: found)
        assert not triton_support.takes_tma(whole)


def test_properties_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 7)
    properties = mock.Mock(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for hip, expected in ((None, (9, 0)), ("6.0", None)):
        monkeypatch.setattr(torch.version, "hip", hip)
        triton_support.capability_of.cache_clear()
        assert (triton_support.capability_of(gpu), triton_support.capability_of(cpu)) == (expected, None)
    assert (triton_support.num_multiprocessors(gpu), triton_support.num_multiprocessors(cpu)) == (132, 2)
    for cached in (triton_support.capability_of, triton_support.num_multiprocessors):
        cached.cache_clear()
    for precision, expected in (("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        assert triton_support.dot_precision() == expected


def test_where_experts_lie() -> None:
    """Evenly spaced, in either order, or by a table of addresses; and whether all is at multiples of 16 bytes."""
    packed = torch.zeros(3, 4, 8)

    def located(tensors: Any) -> tuple[int, Any, int, int, int, bool]:
        base, table, *rest = locate_experts(tensors)
        return (base.data_ptr() - packed.data_ptr(), None if table is None else table.tolist(), *rest)

    assert located(packed) == (0, None, 32, 0, 1, True)
    assert located(packed.unbind()) == (0, None, 32, 0, 1, True)
    assert located(packed.unbind()[::-1]) == (0, None, 32, 2, -1, True)
    assert located([packed[0], packed[2]]) == (0, None, 64, 0, 1, True)
    assert located([packed[1]]) == (128, None, 1, 0, 1, False), "the stride of one expert is arbitrary"
    assert located(packed.unbind(1))[2:5] == (8, 0, 1)
    addresses = [each.data_ptr() for each in packed]
    uneven = [packed[0], packed[2], packed[1]]
    assert located(uneven)[1:] == ([addresses[0], addresses[2], addresses[1]], 0, 0, 1, True)
    assert located([packed[0], None, packed[1]])[1:] == ([addresses[0], 0, addresses[1]], 0, 0, 1, True)
    assert located([None, packed[1]])[1:] == ([0, addresses[1]], 0, 0, 1, True)
    assert located([packed[0], packed[0]])[1] is not None, "two experts of one memory"
    flat = torch.zeros(200, dtype=torch.bfloat16)
    for tensors in (flat[1:161].view(2, 8, 10), flat[:160].view(2, 8, 10), flat[:144].view(2, 9, 8)[:, :8, :7]):
        found = locate_experts(tensors)
        assert found.aligned is (tensors.shape[2] == 7)
    between = [flat[:32].view(4, 8), flat[100:132].view(4, 8), flat[48:80].view(4, 8)]
    assert not locate_experts(between).aligned and locate_experts([*between[::2], None]).aligned
    one, other = torch.zeros(9, dtype=torch.uint8)[:8].view(2, 4), torch.zeros(2, 4, dtype=torch.uint8)
    assert locate_experts([one, other]).stride == abs(one.data_ptr() - other.data_ptr())
    found = locate_experts(packed)
    assert found.argument == (found.base, None, 32, 0, 1) and found.form == (True, 32, 0, 1, True)
    assert locate_experts(uneven).form == (False, 0, 0, 1, True)


def test_descriptors_of_experts() -> None:
    """The stride of a single packed expert is arbitrary, and no distance of the next one."""
    packed = torch.zeros(3, 4, 8, dtype=torch.bfloat16)
    one = packed.as_strided((1, 4, 8), (5, 8, 1))
    wide = torch.zeros(2, 4, 16, dtype=torch.bfloat16)[:, :, :8]
    for tensors, expected in (
        (packed, ([3, 4, 8], [32, 8, 1])),
        (wide, ([2, 4, 8], [64, 16, 1])),
        (one, ([1, 4, 8], [32, 8, 1])),
        (wide[1:], ([1, 4, 8], [64, 16, 1])),
        ([wide[0]], ([1, 4, 8], [64, 16, 1])),
    ):
        made = triton_support.experts_descriptor(locate_experts(tensors), len(tensors), [1, 2, 8])
        assert (made.shape, made.strides) == expected and made.block_shape == [1, 2, 8]


class Stream:
    def __init__(self) -> None:
        self.waited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)


def test_tables_on_gpus_are_waited_for_by_other_streams_and_kept_by_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, now, capturing = Stream(), Stream(), list[Stream](), [False]
    device, events = torch.device("cuda", 0), list[Any]()
    made, recorded = list[torch.Tensor](), list[Any]()

    class Table:
        def record_stream(self, stream: Stream) -> None:
            recorded.append(stream)

    def tensor(values: Any, **options: Any) -> Any:
        assert options == {"dtype": torch.int64, "pin_memory": True}
        pinned = mock.Mock()
        pinned.to = lambda to, non_blocking: (made.append((to, values, non_blocking)), Table())[1]
        return pinned

    def event() -> Any:
        events.append(mock.Mock())
        return events[-1]

    cuda = SimpleNamespace(
        current_stream=lambda _: now[-1], is_current_stream_capturing=lambda: capturing[0], Event=event
    )
    monkeypatch.setattr(experts, "torch", SimpleNamespace(int64=torch.int64, tensor=tensor, cuda=cuda))
    monkeypatch.setattr(experts, "_captured", {})
    experts._cuda_table.cache_clear()
    now.append(first)
    table = experts.device_table((1, 2), device)
    assert made == [(device, (1, 2), True)] and experts.device_table((1, 2), device) is table
    events[0].record.assert_called_once_with(first)
    assert not first.waited and not recorded
    now.append(second)
    assert experts.device_table((1, 2), device) is table
    assert second.waited == [events[0]] and recorded == [second], "another stream waits, and keeps the memory"
    assert not experts._captured
    capturing[0] = True
    assert experts.device_table((1, 2), device) is table and len(second.waited) == 1
    assert list(experts._captured) == [((1, 2), device)], "the graph keeps the table"
    with pytest.raises(RuntimeError, match="met new addresses in a CUDA graph capture"):
        experts.device_table((3,), device)
    experts._cuda_table.cache_clear()


def test_tables_on_cpus_are_of_64_bits() -> None:
    assert experts.device_table((), torch.device("cpu")).dtype is torch.int64
    assert experts.device_table((1, 2), torch.device("cpu")) is experts.device_table((1, 2), torch.device("cpu"))
