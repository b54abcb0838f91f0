"""The base of all modules with experts: parameters of a grouped linear layer, and how its product runs.

Legend: E ``num_gemms``, the experts; T rows; K input features; N output features.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ddp.contract.grouped_wgrad import GroupedWgrad
from .. import recipes
from ..dense.compiled_wgrad import mode_of
from ..dense.linear import LinearModule
from ..dense.linear_options import InitMethod, reset_linear
from ..dense.products import refuse_in_transform, rows_of
from ..dense.quantized_linear import recipe_of_forward
from ..wgrad_queue import WgradQueue
from .compiled_grouped_linear import compiled_grouped_linear
from .fused_grouped_linear import fused_grouped_linear
from .quantized_grouped_linear import quantized_grouped_linear

__all__ = ["ExpertLayer", "GroupedModule", "TEGroupedModule"]


class ExpertLayer(NamedTuple):
    """Parameter names of one grouped linear layer: ``{prefix}weight0`` and so on, [N, K] each, or one packed
    ``{prefix}weight`` [E, N, K]. Biases likewise.
    """

    prefix: str
    weight_names: tuple[str, ...]
    bias_names: tuple[str, ...]
    packed_weight: bool
    packed_bias: bool

    @classmethod
    def named(cls, prefix: str, num_gemms: int, *, packed_weight: bool, packed_bias: bool) -> "ExpertLayer":
        """The layer of ``num_gemms`` experts whose parameters start with ``prefix``."""

        def names(whole: str, packed: bool) -> tuple[str, ...]:
            return (whole,) if packed else tuple(f"{whole}{expert}" for expert in range(num_gemms))

        weights, biases = names(f"{prefix}weight", packed_weight), names(f"{prefix}bias", packed_bias)
        return cls(prefix, weights, biases, packed_weight, packed_bias)


class GroupedModule(LinearModule, nn.Module):
    """Mixin of modules with one or more linear layers of experts."""

    num_products = 0  # of dense products, which delayed scaling counts
    wgrad_product = GroupedWgrad
    num_gemms: int
    expert_layers: tuple[ExpertLayer, ...]

    def add_layer(
        self, layer: ExpertLayer, out_features: int, in_features: int, *, bias: bool, device: Any, dtype: Any
    ) -> None:
        """Create the parameters, uninitialised: weights first, so that they are adjacent in a bucket, then biases."""

        def empty(packed: bool, *shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty((self.num_gemms,) * packed + shape, device=device, dtype=dtype))

        for name in layer.weight_names:
            self.register_parameter(name, empty(layer.packed_weight, out_features, in_features))
        for name in layer.bias_names:
            self.register_parameter(name, empty(layer.packed_bias, out_features) if bias else None)

    def reset_layer(self, layer: ExpertLayer, init_method: InitMethod | None) -> None:
        """Initialise a layer expert by expert, so that packed and separate weights get the same values."""
        weights, biases = self.parameters_named(layer.weight_names), self.parameters_named(layer.bias_names)
        for expert in range(self.num_gemms):
            weight = weights[0].detach()[expert] if layer.packed_weight else weights[expert]
            bias = None
            if biases:
                bias = biases[0].detach()[expert] if layer.packed_bias else biases[expert]
            reset_linear(weight, bias, init_method)

    def parameters_named(self, names: Sequence[str]) -> tuple[Tensor, ...]:
        """The parameters with these names. A layer without biases has none of its bias names."""
        own = self._parameters  # getattr takes a microsecond each; parametrize computes names that are missing
        found = [own[name] if name in own else getattr(self, name) for name in names]
        return tuple(each for each in found if each is not None)

    def multiply_rows(
        self,
        layer: ExpertLayer,
        rows: Tensor,
        offsets: Tensor,
        bias_scales: Tensor | None,
        queue: WgradQueue | None,
        *,
        add_bias: bool = True,
        out: Tensor | None = None,
        grad_input: Tensor | None = None,
    ) -> Tensor:
        """The product of a layer: rows [T, K], offsets [E + 1] from ``row_offsets`` -> [T, N].

        bias_scales, out, grad_input  see ``fused_grouped_linear``
        """
        weights = self.parameters_named(layer.weight_names)
        biases = self.parameters_named(layer.bias_names) if add_bias else ()
        if not torch.is_autocast_enabled(rows.device.type):
            self._check_dtypes(rows, weights, biases)
        if bias_scales is not None and bias_scales.shape != (rows.shape[0],):
            raise ValueError(
                f"{self.describe()}: bias_scales must be [{rows.shape[0]}], one for each row; got "
                f"{tuple(bias_scales.shape)}"
            )
        product = self.expert_layers.index(layer)
        if torch.compiler.is_compiling():
            refuse_in_transform(self.describe())
            key = self._wgrad_key if mode_of(self, weights, queue, product) == "graph" else None
            return compiled_grouped_linear(
                rows, weights, biases, offsets, key, product, bias_scale=bias_scales, transposed=self.transposed
            )
        # Step 2.2 of ``dense/linear.py``: quantised, or of the tensors as they are; and where weight gradients go.
        recipe = recipe_of_forward(self, rows)
        run: Callable[..., Tensor] = fused_grouped_linear
        if recipe is not None and rows.shape[0]:  # without rows there is nothing to quantise
            run = partial(quantized_grouped_linear, recipe=recipe)
        return run(
            rows,
            weights[0] if layer.packed_weight else weights,
            None if not biases else biases[0] if layer.packed_bias else biases,
            offsets,
            self.use(product, weights, *self.delivery(weights, queue)),
            bias_scale=bias_scales,
            out=out,
            grad_input=grad_input,
        )

    def _check_dtypes(self, rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        dtypes = {tensor.dtype for tensor in (*weights, *biases)}
        if dtypes != {rows.dtype}:
            found = " and ".join(sorted(map(str, dtypes)))
            raise ValueError(
                f"{self.describe()}: the input is {rows.dtype} and the parameters {found}; cast one or use autocast"
            )

    def runs_in_graph(self, m_splits: Any, *buffers: Tensor | None) -> bool:
        """Whether ``torch.compile`` takes this forward whole. If not, the forward is a graph break, as under a recipe.

        Splits on the host would be constants of the graph, and memory that the caller gave would be written by an
        operator that the compiler takes for a pure one. The other cases are those of ``LinearModule``.
        """
        if recipes.may_be_any or not isinstance(m_splits, Tensor) or any(buffer is not None for buffer in buffers):
            return False
        queue = self.queue_now()
        return all(
            mode_of(self, self.parameters_named(layer.weight_names), queue, product) != "break"
            for product, layer in enumerate(self.expert_layers)
        )

    def weights_of(self, product: int) -> tuple[str, ...]:
        """Names of the weights of one of the module's products."""
        return self.expert_layers[product].weight_names

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for layer in self.expert_layers:
            for whole, packed in (("weight", layer.packed_weight), ("bias", layer.packed_bias)):
                error = _repack(state_dict, f"{prefix}{layer.prefix}{whole}", self.num_gemms, packed)
                if error:
                    error_msgs.append(f"{self.describe()}: {error}")
        rest = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class TEGroupedModule(GroupedModule):
    """Base of the modules with experts that have Transformer Engine's arguments."""

    single_grouped_weight: bool
    single_grouped_bias: bool
    scale_bias: bool

    def set_sizes(self, **sizes: int) -> None:
        """Set attributes of these names. Raises ``ValueError`` for sizes below 1."""
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{type(self).__name__} needs {name} of 1 or more, got {size}")
            setattr(self, name, size)

    def rows_of(self, input: Tensor, features: int) -> Tensor:
        """[..., features] -> [T, features]. Raises ``ValueError`` for another number of features."""
        if input.shape[-1:] != (features,):
            raise ValueError(f"{self.describe()} takes {features} features in the last dim, got {tuple(input.shape)}")
        return rows_of(input)

    def extra_repr(self) -> str:
        """The sizes, what form the parameters have, and what happens to the weight gradients."""
        bias = self._parameters[self.expert_layers[0].bias_names[0]] is not None
        return (
            f"{super().extra_repr()}, bias={bias}, scale_bias={self.scale_bias}, "
            f"single_grouped_weight={self.single_grouped_weight}, single_grouped_bias={self.single_grouped_bias}"
        )


def _repack(state_dict: dict[str, Any], whole: str, count: int, packed: bool) -> str | None:
    """Convert the tensors named ``whole`` in a state dict to the module's form, packed or separate.

    Returns an error message if their number is wrong, else None.
    """
    discrete: list[str] = []
    while f"{whole}{len(discrete)}" in state_dict:
        discrete.append(f"{whole}{len(discrete)}")
    stored = len(discrete) or (state_dict[whole].shape[0] if whole in state_dict else 0)
    if stored and stored != count:
        return f"the state dict has {whole} of {stored} experts, and the module has {count}"
    if packed and discrete and whole not in state_dict:
        state_dict[whole] = torch.stack([state_dict.pop(name) for name in discrete])
    elif not packed and not discrete and whole in state_dict:
        for expert, tensor in enumerate(state_dict.pop(whole).unbind()):
            state_dict[f"{whole}{expert}"] = tensor
    return None
