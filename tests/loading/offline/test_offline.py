"""Recordings of others: every number where it belongs, exact targets at every kind of end, and refusals that say why."""

import gymnasium as gym
import numpy as np
import pytest
import recordings as rec
import torch
from messages import check_refused, naming, refused

from amago import ops
from amago.loading import (
    ArrayDataset,
    D4RLDataset,
    DatasetSettings,
    DiskTrajDataset,
    MinariDataset,
    MixtureOfDatasets,
    SequenceLoader,
)
from amago.loading.offline.arrays import read_npz
from amago.loading.offline.minari import export

h5py = pytest.importorskip("h5py")
minari = pytest.importorskip("minari")


@pytest.fixture(autouse=True)
def minari_root(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def arrays(tmp_path, episodes, **options):
    return ArrayDataset(**rec.rows(episodes, **options), action_space=rec.ACT)


def d4rl(tmp_path, episodes, max_episode_steps=None, **options):
    path = rec.write_hdf5(tmp_path / "d.hdf5", episodes, **options)
    return D4RLDataset(path, max_episode_steps)


def from_minari(tmp_path, episodes, in_memory=True):
    rec.write_minari("test/counting-v0", episodes)
    return MinariDataset("test/counting-v0", in_memory=in_memory)


def imported(tmp_path, episodes):
    """Copied into a run's buffer."""
    from_minari(tmp_path, episodes, in_memory=False).copy_to(tmp_path / "run" / "buffer" / "protected")
    return DiskTrajDataset(tmp_path, "run")


def exported(tmp_path, episodes):
    """Written as a Minari dataset by us."""
    source = arrays(tmp_path, episodes, next_observations=True).source
    assert export(source, source.obs_space, source.action_spec, "test/ours-v0") == len(episodes)
    return MinariDataset("test/ours-v0")


def mixture(tmp_path, episodes):
    return MixtureOfDatasets(
        [from_minari(tmp_path, episodes[:3]), d4rl(tmp_path, episodes[3:], next_observations=True)], [0.4, 0.6]
    )


SOURCES = {
    "arrays": (lambda p, e: arrays(p, e), False),
    "arrays with next observations": (lambda p, e: arrays(p, e, next_observations=True), True),
    "d4rl": (lambda p, e: d4rl(p, e), False),
    "d4rl with next observations": (lambda p, e: d4rl(p, e, next_observations=True), True),
    "d4rl without timeouts": (lambda p, e: d4rl(p, e, rec.LIMIT, timeouts=False), False),
    "d4rl without timeouts, with next observations": (lambda p, e: d4rl(p, e, timeouts=False, next_observations=True), True),
    "minari": (from_minari, True),
    "minari from disk": (lambda p, e: from_minari(p, e, in_memory=False), True),
    "imported": (imported, True),
    "exported": (exported, True),
    "mixture": (mixture, True),
}


def value(obs):
    """V of an observation [episode, t], in float64: another number for each."""
    return torch.sin(3.0 * obs[..., :1].double()) + 0.1 * obs[..., 1:].double() ** 2


def oracle(episode, t, last, n, gamma):
    """The target at step t of an episode in a sequence whose last observation is the one at time ``last``."""
    y, discount = 0.0, 1.0
    for k in range(t, min(t + n, last)):
        y += discount * float(episode.rewards[k])
        discount *= gamma
        if episode.terminated and k == len(episode) - 1:
            return y
    end = min(t + n, last)
    return y + discount * (np.sin(3.0 * episode.number) + 0.1 * end**2)


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_every_transition_and_its_exact_target(tmp_path, name):
    make, complete = SOURCES[name]
    episodes = rec.record()
    dataset = make(tmp_path, episodes)
    dataset.configure(DatasetSettings(4, "both"))
    assert dataset.ready_for_training
    gamma, seen = 0.9, set()
    for batch in SequenceLoader(dataset, batch_size=16, seed=1).batches(15):
        obs, mask = batch.obs["observation"], batch.transition_mask
        targets = {
            n: ops.n_step_return(batch.rews.double(), batch.dones, value(obs[:, 1:]), torch.tensor(gamma).double(), mask, n=n)
            for n in (1, 3)
        }
        for b in range(len(obs)):
            steps = int(mask[b].sum())
            first = int(batch.time_idxs[b, 0])
            episode = episodes[int(obs[b, 0, 0])]
            for i in range(steps):
                t = first + i
                seen.add((episode.number, t))
                assert obs[b, i].tolist() == [episode.number, t]
                assert batch.actions[b, i].item() == rec.action(episode.number, t)
                assert batch.rews[b, i].item() == episode.rewards[t]
                before = [0.0, 0.0] if t == 0 else [episode.rewards[t - 1], rec.action(episode.number, t - 1)]
                assert batch.rl2s[b, i].tolist() == before
                for n, target in targets.items():
                    assert target[b, i].item() == pytest.approx(oracle(episode, t, first + steps, n, gamma), abs=1e-6)
            assert batch.rl2s[b, steps].tolist() == [
                episode.rewards[first + steps - 1],
                rec.action(episode.number, first + steps - 1),
            ]
    # a cut episode whose last observation was not recorded lacks the step that led to it
    lost = {(e.number, len(e) - 1) for e in episodes if not e.terminated and not complete}
    assert seen == {(e.number, t) for e in episodes for t in range(len(e))} - lost


def test_a_time_limit_without_timeouts_is_counted_from_each_termination(tmp_path):
    episodes = [rec.Episode(i, np.ones(n, np.float32), n != 6, n == 6) for i, n in enumerate([2, 6, 6, 5, 6])]
    dataset = d4rl(tmp_path, episodes, rec.LIMIT, timeouts=False)
    assert dataset.source.lengths.tolist() == [2, 5, 5, 5, 5]
    unlimited = D4RLDataset(tmp_path / "d.hdf5", float("inf"))
    assert unlimited.source.lengths.tolist() == [2, 17, 5]


def test_dicts_images_and_discrete_actions_come_back_from_minari(tmp_path):
    obs_space = gym.spaces.Dict(
        {
            "image": gym.spaces.Box(0, 255, (4, 4, 3), np.uint8),
            "inner": gym.spaces.Dict({"where": gym.spaces.Discrete(3)}),
            "note": gym.spaces.Text(5),
        }
    )
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (3, 4, 4, 3)).astype(np.uint8)
    from minari.data_collector import EpisodeBuffer

    episode = EpisodeBuffer(
        observations={"image": images, "inner": {"where": np.array([0, 2, 1])}, "note": ["a", "b", "c"]},
        actions=np.array([5, 7]), rewards=[1.0, 2.0], terminations=[False, False], truncations=[False, True],
    )  # fmt: skip
    rec.write_buffers("test/mixed-v0", [episode], obs_space, gym.spaces.Discrete(3, start=5))
    with refused(TypeError, "observation 'note' has space Text"):
        _ = MinariDataset("test/mixed-v0").source
    dataset = MinariDataset("test/mixed-v0", obs_keys=["image", "inner"], env_name="mixed")
    traj = dataset.source.read(0)
    np.testing.assert_array_equal(traj.obs["image"], images)
    np.testing.assert_array_equal(traj.obs["inner/where"], [[1, 0, 0], [0, 0, 1], [0, 1, 0]])
    np.testing.assert_array_equal(traj.actions, [[0], [2]])
    assert (traj.env_name, traj.dones.any()) == ("mixed", False)
    # and once around through our own export, which stores images as they are
    source = dataset.source
    export(source, source.obs_space, source.action_spec, "test/around-v0")
    again = MinariDataset("test/around-v0").source.read(0)
    np.testing.assert_array_equal(again.obs["image"], images)
    np.testing.assert_array_equal(again.actions, traj.actions)
    assert minari.load_dataset("test/around-v0")[0].actions.tolist() == [5, 7]
    assert minari.load_dataset("test/around-v0")[0].truncations.tolist() == [False, True]


