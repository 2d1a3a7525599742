from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
from counting_env import CountingEnv, check_traj, is_terminated, length_of, make_counting, make_vector
from messages import check_refused, naming
from store_helpers import stored

from amago.envs import AMAGO_ENV_LOG_PREFIX, AMAGOEnv, RecordingError, ReturnHistory, SequenceWrapper, SpecialMetricHistory


def run(recorder, steps, seed=0):
    rng = np.random.default_rng(seed)
    recorder.reset()
    for _ in range(steps):
        _, _, terminated, truncated, _ = recorder.step(rng.integers(5, size=(recorder.batched_envs, 1)))
        if recorder.batched_envs == 1 and (terminated | truncated).any():
            recorder.reset()


@pytest.mark.parametrize("form", ["final_obs", "dict", "final_observation", None])
def test_last_observations_of_environments_without_metadata(form, tmp_path):
    """SAME_STEP is assumed; the last observation comes in any of three forms, or is lost."""

    class Vector(gym.vector.SyncVectorEnv):
        def step(self, actions):
            *out, info = super().step(actions)
            last = info.get("final_obs")
            if last is None or form is None:
                return *out, {}
            if form == "dict":
                blank = {k: np.zeros_like(v[0]) for k, v in out[0].items()}
                last = {k: np.stack([(x or blank)[k] for x in last]) for k in blank}
            return *out, {"final_obs" if form == "dict" else form: last}

    envs = Vector([lambda i=i: CountingEnv(i) for i in range(3)], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    envs.metadata = {}
    recorder = SequenceWrapper(AMAGOEnv(envs, "v", batched_envs=3), save_trajs_to=tmp_path / "fifo")
    run(recorder, 60)
    recorder.save_finished_trajs()
    lengths = {}
    for traj in stored(tmp_path):
        actor, episode = (int(x) for x in traj.obs["count"][0, 1:3])
        known = form is not None or not is_terminated(actor, episode)
        _, _, begin, n = check_traj(traj, "discrete", checked_last=known)
        assert begin == 0
        lengths[actor, episode] = n
    assert len(lengths) > 20
    for (actor, episode), n in lengths.items():
        lost = form is None and not is_terminated(actor, episode)
        assert n == length_of(actor, episode) - lost
    told, _ = recorder.drain()
    assert all(r.length in range(2, 9) for r in told)
    assert len(told) == len(lengths)  # a returned sum is right even where the last transition is not kept


def test_changing_names_and_metrics_by_name():
    recorder = SequenceWrapper(AMAGOEnv(CountingEnv(1, changing_name=True)))
    run(recorder, 200)
    episodes, frames = recorder.drain()
    assert [e.env_name for e in episodes[:5]] == [f"counting-{i % 3}" for i in range(5)]
    assert (sum(frames.values()), set(frames)) == (200, {"counting-0", "counting-1", "counting-2"})
    specials = SpecialMetricHistory.of(episodes)
    for name, values in specials.data.items():
        assert {int(v) % 3 for v in values["Episode Number"]} == {int(name[-1])}
    returns = ReturnHistory.of(episodes)
    assert sum(len(v) for v in returns.data.values()) == len(episodes)
    assert returns.data["counting-0"] == [e.ret for e in episodes if e.env_name == "counting-0"]
    assert recorder.drain() == ([], {})


def test_explicit_name_wins_and_rows_may_have_their_own():
    assert AMAGOEnv(CountingEnv(0, changing_name=True), env_name="mine").env_name == "mine"
    vec = make_vector(3, gym.vector.AutoresetMode.SAME_STEP)().unwrapped
    recorder = SequenceWrapper(AMAGOEnv(vec, ["a", "b", "a"], batched_envs=3))
    assert recorder.env_name == "a+b"
    run(recorder, 30)
    _, frames = recorder.drain()
    assert frames == {"a": 60, "b": 30}


def logging_env(value):
    class Logging(CountingEnv):
        def step(self, action):
            *out, info = super().step(action)
            return *out, info | {f"{AMAGO_ENV_LOG_PREFIX} grid": value}

    return SequenceWrapper(AMAGOEnv(Logging(0)))


def test_metrics_are_numbers_or_arrays_of_them():
    recorder = logging_env(np.array([[1, 2], [3, 6]]))
    run(recorder, length_of(0, 0))
    assert recorder.drain()[0][0].metrics["grid"] == 3.0
    assert recorder.special_history.data["counting"]["grid"] == [1.0, 2.0, 3.0, 6.0] * 2
    check_refused(
        ValueError, *((naming("grid", "number"), lambda x=x: run(logging_env(x), 1)) for x in ("many", [1, None, "x"]))
    )


def test_errors_name_the_argument(tmp_path):
    env = make_counting(0)()
    check_refused(
        ValueError,
        (naming("save_every", 0), lambda: SequenceWrapper(env, save_every=0)),
        (naming("save_as", "'csv'"), lambda: SequenceWrapper(env, save_trajs_to=tmp_path, save_trajs_as="csv")),
    )
    full = mock.Mock(write=mock.Mock(side_effect=OSError("no room")))
    check_refused(RecordingError, ("no room", lambda: run(SequenceWrapper(env, writer=full), 20)))


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_active_trajectories_follow_the_rows_of_a_batch(mode, tmp_path):
    """Each has the steps of its row's piece in progress, also between the end of a rollout and the reset in the next step."""
    recorder = SequenceWrapper(make_vector(3, gym.vector.AutoresetMode[mode])(), save_trajs_to=tmp_path, save_every=2)
    recorder.reset()
    for _ in range(50):
        recorder.step(np.zeros((3, 1), int))
        for traj in recorder.active_trajs:
            times = [int(t.time_idx[0]) for t in traj]
            assert times == list(range(times[0], times[0] + len(times)))
            assert 1 <= len(times) <= 2
