"""The tables of docs/results.md are those of the rows in benchmarks/results/."""

from pathlib import Path

from run_inside import module_of

ROOT = Path(__file__).resolve().parents[2]
make_results = module_of(ROOT / "docs" / "make_results.py")


def test_the_tables_of_results_are_current():
    text = make_results.PAGE.read_text()
    assert len(make_results.BLOCK.findall(text)) >= 5
    assert make_results.page(text, pictures=False) == text, "changed rows or tables: run python docs/make_results.py"


def test_the_first_picture_shows_what_the_readme_says(tmp_path):
    """It is drawn from the rows of runs, by a program of the repository."""
    program = module_of(ROOT / "docs" / "plot_adaptation.py")
    memory, none = (program.curve_and_rates(name)[1] for name in program.AGENTS.values())
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"from {memory[0]:.0%} in the first attempt to {memory[-1]:.0%} in the last" in readme
    assert f"ends at {none[-1]:.0%}" in readme
    assert program.draw(tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
