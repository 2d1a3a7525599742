"""Starting a pool, refused arguments, and what is left after closing it."""

import subprocess
import sys
import textwrap
import threading
from contextlib import closing

import gin
import gymnasium as gym
import numpy as np
import pytest
import tiny
from counting_env import CountingEnv, make_counting, make_vector
from fault_helpers import leaves_nothing, processes
from messages import check_refused, naming

from amago import config
from amago.envs import AMAGOEnv, make_pool

SAME_STEP = gym.vector.AutoresetMode.SAME_STEP


@pytest.fixture(scope="module", autouse=True)
def _warm():
    """Let the forkserver start before anything is counted."""
    make_pool([make_counting(0)], "async").close()


@pytest.mark.parametrize("context", [None, "fork", "spawn"])
def test_close_leaves_nothing(context):
    before = processes()
    with leaves_nothing():
        pool = make_pool([make_counting(i) for i in range(4)], "async", workers=2, mp_context=context)
        pool.reset()
        pool.step(np.zeros((4, 1), int))
        assert len(processes()) - len(before) == 2
        times = pool.time_idxs.copy()
        pool.close()
        pool.close()
        np.testing.assert_array_equal(pool.time_idxs, times)  # may still be read
        del pool


def test_a_pool_that_is_forgotten_is_closed():
    with leaves_nothing():
        pool = make_pool([make_counting(0)], "async")
        pool.reset()
        del pool


PROGRAM = """
    import sys, types
    if __name__ != "__main__":
        raise SystemExit("the script was imported again")
    fake = types.ModuleType("torch")  # what a program that imports torch looks like, without the time it takes
    {torch}
    import gymnasium, numpy as np
    from amago.envs import AMAGOEnv, make_pool
    from counting_env import CountingEnv

    SHIFT = 7

    class Mine(CountingEnv):
        def _obs(self, took):
            obs = super()._obs(took)
            obs["count"][1] += SHIFT
            return obs

    gymnasium.register("Mine-v0", entry_point="__main__:Mine", order_enforce=False, disable_env_checker=True)
    gymnasium.register("Also-v0", entry_point=Mine, order_enforce=False, disable_env_checker=True)

    def make_env():
        return AMAGOEnv(gymnasium.make("Mine-v0", actor=1))

    def make_other():
        return AMAGOEnv(gymnasium.make("Also-v0", actor=2))

    pool = make_pool([make_env, make_other], "async", mp_context={context!r}, workers=2)
    assert __file__ and hasattr(sys.modules["__main__"], "__spec__")
    pool.reset()
    pool.step(np.zeros((2, 1), int))
    assert "torch" in sys.modules
    print("torch in workers:", pool.obs["count"][:, 3].tolist(), "actors:", pool.obs["count"][:, 1].tolist())
    {end}
"""


