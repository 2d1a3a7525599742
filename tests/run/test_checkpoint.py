"""Training states: exact, complete or absent, and never unpickled. Weights published for other processes, and runs that begin with them."""

import os
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from messages import names, refused
from store_helpers import stored
from tiny import EPISODE, experiment, learned, started

import amago
from amago import config
from amago.cli_utils import switch_async_mode
from amago.envs import AMAGOEnv
from amago.envs.exploration import BilevelEpsilonGreedy
from amago.loading import DiskTrajDataset
from amago.run import checkpoint
from amago.run.checkpoint import CheckpointError, load_weight_file, save_weights
from amago.run.settings import SettingsError
from amago.store.files import temporary

INF = float("inf")


def test_loading_brings_everything_back_also_in_a_process_without_a_seed(tmp_path):
    def everything(e):
        batch, place = e.train_dloader.draw(e.train_dloader.next_batch), e.lr_schedule.last_epoch
        counters = (e.epoch, e.env_steps, e.learner.grad_steps, e.learner.skipped, e.train_dloader.next_batch, place)
        rates = [value for group in e.optimizer.param_groups for value in (group["lr"], group["weight_decay"])]
        random = torch.rand(3), torch.as_tensor(np.random.rand(3))
        others = (*random, torch.tensor(counters), torch.tensor(rates), batch.rews, batch.time_idxs)
        return state(e) | dict(enumerate(others))

    fields = {"ckpt_interval": 1, "train_batches_per_epoch": 6}
    e = learned(tmp_path, **fields)
    saved = e.ckpt_dir / "training_states" / "run_epoch_0"
    e.load_checkpoint(0)
    before = everything(e)
    e.epochs, e.start_collecting_at_epoch = 2, INF
    e.learn()
    e.load_checkpoint_from_path(str(saved))
    assert not tiny.differing(before, everything(e))
    e.close()
    assert not tiny.differing(before, everything(started(tmp_path, seed=None, resume=0, **fields)))


def test_an_epoch_that_is_not_there(tmp_path):
    learned(tmp_path, name="two\nlines", ckpt_interval=1, epochs=2).close()
    with refused(CheckpointError, "'two\\nlines'", 7, "0, 1"):
        started(tmp_path, name="two\nlines", resume=7)
    e = started(tmp_path, name="two\nlines", resume="auto")
    assert e.epoch == 2
    with refused(CheckpointError, "'two\\nlines'", 5, "0, 1"):
        e.load_checkpoint(5)
    with refused(CheckpointError, str(e.ckpt_dir / "policy_weights" / "policy_epoch_5.pt")):
        e.load_checkpoint(5, resume_training_state=False)


def test_a_renamed_run_goes_on(tmp_path):
    learned(tmp_path, name="before", ckpt_interval=1, epochs=2).close()
    (tmp_path / "before").rename(tmp_path / "after")
    for resume, epoch in (("auto", 2), (0, 1)):
        e = started(tmp_path, name="after", resume=resume)
        assert (e.epoch, e.learner.grad_steps) == (epoch, 2 * epoch)
        e.close()
    assert amago.load_policy(tmp_path / "after")  # without ckpts/latest, from the newest of the states
    learned(tmp_path, name="after", ckpt_interval=1, epochs=3, resume="auto").close()
    states = tmp_path / "after" / "ckpts" / "training_states"
    assert [p.name for p in checkpoint.training_states(states)] == ["before_epoch_0", "before_epoch_1", "after_epoch_2"]
    flip_a_bit(states / "after_epoch_2" / "state.json")
    e = started(tmp_path, name="after", resume="auto")
    assert e.epoch == 2, "what was saved under the old name still counts"
    e.close()
    checkpoint.prune(states, 1)
    assert [p.name for p in states.iterdir()] == ["after_epoch_2"]


def flip_a_bit(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def save(states, epoch):
    """Save a tiny training state."""
    checkpoint.save_training_state(states / f"run_epoch_{epoch}", {"w": torch.ones(5)}, {}, {"epoch": epoch})


def test_no_flipped_bit_of_a_manifest_gets_past(tmp_path):
    save(tmp_path, 3)
    manifest = tmp_path / "run_epoch_3" / "manifest.json"
    good, passed = manifest.read_bytes(), []
    for i in range(len(good)):
        manifest.write_bytes(good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :])
        try:
            checkpoint.verify(manifest.parent)
            passed.append(chr(good[i]))
        except CheckpointError:
            continue
    assert passed == []


