"""Faults of ``maingrad.graphed``: steps that are captured although a replay is wrong, or not captured as they should."""

from fault import Change, Fault

TESTS = "tests/ddp/graphs/test_graphed.py"
EAGER = f"{TESTS}::test_stays_eager_and_says_why_once"
CHANGED = f"{TESTS}::test_a_change_between_two_calls_is_seen"
READS = "tests/ddp/graphs/test_graphed_reads.py::test_a_number_that_changes_is_seen_wherever_it_is"
MODELS = "tests/ddp/graphs/test_graphed_models.py"
STEP, STATE = "maingrad.ddp.graphs.auto_step", "maingrad.ddp.graphs.host.host_state"
GRAPHS, PLACES = "maingrad.ddp.graphs.step_graphs", "maingrad.ddp.graphs.host.host_places"

FAULTS = [
    Fault(
        "68a-a-change-in-a-call-is-not-seen",
        sentence="A step that counts on the host is captured.",
        tests=[f"{EAGER}[counter_in_the_module]", f"{EAGER}[counter_in_the_closure]"],
        changes=[
            Change(
                STEP, "AutoStep._change_in_call", "state.change()) is not None", "state.change()) is not None and False"
            )
        ],
    ),
    Fault(
        "68b-draws-of-the-host-are-not-seen",
        sentence="A step that draws random numbers on the host is captured.",
        tests=[f"{EAGER}[python_draws]", f"{EAGER}[own_generator_draws]"],
        changes=[Change(STEP, "AutoStep._change_in_call", "(drawn := state.draws()) is not None", "False")],
    ),
    Fault(
        "68c-a-change-between-calls-is-not-seen",
        sentence="A replay runs although Python would read another number.",
        tests=[f"{CHANGED}[attribute]", f"{CHANGED}[global]"],
        changes=[Change(GRAPHS, "StepGraphs.state", "(change := state.change()) is None", "True")],
    ),
    Fault(
        "68d-attributes-of-classes-are-not-compared",
        sentence="A step that counts in a class is captured.",
        tests=[f"{EAGER}[counter_of_the_class]"],
        changes=[
            Change(
                STATE,
                "HostState._visit_class",
                "vars(kind).get(name, ABSENT) for name in names",
                "ABSENT for name in ()",
            )
        ],
    ),
    Fault(
        "68e-ranks-decide-alone",
        sentence="One rank runs eagerly while the other replays.",
        tests=[f"{TESTS}::test_one_rank_that_must_stay_eager_stops_all"],
        changes=[Change(STEP, "AutoStep._tell", "if not self._groups:", "if True:")],
    ),
    Fault(
        "68f-arguments-that-are-taken-apart",
        sentence="A step that takes items out of its arguments is captured.",
        tests=[f"{EAGER}[takes_its_arguments_apart]"],
        changes=[Change(STEP, "AutoStep._change_in_call", "_shape_of(call) != given", "False")],
    ),
    Fault(
        "68g-results-of-eager-calls-keep-their-graph",
        sentence="Results that a program keeps hold the activations of the eager calls.",
        tests=[f"{TESTS}::test_a_kept_result_keeps_no_graph"],
        changes=[
            Change(STEP, "AutoStep._run_eagerly", "tree_map_only(Tensor, Tensor.detach, result)", "result"),
        ],
    ),
    Fault(
        "68h-a-failed-capture-has-run",
        sentence="The eager call behind a capture that failed is the second one of its step.",
        tests=[f"{EAGER}[reads_a_value_after_the_step]"],
        changes=[Change("maingrad.ddp.graphs.recorded", "RecordedGraph.undo", "written.restore()", "pass")],
    ),
    Fault(
        "68i-a-capture-asks-on-the-host",
        sentence="A capture asks as an eager call whether sequences are packed.",
        tests=[f"{MODELS}::test_is_captured[Llama]"],
        changes=[
            Change(
                "maingrad.ddp.graphs.model_masks",
                "ModelMasks.ask",
                "is_capturing() and len(answers) == 1 and (known := next(iter(answers))) is not _PACKED",
                "False",
            ),
        ],
    ),
    Fault(
        "68j-the-loop-steps-again",
        sentence="transformers' loop steps behind a step that has run as a graph.",
        tests=["tests/launch/training/hugging_face/test_graphed_trainer.py::test_a_graph_logs_what_eager_steps_log"],
        changes=[
            Change(
                "maingrad.launch.training.hugging_face.step_graph",
                "StepGraph.microbatch",
                "trainer.accelerator.gradient_state._set_sync_gradients(False)",
                "pass",
            ),
        ],
    ),
    Fault(
        "68k-iterators-are-not-seen",
        sentence="A step that takes its batch from an iterator is captured, and sees one batch for ever.",
        tests=[f"{EAGER}[reads_an_iterator]"],
        changes=[Change(STEP, "AutoStep._kind_of", "state.lost is not None", "False")],
    ),
    Fault(
        "68l-functions-behind-decorators-are-not-seen",
        sentence="A replay runs although a function behind a library's decorator would read another number.",
        tests=[f"{READS}[decorated_function]", f"{READS}[context_manager]"],
        changes=[Change(STATE, "HostState._visit_function", 'self._reach(own.get("__wrapped__"), path, True)', "pass")],
    ),
    Fault(
        "68m-what-hooks-read-is-not-seen",
        sentence="A replay runs although a hook of the model would read another number.",
        tests=[f"{READS}[hook_of_a_module]", f"{READS}[hook_of_a_gradient]"],
        changes=[Change(STATE, "HostState._walk", "in self.hooks()", "in ()")],
    ),
    Fault(
        "68n-keys-are-not-compared",
        sentence="A replay runs although a dict has another key.",
        tests=[f"{READS}[keys_of_a_dict]"],
        changes=[Change(PLACES, "Place.change", "not all(map(operator.is_, now, names))", "False")],
    ),
]
