"""What happens on resume to settings that are others than those of the training state."""

import dataclasses

import pytest
import tiny
import torch
from messages import naming
from tiny import EPISODE, experiment, learned, started

import amago
from amago import Agent, config
from amago.agent import MultiTaskAgent
from amago.envs.exploration import BilevelEpsilonGreedy, EpsilonGreedy
from amago.loading import DiskTrajDataset, MixtureOfDatasets
from amago.run import checkpoint
from amago.run.changes import (
    APPLIED,
    APPLIED_PARAMETERS,
    FIELDS,
    INITIAL_PARAMETERS,
    IRRELEVANT,
    REFUSED,
    kind_of,
)
from amago.run.checkpoint import CheckpointError
from amago.run.checks import SettingsError
from amago.run.settings import ExperimentSettings


def other_tmaze():
    return tiny.tmaze()


def saved(root, **fields):
    """A run with a training state of epoch 0."""
    learned(root, ckpt_interval=1, **fields).close()


def resumed(root, **fields):
    return started(root, **({"resume": "auto", "epochs": 2, "verbose": True, "ckpt_interval": 1} | fields))


# ---- every field ---------------------------------------------------------------------------------------------------------


def test_every_field_has_an_entry():
    fields = {f.name for f in dataclasses.fields(ExperimentSettings)}
    assert set(FIELDS) == fields, "say in amago/run/changes.py what happens to a field that differs on resume"
    assert {kind for kind, _ in FIELDS.values()} == {APPLIED, REFUSED, IRRELEVANT}
    assert all(note for kind, note in FIELDS.values() if kind == IRRELEVANT), "say why a difference does not matter"


# another value of each field; None where a test below changes it
OTHER = {
    "run_name": None, "ckpt_base_dir": None, "dataset": None, "resume": None, "overwrite": None, "init_from": None, "dset_root": None,
    "dset_name": None, "log_to_wandb": None, "seed": None, "epochs": None, "mixed_precision": "bf16", "max_seq_len": EPISODE - 1,
    "tstep_encoder_type": None, "traj_encoder_type": None, "agent_type": None, "val_timesteps_per_epoch": 9,
    "make_train_env": other_tmaze, "make_val_env": other_tmaze, "parallel_actors": 3, "env_mode": "async",
    "async_env_mp_context": "fork", "exploration_wrapper_type": None, "sample_actions": False,
    "force_reset_train_envs_every": 3, "wandb_project": "p", "wandb_entity": "e", "wandb_group_name": "g", "verbose": False,
    "log_interval": 7, "traj_save_len": 50, "has_dset_edit_rights": False, "stagger_traj_file_lengths": False,
    "save_trajs_as": "npz-compressed", "padded_sampling": "both", "dloader_workers": 1, "start_learning_at_epoch": 1,
    "start_collecting_at_epoch": 1, "train_timesteps_per_epoch": 6, "train_batches_per_epoch": 3, "val_interval": 5,
    "ckpt_interval": 2, "always_save_latest": True, "always_load_latest": True, "batch_size": 3, "batches_per_update": 2,
    "learning_rate": 0.5, "critic_loss_weight": 2.0, "lr_warmup_steps": 9, "grad_clip": 0.5, "l2_coeff": 0.25,
    "sample_actions_train": False, "sample_actions_val": False, "lr_cooldown": 0.5, "log_to_tensorboard": True, "env_workers": 1, "env_step_timeout": 5.0,
    "max_env_restarts": 3, "keep_training_states": 4, "dset_max_size": None, "extra_fields": None, "cut_short_trajectories": True,
    "dset_max_steps": None, "dset_max_bytes": None, "env_trial_steps": 0, "val_episodes": 2, "refused_data_timeout": 1.0, "share_buffer": True,
    "l2_weights_only": True, "actor_learning_rate": 0.5, "critic_learning_rate": 0.5, "traj_learning_rate": 0.5, "ema_decay": 0.5,
    "progress": "plain", "callbacks": [amago.Callback()],
}  # fmt: skip


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    config.clear()
    root = tmp_path_factory.mktemp("state")
    saved(root)
    config.clear()
    return root


