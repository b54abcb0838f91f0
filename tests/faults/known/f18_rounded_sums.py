from fault import Change, Fault, sharded

FAULTS = [
    Fault(
        "18a-buckets-in-the-parameters-dtype",
        sentence="bf16 parameters get bf16 accumulators: 256 + 1 - 256 is 0.",
        tests=[
            "tests/ddp/contract/test_contract_faults.py::test_18_small_bf16_gradients_survive_between_large_ones",
            "tests/te_integration/dense/test_module_faults.py::test_18_small_bf16_gradients_survive_between_large_ones",
            *sharded(
                "tests/fsdp/iteration/test_contract_faults.py::test_18_small_bf16_gradients_survive_between_large_ones[fp32 masters-fused-{}]"
            ),
        ],
        changes=[
            Change(
                "maingrad.ddp.plan.owned_params",
                "grad_dtype_of",
                "return of_half if param_dtype in (torch.bfloat16, torch.float16) else param_dtype",
                "return param_dtype",
            ),
        ],
    ),
    Fault(
        "18b-the-sum-is-rounded",
        sentence="The sum of main_grad and the product is rounded to the dtype of bf16 operands: 256 + 1 - 256 is 0.",
        tests=[
            "tests/ddp/contract/test_contract_faults.py::test_18_small_bf16_gradients_survive_between_large_ones",
            "tests/te_integration/dense/test_module_faults.py::test_18_small_bf16_gradients_survive_between_large_ones",
            "tests/fsdp/iteration/test_contract_faults.py::test_18_small_bf16_gradients_survive_between_large_ones[fp32 masters-fused-zero1]",
            "tests/fsdp/iteration/test_contract_faults.py::test_18_small_bf16_gradients_survive_between_large_ones[fp32 masters-fused-hybrid]",
        ],
        changes=[
            Change(
                "maingrad.kernels.grouped.reference",
                "wgrad_accumulate_reference",
                "main_grad.add_(product)",
                "main_grad.copy_(main_grad.bfloat16() + product.bfloat16())",
            ),
        ],
    ),
    Fault(
        "18c-shards-are-summed-in-bf16",
        sentence="Reduced gradients of bf16 parameters are summed over microbatches in bf16.",
        tests=[
            "tests/fsdp/iteration/test_contract_faults.py::test_18_small_bf16_gradients_survive_between_large_ones[fp32 masters-fused-zero2]",
            "tests/fsdp/iteration/test_contract_faults.py::test_18_small_bf16_gradients_survive_between_large_ones[fp32 masters-fused-zero3]",
            "tests/fsdp/iteration/test_contract_faults.py::test_18_small_bf16_gradients_survive_between_large_ones[fp32 masters-fused-hsdp]",
            "tests/fsdp/iteration/test_contract_faults.py::test_18_small_bf16_gradients_survive_between_large_ones[fp32 masters-fused-hsdp_zero1]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.unit.grad_shard",
                "_accumulate",
                "into.add_(value)",
                "into.copy_(into.bfloat16() + value.bfloat16())",
            ),
        ],
    ),
]
