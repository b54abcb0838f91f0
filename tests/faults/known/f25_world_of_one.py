from fault import Change, Fault

FAULTS = [
    Fault(
        "25a-no-process-group-is-a-world-of-one",
        sentence="Ranks that a launcher has started find no process group, and each is a world of one.",
        tests=[
            "tests/ddp/collectives/test_world_of_one.py::test_ranks_that_a_launcher_started_and_no_process_group_are_refused",
        ],
        changes=[
            Change(
                "maingrad.ddp.collectives.rank_grid",
                "group_or_default",
                "if num_ranks > 1:",
                "if False:",
            ),
        ],
    ),
    Fault(
        "25b-a-late-process-group-is-not-seen",
        sentence="A wrapper that was made before the process group stays a world of one.",
        tests=[
            "tests/ddp/collectives/test_world_of_one.py::test_a_group_made_after_wrapping_is_refused_at_the_next_forward",
            "tests/ddp/collectives/test_world_of_one.py::test_without_a_forward_of_the_wrapper_it_is_refused_at_the_reduction",
        ],
        changes=[
            Change(
                "maingrad.ddp.collectives.rank_grid",
                "make_grid",
                "return RankGrid(inner, outer, inner, assumed=ranks is None and inner is None)",
                "return RankGrid(inner, outer, inner)",
            ),
        ],
    ),
    Fault(
        "25c-a-wrapper-is-let-go",
        sentence="Nobody keeps the wrapper, and each rank trains the model by itself.",
        tests=[
            "tests/ddp/wrapper/test_dropped_wrapper.py::test_a_model_whose_wrapper_is_gone_refuses_to_train",
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.attachment",
                "_take_back",
                "entry.owners if dropped else ()",
                "()",
            ),
        ],
    ),
]
