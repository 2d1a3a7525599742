"""Recordings of others: every number where it belongs, exact targets at every kind of end, and refusals that say why."""

import os
import sys

import gymnasium as gym
import numpy as np
import pytest
import recordings as rec
import torch
from tiny import experiment

from amago import ops
from amago.data.relabel import Relabeler
from amago.envs import AMAGOEnv
from amago.loading import (
    ArrayDataset,
    D4RLDataset,
    DatasetSettings,
    DiskTrajDataset,
    MinariDataset,
    MixtureOfDatasets,
    OfflineDataset,
    SequenceLoader,
)
from amago.loading.offline.arrays import read_npz
from amago.loading.offline.minari import export

h5py = pytest.importorskip("h5py")
minari = pytest.importorskip("minari")


@pytest.fixture(autouse=True)
def minari_root(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


# ---- the sources: a function (directory, episodes) -> data set, and whether it keeps the last step of a cut episode --------------


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
    """Written as a Minari data set by us."""
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


def test_terminations_end_episodes_whatever_else_is_known(tmp_path):
    both = d4rl(tmp_path, rec.record(), rec.LIMIT, timeouts=True)
    assert both.source.lengths.tolist() == [3, 5, 6, 1, 5, 5, 3]
    dones = [t.dones[-1, 0] for t in both.source]
    assert dones == [True, False, True, True, False, True, False]


# ---- kinds of observation and action ---------------------------------------------------------------------------------------------


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
    with pytest.raises(TypeError, match="observation 'note' has space Text"):
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


def test_a_dict_of_arrays_and_uint8(tmp_path):
    rows = rec.rows(rec.record(), next_observations=True)
    image = np.arange(len(rows["rewards"]), dtype=np.uint8)[:, None]
    for name in ("observations", "next_observations"):
        rows[name] = {"state": rows[name], "image": image}
    source = ArrayDataset(**rows, action_space=rec.ACT).source
    assert {k: s.dtype for k, s in source.obs_space.spaces.items()} == {"image": np.uint8, "state": np.float32}
    assert source.read(1).obs["image"].dtype == np.uint8
    np.testing.assert_array_equal(source.read(1).obs["image"][:, 0], [3, 4, 5, 6, 7, 8, 8])


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


# ---- sampling --------------------------------------------------------------------------------------------------------------------


def test_samples_do_not_depend_on_threads_or_on_where_the_data_lies(tmp_path):
    rec.write_minari("test/counting-v0", rec.record())

    def drawn(workers, **options):
        dataset = MinariDataset("test/counting-v0", **options)
        dataset.configure(DatasetSettings(4))
        loader = SequenceLoader(dataset, 3, workers=workers, seed=5)
        out = [b.rews.flatten().tolist() for b in loader.batches(8)]
        loader.close()
        return out

    reference = drawn(0)
    assert drawn(2) == reference
    assert drawn(2, in_memory=False) == reference


def test_a_relabeler_may_change_arrays_in_place_and_the_recording_stays(tmp_path):
    class Spoil(Relabeler):
        def relabel(self, traj):
            traj.obs["observation"][:] = -1
            traj.rews[:] = 7
            traj.dones[:] = False
            return traj

    dataset = ArrayDataset(**rec.rows(rec.record()), action_space=rec.ACT, relabeler=Spoil())
    dataset.configure(DatasetSettings(4))
    sample = dataset.sample_random_trajectory(np.random.default_rng(0))
    assert (sample.rews == 7).all()
    assert (sample.obs["observation"] == -1).all()
    for _ in range(20):
        dataset.sample_random_trajectory(np.random.default_rng(0))
    for traj, episode in zip(dataset.source, [e for e in rec.record() if len(e) > e.cut], strict=True):
        np.testing.assert_array_equal(traj.obs["observation"][:, 0], episode.number)
        np.testing.assert_array_equal(traj.rews[:, 0], episode.rewards[: len(traj)])
        assert traj.dones[-1, 0] == episode.terminated


def test_a_relabeler_gets_the_random_stream_of_the_batch(tmp_path):
    class Noise(Relabeler):
        def relabel_with(self, traj, rng):
            traj.rews = traj.rews * 0 + np.float32(rng.random())
            return traj

    dataset = ArrayDataset(**rec.rows(rec.record()), action_space=rec.ACT, relabeler=Noise())
    dataset.configure(DatasetSettings(4))
    draws = [SequenceLoader(dataset, 4, seed=3).draw(n).rews.flatten().tolist() for n in (0, 0, 1)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


def test_the_size_is_logged_and_nothing_is_collected(tmp_path):
    dataset = arrays(tmp_path, rec.record())
    assert dataset.on_end_of_collection() == {"trajectories": 7.0, "timesteps": 28.0}
    assert dataset.save_new_trajs_to is None
    assert len(dataset) == 7


# ---- refusals --------------------------------------------------------------------------------------------------------------------


def test_the_policys_spaces_are_compared(tmp_path):
    dataset = arrays(tmp_path, rec.record())
    obs = gym.spaces.Dict({"observation": rec.OBS})
    dataset.check_spaces(obs, rec.ACT)
    with pytest.raises(
        ValueError, match=r"ArrayDataset has observations \{'observation': \(2,\)\}, but the environment has \{'x'"
    ):
        dataset.check_spaces(gym.spaces.Dict({"x": rec.OBS}), rec.ACT)
    with pytest.raises(
        ValueError, match=r"has actions Box\(-1.0, 1.0, \(1,\), float32\), but the environment has Discrete\(2\)"
    ):
        dataset.check_spaces(obs, gym.spaces.Discrete(2))
    with pytest.raises(ValueError, match="would mean two different actions"):
        dataset.check_spaces(obs, gym.spaces.Box(-2.0, 2.0, (1,), np.float32))


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


def test_recordings_without_bounds_fit_environments_that_have_them():
    recording = pixels(rec.OBS)
    recording.check_spaces(gym.spaces.Dict({"observation": UNIT}), rec.ACT)
    recording.check_spaces(gym.spaces.Dict({"observation": PIXELS}), rec.ACT)
    pixels(UNIT).check_spaces(gym.spaces.Dict({"observation": rec.OBS}), rec.ACT)


def test_files_of_other_spaces_that_come_later_are_refused(tmp_path):
    """A learner whose buffer is empty at the start knows the spaces of its files only when they come."""
    disk = DiskTrajDataset(tmp_path, "run")
    disk.configure(DatasetSettings(4))
    disk.check_spaces(gym.spaces.Dict({"observation": UNIT}), rec.ACT)
    pixels(UNIT).copy_to(tmp_path / "run" / "buffer" / "fifo", "a")
    assert disk.on_end_of_collection()["trajectories"] == 1
    pixels(BYTES).copy_to(tmp_path / "run" / "buffer" / "fifo", "b")
    with pytest.raises(ValueError, match="uint8"):
        disk.on_end_of_collection()


def test_a_buffer_of_actions_with_other_bounds_is_refused(tmp_path):
    pixels(UNIT).copy_to(tmp_path / "run" / "buffer" / "protected")
    disk = DiskTrajDataset(tmp_path, "run")
    disk.configure(DatasetSettings(4))
    with pytest.raises(ValueError, match="would mean two different actions"):
        disk.check_spaces(gym.spaces.Dict({"observation": UNIT}), gym.spaces.Box(-2.0, 2.0, (1,), np.float32))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("observations", np.nan, r"rows 0 to 2: observations\['observation'\] is not finite at step 1"),
        ("rewards", np.inf, "rows 0 to 2: rewards is not finite at step 1"),
        ("actions", np.nan, "rows 0 to 2: actions are not finite at step 1"),
    ],
    ids=["observation", "reward", "action"],
)
def test_numbers_that_are_not_finite_are_refused(field, value, message):
    rows = rec.rows(rec.record())
    rows[field][1] = value
    with pytest.raises(ValueError, match=message):
        _ = ArrayDataset(**rows, action_space=rec.ACT).source


