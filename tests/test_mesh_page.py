"""The code of docs/mesh.md runs, and gives the gradients of a model that nobody has cut."""

import math
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sliced_models import Plain, batch_of, cut
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from maingrad.ddp import clip_grad_norm
from maingrad.launch import parallelize, simulate
from maingrad.launch.config.mesh import MeshConfig
from maingrad.te_integration.pipeline import finalize_model_grads

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, TRAINING = ((DOCS / name).read_text() for name in ("mesh.md", "training.md"))
MARKS, EMBEDDING, MEGATRON, TORCH, SHARDED, LAYERS, CHECKPOINTS, ULYSSES, VERIFY = re.findall(
    r"```python\n(.*?)```", PAGE, flags=re.DOTALL
)
(TOML,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)


def run(block: str, **given: Any) -> dict[str, Any]:
    """The names that a block leaves. The ranks of these tests have no GPU."""
    exec(block.replace('"cuda"', '"cpu"'), given)
    return given


def norm_of(model: Callable[..., Tensor], batches: Iterator[Any], module: nn.Module) -> float:
    """The norm of the average of the batches' gradients, by plain PyTorch."""
    losses = [model(*batch) for batch in batches]
    (sum(losses) / len(losses)).backward()
    return float(nn.utils.get_total_norm([param.grad for param in module.parameters() if param.grad is not None]))


# ---- Megatron's marks. ----


def marked() -> dict[str, Any]:
    return run(MARKS, build_model=lambda tp: cut(Plain(), tp.get_group()))


def norm_of_marked() -> float:
    names = marked()
    names["model"](*batch_of(names["mesh"].get_local_rank("dp"))).backward()
    names["optimizer"].step()
    return float(names["optimizer"].grad_norm)


@pytest.mark.in_turn
def test_megatrons_marks() -> None:
    plain = Plain()
    expected = norm_of(plain, map(batch_of, range(4)), plain)
    assert simulate(norm_of_marked, 8) == pytest.approx([expected] * 8, rel=1e-5)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Parameter(torch.zeros(4))
        self.word.shared_embedding = True  # type: ignore[assignment]

    def forward(self, x: float) -> Tensor:
        return (self.word * x).sum()


def norm_of_two_stages() -> float:
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    both: Any = dist.group.WORLD
    given = {"stage": Stage(), "inputs": 1.0 + dist.get_rank(), "dp": alone, "first_and_last": both, "pp": both}
    return float(run(EMBEDDING, **given)["norm"])


def test_an_embedding_on_two_stages() -> None:
    expected = (1.0 + 2.0) * math.sqrt(4)  # of the sum of both gradients, once
    assert simulate(norm_of_two_stages, 2) == pytest.approx([expected] * 2)


def test_the_function_of_megatrons_schedules() -> None:
    config = SimpleNamespace()
    run(MEGATRON, config=config)
    assert config.finalize_model_grads_func is finalize_model_grads


# ---- torch's tensor parallelism. ----


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """Blocks, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x - 1).square().mean()


def data(index: int) -> tuple[Tensor]:
    return (torch.randn(3, 8, generator=torch.Generator().manual_seed(index)),)


def norm_of_torchs(block: str) -> tuple[float, int]:
    names = run(block, model=Model())
    model = names["model"]
    model(*data(names["mesh"].get_local_rank("dp"))).backward()
    writes = sum(record.num_fused_writes for record in model.records) if block == TORCH else 4
    return float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)), writes


@pytest.mark.in_turn
@pytest.mark.parametrize("block", [TORCH, SHARDED], ids=["ddp", "fully_shard"])
def test_torchs_tensor_parallelism(block: str) -> None:
    plain = Model()
    expected = norm_of(plain, map(data, range(4)), plain)
    for norm, writes in simulate(norm_of_torchs, 8, block):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert writes == 4, "each layer's"


# ---- Layers. ----


def run_layers() -> tuple[float, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = run(LAYERS, mesh=mesh)["model"]
    whole = torch.randn(6, 2, 64, generator=torch.Generator().manual_seed(mesh.get_local_rank("dp")))
    model(whole.chunk(2)[mesh.get_local_rank("tp")]).square().sum().backward()
    return float(clip_grad_norm(model, 1.0)), sum(record.num_fused_writes for record in model.records)


def norm_of_whole_layers() -> float:
    """The block's layers on one rank, by the same lines."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = run(LAYERS, mesh=mesh)["model"]
    wholes = [torch.randn(6, 2, 64, generator=torch.Generator().manual_seed(index)) for index in range(2)]
    (sum(model(whole).square().sum() for whole in wholes) / 2).backward()
    return float(clip_grad_norm(model, 1.0))


