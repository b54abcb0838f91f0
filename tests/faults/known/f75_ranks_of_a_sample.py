"""Ranks that compute one sample together: exchanges, parts of a GPT, what ``maingrad train`` gives each of them."""

from fault import Change, Fault

EXCHANGES = "tests/launch/parallelizing/test_exchanges.py::"
CUT = "tests/launch/model/test_cut_gpt.py::"
TRAIN = "tests/launch/training/test_mesh.py::"
SAME = TRAIN + "test_ranks_that_share_samples_train_the_same_model"
PLAN = "tests/launch/plan/"
OF_PARTS = CUT + "test_losses_and_gradients_are_those_of_one_rank"

FAULTS = [
    Fault(
        "75a-gradients-stay-where-they-are",
        sentence="Sequences are exchanged for heads in forward, and their gradients not in backward.",
        tests=[EXCHANGES + "test_ulysses_is_attention_over_whole_sequences"],
        changes=[
            Change(
                "maingrad.launch.parallelizing.exchanges",
                "_Exchange.backward",
                "return _exchange(dy, ctx.group), None",
                "return dy, None",
            )
        ],
    ),
    Fault(
        "75b-words-of-other-ranks-are-embedded",
        sentence="Tensor-parallel ranks add rows of their own for words that another rank has.",
        tests=[OF_PARTS],
        changes=[
            Change(
                "maingrad.launch.model.gpt",
                "GPT._embedded",
                ".masked_fill(((own < 0) | (own >= rows))[..., None], 0.0)",
                "",
            ),
        ],
    ),
    Fault(
        "75c-heads-get-other-heads-keys",
        sentence="Copies of key and value heads are in another order than the query heads that they serve.",
        tests=[EXCHANGES + "test_ulysses_is_attention_over_whole_sequences"],
        changes=[
            Change(
                "maingrad.launch.parallelizing.exchanges",
                "ulysses",
                "k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)",
                "k, v = k.repeat(1, copies, 1, 1), v.repeat(1, copies, 1, 1)",
            )
        ],
    ),
    Fault(
        "75d-every-part-begins-at-the-first-place",
        sentence="The rotary positions of a part of a sequence are those of the first part.",
        tests=[OF_PARTS],
        changes=[
            Change(
                "maingrad.launch.model.gpt",
                "GPT.forward",
                "self.context.own(table[:length], 0)",
                "table[: tokens.shape[1]]",
            )
        ],
    ),
    Fault(
        "75e-queries-and-keys-are-cut-as-one",
        sentence="The packed weight of queries, keys and values is cut once: a rank has queries alone.",
        tests=[OF_PARTS],
        changes=[
            Change(
                "maingrad.launch.model.cut_gpt",
                "cut_gpt",
                'cut(module.qkv, "column", module.split)',
                'cut(module.qkv, "column", [sum(module.split)])',
            )
        ],
    ),
    Fault(
        "75f-uneven-parts-of-a-vocabulary-overlap",
        sentence="Parts of a vocabulary that does not divide begin where even ones would.",
        tests=[OF_PARTS],
        changes=[
            Change(
                "maingrad.launch.model.cut_gpt", "cut_gpt", "-(-model.vocab_size // size)", "(model.vocab_size // size)"
            )
        ],
    ),
    Fault(
        "75g-masks-of-dropout-are-equal-in-all-heads",
        sentence="Tensor-parallel ranks draw the same masks for their heads, and for their parts of a sequence.",
        tests=[TRAIN + "test_each_rank_draws_for_its_heads_and_tokens"],
        changes=[
            Change(
                "maingrad.launch.training.train",
                "Trainer._step",
                "[settings.seed, step, self.runtime.rank]",
                "[settings.seed, step, self.runtime.loss_rank]",
            )
        ],
    ),
    Fault(
        "75h-no-word-is-said-of-dropout-on-what-every-rank-has",
        sentence="Tensor-parallel ranks drop other activations of those that each of them computes whole.",
        tests=["tests/launch/config/test_mesh_table.py::test_what_cannot_be_cut_is_refused"],
        changes=[
            Change(
                "maingrad.launch.config.run",
                "Config.__post_init__",
                "same and model.dropout",
                "False and model.dropout",
            )
        ],
    ),
    Fault(
        "75i-parts-of-sequences-weigh-too-little",
        sentence="Shares of counted targets are multiplied by the ranks with other sequences, and context-parallel ranks "
        "average too.",
        tests=[SAME],
        changes=[
            Change(
                "maingrad.launch.training.train",
                "Trainer._document_arguments",
                "self.runtime.loss_ranks /",
                "self.runtime.data_ranks /",
            )
        ],
    ),
    Fault(
        "75j-ranks-of-a-sample-read-different-samples",
        sentence="Ranks that compute one sample together read different ones.",
        tests=[SAME],
        changes=[
            Change(
                "maingrad.launch.training.train",
                "Trainer._batch",
                "(microbatch * self.runtime.data_ranks + self.runtime.data_rank)",
                "(microbatch * self.runtime.data_ranks + self.runtime.rank % self.runtime.data_ranks)",
            )
        ],
    ),
    Fault(
        "75k-the-rest-of-a-sequence-is-not-read",
        sentence="All context-parallel ranks take the targets of the first part of the sequences.",
        tests=[SAME],
        changes=[
            Change(
                "maingrad.launch.training.train",
                "Trainer._own_part",
                "targets=own(batch.targets, 1)",
                "targets=batch.targets.chunk(self.runtime.context.size, 1)[0]",
            )
        ],
    ),
    Fault(
        "75l-verify-gives-all-ranks-the-same-tokens",
        sentence="verify compares context-parallel ranks that have one part of the tokens, twice.",
        tests=["tests/launch/verification/test_ranks_of_a_row.py::test_right_plans_are_right"],
        changes=[
            Change(
                "maingrad.launch.verification.batches",
                "part_of_tokens",
                "each.chunk(parts, 1)[part]",
                "each.chunk(parts, 1)[0]",
            )
        ],
    ),
    Fault(
        "75m-copies-of-heads-are-not-planned",
        sentence="The planned bytes of attention's exchanges lack the copies of key and value heads.",
        tests=[PLAN + "test_exchanged.py::test_what_ranks_of_a_sample_send_is_planned"],
        changes=[
            Change(
                "maingrad.launch.plan.exchanged",
                "_over_cp",
                "math.lcm(model.num_kv_heads // config.mesh.tp, cp)",
                "model.num_kv_heads // config.mesh.tp",
            )
        ],
    ),
    Fault(
        "75n-copies-of-parameters-are-planned-on-too-few-ranks",
        sentence="The plan shards what is not cut over the data-parallel ranks alone.",
        tests=[PLAN + "test_plan.py::test_plan_of_tensor_parallel_ranks_is_what_training_allocates"],
        changes=[
            Change(
                "maingrad.launch.plan.units", "_buckets", "copies = inner_size * config.mesh.tp", "copies = inner_size"
            )
        ],
    ),
    Fault(
        "75u-the-plan-counts-all-shards-of-copies",
        sentence="The plan has each rank send all shards of what is not cut, and not those of its own column.",
        tests=[PLAN + "test_plan.py::test_plan_of_tensor_parallel_ranks_is_what_training_allocates"],
        changes=[Change("maingrad.launch.plan.units", "_buckets", "config.mesh.tp if layout", "1 if layout")],
    ),
    Fault(
        "75o-a-slice-is-compared-with-the-first-rows",
        sentence="verify compares a rank's columns with the first elements of the whole parameter.",
        tests=["tests/launch/verification/test_ranks_of_a_row.py::test_right_plans_are_right"],
        changes=[Change("maingrad.launch.verification.ways", "_in_whole", "held.dim is None", "True")],
    ),
    Fault(
        "75p-a-norms-gradient-is-one-ranks-part",
        sentence="Under sequence parallelism gradients of norms are averaged, and not summed, over tensor-parallel ranks.",
        tests=[OF_PARTS, SAME],
        changes=[Change("maingrad.launch.model.cut_gpt", "cut_gpt", '"partial")', '"dense")')],
    ),
    Fault(
        "75q-a-target-is-looked-up-on-one-rank",
        sentence="The logit of a target is taken from this rank's words alone.",
        tests=[OF_PARTS],
        changes=[
            Change("maingrad.te_integration.head.over_ranks", "cross_entropy_over_ranks", "- sums[1]", "- of_target")
        ],
    ),
    Fault(
        "75r-the-last-target-is-looked-for-in-one-part",
        sentence="What lies behind the last target of a rank's part counts as padding, and is a prompt of the next rank's.",
        tests=[CUT + "test_a_prompt_may_be_on_an_earlier_rank"],
        changes=[
            Change(
                "maingrad.launch.model.gpt",
                "GPT.forward",
                "find_padding(targets, self.context)",
                "find_padding(targets)",
            )
        ],
    ),
    Fault(
        "75s-another-ranks-target-is-the-first-class",
        sentence="A head of a part of the classes takes targets of other ranks for its first class.",
        tests=[OF_PARTS],
        changes=[
            Change(
                "maingrad.te_integration.head.over_ranks",
                "cross_entropy_over_ranks",
                "masked_fill(elsewhere, 0.0)",
                "masked_fill(elsewhere, 0.0) + logits[:, 0] * elsewhere",
            )
        ],
    ),
    Fault(
        "75t-the-back-of-a-ring-is-in-another-order",
        sentence="In a ring the first rank has the middle of a sequence beside its front, and not the end.",
        tests=[EXCHANGES + "test_a_ring_is_causal_attention_over_whole_sequences"],
        changes=[
            Change(
                "maingrad.launch.parallelizing.exchanges",
                "ContextRanks.own",
                "parts[-1 - rank]",
                "parts[rank + self.size]",
            )
        ],
    ),
]
