"""Keys of launches: two launches that Triton compiles differently never have one key.

What one launch has compiled is launched again for its key, with other arguments: a wrong form reads and writes wrong
memory. No kernel runs here; functions that launch are replaced by ones that note keys and arguments.
"""

import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the launches are Triton's")
from triton.tools.tensor_descriptor import TensorDescriptor

from maingrad.kernels.grouped import gemm_triton, wgrad_triton
from maingrad.kernels.grouped.gemm_triton import GemmConfig, grouped_gemm_triton
from maingrad.kernels.grouped.wgrad_config import WgradConfig
from maingrad.kernels.grouped.wgrad_triton import grouped_wgrad_triton
from maingrad.kernels.optimizer import triton_update
from maingrad.kernels.optimizer.orthogonal import elements_triton, product_triton
from maingrad.kernels.optimizer.orthogonal.elements_triton import apply_on_triton, momentum_on_triton
from maingrad.kernels.optimizer.orthogonal.product_triton import full_product, symmetric_product
from maingrad.kernels.optimizer.reference import AdamOptions, UpdateRow
from maingrad.kernels.optimizer.triton_update import TritonUpdate
from maingrad.kernels.permutation import exchange_triton
from maingrad.kernels.quantized import Element, QuantSpec, ScaleForm, quantize_triton
from maingrad.kernels.triton_support import Launches

