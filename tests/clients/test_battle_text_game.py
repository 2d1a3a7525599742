"""A client of the original system: an agent of its own for a duel told in words (``tests/clients/battle``), from recordings to play.

The modules are written from what is known of such clients: how they wrap environments, read observations, subclass agents and data
sets, and what they bind in gin files. Nothing in them is written for this library.
"""

import copy

import gin
import numpy as np
import original_files as of
import pytest
import tiny
import torch
from battle.game import ACTIONS, WORDS, Duel, DuelAMAGOEnv
from battle.learner import AdvantageWeights, DuelLearner
from battle.networks import DuelTstepEncoder, LegalActor
from battle.replays import ParsedReplays

import amago
from amago import cli_utils
from amago.loading import DiskTrajDataset, MixtureOfDatasets
from amago.nets.traj_encoders import TformerTrajEncoder

GIN = f"""
import amago.agent
import amago.experiment
import amago.nets.actor_critic
import amago.nets.traj_encoders
import amago.nets.transformer
import battle.learner
import battle.networks

DuelTstepEncoder.vocabulary = {len(WORDS) + 1}
DuelTstepEncoder.d_word = 8
agent.MultiTaskAgent.fbc_filter_func = @custom.AdvantageWeights()
custom.AdvantageWeights.beta = 0.5
MultiTaskAgent.actor_type = @networks.LegalActor
MultiTaskAgent.pass_obs_keys_to_actor = ["illegal_actions"]
MultiTaskAgent.num_critics = 3
DuelLearner.return_loss_weight = 0.25
MultiTaskAgent.online_coeff = 0.0
MultiTaskAgent.offline_coeff = 1.0
amago.agent.Multigammas.discrete = [0.9]
amago.nets.actor_critic.NCriticsTwoHot.d_hidden = 16
amago.nets.actor_critic.NCriticsTwoHot.output_bins = 16
amago.nets.actor_critic.NCriticsTwoHot.min_return = -50
amago.nets.actor_critic.NCriticsTwoHot.max_return = 50
LegalActor.d_hidden = 16
traj_encoders.TformerTrajEncoder.d_model = 16
traj_encoders.TformerTrajEncoder.n_heads = 2
traj_encoders.TformerTrajEncoder.d_ff = 32
traj_encoders.TformerTrajEncoder.n_layers = 1
traj_encoders.TformerTrajEncoder.attention_type = @transformer.VanillaAttention
"""


def write_replays(root, number):
    """Files as the original system writes them, of duels by a player who does what is legal."""
    rng, game = np.random.default_rng(0), Duel()
    for i in range(number):
        obs, info = game.reset(seed=i)
        seen, actions, rews, over = [], [], [], False
        while True:
            seen.append(obs | {"illegal_actions": ~np.isin(np.arange(ACTIONS), info["legal_actions"])})
            if over:
                break
            actions.append(int(rng.choice(info["legal_actions"])))
            obs, reward, terminated, truncated, info = game.step(actions[-1])
            rews.append(reward)
            over = terminated or truncated
        rows = {k: np.stack([o[k] for o in seen]) for k in seen[0]}
        content = of.arrays(of.one_hot(actions, ACTIONS), obs=lambda rng, t, rows=rows: rows)
        content |= {"rews": np.array(rews, np.float32)[:, None], "dones": content["dones"] & terminated}
        of.write(root, content, i, env="gen1")


@pytest.fixture
def client(tmp_path):
    """The files that the client's scripts are given."""
    write_replays(tmp_path / "replays", 12)
    (tmp_path / "duel.gin").write_text(GIN)
    gin.clear_config()
    cli_utils.use_config({}, [str(tmp_path / "duel.gin")], finalize=False)
    return tmp_path


def make_env():
    return DuelAMAGOEnv("gen1", turn_limit=8)


def make_experiment(root, run_name, dataset, **fields):
    settings = {
        "run_name": run_name, "ckpt_base_dir": str(root), "max_seq_len": 6, "dataset": dataset, "make_train_env": make_env,
        "make_val_env": make_env, "parallel_actors": 2, "env_mode": "sync", "tstep_encoder_type": DuelTstepEncoder,
        "traj_encoder_type": TformerTrajEncoder, "agent_type": DuelLearner, "epochs": 2, "train_timesteps_per_epoch": 16,
        "train_batches_per_epoch": 3, "val_timesteps_per_epoch": 16, "val_interval": 1, "ckpt_interval": 1, "batch_size": 4,
        "log_interval": 1, "dloader_workers": 0, "verbose": False, "padded_sampling": "none", "traj_save_len": 100,
        "start_collecting_at_epoch": float("inf"), "learning_rate": 1e-3, "l2_coeff": 1e-4, "lr_warmup_steps": 2,
    }  # fmt: skip
    experiment = amago.Experiment(**(settings | fields))
    tiny.opened.append(experiment)
    return experiment


def pretrained(root):
    replays = ParsedReplays(str(root / "replays"), ["gen1"], missing_rate=0.3)
    experiment = make_experiment(root, "offline", replays, critic_loss_weight=3.0)
    experiment.start()
    before = experiment.policy.return_head.weight.detach().clone()
    experiment.learn()
    assert not experiment.policy.return_head.weight.equal(before), "a loss of one's own is trained"
    return experiment


