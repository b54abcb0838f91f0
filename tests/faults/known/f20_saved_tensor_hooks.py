from fault import Change, Fault

FAULTS = [
    Fault(
        "20-the-flag-goes-to-a-copy",
        sentence="The flag is set on, and the record read from, the tensor that a saved-tensor hook handed back.",
        tests=[
            "tests/ddp/contract/test_contract_faults.py::test_20_saved_tensor_hooks_that_hand_back_copies_change_nothing",
            "tests/te_integration/dense/test_saved_tensor_hooks.py::test_20_flag_and_overwrite_bit_are_the_weights_own",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.linear",
                "weight_grads",
                "delivered = use.target.deliver(places, operands, backward)",
                """
                copies = [place and Place(copy, place[1]) for place, copy in zip(places, ctx.saved_tensors[1:])]
                delivered = use.target.deliver(copies, operands, backward)
                """,
            ),
        ],
    ),
]
