from fault import Change, Fault

FAULTS = [
    Fault(
        "12a-bucket-never-launches",
        sentence="A bucket that misses the gradient of an unused parameter is never launched, nor are those behind it.",
        tests=[
            "tests/ddp/buckets/test_overlap.py::test_a_bucket_that_misses_gradients_is_launched_all_the_same",
        ],
        changes=[
            Change(
                "maingrad.ddp.buckets.reducer",
                "BucketLauncher.launch_rest",
                "while self._next < len(self._buckets):",
                "while self._next < len(self._buckets) and self._buckets[self._next].phase is Phase.READY:",
            ),
            Change(
                "maingrad.ddp.buckets.reducer",
                "BucketLauncher._is_ready",
                "bucket.phase is Phase.READY or (self._all_came",
                "bucket.phase is Phase.READY or (False",
            ),
        ],
    ),
    Fault(
        "12b-bucket-launches-early",
        sentence="A bucket is launched in the first microbatch, and what later ones add to it is lost.",
        tests=[
            "tests/ddp/buckets/test_overlap.py::test_a_bucket_waits_for_the_last_microbatch",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.record",
                "GradRecord.open_for_write",
                """
                if self.closed is not None:
                    raise RuntimeError(f"parameter '{self.name}' received a gradient after {self.closed}")
                """,
                "",
            ),
            Change(
                "maingrad.ddp.buckets.reducer",
                "Readiness.on_grad",
                "if not (self.sync and self._overlap) or not self._is_last(record):",
                "if not self._overlap:",
            ),
        ],
    ),
    Fault(
        "12c-a-microbatch-that-was-kept-is-never-reduced",
        sentence="A unit that runs in an earlier microbatch alone is never reduced, or not over all ranks.",
        tests=[
            "tests/fsdp/iteration/test_contract_faults.py::test_12_a_unit_of_the_first_microbatch_alone_is_reduced[zero1]",
            "tests/fsdp/iteration/test_contract_faults.py::test_12_a_unit_of_the_first_microbatch_alone_is_reduced[hybrid]",
            "tests/fsdp/iteration/test_contract_faults.py::test_12_a_unit_of_the_first_microbatch_alone_is_reduced[hsdp]",
            "tests/fsdp/iteration/test_contract_faults.py::test_12_a_unit_of_the_first_microbatch_alone_is_reduced[hsdp_zero1]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds._end_iteration",
                "grad_round.is_left",
                "grad_round.is_left and grad_round.delays",
            ),
        ],
    ),
    Fault(
        "12d-a-graph-that-is-entered-past-the-outputs",
        sentence="Backward comes to a unit's parameters past the outputs of its forward, and nobody reduces their gradients.",
        tests=[
            "tests/fsdp/iteration/test_contract_faults.py::test_12_a_unit_is_reduced_that_backward_enters_past_its_outputs[zero1]",
            "tests/fsdp/iteration/test_contract_faults.py::test_12_a_unit_is_reduced_that_backward_enters_past_its_outputs[zero2]",
            "tests/fsdp/iteration/test_contract_faults.py::test_12_a_unit_is_reduced_that_backward_enters_past_its_outputs[hybrid]",
            "tests/fsdp/iteration/test_contract_faults.py::test_12_parameters_that_stay_until_backward_may_be_reached_past_the_outputs[zero3]",
            "tests/fsdp/iteration/test_contract_faults.py::test_12_parameters_that_stay_until_backward_may_be_reached_past_the_outputs[hsdp]",
            "tests/fsdp/iteration/test_contract_faults.py::test_12_parameters_that_stay_until_backward_may_be_reached_past_the_outputs[hsdp_zero1]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.root",
                "Root.on_grad",
                "self.enter(unit, current_backward(), trains=True, delays=False)",
                "",
            ),
        ],
    ),
    Fault(
        "12e-a-microbatch-ends-with-its-drain",
        sentence="A drain outside no_sync of what a backward inside it delayed is taken for the end of the iteration.",
        tests=[
            "tests/fsdp/iteration/test_schedule.py::test_which_microbatch_is_the_last_is_said_by_its_backward[hybrid-outside]",
            "tests/fsdp/iteration/test_schedule.py::test_which_microbatch_is_the_last_is_said_by_its_backward[hsdp-outside]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds.delayed_wgrad_done",
                """
                if self._due is not None:
                    self._send_due()
                """,
                """
                if self._due is None:
                    self._due = [grad_round for grad_round in self._all if grad_round.is_left]
                self._send_due()
                """,
            ),
        ],
    ),
    Fault(
        "12f-whole-gradients-are-let-go-between-microbatches",
        sentence="A unit that holds whole gradients lets them go with a microbatch that is not the last.",
        tests=[
            "tests/fsdp/iteration/test_reduced_once.py::test_shards_agree_to_the_bit[zero3, resharded-3-True-none-2]",
            "tests/fsdp/iteration/test_reduced_once.py::test_hybrids_agree_to_the_bit[hsdp-3-2-True-none]",
            "tests/fsdp/iteration/test_reduced_once_grads.py::test_it_is_zeros_until_the_last_microbatch[zero3, once]",
            "tests/fsdp/iteration/test_reduced_once_memory.py::test_a_unit_that_does_not_hold_leaves_with_its_microbatch",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds.leave",
                "for bucket in grad_round.buckets:",
                """
                for bucket in grad_round.buckets:
                    bucket.grad_bucket.reset()
                    bucket.whole_grads.release()
                """,
            ),
        ],
    ),
    Fault(
        "12g-a-held-unit-is-reduced-in-every-microbatch",
        sentence="A unit that is to hold its gradients is reduced in every microbatch, over all instances' microbatches in turn.",
        tests=[
            "tests/fsdp/iteration/test_reduced_once.py::test_each_unit_is_reduced_once_in_the_last_microbatch",
            "tests/fsdp/iteration/test_reduced_once.py::test_across_instances_once_as_well",
            "tests/fsdp/iteration/test_reduced_once.py::test_microbatches_are_summed_before_they_are_reduced",
            "tests/fsdp/iteration/test_reduced_once_grads.py::test_it_is_zeros_until_the_last_microbatch",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds.leave",
                "if grad_round.delays or (grad_round.buckets[0].reduces_once and not final):",
                "if grad_round.delays:",
            ),
        ],
    ),
    Fault(
        "12h-a-held-unit-is-reduced-twice",
        sentence="What the last microbatch has reduced is reduced again when the iteration ends.",
        tests=[
            "tests/fsdp/iteration/test_reduced_once.py::test_each_unit_is_reduced_once_in_the_last_microbatch",
            "tests/fsdp/iteration/test_reduced_once.py::test_across_instances_once_as_well",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "",
                "State.SENT: {State.WRITING, State.IDLE},",
                "State.SENT: {State.WRITING, State.IDLE, State.SENT},",
            ),
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds._end_iteration",
                "self._due = [grad_round for grad_round in self._all if grad_round.is_left]",
                "self._due = [grad_round for grad_round in self._all if grad_round.state is not State.IDLE]",
            ),
        ],
    ),
    Fault(
        "12i-a-frozen-forward-leaves-all-unused",
        sentence="A forward of a model that is frozen meanwhile counts as one that leaves all parameters unused: their buckets are launched, and the gradients that come later are lost.",
        tests=[
            "tests/ddp/wrapper/test_after_wrapping.py::test_a_model_that_is_frozen_meanwhile_is_gone_through",
        ],
        quick=[
            "tests/ddp/wrapper/test_after_wrapping.py::test_a_model_that_is_frozen_meanwhile_is_gone_through[before-options1]",
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.data_parallel",
                "DistributedDataParallel._forward",
                """
                if not torch.is_grad_enabled() or is_frozen(self.bucket_params):
                    return self._replicas.run(self.module, args, kwargs)
                self._begin_forward()
                """,
                """
                if not torch.is_grad_enabled():
                    return self._replicas.run(self.module, args, kwargs)
                if not is_frozen(self.bucket_params):
                    self._begin_forward()
                """,
            ),
        ],
    ),
    Fault(
        "12j-a-frozen-backward-ends-the-iteration",
        sentence="A backward that only goes through a frozen model counts as the iteration's last: what earlier microbatches have brought is reduced, and .grad of the frozen is zeros.",
        tests=[
            "tests/fsdp/iteration/test_frozen_meanwhile.py::test_nothing_is_reduced",
            "tests/fsdp/iteration/test_frozen_meanwhile.py::test_the_models_own_iteration_goes_on[before-zero1]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.root",
                "Root.pre_backward",
                "trains = forward.trains and (delivers",
                "trains = (delivers",
            ),
        ],
    ),
    Fault(
        "12k-a-no-sync-inside-ends-the-one-around-it",
        sentence="A no_sync() inside another one ends both: the next microbatch is taken for the last, and launched early.",
        tests=[
            "tests/fsdp/iteration/test_unusual_iterations.py::test_no_sync_inside_no_sync",
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.iteration",
                "BucketIteration.no_sync",
                "self.readiness.sync = before",
                "self.readiness.sync = True",
            ),
        ],
    ),
    Fault(
        "12l-a-gradient-that-is-asked-for-ends-the-iteration",
        sentence="torch.autograd.grad in an iteration counts as its last backward: units are reduced, and hooks called, before theirs.",
        tests=[
            "tests/fsdp/iteration/test_autograd_grad.py::test_a_program_that_only_asks_reduces_nothing_and_leaves_no_parameter_whole",
            "tests/fsdp/iteration/test_autograd_grad.py::test_what_asks_for_gradients_in_an_iteration_is_no_part_of_it[1--zero3-penalised]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.hooks",
                "BackwardHooks._on_output",
                "plain = delivers_to_all()",
                "plain = delivers_to_all() or True",
            ),
        ],
    ),
    Fault(
        "12m-an-output-that-is-asked-for-ends-the-iteration",
        sentence="torch.autograd.grad for a model's own outputs counts as a backward through the model.",
        tests=[
            "tests/fsdp/iteration/test_autograd_grad.py::test_what_asks_for_gradients_in_an_iteration_is_no_part_of_it[1--zero3-of_the_scores]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.hooks",
                "BackwardHooks._on_output",
                """
                if plain and behind is not None and not will_execute(behind):
                    return  # autograd.grad was asked for the output itself, and goes no further
                """,
                "",
            ),
        ],
    ),
    Fault(
        "12y-a-second-backward-forgets-what-was-reduced",
        sentence="A second backward outside no_sync opens buckets again, and the sums of before are gone.",
        tests=[
            "tests/ddp/contract/test_backward_variants.py::test_backwards_outside_no_sync_add_up",
            "tests/ddp/contract/test_add_grad.py::test_it_adds_to_what_backwards_bring",
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.iteration",
                "BucketIteration._reopen",
                "bucket.carried = reduced",
                "pass",
            ),
        ],
    ),
    Fault(
        "12z-a-second-backward-reduces-the-first-again",
        sentence="What a first backward has reduced stays in the buckets, and is averaged with the second one's, and added.",
        tests=[
            "tests/ddp/contract/test_backward_variants.py::test_backwards_outside_no_sync_add_up",
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.iteration",
                "BucketIteration._reopen",
                "self._empty_buckets()",
                "for bucket in self.buckets:\n    bucket.reset()\n    for record in bucket.records:\n        record.written = True\nself._launcher.reset()",
            ),
        ],
    ),
]
