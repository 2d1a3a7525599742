"""The snippets of the original's tutorial of 2024, in its order, each ``Experiment`` trained for two updates.

``...`` in a call stands for arguments that a reader fills in: `fill` adds small ones. Corrected in the snippets, because they would run
nowhere:

- section 1: ``observation_spce``; there and below ``AMAGOEnv``, ``gym``, ``torch`` and ``Experiment`` are used without an import
- section 2: ``def __init_(`` without ``self``; ``Noramlization``
- section 6: ``switch_step_encoder`` (``switch_tstep_encoder``)
- asynchronous training: ``from argparse import ArgumentParser()``; ``options=`` of ``add_argument`` (``choices``); ``--mode train`` (``learn``)

Left out: the vectorised environments of gymnax without that package, and what is not Python (``accelerate config``).
"""

import ast
import gc
import re
import sys
import types

import gymnasium
import numpy as np
import pytest
import tiny
import torch

import amago
from amago import config

SMALL_IMAGE = (36, 36, 3)
ONE_UPDATE = {"train_batches_per_epoch": 1, "batch_size": 1, "train_timesteps_per_epoch": 6}  # of large networks
NO_KERNEL = pytest.mark.filterwarnings("ignore:FlexAttention. its kernel has no backward pass:UserWarning")


class Pictures(gymnasium.Env):
    """Images and joints; five steps."""

    metadata = {"render_modes": []}

    def __init__(self, joints=False):
        image = gymnasium.spaces.Box(0, 255, SMALL_IMAGE, np.uint8)
        self.joints = joints
        both = {"image": image, "joints": gymnasium.spaces.Box(-1, 1, (4,))}
        self.observation_space = gymnasium.spaces.Dict(both) if joints else image
        self.action_space = gymnasium.spaces.Discrete(3)

    def _look(self):
        image = self.np_random.integers(0, 255, SMALL_IMAGE).astype(np.uint8)
        return {"image": image, "joints": np.zeros(4, np.float32)} if self.joints else image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._look(), {}

    def step(self, action):
        self.steps += 1
        return self._look(), float(action == 1), False, self.steps == 5, {}


def pictures():
    return amago.envs.AMAGOEnv(Pictures(), env_name="Pictures")


def robot():
    return amago.envs.AMAGOEnv(Pictures(joints=True), env_name="Robot")


@pytest.fixture
def tutorial(tmp_path, monkeypatch):
    """A reader's program: ``tutorial(snippet, **arguments)`` runs a snippet in its namespace and returns the namespace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    config.bind(tiny.SMALL | {"SigmaReparam.fast_init": True})  # exact norms of large matrices take half a minute
    module = types.ModuleType("__main__")

    def run(snippet, **arguments):
        text = re.sub(r"(?m)^(\s*)\.\.\.,?(\s*#.*)?$", r"\1**fill,", snippet)
        calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("Experiment")]
        given = {k.arg for call in calls for k in call.keywords}
        rest = tiny_arguments(tmp_path) | arguments
        vars(module)["fill"] = {k: v for k, v in rest.items() if k not in given}
        exec(compile(text, "tutorial.md", "exec"), vars(module))
        return types.SimpleNamespace(**vars(module))

    monkeypatch.setitem(sys.modules, "__main__", module)
    yield run
    for value in vars(module).values():
        if isinstance(value, amago.Experiment):
            value.close()
    gc.collect()


def tiny_arguments(root):
    from amago.nets.traj_encoders import GRUTrajEncoder
    from amago.nets.tstep_encoders import FFTstepEncoder

    return {
        "run_name": "run", "ckpt_base_dir": str(root), "max_seq_len": 5, "dset_root": str(root), "dset_name": "dset", "agent_type": amago.Agent,
        "tstep_encoder_type": FFTstepEncoder, "traj_encoder_type": GRUTrajEncoder, "make_train_env": pictures, "make_val_env": pictures,
        "parallel_actors": 1, "env_mode": "sync", "epochs": 1, "train_timesteps_per_epoch": 10, "train_batches_per_epoch": 2, "batch_size": 2,
        "val_timesteps_per_epoch": 10, "val_interval": None, "ckpt_interval": None, "always_save_latest": False, "dloader_workers": 0, "verbose": False, "log_interval": 1,
    }  # fmt: skip


def trained(experiment):
    """The policy, after a run."""
    experiment.start()
    before = tiny.weights(experiment)
    experiment.learn()
    assert tiny.differing(before, tiny.weights(experiment))
    return experiment.policy


ENVIRONMENT = """
import gymnasium
import amago

