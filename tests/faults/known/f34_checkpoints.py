from fault import Change, Fault

FAULTS = [
    Fault(
        "34a-a-data-file-of-another-save-is-read",
        sentence="A data file of another save is taken for the checkpoint's: weights of one step, moments of another.",
        tests=[
            "tests/ddp/checkpoint/test_ids.py::test_a_file_of_another_step_is_refused_by_name",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.rank_file",
                "RankFile.__init__",
                "if found != expected:",
                "if str(found)[-22:] != expected[-22:]:",
            ),
        ],
    ),
    Fault(
        "34b-somebodys-folder-is-taken-for-a-leftover",
        sentence="A checkpoint that is named like what a save leaves beside its place is deleted by the next save.",
        tests=[
            "tests/ddp/checkpoint/test_ids.py::test_somebodys_checkpoint_beside_the_path_is_not_deleted",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.folder",
                "_is_only",
                "return ours and any((folder / name).is_file() for name in names)",
                "return ours",
            ),
        ],
    ),
    Fault(
        "34c-two-saves-write-into-one-folder",
        sentence="A save writes into the folder that another one is writing into.",
        tests=[
            "tests/ddp/checkpoint/test_ids.py::test_a_second_save_to_the_same_path_is_refused_while_the_first_is_under_way",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.folder",
                "Staging._hold",
                "except BlockingIOError:",
                "except ZeroDivisionError:",
            ),
        ],
    ),
    Fault(
        "34d-a-buffers-first-name-decides",
        sentence="A persistent buffer that has a name before it which is not persistent is not saved.",
        tests=[
            "tests/ddp/checkpoint/test_save_and_load.py::test_a_buffer_counts_where_any_of_its_names_is_persistent",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.source",
                "model_tensors",
                "dict(buffers.values())",
                "{name: each for name, each in buffers.values() if name in dict(module.named_buffers())}",
            ),
        ],
    ),
    Fault(
        "34e-few-bytes-are-many-tensors",
        sentence="Memory is taken for tensors that are larger than the files that are said to hold them.",
        tests=[
            "tests/ddp/checkpoint/test_damaged_files.py::test_few_bytes_that_claim_to_be_much_are_not_exported",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.rank_file",
                "check_size",
                "if size < nbytes:",
                "if size < 0:",
            ),
        ],
    ),
    Fault(
        "34f-elements-may-be-missing",
        sentence="A manifest in which elements of a tensor are in no box, or in two, is believed.",
        tests=[
            "tests/ddp/checkpoint/test_format.py::test_slices_that_do_not_fit_together_are_refused_by_name",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.manifest",
                "SavedTensor.__post_init__",
                "check_tiling(self.shape, [box for _, box in self.boxes])",
                "pass",
            ),
        ],
    ),
    Fault(
        "34g-a-flipped-bit-is-not-noticed",
        sentence="Bytes of a tensor that changed on the disk, or that are another tensor's, are loaded.",
        tests=[
            "tests/ddp/checkpoint/test_damaged_files.py::test_a_flipped_bit_in_a_tensor_is_noticed",
            "tests/ddp/checkpoint/test_damaged_files.py::test_bytes_of_two_tensors_in_each_others_place_are_noticed",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.rank_file",
                "Entry.read",
                'if f"{checksum:08x}" != self.checksum:',
                "if checksum < 0:",
            ),
        ],
    ),
    Fault(
        "34h-a-read-is-no-change",
        sentence="Parameters that a load wrote count as unchanged, and masters are not renewed from them.",
        tests=[
            "tests/ddp/checkpoint/test_save_and_load.py::test_weights_alone_load_into_a_wrapped_model",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.rank_file",
                "Entry.read",
                "torch.autograd.graph.increment_version(view)",
                "pass",
            ),
        ],
    ),
    Fault(
        "34i-a-manifest-that-changed-is-believed",
        sentence="Values of the manifest that changed on the disk are loaded.",
        tests=[
            "tests/ddp/checkpoint/test_damaged_files.py::test_a_manifest_that_was_changed_by_hand_says_so",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.manifest",
                "Manifest.read",
                "if written is not None and found != written:",
                "if written is not None and found < 0:",
            ),
        ],
    ),
    Fault(
        "34j-renamed-data-files-are-read",
        sentence="Data files of one save in each other's place are loaded.",
        tests=[
            "tests/ddp/checkpoint/test_damaged_files.py::test_files_of_one_checkpoint_in_each_others_place_are_refused",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.rank_file",
                "RankFile.__init__",
                "if found != expected:",
                "if str(found)[:41] != save_id:",
            ),
        ],
    ),
    Fault(
        "34l-a-run-goes-on-over-other-data",
        sentence="A resumed run reads data that changed since its checkpoint.",
        tests=[
            "tests/launch/training/test_resume.py::test_other_data_are_refused_by_name",
        ],
        changes=[
            Change(
                "maingrad.launch.training.run_state",
                "_check_same_data",
                "if difference is not None:",
                "if difference is not None and now.tokens < 0:",
            ),
        ],
    ),
    Fault(
        "34m-a-file-that-shrinks-is-read-past-its-end",
        sentence="Tokens behind the end of a file that has become shorter are what memory held.",
        tests=[
            "tests/launch/data/test_batches.py::test_a_file_that_shrinks_while_it_is_read_is_named",
        ],
        changes=[
            Change(
                "maingrad.launch.data.tokens",
                "FileTokens.__getitem__",
                "if len(found) < wanted:",
                "if len(found) > wanted:",
            ),
        ],
    ),
    Fault(
        "34n-every-rank-saves-torchs-wrapper",
        sentence="Every rank of torch's wrapper saves into one folder by itself.",
        tests=[
            "tests/ddp/checkpoint/test_faults.py::test_a_model_in_torchs_wrapper_is_refused_on_all_ranks",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.wrapper_source",
                "source_of",
                "if isinstance(model, TorchDDP):",
                "if model is TorchDDP:",
            ),
        ],
    ),
    Fault(
        "34o-one-ranks-part-is-saved-for-all",
        sentence="What one rank holds of a DTensor is saved as all of it.",
        tests=[
            "tests/ddp/checkpoint/test_faults.py::test_dtensors_are_refused_by_name",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.wrapper_source",
                "source_of",
                'if hasattr(tensor, "device_mesh"):',
                'if hasattr(tensor, "no_device_mesh"):',
            ),
        ],
    ),
    Fault(
        "34p-weights-are-written-over-a-checkpoints-file",
        sentence="Weights are written over a checkpoint's own manifest.",
        tests=[
            "tests/launch/test_safetensors_io.py::test_a_checkpoint_is_not_exported_onto_itself",
        ],
        changes=[
            Change(
                "maingrad.launch.safetensors_io",
                "_check_target",
                "name) and (place",
                "name) and not place.parent and (place",
            ),
        ],
    ),
    Fault(
        "34q-a-model-without-memory-is-loaded",
        sentence="A load into a model on the meta device does nothing, and says nothing.",
        tests=[
            "tests/ddp/checkpoint/test_faults.py::test_a_model_on_the_meta_device_is_refused_by_name",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.wrapper_source",
                "source_of",
                "if tensor.is_meta:",
                "if tensor.is_meta and tensor.is_cpu:",
            ),
        ],
    ),
    Fault(
        "34s-an-entry-of-another-dtype-is-read",
        sentence="Bytes whose data file says another dtype than the manifest are converted.",
        tests=[
            "tests/ddp/checkpoint/test_faults.py::test_an_entry_of_another_dtype_is_refused_by_name",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.rank_file",
                "RankFile.find",
                "if found != expected or start < 0:",
                'if found["shape"] != expected["shape"]:',
            ),
        ],
    ),
    Fault(
        "34t-a-transposed-tensor-is-written-as-it-lies",
        sentence="A tensor that is not stored row by row is written as it lies in memory, and read as other elements.",
        tests=[
            "tests/ddp/checkpoint/test_save_and_load.py::test_views_of_every_kind_are_saved_as_their_values",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.rank_file",
                "_blocks",
                "plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()",
                "plain = tensor.detach().as_strided((tensor.numel(),), (1,))",
            ),
        ],
    ),
    Fault(
        "34u-what-is-saved-beside-training-changes",
        sentence="A save in the background writes tensors of the steps after it.",
        tests=[
            "tests/ddp/checkpoint/test_background.py::test_what_is_written_late_is_of_the_moment_of_the_call",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.background",
                "PendingSave.copy_to_host",
                "memory.copy_(each[section].to(memory.dtype), non_blocking=True)",
                "each[section]",
            ),
        ],
    ),
    Fault(
        "34w-a-load-does-not-wait-for-the-save",
        sentence="A load during a save in the background reads the checkpoint before it.",
        tests=[
            "tests/ddp/checkpoint/test_background.py::test_a_load_reads_what_is_still_being_written",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.background",
                "PendingSave.start",
                "lambda: None if self.is_over else self.wait()",
                "lambda: self.wait() if self.done() else None",
            ),
        ],
    ),
    Fault(
        "34x-the-last-checkpoint-goes-before-the-next-is-there",
        sentence="A run deletes its last checkpoint while the next one is being written.",
        tests=[
            "tests/launch/training/test_kept_checkpoints.py::test_the_last_one_stays_until_the_next_is_complete",
        ],
        changes=[
            Change(
                "maingrad.launch.training.run_state",
                "RunSaver.look",
                "ended = self._pending is not None and self._pending.done() and not self._pending.failed()",
                "ended = self._pending is not None and not self._pending.failed()",
            ),
            Change(
                "maingrad.launch.training.run_state",
                "RunSaver._delete",
                "newer = [step for step in complete if number < step <= newest]",
                "newer = [step for step in {*complete, newest} if number < step <= newest]",
            ),
        ],
    ),
    Fault(
        "34zi-a-load-that-a-save-overtakes-fails",
        sentence="A load beside a save that replaces the checkpoint ends with files of two checkpoints.",
        tests=[
            "tests/ddp/checkpoint/test_ids.py::test_a_checkpoint_that_is_replaced_while_it_is_opened_is_opened_again",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.opened",
                "open_checkpoint",
                "if _look(path) == seen:",
                "if True:",
            ),
        ],
    ),
    Fault(
        "34zj-ranks-load-two-checkpoints",
        sentence="A rank that opens the checkpoint after a save has replaced it loads another one than the others.",
        tests=[
            "tests/ddp/checkpoint/test_ids.py::test_ranks_that_opened_different_checkpoints_open_them_again",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.opened",
                "open_checkpoint",
                "if opened and len(set(ids)) == 1:",
                "if opened:",
            ),
        ],
    ),
    Fault(
        "34zl-columns-are-taken-for-rows",
        sentence="A box that is no range of the flattened tensor is read as if it were one.",
        tests=[
            "tests/ddp/checkpoint/test_format.py::test_slices_of_columns_are_read_by_ranks_of_every_kind_and_written_back",
        ],
        changes=[
            Change(
                "maingrad.ddp.plan.cut",
                "Box.view_of",
                "tuple(map(slice, starts, ends))",
                "tuple(slice(max(0, start - 1), end - min(1, start)) for start, end in zip(starts, ends, strict=True))",
            ),
        ],
    ),
]
