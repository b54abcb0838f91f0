"""Faults of moments in 8 bits under ``fully_shard``."""

from fault import Change, Fault

EIGHT = "tests/fsdp/state/test_eight_bit_moments.py"
BITS = f"{EIGHT}::test_ranks_and_placements_change_no_bit_and_zero1_has_the_same"
HELD = "maingrad.fsdp.state.sharded_adam"
ADAM = "maingrad.fsdp.state.sharded_adam"

FAULTS = [
    Fault(
        "64a-shards-cut-blocks",
        sentence="Borders between shards cut blocks of 8-bit moments: the number of ranks changes training, or a step "
        "raises.",
        tests=[BITS, f"{EIGHT}::test_borders_lie_between_blocks"],
        changes=[Change("maingrad.ddp.plan.atoms", "atom_of", "return BLOCK", "return 1")],
    ),
    Fault(
        "64b-a-cut-block-is-not-refused",
        sentence="A layout that cuts blocks fails in the first step, on the ranks with a cut block alone.",
        tests=[f"{EIGHT}::test_a_layout_that_cuts_blocks_is_refused_on_all_ranks"],
        changes=[Change(ADAM, "_ShardedAdam._adopt_params", "if self._in_blocks:", "if False:")],
    ),
    Fault(
        "64c-loaded-moments-keep-their-old-scales",
        sentence="Codes and scales of 8-bit moments are not made from what a load has brought.",
        tests=[f"{EIGHT}::test_each_form_reads_what_the_others_have_saved"],
        changes=[Change(HELD, "HeldState.take", "given = {**given, **self._coded(given)}", "given = {**given}")],
    ),
    Fault(
        "64d-scales-stay-on-the-host",
        sentence="State on the host takes codes through the device, and not their scales.",
        tests=[BITS],
        changes=[Change(ADAM, "_ShardedAdam._homes_of", "if key != _STEP", "if key in (*_MOMENTS, REMAINDER)")],
    ),
    Fault(
        "64e-blocks-make-one-bucket",
        sentence="A unit whose blocks are kept whole is not cut by size: its gradients take memory all at once.",
        tests=[f"{EIGHT}::test_borders_lie_between_blocks"],
        changes=[
            Change("maingrad.fsdp.unit.plan", "plan_unit", 'spec.atom == 1 or atom == "block"', "spec.atom == 1"),
        ],
    ),
    Fault(
        "64f-second-moments-have-signs",
        sentence="Second moments are read by the code of the first: state dicts have other values than steps.",
        tests=[BITS, f"{EIGHT}::test_each_form_reads_what_the_others_have_saved"],
        changes=[Change(HELD, "HeldState._moment", "signed=key != SECOND_MOMENT", "signed=True")],
    ),
    Fault(
        "64g-a-run-may-cut-blocks",
        sentence="maingrad train with moments in 8 bits shards units at any element, and its optimizer is refused.",
        tests=["tests/launch/config/test_run.py::test_moments_in_8_bits_decide_what_shards_may_cut"],
        changes=[
            Change("maingrad.launch.config.file", "structure", '{"shard_atoms": "block", **units}', "{**units}"),
        ],
    ),
]
