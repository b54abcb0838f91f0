"""A step leaves gathers under way that nobody has waited for yet, and whatever comes next may write to their memory.

Gathers keep to the letter here (``strict_gathers``): before somebody waits nothing has arrived, and what a rank sends
must stay as it is. A backend that is fast hides both.
"""

import copy
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strict_gathers import strict_gathers
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp.collectives.in_flight import InFlight
from maingrad.ddp.collectives.rank_grid import RankGrid
from maingrad.ddp.collectives.timeline import Observer
from maingrad.ddp.gathers import param_gather
from maingrad.ddp.gathers.gathered_models import GatheredModel, gathered_models, record_gathered_model
from maingrad.ddp.gathers.param_gather import ParamGather, guard_reads
from maingrad.ddp.gathers.waiting_params import (
    call_before_compiled_code,
    call_before_forward,
    have_wait,
    is_waiting_hook,
    let_go,
    params_in_forward,
)
from maingrad.launch import simulate

RANKS = 2
DTYPES = [torch.float32, torch.bfloat16]
"""Parameters that are their own masters, and some that are rounded."""


class Heads(nn.Module):
    """A trunk and two heads, of which each step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.trunk(x).tanh())


class Job:
    """A training program of one rank."""

    def __init__(self, dtype: torch.dtype, *, overlap: bool) -> None:
        torch.manual_seed(0)
        self.net = Heads().to(dtype)
        self.dtype = dtype
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=overlap, bucket_size=1
        )
        self.model = DistributedDataParallel(self.net, config)
        self.optimizer = DistributedOptimizer(self.model, lr=0.05)
        self.storage = [param.detach() for param in self.net.parameters()]  # as a captured graph has it: it never waits

    def step(self, index: int, head: int) -> None:
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * index + dist.get_rank()))
        self.model(rows.to(self.dtype), head).square().mean().backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        self.model.zero_grad_buffer()

    def masters(self) -> list[Tensor]:
        return [master for group in self.optimizer.param_groups for master in group["params"]]

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.net.parameters()]


def step_again(job: Job) -> None:
    """A step without a read of the other head."""
    job.step(2, head=0)


def step_without_forward(job: Job) -> None:
    job.model.finish_grad_sync()
    job.optimizer.step()


def load_its_state(job: Job) -> None:
    state = copy.deepcopy(job.optimizer.state_dict())
    job.step(2, head=0)
    job.optimizer.load_state_dict(state)


def write_to_masters(job: Job) -> None:
    job.optimizer.finish_param_sync()
    step_without_forward(job)
    if job.dtype is torch.float32:  # they are what is being gathered
        job.optimizer.finish_param_sync()
    with torch.no_grad():
        for master in job.masters():
            master.mul_(0.5)
    job.optimizer.mark_loaded()


PROGRAMS: list[Callable[[Job], None]] = [step_again, step_without_forward, load_its_state, write_to_masters]


def run(program: Callable[[Job], None], dtype: torch.dtype, overlap: bool) -> list[Tensor]:
    job = Job(dtype, overlap=overlap)
    for index in range(2):
        job.step(index, head=0)
    program(job)
    return job.weights()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.sampled(1)
def test_what_comes_after_a_step_waits_for_its_gathers(program: Callable[[Job], None], dtype: torch.dtype) -> None:
    expected = simulate(run, RANKS, program, dtype, False)
    with strict_gathers() as launched:
        found = simulate(run, RANKS, program, dtype, True)
    assert launched
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("how", ["without overlap", "finish_param_sync", "mark_loaded"])
def test_memory_that_nobody_asks_for_has_arrived(how: str) -> None:
    """Without overlap, or when the program has waited: what reads parameters by their address sees no difference."""

    def train() -> None:
        job = Job(torch.float32, overlap=how != "without overlap")
        job.step(0, head=0)
        if how == "finish_param_sync":
            job.optimizer.finish_param_sync()
        elif how == "mark_loaded":
            job.optimizer.mark_loaded()
        assert all(bool(part.isfinite().all()) for part in job.storage)

    with strict_gathers() as launched:
        simulate(train, RANKS)
    assert launched


# ---- One gather, of which a test says when it ends. ----


class Opinionated(nn.Parameter):
    """A class of parameters with a ``__torch_function__`` of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Watched:
    """A ``ParamGather`` of two parameters; ``ends`` are called by those who wait, one for each gather."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cls: type[nn.Parameter] = nn.Parameter) -> None:
        self.module = nn.Linear(2, 2)
        self.module.bias = cls(torch.ones(2))
        self.ends: list[Callable[[], None]] = []
        self.reported: list[tuple[str, str]] = []
        reporter: Any = SimpleNamespace(watch=self.watch)
        params = [*self.module.parameters()]
        self.gather = ParamGather("bucket 3", torch.zeros(6), params, RankGrid(None, None, None), reporter)
        monkeypatch.setattr(param_gather, "all_gather_shards", self.launch)

    def launch(self, flat: Tensor, group: object, *, on_stream: bool) -> InFlight:
        return InFlight(SimpleNamespace(wait=self.ends.pop(0)), (flat,))

    @contextmanager
    def watch(self, what: str, bucket: str) -> Iterator[None]:
        yield
        self.reported.append((what, bucket))

    def start(self) -> None:
        self.gather.start(None)
        guard_reads([self.module], [self.gather])

    def waits(self) -> list[bool]:
        """Whether each parameter waits, and the module."""
        return [
            *(type(each) is not nn.Parameter for each in self.module.parameters()),
            bool(self.module._forward_pre_hooks),
        ]


def test_a_gather_that_another_thread_starts_while_one_is_waited_for_stays_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the next reader would not wait for it."""
    one = Watched(monkeypatch)
    one.ends = [one.start, lambda: None]
    one.start()
    assert one.waits() == [True] * 3
    one.gather.wait()
    assert one.gather.under_way and one.waits() == [True] * 3
    one.module(torch.ones(1, 2))
    assert not one.gather.under_way and one.waits() == [False] * 3 and not one.gather.unhook
    assert one.reported == [("all_gather", "bucket 3")] * 2, "an error that ends the wait would be told with these"


