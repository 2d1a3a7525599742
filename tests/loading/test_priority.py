"""Sequences drawn by priority: frequencies, weights, new and deleted files, resumed runs, and an agent that learns from them."""

import json

import numpy as np
import pytest
import tiny
import torch
from messages import naming
from test_sampling import add, assert_drawn, opened

from amago.data.windows import PADDED_SAMPLING, pieces_of, subsequence
from amago.loading import DatasetSettings, DiskTrajDataset, MixtureOfDatasets, RLData_pad_collate, SequenceLoader
from amago.run.checks import SettingsError


def prioritised(root, **options):
    return opened(root, sampling="priority", **{"priority_alpha": 1.0, "priority_eta": 1.0, **options})


def drawn(dataset, draws=3000, seed=0):
    """The batch, and the episode and first step of each sequence."""
    batch = dataset.sample_batch(np.random.default_rng(seed), draws)
    first = batch.obs["observation"][:, 0].numpy().astype(int)
    return batch, first[:, 0], first[:, 1]


def report(dataset, batch, errors):
    """Tell the data set the TD error of each sequence of a batch, the same in all of its steps."""
    errors = np.asarray(errors, np.float32)
    batch.sources[0].owner.report(batch.sources, errors, errors)


@pytest.mark.parametrize("cut_short", [False, True])
@pytest.mark.parametrize("padded", PADDED_SAMPLING)
@pytest.mark.parametrize("max_len", [1, 2, 5])
def test_the_pieces_of_a_trajectory_share_its_starts(padded, cut_short, max_len):
    for length in range(1, 14):
        (pieces,) = pieces_of([length], max_len, padded, cut_short)
        wants = set()
        rng = np.random.default_rng(0)
        for _ in range(600):
            wants.add(subsequence(length, max_len, padded, rng, cut_short))
        found = [{subsequence(length, max_len, padded, rng, cut_short, (k, pieces)) for _ in range(200)} for k in range(pieces)]
        assert set().union(*found) == wants
        if length <= max_len:
            assert pieces == 1


def test_new_sequences_are_alike_and_errors_decide_from_then_on(tmp_path):
    add(tmp_path, [3] * 6)
    dataset = prioritised(tmp_path, priority_beta=0.5)
    batch, episode, _ = drawn(dataset)
    assert_drawn(episode, [1] * 6)
    torch.testing.assert_close(batch.weights, torch.ones(len(episode)))
    report(dataset, batch, episode + 1.0)
    batch, episode, _ = drawn(dataset, seed=1)
    assert_drawn(episode, np.arange(1.0, 7.0))
    want = (6 * (episode + 1) / 21) ** -0.5
    np.testing.assert_allclose(batch.weights.numpy(), want, rtol=1e-4)


def test_alpha_and_eta(tmp_path):
    add(tmp_path, [3] * 4)
    dataset = prioritised(tmp_path, priority_alpha=0.5, priority_eta=0.25)
    batch, episode, _ = drawn(dataset)
    most, mean = np.array([16.0, 4.0, 1.0, 1.0])[episode], np.array([0.0, 4.0, 1.0, 9.0])[episode]
    batch.sources[0].owner.report(batch.sources, most.astype(np.float32), mean.astype(np.float32))
    assert_drawn(drawn(dataset, seed=1)[1], np.sqrt([4.0, 4.0, 1.0, 7.0]))


def test_the_sequences_of_a_long_trajectory_have_priorities_of_their_own(tmp_path):
    add(tmp_path, [40, 8])
    dataset = prioritised(tmp_path)
    batch, episode, start = drawn(dataset)
    assert_drawn(episode, [5, 1])
    report(dataset, batch, np.where((episode == 0) & (start >= 27), 10.0, 1.0))  # 33 starts; the last of 5 parts is 26 to 32
    _, episode, start = drawn(dataset, seed=1)
    late = (episode == 0) & (start >= 26)
    assert 0.5 < late.mean() < 0.75, "10 of 15 parts of the mass, unless the last report was of start 26"


def test_one_by_one_as_in_batches(tmp_path):
    add(tmp_path, [3, 30, 50])
    dataset = prioritised(tmp_path)
    rng = np.random.default_rng(2)
    single = RLData_pad_collate([dataset.sample_random_trajectory(rng) for _ in range(30)])
    batch = dataset.sample_batch(np.random.default_rng(2), 30)
    assert torch.equal(single.obs["observation"], batch.obs["observation"])
    assert [s[1:] for s in single.sources] == [s[1:] for s in batch.sources]


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


def test_errors_that_are_not_finite_change_nothing(tmp_path):
    add(tmp_path, [3] * 2)
    dataset = prioritised(tmp_path)
    batch, episode, _ = drawn(dataset)
    report(dataset, batch, np.where(episode == 0, np.nan, np.inf))
    assert_drawn(drawn(dataset, seed=1)[1], [1, 1])


def test_balance_and_then_by_priority(tmp_path):
    names = ["A", "A", "A", "B"]
    add(tmp_path, [3] * 4, names=names)
    dataset = prioritised(tmp_path, balance="env_name", priority_beta=1.0)
    batch, episode, _ = drawn(dataset)
    assert_drawn(episode, [1, 1, 1, 3])
    report(dataset, batch, np.array([1.0, 1.0, 4.0, 9.0])[episode])
    batch, episode, _ = drawn(dataset, seed=1)
    assert_drawn(episode, [1, 1, 4, 6])
    np.testing.assert_allclose(batch.weights.numpy(), np.array([3, 3, 3 / 4, 1 / 2])[episode], rtol=1e-4)


