"""What happens on resume to settings that are others than those of the training state."""

import pytest
import tiny
import torch
from messages import names, refused
from tiny import EPISODE, learned, started

import amago
from amago import config
from amago.agent import MultiTaskAgent
from amago.envs.exploration import BilevelEpsilonGreedy, EpsilonGreedy
from amago.loading import DiskTrajDataset, MixtureOfDatasets
from amago.run import checkpoint
from amago.run.settings import SettingsError


def other_tmaze():
    return tiny.tmaze()


def saved(root, **fields):
    """A run with a training state of epoch 0."""
    learned(root, ckpt_interval=1, **fields).close()


def resumed(root, **fields):
    return started(root, **({"resume": "auto", "epochs": 2, "verbose": True, "ckpt_interval": 1} | fields))


# another value of each field, but for those that a test below changes
OTHER = {
    "mixed_precision": "bf16", "max_seq_len": EPISODE - 1, "val_timesteps_per_epoch": 9, "make_train_env": other_tmaze,
    "make_val_env": other_tmaze, "parallel_actors": 3, "env_mode": "async", "async_env_mp_context": "fork",
    "sample_actions": False, "force_reset_train_envs_every": 3, "wandb_project": "p", "wandb_entity": "e",
    "wandb_group_name": "g", "verbose": False, "log_interval": 7, "traj_save_len": 50, "has_dset_edit_rights": False,
    "stagger_traj_file_lengths": False, "save_trajs_as": "npz-compressed", "padded_sampling": "both", "dloader_workers": 1,
    "start_learning_at_epoch": 1, "start_collecting_at_epoch": 1, "train_timesteps_per_epoch": 6, "train_batches_per_epoch": 3,
    "val_interval": 5, "ckpt_interval": 2, "always_save_latest": True, "always_load_latest": True, "batch_size": 3,
    "batches_per_update": 2, "learning_rate": 0.5, "critic_loss_weight": 2.0, "lr_warmup_steps": 9, "grad_clip": 0.5,
    "l2_coeff": 0.25, "sample_actions_train": False, "sample_actions_val": False, "lr_cooldown": 0.5,
    "log_to_tensorboard": True, "env_workers": 1, "env_step_timeout": 5.0, "max_env_restarts": 3, "keep_training_states": 4,
    "cut_short_trajectories": True, "val_episodes": 2, "share_buffer": True, "actor_learning_rate": 0.5,
    "critic_learning_rate": 0.5, "ema_decay": 0.5, "progress": "plain", "callbacks": [amago.Callback()],
}  # fmt: skip


SILENT = {
    "async_env_mp_context", "wandb_project", "wandb_entity", "wandb_group_name", "verbose", "dloader_workers", "log_to_tensorboard",
    "share_buffer", "progress", "callbacks",
}  # fmt: skip
"""Fields that change no result."""


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    root = tmp_path_factory.mktemp("state")
    saved(root)
    return root


def test_fields_that_differ_are_applied_and_named(state, capsys):
    """All at once; a group of processes, a precision and an interval with which nothing would be saved apart."""
    apart = {"env_mode", "mixed_precision", "ckpt_interval", "max_seq_len", "progress", "verbose", "batches_per_update"}
    for group in (OTHER.keys() - apart, apart):
        e = resumed(state, **{k: OTHER[k] for k in group} | {"verbose": True, "progress": "rich", "ckpt_interval": None})
        named = {line.split()[0] for line in capsys.readouterr().out.splitlines() if " -> " in line}
        assert group - SILENT <= named | {"verbose", "progress", "ckpt_interval"}
        assert not named & SILENT
        assert e.epoch == 1
        assert all(getattr(e, k) == OTHER[k] for k in group - {"verbose", "progress", "ckpt_interval"})
        e.close()


