import tempfile

import numpy as np
import torch

import amago
from amago.hindsight import FrozenTraj, Timestep, Trajectory


def timestep(i, terminal=False):
    return Timestep(
        obs={"observation": np.full((1, 2), i, np.float32)}, prev_action=np.array([[0.0, float(i > 0)]], np.float32),
        reward=np.array([float(i)], np.float32), time_idx=np.array([i]), terminal=np.array([terminal]), batched_envs=1,
    )  # fmt: skip


def frozen(T=5, start=0):
    actions = np.eye(2, dtype=np.float32)[np.arange(T) % 2]
    rews = np.ones((T, 1), np.float32)
    return FrozenTraj(
        obs={"observation": np.zeros((T + 1, 3), np.float32)}, rl2s=np.concatenate((np.zeros((1, 3)), np.concatenate((rews, actions), 1))).astype(np.float32),
        time_idxs=np.arange(start, start + T + 1)[:, None], rews=rews, dones=np.eye(T, dtype=bool)[-1:].T, actions=actions,
    )  # fmt: skip


def rldata(T):
    actions = torch.nn.functional.one_hot(torch.arange(T) % 2, 2).float()
    return amago.loading.RLData(
        obs={"observation": torch.zeros(T + 1, 3), "id": torch.zeros(T + 1, 1, dtype=torch.int32)}, rews=torch.arange(T)[:, None].float(),
        dones=torch.zeros(T, 1, dtype=torch.bool), actions=actions, time_idxs=torch.arange(T + 1)[:, None],
    )  # fmt: skip


# fact: timesteps become the policy's input, and have a version of a reset
t = timestep(3)
obs, rl2, time = t.as_input()
assert (rl2.dtype, rl2.tolist(), time.tolist()) == (np.float32, [[3.0, 0.0, 1.0]], [[3]])
reset = t.create_reset_version(np.array([True]))
assert reset.obs["observation"].tolist() == [[3.0, 3.0]]
assert reset.as_input()[1].tolist() == [[0.0, 0.0, 0.0]]
assert [s.reward.shape for s in amago.hindsight.split_batched_timestep(t)] == [(1,)]

# fact: trajectories of timesteps
traj = Trajectory(timesteps=[timestep(0)])
traj.add_timestep(timestep(1))
traj.add_timestep(timestep(2, True))
obs, rl2s, time = traj.as_input_sequence()
assert (obs["observation"].shape, rl2s.shape, time.shape) == ((1, 3, 2), (1, 3, 3), (1, 3, 1))
assert traj.total_return == 3.0
assert len(traj) >= 2
assert traj[1].time_idx.tolist() == [1]
assert len(traj.freeze().rews) == 2
root = tempfile.mkdtemp()
traj.save_to_disk(f"{root}/t.npz", save_as="npz")
assert amago.loading.load_traj_from_disk(f"{root}/t.npz").rews.ravel().tolist() == [1.0, 2.0]

# fact: frozen trajectories are dicts of arrays
d = frozen().to_dict()
assert "_OBS_KEY_observation" in d
again = FrozenTraj.from_dict(d)
assert again.actions.tolist() == frozen().actions.tolist()


# fact: batches are padded with 4.0, from which masks follow
from amago.loading import MAGIC_PAD_VAL, Batch, RLData_pad_collate

assert MAGIC_PAD_VAL == 4.0
batch = RLData_pad_collate([rldata(2), rldata(5)])
assert isinstance(batch, Batch)
assert (~(batch.rl2s == 4).all(-1)).sum(1).tolist() == [3, 6]
assert batch.obs["id"][0, -1].tolist() == [4]
assert bool(batch.dones[0, -1])
assert batch.to("cpu") is batch
