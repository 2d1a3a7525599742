"""The notebooks run from start to end, on a fresh kernel, and reach what their text promises."""

import ast
import re
from pathlib import Path

import pytest
from run_inside import module_of

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
tool = module_of(ROOT / "tools" / "run_notebooks.py")


def text_of(notebook):
    """Everything that a notebook prints."""
    return "".join(o.text for c in notebook.cells if c.cell_type == "code" for o in c.outputs if o.output_type == "stream")


def numbers(text, begin):
    """The numbers behind the line's beginning."""
    line = next(line for line in text.splitlines() if line.startswith(begin))
    return [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", line.removeprefix(begin))]


def own_environment(text):
    assert numbers(text, "mean return after training:")[0] > 0.8, "0.33 is guessing"


def memory_against_none(text):
    memory, none = numbers(text, "GRU"), numbers(text, "no memory")
    assert len(memory) == len(none) == 4
    assert memory[-1] > 0.85
    assert max(none) < 0.75
    assert "Memory is used" in text


def offline_to_online(text):
    recorder = float(re.search(r"^\d+ rollouts, mean return (\d+)$", text, re.MULTILINE).group(1))
    online = numbers(text, "returns of the evaluations, online:")
    assert max(online) > recorder + 20
    assert online[-1] > recorder


PROMISES = {f.__name__: f for f in (own_environment, memory_against_none, offline_to_online)}


def test_every_notebook_has_a_promise():
    assert {p.stem for p in NOTEBOOKS} == set(PROMISES)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_they_run_and_learn(path, tmp_path):
    PROMISES[path.stem](text_of(tool.executed(path, str(tmp_path))))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_what_is_stored_is_complete(path):
    """Readers on the web see outputs without running anything: each is there, of one execution in order, and no error is among them."""
    notebook = nbformat.read(path, as_version=4)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    outputs = [o for c in code for o in c.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    assert any("image/png" in o.get("data", {}) for o in outputs)
    PROMISES[path.stem](text_of(notebook))
    assert path.stat().st_size < 100_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_they_are_about_this_library_alone(path):
    """Only what the extras install is imported, and links lead somewhere."""
    notebook = nbformat.read(path, as_version=4)
    program = "\n".join(c.source for c in notebook.cells if c.cell_type == "code")
    nodes = list(ast.walk(ast.parse(program)))
    modules = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    modules |= {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
    assert {m.partition(".")[0] for m in modules} <= {"amago", "gymnasium", "matplotlib", "numpy", "pathlib", "tempfile"}
    for cell in notebook.cells:
        for link in re.findall(r"\]\(([^)#]+)\)", cell.source) if cell.cell_type == "markdown" else []:
            assert (path.parent / link).is_file(), link
