"""Which sequences of the buffer are drawn: frequencies, priorities, resumed runs, readers ahead, files that come and go."""

import base64
import json
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from messages import check_refused, naming, refused
from store_helpers import add, dataset_of

import amago
from amago import config
from amago.loading import DatasetSettings, DiskTrajDataset, MixtureOfDatasets, RLData_pad_collate, SequenceLoader
from amago.run.settings import SettingsError


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
    assert_drawn(drawn(dataset_of(tmp_path, balance="env_name"), 6000)[1], chances)


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


def prioritised(root, **options):
    return dataset_of(root, sampling="priority", **{"priority_alpha": 1.0, "priority_eta": 1.0, **options})


def drawn(dataset, draws=3000, seed=0):
    """The batch, and the episode and first step of each sequence."""
    batch = dataset.sample_batch(np.random.default_rng(seed), draws)
    first = batch.obs["a/b"][:, 0].numpy().astype(int)
    return batch, first[:, 0], first[:, 1]


def report(dataset, batch, errors):
    """Tell the dataset the TD error of each sequence of a batch, the same in all of its steps."""
    errors = np.asarray(errors, np.float32)
    batch.sources[0].owner.report(batch.sources, errors, errors)


def priorities(dataset):
    return np.frombuffer(base64.b64decode(dataset.state_dict()["priorities"]["priorities"]), "<f4")


def test_new_sequences_are_alike_and_errors_decide_from_then_on(tmp_path):
    add(tmp_path, [3] * 6)
    dataset = prioritised(tmp_path, priority_beta=0.5)
    batch, episode, _ = drawn(dataset)
    assert_drawn(episode, [1] * 6)
    torch.testing.assert_close(batch.weights, torch.ones(len(episode)))
    report(dataset, batch, episode + 1.0)
    batch, episode, _ = drawn(dataset, seed=1)
    assert_drawn(episode, np.arange(1.0, 7.0))
    want = (episode + 1) ** -0.5 * 21 / (np.arange(1.0, 7.0) ** 0.5).sum()
    np.testing.assert_allclose(batch.weights.numpy(), want, rtol=1e-4)


def test_the_sequences_of_a_long_trajectory_have_priorities_of_their_own(tmp_path):
    add(tmp_path, [40, 8])
    dataset = prioritised(tmp_path)
    batch, episode, start = drawn(dataset)
    assert_drawn(episode, [5, 1])
    report(dataset, batch, np.where((episode == 0) & (start >= 27), 10.0, 1.0))  # 33 starts; the last of 5 parts is 26 to 32
    _, episode, start = drawn(dataset, seed=1)
    late = (episode == 0) & (start >= 26)
    assert 0.5 < late.mean() < 0.75, "10 of 15 parts of the mass, unless the last report was of start 26"


def test_new_files_come_first_and_deleted_ones_are_forgotten(tmp_path):
    add(tmp_path, [3] * 4)
    dataset = prioritised(tmp_path, dset_max_size=4)
    batch, episode, _ = drawn(dataset)
    report(dataset, batch, np.where(episode == 3, 8.0, 1.0))
    add(tmp_path, [3], first=4, writer="x")
    dataset.on_end_of_collection()
    assert_drawn(drawn(dataset, seed=1)[1], [0, 1, 1, 8, 8])
    report(dataset, batch, episode + 1.0)  # of batches drawn before; the file of the first is gone
    assert_drawn(drawn(dataset, seed=2)[1], [0, 2, 3, 4, 8])


def test_sequences_of_which_nothing_was_learned_come_seldom(tmp_path):
    add(tmp_path, [3] * 4)
    dataset = prioritised(tmp_path)
    batch, episode, _ = drawn(dataset, 40)
    report(dataset, batch, np.array([np.nan, np.inf, 2.0, 1.0])[episode])
    assert_drawn(drawn(dataset, seed=1)[1], [0, 0, 2, 1])
    report(dataset, batch, np.ones(40))  # another window of them had a loss
    assert_drawn(drawn(dataset, seed=2)[1], [1] * 4)


@pytest.mark.parametrize("beta", [0.0, 0.6, 1.0])
def test_importance_leaves_balance_and_the_weights_of_a_mixture(tmp_path, beta):
    """The losses of each environment, and of each dataset of a mixture, have the weight that was asked for, however unequal errors are."""
    add(tmp_path, [3] * 12, names=["A"] * 9 + ["B"] * 3)
    dataset = prioritised(tmp_path, balance="env_name", priority_beta=beta)
    batch, episode, _ = drawn(dataset)
    report(dataset, batch, np.where(episode < 9, (episode + 1.0) ** 3, 1.0))
    batch, episode, _ = drawn(dataset, 6_000, seed=1)
    weights = batch.weights.numpy()
    assert abs(weights[episode < 9].sum() / weights.sum() - 0.5) < 0.04
    add(tmp_path / "other", [3] * 2, first=50)
    mixture = MixtureOfDatasets([dataset, dataset_of(tmp_path / "other")], [0.7, 0.3], collect_into=0)
    mixture.configure(DatasetSettings(8))
    batch, episode, _ = drawn(mixture, 6_000, seed=2)
    weights = batch.weights.numpy()
    assert abs(weights[episode < 50].sum() / weights.sum() - 0.7) < 0.04


