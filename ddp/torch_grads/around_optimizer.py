"""An optimizer around others: what it shares with them, what it passes on, and what it refuses."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["AroundOptimizer"]


class AroundOptimizer(torch.optim.Optimizer):
    """The base of ``DistributedOptimizer`` and ``ShardedOptimizer``, around optimizers of one or more classes.

    Their groups and state are its own too, so that schedulers and state dicts act on what their steps read.

    inners    one for each class; the first is that of groups without a class of their own
    places    for each inner optimizer, the indices of its groups among the groups of all
    state_of  makes the state of all from what their constructors have made
    """

    def __init__(
        self,
        inners: Sequence[torch.optim.Optimizer],
        places: Sequence[list[int]],
        state_of: Callable[[Mapping[Any, Any]], defaultdict[Any, Any]],
    ) -> None:
        groups = {
            index: group
            for inner, indices in zip(inners, places, strict=True)
            for index, group in zip(indices, inner.param_groups, strict=True)
        }
        super().__init__([groups[index] for index in sorted(groups)], {})  # which have their defaults
        self.defaults = inners[0].defaults
        self.state = state_of({master: state for inner in inners for master, state in inner.state.items()})
        self._inners, self._places = inners, places
        self._share()
        self._sealed = True

    @property
    def classes_of_groups(self) -> list[type[torch.optim.Optimizer]]:
        """The class of each group."""
        inners = {index: each for each, indices in zip(self._inners, self._places, strict=True) for index in indices}
        return [type(inners[index]) for index in sorted(inners)]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As after a load, whose groups may lack options: those of ``torch.optim.Muon`` have no ``split``."""
        super().__setstate__(state)
        self._share()
        for inner in self._inners:
            inner.__setstate__({"param_groups": inner.param_groups})

    def _share(self) -> None:
        for inner, indices in zip(self._inners, self._places, strict=True):
            inner.param_groups = [self.param_groups[index] for index in indices]
            inner.state = self.state

    def _adopt_assigned(self) -> None:
        """Share ``state`` and ``param_groups`` again, where a program has assigned others."""
        own = self._inners[0].state
        if self.state is not own:
            given, self.state = self.state, own
            self.state.replace(given)  # type: ignore[attr-defined]
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: only the constructor makes groups."""
        if vars(self).get("_sealed"):
            raise RuntimeError(
                f"{type(self).__name__} updates every parameter of its model and takes no further group: give the "
                f"constructor param_groups"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} is tied to its model's buckets and is not copied or pickled; use state_dict()"
        )

    _step_supports_amp_scaling = True
    """A scaler leaves unscaling and skipping to ``step``: it sets ``grad_scale`` and ``found_inf``."""

    def __getattr__(self, name: str) -> Any:
        """Methods of the classes that have them: ``train()`` and ``eval()`` of schedule-free optimizers."""
        inners = () if name.startswith("__") else self.__dict__.get("_inners", ())
        having = [getattr(inner, name) for inner in inners if callable(getattr(type(inner), name, None))]
        if not having:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

        def call_each(*args: Any, **kwargs: Any) -> Any:
            first, *_ = [method(*args, **kwargs) for method in having]
            return first

        return call_each if len(having) > 1 else having[0]
