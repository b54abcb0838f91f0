"""Tensor-parallel ranks of a wrapper: who reduces what, by which factor, and what covers everyone."""

from fault import Change, Fault

FOLDER = "tests/ddp/tensor_parallel/"
SUMS = FOLDER + "test_sums.py::test_a_cut_model_has_the_gradients_of_a_plain_one"
WHOLE = FOLDER + "test_whole_model.py::"
KINDS = FOLDER + "test_kinds.py::"
COPIES = FOLDER + "test_copies.py::"
SHARED = FOLDER + "test_shared_embedding.py::"

REDUCTION = "maingrad.ddp.collectives.reduction"
ITERATION = "maingrad.ddp.wrapper.iteration"

FAULTS = [
    Fault(
        "71a-parts-are-averaged",
        sentence="Parts of the gradient of a norm under sequence parallelism are averaged over tensor-parallel ranks.",
        tests=[SUMS],
        changes=[Change(REDUCTION, "make_reductions", '("dense", "mean")', '("dense", "mean", "partial")')],
    ),
    Fault(
        "71b-slices-are-divided-by-everyone",
        sentence="Gradients of slices are divided by the number of all ranks, though only some have added to them.",
        tests=[SUMS],
        changes=[Change(REDUCTION, "make_reductions", "else averaging", 'else grids["dense"]')],
    ),
    Fault(
        "71c-copies-count-once-for-each-tensor-parallel-rank",
        sentence="The norm counts parameters that all ranks hold once for each tensor-parallel rank.",
        tests=[SUMS],
        changes=[
            Change(
                "maingrad.ddp.optimizer.grad_norm",
                "global_grad_norm",
                "replicas = model.reductions[grid_name].num_replicas",
                'replicas = min(model.reductions[grid_name].num_replicas, model.grids["slice"].size)',
            )
        ],
    ),
    Fault(
        "71d-tokens-are-summed-over-tensor-parallel-ranks",
        sentence="Tokens that tensor-parallel ranks share count once for each of them.",
        tests=[WHOLE + "test_tokens_are_counted_once"],
        changes=[
            Change(
                ITERATION,
                "BucketIteration._reduce_all",
                'self._num_tokens, self.grids["slice"]',
                'self._num_tokens, self.grids["dense"]',
            )
        ],
    ),
    Fault(
        "71e-a-scaler-looks-at-its-own-slices",
        sentence="Tensor-parallel ranks look for Inf in their own slices, and skip different steps.",
        tests=[WHOLE + "test_all_ranks_skip_a_step_for_one_slices_inf"],
        changes=[
            Change(
                "maingrad.ddp.optimizer.distributed_optimizer",
                "DistributedOptimizer.unscale_grads",
                'self.model.grids["dense"].sum(found_inf)',
                'self.model.grids["slice"].sum(found_inf)',
            )
        ],
    ),
    Fault(
        "71f-nan-is-raised-on-some-ranks",
        sentence="NaN in a slice is raised where the slice is, and other tensor-parallel ranks go on.",
        tests=[WHOLE + "test_nan_in_one_slice_is_raised_on_all_ranks"],
        changes=[
            Change(
                ITERATION,
                "BucketIteration._reduce_all",
                'raise_where_found(self.grids["dense"]',
                'raise_where_found(self.grids["slice"]',
            )
        ],
    ),
    Fault(
        "71g-norms-of-grad-are-of-ones-own-slices",
        sentence="torch's clip_grad_norm_ covers this rank's slices alone.",
        tests=[WHOLE + "test_every_norm_is_of_the_whole_model"],
        changes=[
            Change(
                "maingrad.ddp.wrapper.data_parallel",
                "DistributedDataParallel._part",
                '"", self.grids["dense"]',
                '"", self.grids["slice"]',
            )
        ],
    ),
    Fault(
        "71h-uneven-slices-close-buckets-elsewhere",
        sentence="A rank with fewer rows closes a bucket at another parameter, and launches in another order.",
        tests=[FOLDER + "test_sums.py::test_an_uneven_cut"],
        changes=[
            Change(
                "maingrad.ddp.plan.owned_params",
                "plan_model",
                "shape=largest.get(name, held[name]),",
                "shape=held[name],",
            )
        ],
    ),
    Fault(
        "71i-an-unmarked-slice-is-overwritten",
        sentence="init_sync gives all tensor-parallel ranks the first one's slice of a parameter without a mark.",
        tests=[KINDS + "test_refusals_name_the_remedy"],
        changes=[
            Change("maingrad.ddp.wrapper.setup_checks", "check_tensor_ranks", "copies if compare else ()", "copies[:0]")
        ],
    ),
    Fault(
        "71j-buffers-are-copied-from-other-slices",
        sentence="A buffer that belongs to a slice gets the first tensor-parallel rank's values.",
        tests=[KINDS + "test_buffers_are_copied_among_ranks_with_the_same_slices"],
        changes=[
            Change(
                "maingrad.ddp.plan.owned_params",
                "find_tensors",
                'others = "dense" if tensor_ranks is None or tensor_ranks.size == 1 else "slice"',
                'others = "dense"',
            )
        ],
    ),
    Fault(
        "71k-gradients-to-be-averaged-are-summed",
        sentence="average_gradients_across_tp_domain is taken for sequence_parallel.",
        tests=[KINDS + "test_marks_say_whether_parts_are_summed_or_averaged"],
        changes=[
            Change(
                "maingrad.ddp.plan.model_slice",
                "slice_of_marks",
                'grad = "mean"',
                'grad = "partial"',
            )
        ],
    ),
    Fault(
        "71l-stages-keep-their-parts-of-a-shared-embedding",
        sentence="Copies of an embedding on two stages train on their own parts of its gradient.",
        tests=[SHARED + "test_copies_train_as_one_weight"],
        changes=[Change(ITERATION, "BucketIteration._reduce_all", "self.shared_embedding.sum()", "pass")],
    ),
    Fault(
        "71m-a-shared-embedding-counts-twice",
        sentence="The norm over stages counts an embedding once for each stage with a copy.",
        tests=[SHARED + "test_copies_train_as_one_weight"],
        changes=[
            Change(
                "maingrad.ddp.optimizer.grad_norm",
                "global_grad_norm",
                "by_bucket[place] /= shared.num_copies",
                "pass",
            )
        ],
    ),
    Fault(
        "71n-context-parallel-ranks-share-no-shards",
        sentence="Of a mesh (replicate, shard, cp) the ranks of cp alone are the inner axis, and others are left out.",
        tests=["tests/ddp/collectives/test_rank_grid.py::test_a_grid_has_its_ranks_inside_and_across"],
        changes=[
            Change(
                "maingrad.ddp.collectives.rank_grid",
                "_groups_of_mesh",
                "mesh = in_two_dims(mesh)\nif mesh.ndim not in (1, 2):",
                "if mesh.ndim not in (1, 2, 3):",
            )
        ],
    ),
    Fault(
        "71o-megatron-sums-once-more",
        sentence="Megatron-core's finalize_model_grads finds the marks, and sums gradients that were summed.",
        tests=[KINDS + "test_marks_that_are_answered_for_are_taken"],
        changes=[Change("maingrad.ddp.plan.owned_params", "take_marks", "setattr(param, mark, False)", "pass")],
    ),
    Fault(
        "71p-a-stock-muon-takes-slices-for-matrices",
        sentence="torch.optim.Muon orthogonalises each rank's slice of a matrix alone.",
        tests=[KINDS + "test_a_stock_muon_over_slices_is_refused"],
        changes=[Change("maingrad.ddp.torch_grads.optimizer", "_begin", "if per_parameter:", "if False:")],
    ),
    Fault(
        "71q-copies-are-averaged-over-everyone",
        sentence="Copies with equal gradients are reduced over tensor-parallel ranks too, tp times the bytes.",
        tests=[COPIES + "test_each_rank_reduces_its_shard_over_the_ranks_with_other_data"],
        changes=[Change(REDUCTION, "make_reductions", 'grids["dense"].size > averaging.size', "False")],
    ),
    Fault(
        "71r-a-rank-gets-another-ones-shard-of-copies",
        sentence="Ranks of each tensor-parallel index reduce the first shards, whoever updates them.",
        tests=[COPIES + "test_each_rank_reduces_its_shard_over_the_ranks_with_other_data"],
        changes=[
            Change(
                REDUCTION,
                "CopiesReduction.__init__",
                "[ranks.index(rank) for rank in column.grid.ranks]",
                "[index for index, _ in enumerate(column.grid.ranks)]",
            )
        ],
    ),
    Fault(
        "71s-released-copies-keep-the-last-sums",
        sentence="Without other data-parallel ranks the shard of a released bucket never gets this rank's gradient.",
        tests=[COPIES + "test_each_rank_reduces_its_shard_over_the_ranks_with_other_data"],
        changes=[Change(REDUCTION, "CopiesReduction.inside", "return into.copy_(mine)", "return mine")],
    ),
    Fault(
        "71t-gradients-to-be-averaged-are-taken-for-equal",
        sentence="average_gradients_across_tp_domain is ignored where each rank updates a shard of a copy.",
        tests=[COPIES + "test_marks_ask_for_the_mean_or_the_sum"],
        changes=[Change("maingrad.ddp.plan.model_slice", "slice_of_marks", 'grad = "mean"', 'grad = "dense"')],
    ),
    Fault(
        "71u-instances-sum-what-they-should-average",
        sentence="Where only ranks across instances have other data, NCCL sums their copies' gradients undivided.",
        tests=[COPIES + "test_a_collective_may_divide"],
        changes=[
            Change(
                REDUCTION,
                "CopiesReduction.across",
                "self._column.across(mine)",
                "GradReduction.across(self, mine)",
            )
        ],
    ),
    Fault(
        "71v-the-timeline-counts-all-shards-of-copies",
        sentence="A timeline says that whole buckets of copies were sent, where each rank sends its column's shards.",
        tests=[COPIES + "test_no_gradient_of_a_copy_is_sent_between_tensor_parallel_ranks"],
        changes=[
            Change(
                REDUCTION,
                "CopiesReduction.wire_nbytes",
                "numel // self.grid.inner_size * len(self._shards)",
                "numel",
            )
        ],
    ),
]
