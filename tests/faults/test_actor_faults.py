"""Actors whose processes are killed or stopped, or whose environments raise, hang or cannot be made, are replaced and counted."""

import contextlib
import io
import os
import shutil
import signal
import threading
import time
from argparse import ArgumentParser

import numpy as np
import pytest
from actor_fault_envs import Followed, Wordy, make_raising_cartpole, tallied
from counting_env import make_counting
from fault_helpers import (
    Held,
    Threads,
    alive,
    assert_gone,
    assert_nothing_left,
    count,
    later,
    leaves_nothing,
    program,
    report,
    rng,
    say,
    seeds,
)  # fmt: skip
from store_helpers import whole_episodes
from workers import actors_of, pids

from amago.envs import ActorError, AMAGOEnv, make_pool
from amago.envs.pool import worker as protocol

W, PATIENCE = 8, 200.0


@pytest.fixture(scope="module", autouse=True)
def _warm():
    """Start the forkserver, which stays, before anything is counted."""
    make_pool([make_counting(0)], "async").close()


def replaced_at(caplog):
    """When each replacement was logged, on the clock of `time.time`."""
    return [record.created for record in caplog.records if "is replaced" in record.getMessage()]


def close_twice(pool):
    """Close, and again; how many seconds that took."""
    begin = time.monotonic()
    pool.close()
    pool.close()
    return time.monotonic() - begin


def test_killed_workers_are_noticed_and_replaced(tmp_path, caplog):
    """One of 8 workers is killed at a random time: while it steps, commits, or reports its statistics or its state."""
    kills, random = count(6, 50), rng("kill")
    pool_seed, play_seed = seeds("kill pool", 2)
    recorder = {"save_trajs_to": str(tmp_path / "fifo"), "save_trajs_as": "segments"}
    before = Held.now()
    pool = make_pool(
        [make_counting(i) for i in range(2 * W)], workers=W, recorder=recorder, seed=pool_seed, max_env_restarts=10 * kills
    )
    replaced = restarts = dropped = 0
    slowest, episodes = 0.0, 0
    try:
        follow = Followed(pool, play_seed)
        rare = [pool.drain, pool.flush, pool.state_dict]
        for _ in range(kills):
            victim, killed = int(random.integers(W)), []
            mates, breaks, known = actors_of(pool)[victim], follow.breaks.copy(), len(replaced_at(caplog))
            pid = pids(pool)[victim]

            def kill(pid=pid, killed=killed):
                killed.append(time.time())
                os.kill(pid, signal.SIGKILL)

            with later(float(random.uniform(0, 0.05)), kill):
                deadline = time.monotonic() + PATIENCE
                while len(replaced_at(caplog)) == known:
                    assert time.monotonic() < deadline
                    follow.step()
                    if random.random() < 0.3:
                        answer = rare[int(random.integers(3))]()
                        follow.look()
                        if hasattr(answer, "restarts"):
                            restarts, dropped = restarts + answer.restarts, dropped + answer.dropped
                            episodes += len(answer.episodes)
            for _ in range(3):
                follow.step()
            slowest = max(slowest, replaced_at(caplog)[known] - killed[0])
            expected = breaks.copy()
            expected[mates] += 1
            np.testing.assert_array_equal(follow.breaks, expected)  # these were replaced, and the other actors went on
            replaced += len(replaced_at(caplog)) == known + 1 and pids(pool)[victim] != pid and alive(pids(pool)[victim])
        stats = pool.drain()
        restarts, dropped, episodes = restarts + stats.restarts, dropped + stats.dropped, episodes + len(stats.episodes)
        close_twice(pool)
    finally:
        pool.close()
    report("killed workers were replaced, and only their actors were interrupted", replaced, kills)
    report("of these were counted as restarts", restarts, kills)
    say(f"noticed after {slowest * 1000:.0f} ms at most; {dropped} unfinished rollouts dropped")
    assert 0 < dropped <= 2 * kills
    whole = whole_episodes(tmp_path)
    assert len(whole) >= episodes / 2 > 0
    assert_nothing_left(before)


def test_hung_workers_are_replaced(caplog):
    """Up to three workers at once are stopped by SIGSTOP, whatever they are doing."""
    timeout, rounds, random = 8.0, count(2, 20), rng("hang")  # long: a slow step on a busy machine is no hang
    pool = make_pool([make_counting(i) for i in range(W)], workers=W, step_timeout=timeout, seed=0, max_env_restarts=1000)
    hung, slowest = 0, 0.0
    try:
        follow = Followed(pool, seeds("hang", 1)[0])
        for _ in range(rounds):
            victims = random.choice(W, size=int(random.integers(1, 4)), replace=False).tolist()
            known, numbers, stopped, breaks = len(replaced_at(caplog)), pids(pool), [], follow.breaks.copy()

            def stop(victims=victims, numbers=numbers, stopped=stopped):
                stopped.append(time.monotonic())
                for v in victims:
                    os.kill(numbers[v], signal.SIGSTOP)

            with later(float(random.uniform(0, 0.05)), stop):
                while len(replaced_at(caplog)) < known + len(victims):
                    follow.step()
            slowest, hung = max(slowest, time.monotonic() - stopped[0]), hung + len(victims)
            expected = breaks.copy()
            expected[victims] += 1
            np.testing.assert_array_equal(follow.breaks, expected)
            assert_gone([numbers[v] for v in victims])
        close_twice(pool)
    finally:
        pool.close()
    say(f"{hung} hung workers, env_step_timeout {timeout} s; replaced after {slowest:.2f} s at most")