def test_arrays_that_do_not_fit_are_refused():
    rows = rec.rows(rec.record())
    with pytest.raises(ValueError, match="actions has 30 rows, but rewards has 31"):
        _ = ArrayDataset(**(rows | {"actions": rows["actions"][:-1]}), action_space=rec.ACT).source
    with pytest.raises(ValueError, match=r"the action at step 2 is outside of Discrete\(3\)"):
        _ = ArrayDataset(**(rows | {"actions": np.array([0, 1, 3] + [0] * 28)}), action_space=gym.spaces.Discrete(3)).source
    with pytest.raises(ValueError, match=r"3 actions of Box\(-1.0, 1.0, \(2,\), float32\) are needed"):
        _ = ArrayDataset(**rows, action_space=gym.spaces.Box(-1, 1, (2,))).source
    one = {k: v[:1] for k, v in rows.items()}
    with pytest.raises(ValueError, match="has no trajectory of at least one transition"):
        _ = ArrayDataset(**one, action_space=rec.ACT).source


def test_what_a_d4rl_file_does_not_say_is_asked_for(tmp_path):
    with pytest.raises(ValueError, match=r"neither timeouts nor next_observations.*pass max_episode_steps"):
        _ = d4rl(tmp_path, rec.record(), timeouts=False).source
    with pytest.raises(ValueError, match="max_episode_steps must be at least 1, got 0"):
        D4RLDataset("x.hdf5", 0)
    with pytest.raises(ValueError, match=r"there is no file .*x\.hdf5"):
        _ = D4RLDataset(tmp_path / "x.hdf5").source
    (tmp_path / "x.hdf5").write_text("no HDF5")
    with pytest.raises(ValueError, match=r"x\.hdf5 cannot be read as HDF5"):
        _ = D4RLDataset(tmp_path / "x.hdf5").source
    with h5py.File(tmp_path / "y.hdf5", "w") as file:
        file["observations"] = np.zeros((3, 2))
    with pytest.raises(ValueError, match=r"y\.hdf5 lacks actions, rewards, terminals.*it has \['observations'\]"):
        _ = D4RLDataset(tmp_path / "y.hdf5").source
    rows = rec.rows(rec.record(), truncations="timeouts", terminations="terminals")
    with h5py.File(tmp_path / "z.hdf5", "w") as file:
        for name, a in (rows | {"actions": rows["actions"] * 5}).items():
            file[name] = a
    with pytest.raises(
        ValueError, match=r"actions of shape \(31, 1\) up to 4\.\d+ are not in a Box from -1 to 1; pass action_space"
    ):
        _ = D4RLDataset(tmp_path / "z.hdf5").source
    wide = gym.spaces.Box(-5.0, 5.0, (1,), np.float32)
    assert D4RLDataset(tmp_path / "z.hdf5", action_space=wide).source.read(0).actions[1, 0] == pytest.approx(rec.action(0, 1))


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
    with pytest.raises(ValueError, match="lacks observations, actions, rewards, terminals"):
        _ = D4RLDataset(tmp_path / "links.hdf5").source


