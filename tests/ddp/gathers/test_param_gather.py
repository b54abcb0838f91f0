"""Gathers under the next forward: every way to read a parameter gives the new weights."""

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.dlpack import from_dlpack

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp.gathers.waiting_params import call_before_compiled_code
from maingrad.launch import simulate
from maingrad.te_integration import Linear

RANKS = 2


class Reader(nn.Module):
    """Registers its layers in another order than it uses them, and reads weights outside their modules' forwards."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.head = Linear(8, 16, bias=False, dtype=dtype)
        self.last = nn.Linear(8, 8, dtype=dtype)
        self.embedding = nn.Embedding(16, 8, dtype=dtype)
        self.first = Linear(8, 8, dtype=dtype)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(F.embedding(tokens, self.embedding.weight)) * self.scale
        x = F.linear(x.tanh(), self.last.weight, self.last.bias)
        return F.linear(x, self.embedding.weight) + self.head(x)


def build(dtype: torch.dtype = torch.float32) -> Reader:
    torch.manual_seed(0)
    return Reader(dtype)


def trainer(
    *, overlap: bool, dtype: torch.dtype = torch.float32
) -> tuple[DistributedDataParallel, DistributedOptimizer, Callable[[], float]]:
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=overlap, bucket_size=64
    )
    ddp = DistributedDataParallel(build(dtype), config)
    optimizer = DistributedOptimizer(ddp, lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step() -> float:
        tokens = torch.randint(16, (4, 5), generator=generator)
        loss = F.cross_entropy(ddp(tokens).float().flatten(0, 1), tokens.flatten())
        loss.backward()
        ddp.finish_grad_sync()
        optimizer.step()
        ddp.zero_grad_buffer()
        return float(loss.detach())

    return ddp, optimizer, step


def in_flight(ddp: DistributedDataParallel) -> list[str]:
    """Names of the parameters whose gather nobody has waited for. Asking the model for them would wait."""
    return [entry.owned.name for entry in ddp.bucket_params if type(entry.owned.param) is not nn.Parameter]


def weights_after(steps: int, overlap: bool) -> list[Tensor]:
    ddp, optimizer, step = trainer(overlap=overlap)
    for _ in range(steps):
        step()
    optimizer.finish_param_sync()
    return [param.detach().clone() for param in ddp.module.parameters()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.sampled(1)
def test_training_is_bitwise_the_same_with_and_without_overlap(ranks: int) -> None:
    for seed in range(3):
        late = simulate(weights_after, ranks, 6, True, seed=seed)
        early = simulate(weights_after, ranks, 6, False, seed=seed)
        for mine, theirs in zip(late, early, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                assert torch.equal(one, other)


READS: dict[str, Callable[[DistributedDataParallel, list[nn.Parameter]], Any]] = {
    "state_dict": lambda ddp, kept: list(ddp.module.state_dict().values()),
    "parameters": lambda ddp, kept: [p.detach().clone() for p in ddp.module.parameters()],
    "a list kept from before, foreach": lambda ddp, kept: torch._foreach_mul([torch.ones_like(p) for p in kept], kept),
    "a list kept from before, one by one": lambda ddp, kept: [p * 1 for p in kept],
    ".data": lambda ddp, kept: [p.data.clone() for p in kept],
    "deepcopy": lambda ddp, kept: list(copy.deepcopy(ddp.module).parameters()),
    "deepcopy of each parameter": lambda ddp, kept: copy.deepcopy(kept),
    "AveragedModel": lambda ddp, kept: list(AveragedModel(ddp.module).module.parameters()),
    "data_ptr": lambda ddp, kept: [(p.data_ptr(), torch.Tensor.detach(p).clone())[1] for p in kept],
    "numpy": lambda ddp, kept: [torch.from_numpy(p.detach().numpy().copy()) for p in kept],
    "a vector of all": lambda ddp, kept: [torch.nn.utils.parameters_to_vector(kept)],
    "by keyword": lambda ddp, kept: [torch.mul(torch.ones(p.shape), other=p) for p in kept],
    "in a list by keyword": lambda ddp, kept: torch._foreach_mul([torch.ones(p.shape) for p in kept], other=kept),
    "in an autograd function": lambda ddp, kept: [Identity.apply(p) for p in kept],
    "torch.func.grad of a forward": lambda ddp, kept: [*grads_by_func(ddp.module.last), *(p * 1 for p in kept)],
    "DLPack": lambda ddp, kept: [from_dlpack(p.requires_grad_(False)) for p in kept],
    "as a list inside a dict of keywords": lambda ddp, kept: [torch.cat(tensors=[p.view(-1) for p in kept])],
}


def grads_by_func(module: nn.Module) -> list[Tensor]:
    """torch.func wraps parameters in C++, and runs the module's forward on what it has wrapped."""

    def loss_of(params: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, params, (torch.ones(1, 8),)).square().sum()  # type: ignore[no-any-return]

    return list(torch.func.grad(loss_of)(dict(module.named_parameters())).values())


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def read_after_a_step(how: str, overlap: bool) -> tuple[list[str], list[Tensor], list[str], bool]:
    ddp, _, step = trainer(overlap=overlap)
    kept = list(ddp.module.parameters())
    for _ in range(2):
        step()
    waiting = in_flight(ddp)
    read = [torch.as_tensor(value).detach().clone() for value in READS[how](ddp, kept)]
    return waiting, read, in_flight(ddp), all(type(value) is Tensor for value in read)


