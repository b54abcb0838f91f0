"""``weak_method``: a callback that keeps no object alive."""

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

__all__ = ["weak_method"]


def weak_method(method: Callable[..., Any], *objects: object) -> Callable[..., Any]:
    """A function that calls ``method(*objects, ...)`` and refers weakly to the method's object and to ``objects``.

    The function does nothing, and returns None, once one of them is gone. Hooks, records and buckets keep such
    functions: a strong reference would keep the wrapper alive.

    method   a bound method, or a function of ``objects``
    objects  its first arguments
    """
    if isinstance(method, MethodType):
        objects = (method.__self__, *objects)
        method = method.__func__
    references = tuple(map(weakref.ref, objects))

    def call(*args: object, **kwargs: object) -> Any:
        alive = []
        for reference in references:
            each = reference()
            if each is None:
                return None
            alive.append(each)
        return method(*alive, *args, **kwargs)

    return call
