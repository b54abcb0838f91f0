from fault import Change, Fault, sharded

FAULTS = [
    Fault(
        "09a-an-expert-without-tokens-keeps-stale-values",
        sentence="An expert without tokens is skipped, and memory that was to be overwritten keeps what it held.",
        tests=[
            "tests/te_integration/experts/test_grouped_linear_contract.py::test_09_an_expert_without_tokens_is_zeros_where_it_was_to_be_overwritten",
            "tests/te_integration/experts/test_grouped_linear.py::test_any_splits_any_sizes_and_any_frozen_experts",
            *sharded(
                "tests/fsdp/iteration/test_contract_faults.py::test_09_an_expert_without_tokens_has_zeros[discrete-{}]"
            ),
            *sharded(
                "tests/fsdp/iteration/test_contract_faults.py::test_09_an_expert_without_tokens_has_zeros[packed-{}]"
            ),
        ],
        changes=[
            Change(
                "maingrad.kernels.grouped.reference",
                "grouped_wgrad_accumulate_reference",
                "if main_grad is not None:",
                "if main_grad is not None and rows.start < rows.stop:",
            ),
        ],
    ),
    Fault(
        "09b-pad-rows-are-left-unwritten",
        sentence="Rows beyond the last expert are left as they were allocated.",
        tests=[
            "tests/te_integration/experts/test_grouped_linear_contract.py::test_09_an_expert_without_tokens_is_zeros_where_it_was_to_be_overwritten",
            "tests/te_integration/experts/test_grouped_linear.py::test_any_splits_any_sizes_and_any_frozen_experts",
        ],
        changes=[
            Change(
                "maingrad.kernels.grouped.reference",
                "grouped_linear_reference",
                "out.zero_()",
                "out.fill_(torch.nan)",
            ),
        ],
    ),
    Fault(
        "09c-what-nobody-wrote-keeps-what-the-pool-held",
        sentence="Memory from the pool is reduced as it came where a backward wrote no gradient.",
        tests=[
            *sharded("tests/fsdp/iteration/test_contract_faults.py::test_09_what_no_backward_wrote_has_zeros[{}]"),
        ],
        changes=[
            Change(
                "maingrad.ddp.buckets.reducer",
                "BucketLauncher._reduce",
                """
                for record in bucket.records:
                    record.zero_unwritten()
                """,
                "",
            ),
        ],
    ),
    Fault(
        "09d-sums-begin-with-what-their-memory-held",
        sentence="The first sum over an instance's microbatches is added to memory that nobody has written.",
        tests=[
            "tests/fsdp/iteration/test_reduced_once_memory.py::test_stale_memory_never_leaks[hsdp-2-all-none]",
            "tests/fsdp/iteration/test_reduced_once_memory.py::test_stale_memory_never_leaks[hsdp_zero1-2-some-none]",
        ],
        quick=[
            "tests/fsdp/iteration/test_reduced_once_memory.py::test_stale_memory_never_leaks[hsdp-2-all-none]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.unit.grad_shard",
                "GradShard._over_instances",
                "_accumulate(self._partial, mine, adds_to_partial)",
                "_accumulate(self._partial, mine, True)",
            ),
        ],
    ),
    Fault(
        "09e-a-first-write-adds-to-what-the-pool-held",
        sentence="The first write of a backward adds to memory that came from the pool as it was.",
        tests=[
            "tests/fsdp/iteration/test_gradient_pool.py::test_stale_memory_never_leaks_with_several_buckets[zero1-plain-True-each once-1]",
            "tests/fsdp/iteration/test_gradient_pool.py::test_stale_memory_never_leaks_with_several_buckets[hsdp_zero1-plain-False-one three times-100]",
            "tests/fsdp/iteration/test_gradient_pool.py::test_ranks_may_delay_gradients_of_different_buckets",
        ],
        changes=[
            Change(
                "maingrad.fsdp.unit.bucket",
                "ShardedBucket._make_grads",
                "first_write_overwrites=True,",
                "first_write_overwrites=False,",
            ),
        ],
    ),
]
