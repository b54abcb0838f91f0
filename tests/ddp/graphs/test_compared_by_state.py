"""Objects that are equal where their class and all attributes are."""

import dataclasses
from typing import Any

import pytest
import torch

from maingrad.ddp.graphs.compared_by_state import ComparedByState


class Options(ComparedByState):
    __slots__ = ("slot",)

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class Others(Options):
    pass


@dataclasses.dataclass
class Fields(ComparedByState):
    size: int
    beside: int = dataclasses.field(default=0, compare=False)


def test_equal_objects_have_one_class_and_equal_attributes() -> None:
    scale = torch.ones(2)
    first = Options(size=1, shape=(2, (3,)), scale=(scale,), slot="a")
    again = Options(slot="a", scale=(scale,), shape=(2, (3,)), size=1)
    assert first == first
    assert first == again
    assert hash(first) == hash(again)
    assert len({first, again}) == 1
    same = {"size": 1, "shape": (2, (3,)), "scale": (scale,), "slot": "a"}
    for change in ({"size": 2}, {"slot": "b"}, {"more": 1}, {"scale": (scale.clone(),)}, {"shape": (2, (4,))}):
        assert first != Options(**(same | change))
    assert first != Options(**{name: value for name, value in same.items() if name != "slot"})
    assert first != Others(**same)
    assert Others(slot="a") != Others(slot="b"), "the base has the slot"
    assert first != "a string"


class OneSlot(ComparedByState):
    __slots__ = "scale"


def test_a_slot_that_is_named_alone_is_compared() -> None:
    one, other = OneSlot(), OneSlot()
    one.scale, other.scale = 1, 2
    assert one != other


def test_a_dataclass_compares_what_its_fields_leave_out() -> None:
    assert Fields(1) == Fields(1)
    assert Fields(1, beside=1) != Fields(1)
    changed, named = Fields(1), Fields(1)
    changed.more = 1  # type: ignore[attr-defined]
    named.__dict__["_specs"] = {}  # a cache
    assert changed != Fields(1)
    assert named == Fields(1)


def test_attributes_stay_once_they_were_compared() -> None:
    options = Options(size=1, shape=2, slot="a")
    options.size = 3
    del options.shape
    hash(options)
    assert options == Options(size=3, slot="a")
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"Options.size was changed after the recipe was used"):
        options.size = 1
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"Options.slot was changed"):
        del options.slot
    assert options.size == 3


def test_what_may_change_in_place_and_own_comparisons_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Options.shape is a list, which may change in place"):
        hash(Options(shape=[1]))
    with pytest.raises(TypeError, match=r"Options.values is a dict, which may change in place"):
        hash(Options(size=1, values={}, width=2))
    for name in ("__eq__", "__hash__"):
        with pytest.raises(TypeError, match=f"Mine defines {name}"):
            type("Mine", (ComparedByState,), {name: lambda *_: True})


def test_a_class_with_slots_is_made_twice_and_compared_by_all_attributes() -> None:
    """``dataclass(slots=True)`` makes the class anew from what the first one has: that is no comparison of its own."""

    @dataclasses.dataclass
    class Sized(ComparedByState):
        size: int
        beside: int = dataclasses.field(default=0, compare=False)

    assert Sized(1) == Sized(1) and len({Sized(1), Sized(1)}) == 1
    assert Sized(1, beside=1) != Sized(1)
    slotted = dataclasses.dataclass(slots=True)(
        type("Slotted", (ComparedByState,), {"__annotations__": {"size": int}, "__module__": __name__})
    )
    assert slotted(1) == slotted(1) != slotted(2)  # type: ignore[call-arg]
