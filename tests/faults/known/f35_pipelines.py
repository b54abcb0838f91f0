from fault import Change, Fault

FAULTS = [
    Fault(
        "35a-another-schedules-microbatches-count",
        sentence="Schedules take turns on the same stages, and gradients are scaled by the other's number of microbatches.",
        tests=[
            "tests/te_integration/pipeline/test_steps.py::test_schedules_in_turn_have_each_its_own_mean",
        ],
        changes=[
            Change(
                "maingrad.te_integration.pipeline.stage",
                "PipelineStage.clear_runtime_states",
                "self.chunks = step.num_microbatches",
                "self.chunks = self.chunks or step.num_microbatches",
            ),
        ],
    ),
    Fault(
        "35b-a-step-of-fewer-backwards",
        sentence="A step has fewer backwards than microbatches, and what is no mean is reduced.",
        tests=[
            "tests/te_integration/pipeline/test_steps.py::test_a_runner_that_stops_before_the_last_microbatch_is_refused",
        ],
        changes=[
            Change(
                "maingrad.te_integration.pipeline.stage",
                "PipelineStage.perform_reduce_grad",
                "if self._num_backwards != self.chunks:",
                "if self._num_backwards > (self.chunks or 0):",
            ),
        ],
    ),
    Fault(
        "35c-an-evaluation-launches-the-buckets",
        sentence="schedule.eval() launches the buckets, and the next training step is refused.",
        tests=[
            "tests/te_integration/pipeline/test_steps.py::test_an_evaluation_leaves_gradients_and_reductions_alone[False-ZeroBubble-2-False]",
        ],
        changes=[
            Change(
                "maingrad.te_integration.pipeline.stage",
                "PipelineStage.perform_reduce_grad",
                "if not self.has_backward:",
                "if self.chunks is None:",
            ),
        ],
    ),
    Fault(
        "35d-the-gradients-of-a-step-that-failed-are-added",
        sentence="A step fails after some backwards, and the next one adds to what they have written.",
        tests=[
            "tests/te_integration/pipeline/test_failures.py::test_the_step_after_one_that_failed_is_refused_until_gradients_are_cleared",
        ],
        changes=[
            Change(
                "maingrad.te_integration.pipeline.stage",
                "PipelineStage._has_leavings",
                "if self._begun_in is None:",
                "if not self._num_backwards < 0:",
            ),
        ],
    ),
    Fault(
        "35e-backwards-from-the-losses-of-a-step-that-failed",
        sentence="The losses of a step that failed are taken for those of the next one.",
        tests=[
            "tests/te_integration/pipeline/test_failures.py::test_losses_of_a_step_that_failed_are_forgotten",
        ],
        changes=[
            Change(
                "maingrad.te_integration.pipeline.stage",
                "PipelineStage.clear_runtime_states",
                "step.losses.clear()  # torch would run backward from losses of a failed step",
                "",
            ),
        ],
    ),
    Fault(
        "35f-a-replica-abandons-what-another-has-launched",
        sentence="A replica abandons a step without the reductions that another has launched, and ranks reduce different buckets together.",
        tests=[
            "tests/te_integration/pipeline/test_failures.py::test_replicas_abandon_a_step_that_failed_on_one_of_them",
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.iteration",
                "BucketIteration._reduce_given_up",
                """
                if self.ddp_config.overlap_grad_reduce:
                    self._launcher.launch_rest()
                    self.steps.start()
                """,
                "",
            ),
        ],
    ),
    Fault(
        "35g-a-tied-weight-is-complete-with-any-of-its-stages",
        sentence="A tied weight of two stages in one wrapper is reduced with the first of them that ends.",
        tests=[
            "tests/te_integration/pipeline/test_shared.py::test_a_tied_embedding_has_the_gradient_of_both_ends",
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.parts",
                "BucketParts._completed_by",
                "others = {key for other in self._open if other is not part for key in self._of[other]}",
                "others: set[int] = set()",
            ),
        ],
    ),
    Fault(
        "35h-no-dgrad-is-the-last",
        sentence="A schedule does not tell wrappers which dgrad is the last, and all reductions come after it.",
        tests=[
            "tests/te_integration/pipeline/test_overlap.py::test_a_chunk_launches_when_it_is_complete",
        ],
        changes=[
            Change(
                "maingrad.te_integration.pipeline.executor",
                "_Run._run_dgrad",
                "final = self._launches_early and entry is self._last_dgrads[entry.chunk]",
                "final = False",
            ),
        ],
    ),
    Fault(
        "35i-sharded-chunks-are-sent-at-the-very-end",
        sentence="A sharded chunk or stage that has ended sends nothing before finish_grad_sync().",
        tests=[
            "tests/te_integration/pipeline/test_overlap.py::test_a_chunk_launches_when_it_is_complete",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.parts",
                "RootParts.end",
                "self.root.grads.finish_grad_sync(wait=False)",
                "pass",
            ),
        ],
    ),
    Fault(
        "35j-an-inner-microbatch-ends-the-one-around-it",
        sentence="A block that names a microbatch inside another one leaves no name behind.",
        tests=[
            "tests/te_integration/delayed/test_queue_edges.py::test_a_microbatch_inside_another_ends_with_its_block",
        ],
        changes=[
            Change(
                "maingrad.te_integration.wgrad_queue",
                "WgradQueue.microbatch",
                "self._named_microbatch = before",
                "self._named_microbatch = None",
            ),
        ],
    ),
    Fault(
        "35k-a-step-over-what-is-pending",
        sentence="An optimizer steps while a delayed weight gradient waits in a queue, and gets it in the next iteration.",
        tests=[
            "tests/te_integration/delayed/test_queue_edges.py::test_a_step_over_what_is_pending_is_refused",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.delayed",
                "DelayedWgrad.__init__",
                "_waiting.add(self)",
                "",
            ),
        ],
    ),
    Fault(
        "35l-a-queue-takes-what-is-pending-along",
        sentence="A queue that is let go takes pending weight gradients along without a word.",
        tests=[
            "tests/te_integration/delayed/test_queue_edges.py::test_a_queue_that_nobody_keeps_is_gone_and_what_it_lacked_is_said",
            "tests/te_integration/delayed/test_queue_edges.py::test_a_wrapper_names_a_queue_that_was_let_go_and_the_iteration_can_be_given_up",
        ],
        changes=[
            Change(
                "maingrad.te_integration.wgrad_queue",
                "WgradQueue.__del__",
                "entry.lose()",
                "pass",
            ),
        ],
    ),
    Fault(
        "35m-modules-keep-a-queue-that-was-dropped",
        sentence="Modules keep a queue alive that nobody will drain.",
        tests=[
            "tests/te_integration/delayed/test_queue_edges.py::test_a_queue_that_nobody_keeps_is_gone_and_what_it_lacked_is_said",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.delayed",
                "DelayedTarget.__init__",
                "weakref.ref(queue)",
                "lambda: queue",
            ),
        ],
    ),
    Fault(
        "35n-torchs-trial-of-a-stage-launches",
        sentence="torch's trial of a stage's module counts as the last backward of an iteration.",
        tests=[
            "tests/te_integration/pipeline/test_steps.py::test_torchs_trial_of_a_module_reduces_nothing",
        ],
        changes=[
            Change(
                "maingrad.te_integration.pipeline.stage",
                "PipelineStage._prepare_forward_infra",
                "with self._no_sync():  # torch runs the module once to learn shapes",
                "with ExitStack():  # torch runs the module once to learn shapes",
            ),
        ],
    ),
    Fault(
        "35o-each-rank-clips-by-its-own-stages",
        sentence="The norm to clip by leaves the stages of other ranks out.",
        tests=[
            "tests/te_integration/pipeline/test_sharded.py::test_clipping_goes_by_the_norm_of_all_stages",
        ],
        quick=[
            "tests/te_integration/pipeline/test_sharded.py::test_clipping_goes_by_the_norm_of_all_stages[ZBV-all-reduce]",
        ],
        changes=[
            Change(
                "maingrad.ddp.optimizer.grad_norm",
                "clip_grad_norm",
                "if pipeline_group is not None and pipeline_group.size() > 1:",
                "if False:",
            ),
        ],
    ),
    Fault(
        "35p-one-stage-abandons-what-another-has-pending",
        sentence="The first of a wrapper's stages that abandons a step throws the iteration away while others have gradients pending.",
        tests=[
            "tests/te_integration/pipeline/test_shared.py::test_stages_of_one_wrapper_abandon_a_step_together",
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.parts",
                "Parts.abandon",
                """
                if not self._begun:
                    self._open.clear()
                    self._abandon()
                """,
                """
                self._open.clear()
                self._abandon()
                """,
            ),
        ],
    ),
]
