"""Models that torch's tensor parallelism has cut."""

from fault import Change, Fault

RULES = "tests/ddp/tensor_parallel/test_rules.py::"
LLAMA = "tests/ddp/tensor_parallel/test_llama.py::"
LOCALIZE = "tests/ddp/tensor_parallel/test_localize.py::"
TRANSFORMERS = "tests/ddp/tensor_parallel/test_transformers.py::"
SHARED = "tests/ddp/tensor_parallel/test_shared_sums.py::"
DENSE = "maingrad.te_integration.dense."
ROOM = "maingrad.ddp.plan.tensor_parallel."

FAULTS = [
    Fault(
        "72a-the-input-of-columns-gets-one-ranks-gradient",
        sentence="The gradient of a whole input that columns multiply is a sum over the ranks, and counts as the sum.",
        tests=[RULES + "test_a_rule_writes_each_microbatch_into_main_grad"],
        changes=[Change(ROOM + "products", "multiply", "to_local(x, Partial()), bias", "to_local(x, at), bias")],
    ),
    Fault(
        "72b-each-rank-adds-the-bias-of-rows",
        sentence="The sum over the ranks of a product of rows has its bias once for each rank.",
        tests=[RULES + "test_a_rule_writes_each_microbatch_into_main_grad"],
        changes=[Change(ROOM + "products", "multiply", "bias * float(mesh.get_local_rank() == 0)", "bias")],
    ),
    Fault(
        "72c-the-whole-is-taken-to-be-as-long-on-each-rank",
        sentence="A local tensor of an uneven cut becomes a DTensor of another whole shape.",
        tests=[RULES + "test_a_rule_writes_each_microbatch_into_main_grad"],
        changes=[Change(ROOM + "layouts", "Layout.dtensor", "run_check=False, **whole", "run_check=False")],
    ),
    Fault(
        "72d-equal-gradients-of-copies-count-once-for-each-rank",
        sentence="A copy's gradient, which each rank has whole, is summed over the ranks.",
        tests=[RULES + "test_any_other_placement_is_right_by_autograd"],
        changes=[
            Change(
                ROOM + "layouts",
                "_FromLocal.backward",
                "local if counts else torch.zeros_like(local)",
                "local",
            )
        ],
    ),
    Fault(
        "72e-each-rank-multiplies-all-rows-of-a-copy",
        sentence="A weight that all ranks have and an input that all have: each rank writes the whole gradient.",
        tests=[RULES + "test_a_rule_writes_each_microbatch_into_main_grad"],
        changes=[
            Change(
                ROOM + "products",
                "multiply",
                "_multiply_part(module, to_local(x, at), mesh)",
                "module.multiply_slice(to_local(x, at), bias)",
            )
        ],
    ),
    Fault(
        "72f-packed-blocks-are-one-cut",
        sentence="A slice of gate and up in one weight is taken for neighbouring rows.",
        tests=[RULES + "test_a_slice_says_which_elements_of_the_whole_it_is"],
        changes=[
            Change(
                ROOM + "layouts",
                "Layout.model_slice",
                'getattr(self.placement, "split_factor", 1)',
                "1",
            )
        ],
    ),
    Fault(
        "72g-transformers-sums-the-gradient-that-is-not-there",
        sentence="transformers' hook on norms of queries and keys stays, and finds no .grad.",
        tests=[TRANSFORMERS + "test_gradients_are_those_of_the_whole_model"],
        changes=[
            Change(
                ROOM + "hugging_face",
                "drop_grad_hooks",
                "hook.cell_contents = _dropped(mesh)",
                "pass",
            )
        ],
    ),
    Fault(
        "72h-nobody-sums-the-norms-of-queries-and-keys",
        sentence="The gradients of norms of cut heads are one rank's parts.",
        tests=[TRANSFORMERS + "test_gradients_are_those_of_the_whole_model"],
        changes=[Change(ROOM + "localize", "_mark_partial", 'group, "partial")', 'group, "dense")')],
    ),
    Fault(
        "72i-a-state-dict-has-slices",
        sentence="State dicts have this rank's slices under the names of whole parameters.",
        tests=[LLAMA + "test_state_dicts_have_dtensors_and_take_what_torch_saves"],
        changes=[
            Change(
                ROOM + "state_dict",
                "install_state_dict_hooks",
                "module.register_state_dict_post_hook(_after_saving)",
                "pass",
            )
        ],
    ),
    Fault(
        "72j-tied-dtensors-become-two-parameters",
        sentence="A DTensor that two modules have becomes a parameter in each.",
        tests=[LOCALIZE + "test_one_dtensor_of_two_modules_stays_one_parameter"],
        changes=[Change(ROOM + "localize", "_local_of", "getattr(tensor, REPLACED, None)", "None")],
    ),
    Fault(
        "72k-what-a-forward-assigns-is-lost",
        sentence="A buffer that a forward assigns is put back to what it was.",
        tests=[LOCALIZE + "test_frozen_parameters_and_buffers_become_local"],
        changes=[
            Change(ROOM + "forwards", "_shown", "if found is shown or found is None:", "if True:"),
        ],
    ),
    Fault(
        "72l-a-cut-head-computes-the-loss",
        sentence="A fused loss reads a head of which each rank has a slice of the classes.",
        tests=["tests/te_integration/tensor_parallel/test_conversion.py::test_a_head_that_is_cut_keeps_its_loss"],
        changes=[
            Change(
                "maingrad.te_integration.conversion.fused_loss",
                "why_no_fused_loss",
                "if is_one_slice(head.weight) or model_slice_of(head.weight) is not None:",
                "if False:",
            )
        ],
    ),
    Fault(
        "72m-a-plain-input-is-taken-for-the-ranks-part",
        sentence="A layer of slices multiplies a plain input, of which nobody has said what it is of the whole.",
        tests=[RULES + "test_a_plain_input_is_refused"],
        changes=[Change(ROOM + "products", "multiply", "if calls_inner_forward(module):", "if True:")],
    ),
    Fault(
        "72n-one-rank-refuses-alone",
        sentence="What one rank cannot make local is raised there alone, and its peers wait in the next collective.",
        tests=[LOCALIZE + "test_what_one_rank_refuses_is_raised_on_all"],
        changes=[
            Change(
                "maingrad.ddp.wrapper.setup_checks",
                "localize_on_each_rank",
                "run_on_all_ranks(make_local, axes",
                "run_on_all_ranks(make_local, []",
            )
        ],
    ),
    Fault(
        "72o-one-rank-refuses-a-unit-alone",
        sentence="Only the data-parallel ranks hear what a unit's rank cannot make local.",
        tests=[LOCALIZE + "test_what_one_rank_refuses_is_raised_on_all"],
        changes=[
            Change("maingrad.fsdp.fully_shard", "fully_shard", "grid._replace(tensor=tensor_ranks).axes", "grid.axes")
        ],
    ),
    Fault(
        "72p-what-others-add-to-a-shared-input-is-lost",
        sentence="The sum of a shared input's gradient has what the first product adds, and nothing of the others.",
        tests=[SHARED + "test_three_products_of_one_input_are_summed_once[True-False]"],
        changes=[Change(DENSE + "tensor_parallel", "_Columns.backward", "dx += each", "pass")],
    ),
    Fault(
        "72q-what-others-add-to-a-compiled-shared-input-is-lost",
        sentence="The same in compiled code.",
        tests=[SHARED + "test_three_products_of_one_input_are_summed_once[True-True]"],
        changes=[
            Change(
                DENSE + "compiled_linear",
                "_CompiledLinear.backward",
                "sum(of_others, input_grad(",
                "sum((), input_grad(",
            )
        ],
    ),
    Fault(
        "72r-another-input-is-taken-for-the-shared-one",
        sentence="Layers beside one another get the first one's input, whatever theirs is.",
        tests=[SHARED + "test_other_inputs_have_sums_of_their_own"],
        changes=[Change(ROOM + "products", "_multiply_columns", "shared.input is x", "shared.input is not None")],
    ),
    Fault(
        "72s-a-shared-input-outlives-its-forward",
        sentence="A layer keeps its input after the forward of its module, which has failed.",
        tests=[SHARED + "test_an_input_is_kept_for_the_forward_of_its_module_alone"],
        changes=[
            Change(
                ROOM + "products",
                "_forward_that_shares",
                "shared.is_open, shared.input, shared.handed_on = False, None, None",
                "pass",
            )
        ],
    ),
    Fault(
        "72t-an-input-is-handed-on-without-its-gradient",
        sentence="Layers share the input that one without gradients, as a recomputed one, has handed on.",
        tests=[SHARED + "test_layers_that_do_not_run_alike_sum_by_themselves[recomputed-True]"],
        changes=[
            Change(ROOM + "products", "_multiply_columns", "x.requires_grad and torch.is_grad_enabled() and ", "")
        ],
    ),
    Fault(
        "72u-an-input-is-handed-on-in-autocasts-dtype",
        sentence="A layer outside autocast gets the input that was cast for one inside.",
        tests=[SHARED + "test_layers_that_do_not_run_alike_sum_by_themselves[autocast-True]"],
        changes=[Change(ROOM + "products", "_multiply_columns", " and shared.state == state", "")],
    ),
]
