"""The long runs: their commands, their settings, and what is said of their cost."""

from pathlib import Path
from typing import Any

import gin
import numpy as np
import pytest

from amago import config
from benchmarks import long_runs
from benchmarks.long_run_cases import RUNS, build

PAGE = (Path(__file__).parents[2] / "docs" / "long_runs.md").read_text()
SHORT = "--max_seq_len 16 --batch_size 2 --parallel_actors 10"  # but with the real networks
NAMES = [run.name for run in RUNS]


@pytest.mark.parametrize("run", RUNS, ids=NAMES)
def test_settings_of_the_zoo_are_those_of_the_run(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of a zoo file is without effect: beaten by an argument of the script, or for a class that the run has not."""
    with config.temporary({}):
        config.parse_files([f"zoo/{run.name}"])
        wanted = config.bindings()
    assert wanted
    gin.config._OPERATIVE_CONFIG.clear()  # what gin has given to whom
    experiment, agent = build(run)
    given = {f"{selector}.{k}": v for (_, selector), found in gin.config._OPERATIVE_CONFIG.items() for k, v in found.items()}
    assert {name: given.get(name, "nothing") for name in wanted} == wanted
    assert agent.max_seq_len == experiment.max_seq_len


def test_the_table_of_costs() -> None:
    costs = [long_runs.measure(run, 16, *SHORT.split()) for run in RUNS[:2]]
    for cost in costs:
        parts = [getattr(cost, name) for name in ("env_steps", "updates", "operations", "activations", "parameters", "disk")]
        assert min(*parts, *cost.hours_here(), *cost.hours_on_gpu(20.0, 5.0, 8), cost.batch_bytes) > 0
        assert all(np.isfinite(parts))
    counted, timed = (part.splitlines() for part in long_runs.table(costs, 20.0, 5.0, 8).split("\n\n"))
    for lines in (counted, timed):
        assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]] == [run.title for run in RUNS[:2]]
        assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize("run", RUNS, ids=NAMES)
def test_the_page_has_the_command_and_the_counts(run: Any) -> None:
    assert f"{run.command} --run_name {run.name} --buffer_dir runs\n" in PAGE
    experiment, agent = build(run)
    steps, updates = long_runs.workload(experiment)
    parameters = sum(p.numel() for p in agent.trainable_params)  # type: ignore[attr-defined]
    told = f"| {run.title} | {steps * experiment.parallel_actors / 1e6:.0f} million | {updates:,} | {parameters / 1e6:.1f} million |"
    assert told in PAGE
