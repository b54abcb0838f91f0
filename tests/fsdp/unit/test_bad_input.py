"""What cannot be sharded is refused with the name of the thing and the remedy, at construction where possible."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from foreign import ForeignProvider
from gloo import run_ranks
from sharded_twin import Block, Net, batches_of, mean_loss, rank_and_size, shard_blocks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp import DistributedDataParallel
from maingrad.fsdp import MixedPrecisionPolicy, fully_shard
from maingrad.launch import simulate


def on_ranks(size: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A test that runs on simulated ranks."""

    def decorate(test: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            simulate(test, size)

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


def step_of(model: nn.Module) -> None:
    mean_loss(model(batches_of(0, 1, dtype=torch.float32)[0])).backward()


# ---- Parameters of two units. ----


def make_tied() -> nn.Sequential:
    model = nn.Sequential(Block(), Block())
    model[1].linear.weight = model[0].linear.weight
    return model


@pytest.mark.parametrize("first", [0, 1])
def test_units_that_share_a_parameter(first: int) -> None:
    model = make_tied()
    fully_shard(model[first])
    match = r"parameter 'linear.weight' was sharded by .* and is registered here as well: make one unit of all modules"
    with pytest.raises(ValueError, match=match):
        fully_shard(model[1 - first])


def test_a_unit_and_the_module_around_it_that_share_a_parameter() -> None:
    model = nn.Sequential(Block(), nn.Linear(7, 7))
    model[1].weight = model[0].linear.weight
    fully_shard(model[0])
    with pytest.raises(ValueError, match=r"parameter '1.weight' was sharded by .*make one unit of all modules"):
        fully_shard(model)


def test_a_parameter_tied_after_its_unit_was_made() -> None:
    model = nn.Sequential(Block(), nn.Linear(7, 7))
    fully_shard(model[0])
    model[1].weight = model[0].linear.weight
    with pytest.raises(ValueError, match=r"parameter '0.linear.weight' is sharded by unit 'Block' and registered outs"):
        fully_shard(model)


def test_a_parameter_tied_after_both_units_were_made() -> None:
    model = nn.Sequential(Block(), Block())
    shard_blocks(model)
    model[1].linear.weight = model[0].linear.weight
    with pytest.raises(RuntimeError, match=r"parameter '1.linear.weight' was replaced after fully_shard .*a tie"):
        model(torch.ones(2, 7))


def test_sharding_from_the_outside_in() -> None:
    model = nn.Sequential(Block(), Block())
    fully_shard(model)
    with pytest.raises(
        ValueError, match=r"parameter 'norm.weight' is sharded by unit 'Sequential' .*from the inside out"
    ):
        fully_shard(model[0])
    model(torch.ones(2, 7)).sum().backward()


def test_sharding_twice() -> None:
    model = nn.Sequential(Block())
    fully_shard(model)
    with pytest.raises(ValueError, match=r"\(FSDPSequential\) is fully sharded already"):
        fully_shard(model)


# ---- Parameters outside their unit. ----


class Borrows(nn.Module):
    """Reads a weight of another unit in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.block(x), self.block.linear.weight)


@pytest.mark.parametrize("placements", ["zero1", "zero3"])
def test_a_parameter_used_outside_its_unit(placements: str) -> None:
    model = Borrows()
    shard_blocks(model, placements=placements)
    match = r"linear\(\) uses the parameter 'block.linear.weight' outside the forward of its unit 'block' while it is"
    with pytest.raises(RuntimeError, match=match):
        model(torch.ones(2, 7))
    model.block(torch.ones(2, 7)).sum().backward()


class ProductAndLoss(torch.autograd.Function):
    """Cross-entropy of ``x @ weight.T``, as losses that are fused with the last product have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        log_probs = (x @ weight.t()).log_softmax(-1)
        ctx.save_for_backward(x, weight, log_probs, labels)
        return nn.functional.nll_loss(log_probs, labels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, log_probs, labels = ctx.saved_tensors
        slope = (log_probs.exp() - nn.functional.one_hot(labels, len(weight))) * grad / len(x)
        return slope @ weight, slope.t() @ x, None


class FusedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(7, 256, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return ProductAndLoss.apply(self.block(x), self.head.weight, labels)


def fused_loss(*, head_is_a_unit: bool, frozen: bool, grad_mode: bool) -> tuple[Tensor, Tensor]:
    """The loss of plain PyTorch, and that of two ranks with one batch."""
    torch.manual_seed(0)
    model = FusedLoss()
    model.head.requires_grad_(not frozen)
    batch = torch.randn(4, 7), torch.tensor([0, 3, 1, 2])
    expected = model(*batch).detach()
    if head_is_a_unit:
        fully_shard(model.head)
    fully_shard(model.block)
    fully_shard(model)
    with torch.set_grad_enabled(grad_mode):
        return expected, model(*batch).detach()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("grad_mode", [True, False])
def test_a_parameter_given_to_a_function_of_autograd_outside_its_unit(frozen: bool, grad_mode: bool) -> None:
    """Each rank has half of the head's rows, which fit the product: its loss would be one over half of the classes."""
    run = partial(fused_loss, frozen=frozen, grad_mode=grad_mode)
    match = (
        r"t\(\), in the forward of a torch.autograd.Function, uses the parameter 'head.weight' outside the forward of"
    )
    with pytest.raises(RuntimeError, match=match):
        simulate(partial(run, head_is_a_unit=True), 2)
    for expected, found in simulate(partial(run, head_is_a_unit=False), 2):
        torch.testing.assert_close(found, expected)


def test_a_part_of_a_unit_called_by_itself() -> None:
    model = nn.Sequential(Block())
    shard_blocks(model)
    model(torch.ones(2, 7))
    with pytest.raises(RuntimeError, match=r"uses the parameter '0.linear.weight' outside the forward of its unit '0'"):
        model[0].linear(torch.ones(2, 7))
    with pytest.raises(RuntimeError, match=r"uses the parameter '0.norm.weight' outside the forward of its unit '0'"):
        model[0].forward(torch.ones(2, 7))


def test_a_unit_after_its_model_is_gone_is_a_model_of_its_own() -> None:
    model = nn.Sequential(Block())
    shard_blocks(model)
    step_of_ones = lambda module: module(torch.ones(2, 7)).sum().backward()  # noqa: E731
    step_of_ones(model)
    block = model[0]
    before = block.linear.bias.grad.to_local().clone()
    del model
    block.zero_grad()
    step_of_ones(block)
    assert block.units[0].name == ""
    torch.testing.assert_close(block.linear.bias.grad.to_local(), before)


# ---- Optimizers. ----


def test_sharding_after_the_optimizer_was_built() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    shard_blocks(model)
    step_of(model)
    match = r"AdamW was built before fully_shard: .* build the optimizer from model.parameters\(\) after the last"
    with pytest.raises(RuntimeError, match=match):
        optimizer.step()


def test_sharding_part_of_a_model_after_the_optimizer_was_built() -> None:
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    shards, rest = [[*block.parameters()] for block in model.blocks], [*model.stem.parameters()]
    optimizers = [torch.optim.AdamW(params) for params in (rest + shards[0], shards[0] + rest + shards[1])]
    fully_shard(model)
    step_of(model)
    for optimizer in optimizers:
        with pytest.raises(RuntimeError, match="AdamW was built before fully_shard"):
            optimizer.step()


@pytest.mark.parametrize("placements", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("read", [False, True])
def test_a_step_before_the_last_microbatch(placements: str, read: bool) -> None:
    """A read of ``.grad`` waits for what was sent; then no reduction is under way."""
    model = Net()
    shard_blocks(model, placements=placements)
    optimizer = torch.optim.AdamW(model.parameters())
    with model.no_sync():
        step_of(model)
    if read:
        assert all(param.grad.to_local().isfinite().all() for param in model.parameters())
    with pytest.raises(RuntimeError, match=r"AdamW.step\(\): gradients of '.*' are not reduced yet: run the last"):
        optimizer.step()
    model.finish_grad_sync()
    optimizer.step()


def test_a_step_before_the_last_microbatch_over_a_model_with_a_frozen_unit() -> None:
    """Which comes first, and has no gradients to wait for."""
    model = nn.Sequential(Block(), Block())
    model[0].requires_grad_(False)
    shard_blocks(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with model.no_sync():
        model(torch.ones(2, 7)).sum().backward()
    with pytest.raises(RuntimeError, match=r"gradients of '1.* are not reduced yet"):
        optimizer.step()


@pytest.mark.parametrize("used", range(3))
def test_a_step_before_the_last_microbatch_of_one_unit(used: int) -> None:
    class OneOf(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            return self[used](x)  # type: ignore[no-any-return]

    model: Any = OneOf([Block(), Block(), Block()])
    shard_blocks(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with model.no_sync():
        model(torch.ones(2, 7)).sum().backward()
    with pytest.raises(RuntimeError, match=rf"gradients of '{used}.* are not reduced yet"):
        optimizer.step()


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_step_before_the_last_microbatch_over_one_bucket_of_a_unit(name: str) -> None:
    model: Any = fully_shard(nn.Linear(5, 5), bucket_size=1)
    assert len(model.units[0].buckets) == 2
    optimizer = torch.optim.SGD([getattr(model, name)])
    with model.no_sync():
        model(torch.ones(2, 5)).sum().backward()
    with pytest.raises(RuntimeError, match=rf"SGD.step\(\): gradients of '{name}' are not reduced yet"):
        optimizer.step()


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_step_beside_a_gradient_that_was_put_into_a_whole_parameter(name: str) -> None:
    wholes: list[nn.Parameter] = []
    model: Any = fully_shard(nn.Linear(5, 5))
    handle = model.register_forward_pre_hook(lambda module, _: wholes.append(getattr(module, name)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    handle.remove()
    wholes[0].grad = torch.ones(wholes[0].shape)
    with pytest.raises(RuntimeError, match=r"AdamW.step\(\): gradients of '.*' are not reduced yet"):
        optimizer.step()
    wholes[0].grad = None
    optimizer.step()


@on_ranks(2)
def test_optimizers_that_look_across_elements() -> None:
    model = nn.Sequential(nn.Linear(5, 16, bias=False))
    fully_shard(model)
    step_of(model)
    with pytest.raises(RuntimeError, match="LBFGS cannot update sharded parameters: it needs whole gradients at once"):
        torch.optim.LBFGS(model.parameters()).step(lambda: 0.0)
    with pytest.raises(RuntimeError, match="Adafactor cannot update sharded parameters: it needs whole gradients at"):
        torch.optim.Adafactor(model.parameters()).step()
    with pytest.raises(RuntimeError, match=r"Muon updates whole parameters.*shard_atoms=\"whole\""):
        torch.optim.Muon(model.parameters()).step()
    torch.optim.NAdam(model.parameters()).step()


@on_ranks(2)
def test_one_cut_parameter_is_enough_to_refuse_an_optimizer_of_whole_ones() -> None:
    model: Any = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    fully_shard(model[0], shard_atoms="whole")
    fully_shard(model)
    for weights in ([model[0].weight, model[1].weight], [model[1].weight, model[0].weight]):
        model(torch.ones(2, 16)).sum().backward()
        with pytest.raises(RuntimeError, match=r"Muon updates whole parameters"):
            torch.optim.Muon(weights).step()
        model.zero_grad()


@on_ranks(2)
def test_a_border_between_two_parameters_cuts_none() -> None:
    model = nn.Sequential(nn.Linear(5, 64, bias=False), nn.Linear(64, 5, bias=False))
    model[0].empty = nn.Parameter(torch.ones(0, 5))  # it lies at the border
    fully_shard(model)
    step_of(model)
    torch.optim.Muon(param for param in model.parameters() if param.shard.numel).step()


def _change(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if how == "zero":
        optimizer.zero_grad(set_to_none=False)
    elif how == "replace":
        for param in model.parameters():
            if param.shard.name.endswith("linear.weight"):  # behind its bias in the bucket
                param.grad = param.grad * 1.0
    else:
        for param in model.parameters():
            param.grad.mul_(0.5)


@pytest.mark.parametrize(
    ("placements", "change"),
    [("zero1", "zero"), ("zero1", "scale"), ("hsdp", "zero"), ("hsdp", "scale"), ("hsdp", "replace")],
)
def test_gradients_changed_in_the_middle_of_an_iteration(placements: str, change: str) -> None:
    def on_each_rank() -> None:
        model = Net()
        mesh = init_device_mesh("cpu", (2, 1)) if placements == "hsdp" else None
        shard_blocks(model, placements=placements, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters())
        with model.no_sync():
            step_of(model)
        wrong = pytest.raises(RuntimeError, match=r"\.grad of parameter '.*' was changed in the middle of an iteration")
        if placements == "zero1":  # there is nothing yet that could be changed
            with wrong:
                _change(change, model, optimizer)
            return
        _change(change, model, optimizer)
        with wrong:
            step_of(model)

    simulate(on_each_rank, 2)


# ---- Modules and parameters that cannot be sharded. ----


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.ModuleList([Block()]),
        lambda: nn.ModuleDict({"a": Block()}),
        lambda: nn.ParameterList([torch.ones(2)]),
    ],
)
def test_modules_without_a_forward(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"\w+(List|Dict) has no forward, and a unit is gathered for its forward"):
        fully_shard(make())


def test_what_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"fully_shard takes one nn.Module, got function"):
        fully_shard(test_what_is_no_module)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_compiled_and_scripted_modules() -> None:
    with pytest.raises(
        ValueError, match=r"the module is torch.compile\(...\) of another module: call that one's .comp"
    ):
        fully_shard(torch.compile(Block()))
    scripted = torch.jit.script(nn.Linear(3, 3))
    for place, model in (("0", nn.Sequential(scripted)), ("0.0", nn.Sequential(nn.Sequential(scripted)))):
        with pytest.raises(ValueError, match=f"module '{place}' is a ScriptModule, whose parameters stay where they"):
            fully_shard(model)


def test_a_policy_of_another_library() -> None:
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(
        TypeError, match=r"mixed_precision is a maingrad\.fsdp\.MixedPrecisionPolicy, got MixedPrecision"
    ):
        fully_shard(Block(), mixed_precision=policy)  # type: ignore[arg-type]


def with_grad(model: nn.Module) -> None:
    step_of(model)


def with_hook(model: nn.Module) -> None:
    model.head.weight.register_hook(lambda grad: grad * 2)


def complex_one(model: nn.Module) -> None:
    model.extra = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


def sparse(model: nn.Module) -> None:
    model.extra = nn.Parameter(torch.eye(2).to_sparse())


def computed(model: nn.Module) -> None:
    model.extra = nn.Parameter(torch.zeros(2), requires_grad=False)
    model.extra.copy_(torch.ones(2, requires_grad=True))


def owned_elsewhere(model: nn.Module) -> None:
    ForeignProvider(model)


def lazy(model: nn.Module) -> None:
    model.extra = nn.LazyLinear(3)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (with_grad, r"parameter '.*' already has a .grad.*module.zero_grad\(\) before fully_shard"),
        (with_hook, r"parameter 'head.weight' has hooks, which no backward would call"),
        (complex_one, r"parameter 'extra' is torch.complex64: .* list it in ignored_params"),
        (sparse, r"parameter 'extra' is torch.sparse_coo: .* list it in ignored_params"),
        (computed, r"parameter 'extra' is computed from others: shard those"),
        (owned_elsewhere, r"parameter '.*' already has a main_grad: it belongs to another"),
        (lazy, r"'extra.weight' has no shape yet: run a forward of the lazy module before fully_shard"),
    ],
)
def test_parameters_that_cannot_be_sharded(spoil: Callable[[nn.Module], None], match: str) -> None:
    model = Net()
    before = dict(model.named_parameters())
    spoil(model)
    with pytest.raises(ValueError, match=match):
        fully_shard(model)
    assert all(dict(model.named_parameters())[name] is param for name, param in before.items()), "left as it was"


def test_wrappers_of_data_parallelism_inside_and_outside() -> None:
    ours = nn.Sequential(DistributedDataParallel(Block()), Block())
    with pytest.raises(
        ValueError, match=r"parameter '0.module.norm.weight' already has a main_grad: it belongs to ano"
    ):
        fully_shard(ours)
    sharded = nn.Sequential(fully_shard(Block()), Block())
    with pytest.raises(ValueError, match=r"parameter '0.norm.weight' is sharded \(maingrad.fsdp.fully_shard\)"):
        DistributedDataParallel(sharded)


def test_torchs_wrapper_of_data_parallelism_inside_and_around() -> None:
    run_ranks(torchs_wrapper, 1)


class Hides(nn.Module):
    """Registers the parameters of a unit, and not the unit."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.taken = nn.ParameterList(unit.parameters())
        self.units = [unit]

    def forward(self, x: Tensor) -> Tensor:
        return self.units[0](x)  # type: ignore[no-any-return]


def torchs_wrapper() -> None:
    module = nn.parallel.DistributedDataParallel(Block())
    for model in (module, nn.Sequential(module)):
        with pytest.raises(ValueError, match=r"is wrapped in torch's DistributedDataParallel already: shard what it"):
            fully_shard(model)
    for around in (fully_shard(Block()), nn.Sequential(nn.Linear(2, 2), fully_shard(Block()))):
        with pytest.raises(ValueError, match=r"DistributedDataParallel around .* of maingrad\.fsdp\.fully_shard"):
            nn.parallel.DistributedDataParallel(around)
    hidden = nn.parallel.DistributedDataParallel(Hides(fully_shard(Block())))
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel around .* of maingrad\.fsdp\.fully_shard"):
        hidden(torch.ones(2, 7))


def test_policies_that_cannot_be() -> None:
    for name in ("param_dtype", "grad_dtype", "reduce_dtype", "output_dtype"):
        message = rf"MixedPrecisionPolicy\.{name} must be a floating-point dtype, got torch\.i"
        with pytest.raises(ValueError, match=message):
            MixedPrecisionPolicy(**{name: torch.int8})
    with pytest.raises(ValueError, match=r"reduce_dtype torch.float32 is wider than grad_dtype torch.bfloat16"):
        MixedPrecisionPolicy(grad_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert MixedPrecisionPolicy(reduce_dtype=torch.float32).wire_dtype is None, "as wide, and the same"


# ---- Afterwards. ----


@on_ranks(2)
def test_nothing_is_left_behind_by_a_refusal() -> None:
    """After a refusal the module can be corrected and sharded."""
    rank, _ = rank_and_size()
    model = Net()
    model.head.bias = nn.Parameter(torch.zeros(3 + rank))
    with pytest.raises(ValueError, match="differs between ranks"):
        fully_shard(model)
    model.head.bias = nn.Parameter(torch.zeros(3))
    fully_shard(model)
    step_of(model)
