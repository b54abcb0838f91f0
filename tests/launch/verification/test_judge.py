"""The judgement of one way from what its ranks have: given numbers in place of runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maingrad.ddp import muon_groups
from maingrad.ddp.plan.cut import Box
from maingrad.ddp.plan.model_slice import ModelSlice
from maingrad.launch import simulate
from maingrad.launch.verification.comparison import Piece, allowed_between
from maingrad.launch.verification.experiments import Comparison
from maingrad.launch.verification.findings import Cause, Finding, WayResult
from maingrad.launch.verification.judge import _slopes_of, judge
from maingrad.launch.verification.plain import Part, Plain
from maingrad.launch.verification.program import Program
from maingrad.launch.verification.ways import RankResult, Setting, Way, _in_whole, _instances

WEIGHT = torch.tensor([[1.0, -2.0]])
GRADS = [{"weight": torch.tensor([[3.0, 0.0]])}, {"weight": torch.tensor([[0.0, 4.0]])}]
MEAN = torch.tensor([[1.5, 2.0]])
NORM = 2.5
ADAMW = {"lr": 0.05, "weight_decay": 0.1, "eps": 1.0}


def model() -> nn.Module:
    made = nn.Linear(2, 1, bias=False)
    made.weight = nn.Parameter(WEIGHT.clone())
    return made


def updated() -> Tensor:
    param = nn.Parameter(WEIGHT.clone())
    param.grad = MEAN.clone()
    torch.optim.AdamW([param], **ADAMW).step()
    return param.detach()


@dataclass(frozen=True, kw_only=True)
class Given(Comparison):
    """What a run would find is given."""

    run: Callable[[], Sequence[RankResult]]
    cause: Finding | None = None

    def run_way(self, *_: Any) -> Any:
        return self.run()

    def find_cause(self, off: Any) -> Finding | None:
        return self.cause


def judged(run: Callable[[], Sequence[RankResult]], **fields: Any) -> tuple[WayResult, Finding | None]:
    setting = Setting(lambda model: (), adamw=ADAMW)._replace(**fields.pop("setting", {}))
    plains = [Plain(0.0, grads) for grads in fields.pop("grads", GRADS)]
    comparison = Given(
        program=Program(model(), None, None, 0),
        batch=None,
        parts=[Part(rank, 0, None) for rank in (0, 1)],
        setting=setting,
        allowed=allowed_between({"weight": MEAN}, None),
        plains=plains,
        run=run,
        **fields,
    )
    return judge("a_way", Way("ddp"), comparison)


def rank(grad: Tensor = MEAN, norm: float = NORM, weight: Tensor | None = None, fused: int = 3) -> RankResult:
    weight = updated() if weight is None else weight
    return RankResult([Piece("weight", 0, grad.reshape(-1))], norm, [Piece("weight", 0, weight.reshape(-1))], fused)


def test_a_way_that_is_right() -> None:
    result, finding = judged(lambda: [rank(), rank(fused=5)])
    assert finding is None and result == WayResult(
        way="a_way", ok=True, grad_error=0.0, norm_error=0.0, weight_error=0.0, fused_writes=3
    )


def test_a_gradient_that_is_wrong_on_one_rank() -> None:
    result, finding = judged(lambda: [rank(), rank(2 * MEAN)])
    assert finding is not None and finding.cause is Cause.LIBRARY and finding.parameters == ("weight",)
    assert finding.ranks == (1,) and finding.error == result.grad_error == pytest.approx(1.0) and not result.ok
    assert finding.evidence.endswith(
        "Rank 1's gradient is a sum of the parts' gradients: in units of 1/2, it contains 2.00 of rank 0's "
        "microbatch 0, 2.00 of rank 1's microbatch 0."
    )
    half = rank(GRADS[1]["weight"] / 2)
    _, finding = judged(lambda: [half._replace(grads=[Piece("frozen here", 0, WEIGHT[0]), *half.grads])] * 2)
    assert finding is not None and finding.ranks == (0, 1)
    assert "it contains 0.00 of rank 0's microbatch 0, 1.00 of rank 1's microbatch 0." in finding.evidence
    _, finding = judged(lambda: [rank(MEAN * torch.nan)])
    assert finding is not None and finding.evidence.endswith("No rank holds all of it, or it is not finite.")
    _, finding = judged(lambda: [rank(torch.tensor([[2.0, -1.5]]))], grads=[{"weight": MEAN}] * 2)
    assert finding is not None and finding.evidence.endswith("Rank 0's gradient is no sum of the parts' gradients.")
    _, finding = judged(lambda: [rank(torch.tensor([2.0, 1.0])[None])], grads=[{"weight": MEAN}] * 2)
    assert finding is not None and finding.evidence.endswith("is no sum of the parts' gradients."), "half of it is none"
    known = Finding(cause=Cause.HOOK, evidence="")
    assert judged(lambda: [rank(2 * MEAN)], cause=known)[1] is known


def test_a_norm_that_is_wrong_on_any_rank() -> None:
    result, finding = judged(lambda: [rank(), rank(norm=NORM * 1.1)])
    assert finding is not None and finding.cause is Cause.LIBRARY and "the global norm is 2.5" in finding.evidence
    assert result.norm_error == pytest.approx(0.1) and not result.ok
    result, finding = judged(lambda: [rank(norm=NORM * 1.1)], setting={"experts": object()})
    assert finding is None and result.ok, "ranks hold other experts"


def test_weights_that_are_wrong() -> None:
    step = updated() - WEIGHT
    result, finding = judged(lambda: [rank(weight=WEIGHT + 1.1 * step)])
    assert finding is not None and finding.cause is Cause.LIBRARY and finding.parameters == ("weight",)
    assert "the weights after the step are not those" in finding.evidence
    assert result.weight_error == pytest.approx(0.1, rel=1e-3), "relative to the step"
    assert judged(lambda: [rank(weight=WEIGHT)])[0].weight_error == pytest.approx(1.0)


def raises(error: Exception) -> Callable[[], Any]:
    def run() -> Any:
        raise error

    return run


def test_what_a_way_raises() -> None:
    result, finding = judged(raises(ValueError("the parameter 'weight' is odd")))
    assert finding is not None and finding.cause is Cause.REFUSED and finding.parameters == ("weight",)
    assert finding.evidence == "Plain PyTorch runs, and this way raises. ValueError: the parameter 'weight' is odd"
    assert result == WayResult(way="a_way")
    _, finding = judged(raises(ValueError("a weight without a name")))
    assert finding is not None and finding.parameters == ()
    _, finding = judged(raises(KeyError("of the program")))
    assert finding is not None and finding.cause is Cause.REFUSED and finding.parameters == ()
    own = {"__name__": "maingrad.ddp.somewhere"}
    exec("def run(): raise error", own)
    for error, cause in ((KeyError("k"), Cause.LIBRARY), (TypeError("t"), Cause.REFUSED)):
        own["error"] = error  # type: ignore[assignment]
        _, finding = judged(own["run"])  # type: ignore[arg-type]
        assert finding is not None and finding.cause is cause
    own |= {"__name__": "maingrad.ddp.collectives.somewhere", "error": RuntimeError("r")}  # type: ignore[dict-item]
    exec("def run(): raise error", own)
    known = Finding(cause=Cause.HOOK, evidence="Known.")
    _, finding = judged(own["run"], cause=known)  # type: ignore[arg-type]
    assert finding is not None and finding.evidence.startswith("Ranks call different collectives")
    own["error"] = KeyError("k")  # type: ignore[assignment]
    assert judged(own["run"])[1].cause is Cause.LIBRARY  # type: ignore[arg-type, union-attr]
    _, finding = judged(raises(RuntimeError("x" * 900)), cause=known)
    assert finding is not None and finding.cause is Cause.HOOK
    assert finding.evidence == ("Known. RuntimeError: " + "x" * 900)[: len("Known. ") + 600]


def test_how_much_muon_magnifies_an_error() -> None:
    """By its smallest part: in proportion to the learning rate, and to one over the part's norm."""
    made = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    grad = torch.zeros(6, 4)
    grad[0, 0], grad[2:, 0] = 3.0, 4.0

    def slope(grad: Tensor, **options: Any) -> float:
        return _slopes_of(muon_groups(made, **options), {"0.weight": grad, "1.weight": torch.ones(2, 6)})["0.weight"]

    whole = slope(grad, lr=0.5)
    assert slope(2 * grad, lr=0.5) == pytest.approx(whole / 2) and slope(grad, lr=1.0) == pytest.approx(2 * whole)
    assert slope(grad) == pytest.approx(slope(grad, lr=1e-3)), "torch's default"
    one = slope(torch.eye(6, 4) / 2, lr=0.5)
    assert whole == pytest.approx(one / float(grad.norm()))
    assert slope(torch.zeros(6, 4), lr=0.5) == pytest.approx(one * 1e30), "finite"
    split = slope(grad, lr=0.5, split={"0.weight": [2, 4]}, adjust_lr_fn="match_rms_adamw")
    same_ratio = slope(grad, lr=0.5, adjust_lr_fn="match_rms_adamw") * (4 / 6) ** 0.5
    assert split == pytest.approx(same_ratio * float(grad.norm()) / 3), "that of two rows, whose norm is 3"
    uneven = slope(grad, lr=0.5, split={"0.weight": [1, 5]}, adjust_lr_fn="match_rms_adamw")
    assert uneven == pytest.approx(split * (5 / 4) ** 0.5), "five rows are more than four columns"


