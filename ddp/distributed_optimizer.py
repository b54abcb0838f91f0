"""AdamW on flat fp32 masters: one per bucket, this rank's shard of it, or all of it under all-reduce.

The parameters move into flat buffers with the gradients' own layout, so that a rank's shard of parameters, masters,
moments and gradients is the same range of elements everywhere, and the all-gather runs in place::

    bucket of gradients (reduce-scattered)   | rank 0 | rank 1 | rank 2 | rank 3 |
    master, exp_avg, exp_avg_sq on rank 1             | fp32   |
    bucket of parameters (all-gathered)      | rank 0 | rank 1 | rank 2 | rank 3 |
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .bucket import Bucket
from .buffer import FlatBuffer
from .collectives import all_gather_shards
from .data_parallel import DistributedDataParallel
from .grad_norm import clip_coefficient, global_grad_norm
from .wiring import WiredParam

__all__ = ["DistributedOptimizer"]


class _Shard(NamedTuple):
    """What this rank updates of one bucket."""

    bucket: Bucket
    params: Tensor
    """[bucket.numel] the bucket's parameters, all ranks' shards."""
    mine: Tensor
    """View of ``params``: the range that this rank updates."""
    master: nn.Parameter
    """fp32 copy of ``mine``; ``mine`` itself where parameters are fp32 already."""
    grads: Tensor
    """View of the bucket's gradients: the same range."""


class _Slice(NamedTuple):
    """Where one parameter meets this rank's shard of its bucket."""

    wired: WiredParam
    view: Tensor
    """The parameter's storage in the flat buffer, in the parameter's shape."""
    master: Tensor
    """Its elements in the master."""
    mine: Tensor
    """The same elements in the flat parameter buffer."""


class DistributedOptimizer(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) over the buckets of a ``DistributedDataParallel`` model.

    With ``use_distributed_optimizer=True`` each rank keeps masters and moments of its shard only (ZeRO stage 1,
    Rajbhandari et al., 2020) and the updated parameters are all-gathered; otherwise every rank updates everything.
    PyTorch's fused AdamW does the arithmetic; clipping by the global norm rides in the same pass.

    lr, betas, eps, weight_decay  as in ``torch.optim.AdamW``; learning-rate schedulers of torch work on this class
    max_grad_norm                 clip by the global norm; None: no clipping (``grad_norm`` is then None)

    Parameters that somebody changed since the last step (``load_state_dict``, an in-place update) are read into the
    masters again first. ``zero_grad`` is ``model.zero_grad_buffer``. ``step`` raises ``RuntimeError`` before
    ``finish_grad_sync`` and under ``GradScaler``.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(f"DistributedOptimizer needs a DistributedDataParallel model, got {type(model).__name__}")
        if max_grad_norm is not None and max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm must be positive, or None for no clipping; got {max_grad_norm}")
        self.model = model
        self.max_grad_norm = max_grad_norm
        self.grad_norm: Tensor | None = None
        """Global norm of the last step's gradients before clipping, a 0-dim tensor."""

        param_views = _flatten_params(model)
        self._shards = [_shard_of(model, bucket, params) for bucket, params in param_views]
        self._slices = list(_slices_of(model, self._shards))
        self._versions = [piece.wired.owned.param._version for piece in self._slices]

        masters = [shard.master for shard in self._shards]
        self._adamw = torch.optim.AdamW(masters, lr, betas, eps, weight_decay, fused=True)
        super().__init__(masters, self._adamw.defaults)
        # One list of groups and one state for both, so that schedulers and state dicts act on what the step reads.
        self.param_groups = self._adamw.param_groups
        self.state = self._adamw.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Clip, update the masters, round them into the parameters and gather these from all ranks."""
        if closure is not None:
            raise ValueError("DistributedOptimizer.step() takes no closure: gradients are reduced once per iteration")
        self.model.check_reduced("optimizer.step()")
        self._check_storage()
        self.refresh_masters()
        self._adamw.grad_scale = self._inverse_clip_coefficient()  # type: ignore[attr-defined]
        for shard in self._shards:
            shard.master.grad = shard.grads.to(shard.master.dtype)
        self._adamw.step()
        for shard in self._shards:
            shard.master.grad = None
        flights = []
        for shard in self._shards:
            if shard.master.data_ptr() != shard.mine.data_ptr():
                shard.mine.copy_(shard.master)
            if self.model.config.use_distributed_optimizer:
                flights.append(all_gather_shards(shard.params, self.model.process_group))
        for flight in flights:
            flight.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Start a new iteration: ``model.zero_grad_buffer()``."""
        self.model.zero_grad_buffer()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Read parameters into the masters where somebody changed them since they were last in step.

        Elements that still are their master's rounding keep it: a model loaded after its optimizer loses no bits.
        In-place changes are seen by the tensor's version. Writing through ``param.data`` leaves none: change the
        parameter itself under ``torch.no_grad()``.
        """
        for index, piece in enumerate(self._slices):
            version = piece.wired.owned.param._version
            if version != self._versions[index]:
                self._versions[index] = version
                same = piece.master.to(piece.mine.dtype) == piece.mine
                piece.master.copy_(torch.where(same, piece.master, piece.mine))

    def state_dict(self) -> dict[str, Any]:
        """This rank's moments, groups and masters. It fits this number of ranks and this bucket plan only."""
        state = super().state_dict()
        state["masters"] = [shard.master.detach() for shard in self._shards]
        state["layout"] = self._layout_key()
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave on the same rank of the same layout; parameters follow the masters."""
        if state_dict.get("layout") != self._layout_key():
            raise ValueError(
                f"this optimizer state was saved with another bucket plan, rank or number of ranks: it has layout "
                f"{state_dict.get('layout')}, and this is {self._layout_key()}"
            )
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self._adamw.param_groups, self._adamw.state = self.param_groups, self.state
        for shard, master in zip(self._shards, state_dict["masters"], strict=True):
            shard.master.copy_(master)
            shard.mine.copy_(shard.master)
            if self.model.config.use_distributed_optimizer:
                all_gather_shards(shard.params, self.model.process_group).wait()
        self._versions = [piece.wired.owned.param._version for piece in self._slices]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One group of flat masters, made by the constructor; another one is refused."""
        if self.param_groups:
            raise RuntimeError(
                "DistributedOptimizer updates every parameter of its model as one group and takes no other: "
                "wrap the model with all its parameters"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "DistributedOptimizer is tied to its model's buckets and is not copied or pickled; use state_dict()"
        )

    @property
    def grad_scale(self) -> Tensor:
        """Read by ``torch.amp.GradScaler.step``, which this optimizer refuses."""
        raise RuntimeError(
            "GradScaler over DistributedOptimizer: each rank would look for Inf in its own shard only, and ranks would "
            "skip different steps; train in bf16, or use a stock optimizer with model.expose_grads()"
        )

    _step_supports_amp_scaling = True  # makes GradScaler.step read grad_scale, which names the remedy above

    def _layout_key(self) -> str:
        first = self._shards[0]
        offset = first.mine.storage_offset() - first.params.storage_offset()
        return f"{self.model.plan.fingerprint[:16]}/{offset}/{len(self._shards)}"

    def _inverse_clip_coefficient(self) -> Tensor | None:
        """What fused AdamW divides gradients by, so that clipping costs no pass of its own."""
        if self.max_grad_norm is None:
            return None
        self.grad_norm = global_grad_norm(self.model)
        return clip_coefficient(self.grad_norm, self.max_grad_norm).reciprocal().float()

    def _check_storage(self) -> None:
        for piece in self._slices:
            param = piece.wired.owned.param
            if param.data_ptr() != piece.view.data_ptr():
                raise RuntimeError(
                    f"parameter '{piece.wired.owned.name}' was given other storage (.to(), .data = ...) after the "
                    f"optimizer was built: updates would not reach it; move the model before wrapping it"
                )


