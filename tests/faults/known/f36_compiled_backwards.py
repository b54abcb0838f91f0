from fault import Change, Fault

FAULTS = [
    Fault(
        "36a-the-operator-has-no-effect",
        sentence="The operator of the weight gradient has no effect that a compiler sees: as nobody reads its result, the call is dropped.",
        tests=[
            "tests/te_integration/test_compiled.py::test_a_converted_layer_is_written_once",
        ],
        changes=[
            Change(
                "maingrad.te_integration.torch_internals",
                "make_effectful_op",
                "_give_effect(op, _effect_type.ORDERED)",
                "pass",
            ),
        ],
    ),
    Fault(
        "36b-gradients-of-inputs-write",
        sentence="A compiled backward that was asked for gradients of inputs alone writes main_grad.",
        tests=[
            "tests/te_integration/test_compiled.py::test_gradients_of_inputs_alone_write_nothing",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.compiled_wgrad",
                "WgradHandle._wanted",
                "return weight if will_execute(following[place][0]) else None",
                """
                will_execute(following[place][0])
                return weight
                """,
            ),
        ],
    ),
    Fault(
        "36c-a-copy-writes-for-the-original",
        sentence="A copied module keeps the handle of the original, and its compiled backward writes for the original, or nowhere.",
        tests=[
            "tests/te_integration/test_compiled.py::test_a_copy_writes_its_own_gradient",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.linear_options",
                "LinearOptions.__setstate__",
                """
                if "_wgrad_handle" in state:
                    self.make_handle()  # a copy is a module of its own
                """,
                "",
            ),
        ],
    ),
    Fault(
        "36d-a-compiled-layer-overlooks-a-hook",
        sentence="A layer is compiled as a fused one although its weight has a hook, which gets no gradient.",
        tests=[
            "tests/te_integration/test_compiled.py::test_a_hook_on_the_weight_gets_its_gradient",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.compiled_wgrad",
                "_grad_receiver",
                """
                if not is_fusable(param):
                    return "autograd"
                """,
                "",
            ),
        ],
    ),
    Fault(
        "36e-the-second-product-writes-the-first-weight",
        sentence="The weight gradient of a module's second product goes to its first weight.",
        tests=[
            "tests/te_integration/test_compiled.py::test_two_products_write_two_weights",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.layer_norm_mlp",
                "LayerNormMLP.weights_of",
                "return (self.weight_names[product],)",
                "return (self.weight_names[0],)",
            ),
        ],
    ),
    Fault(
        "36f-a-computed-weight-is-taken-for-the-parameter",
        sentence="A weight that torch.func.functional_call brings into a compiled layer is taken for the layer's own parameter.",
        tests=[
            "tests/te_integration/test_compiled.py::test_each_product_is_written_once[--a_computed_weight]",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.compiled_wgrad",
                "mode_of",
                """
                for weight in weights:
                    if not isinstance(weight, nn.Parameter):  # torch.func.functional_call brought another one
                        return "autograd"
                """,
                "",
            ),
        ],
    ),
    Fault(
        "36g-compiled-code-keeps-its-first-recipe",
        sentence="Code that was compiled under one recipe runs under another.",
        tests=[
            "tests/te_integration/recipes/test_compiled.py::test_each_recipe_has_a_graph_and_comes_back_to_it",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.compiled_wgrad",
                "WgradHandle.guarded",
                'return [recipe, in_transform(), can_compile(), *map(_grad_receiver, module.__dict__["_parameters"].values())]',
                'return [in_transform(), can_compile(), *map(_grad_receiver, module.__dict__["_parameters"].values())]',
            ),
        ],
    ),
    Fault(
        "36h-compiled-code-forgets-that-it-was-quantised",
        sentence="A reentrant checkpoint around compiled layers computes again without the recipe.",
        tests=[
            "tests/te_integration/recipes/test_compiled.py::test_reentrant_checkpoints_are_refused",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.compiled_wgrad",
                "WgradHandle.mode",
                """
                if self.recipe() == _FORGOTTEN:
                    return "break"
                """,
                "",
            ),
        ],
    ),
]