def test_layers_over_tensor_parallel_ranks() -> None:
    (expected,) = simulate(norm_of_whole_layers, 1)
    for norm, writes in simulate(run_layers, 4):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert writes == 4


# ---- Checkpoints, context parallelism, plans. ----


def save_and_load(folder: Path) -> bool:
    names = marked()
    model, optimizer = names["model"], names["optimizer"]
    before = [param.detach().clone() for param in model.parameters()]
    run(CHECKPOINTS.replace("runs/step-100", str(folder)), model=model, optimizer=optimizer)
    return all(map(torch.equal, before, model.parameters()))


@pytest.mark.in_turn
def test_checkpoints(tmp_path: Path) -> None:
    assert all(simulate(save_and_load, 8, tmp_path / "step-100"))


class Attention(nn.Module):
    """Attention between two products, and a loss."""

    def __init__(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.qkv, self.out = attention, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return (self.out(self.attention(q, k, v).transpose(1, 2).flatten(2)) - 1).square().mean()


def sequences(index: int) -> tuple[Tensor]:
    return (torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(index)),)


def norm_over_parts() -> float:
    names = run(ULYSSES, build_model=Attention)
    mesh, model = names["mesh"], names["model"]
    (whole,) = sequences(mesh.get_local_rank("dp"))
    model(whole.chunk(4, dim=1)[mesh.get_local_rank("cp")]).backward()
    return float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def test_ulysses() -> None:
    plain = Attention(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    expected = norm_of(plain, map(sequences, range(2)), plain)
    assert simulate(norm_over_parts, 8) == pytest.approx([expected] * 8, rel=1e-5)


def test_the_table_of_a_configuration() -> None:
    read = tomllib.loads(TOML)
    assert read["parallel"] == "zero1"
    assert MeshConfig(**read["mesh"]).data_ranks(64) == 16
    (other,) = re.findall(r"```toml\n(\[mesh\]\n.*?)```", TRAINING, flags=re.DOTALL)
    assert "64 ranks are 8 data-parallel ones" in TRAINING
    assert MeshConfig(**tomllib.loads(other)["mesh"]).data_ranks(64) == 8


@pytest.mark.in_turn
def test_verify() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, use_cache=False)
    found: list[Any] = []
    ids = torch.randint(32, (4, 5), generator=torch.Generator().manual_seed(0))
    given = {"model": Model(), "batch": torch.randn(4, 8), "llama": transformers.LlamaForCausalLM(config), "ids": ids}
    run(VERIFY, print=found.append, **given)
    for each in found:
        assert each.ok, each
        assert {"ddp_tp", "zero1_tp_converted"} <= {row.way for row in each.results}
    assert len(found) == 2


@pytest.mark.parametrize("form", ["ddp", "zero1", "zero3"])
def test_sequences_and_parameters_may_both_be_cut(form: str) -> None:
    """The first table's ranks and arguments, which ``parallelize`` hands on. Batches stand for parts of sequences."""

    def on_each_rank() -> float:
        mesh: DeviceMesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        ranks = mesh["dp", "cp"]._flatten()
        part = cut(Plain(), mesh["tp"].get_group())
        model = parallelize(part, form, mesh=ranks, tensor_parallel_group=mesh["tp"])
        model(*batch_of(mesh.get_local_rank("cp"))).backward()
        return float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))

    plain = Plain()
    expected = norm_of(plain, map(batch_of, range(2)), plain)
    assert simulate(on_each_rank, 4) == pytest.approx([expected] * 4, rel=1e-5)
