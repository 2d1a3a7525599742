"""Mistakes of users and the code that makes each. ``docs/errors.md`` has their messages, which `python docs/make_errors.py` writes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
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
        cause: makes the mistake in an empty directory.
    """

    group: str
    what: str
    kind: type[Exception]
    cause: Cause

    def message(self, root: Path) -> str:
        """What the user is told for the mistake in an empty directory, which is called ``runs`` in it."""
        catch = pytest.warns if issubclass(self.kind, Warning) else pytest.raises
        with catch(self.kind) as caught:
            self.cause(root)
        err = caught.value if isinstance(caught, pytest.ExceptionInfo) else caught[0].message
        assert isinstance(err, self.kind)
        assert type(err).__name__ == self.kind.__name__  # gin raises a subclass of the same name
        return str(err).replace(str(root), "runs")


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


def recorded_as_bytes(root: Path) -> None:
    """A recording of six lights from 0 to 255, where the environment shows them from 0 to 1."""
    lights, n = Scripted(gym.spaces.Box(0, 1, (6,), np.float32), TWO, (np.zeros(6, np.float32), {})), 8
    dataset = ArrayDataset(
        observations=np.full((n, 6), 200, np.uint8), actions=np.zeros(n, np.int64), rewards=np.zeros(n), terminations=np.arange(n) == n - 1,
        action_space=TWO,
    )  # fmt: skip
    tiny.started(root, lambda: AMAGOEnv(lights, "Lights"), dataset=dataset)


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


def twice(root: Path) -> None:
    e = tiny.started(root)
    e.start()


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


ENV, OBS, ACT = "Environments", "What an environment returns", "Actions"
GIN, FIELDS, TOGETHER = "gin", "Fields of `Experiment`", "Fields that contradict each other"
AROUND, ORDER = "What an `Experiment` finds", "Order of calls"

