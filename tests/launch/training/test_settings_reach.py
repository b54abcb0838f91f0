"""What a setting reaches: the calls that build, cut, compile, wrap and shard a run's model get it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_run import tiny_config, tiny_document
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.launch import simulate
from maingrad.launch.config.file import structure
from maingrad.launch.config.run import Config
from maingrad.launch.model import gpt
from maingrad.launch.model.hugging_face import HuggingFaceModel
from maingrad.launch.training import train as loop
from maingrad.launch.training import wrapping
from maingrad.launch.training.loading import load_model
from maingrad.launch.training.metrics import MetricsWriter
from maingrad.launch.training.runtime import current_runtime
from maingrad.launch.training.signals import StopRequest
from maingrad.launch.training.train import Trainer
from maingrad.launch.training.watching.progress import Display
from maingrad.launch.training.wrapping import Wrapped

transformers = pytest.importorskip("transformers")

EXPERTS = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 16}
BF16 = {"param_dtype": "bfloat16"}


def loaded(config: Config) -> Any:
    return load_model(config, current_runtime("cpu", config.mesh))


def wrapped(config: Config) -> Wrapped:
    return Wrapped(loaded(config), config, current_runtime("cpu", config.mesh))


def of_hugging_face(folder: Path, **sections: Any) -> Config:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaConfig(**sizes, vocab_size=256).save_pretrained(folder / "source")
    model = {"hugging_face": str(folder / "source"), "pretrained": False}
    return structure(tiny_document(folder, **sections) | {"model": model})


# ---- The model. ----


def test_weights_are_drawn_from_the_seed_of_the_run(tmp_path: Path):
    for seed in (0, 5):
        config = tiny_config(tmp_path, train={"seed": seed})
        expected = gpt.build_model(config.model, seed=seed)
        assert torch.equal(loaded(config).head.weight, expected.head.weight)


def test_each_block_is_compiled_by_the_backend_and_the_gpts_without_a_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compiled: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **how: compiled.append((type(module).__name__, how)))
    how = {"compile": True, "compile_backend": "eager"}
    loaded(tiny_config(tmp_path, train=how))
    loaded(of_hugging_face(tmp_path, train=how))
    whole, broken = ({"fullgraph": whole, "backend": "eager"} for whole in (True, False))
    assert compiled == [("Block", whole), ("Block", whole), ("LlamaDecoderLayer", broken)]
    compiled.clear()
    loaded(tiny_config(tmp_path))
    assert compiled == []
    for mesh, fullgraph in (({"ep": 2}, broken), ({"tp": 2, "sequence_parallel": True}, whole)):
        config = tiny_config(tmp_path, train=how, mesh=mesh, model=EXPERTS if "ep" in mesh else {})
        simulate(lambda config=config: loaded(config) and None, 2)
        assert compiled == [("Block", fullgraph)] * 4, "tokens that travel break a graph"
        compiled.clear()


@pytest.mark.parametrize(
    ("how", "blocks", "attentions"),
    [
        ({}, [False, False], [False, False]),
        ({"recompute": "blocks"}, [True, True], [False, False]),
        ({"recompute": "operators", "recompute_every": 2}, [True, False], [False, False]),
        ({"recompute": "attention"}, [False, False], [True, True]),
    ],
)
def test_activations_are_computed_again_where_the_run_says(
    tmp_path: Path, how: dict[str, Any], blocks: list[bool], attentions: list[bool]
):
    model = loaded(tiny_config(tmp_path, train=how))
    assert ["forward" in vars(block) for block in model.blocks] == blocks
    assert ["forward" in vars(block.attention) for block in model.blocks] == attentions


@pytest.mark.parametrize("halves", [False, True])
def test_sequence_parallel_ranks_have_their_part_between_layers(tmp_path: Path, halves: bool):
    config = tiny_config(tmp_path, mesh={"tp": 2, "sequence_parallel": halves})

    def length() -> int:
        model, seen = loaded(config), list[Tensor]()
        model.blocks[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        model(torch.zeros(1, 24, dtype=torch.long))
        return seen[0].shape[1]

    assert simulate(length, 2) == [12 if halves else 24] * 2


@pytest.mark.parametrize("transport", ["all_to_all", "symmetric"])
def test_tokens_travel_as_the_mesh_says(tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch):
    made: list[Any] = []
    monkeypatch.setattr(gpt, "TokenDispatcher", lambda experts, mesh, how: made.append((experts, mesh.size(), how)))
    config = tiny_config(tmp_path, mesh={"ep": 2, "transport": transport}, model=EXPERTS)
    simulate(lambda: loaded(config) and None, 2)
    assert made == [(4, 2, transport)] * 2


def test_routers_balance_over_the_ranks_whose_losses_are_averaged(tmp_path: Path):
    assert loaded(tiny_config(tmp_path)).loss_group is None

    def ranks(mesh: dict[str, int]) -> list[int]:
        return dist.get_process_group_ranks(loaded(tiny_config(tmp_path, mesh=mesh)).loss_group)

    assert simulate(ranks, 4, {}) == simulate(ranks, 4, {"cp": 2}) == [[0, 1, 2, 3]] * 4
    assert simulate(ranks, 4, {"tp": 2}) == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert simulate(ranks, 4, {"pp": 2}) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_model_of_hugging_face_knows_of_padding_where_rows_have_some(tmp_path: Path):
    for documents in ("join", "mask", "pad"):
        config = of_hugging_face(tmp_path, data={"documents": documents, "order": "epochs"})
        model = loaded(config)
        assert isinstance(model, HuggingFaceModel) and model.pads is (documents == "pad")


def test_a_model_of_hugging_face_is_asked_about_documents_where_attention_is_to_know_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[Any] = []
    monkeypatch.setattr(loop, "check_documents", lambda model, device: asked.append((model, device.type)))
    for documents in ("join", "mask"):
        config = of_hugging_face(tmp_path, data={"documents": documents})
        runtime, display = current_runtime("cpu", config.mesh), Display(is_main=False)
        made = Trainer(config, runtime, MetricsWriter(None), StopRequest(), display)
        assert asked == ([(made.module, "cpu")] if documents == "mask" else [])


def trainer_of(config: Config) -> Trainer:
    runtime, display = current_runtime("cpu", config.mesh), Display(is_main=False)
    return Trainer(config, runtime, MetricsWriter(None), StopRequest(), display)


@pytest.mark.in_turn
def test_steps_are_captured_as_the_run_says_where_the_host_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[Any] = []
    monkeypatch.setattr(Wrapped, "graphed", lambda self, iteration, how: asked.append((iteration.__name__, how)))

    def ask(**sections: Any) -> Any:
        asked.clear()
        trainer_of(tiny_config(tmp_path, **sections))
        return asked[0]

    for how in ("auto", True, False):
        assert ask(train={"cuda_graph": how}) == ("_iteration", how)
    for sections in ({"mesh": {"pp": 2}}, {"mesh": {"ep": 2}, "model": EXPERTS}):
        assert simulate(lambda sections=sections: ask(**sections), 2) == [("_iteration", False)] * 2
    assert simulate(lambda: ask(mesh={"tp": 2}), 2) == [("_iteration", "auto")] * 2
    by_kernels = {"ep": 2, "transport": "symmetric"}
    assert not tiny_config(tmp_path, mesh=by_kernels, model=EXPERTS).mesh.runs_eagerly


def test_a_run_knows_the_names_of_its_tokens_and_whether_it_saves(tmp_path: Path):
    """Data are read for their digests only where a checkpoint keeps or compares them."""
    torch.arange(3000).remainder(250).to(torch.uint16).numpy().tofile(tmp_path / "tokens")
    tokens = {"source": "tokens", "paths": [str(tmp_path / "tokens")]}
    text, numbers = tiny_config(tmp_path), tiny_config(tmp_path, data=tokens, train={"save_every": 2})
    made = trainer_of(text)
    assert (made.unit, made.saves, made.digests) == ("byte", False, {})
    assert made.equal_weights.tolist() == [0.5, 0.5] and made.equal_weights.dtype is torch.float64
    assert (made.rows, len(made.windows.inputs)) == (12, 8)
    made = trainer_of(numbers)
    assert (made.unit, made.saves, made.digests.keys()) == ("token", True, {"training", "validation"})
    made = trainer_of(tiny_config(tmp_path, data=tokens, train={"resume": "auto"}))
    assert (made.saves, made.digests.keys()) == (False, {"training", "validation"})
    assert [trainer.rows for trainer in simulate(trainer_of, 3, text)] == [4] * 3


# ---- Wrapped or sharded. ----


class Stopped(Exception):
    """Nothing is sharded."""


def test_each_option_of_units_is_given_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given: list[Any] = []

    def spied(module: nn.Module, units: Any, row: Any, mesh: Any, policy: Any, options: Any, *others: Any) -> None:
        given.append(options)
        raise Stopped

    monkeypatch.setattr(wrapping, "shard_units", spied)
    changes: dict[str, Any] = {
        "reshard_after_forward": False,
        "reduce_every_microbatch": False,
        "bucket_size": 4000,
        "shard_atoms": "row",
        "offload_to_cpu": True,
        "copy_engine_gather": False,
    }
    for changed in ({}, changes):
        config = tiny_config(tmp_path, parallel="fsdp", fsdp=changed)
        with pytest.raises(Stopped):
            wrapped(config)
        assert {name: given[-1][name] for name in changes} == {name: getattr(config.fsdp, name) for name in changes}


@pytest.mark.parametrize("state", ["full", "compact"])
def test_a_drawn_model_is_sharded_as_it_is_and_a_loaded_one_from_its_first_rank(
    tmp_path: Path, state: str, monkeypatch: pytest.MonkeyPatch
):
    """Compact state keeps shards in the dtype of computation: ``mixed_precision`` says so."""
    given: list[Any] = []

    def spied(module: nn.Module, units: Any, row: Any, mesh: Any, policy: Any, options: Any, *others: Any) -> None:
        given.append((options, policy, module, units))
        raise Stopped

    monkeypatch.setattr(wrapping, "shard_units", spied)
    sections: dict[str, Any] = {"parallel": "fsdp", "optimizer": {"state": state}}
    drawn, loaded_one = tiny_config(tmp_path, model=BF16, **sections), of_hugging_face(tmp_path, **sections)
    for config in (drawn, loaded_one):
        with pytest.raises(Stopped):
            wrapped(config)
        options, policy, module, units = given[-1]
        assert units and module not in units
        assert (options.get("init_sync"), "init_fn" in options) == ((False, False) if config is drawn else (None, True))
        assert options["device"] == torch.device("cpu")
        assert options.get("mixed_precision") is (policy if state == "compact" else None)
    values = {name: param.detach().clone() for name, param in module.named_parameters()}
    options["init_fn"](module)
    assert all(param.equal(values[name]) for name, param in module.named_parameters()), "nothing is drawn anew"


@pytest.mark.in_turn
def test_ranks_of_instances_are_those_of_one_stage_and_one_part_of_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Instances are the outer dim: what is sharded is whole inside of each."""

    def spied(module: nn.Module, units: Any, row: Any, mesh: Any, *others: Any) -> None:
        raise Stopped(mesh.mesh.tolist())

    monkeypatch.setattr(wrapping, "shard_units", spied)

    def grid(mesh: dict[str, int]) -> Any:
        config = tiny_config(tmp_path, parallel="hsdp", fsdp={"num_instances": 2}, mesh=mesh)
        with pytest.raises(Stopped) as stopped:
            wrapped(config)
        return stopped.value.args[0]

    assert simulate(grid, 6, {}) == [[[0, 1, 2], [3, 4, 5]]] * 6
    assert simulate(grid, 8, {"tp": 2}) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]] * 4
    assert simulate(grid, 8, {"pp": 2}) == [[[0, 1], [2, 3]]] * 4 + [[[4, 5], [6, 7]]] * 4


