"""``LayerNormMLP``: a normalisation and the two linear layers of a transformer's feed-forward block.

Legend: K ``hidden_size``, F ``ffn_hidden_size``, G rows of the first weight: F, or 2F where the activation is gated.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from ..te_arguments import refuse_unsupported
from ..wgrad_queue import WgradQueue
from .activations import activation_named
from .layer_norm_linear import NormalizingModule
from .linear import LinearModule, brought
from .linear_options import InitMethod, one_dtype, reset_linear

__all__ = ["LayerNormMLP"]


class LayerNormMLP(LinearModule, NormalizingModule):
    """``y = act(norm(x) W1^T + b1) W2^T + b2``, with one GEMM into each weight's ``main_grad``.

    =================  ============  ========================================
    x                  [..., K]      input
    layer_norm_weight  [K]           see ``NormalizingModule``
    layer_norm_bias    [K] or None   None for RMSNorm
    fc1_weight         [G, K]        W1
    fc1_bias           [G] or None   b1
    fc2_weight         [K, F]        W2
    fc2_bias           [K] or None   b2
    y                  [..., K]      output
    =================  ============  ========================================

    The two weights are independent: each may be frozen, tied, fused and overwritten alone.

    eps                        added to the variance
    normalization              "LayerNorm" or "RMSNorm"
    zero_centered_gamma        ``layer_norm_weight`` is gamma - 1
    activation                 Transformer Engine's name; ``activations.py`` lists all
    activation_params          for "clamped_swiglu": ``limit`` and ``alpha``
    checkpoint                 save x only, and recompute the rest in backward (non-reentrant
                               ``torch.utils.checkpoint``). A fused or delayed second product is not recomputed
    return_bias                also return ``b2``, which is not added to y
    return_layernorm_output    also return ``norm(x)`` [..., K], as the last result
    init_method                initialises W1; None: like ``nn.Linear``. Biases are 0 if it is given
    output_layer_init_method   initialises W2; None: ``init_method``
    delay_wgrad_compute        ``backward_dw()`` computes dW2, then dW1, of the oldest pending microbatch
    set_parallel_mode          the first product is column-parallel over ``tp_group``, the second row-parallel
    others                     see ``Linear``

    Names of arguments and parameters are those of Transformer Engine. Its other arguments are accepted if their value
    has no effect, and refused by name otherwise. Raises ``ValueError`` for an unknown ``activation`` or
    ``normalization``.
    """

    weight_names: tuple[str, ...] = ("fc1_weight", "fc2_weight")
    num_products = 2
    fc1_bias: Tensor | None
    fc2_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_bias: bool = False,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        checkpoint: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        set_parallel_mode: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
        name: str | None = None,
        **unsupported: Any,
    ) -> None:
        refuse_unsupported("LayerNormMLP", unsupported)
        super().__init__()
        dtype = one_dtype("LayerNormMLP", dtype, params_dtype)
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self.activation = activation
        self.activate, gated = activation_named(activation, activation_params)
        self.checkpoint = checkpoint
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.init_method = init_method
        self.output_layer_init_method = init_method if output_layer_init_method is None else output_layer_init_method

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        fc1_features = 2 * ffn_hidden_size if gated else ffn_hidden_size
        self.add_normalization(hidden_size, eps, normalization, zero_centered_gamma, device, dtype)
        self.fc1_weight = empty(fc1_features, hidden_size)
        self.register_parameter("fc1_bias", empty(fc1_features) if bias else None)
        self.fc2_weight = empty(hidden_size, ffn_hidden_size)
        self.register_parameter("fc2_bias", empty(hidden_size) if bias else None)
        self.reset_parameters()
        modes = ("column", "row") if set_parallel_mode else ()
        brought.cut_over_ranks(self, modes, tp_group, tp_size, sequence_parallel, gated)
        self.set_wgrad_options(fuse=fuse_wgrad_accumulation, delay=delay_wgrad_compute, name=name)

    def reset_parameters(self) -> None:
        """Initialise all parameters anew: after ``to_empty``, or to start over."""
        self.reset_normalization()
        reset_linear(self.fc1_weight, self.fc1_bias, self.init_method)
        reset_linear(self.fc2_weight, self.fc2_bias, self.output_layer_init_method)

    def forward(self, input: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """[..., K] -> [..., K]; or a tuple of output, b2 and normalised input, as the options ask for.

        ``is_first_microbatch`` has no effect: backward knows which write is the first of an iteration.
        """
        if self.checkpoint and torch.is_grad_enabled():
            output, normalized = self._recomputed(input)
        else:
            output, normalized = self._run(input, self.queue_now())
        return self.results(output, self.fc2_bias, normalized)

    def weights_of(self, product: int) -> tuple[str, ...]:
        """Names of the weights of one of the module's products."""
        return (self.weight_names[product],)

    def _run(self, input: Tensor, queue: WgradQueue | None, only_save: bool = False) -> tuple[Tensor, Tensor]:
        """Output and normalised input; ``only_save`` skips the second product, whose result backward does not need."""
        normalized = self.normalize(input)
        hidden = self.activate(self.multiply(normalized, (self.fc1_weight,), self.fc1_bias, queue))
        bias = None if self.return_bias else self.fc2_bias
        output = self.multiply(hidden, (self.fc2_weight,), bias, queue, product=1, only_save=only_save)
        return output, normalized

    def _recomputed(self, input: Tensor) -> tuple[Tensor, Tensor]:
        queue = self.queue_now()  # the recompute runs in backward, outside any delayed_wgrad block
        if torch.compiler.is_compiling():  # a compiler leaves out what no result needs
            of_graph: tuple[Tensor, Tensor] = recompute(
                self._run, input, queue, use_reentrant=False, preserve_rng_state=False
            )
            return of_graph
        again = False

        def run(x: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal again
            only_save, again = again, True
            return self._run(x, queue, only_save)

        result: tuple[Tensor, Tensor] = recompute(run, input, use_reentrant=False, preserve_rng_state=False)
        return result

    def sizes(self) -> str:
        """The sizes of the layer, by the names of the constructor's arguments."""
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"normalization={self.normalization}, activation={self.activation}"
        )

    def extra_repr(self) -> str:
        """The sizes, and what happens to the weight gradients."""
        return f"{super().extra_repr()}, bias={self.fc1_bias is not None}, checkpoint={self.checkpoint}"
