"""Extra arguments and state of Transformer Engine's callers and checkpoints neither fail nor have an effect."""

import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from loops import wrap
from modules import ALL_FACTORIES, FACTORIES, FEATURES, make
from torch import Tensor, nn

from maingrad.te_integration import Embedding, GroupedLinear, LayerNormMLP, Sequential
from maingrad.te_integration.dense.activations import ACTIVATIONS

WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "get_rng_state_tracker": (None,),
    "rng_state_tracker_function": (None,),
    "rng_tracker_name": (None,),
    "accumulate_into_main_grad": (False,),
    "seq_length": (None,),
    "micro_batch_size": (None,),
    "return_layernorm_output_gathered": (False,),
    "symmetric_ar_type": (None,),
    "keep_fp8_weight_transpose_cache": (False, True),
    "cache_quantized_params": (False,),
    "ub_name": (None,),
    "ub_overlap_ag": (False, None),
}
"""Arguments of its modules, and the values that ask for nothing."""
OF_EXPERTS: dict[str, tuple[Any, ...]] = {
    "parallel_mode": (None,),
    "set_parallel_mode": (False,),
    "sequence_parallel": (False,),
    "tp_group": (None,),
    "tp_size": (1,),
}


def batch(seed: int = 1) -> Tensor:
    return torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(seed))


def theirs(module: nn.Module, prefix: str, extra: Any) -> dict[str, Any]:
    """The state dict of Transformer Engine's module: the same keys, and its scaling factors."""
    return {f"{prefix}{name}": value for name, value in module.state_dict().items()} | {f"{prefix}_extra_state": extra}


@pytest.mark.parametrize("kind", ALL_FACTORIES)
def test_its_arguments_are_taken_where_they_ask_for_nothing(kind: str) -> None:
    for name, values in (WITHOUT_EFFECT if kind in FACTORIES else WITHOUT_EFFECT | OF_EXPERTS).items():
        for value in values:
            make(kind, **{name: value})
        with pytest.raises(ValueError, match=f"does not support {name}='asked for'"):
            make(kind, **{name: "asked for"})
    with pytest.raises(ValueError, match="does not support seq_length=0"):
        make(kind, seq_length=0)
    with pytest.raises(TypeError, match="has no argument 'sub_name'"):
        make(kind, sub_name=None)


@pytest.mark.parametrize("kind", [*ALL_FACTORIES, "Embedding"])
@pytest.mark.parametrize("dtype", ["dtype", "params_dtype"])
def test_parameters_are_made_where_and_of_the_dtype_that_was_asked_for(kind: str, dtype: str) -> None:
    options: dict[str, Any] = {"device": "meta", "name": "layers.3"}
    if kind == "Embedding":
        module: Any = Embedding(4, 8, dtype=torch.float64, **options)
    else:
        module = ALL_FACTORIES[kind](**{dtype: torch.float64}, **options)
    found = {(param.dtype, param.device.type) for param in module.parameters()}
    assert found == {(torch.float64, "meta")} and module.describe() == "layers.3"


@pytest.mark.parametrize("kind", FACTORIES)
@pytest.mark.parametrize("extra", [None, torch.empty(0), io.BytesIO()], ids=["None", "tensor", "bytes"])
@pytest.mark.parametrize("prefix", ["", "0.", "1.0."])
def test_its_checkpoints_load_strictly(kind: str, extra: Any, prefix: str) -> None:
    source, target = make(kind, seed=1), make(kind, seed=2)
    model: nn.Module = {"": target, "0.": Sequential(target), "1.0.": nn.Sequential(nn.Tanh(), Sequential(target))}[
        prefix
    ]
    given = theirs(source, prefix, extra)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing was left unread
        model.load_state_dict(given, strict=True)
    assert f"{prefix}_extra_state" in given, "the caller's own stays as it is"
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .*other"):
        model.load_state_dict(given | {f"{prefix}other": torch.zeros(1)})


