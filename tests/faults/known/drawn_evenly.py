"""A draw over all folders, evenly by function, of slips that no quick test had noticed."""

from fault import Change, Fault

FAULTS = [
    Fault(
        "12y-unused-parameters-are-ready-under-no-sync",
        sentence="Buckets of parameters that a forward has not reached are ready in its backward under no_sync.",
        tests=[
            "tests/ddp/buckets/test_end_of_backward.py::"
            "test_what_one_forward_has_not_reached_waits_where_its_backward_is_under_no_sync"
        ],
        changes=[
            Change(
                "maingrad.ddp.buckets.reducer",
                "Readiness._on_backward_start",
                "if self.sync and self._overlap:",
                "if self._overlap:",
            ),
        ],
    ),
    Fault(
        "34ze-a-newer-format-is-read",
        sentence="A checkpoint of a later format is read as if it were of this one.",
        tests=["tests/ddp/checkpoint/test_ids.py::test_a_version_to_come_is_refused"],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.manifest",
                "Manifest.read",
                "if version != VERSION:",
                "if version < VERSION:",
            ),
        ],
    ),
    Fault(
        "34zg-elements-may-be-held-by-nobody",
        sentence="Elements that no rank holds are noticed by the load.",
        tests=["tests/ddp/checkpoint/test_faults.py::test_elements_that_no_rank_holds_are_missed_on_all_ranks"],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.boxes",
                "check_tiling",
                "if missing:",
                "if missing < 0:",
            ),
        ],
    ),
    Fault(
        "50f-whole-parameters-with-marks-are-taken-for-slices",
        sentence="Norms of marked parameters that every rank holds whole are collectives.",
        tests=[
            "tests/ddp/wrapper/test_model_parallel.py::test_one_rank_may_take_a_norm_of_whole_parameters_with_marks"
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.data_parallel",
                "DistributedDataParallel.__init__",
                "for owned in marked if unknown",
                "for owned in marked",
            ),
        ],
    ),
    Fault(
        "49c-minus-one-is-taken-for-unwritten",
        sentence="An integer buffer of -1 on meta is refused as if nobody had written it.",
        tests=["tests/fsdp/unit/test_meta.py::test_a_buffer_of_minus_ones_is_written"],
        changes=[
            Change(
                "maingrad.fsdp.unit.materialize",
                "_bits",
                """b"\\xff" if tensor.is_floating_point() else b"\\xa5\"""",
                """b"\\xff\"""",
            ),
        ],
    ),
    Fault(
        "43h-an-evaluation-counts-as-the-check",
        sentence="After an evaluation, the first unit that trains checks itself alone.",
        tests=["tests/fsdp/unit/test_after_sharding.py::test_a_change_is_seen_by_the_first_unit_that_trains"],
        changes=[
            Change(
                "maingrad.fsdp.iteration.root",
                "Root._check_units",
                "self._all_checked = trains",
                "self._all_checked = True",
            ),
        ],
    ),
    Fault(
        "48d-memory-that-is-there-is-counted-again",
        sentence="Whole parameters that stay are counted once more in each step.",
        tests=["tests/fsdp/unit/test_memory.py::test_parameters_that_are_gathered_again_are_counted_once"],
        changes=[
            Change(
                "maingrad.ddp.buckets.buffer",
                "ReleasableBuffer.take",
                """
                if self.resident:
                    return
                """,
                "",
            ),
        ],
    ),
    Fault(
        "35z-a-step-under-no-sync-sends",
        sentence="Every step of a sharded stage reduces its gradients, also under no_sync.",
        tests=["tests/te_integration/pipeline/test_sharded.py::test_a_step_under_no_sync_reduces_nothing"],
        changes=[
            Change("maingrad.fsdp.iteration.parts", "RootParts.backward", "self.root.sync and final", "final"),
        ],
    ),
    Fault(
        "35za-a-step-without-weight-gradients-ends",
        sentence="A pipeline's step that leaves out its delayed weight gradients is not refused.",
        tests=[
            "tests/te_integration/pipeline/test_steps.py::test_a_runner_that_leaves_out_weight_gradients_is_refused"
        ],
        changes=[
            Change(
                "maingrad.te_integration.pipeline.stage",
                "PipelineStage.perform_reduce_grad",
                """
                self.queue.check_empty()
                """,
                "",
            ),
        ],
    ),
    Fault(
        "36i-a-compiled-transposed-layer-writes-its-gradient-untransposed",
        sentence="The weight gradient of a compiled Conv1D is that of its transpose.",
        tests=["tests/te_integration/recipes/test_compiled.py::test_a_layer_whose_weight_is_stored_transposed"],
        changes=[
            Change(
                "maingrad.te_integration.dense.compiled_wgrad",
                "WgradHandle.deliver",
                "(x, dy) if module.transposed else (dy, x)",
                "dy, x",
            ),
        ],
    ),
    Fault(
        "36l-a-graph-break-multiplies-by-the-transpose-of-a-transposed-weight",
        sentence="Behind a graph break a Conv1D of a computed weight is multiplied as a Linear: silent where it is square.",
        tests=[
            "tests/te_integration/test_convert_transformers.py"
            "::test_a_compiled_conv1d_whose_weight_is_parametrized_later"
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.linear",
                "_Plain.multiply",
                "weight.t() if self.transposed else weight",
                "weight",
            ),
        ],
    ),
    Fault(
        "48e-slices-share-memory",
        sentence="A slice of a weight that is saved or freed takes the other slices along.",
        tests=["tests/te_integration/dense/test_split_hooks.py::test_a_slice_has_memory_of_its_own"],
        changes=[
            Change("maingrad.te_integration.dense.linear", "SplitLinear.split_parameters", "part.clone()", "part"),
        ],
    ),
    Fault(
        "16zz-callables-that-are-too-many-are-dropped",
        sentence="More callables than the schedule has layers are accepted, and the last are dropped.",
        tests=["tests/te_integration/graphs/test_refused.py::test_numbers_that_do_not_fit"],
        changes=[
            Change(
                "maingrad.te_integration.graphs.chunks",
                "graphed_chunks",
                "len(callables) != sum(counts)",
                "len(callables) < sum(counts)",
            ),
        ],
    ),
    Fault(
        "09g-biases-forget-their-scale",
        sentence="Bias gradients are not scaled where the scale itself needs no gradient.",
        tests=[
            "tests/te_integration/experts/test_grouped_linear.py::"
            "test_scales_that_need_no_gradient_still_scale_the_biases"
        ],
        changes=[
            Change(
                "maingrad.te_integration.experts.fused_grouped_linear",
                "_FusedGroupedLinear.forward",
                "scale if needs_db else None",
                "scale if needs_ds else None",
            ),
        ],
    ),
    Fault(
        "41e-the-last-ranks-error-is-the-ways",
        sentence="The table of verify shows the error of the last rank that holds a gradient.",
        tests=["tests/launch/verification/test_library_faults.py::test_the_error_of_a_way_is_that_of_its_worst_rank"],
        changes=[
            Change(
                "maingrad.launch.verification.comparison",
                "Allowed.differences",
                "max(error, errors.get(start, 0.0))",
                "error",
            ),
        ],
    ),
    Fault(
        "41f-each-model-begins-where-the-first-has-ended",
        sentence="What the first model's forwards have changed is every model's first state.",
        tests=[
            "tests/launch/verification/test_verify.py::test_each_model_of_a_function_begins_with_the_first_ones_state"
        ],
        changes=[
            Change(
                "maingrad.launch.verification.program",
                "Program._build",
                "own_copy(built.state_dict())",
                "dict(built.state_dict())",
            ),
        ],
    ),
    Fault(
        "52z-a-stopped-tuning-leaves-nothing",
        sentence="Tables are written after the last shape alone: a stopped run of `maingrad tune` leaves no table.",
        tests=["tests/launch/tuning/test_command.py::test_a_run_that_is_stopped_leaves_what_it_measured"],
        changes=[
            Change(
                "maingrad.launch.tuning.tune",
                "tune",
                """
                write_tuning(timings, device, folder)
                """,
                "",
            ),
        ],
    ),
    Fault(
        "41g-an-error-of-a-callback-is-lost",
        sentence="On simulated ranks, a callback behind a collective that raises is taken for one that has succeeded.",
        tests=["tests/launch/simulation/test_simulate.py::test_an_error_of_a_callback_is_raised_by_the_wait_for_it"],
        changes=[
            Change(
                "maingrad.launch.simulation.group",
                "_SimulatedFuture.then",
                "following.set_exception(error)",
                "following.set_result(None)",
            ),
        ],
    ),
    Fault(
        "09h-outputs-of-another-dtype-are-filled",
        sentence="Memory of another dtype is taken for the outputs of experts.",
        tests=["tests/kernels/grouped/test_gemms.py::test_memory_for_the_output_that_does_not_fit_is_refused"],
        changes=[
            Change("maingrad.kernels.grouped.products", "_check_written", " or given.dtype not in dtypes or ", " or "),
        ],
    ),
]
