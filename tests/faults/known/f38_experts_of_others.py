from fault import Change, Fault

FAULTS = [
    Fault(
        "38a-gate-and-up-change-places",
        sentence="A fused expert's gate is taken for its up projection.",
        tests=[
            "tests/te_integration/experts/test_hugging_face_experts.py::test_results_and_gradients_of_several_microbatches[mixtral]",
        ],
        changes=[
            Change(
                "maingrad.te_integration.experts.hugging_face_experts",
                "FusedExperts._activate",
                "return scaled_activation(hidden, scales, _SWIGLU)",
                "return scaled_activation(hidden.roll(hidden.shape[-1] // 2, -1), scales, _SWIGLU)",
            ),
        ],
    ),
    Fault(
        "38b-biases-of-transposed-experts-get-no-gradient",
        sentence="The biases of experts that store transposed weights get no gradient.",
        tests=[
            "tests/te_integration/experts/test_hugging_face_experts.py::test_results_and_gradients_of_several_microbatches[gpt_oss]",
        ],
        changes=[
            Change(
                "maingrad.te_integration.experts.fused_grouped_linear",
                "_bias_grads",
                "if True in needs_db:",
                "if True in needs_db and not ctx.use.transposed:",
            ),
        ],
    ),
    Fault(
        "38c-frozen-layers-count-as-fused",
        sentence="The share of fused FLOPs counts frozen layers, which have no weight gradient.",
        tests=[
            "tests/te_integration/experts/test_hugging_face_experts.py::test_how_many_experts_a_token_goes_to",
        ],
        changes=[
            Change(
                "maingrad.te_integration.conversion.report",
                "Conversion.of",
                "work = weight.numel() * _share_of_tokens(module) * weight.requires_grad",
                "work = weight.numel() * _share_of_tokens(module)",
            ),
        ],
    ),
]