@pytest.mark.parametrize("balance", [None, "env_name"])
def test_a_resumed_run_draws_by_the_priorities_it_would_have_had(tmp_path, balance):
    dataset = prioritised(tmp_path, balance=balance, priority_alpha=0.7)
    for i, writer in enumerate(("z", "a", "m")):
        add(tmp_path, [3, 30, 5, 20, 100, 9], first=6 * i, names=["A", "B", "C"], writer=writer)
        dataset.on_end_of_collection()
        batch = drawn(dataset, 200, seed=i)[0]
        report(dataset, batch, np.random.default_rng(i).random(200))
    state = json.loads(json.dumps(dataset.state_dict()))
    again = prioritised(tmp_path, balance=balance, priority_alpha=0.7)
    again.load_state_dict(state)
    early = DiskTrajDataset(tmp_path, "d", sampling="priority", priority_alpha=0.7, priority_eta=1.0, balance=balance)
    early.load_state_dict(state)
    early.configure(DatasetSettings(8))
    want, _, _ = drawn(dataset, 300, seed=9)
    for other in (again, early):
        found, _, _ = drawn(other, 300, seed=9)
        assert torch.equal(found.obs["a/b"], want.obs["a/b"])
        assert torch.equal(found.weights, want.weights)
    assert not torch.equal(drawn(prioritised(tmp_path, balance=balance), 300, seed=9)[0].rews, want.rews)
    state["priorities"]["sequences"][0] += 1
    with refused(ValueError, "priorities"):
        again.load_state_dict(state)


def run_with(root, name="run", **fields):
    dataset = DiskTrajDataset(root, name, sampling="priority")
    return tiny.learned(root, name=name, dataset=dataset, ckpt_interval=1, **fields)


@pytest.mark.parametrize("agent", ["agent", "multitask"])
def test_an_agent_reports_its_errors(tmp_path, agent):
    e = run_with(tmp_path, agent_type=agent, train_batches_per_epoch=6)
    values = priorities(e.dataset)
    assert len(np.unique(values)) == 4, "each of 4 episodes has an error of its own"
    assert (values != 1.0).all()


def test_sequences_that_a_mask_leaves_out_do_not_fill_the_batches(tmp_path):
    shares = []

    class Counted(amago.Experiment):
        def edit_critic_mask(self, batch, critic_loss, pad_mask):  # by content, the same whenever a sequence is drawn
            mask = pad_mask & (batch.obs["observation"].flatten(1).sum(1) > 0)[:, None, None, None, None]
            shares.append(float((~mask.flatten(1).any(1)).float().mean()))
            return mask

    def share_without_loss(sampling):
        """Of the sequences of the last batches."""
        fields = {"dataset": DiskTrajDataset(tmp_path, sampling, sampling=sampling), "epochs": 2, "train_batches_per_epoch": 16}
        tiny.learned(tmp_path, name=sampling, experiment_type=Counted, **fields).close()
        return np.mean(shares[-16:])

    uniform, priority = map(share_without_loss, ("uniform", "priority"))
    assert 0.1 < uniform < 0.9
    assert priority < uniform / 2


def test_losses_are_weighted_by_importance(tmp_path):
    e = run_with(tmp_path)
    batch = e.train_dloader.draw(0)
    owner = batch.sources[0].owner
    batch.sources = [s._replace(weight=float(i)) for i, s in enumerate(batch.sources)]
    e.policy.eval()

    def critic_loss():
        torch.manual_seed(0)  # targets take random critics
        return e.compute_loss(batch, False)["Critic Loss"]

    weighted, _ = critic_loss(), torch.manual_seed(0)
    loss = e.policy.losses(batch)
    w = torch.arange(4.0)[:, None, None] * batch.transition_mask
    want = (loss["critic"].mean(dim=(2, 3)) * w).sum() / batch.transition_mask.sum()
    torch.testing.assert_close(weighted, want)
    batch.sources = [s._replace(weight=1.0, owner=owner) for s in batch.sources]
    alike = critic_loss()
    batch.sources = None
    torch.testing.assert_close(alike, critic_loss())


def test_an_agent_without_errors_is_refused(tmp_path):
    config.bind({"Agent.fake_filter": True, "Agent.online_coeff": 0.0})
    with refused(SettingsError, "priority", "Agent", "td_errors"):
        run_with(tmp_path)


def test_several_processes_and_wrong_numbers_are_refused(tmp_path):
    several = SimpleNamespace(accelerator=SimpleNamespace(num_processes=2))

    def dataset(**options):
        return DiskTrajDataset(tmp_path, "d", sampling="priority", **options)

    wrong = {"priority_alpha": 1.5, "priority_beta": -0.5, "priority_eta": float("nan")}
    check_refused(
        ValueError,
        (naming("priority", 2), lambda: dataset().configure(DatasetSettings(8, experiment=several))),
        *(
            (naming(name, repr(value)), lambda name=name, value=value: dataset(**{name: value}))
            for name, value in wrong.items()
        ),
    )
    add(tmp_path, [3] * 2)
    data = dataset_of(tmp_path, sampling="priority")
    data.configure(DatasetSettings(8, items_per_epoch=4))
    loader = torch.utils.data.DataLoader(data, 2, collate_fn=RLData_pad_collate, num_workers=1)
    check_refused(RuntimeError, (naming("priority", "num_workers=0"), lambda: next(iter(loader))))
