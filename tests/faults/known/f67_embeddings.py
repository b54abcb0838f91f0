"""Faults of the embedding's gradient, which goes into ``main_grad`` row by row."""

from fault import Change, Fault

TESTS = "tests/te_integration/embedding/test_embedding.py"
KERNEL = "tests/kernels/test_embedding_wgrad.py"
MODULE, TRITON = "maingrad.te_integration.dense.embedding", "maingrad.kernels.permutation.embedding_triton"
REFERENCE = "maingrad.kernels.permutation.reference"

FAULTS = [
    Fault(
        "67a-a-repeated-token-is-added-once",
        sentence="Of the rows of one id the last counts.",
        tests=[f"{TESTS}::test_training_equals_autograds_bit_for_bit[ddp]"],
        changes=[
            Change(
                REFERENCE,
                "embedding_wgrad_reference",
                "summed = embedding_grad(dy.to(dtype), tokens, main_grad.shape[0])",
                """
                summed = torch.zeros_like(main_grad, dtype=dtype)
                summed[tokens[tokens >= 0]] = dy.to(dtype)[tokens >= 0]
                """,
            )
        ],
    ),
    Fault(
        "67b-the-kernel-adds-the-last-row-of-a-chunk-alone",
        sentence="A sum does not go on from row to row.",
        tests=[
            f"{KERNEL}::test_one_id_in_all_places_is_summed_once",
            f"{KERNEL}::test_half_precision_is_summed_in_fp32",
        ],
        changes=[Change(TRITON, "_sum_chunks_kernel", "total += tl.load(dy", "total = tl.load(dy")],
    ),
    Fault(
        "67c-the-last-part-of-a-long-segment-is-lost",
        sentence="An id whose rows cross chunks loses those of its last chunk.",
        tests=[f"{KERNEL}::test_one_id_in_all_places_is_summed_once"],
        changes=[Change(TRITON, "_add_parts_kernel", "mask = (part <= last)", "mask = (part < last)")],
    ),
    Fault(
        "67d-a-tied-weight-is-overwritten-by-its-second-use",
        sentence="Head and embedding share a weight, and the embedding's rows take the place of the head's product.",
        tests=[f"{TESTS}::test_a_tied_head_adds_to_the_same_sum[ddp]"],
        changes=[Change(MODULE, "EmbeddingWgrad.accumulate", "overwrite=overwrite[0]", "overwrite=True")],
    ),
    Fault(
        "67e-a-weight-is-written-twice",
        sentence="The gradient goes into main_grad, and to autograd as well.",
        tests=[f"{TESTS}::test_each_microbatch_is_one_write_of_each_use"],
        changes=[
            Change(
                MODULE,
                "_FusedEmbedding.backward",
                "return (None,) * 5 + tuple(weight_grads(ctx, wanted, places, operands))",
                """
                weight_grads(ctx, wanted, places, operands)
                return (None,) * 5 + tuple(ctx.use.wgrad.gradients([True], ctx.weight_dtype, *operands))
                """,
            )
        ],
    ),
    Fault(
        "67f-padding-is-counted",
        sentence="Rows of padding are summed into the row of padding_idx.",
        tests=[f"{TESTS}::test_rows_without_a_token_are_zero_in_each_iteration"],
        changes=[Change(MODULE, "_operands", "ids = ids.masked_fill(ids == padding_idx, -1)", "pass")],
    ),
    Fault(
        "67g-a-first-write-leaves-old-rows",
        sentence="The first write of an iteration writes the rows of its tokens, and others keep the last iteration's.",
        tests=[f"{TESTS}::test_rows_without_a_token_are_zero_in_each_iteration"],
        changes=[
            Change(
                REFERENCE,
                "embedding_wgrad_reference",
                "main_grad.copy_(summed)",
                "main_grad[tokens.clamp(min=0)] = summed[tokens.clamp(min=0)].to(main_grad.dtype)",
            )
        ],
    ),
    Fault(
        "67h-the-kernel-leaves-old-rows",
        sentence="The same of the kernel.",
        tests=[f"{KERNEL}::test_triton_sums_exactly"],
        changes=[Change(TRITON, "embedding_wgrad_triton", "main_grad.zero_()", "pass")],
    ),
    Fault(
        "67i-a-subclass-loses-its-scale",
        sentence="The fused class stands before Gemma's, whose forward scales the output, and does not run.",
        tests=["tests/te_integration/embedding/test_conversion.py::test_a_subclass_of_transformers_keeps_its_forward"],
        changes=[
            Change(
                MODULE,
                "fused_embedding_class",
                "(MadeClass, base, Embedding)",
                "(MadeClass, Embedding, base)",
            )
        ],
    ),
    Fault(
        "67j-tied-lookups-count-as-products",
        sentence="The share of fused FLOPs counts lookups.",
        tests=["tests/te_integration/embedding/test_conversion.py::test_lookups_take_no_part_of_the_flops"],
        changes=[
            Change(
                "maingrad.te_integration.conversion.report",
                "linear_weights",
                """
                if isinstance(module, nn.Embedding):
                    return ()
                """,
                "",
            )
        ],
    ),
]