@pytest.mark.parametrize("how", READS)
@pytest.mark.sampled(2)
def test_every_way_to_read_a_parameter_sees_the_new_weights(how: str) -> None:
    late = simulate(read_after_a_step, RANKS, how, True)
    early = simulate(read_after_a_step, RANKS, how, False)
    for (waiting, seen, left, plain), (_, expected, _, _) in zip(late, early, strict=True):
        assert len(waiting) == 7  # or the test shows nothing
        assert left == []
        assert plain
        assert len(seen) == len(expected)
        for one, other in zip(seen, expected, strict=True):
            assert torch.equal(one, other)


def pickled_after_a_step() -> bool:
    ddp, optimizer, step = trainer(overlap=True)
    step()
    file = io.BytesIO()
    torch.save(ddp.module.last.state_dict(), file)
    assert in_flight(ddp) != []  # the other buckets' are still under way
    optimizer.finish_param_sync()
    file.seek(0)
    saved = torch.load(file)
    return all(torch.equal(saved[name], value) for name, value in ddp.module.last.state_dict().items())


def test_saving_one_module_waits_for_its_buckets_alone() -> None:
    assert all(simulate(pickled_after_a_step, RANKS))


def facts_of(param: nn.Parameter) -> list[Any]:
    """What says nothing of values, by properties and methods, and by torch's functions of the same names."""
    properties = """
        shape dtype device layout ndim requires_grad grad grad_fn is_leaf retains_grad output_nr itemsize nbytes name
        _base _version _backward_hooks _post_accumulate_grad_hooks is_cpu is_cuda is_xpu is_mps is_mtia is_meta
        is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_vulkan
    """
    methods = """
        size stride numel nelement dim ndimension element_size storage_offset is_contiguous is_floating_point is_complex
        is_signed is_inference is_conj is_neg get_device dim_order __dir__ _is_view
    """
    functions = (torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed, torch.is_conj, torch.is_neg)
    return [
        *(getattr(param, name) for name in properties.split()),
        *(getattr(param, name)() for name in methods.split()),
        *(function(param) for function in functions),
    ]


def asks_about_parameters() -> int:
    ddp, _, step = trainer(overlap=True)
    kept = dict(ddp.module.named_parameters())
    step()
    before = len(in_flight(ddp))
    assert list(ddp.module._parameters) == ["scale"] and "scale" in ddp.module._parameters
    for name, param in kept.items():
        assert isinstance(param, nn.Parameter)
        facts = (param.shape, param.dtype, param.device, param.requires_grad, param.grad, param.numel(), param.size())
        assert facts[-1] == param.main_grad.shape, name
        assert param in {param: 0}
        facts_of(param)
        assert param.ndim == 0 or len(param) == param.shape[0]
        assert param.is_same_size(param)
        made = [param.new_empty(2), param.new_zeros(2), param.new_ones(2), param.new_full((2,), 7), param.new(2)]
        made.append(param.new_empty_strided((2,), (1,)))
        assert all(each.shape == (2,) for each in made)
        param.requires_grad_(True)
        param.requires_grad = True
        param.retain_grad()
        param.grad = None
        del param.grad
        for register in (param.register_hook, param.register_post_accumulate_grad_hook):
            register(lambda _: None).remove()
    assert len(in_flight(ddp)) == before
    return before


def test_asking_about_a_parameter_does_not_wait_for_it() -> None:
    assert simulate(asks_about_parameters, RANKS) == [7, 7]


