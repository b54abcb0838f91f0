"""Faults of optimizers of matrices, beside elementwise ones and among ranks."""

from fault import Change, Fault

CLASSES = "tests/ddp/optimizer/test_classes_by_group.py"
GROUPS = "tests/ddp/torch_grads/test_muon_groups.py"
DEALT = "tests/ddp/plan/test_layout_whole.py"
SHARDED = "tests/fsdp/state/test_sharded_muon.py"

FAULTS = [
    Fault(
        "70a-state-of-another-class-is-taken",
        sentence="A checkpoint's moments of one class go to a group of another, which steps without its own.",
        tests=[f"{CLASSES}::test_state_of_another_class_is_refused"],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.optimizer",
                "plan_optimizer",
                "if saved.class_of_group(there) != cls:",
                "if False:",
            ),
        ],
    ),
    Fault(
        "70b-an-optimizer-of-matrices-gets-flat-shards",
        sentence="Without sharding, Muon gets the elements of several parameters as one vector.",
        tests=[f"{CLASSES}::test_each_class_steps_as_alone[ddp-dtype0-1]"],
        changes=[
            Change(
                "maingrad.ddp.optimizer.distributed_optimizer",
                "DistributedOptimizer.__init__",
                "return entry.bucket.layout.keeps_params_whole or not is_elementwise(class_of[group_of(entry)])",
                "return entry.bucket.layout.keeps_params_whole",
            ),
        ],
    ),
    Fault(
        "70c-loaded-options-do-not-reach-the-step",
        sentence="After a load of a state dict, steps read the options of before.",
        tests=[f"{CLASSES}::test_state_dicts_of_all_classes"],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.around_optimizer",
                "AroundOptimizer._share",
                "inner.param_groups = [self.param_groups[index] for index in indices]",
                "",
            ),
        ],
    ),
    Fault(
        "70d-matrices-and-others-share-a-bucket",
        sentence="Parameters that are kept whole and others lie in one bucket, whose borders cut matrices.",
        tests=[f"{CLASSES}::test_only_selected_parameters_are_kept_whole"],
        changes=[
            Change("maingrad.ddp.plan.owned_params", "plan_model", "whole=name in matrices - stacks", "whole=False")
        ],
    ),
    Fault(
        "70e-a-tied-head-is-a-matrix",
        sentence="Muon gets an embedding that is tied to the head.",
        tests=[f"{GROUPS}::test_what_is_left_out_and_why"],
        changes=[
            Change("maingrad.ddp.torch_grads.muon_groups", "muon_groups", "if id(param) in embedded:", "if False:")
        ],
    ),
    Fault(
        "70f-a-fused-matrix-is-one",
        sentence="Query, key and value of one weight are orthogonalised as one matrix.",
        tests=[f"{GROUPS}::test_fused_matrices_have_parts"],
        changes=[
            Change("maingrad.ddp.torch_grads.muon_groups", "_parts_of", "if what is None or", "if what != 'gate_up' or")
        ],
    ),
    Fault(
        "70g-masters-of-two-classes-in-one-bucket",
        sentence="A state dict has the masters of one class, where a bucket holds two classes with compact state.",
        tests=[f"{CLASSES}::test_two_classes_with_compact_state_in_one_bucket"],
        changes=[
            Change("maingrad.ddp.optimizer.steps", "StepsByClass.full", "others[part] = mine[index][part]", "pass")
        ],
    ),
    Fault(
        "70h-norms-of-masters-by-their-number",
        sentence="Ranks with different numbers of masters sum different numbers of norms.",
        tests=[f"{CLASSES}::test_clipping_by_masters_whose_number_differs_between_ranks"],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.over_ranks",
                "norms",
                "powers = powers if has_whole else powers.sum()[None]",
                "",
            )
        ],
    ),
    Fault(
        "70i-gaps-of-the-rest-stay-empty",
        sentence="Matrices that are no row leave ranks without one, whose shards are padding.",
        tests=[f"{DEALT}::test_small_rows_fill_the_gaps_of_the_rest"],
        changes=[Change("maingrad.ddp.plan.dealing", "_filled", "if filled < padding:", "if False:")],
    ),
    Fault(
        "70j-elements-in-place-of-work",
        sentence="Ranks get equal numbers of elements, and one of them the costly ones.",
        tests=[f"{DEALT}::test_equal_costs_within_the_shortest_shard"],
        changes=[
            Change("maingrad.ddp.plan.dealing", "deal", "(load + costs[index], rank)", "(load + sizes[index], rank)")
        ],
    ),
    Fault(
        "70k-one-rank-orthogonalises-all",
        sentence="All matrices that shards cut go to the first rank, for which the others wait.",
        tests=[f"{SHARDED}::test_shards_cut_matrices_and_all_ranks_orthogonalise"],
        changes=[Change("maingrad.fsdp.state.sharded_muon", "_deal", "load.index(min(load))", "0")],
    ),
    Fault(
        "70l-a-shard-is-taken-for-a-matrix",
        sentence="A rank applies the first elements of an update to its shard, whichever elements it has.",
        tests=[f"{SHARDED}::test_weights_have_the_bits_of_whole_matrices[zero3-element-2]"],
        changes=[
            Change(
                "maingrad.fsdp.state.sharded_muon",
                "_Bucket.give_back",
                "flat[place][elements]",
                "flat[place][: elements.stop - elements.start]",
            )
        ],
    ),
    Fault(
        "70m-loaded-state-reaches-no-class",
        sentence="Over sharded parameters, classes step with the state of before a load.",
        tests=[f"{SHARDED}::test_state_dicts_and_schedules_reach_each_class"],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.around_optimizer",
                "AroundOptimizer._share",
                "inner.state = self.state",
                "",
            )
        ],
    ),
]
