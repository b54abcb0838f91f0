"""NaN and Inf in gradients are found before reductions spread them, are named on all ranks, and leave no trace."""

import math
import re
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ending_ranks import run_to_the_end
from loops import assert_same, loss_of, make_batches, weights
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp.buckets.bucket import Phase
from maingrad.launch import simulate
from maingrad.te_integration import Linear

CONFIGS: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "all-reduce under backward": {"overlap_grad_reduce": True},
    "ZeRO-1": {"overlap_grad_reduce": True, "use_distributed_optimizer": True, "overlap_param_gather": True},
    "bf16 on the wire": {"use_distributed_optimizer": True, "grad_reduce_wire_dtype": torch.bfloat16},
}


class Mixed(nn.Module):
    """A delayed weight gradient, one that our module writes, an expert's, and one that autograd writes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = Linear(8, 16, bias=False, dtype=dtype, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
        self.second = Linear(16, 16, dtype=dtype, fuse_wgrad_accumulation=True)
        self.norm = nn.LayerNorm(16, dtype=dtype)
        self.expert = nn.Linear(16, 16, dtype=dtype)
        for parameter in self.expert.parameters():
            parameter.allreduce = False
        self.last = nn.Linear(16, 4, dtype=dtype)
        self.nothing = nn.Parameter(torch.zeros(0, dtype=dtype))
        self.poison: tuple[str, float] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self._poisoned("first", self.first(x)).tanh()
        x = self.norm(self._poisoned("second", self.second(x)).tanh())
        x = x + self._poisoned("expert", self.expert(x))
        return self._poisoned("last", self.last(x))

    def _poisoned(self, name: str, y: Tensor) -> Tensor:
        """Make one element of the gradient of ``y`` bad, and so the gradients of this layer and of those before it."""
        if self.poison is not None and self.poison[0] == name:
            value = self.poison[1]
            y = y.clone()  # a hook of its own
            y.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), value))
        return y


def make(dtype: torch.dtype = torch.float32, **config: Any) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    config = {"check_for_nan_in_grad": True, "bucket_size": 300, **config}
    model = DistributedDataParallel(Mixed(dtype), DistributedDataParallelConfig(**config))
    return model, DistributedOptimizer(model, lr=0.1, max_grad_norm=1.0)


def backwards(model: DistributedDataParallel, seed: int, *, layer: str = "", value: float = 0.0, at: int = -1) -> None:
    """Three microbatches' backwards. The gradient of ``layer`` holds ``value`` in microbatch ``at``."""
    for index, batch in enumerate(make_batches(3, next(model.parameters()).dtype, seed=seed)):
        model.module.poison = (layer, value) if index == at else None
        if index < 2:
            with model.no_sync():
                loss_of(model, batch).backward()
                model.module.first.backward_dw()
        else:
            loss_of(model, batch).backward()
            model.module.first.backward_dw()
    model.module.poison = None


def finish(model: DistributedDataParallel, optimizer: DistributedOptimizer) -> None:
    model.finish_grad_sync()
    optimizer.step()
    model.zero_grad_buffer()


def two_trainings(
    dtype: torch.dtype, config: dict[str, Any], victim: int, layer: str, value: float, at: int
) -> tuple[str, str]:
    """Train with and without an iteration that is bad on one rank: bitwise the same. Returns the error's message."""
    rank = dist.get_rank()
    model, optimizer = make(dtype, **config)
    twin, twin_optimizer = make(dtype, **config)
    for one, its_optimizer in ((model, optimizer), (twin, twin_optimizer)):
        backwards(one, seed=1 + rank)
        finish(one, its_optimizer)

    before = weights(model)
    backwards(model, seed=50 + rank, layer=layer, value=value, at=at if rank == victim else -1)
    with pytest.raises(FloatingPointError) as raised:
        model.finish_grad_sync()
    with pytest.raises(FloatingPointError, match=re.escape(str(raised.value))):
        optimizer.step()  # whoever goes on regardless meets it again
    assert_same(weights(model), before)
    model.zero_grad_buffer()

    for step in range(2):
        for one, its_optimizer in ((model, optimizer), (twin, twin_optimizer)):
            backwards(one, seed=100 * step + rank)
            finish(one, its_optimizer)
        assert_same(weights(model), weights(twin))
        assert all(param.isfinite().all() for param in model.parameters())
    name = re.search(r"parameter '([^']*)'", str(raised.value))
    assert name is not None
    bucket = next(bucket.name for bucket in model.buckets if name[1] in [record.name for record in bucket.records])
    return str(raised.value), bucket


