from fault import Change, Fault

FAULTS = [
    Fault(
        "36j-compiled-autograd-is-asked-for-once",
        sentence="Whether compiled autograd is on is remembered from the first compilation of the process: later its "
        "backwards drop weight gradients of compiled layers, in silence.",
        tests=[
            "tests/te_integration/test_compiled.py"
            "::test_compiled_autograd_may_be_switched_on_for_code_that_is_compiled_already"
        ],
        changes=[
            Change(
                "maingrad.te_integration.torch_internals",
                "is_compiled_autograd_on",
                'asked_for = getattr(_dynamo_config(), "compiled_autograd", True)',
                'asked_for = vars(_dynamo_config()).setdefault("_asked", _dynamo_config().compiled_autograd)',
            ),
        ],
    ),
    Fault(
        "36k-compiled-code-stays-when-compiled-autograd-comes",
        sentence="Code that was compiled before compiled autograd was switched on keeps its operators, which are then "
        "dropped in silence.",
        tests=[
            "tests/te_integration/test_compiled.py"
            "::test_compiled_autograd_may_be_switched_on_for_code_that_is_compiled_already"
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.compiled_wgrad",
                "WgradHandle.guarded",
                "return [recipe, in_transform(), can_compile(), *map",
                "return [recipe, in_transform(), *map",
            ),
        ],
    ),
]