@pytest.mark.in_turn
def test_the_wrapper_is_told_who_holds_the_same_experts_and_the_same_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And who averages the same losses."""
    made = wrapping.DistributedDataParallel

    def spied(module: Any, config: Any, **options: Any) -> Any:
        if dist.get_rank() == 0:
            given.append({name: group and dist.get_process_group_ranks(group) for name, group in options.items()})
        return made(module, config, **options)

    given: list[Any] = []
    monkeypatch.setattr(wrapping, "DistributedDataParallel", spied)
    tied = {"tie_embeddings": True}
    for mesh, model, wanted in (
        ({}, {}, {"process_group": None}),
        ({"ep": 2}, EXPERTS, {"process_group": None, "expert_process_group": [0, 2]}),
        ({"pp": 2}, tied, {"process_group": [0, 1], "embedding_group": [0, 2]}),
        ({"pp": 2, "tp": 2}, {}, {"process_group": [0]}),
    ):
        config = tiny_config(tmp_path, mesh=mesh, model=model)
        simulate(lambda found=config: wrapped(found) and None, 4)
        assert given.pop() == wanted


@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
@pytest.mark.parametrize("moments", ["bfloat16", "float32", "uint8"])
def test_compact_state_has_the_moments_that_were_asked_for(
    tmp_path: Path, parallel: str, moments: str, monkeypatch: pytest.MonkeyPatch
):
    """And shards that are fully sharded are bf16, as the model is: remainders are beside them."""
    made, given = wrapping.make_optimizer, list[Any]()
    monkeypatch.setattr(wrapping, "make_optimizer", lambda *args, **how: given.append(how) or made(*args, **how))
    optimizer = {"state": "compact", "moment_dtype": moments}
    config = tiny_config(tmp_path, parallel=parallel, model=BF16, optimizer=optimizer)
    (dtypes,) = simulate(lambda: {param.dtype for param in wrapped(config).model.parameters()}, 1)
    assert dtypes == {torch.bfloat16}
    assert [(how["state"], how["moment_dtype"]) for how in given] == [("compact", getattr(torch, moments))]


@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
def test_a_step_is_captured_as_the_run_says(tmp_path: Path, parallel: str, monkeypatch: pytest.MonkeyPatch):
    """ "auto": where that is right. The norm of shards is a result of the graph, and the optimizer's from then on."""
    made = wrapped(tiny_config(tmp_path, parallel=parallel))
    captured, results = list[Any](), list[Any]()

    def capture(kind: str) -> Any:
        def graph(step: Any, model: Any, optimizer: Any) -> Any:
            captured.append((kind, model is made.model, optimizer is made.optimizer))

            def replayed(*args: Tensor) -> Any:
                results.append(step(*args))
                made.optimizer.grad_norm = None  # a replay runs no Python
                return results[-1]

            return replayed

        return graph

    monkeypatch.setattr(wrapping, "graphed", capture("auto"))
    monkeypatch.setattr(wrapping, "GraphedTrainingStep", capture("zero1"))
    monkeypatch.setattr(wrapping.fsdp, "GraphedTrainingStep", capture("fsdp"))

    def iteration(inputs: Tensor) -> Tensor:
        made.optimizer.grad_norm = 3 * inputs
        return 2 * inputs

    assert made.graphed(iteration, False) is None
    for how in ("auto", True):
        run = made.graphed(iteration, how)  # type: ignore[arg-type]
        made.optimizer.grad_norm = None
        assert run is not None and run(torch.ones(())) == 2.0
        assert results[-1][1] == made.optimizer.grad_norm == (3.0 if parallel == "fsdp" else None)
    assert captured == [("auto", True, True), (parallel, True, True)]


