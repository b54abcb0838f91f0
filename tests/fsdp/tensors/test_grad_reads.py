"""Whichever way a program reads a sharded gradient, it sees the whole one's answer, or an error that names the whole.

Plain PyTorch in one process, on the batches of all ranks, is the reference.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from grad_functions import Net, answer, batch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from maingrad.ddp import WORLD_OF_ONE
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate

RANKS = 2


def backward(model: Any, step: int = 0) -> None:
    """One iteration of a sharded model, or of a plain model on all ranks' batches."""
    if hasattr(model, "unsharded"):
        model(batch(dist.get_rank(), step)).square().mean().backward()
    else:
        (sum(model(batch(rank, step)).square().mean() for rank in range(RANKS)) / RANKS).backward()


def plain() -> Any:
    model = Net()
    backward(model)
    return model


def sharded(**options: Any) -> Any:
    model: Any = fully_shard(Net(), **options)
    backward(model)
    return model


def on_each(check: Callable[[Any], Any], **options: Any) -> list[Any]:
    return simulate(lambda: check(sharded(**options)), RANKS)


READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda g: g.norm(),
    "data": lambda g: g.data.norm(2),
    "detached": lambda g: g.detach().norm(),
    "cloned": lambda g: g.clone().norm(),
    "of a view": lambda g: g.view(-1).norm(),
    "flattened": lambda g: g.flatten().norm(p=1),
    "reshaped": lambda g: g.reshape(-1).float().double().norm(),
    "on the host": lambda g: g.detach().cpu().norm(),
    "vector_norm": lambda g: torch.linalg.vector_norm(g.data, float("inf")),
    "foreach": lambda g: torch._foreach_norm([g.data, g * 2])[1],
    "foreach product": lambda g: torch._foreach_norm(torch._foreach_mul([g], 3.0))[0],
    "stacked norms": lambda g: torch.stack([g.norm(), g.data.norm()]).norm(),
    "sum of squares": lambda g: (g**2).sum(),
    "square by pow": lambda g: g.data.pow(2).sum().item(),
    "product": lambda g: (g * g.detach()).sum().sqrt(),
    "dot": lambda g: torch.dot(g.flatten(), g.flatten()),
    "largest": lambda g: g.abs().max(),
    "largest, data": lambda g: g.data.abs().max().item(),
    "smallest": lambda g: g.min(),
    "amax": lambda g: torch.amax(g),
    "mean": lambda g: g.mean(),
    "mean of sizes": lambda g: g.data.abs().mean(),
    "variance": lambda g: g.var(unbiased=False),
    "sum": lambda g: g.sum(),
    "sum in fp32": lambda g: g.sum(dtype=torch.float32),
    "keepdim": lambda g: g.sum(dim=None, keepdim=True).sum(),
    "isnan": lambda g: g.isnan().any(),
    "isfinite": lambda g: torch.isfinite(g).all(),
    "a branch": lambda g: bool(torch.isnan(g).any()) or 3,
    "zeros": lambda g: (g == 0).sum() + torch.count_nonzero(g),
    "clamped": lambda g: g.clamp(-1e-3, 1e-3).norm(),
    "with a number first": lambda g: (1 - g / 2).norm(),
    "added": lambda g: (g + torch.zeros_like(g) + torch.ones(())).sum(),
    "signs": lambda g: g.sign().sum(),
    "where": lambda g: torch.where(g > 0, g, 0).sum(),
    "larger": lambda g: torch.maximum(g, -g).sum(),
    "max of two": lambda g: torch.max(g, -g).sum(),
    "equal": lambda g: torch.equal(g, g.clone()),
    "unequal": lambda g: torch.equal(g, g.clone() + (g == g.abs().max())),
    "allclose": lambda g: torch.allclose(g, g * (1 + 1e-9)),
    "mended": lambda g: g.nan_to_num(0.0).norm(),
    "a deep copy": lambda g: copy.deepcopy(g).norm(),
}


ON_SHARDS = {
    "norm", "data", "detached", "cloned", "on the host", "vector_norm", "foreach", "foreach product", "stacked norms",
    "clamped", "with a number first", "mended", "a deep copy",
}  # fmt: skip
"""Norms, also of element-wise results. The others need the whole gradient."""


