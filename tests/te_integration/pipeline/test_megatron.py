"""``finalize_model_grads`` around Megatron-core's function, of which a stand-in notes what it is told.

tests/te_integration/foreign/test_megatron_finalize.py has the real one, where it is installed.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from maingrad.launch import simulate
from maingrad.te_integration.pipeline import finalize_model_grads

ASKED = {
    "pp": ("get_pipeline_model_parallel_group", {}),
    "dp_cp": ("get_data_parallel_group", {"with_context_parallel": True}),
    "tp_dp_cp": ("get_tensor_and_data_parallel_group", {"with_context_parallel": True}),
}


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron-core's module; ``told`` has the arguments of each call, by rank."""
    path, name = "", ""
    for part in ("megatron", "core", "distributed", "finalize_model_grads"):
        path = f"{path}.{part}" if path else part
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    module: Any = sys.modules[path]
    module.told = {}
    module.finalize_model_grads = lambda *given: module.told.update({dist.get_rank(): given})
    module.parallel_state = SimpleNamespace()
    for name, (getter, options) in ASKED.items():

        def get(name: str = name, options: Any = options, **given: Any) -> Any:
            assert given == options
            return dist.group.WORLD if name == "pp" else SimpleNamespace(size=lambda: 2, name=name)

        setattr(module.parallel_state, getter, get)
    return module


class Chunk:
    def __init__(self) -> None:
        self.told: list[tuple[Any, bool]] = []

    def finish_grad_sync(self, num_tokens: Any, *, force_all_reduce: bool) -> None:
        self.told.append((num_tokens, force_all_reduce))


@pytest.mark.parametrize("force", [True, None])
@pytest.mark.parametrize("own_groups", [False, True])
def test_the_last_stages_tokens_and_the_groups_that_have_nothing_left_to_sum(
    theirs: Any, own_groups: bool, force: bool | None
) -> None:
    def on_a_rank() -> list[Any]:
        collection = None
        if own_groups:
            collection = SimpleNamespace(pp=dist.group.WORLD, tp=SimpleNamespace(size=lambda: 4), expt_dp="of experts")
        chunks = [Chunk(), Chunk()]
        finalize_model_grads(chunks, torch.tensor(7 * dist.get_rank()), collection, force)
        model, tokens, groups, forced = theirs.told[dist.get_rank()]
        assert model == chunks and tokens is None and forced is force
        assert groups.tp.size() == groups.embd.size() == groups.pos_embd.size() == 1
        assert groups.pp is dist.group.WORLD
        if own_groups:
            assert groups.expt_dp == "of experts"
        else:
            assert (groups.dp_cp.name, groups.tp_dp_cp.name) == ("dp_cp", "tp_dp_cp")
        return [told for chunk in chunks for told in chunk.told]

    for told in simulate(on_a_rank, 2):
        assert told == [(torch.tensor(7), force is True)] * 2


def test_without_tokens_nothing_is_broadcast(theirs: Any) -> None:
    def on_a_rank() -> list[Any]:
        chunk = Chunk()
        finalize_model_grads([chunk])
        return chunk.told

    assert simulate(on_a_rank, 1) == [[(None, False)]]
