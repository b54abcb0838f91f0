"""``main_grad`` of parameters whose accumulators have memory for some time only: see ``buckets/released.py``."""

from typing import Any

from torch import Tensor

from ..contract.record import GradRecord
from ..torch_internals import let_foreach_take
from .shown_grad import ShownGrad, without_memory

__all__ = ["MainGradView"]


class MainGradView(ShownGrad):
    """What a program finds in ``param.main_grad``. Functions of torch read and write the accumulator where it holds a
    gradient of this iteration that is not reduced yet, and raise ``RuntimeError`` at other times."""

    record: GradRecord

    @staticmethod
    def __torch_function__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = ShownGrad.__torch_function__(func, types, args, kwargs)
        # ``param.main_grad += grad`` stores in ``param.main_grad`` what is returned here.
        return args[0] if args and isinstance(args[0], MainGradView) and found is args[0].record.view else found

    @staticmethod
    def of_record(param: Tensor, record: GradRecord) -> "MainGradView":
        """The view of ``param``'s accumulator."""
        view = without_memory(param, param.shape, record.view.dtype, record.name, None, None, cls=MainGradView)
        view.record = record
        return view

    def read(self) -> Tensor:
        """The accumulator."""
        if not self.record.written or self.record.closed is not None:
            raise RuntimeError(
                f"main_grad of parameter '{self.of}' has no memory now, since release_grads=True: it is there from the "
                f"parameter's first gradient of an iteration to its bucket's reduction. After the last backward read "
                f"param.grad; to add a gradient by hand call maingrad.ddp.add_grad(param, grad); a module that writes "
                f"main_grad itself takes param.get_main_grad(); or leave the option off"
            )
        return self.record.view

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{func} read param.main_grad past torch's Python functions, and with release_grads=True that tensor has "
            f"no memory of its own: give it param.get_main_grad() in a backward, or param.grad after the last"
        )


let_foreach_take(MainGradView)