def test_actions_are_scaled_by_their_space_and_cut_to_it(tmp_path, caplog):
    rows = rec.rows(rec.record()) | {"actions": np.full((31, 1), 3.0)}
    rows["actions"][0] = 4.5
    source = ArrayDataset(**rows, action_space=gym.spaces.Box(0.0, 4.0, (1,), np.float32)).source
    assert source.read(0).actions[:2, 0].tolist() == [1.0, 0.5]
    assert "1 actions were outside of Box(0.0, 4.0" in caplog.text


def test_npz_files_have_the_same_arrays_by_any_usual_name(tmp_path):
    episodes = rec.record()
    np.savez(tmp_path / "a.npz", **rec.rows(episodes, truncations="timeouts", terminations="terminals"))
    one = ArrayDataset(**read_npz(tmp_path / "a.npz"), action_space=rec.ACT).source
    rows = rec.rows(episodes)
    np.savez(tmp_path / "b.npz", **{"observations/s": rows.pop("observations")}, **rows)
    two = ArrayDataset(**read_npz(tmp_path / "b.npz"), action_space=rec.ACT).source
    assert one.lengths.tolist() == two.lengths.tolist()
    np.testing.assert_array_equal(one.read(1).obs["observation"], two.read(1).obs["s"])
    np.savez(tmp_path / "c.npz", observations=rows["rewards"], x=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match=r"c\.npz cannot be read as an \.npz file of plain arrays"):
        read_npz(tmp_path / "c.npz")
    np.savez(tmp_path / "d.npz", observations=rows["rewards"])
    with pytest.raises(ValueError, match=r"d\.npz lacks actions, rewards, terminations; it has \['observations'\]"):
        read_npz(tmp_path / "d.npz")


