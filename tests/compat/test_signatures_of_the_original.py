"""Names, arguments and defaults that code for the original system relies on, one probe each."""

import importlib
import inspect
import math
from contextlib import closing

import gin
import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch

import amago
from amago import config
from amago.envs import AMAGOEnv
from amago.envs.exploration import EpsilonGreedy
from amago.nets.traj_encoders import FFTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder

NO_DEFAULT = inspect.Parameter.empty


def find(path):
    """The class or function of a dotted path, which may be imported like this."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


# Arguments that clients give by name, with the defaults that they count on (NO_DEFAULT: they give a value). In parentheses: differences that docs/original.md lists.
SIGNATURES = {
    "amago.utils.amago_warning": {"msg": NO_DEFAULT, "category": amago.utils.AmagoWarning},
    "amago.utils.call_async_env": {"env": NO_DEFAULT, "method_name": NO_DEFAULT},
    "amago.utils.masked_avg": {"tensor": NO_DEFAULT, "mask": NO_DEFAULT},
    "amago.utils.stack_list_array_dicts": {"list_": NO_DEFAULT, "axis": 0, "cat": False},
    "amago.utils.split_dict": {"d": NO_DEFAULT, "axis": NO_DEFAULT},
    "amago.utils.split_batch": {"arr": NO_DEFAULT, "axis": NO_DEFAULT},
    "amago.utils.get_constant_schedule_with_warmup": {"optimizer": NO_DEFAULT, "num_warmup_steps": NO_DEFAULT, "last_epoch": -1},
    "amago.utils.retry_load_checkpoint": {"ckpt_path": NO_DEFAULT, "map_location": NO_DEFAULT, "tries": 10},
    "amago.utils.AdamWRel": {"params": NO_DEFAULT, "reset_interval": gin.REQUIRED, "lr": 1e-3},
    "amago.envs.amago_env.AMAGOEnv": {"env": NO_DEFAULT, "env_name": None, "batched_envs": 1},
    "amago.envs.amago_env.SequenceWrapper": {"env": NO_DEFAULT, "save_trajs_to": None, "save_every": None, "save_trajs_as": "npz"},
    "amago.envs.amago_env.EnvCreator": {
        "make_env": NO_DEFAULT, "exploration_wrapper_type": None, "save_trajs_to": None, "save_every_low": None, "save_every_high": None,
        "save_trajs_as": "npz",
    },
    "amago.envs.amago_env.ReturnHistory": {"env_name": None},
    "amago.envs.amago_env.SpecialMetricHistory": {"env_name": None},
    "amago.envs.exploration.EpsilonGreedy": {
        "amago_env": NO_DEFAULT, "eps_start": 1.0, "eps_end": 0.05, "steps_anneal": 1_000_000, "randomize_eps": True,
    },
    "amago.envs.exploration.BilevelEpsilonGreedy": {
        "amago_env": NO_DEFAULT, "rollout_horizon": gin.REQUIRED, "eps_start_start": 1.0, "eps_start_end": 0.05, "eps_end_start": 0.8,
        "eps_end_end": 0.01, "steps_anneal": 1_000_000, "randomize_eps": True,
    },
    "amago.hindsight.Timestep": {
        "obs": NO_DEFAULT, "prev_action": NO_DEFAULT, "reward": NO_DEFAULT, "time_idx": NO_DEFAULT, "terminal": NO_DEFAULT,
    },
    "amago.hindsight.FrozenTraj": {
        "obs": NO_DEFAULT, "rl2s": NO_DEFAULT, "time_idxs": NO_DEFAULT, "rews": NO_DEFAULT, "dones": NO_DEFAULT, "actions": NO_DEFAULT,
    },
    "amago.loading.RLData": {
        "obs": NO_DEFAULT, "rews": NO_DEFAULT, "dones": NO_DEFAULT, "actions": NO_DEFAULT, "time_idxs": NO_DEFAULT, "rl2s": None,
    },
    "amago.loading.RLData.random_slice": {"length": NO_DEFAULT, "padded_sampling": "none"},
    "amago.loading.RLDataset": {"dset_name": None},
    "amago.loading.DiskTrajDataset": {"dset_root": NO_DEFAULT, "dset_name": NO_DEFAULT, "relabeler": None},  # (dset_min_size)
    "amago.loading.MixtureOfDatasets": {
        "datasets": NO_DEFAULT, "sampling_weights": NO_DEFAULT, "initial_sampling_weights": None, "smooth_sudden_starts": None,
        "dset_name": None,
    },
    "amago.loading.get_path_to_trajs": {"dset_root": NO_DEFAULT, "dset_name": NO_DEFAULT, "fifo": True},
    "amago.nets.utils.add_activation_log": {"root_key": NO_DEFAULT, "activation": NO_DEFAULT, "log_dict": None},
    "amago.nets.utils.InputNorm": {"dim": NO_DEFAULT, "beta": 1e-4, "init_nu": 1.0, "skip": False},
    "amago.nets.ff.Normalization": {"method": NO_DEFAULT, "d_model": NO_DEFAULT},
    "amago.nets.ff.MLP": {
        "d_inp": NO_DEFAULT, "d_hidden": NO_DEFAULT, "n_layers": NO_DEFAULT, "d_output": NO_DEFAULT, "activation": "leaky_relu",
        "normalization": None, "dropout_p": 0.0,
    },
    "amago.nets.ff.FFBlock": {"norm": None},
    "amago.nets.ff.SimNorm": {"dim": 8},
    "amago.nets.tstep_encoders.TstepEncoder": {"obs_space": NO_DEFAULT, "rl2_space": NO_DEFAULT, "hide_rl2s": False, "hide_rewards": False},
    "amago.nets.tstep_encoders.FFTstepEncoder": {
        "obs_space": NO_DEFAULT, "rl2_space": NO_DEFAULT, "n_layers": 2, "d_hidden": 512, "d_output": 256, "norm": None, "out_norm": "layer",
        "hide_rl2s": False, "normalize_inputs": True, "specify_obs_keys": None, "auto_scale": False,
    },
    "amago.nets.tstep_encoders.CNNTstepEncoder": {
        "channels_first": False, "img_features": 256, "rl2_features": 12, "d_output": 256, "drqv2_aug": False, "aug_pct_of_batch": 0.75,
        "obs_key": "observation",
    },
    "amago.nets.cnn.GridworldCNN": {"channels": (16, 32, 48)},
    "amago.nets.traj_encoders.TrajEncoder": {"tstep_dim": NO_DEFAULT, "max_seq_len": NO_DEFAULT},
    "amago.nets.traj_encoders.TformerTrajEncoder": {
        "tstep_dim": NO_DEFAULT, "max_seq_len": NO_DEFAULT, "d_model": 256, "n_heads": 8, "d_ff": 1024, "n_layers": 3, "dropout_ff": 0.05,
        "dropout_emb": 0.05, "dropout_attn": 0.0, "dropout_qkv": 0.0, "pos_emb": "fixed", "sigma_reparam": True,
        "normformer_norms": True, "head_scaling": True,
    },  # (attention_type)
    "amago.nets.traj_encoders.GRUTrajEncoder": {"d_hidden": 256, "n_layers": 2, "d_output": 256, "norm": "layer"},
    "amago.nets.traj_encoders.FFTrajEncoder": {"d_model": 256, "d_ff": None, "n_layers": 1, "dropout": 0.0, "norm": None, "out_norm": "layer"},
    "amago.nets.traj_encoders.MambaTrajEncoder": {"d_state": 16, "d_conv": 4, "expand": 2, "n_layers": 3, "norm": "layer"},
    "amago.nets.transformer.SelfAttention": {"causal": True, "dropout": 0.0},
    "amago.nets.transformer.FlashAttention": {"causal": True, "dropout": 0.0, "window_size": (-1, -1)},
    "amago.nets.transformer.FlexAttention": {"causal": True, "dropout": 0.0, "score_mod": None, "mask_mod": None},
    "amago.nets.transformer.SlidingWindowFlexAttention": {"causal": True, "dropout": 0.0, "window_size": gin.REQUIRED},
    "amago.nets.transformer.SigmaReparam": {"d_in": NO_DEFAULT, "d_out": NO_DEFAULT, "bias": True, "fast_init": False},
    "amago.nets.policy_dists.Discrete": {"d_action": NO_DEFAULT, "clip_prob_high": 0.99},  # (clip_prob_low)
    "amago.nets.policy_dists.DiscreteLikeContinuous": {"categorical": NO_DEFAULT},
    "amago.nets.policy_dists.TanhGaussian": {"clip_actions_on_log_prob": (-0.99, 0.99)},
    "amago.nets.policy_dists.Beta": {"alpha_low": 1.0001},
    "amago.nets.policy_dists.GMM": {"gmm_modes": 5, "std_low": 1e-4},
    "amago.nets.actor_critic.BaseActorHead": {
        "state_dim": NO_DEFAULT, "action_dim": NO_DEFAULT, "discrete": NO_DEFAULT, "gammas": NO_DEFAULT,
    },
    "amago.nets.actor_critic.BaseActorHead.forward": {"state": NO_DEFAULT, "log_dict": None, "straight_from_obs": None},
    "amago.nets.actor_critic.Actor": {"n_layers": 2, "d_hidden": 256, "dropout_p": 0.0},
    "amago.nets.actor_critic.ResidualActor": {
        "feature_dim": 256, "residual_ff_dim": 512, "residual_blocks": 2, "normalization": "layer", "dropout_p": 0.0,
    },
    "amago.nets.actor_critic.BaseCriticHead": {
        "state_dim": NO_DEFAULT, "action_dim": NO_DEFAULT, "discrete": NO_DEFAULT, "gammas": NO_DEFAULT, "num_critics": NO_DEFAULT,
    },
    "amago.nets.actor_critic.NCriticsTwoHot": {
        "min_return": None, "max_return": None, "output_bins": 128, "use_symlog": True, "label_type": "twohot", "sigma": 0.75,
        "init_value": None,
    },
    "amago.nets.actor_critic.PopArtLayer": {"gammas": NO_DEFAULT, "beta": 5e-4, "init_nu": 100.0, "enabled": True},
    "amago.nets.actor_critic.gammas_as_input_seq": {"gammas": NO_DEFAULT},
    "amago.agent.BaseAgent": {
        "obs_space": NO_DEFAULT, "rl2_space": NO_DEFAULT, "action_space": NO_DEFAULT, "max_seq_len": NO_DEFAULT,
        "tstep_encoder_type": NO_DEFAULT, "traj_encoder_type": NO_DEFAULT,
    },
    "amago.agent.Agent": {
        "num_critics": 4, "num_critics_td": 2, "online_coeff": 1.0, "offline_coeff": 0.1, "critic_loss_weight": 10.0, "gamma": 0.999,
        "reward_multiplier": 10.0, "tau": 0.003, "fake_filter": False, "num_actions_for_value_in_critic_loss": 1,
        "num_actions_for_value_in_actor_loss": 1, "fbc_filter_func": amago.agent.binary_filter, "popart": True, "use_target_actor": True,
        "use_multigamma": True, "n_step": 1, "pass_obs_keys_to_actor": None,
    },
    "amago.agent.MultiTaskAgent": {"online_coeff": 0.0, "offline_coeff": 1.0, "num_actions_for_value_in_actor_loss": 3},
    "amago.agent.binary_filter": {"adv": NO_DEFAULT, "threshold": 0.0},
    "amago.agent.exp_filter": {
        "adv": NO_DEFAULT, "beta": 1.0, "clip_adv_low": None, "clip_adv_high": None, "clip_weights_low": 1e-7,
    },  # (clip_weights_high)
    "amago.agent.leaky_relu_filter": {
        "adv": NO_DEFAULT, "beta": 2.0, "tau": 1e-2, "neg_slope": 0.05, "target_f0": 1e-2, "clip_weights_low": 1e-7,
        "clip_weights_high": 10.0, "add_binary": True,
    },
    "amago.agent.Agent.get_actions": {
        "obs": NO_DEFAULT, "rl2s": NO_DEFAULT, "time_idxs": NO_DEFAULT, "hidden_state": None, "sample": True,
    },
    "amago.agent.Agent.get_state_embedding": {"obs": NO_DEFAULT, "rl2s": NO_DEFAULT, "time_idxs": NO_DEFAULT, "hidden_state": None},
    "amago.agent.Agent.on_checkpoint_loaded": {"is_resume": False},
    "amago.cli_utils.use_config": {"custom_params": NO_DEFAULT, "gin_configs": None, "finalize": True},
    "amago.cli_utils.switch_traj_encoder": {"config": NO_DEFAULT, "arch": NO_DEFAULT, "memory_size": None, "layers": None},
    "amago.cli_utils.switch_tstep_encoder": {"config": NO_DEFAULT, "arch": NO_DEFAULT},
    "amago.cli_utils.switch_agent": {"config": NO_DEFAULT, "agent": NO_DEFAULT},
    "amago.cli_utils.switch_exploration": {"config": NO_DEFAULT, "strategy": NO_DEFAULT},
}  # fmt: skip


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_and_defaults(path):
    owner, _, name = path.rpartition(".")
    try:
        found = find(path)
    except ModuleNotFoundError:  # a method
        found = getattr(find(owner), name)
    parameters = inspect.signature(found.__init__ if inspect.isclass(found) else found).parameters
    for argument, default in SIGNATURES[path].items():
        actual = parameters[argument].default
        assert default is NO_DEFAULT or actual is default or actual == default, f"{path}({argument}={actual!r})"


def test_critics_of_multitask_agents_classify():
    assert inspect.signature(amago.agent.MultiTaskAgent.__init__).parameters["critic_type"].default.__name__ == "NCriticsTwoHot"
    low, high = (
        inspect.signature(find("amago.nets.policy_dists.TanhGaussian").__init__).parameters[f"std_{x}"].default
        for x in ("low", "high")
    )
    assert (low, high) == (pytest.approx(math.exp(-5)), pytest.approx(math.exp(2)))


class Longer(AMAGOEnv):
    rested = 0

    def take_long_break(self, minutes):
        self.rested += minutes
        return self.rested


def longer():
    return Longer(gym.make("CartPole-v1", max_episode_steps=6), env_name="Longer")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_gymnasium_steps_them_in_processes(tmp_path):
    creators = [amago.envs.EnvCreator(longer, EpsilonGreedy, str(tmp_path), 2, 4, "npz") for _ in range(2)]
    with closing(gym.vector.AsyncVectorEnv(creators, context="fork")) as envs:
        obs, _ = envs.reset()
        assert obs["observation"].reshape(2, 4).dtype == np.float32
        for _ in range(6):
            obs, reward, terminated, truncated, _ = envs.step(np.zeros((2, 1), np.uint8))
        assert np.reshape(reward, 2).tolist() == [1.0, 1.0]
        assert (np.reshape(terminated, 2) | np.reshape(truncated, 2)).all()
        assert amago.utils.call_async_env(envs, "take_long_break", 3) == [3, 3]
        assert amago.utils.call_async_env(envs, "env_name") == ["Longer", "Longer"]
        assert [len(x) for x in amago.utils.call_async_env(envs, "current_timestep")] == [3, 3]


@pytest.mark.parametrize(("choices", "dtype"), [(256, torch.uint8), (257, torch.int64)])
def test_many_choices(choices, dtype):
    config.bind(tiny.SMALL)
    agent = amago.Agent(
        obs_space=gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (3,))}), rl2_space=gym.spaces.Box(-np.inf, np.inf, (1 + choices,)),
        action_space=gym.spaces.Discrete(choices), max_seq_len=4, tstep_encoder_type=FFTstepEncoder, traj_encoder_type=FFTrajEncoder,
    )  # fmt: skip
    obs, rl2s, times = {"a": torch.zeros(2, 1, 3)}, torch.zeros(2, 1, 1 + choices), torch.zeros(2, 1, 1, dtype=torch.int64)
    actions, _ = agent.get_actions(obs, rl2s, times)
    assert actions.dtype == dtype