def test_matrices_of_muon_are_whole_on_one_rank_under_zero1_alone(tmp_path: Path):
    """And those that the run names besides."""
    for parallel, ddp, wanted in (("zero1", {}, 8), ("zero1", {"keep_matrices_whole": ["head*"]}, 9), ("ddp", {}, 0)):
        config = tiny_config(tmp_path, parallel=parallel, ddp=ddp, optimizer={"name": "muon"})
        assert len(wrapped(config).model.ddp_config.keep_matrices_whole) == wanted
    assert wrapped(tiny_config(tmp_path)).model.ddp_config.keep_matrices_whole == ()


def test_vectors_are_a_group_of_their_own_where_there_is_decay(tmp_path: Path):
    for changes, decays in (
        ({"decay_vectors": False}, [0.0, 0.1]),
        ({}, [0.1]),
        ({"decay_vectors": False, "name": "torch.optim.Rprop", "weight_decay": 0.0}, [None]),
    ):
        groups = wrapped(tiny_config(tmp_path, optimizer=changes)).optimizer.param_groups
        assert sorted((group.get("weight_decay") for group in groups), key=str) == decays


def test_scalars_are_vectors_and_stacks_are_matrices(tmp_path: Path):
    """Of a learned scale, a norm, a matrix and packed experts."""
    shapes = {"scale": (), "norm": (4,), "matrix": (4, 4), "experts": (2, 4, 4)}
    module = nn.ParameterDict({name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()})
    for decay_vectors in (False, True):
        settings = tiny_config(tmp_path, optimizer={"decay_vectors": decay_vectors}).optimizer
        model = DistributedDataParallel(copy.deepcopy(module), DistributedDataParallelConfig())
        optimizer = wrapping._optimizer_of(model, settings, settings.muon_of(module))
        model.finish_grad_sync()
        optimizer.step()
        for name, param in model.module.named_parameters():
            decays = decay_vectors or name in ("matrix", "experts")
            assert float(param.detach().mean()) == pytest.approx(1.0 - decays * settings.lr * 0.1, abs=1e-7), name


