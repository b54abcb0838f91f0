"""``GraphedTrainingStep``: a whole iteration of a sharded model, replayed as one CUDA graph.

All of it is in the graph: each unit's gathers, forwards and backwards, reductions, and the update of the shards. Whole
parameters and gradients come and go in the graph's own memory. Nothing is gathered between two calls, so that nothing
has to wait there. A replay runs no Python. After it the host notes that shards have changed, and the next eager use
gathers anew.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer

from ..ddp.graphs.step_graphs import P, StepGraphs, T, Variant, check_optimizer, counted_steps
from ..ddp.optimizer.param_groups import is_fused
from ..ddp.torch_grads.sharded_grad import step_ended
from ..ddp.torch_internals import DisableTorchFunctionSubclass, grad_of_tensor, hook_keys
from .iteration.root import Root
from .module import FSDPModule, root_of, unit_of
from .state.optimizer_state import params_of
from .state.sharded_adam import ShardedAdam, ShardedAdamW
from .tensors.parameter import ShardedParameter, grad_hook_keys

__all__ = ["GraphedTrainingStep"]


class ShardedVariant(Variant):
    """The graph of one kind of call."""

    written: Sequence[Tensor] = ()
    """Parameters that the function writes after the optimizer's step, of which compact state has no remainders."""


class GraphedTrainingStep(StepGraphs[P, T, ShardedVariant]):
    """A function that runs one whole iteration, called eagerly at first, then captured and replayed as a CUDA graph::

        def train_step(tokens, targets):                 # one iteration, as a program without graphs writes it
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()                        # it ends like this: nothing of an iteration is left
            return loss

        step = GraphedTrainingStep(train_step, model, optimizer)
        for tokens, targets in batches:
            losses.append(step(tokens, targets))         # new tensors in every call
            scheduler.step()

    train_step        takes tensors, numbers and strings, alone or in lists, tuples and dicts; returns tensors or None,
                      alone or so. Microbatches, ``no_sync``, delayed weight gradients, clipping, loss scaling
                      (``torch.amp.GradScaler``) and compiled blocks may be in it
    model             the outermost module that ``fully_shard`` was called on
    optimizer         a torch optimizer over ``model.parameters()`` with ``fused=True`` (AdamW, Adam or SGD), or a
                      ``ShardedAdamW``
    num_warmup_steps  eager calls before the capture: optimizer states, compiled code and communicators are made in them
    max_graphs        how many kinds of calls are captured, as by ``maingrad.ddp.GraphedTrainingStep``, which also says
                      what the function may do

    Every call is one step of training, whether eager, captured or replayed. Between calls the model and the optimizer
    are in the state that an eager step leaves.

    Refused by name: optimizers without fused kernels, step hooks, a second optimizer over the model in the step, a
    recorded timeline, ``offload_to_cpu``, ``copy_engine_gather=True``, ``expandable_segments`` with several ranks, a
    step around which ``no_sync()`` or ``unshard()`` holds, and one that begins with gradients. Units whose gathers
    would run on copy engines by "auto" gather by kernels.

    On CPUs operations are recorded and run again in place of a CUDA graph: slower than eager, for tests.
    """

    variant_type = ShardedVariant

    def __init__(
        self,
        train_step: Callable[P, T],
        model: FSDPModule,
        optimizer: Optimizer,
        *,
        num_warmup_steps: int = 2,
        max_graphs: int = 8,
    ) -> None:
        if not isinstance(model, FSDPModule):
            raise TypeError(
                f"maingrad.fsdp.GraphedTrainingStep takes a module of fully_shard, not {type(model).__name__}; for "
                f"DistributedDataParallel it is maingrad.ddp.GraphedTrainingStep"
            )
        unit = unit_of(model)
        chosen = unit.copy_engine_gather == "auto"
        if chosen:
            unit.copy_engine_gather = False  # a root that is made now maps no memory
        root = root_of(model)
        if root.module() is not model:
            raise ValueError("GraphedTrainingStep: the module is a unit inside another; give the outermost one")
        if chosen and not any(each.copy_engine_gather is True for each in root.units):
            root.gather_by_kernels()
        self._root = root
        self._shards = [pair.sharded for bucket in root.buckets for pair in bucket.pairs]
        self._shard_ids = {id(shard) for shard in self._shards}
        self._optimizer = optimizer
        check_graphable(root, optimizer)
        super().__init__(
            train_step,
            optimizer,
            model,
            self._shards,
            root.gathers,
            root.units[0].grid.size,
            root.device,
            num_warmup_steps=num_warmup_steps,
            max_graphs=max_graphs,
        )

    def _beside(self) -> list[object]:
        with DisableTorchFunctionSubclass():
            plain = self._plain_params()
            seen = [(id(param), param.data_ptr(), param.requires_grad) for param in plain]
            return [*grad_hook_keys(self._shards), *hook_keys(plain), *seen]

    def _plain_params(self) -> list[Tensor]:
        """Parameters of the optimizer that are not sharded: a scale beside the model, equal on all ranks."""
        groups = self._optimizer.param_groups
        return [param for group in groups for param in group["params"] if id(param) not in self._shard_ids]

    def _check_startable(self, *, known: bool) -> None:
        root = self._root
        if known:  # the groups, and their options, are those of the capture
            check_optimizer(self._optimizer)
        else:
            check_graphable(root, self._optimizer)
        self._check_observed(root.observer)
        if not root.sync:
            raise RuntimeError(f"{self._name}: no_sync() around the graphed step; open it in the function")
        held = next((unit.label for unit in root.units if unit.num_unshards), None)
        if held is not None:
            raise RuntimeError(f"{self._name}: {held} is unsharded; call reshard() before the graphed step")
        if self._has_grads():
            raise RuntimeError(
                f"{self._name}: an iteration has begun outside of the graphed step, or its .grad are left: call "
                f"optimizer.zero_grad() before it"
            )

    def _has_grads(self) -> bool:
        with DisableTorchFunctionSubclass():  # for speed: no value is read
            grads = map(grad_of_tensor.__get__, (*self._shards, *self._plain_params()))
            return any(grad is not None for grad in grads)

    def _prepare(self) -> None:
        root = self._root
        root.begin(root.units[0])
        if root.grads.under_way:  # its .grad were set to None
            root.grads.give_up()
            root.grads.begin()
        root.gathers.release_all()
        if isinstance(self._optimizer, ShardedAdamW | ShardedAdam):
            self._optimizer.prepare_replay()

    @contextmanager
    def one_iteration(self) -> Iterator[None]:
        with counted_steps(self._name, self._optimizer, self._shard_ids) as mine:
            yield
        if len(mine) != 1 or self._has_grads():
            left = ", and has left .grad: let optimizer.zero_grad() be its last call" if self._has_grads() else ""
            raise RuntimeError(
                f"{self._name} must run one whole iteration: it called optimizer.step() {len(mine)} times{left}"
            )

    def _end_capture(self, variant: ShardedVariant) -> None:
        if isinstance(self._optimizer, ShardedAdamW | ShardedAdam):
            variant.written = self._optimizer.written_since()
        self._root.grads.begin()  # lets go of the captured sums

    def _capture_failed(self) -> None:
        step_ended(self._optimizer)
        self._root.grads.launcher.forget()
        self._root.abandon()
        for param in (*self._shards, *self._plain_params()):
            param.grad = None
        vars(self._optimizer).pop("grad_scale", None)
        vars(self._optimizer).pop("found_inf", None)

    def _after_replay(self, variant: ShardedVariant) -> None:
        if isinstance(self._optimizer, ShardedAdamW | ShardedAdam):
            self._optimizer.record_replay(variant.written)
        self._root.gathers.record_replay()