@pytest.mark.parametrize("name", READS)
@pytest.mark.sampled(3)
def test_a_read_is_that_of_the_whole_gradient(name: str) -> None:
    reference = {key: READS[name](param.grad) for key, param in plain().named_parameters()}

    def check(model: Any) -> None:
        for key, param in model.named_parameters():
            for grad_mode in (True, False):
                with torch.set_grad_enabled(grad_mode):
                    found = answer(READS[name], param.grad, on_shards=name in ON_SHARDS)
                    wanted = reference[key]
                assert type(found) is type(wanted)
                if isinstance(found, Tensor):
                    assert found.dtype == wanted.dtype and found.shape == wanted.shape
                    torch.testing.assert_close(found, wanted)
                else:
                    assert found == pytest.approx(wanted)

    on_each(check)


@pytest.mark.parametrize("placements", ["zero1", "zero2"])
def test_placements_read_alike(placements: str) -> None:
    reference = plain()

    def check(model: Any) -> None:
        for name, param in model.named_parameters():
            whole = reference.get_parameter(name).grad
            torch.testing.assert_close(param.grad.data.abs().norm(), whole.norm())
            torch.testing.assert_close(param.grad.full_tensor(), whole)

    on_each(check, placements=placements)


def test_replicas_and_experts_count_once() -> None:
    """Instances are replicas. Norms count the different experts of all ranks as one parameter."""
    reference = plain()

    def check() -> None:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        model: Any = fully_shard(Net(), mesh=mesh, placements="hsdp")
        model(batch(dist.get_rank() % 2)).square().mean().backward()
        for name, param in model.named_parameters():
            whole = reference.get_parameter(name).grad
            torch.testing.assert_close(param.grad.detach().norm(1), whole.norm(1))
            torch.testing.assert_close(param.grad.full_tensor(), whole)
        own: Any = Net()
        fully_shard(own.head, mesh=WORLD_OF_ONE)
        fully_shard(own)
        own(batch(dist.get_rank())).square().mean().backward()
        grad = own.head.weight.grad
        norms: list[Any] = [None] * 4
        dist.all_gather_object(norms, grad.to_local().norm())
        torch.testing.assert_close(grad.data.norm(), torch.stack(norms).norm())
        torch.testing.assert_close(grad.full_tensor().sum(), grad.to_local().sum())  # its whole is this rank's expert

    simulate(check, 4)


def test_the_remedies_are_the_whole_and_the_local_part() -> None:
    reference = plain()

    def check(model: Any) -> None:
        for name, param in model.named_parameters():
            whole, shard = reference.get_parameter(name).grad, param.shard
            for grad in (param.grad, param.grad.detach(), param.grad.clone()):
                found = grad.full_tensor()
                assert type(found) is Tensor and found.shape == whole.shape
                torch.testing.assert_close(found, whole)
            local = param.grad.to_local()
            assert type(local) is Tensor and local.shape == param.shape
            torch.testing.assert_close(local.reshape(-1), whole.reshape(-1)[shard.start : shard.end])
            local.zero_()
            assert not param.grad.full_tensor().any(), "it is the same memory"
        assert "of 'scale' ()" in f"{model.scale.grad}"

    on_each(check)


def test_shards_of_other_elements_do_not_mix() -> None:
    def check() -> None:
        model: Any = fully_shard(nn.Sequential(*[nn.Linear(20, 20, bias=False) for _ in range(3)]))
        model(torch.ones(2, 20)).sum().backward()
        first, second, third = (layer.weight.grad for layer in model)
        with pytest.raises(RuntimeError, match=r"mul\(\) of shards of different elements.*'1\.weight'"):
            (third if dist.get_rank() else first) * second
        with pytest.raises(RuntimeError, match="a shard of other elements"):
            model[1].weight.grad = third if dist.get_rank() else first

    simulate(check, RANKS)


# ---- What a program makes of a gradient, and puts into .grad. ----


def halved(param: Any) -> None:
    param.grad = param.grad * 0.5


def cloned(param: Any) -> None:
    param.grad = param.grad.detach().clone()


def plain_of_this_rank(param: Any) -> None:
    param.grad = torch.full_like(param, 0.125)


def through_data(param: Any) -> None:
    param.grad.data = param.grad.data.clamp(-1e-2, 1e-2)


def noisy(param: Any) -> None:
    param.grad += torch.zeros_like(param.grad).fill_(0.01)


def masked(param: Any) -> None:
    param.grad[param.grad.abs() < 1e-3] = 0.0