def test_numbers_of_parameters_are_those_of_whole_ones(tmp_path: Path):
    model = {"vocab_size": 257}
    whole = sum(param.numel() for param in loaded(tiny_config(tmp_path, model=model)).parameters())
    for parallel, mesh in (("zero1", {"tp": 2}), ("fsdp", {"tp": 2}), ("fsdp", {})):
        config = tiny_config(tmp_path, parallel=parallel, mesh=mesh, model=model)
        assert simulate(lambda given=config: sum(each.numel for each in wrapped(given).parameters), 2) == [whole] * 2


@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
def test_what_is_frozen_is_no_parameter_of_a_run_and_is_in_its_weights(tmp_path: Path, parallel: str):
    config = tiny_config(tmp_path, parallel=parallel)
    module = loaded(config)
    frozen = module.blocks[1].ffn_norm.weight.requires_grad_(False).numel()
    numels = [param.numel() for param in module.parameters()]
    made = Wrapped(module, config, current_runtime("cpu", config.mesh))
    assert len(made.parameters) == len(made.records) == len(numels) - 1
    assert sum(each.numel for each in made.parameters) == sum(numels) - frozen
    assert len(made.whole_weights(wanted=True)) == len(numels) + len([*module.buffers()])


@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
def test_a_failure_closes_groups_with_tensor_parallel_and_with_data_parallel_ranks(tmp_path: Path, parallel: str):
    """So that a rank in a collective of either kind does not wait for one that has failed."""
    config = tiny_config(tmp_path, parallel=parallel, mesh={"tp": 2})

    def closed() -> list[list[int]]:
        groups = [group for grid in wrapped(config).failures.grids for group in grid[:3] if group is not None]
        return [dist.get_process_group_ranks(group) for group in groups]

    for rank, groups in enumerate(simulate(closed, 4)):
        assert [rank % 2, rank % 2 + 2] in groups
        assert any({rank, rank ^ 1} <= {*group} for group in groups), "the rank with the other parts of matrices"


