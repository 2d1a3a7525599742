"""A budget of environment steps in place of epochs."""

import pytest
import tiny

from amago.cli_utils import switch_async_mode


def steps_of(e):
    """Environment steps at the end of each epoch."""
    return [row["env_steps"] for row in tiny.rows(e.run_dir, "train")]


@pytest.mark.parametrize(("total", "taken"), [(24, [24]), (25, [24, 26]), (60, [24, 48, 60]), (11, [12])])
def test_a_run_takes_exactly_its_steps(tmp_path, total, taken):
    e = tiny.learned(tmp_path, total_steps=total, epochs=500)
    assert steps_of(e) == taken, "2 actors take 12 steps each in an epoch, and the last epoch what is left"
    assert e.epochs == len(taken)


@pytest.mark.parametrize("stop", [1, 2])
def test_a_resumed_run_is_the_same_run(tmp_path, stop):
    settings = {"total_steps": 60, "ckpt_interval": 1, "lr_cooldown": 0.5}
    straight = tiny.learned(tmp_path / "a", **settings)
    tiny.learned(tmp_path / "b", **settings, callbacks=[tiny.StopAfter(stop)]).close()
    resumed = tiny.learned(tmp_path / "b", **settings, resume="auto")
    assert (steps_of(resumed), resumed.epochs) == (steps_of(straight), 3)
    assert resumed.grad_update_counter == straight.grad_update_counter


def test_a_resumed_run_with_more_steps_and_other_actors(tmp_path):
    tiny.learned(tmp_path, total_steps=25, ckpt_interval=1).close()
    e = tiny.learned(tmp_path, total_steps=100, ckpt_interval=1, resume="auto", parallel_actors=3)
    assert steps_of(e) == [24, 26, 62, 98, 101], "3 actors take 36 steps in an epoch, and the last one each"
    e.total_steps = 104
    e.learn()
    assert steps_of(e)[-1] == 104


def test_a_learner_ends_when_so_many_are_delivered(tmp_path):
    collector = switch_async_mode(tiny.experiment(tmp_path, seed=None, total_steps=36), "collect")
    collector.start()
    collector.learn()
    collector.close()
    assert collector.env_steps == 36
    learner = switch_async_mode(tiny.experiment(tmp_path, total_steps=36, epochs=50), "learn")
    learner.start()
    learner.learn()
    assert (learner.epoch, steps_of(learner)) == (1, [36])