Noted = list[tuple[Any, Any]]
WHOLE = QuantSpec(Element.E4M3, None, ScaleForm.FP32)
BLOCK = QuantSpec(Element.E4M3, (1, 128), ScaleForm.POWER_OF_TWO)
SQUARE = QuantSpec(Element.E4M3, (128, 128), ScaleForm.POWER_OF_TWO)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Key, and what Triton looks at, of each launch."""
    found: Noted = []
    modules = (
        gemm_triton,
        wgrad_triton,
        elements_triton,
        product_triton,
        quantize_triton,
        triton_update,
        exchange_triton,
    )
    for module in modules:
        for name, launch in vars(module).copy().items():
            if isinstance(launch, Launches):

                def note(key: Any, grid: Any, *given: Any, _name: str = name, **options: Any) -> None:
                    found.append(((_name, key), (_name, form_of(given), form_of(tuple(sorted(options.items()))))))

                monkeypatch.setattr(module, name, note)
    return found


def form_of(argument: Any) -> Any:
    """What decides how Triton compiles a kernel for an argument. Numbers that differ count: a constant may be one."""
    if isinstance(argument, TensorDescriptor):
        return form_of(argument.base), *map(tuple, (argument.shape, argument.strides, argument.block_shape))
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, tuple):
        return tuple(map(form_of, argument))
    return float if isinstance(argument, float) else argument


def check(noted: Noted, *launches: Callable[[], object]) -> None:
    """Each launch differs from all others, and the first has its key again."""
    made = []
    for launch in (*launches, launches[0]):
        launch()
        made.append(tuple(noted))
        noted.clear()
    assert [key for key, _ in made.pop()] == [key for key, _ in made[0]]
    for one, other in itertools.combinations(made, 2):
        assert [form for _, form in one] != [form for _, form in other], "the test's launches differ"
        assert [key for key, _ in one] != [key for key, _ in other], one


def at(*shape: int, dtype: torch.dtype = torch.bfloat16, off: int = 0) -> Tensor:
    """Memory that begins ``off`` elements behind whole 16 bytes."""
    numel = torch.Size(shape).numel()
    return torch.zeros(numel + 8, dtype=dtype)[off : off + numel].view(shape)


def test_products_of_experts(noted: Noted) -> None:
    config = GemmConfig(32, 32, 32, 4, 2, tma=True)
    packed, apart = at(2, 48, 64), [at(48, 64) for _ in range(3)]

    def launch(**changed: Any) -> Callable[[], object]:
        given = {"x": at(20, 64), "weights": packed, "offsets": torch.zeros(3, dtype=torch.int64), "out": at(20, 48)}
        return lambda: grouped_gemm_triton(**{**given, "config": config, "transposed": True, **changed})

    bias, scale = at(2, 48), at(20, dtype=torch.float32)
    check(
        noted,
        launch(),
        launch(config=config._replace(num_warps=8)),
        launch(config=config._replace(tma=False)),
        launch(x=at(21, 64), out=at(21, 48)),
        launch(out=at(20, 50)[:, :48]),
        launch(x=at(20, 72)[:, :64]),
        launch(weights=at(2, 56, 64)),
        launch(weights=at(2, 48, 64, off=1)),
        launch(weights=at(2, 48, 65)[:, :, :64]),
        launch(weights=at(2, 48, 72)[:, :, :64]),
        launch(weights=[packed[1], packed[0]]),
        launch(weights=[packed[0], apart[0]]),
        launch(weights=[packed[0].half(), apart[0].half()], x=at(20, 64, dtype=torch.float16)),
        launch(weights=at(2, 64, 48), transposed=False),
        launch(x=at(20, 64, off=1)),
        launch(out=at(20, 48, off=1)),
        launch(out=at(20, 48, dtype=torch.float32)),
        launch(offsets=torch.zeros(3, dtype=torch.int32)),
        launch(offsets=torch.zeros(4, dtype=torch.int64)[1:]),
        launch(offsets=torch.zeros(4, dtype=torch.int64), weights=at(3, 48, 64)),
        launch(bias=bias),
        launch(bias=[bias[1], bias[0]]),
        launch(bias=at(2, 48, off=1)),
        launch(bias=bias, bias_scale=scale),
        launch(bias=bias, bias_scale=scale.bfloat16()),
        launch(bias=bias, bias_scale=at(20, dtype=torch.float32, off=1)),
    )

    def launch_in_tf32() -> None:
        torch.set_float32_matmul_precision("high")
        try:
            launch()()
        finally:
            torch.set_float32_matmul_precision("highest")

    check(noted, launch(), launch_in_tf32)


def test_weight_gradients_of_experts(noted: Noted) -> None:
    config = WgradConfig(32, 32, 32, 4, 2, tma=True)
    packed, wide = at(2, 48, 64, dtype=torch.float32), at(2, 48, 65, dtype=torch.float32)

    def launch(**changed: Any) -> Callable[[], object]:
        given = {"dy": at(20, 48), "x": at(20, 64), "grads": packed, "offsets": torch.zeros(3, dtype=torch.int64)}
        dy, x, grads, offsets, overwrite, of = {**given, "overwrite": False, "config": config, **changed}.values()
        return lambda: grouped_wgrad_triton(dy, x, grads, offsets, overwrite, of)

    check(
        noted,
        launch(),
        launch(overwrite=True),
        launch(overwrite=[True, False]),
        launch(config=config._replace(reduce=True)),
        launch(config=config._replace(tma=False)),
        launch(config=config._replace(group=16)),
        launch(grads=[packed[0], None]),
        launch(grads=[packed[1], packed[0]]),
        launch(grads=wide[:, :, :64]),
        launch(grads=packed.bfloat16()),
        launch(grads=at(2, 48, 64, dtype=torch.float32, off=1)),
        launch(dy=at(20, 56)[:, :48]),
        launch(dy=at(20, 48, off=1)),
        launch(x=at(20, 72)[:, :64]),
        launch(x=at(20, 64, off=1)),
        launch(x=at(20, 72), grads=at(2, 48, 72, dtype=torch.float32)),
        launch(dy=at(20, 48, dtype=torch.float16), x=at(20, 64, dtype=torch.float16)),
        launch(dy=at(24, 48), x=at(24, 64)),
        launch(offsets=torch.zeros(3, dtype=torch.int32)),
        launch(offsets=torch.zeros(4, dtype=torch.int64)[1:]),
        launch(grads=packed[:1], offsets=None),
    )


def test_products_of_orthogonalisation(noted: Noted) -> None:
    def half(*shape: int) -> Tensor:
        return at(*shape, dtype=torch.float16)

    def symmetric(**changed: Any) -> Callable[[], object]:
        given = {"a": half(2, 16, 24), "b": half(2, 16, 24), "out": half(2, 16, 16)}
        return lambda: symmetric_product(**{**given, **changed})

    square, wide = half(2, 16, 16), half(2, 16, 32)
    check(
        noted,
        symmetric(),
        symmetric(diagonal=1.0),
        symmetric(addend=square),
        symmetric(addend=square.float()),
        symmetric(addend=at(2, 16, 16, dtype=torch.float16, off=1)),
        symmetric(a=square, b=square),
        symmetric(a=square, b=square, tall=True),
        symmetric(a=wide[:, :, :24]),
        symmetric(b=wide[:, :, :24]),
        symmetric(a=wide, b=wide),
        symmetric(out=wide[:, :, :16]),
        symmetric(out=square.bfloat16()),
        symmetric(a=half(2, 16, 24).bfloat16(), b=half(2, 16, 24).bfloat16()),
        symmetric(a=half(3, 16, 24), b=half(3, 16, 24), out=half(3, 16, 16)),
        symmetric(a=half(2, 24, 24), b=half(2, 24, 24), out=half(2, 24, 24)),
    )

    def full(**changed: Any) -> Callable[[], object]:
        return lambda: full_product(**{"a": square, "b": half(2, 16, 24), "out": half(2, 16, 24), **changed})

    check(
        noted,
        full(),
        full(b=wide, out=wide),
        full(a=wide[:, :, :16]),
        full(b=wide[:, :, :24]),
        full(out=wide[:, :, :24]),
        full(a=half(3, 16, 16), b=half(3, 16, 24), out=half(3, 16, 24)),
        full(a=half(2, 8, 16), out=half(2, 8, 24)),
        full(a=square.bfloat16(), b=half(2, 16, 24).bfloat16()),
        full(out=half(2, 16, 24).bfloat16()),
    )


@pytest.mark.parametrize("spec", [WHOLE, BLOCK, SQUARE])
def test_copies_of_a_matrix(noted: Noted, spec: QuantSpec) -> None:
    def launch(x: Tensor, **changed: Any) -> Callable[[], object]:
        return lambda: quantize_triton.quantize_triton(x, **{"rows": spec, "columns": spec, **changed})

    x = at(20, 48)
    number = torch.ones(())
    given = [launch(x, scale=number), launch(x, scale=number, amax=number)] if spec.block is None else []
    check(
        noted,
        launch(x),
        launch(x, rows=None),
        launch(x, columns=None),
        launch(x, rows=replace(spec, element=Element.E5M2), columns=replace(spec, element=Element.E5M2)),
        launch(at(20, 48, dtype=torch.float16)),
        launch(at(20, 48, off=1)),
        launch(at(20, 56)[:, :48]),
        launch(at(24, 48)),
        launch(at(20, 56)),
        *given,
    )


def test_no_pass_looks_for_the_largest_magnitude_where_a_scale_is_given(noted: Noted) -> None:
    for scale, names in ((None, ["_launch_amax", "_launch_tiles"]), (torch.ones(()), ["_launch_tiles"])):
        quantize_triton.quantize_triton(at(20, 48), WHOLE, WHOLE, scale)
        assert [name for (name, _), _ in noted] == names
        noted.clear()


@pytest.mark.parametrize("spec", [WHOLE, SQUARE])
def test_copies_of_matrices_of_experts(noted: Noted, spec: QuantSpec) -> None:
    def launch(matrices: Any, rows: Any = spec) -> Callable[[], object]:
        return lambda: quantize_triton.quantize_experts_triton(matrices, rows, spec)

    packed = at(2, 16, 48)
    check(
        noted,
        launch(packed),
        launch(packed, rows=None),
        launch([packed[1], packed[0]]),
        launch([packed[0], at(16, 48)]),
        launch(at(2, 24, 48)),
        launch(at(2, 16, 49)[:, :, :48]),
        launch(at(2, 16, 48, dtype=torch.float16)),
        launch(at(2, 16, 48, off=1)),
    )


@pytest.mark.parametrize("spec", [WHOLE, BLOCK])
def test_copies_of_rows_of_experts(noted: Noted, spec: QuantSpec) -> None:
    x, offsets = at(20, 48), torch.tensor([0, 3, 20])

    def launch(x: Tensor, **changed: Any) -> Callable[[], object]:
        given = {"rows": spec, "columns": spec, "offsets": offsets, **changed}
        return lambda: quantize_triton.quantize_grouped_triton(x, **given)

    check(
        noted,
        launch(x),
        launch(x, rows=None),
        launch(x, columns=None),
        launch(x, rows=replace(spec, element=Element.E5M2), columns=replace(spec, element=Element.E5M2)),
        launch(at(20, 48, dtype=torch.float16)),
        launch(at(20, 48, off=1)),
        launch(at(20, 56)[:, :48]),
        launch(at(24, 48)),
        launch(x, offsets=offsets.int()),
        launch(x, offsets=torch.tensor([0, 0, 3, 20])[1:]),
        launch(x, offsets=torch.tensor([0, 0, 3, 20])),
    )


def test_exchanges_of_rows(noted: Noted) -> None:
    """Tables of all kinds of exchanges have one type, and begin at whole 16 bytes."""
    numbers = [at(2, dtype=dtype) for dtype in (torch.int64, torch.uint8, torch.int32, torch.int64)]
    exchange = exchange_triton.Exchange(*numbers, rank=0, num_ranks=2, half_nbytes=4096)
    plan, counts, splits = at(9, dtype=torch.int32), at(4, dtype=torch.int64), at(2, dtype=torch.int64)

    def meet(**changed: Any) -> Callable[[], object]:
        own = changed.pop("exchange", exchange)
        given = {"counts": counts, "plan": plan, "splits": splits, "most_rows": 20, "timeout": 1.0, **changed}
        return lambda: exchange_triton.meet(own, **given)

    check(
        noted,
        meet(),
        meet(counts=None),
        meet(counts=counts.int()),
        meet(plan=at(9, dtype=torch.int32, off=1)),
        meet(splits=at(1, dtype=torch.int64)),
        meet(most_rows=16),
        meet(exchange=exchange._replace(rank=1)),
        meet(exchange=exchange._replace(half_nbytes=4100)),
        meet(wait=False),
    )
    meet(timeout=1e9)()
    [(_, (_, given, _))] = noted
    assert 2**31 - 1 in given, "the kernel counts its looks in 32 bits"
    noted.clear()

    def copy(rows: Tensor, **changed: Any) -> Callable[[], object]:
        given = {"exchange": exchange, "offset": 32, "plan": plan, "routed": False, "write": True, **changed}
        own, offset = given.pop("exchange"), given.pop("offset")
        return lambda: exchange_triton.copy_rows(own, offset, rows, **given)

    rows = at(20, 48)
    check(
        noted,
        copy(rows),
        copy(rows, write=False),
        copy(rows, routed=True),
        copy(rows, offset=36),
        copy(rows, exchange=exchange._replace(rank=1)),
        copy(rows, exchange=exchange._replace(num_ranks=4)),
        copy(rows, plan=at(17, dtype=torch.int32)),
        copy(at(20, 48, off=2)),
        copy(at(20, 49)),
        copy(at(21, 48)),
        copy(at(20, 46)),
        copy(at(20, 48, dtype=torch.uint8)),
        copy(at(20, 47, dtype=torch.uint8)),
    )


def test_passes_over_elements(noted: Noted) -> None:
    def fp32(*shape: int, off: int = 0) -> Tensor:
        return at(*shape, dtype=torch.float32, off=off)

    def momentum(**changed: Any) -> Callable[[], object]:
        given = {"buffer": fp32(2, 4, 8), "grad": fp32(2, 4, 8), "update": fp32(2, 4, 8), "momentum": 0.9}
        return lambda: momentum_on_triton(**{**given, "nesterov": True, **changed})

    stack = fp32(2, 6, 8)[:, :4]
    check(
        noted,
        momentum(),
        momentum(nesterov=False),
        momentum(buffer=stack),
        momentum(grad=stack),
        momentum(update=stack),
        momentum(buffer=fp32(2, 4, 8, off=1)),
        momentum(grad=fp32(2, 4, 8, off=1)),
        momentum(update=fp32(2, 4, 8, off=1)),
        momentum(grad=fp32(2, 4, 8).half()),
        momentum(buffer=fp32(2, 4, 9), grad=fp32(2, 4, 9), update=fp32(2, 4, 9)),
    )

    def apply(**changed: Any) -> Callable[[], object]:
        given = {"param": fp32(2, 4, 8), "orthogonal": fp32(2, 4, 8).half(), "kept": 0.9, "step": -0.1}
        return lambda: apply_on_triton(**{**given, **changed})

    check(
        noted,
        apply(),
        apply(param=stack),
        apply(orthogonal=at(2, 6, 8, dtype=torch.float16)[:, :4]),
        apply(param=fp32(2, 4, 8, off=1)),
        apply(orthogonal=at(2, 4, 8, dtype=torch.float16, off=1)),
        apply(orthogonal=fp32(2, 4, 8)),
        apply(param=fp32(2, 4, 9), orthogonal=fp32(2, 4, 9).half()),
    )


def row_of(numel: int = 512, **changed: Any) -> UpdateRow:
    def of(dtype: torch.dtype, off: int = 0) -> Tensor:
        return at(numel, dtype=dtype, off=off)

    given = {name: of(torch.float32) for name in ("grad", "exp_avg", "exp_avg_sq", "master")}
    tensors = {name: of(*value) if isinstance(value, tuple) else value for name, value in changed.items()}
    return UpdateRow(**{**given, "step": torch.zeros(()), **tensors})


def test_steps_of_optimizers(noted: Noted) -> None:
    half, byte = (torch.bfloat16,), (torch.uint8,)
    scale = torch.zeros(2)

    def launch(row: UpdateRow, rule: Any = "adamw", maximize: bool = False, **numbers: Any) -> Callable[[], object]:
        options: Any = [AdamOptions(1e-3, 0.9, 0.99, 1e-8, 0.1)]
        update = TritonUpdate((row,), rule, maximize)
        return lambda: update(options, numbers.get("divisor"), numbers.get("found_inf"))

    codes = {"exp_avg": byte, "exp_avg_sq": byte, "exp_avg_scale": scale, "exp_avg_sq_scale": scale}
    check(
        noted,
        launch(row_of()),
        launch(row_of(), maximize=True),
        launch(row_of(), rule="adam"),
        launch(row_of(exp_avg_sq=None), rule="sgd"),
        launch(row_of(exp_avg_sq=None), rule="lion"),
        launch(row_of(grad=half)),
        launch(row_of(exp_avg=half)),
        launch(row_of(exp_avg_sq=half)),
        launch(row_of(param=half)),
        launch(row_of(param=(torch.float16,))),
        launch(row_of(master=None, param=half, remainder=(torch.int16,))),
        launch(row_of(**codes)),
        launch(row_of(grad=(torch.float32, 1))),
        launch(row_of(exp_avg=(torch.float32, 1), param=half)),
        launch(row_of(), divisor=torch.ones(())),
        launch(row_of(), found_inf=torch.ones(())),
        launch(row_of(), divisor=at(1, dtype=torch.float32, off=1)[0]),
    )


# ---- What a GPU alone is told. ----


def told(monkeypatch: pytest.MonkeyPatch, module: Any, kernel: Any) -> list[tuple[int, dict[str, Any]]]:
    """The number of programs, and the arguments by name, of each launch on an NVIDIA GPU."""
    found: list[tuple[int, dict[str, Any]]] = []
    names = list(inspect.signature(kernel.fn).parameters)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(
        module,
        "_launch",
        lambda key, grid, *given, **how: found.append((grid[0], dict(zip(names, given, strict=True)) | how)),
    )
    return found


def test_how_weight_gradients_meet_their_accumulators(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the accelerator's addition where it can add; else what is read is fetched before the products."""
    launches = told(monkeypatch, wgrad_triton, wgrad_triton._grouped_wgrad_kernel)
    monkeypatch.setattr(wgrad_triton, "is_interpreted", lambda: False)
    config = WgradConfig(32, 32, 32, 4, 2, tma=True, reduce=True, parts=2, max_registers=96)
    dy, x, offsets = at(20, 48), at(20, 64), torch.zeros(3, dtype=torch.int64)
    packed = at(2, 48, 64, dtype=torch.float32)

    def launch(grads: Any = packed, overwrite: Any = False, given: WgradConfig = config) -> tuple[bool, bool]:
        grouped_wgrad_triton(dy, x, grads, offsets, overwrite, given)
        [(programs, how)] = launches
        launches.clear()
        assert programs == (3 if given.persistent else 8)
        assert how["grad_desc"] is None or how["grad_desc"].block_shape == [1, 32, 16]
        assert how["maxnreg"] == 96 and (how["num_warps"], how["num_stages"]) == (4, 2)
        return how["grad_desc"] is not None, how["PREFETCH"]

    adds, reads, writes = (True, False), (False, True), (False, False)
    assert launch() == launch(list(packed.unbind())) == adds
    assert launch(overwrite=True) == writes
    for grads in (
        packed.bfloat16(),
        at(2, 48, 64, dtype=torch.float32, off=1),
        at(2, 48, 65, dtype=torch.float32)[:, :, :64],
        [packed[0], None],
    ):
        assert launch(grads) == reads
    assert launch(overwrite=[True, False]) == launch(given=config._replace(reduce=False)) == reads
    assert launch(given=config._replace(tma=False)) == reads
    monkeypatch.setattr(wgrad_triton, "num_multiprocessors", lambda _: 1)
    assert launch(given=config._replace(persistent=3)) == adds
    for is_amd in (False, True):
        monkeypatch.setattr(torch.version, "hip", "6.0" if is_amd else None)
        monkeypatch.setattr(wgrad_triton, "is_interpreted", lambda is_amd=is_amd: not is_amd)
        grouped_wgrad_triton(dy, x, packed.bfloat16(), offsets, False, config)
        assert not launches[-1][1]["PREFETCH"] and "maxnreg" not in launches[-1][1], "PTX, and an option of NVIDIA's"


