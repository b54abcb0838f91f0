"""Weights that a module asks for one by one, as Transformer Engine's do."""

from fault import Change, Fault

HERE = "tests/fsdp/unit/test_distributed_weights.py::"
OPTIONS = HERE + "test_under_each_option"
UNIT, ASKS = "maingrad.fsdp.unit.weight_unit", "maingrad.fsdp.iteration.weights"

FAULTS = [
    Fault(
        "80a-a-module-overwrites-what-get-main-grad-gives",
        sentence="A distributed weight has __fsdp_param__ too: the module overwrites earlier microbatches' sum.",
        tests=[OPTIONS],
        changes=[
            Change(
                UNIT,
                "WeightBucket._serve",
                "attach(param, record)",
                "attach(param, record); param.__fsdp_param__ = True\n"
                "param.get_main_grad = lambda: (record.open_for_write(), record.view)[1]",
            )
        ],
    ),
    Fault(
        "80b-main-grad-is-lent-again",
        sentence="The second product of an iteration overwrites the first.",
        tests=[OPTIONS],
        changes=[
            Change(
                UNIT,
                "WeightUnit._grad_buffer",
                "if record.written or not self.root.weights.delivers_to(param):",
                "if not self.root.weights.delivers_to(param):",
            )
        ],
    ),
    Fault(
        "80c-weights-of-a-group-in-the-order-of-buckets",
        sentence="The first expert's tokens are multiplied by the last expert's weight.",
        tests=[OPTIONS],
        changes=[Change(UNIT, "make_weight_units", "order.index(pair.name)", "-order.index(pair.name)")],
    ),
    Fault(
        "80d-asked-weights-stay",
        sentence="A weight stays whole after its module's forward.",
        tests=[HERE + "test_a_weight_is_whole_for_its_module_alone"],
        changes=[
            Change(
                ASKS, "WeightAsks.forward_ended", "self._root.release_after_forward(unit, has_graph=has_graph)", "pass"
            )
        ],
    ),
    Fault(
        "80e-autograd-grad-keeps-what-a-module-hands-over",
        sentence="autograd.grad through a module that hands over a gradient adds it to the iteration's.",
        tests=[HERE + "test_going_through_the_model_writes_nothing"],
        changes=[Change(ASKS, "WeightAsks.finalize", " and self.delivers_to(pair.whole)", "")],
    ),
    Fault(
        "80f-gradients-that-were-handed-over-wait",
        sentence="The reduction of a weight waits for the end of the backward.",
        tests=[HERE + "test_reduction_starts_when_the_gradient_is_handed_over"],
        changes=[Change(ASKS, "WeightAsks.finalize", "self._root.leave(unit)", "pass")],
    ),
    Fault(
        "80g-the-gradient-of-another-use-is-dropped",
        sentence="What autograd brings for a weight is taken for a placeholder, and another use's gradient is lost.",
        tests=[HERE + "test_another_use_of_the_weight_is_refused"],
        changes=[Change(UNIT, "_on_grad", "not (delivered and is_operation)", "not delivered")],
    ),
    Fault(
        "80h-a-module-asks-a-tensor-that-gathers-nothing",
        sentence="Under hooks on saved tensors a module gets another tensor back, and computes with freed memory.",
        tests=[HERE + "test_saved_tensors_that_come_back_as_others_are_refused"],
        changes=[Change(ASKS, "WeightAsks.for_forward", "if are_saves_packed() and", "if False and")],
    ),
    Fault(
        "80i-frozen-weights-stay-until-backward-ends",
        sentence="Backward passes frozen weights, and nobody frees them.",
        tests=[HERE + "test_a_weight_is_whole_for_its_module_alone"],
        changes=[Change(ASKS, "WeightAsks._pass_frozen", "self._root.gathers.release(self._frozen)", "pass")],
    ),
    Fault(
        "80j-weights-of-a-frozen-model-train",
        sentence="A backward through the frozen model is an iteration's for the weights that modules ask for.",
        tests=[HERE + "test_a_frozen_model_lets_gradients_through"],
        changes=[
            Change(
                ASKS,
                "WeightAsks.forward_ended",
                "unit.hands_over = _trains(unit)",
                "unit.hands_over = unit.trains",
            )
        ],
    ),
]
