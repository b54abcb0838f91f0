"""Linear layers that are cut over tensor-parallel ranks, as Megatron-core's and Transformer Engine's.

======  ========  =============================  =====================  ==============================
mode    weight    input                          output                 gradient of the input
======  ========  =============================  =====================  ==============================
column  [N/p, K]  whole                          its columns [T, N/p]   all-reduced
column  "         gathered from [T/p, K] (*)     its columns [T, N/p]   reduce-scattered to [T/p, K]
row     [N, K/p]  its columns [T, K/p]           all-reduced            its columns
row     "         its columns [T, K/p]           reduce-scattered (*)   its columns, of gathered dy
======  ========  =============================  =====================  ==============================

(*) with sequence parallelism. A row-parallel bias is added once, after the sum.

A fused column-parallel product overlaps its collectives in backward with its own products:

    network    gather x ......   sum dx ........
    GEMMs      dx = dy W         dW (+)= dy^T x     wait for dx

So x is kept as the part of the sequence that it was. Compiled code keeps the gathered x: a compiler would merge the two
gathers, and compute the weight gradient first, if it did not read ``dx``.

Products of one input share one sum where the first hands the input on to the others (``shares``): what they add to the
input's gradient comes to the first, which adds it to its own dx before the sum starts.

Any other execution (under a recipe, or where autograd delivers) runs between ``to_columns`` and ``from_rows``, which
overlap nothing. Legend: T rows, K input features, N output features, p ranks.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...ddp.torch_internals import current_backward, watch_prehooks
from ..wgrad_queue import Filling, WgradQueue, fill_wait, filling
from .compiled_linear import InGraph
from .hugging_face import MadeClass
from .linear import LinearModule, ProductUse, brought, wanted_and_places, weight_grads
from .products import Ranks, cast, dtype_of_products, input_grad, linear_product, rows_of

__all__ = [
    "ParallelMode",
    "TensorParallelModule",
    "exchange_over_ranks",
    "from_rows",
    "multiply_over_ranks",
    "ranks_of",
    "tensor_parallel_class",
    "to_columns",
]

ParallelMode: TypeAlias = Literal["column", "row"]


def ranks_of(group: dist.ProcessGroup, sequence_dim: int | None = None) -> Ranks:
    """The ``Ranks`` of a tensor-parallel group; ``sequence_dim``, not negative, is the one of sequence parallelism."""
    return Ranks(group.group_name, group.size(), group.rank(), sequence_dim)


def multiply_over_ranks(
    module: LinearModule,
    mode: ParallelMode,
    ranks: Ranks,
    input: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    queue: WgradQueue | None,
    product: int = 0,
    only_save: bool = False,
    *,
    shares: bool = False,
) -> Any:
    """``x W^T + b`` of local tensors, with the collectives of ``mode``. Other arguments: ``LinearModule.multiply``.

    Returns the local output; its gradient must be local too, and is not to be summed over the ranks. With ``shares``
    (column-parallel, without sequence parallelism) a pair of it and of the input for other products.
    """
    waiting = filling(queue)
    execution = module.execution(input, weights, queue, product, only_save)
    if mode == "row":
        output = execution.multiply(input, weights, None)
        if only_save and not output.numel():
            return output
        output = from_rows(output, ranks, waiting)
        return output if bias is None else output + cast(bias, output.dtype)
    if type(execution) is ProductUse:
        dtype = dtype_of_products(input)
        if not execution.save_original_input:
            input = cast(input, dtype)
        return _Columns.apply(input, execution, dtype, ranks, waiting, shares, *weights, bias)
    if isinstance(execution, InGraph) and execution.recipe < 0:
        return execution._replace(ranks=ranks, shares=shares).multiply(input, weights, bias)
    input = to_columns(input, ranks, waiting)
    output = execution.multiply(input, weights, bias)
    return (output, input) if shares else output


def to_columns(input: Tensor, ranks: Ranks, waiting: Filling = None) -> Tensor:
    """The input of a column-parallel product, for an execution that does not exchange it itself."""
    whole: Tensor = _Exchange.apply(input, ranks, waiting, False)
    return whole


def from_rows(output: Tensor, ranks: Ranks, waiting: Filling = None) -> Tensor:
    """The sum over the ranks of what a row-parallel product has computed."""
    summed: Tensor = _Exchange.apply(output, ranks, waiting, True)
    return summed


class _Columns(torch.autograd.Function):
    """A fused or delayed column-parallel product: ``_FusedLinear`` with the collectives of the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        use: ProductUse,
        dtype: torch.dtype,
        ranks: Ranks,
        waiting: Filling,
        shares: bool,
        *weights_and_bias: Any,
    ) -> Any:
        *weights, bias = weights_and_bias
        x = cast(input, dtype)
        needs_dw = True in ctx.needs_input_grad[6:-1]
        ctx.save_for_backward(input if needs_dw else None, *(weights if ctx.needs_input_grad[0] else ()))
        ctx.use, ctx.ranks, ctx.waiting = use, ranks, waiting
        ctx.outer_backward = current_backward()
        ctx.input_dtype, ctx.weight_dtype = input.dtype, weights[0].dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        y = linear_product(ranks.finish_gather(ranks.start_gather(x)), weights, bias, transposed=use.transposed)
        return (y, input.view_as(input)) if shares else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, *of_others = grads
        x, *weights = ctx.saved_tensors
        use: ProductUse = ctx.use
        ranks: Ranks = ctx.ranks
        _refuse_second_derivatives(use.owner)
        needs_dx, _, _, _, _, _, *needs_dw, needs_db = ctx.needs_input_grad
        wanted, places = wanted_and_places(ctx, needs_dw)
        gathering = None if x is None else ranks.start_gather(cast(x, dy.dtype))
        dx = None
        if needs_dx:
            dx = cast(input_grad(dy, weights, transposed=use.transposed), ctx.input_dtype)
            for each in of_others:
                dx += each
            dx = ranks.start_sum(dx, in_place=True)
            fill_wait(ctx.waiting)
        dy_rows = rows_of(dy)
        db = dy_rows.sum(0, dtype=ctx.bias_dtype) if needs_db else None
        results: list[Tensor | None] = [None] * len(needs_dw)
        if gathering is not None:
            x_rows = rows_of(ranks.finish_gather(gathering))
            results = weight_grads(ctx, wanted, places, (x_rows, dy_rows) if use.transposed else (dy_rows, x_rows))
        if dx is not None:
            dx = ranks.finish_sum(dx)
        return (dx, None, None, None, None, None, *results, db)


