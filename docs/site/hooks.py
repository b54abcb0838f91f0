"""Gives the site the repository's own layout, so that relative links mean the same on GitHub and on the site."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("ddp", "fsdp", "kernels", "launch", "te_integration")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "tests/fuzz/README.md")
NOT_PAGES = ("mkdocs.yml", "site")
SECTIONS = (
    ("Use", "docs/*.md"),
    ("Use", "docs/examples/*.md"),
    ("Reference", "docs/reference/*.md"),
    ("Benchmarks", "docs/benchmarks/*.md"),
)


def on_startup(**_: Any) -> None:
    """The package for the API reference: griffe reads what it finds, and the checkout holds more than the package."""
    package = ROOT / ".build/api/maingrad"
    package.mkdir(parents=True, exist_ok=True)
    for name in ("__init__.py", *ROOMS):
        link = package / name
        if not link.is_symlink():
            link.symlink_to(ROOT / name)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Pages that the navigation does not name come last in their section."""
    sections = {name: pages for section in config.nav or [] for name, pages in section.items()}
    named = {page for pages in sections.values() for page in _leaves(pages)}
    for name, pattern in SECTIONS:
        found = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))
        sections[name] += [page for page in found if page not in named]
        named.update(found)
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """README.md is the home page, docs/x.md is at docs/x/, and whatever a page links to is beside it."""
    for file in list(files):
        if file.abs_src_path and Path(file.abs_src_path).is_relative_to(ROOT / "docs"):
            files.remove(file)
    inside = (path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*") if path.is_file())
    names = {*PAGES, *(str(path) for path in inside if path.parts[1] not in NOT_PAGES)}
    names |= {link for name in names if name.endswith(".md") for link in _linked(name)}
    for name in sorted(names):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def _leaves(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from _leaves(each)


def _linked(page: str) -> Iterator[str]:
    """Files of the repository that a page links to."""
    for link in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text(encoding="utf-8")):
        target = (ROOT / page).parent.joinpath(link).resolve()
        if target.is_file() and target.is_relative_to(ROOT):
            yield str(target.relative_to(ROOT))
