"""Experts of one grouped product under different providers, each by its own row; faults of weight groups."""

import weakref
from typing import Any

import pytest
import torch
from foreign import ForeignProvider, LazyForeignProvider
from loops import has_no_own_grad, wrap
from modules import error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.ddp.contract.main_grad import placeholder
from maingrad.launch import simulate
from maingrad.te_integration import GroupedLinear, WgradQueue, delayed_wgrad

K, N = 6, 5
SPLITS = [3, 2, 0, 4, 1, 2]
ROUNDING = 2.0**-19
DELAYED_OR_NOT = pytest.mark.parametrize("delay", [False, True])
FUSED_OR_NOT = pytest.mark.parametrize("fuse", [False, True])


def make(experts: int = len(SPLITS), **options: Any) -> GroupedLinear:
    torch.manual_seed(0)
    return GroupedLinear(experts, K, N, **{"fuse_wgrad_accumulation": True, **options})


def batch(rows: int = sum(SPLITS), seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, K, generator=generator), torch.randn(rows, N, generator=generator)


def wgrads(batches: list[tuple[Tensor, Tensor]], splits: list[int] = SPLITS) -> list[Tensor]:
    """Summed over batches, of each expert, in fp64."""
    total = [torch.zeros(N, K, dtype=torch.float64) for _ in splits]
    for x, dy in batches:
        for expert, (one, other) in enumerate(zip(x.double().split(splits), dy.double().split(splits), strict=True)):
            total[expert] += other.t() @ one
    return total


def step(module: GroupedLinear, x: Tensor, dy: Tensor, splits: list[int] = SPLITS) -> None:
    module(x, torch.tensor(splits)).backward(dy)
    module.backward_dw()


class Some(nn.Module):
    """Some parameters of another module, under their own names."""

    def __init__(self, module: nn.Module, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, getattr(module, name))


# ---- Mixed experts. ----


class Mixed:
    """Expert 0 frozen, 1 without the flag, 2 and 3 foreign (2 has no rows), 4 lazy, 5 ours."""

    def __init__(self, delay: bool) -> None:
        self.module = make(delay_wgrad_compute=delay, bias=False)
        self.weights = [getattr(self.module, f"weight{expert}") for expert in range(6)]
        self.weights[0].requires_grad_(False)
        self.weights[0].main_grad = torch.full((N, K), torch.nan)
        self.weights[0].grad_added_to_main_grad = False
        self.no_flag = ForeignProvider(Some(self.module, "weight1"), flag=False)
        self.foreign = ForeignProvider(Some(self.module, "weight2", "weight3"))
        self.lazy_model = Some(self.module, "weight4")
        self.lazy = LazyForeignProvider(self.lazy_model)
        self.ours = wrap(Some(self.module, "weight5"))
        if delay:  # foreign hooks run where this module says that a gradient is there
            for provider, name in ((self.foreign, "weight2"), (self.foreign, "weight3"), (self.lazy, "weight4")):
                hook = provider._hook_of(name)
                weight = getattr(self.module, name)
                self.module.register_wgrad_accumulation_and_reduce_hooks(lambda hook=hook, weight=weight: hook(weight))

    def flags(self) -> list[Any]:
        return [getattr(weight, "grad_added_to_main_grad", "absent") for weight in self.weights]


@DELAYED_OR_NOT
def test_each_expert_follows_its_own_row(delay: bool) -> None:
    mixed = Mixed(delay)
    module, batches = mixed.module, [batch(seed=seed) for seed in range(3)]
    for index, (x, dy) in enumerate(batches):
        output = module(x, torch.tensor(SPLITS))
        seen: list[Any] = []

        def note(grads: tuple[Tensor | None, ...], _: object, seen: list[Any] = seen) -> None:
            seen.append([None if grad is None else grad.data_ptr() for grad in grads])
            seen.append(mixed.flags())

        output.grad_fn.register_hook(note)
        del note
        before = [getattr(weight, "main_grad", torch.empty(0)).clone() for weight in mixed.weights]
        output.backward(dy)
        returned, flags = seen
        scratch = placeholder(mixed.weights[3]).data_ptr()
        tensors = [each for each in returned if each is not None]
        assert tensors == [scratch] * 3, "the foreign and the lazy experts, and nobody else"
        assert flags == [False, "absent", True, True, True, True]
        if delay:
            after = [getattr(weight, "main_grad", torch.empty(0)) for weight in mixed.weights]
            for one, other in zip(before, after, strict=True):
                assert torch.equal(one.nan_to_num(7), other.nan_to_num(7)), "written before its turn"
            assert module.need_backward_dw()
        module.backward_dw()
        mixed.lazy.start_microbatch(mixed.lazy_model)
        assert mixed.flags() == [False, "absent", False, False, False, False]
        expected = wgrads(batches[: index + 1])
        for expert in range(1, 6):
            assert error(mixed.weights[expert].main_grad, expected[expert]) <= ROUNDING, f"expert {expert}"
            assert has_no_own_grad(mixed.weights[expert])
    frozen = mixed.weights[0]
    assert frozen.main_grad.isnan().all() and frozen.grad is None and frozen.grad_added_to_main_grad is False


