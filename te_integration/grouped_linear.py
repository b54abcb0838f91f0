"""``GroupedLinear``: a linear layer with a weight for each expert, all of them in one product.

Legend: E ``num_gemms``, the experts; T rows; K ``in_features``; N ``out_features``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ddp.main_grad import check_delayable, is_fusable
from .fused_grouped_linear import GroupedUse, fused_grouped_linear
from .fused_linear import run_outside_graph
from .linear_module import InitMethod, LinearModule, one_dtype, reset_linear
from .row_splits import row_offsets
from .te_arguments import refuse_unsupported
from .wgrad_queue import WgradQueue

__all__ = ["GroupedLinear"]


class GroupedLinear(LinearModule, nn.Module):
    """``y[t] = x[t] W_e^T + b_e`` for row t of expert e, with ``main_grad_e += dy_e^T x_e`` of all experts as one GEMM.

    =======================  ===========  =========================================================
    inp                      [..., K]     x: T rows, those of expert 0 first; pad rows last, if any
    m_splits                 E            rows of each expert: a list of ints, or a tensor [E]
    weight0, ... weight{E-1} [N, K] each  with ``single_grouped_weight`` one ``weight`` [E, N, K]
    bias0, ... bias{E-1}     [N] each     with ``single_grouped_bias`` one ``bias`` [E, N]
    y                        [..., N]     zeros in pad rows
    =======================  ===========  =========================================================

    A tensor of splits stays on the device: nothing here waits for it, an expert may have no rows, and a captured CUDA
    graph may be replayed with other splits. A list is checked on the host.

    Each weight has its own flag, its own first write and its own frozen state; a packed weight is one parameter, with
    one ``main_grad`` [E, N, K], and its experts are frozen together. Without a fused or delayed weight gradient
    autograd gets ordinary gradients from the same kernels. There is no second derivative.

    single_grouped_weight    one packed weight; the state dict of either form loads into the other
    single_grouped_bias      one packed bias, likewise
    scale_bias               ``y[t] = x[t] W_e^T + s[t] b_e``: ``forward`` takes s [T], which gets its gradient too
    return_bias              return ``(x W^T, [b_0, ...])`` and leave the addition to the caller
    fuse_wgrad_accumulation, delay_wgrad_compute, params_dtype, init_method, save_original_input, name
                             see ``Linear``; ``init_method`` is called with each expert's [N, K]

    Names of arguments and parameters are those of Transformer Engine's module, ``scale_bias`` of its operation; other
    arguments of theirs are accepted where they have no effect, and refused by name otherwise. From one seed packed and
    discrete weights are equal. Raises ``ValueError`` for sizes below 1 and for a scaled bias without a bias to add.
    """

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
        sizes = {"num_gemms": num_gemms, "in_features": in_features, "out_features": out_features}
        for argument, size in sizes.items():
            if size < 1:
                raise ValueError(f"GroupedLinear needs {argument} of 1 or more, got {size}")
        if scale_bias and (return_bias or not bias):
            raise ValueError("GroupedLinear: scale_bias needs bias=True, and return_bias leaves nothing to scale")
        super().__init__()
        dtype = one_dtype("GroupedLinear", dtype, params_dtype)
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.single_grouped_weight, self.single_grouped_bias = single_grouped_weight, single_grouped_bias
        self.scale_bias, self.return_bias, self.save_original_input = scale_bias, return_bias, save_original_input
        self.init_method = init_method
        self.weight_names = _names("weight", num_gemms, single_grouped_weight)
        self.bias_names = _names("bias", num_gemms, single_grouped_bias)

        def empty(names: Sequence[str], *shape: int) -> None:
            packed = (num_gemms,) if len(names) == 1 and names[0] in ("weight", "bias") else ()
            for each in names:
                self.register_parameter(each, nn.Parameter(torch.empty(*packed, *shape, device=device, dtype=dtype)))

        empty(self.weight_names, out_features, in_features)
        if bias:
            empty(self.bias_names, out_features)
        else:
            for each in self.bias_names:
                self.register_parameter(each, None)
        self.reset_parameters()
        self.set_wgrad_options(fuse=fuse_wgrad_accumulation, delay=delay_wgrad_compute, name=name)

    @property
    def num_extra_inputs(self) -> int:
        """For ``Sequential``: the splits, and the scales of the bias."""
        return 2 if self.scale_bias else 1

    def reset_parameters(self) -> None:
        """Initialise the weights and biases anew, expert by expert: after ``to_empty``, or to start over."""
        weights, biases = self._parameters_of(self.weight_names), self._parameters_of(self.bias_names)
        for expert in range(self.num_gemms):
            weight = weights[0].detach()[expert] if self.single_grouped_weight else weights[expert]
            bias = None
            if biases:
                bias = biases[0].detach()[expert] if self.single_grouped_bias else biases[expert]
            reset_linear(weight, bias, self.init_method)

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
        """[..., K] -> [..., N]; with ``return_bias`` a pair of it and the list of biases, None without any.

        bias_scales  [T], with ``scale_bias``
        out          [T, N], memory for the output, and ``grad_input`` [T, K] for the input's gradient:
                     ``fused_grouped_linear`` says until when they must be left alone

        ``is_first_microbatch`` is accepted and changes nothing: which write overwrites is known in backward. Raises
        ``ValueError`` for splits that do not fit (``row_offsets``), for scales that are missing or in vain, and for
        shapes and dtypes that do not fit together.
        """
        if torch.compiler.is_compiling():
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
        if inp.dim() < 1 or inp.shape[-1] != self.in_features:
            raise ValueError(
                f"{self.describe()} takes {self.in_features} features in the last dim, got {tuple(inp.shape)}"
            )
        rows = inp if inp.dim() == 2 else inp.reshape(-1, self.in_features)
        offsets = row_offsets(m_splits, self.num_gemms, rows.shape[0], rows.device, self.describe())
        output = self.multiply_rows(rows, offsets, bias_scales, self.queue_now(), out=out, grad_input=grad_input)
        return output if inp.dim() == 2 else output.view(*inp.shape[:-1], self.out_features)

    def multiply_rows(
        self,
        rows: Tensor,
        offsets: Tensor,
        bias_scales: Tensor | None,
        queue: WgradQueue | None,
        *,
        out: Tensor | None = None,
        grad_input: Tensor | None = None,
        only_save: bool = False,
    ) -> Tensor:
        """The product where the offsets are known: rows [T, K], offsets [E + 1] from ``row_offsets`` -> [T, N]."""
        if (bias_scales is not None) is not self.scale_bias:
            raise ValueError(
                f"{self.describe()}: scale_bias={self.scale_bias}, and "
                f"{'no bias_scales were given' if self.scale_bias else 'bias_scales were given'}"
            )
        weights = self._parameters_of(self.weight_names)
        biases = () if self.return_bias else self._parameters_of(self.bias_names)
        if not torch.is_autocast_enabled(rows.device.type):
            self._check_dtypes(rows, weights, biases)
        if bias_scales is not None and bias_scales.shape != (rows.shape[0],):
            raise ValueError(
                f"{self.describe()}: bias_scales must be [{rows.shape[0]}], one for each row; got "
                f"{tuple(bias_scales.shape)}"
            )
        use = self._grouped_use(weights, queue, only_save)
        return fused_grouped_linear(
            rows,
            weights[0] if self.single_grouped_weight else weights,
            None if not biases else biases[0] if self.single_grouped_bias else biases,
            offsets,
            use,
            bias_scale=bias_scales,
            out=out,
            grad_input=grad_input,
        )

    def _parameters_of(self, names: Sequence[str]) -> tuple[Tensor, ...]:
        """Those of them that there are: a module has all of its biases, or none."""
        own = self._parameters  # getattr costs a microsecond for each; what is not there is computed (parametrize)
        found = [own[name] if name in own else getattr(self, name) for name in names]
        return tuple([each for each in found if each is not None])

    def _check_dtypes(self, rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        dtypes = {tensor.dtype for tensor in (*weights, *biases)}
        if dtypes != {rows.dtype}:
            found = " and ".join(sorted(map(str, dtypes)))
            raise ValueError(
                f"{self.describe()}: the input is {rows.dtype} and the parameters {found}; cast one or use autocast"
            )

    def _grouped_use(self, weights: Sequence[Tensor], queue: WgradQueue | None, only_save: bool) -> GroupedUse:
        """The same object as in the last forward, where nothing has changed."""
        fused = self.fuse_wgrad_accumulation
        if fused or queue is not None:
            needing = [weight for weight in weights if weight.requires_grad]
            if not needing or not torch.is_grad_enabled() or not all(map(is_fusable, needing)):
                fused, queue = False, None
            elif queue is not None and queue is not self.wgrad_queue:
                check_delayable(needing, self.describe())
        uses: dict[tuple[bool, bool], GroupedUse | None] = self.__dict__.setdefault("_uses", {})
        use = uses.get((fused, only_save))
        if use is None or not use.serves(weights, fused, queue):
            use = uses[fused, only_save] = GroupedUse(
                weights,
                self.weight_names,
                self.describe(),
                fused=fused,
                queue=queue,
                save_original_input=self.save_original_input,
                only_save=only_save,
            )
        return use

    def _biases_alone(self) -> list[Tensor] | None:
        biases = self._parameters_of(self.bias_names)
        if not biases:
            return None
        return list(biases[0].unbind()) if self.single_grouped_bias else list(biases)

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
        for whole, packed in (("weight", self.single_grouped_weight), ("bias", self.single_grouped_bias)):
            error = _repack(state_dict, f"{prefix}{whole}", self.num_gemms, packed)
            if error:
                error_msgs.append(f"{self.describe()}: {error}")
        rest = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def sizes(self) -> str:
        """Its sizes, by the names of its arguments."""
        return f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}"

    def extra_repr(self) -> str:
        """The sizes, what form the parameters have, and what happens to the weight gradients."""
        bias = self._parameters[self.bias_names[0]] is not None
        return (
            f"{super().extra_repr()}, bias={bias}, scale_bias={self.scale_bias}, "
            f"single_grouped_weight={self.single_grouped_weight}, single_grouped_bias={self.single_grouped_bias}"
        )


def _names(whole: str, count: int, packed: bool) -> tuple[str, ...]:
    return (whole,) if packed else tuple([f"{whole}{expert}" for expert in range(count)])


def _repack(state_dict: dict[str, Any], whole: str, count: int, packed: bool) -> str | None:
    """Bring the experts' tensors under ``whole`` into the other form, where that is the one asked for.

    Returns what is wrong with their number, if anything.
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
