"""Which trajectories of the buffer are drawn: frequencies, resumed runs, readers ahead, files that come and go."""

import gymnasium as gym
import numpy as np
import pytest
from messages import naming

from amago import config
from amago.data.timesteps import TrajectoryBuilder
from amago.data.windows import PADDED_SAMPLING, expected_transitions, subsequence
from amago.loading import DatasetSettings, DiskTrajDataset, MixtureOfDatasets, SequenceLoader
from amago.run.changes import changes
from amago.run.describe import described
from amago.spaces import action_spec
from amago.store import TrajectoryWriter

SPACE = gym.spaces.Discrete(2)
OBS = gym.spaces.Dict({"observation": gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)})


def count_from(episode, steps, env_name):
    """Observations (episode, t)."""
    traj = TrajectoryBuilder(action_spec(SPACE), env_name=env_name).start({"observation": np.array([episode, 0], np.float32)})
    for t in range(steps):
        traj.add(0, 0.0, t == steps - 1, {"observation": np.array([episode, t + 1], np.float32)})
    return traj.to_stored()


def add(root, lengths, first=0, names=("A",), save_as="npz", writer="w", part="fifo"):
    """Episodes numbered from ``first``, of environments in turn."""
    directory = root / "d" / "buffer" / part
    directory.mkdir(parents=True, exist_ok=True)
    w = TrajectoryWriter(directory, writer=writer, action_space=SPACE, obs_space=OBS, save_as=save_as)
    for i, steps in enumerate(lengths, first):
        w.write(count_from(i, steps, names[i % len(names)]))
    w.close()


def opened(root, max_seq_len=8, padded="none", cut_short=False, cls=DiskTrajDataset, **kwargs):
    dataset = cls(root, "d", **kwargs)
    dataset.configure(DatasetSettings(max_seq_len, padded, cut_short_trajectories=cut_short))
    return dataset


