from fault import Change, Fault

FAULTS = [
    Fault(
        "15-one-bit-for-all-weights",
        sentence="Whether to overwrite is asked once in a backward, and applied to all weights.",
        tests=[
            "tests/te_integration/dense/test_layer_norm_mlp.py::test_15_each_weight_has_its_own_overwrite_bit",
            "tests/te_integration/dense/test_layer_norm_mlp.py::test_15_each_weight_obeys_its_own_foreign_overwrite_bit",
            "tests/te_integration/dense/test_layer_norm_linear.py::test_15_each_slice_obeys_its_own_foreign_overwrite_bit",
            "tests/te_integration/experts/test_grouped_mlp_weights.py::test_15_each_weight_obeys_its_own_foreign_bit",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "",
                '_OVERWRITTEN_IN = "_maingrad_overwritten_in"',
                """
                _OVERWRITTEN_IN = "_maingrad_overwritten_in"
                _BITS: dict[int, bool] = {}
                """,
            ),
            Change(
                "maingrad.ddp.contract.main_grad",
                "open_for_write",
                """
                if record is not None:
                    overwrite = record.open_for_write()
                    record.num_fused_writes += 1
                    return overwrite
                return getattr(weight, "overwrite_main_grad", False) and _first_write_of(backward, weight)
                """,
                """
                if record is not None:
                    overwrite = record.open_for_write()
                    record.num_fused_writes += 1
                    return _BITS.setdefault(backward, overwrite)
                return _BITS.setdefault(
                    backward, getattr(weight, "overwrite_main_grad", False) and _first_write_of(backward, weight)
                )
                """,
            ),
        ],
    ),
    Fault(
        "15b-one-bit-for-all-experts",
        sentence="Whether to overwrite is asked of the first expert, and applied to the whole group.",
        tests=[
            "tests/te_integration/experts/test_grouped_linear_contract.py::test_15_each_expert_obeys_its_own_foreign_overwrite_bit",
            "tests/te_integration/experts/test_grouped_linear_contract.py::test_15_each_expert_has_its_own_first_write",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.grouped_wgrad",
                "GroupedWgrad.accumulate",
                "if self._packed:",
                """
                overwrite = list(overwrite[:1]) * len(overwrite)
                if self._packed:
                """,
            ),
        ],
    ),
    Fault(
        "15c-hooks-of-the-first-slice-are-asked-for",
        sentence="Whether somebody has to see a gradient is asked of the first slice of a split weight only: a hook on another one is never called.",
        tests=[
            "tests/te_integration/dense/test_split_hooks.py::test_a_hook_on_any_slice_sees_its_gradient",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.linear",
                "LinearModule.delivery",
                "if not needing or in_transform() or not all(map(is_fusable, needing)):",
                "if not needing or in_transform() or not is_fusable(needing[0]):",
            ),
        ],
    ),
]
