"""Epsilon falls within the run, unless its schedule was set."""

import pytest
import tiny
from tiny import rows

from amago import config
from amago.envs.exploration import BilevelEpsilonGreedy, EpsilonGreedy

EPOCHS, STEPS = 8, 12


def epsilons(directory, name="run", **fields):
    """Epsilon after each of the epochs of a run, without the random factor of each rollout."""
    config.bind({"EpsilonGreedy.randomize_eps": False, "BilevelEpsilonGreedy.randomize_eps": False})
    fields = {"train_batches_per_epoch": 0, "epochs": EPOCHS, "train_timesteps_per_epoch": STEPS, **fields}
    tiny.learned(directory, name=name, **fields).close()
    return [r["values"]["Epsilon"] for r in rows(directory / name) if r["section"] == "rollout"]


@pytest.mark.parametrize("env_mode", ["sync", "async"])
def test_epsilon_falls_over_the_first_half_of_a_run(tmp_path, env_mode, capsys):
    found = epsilons(tmp_path, env_mode=env_mode, verbose=True)
    assert found == pytest.approx([1 - 0.95 * min(1.0, e / 4) for e in range(1, EPOCHS + 1)])
    assert "EpsilonGreedy, epsilon 1.00 -> 0.05 in this run" in capsys.readouterr().out


def test_epochs_without_collection_do_not_count(tmp_path):
    assert epsilons(tmp_path, start_collecting_at_epoch=4)[1:] == pytest.approx([0.05] * 3)


@pytest.mark.parametrize("length", [960, 1_000_000])
def test_a_schedule_that_was_set_stays(tmp_path, length, capsys):
    config.bind({"EpsilonGreedy.steps_anneal": length})
    assert epsilons(tmp_path, verbose=True)[-1] == pytest.approx(1 - 0.95 * EPOCHS * STEPS / length)
    assert f"epsilon 1.00 -> {1 - 0.95 * EPOCHS * STEPS / length:.2f} in this run" in capsys.readouterr().out


class Short(EpsilonGreedy):
    def __init__(self, amago_env):
        super().__init__(amago_env, eps_end=0.5, steps_anneal=STEPS)


def test_a_subclass_keeps_its_own_schedule(tmp_path):
    assert epsilons(tmp_path, exploration_wrapper_type=Short) == [0.5] * EPOCHS


def test_bilevel_epsilon_falls_within_the_run_too(tmp_path):
    config.bind({"BilevelEpsilonGreedy.rollout_horizon": tiny.EPISODE})
    assert epsilons(tmp_path, exploration_wrapper_type=BilevelEpsilonGreedy)[EPOCHS // 2] == pytest.approx(0.05)


def test_a_run_that_begins_with_trained_weights_does_not_begin_at_random(tmp_path):
    tiny.learned(tmp_path, name="before", ckpt_interval=1).close()
    assert epsilons(tmp_path, init_from=tmp_path / "before") == pytest.approx([0.05] * EPOCHS)
    config.bind({"EpsilonGreedy.steps_anneal": EPOCHS * STEPS})
    assert epsilons(tmp_path, "again", init_from=tmp_path / "before")[0] == pytest.approx(1 - 0.95 / EPOCHS)


def test_a_resumed_run_goes_on_where_it_was(tmp_path):
    whole = epsilons(tmp_path, "whole")
    fields = {"ckpt_interval": 1, "resume": "auto"}
    assert epsilons(tmp_path, "halves", **fields, callbacks=[tiny.StopAfter(3)]) == whole[:3]
    assert epsilons(tmp_path, "halves", **fields) == whole
