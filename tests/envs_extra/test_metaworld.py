"""Meta-World against its own environments and its own scripted policies."""

import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from amago.envs.builtin.metaworld_ml import MetaWorld, MetaWorldTasks, metaworld_tasks
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX

SUCCESS_RATE = f"{AMAGO_ENV_LOG_PREFIX} Success Rate"
ATTEMPT = f"{AMAGO_ENV_LOG_PREFIX} Attempt"

metaworld = pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'amago[metaworld]'")


@pytest.fixture(scope="module")
def reach() -> MetaWorldTasks:
    return metaworld_tasks("reach-v3", seed=0)


@pytest.fixture(scope="module")
def two(reach: MetaWorldTasks) -> MetaWorldTasks:
    """Two tasks in training and one in the test, as a suite has, without drawing the goals of a whole suite."""
    push = metaworld_tasks("push-v3", seed=0)
    classes = {"train": reach.classes["train"] | push.classes["train"], "test": push.classes["test"]}
    tasks = {"train": reach.tasks["train"] | push.tasks["train"], "test": push.tasks["test"]}
    return MetaWorldTasks("two", classes, tasks)


def actions(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, size=(n, 4)).astype(np.float32)


def goal_of(task: Any) -> np.ndarray:
    return np.asarray(pickle.loads(task.data)["rand_vec"])


def test_goals_are_fifty_a_split_apart_and_fixed_by_the_seed(reach: MetaWorldTasks) -> None:
    goals = {split: np.array([goal_of(t) for t in reach.tasks[split]["reach-v3"]]) for split in ("train", "test")}
    assert {len(np.unique(g, axis=0)) for g in goals.values()} == {50}
    assert not set(map(bytes, goals["train"])) & set(map(bytes, goals["test"]))
    again = metaworld_tasks("reach-v3", seed=0)
    assert [t.data for t in again.tasks["train"]["reach-v3"]] == [t.data for t in reach.tasks["train"]["reach-v3"]]


def test_old_names_are_mapped_with_a_warning(reach: MetaWorldTasks) -> None:
    with pytest.warns(UserWarning, match="Meta-World has no reach-v2 any more: using reach-v3"):
        old = metaworld_tasks("reach-v2", seed=0)
    assert old.benchmark == "reach-v3"
    assert [t.data for t in old.tasks["test"]["reach-v3"]] == [t.data for t in reach.tasks["test"]["reach-v3"]]


def test_suites_are_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 or 45 tasks to train on, 5 others to test on. Goals are not drawn here: that takes half a minute."""

    def some_goals(classes: Any, args: Any, override: Any, seed: Any = None) -> list[Any]:
        assert override == {"partially_observable": True}
        return [metaworld.Task(env_name=name, data=b"") for name in args for _ in range(50)]

    monkeypatch.setattr(metaworld, "_make_tasks", some_goals)
    for name, n in (("ml10", 10), ("ML45", 45)):
        suite = metaworld_tasks(name)
        assert suite.benchmark == name.upper()
        assert (len(suite.names("train")), len(suite.names("test"))) == (n, 5)
        assert not set(suite.names("train")) & set(suite.names("test"))
        assert {len(t) for split in suite.tasks.values() for t in split.values()} == {50}
        env = MetaWorld(suite, "test")
        assert env.env_name.endswith("-test")


def test_attempts_are_upstreams_episodes(reach: MetaWorldTasks) -> None:
    env = MetaWorld(reach, "train", k_episodes=2, episode_length=12)
    assert env.horizon == 24
    obs, info = env.reset(seed=1)
    assert info == {}
    upstream = reach.classes["train"]["reach-v3"]()
    goal = env._simulator._target_pos
    (task,) = [t for t in reach.tasks["train"]["reach-v3"] if np.allclose(goal_of(t)[3:], goal)]
    upstream.set_task(task)
    log: dict[str, float] = {}
    for t, action in enumerate(actions(24)):
        if t % 12 == 0:
            theirs, _ = upstream.reset()
            total, solved = 0.0, 0.0
        np.testing.assert_array_equal(obs[:39], theirs.astype(np.float32))
        np.testing.assert_allclose(obs[39:], [(t % 12) / 12, (t // 12) / 2], rtol=1e-6)
        assert (obs[36:39] == 0).all(), "the goal is hidden"
        assert obs in env.observation_space
        theirs, paid, _, _, told = upstream.step(action)
        obs, reward, terminated, truncated, info = env.step(action)
        assert reward == paid
        assert 0.0 <= reward <= 10.0
        assert (terminated, truncated) == (t == 23, False)
        total, solved = total + reward, max(solved, told["success"])
        if t % 12 == 11:
            i = t // 12
            assert info.pop(f"{ATTEMPT} {i} Return") == pytest.approx(total)
            assert info.pop(f"{ATTEMPT} {i} Success") == solved
            log |= info
        else:
            assert info == {}
    assert set(log) == {SUCCESS_RATE}
    with pytest.raises(gym.error.ResetNeeded):
        env.step(np.zeros(4))


def test_a_seed_gives_a_rollout_whatever_was_before(two: MetaWorldTasks) -> None:
    def rollout(env: MetaWorld, seed: int) -> list[Any]:
        out: list[Any] = [env.reset(seed=seed)[0].tolist(), env.env_name]
        for action in actions(12):
            obs, reward, *_ = env.step(action)
            out += [obs.tolist(), reward]
        return out

    a, b = MetaWorld(two, k_episodes=2, episode_length=6), MetaWorld(two, k_episodes=2, episode_length=6)
    first = {seed: rollout(a, seed) for seed in (0, 1, 2, 3)}
    for seed in (3, 1, 0, 2):
        assert rollout(b, seed) == first[seed]
    assert {seen[1] for seen in first.values()} == {"reach-v3", "push-v3"}


def test_tasks_and_environments_go_to_other_processes(reach: MetaWorldTasks) -> None:
    copy = pickle.loads(pickle.dumps(reach))
    a, b = MetaWorld(reach, episode_length=4), MetaWorld(copy, episode_length=4)
    np.testing.assert_array_equal(a.reset(seed=5)[0], b.reset(seed=5)[0])
    assert len(pickle.dumps(reach)) < 100_000
