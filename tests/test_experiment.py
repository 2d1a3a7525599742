"""The public behaviour of `Experiment`, from start() to evaluate_test()."""

import json
import math
import multiprocessing
import os
from contextlib import closing

import numpy as np
import pytest
import tiny
from messages import refused
from tiny import EPISODE, experiment, learned, rows, started

import amago
from amago import config
from amago.envs import make_pool
from amago.envs.exploration import EpsilonGreedy
from amago.loading import DatasetSettings, DiskTrajDataset, DoNothingDataset
from amago.run import console
from amago.run.data import NothingTrainedError

ROW = {"epoch", "env_steps", "grad_steps", "wall_time", "section", "values"}
TOTAL = "Average Total Return (Across All Env Names)"


@pytest.mark.parametrize(("traj", "make_env"), [("ff", tiny.cartpole), ("gru", tiny.pendulum), ("transformer", tiny.bits)])
def test_every_sequence_model_learns_in_every_action_space(tmp_path, make_env, traj):
    e = started(
        tmp_path, make_env, traj, train_timesteps_per_epoch=35, max_seq_len=10, val_timesteps_per_epoch=31, val_interval=1
    )
    before = tiny.weights(e)
    e.learn()
    assert (e.learner.grad_steps, e.learner.skipped) == (2, 0)
    trained = {id(p) for p in e.policy.trainable_params}
    moved = set(tiny.differing(before, tiny.weights(e)))
    assert {n for n, p in e.policy.named_parameters() if id(p) in trained and p.abs().sum() > 0} - moved == set()
    metrics = e.evaluate_test(make_env, timesteps=31)
    assert metrics["Number of Rollouts"] >= 2
    assert math.isfinite(metrics[TOTAL])


