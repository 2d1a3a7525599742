"""The process of a run: environments that change it, and memory that is used again."""

import json
import os
import platform
import random
import signal
import warnings
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from store_helpers import stored

import amago
from amago.envs import AMAGOEnv
from amago.run.group import Stopped

EPISODE = 4


MEDDLING = {
    "gradients": lambda: torch.set_grad_enabled(False),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "device": lambda: torch.set_default_device("meta"),
    "threads": lambda: torch.set_num_threads(3),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "torch": lambda: torch.manual_seed(0),
    "numpy": lambda: np.random.seed(0),
    "random": lambda: random.seed(0),
    "floating point": lambda: np.seterr(all="raise"),
    "warnings": lambda: warnings.simplefilter("error"),
    "directory": lambda: os.chdir("/"),
    "variables": lambda: (os.environ.update(CUDA_VISIBLE_DEVICES="7"), os.environ.pop("KEPT_BY_THE_RUN", None)),
    "signals": lambda: [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)],
}


class Meddler(gym.Env):
    """Changes something of its process in each call of one of its methods."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(8)

    def __init__(self, what, where):
        self.what, self.where = what, where
        self.meddle("init")

    def meddle(self, where):
        if where == self.where:
            for what, meddle in MEDDLING.items():
                if self.what in (what, "all"):
                    meddle()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.meddle("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        self.meddle("step")
        return np.zeros(2, np.float32), 1.0, self.t == EPISODE, False, {}


def make(what, where, mode):
    if mode == "sync":
        return AMAGOEnv(Meddler(what, where), env_name="Meddler")
    envs = [partial(Meddler, what, where)] * 2
    envs = gym.vector.SyncVectorEnv(envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    return AMAGOEnv(envs, env_name="Meddler", batched_envs=2)


def state():
    return {
        "gradients": torch.is_grad_enabled(), "dtype": torch.get_default_dtype(), "device": torch.get_default_device(),
        "threads": torch.get_num_threads(), "deterministic": torch.are_deterministic_algorithms_enabled(),
        "floating point": np.geterr(), "warnings": list(warnings.filters), "directory": os.getcwd(), "variables": dict(os.environ),
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
    }  # fmt: skip


class Watches(amago.Callback):
    """Draws numbers as a callback of a user's own may, and stops the run by a signal at the end."""

    def __init__(self):
        self.seen, self.drawn = [], []

    def on_epoch_end(self, experiment, metrics):
        self.seen.append(state())
        self.drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
        if experiment.epoch == 2:
            signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def restored(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEPT_BY_THE_RUN", "1")
    torch.use_deterministic_algorithms(False)  # imports, on first use, what sets a variable and a filter of warnings
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("what", "where", "mode"),
    [
        ("gradients", "step", "sync"), ("torch", "step", "sync"),
        *(("all", where, "sync") for where in ("step", "init", "reset")), ("all", "step", "already_vectorized"),
    ],
)  # fmt: skip
def test_a_run_goes_on_as_if_its_environments_left_the_process_alone(tmp_path, restored, what, where, mode):
    before, watcher = state(), Watches()
    e = tiny.experiment(
        "ours", partial(make, what, where, mode), env_mode=mode, parallel_actors=2, epochs=6, val_interval=1, val_timesteps_per_epoch=5,
        train_timesteps_per_epoch=12, train_batches_per_epoch=2, save_trajs_as="npz", callbacks=[watcher], seed=3, ckpt_interval=1,
        log_interval=1, dloader_workers=0,
    )  # fmt: skip
    e.start()
    with pytest.raises(Stopped) as stopped:
        e.learn()
    assert stopped.value.code == 128 + signal.SIGTERM
    assert e.grad_update_counter == 4
    assert all(p.dtype == torch.float32 for p in e.policy.parameters())
    for seen in watcher.seen:
        assert {k: v for k, v in seen.items() if k != "signals"} == {k: v for k, v in before.items() if k != "signals"}
    assert len(set(watcher.drawn)) == len(watcher.drawn)
    assert (tmp_path / "ours").is_dir()
    assert os.listdir() == ["ours"]
    trajs = stored(e.run_dir / "buffer")
    assert len(trajs) >= 6
    assert len(trajs[0]) == EPISODE
    assert len({traj.actions.tobytes() for traj in trajs}) >= 4, "the policy draws the same actions in every rollout"


def test_what_an_environment_has_changed_is_there_when_it_runs_again(tmp_path, restored):
    class Relies(Meddler):
        def __init__(self):
            os.chdir("/")
            torch.set_grad_enabled(False)
            np.random.seed(5)
            self.model = torch.nn.Linear(1, 1)

        def meddle(self, where):
            assert os.getcwd() == "/"
            self.model(torch.ones(1)).numpy()  # an error where gradients are kept

    e = tiny.learned(tmp_path, lambda: AMAGOEnv(Relies(), env_name="E"), env_mode="sync", val_interval=1)
    assert e.evaluate_test(lambda: AMAGOEnv(Relies(), env_name="E"), 9)
    e.close()
    assert os.getcwd() == str(tmp_path)


PAGES = """
import json, resource, torch
from amago.run.process import keep_freed_memory

def pages():
    "Pages that the system clears for 96 MB in six tensors; there are 24,576."
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _ = [torch.ones(2**22) for _ in range(6)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = keep_freed_memory(True)
during = [pages() for _ in range(4)][-1]
print(json.dumps([kept, during, keep_freed_memory(False)]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_used_again_until_it_is_restored():
    kept, during, restored = json.loads(tiny.run_program(PAGES))
    assert kept
    assert during < 2_000
    assert restored
