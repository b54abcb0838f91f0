"""``Linear``, and the way of a product: from a module's forward to what its backward returns to autograd.

The steps are those of ``docs/by_hand.py``, each marked where it happens:

    forward     2.1  the weights, and a queue if their gradients are delayed       SplitLinear.linear
                2.2  how this product runs, chosen once                            LinearModule.execution
                2.3  the product; what backward needs is saved                     _FusedLinear.forward
    backward    3.1  who asks for each weight's gradient?                          demand
                3.2  where does it go? errors are raised before any product        WgradTarget.resolve
                3.3  the gradients of input and bias                               _FusedLinear.backward
                3.4  the product into main_grad                                    WgradTarget.deliver, DenseWgrad
                3.5  the flag on the parameter; autograd gets None                 hand_over

``demand``, ``WgradTarget`` and ``hand_over`` are in ``ddp/contract/main_grad.py``. A plain layer knows no recipes, no
compiled code and no tensor-parallel ranks. Other files bring them, and ``te_integration/__init__.py`` imports those.

Legend: T rows (all leading dims of the input together), K ``in_features``, N ``out_features``.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ...ddp.contract import target as targets
from ...ddp.contract.delay_blocks import check_delayable, queue_of_block
from ...ddp.contract.main_grad import Demand, Place, WgradProduct, is_fusable
from ...ddp.contract.torch_wrappers import record_without_grad, refuse_delay_in_recompute
from ...ddp.torch_internals import NO_BACKWARD, current_backward, watch_prehooks
from ..te_arguments import refuse_unsupported
from ..wgrad_queue import WgradQueue
from .linear_options import InitMethod, LinearOptions, ParametersSplit, one_dtype, reset_linear, split_sizes
from .products import DenseWgrad, Ranks, cast, dtype_of_products, in_transform, input_grad, linear_product, rows_of

__all__ = [
    "PLAIN",
    "Execution",
    "Linear",
    "LinearModule",
    "ProductUse",
    "SplitLinear",
    "brought",
    "wanted_and_places",
    "weight_grads",
]


class Execution(Protocol):
    """How one product runs: ``PLAIN``, a ``ProductUse``, or what other files bring.

    Another way to run products is a class with this method in a file of its own, an attribute of ``_Brought`` that the
    file sets, and a branch of ``LinearModule.execution``. Traced code chooses in ``compiled_linear.py``. Experts have
    no such object: ``multiply_rows`` in ``experts/grouped_module.py`` chooses for them.
    """

    def multiply(self, input: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """``x W^T + b``: x [..., K], weights [N_i, K] each (slices of W along N), b [N] -> [..., N]."""


class _Plain(NamedTuple):
    """Autograd computes everything."""

    transposed: bool

    def multiply(self, input: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """See ``Execution``; a ``transposed`` weight is [K, N]."""
        weight = weights[0] if len(weights) == 1 else torch.cat(tuple(weights))
        return F.linear(input, weight.t() if self.transposed else weight, bias)


PLAIN = {False: _Plain(False), True: _Plain(True)}  # torch 2.11 traces no tuple indexed by a bool
"""By a module's ``transposed``."""


class _Brought:
    """What other files bring for all modules: they set each attribute when they are imported."""

    recipe_of_forward: Callable[["LinearModule", Tensor], Any]
    """The recipe of a forward of this input; None: there is none. Of ``quantized_linear.py``."""
    execution_under_recipe: Callable[..., Execution]
    """``LinearModule.execution`` under a recipe, which is the first argument. Of ``quantized_linear.py``."""
    execution_in_trace: Callable[..., Execution]
    """``LinearModule.execution`` in code that a compiler traces. Of ``compiled_linear.py``."""
    name_for_graphs: Callable[["LinearModule"], None]
    """Makes the object by which compiled code names a module. Of ``compiled_wgrad.py``."""
    multiply_over_ranks: Callable[..., Any]
    """``LinearModule.multiply`` with collectives around it. Of ``tensor_parallel.py``."""
    cut_over_ranks: Callable[..., None]
    """Leaves a new module its slices of the parameters. Of ``tensor_parallel.py``."""


brought = _Brought()


