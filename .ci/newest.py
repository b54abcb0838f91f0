"""The front door with the newest versions that pip gives: the quick start as printed, then a sample of the tests.

    python .ci/newest.py FOLDER

FOLDER keeps a clone of the working tree with the quick start's ``.venv``, and an environment for the tests on top of
it. pip renews what has a newer version; other requirements in pyproject.toml make both environments anew.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAGE = (ROOT / "docs/quick_start.md").read_text()
PACKAGES = ["kernels", "ddp", "fsdp", "te_integration", "te_integration.pipeline", "launch"]
WATCHED = ["torch", "triton", "transformers", "accelerate", "lightning", "peft", "torchao"]
"""Where one of them is newer than its pin, more tests run: ``make test`` runs with the pins."""

SMALL = [
    "tests/kernels/test_private_names.py",
    "tests/ddp/test_torch_internals.py",
    "tests/te_integration/test_torch_internals.py",
]
LARGE = [
    "tests/test_examples.py",
    "tests/test_imports.py",
    "tests/te_integration/test_compiled.py",
    "tests/te_integration/test_convert_transformers.py",
    "tests/te_integration/pipeline",
    "tests/launch/simulation",
]
STEP = re.compile(r"^step (\d+) loss (\d\.\d{4}) norm \d+\.\d{3}$", re.MULTILINE)


def run(command: str, folder: Path, **variables: str) -> str:
    """Run a command of bash in ``folder``; returns its output, and shows it where the command fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], cwd=folder, env=environment, capture_output=True, text=True
    )
    if ended.returncode != 0:
        sys.exit(f"make test-newest: this failed in {folder}:\n{command}\n{ended.stdout[-5000:]}{ended.stderr[-5000:]}")
    return ended.stdout


def requirements(extra: str) -> list[str]:
    """What an extra asks for, with the extras that it includes, and without maingrad itself."""
    found = []
    for each in PROJECT["project"]["optional-dependencies"][extra]:
        included = re.fullmatch(r"maingrad\[(.+)\]", each)
        found += requirements(included[1]) if included else [each]
    return found


def clone(into: Path) -> None:
    """The files of the working tree that git knows or would add; ``.venv`` stays."""
    for entry in into.iterdir():
        if entry.name != ".venv":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    known = run("git ls-files -z --cached --others --exclude-standard", ROOT).split("\0")
    for name in filter(None, known):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)


def check_quick_start(folder: Path, activate: str) -> None:
    """The program of the page, with the page's command, in a new folder."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (command,) = re.findall(r"```bash\n(torchrun .*?)```", PAGE, flags=re.DOTALL)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "train.py").write_text(program)
    steps = STEP.findall(run(f"{activate}\n{command}", folder))
    if [int(number) for number, _ in steps] != list(range(1, 41)) or float(steps[-1][1]) > 3.5:
        sys.exit(f"make test-newest: the quick start does not learn: {steps}")
    again = STEP.findall(run(f"{activate}\n{command}", folder))
    if again:
        sys.exit(f"make test-newest: the quick start does not go on from its checkpoint: {again}")


def main(folder: Path) -> None:
    """Renew the environments, and check."""
    project = PROJECT["project"]
    asked = json.dumps(
        [sys.version, PROJECT["build-system"], project["dependencies"], project["optional-dependencies"]]
    )
    stamp, found = folder / "requirements", hashlib.sha256(asked.encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != found:
        shutil.rmtree(folder, ignore_errors=True)
    for each in ("clone", "tests"):
        (folder / each).mkdir(parents=True, exist_ok=True)
    clone(folder / "clone")

    # 1. The page's installation. pip is told to take what is newest, as it would in an empty environment.
    (install,) = re.findall(r"```bash\n(python3 -m venv .*?)```", PAGE, flags=re.DOTALL)
    python3 = f'export PATH="{Path(sys.executable).parent}:$PATH"\n'
    run(python3 + install, folder / "clone", PIP_UPGRADE="1", PIP_UPGRADE_STRATEGY="eager", PIP_QUIET="1")
    activate = f". {folder}/clone/.venv/bin/activate"

    # 2. Every package, without a warning of maingrad's that this torch lacks a name.
    imports = ", ".join(f"maingrad.{name}" for name in PACKAGES)
    run(f"{activate}\npython -W error::RuntimeWarning -c 'import {imports}'", folder)

    # 3. The program.
    check_quick_start(folder / "run", activate)

    # 4. A sample of the tests, on top of the same packages.
    site = run(f"{activate}\npython -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))'", folder).strip()
    python = folder / "tests/bin/python"
    if not python.exists():
        run(f"{sys.executable} -m venv {folder}/tests", folder)
    own = run(f"{python} -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))'", folder).strip()
    Path(own, "quick_start.pth").write_text(f"{site}\n")
    wanted = " ".join(f"'{each}'" for each in requirements("test"))
    run(f"{python} -m pip install --quiet --upgrade --upgrade-strategy eager {wanted}", folder)
    stamp.write_text(found)

    code = f"import importlib.metadata as found; print(*(f'{{name}}=={{found.version(name)}}' for name in {WATCHED}))"
    versions = run(f'{python} -c "{code}"', folder).split()
    newer = sorted(set(versions) - set(PROJECT["tool"]["uv"]["constraint-dependencies"]))
    sample = " ".join(SMALL + (LARGE if newer else []))
    print(f"make test-newest: {' '.join(versions)}; not the pins: {' '.join(newer) or 'none'}", flush=True)
    print(run(f"{python} -m pytest -q -p no:cacheprovider -m 'not slow and not gpu' {sample}", ROOT).strip())


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
