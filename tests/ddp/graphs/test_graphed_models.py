"""Models of Hugging Face under ``maingrad.graphed`` on a CPU; twenty on a GPU: ``test_graphed_models_gpu.py``."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may download

import pytest
import torch

pytest.importorskip("transformers")
from graphed_models import train

CPU = torch.device("cpu")


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["Llama", "Gemma3Text", "T5", "Bart", "Mamba"])
@pytest.mark.sampled(5)
def test_is_captured(name: str) -> None:
    """transformers asks on the host whether sequences are packed: a capture has the answer of eager calls."""
    eager, graphed = (train(name, CPU, graphed=graphed) for graphed in (False, True))
    assert (graphed.num_graphs, graphed.why_eager) == (1, None)
    assert all(map(torch.equal, [*eager.losses, *eager.norms], [*graphed.losses, *graphed.norms]))


@pytest.mark.parametrize(("name", "why"), [("Mixtral", "rows of each expert")])
def test_is_named(name: str, why: str) -> None:
    eager, graphed = (train(name, CPU, graphed=graphed) for graphed in (False, True))
    assert graphed.num_graphs == 0
    assert why in (graphed.why_eager or "")
    assert "graphed_models.py" in (graphed.why_eager or "")
    assert all(map(torch.equal, [*eager.losses, *eager.norms], [*graphed.losses, *graphed.norms]))
