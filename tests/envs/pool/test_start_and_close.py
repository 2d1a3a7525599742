"""Starting a pool, refused arguments, and what is left after closing it."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from counting_env import CountingEnv, make_counting, make_vector
from messages import naming
from workers import actors_of, kill, pids

from amago import config
from amago.envs import AMAGOEnv, BilevelEpsilonGreedy, EpsilonGreedy, make_pool
from amago.envs.pool.plan import ActorPlan
from amago.envs.pool.worker import pack, unpack

SAME_STEP = gym.vector.AutoresetMode.SAME_STEP


def descriptors():
    return {
        fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
    }


def processes():
    """Living descendants of this process, without multiprocessing's forkserver and resource tracker."""
    parents, names = {}, {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            names[pid] = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if stat[0] != "Z":
            parents[pid] = stat[1]
    found, edge = set(), {str(os.getpid())}
    while edge:
        edge = {p for p, parent in parents.items() if parent in edge and p not in found}
        found |= edge
    tops = {p for p in found if parents[p] == str(os.getpid())}
    return {p for p in found if not (p in tops and ("forkserver" in names[p] or "resource_tracker" in names[p]))}


@pytest.fixture(scope="module", autouse=True)
def _warm():
    """Let the forkserver start before anything is counted."""
    make_pool([make_counting(0)], "async").close()


@pytest.mark.parametrize("context", [None, "fork", "spawn"])
def test_close_leaves_nothing(context):
    gc.collect()
    before = descriptors(), processes(), set(os.listdir("/dev/shm"))
    pool = make_pool([make_counting(i) for i in range(4)], "async", workers=2, mp_context=context)
    pool.reset()
    pool.step(np.zeros((4, 1), int))
    assert len(processes()) - len(before[1]) == 2
    times = pool.time_idxs.copy()
    pool.close()
    pool.close()
    np.testing.assert_array_equal(pool.time_idxs, times)  # may still be read
    gc.collect()
    assert processes() == before[1]
    assert set(os.listdir("/dev/shm")) == before[2]
    assert len(descriptors()) == len(before[0])
    with pytest.raises(ValueError, match="closed"):
        pool.reset()


def test_a_pool_that_is_forgotten_is_closed():
    before = processes()
    pool = make_pool([make_counting(0)], "async")
    pool.reset()
    assert processes() != before
    del pool
    gc.collect()
    assert processes() == before


def test_close_does_not_wait_for_a_worker_that_hangs(tmp_path):
    pool = make_pool([make_counting(0, fault="hang", flag=str(tmp_path / "f"))], "async")
    before = processes()
    pool.reset()
    for _ in range(5):
        pool.send(0, np.zeros((1, 1), int))
        if os.path.exists(tmp_path / "f") or pool.obs["count"][0, 2] == 1:
            time.sleep(0.3)
        if os.path.exists(tmp_path / "f"):
            break
        pool.wait(0)
    assert os.path.exists(tmp_path / "f")
    begin = time.monotonic()
    pool.close()
    assert time.monotonic() - begin < 8
    assert len(processes()) == len(before) - 1


def script(tmp_path, text):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text))
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([os.path.dirname(os.path.dirname(os.path.dirname(__file__))), os.getcwd()])
    }
    return [sys.executable, "-W", "error", str(path)], env