def written() -> io.BytesIO:
    """As ``torch.save`` leaves it: at its end."""
    stream = io.BytesIO()
    stream.write(b"pickled")
    return stream


@pytest.mark.parametrize("extra", [torch.ones(8, dtype=torch.uint8), written(), {"scale_fwd": 1}])
def test_scales_in_its_checkpoints_are_not_read_and_a_warning_says_so(extra: Any) -> None:
    kind = next(iter(FACTORIES))
    source, target = make(kind, seed=1), make(kind, seed=2)
    with pytest.warns(RuntimeWarning, match="_extra_state.* were not read: under DelayedScaling"):
        target.load_state_dict(theirs(source, "", extra))
    assert all(map(torch.equal, source.state_dict().values(), target.state_dict().values()))


@pytest.mark.parametrize("kind", FACTORIES)
@pytest.mark.parametrize("delay", [False, True])
def test_is_first_microbatch_erases_nothing(kind: str, delay: bool) -> None:
    """There it makes each of a module's uses in the first microbatch overwrite the one before (fault 8)."""
    results = []
    for first in (None, True, False):
        module = make(kind, delay=delay)
        ddp = wrap(module)
        for seed in range(2):
            with ddp.no_sync():
                y = ddp(batch(seed), is_first_microbatch=first)
                module(y, is_first_microbatch=first).square().sum().backward()
            module.backward_dw()
        results.append({name: getattr(module, name).main_grad.clone() for name in module.weight_names})
    for other in results[1:]:
        assert all(torch.equal(other[name], gradient) for name, gradient in results[0].items())


@pytest.mark.parametrize("kind", FACTORIES)
@pytest.mark.parametrize("delay", [False, True])
def test_modules_can_be_saved_whole(kind: str, delay: bool) -> None:
    module = make(kind, delay=delay)
    ddp = wrap(module)
    ddp(batch()).sum().backward()
    module.backward_dw()
    expected = module(batch())
    del ddp
    copy = pickle.loads(pickle.dumps(module))
    assert torch.equal(copy(batch()), expected)
    again = wrap(copy)
    again(batch()).sum().backward()
    assert copy.need_backward_dw() is delay
    copy.backward_dw()
    again.finish_grad_sync()
    assert all(record.num_fused_writes == 1 for record in again.records if record.name in copy.weight_names)


def test_every_activation_can_be_saved() -> None:
    for activation in ACTIVATIONS:
        module = LayerNormMLP(FEATURES, 4, activation=activation)
        assert torch.equal(pickle.loads(pickle.dumps(module))(batch()), module(batch())), activation


NEUTRAL: dict[str, tuple[Any, Any]] = {
    "sequence_parallel": (False, True),
    "tp_group": (None, "ranks"),
    "tp_size": (1, 2),
    "parallel_mode": (None, "row"),
    "get_rng_state_tracker": (None, "tracker"),
    "rng_state_tracker_function": (None, "tracker"),
    "rng_tracker_name": (None, "experts"),
    "accumulate_into_main_grad": (False, True),
    "set_parallel_mode": (False, True),
    "return_layernorm_output_gathered": (False, True),
    "seq_length": (None, 16),
    "micro_batch_size": (None, 4),
    "symmetric_ar_type": (None, "two_shot"),
    "keep_fp8_weight_transpose_cache": (False, "sometimes"),
    "cache_quantized_params": (False, True),
    "ub_overlap_ag": (False, True),
    "ub_overlap_rs": (None, True),
    "ub_name": (None, "fc1"),
}
"""Arguments of Transformer Engine: a value without effect, and one with."""


@pytest.mark.parametrize("name", NEUTRAL)
def test_each_argument_has_values_without_effect(name: str) -> None:
    accepted, refused = NEUTRAL[name]
    GroupedLinear(1, 2, 2, **{name: accepted})
    with pytest.raises(ValueError, match=f"GroupedLinear does not support {name}={refused!r}: "):
        GroupedLinear(1, 2, 2, **{name: refused})
