"""Faults of losses without logits in Hugging Face's language models."""

from fault import Change, Fault

TESTS = "tests/te_integration/head/test_fused_loss.py"
LATER = "tests/te_integration/head/test_deferred_logits.py"
WRAPPED = "tests/te_integration/head/test_fused_loss_wrappers.py"
DEFERRED = "maingrad.te_integration.conversion.deferred_logits"
FUSED = "maingrad.te_integration.conversion.fused_loss"

FAULTS = [
    Fault(
        "66a-a-cap-is-forgotten",
        sentence="The loss of Gemma 2 is that of logits without their cap.",
        tests=[f"{TESTS}::test_every_architecture_has_its_own_loss[gemma2]"],
        changes=[Change(DEFERRED, "DeferredLogits.cross_entropy", "0.0, cap, scale", "0.0, None, scale")],
    ),
    Fault(
        "66b-a-division-multiplies",
        sentence="The loss of Granite is that of logits multiplied by logits_scaling.",
        tests=[f"{TESTS}::test_every_architecture_has_its_own_loss[granite]"],
        changes=[
            Change(DEFERRED, "_form_of", 'factor *= value if kind == "mul" else 1.0 / value', "factor *= value"),
        ],
    ),
    Fault(
        "66c-a-bias-is-dropped",
        sentence="The loss of BART leaves out the bias beside its head.",
        tests=[f"{TESTS}::test_every_architecture_has_its_own_loss[bart]"],
        changes=[Change(DEFERRED, "DeferredLogits.cross_entropy", "bias=bias", "bias=None")],
    ),
    Fault(
        "66d-logits-of-another-weight",
        sentence="Logits that are read after the step are those of the new weights, and nothing says so.",
        tests=[f"{TESTS}::test_logits_are_refused_once_the_weight_may_have_changed"],
        changes=[
            Change(DEFERRED, "DeferredLogits._check_weight", "self._made.weight != _state_of(weight)", "False"),
        ],
    ),
    Fault(
        "66e-a-loss-of-the-programs-own-is-ignored",
        sentence="A loss_function that a program sets after the conversion gets something that is no tensor.",
        tests=[f"{TESTS}::test_other_losses_stay_and_the_report_says_why"],
        changes=[Change(FUSED, "_replaced_loss", "if function is None or (", "if True or (")],
    ),
    Fault(
        "66f-the-number-of-items-is-announced-twice",
        sentence='"in_forward" with num_items_in_batch makes gradients for a sum that nothing divides.',
        tests=[f"{TESTS}::test_in_forward[llama-number]"],
        changes=[
            Change(FUSED, "_fused_class", "(1.0 if grad_scale is None else grad_scale) / count", "grad_scale"),
        ],
    ),
    Fault(
        "66g-a-sharded-head-gathers-once",
        sentence="A head that is a unit of its own computes logits from its shard, where a loss reads them.",
        tests=[f"{WRAPPED}::test_a_loss_of_transformers_that_reads_logits_gets_them"],
        changes=[
            Change(
                DEFERRED,
                "DeferredLogits.values",
                "values: Tensor = self._head(self._hidden, defer=False)",
                "values: Tensor = self._head.multiply(self._hidden, (self._head.weight,), self._head.bias, None)",
            ),
        ],
    ),
    Fault(
        "66h-copies-of-a-model-are-plain",
        sentence="copy.deepcopy of a model loses its fused loss, or fails.",
        tests=[f"{TESTS}::test_names_files_and_copies_are_as_before[mixtral]"],
        changes=[Change(FUSED, "_fused_class", "(_fused_class, base)", "(inspect.unwrap, base)")],
    ),
    Fault(
        "66i-a-metric-takes-the-graph-from-logits",
        sentence="Logits that a metric reads first, under no_grad, give no gradient to a term that takes them later.",
        tests=[f"{LATER}::test_logits_that_are_read_later_are_of_the_modes_of_the_forward"],
        changes=[
            Change(DEFERRED, "DeferredLogits.values", "self._made.modes(self.device.type)", "contextlib.nullcontext()"),
        ],
    ),
]