PROGRAM = """
    import sys, types
    if __name__ != "__main__":
        raise SystemExit("the script was imported again")
    fake = types.ModuleType("torch")  # what a program that imports torch looks like, without the time it takes
    {torch}
    import gymnasium, numpy as np
    from amago import config
    from amago.envs import AMAGOEnv, EpsilonGreedy, make_pool
    from counting_env import CountingEnv

    SHIFT = 7

    class Mine(CountingEnv):
        def _obs(self, took):
            obs = super()._obs(took)
            obs["count"][1] += SHIFT
            return obs

    class MyNoise(EpsilonGreedy):
        def add_exploration_noise(self, action, local_step, horizon):
            assert self.eps_start == 0.25, self.eps_start
            return np.full_like(action, 4)

    gymnasium.register("Mine-v0", entry_point="__main__:Mine", order_enforce=False, disable_env_checker=True)
    gymnasium.register("Also-v0", entry_point=Mine, order_enforce=False, disable_env_checker=True)

    def make_env():
        return AMAGOEnv(gymnasium.make("Mine-v0", actor=1))

    def make_other():
        return AMAGOEnv(gymnasium.make("Also-v0", actor=2))

    config.bind({{"EpsilonGreedy.eps_start": 0.25}})
    pool = make_pool([make_env, make_other], "async", exploration=MyNoise, mp_context={context!r}, workers=2)
    assert __file__ and hasattr(sys.modules["__main__"], "__spec__")
    pool.reset()
    pool.step(np.zeros((2, 1), int))
    assert "torch" in sys.modules
    print("torch in workers:", pool.obs["count"][:, 3].tolist(), "actors:", pool.obs["count"][:, 1].tolist())
    print("took:", pool.obs["took"][:, 0].tolist())
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
    command, env = script(tmp_path, PROGRAM.format(context=context, torch=torch, end=end))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "torch in workers: [0.0, 0.0] actors: [8.0, 9.0]" in done.stdout
    assert "took: [7.0, 7.0]" in done.stdout
    assert done.stderr == ""


def test_workers_end_when_the_program_is_killed(tmp_path):
    command, env = script(
        tmp_path,
        """
        import numpy as np, time
        from amago.envs import make_pool
        from counting_env import make_counting
        from workers import pids
        pool = make_pool([make_counting(i) for i in range(2)], "async", workers=2,
                         recorder={"save_trajs_to": "DIR", "save_trajs_as": "segments"})
        pool.reset()
        for _ in range(30):
            pool.step(np.zeros((2, 1), int))
        print(*pids(pool), flush=True)
        time.sleep(60)
        """.replace("DIR", str(tmp_path / "fifo")),
    )
    program = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    pids = program.stdout.readline().split()
    assert len(pids) == 2
    program.send_signal(signal.SIGKILL)
    program.wait()
    program.stdout.close()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert len(list((tmp_path / "fifo").glob("*.safetensors"))) == 2  # what had ended was committed


def test_signals_to_the_group_leave_workers_alone():
    pool = make_pool([make_counting(0)], "async")
    try:
        pool.reset()
        for number in (signal.SIGINT, signal.SIGTERM):
            kill(pool, 0, number)
        pool.step(np.zeros((1, 1), int))
        assert pool.drain().restarts == 0
    finally:
        pool.close()


def test_what_cannot_be_pickled_is_named():
    lock = threading.Lock()

    def make_locked():
        with lock:
            return AMAGOEnv(CountingEnv(0))

    with pytest.raises(ValueError, match=naming("make_envs[1]", "make_locked", "worker")):
        make_pool([make_counting(0), make_locked], "async", workers=1)
    make_pool([make_locked], "async", mp_context="fork").close()


def test_only_bindings_of_what_a_worker_has_are_carried():
    config.bind({"BilevelEpsilonGreedy.rollout_horizon": 33})
    plan = ActorPlan({0: make_counting(0)}, 1, [[0]], BilevelEpsilonGreedy, None, 0, ())
    payload = pack(plan)
    config.clear()
    fresh, skipped = unpack(payload)
    assert not skipped
    assert fresh.exploration is BilevelEpsilonGreedy
    assert fresh.exploration(fresh.make_envs[0]()).rollout_horizon == 33
    assert cloudpickle.loads(cloudpickle.dumps(plan)).groups == [[0]]


@pytest.mark.parametrize(
    ("error", "named", "arguments"),
    [
        (ValueError, ("env_mode", "'threads'"), {"env_mode": "threads"}),
        (ValueError, ("parallel_actors", 3, "make_envs", 2), {"parallel_actors": 3}),
        (ValueError, ("workers", 0), {"workers": 0}),
        (ValueError, ("step_timeout", -1), {"step_timeout": -1}),
        (ValueError, ("mp_context", "'thread'"), {"mp_context": "thread"}),
        (TypeError, ("exploration", "'egreedy'"), {"exploration": "egreedy"}),
        (ValueError, ("recorder", ["dir"]), {"recorder": {"dir": "x"}}),
        (ValueError, ("max_env_restarts", -1), {"max_env_restarts": -1}),
        (ValueError, ("env_mode='already_vectorized'", "make_envs", 2), {"env_mode": "already_vectorized"}),
    ],
)
def test_wrong_arguments_are_refused(error, named, arguments):
    with pytest.raises(error, match=naming(*named)):
        make_pool([make_counting(0), make_counting(1)], **arguments)


def test_wrong_environments_are_refused():
    with pytest.raises(ValueError, match=naming("make_envs", "empty")):
        make_pool([], "sync")
    with pytest.raises(TypeError, match=naming("make_envs[0]", "CountingEnv", "function")):
        make_pool([CountingEnv(0)], "sync")
    with pytest.raises(TypeError, match=naming("AMAGOEnv", "CountingEnv")):
        make_pool([lambda: CountingEnv(0)], "sync")
    with pytest.raises(ValueError, match=naming("batched_envs=3", 5, "parallel_actors")):
        make_pool([make_vector(3, SAME_STEP)], "already_vectorized", parallel_actors=5)
    with pytest.raises(ValueError, match=naming("batched_envs=3", 1, "already_vectorized")):
        make_pool([make_vector(3, SAME_STEP)], "sync")
    for mode in ("sync", "async"):
        with pytest.raises(ValueError, match="must have the same spaces"):
            make_pool([make_counting(0), make_counting(1, kind="continuous")], mode, workers=2)


def test_wrong_calls_are_refused():
    for mode in ("sync", "async"):
        pool = make_pool(make_counting(0), mode, parallel_actors=2, workers=1)
        try:
            pool.reset()
            with pytest.raises(ValueError, match=naming("actions", (2,), (2, 1))):
                pool.send(0, np.zeros(2, int))
            with pytest.raises(ValueError, match=naming("actions", (3, 1), (2, 1))):
                pool.send_all(np.zeros((3, 1), int))
            with pytest.raises(ValueError, match=naming("group 0", "send(0, actions)")):
                pool.wait(0)
            pool.send(0, np.zeros((2, 1), int))
            with pytest.raises(ValueError, match=naming("group 0", "wait(0)")):
                pool.send(0, np.zeros((2, 1), int))
            pool.wait(0)
            with pytest.raises(ValueError, match=naming(9, "actors", 2)):
                pool.load_state_dict({"num_actors": 9, "actors": {}})
        finally:
            pool.close()
    with pytest.raises(ValueError, match=naming("env_mode='async'", "env_mode='sync'")):
        pool.render()


def test_groups_and_workers():
    for workers, n, expected in ((2, 5, [slice(0, 2), slice(2, 5)]), (1, 4, [slice(0, 4)]), (2, 3, [slice(0, 3)])):
        pool = make_pool([make_counting(i) for i in range(n)], "async", workers=workers)
        try:
            assert pool.groups == expected
            held = actors_of(pool)
            assert sorted(a for actors in held for a in actors) == list(range(n))
            assert max(map(len, held)) - min(map(len, held)) <= 1
        finally:
            pool.close()
    pool = make_pool([make_counting(i) for i in range(3)], "async", workers=3)
    assert len(pids(pool)) == 3
    pool.close()
    vector = make_pool([make_vector(3, SAME_STEP)], "already_vectorized")
    assert vector.num_actors == 3
    vector.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_exploration_goes_on_where_it_stopped(mode):
    def start():
        return make_pool([make_counting(i) for i in range(3)], mode, exploration=EpsilonGreedy, seed=1, workers=1)

    def play(pool, n):
        pool.reset()
        out = []
        for _ in range(n):
            pool.step(np.zeros((3, 1), int))
            out.append(np.concatenate([pool.obs["took"][:, 0], pool.obs["count"][:, 0]]))
        return np.stack(out)

    first, second = start(), start()
    try:
        play(first, 20)
        state = first.state_dict()
        assert [state["actors"][str(i)]["exploration"]["global_step"] for i in range(3)] == [20] * 3
        second.reset()
        second.load_state_dict(state)
        assert second.state_dict() == state
        third = play(first, 1), play(second, 1)
        actions = [t[0, :3] for t in third]
        np.testing.assert_array_equal(*actions)
        assert second.state_dict()["actors"]["0"]["exploration"]["global_step"] == 21
    finally:
        first.close()
        second.close()


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
