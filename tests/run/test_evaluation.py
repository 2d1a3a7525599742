"""The figures of an evaluation: returns of each rollout, intervals, attempts; the same for a run, a command and a card."""

import copy
import json
import pickle

import numpy as np
import pytest
import tiny

from amago.cli import main
from amago.envs import AMAGOEnv
from amago.envs.builtin import MetaFrozenLake
from amago.policy.card import Results
from amago.run.evaluate import summarise
from amago.run.results import Estimate, Evaluation

RETURNS = {"a": [1.0, 2.0, 6.0], "b": [0.5]}
SPECIALS = {"Attempt 0 Success in a": [0.0, 1.0, 0.0], "Attempt 1 Success in a": [1.0, 1.0, float("nan")], "Speed in b": [3.0]}


def lake():
    return AMAGOEnv(MetaFrozenLake(size=2, k_episodes=3, max_episode_steps=3), env_name="Lake")


def test_metrics_by_name_are_a_dict_and_the_figures_are_beside_them():
    found = summarise(RETURNS, SPECIALS)
    assert found["Average Total Return (Across All Env Names)"] == pytest.approx((3.0 + 0.5) / 2)
    assert isinstance(found, dict), "as programs expect"
    assert found.returns == RETURNS
    assert found.scores["a"] == Estimate.of(RETURNS["a"])
    assert list(found.attempts) == ["Attempt # Success in a"]
    assert [(i, e.mean, e.rollouts) for i, e in found.attempts["Attempt # Success in a"].items()] == [
        (1, pytest.approx(1 / 3), 3),
        (2, 1.0, 2),
    ]
    for same in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert (str(same), repr(same), same.returns) == (str(found), repr(found), found.returns)
    empty = summarise({}, {})
    assert (dict(empty), str(empty).splitlines()[0].split()[0]) == ({}, "return")


def test_all_of_it_is_json_and_that_of_a_card():
    found = json.loads(json.dumps(summarise(RETURNS, SPECIALS).as_json(), allow_nan=False))
    assert found["returns"]["a"] == {
        "mean": 3.0, "interval_95": [1.0, 6.0], "std": pytest.approx(np.std(RETURNS["a"])), "rollouts": 3, "of_each": [1.0, 2.0, 6.0],
    }  # fmt: skip
    assert found["attempts"]["Attempt # Success in a"]["2"]["mean"] == 1.0
    card = Results(RETURNS, SPECIALS, seed=3).as_json()
    assert {k: card[k] for k in found} == found
    assert card["seed"] == 3


def test_tables_have_a_line_for_each_attempt():
    text, page = (show(Evaluation({}, RETURNS, SPECIALS)) for show in (str, Evaluation._repr_html_))
    rows = [line.split() for line in text.splitlines()]
    assert ["1", "0.333", "[0,", "1]"] in rows
    assert ["2", "1", "[1,", "1]"] in rows
    assert "<td>0.333 [0, 1]</td>" in page
    assert "<script>" not in Evaluation({}, {"<script>": [1.0]}, {})._repr_html_()


def test_a_test_of_a_run_and_the_command_say_them(tmp_path, capsys):
    e = tiny.learned(tmp_path, lake, always_save_latest=True)
    (e.run_dir / "settings.yaml").write_text("env: amago.envs.builtin:MetaFrozenLake\n")
    found = e.evaluate_test(lake, timesteps=60, episodes=6)
    assert len(found.returns["Lake"]) == 6
    assert found["Average Total Return in Lake"] == pytest.approx(np.mean(found.returns["Lake"]))
    assert list(found.attempts["Attempt # Success in Lake"]) == [1, 2, 3]
    assert found["Average Rollout Length"] > 0
    run, env = str(e.run_dir), f"{__name__}:lake"
    e.close()
    capsys.readouterr()
    argv = ["eval", run, "--env", env, "--episodes", "3", "--actors", "2", "--seed", "1"]
    assert main([*argv, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["returns"]["Lake"]["rollouts"] == len(printed["returns"]["Lake"]["of_each"]) == 3
    assert printed["all"]["Number of Rollouts"] == 3
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "Attempt 0" not in out, "attempts are counted from 1, in the table"
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["1", "2", "3"]
    assert main([*argv, "--json", "--memory"]) == 2