@pytest.mark.parametrize("name", sorted(k for k, v in OTHER.items() if v is not None))
def test_a_field_that_differs_is_applied_and_said(state, name, capsys):
    e = resumed(state, **{"ckpt_interval": None, name: OTHER[name]})
    try:
        out = capsys.readouterr().out
        assert e.epoch == 1
        said = [line for line in out.splitlines() if line.strip().startswith(f"{name} ")]
        if FIELDS[name][0] == IRRELEVANT or name == "verbose":
            assert not said
        else:
            (line,) = said
            assert " -> " in line
        assert getattr(e, name) == OTHER[name]
    finally:
        e.close()


def test_the_fields_above_are_all_fields():
    assert set(OTHER) == set(FIELDS)


# ---- what is applied -----------------------------------------------------------------------------------------------------


def test_the_optimizer_takes_the_new_rates(tmp_path, capsys):
    saved(tmp_path, epochs=3)  # 6 updates, beyond the warm-up
    e = resumed(tmp_path, epochs=4, learning_rate=1e-4, l2_coeff=0.5)
    assert "learning_rate 0.001 -> 0.0001" in capsys.readouterr().out
    (group,) = e.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (1e-4, 0.5)
    assert e.lr_schedule.base_lrs == [1e-4]
    e.learn()
    assert tiny.rows(e.run_dir, "train")[-1]["values"]["Learning Rate"] == pytest.approx(1e-4)
    assert e.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
    e.close()


def test_moments_and_place_in_the_schedule_stay(tmp_path):
    e = learned(tmp_path, ckpt_interval=1)
    moments = {i: s["exp_avg"].clone() for i, s in e.optimizer.state_dict()["state"].items()}
    e.close()
    e = resumed(tmp_path, learning_rate=1e-4, lr_warmup_steps=8)
    now = e.optimizer.state_dict()["state"]
    assert all(now[i]["exp_avg"].equal(m) for i, m in moments.items())
    assert e.lr_schedule.last_epoch == 2
    assert e.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4 * 3 / 8), "the third of eight steps of warm-up"
    e.close()


def test_other_hyperparameters_of_an_own_optimizer_are_applied(tmp_path):
    class Momentum(type(experiment(tmp_path))):
        momentum = 0.5

        def init_optimizer(self, policy):
            return torch.optim.SGD(policy.trainable_params, lr=self.learning_rate, momentum=self.momentum)

    saved(tmp_path, experiment_type=Momentum)
    Momentum.momentum = 0.75
    e = resumed(tmp_path, experiment_type=Momentum)
    assert e.optimizer.param_groups[0]["momentum"] == 0.75
    e.close()


def test_an_optimizer_with_other_groups_is_refused(tmp_path):
    class TwoGroups(type(experiment(tmp_path))):
        def init_optimizer(self, policy):
            first, *others = policy.trainable_params
            return torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=self.learning_rate)

    saved(tmp_path)
    with pytest.raises(CheckpointError, match=naming("run_epoch_0", "groups")):
        resumed(tmp_path, experiment_type=TwoGroups)


def test_nothing_is_said_where_nothing_differs(tmp_path, capsys):
    saved(tmp_path, epochs=2)
    resumed(tmp_path).close()
    out = capsys.readouterr().out
    assert "differ" not in out
    assert "note" not in out