UNIT, BYTES = gym.spaces.Box(0, 1, (2,), np.float32), gym.spaces.Box(0, 255, (2,), np.uint8)
PIXELS = gym.spaces.Box(0, 255, (2,), np.float32)


def pixels(space):
    """A recording of one episode with such observations."""
    return ArrayDataset(
        **rec.rows([rec.Episode(0, np.ones(4, np.float32), True, False)])
        | {"observations": np.zeros((4, 2), space.dtype), "next_observations": np.zeros((4, 2), space.dtype)},
        action_space=rec.ACT,
        observation_space=space,
    )


@pytest.mark.parametrize(
    ("recorded", "wanted", "message"),
    [
        (BYTES, UNIT, r"uint8 \(2,\) from 0 to 255, but the environment has float32 \(2,\) from 0 to 1"),
        (UNIT, BYTES, r"float32 \(2,\) from 0 to 1, but the environment has uint8 \(2,\) from 0 to 255"),
        (PIXELS, UNIT, r"float32 \(2,\) from 0 to 255, but the environment has float32 \(2,\) from 0 to 1"),
    ],
    ids=["bytes for reals", "reals for bytes", "range"],
)
def test_other_dtypes_and_ranges_are_refused(tmp_path, recorded, wanted, message):
    wanted = gym.spaces.Dict({"observation": wanted})
    message += ": convert the recorded numbers, or wrap the environment"
    dataset = pixels(recorded)
    with pytest.raises(ValueError, match=message):
        dataset.check_spaces(wanted, rec.ACT)
    dataset.copy_to(tmp_path / "run" / "buffer" / "protected")
    disk = DiskTrajDataset(tmp_path, "run")
    disk.configure(DatasetSettings(4))
    with pytest.raises(ValueError, match=message):
        disk.check_spaces(wanted, rec.ACT)
    disk.check_spaces(gym.spaces.Dict({"observation": recorded}), rec.ACT)


def test_files_of_other_spaces_that_come_later_are_refused(tmp_path):
    """A learner whose buffer is empty at the start knows the spaces of its files only when they come."""
    disk = DiskTrajDataset(tmp_path, "run")
    disk.configure(DatasetSettings(4))
    disk.check_spaces(gym.spaces.Dict({"observation": UNIT}), rec.ACT)
    pixels(UNIT).copy_to(tmp_path / "run" / "buffer" / "fifo", "a")
    assert disk.on_end_of_collection()["trajectories"] == 1
    pixels(BYTES).copy_to(tmp_path / "run" / "buffer" / "fifo", "b")
    with refused(ValueError, "uint8"):
        disk.on_end_of_collection()


