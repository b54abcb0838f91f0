"""A third draw, from data parallelism alone, of slips that no quick test had noticed."""

from fault import Change, Fault

FAULTS = [
    Fault(
        "12za-what-another-part-uses-is-ready",
        sentence="A parameter that one stage's last forward does not reach is ready, although another stage uses it later.",
        tests=[
            "tests/ddp/buckets/test_end_of_backward.py::test_what_one_part_does_not_use_waits_for_the_part_that_does"
        ],
        changes=[
            Change(
                "maingrad.ddp.buckets.reducer",
                "Readiness._on_backward_start",
                """
                if self._is_last(entry.record):
                    self._mark_ready(entry.bucket, entry.record)
                """,
                "self._mark_ready(entry.bucket, entry.record)",
            ),
        ],
    ),
    Fault(
        "57m-what-was-carried-stays",
        sentence="The sum of before a second backward stays in memory after it was added.",
        tests=[
            "tests/ddp/buckets/test_end_of_backward.py::test_what_was_reduced_before_a_second_backward_is_freed_when_it_is_added"
        ],
        changes=[
            Change(
                "maingrad.ddp.buckets.bucket",
                "Bucket.end_reduction",
                "self.carried = None",
                "",
            ),
        ],
    ),
    Fault(
        "24i-a-reduced-gradient-that-was-cleared-goes-on",
        sentence="A gradient that was reduced and then set to None is part of the next backward's sum.",
        tests=[
            "tests/ddp/torch_grads/test_zeroing.py::test_one_layers_gradients_are_discarded_after_a_read_and_the_others_go_on"
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.shown_params",
                "ShownGrads._zero_cleared_now",
                "self._cleared = [each for each in self._cleared if each.record.closed is not None]",
                "self._cleared.clear()",
            ),
        ],
    ),
    Fault(
        "24j-what-came-earlier-is-shown-again",
        sentence="A gradient that was set to None is shown again by a backward that does not reach its parameter.",
        tests=[
            "tests/ddp/torch_grads/test_zeroing.py::test_gradients_that_were_discarded_stay_away_in_a_backward_that_does_not_reach_them"
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.shown_params",
                "ShownGrads.show_again",
                "arrived, self._arrived = self._arrived, []",
                "arrived = self._arrived",
            ),
        ],
    ),
    Fault(
        "47l-settings-are-compared-inside-instances-alone",
        sentence="Settings that differ between the outer ranks of a mesh are not noticed.",
        tests=[
            "tests/ddp/wrapper/test_bad_input.py::test_settings_that_differ_along_one_dim_of_a_mesh_are_refused_on_every_rank"
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.setup_checks",
                "_groups_of",
                "[ranks.get_group(axis) for axis in range(ranks.ndim)]",
                "[ranks.get_group(ranks.ndim - 1)]",
            ),
        ],
    ),
    Fault(
        "29i-experts-of-instances-of-one-rank-are-not-compared",
        sentence="Experts that differ between instances of one rank each are overwritten by the first one's.",
        tests=[
            "tests/ddp/wrapper/test_experts.py::test_experts_that_differ_are_refused_where_each_rank_is_an_instance"
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.setup_checks",
                "check_undeclared_parts",
                "grid.axes, failures",
                "[grid.inner] if grid.inner_size > 1 else [], failures",
            ),
        ],
    ),
    Fault(
        "27i-a-state-of-groups-in-another-order-is-loaded",
        sentence="The moments of one group are loaded as those of another that is cut alike.",
        tests=["tests/ddp/optimizer/test_param_groups.py::test_a_state_of_the_same_groups_in_another_order_is_refused"],
        changes=[
            Change(
                "maingrad.ddp.optimizer.fit",
                "layout_key",
                "segment.end, segment.group)",
                "segment.end)",
            ),
        ],
    ),
    Fault(
        "33o-a-row-as-long-as-a-part-is-not-cut",
        sentence="A row with as many elements as a rank's part is taken for the part.",
        tests=[
            "tests/ddp/torch_grads/test_reads_of_parts.py::test_a_row_is_cut_for_a_part_with_as_many_elements_from_the_middle_of_one"
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.grad_reads",
                "_part",
                "operand.shape == like.shape and not (fits and shard.flat)",
                "operand.shape == like.shape",
            ),
        ],
    ),
    Fault(
        "16zd-dampening-in-one-group-is-not-seen",
        sentence="A first step after a load is replayed with dampening, where one group alone has dampening.",
        tests=["tests/ddp/graphs/test_refused.py::test_what_is_refused_at_once"],
        changes=[
            Change(
                "maingrad.ddp.graphs.step_graphs",
                "check_optimizer",
                'any(group.get("dampening")',
                'all(group.get("dampening")',
            ),
        ],
    ),
    Fault(
        "03h-our-write-is-remembered-in-the-next-microbatch",
        sentence="A foreign placeholder is added where our module has written in the microbatch before.",
        tests=[
            "tests/ddp/contract/test_contract_faults.py::test_03_a_foreign_use_in_the_microbatch_after_ours_adds_no_uninitialised_memory"
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "absorb_grad",
                "ours, record.consumer_wrote = record.consumer_wrote, False",
                "ours = record.consumer_wrote",
            ),
        ],
    ),
    Fault(
        "56b-accumulators-of-other-libraries-are-replaced",
        sentence="A model whose parameters have a main_grad of another library is wrapped.",
        tests=["tests/ddp/wrapper/test_bad_input.py::test_a_model_that_another_provider_owns_is_refused"],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "check_unattached",
                "has_main_grad(param)",
                "record_of(param) is not None",
            ),
        ],
    ),
    Fault(
        "14d-gradients-without-values-are-contiguous",
        sentence="Until its values are read, a gradient has other strides than its parameter.",
        tests=[
            "tests/ddp/torch_grads/test_existing_models.py::test_gradients_have_the_parameters_strides_before_their_values_are_read"
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.shown_grad",
                "without_memory",
                "like.stride() if like.shape == shape else None",
                "None",
            ),
        ],
    ),
    Fault(
        "47m-a-hash-of-the-last-gathers-alone",
        sentence="Ranks that differ early in a very long evaluation are taken for alike.",
        tests=["tests/fsdp/iteration/test_other_units.py::test_a_difference_at_the_start_of_a_very_long_evaluation"],
        changes=[
            Change(
                "maingrad.ddp.collectives.step_check",
                "_Entries.add",
                "(self.digest, index)",
                "(0, index)",
            ),
        ],
    ),
    Fault(
        "57n-the-only-gradient-is-taken-for-a-discarded-one",
        sentence="Where no other parameter has a gradient, the hook's clearing of .grad discards the iteration.",
        tests=[
            "tests/ddp/torch_grads/test_zeroing.py::test_a_model_of_one_parameter_goes_on_after_a_read",
            "tests/ddp/torch_grads/test_zeroing.py::test_the_last_gradient_that_is_not_discarded_goes_on",
            "tests/ddp/torch_grads/test_existing_loop.py"
            "::test_a_head_that_is_called_outside_of_the_wrapper_goes_backward_twice",
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.shown_params",
                "ShownGrads.is_cleared",
                "if not self.active or (self._arrived and current_backward() != NO_BACKWARD):",
                "if not self.active:",
            ),
            Change(
                "maingrad.ddp.contract.main_grad",
                "absorb_grad",
                "add_to_main_grad(record, grad)",
                """
                param.grad = None
                add_to_main_grad(record, grad)
                """,
            ),
        ],
    ),
]