@pytest.mark.parametrize("env_mode", ["sync", "async", "already_vectorized"])
def test_every_env_mode(tmp_path, env_mode):
    make = tiny.cartpoles if env_mode == "already_vectorized" else tiny.cartpole
    fields = {"make_env": make, "env_mode": env_mode, "train_timesteps_per_epoch": 35, "val_timesteps_per_epoch": 31}
    with closing(learned(tmp_path, val_interval=1, env_workers=2 if env_mode == "async" else None, **fields)) as e:
        only_reset = 0 if env_mode != "already_vectorized" else rows(e.run_dir, "rollout")[0]["values"]["Number of Rollouts"]
        assert 70 - only_reset <= e.env_steps <= 70 - min(only_reset, 1)
        assert e.learner.grad_steps == 2
        assert rows(e.run_dir, "val")[0]["values"]["Number of Rollouts"] >= 2
        assert rows(e.run_dir, "rollout")[0]["values"]["Number of Rollouts"] >= 2
        assert e.evaluate_test(make, timesteps=31)["Number of Rollouts"] >= 2
    assert not multiprocessing.active_children()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of two epochs that writes all kinds of files."""
    root = tmp_path_factory.mktemp("finished")
    files = {"ckpt_interval": 1, "always_save_latest": True, "log_interval": 1, "save_trajs_as": "npz"}
    e = learned(root, traj="gru", epochs=2, val_interval=1, **files)
    e.evaluate_test(tiny.tmaze, timesteps=EPISODE + 1)
    e.close()
    return e


def test_the_directory_is_as_documented(finished):
    run = finished.run_dir
    assert {p.name for p in run.iterdir()} >= {"config.txt", "policy.json", "policy.pt", "metrics.jsonl", "ckpts", "buffer"}
    assert sorted(p.name for p in (run / "ckpts").iterdir()) == ["config.txt", "latest", "policy_weights", "training_states"]
    assert sorted(p.name for p in (run / "ckpts" / "training_states").iterdir()) == ["run_epoch_0", "run_epoch_1"]
    assert sorted(p.name for p in (run / "ckpts" / "policy_weights").iterdir()) == ["policy_epoch_0.pt", "policy_epoch_1.pt"]
    assert (run / "policy.pt").resolve() == (run / "ckpts" / "latest" / "policy.pt").resolve()
    assert len(list((run / "buffer" / "fifo").glob("*.npz"))) == 8  # 2 epochs, 2 actors, 2 episodes
    assert not [p for p in run.rglob("*") if p.name.startswith((".tmp", ".old"))]


def test_rows_have_the_documented_keys_and_sections(finished):
    found = rows(finished.run_dir)
    assert all(set(r) - {"memory"} == ROW for r in found)
    assert {r["section"] for r in found} == {"rollout", "val", "test", "train", "buffer"}
    assert all(isinstance(v, float) or v is None for r in found for v in r["values"].values())
    times = [r["wall_time"] for r in found]
    assert times == sorted(times)


def test_progress_is_counted(finished):
    per_epoch = 2 * 2 * EPISODE
    assert (finished.epoch, finished.env_steps, finished.learner.grad_steps) == (2, 2 * per_epoch, 4)
    found = {
        s: [(r["epoch"], r["env_steps"], r["grad_steps"]) for r in rows(finished.run_dir, s)]
        for s in ("val", "rollout", "test")
    }
    assert found["val"] == [(0, 0, 0), (1, per_epoch, 2)]
    assert found["rollout"] == [(0, per_epoch, 0), (1, 2 * per_epoch, 2)]
    assert found["test"] == [(2, 2 * per_epoch, 4)]
    assert rows(finished.run_dir, "train")[-1]["grad_steps"] == 4


def test_names_of_training_metrics(finished):
    values = rows(finished.run_dir, "train")[-1]["values"]
    assert set(values) >= {
        "Actor Loss", "Critic Loss", "Sequence Length", "Batch Size (in Timesteps)", "Unmasked Batch Size (in Timesteps)",
        "Gradient Norm", "Learning Rate", "Skipped Updates", "TrajEncoder Grad Norm", "Q(s, a) (gamma=0.999)", "Q(s, a) (gamma=0.9)",
    }  # fmt: skip
    assert (values["Sequence Length"], values["Skipped Updates"]) == (EPISODE + 1, 0.0)


def test_the_summary_is_printed(tmp_path, capsys):
    learned(tmp_path, verbose=True, val_interval=1).close()
    out, err = capsys.readouterr()
    assert "seed" in out
    assert "trainable parameters" in out
    assert "0 to 1; evaluation every epoch, no checkpoint" in out
    assert err == ""


@pytest.mark.parametrize("large", [False, True])
def test_a_large_agent_on_a_cpu_is_told_what_is_faster(tmp_path, capsys, monkeypatch, large):
    monkeypatch.setattr(console, "LARGE", 1_000 if large else 10**9)
    started(tmp_path, verbose=True).close()
    assert ("Fast on a CPU" in capsys.readouterr().out) is large


BEFORE_START = {
    "learn": (), "evaluate_val": (), "evaluate_test": (tiny.tmaze, 5), "collect_new_training_data": (), "load_checkpoint_from_path": ("x",),
    "load_checkpoint": (0,), "save_checkpoint": (), "write_latest_policy": (), "read_latest_policy": (), "delete_buffer_from_disk": (),
}  # fmt: skip


@pytest.mark.parametrize("name", BEFORE_START)
def test_nothing_works_before_start(tmp_path, name):
    e = experiment(tmp_path)
    with refused(RuntimeError, f"start() before {name}()"):
        getattr(e, name)(*BEFORE_START[name])
    assert not e.run_dir.exists()


def test_more_epochs_may_be_asked_for(tmp_path):
    e = learned(tmp_path)
    before = tiny.weights(e)
    e.learn()
    assert not tiny.differing(before, tiny.weights(e)), "nothing is left to do"
    e.epochs = 3
    e.learn()
    assert (e.epoch, e.learner.grad_steps) == (3, 6)


def test_a_failing_start_leaves_nothing_running(tmp_path):
    config.bind({"Agent.num_critics": 0})
    e = experiment(tmp_path, env_mode="async", env_workers=1)
    with pytest.raises(ValueError, match="num_critics"):
        e.start()
    assert not multiprocessing.active_children()


def test_fields_have_gin_defaults(tmp_path):
    config.bind({"Experiment.batch_size": 3, "Experiment.learning_rate": 0.5})
    e = amago.Experiment(
        run_name="a", ckpt_base_dir=str(tmp_path), max_seq_len=3, tstep_encoder_type=tiny.FFTstepEncoder,
        traj_encoder_type=tiny.FFTrajEncoder, agent_type=amago.Agent, val_timesteps_per_epoch=3, make_train_env=tiny.tmaze,
        make_val_env=tiny.tmaze, dset_root=str(tmp_path), dset_name="a",
    )  # fmt: skip
    assert (e.batch_size, e.learning_rate) == (3, 0.5)


def test_root_and_name_make_the_data_set(tmp_path):
    limits = {"dset_max_size": 3, "dset_max_steps": 50, "dset_max_bytes": 1e9}
    e = learned(tmp_path, dataset=None, dset_root=str(tmp_path / "data"), dset_name="mine", **limits)
    assert isinstance(e.dataset, DiskTrajDataset)
    assert (e.dataset.dset_max_size, e.dataset.dset_max_steps, e.dataset.dset_max_bytes) == (3, 50, 1e9)
    assert list((tmp_path / "data" / "mine" / "buffer" / "fifo").iterdir())


def test_a_list_gives_each_actor_its_own_environment(tmp_path):
    def named(name):
        return lambda: amago.envs.AMAGOEnv(tiny.TMazePassive(tiny.CORRIDOR), env_name=name)

    e = learned(tmp_path, make_train_env=[named("a"), named("b")], make_val_env=iter([named("c"), named("d")]), val_interval=1)
    assert e.frames_by_env == {"a": 2 * EPISODE, "b": 2 * EPISODE}
    assert {"Average Total Return in c", "Average Total Return in d"} <= set(rows(e.run_dir, "val")[0]["values"])
    assert e.x_axis_metrics() == {
        "Epoch": 1, "total_frames": 4 * EPISODE, "gradient_steps": 2, "total_frames-a": 12, "total_frames-b": 12,
    }  # fmt: skip


def actions_taken(e):
    return np.concatenate([e.dataset.store.read(i).actions[:, 0] for i in range(len(e.dataset.store))])


def test_without_exploration_the_policy_acts(tmp_path):
    fields = {"sample_actions_train": False, "train_timesteps_per_epoch": 20 * EPISODE, "train_batches_per_epoch": 0}
    config.bind({"EpsilonGreedy.randomize_eps": False, "EpsilonGreedy.steps_anneal": 1_000_000})
    noisy = learned(tmp_path, name="noisy", exploration_wrapper_type=EpsilonGreedy, **fields)
    pure = learned(tmp_path, name="pure", exploration_wrapper_type=None, **fields)
    shares = [np.bincount(actions_taken(e), minlength=4) / (40 * EPISODE) for e in (noisy, pure)]
    assert shares[0].max() < 0.4  # eps is nearly 1: uniform over four actions
    assert shares[1].max() > 0.5  # a fresh policy's mode hardly depends on what it sees


@pytest.mark.parametrize(("every", "forced"), [(None, 0), (1, 2), (2, 1)])
def test_training_environments_are_reset_when_asked(tmp_path, every, forced):
    resets = []

    class Counted(tiny.TMazePassive):
        def reset(self, **kwargs):
            resets.append(1)
            return super().reset(**kwargs)

    def make():
        return amago.envs.AMAGOEnv(Counted(50), env_name="Long")  # no episode ends by itself

    short = {"train_timesteps_per_epoch": 4, "train_batches_per_epoch": 0, "parallel_actors": 1}
    learned(tmp_path, make, epochs=3, force_reset_train_envs_every=every, **short).close()
    assert len(resets) == 1 + forced


def test_learning_and_collecting_can_begin_later(tmp_path):
    e = learned(tmp_path, epochs=3, start_learning_at_epoch=2)
    assert (e.learner.grad_steps, {r["epoch"] for r in rows(e.run_dir, "train")}) == (2, {2})
    assert [r["env_steps"] for r in rows(e.run_dir, "rollout")] == [24, 48, 72]
    e.close()
    e = learned(
        tmp_path, epochs=3, start_collecting_at_epoch=2, dataset=DiskTrajDataset(tmp_path, "run"), name="b", share_buffer=True
    )
    assert (e.env_steps, e.learner.grad_steps) == (24, 6)
    assert {r["epoch"] for r in rows(e.run_dir, "train")} == {0, 1, 2}


def test_a_run_that_trained_on_nothing_fails_and_may_go_on(tmp_path):
    e = started(tmp_path, train_timesteps_per_epoch=EPISODE - 1, epochs=1)  # no episode ends
    with refused(NothingTrainedError, "train_timesteps_per_epoch", EPISODE - 1, "traj_save_len"):
        e.learn()
    assert (e.env_steps, e.learner.grad_steps) == (2 * (EPISODE - 1), 0)
    e.epochs = 2
    e.learn()  # now one did
    assert e.learner.grad_steps == 2


def test_a_run_that_was_not_to_train_ends_well(tmp_path):
    nothing = {"train_timesteps_per_epoch": EPISODE - 1}  # no episode ends
    kinds = {"train_batches_per_epoch": 0}, {"start_learning_at_epoch": float("inf")}, {"dataset": DoNothingDataset()}
    for i, kind in enumerate(kinds):
        e = learned(tmp_path, name=f"run{i}", **kind, **nothing)
        assert (e.epoch, e.learner.grad_steps) == (e.epochs, 0)
        assert e.env_steps > 0


def test_evaluated_trajectories_can_be_kept(tmp_path):
    e = started(tmp_path)
    metrics = e.evaluate_test(
        tiny.tmaze, timesteps=2 * EPISODE + 1, save_trajs_to=str(tmp_path / "demos" / "d" / "buffer" / "protected")
    )
    e.close()
    assert metrics["Number of Rollouts"] == 4
    demos = DiskTrajDataset(tmp_path / "demos", "d")
    demos.configure(DatasetSettings(max_seq_len=EPISODE))
    stored = [demos.store.read(i) for i in range(len(demos.store))]
    assert [len(t.rews) for t in stored] == [EPISODE] * 4
    assert np.mean([t.rews.sum() for t in stored]) == pytest.approx(metrics[TOTAL], abs=1e-5)
    assert stored[0].env_name == "TMaze"


def test_evaluation_does_not_touch_the_buffer_or_the_counters(tmp_path):
    e = learned(tmp_path)
    before = (e.env_steps, e.epoch, len(e.dataset.store), tiny.weights(e))
    e.evaluate_test(tiny.tmaze, timesteps=20)
    e.dataset.on_end_of_collection()
    assert (e.env_steps, e.epoch, len(e.dataset.store)) == before[:3]
    assert not tiny.differing(before[3], tiny.weights(e))


def test_interact_takes_a_pool_of_ones_own(tmp_path):
    e = started(tmp_path)
    pool = make_pool([tiny.tmaze] * 3, env_mode="sync", seed=1)
    pool.reset()
    try:
        _, (returns, specials) = e.interact(pool, 2 * EPISODE)
        assert [len(r.data["TMaze"]) for r in returns] == [2, 2, 2]
        assert {len(v) for s in specials for v in s.data["TMaze"].values()} == {2}
        _, (returns, _) = e.interact(pool, 10 * EPISODE, episodes=3)
        assert [len(r.data["TMaze"]) for r in returns] == [1, 1, 1]
        memory = [e.policy.init_hidden_state(3, "cpu")]
        _, (returns, _) = e.interact(pool, EPISODE, hidden_state=memory)
        assert [len(r.data["TMaze"]) for r in returns] == [1, 1, 1]
    finally:
        pool.close()
        e.close()


def trace(e):
    """All rows of the log, without times and memory."""
    return [{k: v for k, v in r.items() if k not in ("wall_time", "memory")} for r in rows(e.run_dir)]


def test_one_seed_gives_one_run_and_another_seed_another(tmp_path):
    shared = {
        "epochs": 2, "val_interval": 1, "log_interval": 1, "max_seq_len": 10, "train_timesteps_per_epoch": 35, "val_timesteps_per_epoch": 31,
    }  # fmt: skip
    workers = {"dloader_workers": 2, "env_mode": "async", "env_workers": 1}
    found = {}
    for name, own in {"one": {}, "same": {}, "other workers": workers, "other seed": {"seed": 1}}.items():
        e = learned(tmp_path / name, tiny.cartpole, "transformer", **shared, **own)
        e.evaluate_test(tiny.cartpole, timesteps=31)
        found[name] = tiny.weights(e), json.dumps(trace(e))
        e.close()
    weights, log = found["one"]
    for name in ("same", "other workers"):
        assert not tiny.differing(weights, found[name][0])
        assert log == found[name][1]
    assert tiny.differing(weights, found["other seed"][0])
    assert log != found["other seed"][1]


def test_no_seed_is_recorded_and_differs(tmp_path):
    seeds = set()
    for name in ("a", "b"):
        e = learned(tmp_path, name=name, seed=None, ckpt_interval=1)
        seeds.add(json.loads((e.ckpt_dir / "training_states" / f"{name}_epoch_0" / "state.json").read_text())["seed"])
        e.close()
    assert len(seeds) == 2


def test_closing_gives_back_the_files_of_the_buffer(tmp_path):
    """Although the object still exists."""

    def held():
        return [p for p in (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")) if "buffer" in p]

    before = held()
    e = tiny.learned(tmp_path)
    assert len(held()) > len(before)
    e.close()
    assert held() == before
