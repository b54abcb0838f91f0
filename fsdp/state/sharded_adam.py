"""``ShardedAdamW`` and ``ShardedAdam``: torch's classes over shards, with state in fewer bytes or on the host.

What a rank keeps of each of its elements, between steps::

                              shard    beside it                              in all, with the fp32 gradient
    torch.optim.AdamW         fp32     exp_avg, exp_avg_sq fp32               16 bytes
    state="compact"           bf16     int16 remainder, moments bf16          12
    ... moment_dtype=fp32     bf16     int16 remainder, moments fp32          16
    ... moment_dtype=uint8    bf16     int16 remainder, moments in 8 bits     10.03
    offload_state="host"      either   in page-locked memory

A bf16 shard and its remainder are the 32 bits of an fp32 master (``kernels.optimizer.reference.split_master``). So
gathers send what shards hold, without a cast, and no fp32 master exists. A step is one pass over memory
(``kernels/optimizer``). State dicts and checkpoints have fp32 masters and moments, and either form reads them.
"""

import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...ddp.collectives.streams import is_capturing
from ...ddp.optimizer.host_state import HostState, Member
from ...ddp.optimizer.moment_blocks import check_blocks, scale_key
from ...ddp.optimizer.state_forms import StateForm, knows_options
from ...ddp.optimizer.steps import MASTER, REMAINDER, SECOND_MOMENT, adam_options
from ...ddp.torch_internals import DisableTorchFunctionSubclass
from ...kernels.optimizer.adamw import AdamUpdate
from ...kernels.optimizer.eight_bits import blocks_of, dequantize_moment, quantize_moment
from ...kernels.optimizer.reference import UpdateRow, join_master, split_master
from ..tensors.parameter import ShardedParameter, flat_of
from .optimizer_state import params_of, places_of, translate_state_dicts
from .optimizer_watch import bucket_of, buckets_of
from .state_dict import is_kept

__all__ = ["ShardedAdam", "ShardedAdamW", "sharded_class"]

_STEP = "step"
_MOMENTS = ("exp_avg", SECOND_MOMENT)


class HeldState(NamedTuple):
    """State of one parameter, at the same addresses for ever: loads copy into it, and graphs replay updates of it."""

    tensors: dict[str, Tensor]
    """By torch's keys, and ``"remainder"``. Moments in 8 bits have scales beside them, by ``scale_key``."""
    plain: Tensor
    """The parameter as a plain tensor of one dim, with the parameter's version."""
    on_device: dict[str, Tensor]
    """Those that a step reads and writes: ``tensors``, or device memory that several buckets use by turns."""

    @property
    def is_compact(self) -> bool:
        """Whether the parameter and its remainder are the master. False: the parameter is the master."""
        return REMAINDER in self.tensors

    def is_in(self, given: Mapping[str, Any]) -> bool:
        """Whether ``given`` has these tensors, and no others."""
        return len(given) == len(self.tensors) and all(given.get(key) is each for key, each in self.tensors.items())

    def take(self, given: Mapping[str, Any]) -> None:
        """Copy state in either form. What ``given`` lacks begins anew. The parameter follows a ``"master"``."""
        given = {**given, **self._coded(given)}
        for key, mine in self.tensors.items():
            value = given.get(key)
            if value is None:
                mine.zero_()
            elif value is not mine:
                _copy(key, mine, torch.as_tensor(value))
        master: Tensor | None = given.get(MASTER)
        if master is None:
            return
        values = master.reshape(-1).float()
        if self.is_compact:
            values, remainder = split_master(values)
            self.tensors[REMAINDER].view(-1).copy_(remainder)
        self.plain.copy_(values)

    def _coded(self, given: Mapping[str, Any]) -> dict[str, Tensor]:
        """Codes and scales of moments that are kept in 8 bits and that ``given`` has as numbers."""
        coded: dict[str, Tensor] = {}
        for key in _MOMENTS:
            values = given.get(key)
            if self.tensors[key].dtype is torch.uint8 and values is not None and values.dtype is not torch.uint8:
                codes, scales = quantize_moment(values.reshape(-1).float(), signed=key != SECOND_MOMENT)
                coded |= {key: codes.view(values.shape), scale_key(key): scales}
        return coded

    def forget_remainder(self) -> None:
        """A program has written the parameter, which is the master now."""
        if self.is_compact:
            self.tensors[REMAINDER].zero_()

    def full(self) -> dict[str, Tensor]:
        """torch's state with fp32 moments, and the ``"master"`` of a compact parameter; copies in host memory."""
        full = {key: self._moment(key) for key in _MOMENTS}
        if self.is_compact:
            full[MASTER] = self.master().view(self.tensors[REMAINDER].shape)
        return {_STEP: self.tensors[_STEP].clone(), **full}

    def _moment(self, key: str) -> Tensor:
        """A moment in fp32, a copy in host memory."""
        mine = self.tensors[key]
        if mine.dtype is not torch.uint8:
            return mine.to("cpu", torch.float32, copy=True)
        values = dequantize_moment(mine.view(-1), self.tensors[scale_key(key)], signed=key != SECOND_MOMENT)
        return values.cpu().view(mine.shape)

    def master(self) -> Tensor:
        """The fp32 master [elements here] of a compact parameter, a copy in host memory."""
        return join_master(self.plain.cpu(), self.tensors[REMAINDER].view(-1).cpu())


