"""Built-in environments under the modules and names of the original system."""

import importlib

import numpy as np
import pytest

from amago.envs import AMAGOEnv
from amago.envs.builtin import key_door
from amago.envs.builtin.frozen_lake import MetaFrozenLake


def test_toy_environments():
    from amago.envs.builtin.toy_gym import MetaFrozenLake as Lake
    from amago.envs.builtin.toy_gym import RoomKeyDoor

    assert Lake is MetaFrozenLake
    assert RoomKeyDoor is key_door.RoomKeyDoor
    lake = Lake(
        5, k_episodes=3, hard_mode=False, recover_mode=True, max_episode_steps=30, show_k_progress=True, slip_chance=0.1
    )
    assert lake.max_episode_steps == 30
    room = RoomKeyDoor(
        dark=False, size=7, max_episode_steps=20, meta_rollout_horizon=60, start_location="random", key_location=(0, 0),
        goal_location="random", randomize_actions=True,
    )  # fmt: skip
    env = AMAGOEnv(room, env_name="room")
    assert env.reset(seed=0)[0].obs["observation"].shape[0] == 1


@pytest.mark.parametrize(("up", "reward"), [(True, 5.0), (False, -2.0)])
def test_tmaze_with_other_rewards(up, reward):
    from amago.envs.builtin.tmaze import TMazeAltActive, TMazeAltPassive

    env = TMazeAltPassive(corridor_length=3, goal_reward=5.0, penalty=-0.5, distract_reward=-2.0)
    obs, _ = env.reset(seed=0)
    rewards = [env.step(action)[1] for action in (0, 2, 0)]
    assert rewards == [0.0, -0.5, 0.0]
    env = TMazeAltPassive(corridor_length=3, goal_reward=5.0, distract_reward=-2.0)
    obs, _ = env.reset(seed=0)
    towards, away = (1, 3) if obs[1] > 0 else (3, 1)
    rewards = [env.step(action)[1] for action in (0, 0, 0, towards if up else away)]
    assert rewards == [0.0, 0.0, 0.0, reward]
    active = TMazeAltActive(corridor_length=3)
    active.reset(seed=0)
    assert [active.step(2)[1] for _ in range(5)] == [0.0] * 5  # neither penalty nor reward


def test_mazes():
    from amago.envs.builtin.mazerunner import MazeRunnerAMAGOEnv

    env = MazeRunnerAMAGOEnv(maze_dim=9, num_goals=2, time_limit=20, randomized_action_space=True)
    assert isinstance(env, AMAGOEnv)
    assert set(env.observation_space.spaces) == {"obs", "goals", "achieved"}
    step, _ = env.reset(seed=0)
    assert step.obs["goals"].shape == (1, 2, 2)
    assert np.array_equal(step.obs["obs"][0, :2], step.obs["achieved"][0])


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("popgym_envs", ["POPGymAMAGO", "MultiDomainPOPGymAMAGO"]),
        ("metaworld_ml", ["Metaworld"]),
        ("alchemy", ["SymbolicAlchemy"]),
        ("babyai", ["MultitaskMetaBabyAI", "ALL_BABYAI_TASKS"]),
        ("gymnax_envs", ["GymnaxCompatibility"]),
        ("xland_minigrid", ["XLandMinigridVectorizedGym"]),
        ("ale_retro", ["AtariGame", "ALE", "AtariAMAGOWrapper", "RetroArcade", "RetroAMAGOWrapper"]),
        ("procgen_envs", ["ProcgenAMAGO", "TwoAttemptMTProcgen"]),
        ("half_cheetah_v4_vel", ["HalfCheetahV4_MetaVelocity"]),
    ],
)
def test_modules_import_without_the_benchmarks_package(module, names):
    where = importlib.import_module(f"amago.envs.builtin.{module}")
    assert all(hasattr(where, name) for name in names)