def test_whole_weights_have_the_dtype_of_computation_and_buffers(tmp_path: Path):
    """The same digest whatever is sharded, and another one of other weights; ranks that want nothing take part, and get
    nothing."""
    expected = loaded(tiny_config(tmp_path, model=BF16))

    def found(config: Config) -> Any:
        made = wrapped(config)
        weights, digest = made.whole_weights(wanted=True), made.digest(wanted=True)
        before = {name: each.clone() for name, each in weights.items()}
        with torch.no_grad():
            for tensor in (*made.model.parameters(), *made.model.buffers()):
                tensor.zero_()
        assert all(torch.equal(each, before[name]) for name, each in weights.items()), "copies"
        return weights, digest, made.whole_weights(wanted=False)

    digests = set()
    for parallel in ("zero1", "fsdp"):
        for weights, digest, nothing in simulate(found, 2, tiny_config(tmp_path, parallel=parallel, model=BF16)):
            wanted = dict(expected.named_parameters()) | dict(expected.named_buffers())
            assert weights.keys() == wanted.keys() and nothing == {}
            assert all(weights[name].dtype is each.dtype and weights[name].equal(each) for name, each in wanted.items())
            digests.add(digest)
    assert len(digests) == 1
    ((_, other, _),) = simulate(found, 1, tiny_config(tmp_path, model=BF16, train={"seed": 1}))
    assert other not in digests