@DELAYED_OR_NOT
@FUSED_OR_NOT
def test_a_frozen_expert_keeps_its_bias(delay: bool, fuse: bool) -> None:
    """Fault 7 of a group: nothing of the frozen expert is computed, and everything of the others."""
    module = make(fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay)
    module.weight1.requires_grad_(False)
    module.bias3.requires_grad_(False)
    ddp = wrap(module)
    x, dy = batch()
    step(module, x, dy)
    ddp.finish_grad_sync()
    expected, sums = wgrads([(x, dy)]), [part.double().sum(0) for part in dy.split(SPLITS)]
    for expert in range(6):
        weight, bias = getattr(module, f"weight{expert}"), getattr(module, f"bias{expert}")
        if expert == 1:
            assert weight.grad is None and not hasattr(weight, "main_grad")
        else:
            assert error(weight.main_grad, expected[expert]) <= ROUNDING
        if expert == 3:
            assert bias.grad is None
        else:
            assert error(bias.main_grad, sums[expert]) <= ROUNDING


# ---- Delayed groups. ----


def test_a_group_is_one_entry_that_every_record_waits_for() -> None:
    module = make(bias=False)
    ddp = wrap(module, overlap_grad_reduce=True, bucket_size=1)
    queue = WgradQueue()
    x, dy = batch()
    with delayed_wgrad(queue):
        output = module(x, torch.tensor(SPLITS))
    output.backward(dy)
    (entry,) = queue
    indices = {record.name: record.bucket_index for record in ddp.records}
    assert len(set(indices.values())) == 6 and entry.pending.order[0] == min(indices.values())
    assert all(record.pending == [entry.pending] for record in ddp.records)
    assert {bucket.phase.value for bucket in ddp.buckets} == {"accumulating"}
    assert [*map(id, entry.weights())] == [*map(id, module.parameters())]
    other = make(bias=False)
    queue.drain_module(other)
    assert len(queue) == 1, "not its weights"
    queue.drain_module(module)
    assert not queue and {bucket.phase.value for bucket in ddp.buckets} == {"reducing"}
    assert not any(record.pending for record in ddp.records)
    ddp.finish_grad_sync()


def test_an_abandoned_group_leaves_nothing_pending() -> None:
    module = make(delay_wgrad_compute=True)
    ddp = wrap(module)
    x, dy = batch()
    module(x, torch.tensor(SPLITS)).backward(dy)
    module.wgrad_queue.clear()
    assert not module.need_backward_dw() and not any(record.pending for record in ddp.records)
    ddp.zero_grad_buffer()


def test_a_group_that_waits_is_not_read_after_it_was_overwritten() -> None:
    module = make(delay_wgrad_compute=True, fuse_wgrad_accumulation=False)
    x, dy = batch()
    module(x, torch.tensor(SPLITS)).backward(dy)
    x.zero_()
    with pytest.raises(RuntimeError, match=r"GroupedLinear\(.*was changed in place before it was computed"):
        module.backward_dw()


def test_a_group_that_waits_keeps_nothing_of_the_layers_before() -> None:
    before, module = nn.Linear(K, K), make(delay_wgrad_compute=True, fuse_wgrad_accumulation=False)
    x, dy = batch()
    module(before(x), torch.tensor(SPLITS)).backward(dy)
    alive = weakref.ref(before.weight)
    del before
    assert alive() is None
    module.backward_dw()
    assert module.weight0.grad is not None