def make_env():
  env = gymnasium.make("Pendulum-v1")
  env = amago.envs.AMAGOEnv(env=env, env_name="Pendulum", batched_envs=1)
  return env

sample_env = make_env()
sample_env.observation_space
sample_timestep, info = sample_env.reset()
sample_timestep.obs["observation"].shape
"""


def test_1_environments(tutorial):
    names = tutorial(ENVIRONMENT)
    space = gymnasium.spaces.Box(np.array([-1, -1, -8], np.float32), np.array([1, 1, 8], np.float32), dtype=np.float32)
    assert names.sample_env.observation_space == gymnasium.spaces.Dict({"observation": space})
    assert isinstance(names.sample_timestep, amago.hindsight.Timestep)
    assert names.sample_timestep.obs["observation"].shape == (1, 3)
    names = tutorial(
        """
experiment = amago.Experiment(
  make_train_env=make_env,
  make_val_env=make_env,
  parallel_actors=36,
  env_mode="async",
  ...,
)
experiment.parallel_actors, experiment.env_mode = 2, "sync"
""",
        train_timesteps_per_epoch=200,
    )
    trained(names.experiment)


def test_1_vectorised_environments(tutorial):
    pytest.importorskip("gymnax", reason="gymnax is not installed: pip install 'amago[gymnax]'", exc_type=ImportError)
    names = tutorial(
        """
import gymnax
import amago
from amago.envs import AMAGOEnv
from amago.envs.builtin.gymnax_envs import GymnaxCompatability

def make_env():
  env, params = gymnax.make("Pendulum-v1")
  vec_env = GymnaxCompatability(env, num_envs=512, params=params)
  return AMAGOEnv(env=vec_env, env_name=f"gymnax_Pendulum", batched_envs=512)

experiment = amago.Experiment(
  make_train_env=make_env,
  make_val_env=make_env,
  parallel_actors=512,
  env_mode="already_vectorized",
  ...,
)
""",
        train_timesteps_per_epoch=200,
    )
    trained(names.experiment)


META_RL = """
import gymnasium as gym
from amago.envs import AMAGO_ENV_LOG_PREFIX

class MyMetaRLEnv(gym.Wrapper):

  def reset(self):
    self.sample_new_task_somehow()
    obs, info = self.env.reset()
    self.current_episode = 0
    self.episode_return = 0
    return obs, info

  def step(self, action):
    next_obs, reward, terminated, truncated, info = self.env.step(action)
    self.episode_return += reward
    if terminated or truncated:
      next_obs, info = self.reset_to_the_same_task_somehow()
      info[f"{AMAGO_ENV_LOG_PREFIX} Ep {self.current_episode} Return"] = self.episode_return
      self.episode_return = 0
      self.current_episode += 1
    done = self.current_episode >= self.k
    return next_obs, reward, done, done, info