def test_shards_of_all_stages_are_clipped_by_one_norm():
    """Its dtype is that of gradients."""

    def clipped(limit: float) -> tuple[Any, list[float]]:
        stage = nn.Linear(2, 1, bias=False)
        stage.weight.grad = torch.tensor([[3.0, 0.0]]) if dist.get_rank() == 0 else torch.tensor([[0.0, 4.0]])
        norm = wrapping._clip_shards(stage, limit, dist.group.WORLD)
        assert norm.dtype is torch.float32
        return float(norm), stage.weight.grad[0].tolist()

    for limit, factor in ((2.5, 0.5), (10.0, 1.0)):
        (one, first), (other, second) = simulate(clipped, 2, limit)
        assert one == other == 5.0
        assert first == pytest.approx([3.0 * factor, 0.0], rel=1e-5)
        assert second == pytest.approx([0.0, 4.0 * factor], rel=1e-5)
    alone = nn.Linear(2, 1, bias=False)
    alone.weight.grad = torch.tensor([[3.0, 4.0]])
    assert float(wrapping._clip_shards(alone, 1.0, None)) == 5.0
    assert alone.weight.grad[0].tolist() == pytest.approx([0.6, 0.8], rel=1e-5)


@pytest.mark.parametrize(("parallel", "limit"), [("zero1", 0.5), ("zero1", None), ("fsdp", 0.5), ("fsdp", None)])
def test_stages_are_clipped_by_the_norm_of_all_of_them(
    tmp_path: Path, parallel: str, limit: float | None, monkeypatch: pytest.MonkeyPatch
):
    """By one call before the step, which the optimizer's own clipping would not see."""
    given: list[Any] = []
    for name in ("clip_grad_norm", "_clip_shards"):
        monkeypatch.setattr(wrapping, name, lambda *args, **how: given.append((*args[1:], *how.values())) or "norm")

    def clip() -> None:
        made = wrapped(tiny_config(tmp_path, parallel=parallel, mesh={"pp": 2}, optimizer={"max_grad_norm": limit}))
        monkeypatch.setattr(type(made.optimizer), "step", lambda self: None)
        made.step()
        assert given == ([] if limit is None else [(limit, made.pipeline)]) and made.pipeline is not None
        assert limit is None or made.optimizer.grad_norm == "norm"
        given.clear()

    simulate(clip, 2)
