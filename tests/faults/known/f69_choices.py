"""Faults of what the library chooses: copy engines for gathers, kernels of activations."""

from fault import Change, Fault

CHOICE = "maingrad.ddp.buckets.copy_engines"
RULE = "tests/ddp/buckets/test_copy_engines.py"
TESTS = "tests/fsdp/test_copy_engine_choice.py"

FAULTS = [
    Fault(
        "69a-each-rank-chooses-by-itself",
        sentence="Ranks that choose copy engines map memory with ranks that do not, and all of them hang.",
        tests=[f"{RULE}::test_one_rank_that_cannot_decides_for_all"],
        changes=[
            Change(
                CHOICE,
                "choose_copy_engines",
                'return all(gather(chosen, axes, failures, "the choice of copy engines").values())',
                "return chosen",
            ),
        ],
    ),
    Fault(
        "69b-ranks-of-several-hosts-map-memory",
        sentence="Ranks that do not reach each other's memory gather by copy engines.",
        tests=[f"{RULE}::test_ranks_that_do_not_reach_each_other_gather_by_kernels"],
        changes=[Change(CHOICE, "choose_copy_engines", "told[other].device in told[rank].reached", "True")],
    ),
    Fault(
        "69c-shards-count-as-whole-buckets",
        sentence="Copy engines are chosen for small shards, since the bytes of a whole bucket are compared.",
        tests=[f"{RULE}::test_half_of_the_bytes_are_in_buckets_of_large_shards"],
        changes=[
            Change(CHOICE, "large_enough", "MIN_SHARD_NBYTES * each.group.size()", "MIN_SHARD_NBYTES"),
        ],
    ),
    Fault(
        "69d-whole-models-are-mapped",
        sentence="By the default all whole parameters of ZeRO-2 are in memory that the process never gives back.",
        tests=[f"{TESTS}::test_who_maps_memory[zero2-options3-False]"],
        changes=[
            Change(
                "maingrad.fsdp.iteration.connect",
                "use_copy_engines",
                "if units[0].copy_engine_gather is False or any(bucket.whole_params_at_rest for bucket in buckets):",
                "if units[0].copy_engine_gather is False:",
            ),
        ],
    ),
    Fault(
        "69e-captured-gathers-take-mapped-memory",
        sentence="A graphed step over units that chose copy engines gathers into memory that is not the graph's.",
        tests=[f"{TESTS}::test_a_graphed_step_gathers_by_kernels[True]"],
        changes=[
            Change("maingrad.fsdp.iteration.root", "Root.gather_by_kernels", "bucket.whole_params.pool = None", "pass"),
        ],
    ),
    Fault(
        "69f-parameters-of-an-activation-are-dropped",
        sentence="The kernel of clamped_swiglu takes its own limit and alpha in place of the module's.",
        tests=[
            "tests/te_integration/dense/test_layer_norm_mlp.py"
            "::test_a_gated_activation_is_the_same_by_its_kernel[clamped_swiglu]"
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.activations",
                "_clamped_swiglu",
                'glu_named("clamped_swiglu", limit=limit, alpha=alpha)',
                'glu_named("clamped_swiglu")',
            ),
        ],
    ),
]
