"""Models of Hugging Face under ``maingrad.graphed`` on a CPU; twenty on a GPU: ``test_graphed_models_gpu.py``."""

import os
import sys
import types

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may download

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from graphed_models import train
from torch import Tensor, nn

from maingrad.ddp.collectives.streams import capturing
from maingrad.ddp.graphs import model_masks
from maingrad.ddp.graphs.model_masks import ModelMasks

CPU = torch.device("cpu")


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["Llama", "Gemma3Text", "T5", "Bart", "Mamba"])
@pytest.mark.sampled(5)
def test_is_captured(name: str) -> None:
    """transformers asks on the host whether sequences are packed: a capture has the answer of eager calls."""
    eager, graphed = (train(name, CPU, graphed=graphed) for graphed in (False, True))
    assert (graphed.num_graphs, graphed.why_eager) == (1, None)
    assert all(map(torch.equal, [*eager.losses, *eager.norms], [*graphed.losses, *graphed.norms]))


@pytest.mark.in_turn
@pytest.mark.parametrize(("name", "why"), [("Mixtral", "rows of each expert")])
def test_is_named(name: str, why: str) -> None:
    eager, graphed = (train(name, CPU, graphed=graphed) for graphed in (False, True))
    assert graphed.num_graphs == 0
    assert why in (graphed.why_eager or "")
    assert "graphed_models.py" in (graphed.why_eager or "")
    assert all(map(torch.equal, [*eager.losses, *eager.norms], [*graphed.losses, *graphed.norms]))


# ---- What transformers asks of each batch, by itself. ----

PACKED, CAUSAL = model_masks._ASKED[:2]
GIVEN = torch.ones(2)


