"""A draw over all folders, evenly by function, of slips that no quick test had noticed."""

from fault import Change, Fault

FAULTS = [
    Fault(
        "34za-a-newer-format-is-read",
        sentence="A checkpoint of a later format is read as if it were of this one.",
        tests=["tests/ddp/checkpoint/test_ids.py::test_a_version_to_come_is_refused"],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.manifest",
                "_check_version",
                "version == VERSION:",
                "version >= VERSION:",
            ),
        ],
    ),
]
