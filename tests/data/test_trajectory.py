import gymnasium as gym
import numpy as np
from messages import check_refused, naming, refused

from amago.data.trajectory import FrozenTraj
from amago.hindsight import Timestep, TrajectoryBuilder
from amago.relabeling import NoOpRelabeler, Relabeler
from amago.spaces import action_spec

SPEC = action_spec(gym.spaces.Discrete(3, start=1))


def rollout(steps=4, terminated=True):
    traj = TrajectoryBuilder(SPEC, env_name="count").start({"observation": np.array([0.0], np.float32)})
    for t in range(steps):
        obs = {"observation": np.array([t + 1.0], np.float32)}
        traj.add(1 + t % 3, reward=float(t + 1), terminated=terminated and t == steps - 1, obs=obs)
    return traj


def test_rl2s_hold_the_reward_that_arrived_with_the_observation_and_the_action_that_caused_it():
    frozen = rollout().freeze()
    np.testing.assert_array_equal(frozen.rl2s[0], 0)
    for t in range(1, 5):
        assert (frozen.rl2s[t, 0], frozen.rl2s[t, 1:].argmax()) == (t, (t - 1) % 3)
        assert frozen.obs["observation"][t] == t
    np.testing.assert_array_equal(frozen.time_idxs[:, 0], range(5))
    np.testing.assert_array_equal(frozen.dones[:, 0], [False, False, False, True])


def test_stored_pieces_derive_what_the_whole_derives_with_one_more_observation_than_transitions():
    piece = rollout(6).freeze().slice(2, 5).validate()
    np.testing.assert_array_equal(piece.obs["observation"][:, 0], [2, 3, 4, 5])
    np.testing.assert_array_equal(piece.rews[:, 0], [3, 4, 5])
    again = piece.to_stored(SPEC, "count").derive(SPEC)
    for name in ("rl2s", "time_idxs", "rews", "dones", "actions"):
        np.testing.assert_array_equal(getattr(again, name), getattr(piece, name), err_msg=name)


def test_validate_names_the_field():
    traj = rollout().freeze()
    traj.dones = traj.dones[:-1]
    with refused(ValueError, "dones", 3, 4):
        traj.validate()


def test_a_trajectory_refuses_steps_out_of_order():
    check_refused(
        ValueError,
        (naming("start(", "add("), lambda: TrajectoryBuilder(SPEC).add(1, 0.0, False, {"observation": np.zeros(1)})),
        (naming("terminated", "start("), lambda: rollout().add(1, 0.0, False, {"observation": np.zeros(1)})),
        ("at least one transition", lambda: TrajectoryBuilder(SPEC).start({"observation": np.zeros(1)}).freeze()),
    )


def test_relabelers_are_checked():
    class Broken(Relabeler):
        def relabel(self, traj: FrozenTraj) -> FrozenTraj:
            traj.rews = traj.rews[:2]
            return traj

    traj = rollout().freeze()
    assert NoOpRelabeler()(traj) is traj
    with refused(ValueError, "rows", 5, 2, 3):
        Broken()(traj)


def test_timestep_rl2():
    action, reward = np.array([[0.0, 1.0]], np.float32), np.array([2.0], np.float32)
    t = Timestep({}, action, reward, np.zeros(1, np.int64), np.zeros(1, bool))
    np.testing.assert_array_equal(t.rl2, [[2.0, 0.0, 1.0]])
