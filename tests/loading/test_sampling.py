"""Which trajectories of the buffer are drawn: frequencies, resumed runs, readers ahead, files that come and go."""

import numpy as np
import pytest
from messages import refused
from store_helpers import add, dataset_of

from amago import config
from amago.loading import DiskTrajDataset, SequenceLoader


def episodes(dataset, draws, seed=0, batch_size=50):
    """The episode of each sequence drawn."""
    rng = np.random.default_rng(seed)
    batches = [dataset.sample_batch(rng, batch_size) for _ in range(draws // batch_size)]
    return np.concatenate([b.obs["a/b"][:, 0, 0].numpy().astype(int) for b in batches])


def assert_drawn(found, chances):
    """Chi-square: how often each episode was drawn, against its probability; beyond 5 standard deviations is a failure."""
    chances = np.asarray(chances, float) / np.sum(chances)
    counts, expected = np.bincount(found, minlength=len(chances)), len(found) * chances
    assert not counts[chances == 0].any()
    possible = chances > 0
    statistic = (((counts - expected) ** 2)[possible] / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom), (counts, expected)


LENGTHS = [1, 3, 8, 9, 20, 60]


@pytest.mark.parametrize(
    ("padded", "cut_short"),
    [("none", False), ("none", True), ("left", False), ("right", True), ("both", False), ("both", True)],
)
def test_by_length_every_timestep_is_trained_on_as_often(tmp_path, padded, cut_short):
    add(tmp_path, LENGTHS, save_as="segments")
    dataset = dataset_of(tmp_path, padded=padded, cut_short=cut_short, sampling="length")
    rng, draws = np.random.default_rng(0), 6000
    batch = dataset.sample_batch(rng, draws)
    of, steps = batch.obs["a/b"][:, 0, 0].numpy().astype(int), batch.mask[:, 1:, 0].sum(1).numpy()
    share = np.array([steps[of == i].sum() for i in range(len(LENGTHS))]) / LENGTHS  # batches with a timestep, on average
    for i in range(len(LENGTHS)):
        assert abs(share[i] / share.mean() - 1) < 6 / np.sqrt(max(1, (of == i).sum())), share


@pytest.mark.parametrize("save_as", ["npz", "segments"])
def test_balance_gives_every_environment_the_same_share(tmp_path, save_as):
    names = ["A", "B", "A", "A", "C", "A", "A", "A"]
    add(tmp_path, [3] * 8, names=names, save_as=save_as)
    chances = [1 / names.count(n) for n in names]
    assert_drawn(episodes(dataset_of(tmp_path, balance="env_name"), 6000), chances)


@pytest.mark.parametrize("workers", [0, 3])
def test_a_file_with_nearly_all_of_the_weight_that_another_process_deletes(tmp_path, workers):
    add(tmp_path, [8] * 199 + [800_000])  # the last has a chance of .998
    dataset = dataset_of(tmp_path, sampling="length")
    newest = dataset.store.view().path(199)
    loader = SequenceLoader(dataset, 4, workers=workers)
    batches = loader.batches(40)
    next(batches)
    (tmp_path / "d" / "buffer" / "fifo" / newest).unlink()
    dataset.store.close()  # an open file could still be read
    last = list(batches)[-1]
    loader.close()
    assert 199 not in last.obs["a/b"][:, 0, 0]


WAYS = [{"sampling": "length"}, {"balance": "env_name"}, {"sampling": "length", "balance": "env_name"}]  # fmt: skip


def drawn_by(dataset, workers=0, first=0, count=6):
    loader = SequenceLoader(dataset, 8, workers=workers, seed=7)
    loader.next_batch = first
    found = [b.obs["a/b"][:, 0].tolist() for b in loader.batches(count)]
    loader.close()
    return found


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_resumed_run_draws_what_it_would_have_drawn(tmp_path, way):
    """Files of three writers, added in another order than that of their names, and the oldest deleted."""
    dataset = dataset_of(tmp_path, dset_max_size=14, **way)
    for i, writer in enumerate(("z", "a", "m")):
        add(tmp_path, [3, 30, 5, 20, 100, 9], first=6 * i, names=["A", "B", "C"], writer=writer)
        dataset.on_end_of_collection()
    state, want = dataset.state_dict(), drawn_by(dataset, first=3)
    dataset.close()
    (tmp_path / "d" / "buffer" / "order.journal").unlink()  # so that the order is that of the state
    again = dataset_of(tmp_path, dset_max_size=14, **way)
    assert drawn_by(again, first=3) != want or way == {"balance": "env_name"}
    again.load_state_dict(state)
    assert drawn_by(again, first=3) == want


@pytest.mark.parametrize(("option", "value", "right"), [("sampling", "lenght", "length"), ("balance", "task", "env_name")])
def test_wrong_arguments_are_named(tmp_path, option, value, right):
    with refused(ValueError, option, value, right):
        DiskTrajDataset(tmp_path, "d", **{option: value})


def test_gin_sets_it_and_the_summary_says_it(tmp_path):
    config.bind({"DiskTrajDataset.sampling": "length", "DiskTrajDataset.balance": "env_name"})
    add(tmp_path, [3])
    dataset = dataset_of(tmp_path)
    config.clear()
    assert (dataset.sampling, dataset.balance) == ("length", "env_name")
    assert "by length" in dataset.describe()
    assert dataset_of(tmp_path).describe().endswith("trajectories")
