"""Buffers of the original system: read where they lie, mixed with ours, never moved, never deleted; imported on request."""

import hashlib
import pickle
import sys
import types

import gymnasium as gym
import numpy as np
import original_files as of
import pytest
import tiny
import torch
from messages import naming
from run_inside import refusal

from amago.cli import main
from amago.hindsight import FrozenTraj
from amago.loading import DatasetSettings, DiskTrajDataset, OriginalDataset, get_path_to_trajs, load_traj_from_disk
from amago.store import PickleRefusedError

OBS = gym.spaces.Dict({"observation": gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)})
MANY = gym.spaces.Dict({
    "image": gym.spaces.Box(0, 255, (2, 2, 3), np.uint8), "on": gym.spaces.Box(0, 1, (2,), np.bool_),
    "tokens": gym.spaces.Box(0, 99, (4,), np.int32), "x/y": gym.spaces.Box(-9, 9, (2,), np.float32),
})  # fmt: skip
SPACES = {
    "discrete": (gym.spaces.Discrete(4), lambda rng, t: of.one_hot(rng.integers(0, 4, t), 4)),
    "continuous": (gym.spaces.Box(-2.0, 2.0, (2,), np.float32), lambda rng, t: rng.uniform(-1, 1, (t, 2)).astype(np.float32)),
    "bits": (gym.spaces.MultiBinary(3), lambda rng, t: rng.integers(0, 2, (t, 3)).astype(np.float32)),
}


def many_keys(rng, t):
    return {
        "image": rng.integers(0, 256, (t + 1, 2, 2, 3)).astype(np.uint8), "on": rng.integers(0, 2, (t + 1, 2)).astype(bool),
        "tokens": rng.integers(0, 99, (t + 1, 4)).astype(np.int32), "x/y": rng.uniform(-9, 9, (t + 1, 2)).astype(np.float32),
    }  # fmt: skip


def fill(root, kind="discrete", lengths=(20, 5, 9), part="fifo", start=0, **options):
    """Files of the original; returns their arrays by path."""
    _, draw = SPACES[kind]
    files = {}
    for i, t in enumerate(lengths):
        content = of.arrays(draw(np.random.default_rng(i), t), seed=i, start=start, obs=options.get("obs"))
        files[of.write(root / "d" / "buffer" / part, content, i, save=options.get("save", np.savez))] = content
    return files


def opened(root, space=SPACES["discrete"][0], obs=OBS, max_seq_len=100, **options):
    dataset = DiskTrajDataset(root, "d", **options)
    dataset.configure(DatasetSettings(max_seq_len))
    dataset.check_spaces(obs, space)
    return dataset


def digests(root):
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in root.rglob("*.npz")}


def assert_is(sample, content, start, n):
    """A training sequence is transitions [start, start + n) of the arrays of a file."""
    for name, more in (("rl2s", 1), ("time_idxs", 1), ("rews", 0), ("dones", 0), ("actions", 0)):
        np.testing.assert_array_equal(getattr(sample, name), content[name][start : start + n + more], err_msg=name)
    for key, value in sample.obs.items():
        want = content[f"_OBS_KEY_{key}"][start : start + n + 1]
        assert value.numpy().dtype == want.dtype
        np.testing.assert_array_equal(value, want, err_msg=key)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("start", [0, 7])
def test_every_number_is_what_the_file_holds(tmp_path, kind, save, start):
    files = fill(tmp_path, kind, save=save, start=start)
    dataset, rng, seen = opened(tmp_path, SPACES[kind][0], max_seq_len=6), np.random.default_rng(0), set()
    by_reward = {r: (c, i) for c in files.values() for i, r in enumerate(c["rews"][:, 0].tolist())}
    for _ in range(60):
        sample = dataset.sample_random_trajectory(rng)
        content, at = by_reward[sample.rews[0, 0].item()]
        assert_is(sample, content, at, len(sample))
        seen.add(len(content["rews"]))
    assert seen == {20, 5, 9}


def test_observations_keep_their_keys_and_dtypes(tmp_path):
    [content] = fill(tmp_path, lengths=[8], obs=many_keys).values()
    dataset = opened(tmp_path, obs=MANY)
    assert_is(dataset.sample_random_trajectory(np.random.default_rng(0)), content, 0, 8)
    batch = dataset.sample_batch(np.random.default_rng(0), 2)
    assert {k: v.dtype for k, v in batch.obs.items()} == {
        "image": torch.uint8, "on": torch.bool, "tokens": torch.int32, "x/y": torch.float32
    }  # fmt: skip