# ---- Ways. ----


def test_what_ways_need() -> None:
    plain, tokens = Way("zero1"), Way("zero3", cut="context_parallel")
    assert (plain.ranks_of_row, tokens.ranks_of_row) == (1, 2)
    assert [name for name in ("ddp", "zero1", "zero3", "hsdp") if Way(name).shards_parameters] == ["zero3", "hsdp"]
    setting = Setting(lambda model: ())
    assert setting.fits(plain) and not setting.fits(tokens)
    with_cut = setting._replace(context_parallel=lambda model, mesh: None)
    assert with_cut.fits(tokens) and not with_cut.fits(Way("ddp", cut="tensor_parallel"))
    shared = Way("zero1", ep=2)
    assert [setting._replace(most_ep=most).fits(shared) for most in (1, 2, 3, 4)] == [False, True, False, True]
    made = nn.Linear(2, 3)
    assert not setting.matrices(made).groups and list(setting._replace(muon={}).matrices(made).matrices) == ["weight"]


def test_instances_are_as_few_as_ranks_allow() -> None:
    def fn() -> tuple[Any, ...]:
        mesh = _instances()
        return tuple(mesh.shape), mesh.mesh_dim_names, mesh["inner"].size()

    for ranks, shape in ((1, (1, 1)), (3, (3, 1)), (4, (2, 2)), (6, (2, 3))):
        assert simulate(fn, ranks) == [(shape, ("outer", "inner"), shape[1])] * ranks


def test_a_piece_of_a_slice_lies_in_the_whole() -> None:
    """Columns 2 and 3 of a matrix [2, 4], and of the flattened slice the elements from the second on."""
    piece = Piece("w", 1, torch.tensor([5.0, 6.0, 7.0]))
    assert _in_whole(piece, None) is piece
    held = ModelSlice((2, 4), (Box((0, 2), (2, 2)),), 1, None, "slice")
    found = _in_whole(piece, held)
    assert (found.name, found.start, found.places.tolist()) == ("w", 3, [3, 6, 7]) and found.values is piece.values
    assert _in_whole(piece, held._replace(dim=None)) is piece
    nothing = _in_whole(Piece("w", 4, torch.zeros(0)), held)
    assert nothing.start == 0 and nothing.places is not None and not len(nothing.places)
