"""Environment steps: a budget of them, those that other processes deliver, and epsilon, which falls with them."""

import numpy as np
import pytest
import tiny
from messages import names
from tiny import rows

from amago import config
from amago.cli_utils import switch_async_mode
from amago.envs.exploration import BilevelEpsilonGreedy, EpsilonGreedy
from amago.loading import DiskTrajDataset, MixtureOfDatasets
from amago.run.checkpoint import CheckpointError


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


def test_a_resumed_run_with_more_steps_and_other_actors(tmp_path, capsys):
    tiny.learned(tmp_path, total_steps=25, ckpt_interval=1).close()
    e = tiny.learned(tmp_path, total_steps=100, ckpt_interval=1, resume="auto", parallel_actors=3, verbose=True)
    assert names(capsys.readouterr().out, "run_epoch_1", "4 gradient steps", "26 environment steps")
    assert steps_of(e) == [24, 26, 62, 98, 101], "3 actors take 36 steps in an epoch, and the last one each"
    assert (e.frames_by_env, e.learner.grad_steps) == ({"TMaze": 101}, 10)
    times = [row["wall_time"] for row in rows(e.run_dir)]
    assert times == sorted(times)
    e.total_steps = 104
    e.learn()
    assert steps_of(e)[-1] == 104


def test_a_learner_ends_when_so_many_are_delivered(tmp_path):
    assert collect(tmp_path, epochs=2, total_steps=36) == 36
    e = learner(tmp_path, total_steps=36, epochs=50)
    e.learn()
    assert (e.epoch, steps_of(e)) == (1, [36])


def collect(root, epochs=1, **fields):
    e = switch_async_mode(tiny.experiment(root, epochs=epochs, seed=None, **fields), "collect")
    e.epochs = epochs
    e.start()
    e.learn()
    e.close()
    return e.env_steps


def learner(root, **fields):
    e = switch_async_mode(tiny.experiment(root, **fields), "learn")
    e.start()
    return e


def test_steps_that_were_deleted_still_count_also_after_a_resume(tmp_path):
    def learn(epochs):
        data = DiskTrajDataset(tmp_path, "run", dset_max_size=1)
        return learner(tmp_path, dataset=data, ckpt_interval=1, resume="auto", epochs=epochs)

    collect(tmp_path)
    e = learn(1)
    e.learn()
    collect(tmp_path)
    e.data.on_end_of_collection()
    assert e.env_steps == 48
    assert e.data.store.info()["evicted"] > 0
    e.save_checkpoint()
    e.close()
    collect(tmp_path)
    assert learn(2).env_steps == 72, "those before the training state, and those that came while nobody learned"


def test_files_that_are_never_deleted_were_not_collected(tmp_path):
    collect(tmp_path)
    fifo, protected = tmp_path / "run" / "buffer" / "fifo", tmp_path / "run" / "buffer" / "protected"
    for path in fifo.glob("*.safetensors"):
        path.rename(protected / path.name)
    assert learner(tmp_path).env_steps == 0


def test_a_mixture_counts_what_its_collecting_data_set_receives(tmp_path):
    collect(tmp_path)
    mixture = MixtureOfDatasets(
        [DiskTrajDataset(tmp_path, "run"), DiskTrajDataset(tmp_path, "other")], [0.5, 0.5], collect_into=0
    )
    assert learner(tmp_path, dataset=mixture).env_steps == 24


def test_a_collector_has_no_optimizer_and_says_so(tmp_path):
    first = learner(tmp_path, name="other")
    first.save_checkpoint()
    e = switch_async_mode(tiny.experiment(tmp_path), "collect")
    e.start()
    assert e.optimizer is None
    with pytest.raises(CheckpointError, match="only collects"):
        e.load_checkpoint_from_path(str(first.checkpoints.of_epoch(0)))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_environments_may_be_deleted_and_are_started_again_when_they_are_needed(tmp_path, mode):
    e = tiny.learned(tmp_path, env_mode=mode, env_workers=1)
    before = e.train_envs
    del e.train_envs, e.val_envs
    with pytest.raises(ValueError, match="the pool is closed"):
        before.step(np.zeros((2, 1), np.int64))
    e.collect_new_training_data()
    e.evaluate_val()
    assert e.train_envs is not before


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
    config.bind({"BilevelEpsilonGreedy.rollout_horizon": tiny.EPISODE, "EpsilonGreedy.steps_anneal": 1_000_000})  # of the other
    assert epsilons(tmp_path, exploration_wrapper_type=BilevelEpsilonGreedy)[EPOCHS // 2] == pytest.approx(0.05)


def test_a_run_that_begins_with_trained_weights_does_not_begin_at_random(tmp_path):
    tiny.learned(tmp_path, name="before", ckpt_interval=1).close()
    assert epsilons(tmp_path, init_from=tmp_path / "before") == pytest.approx([0.05] * EPOCHS)
    config.bind({"EpsilonGreedy.steps_anneal": EPOCHS * STEPS})  # as settings of the zoo do
    assert epsilons(tmp_path, "again", init_from=tmp_path / "before") == pytest.approx([0.05] * EPOCHS)
    config.bind({"EpsilonGreedy.eps_start": 1.0})
    assert epsilons(tmp_path, "explores", init_from=tmp_path / "before")[0] == pytest.approx(1 - 0.95 / EPOCHS)
    config.bind({"BilevelEpsilonGreedy.rollout_horizon": tiny.EPISODE, "BilevelEpsilonGreedy.eps_end_end": 0.05})
    bilevel = {"init_from": tmp_path / "before", "exploration_wrapper_type": BilevelEpsilonGreedy}
    assert epsilons(tmp_path, "bilevel", **bilevel) == pytest.approx([0.05] * EPOCHS)
    config.bind({"BilevelEpsilonGreedy.eps_start_start": 1.0})
    assert epsilons(tmp_path, "bilevel_explores", **bilevel)[0] > 0.5
