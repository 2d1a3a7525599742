import gymnasium as gym
import numpy as np

import amago


class Counting(gym.Env):
    def __init__(self, action_space=None, horizon=3):
        self.action_space = gym.spaces.Discrete(3) if action_space is None else action_space
        self.observation_space, self.horizon, self.taken = gym.spaces.Box(0, 99, (1,), np.float32), horizon, []

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {"began": True}

    def step(self, action):
        self.t, self.taken = self.t + 1, [*self.taken, action]
        return np.full(1, self.t, np.float32), 1.0, self.t == self.horizon, False, {"AMAGO_LOG_METRIC T": self.t}


def wrapped(**options):
    return amago.envs.AMAGOEnv(Counting(**options), env_name="a/b")


# fact: the wrapper is a gymnasium.Wrapper whose env takes the policy's action
env = wrapped()
assert isinstance(env, gym.Wrapper)
env.reset()
env.env.step(np.array([1], np.uint8))
assert env.unwrapped.taken == [1]
assert env.env.get_wrapper_attr("horizon") == 3

# fact: actions as clients send them
env = wrapped(action_space=gym.spaces.Box(-2, 4, (2,)))
env.reset()
env.step(np.array([-1, 1], np.float32))
assert np.allclose(env.unwrapped.taken[0], [-2, 4])
bits = wrapped(action_space=gym.spaces.MultiBinary(2))
bits.reset()
bits.step(np.array([1.0, 0.0], np.float32))
assert bits.unwrapped.taken[0].dtype == np.int8
discrete = wrapped()
discrete.reset()
discrete.step(np.array([2], np.uint8))
assert isinstance(discrete.unwrapped.taken[0], int)
assert discrete.make_action_rep(np.array([2])).tolist() == [[0, 0, 1]]
assert discrete.make_action_rep(np.array([2])).dtype == np.uint8

# fact: recorded sequences give observations, histories and frames by name
import tempfile

env = amago.envs.SequenceWrapper(wrapped(), save_trajs_to=tempfile.mkdtemp(), save_every=None, save_trajs_as="npz")
assert isinstance(env.rl2_space, gym.spaces.Dict)
assert env.rl2_space["rl2"].shape == (4,)
obs, info = env.reset(seed=0)
assert obs["observation"].shape == (1, 1)
for i in range(4):
    obs, reward, terminated, truncated, info = env.step(np.array([1], np.uint8))
obs, rl2, time = env.current_timestep
assert (rl2.dtype, rl2.shape, time.tolist()) == (np.float32, (1, 4), [[1]])
assert env.return_history.data == {"a_b": [3.0]}

assert env.special_history.data["a_b"]["T"] == [1, 2, 3, 4]
assert env.total_frames == 4
assert env.total_frames_by_env_name == {"a_b": 4}
assert len(env.active_trajs) == 1
assert isinstance(env.active_trajs[0], amago.hindsight.Trajectory)
env.save_finished_trajs()
env.reset_stats()
assert not env.return_history.data.get("a_b")

# fact: creators build environments with exploration and recording
import tempfile

creator = amago.envs.EnvCreator(
    make_env=wrapped, exploration_wrapper_type=amago.envs.exploration.EpsilonGreedy, save_trajs_to=tempfile.mkdtemp(), save_every_low=5,
    save_every_high=6, save_trajs_as="npz",
)  # fmt: skip
assert isinstance(creator(), amago.envs.SequenceWrapper)
assert creator.rl2_space["rl2"].shape == (4,)
assert creator.already_vectorized is False

# fact: vectorised helpers
from amago.envs.env_utils import AlreadyVectorizedEnv

one = AlreadyVectorizedEnv([lambda: amago.envs.SequenceWrapper(wrapped(), save_trajs_to=None)])
one.reset()

