"""What a rank is told where ranks may not go on as they do."""

from collections.abc import Callable

__all__ = ["refusal"]


def refusal(run: Callable[[], None]) -> str:
    """The message of the ``RuntimeError`` that ``run`` raises, or that it has raised none."""
    try:
        run()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"