def _flatten_params(model: DistributedDataParallel) -> list[tuple[Bucket, Tensor]]:
    """Move the parameters into flat buffers laid out like the gradients; returns each bucket with its parameters."""
    by_name = {wired.owned.name: wired for wired in model.wired}
    by_index = {bucket.index: bucket for bucket in model.buckets}
    views = []
    names: dict[int, str] = {}
    for wired in model.wired:
        if wired.owned.param.is_complex():
            raise ValueError(
                f"parameter '{wired.owned.name}' is {wired.dtype}: DistributedOptimizer updates real parameters; use a "
                f"stock optimizer with model.expose_grads()"
            )
        first = names.setdefault(wired.owned.param.data_ptr(), wired.owned.name)
        if first != wired.owned.name and wired.owned.param.numel():
            raise ValueError(
                f"parameters '{first}' and '{wired.owned.name}' share memory, which flat buffers would undo: tie them "
                f"as one nn.Parameter object"
            )
    for layout in model.plan.buffers:
        buffer = FlatBuffer(layout, layout.param_dtype, model.device)
        for bucket in layout.buckets:
            for slot in bucket.slots:
                param, view = by_name[slot.spec.name].owned.param, buffer.param_view(slot)
                view.copy_(param.detach())
                param.data = view
            views.append((by_index[bucket.index], buffer.bucket_view(bucket)))
    return views


def _shard_of(model: DistributedDataParallel, bucket: Bucket, params: Tensor) -> _Shard:
    owned = slice(*model.owned_range(bucket.layout))
    mine = params[owned]
    master = mine.float() if mine.dtype in (torch.bfloat16, torch.float16) else mine
    return _Shard(bucket, params, mine, nn.Parameter(master), bucket.grad_data[owned])


def _slices_of(model: DistributedDataParallel, shards: list[_Shard]) -> list[_Slice]:
    """Each parameter's intersection with this rank's shard (empty where it lies in another rank's)."""
    by_name = {wired.owned.name: wired for wired in model.wired}
    slices = []
    for shard in shards:
        layout = shard.bucket.layout
        first, last = model.owned_range(layout)
        for slot in layout.slots:
            start = max(slot.start - layout.start, first)
            end = max(min(slot.end - layout.start, last), start)
            wired = by_name[slot.spec.name]
            slices.append(
                _Slice(
                    wired=wired,
                    view=wired.owned.param.detach(),
                    master=shard.master.detach()[start - first : end - first],
                    mine=shard.params[start:end],
                )
            )
    return slices
