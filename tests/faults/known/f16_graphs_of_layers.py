from fault import Change, Fault

FAULTS = [
    Fault(
        "16a-a-replay-says-nothing-to-the-provider",
        sentence="A replay sets no flag and returns no placeholder: the hook of a provider finds neither.",
        tests=[
            "tests/te_integration/graphs/test_callables.py::test_a_foreign_provider_sees_what_it_sees_eagerly",
        ],
        changes=[
            Change(
                "maingrad.te_integration.graphs.layer_graphs",
                "LayerGraphs.replay_dgrad",
                """
                for weight, given in zip(delivery.weights, delivery.hand_over(), strict=True):
                    if given is not None:
                        handed[id(weight)] = given
                """,
                "pass",
            ),
        ],
    ),
    Fault(
        "16b-the-captured-beta-is-believed",
        sentence="A replay adds to, or overwrites, what its capture did, whatever the record says now.",
        tests=[
            "tests/te_integration/graphs/test_callables.py::test_without_an_order_every_module_has_one_microbatch_in_flight",
            "tests/te_integration/graphs/test_callables.py::test_an_order_that_is_run_twice_in_an_iteration_adds",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.capturing",
                "Delivery.open",
                """
                if overwrites and not captured:
                    accumulator.zero_()
                elif captured and not overwrites:
                    kept.append((accumulator, accumulator.clone()))
                """,
                "del overwrites",
            ),
        ],
    ),
    Fault(
        "16c-a-buffer-is-reused-after-its-dgrad",
        sentence="The operands of a delayed weight gradient are overwritten by the next microbatch.",
        tests=[
            "tests/te_integration/graphs/test_orders.py::test_an_order_trains_as_it_does_eagerly",
            "tests/te_integration/graphs/test_buffers.py::test_delayed_gradients_keep_their_operands",
        ],
        changes=[
            Change(
                "maingrad.te_integration.graphs.layer_graphs",
                "LayerGraphs.capture_dgrad",
                """
                if not self._later:
                    self._order.buffers.give_back([*self._inputs, *self._output_grads])
                """,
                "self._order.buffers.give_back([*self._inputs, *self._output_grads])",
            ),
        ],
    ),
    Fault(
        "16d-every-write-is-captured-as-the-first",
        sentence="The graphs of later microbatches overwrite, and each replay has to save and add what was there.",
        tests=[
            "tests/te_integration/graphs/test_callables.py::test_the_first_write_of_an_order_is_captured_as_an_overwrite_and_no_other",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.capturing",
                "FirstWrites.take",
                "return self._in_order and first and record is not None and record.first_write_overwrites",
                """
                del first
                return self._in_order and record is not None and record.first_write_overwrites
                """,
            ),
        ],
    ),
    Fault(
        "16e-a-replay-does-not-wait-for-the-gather",
        sentence="A replayed forward reads parameters whose gather is under way.",
        tests=[
            "tests/te_integration/graphs/test_gathers.py::test_a_replay_waits_for_the_parameters_of_its_layer",
        ],
        changes=[
            Change(
                "maingrad.te_integration.graphs.weights",
                "CapturedWeights._state",
                "param.data_ptr()",
                "None",
            ),
        ],
    ),
    Fault(
        "16f-a-delayed-gradient-is-not-queued",
        sentence="A replay announces no delayed weight gradient: buckets are reduced before it is there.",
        tests=[
            "tests/te_integration/graphs/test_orders.py::test_an_order_trains_as_it_does_eagerly",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.capturing",
                "Delivery.put",
                "queue.put(entry)",
                "",
            ),
        ],
    ),
    Fault(
        "16g-graphs-are-replayed-in-any-order",
        sentence="A replay out of the captured order reads memory that another graph has written.",
        tests=[
            "tests/te_integration/graphs/test_refused.py::test_a_call_out_of_turn",
        ],
        changes=[
            Change(
                "maingrad.te_integration.graphs.captured_order",
                "CapturedOrder.enter",
                "if step != self._next:",
                "if step != self._next and step == 0:",
            ),
        ],
    ),
    Fault(
        "16h-a-capture-writes-main-grad",
        sentence="Trials and captures add to the gradients of the running iteration.",
        tests=[
            "tests/te_integration/graphs/test_refused.py::test_a_capture_that_fails_leaves_the_model_as_it_was",
        ],
        changes=[
            Change(
                "maingrad.te_integration.graphs.trial",
                "content_kept",
                "tensor.data.copy_(copy)  # captured autograd graphs that have saved it are to see no change",
                "del tensor, copy",
            ),
        ],
    ),
    Fault(
        "16j-a-capture-that-fails-leaves-its-choices-on-the-modules",
        sentence="A capture that fails leaves on the modules what it has chosen for their gradients.",
        tests=[
            "tests/te_integration/graphs/test_refused.py::test_a_capture_that_fails_leaves_the_model_as_it_was",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.linear",
                "ProductUse.serves",
                "self.captured is targets.captured and ",
                "",
            ),
        ],
    ),
    Fault(
        "16i-static-gradients-are-given-away",
        sentence="Without a provider .grad is the graph's memory, which the next replay overwrites.",
        tests=[
            "tests/te_integration/graphs/test_callables.py::test_gradients_without_a_provider_are_the_users",
        ],
        changes=[
            Change(
                "maingrad.te_integration.graphs.layer_graphs",
                "_for_autograd",
                "grad.detach() if record_of(param) is not None and has_one_hook(param) else grad.clone()",
                "grad.detach()",
            ),
        ],
    ),
    Fault(
        "16y-a-captured-step-reads-shards-of-the-step-before",
        sentence="A captured step reads parameters after its update, before the shards of other ranks have come.",
        tests=[
            "tests/ddp/graphs/test_host_effects.py::test_parameters_that_the_step_reads_after_the_update",
        ],
        changes=[
            Change(
                "maingrad.ddp.optimizer.param_sync",
                "ParamSync.publish",
                """
                else:
                    self._refuse_reads()
                """,
                "",
            ),
        ],
    ),
    Fault(
        "16y-one-rank-captures-for-all",
        sentence="What is refused in captures is refused of a rank that trains eagerly beside one that captures.",
        tests=[
            "tests/ddp/graphs/test_training_step.py::test_a_rank_trains_eagerly_while_another_one_captures",
        ],
        changes=[
            Change(
                "maingrad.ddp.collectives.streams",
                "is_capturing",
                "return bool(_capturing) and bool(capture_number())",
                "return bool(_capturing)",
            ),
        ],
    ),
]
