"""Rules that find in a log why a run may learn nothing: in the run, in `amago doctor RUN`, and on the page that explains them."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest
import tiny
from runs_on_disk import RETURN, append, write_settings

from amago.cli import main
from amago.run.callbacks import LogRow
from amago.run.rules import RULES, findings

PAGE = Path(__file__).parents[2] / "docs" / "common_mistakes.md"
HIGHEST, LOWEST, APPROVED = "Reward in Batch (max)", "Reward in Batch (min)", "Pct. of Actions Approved by Filter (main gamma)"


def log(epochs=40, seconds=(1, 20, 9), grows=0.0, **numbers):
    """The log of a healthy run, in which some numbers, of an epoch, are others."""
    found = []
    for n in range(epochs):
        usual = {"score": n, "rollouts": 20, "reward": 1.0, "loss": 0.5, "entropy": 1.1 - n / epochs, "approved": 40}
        now = {k: v(n) if callable(v) else v for k, v in (usual | numbers).items()}
        train = {
            HIGHEST: now["reward"],
            LOWEST: 0.0,
            "Critic Loss": now["loss"],
            "Policy Entropy": now["entropy"],
            APPROVED: now["approved"],
        }
        at, begin, memory = {"epoch": n, "env_steps": 100 * n}, n * sum(seconds), 1.0 + grows * n
        ends = [begin + sum(seconds[: i + 1]) for i in range(3)]
        found += [
            LogRow("val", {RETURN: now["score"], "Number of Rollouts": now["rollouts"], "Success": 1.0}, grad_steps=50 * n, wall_time=ends[0], **at),
            LogRow("rollout", {RETURN: now["score"]}, grad_steps=50 * n, wall_time=ends[1], **at),
            LogRow("buffer", {"trajectories": n}, grad_steps=50 * n, wall_time=ends[1], memory=memory, **at),
            LogRow("train", train, grad_steps=50 * n + 50, wall_time=ends[2], **at),
        ]  # fmt: skip
    return found


CASES = {
    "huge rewards": ({"reward": -1e6, "loss": 1e6}, {"reward": 1e6, "loss": 30.0}),
    "no reward": ({"reward": 0.0}, {"reward": lambda n: 0.0 if n else 1.0}),
    "collapsed policy": (
        {"entropy": lambda n: 1.1 if n == 0 else 0.01, "score": 0.0},
        {"entropy": lambda n: 1.1 if n == 0 else 0.01},  # it is sure of what it does, and its return has risen
    ),
    "few approved": ({"approved": 15, "score": lambda n: -n}, {"approved": 15}),
    "few rollouts": ({"rollouts": 4}, {"rollouts": lambda n: 5 if n else 1}),
    "slow environments": ({"seconds": (1, 40, 1)}, {"seconds": (1, 40, 5)}),
    "growing memory": ({"grows": 0.1}, {"grows": 0.001}),
}


@pytest.mark.parametrize("name", RULES)
def test_each_rule_finds_its_fault_alone_and_not_in_a_run_without_it(name):
    faulty, healthy = CASES[name]
    ((found, words, advice),) = findings(log(**faulty))
    assert found == name
    assert words
    assert advice
    assert list(findings(log(**healthy))) == []


def test_the_first_rows_are_no_fault():
    for rows in range(9):
        assert list(findings(log(reward=0.0)[:rows])) == []


def test_what_is_not_a_number_is_left_out():
    rows = log(loss=None, reward=float("nan"), entropy=float("inf"), approved=None)
    assert list(findings(rows)) == []


def test_the_run_says_it_once_and_the_doctor_later(tmp_path, capsys):
    e = tiny.learned(tmp_path, verbose=True, epochs=3, val_interval=1, val_timesteps_per_epoch=tiny.EPISODE + 1)
    e.close()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert len(said) == 1
    assert "2 rollouts" in said[0]
    assert "val_timesteps_per_epoch" in said[0]
    assert main(["doctor", str(e.run_dir)]) == 0
    assert re.search(r"note +few rollouts .*2 rollouts", capsys.readouterr().out)
    assert all(row.get("memory", 1.0) > 0.01 for row in tiny.rows(e.run_dir))
    assert [row["section"] for row in tiny.rows(e.run_dir) if "memory" in row] == ["buffer"] * 3


def test_the_doctor_reads_logs_of_earlier_versions(tmp_path, capsys):
    keys = ("epoch", "env_steps", "grad_steps", "wall_time", "section", "values")
    append(tmp_path / "run", *({k: asdict(row)[k] for k in keys} for row in log(reward=0.0)))
    write_settings(tmp_path / "run", [{"time": "2026-01-01T00:00:00", "role": "learn"}])
    assert main(["doctor", str(tmp_path / "run")]) == 0
    assert "no reward was seen in 2,000 updates" in capsys.readouterr().out


def test_every_mistake_on_the_page_names_its_rule_or_why_there_is_none():
    text = PAGE.read_text()
    named = (
        re.findall(r"[Rr]ule:\*? ([^.|\n]+)", text)
        + re.findall(r"\| ([^|\n]+) \|\n", text.partition("## Figures that tell")[2].partition("\n## ")[0])[1:]
    )
    assert set(RULES) <= {name for cell in named for name in RULES if name in cell}
    assert all(any(rule in cell for rule in RULES) or "none: " in cell or set(cell) <= {"-", " "} for cell in named), named
    for section in re.split(r"\n## ", text)[3:]:
        assert "rule" in section.lower(), section.splitlines()[0]