def test_the_optimizer_takes_the_new_rates_and_keeps_its_moments(tmp_path, capsys):
    e = learned(tmp_path, ckpt_interval=1, epochs=3)  # 6 updates, beyond the warm-up
    moments = {i: s["exp_avg"].clone() for i, s in e.optimizer.state_dict()["state"].items()}
    e.close()
    e = resumed(tmp_path, epochs=4, learning_rate=1e-4, l2_coeff=0.5)
    assert "learning_rate 0.001 -> 0.0001" in capsys.readouterr().out
    (group,) = e.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (1e-4, 0.5)
    assert e.lr_schedule.base_lrs == [1e-4]
    now = e.optimizer.state_dict()["state"]
    assert all(now[i]["exp_avg"].equal(m) for i, m in moments.items())
    e.learn()
    assert tiny.rows(e.run_dir, "train")[-1]["values"]["Learning Rate"] == pytest.approx(1e-4)
    e.close()
    e = resumed(tmp_path, epochs=5, learning_rate=1e-4, lr_warmup_steps=16)
    assert e.lr_schedule.last_epoch == 8
    assert e.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4 * 9 / 16), "the ninth of sixteen steps of warm-up"


def test_gin_bindings_of_losses_are_applied_and_said(tmp_path, capsys):
    config.bind({"Agent.tau": 0.01, "Agent.entropy_target": 0.5})
    saved(tmp_path)
    config.bind({"Agent.tau": 0.02, "Agent.entropy_target": 0.7})
    config.bind({"exp_filter.beta": 3.0, "Discrete.clip_prob_high": 0.9, "EpsilonGreedy.steps_anneal": 50})
    e = resumed(tmp_path)
    out = capsys.readouterr().out
    assert "amago.agent.Agent.tau 0.01 -> 0.02" in out
    assert "Discrete.clip_prob_high 0.99 -> 0.9" in out, "unbound before: the default is the value before"
    assert "EpsilonGreedy.steps_anneal 1000000 -> 50" in out
    assert "exp_filter" not in out, "the agent uses another filter"
    assert "Agent.entropy_target 0.5 -> 0.7" in out
    assert (e.policy.tau, e.policy.temperature.target) == (0.02, 0.7)
    e.close()
    config.clear()
    config.bind({"Agent.entropy_target": 0.5})
    resumed(tmp_path).close()
    assert "amago.agent.Agent.tau 0.01 -> 0.003" in capsys.readouterr().out, "no longer bound: the default is the value now"


@pytest.mark.parametrize(
    ("fields", "bindings", "named"),
    [
        ({"traj": "gru"}, {}, ("traj_encoder_type", "FFTrajEncoder", "GRUTrajEncoder")),
        ({"agent_type": MultiTaskAgent}, {}, ("agent_type", "Agent", "MultiTaskAgent")),
        ({}, {"Multigammas.discrete": [0.8]}, ("Multigammas.discrete", "[0.9]", "[0.8]")),
        ({}, {"Agent.gamma": 0.9}, ("Agent.gamma", 0.999, 0.9)),
        ({}, {"Agent.entropy_target": 0.5}, ("Agent.entropy_target", None, 0.5)),
        ({}, {"Actor.activation": "relu"}, ("Actor.activation", "leaky_relu", "relu")),
        ({}, {"FFTrajEncoder.d_model": 8}, ("FFTrajEncoder.d_model", 16, 8)),
    ],
)
def test_other_networks_are_refused_with_both_values(state, monkeypatch, fields, bindings, named):
    for name, value in bindings.items():
        monkeypatch.setitem(tiny.SMALL, name, value)
    made = []
    with refused(SettingsError, "run_epoch_0", *named):
        resumed(state, make_env=lambda: made.append(1) or tiny.tmaze(), **fields)
    assert not made, "before any environment is started"