watch_prehooks(_Columns)


class _Exchange(torch.autograd.Function):
    """The ranks' sum, and in backward the gather of its gradient; or the gather, and in backward the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, waiting: Filling, sums: bool) -> Tensor:
        ctx.arguments = ranks, waiting, not sums
        found = _exchanged(x, ranks, None, sums)
        return x.view_as(x) if found is x else found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives("a tensor-parallel layer")
        return _exchanged(grads[0], *ctx.arguments), None, None, None


def _exchanged(x: Tensor, ranks: Ranks, waiting: Filling, sums: bool) -> Tensor:
    if sums:
        started = ranks.start_sum(x)
        fill_wait(waiting)
        return ranks.finish_sum(started)
    started = ranks.start_gather(x)
    if ranks.sequence_dim is not None:
        fill_wait(waiting)
    return ranks.finish_gather(started)


def _refuse_second_derivatives(owner: str) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{owner}: second derivatives (create_graph=True) of products over tensor-parallel ranks are not defined"
        )


class TensorParallelModule(MadeClass, LinearModule):
    """Mixin of modules whose parameters are slices. ``tensor_parallel_class`` combines it with a class of modules."""

    ranks: Ranks
    modes: tuple[ParallelMode, ...]
    """The mode of each product."""
    cuts: Mapping[str, tuple[int, int]]
    """Parameter -> the dim that is cut, and the number of its blocks each of which is cut. Others are whole."""
    tensor_parallel_members: tuple[int, ...]
    """Global ranks of the group: wrappers compare them with theirs."""

    def multiply(
        self,
        input: Tensor,
        weights: Sequence[Tensor],
        bias: Tensor | None,
        queue: WgradQueue | None,
        product: int = 0,
        only_save: bool = False,
    ) -> Tensor:
        """See ``multiply_over_ranks``."""
        arguments = self.ranks, input, weights, bias, queue, product, only_save
        output: Tensor = multiply_over_ranks(self, self.modes[product], *arguments)
        return output

    def reset_parameters(self) -> None:
        """Initialise all parameters again. Ranks with one random state get slices of one whole."""
        own = self.__dict__["_parameters"]
        slices = {name: own[name] for name in self.cuts}
        for name, (dim, _) in self.cuts.items():
            shape = list(slices[name].shape)
            shape[dim] *= self.ranks.size
            own[name] = nn.Parameter(slices[name].new_empty(shape))
        super().reset_parameters()  # type: ignore[misc]  # of the class that this one is combined with
        for name, part in slices.items():
            whole, own[name] = own[name], part
            with torch.no_grad():
                part.copy_(self._slice_of(whole, name))
        self.set_marks()  # which ``to_empty`` has dropped

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.set_marks()  # which copies lack

    def set_marks(self) -> None:
        """Give the parameters Megatron's marks, by which wrappers and checkpoints know what they are of the whole.

        Not where somebody else has cut them (``exchange_over_ranks``), and says it by their ``ModelSlice``.
        """
        for name, param in self.__dict__["_parameters"].items():
            if name in self.cuts:
                param.tensor_model_parallel = True
                param.partition_dim, param.partition_stride = self.cuts[name]
            elif param is not None and self.cuts:  # norms and biases of row-parallel layers see a part of the sequence
                param.sequence_parallel = self.ranks.sequence_dim is not None

    def _slice_of(self, whole: Tensor, name: str) -> Tensor:
        (dim, blocks), (_, size, rank, _) = self.cuts[name], self.ranks
        return torch.cat([block.chunk(size, dim)[rank] for block in whole.chunk(blocks, dim)], dim)


@functools.cache
def tensor_parallel_class(base: type) -> type[nn.Module]:
    """The class of slices of ``base``, cached so that all modules of one ``base`` have the same type."""
    members = {"_unfused": base, "_made_by": (tensor_parallel_class, base), "__doc__": base.__doc__}
    return type(f"TensorParallel{base.__name__}", (TensorParallelModule, base), members)


def _cut_over_ranks(
    module: Any,
    modes: Sequence[ParallelMode],
    group: dist.ProcessGroup | None,
    size: int,
    sequence_parallel: bool,
    gated: bool = False,
) -> None:
    """Cut a module that has its initial values; without ``modes``, or for one rank, it stays whole.

    modes  of each product
    gated  the first weight is two blocks, each of which is cut

    Raises ``ValueError`` for arguments that contradict each other, and sizes that do not divide over the ranks.
    """
    name = type(module).__name__
    ranks = 1 if group is None else group.size()
    if size not in (1, ranks):
        raise ValueError(f"{name}: tp_size={size}, and tp_group, of the tensor-parallel ranks, has {ranks} rank(s)")
    if not modes and (ranks > 1 or sequence_parallel):
        raise ValueError(f"{name}: tp_group and sequence_parallel say how a layer is cut that has a parallel_mode")
    if not modes or group is None or ranks == 1:
        return
    if len(modes) == 1:  # the width inside of an MLP stays the whole layer's
        cut_side = "out_features" if modes[0] == "column" else "in_features"
        setattr(module, cut_side, getattr(module, cut_side) // ranks)
    cuts = {}
    for product, mode in enumerate(modes):
        for weight in module.weights_of(product):
            if mode == "row":
                cuts[weight] = 1, 1
            else:
                cuts[weight] = cuts[weight.replace("weight", "bias")] = 0, 2 if gated else 1
    own = module.__dict__["_parameters"]
    exchange_over_ranks(module, modes, ranks_of(group, 0 if sequence_parallel else None), group)
    module.cuts = {each: cut for each, cut in cuts.items() if own.get(each) is not None}
    for each, (dim, blocks) in module.cuts.items():
        whole = own[each].detach()
        if whole.shape[dim] % (blocks * ranks):
            raise ValueError(f"{name}: {each} {list(whole.shape)} does not divide over {ranks} ranks in dim {dim}")
        own[each] = nn.Parameter(module._slice_of(whole, each))
    module.set_marks()


def exchange_over_ranks(module: Any, modes: Sequence[ParallelMode], ranks: Ranks, group: dist.ProcessGroup) -> None:
    """Make a module whose parameters are slices exchange what its products need. The caller cuts them, and marks them.

    modes  of each product
    ranks  those of ``group``: ``ranks_of``
    """
    module.ranks, module.modes, module.cuts = ranks, tuple(modes), {}
    module.tensor_parallel_members = tuple(dist.get_process_group_ranks(group))
    cls: Any = type(module)
    module.__class__ = tensor_parallel_class(cls)


brought.multiply_over_ranks = multiply_over_ranks
brought.cut_over_ranks = _cut_over_ranks