# The first in launch order: a layer's own gradients are bad, and those of the layers before it. Experts' bucket is full
# before the one that holds the last layer.
FIRST_NAMED = {"first": "first.weight", "second": "second.bias", "expert": "expert.bias", "last": "expert.bias"}

CASES = [
    (torch.float32, "ZeRO-1", 0, "first", math.nan, 2),
    (torch.float32, "all-reduce under backward", 2, "expert", math.inf, 2),
    (torch.float32, "bf16 on the wire", 1, "second", -math.inf, 1),
    (torch.bfloat16, "ZeRO-1", 1, "last", math.nan, 0),
    (torch.float64, "all-reduce", 2, "expert", math.nan, 0),
]
ALL_CASES = [
    (dtype, config, 1, layer, value, at)
    for dtype in (torch.float32, torch.bfloat16, torch.float64)
    for config in CONFIGS
    for layer in FIRST_NAMED
    for value in (math.nan, math.inf)
    for at in (0, 2)
    if not (config == "bf16 on the wire" and dtype is torch.bfloat16)
]


@pytest.mark.parametrize(
    "dtype, config, victim, layer, value, at",
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL_CASES)],
)
@pytest.mark.sampled(2)
def test_bad_gradients_are_named_on_all_ranks_and_leave_no_trace(
    dtype: torch.dtype, config: str, victim: int, layer: str, value: float, at: int
) -> None:
    options = {**CONFIGS[config], "grad_reduce_in_fp32": dtype is not torch.bfloat16}
    results = simulate(two_trainings, 3, dtype, options, victim, layer, value, at)
    or_more = ", or more than torch.bfloat16 can hold," if config == "bf16 on the wire" else ""
    for message, bucket in results:
        assert message == results[0][0], "alike on all ranks"
        assert message.startswith(
            f"the gradient of parameter '{FIRST_NAMED[layer]}' holds NaN or Inf{or_more} on rank {victim}, before it "
            f"was reduced in {bucket}: the first of "
        )
        assert ("the first of 1 such" in message) == (layer == "first"), "the delayed one is nobody else's trouble"
        assert message.endswith("call model.zero_grad() to go on without this iteration")
        assert "ranks have such" not in message, "one rank has"


def test_a_step_alone_updates_no_bucket_where_the_last_one_is_bad() -> None:
    """Nothing is updated while other buckets are still being reduced."""
    config = DistributedDataParallelConfig(check_for_nan_in_grad=True, bucket_size=1, overlap_grad_reduce=True)

    def on_each_rank() -> None:
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), config)
        optimizer = DistributedOptimizer(model, lr=0.1)
        before = weights(model)
        model.module[0].weight.register_hook(lambda grad: grad * math.nan)
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(FloatingPointError, match=r"parameter '0\.weight' holds NaN"):
            optimizer.step()
        assert_same(weights(model), before)

    simulate(on_each_rank, 2)


# ---- Real processes. ----


def one_bad_iteration(layer: str, value: float, config: dict[str, Any]) -> None:
    """Rank 1's gradients are bad in the second iteration, and no rank catches the error."""
    model, optimizer = make(**config)
    for step in range(3):
        backwards(model, seed=step, layer=layer, value=value, at=1 if dist.get_rank() == 1 and step == 1 else -1)
        finish(model, optimizer)


@pytest.mark.parametrize("config", ["all-reduce under backward", "ZeRO-1"])
@pytest.mark.sampled(1)
def test_bad_gradients_end_every_process(config: str) -> None:
    for ended in run_to_the_end(one_bad_iteration, 3, "expert", math.nan, CONFIGS[config]):
        assert ended.exit_code == 1, ended.output
        last = ended.output.strip().rpartition("\n")[2]
        assert re.match(
            r"FloatingPointError: the gradient of parameter 'expert.bias' holds NaN or Inf on rank 1, before it was "
            r"reduced in bucket \d \(expert.*\): the first of \d+ such gradients over all ranks\. The weights",
            last,
        ), ended.output