def check_graphable(root: Root, optimizer: Optimizer) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what cannot be captured, whatever the function does."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"GraphedTrainingStep takes a torch optimizer, not {type(optimizer).__name__}")
    shards = {id(pair.sharded) for bucket in root.buckets for pair in bucket.pairs}
    params = params_of(optimizer)
    if not any(id(param) in shards for param in params):
        raise ValueError("GraphedTrainingStep: the optimizer has no parameter of the model")
    for param in params:
        if isinstance(param, ShardedParameter) and id(param) not in shards:
            raise ValueError(
                f"GraphedTrainingStep: the optimizer has '{param.shard.name}' of another model, whose modes and "
                f"hooks no graph of this one follows: call fully_shard on a module that holds both models and "
                f"runs them in its forward, or take an optimizer and a step for each"
            )
    is_known = is_fused(type(optimizer)) or isinstance(optimizer, ShardedAdamW | ShardedAdam)
    if not (is_known and all(group.get("fused") for group in optimizer.param_groups)):
        raise ValueError(
            f"GraphedTrainingStep: {type(optimizer).__name__} without fused=True reads learning rates and counters on "
            f"the host; AdamW, Adam and SGD with fused=True can be captured"
        )
    if any(bucket.shard.device != root.device for bucket in root.buckets):
        raise ValueError("GraphedTrainingStep: offload_to_cpu updates shards on the host, which no graph replays")
    if root.copy_engines:
        raise ValueError(
            "GraphedTrainingStep: gathers by copy engines take memory that all ranks map, and not the graph's; build "
            'the units with copy_engine_gather="auto", by which captured gathers run as kernels, or False'
        )
    check_optimizer(optimizer)
