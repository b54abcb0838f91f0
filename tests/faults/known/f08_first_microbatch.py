from fault import Change, Fault, sharded

FAULTS = [
    Fault(
        "08a-the-first-microbatch-overwrites",
        sentence="Every write of the first microbatch overwrites: a module used twice keeps its last use.",
        tests=[
            "tests/te_integration/dense/test_return_table_modules.py::test_08_a_module_used_twice_overwrites_once_in_each_backward",
            *sharded("tests/fsdp/iteration/test_contract_faults.py::test_08_the_first_microbatch_overwrites_once[{}]"),
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "absorb_grad",
                "ours, record.consumer_wrote = record.consumer_wrote, False",
                """
                ours, record.consumer_wrote = record.consumer_wrote, False
                record.written = record.written or ours
                """,
            ),
            Change(
                "maingrad.ddp.contract.main_grad",
                "open_for_write",
                "overwrite = record.open_for_write()",
                """
                overwrite = record.open_for_write()
                record.written = not overwrite
                """,
            ),
        ],
    ),
    Fault(
        "08b-a-foreign-bit-is-obeyed-by-every-use",
        sentence="Every write under a foreign overwrite_main_grad overwrites: a module used twice keeps its last use.",
        tests=[
            "tests/te_integration/dense/test_return_table_modules.py::test_08_a_module_used_twice_overwrites_once_in_each_backward",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "open_for_write",
                'return getattr(weight, "overwrite_main_grad", False) and _first_write_of(backward, weight)',
                'return getattr(weight, "overwrite_main_grad", False)',
            ),
        ],
    ),
    Fault(
        "08c-which-backward-is-asked-too-late",
        sentence="A delayed gradient asks when it runs which backward this is: there is none, and it adds to memory that was to be overwritten.",
        tests=[
            "tests/te_integration/dense/test_return_table_modules.py::test_08_a_module_used_twice_overwrites_once_in_each_backward",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "_first_write_of",
                "first = getattr(weight, _OVERWRITTEN_IN, None) != backward",
                """
                backward = torch._C._current_graph_task_id()
                first = getattr(weight, _OVERWRITTEN_IN, None) != backward
                """,
            ),
        ],
    ),
    Fault(
        "08d-a-held-microbatch-is-overwritten",
        sentence="The whole gradients that a unit holds are overwritten by the next microbatch.",
        tests=[
            "tests/fsdp/iteration/test_reduced_once.py::test_shards_agree_to_the_bit[zero3, resharded-3-True-none-2]",
            "tests/fsdp/iteration/test_reduced_once.py::test_hybrids_agree_to_the_bit[hsdp-3-2-True-none]",
            "tests/fsdp/iteration/test_reduced_once_grads.py::test_it_is_zeros_until_the_last_microbatch[zero3, once]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds.leave",
                "for bucket in grad_round.buckets:",
                """
                for bucket in grad_round.buckets:
                    for record in bucket.records:
                        record.written = False
                """,
            ),
        ],
    ),
]