"""


def test_1_attempts_and_their_metrics(tutorial):
    names = tutorial(META_RL)

    class Twice(names.MyMetaRLEnv):
        k = 2

        def sample_new_task_somehow(self):
            self.task = 3

        def reset_to_the_same_task_somehow(self):
            return self.env.reset(seed=self.task)

    def make_env():
        return amago.envs.AMAGOEnv(Twice(gymnasium.make("CartPole-v1", max_episode_steps=6)), env_name="Twice")

    names = tutorial(
        "import amago\nexperiment = amago.Experiment(\n  ...,\n)\n",
        make_train_env=make_env, make_val_env=make_env, train_timesteps_per_epoch=40, val_interval=1, val_timesteps_per_epoch=40,
    )  # fmt: skip
    trained(names.experiment)
    val = tiny.rows(names.experiment.run_dir, "val")[0]["values"]
    assert val["Average Ep 0 Return in Twice"] <= 6
    assert val["Average Total Return in Twice"] == pytest.approx(
        val["Average Ep 0 Return in Twice"] + val["Average Ep 1 Return in Twice"]
    )


def test_2_write_a_timestep_encoder(tutorial):
    names = tutorial(
        """
import amago
import gymnasium as gym
import torch
from torch import nn
import torch.nn.functional as F

from amago import TstepEncoder
from amago.nets.cnn import NatureishCNN
from amago.nets.ff import Normalization

class MultiModalRobotTstepEncoder(TstepEncoder):
  def __init__(
      self,
      obs_space: gym.spaces.Dict,
      rl2_space: gym.spaces.Box,
  ):
    super().__init__(obs_space=obs_space, rl2_space=rl2_space)
    img_space = obs_space["image"]
    joint_space = obs_space["joints"]
    self.cnn = NatureishCNN(img_shape=img_space.shape)
    cnn_out_shape = self.cnn(self.cnn.blank_img).shape[-1]
    self.joint_rl2_emb = nn.Linear(joint_space.shape[-1] + rl2_space.shape[-1], 32)
    self.merge = nn.Linear(cnn_out_shape + 32, 128)
    self.output_layer = nn.Linear(128, 64)
    self.out_norm = Normalization("layer", 64)

  @property
  def emb_dim(self):
    return 64

  def inner_forward(self, obs, rl2s, log_dict=None):
    img_features = self.cnn(obs["image"])
    joints_and_rl2s = torch.cat((obs["joints"], rl2s), dim=-1)
    joint_features = F.leaky_relu(self.joint_rl2_emb(joints_and_rl2s))
    merged = torch.cat((img_features, joint_features), dim=-1)
    merged = F.leaky_relu(self.merge(merged))
    out = self.out_norm(self.output_layer(merged))
    return out

experiment = amago.Experiment(
  ...,
  tstep_encoder_type=MultiModalRobotTstepEncoder,
)
""",
        make_train_env=robot,
        make_val_env=robot,
    )
    encoder = trained(names.experiment).tstep_encoder
    assert encoder.emb_dim == 64
    out = encoder(
        obs={"image": torch.zeros(2, 3, *SMALL_IMAGE, dtype=torch.uint8), "joints": torch.zeros(2, 3, 4)},
        rl2s=torch.zeros(2, 3, 4),
    )
    assert out.shape == (2, 3, 64)


PARTS = """
import amago
from amago.nets.traj_encoders import MambaTrajEncoder

experiment = amago.Experiment(
  ...,
  traj_encoder_type=MambaTrajEncoder,
)
""", """
import amago
from amago.agent import MultiTaskAgent

experiment = amago.Experiment(
  ...,
  agent_type=MultiTaskAgent,
)
"""  # fmt: skip


@pytest.mark.parametrize(
    ("snippet", "part", "name"), [(PARTS[0], "traj_encoder", "MambaTrajEncoder"), (PARTS[1], None, "MultiTaskAgent")]
)
def test_3_and_4_choose_a_sequence_model_and_an_agent(tutorial, snippet, part, name):
    config.bind(tiny.MAMBA | tiny.TWO_HOT)
    names = tutorial(snippet, make_train_env=tiny.cartpole, make_val_env=tiny.cartpole, train_timesteps_per_epoch=60)
    policy = trained(names.experiment)
    assert type(getattr(policy, part) if part else policy).__name__ == name


def test_6_a_required_setting_is_missing(tutorial):
    names = tutorial(
        """