@pytest.mark.parametrize("workers", [0, 3])
def test_a_file_that_another_process_deletes(tmp_path, workers):
    add(tmp_path, [3] * 40)
    dataset = prioritised(tmp_path)
    batch, episode, _ = drawn(dataset)
    report(dataset, batch, np.where(episode == 7, 1e9, 1e-3))
    loader = SequenceLoader(dataset, 4, workers=workers)
    batches = loader.batches(40)
    assert (next(batches).obs["observation"][:, 0, 0] == 7).all()
    lost = next(path for path in dataset.all_filenames if path == dataset.store.view().path(7))
    (tmp_path / lost).unlink()
    dataset.store._cache.clear()
    last = list(batches)[-1]
    loader.close()
    assert 7 not in last.obs["observation"][:, 0, 0]
    report(dataset, batch, np.full(len(episode), 1e9))  # arrives late, and must not bring it back
    assert 7 not in drawn(dataset, seed=1)[1]


@pytest.mark.parametrize("balance", [None, "env_name"])
def test_a_resumed_run_draws_what_it_would_have_drawn(tmp_path, balance):
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
        assert torch.equal(found.obs["observation"], want.obs["observation"])
        assert torch.equal(found.weights, want.weights)
    assert not torch.equal(drawn(prioritised(tmp_path, balance=balance), 300, seed=9)[0].rews, want.rews)
    state["priorities"]["sequences"][0] += 1
    with pytest.raises(ValueError, match=naming("priorities")):
        again.load_state_dict(state)


# ---- in a run ------------------------------------------------------------------------------------------------------------


def run_with(root, name="run", **fields):
    dataset = DiskTrajDataset(root, name, sampling="priority")
    return tiny.learned(root, name=name, dataset=dataset, ckpt_interval=1, **fields)


@pytest.mark.parametrize("agent", ["agent", "multitask"])
def test_an_agent_reports_its_errors(tmp_path, agent):
    e = run_with(tmp_path, agent_type=agent, train_batches_per_epoch=6)
    values = e.dataset._sampling.priorities._now._priority
    assert len(np.unique(values)) == 4, "each of 4 episodes has an error of its own"
    assert (values != 1.0).all()
    e.close()


def test_the_errors_are_those_of_the_critics(tmp_path):
    """A batch of one sequence: its priority is eta max + (1 - eta) mean of the normalised error of its steps, which the squared loss has too."""
    e = run_with(tmp_path)
    batch = e.train_dloader.draw(0)
    e.policy.eval()
    loss = e.policy.losses(batch)
    torch.testing.assert_close(e.policy.td_errors, loss.critic_loss.detach().sqrt().mean(dim=(2, 3)), rtol=1e-4, atol=1e-5)
    e.close()


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
    want = (loss.critic_loss.mean(dim=(2, 3)) * w).sum() / w.sum()
    torch.testing.assert_close(weighted, want)
    batch.sources = [s._replace(weight=1.0, owner=owner) for s in batch.sources]
    alike = critic_loss()
    batch.sources = None
    torch.testing.assert_close(alike, critic_loss())
    e.close()


def test_a_training_state_holds_them(tmp_path):
    e = run_with(tmp_path)
    want = e.dataset._sampling.priorities.state_dict()
    e.close()
    dataset = DiskTrajDataset(tmp_path, "run", sampling="priority")
    e = tiny.started(tmp_path, dataset=dataset, resume="auto", epochs=2)
    assert dataset._sampling.priorities.state_dict() == want
    e.learn()
    e.close()


def test_within_a_mixture(tmp_path):
    tiny.learned(tmp_path, name="other", train_batches_per_epoch=0).close()
    own = DiskTrajDataset(tmp_path, "run", sampling="priority")
    both = MixtureOfDatasets([own, DiskTrajDataset(tmp_path, "other")], [0.5, 0.5], collect_into=0)
    e = tiny.learned(tmp_path, dataset=both, train_batches_per_epoch=6)
    values = own._sampling.priorities._now._priority
    assert (values != 1.0).any()
    batch = e.train_dloader.draw(0)
    assert {s is None for s in batch.sources} == {True, False}
    assert (batch.weights[[s is None for s in batch.sources]] == 1).all()
    e.close()


def test_an_agent_without_errors_is_refused(tmp_path):
    from amago import config

    config.bind({"Agent.fake_filter": True, "Agent.online_coeff": 0.0})
    with pytest.raises(SettingsError, match=naming("priority", "Agent", "td_errors")):
        run_with(tmp_path)


def test_several_processes_are_refused(tmp_path):
    class Two:
        num_processes = 2

    class Experiment:
        accelerator = Two()

    with pytest.raises(ValueError, match=naming("priority", 2)):
        DiskTrajDataset(tmp_path, "d", sampling="priority").configure(DatasetSettings(8, experiment=Experiment()))


def test_workers_of_torch_are_refused(tmp_path):
    add(tmp_path, [3] * 2)
    dataset = opened(tmp_path, sampling="priority")
    dataset.configure(DatasetSettings(8, items_per_epoch=4))
    loader = torch.utils.data.DataLoader(dataset, 2, collate_fn=RLData_pad_collate, num_workers=1)
    with pytest.raises(RuntimeError, match=naming("priority", "num_workers=0")):
        next(iter(loader))


@pytest.mark.parametrize(("name", "value"), [("priority_alpha", 1.5), ("priority_beta", -0.5), ("priority_eta", float("nan"))])
def test_wrong_numbers_are_named(tmp_path, name, value):
    with pytest.raises(ValueError, match=naming(name, repr(value))):
        DiskTrajDataset(tmp_path, "d", sampling="priority", **{name: value})