def test_hostile_hdf5_files_are_refused(tmp_path):
    with h5py.File(tmp_path / "huge.hdf5", "w") as file:
        for name in ("observations", "actions", "rewards", "terminals"):
            file.create_dataset(name, shape=(1 << 42,), dtype="f8", chunks=True)
    with pytest.raises(ValueError, match=r"declares \d+ bytes of data, but has only"):
        _ = D4RLDataset(tmp_path / "huge.hdf5").source
    rec.write_hdf5(tmp_path / "other.hdf5", rec.record())
    with h5py.File(tmp_path / "links.hdf5", "w") as file:
        for name in ("observations", "actions", "rewards", "terminals"):
            file[name] = h5py.ExternalLink(str(tmp_path / "other.hdf5"), name)
    with refused(ValueError, "lacks observations, actions, rewards, terminations"):
        _ = D4RLDataset(tmp_path / "links.hdf5").source


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("damage", ["short", "missing", "infinite"])
def test_a_damaged_episode_is_left_out_and_named(tmp_path, caplog, in_memory, damage):
    rec.write_minari("test/counting-v0", rec.record())
    lengths = list(MinariDataset("test/counting-v0").source.lengths)
    (file,) = (tmp_path / "minari").rglob("main_data.hdf5")
    with h5py.File(file, "a") as f:
        group = f["episode_1"]
        rows = group["observations"][()]
        del group["observations"]
        if damage != "missing":
            group["observations"] = rows[:-1] if damage == "short" else np.where(rows == rows, np.inf, rows)
    with pytest.raises(ValueError, match=r"episode 1|observations") as refusal:
        list(MinariDataset("test/counting-v0", in_memory=True).source)
    assert "skip_damaged=True" in str(refusal.value)
    dataset = MinariDataset("test/counting-v0", in_memory=in_memory, skip_damaged=True)
    assert list(dataset.source.lengths) == [lengths[0], *lengths[2:]]
    assert [len(traj) for traj in dataset.source] == [lengths[0], *lengths[2:]]
    assert "episode 1" in caplog.text
    assert list(dataset.damaged) == ["the Minari dataset test/counting-v0, episode 1"]
    assert "1 damaged" in dataset.describe()
    assert dataset.copy_to(tmp_path / "buffer") == len(lengths) - 1


def test_rows_that_are_damaged_are_left_out_of_arrays_and_files(tmp_path, caplog):
    rows = {
        "observations": np.zeros((6, 1), np.float32), "actions": np.zeros((6, 1), np.float32), "rewards": np.arange(6.0),
        "terminations": np.array([0, 1, 0, 1, 0, 1], bool),
    }  # fmt: skip
    rows["rewards"][2] = np.nan
    box = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    with pytest.raises(ValueError, match=r"rows 2 to 3.*skip_damaged=True"):
        _ = ArrayDataset(**rows, action_space=box).source
    dataset = ArrayDataset(**rows, action_space=box, skip_damaged=True)
    assert [float(traj.rews[0, 0]) for traj in dataset.source] == [0.0, 4.0]
    assert "rows 2 to 3" in caplog.text
    with h5py.File(tmp_path / "d.hdf5", "w") as file:  # with the names of other collections
        for name, value in rows.items():
            file["dones" if name == "terminations" else name] = value
    from_file = D4RLDataset(tmp_path / "d.hdf5", float("inf"), skip_damaged=True)
    assert [float(traj.rews[0, 0]) for traj in from_file.source] == [0.0, 4.0]
    assert len(from_file.damaged) == 1


