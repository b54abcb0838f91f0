"""Changes of a model behind forwards that have no backward, and between the microbatches of an iteration."""

from fault import Change, Fault

DDP = "tests/ddp/wrapper/test_changes_at_any_moment.py::"
SHARDED = "tests/fsdp/iteration/test_changes_at_any_moment.py::"
CAST = f"{DDP}test_a_change_is_served_as_plain_pytorch_serves_it_or_refused_by_name[cast-before backward-zero1]"

FAULTS = [
    Fault(
        "43a-a-change-behind-a-forward-without-a-backward",
        sentence="A forward whose backward never came opens the iteration; a layer that is unfrozen behind it trains.",
        tests=[f"{DDP}test_unfreezing_behind_a_look_at_shapes_is_refused_before_the_ranks_part"],
        changes=[
            Change(
                "maingrad.ddp.buckets.checks",
                "ModelWatch._find_frozen",
                "if self._seen is not None and self._seen.holds():",
                "if self._seen is not None:",
            )
        ],
    ),
    Fault(
        "43b-nothing-is-checked-before-gradients-leave",
        sentence="A program that calls a method of the module's, in place of the wrapper, changes the model unseen.",
        tests=[f"{DDP}test_a_change_behind_a_methods_forward_is_refused_before_gradients_leave"],
        changes=[
            Change("maingrad.ddp.buckets.reducer", "Readiness._check_once", "self._check_launch()", "pass"),
            Change(
                "maingrad.ddp.wrapper.iteration",
                "BucketIteration._start",
                "self._watch.check_sync()",
                "pass",
            ),
        ],
    ),
    Fault(
        "43c-a-frozen-layer-is-refused-in-every-microbatch",
        sentence="A layer that is frozen for one microbatch is refused, though it has the gradients of the others.",
        tests=[f"{DDP}test_a_layer_that_is_frozen_for_one_microbatch_keeps_the_gradient_of_the_others"],
        changes=[
            Change(
                "maingrad.ddp.buckets.checks",
                "ModelWatch.check_forward",
                "if frozen and not any(entry.record.written for entry in self._bucket_params):",
                "if frozen:",
            )
        ],
    ),
    Fault(
        "43d-a-fused-layer-trains-though-it-is-frozen",
        sentence="A fused layer that is frozen between forward and backward writes main_grad; autograd drops a gradient.",
        tests=[f"{DDP}test_a_fused_layer_that_is_frozen_before_its_backward_gets_no_gradient"],
        changes=[
            Change("maingrad.ddp.contract.main_grad", "WgradTarget.place", "if not weight.requires_grad:", "if False:")
        ],
    ),
    Fault(
        "43e-units-are-checked-once-an-iteration",
        sentence="A sharded layer that is unfrozen between two microbatches is not trained, and nothing says so.",
        tests=[f"{SHARDED}test_unfreezing_between_microbatches_is_refused"],
        changes=[
            Change(
                "maingrad.fsdp.iteration.root",
                "Root._check_units",
                "one_by_one = trains and self._all_checked and unit is not self.units[0]",
                "one_by_one = trains and self._all_checked",
            ),
            Change(
                "maingrad.fsdp.iteration.root",
                "Root.enter",
                """
                self._all_checked = False
                with DisableTorchFunctionSubclass():
                    for each in self.units:  # the program may have changed them since the forward
                        each.registered.check(each.label)
                """,
                "",
            ),
        ],
    ),
    Fault(
        "43f-a-parameter-that-replaces-a-whole-one-is-lost",
        sentence="A parameter that is replaced within unsharded() is thrown away at its end, silently.",
        tests=[f"{SHARDED}test_a_parameter_that_replaces_a_whole_one_is_not_lost_silently"],
        changes=[
            Change(
                "maingrad.fsdp.unit.registration",
                "Registration.show_shards",
                "self._replaced = self._replaced or self._find_replaced()",
                "pass",
            )
        ],
    ),
    Fault(
        "43g-gradients-are-shown-before-the-model-is-checked",
        sentence="Without overlap, a model that was cast before its backward meets torch's error on the dtype of .grad, and no name.",
        tests=[CAST],
        quick=[CAST],
        changes=[
            Change(
                "maingrad.ddp.buckets.reducer",
                "Readiness._show",
                """
                self._check_once()
                if self._overlap:
                    self._launcher.on_backward_over()
                """,
                """
                if self._overlap:
                    self._check_once()
                    self._launcher.on_backward_over()
                """,
            ),
        ],
    ),
]
