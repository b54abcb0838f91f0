"""torch's clipping reads ``.grad`` only: with gradients in ``main_grad`` it would clip nothing, without an error."""

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from loops import assert_same, ddp_backward, make_batches, make_model, plain_backward, plain_grads, plain_twin, wrap
from torch import Tensor, nn

# As most programs have it: by name, before the library is there.
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from maingrad.ddp import DistributedOptimizer, clip_grad_norm
from maingrad.fsdp import fully_shard
from maingrad.te_integration import Linear

Clip = Callable[[Iterable[Tensor]], object]

CLIPS: dict[str, Clip] = {
    "clip_grad_norm_": lambda params: clip_grad_norm_(params, 1e-3),
    "by keyword": lambda params: clip_grad_norm_(parameters=params, max_norm=1e-3, foreach=False),
    "clip_grad_value_": lambda params: clip_grad_value_(params, 1e-3),
    "clip_grads_with_norm_": lambda params: clip_grads_with_norm_(params, 1e-3, torch.tensor(7.0)),
    "by its module": lambda params: torch.nn.utils.clip_grad_norm_(params, 1e-3),
    "by its file": lambda params: torch.nn.utils.clip_grad.clip_grad_norm_(params, 1e-3),
}


@pytest.mark.parametrize("config", [{}, {"use_distributed_optimizer": True}, {"overlap_grad_reduce": True}], ids=str)
@pytest.mark.parametrize("name", CLIPS)
def test_gradients_that_were_not_exposed_are_refused(name: str, config: dict[str, Any]) -> None:
    ddp = wrap(make_model(), **config)
    ddp_backward(ddp, make_batches(2))
    expected = r"clip_grads?_\w+: the gradient of parameter '0.weight' is in main_grad.*expose_grads\(\).*"
    expected += r"max_grad_norm=.*maingrad.ddp.clip_grad_norm.*reduced_grads\(\)"
    with pytest.raises(RuntimeError, match=expected):
        CLIPS[name](ddp.parameters())
    with pytest.raises(RuntimeError, match=expected):
        CLIPS[name](list(ddp.module.parameters()))


def test_one_parameter_and_one_among_others_are_refused() -> None:
    ddp = wrap(make_model())
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    ddp_backward(ddp, make_batches(1))
    with pytest.raises(RuntimeError, match=r"parameter '3.weight' is in main_grad"):
        clip_grad_norm_(ddp.module[3].weight, 1.0)
    with pytest.raises(RuntimeError, match=r"parameter '3.weight' is in main_grad"):
        clip_grad_norm_([*other.parameters(), ddp.module[3].weight], 1.0)


def test_before_the_reduction_it_is_refused_as_well() -> None:
    ddp = wrap(make_model())
    with ddp.no_sync():
        ddp(make_batches(1)[0]).sum().backward()
    with pytest.raises(RuntimeError, match=r"finish_grad_sync\(\) and model.expose_grads\(\) first"):
        clip_grad_norm_(ddp.parameters(), 1.0)


def test_delayed_gradients_that_are_all_pending_are_refused() -> None:
    ddp = wrap(Linear(8, 4, bias=False, fuse_wgrad_accumulation=True, delay_wgrad_compute=True))
    ddp(make_batches(1)[0]).sum().backward()
    with pytest.raises(RuntimeError, match="parameter 'weight' is in main_grad"):
        clip_grad_norm_(ddp.parameters(), 1.0)


def test_the_remedies_work() -> None:
    batches = make_batches(2)
    plain = make_model(fuse=False)
    plain_backward(plain, batches)
    norm = clip_grad_norm_(plain.parameters(), 0.5)

    ddp = wrap(make_model())
    ddp_backward(ddp, batches)
    ddp.expose_grads()
    assert torch.equal(clip_grad_norm_(ddp.parameters(), 0.5), norm)
    assert_same(plain_grads(ddp.module), plain_grads(plain))

    for config in ({}, {"use_distributed_optimizer": True}):
        ddp = wrap(make_model(), **config)
        ddp_backward(ddp, batches)
        torch.testing.assert_close(clip_grad_norm(ddp, 0.5), norm)
        for grad in ddp.reduced_grads():
            grad.clamp_(-1e-3, 1e-3)
        clip_grad_value_(plain.parameters(), 1e-3)
        for name, param in ddp.module.named_parameters():
            torch.testing.assert_close(param.main_grad, plain.get_parameter(name).grad)

    ddp = wrap(make_model(), use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(ddp, max_grad_norm=0.5)
    ddp_backward(ddp, batches)
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, norm)