def test_which_weights_the_accelerator_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = told(monkeypatch, gemm_triton, gemm_triton._grouped_gemm_kernel)
    config, offsets = GemmConfig(64, 32, 16, 4, 2, tma=True), torch.zeros(3, dtype=torch.int64)
    packed = at(2, 48, 64)
    for weights, transposed, box in (
        (packed, True, [1, 32, 16]),
        (packed, False, [1, 16, 32]),
        (list(packed.unbind()), True, [1, 32, 16]),
        ([packed[0], packed[0]], True, None),
        (at(2, 48, 64, off=1), True, None),
        (at(2, 48 * 64 + 4)[:, : 48 * 64].view(2, 48, 64), True, None),
    ):
        x, out = (at(20, 64), at(20, 48)) if transposed else (at(20, 48), at(20, 64))
        grouped_gemm_triton(x, weights, offsets, out, config, transposed=transposed)
        [(_, how)] = launches
        launches.clear()
        assert how["x_desc"].block_shape == [64, 16]
        assert (how["weight_desc"] and how["weight_desc"].block_shape) == box
    grouped_gemm_triton(at(20, 64, off=1), packed, offsets, at(20, 48), config, transposed=True)
    assert launches[0][1]["x_desc"] is None and launches[0][1]["weight_desc"] is not None
    launches.clear()
    grouped_gemm_triton(at(0, 64), packed, offsets, at(0, 48), config, transposed=True)
    grouped_gemm_triton(at(20, 64), at(2, 0, 64), offsets, at(20, 0), config, transposed=True)
    assert not launches, "a GPU refuses a launch of no programs"


def test_counts_of_matrices_are_no_constants_of_the_quantiser() -> None:
    """See ``Launches``: with a constant Triton leaves elements unwritten."""
    launches = [each for each in vars(quantize_triton).values() if isinstance(each, Launches)]
    assert [each._counts for each in launches] == [("R", "C")] * 6


def test_more_experts_than_programs_look_for_their_largest_magnitudes(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, tiles, expected in ((600, 1, 1), (256, 4, 2), (1, 9, 8), (1, 2000, 512)):
        launched: list[Any] = []
        monkeypatch.setattr(quantize_triton, "_launch_amax", lambda _, grid, *rest, made=launched: made.append(grid))
        monkeypatch.setattr(quantize_triton, "_launch_tiles", lambda *_: None)
        quantize_triton.quantize_experts_triton(at(count, 32 * tiles, 2), WHOLE, None)
        assert launched == [(expected, 1, count)]