def test_uses_in_two_recomputed_blocks_are_one_microbatch() -> None:
    """Each block of a reentrant checkpoint runs a backward of its own, inside the one that the program has called."""
    module = make(delay_wgrad_compute=True, fuse_wgrad_accumulation=False)
    batches, splits = [batch(seed=seed) for seed in range(2)], torch.tensor(SPLITS)
    outputs = [checkpoint(module, x.requires_grad_(), splits, use_reentrant=True) for x, _ in batches]
    torch.autograd.backward(outputs, [dy for _, dy in batches])
    module.backward_dw()
    assert not module.need_backward_dw()
    for expert, wanted in enumerate(wgrads(batches)):
        assert error(getattr(module, f"weight{expert}").grad, wanted) <= ROUNDING


def test_a_queue_over_a_foreign_providers_experts_is_refused() -> None:
    module = make()
    kept = ForeignProvider(module)
    with delayed_wgrad(WgradQueue()), pytest.raises(RuntimeError, match=r"GroupedLinear\(.*a foreign provider owns"):
        module(batch()[0], SPLITS)
    assert kept is not None


# ---- Faults. ----


@pytest.mark.parametrize("packed", [False, True])
def test_04_delayed_and_unfused_gradients_add_up_in_grad(packed: bool) -> None:
    module = make(fuse_wgrad_accumulation=False, delay_wgrad_compute=True, single_grouped_weight=packed)
    batches = [batch(seed=seed) for seed in range(3)]
    for x, dy in batches[:2]:
        module(x, torch.tensor(SPLITS)).backward(dy)
    x, dy = batches[2]
    module(x, torch.tensor(SPLITS)).backward(dy)
    for _ in range(3):
        assert module.need_backward_dw()
        module.backward_dw()
    gradient = module.weight.grad if packed else torch.stack([getattr(module, f"weight{e}").grad for e in range(6)])
    for mine, theirs in zip(gradient, wgrads(batches), strict=True):
        assert error(mine, theirs) <= ROUNDING


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("provider", ["none", "ours"])
def test_05_delayed_and_unfused_returns_nothing_before_its_turn(packed: bool, provider: str) -> None:
    module = make(fuse_wgrad_accumulation=False, delay_wgrad_compute=True, single_grouped_weight=packed, bias=False)
    kept = wrap(module) if provider == "ours" else None
    x, dy = batch()
    module(x, torch.tensor(SPLITS)).backward(dy)
    for name in module.weight_names:
        weight = getattr(module, name)
        assert has_no_own_grad(weight)
        assert kept is None or not weight.main_grad.any()
    module.backward_dw()
    for expert, expected in enumerate(wgrads([(x, dy)])):
        weight = module.weight if packed else getattr(module, f"weight{expert}")
        gradient = weight.grad if kept is None else weight.main_grad
        assert error(gradient[expert] if packed else gradient, expected) <= ROUNDING


@DELAYED_OR_NOT
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("provider", ["ours", "lazy"])
def test_09_an_expert_without_tokens_is_zeros_where_it_was_to_be_overwritten(
    packed: bool, provider: str, delay: bool
) -> None:
    """Also in the next iteration, whose memory still holds the last gradients. Padding rows do not contribute."""
    module = make(single_grouped_weight=packed, delay_wgrad_compute=delay, bias=False)
    ddp = wrap(module) if provider == "ours" else None
    kept = None if provider == "ours" else LazyForeignProvider(module)
    for splits in ([3, 2, 0, 4, 1, 2], [0, 5, 4, 0, 3, 0], [0, 0, 0, 0, 0, 0]):
        x, dy = batch(sum(splits) + 4)
        x[sum(splits) :] = dy[sum(splits) :] = torch.nan
        for name in module.weight_names if ddp is not None else ():
            getattr(module, name).main_grad.data.fill_(torch.nan)
        output = module(x, torch.tensor(splits))
        assert not output[sum(splits) :].any(), "pad rows are zeros"
        output.backward(dy)
        module.backward_dw()
        for expert, expected in enumerate(wgrads([(x[: sum(splits)], dy[: sum(splits)])], splits)):
            main_grad = module.weight.main_grad[expert] if packed else getattr(module, f"weight{expert}").main_grad
            assert error(main_grad, expected) <= ROUNDING, f"expert {expert}"
        if ddp is not None:
            ddp.finish_grad_sync()
            ddp.zero_grad_buffer()
        else:
            kept.allocated.clear()


