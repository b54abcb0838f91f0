from fault import Change, Fault

FAULTS = [
    Fault(
        "23-a-step-is-not-seen",
        sentence="Whole parameters that stay in memory are not gathered again after a step.",
        tests=[
            "tests/fsdp/iteration/test_contract_faults.py::test_23_a_step_is_seen_by_the_next_forward[sgd-zero1]",
            "tests/fsdp/iteration/test_contract_faults.py::test_23_a_step_is_seen_by_the_next_forward[sgd-zero2]",
            "tests/fsdp/iteration/test_contract_faults.py::test_23_a_step_is_seen_by_the_next_forward[sgd-hybrid]",
            "tests/fsdp/iteration/test_contract_faults.py::test_23_a_step_is_seen_by_the_next_forward[fused adamw-zero1]",
            "tests/fsdp/iteration/test_contract_faults.py::test_23_a_step_is_seen_by_the_next_forward[fused adamw-zero2]",
            "tests/fsdp/iteration/test_contract_faults.py::test_23_a_step_is_seen_by_the_next_forward[fused adamw-hybrid]",
            "tests/fsdp/iteration/test_contract_faults.py::test_23_a_step_is_seen_by_the_next_forward[by hand-zero1]",
            "tests/fsdp/iteration/test_contract_faults.py::test_23_a_step_is_seen_by_the_next_forward[by hand-zero2]",
            "tests/fsdp/iteration/test_contract_faults.py::test_23_a_step_is_seen_by_the_next_forward[by hand-hybrid]",
        ],
        quick=[
            "tests/fsdp/iteration/test_contract_faults.py::test_23_a_step_is_seen_by_the_next_forward[sgd-zero1]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.root",
                "UnitGathers.notice_changes",
                "if unit.gathered and any(bucket.changed for bucket in unit.buckets):",
                "if unit.gathered and unit.releasable and any(bucket.changed for bucket in unit.buckets):",
            ),
        ],
    ),
    Fault(
        "23b-a-fused-step-is-not-seen",
        sentence="A fused optimizer raises no version, and nobody tells the units that it stepped.",
        tests=[
            "tests/fsdp/iteration/test_contract_faults.py::test_23_a_step_is_seen_by_the_next_forward[fused adamw-zero1]",
            "tests/fsdp/iteration/test_contract_faults.py::test_23_a_step_is_seen_by_the_next_forward[fused adamw-zero2]",
            "tests/fsdp/iteration/test_contract_faults.py::test_23_a_step_is_seen_by_the_next_forward[fused adamw-hybrid]",
            "tests/fsdp/iteration/test_contract_faults.py::test_23_a_step_is_seen_by_the_next_forward[fused adamw-hsdp_zero1]",
        ],
        quick=[
            "tests/fsdp/iteration/test_contract_faults.py::test_23_a_step_is_seen_by_the_next_forward[fused adamw-zero1]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.state.optimizer_watch",
                "_after_step",
                "bucket.record_change()",
                "del bucket",
            ),
        ],
    ),
    Fault(
        "23c-forward-does-not-wait-for-the-gather",
        sentence="A unit's forward starts before its gather has arrived.",
        tests=[
            "tests/fsdp/iteration/test_delays.py::test_no_order_of_ranks_changes_a_bit[zero3-1-none]",
            "tests/fsdp/iteration/test_delays.py::test_no_order_of_ranks_changes_a_bit[hsdp-2-none]",
            "tests/fsdp/iteration/test_delays.py::test_no_order_of_ranks_changes_a_bit[zero1-1-none]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.root",
                "Root.pre_forward",
                "self.gathers.wait(unit)",
                "",
            ),
        ],
    ),
    Fault(
        "23d-backward-does-not-wait-for-the-gather",
        sentence="A unit's backward starts before its gather has arrived.",
        tests=[
            "tests/fsdp/iteration/test_delays.py::test_no_order_of_ranks_changes_a_bit[zero3-1-none]",
            "tests/fsdp/iteration/test_delays.py::test_no_order_of_ranks_changes_a_bit[hsdp-2-none]",
            "tests/fsdp/iteration/test_delays.py::test_no_order_of_ranks_changes_a_bit[hsdp_zero1-2-none]",
        ],
        quick=[
            "tests/fsdp/iteration/test_delays.py::test_no_order_of_ranks_changes_a_bit[zero3-1-none]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.root",
                "Root.pre_backward",
                "self.gathers.wait(unit)",
                "",
            ),
        ],
    ),
    Fault(
        "23g-an-extension-reads-in-a-forward-too-early",
        sentence="A module's forward hands its parameters to C++, which asks nobody, before they have arrived.",
        tests=[
            "tests/ddp/gathers/test_gather_extensions.py::test_new_weights_are_read_in_c[a list that the module keeps]",
            "tests/ddp/gathers/test_gather_extensions.py::test_new_weights_are_read_in_c[a list that the module makes later]",
            "tests/ddp/gathers/test_gather_extensions.py::test_new_weights_are_read_in_c[a hook]",
            "tests/ddp/gathers/test_gather_extensions.py::test_new_weights_are_read_in_c[a list and a dict of parameters]",
            "tests/ddp/gathers/test_param_gather.py::test_every_way_to_read_a_parameter_sees_the_new_weights[torch.func.grad of a forward]",
        ],
        quick=[
            "tests/ddp/gathers/test_gather_extensions.py::test_new_weights_are_read_in_c[a list that the module keeps]",
        ],
        changes=[
            Change(
                "maingrad.ddp.gathers.param_gather",
                "guard_reads",
                "elif gather.guards:",
                "elif False:",
            ),
        ],
    ),
    Fault(
        "23i-torchscript-reads-too-early",
        sentence="TorchScript reads parameters in C++ before they have arrived.",
        tests=[
            "tests/ddp/gathers/test_gather_extensions.py::test_new_weights_are_read_in_c[a scripted module and its second method]",
            "tests/ddp/gathers/test_gather_extensions.py::test_new_weights_are_read_in_c[a traced module]",
            "tests/ddp/gathers/test_gather_extensions.py::test_new_weights_are_read_in_c[a scripted module's forward]",
            "tests/ddp/gathers/test_gather_extensions.py::test_new_weights_are_read_in_c[a copy of a scripted module]",
        ],
        quick=[
            "tests/ddp/gathers/test_gather_extensions.py::test_new_weights_are_read_in_c[a scripted module and its second method]",
        ],
        changes=[
            Change(
                "maingrad.ddp.gathers.param_gather",
                "guard_reads",
                "if isinstance(module, torch.jit.ScriptModule):",
                "if False:",
            ),
        ],
    ),
    Fault(
        "23j-a-bucket-is-gathered-before-it-is-updated",
        sentence="The first gather is issued when the last bucket is updated, which need not be its own.",
        tests=[
            "tests/ddp/gathers/test_param_gather.py::test_23_no_bucket_is_gathered_before_it_is_updated",
        ],
        changes=[
            Change(
                "maingrad.ddp.optimizer.distributed_optimizer",
                "DistributedOptimizer.step",
                "self.param_sync.record_updated(flats)",
                """
                if flats[-1] is self._flats[-1]:
                    self.param_sync.record_updated(self._flats)
                """,
            ),
        ],
    ),
    Fault(
        "23k-a-thread-goes-on-while-another-waits",
        sentence="A thread that finds another one waiting for a gather reads at once.",
        tests=[
            "tests/ddp/gathers/test_gather_threads.py::test_a_thread_reads_what_has_arrived",
        ],
        changes=[
            Change(
                "maingrad.ddp.gathers.param_gather",
                "ParamGather.wait",
                """
                self._wait_for(flight)
                if self._flight is flight:  # another thread may have issued the next gather meanwhile
                    self._flight = None
                """,
                """
                self._flight = None
                self._wait_for(flight)
                """,
            ),
        ],
    ),
    Fault(
        "23o-a-parameter-by-keyword-does-not-wait",
        sentence="A parameter that a torch function is given by keyword is read before its gather has arrived.",
        tests=[
            "tests/ddp/gathers/test_param_gather.py::test_every_way_to_read_a_parameter_sees_the_new_weights",
        ],
        quick=[
            "tests/ddp/gathers/test_param_gather.py::test_every_way_to_read_a_parameter_sees_the_new_weights[by keyword]",
        ],
        changes=[
            Change(
                "maingrad.ddp.gathers.waiting_params",
                "_WaitsForGather.__torch_function__",
                """
                for value in tree_leaves((args, kwargs)):
                    _after_gather(value)
                return func(*args, **kwargs)
                """,
                """
                for value in tree_leaves(args):
                    _after_gather(value)
                with DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
                """,
            ),
        ],
    ),
    Fault(
        "23p-a-class-of-fixed-shape-is-not-waited-for",
        sentence="A parameter whose class cannot change is given away before its gather has arrived.",
        tests=[
            "tests/ddp/gathers/test_param_gather.py::test_a_parameter_of_a_class_of_fixed_shape_has_arrived",
        ],
        changes=[
            Change(
                "maingrad.ddp.gathers.param_gather",
                "ParamGather.guard",
                """
                elif self.refusal is None:
                    self.wait()
                """,
                "",
            ),
        ],
    ),
    Fault(
        "23q-a-step-overtakes-the-last-ones-gathers",
        sentence="A step writes to parameters whose gather of the last step is still under way.",
        tests=[
            "tests/ddp/gathers/test_gathers_under_way.py::test_what_comes_after_a_step_waits_for_its_gathers[step_again-torch.float32]",
            "tests/ddp/gathers/test_gathers_under_way.py::test_what_comes_after_a_step_waits_for_its_gathers[step_without_forward-torch.bfloat16]",
        ],
        changes=[
            Change(
                "maingrad.ddp.optimizer.distributed_optimizer",
                "DistributedOptimizer.step",
                "self.finish_param_sync()",
                "",
            ),
        ],
    ),
    Fault(
        "23r-a-state-is-loaded-under-a-gather",
        sentence="Masters are loaded while the parameters that they are, are being gathered.",
        tests=[
            "tests/ddp/gathers/test_gathers_under_way.py::test_what_comes_after_a_step_waits_for_its_gathers[load_its_state-torch.float32]",
        ],
        quick=[
            "tests/ddp/gathers/test_gathers_under_way.py::test_what_comes_after_a_step_waits_for_its_gathers[load_its_state-torch.float32]",
        ],
        changes=[
            Change(
                "maingrad.ddp.optimizer.distributed_optimizer",
                "DistributedOptimizer.prepare_state",
                "self.finish_param_sync()",
                "",
            ),
        ],
    ),
]
