"""Random parameters with atoms, and where plans put them."""

import torch
from hypothesis import strategies as st

from maingrad.ddp.plan.atoms import atom_of
from maingrad.ddp.plan.layout import GradPlan, ParamSpec

ONE_BUCKET = 10**15  # elements at which a bucket is closed: never
KINDS = ("element", "row", "whole", 2, 7)


def spec(name: str, *shape: int, atom: int = 1, grid_name: str = "dense") -> ParamSpec:
    return ParamSpec(
        name=name, shape=shape, param_dtype=torch.bfloat16, grad_dtype=torch.float32, grid_name=grid_name, atom=atom
    )


@st.composite
def models(draw: st.DrawFn, most: int = 16) -> list[ParamSpec]:
    """At most so many parameters: atoms of each kind, and of a number of elements that fits no row."""
    specs = []
    for index in range(draw(st.integers(1, most))):
        shape = tuple(draw(st.lists(st.integers(0, 70), max_size=3)))
        kind = draw(st.sampled_from(KINDS))
        atom = draw(st.one_of(st.just(atom_of(shape, kind)), st.integers(1, 5000)))
        grid_name = draw(st.sampled_from(("dense", "dense", "expert")))
        specs.append(spec(f"layer.{index}", *shape, atom=atom, grid_name=grid_name))
    return specs


def starts(plan: GradPlan) -> dict[str, int]:
    """First element of each parameter in its buffer."""
    return {slot.spec.name: slot.start for bucket in plan.buckets for slot in bucket.slots}