class LinearModule(LinearOptions):
    """Mixin of modules with one or more products ``x W^T``."""

    wgrad_product: type[WgradProduct] = DenseWgrad
    """Computes the weight gradients of a product."""

    def make_handle(self) -> None:
        """Make the object by which compiled code names this module. Call it for each new or converted module."""
        brought.name_for_graphs(self)

    def queue_now(self) -> WgradQueue | None:
        """The queue for weight gradients of the current forward: the module's own, else that of ``delayed_wgrad``."""
        queue: WgradQueue | None = queue_of_block() if self.wgrad_queue is None else self.wgrad_queue
        return queue

    def multiply(
        self,
        input: Tensor,
        weights: Sequence[Tensor],
        bias: Tensor | None,
        queue: WgradQueue | None,
        product: int = 0,
        only_save: bool = False,
    ) -> Tensor:
        """``x W^T + b``: x [..., K], weights [N_i, K] each (slices of W along N), b [N] -> [..., N].

        queue      weight gradients are delayed into it; None: into none
        product    index of the product in the module
        only_save  see ``ProductUse``
        """
        return self.execution(input, weights, queue, product, only_save).multiply(input, weights, bias)

    def execution(
        self,
        input: Tensor,
        weights: Sequence[Tensor],
        queue: WgradQueue | None,
        product: int = 0,
        only_save: bool = False,
    ) -> Execution:
        """How a product runs in this forward. Arguments are those of ``multiply``."""
        # Step 2.2: in traced code, quantised, by plain autograd, or fused.
        if torch.compiler.is_compiling():
            return brought.execution_in_trace(self, input, weights, queue, product, only_save)
        recipe = brought.recipe_of_forward(self, input)
        if recipe is not None:
            return brought.execution_under_recipe(recipe, self, input, weights, queue, product, only_save)
        fused, queue = self.delivery(weights, queue)
        if not fused and queue is None:
            return PLAIN[self.transposed]
        self.check_input(input, weights[0])
        return self.use(product, weights, fused, queue, only_save)

    def delivery(self, weights: Sequence[Tensor], queue: WgradQueue | None) -> tuple[bool, WgradQueue | None]:
        """Return whether this forward's weight gradients go into ``main_grad``, and the queue that they wait in.

        (False, None): autograd delivers them, because the options say so, no weight needs a gradient, or a transform, a
        hook or a tensor subclass must see the gradient.
        """
        fused = self.fuse_wgrad_accumulation
        if not fused and queue is None:
            return False, None
        if not torch.is_grad_enabled():
            if queue is not None:
                record_without_grad(self, weights)
            return False, None
        needing = [weight for weight in weights if weight.requires_grad]
        if not needing or in_transform() or not all(map(is_fusable, needing)):
            return False, None
        if queue is not None:
            if queue is not self.wgrad_queue:
                check_delayable(needing, self.describe())
            refuse_delay_in_recompute(self, self.describe)
        return fused, queue

    def use(
        self,
        product: int,
        weights: Sequence[Tensor],
        fused: bool,
        queue: WgradQueue | None,
        only_save: bool = False,
        computed_by: type[WgradProduct] | None = None,
    ) -> "ProductUse":
        """The object of the last forward if nothing has changed.

        A new one in each forward would cost a tiny layer (64 x 64, 16 rows) 3 % of its forward and backward.
        """
        uses: dict[Any, ProductUse | None] = self.__dict__.setdefault("_uses", {})
        key = product, fused, only_save, computed_by
        use = uses.get(key)
        if use is None or not use.serves(weights, queue):
            use = uses[key] = ProductUse(
                weights,
                self.weights_of(product),
                (computed_by or self.wgrad_product)(weights),
                self.describe(),
                fused=fused,
                queue=queue,
                transposed=self.transposed,
                save_original_input=self.save_original_input,
                only_save=only_save,
            )
        return use