CASES = [
    Case(ENV, "no environment", TypeError, wrapping(lambda: "CartPole-v1")),
    Case(ENV, "an AMAGOEnv wrapped again", TypeError, wrapping(lambda: tiny.cartpole())),
    Case(ENV, "an action space without bounds", ValueError,
         wrapping(lambda: Scripted(BOX, gym.spaces.Box(-INF, INF, (2,)), None))),
    Case(ENV, "an action space without an array form", TypeError, wrapping(lambda: Scripted(BOX, gym.spaces.Text(5), None))),
    Case(ENV, "an observation that is text", TypeError,
         wrapping(lambda: Scripted(gym.spaces.Dict(note=gym.spaces.Text(5)), TWO, None))),
    Case(ENV, "no number of rows", ValueError, wrapping(lambda: Scripted(BOX, TWO, None), batched_envs=0)),
    Case(ENV, "another number of rows than the vectorised environment has", ValueError,
         wrapping(lambda: tiny.cartpoles(3).unwrapped, batched_envs=5)),
    Case(ENV, "a bare environment in a pool", TypeError, lambda _: make_pool([bare], "sync")),
    Case(ENV, "a bare environment in an exploration wrapper", TypeError, lambda _: EpsilonGreedy(Endless())),
    Case(ENV, "a bare environment in the recorder", TypeError, lambda _: SequenceWrapper(Endless())),
    Case(OBS, "wrong dtype", ValueError, observing(DICT, {"position": GOOD, "seen": np.zeros(4)})),
    Case(OBS, "whole numbers that the dtype cannot hold", ValueError,
         observing(gym.spaces.Box(-100, 100, (1,), np.int8), np.array([300]))),
    Case(OBS, "wrong shape", ValueError, observing(BOX, np.zeros(3, np.float32))),
    Case(OBS, "a key is missing", ValueError, observing(DICT, {"position": GOOD})),
    Case(OBS, "a key that the space does not have", ValueError,
         observing(DICT, {"position": GOOD, "seen": np.zeros(4, np.uint8), "smell": GOOD})),
    Case(OBS, "no dict", ValueError, observing(DICT, GOOD)),
    Case(OBS, "an index outside of its space", ValueError, observing(gym.spaces.Discrete(3), 3)),
    Case(OBS, "a fraction for an index", ValueError, observing(gym.spaces.Discrete(3), 1.5)),
    Case(OBS, "no bit", ValueError, observing(gym.spaces.MultiBinary(2), np.array([0, 2]))),
    Case(OBS, "NaN in an observation", NonFiniteError, observing(BOX, np.array([0, NAN], np.float32))),
    Case(OBS, "infinity in an observation, at a later step", NonFiniteError,
         stepping((np.array([INF, 0], np.float32), 0.0, False, False, {}))),
    Case(OBS, "NaN for a reward", NonFiniteError, stepping((GOOD, NAN, False, False, {}))),
    Case(OBS, "a reward that float32 cannot hold", NonFiniteError, stepping((GOOD, 1e39, False, False, {}))),
    Case(OBS, "several rewards", TypeError, stepping((GOOD, np.zeros(2), False, False, {}))),
    Case(OBS, "a step of the old Gym", TypeError, stepping((GOOD, 0.0, False, {}))),
    Case(OBS, "a reset of the old Gym", TypeError, lambda _: AMAGOEnv(Scripted(BOX, TWO, GOOD), "Mine").reset()),
    Case(ACT, "the environment's own form", TypeError, acting(gym.spaces.Dict(a=TWO), {"a": 1})),
    Case(ACT, "wrong shape", ValueError, acting(TWO, np.array([1, 0]))),
    Case(ACT, "an index out of bounds", ValueError, acting(TWO, np.array([[2]]))),
    Case(ACT, "a negative index", ValueError, acting(TWO, np.array([[-1]]))),
    Case(ACT, "a fraction for an index", ValueError, acting(TWO, np.array([[0.5]]))),
    Case(ACT, "a number out of bounds", ValueError,
         acting(gym.spaces.Box(-2.0, 2.0, (2,)), np.array([[0.0, 1.5]], np.float32))),
    Case(ACT, "no bit", ValueError, acting(gym.spaces.MultiBinary(3), np.array([[0, 1, 2]], np.int8))),
    Case(ACT, "NaN", NonFiniteError, acting(gym.spaces.Box(-2.0, 2.0, (1,)), np.array([[NAN]], np.float32))),
    Case(GIN, "a class that does not exist", ValueError, binding(Agnt__tau=0.1)),
    Case(GIN, "a parameter that does not exist", ValueError, binding(Agent__taau=0.1)),
    Case(GIN, "a parameter that does not exist, in a file", ValueError, gin_file("Agent.taau = 0.1\n")),
    Case(GIN, "a class that does not exist, in a file", ValueError, gin_file("Agnt.tau = 0.1\n")),
    Case(GIN, "a file that does not exist", ValueError, lambda _: config.parse_files(["nowhere.gin"])),
    Case(GIN, "settings that are not in the zoo", ValueError, lambda _: config.parse_files(["zoo/cartpol"])),
    Case(FIELDS, "a field that has no default left out", TypeError, starting(max_seq_len=REQUIRED)),
    Case(FIELDS, "no sequence", SettingsError, starting(max_seq_len=0)),
    Case(FIELDS, "an empty batch", SettingsError, starting(batch_size=0)),
    Case(FIELDS, "half a batch", SettingsError, starting(batch_size=2.5)),
    Case(FIELDS, "no actors", SettingsError, starting(parallel_actors=0)),
    Case(FIELDS, "a negative number of epochs", SettingsError, starting(epochs=-1)),
    Case(FIELDS, "a negative number of batches", SettingsError, starting(train_batches_per_epoch=-1)),
    Case(FIELDS, "a negative number of steps", SettingsError, starting(train_timesteps_per_epoch=-1)),
    Case(FIELDS, "a negative seed", SettingsError, starting(seed=-3)),
    Case(FIELDS, "no learning rate", SettingsError, starting(learning_rate=0.0)),
    Case(FIELDS, "an infinite learning rate", SettingsError, starting(learning_rate=INF)),
    Case(FIELDS, "an infinite weight decay", SettingsError, starting(l2_coeff=INF)),
    Case(FIELDS, "a negative weight", SettingsError, starting(critic_loss_weight=-1)),
    Case(FIELDS, "NaN for an epoch", SettingsError, starting(start_collecting_at_epoch=NAN)),
    Case(FIELDS, "gradients clipped to nothing", SettingsError, starting(grad_clip=0)),
    Case(FIELDS, "no time for a step", SettingsError, starting(env_step_timeout=0)),
    Case(FIELDS, "0 where None means all", SettingsError, starting(keep_training_states=0)),
    Case(FIELDS, "a word for a switch", SettingsError, starting(log_to_wandb="yes")),
    Case(FIELDS, "an unknown way to step", SettingsError, starting(env_mode="vectorized")),
    Case(FIELDS, "an unknown file format", SettingsError, starting(save_trajs_as="hdf5")),
    Case(FIELDS, "pickled trajectories", SettingsError, starting(save_trajs_as="traj")),
    Case(FIELDS, "an unknown padding", SettingsError, starting(padded_sampling="middle")),
    Case(FIELDS, "an unknown precision", SettingsError, starting(mixed_precision="fp8")),
    Case(FIELDS, "an unknown start of processes", SettingsError, starting(async_env_mp_context="thread")),
    Case(FIELDS, "an unknown way to resume", SettingsError, starting(resume="yes")),
    Case(FIELDS, "a path for a name", SettingsError, starting(run_name="a/b")),
    Case(FIELDS, "no path", SettingsError, starting(ckpt_base_dir=None)),
    Case(FIELDS, "a file for a directory", SettingsError, file_instead_of_directory),
    Case(FIELDS, "a path for a dataset", SettingsError, starting(dataset="runs/demo")),
    Case(FIELDS, "no dataset", SettingsError, starting(dataset=None)),
    Case(FIELDS, "a timestep encoder for a sequence model", SettingsError, starting(traj_encoder_type=FFTstepEncoder)),
    Case(FIELDS, "a sequence model for a timestep encoder", SettingsError, starting(tstep_encoder_type=TformerTrajEncoder)),
    Case(FIELDS, "no agent", SettingsError, starting(agent_type="ppo")),
    Case(FIELDS, "an agent for exploration", SettingsError, starting(exploration_wrapper_type=amago.Agent)),
    Case(FIELDS, "an environment's id for a function", SettingsError, starting(make_train_env="CartPole-v1")),
    Case(FIELDS, "an empty buffer", ValueError, lambda root: DiskTrajDataset(root, "run", dset_max_size=0)),
    Case(FIELDS, "a class for a relabeler", ValueError, lambda root: DiskTrajDataset(root, "run", relabeler=Relabeler)),
    Case(TOGETHER, "pieces on disk shorter than a training sequence", SettingsError, starting(traj_save_len=5, max_seq_len=10)),
    Case(TOGETHER, "another number of functions than of actors", SettingsError, starting(make_train_env=[never])),
    Case(TOGETHER, "several functions for one vectorised environment", SettingsError,
         starting(make_train_env=[never, never], make_val_env=never, env_mode="already_vectorized")),
    Case(TOGETHER, "a list with something else than functions", SettingsError, starting(make_val_env=[never, "x"])),
    Case(TOGETHER, "two datasets", SettingsError,
         lambda root: tiny.experiment(root, never, dset_root=str(root), dset_name="other").start()),
    Case(TOGETHER, "nothing to do in any epoch", UserWarning,
         lambda root: tiny.learned(root, start_learning_at_epoch=INF, start_collecting_at_epoch=INF)),
    Case(TOGETHER, "half precision without a GPU", SettingsError, no_gpu),
    Case(AROUND, "a bare environment", TypeError, started(make_env=bare)),
    Case(AROUND, "another number of rows than of actors", ValueError,
         started(make_env=tiny.cartpoles, env_mode="already_vectorized", parallel_actors=3)),
    Case(AROUND, "a recording in other units than the environment's", ValueError, recorded_as_bytes),
    Case(AROUND, "a run name whose buffer holds another environment", SettingsError, other_buffer),
    Case(AROUND, "a run name that was used before", RunExistsError, second_run),
    Case(AROUND, "the buffer of another run", RunExistsError, buffer_of_another),
    Case(AROUND, "other networks on resume", SettingsError, other_networks),
    Case(TOGETHER, "resuming what is to be deleted", SettingsError, starting(overwrite=True, resume="auto")),
    Case(AROUND, "weights to begin with that do not exist", SettingsError, starting(init_from="nowhere")),
    Case(AROUND, "another environment to evaluate on", SettingsError,
         lambda root: tiny.started(root, make_val_env=tiny.cartpole, val_interval=1).evaluate_val()),
    Case(AROUND, "a checkpoint that does not exist", CheckpointError, started(resume=3)),
    Case(AROUND, "an evaluation too short for one rollout", UserWarning,
         lambda root: tiny.started(root, val_timesteps_per_epoch=tiny.EPISODE - 1, val_interval=1).evaluate_val()),
    Case(AROUND, "an evaluation too short for the rollouts asked for", UserWarning,
         lambda root: tiny.started(root, parallel_actors=2).evaluate_test(tiny.tmaze, 2 * tiny.EPISODE, episodes=5)),
    Case(AROUND, "rollouts that never end, so that nothing is saved", UserWarning,
         lambda root: tiny.learned(root, endless, train_timesteps_per_epoch=1_000, train_batches_per_epoch=0)),
    Case(AROUND, "an environment whose reward is None", EnvironmentMistake,
         lambda root: tiny.learned(root, lambda: AMAGOEnv(Scripted(BOX, TWO, (GOOD, {}), (GOOD, None, False, False, {})), "Mine") )),
    Case(AROUND, "a run that is over before any rollout has ended", NothingTrainedError,
         lambda root: tiny.learned(root, tiny.tmaze, train_timesteps_per_epoch=tiny.EPISODE - 1)),
    Case(ORDER, "`learn()` before `start()`", RuntimeError, before_start("learn")),
    Case(ORDER, "`evaluate_val()` before `start()`", RuntimeError, before_start("evaluate_val")),
    Case(ORDER, "`save_checkpoint()` before `start()`", RuntimeError, before_start("save_checkpoint")),
    Case(ORDER, "`start()` twice", RuntimeError, twice),
]  # fmt: skip