@DELAYED_OR_NOT
def test_14_rows_of_any_stride_are_written_where_they_are(delay: bool) -> None:
    """Discrete: rows apart. Packed: experts between each other's rows, or apart. Nothing between them is touched."""
    for packed in (False, True):
        module = make(single_grouped_weight=packed, delay_wgrad_compute=delay, bias=False)
        kept = ForeignProvider(module)
        around = torch.full((N, 6, K + 3), 7.0)
        views = around[:, :, 1 : K + 1].transpose(0, 1)  # [6, N, K], experts' rows interleaved
        if packed:
            module.weight.main_grad = views
        else:
            for expert in range(6):
                getattr(module, f"weight{expert}").main_grad = views[expert]
        views.zero_()
        batches = [batch(seed=seed) for seed in range(2)]
        for x, dy in batches:
            step(module, x, dy)
        for expert, expected in enumerate(wgrads(batches)):
            assert error(around[:, expert, 1 : K + 1], expected) <= ROUNDING
        assert (around[:, :, 0] == 7).all() and (around[:, :, K + 1 :] == 7).all()
        assert kept is not None


@DELAYED_OR_NOT
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda shape: torch.zeros(*shape[:-2], shape[-1], shape[-2]).mT, r"got shape \(.*5, 6\), stride \(.*1, 5\)"),
        (lambda shape: torch.zeros(1, shape[-1]).expand(shape), r"stride \(.*0, 1\)"),
        (lambda shape: torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2], r"stride \(.*12, 2\)"),
        (lambda shape: torch.zeros(shape[:-1]), r"got shape \(.*5,?\)"),
        (lambda shape: torch.zeros(shape, dtype=torch.float16), r"torch\.float16"),
    ],
    ids=["transposed", "one row for all", "every other column", "flat", "half"],
)
def test_14_a_main_grad_that_cannot_be_written_is_refused(packed: bool, bad: Any, message: str, delay: bool) -> None:
    """With the module, the weight, its shape and its stride, and before anything is written."""
    module = make(single_grouped_weight=packed, delay_wgrad_compute=delay, bias=False, name="layers.1.fc2")
    kept = ForeignProvider(module)
    name = "weight" if packed else "weight4"
    getattr(module, name).main_grad = bad(getattr(module, name).shape)
    x, dy = batch()
    refused = rf"(?s)layers.1.fc2, {name}: main_grad must have adjacent columns.*{message}"
    with pytest.raises(RuntimeError, match=refused):
        step(module, x, dy)
    assert packed or not module.weight0.main_grad.any()
    assert kept is not None


@DELAYED_OR_NOT
def test_15_each_expert_obeys_its_own_foreign_overwrite_bit(delay: bool) -> None:
    module = make(delay_wgrad_compute=delay, bias=False)
    kept = ForeignProvider(module)
    overwrites = [True, False, True, False, False, True]
    for expert, overwrite in enumerate(overwrites):
        getattr(module, f"weight{expert}").main_grad.data.fill_(3.0)
        getattr(module, f"weight{expert}").overwrite_main_grad = overwrite
    x, dy = batch()
    step(module, x, dy)
    for expert, expected in enumerate(wgrads([(x, dy)])):
        before = 0.0 if overwrites[expert] else 3.0
        assert error(getattr(module, f"weight{expert}").main_grad, expected + before) <= ROUNDING, f"expert {expert}"
    assert kept is not None


@DELAYED_OR_NOT
def test_15_each_expert_has_its_own_first_write(delay: bool) -> None:
    """Another product of this iteration has already written experts 1 and 4."""
    module = make(delay_wgrad_compute=delay, bias=False)
    ddp = wrap(module)
    for record in ddp.records:
        record.view.data.fill_(torch.nan)
    for expert in (1, 4):
        weight = getattr(module, f"weight{expert}")
        (weight * 3.0).sum().backward()
    x, dy = batch()
    step(module, x, dy)
    for expert, expected in enumerate(wgrads([(x, dy)])):
        before = 3.0 if expert in (1, 4) else 0.0
        assert error(getattr(module, f"weight{expert}").main_grad, expected + before) <= ROUNDING, f"expert {expert}"


