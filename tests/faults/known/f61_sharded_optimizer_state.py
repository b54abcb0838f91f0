"""Faults of compact optimizer state, and of state that lies on the host, under ``fully_shard``."""

from fault import Change, Fault

COMPACT = "tests/fsdp/state/test_compact_state.py"
HELD = "maingrad.fsdp.state.sharded_adam"
ADAM = "maingrad.fsdp.state.sharded_adam"
BITS = f"{COMPACT}::test_masters_have_the_bits_of_fp32_masters"

FAULTS = [
    Fault(
        "61a-one-write-is-a-write-to-all",
        sentence="All shards of a bucket have one version: a write to one parameter takes the remainders of all others.",
        tests=[BITS],
        changes=[
            Change(
                "maingrad.fsdp.tensors.parameter",
                "make_pair",
                "make_sharded(shard[offset : offset + part.numel].data, info",
                "make_sharded(shard[offset : offset + part.numel], info",
            ),
        ],
    ),
    Fault(
        "61b-a-written-shard-keeps-its-remainder",
        sentence="A program writes a parameter, and the master is the new shard with the old remainder.",
        tests=[BITS, f"{COMPACT}::test_loaded_weights_are_masters"],
        changes=[Change(HELD, "HeldState.forget_remainder", "if self.is_compact:", "if False:")],
    ),
    Fault(
        "61c-random-bits-count-from-the-shard",
        sentence="Moments are rounded by where elements lie in a shard: the number of ranks changes training.",
        tests=[f"{COMPACT}::test_ranks_and_placements_change_no_bit_of_bf16_moments"],
        changes=[
            Change(
                ADAM,
                "_ShardedAdam._row",
                "first=param.shard.start if isinstance(param, ShardedParameter) else 0",
                "first=0",
            ),
        ],
    ),
    Fault(
        "61d-loaded-masters-lose-their-remainders",
        sentence="A load takes the shards of a state dict or checkpoint, and not the 16 bits that the masters have more.",
        tests=[
            f"{COMPACT}::test_a_state_dict_is_a_copy_in_full_form",
            f"{COMPACT}::test_training_goes_on_on_other_ranks_with_the_same_bits",
        ],
        changes=[
            Change(HELD, "HeldState.take", "self.tensors[REMAINDER].view(-1).copy_(remainder)", "remainder.zero_()"),
        ],
    ),
    Fault(
        "61e-state-stays-on-the-device",
        sentence="A bucket's updated state is not copied back to the host: each step begins with an earlier one's.",
        tests=[f"{COMPACT}::test_state_on_the_host_has_the_same_bits"],
        changes=[
            Change(
                "maingrad.ddp.optimizer.host_state",
                "HostState.visits",
                "self._to_host.start(pairs)",
                "self._to_host.start([])",
            ),
        ],
    ),
    Fault(
        "61f-gradients-of-bf16-shards-are-rounded",
        sentence="fp32 sums of gradients are rounded to the shards' dtype before the step.",
        tests=[BITS, f"{COMPACT}::test_twelve_bytes_an_element"],
        changes=[
            Change("maingrad.fsdp.unit.grad_shard", "GradShard._make_sums", " and not self._shows_sums", ""),
        ],
    ),
    Fault(
        "61h-torchs-class-keeps-masters-as-state",
        sentence="torch's AdamW loads compact state: its shards stay rounded, and the masters lie beside them for ever.",
        tests=[f"{COMPACT}::test_each_form_reads_the_state_dicts_of_the_others"],
        changes=[
            Change(
                "maingrad.fsdp.state.optimizer_state",
                "_to_shards",
                "if MASTER in known:",
                "if False:",
            ),
        ],
    ),
    Fault(
        "61i-gradients-outlive-their-step",
        sentence="The update keeps the gradients that it was made with, whose memory activations were to use.",
        tests=["tests/kernels/test_optimizer.py::test_gradients_may_move_and_are_not_kept[reference-cpu]"],
        changes=[
            Change(
                "maingrad.kernels.optimizer.flat_update",
                "FlatUpdate.__init__",
                "tuple(row._replace(grad=row.grad.new_empty(0)) for row in tensors)",
                "tuple(tensors)",
            ),
        ],
    ),
    Fault(
        "61j-moved-gradients-are-read-where-they-were",
        sentence="The table of an update keeps the addresses of an earlier step's gradients.",
        tests=["tests/kernels/test_optimizer.py::test_gradients_may_move_and_are_not_kept[launches-cpu]"],
        changes=[
            Change(
                "maingrad.kernels.optimizer.triton_update",
                "TritonUpdate.move_grads",
                "self._write_grads(first, len(grads), by)",
                "pass",
            ),
        ],
    ),
    Fault(
        "61k-random-bits-of-the-first-name",
        sentence="Random bits follow the names that parameters had before the first forward, where torch's functions step.",
        tests=[f"{COMPACT}::test_a_step_before_the_first_forward_changes_no_random_bits"],
        changes=[Change(ADAM, "_ShardedAdam._update_of", "_name_of(param), ", "")],
    ),
    Fault(
        "61l-a-load-of-the-same-values-is-a-write",
        sentence="torch's set_state_dict loads the model behind its optimizer, and all masters lose their remainders.",
        tests=[f"{COMPACT}::test_torchs_functions_load_the_model_behind_its_optimizer"],
        changes=[
            Change(ADAM, "_ShardedAdam.refresh_masters", " and not is_kept(param, known)", ""),
        ],
    ),
    Fault(
        "61m-every-load-is-of-the-same-values",
        sentence="Loaded weights keep the remainders of the weights before them.",
        tests=[
            f"{COMPACT}::test_torchs_functions_load_the_model_behind_its_optimizer",
            f"{COMPACT}::test_loaded_weights_are_masters",
        ],
        changes=[
            Change(
                "maingrad.fsdp.state.state_dict",
                "_before_loading",
                "if torch.equal(param, state_dict[key].to(param.device)):",
                "if True:",
            ),
        ],
    ),
]
