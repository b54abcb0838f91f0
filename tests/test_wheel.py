"""The wheel holds the library as git tracks it: every file of it, and nothing else."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import maingrad

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("ddp", "fsdp", "kernels", "launch", "te_integration")


def tracked() -> list[str]:
    listing = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    return [name for name in listing.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, in a folder that is no valid package name, without a network."""
    source = tmp_path_factory.mktemp("source") / "a-b.c"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run([*command, "--wheel-dir", out, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.in_turn
def test_wheel_holds_the_tracked_library_files(wheel: zipfile.ZipFile) -> None:
    expected = {"maingrad/__init__.py", "maingrad/__main__.py", "maingrad/py.typed"}
    expected |= {f"maingrad/{name}" for name in tracked() if name.split("/")[0] in ROOMS}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == expected


def test_every_tracked_room_is_packaged() -> None:
    """A new folder of the library is easily forgotten in pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(settings["tool"]["setuptools"]["packages"])
    assert packages == {"maingrad"} | {
        f"maingrad.{name.rpartition('/')[0].replace('/', '.')}"
        for name in tracked()
        if name.split("/")[0] in ROOMS and name.endswith(".py")
    }


def metadata(wheel: zipfile.ZipFile, field: str) -> list[str]:
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    lines = wheel.read(path).decode().splitlines()
    return [line.removeprefix(f"{field}: ") for line in lines if line.startswith(f"{field}: ")]


def test_the_version_has_one_source(wheel: zipfile.ZipFile) -> None:
    assert metadata(wheel, "Version") == [maingrad.__version__]
    assert f"## [{maingrad.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_core_dependencies_are_few_and_triton_where_it_exists(wheel: zipfile.ZipFile) -> None:
    core = [each for each in metadata(wheel, "Requires-Dist") if "extra ==" not in each]
    assert [each.split(">=")[0] for each in core] == ["torch", "einops", "numpy", "triton"]
    assert "platform_machine" in core[-1]
    assert "sys_platform" in core[-1]


def test_every_dependency_is_pinned() -> None:
    """`make` installs what was tested: each name that pyproject.toml asks for has one exact version."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = [pin.partition("==")[0] for pin in settings["tool"]["uv"]["constraint-dependencies"]]
    groups = [settings["project"]["dependencies"], *settings["project"]["optional-dependencies"].values()]
    names = {each.split(">=")[0] for group in groups for each in group if not each.startswith("maingrad[")}
    assert names <= set(pins)
    assert len(pins) == len(set(pins))
