"""Faults of compact optimizer state, and of state that lies on the host."""

from fault import Change, Fault

COMPACT = "tests/ddp/optimizer/test_compact_state.py"
FORMS = "maingrad.ddp.optimizer.state_forms"
REFERENCE = "maingrad.kernels.optimizer.reference"

FAULTS = [
    Fault(
        "60a-ties-go-to-even",
        sentence="A compact parameter is rounded half to even, and two masters get one parameter and one remainder.",
        tests=["tests/kernels/test_optimizer.py::test_every_finite_master_is_split_and_joined_exactly"],
        changes=[
            Change(
                REFERENCE,
                "split_master",
                "((bits - remainder) >> 16).to(torch.int16).view(torch.bfloat16)",
                "master.bfloat16()",
            ),
        ],
    ),
    Fault(
        "60b-a-written-parameter-keeps-its-remainder",
        sentence="A program writes a parameter, and the master is the new parameter with the old remainder.",
        tests=[f"{COMPACT}::test_masters_have_the_bits_of_fp32_masters", f"{COMPACT}::test_loaded_weights_are_masters"],
        changes=[
            Change(FORMS, "CompactSteps.take_written", "if REMAINDER in state:", "if False:"),
        ],
    ),
    Fault(
        "60c-random-bits-count-from-the-shard",
        sentence="Moments are rounded by where elements lie in a shard: the number of ranks changes training.",
        tests=[f"{COMPACT}::test_replicas_and_ranks_stay_equal_and_moments_are_bf16"],
        changes=[
            Change("maingrad.ddp.optimizer.steps", "OnePassSteps._row", "first=held.start", "first=0"),
        ],
    ),
    Fault(
        "60d-loaded-moments-stay-wide",
        sentence="After a load of full state, compact moments are fp32 from then on: twice the memory.",
        tests=[f"{COMPACT}::test_training_goes_on_on_other_ranks_with_the_same_bits"],
        changes=[
            Change(
                FORMS,
                "CompactSteps.take_loaded",
                "self._keep(segment, key, state[key])",
                "state[key] = state[key].to(segment.grads.device)",
            ),
        ],
    ),
    Fault(
        "60e-state-stays-on-the-device",
        sentence="A bucket's updated state is not copied back to the host: each step begins with the first one's.",
        tests=[f"{COMPACT}::test_state_on_the_host_has_the_same_bits"],
        changes=[
            Change(
                "maingrad.ddp.optimizer.host_state",
                "HostState.visits",
                "self._to_host.start(pairs)",
                "self._to_host.start([])",
            ),
        ],
    ),
    Fault(
        "60f-loaded-masters-lose-their-remainders",
        sentence="A load takes the parameters of a checkpoint, and not the 16 bits that the masters have more.",
        tests=[f"{COMPACT}::test_each_form_reads_what_the_others_have_saved"],
        changes=[
            Change(
                FORMS,
                "CompactSteps.take_loaded",
                "kept.view(-1).copy_(remainder)",
                "kept.zero_()",
            ),
        ],
    ),
    Fault(
        "60g-a-skipped-step-counts",
        sentence="A step that a scaler skips counts for the bias corrections of AdamW.",
        tests=[f"{COMPACT}::test_a_step_that_is_skipped_changes_nothing"],
        changes=[
            Change(REFERENCE, "update_reference", "step += 1 if found_inf is None else 1 - found_inf", "step += 1"),
        ],
    ),
    Fault(
        "60h-a-capture-makes-tables",
        sentence="A load before the capture has freed the kernel's tables, and the capture cannot make them.",
        tests=["tests/ddp/graphs/test_training_step.py::test_no_capture_makes_tables_of_an_update"],
        changes=[
            Change(
                "maingrad.ddp.optimizer.distributed_optimizer",
                "DistributedOptimizer.mark_loaded",
                "self._steps.take_loaded(",
                "[each._updates.clear() for each in self._steps._steps if hasattr(each, '_updates')]; self._steps.take_loaded(",
            ),
        ],
    ),
]