from amago import Experiment
from amago.cli_utils import use_config
from amago.nets.traj_encoders import TformerTrajEncoder
from amago.nets.transformer import SlidingWindowFlexAttention

use_config({"TformerTrajEncoder.attention_type": SlidingWindowFlexAttention})
experiment = Experiment(
  traj_encoder_type=TformerTrajEncoder,
  ...
)
"""
    )
    with pytest.raises(RuntimeError, match="window_size"):
        names.experiment.start()


def test_6_exploration(tutorial):
    names = tutorial(
        """
from amago import Experiment
from amago.envs.exploration import EpsilonGreedy
from amago.cli_utils import use_config

config = {
  "EpsilonGreedy.steps_anneal" : 200_000,
  "EpsilonGreedy.eps_start" : 1.0,
  "EpsilonGreedy.eps_end" : .01,
  "EpsilonGreedy.randomize_eps" : False,
}
use_config(config)
experiment = Experiment(
  exploration_wrapper_type=EpsilonGreedy,
  ...
)
wrapped = EpsilonGreedy(fill["make_train_env"]())
"""
    )
    trained(names.experiment)
    wrapped = names.wrapped
    assert (wrapped.steps_anneal, wrapped.eps_start, wrapped.eps_end, wrapped.randomize_eps) == (200_000, 1.0, 0.01, False)


@NO_KERNEL
def test_6_an_easier_way(tutorial, tmp_path):
    config.bind(tiny.TWO_HOT)
    names = tutorial(
        """
from amago import Experiment
from amago.cli_utils import switch_traj_encoder, switch_tstep_encoder, switch_agent, switch_exploration, use_config
from amago.nets.transformer import SlidingWindowFlexAttention
from amago.nets.cnn import IMPALAishCNN


config = {
  "amago.nets.transformer.SlidingWindowFlexAttention.window_size" : 128,
  "amago.nets.cnn.IMPALAishCNN.cnn_block_depths" : [32, 64, 64],
}
tstep_encoder_type = switch_tstep_encoder(config, arch="cnn", cnn_type=IMPALAishCNN)
traj_encoder_type = switch_traj_encoder(config, arch="transformer", d_model=512, d_ff=2048, n_heads=16, attention_type=SlidingWindowFlexAttention)
exploration_wrapper_type = switch_exploration(config, strategy="egreedy", eps_start=1.0, eps_end=.01, steps_anneal=200_000)
agent_type = switch_agent(config, agent="multitask", num_critics=6, gamma=.998)
use_config(config)

experiment = Experiment(
  tstep_encoder_type=tstep_encoder_type,
  traj_encoder_type=traj_encoder_type,
  agent_type=agent_type,
  exploration_wrapper_type=exploration_wrapper_type,
  ...
)
""",
        **ONE_UPDATE,
    )
    policy = trained(names.experiment)
    assert type(policy).__name__ == "MultiTaskAgent"
    assert (policy.num_critics, round(float(policy.gammas[-1]), 6), policy.traj_encoder.emb_dim) == (6, 0.998, 512)
    (tmp_path / "environment_config.gin").write_text("MultiTaskAgent.num_critics = 7\nMultiTaskAgent.tau = 0.25\n")
    (tmp_path / "rl_config.gin").write_text("MultiTaskAgent.num_critics = 8\n")
    names.experiment.close()
    names = tutorial(
        """
use_config(config, gin_configs=["environment_config.gin", "rl_config.gin"])
experiment = Experiment(
  agent_type=agent_type,
  ...
)
""",
        run_name="files", make_train_env=tiny.cartpole, make_val_env=tiny.cartpole, train_timesteps_per_epoch=60, dset_name="files",
    )  # fmt: skip
    policy = trained(names.experiment)
    assert (policy.num_critics, policy.tau) == (8, 0.25)


def test_7_files_of_a_run(tutorial, tmp_path):
    """The layout of the tutorial: runs lie beside the buffer that they share."""
    names = tutorial(
        """
