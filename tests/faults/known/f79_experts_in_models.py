"""Models whose experts are spread over ranks."""

from fault import Change, Fault

PARALLELIZE = "tests/launch/parallelizing/test_experts.py::"
WRAPPERS = PARALLELIZE + "test_wrappers_train_alike"
TRAIN = "tests/launch/training/test_mesh.py::test_ranks_that_share_out_experts_train_the_same_model"
EXPERTS = "maingrad.launch.parallelizing.experts"
OPTIMIZERS = "maingrad.ddp.plan.tensor_parallel.optimizers"

FAULTS = [
    Fault(
        "79a-each-rank-balances-experts-over-its-own-tokens",
        sentence="The load-balancing loss of a run depends on the number of its ranks.",
        tests=[TRAIN + "[join-ddp-2-mesh0]"],
        quick=[TRAIN + "[join-ddp-2-mesh0]"],
        changes=[Change("maingrad.launch.model.moe", "router_losses", "if group is not None:", "if False:")],
    ),
    Fault(
        "79b-each-rank-keeps-the-first-experts",
        sentence="All ranks keep the first part of the experts, and tokens of the others reach them.",
        tests=[WRAPPERS + "[ddp-2]"],
        changes=[Change(EXPERTS, "keep_own", "whole.narrow(0, rank * count, count)", "whole.narrow(0, 0, count)")],
    ),
    Fault(
        "79c-all-ranks-seem-to-hold-the-same-experts",
        sentence="Different experts are averaged, and overwritten by the first rank's.",
        tests=[WRAPPERS + "[ddp-2]", WRAPPERS + "[zero3-2]"],
        changes=[Change(EXPERTS, "same_place", "if place == mesh.get_local_rank()", "if place >= 0")],
    ),
    Fault(
        "79d-ranks-with-other-experts-count-as-tensor-parallel",
        sentence="fully_shard takes the ranks that hold all experts together for ranks that hold copies of the rest.",
        tests=[WRAPPERS + "[zero3-2]"],
        quick=[WRAPPERS + "[zero3-2]"],
        changes=[
            Change("maingrad.fsdp.iteration.connect", "ranks_of_model", ' and each.grad != "expert"', ""),
        ],
    ),
    Fault(
        "79e-tokens-are-dispatched-twice",
        sentence="The dispatch that transformers has installed stays around ours, whose ids are local ones then.",
        tests=[PARALLELIZE + "test_the_ep_plan_of_transformers"],
        changes=[Change(EXPERTS, "_dispatch", 'experts.__dict__.pop("forward", None)', "experts.num_gemms")],
    ),
    Fault(
        "79f-dtensors-of-experts-are-no-experts",
        sentence="DTensors over data-parallel ranks are taken for slices of tensor parallelism.",
        tests=[PARALLELIZE + "test_experts_that_are_dtensors"],
        changes=[Change(EXPERTS, "share_experts", "param.allreduce = False", "param.allreduce = True")],
    ),
    Fault(
        "79g-copies-of-experts-are-slices",
        sentence="A deepcopy of a model with shared experts loses allreduce = False: a wrapper takes them for slices.",
        tests=[PARALLELIZE + "test_a_wrapper_knows_the_experts_of_a_copy"],
        quick=[PARALLELIZE + "test_a_wrapper_knows_the_experts_of_a_copy"],
        changes=[Change(OPTIMIZERS, "set_slice_of", "if layout.of_experts:", "if False:")],
    ),
    Fault(
        "79h-tied-experts-train-apart",
        sentence="Each of two layers that share experts gets a part of its own.",
        tests=[PARALLELIZE + "test_tied_experts_stay_tied"],
        changes=[Change(EXPERTS, "keep_own", "own = made.get(id(whole))", "own = None")],
    ),
    Fault(
        "79i-optimizers-save-one-ranks-experts",
        sentence="State dicts of torch's optimizers have local tensors, of which one rank's are saved.",
        tests=[PARALLELIZE + "test_state_dicts_of_torchs_optimizers_are_of_all_experts"],
        changes=[Change(OPTIMIZERS, "set_slice_of", "_watch_steps()", "layout.is_cut")],
    ),
]