def test_cartpole_is_learned_in_spite_of_exceptions(tmp_path):
    """Exceptions with probability .001 a step and .005 a reset: as many restarts are logged as were injected."""
    import torch
    from tqdm import tqdm

    from amago.cli import train
    from amago.run.plots import read_metrics

    injected = tmp_path / "injected"
    actors, steps = 8, count(400, 500)
    epochs, updates = count(2, 15), count(4, 150)
    evaluation = count(100, 1001)
    parser = ArgumentParser()
    train.add_arguments(parser)
    arguments = f"""CartPole-v1 --run_name faulty --buffer_dir {tmp_path} --traj_encoder ff --parallel_actors {actors} --env_workers 2
        --timesteps_per_epoch {steps} --epochs {epochs} --grads_per_epoch {updates} --val_interval {max(epochs, 2)} --eval_timesteps {evaluation}
        --seed {seeds("cartpole", 1)[0]} --quiet --configs zoo/cartpole"""
    tqdm(range(1), disable=False, file=io.StringIO()).close()  # it starts a thread that stays
    before = Held.now()
    threads = torch.get_num_threads()
    experiment = train.make_experiment(parser.parse_args(arguments.split()))
    experiment.make_train_env = make_raising_cartpole(0.001, 0.005, str(injected))
    experiment.max_env_restarts = 10**6
    try:
        experiment.start()
        first = {k: v.clone() for k, v in experiment.policy.state_dict().items()}
        experiment.learn()
        changed = sum(not torch.equal(first[k], v) for k, v in experiment.policy.state_dict().items())
        returns = experiment.evaluate_test(experiment.make_val_env, timesteps=evaluation)[
            "Average Total Return (Across All Env Names)"
        ]
        run_dir = experiment.run_dir
    finally:
        experiment.close()
        torch.set_num_threads(threads)
    rows = read_metrics(run_dir)
    counted = sum(r["values"].get("Restarted Environments", 0) for r in rows if r["section"] == "rollout")
    assert tallied(injected) > 0
    report("injected exceptions were counted as restarts", int(counted), tallied(injected))
    say(f"{actors * steps * epochs} steps; return without exploration {returns:.0f} after {epochs * updates} updates")
    assert rows[-1]["grad_steps"] == epochs * updates
    assert changed > 5  # training went on
    assert returns >= count(5, 100)
    del experiment  # the buffer keeps some files open as long as it lives
    assert_nothing_left(before)


FAILING = """
    import os, sys, time
    import gymnasium as gym
    from amago.envs import AMAGOEnv
    from workers import pids

    flag = sys.argv[1]

    def make_failing():
        raise OSError("no such game: " + flag)

    def make_vanishing():
        if os.path.exists(flag):
            raise OSError("no such game: " + flag)
        return AMAGOEnv(gym.make("CartPole-v1"), env_name="CartPole")

    def train(make_env):
        import tiny
        tiny.learned(os.getcwd(), make_env, env_mode="async", env_workers=2, parallel_actors=2, epochs=10_000)

    def play(make_env):
        import numpy as np
        from amago.envs import make_pool
        pool = make_pool(make_env, "async", parallel_actors=1)
        pool.reset()
        print("begins", pids(pool)[0], flush=True)
        while True:
            pool.step(np.zeros((1, 1), int))
"""


def fails(folder, call):
    """Run the script in a folder; returns (seconds that it took to end after the fault, output, exit code)."""
    flag, begin = folder / "flag", time.monotonic()
    script = program(folder, FAILING + "\n    " + call + "\n", flag)
    if "make_vanishing" in call:
        word, pid = script.stdout.readline().split()
        assert word == "begins"
        flag.touch()
        begin = time.monotonic()
        os.kill(int(pid), signal.SIGKILL)
    text, _ = script.communicate(timeout=PATIENCE)
    return time.monotonic() - begin, text, script.returncode


def test_constructors_that_always_fail_end_the_run(tmp_path):
    """From the start; or once a worker is killed, and cannot be replaced."""
    calls = ["play(make_failing)", "play(make_vanishing)", "train(make_failing)"][: count(1, 3)]
    ended = 0
    for i, call in enumerate(calls):
        folder = tmp_path / str(i)
        folder.mkdir()
        took, text, code = fails(folder, call)
        assert f"OSError: no such game: {folder / 'flag'}" in text, text
        assert "Traceback" in text
        assert "ActorError" in text
        ended += code == 1
        say(f"{call}: exit code {code} after {took:.1f} s")
    report("runs with constructors that always fail ended with the traceback and code 1", ended, len(calls))


