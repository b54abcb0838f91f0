"""Buffers inside experts."""

from fault import Change, Fault

FAULTS = [
    Fault(
        "29f-unmarked-buffers-of-experts-are-everybodys",
        sentence="Buffers of experts are overwritten by the first rank's and stored once, because nobody marks them.",
        tests=["tests/fsdp/state/test_buffers_of_experts.py::test_wrapping_leaves_them_each_ranks_own"],
        changes=[
            Change(
                "maingrad.ddp.plan.owned_params",
                "buffers_of_experts",
                'getattr(buffer, "allreduce", not of_experts)',
                'getattr(buffer, "allreduce", True)',
            )
        ],
    ),
    Fault(
        "29g-a-module-around-units-of-experts-is-everybodys",
        sentence="A buffer of a container of experts is copied from the first rank, because its unit is the dense one.",
        tests=["tests/fsdp/state/test_buffers_of_experts.py::test_wrapping_leaves_them_each_ranks_own"],
        changes=[
            Change(
                "maingrad.fsdp.unit.materialize",
                "synchronize",
                "(grids[0] if id(tensor) in of_experts else grid)",
                "grid",
            )
        ],
    ),
    Fault(
        "29h-a-wrapper-stores-experts-buffers-once",
        sentence="A checkpoint of ZeRO-1 has the experts' buffers once, and fully_shard looks for each rank's.",
        tests=["tests/fsdp/state/test_buffers_of_experts.py::test_a_checkpoint_of_one_wrapper_is_read_under_another"],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.source",
                "model_tensors",
                "if id(buffer) in of_experts:",
                "if not getattr(buffer, 'allreduce', True):",
            )
        ],
    ),
]
