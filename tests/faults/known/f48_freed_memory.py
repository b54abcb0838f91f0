"""Whole parameters that a program keeps when their memory is freed."""

from fault import Change, Fault

FAULTS = [
    Fault(
        "48a-a-block-frees-what-was-read-in-it",
        sentence="Views and arrays of parameters that a program has taken within unsharded() lose their memory there.",
        tests=["tests/fsdp/unit/test_freed_memory.py::test_what_is_read_within_unsharded_lives_on"],
        changes=[Change("maingrad.fsdp.unit.bucket", "ShardedBucket.release_params", "if was_read:", "if False:")],
    ),
    Fault(
        "48b-a-state-dict-follows-training",
        sentence="A state dict from unsharded() holds the gathered memory itself, which the next gather writes.",
        tests=["tests/fsdp/unit/test_freed_memory.py::test_a_state_dict_does_not_follow_training"],
        changes=[
            Change(
                "maingrad.fsdp.state.state_dict",
                "_after_saving",
                "state_dict.get(prefix + name, param).detach().clone()",
                "param.detach()",
            )
        ],
    ),
    Fault(
        "48c-a-parameter-without-memory-is-nameless",
        sentence="A parameter that is kept from unsharded() has no memory, and does not say which one it is.",
        tests=["tests/fsdp/unit/test_freed_memory.py::test_a_kept_parameter_refuses_to_be_read_after_the_block"],
        changes=[
            Change(
                "maingrad.fsdp.tensors.parameter",
                "WholeParams.leave",
                "param.__class__ = FreedParameter",
                "pass",
            )
        ],
    ),
]