def test_gin_bindings_of_losses_are_applied_and_said(tmp_path, capsys):
    config.bind({"Agent.tau": 0.01})
    saved(tmp_path)
    config.bind({"Agent.tau": 0.02, "exp_filter.beta": 3.0, "Discrete.clip_prob_high": 0.9, "EpsilonGreedy.steps_anneal": 50})
    e = resumed(tmp_path)
    out = capsys.readouterr().out
    assert "amago.agent.Agent.tau 0.01 -> 0.02" in out
    assert "Discrete.clip_prob_high 0.99 -> 0.9" in out, "unbound before: the default is the value before"
    assert "EpsilonGreedy.steps_anneal 1000000 -> 50" in out
    assert "exp_filter" not in out, "the agent uses another filter"
    assert e.policy.tau == 0.02
    e.close()
    config.clear()
    resumed(tmp_path).close()
    assert "amago.agent.Agent.tau 0.01 -> 0.003" in capsys.readouterr().out, "no longer bound: the default is the value now"


def test_bindings_of_classes_that_are_not_used_do_not_matter(tmp_path, capsys):
    saved(tmp_path)
    config.bind({"TformerTrajEncoder.n_heads": 4, "MultiTaskAgent.tau": 0.5, "MambaTrajEncoder.d_state": 3})
    tiny.SMALL["TformerTrajEncoder.n_heads"] = 4
    try:
        resumed(tmp_path, epochs=1).close()
    finally:
        tiny.SMALL["TformerTrajEncoder.n_heads"] = 2
    assert "->" not in capsys.readouterr().out.replace("FFTstepEncoder ->", "")


# ---- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "bindings", "named"),
    [
        ({"traj": "gru"}, {}, ("traj_encoder_type", "FFTrajEncoder", "GRUTrajEncoder")),
        ({"agent_type": MultiTaskAgent}, {}, ("agent_type", "Agent", "MultiTaskAgent")),
        ({}, {"Multigammas.discrete": [0.8]}, ("Multigammas.discrete", "[0.9]", "[0.8]")),
        ({}, {"Agent.gamma": 0.9}, ("Agent.gamma", 0.999, 0.9)),
        ({}, {"Actor.activation": "relu"}, ("Actor.activation", "leaky_relu", "relu")),
        ({}, {"FFTrajEncoder.d_model": 8}, ("FFTrajEncoder.d_model", 16, 8)),
    ],
)
def test_other_networks_are_refused_with_both_values(state, monkeypatch, fields, bindings, named):
    for name, value in bindings.items():
        monkeypatch.setitem(tiny.SMALL, name, value)
    made = []
    with pytest.raises(SettingsError, match=naming("run_epoch_0", *named)):
        resumed(state, make_env=lambda: made.append(1) or tiny.tmaze(), **fields)
    assert not made, "before any environment is started"


def test_a_class_that_has_moved_is_the_same(tmp_path, capsys):
    moved = type("Agent", (Agent,), {"__module__": "elsewhere"})
    saved(tmp_path, agent_type=moved)
    e = resumed(tmp_path)
    assert "agent_type elsewhere.Agent -> amago.agent.agent.Agent" in capsys.readouterr().out
    assert e.epoch == 1
    e.close()


def test_the_parameters_that_may_change_exist():
    for prefix, classes in APPLIED_PARAMETERS.items():
        for cls, names in classes.items():
            unknown = set(names.split()) - set(config.parameters_of(prefix + cls))
            assert not unknown, f"{prefix}{cls} has no parameter {unknown}"
    for name in INITIAL_PARAMETERS:
        selector, _, parameter = name.rpartition(".")
        assert parameter in config.parameters_of(selector)
    assert kind_of("amago.nets.ff.SomethingNew.size") == REFUSED, "networks that are not listed do not change"


# ---- another data set, other actors --------------------------------------------------------------------------------------