def _copy(key: str, mine: Tensor, value: Tensor) -> None:
    if value.shape != mine.shape:
        raise ValueError(
            f"state '{key}' of shape {list(value.shape)} for a shard of {list(mine.shape)}: load it by "
            f"load_state_dict, which takes whole tensors and DTensors"
        )
    mine.copy_(value)


_MOST_UPDATES = 1024


class _ShardedAdam(Optimizer):
    """What the two classes share."""

    optimizer_class: type[Optimizer]
    """torch's class, which checkpoints name."""
    elementwise = True
    keeps_masters = True
    """State dicts may have a ``"master"`` of each parameter, which other classes write into their shards."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor | None = None,
        *,
        state: Literal["full", "compact"] = "compact",
        moment_dtype: torch.dtype | None = None,
        offload_state: Literal["host"] | None = None,
        **options: Any,
    ) -> None:
        self._form = StateForm(state, moment_dtype, offload_state)
        self._held: dict[Tensor, HeldState] = {}
        self._versions: dict[Tensor, int] = {}
        self._updates: dict[Hashable, AdamUpdate] = {}
        self._captured: list[AdamUpdate] = []
        """Those that graphs replay."""
        self._host: HostState | None = None
        self._given: Mapping[Any, Any] = {}
        self._is_built = False
        for key in ("foreach", "capturable"):
            if options.get(key) or options.get("fused") is False:
                raise ValueError(f"{type(self).__name__} is one pass on the device: leave {key} and fused out")
        options["fused"] = True
        if lr is not None:
            options["lr"] = lr
        super().__init__(params, **options)
        self._is_built = True
        self._adopt_params()
        translate_state_dicts(self)
        self.register_load_state_dict_pre_hook(_keep_given)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} is tied to its model's shards, and not copied: use state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's."""
        super().add_param_group(param_group)
        if self._is_built:
            try:
                self._adopt_params()
            except ValueError:
                self.param_groups.pop()
                raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update shards and state: step 8 of docs/by_hand.py.

        closure  called once, before; computes the iteration's gradients, and returns the loss, which ``step`` returns
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        knows_options(self.optimizer_class, self.param_groups, type(self).__name__)
        self.refresh_masters()
        options = [adam_options(group) for group in self.param_groups]
        index_of = {param: index for index, group in enumerate(self.param_groups) for param in group["params"]}
        with DisableTorchFunctionSubclass():
            grads = {param: param.grad for param in index_of}
        stepping = [param for param, grad in grads.items() if grad is not None]
        for param in stepping:
            if param not in self._held:
                self._begin(param)
        divisor, found_inf = vars(self).get("grad_scale"), vars(self).get("found_inf")
        parts = [(None, stepping)] if self._host is None else self._host.visits(stepping, self._homes_of)
        for _, chosen in parts:  # their state is on the device
            flat = [flat_of(grads[param]) for param in chosen]
            update = self._update_of(chosen, flat, index_of)
            update(options, grads=flat, divisor=divisor, found_inf=found_inf)
        self._note()
        return loss

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take over state that a program has replaced, and parameters that a program has written: see the class."""
        self._settle()
        for param, held in self._held.items():
            version = held.plain._version
            known, self._versions[param] = self._versions[param], version
            if version != known and not is_kept(param, known):
                self._wait_for_host()
                held.forget_remainder()

    # ---- State dicts and checkpoints: the full form. ----

    @torch.no_grad()
    def full_state(self) -> dict[Tensor, dict[str, Tensor]]:
        """torch's state by parameter, with fp32 moments, and ``"master"`` of bf16 shards; copies in host memory."""
        self.refresh_masters()
        self._wait_for_host()
        return {param: held.full() for param, held in self._held.items()}

    def masters(self, full: Mapping[Tensor, dict[str, Tensor]] | None = None) -> dict[Tensor, Tensor]:
        """The fp32 master [elements here] of each bf16 parameter, a copy in host memory.

        full  ``full_state()``, out of which they are taken. A parameter without state is its own master
        """
        full = self.full_state() if full is None else full
        return {
            param: full[param].pop(MASTER).view(-1) if param in full else flat_of(param).to("cpu", torch.float32)
            for param in params_of(self)
            if param.dtype is torch.bfloat16
        }

    def state_dict(self) -> dict[str, Any]:
        """As torch's: elementwise state in DTensors, as copies in host memory. Collective."""
        own, self.state = self.state, self.full_state()  # type: ignore[assignment]
        try:
            return super().state_dict()
        finally:
            self.state = own

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would round the fp32 state to the shards' dtype. Collective."""
        try:
            super().load_state_dict(state_dict)
            for group in self.param_groups:
                group.update(fused=True, foreach=None, capturable=False)
            self.load(self._given)
        finally:
            self._given = {}

    @torch.no_grad()
    def load(self, state: Mapping[Any, Mapping[str, Any]]) -> None:
        """Take over state by parameter, full or compact. Parameters follow a ``"master"``."""
        self.state.update({param: dict(values) for param, values in state.items()})
        self._settle()

    # ---- Graphed steps. ----

    @torch.no_grad()
    def prepare_replay(self) -> None:
        """Before a captured step is replayed: what changed parameters and state bring to the step."""
        self.refresh_masters()
        if self._host is not None:
            self._host.prepare_replay()

    def written_since(self) -> list[Tensor]:
        """Parameters that a program has written since the step."""
        return [param for param, held in self._held.items() if held.plain._version != self._versions[param]]

    def record_replay(self, written: Iterable[Tensor]) -> None:
        """A step was replayed, which then wrote to these parameters (``written_since`` its capture)."""
        self._note()
        self._versions |= dict.fromkeys(written, -1)

    # ---- What is kept. ----

    @property
    def _in_blocks(self) -> bool:
        """Whether moments have 8 bits, and a scale for each block of 256 elements."""
        return self._form.moment_dtype is torch.uint8

    def _note(self) -> None:
        self._versions = {param: held.plain._version for param, held in self._held.items()}

    def _wait_for_host(self) -> None:
        if self._host is not None:
            self._host.wait()

    @torch.no_grad()
    def _adopt_params(self) -> None:
        """Check the parameters, and have their gradients shown in the dtype of the sums."""
        params = params_of(self)
        named = [(_name_of(param), param.dtype) for param in params]
        self._form.check(self.optimizer_class, named, self.param_groups)
        for param in params:
            if not param.is_contiguous():
                raise ValueError(
                    f"a parameter of shape {list(param.shape)} is not contiguous: set param.data = param.contiguous()"
                )
        for name, dtype in () if self._form.is_compact else named:
            if dtype is not torch.float32:
                raise ValueError(
                    f"parameter '{name}' is {dtype}, and full state is beside fp32 shards: say state=\"compact\", or "
                    f"shard the module in fp32, with MixedPrecisionPolicy(param_dtype={dtype})"
                )
        buckets = buckets_of(self)
        if self._in_blocks:
            check_blocks((bucket.layout for bucket in buckets), 'shard the module with shard_atoms="block"')
        for bucket in buckets:
            if bucket.shard.device != bucket.device:
                raise ValueError(
                    f"{type(self).__name__} steps on {bucket.device}, and shards of '{bucket.name}' are on the host: "
                    f'leave offload_to_cpu out, and say offload_state="host"'
                )
        for bucket in buckets:
            if bucket.trainable:
                bucket.grad_shard.show_sums()
        if self._form.offload_state is not None and params:
            self._wait_for_host()
            members: dict[Any, list[Tensor]] = {}  # those that are not sharded are one more bucket
            for param in params:
                members.setdefault(bucket_of(param), []).append(param)
            self._host = HostState(
                params[0].device,
                (
                    Member(param, place, blocks_of(param.numel()) if self._in_blocks else 0)
                    for place, each in enumerate(members.values())
                    for param in each
                ),
            )
            self._updates.clear()
            for param, held in self._held.items():
                self._held[param] = held._replace(on_device=self._places(param, held.tensors))

    def _begin(self, param: Tensor) -> None:
        """State of a parameter, which begins as zeros."""
        compact, on_host = self._form.is_compact, self._host is not None
        moments = (self._form.moment_dtype or torch.bfloat16) if compact else torch.float32
        dtypes = dict.fromkeys(_MOMENTS, moments)
        if param.dtype is torch.bfloat16:  # full state is beside fp32 shards
            dtypes[REMAINDER] = torch.int16
        where: dict[str, Any] = {"device": "cpu", "pin_memory": param.is_cuda} if on_host else {"device": param.device}
        tensors = {_STEP: torch.zeros((), dtype=torch.float32, device=param.device)}
        tensors |= {key: torch.zeros(param.shape, dtype=dtype, **where) for key, dtype in dtypes.items()}
        if self._in_blocks:
            tensors |= {
                scale_key(key): torch.zeros(blocks_of(param.numel()), dtype=torch.float32, **where) for key in _MOMENTS
            }
        self._held[param] = held = HeldState(tensors, flat_of(param), self._places(param, tensors))
        self._versions[param] = held.plain._version
        self.state[param] = dict(tensors)

    def _places(self, param: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Where a step finds the state of a parameter on the device."""
        if self._host is None:
            return tensors
        host = self._host
        return {key: home if key == _STEP else host.place(param, key, home) for key, home in tensors.items()}

    def _homes_of(self, param: Tensor) -> dict[str, Tensor]:
        """The state of a parameter that lies on the host."""
        return {key: home for key, home in self._held[param].tensors.items() if key != _STEP}

    def _settle(self) -> None:
        """Copy state that was loaded or assigned to where it is kept. State that was removed begins anew."""
        for param in params_of(self):
            given, held = self.state.get(param), self._held.get(param)
            if held is None and not given:
                continue
            given = given or {}
            if held is None:
                self._begin(param)
            elif held.is_in(given):
                continue
            held = self._held[param]
            self._wait_for_host()
            held.take(given)
            self._versions[param] = held.plain._version
            self.state[param] = dict(held.tensors)

    # ---- The pass. ----

    def _update_of(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], group_of: Mapping[Tensor, int]
    ) -> AdamUpdate:
        """The kernel's table of these parameters, made anew where gradients have another dtype."""
        maximize = bool(self.param_groups[0]["maximize"])
        # Names too: they decide random bits, and torch's functions step once before the forward that tells them.
        key = (maximize, *[(id(param), _name_of(param), group_of[param]) for param in params])
        update = self._updates.get(key)
        if update is None or not update.takes(grads):
            if len(self._updates) >= _MOST_UPDATES:
                self._updates.clear()
            update = self._updates[key] = AdamUpdate(
                [self._row(param, grad, group_of[param]) for param, grad in zip(params, grads, strict=True)],
                decoupled=issubclass(self.optimizer_class, torch.optim.AdamW),
                maximize=maximize,
                grads_move=True,
            )
        if is_capturing() and update not in self._captured:
            self._captured.append(update)
        return update

    def _row(self, param: Tensor, grad: Tensor, group: int) -> UpdateRow:
        held = self._held[param]
        mine = {key: tensor if key == _STEP else tensor.view(-1) for key, tensor in held.on_device.items()}
        remainder = mine.get(REMAINDER)
        return UpdateRow(
            grad,
            mine["exp_avg"],
            mine["exp_avg_sq"],
            mine[_STEP],
            master=held.plain if remainder is None else None,
            param=None if remainder is None else held.plain,
            remainder=remainder,
            exp_avg_scale=mine.get(scale_key("exp_avg")),
            exp_avg_sq_scale=mine.get(scale_key("exp_avg_sq")),
            first=param.shard.start if isinstance(param, ShardedParameter) else 0,
            key=zlib.crc32(_name_of(param).encode()),
            group=group,
        )


class ShardedAdamW(_ShardedAdam, torch.optim.AdamW):
    """``torch.optim.AdamW`` over parameters of ``fully_shard``, in one pass, with compact state or state on the host.

    params         as torch's classes take them: ``model.parameters()``, ``model.named_parameters()``, or groups. Plain
                   parameters may be among them
    lr             learning rate; None: torch's default
    state          "compact": bf16 shards and 16 bits of remainder are fp32 masters, and moments are bf16. A shard is
                   the master rounded half away from zero. fp32 shards are their own masters. "full": fp32 shards with
                   fp32 moments, as torch keeps them, for ``offload_state``
    moment_dtype   of compact moments: ``torch.bfloat16`` (None), rounded stochastically; ``torch.float32``; or
                   ``torch.uint8``, codes with a scale for 256 elements, for which units are sharded with
                   ``fully_shard(shard_atoms="block")``
    offload_state  "host": remainders and moments lie in page-locked host memory, and pass through the device bucket by
                   bucket in each step, which has the same bits
    options        of torch's class: ``betas``, ``eps``, ``weight_decay``

    Shards are bf16 where the module was when ``fully_shard`` took it: ``fully_shard(model.bfloat16())``. Their
    ``.grad`` is then in ``grad_dtype`` of the mixed-precision policy (fp32), the sums themselves, without a bf16 copy.

    A program's write to a parameter (``load_state_dict``, an in-place update) is its new master, without remainders.
    ``state_dict()`` has fp32 moments and, of bf16 shards, fp32 masters (``"master"``), as copies in host memory.
    ``load_state_dict`` takes them, and what torch's classes have saved.

    Raises ``ValueError`` for parameters that are neither bf16 nor fp32, for ``amsgrad``, ``maximize`` and
    ``differentiable``, under ``offload_to_cpu``, whose shards no GPU updates, and for moments in 8 bits where a border
    between shards cuts one of their blocks.
    """

    optimizer_class = torch.optim.AdamW


class ShardedAdam(_ShardedAdam, torch.optim.Adam):
    """``torch.optim.Adam`` over parameters of ``fully_shard``: as ``ShardedAdamW``, with Adam's weight decay."""

    optimizer_class = torch.optim.Adam


def sharded_class(optimizer_class: type[Optimizer]) -> type[Optimizer]:
    """The class here that is torch's ``optimizer_class`` with other forms of state. ``ValueError``: there is none."""
    for each in (ShardedAdamW, ShardedAdam):
        if each.optimizer_class is optimizer_class:
            return each
    raise ValueError(
        f'state="compact" and offload_state are for Adam and AdamW, not {optimizer_class.__name__}: leave them out'
    )


def _keep_given(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Pre-hook of ``load_state_dict``, after the one that makes shards: torch loads the groups alone."""
    state = state_dict["state"]
    if any(REMAINDER in given for given in state.values()):
        raise ValueError(
            f"{type(optimizer).__name__}.load_state_dict: a state dict has '{MASTER}', and this one has '{REMAINDER}'. "
            f"torch's set_optimizer_state_dict asks for this name under flatten_optimizer_state_dict=True: leave that "
            f"option out, in saves and loads, or use save_checkpoint and load_checkpoint"
        )
    optimizer._given = {param: state[index] for param, index in places_of(optimizer, state_dict).items()}
    return {**state_dict, "state": {}}


def _name_of(param: Tensor) -> str:
    """The sharded parameter's name in the outermost unit, once a forward has run."""
    return param.shard.name if isinstance(param, ShardedParameter) else "not sharded"