def steps_without_forwards(overlap: bool) -> list[Tensor]:
    ddp, optimizer, step = trainer(overlap=overlap)
    step()
    for _ in range(2):  # gradients of zero, twice in a row: moments and decay still move the weights
        ddp.finish_grad_sync()
        optimizer.step()
        ddp.zero_grad_buffer()
    ddp.eval()
    with torch.no_grad():
        evaluated = ddp(torch.arange(16)).clone()
    ddp.train()
    step()
    with torch.no_grad():
        for param in ddp.module.parameters():
            param.mul_(0.5)  # an update by hand, right after a step
    step()
    return [evaluated, *(param.detach().clone() for param in ddp.module.parameters())]


def test_steps_without_forwards_evaluation_and_updates_by_hand() -> None:
    for late, early in zip(
        simulate(steps_without_forwards, RANKS, True), simulate(steps_without_forwards, RANKS, False), strict=True
    ):
        for one, other in zip(late, early, strict=True):
            assert torch.equal(one, other)


class Named(nn.Parameter):
    """A user's own class of parameters."""


class Opinionated(nn.Parameter):
    """A class of parameters with a ``__torch_function__`` of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Inherits(Opinionated):
    """A class of parameters that inherits a ``__torch_function__``."""


def with_parameters_of(cls: type[nn.Parameter]) -> tuple[bool, bool, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    weight = model[0].weight = cls(model[0].weight.detach().clone())
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)
    ddp = DistributedDataParallel(model, config)
    optimizer = DistributedOptimizer(ddp)
    for _ in range(2):
        ddp(torch.ones(1, 8)).sum().backward()
        ddp.finish_grad_sync()
        optimizer.step()
        ddp.zero_grad_buffer()
    waits = type(weight) is not cls
    ddp(torch.ones(1, 8))
    assert not any(module._forward_pre_hooks for module in model)
    return waits, type(model[0].weight) is cls, model[0].weight.detach().clone()


class Fixed(nn.Parameter):
    """A class of parameters that Python does not let change."""

    def __init_subclass__(cls) -> None:
        raise TypeError("Fixed has no subclasses")


class Slotted(nn.Parameter):
    __slots__ = ("note",)


def read_from_a_list(cls: Any, overlap: bool) -> tuple[bool, list[Tensor]]:
    """Reads a parameter from a list that was made before: no module is involved."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16, bias=False))
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.copy_(torch.full_like(param, 0.1 * (index + 1)))
    model[1].weight = cls(model[1].weight.detach().clone())  # gathered last, and of two ranks' shards
    ddp = DistributedDataParallel(
        model,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=overlap, bucket_size=1
        ),
    )
    optimizer = DistributedOptimizer(ddp, lr=0.1)
    kept = list(model.parameters())
    ddp(torch.ones(1, 8)).square().sum().backward()
    ddp.finish_grad_sync()
    optimizer.step()
    waits = type(kept[-1]) is not cls
    return waits, [Tensor.clone(param.detach()) for param in reversed(kept)]


def test_a_parameter_of_a_class_of_fixed_shape_has_arrived() -> None:
    for cls in (Fixed, Slotted, nn.Parameter):
        # A rank goes on as long as it can: the first one reads before others have sent anything.
        late, early = (simulate(read_from_a_list, RANKS, cls, overlap, order=min) for overlap in (True, False))
        for (waits, seen), (_, wanted) in zip(late, early, strict=True):
            assert waits is (cls is not Fixed)
            assert all(map(torch.equal, seen, wanted))


def test_classes_of_parameters_come_back_and_those_with_an_opinion_are_waited_for_at_once() -> None:
    plain, named, opinionated, inherits = (
        simulate(with_parameters_of, RANKS, cls)[0] for cls in (nn.Parameter, Named, Opinionated, Inherits)
    )
    assert plain[:2] == named[:2] == (True, True)
    assert opinionated[:2] == inherits[:2] == (False, True)
    for other in (named, opinionated, inherits):
        assert torch.equal(plain[2], other[2].as_subclass(Tensor))


def compiled(what: str) -> tuple[list[float], list[float]]:
    torch._dynamo.reset()
    losses = []
    for compile_it in (True, False):
        ddp, _, step = trainer(overlap=True)
        if compile_it and what == "a submodule":
            ddp.module.last.compile(backend="eager")
            ddp.module.first.compile(backend="eager")
        elif compile_it and what == "a replaced submodule":
            ddp.module.first = torch.compile(ddp.module.first, backend="eager")
        elif compile_it:
            (ddp if what == "the wrapper" else ddp.module).compile(backend="eager")
        losses.append([step() for _ in range(4)])
    return losses[0], losses[1]


