"""The manifests of docs/kubernetes.md are YAML, and start a command that exists."""

import re
from pathlib import Path
from typing import Any

import pytest

from maingrad.launch.cli import Train, _parse

PAGE = (Path(__file__).resolve().parents[1] / "docs/kubernetes.md").read_text()
MANIFESTS = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)


def commands(node: Any) -> list[list[str]]:
    if isinstance(node, dict):
        found = [node["command"]] if "command" in node else []
        return found + [each for value in node.values() for each in commands(value)]
    return [each for value in node for each in commands(value)] if isinstance(node, list) else []


def test_the_manifests_start_maingrad_train() -> None:
    yaml = pytest.importorskip("yaml")
    kinds = [yaml.safe_load(text)["kind"] for text in MANIFESTS]
    assert kinds == ["PyTorchJob", "JobSet"]
    for text in MANIFESTS:
        (command,) = commands(yaml.safe_load(text))
        assert command[0] == "torchrun"
        arguments = command[command.index("maingrad") + 1 :]
        parsed, rest = _parse(arguments)
        assert isinstance(parsed, Train)
        assert rest == ["--train.save-every", "500", "--train.resume", "auto"]
