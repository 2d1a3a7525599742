"""The snippets of the original's tutorial of 2024, in its order, each ``Experiment`` trained for two updates.

``...`` in a call stands for arguments that a reader fills in: `fill` adds small ones. Corrected in the snippets, because they would run
nowhere:

- section 1: there and below ``AMAGOEnv``, ``gym``, ``torch`` and ``Experiment`` are used without an import
- section 6: ``switch_step_encoder`` (``switch_tstep_encoder``)
- asynchronous training: ``from argparse import ArgumentParser()``; ``options=`` of ``add_argument`` (``choices``); ``--mode train`` (``learn``)

Left out: the vectorised environments of gymnax without that package, what is not Python (``accelerate config``), and what other tests
train: attempts with metrics (``tests/envs``), the timestep encoder of a robot (``docs/extending.md``), sequence models and agents by their
classes (``tests/test_experiment.py``), and `EpsilonGreedy`.
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

import amago
from amago import config

SMALL_IMAGE = (36, 36, 3)
ONE_UPDATE = {"train_batches_per_epoch": 1, "batch_size": 1, "train_timesteps_per_epoch": 6}  # of large networks
NO_KERNEL = pytest.mark.filterwarnings("ignore:FlexAttention. its kernel has no backward pass:UserWarning")


class Pictures(gymnasium.Env):
    """Images; five steps."""

    metadata = {"render_modes": []}
    observation_space, action_space = gymnasium.spaces.Box(0, 255, SMALL_IMAGE, np.uint8), gymnasium.spaces.Discrete(3)

    def _look(self):
        return self.np_random.integers(0, 255, SMALL_IMAGE).astype(np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._look(), {}

    def step(self, action):
        self.steps += 1
        return self._look(), float(action == 1), False, self.steps == 5, {}


def pictures():
    return amago.envs.AMAGOEnv(Pictures(), env_name="Pictures")


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
