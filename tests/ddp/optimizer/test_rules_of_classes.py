"""The rules by which optimizer classes, their options and their groups are taken or refused, one by one."""

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn, optim

from maingrad.ddp import DistributedDataParallelConfig, Lion, Muon
from maingrad.ddp.optimizer.fit import check_fits, shard_of_how_many
from maingrad.ddp.optimizer.param_groups import (
    assign_groups,
    check_matrices,
    check_optimizer_class,
    check_options,
    groups_by_class,
    is_capturable,
    is_elementwise,
    is_per_matrix,
    names_of_classes,
    why_not_over,
)
from maingrad.ddp.optimizer.state_forms import StateForm
from maingrad.ddp.optimizer.steps import check_decay


class Silent(optim.AdamW):
    """A subclass may compute anything."""


class OfElements(optim.Optimizer):
    elementwise = True


class OfParameters(optim.Optimizer):
    elementwise, per_parameter = False, True


class OfMatrices(OfParameters):
    per_matrix = True


class MatricesAlone(optim.Optimizer):
    per_matrix = True


TAKEN, CUT, UNKNOWN = None, "shards cut them apart: keep them whole, by HERE", "is not known to be elementwise"


@pytest.mark.parametrize(
    ("cls", "cut", "whole"),
    [
        *((cls, TAKEN, TAKEN) for cls in (optim.AdamW, optim.SGD, optim.Rprop, Lion, OfElements)),
        *((cls, CUT, TAKEN) for cls in (optim.Adafactor, optim.Muon, Muon, OfParameters, OfMatrices)),
        *((cls, UNKNOWN, UNKNOWN) for cls in (Silent, optim.LBFGS, MatricesAlone)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_a_class_says_of_its_update_decides_over_which_shards_it_steps(
    cls: Any, cut: str | None, whole: str | None
) -> None:
    for is_whole, expected in ((False, cut), (True, whole)):
        why = why_not_over(cls, whole=is_whole, kept_whole="HERE")
        assert (why is None) is (expected is None)
        assert expected is None or expected in str(why)
    assert is_elementwise(cls) is (cut is None)


def test_steps_are_captured_where_nothing_of_them_is_on_the_host() -> None:
    assert is_capturable(Muon, {})
    for cls in (optim.AdamW, optim.Adam, optim.SGD):
        assert is_capturable(cls, {"fused": True}) and not is_capturable(cls, {"fused": None})
    for cls in (Silent, Lion, optim.RMSprop, optim.Muon):
        assert not is_capturable(cls, {"fused": True})


def named(**shapes: tuple[int, ...]) -> list[Any]:
    return [SimpleNamespace(owned=SimpleNamespace(name=n, param=torch.empty(shape))) for n, shape in shapes.items()]


@pytest.mark.parametrize(("cls", "most"), [(optim.Muon, 2), (Muon, 3)])
def test_classes_of_matrices_take_matrices_and_ours_takes_stacks_of_them(cls: Any, most: int) -> None:
    assert is_per_matrix(cls)
    for dims in range(5):
        shapes = named(first=(4, 3), other=(2,) * dims)
        fits = 2 <= dims <= most
        with nullcontext() if fits else pytest.raises(ValueError, match=r"parameter 'other' has shape \[") as raised:
            check_optimizer_class(cls, shapes, whole=True)
        assert fits or cls.__name__ in str(raised.value)
    with pytest.raises(ValueError, match=re.escape("keep_matrices_whole=[their names]")):
        check_optimizer_class(cls, named(first=(4, 3)), whole=False)


def test_what_is_no_class_or_needs_all_parameters_at_once_is_refused() -> None:
    for given in (optim.AdamW([torch.ones(1)]), nn.Linear, "AdamW"):
        with pytest.raises(TypeError, match=r"a subclass of torch\.optim\.Optimizer, got"):
            check_optimizer_class(given, [], whole=True)  # type: ignore[arg-type]
    for cls in (optim.LBFGS, optim.SparseAdam):
        with pytest.raises(ValueError, match=rf"{cls.__name__} cannot update flat shards"):
            check_optimizer_class(cls, [], whole=True)
    with pytest.raises(ValueError, match=re.escape("DistributedDataParallelConfig(keep_params_whole=True)")):
        check_optimizer_class(OfParameters, named(first=(4,)), whole=False)
    check_optimizer_class(OfParameters, named(first=(4,), second=(2, 2, 2, 2)), whole=True)


def test_names_of_classes_are_said_once_where_they_are_one() -> None:
    assert names_of_classes([Lion, Lion, Lion]) == "Lion"
    assert names_of_classes([Lion, Muon, Lion]) == "Lion, Muon, Lion"


def test_groups_come_to_their_classes_with_their_own_options() -> None:
    options = {"lr": 0.5, "foreach": True}
    groups = [
        {"params": "a", "optimizer": Lion, "lr": 1.0},
        {"params": "b", "eps": 0.1},
        {"params": "c", "optimizer": optim.SGD},
        {"params": "d", "optimizer": Lion, "weight_decay": 0.2},
    ]
    found = groups_by_class(optim.AdamW, options, groups)
    assert [(each.cls, each.options, each.groups) for each in found] == [
        (optim.AdamW, options, {1: {"eps": 0.1}, 4: {}}),
        (Lion, {}, {0: {"lr": 1.0}, 3: {"weight_decay": 0.2}}),
        (optim.SGD, {"fused": True}, {2: {}}),
    ]
    (alone,) = groups_by_class(optim.Adam, {"fused": False, "lr": 0.1}, [])
    assert (alone.options, alone.groups) == ({"fused": False, "lr": 0.1}, {0: {}})
    (alone,) = groups_by_class(optim.Adam, {"foreach": False}, [])
    assert alone.options == {"fused": True, "foreach": False}
    first, second = groups_by_class(optim.AdamW, {}, [{"params": "*", "optimizer": Muon}])
    assert (first.cls, first.groups, second.cls, second.groups) == (optim.AdamW, {1: {}}, Muon, {0: {}})


def test_options_are_checked_for_each_group_as_the_constructor_would() -> None:
    check_options(optim.AdamW, {"lr": 0.1}, {0: {"lr": 0.2}, 3: {"betas": (0.5, 0.6)}})
    for options, groups, error, message in (
        ({"lr": -1.0}, {0: {}}, ValueError, "^Invalid learning rate: -1.0"),
        ({}, {0: {}, 3: {"lr": -2.0}}, ValueError, r"^param_groups\[3\]: Invalid learning rate: -2.0"),
        ({}, {2: {"lrs": 2.0}}, TypeError, r"^param_groups\[2\]: .*unexpected keyword argument 'lrs'"),
        ({"differentiable": True}, {0: {}}, ValueError, "^differentiable=True"),
        ({}, {0: {}, 1: {"differentiable": True}}, ValueError, "^differentiable=True"),
    ):
        with pytest.raises(error, match=message):
            check_options(optim.AdamW, options, groups)  # type: ignore[arg-type]


def test_a_matrix_that_its_own_group_does_not_fit_is_named() -> None:
    shapes = named(first=(6, 4), second=(9, 4))
    assigned = {"first": 0, "second": 2}
    check_matrices(Muon, {"split": 3}, {0: {}, 2: {}}, shapes, assigned)
    check_matrices(Muon, {"split": 2}, {0: {}, 2: {"split": 3}}, shapes, assigned)
    with pytest.raises(ValueError, match=r"^parameter 'second': "):
        check_matrices(Muon, {}, {0: {"split": 2}, 2: {"split": 2}}, shapes, assigned)
    check_matrices(optim.Muon, {}, {0: {"split": 2}, 2: {"split": 2}}, shapes, assigned)


def test_a_parameter_is_in_the_first_group_that_selects_it() -> None:
    params = named(a=(2,), b=(2, 2), c=(3,), d=(3, 3))
    groups = [
        {"params": ["c", "a"]},
        {"params": lambda name, param: param.dim() == 1 or name == "b"},
        {"params": ("[bd]",)},
    ]
    assert assign_groups(params, groups[:1]) == {"a": 0, "b": 1, "c": 0, "d": 1}
    assert assign_groups(params, groups) == {"a": 0, "b": 1, "c": 0, "d": 2}
    for bad, error, message in (
        ([groups[0], {"params": "a"}], ValueError, r"param_groups\[1\] selects only parameters of groups before it"),
        ([groups[0], {"params": []}], ValueError, r"param_groups\[1\] selects no parameter"),
        ([groups[0], {"params": "z"}], ValueError, r"param_groups\[1\].*'z'"),
        ([groups[0], {"lr": 1.0}], ValueError, r"param_groups\[1\] has no 'params'"),
        ([{"params": [nn.Linear(1, 1).weight]}], TypeError, r"param_groups\[0\]: select .* got Parameter"),
        ([{"params": nn.Linear(1, 1)}], TypeError, r"param_groups\[0\]: select .* got Linear"),
        ([{"params": 3}], TypeError, r"param_groups\[0\]: select .* got int"),
        ({"params": "a"}, TypeError, "a sequence of dicts"),
        ("a", TypeError, "a sequence of dicts"),
        ({}, TypeError, "a sequence of dicts"),
        ("", TypeError, "a sequence of dicts"),
        ([groups[0], "a"], TypeError, "a sequence of dicts"),
    ):
        with pytest.raises(error, match=message):  # type: ignore[call-overload]
            assign_groups(params, bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [optim.AdamW, optim.Adam, optim.SGD, Lion])
def test_each_class_has_its_own_decay(cls: Any) -> None:
    own = cls is optim.AdamW
    for given in ([{}], [{}, {"decoupled_weight_decay": own}]):
        check_decay(cls, given, "it")
    other = "Adam" if own else "AdamW"
    with pytest.raises(ValueError, match=rf"it does not go with decoupled_weight_decay={not own} .*class {other},"):
        check_decay(cls, [{}, {"decoupled_weight_decay": not own}], "it")


FULL, COMPACT = StateForm("full", None, None), StateForm("compact", None, None)
PLAIN = [("a", torch.float32), ("b", torch.bfloat16)]


@pytest.mark.parametrize(
    ("form", "cls", "dtypes", "options", "message"),
    [
        (FULL, Silent, [("a", torch.float16)], [{"amsgrad": True}], None),
        (COMPACT, optim.AdamW, PLAIN, [{"betas": (0.5, 0.6), "amsgrad": False}], None),
        (StateForm("compact", torch.uint8, "host"), Lion, PLAIN, [{}, {}], None),
        (StateForm("full", None, "host"), optim.SGD, PLAIN, [{}], None),
        (StateForm("Full", None, None), optim.SGD, PLAIN, [], "state='Full'"),  # type: ignore[arg-type]
        (StateForm("full", torch.float32, None), optim.SGD, PLAIN, [], "full moments are fp32"),
        (StateForm("full", torch.bfloat16, "host"), optim.SGD, PLAIN, [], "full moments are fp32"),
        (StateForm("compact", torch.float16, None), optim.SGD, PLAIN, [], "compact moments are"),
        (StateForm("compact", torch.int8, None), optim.SGD, PLAIN, [], "compact moments are"),
        (StateForm("full", None, "device"), optim.SGD, PLAIN, [], "offload_state='device'"),  # type: ignore[arg-type]
        (COMPACT, Silent, PLAIN, [], "state=.compact. is for AdamW, Adam, SGD, Lion, not Silent"),
        (StateForm("full", None, "host"), Silent, PLAIN, [], "offload_state=.host. is for AdamW"),
        (COMPACT, optim.Adam, PLAIN, [{}, {"amsgrad": True}], "does not go with amsgrad=True"),
        (COMPACT, optim.Adam, PLAIN, [{"maximize": True}, {}], "does not go with maximize=True"),
        (COMPACT, optim.Adam, PLAIN, [{}, {"betas": (torch.tensor(0.5), 0.6)}], "betas that are numbers"),
        (COMPACT, optim.Adam, PLAIN, [{"betas": (0.5, torch.tensor(0.6))}, {}], "betas that are numbers"),
        (COMPACT, optim.Adam, PLAIN, [{}, {"decoupled_weight_decay": True}], "take the class AdamW"),
        (COMPACT, optim.SGD, [*PLAIN, ("c", torch.float16)], [], "parameter 'c' is torch.float16"),
        (COMPACT, optim.SGD, [("c", torch.float64), *PLAIN], [], "parameter 'c' is torch.float64"),
    ],
)
def test_forms_of_state_go_with_these_classes_options_and_dtypes(
    form: StateForm, cls: Any, dtypes: Any, options: Any, message: str | None
) -> None:
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        form.check(cls, iter(dtypes), options)


def test_classes_without_another_form_have_full_state() -> None:
    for form in (COMPACT, StateForm("full", None, "host"), StateForm("compact", torch.uint8, "host")):
        assert [form.of(cls) for cls in (optim.AdamW, optim.Adam, optim.SGD, Lion)] == [form] * 4
        assert [form.of(cls) for cls in (Muon, Silent, optim.RMSprop)] == [FULL] * 3


def test_a_state_dict_fits_by_its_layout_and_the_error_says_what_is_other() -> None:
    lengths = {"state": None, "masters": 2}
    whole = {"layout": "L", "shard": "1 of 2", "state": {}, "masters": [1, 2]}
    check_fits(whole, "L", "1 of 2", lengths)
    check_fits({**whole, "state": {0: 1, 1: 2, 2: 3}}, "L", "1 of 2", lengths)
    for given, message in (
        ({**whole, "masters": [1]}, "'masters' is missing, or cut"),
        ({**whole, "masters": [1, 2, 3]}, "'masters' is missing, or cut"),
        ({key: whole[key] for key in ("layout", "shard", "masters")}, "'state' is missing, or cut"),
        ({**whole, "layout": "K"}, "another bucket plan.*it has layout K, and this is L"),
        ({**whole, "layout": "K", "shard": "2 of 2"}, "is that of shard 2 of 2, and this rank has shard 1 of 2"),
        ({"state": {}, "masters": []}, "it has layout None, and this is L"),
    ):
        with pytest.raises(ValueError, match=message):
            check_fits(given, "L", "1 of 2", lengths)


def test_a_shard_is_said_by_its_place_in_its_instance_and_among_tensor_parallel_ranks() -> None:
    def said(tensor: Any, **config: Any) -> str:
        grids = {"dense": SimpleNamespace(inner_rank=1, inner_size=4, size=8), "expert": SimpleNamespace(inner_rank=0)}
        options = DistributedDataParallelConfig(**config)
        return shard_of_how_many(SimpleNamespace(grids=grids, ddp_config=options, tensor_ranks=tensor))  # type: ignore[arg-type]

    sharded = {"use_distributed_optimizer": True}
    assert said(None, **sharded) == "2 of 4"
    assert said(None) == "1 of 1"
    assert said(SimpleNamespace(size=1, inner_rank=0), **sharded) == "2 of 4"
    assert said(SimpleNamespace(size=3, inner_rank=2), **sharded) == "2 of 4 on tensor-parallel rank 3 of 3"
