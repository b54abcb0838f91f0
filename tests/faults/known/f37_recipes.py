from fault import Change, Fault

FAULTS = [
    Fault(
        "37a-a-recompute-forgets-its-recipe",
        sentence="What is computed again in backward is computed without the recipe of its forward.",
        tests=[
            "tests/te_integration/recipes/test_autocast.py::test_what_is_computed_again_has_the_recipe",
        ],
        changes=[
            Change(
                "maingrad.te_integration.recipes",
                "recipe_now",
                "recipe = _regions.get(frame)",
                "recipe = None",
            ),
        ],
    ),
    Fault(
        "37b-backward-asks-for-the-recipe",
        sentence="Backward quantises by the recipe that is around it.",
        tests=[
            "tests/te_integration/recipes/test_autocast.py::test_backward_has_the_recipe_of_its_forward",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.quantized_linear",
                "_QuantizedLinear.backward",
                "recipe: Quantizing = ctx.recipe",
                "recipe: Quantizing = recipe_now() or ctx.recipe",
            ),
        ],
    ),
    Fault(
        "37c-scales-are-rounded-twice",
        sentence="A scale is the product with an inverse, rounded twice.",
        tests=[
            "tests/kernels/quantized/test_quantize.py::test_special_values",
        ],
        changes=[
            Change(
                "maingrad.kernels.quantized.quantize",
                "_encode",
                "encode = (torch.full_like(amax, largest) / amax).clamp(max=torch.finfo(torch.float32).max)",
                "encode = (largest * (1.0 / amax)).clamp(max=torch.finfo(torch.float32).max)",
            ),
        ],
    ),
    Fault(
        "37d-a-tie-is-rounded-away-from-zero",
        sentence="E2M1 rounds ties away from zero.",
        tests=[
            "tests/kernels/quantized/test_quantize.py::test_special_values",
        ],
        changes=[
            Change(
                "maingrad.kernels.quantized.quantize",
                "_packed_e2m1",
                "up = (share > 0.5) | ((share == 0.5) & (below % 2 == 1))  # a tie goes to the even code",
                "up = share >= 0.5",
            ),
        ],
    ),
    Fault(
        "37e-a-nested-region-forgets-its-recipe",
        sentence="A region in the recompute of another is computed as if no region were around.",
        tests=[
            "tests/te_integration/recipes/test_recompute.py::test_nested_regions",
        ],
        changes=[
            Change(
                "maingrad.te_integration.recipes",
                "recipe_now",
                "first.append(frame)",
                """
                first.append(frame)
                break
                """,
            ),
        ],
    ),
    Fault(
        "37f-a-block-around-backward-counts",
        sentence="What is computed again in backward has the recipe around the backward.",
        tests=[
            "tests/te_integration/recipes/test_recompute.py::test_a_block_around_backward_does_not_count",
        ],
        changes=[
            Change(
                "maingrad.te_integration.recipes",
                "recipe_now",
                "recipe = _regions.get(frame)",
                "recipe = _state.recipe or _regions.get(frame)",
            ),
        ],
    ),
    Fault(
        "37g-the-transform-is-autocast",
        sentence="The Hadamard transform runs in the dtype of torch.autocast.",
        tests=[
            "tests/kernels/quantized/test_quantize.py::test_what_is_around_changes_no_bit",
        ],
        changes=[
            Change(
                "maingrad.kernels.quantized.quantize",
                "rotate",
                "with torch.autocast(x.device.type, enabled=False):",
                "with torch.autocast(x.device.type, enabled=torch.is_autocast_enabled(x.device.type)):",
            ),
        ],
    ),
    Fault(
        "37h-compiled-code-asks-for-open-blocks",
        sentence="Compiled code asks which block is open, and none is in a recompute.",
        tests=[
            "tests/te_integration/recipes/test_compiled.py::test_checkpoints[around]",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.compiled_wgrad",
                "WgradHandle.recipe",
                "recipe = recipes.recipe_now()",
                "recipe = recipes._state.recipe",
            ),
        ],
    ),
    Fault(
        "37i-an-overflow-is-cut-off",
        sentence="Inf in a gradient in fp16 becomes the largest element, and a loss scaler takes the step.",
        tests=[
            "tests/te_integration/recipes/test_autocast.py::test_a_loss_scaler_sees_an_overflow",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.quantized_linear",
                "overflow_as_nan",
                "return dy.masked_fill(dy.isinf(), torch.nan) if dy.dtype is torch.float16 else dy",
                "return dy.masked_fill(dy.isinf(), torch.nan) if dy.dtype is torch.float64 else dy",
            ),
        ],
    ),
    Fault(
        "37j-a-block-that-straddles-experts",
        sentence="A block of the weight gradient's operands lies in two experts, whose scale is that of the larger one.",
        tests=[
            "tests/kernels/quantized/test_grouped.py::test_each_expert_has_the_bits_of_its_rows_alone",
            "tests/te_integration/recipes/test_experts.py::test_main_grad_is_the_sum_of_exact_products",
        ],
        changes=[
            Change(
                "maingrad.kernels.quantized.grouped",
                "_Experts.__init__",
                "self._blocks_more = (part - self._num_experts).clamp(min=0)",
                "self._blocks_more = torch.zeros_like(part)",
            ),
        ],
    ),
    Fault(
        "37k-one-scale-for-all-experts",
        sentence="All experts have the scale of the one with the largest element.",
        tests=[
            "tests/kernels/quantized/test_grouped.py::test_each_expert_has_the_bits_of_its_rows_alone",
            "tests/te_integration/recipes/test_experts.py::test_main_grad_is_the_sum_of_exact_products",
        ],
        changes=[
            Change(
                "maingrad.kernels.quantized.grouped",
                "_Experts.amax",
                "return torch.where(self.owner == experts[:, None], each, 0.0).amax(1)",
                "return torch.where(self.filled, each, 0.0).amax().expand(self._num_experts)",
            ),
        ],
    ),
    Fault(
        "37l-what-fills-a-block-is-a-row",
        sentence="What fills up the last block of an expert is a row of another one.",
        tests=[
            "tests/kernels/quantized/test_grouped.py::test_each_expert_has_the_bits_of_its_rows_alone",
            "tests/te_integration/recipes/test_experts.py::test_main_grad_is_the_sum_of_exact_products",
        ],
        changes=[
            Change(
                "maingrad.kernels.quantized.grouped",
                "quantize_grouped",
                "values = torch.where(source >= 0, x.float(), 0.0)",
                "values = x.float()",
            ),
        ],
    ),
    Fault(
        "37m-pad-rows-are-quantised",
        sentence="What lies in pad rows reaches the operands.",
        tests=[
            "tests/kernels/quantized/test_grouped.py::test_each_expert_has_the_bits_of_its_rows_alone",
        ],
        changes=[
            Change(
                "maingrad.kernels.quantized.grouped",
                "quantize_grouped",
                "values = torch.where(filled[:, None], x.float(), 0.0)",
                "values = x.float()",
            ),
        ],
    ),
    Fault(
        "37n-an-overflow-of-an-expert-is-cut-off",
        sentence="Inf in an expert's gradient in fp16 becomes the largest element, and a loss scaler takes the step.",
        tests=[
            "tests/te_integration/recipes/test_experts.py::test_an_overflow_in_fp16_stays_visible",
        ],
        changes=[
            Change(
                "maingrad.te_integration.experts.quantized_grouped_linear",
                "QuantizedProducts.gradients",
                "dy = overflow_as_nan(dy)",
                "",
            ),
        ],
    ),
    Fault(
        "37o-compiled-experts-have-no-recipe",
        sentence="Compiled code takes experts whole under a recipe, and computes them without it.",
        tests=[
            "tests/te_integration/recipes/test_experts_around.py::test_compiled_code_leaves_quantised_experts_outside",
        ],
        changes=[
            Change(
                "maingrad.te_integration.experts.grouped_module",
                "GroupedModule.runs_in_graph",
                "recipes.may_be_any or not",
                "not",
            ),
        ],
    ),
    Fault(
        "37p-a-first-forward-takes-an-old-weight",
        sentence="A weight that was written before the iteration's first gradient is seen as it was.",
        tests=[
            "tests/te_integration/recipes/test_weights.py::test_a_line_search_before_the_first_backward",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.quantized_linear",
                "kept_copies",
                'and (moment == "backward" or all(each is not None and each.written for each in records))',
                "",
            ),
        ],
    ),
    Fault(
        "37q-an-evaluation-takes-a-kept-weight",
        sentence="An evaluation with weights that were swapped in computes with those of the training.",
        tests=[
            "tests/te_integration/recipes/test_weights.py::test_swapped_weights_are_evaluated_between_microbatches",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.quantized_linear",
                "kept_copies",
                'or moment == "evaluation" else',
                "else",
            ),
            Change(
                "maingrad.te_integration.dense.quantized_linear",
                "kept_copies",
                'if moment == "forward":',
                'if moment != "backward":',
            ),
        ],
    ),
    Fault(
        "37r-a-weight-is-kept-for-the-next-iteration",
        sentence="A quantised weight outlives its iteration, and the step is not seen.",
        tests=[
            "tests/te_integration/recipes/test_weights.py::test_every_optimizer_step_is_seen",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.record",
                "GradRecord.close",
                "self.of_weight = None",
                "",
            ),
            Change(
                "maingrad.ddp.contract.record",
                "GradRecord.reset",
                "self.closed = self.of_weight = None",
                "self.closed = None",
            ),
            Change(
                "maingrad.te_integration.dense.quantized_linear",
                "kept_copies",
                'and (moment == "backward" or all(each is not None and each.written for each in records))',
                "",
            ),
        ],
    ),
    Fault(
        "37s-a-column-is-scaled-as-a-row",
        sentence="The quantiser's transposed copy has the scales of the rows.",
        tests=[
            "tests/kernels/quantized/test_quantize_triton.py::test_both_copies[block-cpu]",
        ],
        changes=[
            Change(
                "maingrad.kernels.quantized.quantize_kernels",
                "blocks_kernel",
                "elements = _elements(values * encode[None, :, None, :], MAX, by_columns)",
                "elements = _elements(values * encode[None, :, None, :] * 2, MAX, by_columns)",
            ),
        ],
    ),
    Fault(
        "37t-no-zeros-behind-the-columns",
        sentence="Behind the columns of a quantised copy lies what the memory held before.",
        tests=[
            "tests/kernels/quantized/test_quantize_triton.py::test_both_copies[block-cpu]",
        ],
        changes=[
            Change(
                "maingrad.kernels.quantized.quantize_kernels",
                "blocks_kernel",
                "tl.store(place, elements, (row < end) & (column < rows_stride))",
                "tl.store(place, elements, (row < end) & (column < C))",
            ),
        ],
    ),
    Fault(
        "37y-amaxes-are-not-loaded",
        sentence="A run goes on from a checkpoint with scales of 1.",
        tests=[
            "tests/te_integration/recipes/test_delayed_scaling_checkpoints.py::test_goes_on_bit_for_bit",
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.checkpoint",
                "load_checkpoint",
                "at_the_end[:] = [*adopts, install]",
                "at_the_end[:] = [install]",
            ),
        ],
    ),
    Fault(
        "37z-an-infinite-amax-gives-a-scale",
        sentence="An amax of Inf or 0 gives a scale of 0 or Inf.",
        tests=[
            "tests/te_integration/recipes/test_delayed_scaling.py::test_scales_are_those_of_the_formulas",
        ],
        changes=[
            Change(
                "maingrad.te_integration.recipes",
                "DelayedScaling.new_scales",
                "return torch.where((amax > 0) & amax.isfinite(), scales, old)",
                "return scales",
            ),
        ],
    ),
    Fault(
        "37za-sums-stay-in-the-tensor-cores",
        sentence="Sums of 8-bit products stay in the tensor cores, which keep 14 bits of them.",
        tests=[
            "tests/kernels/test_triton_compiles.py::test_sums_of_8_bit_products_leave_the_tensor_cores[gemm_triton._grouped_gemm_kernel-128]",
            "tests/kernels/test_triton_compiles.py::test_sums_of_8_bit_products_leave_the_tensor_cores[wgrad_triton._grouped_wgrad_kernel-128]",
        ],
        changes=[
            Change(
                "maingrad.kernels.grouped.gemm_triton",
                "_products",
                "acc = tl.dot(rows, w, acc, max_num_imprecise_acc=BLOCK_C)",
                "acc = tl.dot(rows, w, acc)",
            ),
            Change(
                "maingrad.kernels.grouped.quantized_triton",
                "sum_of_quantized",
                "acc, max_num_imprecise_acc=128)",
                "acc)",
            ),
        ],
    ),
    Fault(
        "37zb-one-expert-speaks-for-all",
        sentence="Only the first expert's weight says whether kept copies of all are old.",
        tests=[
            "tests/te_integration/recipes/test_weights_of_experts.py::test_what_changes_between_microbatches",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.quantized_linear",
                "kept_copies",
                "key = *form, number, *((weight._version, weight.data_ptr()) for weight in weights)",
                "key = *form, number, *((weight._version, weight.data_ptr()) for weight in weights[:1])",
            ),
        ],
    ),
    Fault(
        "37zc-a-gradient-of-one-expert-is-taken-for-all",
        sentence="A gradient of one expert, which another layer has too, stands for the others, and their old copies are taken.",
        tests=[
            "tests/te_integration/recipes/test_weights_of_experts.py::test_a_gradient_of_one_expert_speaks_for_none_of_the_others",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.quantized_linear",
                "kept_copies",
                'and (moment == "backward" or all(each is not None and each.written for each in records))',
                'and (moment == "backward" or all(each is not None and each.written for each in records[:1]))',
            ),
        ],
    ),
]
