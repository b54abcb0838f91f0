"""Parameters that a forward writes: lost in gathered memory, or different on each rank."""

from fault import Change, Fault

_SHARDED = "tests/fsdp/unit/test_whole_writes.py"
_REPLICAS = "tests/ddp/buckets/test_replicas.py"

FAULTS = [
    Fault(
        "45a-a-write-in-a-forward-is-lost-at-the-reshard",
        sentence="Whole parameters are freed after a forward, and what it has written there is lost with them.",
        tests=[
            f"{_SHARDED}::test_one_rank_writes_without_an_option",
            f"{_SHARDED}::test_writes_of_reduced_statistics_are_declared_alike",
            f"{_SHARDED}::test_hooks_of_users_write_in_their_units_forward",
        ],
        changes=[Change("maingrad.fsdp.unit.registration", "WholeWrites.take_over", "write_back(written)", "pass")],
    ),
    Fault(
        "45b-a-write-in-a-recompute-is-lost",
        sentence="A forward that backward recomputes inside a unit writes after the unit's own forward has ended.",
        tests=[f"{_SHARDED}::test_units_that_run_twice_and_recomputes_write_each_time"],
        changes=[Change("maingrad.fsdp.iteration.root", "Root._leave_unit", "unit.writes.take_over()", "pass")],
    ),
    Fault(
        "45c-a-write-rounds-the-other-elements-of-a-master",
        sentence="A whole bf16 parameter is copied to its fp32 shard, and elements that were not written lose bits.",
        tests=[f"{_SHARDED}::test_elements_that_no_forward_has_written_keep_their_bits_in_masters"],
        changes=[
            Change("maingrad.fsdp.unit.registration", "write_back", "if part.dtype is not sharded.dtype:", "if False:")
        ],
    ),
    Fault(
        "45d-a-write-through-data-is-lost",
        sentence="A write through .data raises no version counter, and is lost in a unit's first forward too.",
        tests=[f"{_SHARDED}::test_a_write_through_data_in_a_first_forward_is_refused"],
        changes=[
            Change(
                "maingrad.fsdp.unit.registration", "WholeWrites._check_uncounted", "if old != new and", "if False and"
            )
        ],
    ),
    Fault(
        "46a-a-forward-writes-from-local-data",
        sentence="A forward writes a parameter from the rank's own data, and replicas part.",
        tests=[
            f"{_REPLICAS}::test_writes_that_are_not_declared_are_refused_by_name",
            f"{_REPLICAS}::test_an_evaluation_that_writes_is_refused_as_well",
            f"{_REPLICAS}::test_a_frozen_parameter_that_a_forward_replaces_is_refused",
        ],
        changes=[Change("maingrad.ddp.buckets.replicas", "Replicas.run", "self._check(before)", "pass")],
    ),
    Fault(
        "46b-each-rank-writes-its-own-values-to-its-shard",
        sentence="A forward writes a sharded parameter from the rank's own data: shards of different values.",
        tests=[f"{_SHARDED}::test_writes_that_are_not_declared_are_refused_by_name"],
        changes=[
            Change("maingrad.fsdp.unit.registration", "WholeWrites.take_over", "if not self._served:", "if False:")
        ],
    ),
    Fault(
        "46c-replicas-that-differ-are-taken-for-equal",
        sentence="The comparison of replicas on demand looks at one rank alone.",
        tests=[
            f"{_REPLICAS}::test_replicas_that_part_are_found_in_their_turn",
            f"{_REPLICAS}::test_the_comparison_names_all_ranks_that_differ_and_counts_parameters",
        ],
        changes=[
            Change(
                "maingrad.ddp.buckets.replicas",
                "find_parted",
                "if len(set(gather(hash(tuple(mine)), axes, failures, what).values())) == 1:",
                "if gather(hash(tuple(mine)), axes, failures, what):",
            )
        ],
    ),
    Fault(
        "46d-replicas-are-compared-in-the-middle-of-an-update",
        sentence="A step compares replicas when it has updated this rank's shards of some buckets already.",
        tests=[f"{_REPLICAS}::test_a_step_without_a_wait_compares_before_the_update"],
        changes=[
            Change(
                "maingrad.ddp.config",
                "DistributedDataParallelConfig.can_wait_by_bucket",
                " or self.check_replicas_every",
                "",
            )
        ],
    ),
]
