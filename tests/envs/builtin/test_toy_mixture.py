"""ToyMixture: three tasks behind one interface, none of which sees the others."""

import numpy as np
import pytest
from support.toy_mixture import TASKS, ToyMixture

from amago.envs.builtin import MetaFrozenLake, RoomKeyDoor, TMazePassive
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX

SCORE = f"{AMAGO_ENV_LOG_PREFIX} Score"
ROOM = {
    "dark": False, "size": 2, "max_episode_steps": 6, "meta_rollout_horizon": 6, "start_location": (0, 0), "key_location": (1, 1),
}  # fmt: skip
ALONE = {  # the environment, what one of its rewards is worth, and the most of them
    "recall": (lambda: TMazePassive(2), 1.0, 1),
    "lake": (lambda: MetaFrozenLake(2, 3, max_episode_steps=4), 30.0, 3),
    "room": (lambda: RoomKeyDoor(**ROOM), 1000.0, 2),
}


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_the_environment_itself(task):
    """The same actions give the same observations, and its rewards times its scale."""
    make, scale, most = ALONE[task]
    mixture, alone = ToyMixture(task), make()

    def shown(own):
        row = np.zeros(mixture.observation_space.shape)
        row[TASKS.index(task)], row[3 : 3 + own.size] = 1.0, own
        return row

    for seed in range(20):
        actions = np.random.default_rng(seed)
        own = int(np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).integers(2**31))
        seen, obs, total, over = mixture.reset(seed=seed)[0], alone.reset(seed=own)[0], 0.0, False
        np.testing.assert_array_equal(seen, shown(obs))
        while not over:
            action = int(actions.integers(alone.action_space.n))
            seen, reward, over, truncated, info = mixture.step(action)
            obs, paid, done, _, _ = alone.step(action)
            total += paid
            np.testing.assert_array_equal(seen, shown(obs))
            assert (reward, truncated) == (pytest.approx(paid * scale), False)
            assert over == (done or total >= most)
        assert info[SCORE] == pytest.approx(total / most)


def test_an_action_that_a_task_lacks_is_its_last():
    env = ToyMixture("recall")
    env.reset(seed=0)
    *_, reward, _, _, _ = env.step(0)
    assert reward == 0.0
    *_, reward, _, _, _ = env.step(4)
    assert reward == pytest.approx(-1 / 3), "down, which is not forward"
