from fault import Change, Fault

FAULTS = [
    Fault(
        "34zr-a-save-in-the-foreground-goes-on-after-ctrl-c",
        sentence="A thread writes the model while the program, after Ctrl-C in the save, changes the model.",
        tests=[
            "tests/ddp/checkpoint/test_background.py::test_ctrl_c_ends_a_save_and_leaves_the_checkpoint_of_before",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.checkpoint",
                "save_checkpoint",
                "pending.finish()",
                "pending.start(model) or finish_pending(model)",
            ),
        ],
    ),
    Fault(
        "34zs-a-save-under-way-is-forgotten-at-ctrl-c",
        sentence="After Ctrl-C in the wait for a save in the background, the next save to its path is refused.",
        tests=[
            "tests/ddp/checkpoint/test_background.py::"
            "test_after_ctrl_c_the_next_save_waits_for_the_one_in_the_background",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.background",
                "finish_pending",
                "_under_way.get(model)",
                "_under_way.pop(model, None)",
            ),
        ],
    ),
    Fault(
        "34zt-a-header-and-elements-of-two-saves",
        sentence="A save replaces a data file after its header was read, and the elements are those of the new file.",
        tests=[
            "tests/ddp/checkpoint/test_ids.py::test_a_file_that_is_replaced_while_its_header_is_read_is_one_file",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.rank_file",
                "Entry.read",
                "self.file.content.seek(self.position)",
                "(vars(self.file).update(content=self.file.path.open('rb')), self.file.content.seek(self.position))",
            ),
        ],
    ),
    Fault(
        "34zu-state-of-the-dtype-of-another-parameter",
        sentence="After a load, a parameter without elements has moments in the dtype of another parameter.",
        tests=[
            "tests/fsdp/state/test_checkpoint.py::"
            "test_a_parameter_without_elements_of_another_dtype_steps_after_a_load",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.optimizer",
                "plan_optimizer",
                "and updated.dtype in likes:",
                "and likes:",
            ),
            Change(
                "maingrad.ddp.checkpoint.optimizer",
                "plan_optimizer",
                "likes[updated.dtype]",
                "next(iter(likes.values()))",
            ),
        ],
    ),
    Fault(
        "34zv-all-parameters-are-rounded-before-the-first-is-written",
        sentence="A save of a fully sharded model takes memory for rounded copies of all of this rank's parameters.",
        tests=["tests/fsdp/state/test_checkpoint.py::test_a_save_rounds_one_tensor_at_a_time"],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.checkpoint",
                "_look_at",
                "held.start, sections, slices.get(name), model=held.dtype)",
                "held.start, {**sections, 'model': held.param.to(held.dtype)}, slices.get(name))",
            ),
        ],
    ),
    Fault(
        "34zw-a-load-opens-no-more-files-than-are-usual",
        sentence="A checkpoint of more ranks than a process may open files cannot be read by one process.",
        tests=["tests/ddp/checkpoint/test_format.py::test_more_files_are_read_than_a_process_may_open_at_first"],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.opened",
                "_open",
                "if soft < wanted_files:",
                "if False:",
            ),
        ],
    ),
    Fault(
        "34zx-matrices-of-state-come-back-row-by-row",
        sentence="After a load, the matrices of an optimizer lie otherwise in memory, and products have other bits.",
        tests=[
            "tests/ddp/checkpoint/test_state_of_other_shapes.py::"
            "test_a_resumed_run_has_the_bits_of_one_without_interruption[Soap-zero1-2]",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.optimizer",
                "_take",
                "torch.empty_permuted(entry.shape, order,",
                "torch.empty(entry.shape,",
            ),
        ],
    ),
]
