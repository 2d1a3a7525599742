"""env_mode="auto": workers for slow environments, this process for fast ones, and one choice for every seeded run."""

import time

import numpy as np
import pytest
from counting_env import CountingEnv, make_counting
from tiny import experiment

from amago.envs import AMAGOEnv, make_pool
from amago.envs.pool import InProcessPool, auto
from amago.envs.pool.subprocess import AsyncPool

closed = []


class Costly(CountingEnv):
    """An environment whose step takes ``seconds`` on the clock of the test."""

    seconds, now = 0.0, 0.0

    def step(self, action):
        Costly.now += self.seconds
        return super().step(action)

    def close(self):
        closed.append(self)


def costly(seconds):
    class Timed(Costly):
        pass

    Timed.seconds = seconds
    return lambda: AMAGOEnv(Timed(0), env_name="timed")


def chosen(seconds, actors, workers, **options):
    return auto.choose_mode(costly(seconds), actors, workers, clock=lambda: Costly.now, **options)


def test_the_time_of_all_environments_decides():
    assert chosen(10e-6, 16, 2).mode == "sync"  # 160 us, of which two workers would save half
    assert chosen(1e-3, 16, 2).mode == "async"
    assert chosen(50e-6, 16, 2).mode == "sync"
    assert chosen(50e-6, 64, 2).mode == "async"
    assert chosen(1e-3, 16, 2).reason == "as 16 environments take 16 ms for a step"


def test_one_worker_saves_nothing():
    assert chosen(1.0, 16, 1).mode == chosen(1.0, 1, 8).mode == "sync"


def test_a_seeded_run_does_not_ask_the_clock():
    choice = auto.choose_mode(lambda: pytest.fail("an environment was made"), 16, 2, repeatable=True)
    assert choice == ("sync", "as the run is seeded and must repeat")


def test_measuring_ends_soon_and_closes_its_environment():
    closed.clear()
    before = Costly.now
    assert auto.step_seconds(costly(0.2), clock=lambda: Costly.now) == pytest.approx(0.2)
    assert Costly.now - before <= 0.2 * (auto.WARM_UP_STEPS + auto.MIN_STEPS + 1)
    assert len(closed) == 1
    start = time.perf_counter()
    assert auto.step_seconds(make_counting(0)) > 0
    assert time.perf_counter() - start < 5


def test_an_environment_that_fails_is_left_to_the_workers():
    def broken():
        raise RuntimeError("no such game")

    assert auto.choose_mode(broken, 4, 2).mode == "async"


def test_pools(monkeypatch):
    monkeypatch.setattr(auto, "WORTH_SECONDS", 0.0)
    for seed, kind in ((None, AsyncPool), (np.random.SeedSequence(1), InProcessPool)):
        pool = make_pool([make_counting(i) for i in range(2)], "auto", workers=2, seed=seed)
        try:
            assert isinstance(pool, kind)
        finally:
            pool.close()


@pytest.mark.parametrize("seed", [None, 3])
def test_a_run_chooses_once_and_says_why(tmp_path, monkeypatch, capsys, seed):
    asked = []

    def choose(maker, actors, workers, repeatable):
        asked.append(repeatable)
        return auto.ModeChoice("sync", "for a reason")

    monkeypatch.setattr("amago.run.collect.choose_mode", choose)
    run = experiment(tmp_path, env_mode="auto", seed=seed, verbose=True, val_interval=1)
    run.start()
    assert "2 actors (auto: sync, for a reason)" in capsys.readouterr().out
    run.learn()
    assert run.evaluate_test(run.make_val_env, timesteps=7)
    run.close()
    assert asked == [seed is not None]


def test_a_seeded_run_is_that_of_sync(tmp_path):
    weights = []
    for mode in ("auto", "sync"):
        run = experiment(tmp_path, name=mode, env_mode=mode, seed=3)
        run.start()
        run.learn()
        run.close()
        weights.append(run.policy.state_dict())
    assert all(weights[0][k].equal(weights[1][k]) for k in weights[1])