@pytest.mark.parametrize("name", CLIPS)
def test_where_there_is_no_gradient_nothing_is_refused(name: str) -> None:
    """torch clips nothing then, and there is nothing to clip."""
    ddp = wrap(make_model())
    if name != "clip_grad_value_":  # torch's own error
        CLIPS[name](ddp.parameters())
    ddp_backward(ddp, make_batches(1))
    ddp.zero_grad_buffer()
    if name != "clip_grad_value_":
        CLIPS[name](ddp.parameters())


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.sampled(4)
def test_other_models_and_those_whose_wrapper_is_gone_are_left_alone(name: str) -> None:
    ours = make_model(fuse=False)
    ddp = wrap(ours)
    ddp_backward(ddp, make_batches(1))
    other, twin = plain_twin(make_model()), plain_twin(make_model())
    for alive in (True, False):
        for model in (other, twin):
            plain_backward(model, make_batches(2))
        CLIPS[name](other.parameters())
        if not alive:
            plain_backward(ours, make_batches(2))
            CLIPS[name](ours.parameters())
            assert_same(plain_grads(ours), plain_grads(other))
        assert not torch.equal(other[0].weight.grad, twin[0].weight.grad)
        other.zero_grad()
        twin.zero_grad()
        if alive:
            del ddp


def test_torch_still_warns_of_an_empty_generator() -> None:
    ddp = wrap(make_model())
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((param for param in ()), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip_grad_norm_([], 1.0)
    assert ddp.records


def test_a_compiled_clip_of_another_model_stays_one_graph() -> None:
    ddp = wrap(make_model())
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    twin = nn.Linear(2, 2)
    twin.load_state_dict(other.state_dict())
    twin(torch.ones(1, 2)).sum().backward()

    @torch.compile(backend="eager", fullgraph=True)
    def clip(params: list[Tensor]) -> Tensor:
        return clip_grad_norm_(params, 0.1, foreach=False)

    assert torch.equal(clip(list(other.parameters())), clip_grad_norm_(twin.parameters(), 0.1))
    assert_same(plain_grads(other), plain_grads(twin))
    assert ddp.records


def test_whole_parameters_of_a_sharded_model_are_refused_and_shards_are_not() -> None:
    model: Any = fully_shard(make_model())
    model(make_batches(1)[0]).sum().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    with model.unsharded(), pytest.raises(RuntimeError, match=r"parameter '0.weight' is whole.*outside of"):
        clip_grad_norm_(model.parameters(), 1.0)


def test_a_norm_of_gradients_alone_cannot_know_whose_they_are() -> None:
    """See docs/main_grad.md. The clipping that follows in such a program takes parameters, and is refused."""
    ddp = wrap(make_model())
    ddp_backward(ddp, make_batches(1))
    norm = get_total_norm([param.grad for param in ddp.parameters() if param.grad is not None])
    assert norm == 0
    with pytest.raises(RuntimeError, match="is in main_grad"):
        clip_grads_with_norm_(ddp.parameters(), 1.0, norm)


REPLACED = """
import functools
import torch
from torch.nn import utils

class Logging:  # somebody's own, which has no closure to look into
    def __init__(self, clip): functools.update_wrapper(self, clip); self.clip = clip
    def __call__(self, *args, **kwargs): print("clips"); return self.clip(*args, **kwargs)

original = utils.clip_grad_norm_.__wrapped__
utils.clip_grad_norm_ = utils.clip_grad.clip_grad_norm_ = Logging(original)

from maingrad.ddp import DistributedDataParallel
ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
ddp(torch.ones(1, 2)).sum().backward()
for place in (utils, utils.clip_grad):
    try:
        place.clip_grad_norm_(ddp.parameters(), 1.0)
    except RuntimeError as error:
        print(error)
ddp.zero_grad_buffer()
utils.clip_grad_norm_(ddp.parameters(), 1.0)
"""


@pytest.mark.slow
def test_clipping_that_somebody_has_replaced_is_replaced_in_turn() -> None:
    """In a process of its own: torch's functions are the process's."""
    done = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, text=True, check=True)
    first, second, third = done.stdout.splitlines()
    assert first == second
    assert first.startswith("clip_grad_norm_: the gradient of parameter 'weight' is in main_grad")
    assert third == "clips"
