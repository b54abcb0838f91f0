from fault import Change, Fault

FAULTS = [
    Fault(
        "26-each-expert-has-a-norm-of-its-own-ranks",
        sentence="An expert's norm, and the search for Inf in its gradient, cover the ranks that hold it: ranks clip and skip differently.",
        tests=[
            "tests/fsdp/unit/test_experts.py::test_clipping_is_by_one_norm_over_all_experts[1-2.0]",
            "tests/fsdp/unit/test_experts.py::test_clipping_is_by_one_norm_over_all_experts[2-1.0]",
            "tests/fsdp/unit/test_experts.py::test_an_overflow_of_one_expert_is_skipped_by_all[1]",
            "tests/fsdp/unit/test_experts.py::test_an_overflow_of_one_expert_is_skipped_by_all[2]",
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.over_ranks",
                "everyone_of",
                "return info.everyone",
                "return info.grid",
            ),
        ],
    ),
    Fault(
        "26b-a-stock-optimizer-knows-one-ranks-experts",
        sentence="Under a stock optimizer each rank clips, and looks for Inf, by its own experts.",
        tests=[
            "tests/ddp/wrapper/test_own_ranks.py::test_torchs_norm_and_ours_are_one_for_all_ranks[False]",
            "tests/ddp/wrapper/test_own_ranks.py::test_all_ranks_skip_where_one_ranks_expert_overflows[False-True-GradScaler0]",
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.data_parallel",
                "DistributedDataParallel._shown_params",
                'own = bool(self.slices) or min(sizes, default=0) < self.grids["dense"].size',
                "own = False",
            ),
        ],
    ),
    Fault(
        "26c-expose-grads-makes-experts-of-one-rank-plain",
        sentence="Where a program calls expose_grads, torch's clipping and its scaler see one rank's experts alone.",
        tests=[
            "tests/ddp/wrapper/test_own_ranks.py::test_torchs_norm_and_ours_are_one_for_all_ranks[True]",
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.iteration",
                "BucketIteration.expose_grads",
                "if each.part is None:",
                "if True:",
            ),
        ],
    ),
    Fault(
        "26d-a-step-takes-an-experts-gradient-that-one-rank-clipped",
        sentence="Where a program replaces an expert's gradient by a plain tensor, torch's clipping sees one rank's, and the step takes it.",
        tests=[
            "tests/ddp/wrapper/test_own_ranks.py::test_steps_refuse_an_experts_gradient_of_which_torch_saw_one_ranks",
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.shown_params",
                "ShownParam.is_of_own_ranks",
                "info.grid.size < info.everyone.size",
                "info.grid.size > info.everyone.size",
            ),
        ],
    ),
]