def cartpole_files(root):
    def obs(rng, t):
        return {"observation": rng.uniform(-1, 1, (t + 1, 4)).astype(np.float32)}

    files = []
    for i in range(6):
        actions = of.one_hot(np.random.default_rng(i).integers(0, 2, 12), 2)
        content = of.arrays(actions, seed=i, obs=obs)
        files.append(of.write(root / "d" / "buffer" / "fifo", content, i, env="CartPole"))
    return files


def test_a_run_trains_on_them_beside_its_own_and_leaves_them_alone(tmp_path):
    files = cartpole_files(tmp_path)
    before = digests(tmp_path)
    e = tiny.learned(
        tmp_path, tiny.cartpole, dataset=DiskTrajDataset(tmp_path, "d", dset_max_size=4), max_seq_len=30, epochs=3,
        train_timesteps_per_epoch=60,
    )  # fmt: skip
    assert digests(tmp_path).items() >= before.items()  # more files than dset_max_size=4 allows
    store = e.dataset.store
    assert sorted({store.env_name(i) for i in range(len(store))}) == ["CartPole"]
    assert sum(store.view().path(i).endswith(f.name) for i in range(len(store)) for f in files) == 6
    own = [store.view().path(i) for i in range(len(store)) if not store.view().path(i).endswith(tuple(f.name for f in files))]
    assert own
    assert len(tiny.rows(e.run_dir, "train")) >= 3
    e.dataset.delete(delete_protected=True, delete_quarantine=True)
    assert digests(tmp_path).items() >= before.items()
    assert not (tmp_path / "d" / "buffer" / "quarantine").exists()


@pytest.mark.parametrize(
    ("space", "obs", "words"),
    [
        (gym.spaces.Discrete(5), OBS, ("4 wide", "5 wide")),
        (gym.spaces.Discrete(4), MANY, ("observation",)),
        (gym.spaces.Discrete(4), gym.spaces.Dict(observation=gym.spaces.Box(-1, 1, (2,))), ("observation", "(3,)", "(2,)")),
        (gym.spaces.MultiDiscrete([2, 2]), OBS, ("actions",)),
    ],
)
def test_files_of_another_environment_are_refused_with_the_reason(tmp_path, space, obs, words):
    files = fill(tmp_path)
    dataset = DiskTrajDataset(tmp_path, "d")
    dataset.configure(DatasetSettings(4))
    with pytest.raises(ValueError, match=naming("does not fit the environment", *words)):
        dataset.check_spaces(obs, space)
    assert all(path.exists() for path in files)


BAD = {
    "no time": lambda c: c | {"time_idxs": np.zeros_like(c["time_idxs"])},
    "too few rewards": lambda c: c | {"rews": c["rews"][:-1]},
    "no transitions": lambda c: {k: v[: len(v) - len(c["rews"])] for k, v in c.items()},
    "an unknown array": lambda c: c | {"more": np.zeros(3)},
}


@pytest.mark.parametrize("bad", BAD)
def test_one_that_cannot_be_read_stays_where_it_is(tmp_path, bad, caplog):
    [content] = fill(tmp_path, lengths=[6]).values()
    path = of.write(tmp_path / "d" / "buffer" / "protected", BAD[bad](content), 77)
    dataset = opened(tmp_path)
    assert len(dataset.store) == 1
    assert [str(path)] == list(dataset.refused_files())
    assert path.exists()
    assert "is skipped" in caplog.text


def test_new_files_are_found_and_a_stranger_among_them_does_not_end_the_run(tmp_path):
    fill(tmp_path, lengths=[6])
    dataset = opened(tmp_path)
    fill(tmp_path, "continuous", lengths=[5], part="protected")
    fill(tmp_path, lengths=[6, 8])
    dataset.on_end_of_collection()
    assert sorted(dataset.store.lengths.tolist()) == [6, 8]
    [reason] = dataset.refused_files().values()
    assert "2 wide" in reason


def test_single_files(tmp_path):
    [(path, content)] = fill(tmp_path, "continuous", lengths=[6]).items()
    traj = load_traj_from_disk(str(path))
    assert isinstance(traj, FrozenTraj)
    for name in ("rl2s", "time_idxs", "rews", "dones", "actions"):
        np.testing.assert_array_equal(getattr(traj, name), content[name])
    assert get_path_to_trajs(str(tmp_path), "d", True) == str(tmp_path / "d" / "buffer" / "fifo")
    assert get_path_to_trajs(str(tmp_path), "d", False) == str(tmp_path / "d" / "buffer" / "protected")
    damaged = tmp_path / "x_00000000_1.npz"
    damaged.write_bytes(b"")
    with pytest.raises(ValueError, match=naming(str(damaged))):
        load_traj_from_disk(damaged)


