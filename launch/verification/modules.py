"""What modules do in a forward: which are running, what they put out, who reads which parameter."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["Connected", "Output", "OutputTrace", "ParamReads", "Read", "RunningModules", "tensors_in"]


class RunningModules:
    """Context in which the modules of a model whose forward runs are known by name, the innermost last.

    before_change  called before a module's forward begins and after it has ended, while ``innermost`` is still the
                   module that ran until then
    """

    def __init__(self, model: nn.Module, before_change: Callable[[], None] = lambda: None) -> None:
        self._model, self._before_change = model, before_change
        self.stack: list[str] = []
        self._handles: list[Any] = []

    @property
    def innermost(self) -> str:
        """Name of the innermost running module; '' for the outermost, and outside of every forward."""
        return self.stack[-1] if self.stack else ""

    def __enter__(self) -> "RunningModules":
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._entering(name)))
            self._handles.append(module.register_forward_hook(self._leaving, always_call=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.stack.clear()

    def _entering(self, name: str) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._before_change()
            self.stack.append(name)

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        self._before_change()
        if self.stack:
            self.stack.pop()


class Output(NamedTuple):
    """What one call of a module was given and has returned."""

    module: str
    inputs: list[Tensor]
    outputs: list[Tensor]


class OutputTrace:
    """Context that records every call of every module in the order in which calls end: inner modules come first."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.calls: list[Output] = []
        self._handles: list[Any] = []

    def __enter__(self) -> "OutputTrace":
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_hook(self._recording(name), with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _recording(self, name: str) -> Callable[[nn.Module, Any, Any, Any], None]:
        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs = [each.detach().clone() for each in tensors_in((args, kwargs))]
            self.calls.append(Output(name, inputs, [each.detach().clone() for each in tensors_in(output)]))

        return record


class Read(NamedTuple):
    """One use of a parameter by a torch function."""

    modules: tuple[str, ...]
    """The modules that ran, the innermost last."""
    function: str
    with_grad: bool
    """Grad mode was on."""


_READING_PROPERTIES = {"T", "mT", "H", "mH", "data"}


class ParamReads(TorchFunctionMode):
    """Mode that records which torch functions get each parameter, and which modules run at that time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._running = RunningModules(model)
        self.reads: dict[str, list[Read]] = {}

    def __enter__(self) -> "ParamReads":
        self._running.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._running.__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = _name_of(func)
        if name is not None:
            for tensor in tensors_in((args, kwargs)):
                if id(tensor) in self._names:
                    read = Read(tuple(self._running.stack), name, torch.is_grad_enabled())
                    self.reads.setdefault(self._names[id(tensor)], []).append(read)
        return func(*args, **(kwargs or {}))


class Connected(TorchFunctionMode):
    """Mode in which no function runs without a graph; with ``attached`` also ``detach`` and ``.data`` detach nothing.

    What has a gradient in this mode alone was cut off by the program.
    """

    def __init__(self, *, attached: bool) -> None:
        super().__init__()
        self._attached = attached

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "_set_grad_enabled":
            return func(*args, **(kwargs or {}))
        cuts = name in ("detach", "detach_") or (name == "__get__" and _property_of(func) == "data")
        if self._attached and cuts and not isinstance(args[0], nn.Parameter):
            return args[0]
        with torch.enable_grad():
            return func(*args, **(kwargs or {}))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples, lists, mappings, and objects like the outputs of Hugging Face's models."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)


def _property_of(func: Any) -> str:
    return getattr(getattr(func, "__self__", None), "__name__", "")


def _name_of(func: Any) -> str | None:
    """The function's name; None if it reads no values, as ``shape`` and ``requires_grad``."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return _property_of(func) if _property_of(func) in _READING_PROPERTIES else None
    return None if name in ("dim", "size", "numel", "stride", "register_hook", "is_floating_point") else name
