"""Faults of a torch that lacks a private name."""

from fault import Change, Fault

FAULTS = [
    Fault(
        "42a-a-renamed-name-breaks-the-import",
        sentence="A private name that torch has renamed is looked up without a fallback, and importing maingrad fails.",
        tests=[
            "tests/kernels/test_private_names.py::"
            "test_without_any_private_name_every_package_is_imported_with_one_warning_for_each"
        ],
        changes=[
            Change(
                "maingrad.kernels.compat",
                "spelling_of",
                'warn_of_loss(f"has no',
                'raise ImportError(f"has no',
            ),
        ],
    ),
    Fault(
        "42b-traced-code-warns",
        sentence="The fallback of a compiled layer warns where it is traced, and fullgraph=True stops at the warning.",
        tests=[
            "tests/te_integration/test_compiled.py::"
            "test_without_effects_of_operators_a_layer_is_a_break_without_a_warning"
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.compiled_wgrad",
                "can_compile",
                "return wgrad is not None and not is_compiled_autograd_on()",
                "if wgrad is None:\n"
                "    __import__('warnings').warn('each fused layer is a graph break', RuntimeWarning)\n"
                "return wgrad is not None and not is_compiled_autograd_on()",
            ),
        ],
    ),
    Fault(
        "42c-what-cannot-be-replaced-does-nothing",
        sentence="The stand-in of a name that nothing can replace does nothing, and a wrapper trains without it.",
        tests=["tests/kernels/test_private_names.py::test_a_wrapper_says_which_name_it_cannot_do_without"],
        changes=[
            Change(
                "maingrad.kernels.compat",
                "_StandIn.__new__",
                "raise RuntimeError(",
                "return str(",
            ),
        ],
    ),
]
