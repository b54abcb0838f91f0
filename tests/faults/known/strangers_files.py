"""Links that are followed, and code of a stranger's folder that runs."""

from fault import Change, Fault

_FOLDER = "maingrad.ddp.checkpoint.files.folder"
_STRANGERS = "tests/launch/model/test_strangers_folders.py"
_KEPT = "tests/launch/training/test_kept_checkpoints.py"
_FOREIGN = "tests/ddp/checkpoint/test_foreign_files.py"

FAULTS = [
    Fault(
        "52a-retention-empties-what-a-link-names",
        sentence="A checkpoint's link is taken for the checkpoint: the files of an archived one are deleted.",
        tests=[f"{_KEPT}::test_links_and_empty_folders_stay"],
        changes=[
            Change(_FOLDER, "_is_only", "folder.is_dir() and not folder.is_symlink()", "folder.is_dir()"),
            Change(_FOLDER, "_remove", "if folder.exists() and not folder.is_symlink():", "if folder.exists():"),
            Change(
                "maingrad.launch.training.run_state",
                "RunSaver._delete",
                "if path.is_symlink() or not (is_complete(path) or is_left_to_delete(path)):",
                "if not (is_complete(path) or is_left_to_delete(path)):",
            ),
        ],
    ),
    Fault(
        "52b-retention-deletes-an-empty-folder-of-the-users",
        sentence="An empty folder with the name of a checkpoint is taken for what a deletion left.",
        tests=[f"{_KEPT}::test_links_and_empty_folders_stay"],
        changes=[
            Change(
                "maingrad.launch.training.run_state",
                "RunSaver._delete",
                "if path.is_symlink() or not (is_complete(path) or is_left_to_delete(path)):",
                "if path.is_symlink():",
            )
        ],
    ),
    Fault(
        "52c-any-file-of-that-ending-is-deleted",
        sentence="A file beside a checkpoint's is deleted by the next save, because its name ends like theirs.",
        tests=[f"{_FOREIGN}::test_a_file_of_somebody_elses_is_kept"],
        changes=[
            Change(
                _FOLDER,
                "belongs_to_checkpoint",
                "_OURS.fullmatch(name) is not None",
                'name.endswith((".safetensors", ".tmp"))',
            )
        ],
    ),
    Fault(
        "52d-transformers-asks-whether-code-may-run",
        sentence="Nobody has said no, and standard input says yes: code of the folder runs.",
        tests=[f"{_STRANGERS}::test_no_command_runs_code_of_a_folder"],
        changes=[
            Change(
                "maingrad.launch.model.hugging_face_folder",
                "load_settings",
                "folder, local_files_only=True, trust_remote_code=trust_remote_code",
                "folder, local_files_only=True",
            )
        ],
    ),
    Fault(
        "52e-the-records-of-a-run-let-code-run",
        sentence="A report believes the records, which say that the folder's code may run.",
        tests=[f"{_STRANGERS}::test_no_command_runs_code_of_a_folder"],
        changes=[
            Change(
                "maingrad.launch.config.file",
                "structure_of_run",
                "dataclasses.replace(config.model, trust_remote_code=False)",
                "config.model",
            )
        ],
    ),
    Fault(
        "52f-files-behind-links-are-exported",
        sentence="A tokenizer's file that links elsewhere is copied into the exported folder.",
        tests=[f"{_STRANGERS}::test_links_out_of_the_folder_are_not_copied"],
        changes=[
            Change("maingrad.launch.model.hugging_face_folder", "copy_tokenizer", "if stays_inside(path):", "if True:")
        ],
    ),
    Fault(
        "52g-a-report-writes-through-a-link",
        sentence="What report.html links to is overwritten.",
        tests=[f"{_STRANGERS}::test_a_report_replaces_links_and_not_what_they_link_to"],
        changes=[
            Change(
                "maingrad.launch.data.replacing",
                "replacing",
                "os.replace(staging, path)",
                "path.write_bytes(staging.read_bytes())",
            )
        ],
    ),
]
