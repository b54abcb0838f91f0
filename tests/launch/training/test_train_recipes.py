"""``train.recipe``: a run in low precision learns what the run in bf16 learns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import tiny_config

from maingrad.launch import simulate
from maingrad.launch.config.run import Config, ConfigError
from maingrad.launch.training import loading
from maingrad.launch.training.train import train

EXPERTS = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 16}


def losses_of(config: Config) -> list[float]:
    result = train(config)
    return [*result.losses, result.validation_loss or 0.0]


def run(folder: Path, *, ranks: int = 2, parallel: str = "zero1", model: Any = None, **settings: Any) -> list[float]:
    folder.mkdir(exist_ok=True)
    settings = {"num_microbatches": 2, "steps": 8, "eval_every": 8, **settings}
    sections = {"ddp": {}} if parallel == "fsdp" else {}
    model = {"param_dtype": "bfloat16", "num_layers": 1, **(model or {})}
    optimizer = {"lr": 1e-2}  # with which eight steps lower the loss by a third
    config = tiny_config(folder, parallel=parallel, model=model, train=settings, optimizer=optimizer, **sections)
    return simulate(losses_of, ranks, config)[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The run in bf16."""
    return run(tmp_path_factory.mktemp("recipes") / "plain")


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("recipe", "within"),
    [("float8_current", 0.03), ("float8_delayed", 0.03), ("float8_block", 0.03), ("mxfp8", 0.03), ("nvfp4", 0.05)],
)
@pytest.mark.sampled(1)
def test_learns(tmp_path: Path, plain: list[float], recipe: str, within: float) -> None:
    low = run(tmp_path / "low", recipe=recipe)
    assert low != plain
    assert plain[-1] < 0.8 * plain[0]
    assert low[-1] == pytest.approx(plain[-1], rel=within)


@pytest.mark.in_turn
def test_experts_learn(tmp_path: Path) -> None:
    """The router is in fp32, and a warning says that it stays so."""
    settings: dict[str, Any] = {"ranks": 1, "model": EXPERTS}
    plain = run(tmp_path / "bf16", **settings)
    with pytest.warns(RuntimeWarning, match="as without a recipe"):
        low = run(tmp_path / "low", recipe="mxfp8", **settings)
    assert low != plain
    assert low[-1] < 0.8 * low[0]
    assert low[-1] == pytest.approx(plain[-1], rel=0.1)


@pytest.mark.in_turn
@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
@pytest.mark.sampled(1)
def test_delayed_scaling_resumes_on_other_ranks(tmp_path: Path, parallel: str) -> None:
    """Scales and amaxes go on; what two ranks sum in another order than one differs by rounding alone."""
    settings: dict[str, Any] = {"recipe": "float8_delayed", "save_every": 4}

    def go(out: str, ranks: int = 2, **more: Any) -> list[float]:
        return run(tmp_path, ranks=ranks, parallel=parallel, out_dir=str(tmp_path / out), **settings, **more)

    whole = go("whole")
    resume = {"resume": str(tmp_path / "whole/checkpoints/step-00000004")}
    assert go("same", **resume)[-5:] == whole[-5:]
    assert go("other", ranks=1, **resume)[-5:] == pytest.approx(whole[-5:], rel=2e-2)


@pytest.mark.in_turn
def test_as_a_graph(tmp_path: Path) -> None:
    eager = run(tmp_path / "eager", recipe="mxfp8", steps=6, eval_every=3)
    assert run(tmp_path / "graphed", recipe="mxfp8", steps=6, eval_every=3, cuda_graph=True) == pytest.approx(
        eager, rel=1e-3
    )


def test_what_does_not_go_together(tmp_path: Path) -> None:
    for sections in (
        {"train": {"recipe": "mxfp8"}},
        {"train": {"recipe": "mxfp8", "compile": True}, "model": {"param_dtype": "bfloat16"}},
        {"train": {"recipe": "float8_delayed"}, "model": {"param_dtype": "bfloat16", **EXPERTS}},
    ):
        with pytest.raises(ConfigError, match=r"train\.recipe"):
            tiny_config(tmp_path, **sections)


@pytest.mark.parametrize("emulate", [False, True])
def test_a_device_without_kernels_is_said_with_a_remedy(
    emulate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe is asked for as it is set, on the run's device, for the dtype that is computed in."""
    asked: list[Any] = []

    def takes(recipe: Any, tensor: torch.Tensor, name: str) -> None:
        asked.append((recipe.emulate, tensor.dtype, tensor.device.type, name))
        if not recipe.emulate:
            raise RuntimeError("no kernels here")

    monkeypatch.setattr(loading, "takes_recipe", takes)
    settings = {"recipe": "mxfp8", "emulate_recipe": emulate}
    config = tiny_config(tmp_path, train=settings, model={"param_dtype": "bfloat16"})
    if emulate:
        assert loading.load_recipe(config, torch.device("cpu")) is not None
    else:
        with pytest.raises(ConfigError, match=r"no kernels here; set train\.emulate_recipe = true"):
            loading.load_recipe(config, torch.device("cpu"))
    assert asked == [(emulate, torch.bfloat16, "cpu", "train.recipe")]
    assert loading.load_recipe(tiny_config(tmp_path), torch.device("cpu")) is None