MADE = (halved, cloned, plain_of_this_rank, through_data, noisy, masked)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("made", MADE)
def test_what_is_put_into_grad_is_clipped_and_stepped_as_the_whole(made: Callable[[Any], None], foreach: Any) -> None:
    def train(model: Any) -> tuple[list[float], list[Tensor]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        norms = []
        for step in range(2):
            if step:
                backward(model, step)
            for param in model.parameters():
                made(param)
            norms.append(clip_grad_norm_(model.parameters(), 0.05, foreach=foreach).item())
            norms.append(get_total_norm([param.grad for param in model.parameters()]).item())
            optimizer.step()
            optimizer.zero_grad()
        if not hasattr(model, "unsharded"):
            return norms, [param.detach() for param in model.parameters()]
        assert all(type(value) is Tensor for state in optimizer.state.values() for value in state.values())
        with model.unsharded():
            return norms, [param.detach().clone() for param in model.parameters()]

    norms, weights = train(plain())
    for found_norms, found in on_each(train):
        assert found_norms == pytest.approx(norms)
        torch.testing.assert_close(found, weights)


def test_what_is_put_into_grad_goes_on_to_accumulate() -> None:
    def two(model: Any) -> list[float]:
        for param in model.parameters():
            plain_of_this_rank(param)
            through_data(param)
        backward(model, 1)
        return [param.grad.norm().item() for param in model.parameters()]

    expected = two(plain())
    assert on_each(two) == [pytest.approx(expected)] * RANKS


def test_a_mask_of_rows_is_refused_and_changes_nothing() -> None:
    def cleared(placements: str) -> tuple[str, list[float]]:
        model: Any = fully_shard(nn.Linear(4, 4, bias=False), placements=placements)
        model(torch.ones(2, 4)).sum().backward()
        rows = torch.tensor([True, False, False, False])
        with pytest.raises(RuntimeError) as caught:
            model.weight.grad[rows] = 0.0  # torch clears row 0; masked_fill_() would clear column 0
        return str(caught.value), model.weight.grad.full_tensor().flatten().tolist()

    for message, whole in simulate(cleared, RANKS, "zero3"):
        assert "__setitem__() is not defined over the shards of a gradient" in message
        assert whole == [2.0] * 16


def test_a_gradient_of_another_shape_is_refused_by_name() -> None:
    def check(model: Any) -> None:
        with pytest.raises(RuntimeError, match=r"this rank's elements alone \(elements \d+ to \d+ of 'wide\.weight'"):
            model.wide.weight.grad = torch.zeros(60, 5, dtype=torch.float64)
        with pytest.raises(RuntimeError, match=r"copy_\(\) .*'wide\.weight'"):
            model.wide.weight.grad.data = torch.zeros(5, 60, dtype=torch.float64)

    on_each(check)


@pytest.mark.parametrize(
    "norm", [lambda g: g.norm(keepdim=True), lambda g: torch.linalg.vector_norm(g, 1, keepdim=True)]
)
def test_a_norm_keeps_the_dims_of_the_whole(norm: Callable[[Any], Tensor]) -> None:
    expected = norm(plain().wide.weight.grad)
    assert expected.shape == (1, 1)

    def check(model: Any) -> None:
        torch.testing.assert_close(norm(model.wide.weight.grad), expected)

    on_each(check)


def test_inf_is_found_among_the_ranks_of_each_of_two_models() -> None:
    """Each model has ranks of its own, and one scaler checks both in one call."""

    def check() -> list[float]:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        few: Any = fully_shard(Net(), pairs[dist.get_rank() // 2])
        all_ranks: Any = fully_shard(Net())
        for model in (few, all_ranks):
            model(batch(dist.get_rank(), 0)).square().mean().backward()
        if dist.get_rank() == 0:
            mine = [param.grad.to_local() for param in all_ranks.parameters()]
            next(grad for grad in mine if grad.numel()).fill_(torch.inf)
        grads = [param.grad for model in (few, all_ranks) for param in model.parameters()]
        found = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.ones(1))
        return found.tolist()  # type: ignore[no-any-return]

    assert simulate(check, 4) == [[1.0]] * 4


def test_a_view_that_the_program_has_kept_waits_for_the_next_microbatch() -> None:
    """Reductions of microbatches are under way when the backward ends."""

    def check() -> None:
        reference = Net()
        for step in range(2):
            (sum(reference(batch(rank, step)).square().mean() for rank in range(RANKS)) / RANKS).backward()
        model: Any = fully_shard(Net())
        kept = None
        with model.no_sync():
            for step in range(2):
                model(batch(dist.get_rank(), step)).square().mean().backward()
                kept = model.wide.weight.grad.detach() if kept is None else kept
        start, end = model.wide.weight.shard.start, model.wide.weight.shard.end
        torch.testing.assert_close(kept.to_local().view(-1), reference.wide.weight.grad.view(-1)[start:end])

    simulate(check, RANKS)


# ---- The parameter itself is this rank's elements. ----


def test_a_parameters_own_reads_are_local_and_whole_within_unsharded() -> None:
    reference = plain()

    def check(model: Any) -> None:
        for name, param in model.named_parameters():
            whole, shard = reference.get_parameter(name).detach(), param.shard
            mine = whole.reshape(-1)[shard.start : shard.end]
            with torch.no_grad():
                local = [param.norm(), param.data.norm(), param.detach().norm()]
            for norm in local:
                torch.testing.assert_close(norm, mine.norm())
            with pytest.raises(RuntimeError, match=r"uses the parameter '.*unsharded\(\)"):
                param.norm()
        with model.unsharded(), torch.no_grad():
            for name, param in model.named_parameters():
                torch.testing.assert_close(param.norm(), reference.get_parameter(name).detach().norm())

    on_each(check)


# ---- Within a step. ----


class PerParameter(torch.optim.Optimizer):
    """Its update depends on one parameter: it reads norms of results, on the rank that has the parameter."""

    per_parameter = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.numel():
                grad = param.grad.detach().clone()
                state = self.state[param].setdefault("momentum", grad)
                param.sub_(grad / (grad.norm() + state.abs().max() + 1), alpha=0.1)
                self.fails()

    def fails(self) -> None:
        pass


def test_within_a_step_all_is_local_and_plain_and_after_one_that_raised_it_is_not() -> None:
    reference = Net()
    backward(reference)
    PerParameter(reference.parameters()).step()

    class Failing(PerParameter):
        def fails(self) -> None:
            raise ArithmeticError

    def check(model: Any) -> list[Tensor]:
        with pytest.raises(ArithmeticError):
            Failing(model.parameters()).step()
        model.load_state_dict(fully_shard(Net(), shard_atoms="whole").state_dict())
        model.zero_grad()
        backward(model)
        torch.testing.assert_close(model.wide.weight.grad.data.norm(), reference.wide.weight.grad.norm())
        optimizer = PerParameter(model.parameters())
        optimizer.step()
        assert all(type(state["momentum"]) is Tensor for state in optimizer.state.values())
        torch.testing.assert_close((model.wide.weight.grad * 1).norm(), reference.wide.weight.grad.norm())
        with model.unsharded():
            return [param.detach().clone() for param in model.parameters()]

    for found in on_each(check, shard_atoms="whole"):
        torch.testing.assert_close(found, [param.detach() for param in reference.parameters()])


def test_a_step_over_copies_of_shards_is_local_too() -> None:
    """As an average of weights that an optimizer moves."""

    def check(model: Any) -> None:
        copies = copy.deepcopy(list(model.parameters()))
        for param, copied in zip(model.parameters(), copies, strict=True):
            copied.grad = param.grad
        optimizer = PerParameter(copies)
        optimizer.step()
        assert all(type(state["momentum"]) is Tensor for state in optimizer.state.values())

    on_each(check, shard_atoms="whole")


def test_a_step_within_a_step_leaves_the_outer_one_local() -> None:
    """An optimizer around another (Lookahead, a mean of weights) goes on after the inner step."""

    class Around(PerParameter):
        def __init__(self, params: Any) -> None:
            params = list(params)
            super().__init__(params)
            self.inner = torch.optim.SGD(params, lr=0.0)
            self.sums: list[float] = []

        def fails(self) -> None:
            self.inner.step()
            self.sums.append(self.param_groups[0]["params"][0].grad.sum().item())

    def check(model: Any) -> None:
        optimizer = Around(model.parameters())
        optimizer.step()
        mine = optimizer.param_groups[0]["params"][0].grad.to_local().sum().item()
        assert optimizer.sums == [mine] * len(optimizer.sums)

    on_each(check, shard_atoms="whole")


def test_a_closure_that_a_step_calls_twice_reads_whole_gradients_each_time() -> None:
    """As optimizers do that look around: the first call ends before the step reads, the second comes after."""

    class Twice(torch.optim.SGD):
        elementwise = True

        def step(self, closure: Any = None) -> Any:
            closure()
            return closure()

    def check(model: Any) -> None:
        norms: list[float] = []

        def closure() -> None:
            norms.append(float((model.wide.weight.grad * 1).norm()))

        Twice(model.parameters(), lr=0.1).step(closure)
        assert norms[0] == norms[1] > float(model.wide.weight.grad.to_local().norm())

    on_each(check)


def test_a_closure_may_run_the_last_microbatch() -> None:
    def check(model: Any) -> None:
        with model.no_sync():
            backward(model)
        torch.optim.SGD(model.parameters(), lr=0.1).step(lambda: backward(model))
        assert (model.wide.weight.grad * 1).norm() > model.wide.weight.grad.to_local().norm()

    on_each(check)
