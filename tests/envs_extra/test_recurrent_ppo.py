"""RecurrentPPO of sb3-contrib on a task of the suite: the same rows, and a search."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("sb3_contrib", reason="RecurrentPPO needs pip install sb3-contrib")

from benchmarks.suite import recurrent_ppo
from benchmarks.suite.recorded import is_done, points
from benchmarks.suite.tasks import TASKS

RECALL = next(task for task in TASKS if task.name == "recall8")


def test_a_run_trains_and_is_judged_until_its_budget_is_spent(tmp_path):
    path = tmp_path / "seed0.jsonl"
    settings = {"n_steps": 16, "batch_size": 64, "n_envs": 4, "n_epochs": 1}
    recurrent_ppo.train(replace(RECALL, rollouts=32), settings, 0, path, budget=4.0)
    found = points(path)
    assert is_done(path)
    assert len(found) >= 2
    assert found[0].steps == 0
    assert found[-1].cpu >= 4.0
    # the budget may be spent where an evaluation has just ended, after which the last one follows at once
    assert all(a.steps <= b.steps and a.updates <= b.updates for a, b in zip(found, found[1:]))
    assert found[0].steps < found[-1].steps
    assert found[0].updates < found[-1].updates
    assert all(-0.6 <= p.score <= 1.0 for p in found)


def test_the_best_candidate_of_the_search_is_chosen(tmp_path):
    for i, name in enumerate(recurrent_ppo.CANDIDATES):
        with pytest.raises(FileNotFoundError, match=f"has not tried {name}"):
            recurrent_ppo.searched(tmp_path, "recall8")
        path = tmp_path / "recurrent_ppo_search" / name / "recall8" / "seed100.jsonl"
        path.parent.mkdir(parents=True)
        score = 1.0 if name == "short" else 0.1 * i
        row = {"cpu": 10.0, "steps": 5, "updates": 1, "score": score}
        path.write_text("".join(json.dumps(r) + "\n" for r in ({"task": "recall8"}, row, {"done": True})))
    assert recurrent_ppo.searched(tmp_path, "recall8") == recurrent_ppo.CANDIDATES["short"]