def episodes(dataset, draws, seed=0, batch_size=50):
    """The episode of each sequence drawn."""
    rng = np.random.default_rng(seed)
    batches = [dataset.sample_batch(rng, batch_size) for _ in range(draws // batch_size)]
    return np.concatenate([b.obs["observation"][:, 0, 0].numpy().astype(int) for b in batches])


def assert_drawn(found, chances):
    """Chi-square: how often each episode was drawn, against its probability; beyond 5 standard deviations is a failure."""
    chances = np.asarray(chances, float) / np.sum(chances)
    counts, expected = np.bincount(found, minlength=len(chances)), len(found) * chances
    assert not counts[chances == 0].any()
    possible = chances > 0
    statistic = (((counts - expected) ** 2)[possible] / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom), (counts, expected)


# ---- frequencies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut_short", [False, True])
@pytest.mark.parametrize("padded", PADDED_SAMPLING)
@pytest.mark.parametrize("max_len", [1, 2, 5, 8])
def test_the_expected_length_of_a_window_is_that_of_all_its_starts(padded, cut_short, max_len):
    class Every:
        """A random stream whose ``integers`` tells its range, and takes the value that it is told to take."""

        value = None

        def integers(self, low, high):
            self.low, self.high = low, high
            return low if self.value is None else self.value

    lengths = np.arange(1, 25)
    want = []
    for length in lengths:
        stream, sizes = Every(), []
        stream.low, stream.high = 0, 1
        subsequence(length, max_len, padded, stream, cut_short)
        for stream.value in range(stream.low, stream.high):  # noqa: B020
            start, stop = subsequence(length, max_len, padded, stream, cut_short)
            sizes.append(stop - start)
        want.append(np.mean(sizes))
    np.testing.assert_allclose(expected_transitions(lengths, max_len, padded, cut_short), want)


LENGTHS = [1, 3, 8, 9, 20, 60]


@pytest.mark.parametrize(
    ("padded", "cut_short"),
    [("none", False), ("none", True), ("left", False), ("right", True), ("both", False), ("both", True)],
)
def test_by_length_every_timestep_is_trained_on_as_often(tmp_path, padded, cut_short):
    add(tmp_path, LENGTHS, save_as="segments")
    dataset = opened(tmp_path, padded=padded, cut_short=cut_short, sampling="length")
    rng, draws = np.random.default_rng(0), 6000
    batch = dataset.sample_batch(rng, draws)
    of, steps = batch.obs["observation"][:, 0, 0].numpy().astype(int), batch.mask[:, 1:, 0].sum(1).numpy()
    share = (
        np.array([steps[of == i].sum() for i in range(len(LENGTHS))]) / LENGTHS
    )  # how often a timestep was in the batch, on average
    for i in range(len(LENGTHS)):
        assert abs(share[i] / share.mean() - 1) < 6 / np.sqrt(max(1, (of == i).sum())), share


def test_uniform_takes_the_draws_that_it_always_took(tmp_path):
    add(tmp_path, LENGTHS)
    rng = np.random.default_rng(4)
    want = []
    for _ in range(40):
        i = rng.integers(len(LENGTHS))
        subsequence(LENGTHS[i], 8, "none", rng)
        want.append(i)
    for options in ({}, {"sampling": "uniform"}):
        assert episodes(opened(tmp_path, **options), 40, seed=4, batch_size=40).tolist() == want


@pytest.mark.parametrize("half_life", [0.5, 4, 1000])
def test_recent_halves_with_every_half_life(tmp_path, half_life):
    add(tmp_path, [3] * 12)
    found = episodes(opened(tmp_path, sampling="recent", half_life=half_life), 4000)
    age = np.arange(11, -1, -1)
    chances = 0.5 ** (age / half_life)
    kept = chances * 4000 > 5  # the statistic needs a few of each
    assert_drawn(found[kept[found]], np.where(kept, chances, 0))


def test_recent_takes_protected_data_for_older_than_all_collected(tmp_path):
    add(tmp_path, [3] * 2)
    add(tmp_path, [3] * 2, first=2, part="protected", writer="p")
    found = episodes(opened(tmp_path, sampling="recent", half_life=1), 3000)
    assert_drawn(found, [4, 8, 1, 2])


@pytest.mark.parametrize("save_as", ["npz", "segments"])
def test_balance_gives_every_environment_the_same_share(tmp_path, save_as):
    names = ["A", "B", "A", "A", "C", "A", "A", "A"]
    add(tmp_path, [3] * 8, names=names, save_as=save_as)
    chances = [1 / names.count(n) for n in names]
    assert_drawn(episodes(opened(tmp_path, balance="env_name"), 6000), chances)


def test_balance_and_then_by_length(tmp_path):
    add(tmp_path, [8, 80, 8, 16, 8, 800], names=["A", "B"])
    found = episodes(opened(tmp_path, sampling="length", balance="env_name"), 6000)
    assert_drawn(found, np.array([8 / 24, 80 / 896, 8 / 24, 16 / 896, 8 / 24, 800 / 896]))


def test_balance_and_then_by_age_among_the_same_environment(tmp_path):
    add(tmp_path, [3] * 40 + [3] * 2000, names=["B"] * 40 + ["A"] * 2000, save_as="segments")
    found = episodes(opened(tmp_path, sampling="recent", half_life=1, balance="env_name"), 4000)
    assert abs((found < 40).mean() - 0.5) < 0.05, "the newest of B is 2,000 trajectories old, and still drawn"
    assert abs((found == 39).mean() - 0.25) < 0.05


def test_one_by_one_as_in_batches(tmp_path):
    add(tmp_path, LENGTHS, names=["A", "B"])
    dataset = opened(tmp_path, sampling="length", balance="env_name")
    rng = np.random.default_rng(3)
    single = [int(dataset.sample_random_trajectory(rng).obs["observation"][0, 0]) for _ in range(40)]
    assert single == episodes(dataset, 40, seed=3, batch_size=40).tolist()


# ---- files that come and go ----------------------------------------------------------------------------------------------


def test_new_trajectories_are_drawn_after_a_collection_and_deleted_ones_are_not(tmp_path):
    add(tmp_path, [3] * 4)
    dataset = opened(tmp_path, sampling="recent", half_life=1, dset_max_size=4)
    assert_drawn(episodes(dataset, 3000), [1, 2, 4, 8])
    add(tmp_path, [3] * 2, first=4, writer="x")
    dataset.on_end_of_collection()
    assert_drawn(episodes(dataset, 3000), [0, 0, 1, 2, 4, 8])


def test_only_the_chosen_files_are_drawn(tmp_path):
    class NotTheNewest(DiskTrajDataset):
        def _refresh_files(self):
            super()._refresh_files()
            self.all_filenames = self.all_filenames[:-1]

    add(tmp_path, [3] * 4)
    dataset = opened(tmp_path, cls=NotTheNewest, sampling="recent", half_life=1)
    assert_drawn(episodes(dataset, 3000), [1, 2, 4, 0])


@pytest.mark.parametrize("workers", [0, 3])
def test_a_file_with_nearly_all_of_the_weight_that_another_process_deletes(tmp_path, workers):
    add(tmp_path, [3] * 200)
    dataset = opened(tmp_path, sampling="recent", half_life=0.01)  # the second newest has a chance of 2^-100
    newest = dataset.store.view().path(199)
    loader = SequenceLoader(dataset, 4, workers=workers)
    batches = loader.batches(40)
    next(batches)
    (tmp_path / "d" / "buffer" / "fifo" / newest).unlink()
    dataset.store._cache.clear()  # an open file could still be read
    last = list(batches)[-1]
    loader.close()
    assert (last.obs["observation"][:, 0, 0] == 198).all()


def test_when_every_file_is_gone_it_says_so(tmp_path):
    add(tmp_path, [3] * 3)
    dataset = opened(tmp_path, sampling="recent", half_life=1)
    for path in dataset.all_filenames:
        (tmp_path / path).unlink()
    with pytest.raises(RuntimeError, match=naming(str(tmp_path / "d" / "buffer"))):
        dataset.sample_batch(np.random.default_rng(0), 4)


# ---- repeatability -------------------------------------------------------------------------------------------------------

WAYS = [{"sampling": "length"}, {"sampling": "recent", "half_life": 3.0}, {"balance": "env_name"}, {"sampling": "length", "balance": "env_name"}]  # fmt: skip


def drawn_by(dataset, workers=0, first=0, count=6):
    loader = SequenceLoader(dataset, 8, workers=workers, seed=7)
    loader.next_batch = first
    found = [b.obs["observation"][:, 0].tolist() for b in loader.batches(count)]
    loader.close()
    return found


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_readers_ahead_draw_the_same_batches(tmp_path, way):
    add(tmp_path, [3, 30, 5, 20, 100] * 4, names=["A", "B", "C"])
    assert drawn_by(opened(tmp_path, **way)) == drawn_by(opened(tmp_path, **way), workers=4)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_resumed_run_draws_what_it_would_have_drawn(tmp_path, way):
    """Files of three writers, added in another order than that of their names, and the oldest deleted."""
    dataset = opened(tmp_path, dset_max_size=14, **way)
    for i, writer in enumerate(("z", "a", "m")):
        add(tmp_path, [3, 30, 5, 20, 100, 9], first=6 * i, names=["A", "B", "C"], writer=writer)
        dataset.on_end_of_collection()
    state, want = dataset.state_dict(), drawn_by(dataset, first=3)
    dataset.close()
    (tmp_path / "d" / "buffer" / "order.journal").unlink()  # so that the order is that of the state
    again = opened(tmp_path, dset_max_size=14, **way)
    assert drawn_by(again, first=3) != want or way == {"balance": "env_name"}
    again.load_state_dict(state)
    assert drawn_by(again, first=3) == want


def test_within_a_mixture(tmp_path):
    add(tmp_path / "one", [3] * 4)
    add(tmp_path / "two", [3] * 4, first=4)
    parts = [DiskTrajDataset(tmp_path / name, "d", sampling="recent", half_life=1) for name in ("one", "two")]
    both = MixtureOfDatasets(parts, [0.75, 0.25], collect_into=0)
    both.configure(DatasetSettings(8))
    assert_drawn(episodes(both, 4000), [3, 6, 12, 24, 1, 2, 4, 8])


# ---- arguments -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sampling": "lenght"}, ("sampling", "lenght", "length")),
        ({"sampling": "recent"}, ("half_life", "recent")),
        ({"sampling": "recent", "half_life": 0}, ("half_life", 0)),
        ({"sampling": "recent", "half_life": float("nan")}, ("half_life", "nan")),
        ({"half_life": 5}, ("half_life", 5, "recent", "uniform")),
        ({"balance": "task"}, ("balance", "task", "env_name")),
    ],
)
def test_wrong_arguments_are_named(tmp_path, options, named):
    with pytest.raises(ValueError, match=naming(*named)):
        DiskTrajDataset(tmp_path, "d", **options)


