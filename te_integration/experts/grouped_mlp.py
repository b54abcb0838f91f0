"""``GroupedMLP``: experts as two grouped linear layers with a gated activation between them.

Legend: E ``num_gemms``, the experts; T rows; K ``hidden_size``; F ``ffn_hidden_size``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..dense.compiled_wgrad import run_outside_graph
from ..dense.linear_options import InitMethod, one_dtype
from ..te_arguments import refuse_unsupported
from ..wgrad_queue import WgradQueue
from .grouped_module import ExpertLayer, TEGroupedModule
from .row_splits import row_offsets
from .scaled_activations import glu_options, scaled_activation

__all__ = ["GroupedMLP"]


class GroupedMLP(TEGroupedModule):
    """``y[t] = W2_e (p[t] act(W1_e x[t] + b1_e)) + b2_e`` for row t of expert e.

    ===========================  ============  =====================================================================
    input                        [..., K]      x: T rows, those of expert 0 first; pad rows last, if any
    m_splits                     E             number of rows of each expert: a list of ints, or a tensor [E]
    probs                        [...]         p, one per row: routing probabilities; None: 1
    fc1_weight0, fc1_weight1...  [2F, K] each  W1, the gate's rows first; packed: one ``fc1_weight`` [E, 2F, K]
    fc1_bias0, ...               [2F] each     b1; packed: one ``fc1_bias`` [E, 2F]
    fc2_weight0, ...             [K, F] each   W2; packed: one ``fc2_weight`` [E, K, F]
    fc2_bias0, ...               [K] each      b2; packed: one ``fc2_bias`` [E, K]
    y                            [..., K]      zeros in pad rows, for any x and p there
    ===========================  ============  =====================================================================

    Forward and backward equal, bit for bit, ``Sequential(GroupedLinear(E, K, 2F), ScaledSwiGLU(), GroupedLinear(E, F,
    K))`` applied to ``(x, m_splits, p, m_splits)``, but offsets are computed once. A tensor ``m_splits`` stays on the
    device. Separate weights are independent parameters, each with its own main_grad, flags and ``requires_grad``. The
    gradient of p has the dtype of p.

    bias                     add b1 and b2
    single_grouped_weight    packed weights; a state dict of either form loads into the other
    single_grouped_bias      packed biases; state dicts likewise
    scale_bias               add ``p[t] b2_e`` instead of ``b2_e``, so that p scales the whole output of the expert
    activation               a gated one, by Transformer Engine's name: swiglu, geglu, clamped_swiglu, qgeglu, ...
    activation_params        for "clamped_swiglu": ``limit``, ``alpha`` and ``glu_linear_offset``
    init_method              initialises each W1_e
    output_layer_init_method initialises each W2_e; None: ``init_method``
    delay_wgrad_compute      ``backward_dw()`` computes dW2, then dW1, of the oldest pending microbatch
    others                   see ``GroupedLinear``

    Raises ``ValueError`` for sizes below 1, an unknown or ungated activation, and ``scale_bias`` without ``bias``.
    """

    num_extra_inputs = 2
    hidden_size: int
    ffn_hidden_size: int

    def __init__(
        self,
        num_gemms: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        bias: bool = True,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        scale_bias: bool = False,
        activation: str = "swiglu",
        activation_params: Mapping[str, float] | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
        name: str | None = None,
        **unsupported: Any,
    ) -> None:
        refuse_unsupported("GroupedMLP", unsupported)
        if scale_bias and not bias:
            raise ValueError("GroupedMLP: scale_bias=True needs bias=True")
        super().__init__()
        dtype = one_dtype("GroupedMLP", dtype, params_dtype)
        self.set_sizes(num_gemms=num_gemms, hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        self.single_grouped_weight, self.single_grouped_bias = single_grouped_weight, single_grouped_bias
        self.scale_bias = scale_bias
        self.activation = activation
        self.glu = glu_options("GroupedMLP", activation, activation_params)
        self.init_method = init_method
        self.output_layer_init_method = init_method if output_layer_init_method is None else output_layer_init_method
        packed = {"packed_weight": single_grouped_weight, "packed_bias": single_grouped_bias}
        self.fc1, self.fc2 = (ExpertLayer.named(prefix, num_gemms, **packed) for prefix in ("fc1_", "fc2_"))
        self.expert_layers = (self.fc1, self.fc2)
        self.weight_names = (*self.fc1.weight_names, *self.fc2.weight_names)
        self.add_layer(self.fc1, 2 * ffn_hidden_size, hidden_size, bias=bias, device=device, dtype=dtype)
        self.add_layer(self.fc2, hidden_size, ffn_hidden_size, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()
        self.set_wgrad_options(fuse=fuse_wgrad_accumulation, delay=delay_wgrad_compute, name=name)

    def reset_parameters(self) -> None:
        """Initialise all parameters again, expert by expert, for example after ``to_empty``."""
        self.reset_layer(self.fc1, self.init_method)
        self.reset_layer(self.fc2, self.output_layer_init_method)

    def forward(self, input: Tensor, m_splits: Tensor | Sequence[int], probs: Tensor | None = None) -> Tensor:
        """[..., K] -> [..., K].

        Raises ``ValueError`` for splits that do not fit the rows (``row_offsets``), missing probabilities under
        ``scale_bias``, and shapes or dtypes that do not match.
        """
        if torch.compiler.is_compiling() and not self.runs_in_graph(m_splits):
            output: Tensor = run_outside_graph(GroupedMLP._forward, self, input, m_splits, probs)
            return output
        return self._forward(input, m_splits, probs)

    def _forward(self, input: Tensor, m_splits: Tensor | Sequence[int], probs: Tensor | None) -> Tensor:
        rows = self.rows_of(input, self.hidden_size)
        if probs is None and self.scale_bias:
            raise ValueError(f"{self.describe()}: scale_bias=True scales the bias by probs, and none were given")
        if probs is not None:
            if probs.shape not in (input.shape[:-1], rows.shape[:1]):
                raise ValueError(
                    f"{self.describe()} needs a probability for each row, {tuple(input.shape[:-1])}; got probs of "
                    f"{tuple(probs.shape)}"
                )
            probs = probs.reshape(-1)
        offsets = row_offsets(m_splits, self.num_gemms, rows.shape[0], rows.device, self.describe())
        return self._run(rows, offsets, probs, self.queue_now()).view(input.shape)

    def _run(self, rows: Tensor, offsets: Tensor, probs: Tensor | None, queue: WgradQueue | None) -> Tensor:
        """The three steps: rows [T, K], offsets [E + 1], probs [T] -> [T, K].

        Backward runs the second layer first, so its weight gradients are queued first. Saved for backward between the
        layers: h [T, 2F], the input of the activation, and its output [T, F], for the second weight gradient; under a
        recipe the output's quantised copy.
        """
        hidden = self.multiply_rows(self.fc1, rows, offsets, None, queue)
        activated = scaled_activation(hidden, probs, self.glu)
        return self.multiply_rows(self.fc2, activated, offsets, probs if self.scale_bias else None, queue)

    def sizes(self) -> str:
        """The sizes of the layer, by the names of the constructor's arguments."""
        return (
            f"num_gemms={self.num_gemms}, hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"activation={self.activation}"
        )
