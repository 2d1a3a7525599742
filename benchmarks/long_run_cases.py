"""The four long runs of docs/long_runs.md, built without the packages of their environments."""

from __future__ import annotations

import importlib.util
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from amago import cli_utils, config
from amago.agent import BaseAgent
from amago.envs.builtin.metaworld_ml import MetaWorldTasks
from amago.experiment import Experiment
from amago.loading import Batch
from amago.spaces import action_spec, rl2_space

EXAMPLES = Path(__file__).parents[1] / "examples"


def _box(shape: tuple[int, ...], high: float = np.inf, dtype: Any = np.uint8) -> gym.spaces.Box:
    return gym.spaces.Box(-np.inf if high == np.inf else 0, high, shape, np.float32 if high in (1, np.inf) else dtype)


@dataclass(frozen=True)
class Run:
    """A long run.

    Attributes:
        name: name of its settings in the zoo.
        title: name in tables.
        script, arguments: its command.
        obs, actions: the spaces of its environment.
        rollout: maximum steps per rollout.
        env_rate: steps per second of one environment on one core.
    """

    name: str
    title: str
    script: str
    arguments: str
    obs: Mapping[str, gym.spaces.Box]
    actions: gym.Space[Any]
    rollout: int
    env_rate: float

    @property
    def command(self) -> str:
        """The command of the run, without ``--run_name`` and ``--buffer_dir``."""
        return f"python examples/{self.script} --configs zoo/{self.name} {self.arguments}"


_ALL = "--mixed_precision bf16 --resume auto"
RUNS = (
    Run(
        "tmaze_10k", "T-Maze of 10,000 steps", "04_tmaze.py",
        "--horizon 10_000 --no_async --memory_size 128 --memory_layers 2 --parallel_actors 36 --timesteps_per_epoch 10_000 --epochs 500 "
        f"--grads_per_epoch 600 --batch_size 18 --dset_max_size 5000 --val_interval 50 --eval_timesteps 10_001 {_ALL}",
        {"observation": _box((2,))}, gym.spaces.Discrete(4), 10_000, 286_000,
    ),
    Run(
        "metaworld_ml45", "Meta-World ML45", "07_metaworld.py",
        "--benchmark ml45 --k 3 --agent_type multitask --memory_size 320 --memory_layers 3 --max_seq_len 256 --parallel_actors 30 "
        f"--timesteps_per_epoch 1501 --epochs 500 --grads_per_epoch 700 --batch_size 24 --val_interval 20 {_ALL}",
        {"observation": _box((41,))}, gym.spaces.Box(-1.0, 1.0, (4,)), 1500, 1_740,
    ),
    Run(
        "crafter_long", "Crafter, instructions, pictures", "16_crafter_instructions.py",
        "--obs_kind crop --relabel some --memory_size 256 --memory_layers 3 --max_seq_len 512 --parallel_actors 24 --timesteps_per_epoch 2000 "
        f"--epochs 5000 --grads_per_epoch 700 --batch_size 18 --start_learning_at_epoch 5 --dset_max_size 5000 --val_interval 50 {_ALL}",
        {"observation": _box((49, 63, 3), 255), "status": _box((25,), 1), "goals": _box((5, 3), 39), "achieved": _box((3,), 39)},
        gym.spaces.Discrete(17), 2000, 710,
    ),
    Run(
        "atari_multigame", "Atari, ten games", "08_ale.py",
        "--games Pong Boxing Breakout Gopher MsPacman ChopperCommand CrazyClimber BattleZone Qbert Seaquest --agent_type multitask --cnn impala "
        "--memory_size 256 --memory_layers 2 --max_seq_len 32 --parallel_actors 30 --timesteps_per_epoch 1000 --epochs 10_000 "
        f"--grads_per_epoch 500 --batch_size 32 --dset_max_size 60_000 --val_interval 100 {_ALL}",
        {"observation": _box((84, 84, 3), 255)}, gym.spaces.Discrete(18), 27_000, 2_400,
    ),
)  # fmt: skip


# ---- the run itself ----------------------------------------------------------------------------------------------------


def build(run: Run, *more: str) -> tuple[Experiment, BaseAgent]:
    """The experiment of a run, not started, and its agent. Arguments in ``more`` override those of the run."""
    spec = importlib.util.spec_from_file_location(f"long_run_{run.name}", EXAMPLES / run.script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parser = cli_utils.add_common_cli(ArgumentParser())
    module.add_cli(parser)
    make: Callable[..., Experiment] = module.make_experiment
    if hasattr(module, "MakeMetaWorld"):  # only names of tasks are necessary before the first rollout
        make = partial(make, tasks=MetaWorldTasks("ML45", {}, {"train": {"reach-v3": []}}))
    with tempfile.TemporaryDirectory() as folder, config.temporary({}):
        where = ["--run_name", run.name, "--buffer_dir", folder]
        experiment = make(parser.parse_args([*run.command.split()[2:], *where, *more]))
        agent = experiment.agent_type(
            obs_space=gym.spaces.Dict(dict(run.obs)), rl2_space=rl2_space(action_spec(run.actions)), action_space=run.actions,
            max_seq_len=experiment.max_seq_len, tstep_encoder_type=experiment.tstep_encoder_type,
            traj_encoder_type=experiment.traj_encoder_type,
        )  # fmt: skip
    return experiment, agent


def observations(run: Run, *shape: int) -> dict[str, Tensor]:
    """Random whole numbers, of the given leading shape, up to the bound of each space, or 1."""
    most = {k: float(s.high.max()) if np.isfinite(s.high).all() else 1.0 for k, s in run.obs.items()}
    return {k: (torch.rand(*shape, *s.shape) * most[k]).round().to(torch.from_numpy(s.low).dtype) for k, s in run.obs.items()}


def make_batch(run: Run, batch: int, length: int) -> Batch:
    """Random sequences without padding."""
    width = action_spec(run.actions).dim
    actions = torch.rand(batch, length, width) * 2.0 - 1.0
    if isinstance(run.actions, gym.spaces.Discrete):
        actions = torch.nn.functional.one_hot(actions.argmax(-1), width).float()
    return Batch(
        obs=observations(run, batch, length + 1), rl2s=torch.randn(batch, length + 1, 1 + width), rews=torch.randn(batch, length, 1),
        dones=torch.zeros(batch, length, 1, dtype=torch.bool), actions=actions,
        time_idxs=torch.arange(length + 1)[None, :, None].expand(batch, -1, -1),
        mask=torch.ones(batch, length + 1, 1, dtype=torch.bool),
    )  # fmt: skip
