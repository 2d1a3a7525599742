"""The docs site: it builds without a warning, and its reference has every public name."""

import ast
import importlib
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from frozen.public_names import imported_in_docs

import amago

pytest.importorskip("mkdocs", reason="the site needs the extra `docs`")
pytest.importorskip("mkdocstrings_handlers.python", reason="the site needs the extra `docs`")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def entries(site: Path) -> set[str]:
    """Names with an entry in the reference, from the inventory that other projects' docs link with."""
    compressed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split()[0] for line in zlib.decompress(compressed).decode().splitlines()}


def _lists_of_names() -> dict[str, list[str]]:
    """Every ``__all__`` of the library, read without importing (adapters need packages that may be missing)."""
    found = {}
    for path in (ROOT / "amago").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" and path.parent != ROOT / "amago":
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                found[module] = ast.literal_eval(node.value)
    return found | {"amago": [name for name in amago.__all__ if name != "__version__"]}


def _home(module: str, name: str) -> str:
    """Where the object behind a public name was defined."""
    value: Any = getattr(importlib.import_module(module), name)
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else f"{module}.{name}"


def test_listed_names_have_an_entry(entries: set[str]) -> None:
    missing = []
    for module, names in _lists_of_names().items():
        for name in names:
            dotted = f"{module}.{name}"
            module_of_others = any(entry.startswith(f"{dotted}.") for entry in entries)
            if dotted not in entries and not module_of_others and _home(module, name) not in entries:
                missing.append(dotted)
    assert not missing, "no entry in docs/api; give each a docstring, and its module a line `::: module`"


def test_names_that_users_import_have_an_entry(entries: set[str]) -> None:
    used = set(imported_in_docs())
    assert len(used) > 40
    used = {(m, n) for m, n in used if not re.search(r"\._|^amago\.cli\b", f"{m}.{n}")}
    missing = [f"{m}.{n}" for m, n in sorted(used) if f"{m}.{n}" not in entries and _home(m, n) not in entries]
    assert not missing, "pages or examples import them, and docs/api has no entry"


def test_every_field_of_experiment_is_described(site: Path) -> None:
    text = (site / "api" / "experiment.html").read_text(encoding="utf-8")
    described = set(re.findall(r"<code>(\w+)</code>", text))
    assert described >= set(amago.Experiment.__dataclass_fields__)


def test_names_become_links(site: Path) -> None:
    page = (site / "architecture.html").read_text(encoding="utf-8")
    assert re.search(r'<a [^>]*href="api/data\.html#amago\.\S*Timestep"[^>]*><code>amago\.hindsight\.Timestep</code></a>', page)
    page = (site / "environments.html").read_text(encoding="utf-8")
    assert re.search(r'<a [^>]*href="api/envs\.html#amago\.\S*AMAGOEnv"[^>]*><code>AMAGOEnv</code></a>', page)


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text(encoding="utf-8"))
        assert not fetched, f"{page.name} loads {fetched}"


def test_search_works_from_disk(site: Path) -> None:
    """Pages opened from disk can neither fetch the index nor start a worker: both come with the site as scripts."""
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index = {")
    for page in (site / "index.html", site / "api" / "agent.html"):
        (script,) = re.findall(r'<script src="([^"]*iframe-worker[^"]*)"', page.read_text(encoding="utf-8"))
        assert "window.Worker" in (page.parent / script).read_text(encoding="utf-8")
