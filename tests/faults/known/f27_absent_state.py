from fault import Change, Fault

FAULTS = [
    Fault(
        "27a-skipped-momentum-is-uninitialised",
        sentence="A first step that overflows leaves momentum as it was in memory.",
        tests=[
            "tests/ddp/torch_grads/test_skipped_steps.py::test_a_skipped_step_leaves_no_trace[SGD, momentum-first]",
            "tests/ddp/torch_grads/test_skipped_steps.py::test_a_stock_optimizers_first_step_is_skipped_without_a_trace[0.0-True]",
            "tests/fsdp/state/test_optimizer_traces.py::test_a_first_step_that_is_skipped_leaves_no_trace[SGD, momentum, fused-zero3]",
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.optimizer",
                "prepare_skippable_step",
                "optimizer.state[param][_MOMENTUM] = torch.zeros_like(param, requires_grad=False)",
                "optimizer.state[param][_MOMENTUM] = torch.empty_like(param, requires_grad=False)",
            ),
        ],
    ),
    Fault(
        "27b-the-first-gradient-is-dampened",
        sentence="After a first step that was skipped, dampening takes its part of the first gradient.",
        tests=[
            "tests/ddp/torch_grads/test_skipped_steps.py::test_a_skipped_step_leaves_no_trace[SGD, dampening-first]",
            "tests/fsdp/state/test_optimizer_traces.py::test_a_first_step_that_is_skipped_leaves_no_trace[SGD, dampening, fused-zero3]",
        ],
        quick=[
            "tests/ddp/torch_grads/test_skipped_steps.py::test_a_skipped_step_leaves_no_trace[SGD, dampening-first]",
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.optimizer",
                "prepare_skippable_step",
                "and found_inf.item():",
                "and False:",
            ),
        ],
    ),
    Fault(
        "27c-padding-has-a-run",
        sentence="A rank's optimizer updates padding, of which no checkpoint has state.",
        tests=[
            "tests/ddp/optimizer/test_padding_alone.py::test_a_rank_without_a_parameter_has_no_state",
        ],
        changes=[
            Change(
                "maingrad.ddp.optimizer.flat_params",
                "segments_of",
                """
                if not cuts:
                    continue
                """,
                "cuts = cuts or [(0, group_of(flat.bucket_params[0]))]",
            ),
        ],
    ),
    Fault(
        "27d-nothing-has-no-state",
        sentence="A loaded optimizer has no state of a parameter without elements.",
        tests=[
            "tests/fsdp/state/test_optimizer_traces.py::test_empty_shards_go_on[SGD, momentum, fused-save_checkpoint]",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.optimizer",
                "plan_optimizer",
                "if updated.numel() == 0 and updated.requires_grad and updated not in state and updated.dtype in likes:",
                "if False:",
            ),
        ],
    ),
    Fault(
        "27e-state-of-before-the-first-step",
        sentence="State that is there before the first step goes out as what one rank holds.",
        tests=[
            "tests/fsdp/state/test_optimizer_traces.py::test_state_before_the_first_step_is_of_whole_parameters",
            "tests/fsdp/state/test_optimizer_traces.py::test_empty_shards_go_on[Adagrad, by default-get_state_dict]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.state.optimizer_state",
                "translate_state_dicts",
                "optimizer.register_state_dict_post_hook(_after_saving)",
                "",
            ),
        ],
    ),
]
