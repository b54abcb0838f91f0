"""Slices of tensor parallelism under ``fully_shard``."""

from fault import Change, Fault

IN_USE = "tests/fsdp/tensor_parallel/test_slices_in_use.py::"
STATE = "tests/fsdp/tensor_parallel/test_slices_state.py::"
TRAINS = "tests/fsdp/tensor_parallel/test_slices.py::test_gradients_norms_and_steps_are_a_plain_models"
STAY = f"{IN_USE}test_gradients_that_stay_in_grad_are_not_summed_again[zero3]"

FAULTS = [
    Fault(
        "74a-nobody-sums-the-parts-of-a-shard",
        sentence="Copies on tensor-parallel ranks train on this rank's part of the gradient, and drift apart.",
        tests=[STAY],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds._finish",
                "if self._everyone.tensor is not None:",
                "if False:",
            )
        ],
    ),
    Fault(
        "74b-a-part-counts-as-a-whole-gradient",
        sentence="Parts of a gradient are averaged over tensor-parallel ranks, and not summed.",
        tests=[STAY],
        changes=[
            Change("maingrad.fsdp.unit.bucket", "ShardedBucket.partial_grads", 'found.grad == "partial"', "False")
        ],
    ),
    Fault(
        "74c-copies-are-summed-again",
        sentence="What an earlier iteration has summed over tensor-parallel ranks, and left in .grad, is summed again.",
        tests=[STAY],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds._make_copies_alike",
                "together.div_(group.size())",
                "together",
            ),
            Change("maingrad.fsdp.iteration.rounds", "GradRounds._count_parts", "float(group.size())", "1.0"),
        ],
    ),
    Fault(
        "74d-copies-count-several-times-in-a-norm",
        sentence="Each tensor-parallel rank adds the squares of its copies, and steps are clipped too much.",
        tests=[f"{IN_USE}test_uneven_slices_train"],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.over_ranks",
                "norms",
                "shard.num_replicas * shard.copies",
                "shard.num_replicas",
            )
        ],
    ),
    Fault(
        "74e-norms-cover-the-data-parallel-ranks-alone",
        sentence="Each tensor-parallel rank clips by the norm of its own slices, and skips steps by itself.",
        tests=[f"{IN_USE}test_a_scaler_skips_on_all_ranks_where_one_slice_overflows"],
        changes=[
            Change(
                "maingrad.fsdp.iteration.connect",
                "connect_units",
                "ranks_of_norms(units, model_ranks)",
                "ranks_of_norms(units, units[0].grid)",
            )
        ],
    ),
    Fault(
        "74f-uneven-slices-move-copies",
        sentence="Copies lie behind slices of other sizes, so that ranks average different elements of them.",
        tests=[f"{IN_USE}test_uneven_slices_train"],
        changes=[
            Change(
                "maingrad.fsdp.unit.plan",
                "plan_unit",
                "found is not None and found.is_uneven",
                "False and found.is_uneven",
            )
        ],
    ),
    Fault(
        "74g-copies-begin-apart",
        sentence="Tensor-parallel ranks keep the values that each has drawn for parameters that all hold.",
        tests=[f"{IN_USE}test_copies_that_begin_apart_are_refused"],
        changes=[
            Change(
                "maingrad.fsdp.unit_checks",
                "check_copies_of",
                "found is not None and found.dim is None",
                "False",
            )
        ],
    ),
    Fault(
        "74h-slices-are-averaged-with-other-slices",
        sentence="The data-parallel mesh is forgotten, and gradients of different slices are averaged.",
        tests=[f"{IN_USE}test_a_mesh_with_ranks_of_other_slices_is_refused"],
        changes=[Change("maingrad.fsdp.unit_checks", "_set_slices", "if both:", "if False:")],
    ),
    Fault(
        "74i-ranks-differ-in-what-is-partial",
        sentence="One tensor-parallel rank takes a part of a gradient for the whole, and nobody compares.",
        tests=[f"{IN_USE}test_ranks_with_other_slices_compare_what_they_hold"],
        changes=[
            Change(
                "maingrad.fsdp.unit_checks",
                "compare_units",
                "parts.grid._replace(tensor=tensor)",
                "parts.grid",
            )
        ],
    ),
    Fault(
        "74j-rows-of-slices-are-rows-of-the-whole",
        sentence="A state dict says that data-parallel ranks were cut first, and every load mixes rows up.",
        tests=[f"{STATE}test_a_state_dict_has_the_placements_of_fsdp2"],
        changes=[
            Change(
                "maingrad.fsdp.state.state_dict",
                "_placements",
                "_StridedShard(0, split_factor=mesh.size(mesh.ndim - 1))",
                "Shard(0)",
            )
        ],
    ),
    Fault(
        "74k-packed-slices-are-saved-as-one-block",
        sentence="Gate and up of a rank are saved as consecutive rows of the whole parameter.",
        tests=[f"{STATE}test_slices_that_no_placement_tells_are_rows_of_the_whole"],
        changes=[
            Change(
                "maingrad.fsdp.state.state_dict",
                "_slice_of",
                "len(found.boxes) > 1 or found.is_uneven",
                "found.is_uneven",
            )
        ],
    ),
    Fault(
        "74l-muon-takes-a-slice-for-a-matrix",
        sentence="Each rank orthogonalises its slice, which is another update than that of the whole matrix.",
        tests=[f"{IN_USE}test_muon_refuses_slices_by_name"],
        changes=[
            Change(
                "maingrad.fsdp.state.sharded_muon", "ShardedMuon._check_group", "if param.shard.is_cut:", "if False:"
            )
        ],
    ),
    Fault(
        "74m-a-state-dict-of-whole-parameters-has-slices",
        sentence="Within unsharded(), a state dict has this rank's slices where it had DTensors before.",
        tests=["tests/fsdp/tensor_parallel/test_parallelized.py::test_dcp_resumes_on_other_ranks"],
        changes=[
            Change(
                "maingrad.fsdp.state.state_dict",
                "_after_saving",
                "state_dict.get(prefix + name, param).detach()",
                "param.detach()",
            )
        ],
    ),
    Fault(
        "74n-equal-gradients-are-averaged",
        sentence="Copies with equal gradients are summed and divided, for twice the bytes.",
        tests=[f"{IN_USE}test_each_rank_gives_a_part_of_equal_gradients"],
        changes=[Change("maingrad.fsdp.iteration.rounds", "GradRounds._make_copies_alike", "if equal:", "if False:")],
    ),
    Fault(
        "74o-gradients-to-be-averaged-are-taken-for-equal",
        sentence="average_gradients_across_tp_domain is ignored, and each rank gives a part.",
        tests=[f"{IN_USE}test_each_rank_gives_a_part_of_equal_gradients"],
        changes=[Change("maingrad.fsdp.unit.grad_shard", "GradShard.copies", 'found.grad == "dense"', "True")],
    ),
    Fault(
        "74p-slices-of-one-shape-are-taken-for-the-same",
        sentence="Data-parallel ranks hold other slices of one shape, and average them.",
        tests=[f"{IN_USE}test_data_parallel_ranks_compare_which_slices_they_hold"],
        changes=[Change("maingrad.ddp.wrapper.setup_checks", "check_same_slices", "if cut:", "if False:")],
    ),
]