# fact: histories collect scores by name
history, special = amago.envs.ReturnHistory("x"), amago.envs.SpecialMetricHistory("x")
history.add_score("x", 1.0)
special.add_score("x", "AMAGO_LOG_METRIC Won", np.array([1.0, 0.0]))
assert history.data == {"x": [1.0]}
assert special.data["x"]["Won"] == [1.0, 0.0]
assert special.log_prefix == amago.envs.AMAGO_ENV_LOG_PREFIX == "AMAGO_LOG_METRIC"


# fact: exploration has hooks with two arguments, and attributes to be written
class Mine(amago.envs.exploration.ExplorationWrapper):
    def add_exploration_noise(self, action, local_step):
        assert action.shape[0] == len(local_step) == 1
        return np.full_like(action, 2)


env = Mine(wrapped())
env.reset()
assert isinstance(env, gym.ActionWrapper)
assert env.action(np.array([0], np.uint8)).tolist() == [2]
env.step(np.array([0], np.uint8))
assert env.unwrapped.taken == [2]
assert env.env_name == "a_b"
greedy = amago.envs.exploration.EpsilonGreedy(wrapped(), eps_start=1.0, eps_end=0.05, steps_anneal=10, randomize_eps=True)
greedy.reset()
assert greedy.global_multiplier.shape == (1,)
assert (greedy.global_step, greedy.randomize_eps, greedy.batched_envs, greedy.discrete) == (0, True, 1, True)
greedy.rng, greedy.global_multiplier = np.random.default_rng(0), np.zeros(1)
assert greedy.current_eps(np.zeros(1, int)).shape == (1,)
greedy.step(greedy.action(np.array([1], np.uint8)))

# fact: toy environments under their former names
from amago.envs.builtin.mazerunner import MazeRunnerAMAGOEnv
from amago.envs.builtin.tmaze import TMazeAltActive, TMazeAltPassive
from amago.envs.builtin.toy_gym import MetaFrozenLake, RoomKeyDoor

lake = MetaFrozenLake(
    size=3, k_episodes=2, hard_mode=False, recover_mode=True, max_episode_steps=7, show_k_progress=False, slip_chance=0.1
)
assert lake.max_episode_steps == 7
RoomKeyDoor(
    dark=False, size=4, max_episode_steps=5, meta_rollout_horizon=9, start_location="random", randomize_actions=True
).reset()
for maze in (TMazeAltPassive, TMazeAltActive):
    maze(corridor_length=4, goal_reward=1.0, penalty=0.0, distract_reward=0.0).reset()
maze = TMazeAltPassive(corridor_length=3, goal_reward=5.0, penalty=-0.5, distract_reward=-2.0)
maze.reset(seed=0)
assert [maze.step(action)[1] for action in (0, 2, 0)] == [0.0, -0.5, 0.0]
for up in (True, False):
    maze = TMazeAltPassive(corridor_length=3, goal_reward=5.0, distract_reward=-2.0)
    obs, _ = maze.reset(seed=0)
    towards, away = (1, 3) if obs[1] > 0 else (3, 1)
    assert [maze.step(action)[1] for action in (0, 0, 0, towards if up else away)] == [0.0, 0.0, 0.0, 5.0 if up else -2.0]
t, _ = MazeRunnerAMAGOEnv(maze_dim=7, num_goals=2, time_limit=20, randomized_action_space=True).reset()
assert set(t.obs) == {"obs", "goals", "achieved"}

# fact: environments of examples 08, 09 and 12 under their former names
from amago.envs.builtin import ale_retro, half_cheetah_v4_vel, procgen_envs

assert len(procgen_envs.ALL_PROCGEN_GAMES) == 16
assert procgen_envs.TwoShotMTProcgen is procgen_envs.TwoAttemptMTProcgen
for make, package in (
    (lambda: half_cheetah_v4_vel.HalfCheetahV4_MetaVelocity(task_min_velocity=1.0, task_max_velocity=2.0), "mujoco"),
    (lambda: ale_retro.AtariGame("Pong", version="v5", sticky_action_prob=0.1, clip_rewards=True), "atari"),
):
    try:
        env = make()
    except ImportError as err:  # the packages are not everywhere
        assert package in str(err)
    else:
        env.reset()
        env.step(env.action_space.sample())
