"""Memory of models from the meta device that nobody has written."""

from fault import Change, Fault

FAULTS = [
    Fault(
        "49a-memory-that-no-one-wrote-is-copied",
        sentence="What init_fn leaves out is garbage, and init_sync copies it to all ranks.",
        tests=["tests/fsdp/unit/test_meta.py::test_what_nobody_writes_is_refused_by_name"],
        changes=[Change("maingrad.fsdp.unit.materialize", "materialize", "if not overwritten:", "if False:")],
    ),
    Fault(
        "49b-a-version-says-what-was-written",
        sentence="Values that init_fn writes through .data raise no version, and are taken for garbage.",
        tests=["tests/fsdp/unit/test_meta.py::test_what_is_written_in_any_way_is_taken"],
        changes=[
            Change(
                "maingrad.fsdp.unit.materialize",
                "_Unwritten.missing",
                "if not marked:",
                "if tensor._version != self.version:",
            )
        ],
    ),
    Fault(
        "49c-buffers-need-no-values",
        sentence="Parameters that init_fn leaves out are refused, and buffers are not.",
        tests=["tests/fsdp/unit/test_meta.py::test_what_nobody_writes_is_refused_by_name"],
        changes=[
            Change(
                "maingrad.fsdp.unit.materialize",
                "materialize",
                "._version) for name in on_meta",
                "._version) for name in on_meta if name in own",
            )
        ],
    ),
    Fault(
        "49d-a-frozen-tensor-without-memory-is-copied",
        sentence="DistributedDataParallel copies buffers on the meta device between ranks.",
        tests=["tests/ddp/wrapper/test_bad_input.py::test_what_init_sync_would_copy_and_is_on_meta_is_refused"],
        changes=[
            Change("maingrad.ddp.wrapper.setup_checks", "_check_overwritten", "if tensor.is_meta:", "if False:"),
        ],
    ),
]