@pytest.mark.parametrize(
    ("context", "torch", "end"),
    [
        (None, "import torch", "pool.close()"),
        ("spawn", 'sys.modules["torch"] = fake', "pass  # not closed: the interpreter's exit does it"),
    ],
)
def test_workers_import_neither_torch_nor_the_script(context, torch, end, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM.format(context=context, torch=torch, end=end)))
    done = subprocess.run([sys.executable, "-W", "error", path], env=tiny.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch in workers: [0.0, 0.0] actors: [8.0, 9.0]" in done.stdout
    assert done.stderr == ""


def test_what_cannot_be_pickled_is_named():
    lock = threading.Lock()

    def make_locked():
        with lock:
            return AMAGOEnv(CountingEnv(0))

    check_refused(
        ValueError,
        (
            naming("make_envs[1]", "make_locked", "worker"),
            lambda: make_pool([make_counting(0), make_locked], "async", workers=1),
        ),
    )
    make_pool([make_locked], "async", mp_context="fork").close()


def test_wrong_arguments_are_refused():
    def pool(*makers, mode="async", **arguments):
        return lambda: make_pool(
            makers or [make_counting(0), make_counting(1)], mode, workers=arguments.pop("workers", 2), **arguments
        )

    check_refused(
        ValueError,
        (naming("env_mode", "'threads'"), pool(mode="threads")),
        (naming("parallel_actors", 3, "make_envs", 2), pool(parallel_actors=3)),
        (naming("workers", 0), pool(workers=0)),
        (naming("step_timeout", -1), pool(step_timeout=-1)),
        (naming("mp_context", "'thread'"), pool(mp_context="thread")),
        (naming("recorder", ["dir"]), pool(recorder={"dir": "x"})),
        (naming("max_env_restarts", -1), pool(max_env_restarts=-1)),
        (naming("env_mode='already_vectorized'", "make_envs", 2), pool(mode="already_vectorized")),
        (naming("make_envs", "empty"), lambda: make_pool([], "sync")),
        (naming("batched_envs=3", 1, "already_vectorized"), pool(make_vector(3, SAME_STEP), mode="sync")),
        *(
            ("must have the same spaces", pool(make_counting(0), make_counting(1, kind="continuous"), mode=mode))
            for mode in ("sync", "async")
        ),
    )
    check_refused(
        TypeError,
        (naming("exploration", "'egreedy'"), pool(exploration="egreedy")),
        (naming("make_envs[0]", "CountingEnv", "function"), pool(CountingEnv(0), mode="sync")),
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_wrong_calls_are_refused(mode):
    with closing(make_pool(make_counting(0), mode, parallel_actors=2, workers=1)) as pool:
        pool.reset()
        check_refused(
            ValueError,
            (naming("actions", (2,), (2, 1)), lambda: pool.send(0, np.zeros(2, int))),
            (naming("actions", (3, 1), (2, 1)), lambda: pool.send_all(np.zeros((3, 1), int))),
            (naming("group 0", "send(0, actions)"), lambda: pool.wait(0)),
            (naming(9, "actors", 2), lambda: pool.load_state_dict({"num_actors": 9, "actors": {}})),
        )
        pool.send(0, np.zeros((2, 1), int))
        check_refused(ValueError, (naming("group 0", "wait(0)"), lambda: pool.send(0, np.zeros((2, 1), int))))
        pool.wait(0)
        if mode == "async":
            check_refused(ValueError, (naming("env_mode='async'", "env_mode='sync'"), pool.render))
    check_refused(
        ValueError, ("the pool is closed", pool.reset), ("the pool is closed", lambda: pool.step(np.zeros((2, 1), int)))
    )


def test_environments_are_seeded_alike_in_every_mode():
    class Noise(CountingEnv):
        def _obs(self, took):
            return super()._obs(took) | {"took": self.np_random.random(1, dtype=np.float32)}

    def make():
        return AMAGOEnv(Noise(0))

    drawn = {}
    for name, mode, seed, options in (
        ("a", "sync", 4, {}), ("b", "async", 4, {"workers": 2}), ("c", "sync", 5, {}), ("d", "sync", np.random.SeedSequence(4), {}),
    ):  # fmt: skip
        pool = make_pool([make] * 3, mode, seed=seed, **options)
        pool.reset()
        first = pool.obs["took"][:, 0].copy()
        pool.reset()
        drawn[name] = [first, pool.obs["took"][:, 0].copy()]
        pool.close()
    np.testing.assert_array_equal(drawn["a"], drawn["b"])
    np.testing.assert_array_equal(drawn["a"], drawn["d"])
    assert len(set(np.concatenate(drawn["a"] + drawn["c"]).tolist())) == 12  # rollouts and actors differ


LATE = """
import gin

@gin.configurable(module="late_module")
def number(n=1):
    return n
"""


def test_settings_of_what_an_environment_imports_late_have_their_effect(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text(LATE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    def make_env():
        import late_module

        return AMAGOEnv(CountingEnv(late_module.number()))

    make_env()
    with config.temporary({"late_module.number.n": 5}), closing(make_pool([make_env], "async", mp_context="spawn")) as pool:
        pool.reset()
        assert pool.obs["count"][0, 1] == 5
    del sys.modules["late_module"], gin.config._REGISTRY._selector_map["late_module.number"]
