"""Checkpoints of models that tensor-parallel ranks hold together."""

from fault import Change, Fault

TESTS = "tests/ddp/checkpoint/test_tensor_parallel.py::"
BOXES = "maingrad.ddp.checkpoint.files.boxes"
SOURCE = "maingrad.ddp.checkpoint.source"
CALLS = "maingrad.ddp.checkpoint.checkpoint"

FAULTS = [
    Fault(
        "73a-columns-are-taken-for-rows",
        sentence="A rank's columns of a weight are stored as rows of the whole.",
        tests=[TESTS + "test_a_checkpoint_of_two_ranks_has_the_whole_parameters"],
        changes=[Change(BOXES, "_in_whole", "here.offsets, block.offsets", "here.offsets, block.offsets[::-1]")],
    ),
    Fault(
        "73b-packed-blocks-change-places",
        sentence="Gate and up, which are packed in one weight, are stored in the other's place.",
        tests=[TESTS + "test_a_checkpoint_of_two_ranks_has_the_whole_parameters"],
        changes=[Change(BOXES, "_in_whole", "for block in cut.boxes:", "for block in cut.boxes[::-1]:")],
    ),
    Fault(
        "73c-each-rank-writes-its-copy",
        sentence="Every tensor-parallel rank writes the parameters of which all have copies.",
        tests=[TESTS + "test_each_element_is_written_once[ddp]"],
        changes=[Change(CALLS, "_list_saved", "if writers[part] == ranks.place}", "}")],
    ),
    Fault(
        "73d-slices-are-saved-apart",
        sentence="The ranks with other slices are no part of a save, and write into its folder at the same time.",
        tests=[TESTS + "test_slices_by_megatrons_marks"],
        changes=[
            Change(
                SOURCE,
                "CheckpointRanks.axes",
                "(self.grid.inner, self.tensor, self.pipeline, self.grid.outer)",
                "self.grid[:2]",
            )
        ],
    ),
    Fault(
        "73e-ranks-with-other-slices-have-one-place",
        sentence="Two ranks with other slices write to one file.",
        tests=[TESTS + "test_slices_by_megatrons_marks"],
        changes=[Change(SOURCE, "CheckpointRanks.place", "group.rank()", "(group is not self.tensor) * group.rank()")],
    ),
    Fault(
        "73f-a-parameter-of-one-rank-is-left-out",
        sentence="A parameter that only one of the ranks has is not saved, in its turn to be written by another.",
        tests=[TESTS + "test_ranks_that_do_not_fit_each_other_are_refused[a rank has a parameter that others lack]"],
        changes=[Change(CALLS, "_look_at", "if name not in tensors.buffers:", "if False:")],
    ),
    Fault(
        "73g-a-mark-among-known-slices-goes-unseen",
        sentence="A slice that a mark alone tells is saved as a whole parameter, because other slices are known.",
        tests=[TESTS + "test_a_slice_of_which_nobody_says_the_ranks_is_refused"],
        changes=[Change(CALLS, "save_checkpoint", "if name not in source.slices", "if not source.slices")],
    ),
    Fault(
        "73h-a-rank-reads-the-first-ones-slice",
        sentence="A load gives each tensor-parallel rank the elements at its own offsets, which are the first rank's.",
        tests=[TESTS + "test_training_goes_on_at_another_degree"],
        changes=[
            Change(
                CALLS,
                "_parts_to_fill",
                "parts_of_range(name, held.shape, held.start, wanted, slices.get(name))",
                "parts_of_range(name, held.shape, held.start, wanted)",
            )
        ],
    ),
    Fault(
        "73i-experts-stay-on-their-ranks",
        sentence="Experts that are known as slices of a parameter of all experts are stored for each set of ranks.",
        tests=[TESTS + "test_experts_move_between_ranks"],
        changes=[
            Change(
                SOURCE,
                "ModelTensors.unplaced_experts",
                "{name for name in self.experts if self.tied.get(name, name) not in self.slices}",
                "self.experts",
            )
        ],
    ),
    Fault(
        "73j-a-set-of-experts-is-taken-for-all",
        sentence="Experts that an earlier checkpoint has as a set are looked for among all experts.",
        tests=[TESTS + "test_sets_of_experts_of_an_earlier_checkpoint_are_read"],
        changes=[Change(CALLS, "_with_sets", "if stored.get(name, name) == name", "if True")],
    ),
]