def test_a_mixture_added_on_resume_is_said_and_keeps_what_there_was(tmp_path, capsys):
    saved(tmp_path)
    learned(tmp_path, name="other", train_batches_per_epoch=0).close()
    own = DiskTrajDataset(tmp_path, "run")
    mixture = MixtureOfDatasets([own, DiskTrajDataset(tmp_path, "other")], [1.0, 1.0], collect_into=0)
    e = resumed(tmp_path, dataset=mixture)
    out = capsys.readouterr().out
    assert "dataset amago.loading.disk.DiskTrajDataset -> amago.loading.mixture.MixtureOfDatasets" in out
    assert "note: data sets that are new" in out
    e.learn()
    assert e.epoch == 2
    assert len(own.store) == 8
    e.close()
    again = MixtureOfDatasets(
        [DiskTrajDataset(tmp_path, "run"), DiskTrajDataset(tmp_path, "other")], [1.0, 1.0], collect_into=0
    )
    e = resumed(tmp_path, dataset=again, epochs=2)
    assert "note" not in capsys.readouterr().out
    e.close()
    e = resumed(tmp_path, epochs=3)  # and taken away again
    assert "MixtureOfDatasets -> amago.loading.disk.DiskTrajDataset" in capsys.readouterr().out
    e.learn()
    e.close()


def test_another_buffer_on_resume(tmp_path, capsys):
    saved(tmp_path)
    e = resumed(tmp_path, dataset=DiskTrajDataset(tmp_path / "new", "place", 50))
    out = capsys.readouterr().out
    assert "dataset.dset_name run -> place" in out
    assert "dataset.dset_max_size inf -> 50" in out
    assert "note: data sets that are new" in out
    e.learn()
    assert list((tmp_path / "new" / "place" / "buffer" / "fifo").iterdir())
    e.close()


@pytest.mark.parametrize("actors", [1, 5])
def test_another_number_of_actors_keeps_the_schedules(tmp_path, actors, capsys):
    config.bind({"EpsilonGreedy.steps_anneal": 100})
    saved(tmp_path, exploration_wrapper_type=EpsilonGreedy)
    e = resumed(tmp_path, parallel_actors=actors)
    assert f"parallel_actors 2 -> {actors}" in capsys.readouterr().out
    states = e._actors.train.pool.state_dict()["actors"]
    assert len(states) == actors
    assert {s["exploration"]["global_step"] for s in states.values()} == {2 * EPISODE}
    streams = {str(s["exploration"]["rng"]) for s in states.values()}
    assert len(streams) == actors, "each has random numbers of its own"
    e.learn()
    e.close()


def test_exploration_of_another_class_begins_anew(tmp_path, capsys):
    saved(tmp_path)
    config.bind({"BilevelEpsilonGreedy.rollout_horizon": EPISODE})
    e = resumed(tmp_path, exploration_wrapper_type=BilevelEpsilonGreedy)
    out = capsys.readouterr().out
    assert "exploration_wrapper_type" in out
    assert "begin anew" in out
    states = e._actors.train.pool.state_dict()["actors"]
    assert {s["exploration"]["global_step"] for s in states.values()} == {0}
    e.close()


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


@pytest.mark.parametrize("counts", ["of all ranks", "of rank 0"])
def test_a_state_of_another_number_of_processes(tmp_path, capsys, counts):
    e = learned(tmp_path, ckpt_interval=1)
    frames = e.env_steps
    e.close()
    directory = e.ckpt_dir / "training_states" / "run_epoch_0"
    weights, tensors, content = checkpoint.load_training_state(directory)
    content["processes"], content["ranks"] = 2, content["ranks"] * 2
    if counts == "of rank 0":  # as earlier versions saved them
        del content["frames_of_all_ranks"]
    checkpoint.save_training_state(directory, weights, tensors, content)
    e = resumed(tmp_path)
    assert "note: 2 processes saved it, and there are 1" in capsys.readouterr().out
    assert e.env_steps == (frames if counts == "of all ranks" else 2 * frames)
    e.learn()
    assert e.epoch == 2
    e.close()


def test_a_state_without_settings_takes_the_present_ones(tmp_path):
    e = learned(tmp_path, ckpt_interval=1)
    e.close()
    directory = e.ckpt_dir / "training_states" / "run_epoch_0"
    weights, tensors, content = checkpoint.load_training_state(directory)
    del content["settings"]
    checkpoint.save_training_state(directory, weights, tensors, content)
    e = resumed(tmp_path, learning_rate=0.25)
    assert e.lr_schedule.base_lrs == [0.25]
    e.close()
