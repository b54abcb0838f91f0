"""Plain PyTorch's side of ``verify``: what one forward and backward is seen to do, on one rank and on several."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.launch.verification.plain import Part, Plain, mean_of, run_exact, run_one, run_parts, run_whole
from maingrad.launch.verification.program import Program

ROWS = torch.arange(8.0).view(4, 2)


def program(model: Any, step: Any = None, seed: int = 0) -> Program:
    return Program(model, None, step or (lambda model, batch: model(batch).mean()), seed)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def test_gradients_of_shares_are_whole_and_hooks_see_shares() -> None:
    model, seen = linear(), list[Tensor]()
    model.weight.register_hook(lambda grad: seen.append(grad.clone()))
    model.weight.grad = torch.full((1, 2), 7.0)
    found = run_one(program(model), model, ROWS, shares=4)
    assert torch.equal(found.grads["weight"], ROWS.mean(0, keepdim=True)) and found.grads["bias"].item() == 1.0
    assert torch.equal(seen[0], found.grads["weight"] / 4)
    assert found.loss == pytest.approx(model(ROWS).mean().item()) and model.weight.grad is None
    assert (found.without, found.replaced, found.is_random, found.eps) == ((), (), False, 0.0)


class Odd(nn.Module):
    """Counts its calls, replaces a parameter, leaves one unused and freezes one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        self.frozen, self.replaced = nn.Parameter(torch.ones(1), False), nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.replaced = nn.Parameter(torch.ones(2))
        self.added = nn.Parameter(torch.ones(1))
        return x @ (self.used * self.replaced)


def test_what_a_forward_does_to_a_model_is_seen() -> None:
    model = Odd()
    found = run_one(program(model), model, ROWS)
    assert set(found.grads) == {"used", "unused", "replaced"} and not found.grads["unused"].any()
    assert found.without == ("unused",) and set(found.replaced) == {"replaced", "added"}
    assert found.buffers["calls"].item() == 1.0
    model.calls.add_(5)
    assert found.buffers["calls"].item() == 1.0, "as it was after forward"


class Dropping(nn.Linear):
    """Its forward takes a parameter out of the model."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.weight = None  # type: ignore[assignment]
        return output


def test_a_parameter_that_a_forward_takes_out_is_seen() -> None:
    found = run_one(program(linear()), Dropping(2, 1), ROWS)
    assert found.replaced == found.without == ("weight",) and set(found.grads) == {"bias"}


def test_a_backward_of_the_programs_own_is_refused() -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).mean()
        loss.backward()
        return loss

    model = linear()
    with pytest.raises(ValueError, match="has called backward itself"):
        run_one(program(model, step), model, ROWS)


def test_draws_are_seeded_by_the_part_or_are_their_means() -> None:
    drawing = program(linear(), lambda model, batch: (model(batch) * torch.rand(4, 1)).mean(), seed=5)
    model = drawing.make()
    one, again, other = (run_one(drawing, model, ROWS, draw) for draw in (1, 1, 2))
    assert one.is_random and one.loss == again.loss != other.loss
    assert run_one(program(linear(), drawing._step, seed=6), model, ROWS, 0).loss == one.loss, "seed and draw add up"
    chosen = program(linear(), lambda model, batch: model(batch * torch.multinomial(torch.ones(99), 4)[:, None]).mean())
    assert run_one(chosen, model, ROWS, 3).loss != run_one(chosen, model, ROWS, 4).loss
    assert len({run_one(chosen.with_means(), model, ROWS, draw).loss for draw in (3, 4)}) == 1, "what has no mean"
    means = drawing.with_means()
    assert not drawing.means
    half = run_one(means, model, ROWS, 3)
    assert half.is_random and half.loss == run_one(means, model, ROWS, 4).loss == pytest.approx(
        model(ROWS).mean().item() / 2
    )


def test_gradients_of_sparse_embeddings_are_dense() -> None:
    model = nn.Embedding(3, 2, sparse=True)
    found = run_one(program(model, lambda model, batch: model(batch).sum()), model, torch.tensor([2, 2, 0]), shares=2)
    assert found.grads["weight"].tolist() == [[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]]


def test_a_loss_without_a_graph_has_zeros() -> None:
    model = linear()
    found = run_one(program(model, lambda model, batch: batch.mean()), model, ROWS)
    assert found.without == ("weight", "bias") and not any(grad.any() for grad in found.grads.values())


def test_the_whole_batch_stays_as_it_is_and_says_its_precision() -> None:
    def changing(model: nn.Module, batch: Tensor) -> Tensor:
        batch *= 2
        return model(batch).mean()

    rows = ROWS.clone()
    found = run_whole(program(linear(), changing), rows)
    assert torch.equal(rows, ROWS) and found.eps == 0.0

    def in_half(dtype: torch.dtype) -> Any:
        def step(model: nn.Module, batch: Tensor) -> Tensor:
            assert dist.get_world_size() == 1
            with torch.autocast("cpu", dtype):
                return model(batch).float().mean()

        return step

    for dtype in (torch.bfloat16, torch.float16):
        assert run_whole(program(linear(), in_half(dtype)), rows).eps == torch.finfo(dtype).eps
    exact = run_exact(program(linear()), rows)
    assert exact is not None and {grad.dtype for grad in exact.values()} == {torch.float64}
    fails = program(linear(), lambda model, batch: model(batch.float()).mean())
    assert run_exact(fails, rows) is None
    frozen = run_whole(program(linear()), rows, lambda model: model.weight.requires_grad_(False))
    assert set(frozen.grads) == {"bias"}, "the model is prepared"


def test_each_rank_runs_its_microbatches_in_turn_on_one_copy() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 1)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * (1 + dist.get_rank()) * self.calls

    parts = [Part(rank, number, ROWS[2 * rank + number, None]) for rank in (0, 1) for number in (0, 1)]
    counting = program(Counting())
    found = run_parts(counting, parts)
    assert [float(each.grads["bias"]) for each in found] == [1.0, 2.0, 2.0, 4.0]
    assert [float(each.buffers["calls"]) for each in found] == [1.0, 2.0, 1.0, 2.0]
    rows = ROWS.clone()
    changed = program(Counting(), lambda model, batch: model(batch.mul_(2)).mean())
    run_parts(changed, [Part(0, 0, rows)])
    assert torch.equal(rows, ROWS), "a program may change its rows"
    alone = run_parts(counting, parts, in_one_process=True)
    assert [float(each.grads["bias"]) for each in alone] == [1.0, 2.0, 1.0, 2.0], "every rank's parts are rank 0's"
    seen: list[float] = []
    run_parts(counting, parts, lambda model: model.bias.register_hook(lambda grad: seen.append(float(grad))))
    assert sorted(seen) == [0.5, 1.0, 1.0, 2.0], "hooks see shares, as in training"
    assert len({part.draw for part in parts}) == 4 and str(parts[2]) == "rank 1's microbatch 0"


def test_means_of_parts_that_have_other_parameters() -> None:
    one, two = Plain(0.0, {"w": torch.tensor([2.0])}), Plain(0.0, {"v": torch.tensor([3.0])})
    assert {name: grad.tolist() for name, grad in mean_of([one, two]).items()} == {"w": [1.0]}
