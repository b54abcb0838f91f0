"""Mistakes that a third draw over all functions has made, outside of ddp."""

from fault import Change, Fault

FAULTS = [
    Fault(
        "43k-transforms-are-refused-with-gradients-alone",
        sentence="torch.func.vmap over a sharded model under no_grad is not refused.",
        tests=[
            "tests/fsdp/unit/test_frontiers.py::test_torch_func_over_shards_is_refused[outputs_of_each_row-a transform of torch.func over .*: it would take no gradient]"
        ],
        changes=[
            Change(
                "maingrad.fsdp.unit.unit",
                "check_no_transform",
                "if are_transforms_active():",
                "if are_transforms_active() and torch.is_grad_enabled():",
            )
        ],
    ),
    Fault(
        "38e-each-conversion-makes-a-class",
        sentence="Two converted modules of experts of one class have two classes.",
        tests=[
            "tests/te_integration/experts/test_hugging_face_experts.py::test_evaluation_generation_and_the_way_back[mixtral]"
        ],
        changes=[
            Change(
                "maingrad.te_integration.experts.hugging_face_experts",
                "_fused_class",
                "@functools.cache\ndef _fused_class(",
                "def _fused_class(",
            )
        ],
    ),
    Fault(
        "55d-simulated-gathers-reinterpret-bytes",
        sentence="A simulated rank gathers bf16 values into fp32 memory, and no error says so.",
        tests=["tests/launch/simulation/test_errors.py::test_gathering_into_another_dtype_is_refused"],
        changes=[
            Change(
                "maingrad.launch.simulation.group",
                "_chunks",
                "if whole.numel() != part.numel() * size or whole.dtype != part.dtype:",
                "if whole.numel() != part.numel() * size:",
            )
        ],
    ),
    Fault(
        "35y-a-loss-has-no-dims",
        sentence="A pipeline refuses a loss of shape [1, 1].",
        tests=["tests/te_integration/pipeline/test_executor.py::test_a_loss_may_have_dims_of_size_one"],
        changes=[
            Change(
                "maingrad.te_integration.pipeline.executor", "_Run._run_forward", "loss.numel() != 1", "loss.dim() != 0"
            )
        ],
    ),
    Fault(
        "16zd-a-callables-name-is-taken-off-twice",
        sentence="A graphed callable whose child has its own name misses the keys of that child in a state dict.",
        tests=["tests/te_integration/graphs/test_callables.py::test_keys_of_a_callable_may_repeat_its_name"],
        changes=[
            Change(
                "maingrad.te_integration.graphs.callable",
                "GraphedCallable._load_from_state_dict",
                "key.removeprefix(prefix)",
                "key.replace(prefix, '')",
            )
        ],
    ),
    Fault(
        "33p-constants-are-taken-for-draws",
        sentence="nn.init.constant_ over a sharded parameter is refused, though every shard gets the same value.",
        tests=["tests/fsdp/unit/test_frontiers.py::test_shards_take_constants"],
        changes=[
            Change(
                "maingrad.fsdp.tensors.parameter",
                "",
                "_ALLOWED_IN_FUNCTION |= {nn.init.normal_, nn.init.uniform_, nn.init.constant_}",
                "_ALLOWED_IN_FUNCTION |= {nn.init.normal_, nn.init.uniform_}",
            )
        ],
    ),
]
