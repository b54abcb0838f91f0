"""Megatron-core's marks of model parallelism."""

from fault import Change, Fault

TESTS = "tests/ddp/wrapper/test_model_parallel.py::"

FAULTS = [
    Fault(
        "50a-slices-are-taken-for-replicas",
        sentence="The data-parallel group is forgotten, and the first rank's slices overwrite all others'.",
        tests=[TESTS + "test_a_forgotten_group_is_refused"],
        changes=[
            Change(
                "maingrad.ddp.wrapper.setup_checks",
                "check_undeclared_parts",
                "[*parts, *experts]",
                "experts",
            )
        ],
    ),
    Fault(
        "50b-nobody-sums-the-parts-of-a-gradient",
        sentence="Copies of a parameter on tensor-parallel ranks train on parts of its gradient, and drift apart.",
        tests=[TESTS + "test_a_gradient_that_nobody_sums_is_refused"],
        changes=[Change("maingrad.ddp.plan.owned_params", "mark_of_partial_grad", "in _PARTIAL", "in ()")],
    ),
    Fault(
        "50c-a-norm-is-of-one-ranks-slices",
        sentence="Ranks that hold one model together clip by the norms of their own slices.",
        tests=[TESTS + "test_what_would_cover_one_ranks_slices_is_refused"],
        changes=[
            Change(
                "maingrad.ddp.optimizer.fit",
                "_refuse",
                "if name in model.slices",
                "if False",
            )
        ],
    ),
    Fault(
        "50d-a-norm-of-shards-is-of-one-ranks-slices",
        sentence="Norms of sharded gradients cover the outermost unit's ranks, and not those with the other slices.",
        tests=[TESTS + "test_what_would_cover_one_ranks_slices_is_refused"],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.over_ranks",
                "everyone_of",
                "if info.model_slice is None and info.is_cut:",
                "if False:",
            )
        ],
    ),
    Fault(
        "50e-ranks-with-other-slices-write-to-one-checkpoint",
        sentence="All tensor-parallel ranks save their slices under one name in one folder.",
        tests=[TESTS + "test_a_checkpoint_of_slices_is_refused"],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.checkpoint",
                "save_checkpoint",
                "if ranks.grid.leaves_ranks_out and",
                "if False and",
            )
        ],
    ),
    Fault(
        "50f-a-stage-scales-what-is-not-there",
        sentence="torch's pipeline stage divides .grad, which is None, and gradients are too large.",
        tests=[TESTS + "test_torchs_stage_divides_grad_by_the_microbatches"],
        changes=[Change("maingrad.ddp.buckets.reducer", "Readiness._show", "self._shown.show()", "pass")],
    ),
    Fault(
        "50g-one-stage-skips-a-step",
        sentence="The scalers of a pipeline's stages look for Inf in their own gradients, and skip different steps.",
        tests=[TESTS + "test_a_scaler_covers_the_stages_that_the_norm_covers"],
        changes=[
            Change(
                "maingrad.ddp.optimizer.grad_scaler",
                "GradScaler._unscale_grads_",
                "if self._pipeline_group is not None and self._pipeline_group.size() > 1:",
                "if False:",
            )
        ],
    ),
    Fault(
        "50h-a-mark-is-refused-where-there-is-one-tensor-parallel-rank",
        sentence="Megatron-core marks whole parameters as slices at a tensor-parallel degree of 1, which must train.",
        tests=[TESTS + "test_marks_of_whole_parameters_change_nothing"],
        changes=[
            Change(
                "maingrad.ddp.collectives.rank_grid",
                "RankGrid.leaves_ranks_out",
                "return world_size() > self.size",
                "return self.in_larger_world",
            )
        ],
    ),
    Fault(
        "50j-groups-are-named-by-their-number",
        sentence="Ranks that have made different numbers of groups name the next one that they share differently, and wait "
        "for ever.",
        tests=[
            "tests/ddp/collectives/test_rank_grid.py::test_ranks_with_other_models_meet_in_later_groups"
            "[False-two have one]"
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_internals.distributed",
                "new_group_of_members",
                "world.group_count = -made[tuple(ranks)]",
                "made[()] = 0",
            ),
            Change(
                "maingrad.ddp.torch_internals.distributed",
                "new_group_of_members",
                "world.group_count = count",
                "made[()] = 0",
            ),
        ],
    ),
]