@pytest.mark.parametrize("what", ["a submodule", "a replaced submodule", "the model", "the wrapper"])
@pytest.mark.sampled(1)
def test_compiled_modules_see_the_new_weights(what: str) -> None:
    """One simulated rank at a time compiles: Dynamo's state is the process's."""
    for with_compile, without in simulate(compiled, RANKS, what):
        assert with_compile == without


def frames_around_compiled_code() -> list[int]:
    torch._dynamo.reset()
    depths = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            depths.append(len(inspect.stack(context=0)))
            return graph.forward(*args)

        return run

    ddp, _, step = trainer(overlap=True)
    ddp.module.first.compile(backend=backend)
    for _ in range(5):
        step()
    return depths


def test_a_compiled_module_waits_in_one_function_after_any_number_of_steps() -> None:
    for depths in simulate(frames_around_compiled_code, RANKS):
        assert len(depths) == 5
        assert len(set(depths[2:])) == 1


def test_compiled_code_is_called_as_its_module_is() -> None:
    """Each gather is waited for once, of all parameters below the module; those without one are nobody's concern."""
    model, waits = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    first, second = (lambda: waits.append("first")), (lambda: waits.append("second"))
    of = {id(param): first for param in model[0].parameters()} | {id(model[1].weight): second}
    vars(model)["_compiled_call_impl"] = lambda *given, **named: (given, named)
    for _ in range(2):
        call_before_compiled_code(model, lambda param: of.get(id(param)))
        assert model(1, more=2) == ((1,), {"more": 2})
    assert waits == ["first", "second"] * 2


def compiled_anew(what: str) -> tuple[list[int], list[int], list[float]]:
    """After each step: graphs compiled so far by all ranks, and parameters whose gather is under way; the losses."""
    torch._dynamo.reset()
    graphs = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=64)
    ddp = DistributedDataParallel(model, config)
    optimizer = DistributedOptimizer(ddp, lr=0.05)

    def call_the_model(x: Tensor) -> Tensor:
        return model(x).sin()

    forward: Callable[[Tensor], Tensor] = ddp if what == "blocks" else call_the_model
    if what == "blocks":
        for block in model:
            block.compile(backend=counting)
    elif what == "a function that calls the model":
        forward = torch.compile(call_the_model, backend=counting)
    compiled, waiting, losses = [], [], []
    for _ in range(8):
        loss = forward(torch.ones(2, 8)).square().sum()
        loss.backward()
        ddp.finish_grad_sync()
        optimizer.step()
        ddp.zero_grad_buffer()
        compiled.append(len(graphs))
        waiting.append(len(in_flight(ddp)))
        losses.append(float(loss.detach()))
    return compiled, waiting, losses


def test_compiled_blocks_are_compiled_once_and_their_gathers_overlap() -> None:
    for compiled, waiting, _ in simulate(compiled_anew, RANKS, "blocks"):
        assert compiled[1:] == compiled[1:2] * 7
        assert waiting == [6] * 8


@pytest.mark.slow
def test_a_compiled_function_that_calls_the_model_is_soon_compiled_no_more() -> None:
    """In processes: it waits for a gather while it is compiled, which one simulated rank at a time can be."""
    for (compiled, _, losses), (_, _, expected) in zip(
        run_ranks(compiled_anew, RANKS, "a function that calls the model"),
        run_ranks(compiled_anew, RANKS, "nothing"),
        strict=True,
    ):
        assert losses == expected
        assert compiled[3:] == compiled[3:4] * 5


def experts_first(overlap: bool) -> list[Tensor]:
    """The forward first reads an expert of this rank alone, whose bucket is not gathered."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])
    for param in model[0].parameters():
        param.allreduce = False
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=overlap, bucket_size=64
    )
    ddp = DistributedDataParallel(model, config, expert_process_group=groups[dist.get_rank()])
    optimizer = DistributedOptimizer(ddp, lr=0.1)
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        ddp(x).square().sum().backward()
        ddp.start_grad_sync()
        optimizer.step()
        ddp.zero_grad_buffer()
    optimizer.finish_param_sync()
    return [param.detach().clone() for param in model.parameters()]


def test_23_no_bucket_is_gathered_before_it_is_updated() -> None:
    for late, early in zip(simulate(experts_first, RANKS, True), simulate(experts_first, RANKS, False), strict=True):
        assert all(map(torch.equal, late, early))
