from fault import Change, Fault

FAULTS = [
    Fault(
        "29a-frozen-experts-are-overwritten",
        sentence="Parameters and buffers are copied from the first of all ranks, not from the first of those with the same experts.",
        tests=[
            "tests/ddp/wrapper/test_experts.py::test_each_ranks_experts_stay_its_own",
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.setup_checks",
                "broadcast_tensors",
                "grids[each.grid_name].broadcast",
                'grids[each.grid_name if each.tensor.requires_grad else "dense"].broadcast',
            ),
        ],
    ),
    Fault(
        "29b-frozen-experts-are-none",
        sentence="Frozen experts do not count as experts: a group for them is refused, and without it they are overwritten.",
        tests=[
            "tests/ddp/wrapper/test_experts.py::test_each_ranks_experts_stay_its_own",
            "tests/ddp/wrapper/test_experts.py::test_a_marked_buffer_alone_is_an_experts",
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.data_parallel",
                "DistributedDataParallel._make_grids",
                'has_experts=any(each.grid_name == "expert" for each in tensors),',
                'has_experts=any(each.grid_name == "expert" and each.trained for each in tensors),',
            ),
        ],
    ),
    Fault(
        "29c-experts-that-differ-are-taken-for-replicas",
        sentence="Nobody says which ranks hold the same experts, and all of them get the first rank's, or each other's gradients.",
        tests=[
            "tests/ddp/wrapper/test_experts.py::test_experts_that_differ_and_no_group_are_refused_on_all_ranks",
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.setup_checks",
                "check_undeclared_parts",
                "[*parts, *experts]",
                "parts",
            ),
        ],
    ),
    Fault(
        "29d-experts-buffers-are-saved-once",
        sentence="A checkpoint holds one set of the experts' buffers, which all ranks get.",
        tests=[
            "tests/ddp/wrapper/test_experts.py::test_a_checkpoint_keeps_what_each_rank_has_of_experts",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.source",
                "model_tensors",
                "if id(buffer) in of_experts:",
                "if not of_experts:",
            ),
        ],
    ),
    Fault(
        "29e-torch-copies-the-first-ranks-shards",
        sentence="torch's DistributedDataParallel around sharded parameters copies the first rank's shards over all others.",
        tests=[
            "tests/ddp/wrapper/test_other_wrappers.py::test_torch_has_copied_nothing_by_then",
        ],
        changes=[
            Change(
                "maingrad.fsdp.module",
                "FSDPModule.named_parameters",
                "unit_of(self).refuse_torch_ddp()",
                "",
            ),
        ],
    ),
]
