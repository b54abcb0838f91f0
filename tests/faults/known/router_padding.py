"""Router losses and experts that count padding."""

from fault import Change, Fault

_TEST = "tests/launch/model/test_padding.py"

FAULTS = [
    Fault(
        "51a-router-losses-count-padding",
        sentence="Means over all tokens of a row: a document's router losses change with the length of its row.",
        tests=[f"{_TEST}::test_a_document_in_rows_of_12_and_96"],
        changes=[Change("maingrad.launch.model.moe", "_token_mean", "if is_padding is None:", "if True:")],
    ),
    Fault(
        "51b-padding-goes-to-experts",
        sentence="Padding is routed like tokens: experts compute its rows, and the balance loss counts them.",
        tests=[f"{_TEST}::test_experts_compute_no_row_of_padding"],
        changes=[
            Change("maingrad.launch.model.moe", "MixtureOfExperts.forward", "if is_padding is not None:", "if False:")
        ],
    ),
    Fault(
        "51c-the-auxiliary-loss-of-hugging-face-counts-padding",
        sentence="The auxiliary loss is the one that the model computed without an attention_mask.",
        tests=[f"{_TEST}::test_auxiliary_losses_of_transformers_leave_out_padding[mixtral]"],
        changes=[
            Change(
                "maingrad.launch.model.hugging_face",
                "HuggingFaceModel.forward",
                '"attention_mask": mask, ',
                "",
            )
        ],
    ),
    Fault(
        "51d-a-prompt-counts-as-padding",
        sentence="Every place without a target is taken for padding, also a prompt, which later tokens attend to.",
        tests=[f"{_TEST}::test_a_prompt_without_targets_is_no_padding"],
        changes=[Change("maingrad.launch.model.loss", "find_padding", "return places > last", "return targets < 0")],
    ),
]
