"""Timesteps and trajectories as code written for the original system uses them: `amago.hindsight`."""

import gymnasium as gym
import numpy as np
import pytest
from messages import naming

from amago.envs import AMAGOEnv
from amago.hindsight import FrozenTraj, NoOpRelabeler, Relabeler, Timestep, Trajectory, split_batched_timestep


def timestep(b=2, t=3):
    rows = np.arange(b)
    return Timestep(
        {"x": np.arange(b * 2, dtype=np.float32).reshape(b, 2)},
        np.eye(4, dtype=np.uint8)[(rows + 1) % 4],
        (rows + 10).astype(np.float32),
        np.full(b, t),
        rows % 2 == 1,
        b,
    )


def test_what_the_policy_takes():
    obs, rl2, time = timestep().as_input()
    assert obs["x"].shape == (2, 2)
    assert rl2.dtype == np.float32
    assert rl2.tolist() == [[10.0, 0, 1, 0, 0], [11.0, 0, 0, 1, 0]]
    assert time.tolist() == [[3], [3]]


def test_the_reset_version_keeps_the_observation():
    before = timestep()
    after = before.create_reset_version(np.array([False, True]))
    assert after.obs["x"] is before.obs["x"]
    assert after.reward.tolist() == [10.0, 0.0]
    assert after.time_idx.tolist() == [3, 0]
    assert after.terminal.tolist() == [False, False]
    assert after.prev_action.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]
    assert before.reward.tolist() == [10.0, 11.0], "the timestep itself does not change"
    with pytest.raises(ValueError, match=naming("reset_idxs", (3,), 2)):
        before.create_reset_version(np.zeros(3, bool))


def test_rows_of_a_timestep():
    rows = split_batched_timestep(timestep())
    assert [r.batched_envs for r in rows] == [1, 1]
    assert rows[1].obs["x"].tolist() == [[2.0, 3.0]]
    assert rows[1].reward.tolist() == [11.0]
    assert rows[1].prev_action.shape == (1, 4)


def rollout(n=5):
    env = AMAGOEnv(gym.make("CartPole-v1"), "cartpole")
    traj = Trajectory(timesteps=[env.reset(seed=0)[0]])
    for i in range(n):
        traj.add_timestep(env.step(i % 2)[0])
    return traj


def test_a_trajectory_of_timesteps():
    traj = rollout()
    assert len(traj) == 6
    assert traj.total_return == 5.0
    assert traj[0].time_idx[0] == 0
    assert traj[-1].time_idx[0] == 5
    obs, rl2s, time = traj.as_input_sequence()
    assert (obs["observation"].shape, rl2s.shape, time.shape) == ((1, 6, 4), (1, 6, 3), (1, 6, 1))
    frozen = traj.freeze()
    frozen.validate()
    assert len(frozen) == 5
    assert frozen.actions.argmax(axis=1).tolist() == [0, 1, 0, 1, 0]
    assert (frozen.rews == 1).all()
    np.testing.assert_array_equal(frozen.rl2s, rl2s[0])
    assert (frozen.dones.dtype, frozen.actions.dtype, frozen.time_idxs.dtype) == (bool, np.float32, np.int64)


def test_wrong_timesteps_are_refused():
    with pytest.raises(TypeError, match=naming("timestep", "dict")):
        Trajectory([{}])
    with pytest.raises(ValueError, match=naming(2, "split_batched_timestep")):
        Trajectory().add_timestep(timestep())
    with pytest.raises(ValueError, match=naming(1)):
        Trajectory([timestep(b=1)]).freeze()
    with pytest.raises(ValueError, match="no timestep"):
        Trajectory().as_input_sequence()
    with pytest.raises(TypeError, match=naming("TrajectoryBuilder")):
        Trajectory(AMAGOEnv(gym.make("CartPole-v1")).action_spec)


@pytest.mark.parametrize("save_as", ["npz", "npz-compressed"])
def test_files(tmp_path, save_as):
    traj = rollout()
    traj.save_to_disk(tmp_path / "cartpole_0a1b2c3d_17.npz", save_as=save_as)
    with np.load(tmp_path / "cartpole_0a1b2c3d_17.npz", allow_pickle=False) as file:
        assert set(file) == {"rl2s", "time_idxs", "rews", "dones", "actions", "_OBS_KEY_observation"}
        again = FrozenTraj.from_dict(file)
    for name, array in traj.freeze().to_dict().items():
        np.testing.assert_array_equal(array, again.to_dict()[name], err_msg=name)
    with pytest.raises(ValueError, match=naming("save_as", "'trajectory'", "npz", "pickles")):
        traj.save_to_disk(tmp_path / "x.traj", save_as="trajectory")


def test_dicts_of_arrays():
    d = rollout().freeze().to_dict()
    with pytest.raises(ValueError, match=naming("missing", "rews")):
        FrozenTraj.from_dict({k: v for k, v in d.items() if k != "rews"})
    with pytest.raises(ValueError, match=naming("unknown", "mine")):
        FrozenTraj.from_dict(d | {"mine": np.zeros(1)})


def test_relabelers_change_in_place_and_drop_keys():
    class Dropping(Relabeler):
        def relabel(self, traj):
            traj.rews[:] = 7.0
            traj.obs["extra"] = traj.obs["observation"] * 2
            del traj.obs["observation"]
            return traj

    out = Dropping()(rollout().freeze())
    assert list(out.obs) == ["extra"]
    assert (out.rews == 7).all()
    traj = rollout().freeze()
    assert NoOpRelabeler()(traj) is traj