def test_the_newest_is_the_one_saved_last_whatever_its_epoch(tmp_path):
    """After a return to an earlier epoch or a fresh start, the last saved state is the newest, and pruning keeps it."""
    learned(tmp_path, ckpt_interval=1, epochs=5).close()
    again = learned(tmp_path, ckpt_interval=1, epochs=3, resume=1, keep_training_states=2)
    states = again.ckpt_dir / "training_states"
    assert sorted(p.name for p in states.iterdir()) == ["run_epoch_2", "run_epoch_4"], "saved last: 2, and before it 4"
    again.close()
    auto = started(tmp_path, resume="auto")
    assert auto.epoch == 3


def test_what_is_damaged_does_not_drive_out_what_is_not(tmp_path):
    for epoch in (3, 4, 5):
        save(tmp_path, epoch)
    flip_a_bit(tmp_path / "run_epoch_5" / "model.safetensors")
    (tmp_path / "run_epoch_4" / "manifest.json").unlink()
    assert checkpoint.newest_complete(tmp_path).name == "run_epoch_3"
    save(tmp_path, 4)  # the run continues from 3
    checkpoint.prune(tmp_path, 1)
    assert checkpoint.newest_complete(tmp_path).name == "run_epoch_4"
    assert [p.name for p in tmp_path.iterdir()] == ["run_epoch_4"]


def test_what_killed_processes_left_is_removed(tmp_path):
    e = learned(tmp_path, ckpt_interval=1)
    e.close()
    dead = temporary(tmp_path).name.replace(f"-{os.getpid()}-", "-4194305-")
    places = [e.run_dir, *(e.ckpt_dir / name for name in ("training_states", "policy_weights", "latest"))]
    for place in places:
        (place / dead).write_text("half")
    writing = e.ckpt_dir / "latest" / temporary(tmp_path).name
    writing.write_text("of a process that lives")
    (e.ckpt_dir / "training_states" / dead).unlink()
    (e.ckpt_dir / "training_states" / dead).mkdir()
    learned(tmp_path, ckpt_interval=1, epochs=2, resume="auto").close()
    assert not [place for place in places if (place / dead).exists()]
    assert writing.exists()


def test_old_files_are_pruned(tmp_path):
    e = learned(tmp_path, epochs=8, ckpt_interval=3, keep_policy_weights=2, keep_training_states=3, train_batches_per_epoch=0)
    assert {p.name for p in e.checkpoints.weights.iterdir()} == {"policy_epoch_6.pt", "policy_epoch_7.pt"}, (
        "every third, the last"
    )
    assert len(list(e.checkpoints.states.iterdir())) == 3


@pytest.mark.parametrize("content", [torch.ones(3), [torch.ones(3)], {"a": 1}], ids=["tensor", "list", "number"])
def test_files_that_hold_no_weights(tmp_path, content):
    torch.save(content, tmp_path / "x.pt")
    with refused(CheckpointError, str(tmp_path / "x.pt"), "state dict"):
        load_weight_file(tmp_path / "x.pt")


@pytest.mark.parametrize("env_mode", ["sync", "async"])
def test_exploration_schedules_go_on(tmp_path, env_mode):
    def saved_actors(e, epoch):
        state = checkpoint.load_training_state(e.checkpoints.of_epoch(epoch))[2]
        return state["ranks"][0]["pools"]["train"]["actors"]

    fields = {"env_mode": env_mode, "env_workers": 1, "ckpt_interval": 1}
    config.bind({"EpsilonGreedy.steps_anneal": 100})
    e = learned(tmp_path, **fields)
    saved = saved_actors(e, epoch=0)
    assert saved["0"]["exploration"]["global_step"] == 2 * EPISODE
    e.close()
    again = started(tmp_path, resume="auto", epochs=2, **fields)
    again.save_checkpoint()
    assert saved_actors(again, epoch=0) == saved
    again.learn()
    assert saved_actors(again, epoch=1)["1"]["exploration"]["global_step"] == 4 * EPISODE


def test_a_resumed_run_meets_new_episodes(tmp_path):
    """After a resume environments have another seed; otherwise all parts would begin with the same episodes."""
    for epochs in (1, 2, 3):
        fields = {"epochs": epochs, "ckpt_interval": 1, "train_timesteps_per_epoch": 70, "train_batches_per_epoch": 0}
        e = learned(tmp_path, tiny.cartpole, resume="auto", **fields)
        e.close()
    begun = [traj.obs["observation"][0].tobytes() for traj in stored(e.run_dir / "buffer")]
    assert len(set(begun)) == len(begun) >= 3 * 2 * 2


ACTOR = {"start_learning_at_epoch": INF}


def test_versions_of_the_latest_policy_rise_through_all_parts_of_a_run(tmp_path):
    versions = []
    for epochs, resume in ((2, "never"), (3, "auto"), (3, 1)):
        e = learned(tmp_path, epochs=epochs, resume=resume, ckpt_interval=1, always_save_latest=True)
        versions.append(load_weight_file(e.run_dir / "policy.pt").version)
        assert amago.load_policy(e.run_dir).version == versions[-1] == e.checkpoints.version
        e.close()
    assert versions == [2, 3, 4]
    assert load_weight_file(e.ckpt_dir / "policy_weights" / "policy_epoch_0.pt").version == 0