def test_offline_from_recordings(client):
    experiment = pretrained(client)
    policy = experiment.policy
    assert isinstance(policy.fbc_filter_func, AdvantageWeights)
    assert (policy.fbc_filter_func.beta, policy.num_critics, policy.return_loss_weight) == (0.5, 3, 0.25)
    assert isinstance(policy.actor, LegalActor)
    assert policy.pass_obs_keys_to_actor == ["illegal_actions"]
    assert policy.fbc_filter_func.calls >= 6
    assert policy.fbc_filter_func.scale != 1.0
    rows = [row["values"] for row in tiny.rows(experiment.run_dir, "train")]
    assert len(rows) >= 4
    for values in rows:
        assert values["Loss"] == pytest.approx(
            values["Actor Loss"] + 3 * values["Critic Loss"] + 0.25 * values["Return Loss"], rel=1e-3
        )
        assert "Advantage Scale" in values
    assert any("duel-encoder-out" in name for values in rows for name in values)
    buffer = [row["values"] for row in tiny.rows(experiment.run_dir, "buffer")]
    assert [values["Epoch Seen"] for values in buffer if "Epoch Seen" in values] == [0, 1]
    assert all(values["Num Replays"] == 12 for values in buffer if "Num Replays" in values)
    # it plays, and does what is legal alone, which is asked for by its mask
    val = tiny.rows(experiment.run_dir, "val")[-1]["values"]
    names = [name for name in val if name.startswith("Average Valid Actions in gen1_vs_")]
    assert names
    assert all(val[name] == 1.0 for name in names)
    assert any(name.startswith("Average Win Rate in gen1_vs_") for name in val)
    assert any(name.startswith("Bottom Quintile Total Return in gen1_vs_") for name in val)


def test_weights_go_both_ways(client):
    """Weights in the original's form: copies of the critics under names of their own, in one file of tensors."""
    first = pretrained(client)
    first.close()
    stored = torch.load(client / "offline" / "ckpts" / "policy_weights" / "policy_epoch_1.pt", map_location="cpu")
    published = {k: v.clone() for k, v in stored.items()}
    names = {k.removeprefix("maximized_critics.") for k in published if k.startswith("maximized_critics.")}
    assert names == {k.removeprefix("critics.") for k in published if k.startswith("critics.")}
    torch.save(published, client / "published.pt")

    replays = ParsedReplays(str(client / "replays"), ["gen1"])
    second = make_experiment(client, "tuned", replays, epochs=1)
    second.start()
    assert set(second.policy.state_dict()) == set(published)
    assert any(not v.equal(published[k]) for k, v in second.policy.state_dict().items())
    second.load_checkpoint_from_path(str(client / "published.pt"), is_accelerate_state=False)
    assert all(v.equal(published[k]) for k, v in second.policy.state_dict().items())
    second.policy.load_state_dict(published, strict=True)
    second.learn()
    after = torch.load(client / "tuned" / "ckpts" / "policy_weights" / "policy_epoch_0.pt", map_location="cpu")
    assert any(not v.equal(published[k]) for k, v in after.items())

    class RealCopies(DuelLearner):
        """Holds copies of the critics, as the original does."""

        def init_actor_critic(self):
            super().init_actor_critic()
            self.maximized_critics = copy.deepcopy(self.critics)

    of = second.policy
    theirs = RealCopies(
        obs_space=of.obs_space, rl2_space=of.rl2_space, action_space=of.action_space, max_seq_len=6,
        tstep_encoder_type=DuelTstepEncoder, traj_encoder_type=TformerTrajEncoder,
    )  # fmt: skip
    torch.nn.Module.load_state_dict(theirs, after, strict=True)
    assert theirs.maximized_critics.net.output_layer.weight.equal(after["critics.net.output_layer.weight"])


def online(root, **fields):
    replays = ParsedReplays(str(root / "replays"), ["gen1"], dset_name="human")
    played = DiskTrajDataset(dset_root=str(root), dset_name="played", dset_max_size=100)
    mixture = MixtureOfDatasets([replays, played], [0.75, 0.25], initial_sampling_weights=[1.0, 0.0], smooth_sudden_starts=2)
    return make_experiment(root, "online", mixture, start_collecting_at_epoch=1, **fields)


def test_online_after_offline_and_resumed(client):
    experiment = online(client, epochs=3)
    experiment.start()
    experiment.learn()
    rows = [row["values"] for row in tiny.rows(experiment.run_dir, "buffer")]
    weights = [values["played Current Sample Weight"] for values in rows if "played Current Sample Weight" in values]
    assert weights[0] == 0.0
    assert 0 < weights[-1] <= 0.25
    assert len(list((client / "played" / "buffer" / "fifo").iterdir())) > 0
    before = tiny.weights(experiment)
    frames = sum(experiment.frames_by_env.values())
    assert frames == 2 * 2 * 16
    experiment.close()
    again = online(client, epochs=4, resume="auto")
    again.start()
    assert (again.epoch, tiny.differing(before, tiny.weights(again))) == (3, [])
    again.learn()
    assert tiny.differing(before, tiny.weights(again)) != []
    assert sum(again.frames_by_env.values()) == frames + 2 * 16


def test_played_in_processes_of_their_own(client):
    experiment = make_experiment(
        client, "async", DiskTrajDataset(str(client), "own", 50), env_mode="async", env_workers=1, start_collecting_at_epoch=0, epochs=1,
        exploration_wrapper_type=amago.envs.exploration.EpsilonGreedy, val_interval=None,
    )  # fmt: skip
    experiment.start()
    experiment.learn()
    assert tiny.rows(experiment.run_dir, "train")
    metrics = experiment.evaluate_test([make_env, make_env], timesteps=20, save_trajs_to=str(client / "test"))
    assert any(name.startswith("Average Win Rate in gen1_vs_") for name in metrics)
    assert list((client / "test").iterdir())