import amago
del fill["ckpt_base_dir"]
experiment = amago.Experiment(
  ...,
)
experiment.start()
experiment.learn()
""",
        make_train_env=tiny.cartpole, make_val_env=tiny.cartpole, train_timesteps_per_epoch=60, save_trajs_as="npz", epochs=2, ckpt_interval=1,
    )  # fmt: skip
    names.experiment.close()
    dset = tmp_path / "dset"
    assert {p.name for p in (dset / "buffer").iterdir()} >= {"fifo", "protected"}
    assert all(p.suffix == ".npz" and p.name.startswith("CartPole_") for p in (dset / "buffer" / "fifo").iterdir())
    assert (dset / "run" / "config.txt").exists()
    ckpts = dset / "run" / "ckpts"
    assert {p.name for p in (ckpts / "training_states").iterdir()} >= {"run_epoch_0", "run_epoch_1"}
    assert {p.name for p in (ckpts / "policy_weights").iterdir()} >= {"policy_epoch_0.pt", "policy_epoch_1.pt"}


OFFLINE = """
from amago import Experiment
experiment = Experiment(
  start_collecting_at_epoch=float("inf"),
  ...
)
"""


def test_7_offline_from_the_protected_partition(tutorial, tmp_path):
    from amago.hindsight import Trajectory

    env = tiny.cartpole()
    (tmp_path / "dset" / "buffer" / "protected").mkdir(parents=True)
    for i in range(4):
        traj = Trajectory([env.reset(seed=i)[0]])
        for t in range(6):
            traj.add_timestep(env.step(t % 2)[0])
        traj.save_to_disk(tmp_path / "dset" / "buffer" / "protected" / f"CartPole_0000000{i}_{i}.5.npz", save_as="npz")
    names = tutorial(OFFLINE, make_train_env=tiny.cartpole, make_val_env=tiny.cartpole)
    trained(names.experiment)
    assert len(list((tmp_path / "dset" / "buffer" / "protected").iterdir())) == 4


def test_9_collecting_and_learning_in_two_programs(tutorial, monkeypatch, tmp_path):
    script = """
from argparse import ArgumentParser
from amago import Experiment
from amago.agent import MultiTaskAgent
from amago.cli_utils import switch_async_mode, use_config
from amago.nets.traj_encoders import TformerTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder

parser = ArgumentParser()
parser.add_argument("--mode", choices=["learn", "collect", "both"])
args = parser.parse_args()

config = {
  "MultiTaskAgent.num_critics": 2,
}
use_config(config)

del fill["ckpt_base_dir"]
experiment = Experiment(
  dset_root="~/amago_dsets",
  dset_name="agi_training_data",
  run_name="v1",
  tstep_encoder_type=FFTstepEncoder,
  traj_encoder_type=TformerTrajEncoder,
  agent_type=MultiTaskAgent,
  ...
)
switch_async_mode(experiment, args.mode)
experiment.start()
experiment.learn()
"""
    config.bind(tiny.TWO_HOT)
    fill = {
        "always_save_latest": True,
        "make_train_env": tiny.cartpole,
        "make_val_env": tiny.cartpole,
        "train_timesteps_per_epoch": 60,
    }
    monkeypatch.setattr(sys, "argv", ["my_training_script.py", "--mode", "collect"])
    with monkeypatch.context() as patched:
        patched.setattr("amago.cli_utils.scripts.UNTIL_STOPPED", 1)
        tutorial(script, **fill).experiment.close()
    home = tmp_path / "amago_dsets" / "agi_training_data"
    assert list((home / "buffer" / "fifo").iterdir())
    monkeypatch.setattr(sys, "argv", ["my_training_script.py", "--mode", "learn"])
    experiment = tutorial(script, **fill).experiment
    assert tiny.rows(experiment.run_dir, "train")
    assert (home / "v1" / "ckpts" / "latest" / "policy.pt").exists()