def test_a_collector_refuses_to_go_back(tmp_path, caplog):
    learner, actor = started(tmp_path, seed=1, always_save_latest=True), started(tmp_path, seed=2, **ACTOR)
    path = learner.ckpt_dir / "latest" / "policy.pt"
    learner.write_latest_policy()
    old, theirs = path.read_bytes(), tiny.weights(learner)
    learner.learn()
    assert tiny.differing(theirs, tiny.weights(learner))
    actor.read_latest_policy()
    path.write_bytes(old)
    for _ in range(2):
        actor.read_latest_policy()
        assert not tiny.differing(tiny.weights(actor), tiny.weights(learner))
    assert names(caplog.text, "version 1", "version 2")
    save_weights(theirs, path)  # this file has no version
    actor.read_latest_policy()
    assert tiny.differing(tiny.weights(actor), theirs)
    assert len(caplog.records) == 3
    learner.write_latest_policy()
    actor.read_latest_policy()
    assert actor.checkpoints.version == 3
    assert len(caplog.records) == 3


def test_weights_of_old_files_and_of_others_are_read_and_ours_are_checked(tmp_path):
    plain, ours = tmp_path / "plain.pt", tmp_path / "ours.pt"
    torch.save({"w": torch.ones(1000)}, plain)
    assert load_weight_file(plain).version == 0
    save_weights({"w": torch.ones(1000)}, ours, version=7)
    weights, version, *_ = load_weight_file(ours)
    assert version == 7
    assert weights["w"].equal(torch.ones(1000))
    assert type(torch.load(ours, weights_only=True)["w"]) is torch.Tensor
    flip_a_bit(ours)
    with refused(CheckpointError, str(ours)):
        load_weight_file(ours)


def test_one_process_collects_and_another_learns(tmp_path):
    config.bind({"BilevelEpsilonGreedy.rollout_horizon": EPISODE})
    fields = {"exploration_wrapper_type": BilevelEpsilonGreedy, "val_interval": 1}
    collector = switch_async_mode(experiment(tmp_path, seed=1, **fields), "collect")
    collector.epochs = 1
    collector.start()
    first = tiny.weights(collector)
    collector.learn()
    assert (collector.env_steps, collector.grad_update_counter) == (24, 0)
    assert not tiny.differing(first, tiny.weights(collector))

    learner = switch_async_mode(experiment(tmp_path, seed=2, **fields), "learn")
    learner.start()
    learner.learn()
    assert (learner.env_steps, learner.learner.grad_steps) == (24, 2)
    assert len(learner.dataset.store) == 4

    collector.epochs = 2
    collector.learn()
    assert not tiny.differing(tiny.weights(learner), tiny.weights(collector))
    assert collector.env_steps == 48
    learner.epochs = 2
    learner.learn()
    assert len(learner.dataset.store) == 8
    assert not list((learner.ckpt_dir / "training_states").iterdir())


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run of two epochs, and its last weights."""
    e = learned(tmp_path_factory.mktemp("teacher"), name="teacher", ckpt_interval=1, epochs=2, always_save_latest=True)
    weights = tiny.weights(e)
    e.close()
    return e, weights


@pytest.mark.parametrize(
    "path", ["", "ckpts/training_states/teacher_epoch_1", "ckpts/policy_weights/policy_epoch_1.pt", "policy.pt"]
)
def test_a_run_a_training_state_or_a_file(tmp_path, teacher, path):
    source, weights = teacher
    e = started(tmp_path, seed=9, init_from=source.run_dir / path)
    assert not tiny.differing(weights, tiny.weights(e))
    assert (e.epoch, e.learner.grad_steps, e.env_steps) == (0, 0, 0)
    e.learn()
    assert tiny.differing(weights, tiny.weights(e))
    assert tiny.rows(e.run_dir, "train")[-1]["values"]["Learning Rate"] == pytest.approx(0.000625), "a warm-up of its own"


def test_a_run_that_resumes_keeps_its_own_weights(tmp_path, teacher):
    source, weights = teacher
    fields = {"init_from": source.run_dir, "resume": "auto", "ckpt_interval": 1}
    e = learned(tmp_path, **fields)  # the same command, again and again
    own = tiny.weights(e)
    e.close()
    assert tiny.differing(own, weights)
    e = started(tmp_path, epochs=2, **fields)
    assert e.epoch == 1
    assert not tiny.differing(own, tiny.weights(e))


def test_weights_that_do_not_fit_or_are_not_there_are_refused_by_name(tmp_path, teacher):
    source, _ = teacher
    with refused(CheckpointError, "policy.pt", "traj_encoder.rnn.weight_ih_l0"):
        started(tmp_path, traj="gru", init_from=source.run_dir)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    (tmp_path / "empty").mkdir()
    with refused(CheckpointError, str(tmp_path / "empty")):
        started(tmp_path, init_from=tmp_path / "empty")
    learned(tmp_path).close()  # the name is free


def test_the_weights_may_not_be_what_is_overwritten(tmp_path):
    e = learned(tmp_path, ckpt_interval=1)
    e.close()
    with refused(SettingsError, "init_from", "overwrite=True"):
        started(tmp_path, init_from=e.run_dir, overwrite=True)
    again = started(tmp_path, init_from=e.ckpt_dir / "policy_weights" / "policy_epoch_0.pt")  # go on in the same directory
    assert not tiny.differing(tiny.weights(e), tiny.weights(again))


def cliff():
    """Fourteen steps without chance; a fall costs 100, so that the critics' scale is not 1."""
    return AMAGOEnv(gym.make("CliffWalking-v1", max_episode_steps=14), env_name="Cliff")