def test_recordings_that_do_not_fit_are_refused_by_name(tmp_path):
    rows = rec.rows(rec.record())

    def arrays_with(space=rec.ACT, **changes):
        return ArrayDataset(**(rows | changes), action_space=space).source

    def spoilt(field, value):
        changed = rows[field].copy()
        changed[1] = value
        return arrays_with(**{field: changed})

    choices, box = np.array([0, 1, 3] + [0] * 28), gym.spaces.Box(-2.0, 2.0, (1,), np.float32)
    data, obs = arrays(tmp_path, rec.record()), gym.spaces.Dict({"observation": rec.OBS})
    data.check_spaces(obs, rec.ACT)
    check_refused(
        ValueError,
        (naming("rows 0 to 2", "observations['observation']", "step 1"), lambda: spoilt("observations", np.nan)),
        (naming("rows 0 to 2", "rewards", "step 1"), lambda: spoilt("rewards", np.inf)),
        (naming("rows 0 to 2", "actions", "step 1"), lambda: spoilt("actions", np.nan)),
        (naming("actions", 30, 31), lambda: arrays_with(actions=rows["actions"][:-1])),
        (naming("action[2, 0]", 3), lambda: arrays_with(gym.spaces.Discrete(3), actions=choices)),
        (naming("3 actions of Box(-1.0, 1.0, (2,), float32)"), lambda: arrays_with(gym.spaces.Box(-1, 1, (2,)))),
        ("no trajectory of at least one transition", lambda: arrays_with(**{k: v[:1] for k, v in rows.items()})),
        (naming("ArrayDataset has observations", "'x'"), lambda: data.check_spaces(gym.spaces.Dict({"x": rec.OBS}), rec.ACT)),
        (naming("Box(-1.0, 1.0, (1,), float32)", "Discrete(2)"), lambda: data.check_spaces(obs, gym.spaces.Discrete(2))),
        ("two different actions", lambda: data.check_spaces(obs, box)),
    )


def test_files_that_lack_something_are_refused_by_name(tmp_path):
    (tmp_path / "text.hdf5").write_text("no HDF5")
    with h5py.File(tmp_path / "few.hdf5", "w") as file:
        file["observations"] = np.zeros((3, 2))
    rows = rec.rows(rec.record(), truncations="timeouts", terminations="terminals")
    with h5py.File(tmp_path / "far.hdf5", "w") as file:
        for name, a in (rows | {"actions": rows["actions"] * 5}).items():
            file[name] = a
    rec.write_minari("test/counting-v0", rec.record())
    metadata = tmp_path / "minari" / "test" / "counting-v0" / "data" / "metadata.json"
    assert len(MinariDataset(metadata.parents[1])) == len(MinariDataset(metadata.parent)) == 7

    def broken(text):
        metadata.write_text(text)
        return MinariDataset("test/counting-v0").source

    check_refused(
        ValueError,
        (
            naming("timeouts", "next_observations", "max_episode_steps"),
            lambda: d4rl(tmp_path, rec.record(), timeouts=False).source,
        ),
        (naming("max_episode_steps", 0), lambda: D4RLDataset("x.hdf5", 0)),
        (naming("there is no file"), lambda: D4RLDataset(tmp_path / "x.hdf5").source),
        (naming("text.hdf5", "HDF5"), lambda: D4RLDataset(tmp_path / "text.hdf5").source),
        (
            naming("few.hdf5", "actions, rewards, terminations", ["observations"]),
            lambda: D4RLDataset(tmp_path / "few.hdf5").source,
        ),
        (naming("actions", (31, 1), "action_space"), lambda: D4RLDataset(tmp_path / "far.hdf5").source),
        (naming("'a/b-v0'", "data/metadata.json"), lambda: MinariDataset("a/b-v0").source),
        (naming("obs_keys", "'x'"), lambda: MinariDataset("a/b-v0", obs_keys="x")),
        (naming("obs_keys", ["x"]), lambda: MinariDataset("test/counting-v0", obs_keys=["x"]).source),
        (naming("observation_space, action_space"), lambda: broken('{"dataset_id": "test/counting-v0", "env_spec": "{}"}')),
        (naming("metadata.json", "cannot be read"), lambda: broken("{")),
    )
    wide = gym.spaces.Box(-5.0, 5.0, (1,), np.float32)
    found = D4RLDataset(tmp_path / "far.hdf5", action_space=wide).source.read(0).actions
    assert found[1, 0] == pytest.approx(rec.action(0, 1))