class SplitLinear(LinearModule):
    """Mixin of modules with one product. The parameters are ``weight`` and ``bias``, or slices of both along N."""

    bias_names: tuple[str, ...] = ("bias",)
    weight: Tensor
    bias: Any  # Tensor | None, for which nn.Linear says Tensor

    def split_parameters(self, parameters_split: ParametersSplit | None) -> None:
        """Replace the initialised weight and bias by slices, if ``parameters_split`` is not None."""
        if parameters_split is None:
            return
        sizes = split_sizes(parameters_split, self.weight.shape[0])
        self.weight_names = tuple(f"{name}_weight" for name in sizes)
        self.bias_names = tuple(f"{name}_bias" for name in sizes)
        for whole, names in ((self.weight, self.weight_names), (self.bias, self.bias_names)):
            slices = [None] * len(sizes) if whole is None else whole.detach().split(list(sizes.values()))
            for name, part in zip(names, slices, strict=True):
                parameter = None if part is None else nn.Parameter(part.clone())
                self.register_parameter(name, parameter)  # type: ignore[attr-defined]  # nn.Module's
        del self.weight, self.bias

    def reset_parameters(self) -> None:
        """Initialise the weights and biases again, for example after ``to_empty``."""
        for weight_name, bias_name in zip(self.weight_names, self.bias_names, strict=True):
            reset_linear(getattr(self, weight_name), getattr(self, bias_name), self.init_method)

    def linear(self, input: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [..., K] -> ``x W^T + b`` [..., N], and b. With ``return_bias``, b is not added."""
        # Step 2.1: the weights, the bias, and where weight gradients are delayed to.
        if self.weight_names == ("weight",):
            weights: tuple[Tensor, ...] = (self.weight,)
            bias: Tensor | None = self.bias
        else:
            weights = tuple(getattr(self, name) for name in self.weight_names)
            parts = [getattr(self, name) for name in self.bias_names]
            bias = None if parts[0] is None else torch.cat(parts)
        queue = self.queue_now()
        return self.multiply(input, weights, None if self.return_bias else bias, queue), bias

    def extra_repr(self) -> str:
        """The sizes, and what happens to the weight gradient."""
        return f"{super().extra_repr()}, bias={getattr(self, self.bias_names[0]) is not None}"


class Linear(SplitLinear, nn.Linear):
    """``y = x W^T + b``, with ``main_grad += dy^T x`` as one GEMM.

    =========  ============  =====================================
    x          [..., K]      input
    weight     [N, K]        ``nn.Linear``'s own
    bias       [N] or None   ``nn.Linear``'s own
    y          [..., N]      output
    =========  ============  =====================================

    Backward: ``dx = dy W``, ``dW = dy^T x`` written to ``weight.main_grad``, ``db = sum over rows of dy``.

    fuse_wgrad_accumulation  True: write the weight gradient to ``weight.main_grad``, which a provider (maingrad's or
                             Megatron-core's ``DistributedDataParallel``) attaches before the first backward; backward
                             raises ``RuntimeError`` without it. False: autograd delivers the weight gradient
    delay_wgrad_compute      backward computes ``dx`` and ``db`` only. ``backward_dw()`` computes ``dW`` of the oldest
                             pending microbatch and adds it to ``main_grad``, or to ``.grad`` if unfused
    params_dtype             Transformer Engine's name of ``dtype``
    init_method              initialises the weight instead of ``nn.Linear``; the bias is then 0
    return_bias              return ``(x W^T, bias)``; the caller adds the bias
    parameters_split         split the weight along N into several parameters, in this order: names with equal sizes, or
                             name -> size. ``"query_"`` gives ``query_weight`` and ``query_bias``. Each slice has its
                             own ``main_grad``; there is no ``weight``
    save_original_input      under autocast, save the input itself for backward instead of its cast copy
    parallel_mode            "column" or "row": each rank of ``tp_group`` has a slice of the weight, of N or of K. The
                             sizes given are the whole layer's, ``out_features`` or ``in_features`` then the slice's;
                             ranks with one random state cut their initial values from the same whole. A row-parallel
                             bias is whole. ``tensor_parallel.py`` says what is exchanged, and when
    tp_group, tp_size        the tensor-parallel ranks, and their number
    sequence_parallel        outside of pairs of column- and row-parallel layers each rank has a part of x's first dim
    name                     the layer's name in error messages

    Parameter names and state dict are those of ``nn.Linear`` and Transformer Engine. Other arguments of Transformer
    Engine are accepted if their value has no effect, and refused by name otherwise. The fused backward is Megatron-LM's
    ``gradient_accumulation_fusion``. ``torch.compile`` takes the layer into its graph: see ``compiled_linear.py``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        params_dtype: torch.dtype | None = None,
        init_method: InitMethod | None = None,
        return_bias: bool = False,
        parameters_split: ParametersSplit | None = None,
        save_original_input: bool = False,
        parallel_mode: Literal["column", "row"] | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        name: str | None = None,
        **unsupported: Any,
    ) -> None:
        refuse_unsupported("Linear", unsupported)
        super().__init__(in_features, out_features, bias, device, one_dtype("Linear", dtype, params_dtype))
        if init_method is not None:
            self.init_method = init_method
            self.reset_parameters()
        self.return_bias = return_bias
        self.save_original_input = save_original_input
        self.split_parameters(parameters_split)
        modes = () if parallel_mode is None else (parallel_mode,)
        brought.cut_over_ranks(self, modes, tp_group, tp_size, sequence_parallel)
        self.set_wgrad_options(fuse=fuse_wgrad_accumulation, delay=delay_wgrad_compute, name=name)

    def forward(self, input: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """[..., K] -> [..., N]; with ``return_bias`` a pair of output and bias.

        ``is_first_microbatch`` has no effect: backward knows which write is the first of an iteration.
        """
        output, bias = self.linear(input)
        return (output, bias) if self.return_bias else output

    @property
    def slices(self) -> Any:  # type: ignore[override]
        """See ``FusedWgradModule``. A split weight and a returned bias are computed with outside of one product."""
        return "refused" if self.return_bias or self.weight_names != ("weight",) else "local"

    def multiply_slice(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """The product with the local weight of a layer that tensor parallelism has cut."""
        return self.multiply(input, (self.weight,), bias, self.queue_now())

    def multiply_columns(
        self, input: Tensor, bias: Tensor | None, group: str, size: int, rank: int, *, shares: bool
    ) -> Any:
        """``multiply_slice`` for rows of the weight, where the whole input's gradient is summed over the ranks.

        With ``shares`` a pair of this and of the input for other products: what they add to its gradient is summed too.
        """
        arguments = Ranks(group, size, rank, None), input, (self.weight,), bias, self.queue_now()
        return brought.multiply_over_ranks(self, "column", *arguments, shares=shares)

    def sizes(self) -> str:
        """The sizes of the layer, by the names of the constructor's arguments."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class ProductUse:
    """The ``Execution`` of a fused or delayed product: all but its tensors. Forwards with equal options share one.

    weights              of the product
    wgrad                computes their gradients
    names                of the weights in error messages
    owner                name of the module in error messages
    fused                each weight gradient is one GEMM into the weight's ``main_grad``. False, with a ``queue``: it
                         is added to the weight's ``.grad``. False without a queue: autograd delivers it
    queue                delayed weight gradients wait there; None: backward computes them
    transposed           weights and their ``main_grad`` are [K, N] each: ``y = x W + b``, ``dW = x^T dy``
    save_original_input  save the input itself for backward instead of the copy that autocast made; this saves memory
                         if another operation keeps the input anyway
    only_save            save what backward needs and skip the product: for a recompute whose output is not read
    """

    __slots__ = (
        "captured",
        "fused",
        "only_save",
        "owner",
        "packed",
        "save_original_input",
        "target",
        "transposed",
        "wgrad",
    )

    def __init__(
        self,
        weights: Sequence[Tensor],
        names: Sequence[str],
        wgrad: WgradProduct,
        owner: str,
        *,
        fused: bool = True,
        queue: WgradQueue | None = None,
        transposed: bool = False,
        save_original_input: bool = False,
        only_save: bool = False,
    ) -> None:
        self.owner, self.fused, self.transposed = owner, fused, transposed
        self.save_original_input, self.only_save = save_original_input, only_save
        self.wgrad = wgrad
        self.packed = weights[0].dim() == 3
        """All experts' weights are one [E, N, K]."""
        self.captured = targets.captured
        """The capture that this object was made in; None: none."""
        self.target = targets.choose_target(weights, names, wgrad, owner, fused=fused, queue=queue)

    def serves(self, weights: Sequence[Tensor], queue: WgradQueue | None) -> bool:
        """Whether a forward of these weights, delayed into ``queue`` or not, may reuse this object."""
        same = self.captured is targets.captured and self.target.serves(weights, queue)
        return same and self.wgrad.fits(weights)

    def multiply(self, input: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """``y = x W^T + b``. Backward: ``dx = dy W``, ``db = sum dy``, and ``dW = dy^T x`` as the options say.

        =======  ======================  ==============================================================
        input    [..., K]                any leading dims
        weights  [N_i, K] each           slices of W along N, in order; usually one
        bias     [N] or None             N = sum of N_i
        y        [..., N]                in autocast's dtype under autocast, like ``nn.Linear``
        =======  ======================  ==============================================================

        Backward reaches the weights through weak references: see ``WgradTarget``. ``autograd.grad`` and
        ``create_graph=True`` get ordinary gradients and write nothing.
        """
        dtype = dtype_of_products(input)
        if not self.save_original_input:
            input = cast(input, dtype)  # not in _FusedLinear: second derivatives need the cast in the graph
        output: Tensor = _apply_directly(input, self, dtype, *weights, bias)
        return output

    def __reduce__(self) -> Any:
        return type(None), ()  # a copied module has other weights, and creates its own object


class _FusedLinear(torch.autograd.Function):
    """See ``ProductUse.multiply``. ``apply`` takes input, use, dtype of the products, one or more weights, and bias."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, use: ProductUse, dtype: torch.dtype, *weights_and_bias: Any) -> Tensor:
        *weights, bias = weights_and_bias
        x = cast(input, dtype)
        needs_dw = True in ctx.needs_input_grad[3:-1]
        # Step 2.3 of docs/by_hand.py: what the two products of backward need is saved. Weights are left out where no
        # dx is wanted: they may then change in place before backward.
        ctx.save_for_backward(input if needs_dw else None, *(weights if ctx.needs_input_grad[0] else ()))
        ctx.use = use
        # A forward inside a backward is a reentrant recompute; its nested backward counts as part of the outer one.
        ctx.outer_backward = current_backward()
        ctx.input_dtype, ctx.weight_dtype = input.dtype, weights[0].dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        if use.only_save:
            return x.new_empty(0)
        return linear_product(x, weights, bias, transposed=use.transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0]
        x, *weights = ctx.saved_tensors
        use: ProductUse = ctx.use
        needs_dx, _, _, *needs_dw, needs_db = ctx.needs_input_grad
        # Steps 3.1 and 3.2: who asks for each weight's gradient, and where it goes.
        wanted, places = wanted_and_places(ctx, needs_dw)
        # Step 3.3: the gradients of input and bias.
        dx = None
        if needs_dx:
            dx = cast(input_grad(dy, weights, transposed=use.transposed), ctx.input_dtype)
        dy_rows = rows_of(dy)
        db = dy_rows.sum(0, dtype=ctx.bias_dtype) if needs_db else None
        # Step 3.4 of docs/by_hand.py, and 3.5: the weight gradients, into main_grad or to autograd.
        if x is None:
            return (dx, None, None, *[None] * len(needs_dw), db)
        x_rows = cast(rows_of(x), dy.dtype)
        operands = (x_rows, dy_rows) if use.transposed else (dy_rows, x_rows)
        return (dx, None, None, *weight_grads(ctx, wanted, places, operands), db)


# Function.apply in Python only adds support for torch.func transforms, which never get here. Its C++ base saves a tiny
# layer (64 x 64, 16 rows) 3 % of its forward and backward.
_apply_directly = super(torch.autograd.Function, _FusedLinear).apply


def wanted_and_places(ctx: Any, needs_dw: Sequence[bool]) -> tuple[list[Demand], list[Place | None]]:
    """In the backward of a product: what becomes of each weight's gradient, and where it goes if ours to deliver.

    ``ctx.next_functions`` lists the tensor inputs only: the input, then the weights.
    """
    use: ProductUse = ctx.use
    nodes = ctx.next_functions
    asked = use.target.demand
    wanted = [asked(nodes[i + 1][0]) if need else Demand.NOTHING for i, need in enumerate(needs_dw)]
    if use.fused and Demand.ACCUMULATE not in wanted:
        refuse_split_backward(ctx, returns=Demand.RETURN in wanted)
    return wanted, use.target.resolve([want is Demand.ACCUMULATE for want in wanted])


def weight_grads(
    ctx: Any, wanted: Sequence[Demand], places: Sequence[Place | None], operands: Sequence[Any]
) -> list[Tensor | None]:
    """What backward returns for each weight of a product; gradients that have a place are delivered there.

    operands  what ``ctx.use.wgrad`` takes
    """
    use: ProductUse = ctx.use
    results: list[Tensor | None] = [None] * len(wanted)
    if None in places:
        returned = [place is None and want is not Demand.NOTHING for place, want in zip(places, wanted, strict=True)]
        if True in returned:
            results = use.wgrad.gradients(returned, ctx.weight_dtype, *operands)
    if not any(places):
        return results
    # The nested backward of a reentrant recompute counts as part of the backward around it.
    backward = ctx.outer_backward if ctx.outer_backward != NO_BACKWARD else current_backward()
    delivered = use.target.deliver(places, operands, backward)
    return [given if place else own for given, place, own in zip(delivered, places, results, strict=True)]


def refuse_split_backward(ctx: Any, returns: bool) -> None:
    """Raise in the second half of a split backward of torch.distributed.pipelining (inputs first, then weights).

    torch writes the weight gradients of the second half to ``.grad`` directly, so that no provider's hook sees them.
    Each half alone looks like ``autograd.grad`` of a user. The prehook on this node distinguishes torch's split.
    """
    if not getattr(ctx, "has_prehook", False):
        return
    if not returns:
        ctx.ran_for_inputs = True
    elif getattr(ctx, "ran_for_inputs", False) and not torch.is_grad_enabled():
        raise RuntimeError(
            f"{ctx.use.owner}: this backward was split into one for inputs and one for weights, as zero-bubble "
            f"schedules of torch.distributed.pipelining do with its own PipelineStage, and the weight gradient would "
            f"bypass main_grad; use maingrad.te_integration.pipeline.PipelineStage"
        )


watch_prehooks(_FusedLinear)