def run(root, stop_after=None, bindings=None, sampling="uniform", **fields):
    """Four epochs, or those up to ``stop_after``."""
    config.clear()
    config.bind(bindings or {})
    return tiny.learned(
        root, cliff, dataset=DiskTrajDataset(root, "run", sampling=sampling), epochs=4, train_timesteps_per_epoch=40,
        train_batches_per_epoch=3, ckpt_interval=1, force_reset_train_envs_every=1, learning_rate=1e-2,
        callbacks=[tiny.StopAfter(stop_after)], **fields,
    )  # fmt: skip


def state(e):
    """What acts, what is trained, the moments of the optimizer."""
    found = {f"trained/{k}": v for k, v in tiny.weights(e).items()}
    with e.acting_weights():
        found |= {f"acting/{k}": v for k, v in tiny.weights(e).items()}
    for i, moments in e.optimizer.state_dict()["state"].items():
        found |= {f"optimizer/{i}/{k}": torch.as_tensor(v).clone() for k, v in moments.items()}
    return found


SCALED = {"Agent.rescale_critics": True}
EVERYTHING = {  # that has a state of its own, or changes one
    "bindings": SCALED | {
        "Agent.entropy_target": 0.3, "Agent.tau": 0.3, "Agent.use_target_actor": False, "FFTstepEncoder.normalize_inputs": False,
        "BilevelEpsilonGreedy.rollout_horizon": 20,
    },
    "ema_decay": 0.6, "batches_per_update": 2, "lr_cooldown": 0.5, "actor_learning_rate": 1e-2, "sampling": "priority",
    "exploration_wrapper_type": BilevelEpsilonGreedy, "dloader_workers": 2,
}  # fmt: skip


@pytest.mark.parametrize("fields", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path, fields):
    e = run(tmp_path / "straight", **fields)
    straight = state(e)
    assert not fields or e.policy.critics.output_scale > 1
    e.close()
    run(tmp_path / "halved", 2, **fields).close()
    e = run(tmp_path / "halved", resume="auto", **fields)
    assert not tiny.differing(straight, state(e))


@pytest.mark.parametrize("agent_type", [amago.Agent, amago.agent.MultiTaskAgent])
def test_reading_back_what_a_run_has_published_does_not_change_what_is_trained(tmp_path, agent_type):
    """Published weights are the average; training goes on from the trained ones, also after a resume."""
    fields = {"always_save_latest": True, "ema_decay": 0.6, "agent_type": agent_type}
    straight = state(run(tmp_path / "alone", **fields))
    run(tmp_path / "reading", 2, **fields, always_load_latest=True).close()
    e = run(tmp_path / "reading", **fields, always_load_latest=True, resume="auto")
    assert not tiny.differing(straight, state(e))
    e.read_latest_policy()
    assert not tiny.differing(straight, state(e))


def test_weights_without_a_scale_begin_a_run_with_one(tmp_path):
    e = run(tmp_path, 1, always_save_latest=True)
    plain = tiny.weights(e)
    e.close()
    config.bind(SCALED)
    e = tiny.started(tmp_path, cliff, name="scaled", init_from=tmp_path / "run")
    scaled = tiny.weights(e)
    assert scaled["critics.output_scale"] == scaled["target_critics.output_scale"] == 1.0
    assert not tiny.differing(plain, {k: scaled[k] for k in plain})


def test_a_partial_state_dict_changes_nothing_else(tmp_path):
    """`load_state_dict` with strict=False, as clients call it, leaves the scale as it is."""
    e = run(tmp_path, 1, SCALED)
    before = tiny.weights(e)
    e.policy.load_state_dict({k: v for k, v in before.items() if k.startswith("actor.")}, strict=False)
    assert not tiny.differing(before, tiny.weights(e))