def test_minari_data_sets_that_are_missing_or_broken(tmp_path):
    with pytest.raises(ValueError, match=r"there is no Minari data set 'a/b-v0': neither .* nor .* has data/metadata.json"):
        _ = MinariDataset("a/b-v0").source
    with pytest.raises(ValueError, match=r"obs_keys must be a list of keys, got 'x'; write \['x'\]"):
        MinariDataset("a/b-v0", obs_keys="x")
    rec.write_minari("test/counting-v0", rec.record())
    with pytest.raises(ValueError, match=r"obs_keys \['x'\] are not among the observations"):
        _ = MinariDataset("test/counting-v0", obs_keys=["x"]).source
    metadata = tmp_path / "minari" / "test" / "counting-v0" / "data" / "metadata.json"
    assert len(MinariDataset(metadata.parents[1])) == len(MinariDataset(metadata.parent)) == 7
    metadata.write_text('{"dataset_id": "test/counting-v0", "env_spec": "{}"}')
    with pytest.raises(ValueError, match="lacks observation_space, action_space"):
        _ = MinariDataset("test/counting-v0").source
    metadata.write_text("{")
    with pytest.raises(ValueError, match=r"metadata\.json cannot be read"):
        _ = MinariDataset("test/counting-v0").source


def test_an_episode_that_goes_on_after_its_end_is_refused():
    episode = rec.record()[1]
    episode.__class__ = type("Odd", (rec.Episode,), {"terminations": property(lambda self: np.arange(len(self)) == 2)})
    rec.write_minari("test/odd-v0", [episode])
    with pytest.raises(ValueError, match=r"test/odd-v0, episode 0: terminates at step 2 of 6 and goes on"):
        _ = MinariDataset("test/odd-v0").source


@pytest.mark.parametrize(
    ("module", "make"), [("h5py", lambda: D4RLDataset("x")), ("minari", lambda: MinariDataset("test/counting-v0"))]
)
def test_what_is_not_installed_is_named_with_its_extra(monkeypatch, module, make):
    rec.write_minari("test/counting-v0", rec.record())
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{module}: pip install 'amago\[offline\]'"):
        _ = make().source


def test_minaris_directory_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", "here")
    source = arrays(tmp_path, rec.record(), next_observations=True).source
    assert export(source, source.obs_space, source.action_spec, "test/ours-v0") == 7
    assert len(MinariDataset("test/ours-v0")) == 7
    assert os.environ["MINARI_DATASETS_PATH"] == "here"


def test_a_failed_copy_leaves_nothing_behind(tmp_path):
    directory = tmp_path / "buffer" / "protected"
    arrays(tmp_path, rec.record()).copy_to(directory, "first", save_as="npz")
    before = sorted(directory.iterdir())

    class Broken(OfflineDataset):
        def load(self):
            return arrays(tmp_path, rec.record()).source

    def stop(traj):
        if traj.obs["observation"][0, 0] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Broken().copy_to(directory, "second", save_as="npz", progress=stop)
    assert sorted(directory.iterdir()) == before


def test_the_summary_of_an_offline_run_names_its_data_and_no_exploration(tmp_path, capsys):
    class Recorded(gym.Env):
        observation_space, action_space = rec.OBS, rec.ACT

        def reset(self, *, seed=None, options=None):
            return self.observation_space.sample(), {}

        def step(self, action):
            return self.observation_space.sample(), 0.0, False, True, {}

    data = arrays(tmp_path, rec.record())
    mean = np.mean([np.sum(x.rews) for x in data.source])
    run = experiment(
        tmp_path,
        lambda: AMAGOEnv(Recorded(), env_name="recorded"),
        dataset=data,
        start_collecting_at_epoch=float("inf"),
        verbose=True,
    )
    run.start()
    run.close()
    shown = capsys.readouterr().out
    assert f"ArrayDataset: {len(data)} trajectories, {data.source.lengths.sum()} steps, mean return {mean:.4g}" in shown
    assert "exploration" not in shown
    assert "steps of each actor" not in shown