class Asked:
    """A function of transformers: answers, and counts who has asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.count = list(answers), 0

    def __call__(self, tensor: Tensor | None, *sizes: Any) -> Any:
        self.count += 1
        return self.answers.pop(0)


def test_a_capture_has_the_answers_of_eager_calls_by_sizes() -> None:
    masks, asked = ModelMasks(nn.Linear(1, 1)), Asked(True, False, "asked again")
    assert [masks.ask(CAUSAL, asked, None, size) for size in (4, 8)] == [True, False]
    with capturing():
        assert [masks.ask(CAUSAL, asked, None, size) for size in (4, 8)] == [True, False]
        assert masks.ask(CAUSAL, asked, None, 16) == "asked again"
    asked.answers.append("and again")
    with capturing():
        assert masks.ask(CAUSAL, asked, None, 16) == "and again", "no eager call has answered"
    assert asked.count == 4


def test_an_answer_is_that_of_one_function_and_of_what_it_was_given() -> None:
    masks, cases = ModelMasks(nn.Linear(1, 1)), [(CAUSAL, None), (PACKED, None), (CAUSAL, GIVEN), (PACKED, GIVEN)]
    masks._own = [True]
    answers = [True, None, False, True]
    for (name, tensor), answer in zip(cases, answers, strict=True):
        masks.ask(name, Asked(answer), tensor, 4)
    with capturing():
        assert [masks.ask(name, Asked(), tensor, 4) for name, tensor in cases] == answers


@pytest.mark.parametrize("answers", [(True, False), (torch.ones(1),)], ids=["two answers", "a packed batch"])
def test_a_capture_asks_where_eager_calls_had_no_one_answer(answers: tuple[Any, ...]) -> None:
    masks, asked = ModelMasks(nn.Linear(1, 1)), Asked(*answers, "asked again")
    for _ in answers:
        masks.ask(PACKED, asked, None)
    with capturing():
        assert masks.ask(PACKED, asked, None) == "asked again"


@pytest.mark.parametrize("answer", [None, True])
def test_masks_that_some_batches_do_not_need_are_refused(answer: Any) -> None:
    masks = ModelMasks(nn.Linear(1, 1))
    assert masks.ask(CAUSAL, Asked(False), GIVEN) is False
    with capturing():
        assert masks.ask(CAUSAL, Asked(), GIVEN) is False, "the graph makes the mask"
        assert masks.ask(PACKED, Asked("asked"), GIVEN) == "asked"
    assert masks.ask(CAUSAL, Asked(answer), GIVEN) is answer
    assert masks.ask(CAUSAL, Asked(False), GIVEN) is False
    for name in (CAUSAL, PACKED):
        with capturing(), pytest.raises(RuntimeError, match="has found some that need no mask"):
            masks.ask(name, Asked(), GIVEN)


def test_an_inner_model_is_asked_for_and_not_the_one_around_it() -> None:
    masks = ModelMasks(nn.Linear(1, 1))
    masks._own = [False, True]
    assert masks.ask(CAUSAL, Asked(True), GIVEN, 4) is True
    with capturing():
        assert masks.ask(CAUSAL, Asked(), GIVEN, 4) is True
    masks._own = [True, False]
    assert masks.ask(CAUSAL, Asked(True), GIVEN, 8) is True
    with capturing(), pytest.raises(RuntimeError, match="has found some that need no mask"):
        masks.ask(CAUSAL, Asked(), GIVEN, 8)


class Model(nn.Module):
    def forward(self, x: Any, position_ids: Tensor | None = None, attention_mask: Any = None, **more: Any) -> Any:
        if x is None:
            raise KeyboardInterrupt
        if x.numel() == 0:
            raise ValueError("no tokens")
        self.seen = functions.find_packed_sequence_indices(position_ids)
        return x


functions = types.SimpleNamespace(**dict.fromkeys(model_masks._ASKED, lambda tensor: "asked"))


def test_a_model_that_is_given_positions_makes_none_of_its_own() -> None:
    model = Model()
    masks = ModelMasks(model)
    masks._models, masks._module = [model], functions
    before = functions.find_packed_sequence_indices
    x = torch.ones(2)
    given: list[tuple[Any, ...]] = [(x,), (x, None, None), (x, GIVEN), (x, None, GIVEN)]
    own = []
    with masks.answered():
        for args in given:
            hook = model.register_forward_pre_hook(lambda *_: own.append(masks._own[-1]))
            model(*args)
            hook.remove()
        for name in model_masks._GIVEN:
            hook = model.register_forward_pre_hook(lambda *_: own.append(masks._own[-1]))
            model(x, **{name: GIVEN})
            hook.remove()
        assert functions.find_packed_sequence_indices(tensor=GIVEN) == "asked", "by keyword"
        with pytest.raises(ValueError, match="no tokens"):
            model(torch.ones(0))
        assert masks._own == [], "a forward that has raised is over"
        with pytest.raises(KeyboardInterrupt), masks.answered():
            model(None)
        assert masks._own == [], "and so is one that was interrupted, for which torch calls no hook"
        with masks.answered():
            pass
        assert functions.find_packed_sequence_indices is not before, "until the last has left"
    assert own == [True, True, False, False, False, False, False, False]
    assert functions.find_packed_sequence_indices is before


def test_models_inside_a_model_are_asked_and_compiled_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile would trace what notes their arguments."""
    own = type("Own", (Model,), {})
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(PreTrainedModel=own))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", functions)  # type: ignore[arg-type]
    other, plain, compiled = Model(), own(), own()
    compiled.compile()
    masks = ModelMasks(nn.ModuleList([other, plain, compiled]))
    with masks.answered():
        assert [len(model._forward_pre_hooks) for model in (other, plain, compiled)] == [0, 1, 0]
    assert [len(model._forward_pre_hooks) for model in (other, plain, compiled)] == [0, 0, 0]
    monkeypatch.delattr(functions, "find_packed_sequence_indices")
    masks = ModelMasks(plain)
    with masks.answered():
        assert not plain._forward_pre_hooks, "another version of transformers"