@DELAYED_OR_NOT
@pytest.mark.parametrize(("provider", "fuse"), [("ours", True), ("ours", False), ("lazy", True)])
def test_03_experts_that_share_one_weight(provider: str, fuse: bool, delay: bool) -> None:
    """Both contributions of a product count, though one kernel computes both."""
    module = make(bias=False, fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay)
    module.weight3 = module.weight0
    kept: Any = wrap(module) if provider == "ours" else LazyForeignProvider(module)
    batches = [batch(seed=seed) for seed in range(2)]
    for x, dy in batches:
        step(module, x, dy)
        if provider == "lazy":
            kept.start_microbatch(module)
    if provider == "ours":
        kept.finish_grad_sync()
    expected = wgrads(batches)
    assert error(module.weight0.main_grad, expected[0] + expected[3]) <= ROUNDING
    assert error(module.weight1.main_grad, expected[1]) <= ROUNDING


@DELAYED_OR_NOT
@pytest.mark.parametrize("packed", [False, True])
def test_22_gradients_that_are_handed_to_the_caller_leave_main_grad_alone(packed: bool, delay: bool) -> None:
    module = make(single_grouped_weight=packed, delay_wgrad_compute=delay, bias=False)
    ddp = wrap(module)
    x, dy = batch()
    step(module, x, dy)
    before = [record.view.clone() for record in ddp.records]
    other, dother = batch(seed=2)
    other.requires_grad_()
    weights = [getattr(module, name) for name in module.weight_names]
    ours = torch.autograd.grad(module(other, torch.tensor(SPLITS)), (other, *weights), dother)
    gradients = ours[1] if packed else ours[1:]
    for mine, theirs in zip(gradients, wgrads([(other.detach(), dother)]), strict=True):
        assert error(mine, theirs) <= ROUNDING
    (dx,) = torch.autograd.grad(module(other, torch.tensor(SPLITS)), other, dother)
    assert torch.equal(dx, ours[0]), "only the input's was asked for"
    one = weights[-1]
    (alone,) = torch.autograd.grad(module(other, torch.tensor(SPLITS)), one, dother)
    assert torch.equal(alone, ours[-1]), "one expert's was asked for"
    module(other, torch.tensor(SPLITS)).backward(dother, inputs=[other])
    assert torch.equal(other.grad, ours[0])
    assert not module.need_backward_dw()
    for record, view in zip(ddp.records, before, strict=True):
        assert torch.equal(record.view, view)
    assert not any(weight.grad_added_to_main_grad or not has_no_own_grad(weight) for weight in weights)


def test_22_backward_of_one_expert_alone_delivers_that_one() -> None:
    module = make(bias=False)
    ddp = wrap(module)
    x, dy = batch()
    module(x, torch.tensor(SPLITS)).backward(dy, inputs=[module.weight3])
    ddp.finish_grad_sync()
    for expert, expected in enumerate(wgrads([(x, dy)])):
        wanted = expected if expert == 3 else torch.zeros_like(expected)
        assert error(getattr(module, f"weight{expert}").main_grad, wanted) <= ROUNDING


@pytest.mark.parametrize("packed", [False, True])
def test_19_a_backward_that_is_split_for_inputs_and_weights_is_refused(packed: bool) -> None:
    """As torch.distributed.pipelining's own stage does: a prehook, the inputs alone, then the weights alone."""
    module = make(single_grouped_weight=packed, bias=False, name="experts.fc1")
    kept = wrap(module)
    x, dy = batch()
    x.requires_grad_()
    output = module(x, SPLITS)
    output.grad_fn.register_prehook(lambda grads: None)
    torch.autograd.grad(output, x, dy, retain_graph=True)
    weights = [getattr(module, name) for name in module.weight_names]
    with pytest.raises(RuntimeError, match=r"experts.fc1: this backward was split into one for inputs and one for"):
        torch.autograd.grad(output, weights, dy)
    assert not any(record.num_fused_writes for record in kept.records)


