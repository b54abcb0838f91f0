"""What a compiler traces of maingrad's modules, run by Python: each branch of it costs milliseconds."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from maingrad.te_integration.dense import compiled_linear, embedding
from maingrad.te_integration.experts import grouped_linear, grouped_mlp, hugging_face_experts
from maingrad.te_integration.experts.dispatch import compiled_dispatch, dispatcher
from maingrad.te_integration.head import linear_cross_entropy

__all__ = ["traced"]

_BREAKING = (
    compiled_linear,
    embedding,
    linear_cross_entropy,
    grouped_linear,
    grouped_mlp,
    hugging_face_experts,
    dispatcher,
)


@contextlib.contextmanager
def traced() -> Iterator[list[str]]:
    """In this block modules run what a compiler would trace. Yields the names of what was run in graph breaks."""
    broken: list[str] = []

    def run_outside(forward: Any, *args: Any, **options: Any) -> Any:
        broken.append(forward.__qualname__)
        with patch("torch.compiler.is_compiling", lambda: False):
            return forward(*args, **options)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch("torch.compiler.is_compiling", lambda: True))
        stack.enter_context(patch.object(compiled_dispatch, "is_tracing_recomputed", lambda: False))
        for module in _BREAKING:
            stack.enter_context(patch.object(module, "run_outside_graph", run_outside))
        yield broken
