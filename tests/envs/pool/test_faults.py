"""Environments that raise and workers that are killed or hang are replaced and counted, and never recorded as terminated."""

import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from counting_env import CountingEnv, length_of, make_counting
from messages import check_refused, naming
from store_helpers import whole_episodes
from workers import faults_of

from amago.envs import ActorError, AMAGOEnv, EpsilonGreedy, RecordingError, make_pool

N = 4


def faulty(tmp_path, fault, victim=1):
    return [make_counting(i, fault=fault if i == victim else "", flag=str(tmp_path / "flag")) for i in range(N)]


def play(pool, steps, seed=0, until=None):
    rng = np.random.default_rng(seed)
    opened = np.zeros(N, dtype=int)
    for _ in range(steps):
        pool.step(rng.integers(5, size=(N, 1)))
        opened += pool.resets
        t = pool.obs["count"][:, 0]
        np.testing.assert_array_equal(pool.resets, t == 0)
        np.testing.assert_array_equal(pool.time_idxs[:, 0], t)
        np.testing.assert_array_equal(pool.obs["count"][:, 1], np.arange(N))
        if until is not None and until():
            break
    return opened


def read(root):
    """{actor: its episodes}, of whole ones alone."""
    found = defaultdict(list)
    for actor, episode in whole_episodes(root):
        found[actor].append(episode)
    return found


@pytest.mark.parametrize(("mode", "how"), [("sync", "raise"), ("async", "raise"), ("async", "kill"), ("async", "hang")])
def test_a_fault_is_survived_and_counted(mode, how, tmp_path, caplog):
    options = {"workers": 2} if mode == "async" else {}
    options |= {"step_timeout": 10.0} if how == "hang" else {}  # long: a slow step on a busy machine is no hang
    recorder = {"save_trajs_to": str(tmp_path / "fifo"), "save_trajs_as": "segments"}
    with closing(
        make_pool(
            faulty(tmp_path, how), mode, recorder=recorder, exploration=EpsilonGreedy, seed=0, max_env_restarts=3, **options
        )
    ) as pool:
        pool.reset()
        others = [i for i in range(N) if i != 1]
        with caplog.at_level(logging.WARNING):
            play(pool, 6)
            pool.flush()
            play(pool, 57)
        stats = pool.drain()
        assert os.path.exists(tmp_path / "flag")
        assert stats.restarts == 1
        assert stats.dropped >= 1
        again = pool.drain()
        assert (again.restarts, again.dropped, again.episodes) == (0, 0, [])
        pool.flush()
        state = pool.state_dict()
        # Schedules continue, those of replaced actors too.
        assert [state["actors"][str(i)]["exploration"]["global_step"] for i in range(N)] == [63] * N
    episodes = read(tmp_path)
    assert set(episodes) == set(range(N))
    if how == "raise":  # only that environment was replaced; nothing that had ended is lost
        assert stats.dropped == 1
        for i in others:
            assert episodes[i] == list(range(len(episodes[i])))
            assert sum(length_of(i, e) for e in episodes[i]) + max(length_of(i, len(episodes[i])), 1) > 63
        assert episodes[1][0] == 0
        assert episodes[1].count(0) == 2  # before the fault and after it
        assert "bad day" in caplog.text
    else:
        apart = [i for i in range(N) if episodes[i].count(0) == 1]
        assert len(apart) == N // 2  # the other worker's actors went on as if nothing had happened
        for i in apart:
            assert episodes[i] == list(range(len(episodes[i])))
        assert ("hung" if how == "hang" else "exit code -9") in caplog.text
    assert sum(len(e) for e in episodes.values()) >= len(stats.episodes)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_too_many_faults_end_the_run_with_the_traceback(mode, tmp_path):
    broken = str(tmp_path / "broken")

    class Breaks(CountingEnv):
        def step(self, action):
            if os.path.exists(broken):
                raise RuntimeError("always broken")
            return super().step(action)

    recorder = {"save_trajs_to": str(tmp_path / "fifo"), "save_trajs_as": "segments"}
    make = [lambda i=i: AMAGOEnv(Breaks(i)) for i in range(N)]
    with closing(make_pool(make, mode, max_env_restarts=6, workers=1, recorder=recorder)) as pool:
        pool.reset()
        play(pool, 20)
        Path(broken).touch()
        check_refused(ActorError, (naming(7, "max_env_restarts", 6, "always broken"), lambda: play(pool, 10)))
    assert sum(map(len, read(tmp_path).values())) > 10  # what had ended before is on disk


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_environment_that_cannot_be_made_again_is_tried_until_the_limit(mode, tmp_path):
    flag = str(tmp_path / "made")

    def make():
        if os.path.exists(flag):
            raise OSError("the licence server is away")
        open(flag, "w").close()
        return AMAGOEnv(CountingEnv(0, fault="always"))

    with closing(make_pool([make], mode, max_env_restarts=2, workers=1 if mode == "async" else None)) as pool:
        pool.reset()
        check_refused(ActorError, (naming(3, "licence server"), lambda: pool.step(np.zeros((1, 1), int))))


def test_a_worker_is_missed_at_once_though_a_process_of_its_environment_lives_on(tmp_path):
    helpers = tmp_path / "helpers"

    def make():
        helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
        helper.start()
        with helpers.open("a") as f:
            f.write(f"{helper.pid}\n")
        return make_counting(0, fault="kill", flag=str(tmp_path / "flag"))()

    with closing(make_pool([make], "async", max_env_restarts=3, step_timeout=3600.0)) as pool:
        pool.reset()
        while not faults_of(pool)[1]:
            pool.step(np.zeros((1, 1), int))
        alive = [int(pid) for pid in helpers.read_text().split()]
        assert len(alive) == 2
        for pid in alive:
            os.kill(pid, signal.SIGKILL)  # raises if it has ended


def test_a_constructor_that_fails_or_hangs_is_reported_at_once():
    def fails():
        raise OSError("no such game")

    makers = [make_counting(0), fails]
    check_refused(
        ActorError,
        *(("OSError: no such game", lambda c=c: make_pool(makers, workers=2, mp_context=c)) for c in (None, "fork", "spawn")),
        ("hung", lambda: make_pool([lambda: time.sleep(3600)], start_timeout=0.5)),
    )
    assert not multiprocessing.active_children()
    check_refused(OSError, ("no such game", lambda: make_pool(makers, "sync")))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_cannot_be_recorded_is_no_fault_of_the_environment(mode, tmp_path):
    recorder = {"save_trajs_to": str(tmp_path / "d"), "save_trajs_as": "npz"}
    pool = make_pool([make_counting(0)], mode, recorder=recorder, workers=1)
    try:
        pool.reset()
        (tmp_path / "d").rmdir()
        (tmp_path / "d").write_text("a file where the directory was")
        with pytest.raises((RecordingError, ActorError), match=naming(str(tmp_path / "d"))):
            for _ in range(30):
                pool.step(np.zeros((1, 1), int))
        assert faults_of(pool) == (0, 0)
    finally:
        with pytest.raises(OSError) if mode == "sync" else contextlib.nullcontext():
            pool.close()
