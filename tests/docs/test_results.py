"""The tables of docs/results.md are those of the rows in benchmarks/results/."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("make_results", ROOT / "docs" / "make_results.py")
assert SPEC is not None
assert SPEC.loader is not None
make_results = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(make_results)


def test_the_tables_of_results_are_current():
    text = make_results.PAGE.read_text()
    assert len(make_results.BLOCK.findall(text)) >= 5
    assert make_results.page(text, pictures=False) == text, "changed rows or tables: run python docs/make_results.py"


def test_the_first_picture_shows_what_the_readme_says(tmp_path):
    """It is drawn from the rows of runs, by a program of the repository."""
    spec = importlib.util.spec_from_file_location("plot_adaptation", ROOT / "docs" / "plot_adaptation.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    memory, none = (program.curve_and_rates(name)[1] for name in program.AGENTS.values())
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"from {memory[0]:.0%} in the first attempt to {memory[-1]:.0%} in the last" in readme
    assert f"ends at {none[-1]:.0%}" in readme
    assert program.draw(tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
