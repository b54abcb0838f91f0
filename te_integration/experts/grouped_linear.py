"""``GroupedLinear``: one linear layer per expert, computed as one grouped product.

Legend: E ``num_gemms``, the experts; T rows; K ``in_features``; N ``out_features``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dense.compiled_wgrad import run_outside_graph
from ..dense.linear_options import InitMethod, one_dtype
from ..te_arguments import refuse_unsupported
from .grouped_module import ExpertLayer, TEGroupedModule
from .row_splits import row_offsets

__all__ = ["GroupedLinear"]


class GroupedLinear(TEGroupedModule):
    """``y[t] = x[t] W_e^T + b_e`` for row t of expert e, with ``main_grad_e += dy_e^T x_e`` of all experts as one GEMM.

    =======================  ===========  =========================================================
    inp                      [..., K]     x: T rows, those of expert 0 first; pad rows last, if any
    m_splits                 E            number of rows of each expert: a list of ints, or a tensor [E]
    weight0, ... weight{E-1} [N, K] each  or one packed ``weight`` [E, N, K]
    bias0, ... bias{E-1}     [N] each     or one packed ``bias`` [E, N]
    y                        [..., N]     zeros in pad rows
    =======================  ===========  =========================================================

    A tensor ``m_splits`` stays on the device: the host does not wait for it, and a captured CUDA graph may be replayed
    with other values. The host checks a list. An expert may have no rows.

    Separate weights are independent parameters, each with its own main_grad, flags and ``requires_grad``. A packed
    weight is one parameter with one ``main_grad`` [E, N, K]; its experts are frozen together. If the weight gradients
    are neither fused nor delayed, autograd gets ordinary gradients from the same kernels.

    single_grouped_weight    one packed weight; a state dict of either form loads into the other
    single_grouped_bias      one packed bias; state dicts likewise
    scale_bias               ``y[t] = x[t] W_e^T + s[t] b_e``: ``forward`` takes s [T] and returns its gradient
    return_bias              return ``(x W^T, [b_0, ...])``; the caller adds the biases
    fuse_wgrad_accumulation, delay_wgrad_compute, params_dtype, init_method, save_original_input, name
                             see ``Linear``; ``init_method`` is called with each expert's [N, K]

    Names of arguments and parameters are those of Transformer Engine's module; ``scale_bias`` is that of its operation.
    Other arguments of Transformer Engine are accepted if their value has no effect, and refused by name otherwise.
    Packed and separate weights have equal initial values for one seed. Raises ``ValueError`` for sizes below 1, and for
    ``scale_bias`` without an added bias.
    """

    in_features: int
    out_features: int

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        scale_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
        init_method: InitMethod | None = None,
        return_bias: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
        **unsupported: Any,
    ) -> None:
        refuse_unsupported("GroupedLinear", unsupported)
        if scale_bias and (return_bias or not bias):
            raise ValueError("GroupedLinear: scale_bias needs bias=True, and return_bias leaves nothing to scale")
        super().__init__()
        dtype = one_dtype("GroupedLinear", dtype, params_dtype)
        self.set_sizes(num_gemms=num_gemms, in_features=in_features, out_features=out_features)
        self.single_grouped_weight, self.single_grouped_bias = single_grouped_weight, single_grouped_bias
        self.scale_bias, self.return_bias, self.save_original_input = scale_bias, return_bias, save_original_input
        self.init_method = init_method
        self.layer = ExpertLayer.named(
            "", num_gemms, packed_weight=single_grouped_weight, packed_bias=single_grouped_bias
        )
        self.expert_layers = (self.layer,)
        self.weight_names = self.layer.weight_names
        self.add_layer(self.layer, out_features, in_features, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()
        self.set_wgrad_options(fuse=fuse_wgrad_accumulation, delay=delay_wgrad_compute, name=name)

    @property
    def num_extra_inputs(self) -> int:
        """Extra inputs in a ``Sequential``: ``m_splits``, and ``bias_scales`` with ``scale_bias``."""
        return 2 if self.scale_bias else 1

    def reset_parameters(self) -> None:
        """Initialise the weights and biases again, expert by expert, for example after ``to_empty``."""
        self.reset_layer(self.layer, self.init_method)

    def forward(
        self,
        inp: Tensor,
        m_splits: Tensor | Sequence[int],
        bias_scales: Tensor | None = None,
        is_first_microbatch: bool | None = None,
        *,
        out: Tensor | None = None,
        grad_input: Tensor | None = None,
    ) -> Any:
        """[..., K] -> [..., N]; with ``return_bias`` a pair of output and list of biases (None without biases).

        bias_scales  [...], one per row; required with ``scale_bias``, refused without
        out          [T, N], memory for the output; ``fused_grouped_linear`` says when it may be overwritten
        grad_input   [T, K], memory for the gradient of the input; likewise

        ``is_first_microbatch`` has no effect: backward knows which write is the first of an iteration. Raises
        ``ValueError`` for splits that do not fit the rows (``row_offsets``), missing or unused scales, and shapes or
        dtypes that do not match.
        """
        if torch.compiler.is_compiling() and not self.runs_in_graph(m_splits, out, grad_input):
            output: Tensor = run_outside_graph(
                GroupedLinear._forward, self, inp, m_splits, bias_scales, out, grad_input
            )
        else:
            output = self._forward(inp, m_splits, bias_scales, out, grad_input)
        return (output, self._biases_alone()) if self.return_bias else output

    def _forward(
        self,
        inp: Tensor,
        m_splits: Tensor | Sequence[int],
        bias_scales: Tensor | None,
        out: Tensor | None,
        grad_input: Tensor | None,
    ) -> Tensor:
        rows = self.rows_of(inp, self.in_features)
        offsets = row_offsets(m_splits, self.num_gemms, rows.shape[0], rows.device, self.describe())
        if bias_scales is not None and bias_scales.dim() != 1:
            bias_scales = bias_scales.reshape(-1)
        if (bias_scales is not None) is not self.scale_bias:
            raise ValueError(
                f"{self.describe()}: scale_bias={self.scale_bias}, and "
                f"{'no bias_scales were given' if self.scale_bias else 'bias_scales were given'}"
            )
        output = self.multiply_rows(
            self.layer,
            rows,
            offsets,
            bias_scales,
            self.queue_now(),
            add_bias=not self.return_bias,
            out=out,
            grad_input=grad_input,
        )
        return output if inp.dim() == 2 else output.view(*inp.shape[:-1], self.out_features)

    def _biases_alone(self) -> list[Tensor] | None:
        biases = self.parameters_named(self.layer.bias_names)
        if not biases:
            return None
        return list(biases[0].unbind()) if self.single_grouped_bias else list(biases)

    def sizes(self) -> str:
        """The sizes of the layer, by the names of the constructor's arguments."""
        return f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}"