def test_gin_sets_it_and_the_summary_says_it(tmp_path):
    config.bind(
        {"DiskTrajDataset.sampling": "recent", "DiskTrajDataset.half_life": 500.0, "DiskTrajDataset.balance": "env_name"}
    )
    add(tmp_path, [3])
    dataset = opened(tmp_path)
    config.clear()
    assert (dataset.sampling, dataset.half_life, dataset.balance) == ("recent", 500.0, "env_name")
    assert "500" in dataset.describe()
    assert opened(tmp_path).describe().endswith("trajectories")


def test_a_resumed_run_says_that_it_samples_in_another_way(tmp_path):
    def settings(**options):
        return {
            "fields": {"dataset": described(DiskTrajDataset(tmp_path, "d", **options))},
            "parameters": {},
            "bound": [],
            "unused": [],
        }

    before, now = settings(), settings(sampling="length")
    (change,) = changes(before, now)
    assert (change.name, change.before, change.now) == ("dataset.sampling", "uniform", "length")
    for name in ("sampling", "half_life", "balance"):  # as a version saved it that had no such arguments
        del before["fields"]["dataset"][name]
    assert changes(before, settings()) == []
    (change,) = changes(before, now)
    assert (change.name, change.before, change.now) == ("dataset.sampling", "uniform", "length")
