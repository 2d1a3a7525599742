"""Mistakes of users, the code that makes each, and its error message: the table of ``docs/errors.md``."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import tiny

import amago
from amago import config
from amago.envs import AMAGOEnv, EpsilonGreedy, SequenceWrapper, make_pool
from amago.envs.pool import EnvironmentMistake
from amago.loading import ArrayDataset, DiskTrajDataset
from amago.nets.traj_encoders import TformerTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.relabeling import Relabeler
from amago.run.checkpoint import CheckpointError
from amago.run.data import NothingTrainedError
from amago.run.rundir import RunExistsError
from amago.run.settings import REQUIRED, SettingsError
from amago.spaces import NonFiniteError

NAN, INF = float("nan"), float("inf")
Cause = Callable[[Path], Any]


@dataclass(frozen=True)
class Case:
    """One mistake.

    Attributes:
        group: heading of the table it belongs to.
        what: the mistake in words.
        kind: class of the error (or warning).
        message: the whole message, in which the empty directory is called ``runs``.
        cause: makes the mistake in an empty directory.
    """

    group: str
    what: str
    kind: type[Exception]
    message: str
    cause: Cause


class Scripted(gym.Env[Any, Any]):
    """Returns given values."""

    def __init__(self, observation_space: Any, action_space: Any, reset: Any, step: Any = None):
        self.observation_space, self.action_space = observation_space, action_space
        self._reset, self._step = reset, step

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._reset

    def step(self, action: Any) -> Any:
        return self._step


BOX = gym.spaces.Box(-INF, INF, (2,), np.float32)
DICT = gym.spaces.Dict(position=BOX, seen=gym.spaces.Box(0, 255, (4,), np.uint8))
GOOD = np.zeros(2, np.float32)
TWO = gym.spaces.Discrete(2)


def observing(space: Any, obs: Any) -> Cause:
    """An environment whose reset returns this observation."""
    return lambda _: AMAGOEnv(Scripted(space, TWO, (obs, {})), "Mine").reset()


def stepping(step: Any) -> Cause:
    """An environment whose step returns this."""

    def cause(_: Path) -> None:
        env = AMAGOEnv(Scripted(BOX, TWO, (GOOD, {}), step), "Mine")
        env.reset()
        env.step(np.array([[1]]))

    return cause


def acting(space: Any, action: Any) -> Cause:
    """An agent that takes this action."""

    def cause(_: Path) -> None:
        env = AMAGOEnv(Scripted(BOX, space, (GOOD, {})), "Mine")
        env.reset()
        env.step(action)

    return cause


def wrapping(env: Callable[[], Any], **arguments: Any) -> Cause:
    return lambda _: AMAGOEnv(env(), **arguments)


def binding(**params: Any) -> Cause:
    return lambda _: config.bind({name.replace("__", "."): value for name, value in params.items()})


def gin_file(text: str) -> Cause:
    def cause(root: Path) -> None:
        (root / "mine.gin").write_text(text)
        config.parse_files([str(root / "mine.gin")])

    return cause


def never() -> Any:
    raise AssertionError("an environment was made")


def starting(**fields: Any) -> Cause:
    """An `Experiment` that is refused before it creates a file or an environment."""

    def cause(root: Path) -> None:
        before = sorted(root.rglob("*"))
        try:
            tiny.experiment(root, never, **fields).start()
        finally:
            assert sorted(root.rglob("*")) == before, "a file was created"

    return cause


def started(**fields: Any) -> Cause:
    """An `Experiment` that fails when its environments are started."""
    return lambda root: tiny.started(root, **fields)


class Lights(gym.Env[Any, Any]):
    """Six lights, from 0 to 1."""

    observation_space, action_space = gym.spaces.Box(0, 1, (6,), np.float32), TWO

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(6, np.float32), {}


def recorded_as_bytes(root: Path) -> None:
    """A recording of the lights from 0 to 255."""
    n = 8
    dataset = ArrayDataset(
        observations=np.full((n, 6), 200, np.uint8), actions=np.zeros(n, np.int64), rewards=np.zeros(n), terminations=np.arange(n) == n - 1,
        action_space=TWO,
    )  # fmt: skip
    tiny.started(root, lambda: AMAGOEnv(Lights(), "Lights"), dataset=dataset)


class Endless(gym.Env[Any, Any]):
    observation_space, action_space = BOX, TWO

    def __repr__(self) -> str:
        return "Endless()"

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return GOOD, {}

    def step(self, action: Any) -> Any:
        return GOOD, 0.0, False, False, {}


def endless() -> AMAGOEnv:
    return AMAGOEnv(Endless(), "Endless")


def bare() -> Endless:
    return Endless()


def before_start(method: str, *arguments: Any) -> Cause:
    return lambda root: getattr(tiny.experiment(root), method)(*arguments)


def other_buffer(root: Path) -> None:
    tiny.learned(root, tiny.cartpole, train_timesteps_per_epoch=40, train_batches_per_epoch=0).close()
    tiny.started(root, tiny.tmaze)


def other_val_env(root: Path) -> None:
    tiny.started(root, tiny.tmaze, make_val_env=tiny.cartpole, val_interval=1).evaluate_val()


def nothing_ends(root: Path) -> None:
    tiny.learned(root, endless, train_timesteps_per_epoch=1_000, train_batches_per_epoch=0)


def too_short(root: Path) -> None:
    tiny.started(root, tiny.tmaze, val_timesteps_per_epoch=tiny.EPISODE - 1, val_interval=1).evaluate_val()


def too_few(root: Path) -> None:
    tiny.started(root, parallel_actors=2).evaluate_test(tiny.tmaze, 2 * tiny.EPISODE, episodes=5)


def twice(root: Path) -> None:
    e = tiny.started(root)
    e.start()


def ran_in_vain(root: Path) -> None:
    tiny.started(root, resume=3)


def nothing_to_do(root: Path) -> None:
    tiny.learned(root, start_learning_at_epoch=INF, start_collecting_at_epoch=INF)


def second_run(root: Path) -> None:
    tiny.learned(root, ckpt_interval=1).close()
    tiny.learned(root)


def buffer_of_another(root: Path) -> None:
    tiny.learned(root, name="first").close()
    tiny.started(root, name="second", dataset=DiskTrajDataset(root, "first"))


def other_networks(root: Path) -> None:
    tiny.learned(root, ckpt_interval=1).close()
    tiny.started(root, traj="gru", resume="auto")


def no_gpu(root: Path) -> None:
    with mock.patch("torch.cuda.is_available", return_value=False):
        starting(mixed_precision="fp16")(root)


def file_instead_of_directory(root: Path) -> None:
    (root / "file").write_text("")
    tiny.experiment(root, never, ckpt_base_dir=str(root / "file" / "deeper")).start()


def given_twice(root: Path) -> None:
    tiny.experiment(root, never, dset_root=str(root), dset_name="other").start()


ENV, OBS, ACT = "Environments", "What an environment returns", "Actions"
GIN, FIELDS, TOGETHER = "gin", "Fields of `Experiment`", "Fields that contradict each other"
AROUND, ORDER = "What an `Experiment` finds", "Order of calls"
CANNOT = "this Experiment cannot start:\n  - "

# fmt: off
CASES = [
    Case(ENV, "no environment", TypeError,
         "env is 'CartPole-v1', which has no reset() method; AMAGOEnv wraps a gymnasium.Env", wrapping(lambda: "CartPole-v1")),
    Case(ENV, "an AMAGOEnv wrapped again", TypeError,
         "env is AMAGOEnv, which is an AMAGOEnv already; wrap the Gymnasium environment once", wrapping(lambda: tiny.cartpole())),
    Case(ENV, "an action space without bounds", ValueError,
         "action space Box(-inf, inf, (2,), float32) is unbounded: actions are scaled from [-1, 1] to [low, high], so both must be finite. Wrap the environment with gymnasium.wrappers.RescaleAction or give the Box finite bounds.", wrapping(lambda: Scripted(BOX, gym.spaces.Box(-INF, INF, (2,)), None))),
    Case(ENV, "an action space without an array form", TypeError,
         "action space Text(1, 5, charset=0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz) is not supported: use Discrete, MultiDiscrete, Box or MultiBinary, or a Tuple or Dict of these", wrapping(lambda: Scripted(BOX, gym.spaces.Text(5), None))),
    Case(ENV, "an observation that is text", TypeError,
         "observation 'note' has space Text, which has no fixed-size array form. Wrap the environment with gymnasium.wrappers.FilterObservation to drop the key, or TransformObservation to turn it into a Box (tokens, say).", wrapping(lambda: Scripted(gym.spaces.Dict(note=gym.spaces.Text(5)), TWO, None))),
    Case(ENV, "no number of rows", ValueError,
         "batched_envs is 0, but must be an integer of at least 1", wrapping(lambda: Scripted(BOX, TWO, None), batched_envs=0)),
    Case(ENV, "another number of rows than the vectorised environment has", ValueError,
         "batched_envs is 5, but the vectorised environment has num_envs=3", wrapping(lambda: tiny.cartpoles(3).unwrapped, batched_envs=5)),
    Case(ENV, "a bare environment in a pool", TypeError,
         'bare must return an AMAGOEnv, but returned Endless: Endless(). Wrap it: amago.envs.AMAGOEnv(env, env_name="...")', lambda _: make_pool([bare], "sync")),
    Case(ENV, "a bare environment in an exploration wrapper", TypeError,
         "EpsilonGreedy needs an AMAGOEnv, but got Endless: Endless(). Wrap it: amago.envs.AMAGOEnv(env, env_name=\"...\")\n  In call to configurable 'EpsilonGreedy' (<class 'amago.envs.exploration.EpsilonGreedy'>)", lambda _: EpsilonGreedy(Endless())),
    Case(ENV, "a bare environment in the recorder", TypeError,
         'SequenceWrapper needs an AMAGOEnv, but got Endless: Endless(). Wrap it: amago.envs.AMAGOEnv(env, env_name="...")', lambda _: SequenceWrapper(Endless())),
    Case(OBS, "wrong dtype", ValueError,
         "Mine, step 0: observation 'seen' has dtype float64, but its space says uint8", observing(DICT, {"position": GOOD, "seen": np.zeros(4)})),
    Case(OBS, "whole numbers that the dtype cannot hold", ValueError,
         "Mine, step 0: observation 'observation' holds 300, which int8 cannot", observing(gym.spaces.Box(-100, 100, (1,), np.int8), np.array([300]))),
    Case(OBS, "wrong shape", ValueError,
         "Mine, step 0: observation 'observation' has shape (3,), but its space says (2,)", observing(BOX, np.zeros(3, np.float32))),
    Case(OBS, "a key is missing", ValueError,
         "Mine, step 0: observation keys differ from the observation space: missing ['seen']", observing(DICT, {"position": GOOD})),
    Case(OBS, "a key that the space does not have", ValueError,
         "Mine, step 0: observation keys differ from the observation space: not in the space: ['smell']", observing(DICT, {"position": GOOD, "seen": np.zeros(4, np.uint8), "smell": GOOD})),
    Case(OBS, "no dict", ValueError,
         "Mine, step 0: the observation space is a Dict with keys ['position', 'seen'], but the environment returned ndarray", observing(DICT, GOOD)),
    Case(OBS, "an index outside of its space", ValueError,
         "Mine, step 0: observation 'observation' is 3, outside Discrete(3)", observing(gym.spaces.Discrete(3), 3)),
    Case(OBS, "a fraction for an index", ValueError,
         "Mine, step 0: observation 'observation' has dtype float64, but Discrete(3) holds whole numbers", observing(gym.spaces.Discrete(3), 1.5)),
    Case(OBS, "no bit", ValueError,
         "Mine, step 0: observation 'observation' is [0 2], outside MultiBinary(2)", observing(gym.spaces.MultiBinary(2), np.array([0, 2]))),
    Case(OBS, "NaN in an observation", NonFiniteError,
         "Mine, step 0: observation 'observation' is nan at [1]; observations must be finite in float32", observing(BOX, np.array([0, NAN], np.float32))),
    Case(OBS, "infinity in an observation, at a later step", NonFiniteError,
         "Mine, step 1: observation 'observation' is inf at [0]; observations must be finite in float32", stepping((np.array([INF, 0], np.float32), 0.0, False, False, {}))),
    Case(OBS, "NaN for a reward", NonFiniteError,
         "Mine, step 1: the reward is nan; rewards must be finite in float32", stepping((GOOD, NAN, False, False, {}))),
    Case(OBS, "a reward that float32 cannot hold", NonFiniteError,
         "Mine, step 1: the reward is 1e+39; rewards must be finite in float32", stepping((GOOD, 1e39, False, False, {}))),
    Case(OBS, "several rewards", TypeError,
         "Mine, step 1: the reward is array([0., 0.]), but must be one number", stepping((GOOD, np.zeros(2), False, False, {}))),
    Case(OBS, "a step of the old Gym", TypeError,
         "Mine, step 1: step() returned 4 values, but must return (observation, reward, terminated, truncated, info): does the environment follow Gymnasium's interface?", stepping((GOOD, 0.0, False, {}))),
    Case(OBS, "a reset of the old Gym", TypeError,
         "Mine, step 0: reset() returned ndarray, but must return (observation, info): does the environment follow Gymnasium's interface?", lambda _: AMAGOEnv(Scripted(BOX, TWO, GOOD), "Mine").reset()),
    Case(ACT, "the environment's own form", TypeError,
         "action is {'a': 1}, but must be an array in stored form, (B, S) = (1, 1) of int64; ActionSpec.from_env turns an action of Dict('a': Discrete(2)) into it", acting(gym.spaces.Dict(a=TWO), {"a": 1})),
    Case(ACT, "wrong shape", ValueError,
         "action has shape (2,), but must have the stored form, (B, S) = (1, 1) of int64; ActionSpec.from_env turns an action of Discrete(2) into it", acting(TWO, np.array([1, 0]))),
    Case(ACT, "an index out of bounds", ValueError,
         "Mine, step 1: action is 2, but the stored form holds whole numbers from 0 to 1", acting(TWO, np.array([[2]]))),
    Case(ACT, "a negative index", ValueError,
         "Mine, step 1: action is -1, but the stored form holds whole numbers from 0 to 1", acting(TWO, np.array([[-1]]))),
    Case(ACT, "a fraction for an index", ValueError,
         "Mine, step 1: actions have dtype float64, but those of Discrete(2) are stored as int64", acting(TWO, np.array([[0.5]]))),
    Case(ACT, "a number out of bounds", ValueError,
         "Mine, step 1: action[1] is 1.5, but the stored form holds numbers in [-1, 1]", acting(gym.spaces.Box(-2.0, 2.0, (2,)), np.array([[0.0, 1.5]], np.float32))),
    Case(ACT, "no bit", ValueError,
         "Mine, step 1: action[2] is 2, but the stored form holds bits 0 or 1", acting(gym.spaces.MultiBinary(3), np.array([[0, 1, 2]], np.int8))),
    Case(ACT, "NaN", NonFiniteError,
         "Mine, step 1: action is nan, but the stored form holds numbers in [-1, 1]", acting(gym.spaces.Box(-2.0, 2.0, (1,)), np.array([[NAN]], np.float32))),
    Case(GIN, "a class that does not exist", ValueError,
         "cannot bind 'Agnt.tau' = 0.1: no configurable is called 'Agnt'; did you mean Agent?", binding(Agnt__tau=0.1)),
    Case(GIN, "a parameter that does not exist", ValueError,
         "cannot bind 'Agent.taau' = 0.1: amago.agent.Agent has no parameter 'taau'; did you mean tau?", binding(Agent__taau=0.1)),
    Case(GIN, "a parameter that does not exist, in a file", ValueError,
         "runs/mine.gin, line 1: cannot bind 'Agent.taau': amago.agent.Agent has no parameter 'taau'; did you mean tau?", gin_file("Agent.taau = 0.1\n")),
    Case(GIN, "a class that does not exist, in a file", ValueError,
         "runs/mine.gin, line 1: cannot bind 'Agnt.tau': no configurable is called 'Agnt'; did you mean Agent?", gin_file("Agnt.tau = 0.1\n")),
    Case(GIN, "a file that does not exist", ValueError,
         "cannot read the gin file 'nowhere.gin': Unable to open file: nowhere.gin. Searched config paths: [''].", lambda _: config.parse_files(["nowhere.gin"])),
    Case(GIN, "settings that are not in the zoo", ValueError,
         "zoo/cartpol: the zoo has no settings called 'zoo/cartpol'; did you mean zoo/cartpole or zoo/solve_cartpole or zoo/popgym_cartpole?", lambda _: config.parse_files(["zoo/cartpol"])),
    Case(FIELDS, "a field that has no default left out", TypeError,
         "Experiment() needs max_seq_len\n  In call to configurable 'Experiment' (<class 'amago.experiment.Experiment'>)", starting(max_seq_len=REQUIRED)),
    Case(FIELDS, "no sequence", SettingsError,
         CANNOT + "max_seq_len must be a whole number of at least 1, got 0", starting(max_seq_len=0)),
    Case(FIELDS, "an empty batch", SettingsError,
         CANNOT + "batch_size must be a whole number of at least 1, got 0", starting(batch_size=0)),
    Case(FIELDS, "half a batch", SettingsError,
         CANNOT + "batch_size must be a whole number of at least 1, got 2.5", starting(batch_size=2.5)),
    Case(FIELDS, "no actors", SettingsError,
         CANNOT + "parallel_actors must be a whole number of at least 1, got 0", starting(parallel_actors=0)),
    Case(FIELDS, "a negative number of epochs", SettingsError,
         CANNOT + "epochs must be a whole number of 0 or more, got -1", starting(epochs=-1)),
    Case(FIELDS, "a negative number of batches", SettingsError,
         CANNOT + "train_batches_per_epoch must be a whole number of 0 or more, got -1", starting(train_batches_per_epoch=-1)),
    Case(FIELDS, "a negative number of steps", SettingsError,
         CANNOT + "train_timesteps_per_epoch must be None or a whole number of 0 or more, got -1", starting(train_timesteps_per_epoch=-1)),
    Case(FIELDS, "a negative seed", SettingsError,
         CANNOT + "seed must be None or a whole number of 0 or more, got -3", starting(seed=-3)),
    Case(FIELDS, "no learning rate", SettingsError,
         CANNOT + "learning_rate must be a finite number above 0, got 0.0", starting(learning_rate=0.0)),
    Case(FIELDS, "an infinite learning rate", SettingsError,
         CANNOT + "learning_rate must be a finite number above 0, got inf", starting(learning_rate=INF)),
    Case(FIELDS, "an infinite weight decay", SettingsError,
         CANNOT + "l2_coeff must be a finite number of 0 or more, got inf", starting(l2_coeff=INF)),
    Case(FIELDS, "a negative weight", SettingsError,
         CANNOT + "critic_loss_weight must be None or a finite number of 0 or more, got -1", starting(critic_loss_weight=-1)),
    Case(FIELDS, "NaN for an epoch", SettingsError,
         CANNOT + "start_collecting_at_epoch must be a number of 0 or more, got nan", starting(start_collecting_at_epoch=NAN)),
    Case(FIELDS, "gradients clipped to nothing", SettingsError,
         CANNOT + "grad_clip must be a number above 0, got 0", starting(grad_clip=0)),
    Case(FIELDS, "no time for a step", SettingsError,
         CANNOT + "env_step_timeout must be a number above 0, got 0", starting(env_step_timeout=0)),
    Case(FIELDS, "0 where None means all", SettingsError,
         CANNOT + "keep_training_states must be None or a whole number of at least 1, got 0", starting(keep_training_states=0)),
    Case(FIELDS, "a word for a switch", SettingsError,
         CANNOT + "log_to_wandb must be True or False, got 'yes'", starting(log_to_wandb="yes")),
    Case(FIELDS, "an unknown way to step", SettingsError,
         CANNOT + "env_mode must be one of 'async', 'sync', 'already_vectorized', 'auto', got 'vectorized'", starting(env_mode="vectorized")),
    Case(FIELDS, "an unknown file format", SettingsError,
         CANNOT + "save_trajs_as must be one of 'segments', 'npz', 'npz-compressed', got 'hdf5'", starting(save_trajs_as="hdf5")),
    Case(FIELDS, "pickled trajectories", SettingsError,
         CANNOT + "save_trajs_as must be one of 'segments', 'npz', 'npz-compressed', got 'traj'", starting(save_trajs_as="traj")),
    Case(FIELDS, "an unknown padding", SettingsError,
         CANNOT + "padded_sampling must be one of 'none', 'both', 'left', 'right', got 'middle'", starting(padded_sampling="middle")),
    Case(FIELDS, "an unknown precision", SettingsError,
         CANNOT + "mixed_precision must be one of 'no', 'fp16', 'bf16', got 'fp8'", starting(mixed_precision="fp8")),
    Case(FIELDS, "an unknown start of processes", SettingsError,
         CANNOT + "async_env_mp_context must be one of None, 'fork', 'spawn', 'forkserver', got 'thread'", starting(async_env_mp_context="thread")),
    Case(FIELDS, "an unknown way to resume", SettingsError,
         CANNOT + "resume must be 'never', 'auto' or the number of an epoch, got 'yes'", starting(resume="yes")),
    Case(FIELDS, "a path for a name", SettingsError,
         CANNOT + "run_name must be a name without '/', got 'a/b'", starting(run_name="a/b")),
    Case(FIELDS, "no path", SettingsError,
         CANNOT + "ckpt_base_dir must be the path of a directory, got None", starting(ckpt_base_dir=None)),
    Case(FIELDS, "a file for a directory", SettingsError,
         CANNOT + "ckpt_base_dir is 'runs/file/deeper', for checkpoints and logs, but 'runs/file' is a file: name a directory", file_instead_of_directory),
    Case(FIELDS, "a path for a dataset", SettingsError,
         CANNOT + "dataset must be an amago.loading.RLDataset, got 'runs/demo'", starting(dataset="runs/demo")),
    Case(FIELDS, "no dataset", SettingsError,
         CANNOT + "dataset must be given, or dset_root and dset_name to build a DiskTrajDataset", starting(dataset=None)),
    Case(FIELDS, "a timestep encoder for a sequence model", SettingsError,
         CANNOT + "traj_encoder_type must be a subclass of TrajEncoder, got <class 'amago.nets.tstep_encoders.FFTstepEncoder'>", starting(traj_encoder_type=FFTstepEncoder)),
    Case(FIELDS, "a sequence model for a timestep encoder", SettingsError,
         CANNOT + "tstep_encoder_type must be a subclass of TstepEncoder, got <class 'amago.nets.traj_encoders.TformerTrajEncoder'>", starting(tstep_encoder_type=TformerTrajEncoder)),
    Case(FIELDS, "no agent", SettingsError,
         CANNOT + "agent_type must be 'agent', 'multitask' or a subclass of BaseAgent, got 'ppo'", starting(agent_type="ppo")),
    Case(FIELDS, "an agent for exploration", SettingsError,
         CANNOT + "exploration_wrapper_type must be a subclass of ExplorationWrapper, got <class 'amago.agent.agent.Agent'>", starting(exploration_wrapper_type=amago.Agent)),
    Case(FIELDS, "an environment's id for a function", SettingsError,
         CANNOT + "make_train_env must be a function that returns an AMAGOEnv, or a list of such functions, got 'CartPole-v1'", starting(make_train_env="CartPole-v1")),
    Case(FIELDS, "an empty buffer", ValueError,
         "dset_max_size counts trajectories and must be at least 1, got 0\n  In call to configurable 'DiskTrajDataset' (<class 'amago.loading.disk.DiskTrajDataset'>)", lambda root: DiskTrajDataset(root, "run", dset_max_size=0)),
    Case(FIELDS, "a class for a relabeler", ValueError,
         "relabeler must be an instance, got the class Relabeler; write Relabeler()\n  In call to configurable 'DiskTrajDataset' (<class 'amago.loading.disk.DiskTrajDataset'>)", lambda root: DiskTrajDataset(root, "run", relabeler=Relabeler)),
    Case(TOGETHER, "pieces on disk shorter than a training sequence", SettingsError,
         CANNOT + "traj_save_len=5 is less than max_seq_len=10: rollouts would be cut on disk into pieces shorter than a training sequence; make traj_save_len at least max_seq_len", starting(traj_save_len=5, max_seq_len=10)),
    Case(TOGETHER, "another number of functions than of actors", SettingsError,
         CANNOT + "make_train_env lists 1 functions, but parallel_actors=2: give one for each actor", starting(make_train_env=[never])),
    Case(TOGETHER, "several functions for one vectorised environment", SettingsError,
         CANNOT + "make_train_env lists 2 functions, but env_mode='already_vectorized' takes one, whose environment has batched_envs=2 (parallel_actors)", starting(make_train_env=[never, never], make_val_env=never, env_mode="already_vectorized")),
    Case(TOGETHER, "a list with something else than functions", SettingsError,
         CANNOT + "make_val_env must list functions that return an AMAGOEnv, but holds 'x'", starting(make_val_env=[never, "x"])),
    Case(TOGETHER, "two datasets", SettingsError,
         CANNOT + "dataset is given, and dset_root='runs', dset_name='other' would build another: give one of the two", given_twice),
    Case(TOGETHER, "nothing to do in any epoch", UserWarning,
         "epochs=1, start_collecting_at_epoch=inf, start_learning_at_epoch=inf, train_timesteps_per_epoch=12, train_batches_per_epoch=2, val_interval=None and val_timesteps_per_epoch=7 leave nothing to do: learn() neither collects, nor learns, nor evaluates", nothing_to_do),
    Case(TOGETHER, "half precision without a GPU", SettingsError,
         CANNOT + "mixed_precision='fp16' needs a GPU, and there is none: use 'bf16', or 'no'", no_gpu),
    Case(AROUND, "a bare environment", TypeError,
         'bare must return an AMAGOEnv, but returned Endless: Endless(). Wrap it: amago.envs.AMAGOEnv(env, env_name="...")', started(make_env=bare)),
    Case(AROUND, "another number of rows than of actors", ValueError,
         "make_envs[0] made an environment with batched_envs=2, but here it must be 3 (its rows are the parallel_actors)", started(make_env=tiny.cartpoles, env_mode="already_vectorized", parallel_actors=3)),
    Case(AROUND, "a recording in other units than the environment's", ValueError,
         "ArrayDataset has observation 'observation' uint8 (6,) from 0 to 255, but the environment has float32 (6,) from 0 to 1: convert the recorded numbers, or wrap the environment (gymnasium.wrappers.TransformObservation), so that dtype and range agree; if the numbers mean the same already, declare the same observation space", recorded_as_bytes),
    Case(AROUND, "a run name whose buffer holds another environment", SettingsError,
         "the buffer runs/run/buffer holds trajectories of 'CartPole' that do not fit the environments of this run (actions: discrete of width 2 there, discrete of width 4 now; observation 'observation': float32 (4,) there, float32 (2,) now): choose another run_name or dset_name, or delete the buffer", other_buffer),
    Case(AROUND, "a run name that was used before", RunExistsError,
         "run 'run' exists: runs/run has training state run_epoch_0, metrics.jsonl, and with resume='never' a second run would be mixed with it. Choose: resume='auto' (--resume auto) continues it, as does load_checkpoint(N) after start(); another run_name (--run_name) begins a new one beside it; overwrite=True (--overwrite) deletes its checkpoints, its metrics and the trajectories that it collected", second_run),
    Case(AROUND, "the buffer of another run", RunExistsError,
         "the buffer runs/first/buffer/fifo holds the trajectories of run 'first' (runs/first), and run 'second' would train on them, add its own, and delete the oldest. Choose another dset_name, or share_buffer=True (--share_buffer) if that is what you want; to train on data that is never deleted, move the files to buffer/protected", buffer_of_another),
    Case(AROUND, "other networks on resume", SettingsError,
         "runs/run/ckpts/training_states/run_epoch_0 cannot be resumed with other networks, whose weights would not fit or would mean something else:\n  - traj_encoder_type was amago.nets.traj_encoders.FFTrajEncoder and is now amago.nets.traj_encoders.GRUTrajEncoder\nset these as they were, or begin a new run under another run_name", other_networks),
    Case(TOGETHER, "resuming what is to be deleted", SettingsError,
         CANNOT + "overwrite=True deletes the run that resume='auto' would continue: give one of the two", starting(overwrite=True, resume="auto")),
    Case(AROUND, "weights to begin with that do not exist", SettingsError,
         CANNOT + "init_from is 'nowhere', which does not exist: name a run's directory, a training state or a file of weights", starting(init_from="nowhere")),
    Case(AROUND, "another environment to evaluate on", SettingsError,
         "make_val_env makes environments that the agent was not built for (actions: discrete of width 2, not discrete of width 4; observation 'observation': float32 (4,), not float32 (2,)): give both the same spaces", other_val_env),
    Case(AROUND, "a checkpoint that does not exist", CheckpointError,
         "run 'run' has no training state of epoch 3; there are: none", ran_in_vain),
    Case(AROUND, "an evaluation too short for one rollout", UserWarning,
         "no rollout ended within val_timesteps_per_epoch=5 steps of each actor, so nothing was measured; make it longer than a rollout, or give the environment a time limit", too_short),
    Case(AROUND, "an evaluation too short for the rollouts asked for", UserWarning,
         "only 4 of the 5 rollouts asked for ended within timesteps=12 steps of each actor, and long ones are missing first; allow more steps (on the command line: --eval_timesteps), or ask for fewer", too_few),
    Case(AROUND, "rollouts that never end, so that nothing is saved", UserWarning,
         "no rollout ended within train_timesteps_per_epoch=1000 steps of each actor, so nothing was saved and there is nothing to learn from. If rollouts are longer than this, data will appear in later epochs; if they never end, save them in pieces (for example traj_save_len=1000) or give the environment a time limit", nothing_ends),
    Case(AROUND, "an environment whose reward is None", EnvironmentMistake,
         "TypeError: Mine, step 1: the reward is None, but must be one number\nactor 0 raised this before any rollout had ended. It looks like a mistake in the environment rather than a crash, so the environment is not replaced, and the run ends.", lambda root: tiny.learned(root, lambda: AMAGOEnv(Scripted(BOX, TWO, (GOOD, {}), (GOOD, None, False, False, {})), "Mine"))),
    Case(AROUND, "a run that is over before any rollout has ended", NothingTrainedError,
         "the run is over and has trained on nothing: no rollout ended and was saved, within train_timesteps_per_epoch=5 steps of each actor in each of epochs=1 epochs: collect for longer, give the environment a time limit, or save rollouts in pieces (traj_save_len)", lambda root: tiny.learned(root, tiny.tmaze, train_timesteps_per_epoch=tiny.EPISODE - 1)),
    Case(ORDER, "`learn()` before `start()`", RuntimeError,
         "call Experiment.start() before learn()", before_start("learn")),
    Case(ORDER, "`evaluate_val()` before `start()`", RuntimeError,
         "call Experiment.start() before evaluate_val()", before_start("evaluate_val")),
    Case(ORDER, "`save_checkpoint()` before `start()`", RuntimeError,
         "call Experiment.start() before save_checkpoint()", before_start("save_checkpoint")),
    Case(ORDER, "`start()` twice", RuntimeError,
         "start() was called before; build a new Experiment", twice),
]
# fmt: on