def test_a_mixture_added_on_resume_is_said_and_keeps_what_there_was(tmp_path, capsys):
    saved(tmp_path)
    learned(tmp_path, name="other", train_batches_per_epoch=0).close()

    def mixture():
        return MixtureOfDatasets([DiskTrajDataset(tmp_path, name) for name in ("run", "other")], [1.0, 1.0], collect_into=0)

    e = resumed(tmp_path, dataset=mixture())
    out = capsys.readouterr().out
    assert "dataset amago.loading.disk.DiskTrajDataset -> amago.loading.mixture.MixtureOfDatasets" in out
    assert "note: datasets that are new" in out
    e.learn()
    assert e.epoch == 2
    assert len(e.dataset.datasets[0].store) == 8
    e.close()
    e = resumed(tmp_path, dataset=mixture(), epochs=2)
    assert "note" not in capsys.readouterr().out
    e.close()
    e = resumed(tmp_path, epochs=3)  # and taken away again
    assert "MixtureOfDatasets -> amago.loading.disk.DiskTrajDataset" in capsys.readouterr().out
    e.learn()


def test_a_dataset_whose_class_is_in_another_module_keeps_its_state(tmp_path, capsys):
    was, is_now = (type("Recorded", (DiskTrajDataset,), {"__module__": module}) for module in ("__main__", "recorded"))
    saved(tmp_path, dataset=was(tmp_path, "run"))
    resumed(tmp_path, dataset=is_now(tmp_path, "run")).close()
    out = capsys.readouterr().out
    assert "dataset __main__.Recorded -> recorded.Recorded" in out
    assert "datasets that are new" not in out


def test_another_number_of_actors_keeps_the_schedules(tmp_path, capsys):
    config.bind({"EpsilonGreedy.steps_anneal": 100})
    saved(tmp_path, exploration_wrapper_type=EpsilonGreedy)
    e = resumed(tmp_path, parallel_actors=5)
    assert "parallel_actors 2 -> 5" in capsys.readouterr().out
    states = e.actors.train.pool.state_dict()["actors"]
    assert len(states) == 5
    assert {s["exploration"]["global_step"] for s in states.values()} == {2 * EPISODE}
    streams = {str(s["exploration"]["rng"]) for s in states.values()}
    assert len(streams) == 5, "each has random numbers of its own"
    e.learn()


def test_exploration_of_another_class_begins_anew(tmp_path, capsys):
    saved(tmp_path)
    config.bind({"BilevelEpsilonGreedy.rollout_horizon": EPISODE})
    e = resumed(tmp_path, exploration_wrapper_type=BilevelEpsilonGreedy)
    assert names(capsys.readouterr().out, "exploration_wrapper_type", "begin anew")
    assert {s["exploration"]["global_step"] for s in e.actors.train.pool.state_dict()["actors"].values()} == {0}


def test_another_seed_is_applied(tmp_path, capsys):
    saved(tmp_path)
    draws = []
    for seed in (None, 0, 7, 7, 8):
        e = resumed(tmp_path, seed=seed, epochs=1)
        out = capsys.readouterr().out
        assert ("seed 0 -> " in out) == (seed != 0)
        draws.append((e.run_seed, e.train_dloader.draw(2).rews.tolist(), torch.rand(3).tolist()))
        e.close()
    none, same, seven, again, eight = draws
    assert none == same, "no seed: the run goes on with its own"
    assert seven == again
    assert [d[0] for d in draws] == [0, 0, 7, 7, 8]
    assert len({str(d[2]) for d in draws}) == 3
    assert seven[2] != eight[2]


def test_a_state_of_another_number_of_processes(tmp_path, capsys):
    e = learned(tmp_path, ckpt_interval=1)
    frames = e.env_steps
    e.close()
    directory = e.ckpt_dir / "training_states" / "run_epoch_0"
    weights, tensors, content = checkpoint.load_training_state(directory)
    content["processes"], content["ranks"] = 2, content["ranks"] * 2
    checkpoint.save_training_state(directory, weights, tensors, content)
    e = resumed(tmp_path)
    assert "note: 2 processes saved it, and there are 1" in capsys.readouterr().out
    assert e.env_steps == frames
    e.learn()
    assert e.epoch == 2