@pytest.mark.in_turn
@DELAYED_OR_NOT
@FUSED_OR_NOT
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scale_bias", [False, True])
@pytest.mark.sampled(1)
def test_22_derivatives_are_right_and_write_nothing(packed: bool, scale_bias: bool, fuse: bool, delay: bool) -> None:
    """Of the input, the scales, every weight and every bias, by finite differences in fp64; two pad rows."""
    options = {"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": delay, "scale_bias": scale_bias}
    module = make(3, dtype=torch.float64, single_grouped_weight=packed, single_grouped_bias=packed, **options)
    ddp = wrap(module)
    names = [name for name, _ in module.named_parameters()]
    x, _ = batch(7)
    inputs = [x.double().requires_grad_(), *(p.detach().clone().requires_grad_() for p in module.parameters())]
    if scale_bias:
        inputs.append(torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_())

    def run(x: Tensor, *others: Tensor) -> Tensor:
        scales = others[len(names) :]
        parameters = dict(zip(names, others, strict=False))
        return torch.func.functional_call(module, parameters, (x, torch.tensor([2, 0, 3]), *scales))

    for tensor in inputs[1 : len(names) + 1]:
        tensor.main_grad = torch.full_like(tensor, torch.nan)
    assert torch.autograd.gradcheck(run, inputs)
    assert not module.need_backward_dw() and not any(record.view.any() for record in ddp.records)
    assert all(tensor.main_grad.isnan().all() for tensor in inputs[1 : len(names) + 1])


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_backward_that_makes_a_graph_is_refused() -> None:
    module = make()
    kept = wrap(module)
    x, dy = batch()
    output = module(x.requires_grad_(), SPLITS)
    with pytest.raises(RuntimeError, match=r"second derivatives \(create_graph=True\)"):
        output.backward(dy, create_graph=True)
    assert kept is not None


def test_a_missing_provider_is_named_with_the_weight() -> None:
    module = make(name="experts.fc1")
    x, dy = batch()
    output = module(x, SPLITS)
    with pytest.raises(RuntimeError, match=r"experts.fc1, weight0: fuse_wgrad_accumulation=True needs weight.main_"):
        output.backward(dy)


def test_an_expert_that_died_is_named() -> None:
    module = make(name="experts.fc1", fuse_wgrad_accumulation=False, delay_wgrad_compute=True)
    x, dy = batch()
    module(x, SPLITS).backward(dy)
    del module.weight2
    with pytest.raises(RuntimeError, match=r"experts.fc1, weight2: the weight was freed between forward and backward"):
        module.backward_dw()


# ---- Several ranks. ----


@DELAYED_OR_NOT
@FUSED_OR_NOT
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_are_reduced_over_ranks(packed: bool, fuse: bool, delay: bool, sharded: bool) -> None:
    """Each rank has other tokens, and experts that got none there."""
    per_rank = [[3, 2, 0, 4, 1, 2], [0, 6, 1, 0, 0, 5]]

    def one_rank() -> list[Tensor]:
        rank = torch.distributed.get_rank()
        module = make(single_grouped_weight=packed, fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay, bias=False)
        ddp = wrap(module, overlap_grad_reduce=True, bucket_size=64, use_distributed_optimizer=sharded)
        with ddp.no_sync():
            x, dy = batch(seed=rank)
            ddp(x, torch.tensor(per_rank[rank])).backward(dy)
        x, dy = batch(seed=rank + 2)
        ddp(x, torch.tensor(per_rank[rank])).backward(dy)
        while module.need_backward_dw():
            module.backward_dw()
        ddp.finish_grad_sync()
        held = []
        for bucket in ddp.buckets:
            flat, (start, end) = torch.zeros_like(bucket.grad_data), ddp.owned_range(bucket.layout)
            flat[start:end] = bucket.grad_data[start:end]
            held.append(flat)
        return [*held, *[torch.tensor([bucket.layout.start]) for bucket in ddp.buckets]]

    results = simulate(one_rank, 2)
    buckets = len(results[0]) // 2
    summed = [torch.stack([rank[index] for rank in results]).sum(0) / (1 if sharded else 2) for index in range(buckets)]
    expected = [
        sum(each)
        for each in zip(
            *[wgrads([batch(seed=rank), batch(seed=rank + 2)], per_rank[rank]) for rank in range(2)], strict=True
        )
    ]
    total = sum(flat.double().square().sum() for flat in summed).sqrt()
    exact = (torch.stack(expected) / 2).norm()
    assert abs(total - exact) <= ROUNDING * exact
    found = torch.cat([flat[flat != 0] for flat in summed]).double().sort().values
    wanted = (torch.stack(expected) / 2).flatten().to(found.device)
    assert error(found, wanted[wanted != 0].sort().values) <= ROUNDING