def test_while_one_thread_waits_others_wait_too(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Watched(monkeypatch)
    seen: list[tuple[bool, list[bool]]] = []
    guarded: list[bool] = []
    one.ends = [lambda: seen.append((one.gather.under_way, one.waits()))]
    one.start()
    one.gather.unhook.append(lambda: guarded.append(one.gather.guards))
    one.gather.wait()
    assert seen == [(True, [True] * 3)]
    assert guarded == [True], "until all is plain"
    assert not one.gather.guards


def test_code_that_was_compiled_while_parameters_waited_finds_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another thread waits meanwhile, and compiles nothing."""
    one = Watched(monkeypatch)
    traces = [True, False]
    waited: list[int] = []
    monkeypatch.setattr(param_gather, "is_tracing", lambda: traces.pop(0))

    def end() -> None:
        waited.append(len(waited))
        if len(waited) == 1:
            one.gather.wait()  # the other thread's

    one.ends = [end, lambda: waited.append(-1)]
    one.start()
    one.gather.wait()
    assert waited == [0, 1]
    one.start()
    assert waited == [0, 1, -1], "at once"
    assert one.waits() == [False] * 3


def test_a_gather_is_launched_when_this_ranks_shard_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Watched(monkeypatch)
    happened: list[object] = []

    class Noting(Observer):
        def launch(
            self, bucket: str, collective: str, nbytes: Callable[[], int], start: Callable[[], InFlight]
        ) -> InFlight:
            happened.append((bucket, collective, nbytes()))
            return start()

    one.ends = [lambda: None]
    one.gather.start(None, Noting(), fill=lambda: happened.append("the shard"))
    assert happened == ["the shard", ("bucket 3", "all_gather", 24)]


def test_parameters_that_wait_for_one_gather_wait_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose parameters nobody has read since the one before."""
    one = Watched(monkeypatch)
    arrived: list[int] = []
    one.ends = [lambda: arrived.append(1), lambda: arrived.append(2)]
    one.start()
    one.start()
    assert one.waits() == [True] * 3 and not arrived
    assert one.module.weight.sum().isfinite() and arrived == [2]
    assert one.waits() == [False] * 3


def test_a_bucket_with_a_parameter_that_cannot_wait_is_waited_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Watched(monkeypatch, Opinionated)
    arrived: list[int] = []
    one.ends = [lambda: arrived.append(1)]
    one.start()
    assert arrived == [1] and not one.gather.under_way
    assert type(one.module.weight) is nn.Parameter and type(one.module.bias) is Opinionated
    assert not one.module._forward_pre_hooks and not one.gather.unhook


@pytest.mark.parametrize("under_way", [False, True])
def test_reads_are_refused_until_they_are_allowed(monkeypatch: pytest.MonkeyPatch, under_way: bool) -> None:
    """In a capture, where no gather can come: of parameters, and in the module's forward."""
    one = Watched(monkeypatch)
    arrived: list[int] = []
    one.ends = [lambda: arrived.append(1), lambda: arrived.append(2)]
    if under_way:
        one.gather.start(None)
    scripted = torch.jit.script(nn.Linear(1, 2, bias=False))  # its reads are seen nowhere, refused or not
    scripted.weight = one.module.weight
    guard_reads([one.module, scripted], [one.gather], "no {name} in a capture")
    for read in (one.module.weight.sum, one.gather.wait, lambda: one.module(torch.ones(1, 2))):
        with pytest.raises(RuntimeError, match=r"^no bucket 3 in a capture$"):
            read()
    assert one.waits() == [True] * 3 and not arrived
    one.gather.allow_reads()
    assert one.waits() == [False] * 3 and arrived == [1] * under_way
    one.ends = [lambda: arrived.append(3)]
    one.start()
    one.gather.allow_reads()  # nothing is refused, and the gather goes on
    assert one.waits() == [True] * 3 and 3 not in arrived


def test_a_parameter_that_cannot_wait_is_read_where_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Watched(monkeypatch, Opinionated)
    guard_reads([one.module], [one.gather], "no {name} in a capture")
    assert one.module(torch.ones(1, 2)).isfinite().all() and not one.module._forward_pre_hooks
    one.gather.allow_reads()
    one.gather.wait()


def test_a_scripted_module_is_waited_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ reads its parameters."""
    one = Watched(monkeypatch)
    scripted = torch.jit.script(nn.Linear(1, 2, bias=False))
    scripted.weight = one.module.weight
    arrived: list[int] = []
    one.ends = [lambda: arrived.append(1)]
    one.gather.start(None)
    guard_reads([scripted], [one.gather])
    assert arrived == [1] and one.waits() == [False] * 3


def test_a_forward_has_the_parameters_of_containers_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own ``forward`` is none, and other children wait in theirs."""
    one, around = Watched(monkeypatch), nn.Module()
    around.weights = nn.ParameterList([one.module.weight])
    one.ends = [lambda: None]
    one.gather.start(None)
    guard_reads([one.module, around, around.weights], [one.gather])
    assert len(around._forward_pre_hooks) == 1
    one.gather.wait()
    assert not around._forward_pre_hooks

    module = nn.Linear(2, 2, bias=False)
    module.listed = nn.ParameterList([torch.ones(1)])
    module.named = nn.ParameterDict({"one": torch.ones(1)})
    module.held = nn.ModuleList([nn.Linear(2, 2), nn.ParameterList([torch.ones(1)])])
    module.child = nn.Linear(2, 2)
    expected = [module.weight, *module.listed, *module.named.values(), *module.held[1]]
    found = [param for param in params_in_forward(module) if param is not None]
    assert [id(param) for param in found] == [id(param) for param in expected]


def test_where_a_rank_is_alone_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Watched(monkeypatch)
    monkeypatch.undo()
    one.start()
    assert one.waits() == [False] * 3


def test_a_compiled_module_keeps_no_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may outlive the wrapper and the optimizer."""
    one = Watched(monkeypatch)
    vars(one.module)["_compiled_call_impl"] = lambda x: x + 1
    one.module.frozen = nn.Parameter(torch.ones(1), requires_grad=False)  # which nobody gathers
    one.ends = [lambda: None]
    one.start()
    assert one.module(torch.ones(1)) == 2 and not one.gather.under_way
    gone = weakref.ref(one.gather)
    del one.gather
    assert gone() is None
    assert one.module(torch.ones(1)) == 2


def test_two_threads_may_find_that_a_parameter_has_arrived() -> None:
    """Each of them makes it plain again."""

    class Named(nn.Parameter):
        """A user's own class."""

    for cls in (nn.Parameter, Named):
        param = cls(torch.ones(2))
        have_wait(param, lambda: None)
        assert type(param) is not cls
        for _ in range(2):
            let_go(param)
            assert type(param) is cls and "_maingrad_wait" not in vars(param)


@pytest.mark.parametrize("theirs", [["first"], ["first", "second"]])
def test_hooks_of_others_wait_for_no_gather_and_come_after_it(theirs: list[str]) -> None:
    module, called = nn.Linear(2, 2), []
    for name in theirs:
        module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    unhook = call_before_forward(module, "bucket 3", lambda: called.append("gather"))
    assert [is_waiting_hook(key) for key in module._forward_pre_hooks] == [True, *(False for _ in theirs)]
    module(torch.ones(1, 2))
    assert called == ["gather", *theirs]
    unhook()
    unhook()  # by another thread
    module._forward_pre_hooks["a name"] = lambda *_: None  # type: ignore[index, assignment]
    assert not any(map(is_waiting_hook, module._forward_pre_hooks))


class OptimizedModule(nn.Sequential):
    """Has the name of the class of ``torch.compile(module)``, whose code is in ``forward``."""


@pytest.mark.parametrize(
    ("cls", "place"), [(nn.Sequential, "_compiled_call_impl"), (OptimizedModule, "forward")], ids=["method", "function"]
)
def test_compiled_code_waits_once_for_each_gather_below_it(cls: type[nn.Sequential], place: str) -> None:
    """One of the parameters has no gather."""
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    compiled, called = cls(*module), list[str]()
    vars(compiled)[place] = lambda x: called.append("code") or x
    waits = {name: partial(called.append, name) for name in ("first", "second")}
    gathers = {id(param): waits["first"] for param in module[0].parameters()} | {id(module[1].bias): waits["second"]}
    for _ in range(2):
        call_before_compiled_code(compiled, lambda param: gathers.get(id(param)))
    assert compiled(torch.ones(2)).sum() == 2
    assert called == ["first", "second", "code"]
    plain = nn.Linear(2, 2)
    call_before_compiled_code(plain, lambda param: waits["first"])
    plain(torch.ones(2))
    assert called == ["first", "second", "code"]


def test_models_are_known_to_the_thread_that_uses_them_as_long_as_they_live() -> None:
    """Each simulated rank is a thread."""

    class Model(GatheredModel):
        def finish(self) -> None: ...

    model, another = Model(), Model()
    before = gathered_models()
    for _ in range(2):
        record_gathered_model(model)
    record_gathered_model(another)
    assert {*gathered_models()} - {*before} == {model, another}
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(gathered_models).result() == []
    gone = weakref.ref(another)
    del another
    assert gone() is None
    assert [each for each in gathered_models() if each not in before] == [model]
