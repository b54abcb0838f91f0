"""Faults of recipes: what a history keeps, and which recipes are one."""

from fault import Change, Fault

GIVEN_UP = "tests/te_integration/recipes/test_given_up_iterations.py"
OWN = "tests/te_integration/recipes/test_own_recipes.py"

FAULTS = [
    Fault(
        "53a-nan-is-an-infinite-amax",
        sentence="An element that is NaN is recorded as Inf, and the scale is frozen until that has left the history.",
        tests=["tests/te_integration/recipes/test_delayed_scaling.py::test_scales_are_those_of_the_formulas"],
        changes=[
            Change(
                "maingrad.kernels.quantized.quantize",
                "record_amax",
                "nan_to_num(nan=0.0, posinf=torch.inf)",
                "nan_to_num(nan=torch.inf, posinf=torch.inf)",
            )
        ],
    ),
    Fault(
        "53b-every-forward-counts",
        sentence="Amaxes of a forward whose backward trained nothing, or never came, are merged into the history.",
        tests=[f"{GIVEN_UP}::test_what_trains_nothing_leaves_no_amax[ddp]"],
        changes=[
            Change(
                "maingrad.te_integration.scaling.amax_history",
                "AmaxRow.is_in",
                "return self.backward != NO_BACKWARD and (self.backward in trained or self.outer in trained)",
                "return True",
            )
        ],
    ),
    Fault(
        "53c-a-given-up-iteration-counts-in-the-next",
        sentence="Backwards before zero_grad_buffer() are still taken for those of the iteration.",
        tests=[f"{GIVEN_UP}::test_what_trains_nothing_leaves_no_amax[zero1]"],
        changes=[Change("maingrad.ddp.buckets.reducer", "Readiness.reset", "self.trained.clear()", "pass")],
    ),
    Fault(
        "53d-a-cleared-microbatch-counts-in-the-next",
        sentence="Backwards before zero_grad() of a sharded model are still taken for those of the iteration.",
        tests=[f"{GIVEN_UP}::test_what_trains_nothing_leaves_no_amax[zero3]"],
        changes=[
            Change("maingrad.fsdp.iteration.rounds", "GradRounds._notice_all_cleared", "self.trained.clear()", "pass")
        ],
    ),
    Fault(
        "53e-a-step-that-the-device-skips-counts",
        sentence="A scaler's step that the device skips leaves its amaxes in the history.",
        tests=[f"{GIVEN_UP}::test_a_scaler_that_skips_a_step_skips_its_amaxes[zero1]"],
        changes=[
            Change(
                "maingrad.te_integration.scaling.delayed_scaling", "_Watcher.stepped", "roll.undo(found_inf)", "pass"
            ),
        ],
    ),
    Fault(
        "53f-a-step-that-does-not-come-counts",
        sentence="A step that the host skips leaves its amaxes in the history.",
        tests=[f"{GIVEN_UP}::test_a_scaler_that_skips_a_step_skips_its_amaxes[stock]"],
        changes=[
            Change("maingrad.te_integration.scaling.delayed_scaling", "_Watcher.discarded", "roll.undo()", "pass")
        ],
    ),
    Fault(
        "53j-a-scaler-over-shards-is-not-seen",
        sentence="Under fully_shard, a first step that the host skips leaves its amaxes: no optimizer was seen before.",
        tests=[f"{GIVEN_UP}::test_a_scaler_that_skips_a_step_skips_its_amaxes[zero3]"],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds._discarded",
                "iteration_ends.record_optimizer(model)",
                "pass",
            )
        ],
    ),
    Fault(
        "53h-a-frozen-first-layer-has-no-amax",
        sentence="A frozen layer that no backward reaches gets no scales, though the model trains.",
        tests=[f"{GIVEN_UP}::test_frozen_layers_of_a_model_that_trains[ddp]"],
        changes=[
            Change(
                "maingrad.te_integration.scaling.amax_history",
                "select",
                "return found.union(alike) if trained else found",
                "return found",
            )
        ],
    ),
    Fault(
        "53i-a-second-backward-shares-the-row-of-the-first",
        sentence="The gradient of autograd.grad is merged with that of a later backward of the same forward.",
        tests=[f"{GIVEN_UP}::test_each_backward_of_a_forward_has_its_gradient[ddp]"],
        changes=[
            Change(
                "maingrad.te_integration.scaling.product_scaling",
                "ProductScaling.enter_backward",
                "if row.backward not in (NO_BACKWARD, task):",
                "if False:",
            )
        ],
    ),
    Fault(
        "54a-recipes-compare-the-base-s-field",
        sentence="Recipes of one class are equal where emulate is, whatever other attributes say.",
        tests=[f"{OWN}::test_kept_weights_of_one_do_not_serve_the_other[plain]", f"{OWN}::test_compiled_code"],
        changes=[
            Change(
                "maingrad.ddp.graphs.compared_by_state",
                "ComparedByState.__eq__",
                "self.seal() == other.seal()",
                "vars(self).get('emulate') == vars(other).get('emulate')",
            )
        ],
    ),
    Fault(
        "54b-a-field-that-a-dataclass-does-not-compare",
        sentence="Recipes that differ in a field with compare=False are equal.",
        tests=[f"{OWN}::test_kept_weights_of_one_do_not_serve_the_other[decorated]"],
        changes=[
            Change(
                "maingrad.ddp.graphs.compared_by_state",
                "_state_of",
                "if name not in _CACHES}",
                "if name not in _CACHES and getattr(type(recipe).__dataclass_fields__.get(name), 'compare', True)}",
            )
        ],
    ),
    Fault(
        "54c-a-graphed-step-does-not-see-ignores-recipes",
        sentence="A replay goes on by the recipe in a layer that was exempted since.",
        tests=[f"{OWN}::test_a_graphed_step[exempt-zero1]"],
        changes=[Change("maingrad.te_integration.recipes", "", 'switches.append("ignores_recipes")', "pass")],
    ),
    Fault(
        "54d-a-graphed-callable-does-not-see-ignores-recipes",
        sentence="A callable goes on by the recipe in a layer that was exempted since.",
        tests=[f"{OWN}::test_a_graphed_callable"],
        changes=[
            Change(
                "maingrad.te_integration.graphs.weights",
                "CapturedWeights._state",
                "layer is not None and layer.ignores_recipes",
                "False",
            )
        ],
    ),
    Fault(
        "54e-a-used-recipe-changes",
        sentence="An attribute that is set after a recipe was used changes nothing, and no error says so.",
        tests=[f"{OWN}::test_a_recipe_that_was_used_stays_as_it_is"],
        changes=[
            Change(
                "maingrad.ddp.graphs.compared_by_state",
                "ComparedByState.__setattr__",
                "if _STATE in self.__dict__:",
                "if False:",
            )
        ],
    ),
]