def imported(root):
    dataset = DiskTrajDataset(root, "new")
    dataset.configure(DatasetSettings(100))
    return dataset


def test_import_writes_our_own_files(tmp_path, capsys):
    files = fill(tmp_path)
    code = main(["buffer", "import", str(tmp_path / "d"), str(tmp_path / "new"), "--action-space", "discrete:4", "--quiet"])
    assert code == 0
    assert "imported 3 trajectories, 34 steps" in capsys.readouterr().out
    dataset = imported(tmp_path)
    dataset.check_spaces(OBS, SPACES["discrete"][0])
    assert all(p.suffix == ".safetensors" for p in (tmp_path / "new" / "buffer" / "protected").iterdir())
    by_length = {len(c["rews"]): c for c in files.values()}
    rng = np.random.default_rng(0)
    for _ in range(20):
        sample = dataset.sample_random_trajectory(rng)
        assert_is(sample, by_length[len(sample)], 0, len(sample))
    assert {dataset.store.env_name(i) for i in range(3)} == {"Env"}


def test_import_with_the_environments_spaces(tmp_path):
    cartpole_files(tmp_path)
    assert main(["buffer", "import", str(tmp_path / "d"), str(tmp_path / "new"), "--env", "CartPole-v1", "--quiet"]) == 0
    assert imported(tmp_path).store.action_spec(0).space == gym.spaces.Discrete(2)


def test_import_asks_for_what_the_files_do_not_say(tmp_path, capsys):
    fill(tmp_path)
    for to, space, said in (
        ("new", [], "--action-space"),
        ("d", ["--action-space", "discrete:4"], "sampled already"),
        ("new", ["--action-space", "discrete:5"], "5 wide"),
    ):
        assert said in refusal(capsys, "buffer", "import", str(tmp_path / "d"), str(tmp_path / to), *space)


def pickled(directory, content, number=0):
    """A ``.traj`` file, written by classes that have the original's names."""
    module = types.ModuleType("amago.hindsight")
    for name in ("Trajectory", "Timestep"):
        setattr(module, name, type(name, (), {"__module__": "amago.hindsight"}))
    steps = []
    for i in range(len(content["time_idxs"])):
        step = module.Timestep()
        step.__dict__ |= {
            "obs": {k[9:]: v[i : i + 1] for k, v in content.items() if k.startswith("_OBS_KEY_")}, "batched_envs": 1,
            "prev_action": content["rl2s"][i : i + 1, 1:], "reward": content["rl2s"][i, :1], "time_idx": content["time_idxs"][i],
            "terminal": np.concatenate(([[False]], content["dones"]))[i],
        }  # fmt: skip
        steps.append(step)
    traj = module.Trajectory()
    traj.timesteps = steps
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"Env_{number:08x}_1700000000.5.traj"
    there = sys.modules["amago.hindsight"]
    sys.modules["amago.hindsight"] = module
    try:
        path.write_bytes(pickle.dumps(traj))
    finally:
        sys.modules["amago.hindsight"] = there
    return path


class Evil:
    def __reduce__(self):
        return (open, (Evil.path, "w"))


def test_pickles_are_imported_on_request_alone_and_even_then_no_code_is_run(tmp_path, capsys):
    content = of.arrays(of.one_hot([0, 3, 1, 2, 2], 4))
    path = pickled(tmp_path / "old", content)
    Evil.path = str(tmp_path / "executed")
    (tmp_path / "old" / "Env_0000000f_1.5.traj").write_bytes(pickle.dumps({"obs": Evil()}))
    arguments = ["buffer", "import", str(tmp_path / "old"), str(tmp_path / "new"), "--action-space", "discrete:4", "--quiet"]
    said = refusal(capsys, *arguments)
    assert "any code" in said
    assert "--allow-pickle" in said
    assert main([*arguments, "--allow-pickle"]) == 0
    assert "skipped" in capsys.readouterr().err
    assert len(imported(tmp_path).store) == 1
    assert_is(imported(tmp_path).sample_random_trajectory(np.random.default_rng(0)), content, 0, 5)
    assert path.exists()
    with pytest.raises(PickleRefusedError):
        load_traj_from_disk(path)
    with pytest.raises(PickleRefusedError):
        OriginalDataset(tmp_path / "old", gym.spaces.Discrete(4)).load()
    assert not (tmp_path / "executed").exists()
