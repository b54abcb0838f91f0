"""Faults of moments in 8 bits, and of SGD and Lion in one pass."""

from fault import Change, Fault

EIGHT = "tests/ddp/optimizer/test_eight_bit_moments.py"
CLASSES = "tests/ddp/optimizer/test_one_pass_classes.py"
MOMENTS = "tests/kernels/test_optimizer_moments.py"
CODES = "maingrad.kernels.optimizer.eight_bits"
REFERENCE = "maingrad.kernels.optimizer.reference"
STEPS = "maingrad.ddp.optimizer.steps"

FAULTS = [
    Fault(
        "63a-shards-cut-blocks",
        sentence="Borders between shards cut blocks of 8-bit moments: the number of ranks changes training, or a step "
        "raises.",
        tests=[f"{EIGHT}::test_ranks_change_no_bit"],
        changes=[
            Change("maingrad.ddp.plan.owned_params", "plan_model", "else config.shard_atom,", "else 1,"),
        ],
    ),
    Fault(
        "63b-a-cut-block-is-not-refused",
        sentence="A layout that cuts blocks fails in the first step, on the ranks with a cut block alone.",
        tests=[f"{EIGHT}::test_a_layout_that_cuts_blocks_is_refused_on_all_ranks"],
        changes=[
            Change(
                "maingrad.ddp.optimizer.fit",
                "_check_form",
                "if form.moment_dtype is torch.uint8:",
                "if False:",
            ),
        ],
    ),
    Fault(
        "63c-scales-have-no-sign",
        sentence="The largest element of a block is negative and not exact: each save and load shrinks the block.",
        tests=[f"{MOMENTS}::test_what_was_read_has_the_same_codes_again"],
        changes=[
            Change(
                CODES,
                "_largest",
                "torch.where(most & 1 == 1, magnitude, magnitude | -0x80000000)",
                "magnitude",
            ),
        ],
    ),
    Fault(
        "63d-no-interval-is-the-last",
        sentence="A magnitude between the last interval of a decade and the next decade gets the code of neither.",
        tests=[f"{MOMENTS}::test_every_border_between_codes"],
        changes=[
            Change(CODES, "quantize_blocks", ".clamp(max=2 - 2.0**-23)", ""),
        ],
    ),
    Fault(
        "63e-the-first-step-is-dampened",
        sentence="SGD's first gradient is dampened, which torch's is not; after a skipped step it is the second's turn.",
        tests=[f"{CLASSES}::test_steps_are_those_of_the_definition"],
        changes=[
            Change(REFERENCE, "_update_row", "torch.where(step == 1, 1, 1 - dampening)", "(1 - dampening)"),
        ],
    ),
    Fault(
        "63f-loaded-momentum-counts-as-none",
        sentence="After a load of torch's SGD, which counts no steps, the next step is the first again: undampened.",
        tests=[f"{CLASSES}::test_momentum_of_a_checkpoint_without_steps_is_not_the_first"],
        changes=[
            Change(
                STEPS,
                "OnePassSteps._begun",
                "taken = any(state.get(key) is not None for key in moments)",
                "taken = False",
            ),
        ],
    ),
    Fault(
        "63g-lion-steps-by-its-new-moment",
        sentence="Lion's sign is that of the new moment, not of the blend by the first beta.",
        tests=[f"{CLASSES}::test_steps_are_those_of_the_definition"],
        changes=[
            Change(
                REFERENCE,
                "_update_row",
                "blend = fma(beta1, first, fma(-beta1, grad, grad))",
                "blend = fma(beta2, first, fma(-beta2, grad, grad))",
            ),
        ],
    ),
    Fault(
        "63h-loaded-moments-keep-their-old-scales",
        sentence="Codes and scales of 8-bit moments are not made from what a load has brought.",
        tests=[f"{EIGHT}::test_each_form_reads_what_the_others_have_saved"],
        changes=[
            Change(
                STEPS,
                "OnePassSteps._keep",
                "self.blocks.encode(segment, values, kept, state[scale_key(key)], signed=signed)",
                "pass",
            ),
        ],
    ),
    Fault(
        "63i-dampened-first-momentum",
        sentence="Momentum that a program sets in mid-training begins with a dampened gradient, unlike torch's.",
        tests=[
            "tests/ddp/optimizer/test_one_pass_classes.py::test_momentum_that_begins_later_begins_as_in_a_first_step"
        ],
        changes=[
            Change(STEPS, "OnePassSteps._begun", 'state["step"] = torch.zeros_like(state["step"])', "pass"),
        ],
    ),
]