FAULTS = ("none", "raise", "always", "kill", "kill all", "in flight", "unrecordable", "stop", "wordy")


def trouble(fault, tmp_path):
    """A pool of two workers with one kind of fault, not closed."""
    recorder = {"save_trajs_to": str(tmp_path / "d"), "save_trajs_as": "npz"} if fault == "unrecordable" else None
    makers = [make_counting(i, fault=fault if fault in ("raise", "always") else "", flag=str(tmp_path / "f")) for i in range(4)]
    if fault == "wordy":
        makers = [lambda i=i: AMAGOEnv(Wordy(i)) for i in range(4)]
    pool = make_pool(makers, workers=2, seed=0, step_timeout=30.0, max_env_restarts=5, recorder=recorder)
    pool.reset()
    if fault == "unrecordable":
        shutil.rmtree(tmp_path / "d")
        (tmp_path / "d").write_text("a file where the directory was")
    with contextlib.suppress(ActorError):
        for _ in range(12):
            pool.step(np.zeros((4, 1), int))
        assert fault not in ("always", "unrecordable")
    numbers = pids(pool)
    if fault.startswith("kill"):
        for pid in numbers[: 2 if fault == "kill all" else 1]:
            os.kill(pid, signal.SIGKILL)
        pool.drain()
        os.kill(pids(pool)[1], signal.SIGKILL)  # this one is not noticed before it is closed
    if fault == "stop":
        os.kill(numbers[0], signal.SIGSTOP)
    if fault == "in flight":
        pool.send(0, np.zeros((2, 1), int))
    if fault == "wordy":
        pool._workers[0].send_command(protocol.ASK, (1, "drain", ()))
        time.sleep(0.3)
        os.kill(numbers[0], signal.SIGSTOP)
    return pool


def test_nothing_is_left_after_a_fault(tmp_path, monkeypatch):
    monkeypatch.setattr("amago.envs.pool.subprocess._QUIT_SECONDS", count(2, 6))
    slowest, faults = 0.0, FAULTS[: count(8, 9)]
    for fault in faults:
        folder = tmp_path / fault
        folder.mkdir()
        with leaves_nothing():
            pool = trouble(fault, folder)
            numbers = pids(pool)
            slowest = max(slowest, close_twice(pool))
            del pool
            assert_gone(numbers)
    report("kinds of fault left no process, shared memory or descriptor behind", len(faults))
    say(f"close() took {slowest:.1f} s at most")


def test_starts_and_stops_beside_busy_threads():
    times, slowest, lock = count(10, 200), 0.0, threading.Lock()

    def computes_allocates_and_takes_locks(_):
        with lock:
            bytes(1000)
        return sum(range(200)) > 0

    with Threads(computes_allocates_and_takes_locks, 4), leaves_nothing():
        for _ in range(times):
            begin = time.monotonic()
            pool = make_pool([make_counting(i) for i in range(2)], workers=2, start_timeout=PATIENCE)
            pool.reset()
            pool.step(np.zeros((2, 1), int))
            assert pool.drain().restarts == 0
            close_twice(pool)
            slowest = max(slowest, time.monotonic() - begin)
    report("starts and stops beside busy threads, without a hang", times)
    say(f"the longest took {slowest:.2f} s")


ORPHAN = """
    import sys, time
    import numpy as np
    from amago.envs import AMAGOEnv, make_pool
    from amago.envs.pool import worker
    from counting_env import CountingEnv
    from workers import pids

    class Hangs(CountingEnv):
        def step(self, action):
            time.sleep(3600)

    worker.ORPHAN_SECONDS = 0.5
    pool = make_pool([lambda: AMAGOEnv(Hangs(0))], "async", mp_context="fork")
    pool.reset()
    pool.send(0, np.zeros((1, 1), int))
    print(pids(pool)[0], flush=True)
    time.sleep(3600)
"""


def test_a_hung_worker_does_not_outlive_a_killed_program(tmp_path):
    script = program(tmp_path, ORPHAN)
    pid = int(script.stdout.readline())
    assert alive(pid)
    script.kill()
    script.communicate()
    assert_gone([pid])
    assert protocol.ORPHAN_SECONDS == 30


LIMITED = """
    import resource
    import gymnasium as gym
    import numpy as np
    from amago.envs import AMAGOEnv, make_pool

    class Wide(gym.Env):
        observation_space, action_space = gym.spaces.Box(0, 255, (3 * 2**20,), np.uint8), gym.spaces.Discrete(2)

    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    make_pool([lambda: AMAGOEnv(Wide(), "Wide")] * 2, "async", workers=2)
"""


def test_too_little_shared_memory_is_reported_before_the_first_step(tmp_path):
    script = program(tmp_path, LIMITED)
    text, _ = script.communicate(timeout=PATIENCE)
    assert script.returncode == 1, text
    assert "MemoryError: 6.0 MiB of shared memory are needed" in text
    assert "parallel_actors" in text
    report("runs with too little shared memory ended with an error that names it, before the first step", 1)
