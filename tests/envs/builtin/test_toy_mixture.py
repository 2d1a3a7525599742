"""ToyMixture: three tasks behind one interface, none of which sees the others."""

import numpy as np
import pytest
from support.toy_mixture import TASKS, ToyMixture

from amago.envs.builtin import MetaFrozenLake, RoomKeyDoor, TMazePassive
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX

SCORE = f"{AMAGO_ENV_LOG_PREFIX} Score"
ALONE = {
    "recall": (lambda: TMazePassive(2), 1.0),
    "lake": (lambda: MetaFrozenLake(2, 3, max_episode_steps=4), 30.0),
    "room": (
        lambda: RoomKeyDoor(
            dark=False, size=2, max_episode_steps=6, meta_rollout_horizon=6, start_location=(0, 0), key_location=(1, 1)
        ),
        1000.0,
    ),
}


def rollout(env, policy, seed):
    obs, _ = env.reset(seed=seed)
    seen, rewards, done = [obs], [], False
    while not done:
        obs, reward, terminated, truncated, info = env.step(policy(obs))
        assert not truncated
        seen.append(obs)
        rewards.append(reward)
        done = terminated
    return np.array(seen), rewards, info


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_the_environment_itself(task):
    """The same actions give the same observations, and its rewards times its scale."""
    make, scale = ALONE[task]
    mixture, alone = ToyMixture(task), make()
    for seed in range(20):
        actions = np.random.default_rng(seed).integers(alone.action_space.n, size=50).tolist()
        own = int(np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).integers(2**31))
        left, expected, before = list(actions), [], []
        obs, _ = alone.reset(seed=own)
        before.append(obs)
        done, total = False, 0.0
        while not done:
            obs, reward, done, _, _ = alone.step(left.pop(0))
            before.append(obs)
            expected.append(reward)
            total += reward
            done = done or total >= {"recall": 1, "lake": 3, "room": 2}[task]
        left = list(actions)
        seen, rewards, info = rollout(mixture, lambda _, left=left: left.pop(0), seed)
        assert rewards == pytest.approx([r * scale for r in expected])
        assert np.array_equal(seen[:, 3 : 3 + before[0].size], np.array(before))
        assert np.all(seen[:, :3] == np.eye(3)[TASKS.index(task)])
        assert not seen[:, 3 + before[0].size :].any()
        assert info[SCORE] == pytest.approx(total / {"recall": 1, "lake": 3, "room": 2}[task])


def test_an_action_that_a_task_lacks_is_its_last():
    env = ToyMixture("recall")
    env.reset(seed=0)
    *_, reward, _, _, _ = env.step(0)
    assert reward == 0.0
    *_, reward, _, _, _ = env.step(4)
    assert reward == pytest.approx(-1 / 3), "down, which is not forward"