@pytest.mark.in_turn
def test_the_same_on_processes_leaves_no_trace() -> None:
    case = (torch.float32, CONFIGS["ZeRO-1"], 2, "first", math.nan, 0)
    all_ended = run_to_the_end(two_trainings, 3, *case)
    for ended in all_ended:
        assert ended.exit_code == 0, ended.output
        assert "parameter 'first.weight' holds NaN or Inf on rank 2" in ended.returned[0]


# ---- Several ranks, and none. ----


def bad_on_two_ranks() -> str:
    model, _ = make()
    layer = {1: "first", 2: "last"}.get(dist.get_rank(), "")
    backwards(model, seed=1, layer=layer, value=math.nan, at=1 if layer else -1)
    with pytest.raises(FloatingPointError) as raised:
        model.finish_grad_sync()
    return str(raised.value)


def test_the_first_rank_is_named_and_the_others_are_counted() -> None:
    for message in simulate(bad_on_two_ranks, 3):
        assert "'first.weight' holds NaN or Inf on rank 1" in message
        assert "over all ranks; 2 ranks have such gradients." in message


def test_a_bad_gradient_of_an_earlier_backward_of_the_iteration_is_found() -> None:
    """The first backward's reductions were launched before the second backward came."""

    def on_each_rank() -> None:
        model, _ = make(overlap_grad_reduce=True)
        for batch, value in zip(make_batches(2), (math.nan, None), strict=True):
            model.module.poison = None if value is None else ("second", value)
            loss_of(model, batch).backward()
            model.module.first.backward_dw()
        with pytest.raises(FloatingPointError, match=r"'second.bias' holds NaN or Inf on rank 0"):
            model.finish_grad_sync()

    simulate(on_each_rank, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.sampled(6)
def test_nan_and_inf_are_bad_whatever_an_average_multiplies_by(value: float, dtype: torch.dtype) -> None:
    """Two ranks halve their gradients, so that twice the largest number would be sent."""

    def on_each_rank() -> None:
        config = DistributedDataParallelConfig(check_for_nan_in_grad=True)
        model = DistributedDataParallel(torch.nn.Linear(2, 2, bias=False, dtype=dtype), config)
        model(torch.full((1, 2), value if dist.get_rank() else 1.0, dtype=dtype)).sum().backward()
        with pytest.raises(FloatingPointError, match="parameter 'weight' holds NaN or Inf on rank 1"):
            model.finish_grad_sync()

    simulate(on_each_rank, 2)


def test_a_world_of_one_is_searched_too() -> None:
    model, _ = make()
    backwards(model, seed=1, layer="second", value=math.inf, at=0)
    with pytest.raises(FloatingPointError, match=r"'second.bias' holds NaN or Inf on rank 0"):
        model.finish_grad_sync()


@pytest.mark.parametrize("magnitude, dtype", [(3e38, torch.float32), (3e38, torch.bfloat16), (1e308, torch.float64)])
def test_the_largest_finite_gradients_are_no_error(magnitude: float, dtype: torch.dtype) -> None:
    model, _ = make(dtype, grad_reduce_in_fp32=False)
    backwards(model, seed=1)
    for parameter in model.parameters():
        parameter.main_grad.fill_(magnitude)
    model.finish_grad_sync()


def sent(dtype: torch.dtype, magnitude: float) -> str:
    """The error of two ranks whose gradients have this magnitude; the average halves them before they are sent."""
    model, _ = make(use_distributed_optimizer=True, grad_reduce_wire_dtype=dtype)
    backwards(model, seed=1)
    if dist.get_rank() == 1:
        model.module.norm.weight.main_grad.fill_(magnitude)
    try:
        model.finish_grad_sync()
    except FloatingPointError as error:
        return str(error)
    assert all(grad.isfinite().all() for grad in model.reduced_grads())
    return ""


@pytest.mark.parametrize(
    "dtype, fits, overflows", [(torch.float16, 131_000, 131_072), (torch.bfloat16, 3e38, math.inf)]
)
def test_what_overflows_on_the_wire_is_found(dtype: torch.dtype, fits: float, overflows: float) -> None:
    assert simulate(sent, 2, dtype, fits) == ["", ""]
    for message in simulate(sent, 2, dtype, overflows):
        assert f"'norm.weight' holds NaN or Inf, or more than {dtype} can hold, on rank 1" in message


def test_complex_gradients_are_searched() -> None:
    model = DistributedDataParallel(
        nn.Linear(3, 2, dtype=torch.complex64), DistributedDataParallelConfig(check_for_nan_in_grad=True)
    )
    model(torch.ones(1, 3, dtype=torch.complex64)).real.sum().backward()
    model.module.bias.main_grad[0] = complex(3e38, 3e38)  # its magnitude is more than fp32 holds
    model.finish_grad_sync()
    model.zero_grad()
    model(torch.ones(1, 3, dtype=torch.complex64)).real.sum().backward()
    model.module.bias.main_grad[1] = complex(1.0, math.nan)
    with pytest.raises(FloatingPointError, match="'bias' holds NaN or Inf on rank 0"):
        model.finish_grad_sync()


# ---- What the host reads. ----


class Readings(TorchDispatchMode):
    """Records the operations that give the host a tensor's value, or a shape that depends on values."""

    names = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.partition(".")[0].startswith(self.names):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("config", CONFIGS)
def test_the_host_reads_once_and_after_all_buckets(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[list[Phase]] = []

    def counted(rows: Tensor) -> Any:
        reads.append([bucket.phase for bucket in model.buckets])
        return rows.tolist()

    monkeypatch.setattr("maingrad.ddp.buckets.nan_check._read", counted)
    model, _ = make(**CONFIGS[config])
    with Readings() as readings:
        backwards(model, seed=1)
        assert reads == []
        model.finish_grad_sync()
    assert reads == [[Phase.REDUCED] * len(model.buckets)]
    assert len(model.buckets) > 2
    assert readings.seen == [], "nothing else is read"


def test_ranks_pickle_nothing_while_gradients_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object is gathered in two collectives, and on GPUs the host waits for each."""
    gathered: list[int] = []
    gather = dist.all_gather_object

    def counting(*args: Any, **kwargs: Any) -> None:
        gathered.append(threading.get_ident())
        gather(*args, **kwargs)

    def train() -> int:
        model, optimizer = make()
        before = gathered.count(threading.get_ident())
        backwards(model, seed=1 + dist.get_rank())
        finish(model, optimizer)
        return gathered.count(threading.get_ident()) - before

    monkeypatch.setattr(dist, "all_gather_object", counting)
    assert simulate(train, 2) == [0, 0]
    assert gathered, "models are compared so"


def test_noting_a_bucket_needs_no_values() -> None:
    """Tensors on the meta device raise where a value is read."""
    model, _ = make()
    check = model._nan_check
    assert check is not None
    check._parts = {index: part.to("meta") for index, part in check._parts.items()}
    for bucket in model.buckets:
        for record in bucket.records:
            record.view = record.view.to("meta")
        check.note(bucket)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_bad_element_anywhere_is_found(device: str, dtype: torch.dtype) -> None:
    sizes = [1, 17, 1000, 70_001]  # of one thread, of one block, of several
    module = nn.ParameterList([nn.Parameter(torch.zeros(size, dtype=dtype, device=device)) for size in sizes])
    model = DistributedDataParallel(
        module, DistributedDataParallelConfig(check_for_nan_in_grad=True, grad_reduce_in_fp32=False)
    )
    for index, size in enumerate(sizes):
        for place in {0, size // 2, size - 1}:
            for value in (math.nan, math.inf, -math.inf):
                for parameter in module:
                    parameter.main_grad.fill_(-2.0)
                module[index].main_grad[place] = value
                with pytest.raises(FloatingPointError, match=rf"'{index}' holds NaN or Inf .* the first of 1 such"):
                    model.finish_grad_sync()
                model.zero_grad_buffer()
