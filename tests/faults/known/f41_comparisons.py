from fault import Change, Fault

FAULTS = [
    Fault(
        "41a-a-gradient-is-compared-with-itself",
        sentence="verify compares each gradient with itself.",
        tests=[
            "tests/launch/verification/test_library_faults.py::test_a_fault_of_the_library_is_called_one[a bucket is summed]",
        ],
        changes=[
            Change(
                "maingrad.launch.verification.comparison",
                "Allowed.differences",
                "error = distance(values, piece.of(tensor))",
                "error = distance(values, values)",
            ),
        ],
    ),
    Fault(
        "41b-weights-of-other-ranks-are-not-looked-at",
        sentence="verify compares the first rank's weights alone.",
        tests=[
            "tests/launch/verification/test_library_faults.py::test_a_fault_of_the_library_is_called_one[one rank has other weights]",
        ],
        changes=[
            Change(
                "maingrad.launch.verification.judge",
                "judge",
                "[result.weights for result in results]",
                "[result.weights for result in results[:1]]",
            ),
        ],
    ),
    Fault(
        "41c-parts-are-compared-with-themselves",
        sentence="verify compares the parts' gradients with themselves, and not with the whole batch's: every loss is a mean.",
        tests=[
            "tests/launch/verification/test_mistakes.py::test_the_cause_is_named[loss is a sum]",
        ],
        changes=[
            Change(
                "maingrad.launch.verification.verify",
                "_compare",
                "comparison.allowed.differences([pieces_of(mean)], whole.grads)",
                "comparison.allowed.differences([pieces_of(mean)], mean)",
            ),
        ],
    ),
    Fault(
        "41d-buffers-that-differ-are-not-named",
        sentence="verify does not notice buffers that differ between ranks.",
        tests=[
            "tests/launch/verification/test_verify.py::test_buffers_that_each_rank_fills_with_its_own_rows_are_named",
        ],
        changes=[
            Change(
                "maingrad.launch.verification.verify",
                "_compare",
                "unequal(plains[comparison.parts[-1].microbatch].buffers, plains[-1].buffers)",
                "unequal(plains[-1].buffers, plains[-1].buffers)",
            ),
        ],
    ),
]
