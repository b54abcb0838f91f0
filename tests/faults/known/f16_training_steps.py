from fault import Change, Fault

FAULTS = [
    Fault(
        "16j-replayed-shards-are-not-gathered-anew",
        sentence="Eager code between replays of a sharded model computes with whole parameters of before.",
        tests=[
            "tests/fsdp/test_training_step.py::test_evaluation_of_whole_parameters",
        ],
        changes=[
            Change(
                "maingrad.fsdp.training_step",
                "GraphedTrainingStep._after_replay",
                "self._root.gathers.record_replay()",
                "pass",
            ),
        ],
    ),
    Fault(
        "16k-a-capture-trusts-what-is-gathered",
        sentence="A captured step of a sharded model has no gather for units that were whole already, and replays compute with old weights.",
        tests=[
            "tests/fsdp/test_training_step.py::test_evaluation_of_whole_parameters",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.root",
                "UnitGathers.begin_capture",
                """
                self.release_all()
                self.record_replay()
                """,
                "",
            ),
        ],
    ),
    Fault(
        "16l-a-replay-leaves-the-model-in-evaluation",
        sentence="A step that switches to training leaves the model in evaluation when it is replayed.",
        tests=[
            "tests/fsdp/test_training_step_programs.py::test_a_step_that_switches_to_training",
            "tests/ddp/graphs/test_host_effects.py::test_the_mode_that_the_step_leaves",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.step_graphs",
                "StepGraphs._finish",
                """
                for module, mode in variant.modes:
                    module.training = mode
                """,
                "",
            ),
        ],
    ),
    Fault(
        "16l-another-model-that-a-replay-writes-is-not-gathered-anew",
        sentence="A replay writes a second sharded model, and eager code computes with its whole parameters of before.",
        tests=[
            "tests/fsdp/test_training_step_programs.py::test_an_average_in_the_step",
            "tests/ddp/graphs/test_host_effects.py::test_a_sharded_average_of_the_weights",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.step_graphs",
                "StepGraphs._finish",
                "model.record_replay()",
                "pass",
            ),
        ],
    ),
    Fault(
        "16m-a-replay-reads-a-model-that-is-being-gathered",
        sentence="A replay reads the parameters of another model while they are being gathered.",
        tests=[
            "tests/ddp/graphs/test_host_effects.py::test_a_model_that_another_step_trains",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.step_graphs",
                "StepGraphs._ready",
                """
                if model is not self._gathers:
                    model.finish()
                """,
                "assert model",
            ),
        ],
    ),
    Fault(
        "16n-arguments-keep-nothing-of-a-step",
        sentence="What a step adds to a tensor among its arguments, or leaves in its .grad, is lost in a copy, and nobody says so.",
        tests=[
            "tests/ddp/graphs/test_host_effects.py::test_what_the_step_leaves_in_its_arguments",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.step_graphs",
                "StepGraphs._run",
                "inputs.check_unchanged(self._name)",
                "",
            ),
        ],
    ),
    Fault(
        "16n-one-argument-becomes-two",
        sentence="A tensor that is given twice becomes two, and the step takes them for two.",
        tests=[
            "tests/fsdp/test_training_step_programs.py::test_one_tensor_given_twice",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.inputs",
                "_first_places",
                "first.setdefault(id(leaf), place) if isinstance(leaf, Tensor) else place",
                "place",
            ),
        ],
    ),
    Fault(
        "16o-an-optimizer-of-other-parameters-steps-unseen",
        sentence="A captured step holds an optimizer of other parameters, whose learning rates are those of the capture.",
        tests=[
            "tests/fsdp/test_training_step_programs.py::test_another_optimizer_in_the_step",
            "tests/ddp/graphs/test_refused.py::test_another_optimizer_in_the_step",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.step_graphs",
                "counted_steps.note",
                "if threading.get_ident() == thread or any(id(param) in trained for param in params):",
                "if any(id(param) in trained for param in params):",
            ),
        ],
    ),
    Fault(
        "16o-another-optimizer-steps-unseen",
        sentence="A captured step holds a second optimizer, whose learning rates are those of the capture.",
        tests=[
            "tests/fsdp/test_training_step_refused.py::test_a_step_is_one_iteration",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.step_graphs",
                "counted_steps",
                "if others:",
                "if others and len(mine) != 1:",
            ),
        ],
    ),
    Fault(
        "16p-a-replay-is-no-iteration",
        sentence="A replay leaves the number of iterations as it was, where an eager step counts.",
        tests=[
            "tests/ddp/graphs/test_training_step.py::test_ranks",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.training_step",
                "GraphedTrainingStep._launch",
                "self._model.record_replay()",
                "pass",
            ),
        ],
    ),
    Fault(
        "16q-a-replay-uses-the-rate-of-its-capture",
        sentence="Learning rates of the capture are those of all replays: schedulers do nothing.",
        tests=[
            "tests/ddp/graphs/test_training_step.py::test_ranks",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.step_graphs",
                "StepGraphs._ready",
                "self._options.load()",
                "",
            ),
        ],
    ),
    Fault(
        "16r-weights-loaded-between-replays-are-lost",
        sentence="A replay updates masters that do not know of weights which were loaded since.",
        tests=[
            "tests/ddp/graphs/test_training_step.py::test_weights_that_are_loaded",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.training_step",
                "GraphedTrainingStep._check_startable",
                "optimizer.prepare_replay()",
                "optimizer.prepare_replay() if not self.num_graphs else None",
            ),
        ],
    ),
    Fault(
        "16s-nobody-gathers-after-a-replay",
        sentence="After a replay parameters of other ranks stay those of the step before.",
        tests=[
            "tests/ddp/graphs/test_training_step.py::test_ranks",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.training_step",
                "GraphedTrainingStep._after_replay",
                """
                sync.start_replayed(variant.updates)
                sync.publish_replayed(None)
                """,
                "return",
            ),
        ],
    ),
    Fault(
        "16t-every-loss-is-the-last-one",
        sentence="What a replay returns is the memory that the next replay overwrites.",
        tests=[
            "tests/ddp/graphs/test_training_step.py::test_ranks",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.inputs",
                "detached_copies",
                "return tree_unflatten([None if leaf is None else leaf.detach().clone() for leaf in leaves], spec)",
                "return tree_unflatten([None if leaf is None else leaf.detach() for leaf in leaves], spec)",
            ),
        ],
    ),
    Fault(
        "16u-every-norm-is-the-last-one",
        sentence="The norm that the optimizer shows after a replay is the memory that the next replay overwrites.",
        tests=[
            "tests/ddp/graphs/test_training_step.py::test_ranks",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.training_step",
                "GraphedTrainingStep._after_replay",
                "self._optimizer.grad_norm = variant.grad_norm.clone()",
                "self._optimizer.grad_norm = variant.grad_norm",
            ),
        ],
    ),
    Fault(
        "16v-loaded-moments-are-lost",
        sentence="Captured kernels go on with the moments of the capture after load_state_dict.",
        tests=[
            "tests/ddp/graphs/test_training_step.py::test_everything_between_steps",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.step_options",
                "StepOptions.load",
                "tensor.copy_(now)",
                "",
            ),
        ],
    ),
    Fault(
        "16w-a-graph-serves-another-decay",
        sentence="A replay serves a call with another weight decay than that of its capture.",
        tests=[
            "tests/ddp/graphs/test_training_step.py::test_everything_between_steps",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.step_graphs",
                "StepGraphs.kind_of",
                "self._options.key()",
                "()",
            ),
        ],
    ),
    Fault(
        "16w-a-graph-serves-other-groups",
        sentence="A replay updates parameters with the options of the group in which they were when it was captured.",
        tests=[
            "tests/fsdp/test_training_step_programs.py::test_groups_that_change",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.step_options",
                "StepOptions.key",
                'initial_lr", "lr',
                'params", "initial_lr", "lr',
            ),
        ],
    ),
    Fault(
        "16x-a-buffer-is-replaced-in-the-capture",
        sentence="A captured step replaces a buffer, and replays write where nobody looks.",
        tests=[
            "tests/fsdp/test_training_step_programs.py::test_a_buffer_that_is_replaced_in_the_step",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.step_graphs",
                "StepGraphs._check_unchanged",
                "if change is not None:",
                "if False:",
            ),
        ],
    ),
    Fault(
        "16x-a-graph-of-training-serves-evaluation",
        sentence="A replay runs a module as in training that was switched to evaluation since.",
        tests=[
            "tests/ddp/graphs/test_training_step.py::test_a_module_that_is_switched_to_evaluation",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.step_graphs",
                "StepGraphs.kind_of",
                "state.training()",
                "()",
            ),
        ],
    ),
    Fault(
        "16x-a-parameter-beside-the-model-is-not-looked-at",
        sentence="A parameter of the optimizer beside the model is hooked or frozen, and replays know nothing of it.",
        tests=[
            "tests/fsdp/test_training_step_programs.py::test_parameters_beside_the_model",
        ],
        changes=[
            Change(
                "maingrad.fsdp.training_step",
                "GraphedTrainingStep._beside",
                "return [*grad_hook_keys(self._shards), *hook_keys(plain), *seen]",
                "return [*grad_hook_keys(self._shards)]",
            ),
        ],
    ),
    Fault(
        "16z-masters-do-not-follow-what-a-replay-writes",
        sentence="A replay writes parameters after the update, and the next update starts from masters that did not follow.",
        tests=[
            "tests/ddp/graphs/test_host_effects.py::test_parameters_that_the_step_writes_after_the_update",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.training_step",
                "GraphedTrainingStep._after_replay",
                "self._optimizer.record_written(variant.written)",
                "",
            ),
        ],
    ),
    Fault(
        "16z-no-way-back-to-the-first-step",
        sentence="An optimizer that goes back to before its first step is refused, and ranks without a shard hang.",
        tests=[
            "tests/ddp/graphs/test_training_step.py::test_an_optimizer_that_goes_back_to_before_its_first_step",
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.step_options",
                "StepOptions.load",
                "if now is None:",
                "if now is None and not self._state:",
            ),
        ],
    ),
]
