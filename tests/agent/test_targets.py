"""Targets equal a hand-written oracle, whichever way a rollout ends and whichever way its numbers travel.

The oracle knows the rules of `CountingEnv` and nothing else: which reward comes at which time, when an episode ends and how. The
targets come from what went through pool, recorder, disk, slicing, padding and batching.
"""

from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
import torch
from counting_env import CountingEnv, length_of, reward_of

from amago import ops
from amago.envs import AMAGOEnv, make_pool
from amago.loading import DatasetSettings, DiskTrajDataset, RLData, collate

AutoresetMode = gym.vector.AutoresetMode
N, STEPS = 4, 60
GAMMAS = (0.0, 0.9, 0.999)
ENDINGS = {"terminated": (True, False), "truncated": (False, True), "both": (True, True)}


def ending(actor, episode):
    """(terminated, truncated) of the last step."""
    return list(ENDINGS.values())[(actor + episode) % 3]


def value(t, actor, episode):
    """What a state is worth; exact in float64."""
    return 10.0 + 1.25 * t - 0.5 * actor + 0.125 * episode


class Rules(CountingEnv):
    """Episodes end in each of the ways."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        ends = ending(self.actor, self.episode) if terminated or truncated else (False, False)
        return obs, reward, *ends, info


def oracle(actor, episode, start, stop, n, gamma):
    """n-step targets of the transitions [start, stop) of an episode, one by one, in float64."""
    end, (terminates, _) = length_of(actor, episode), ending(actor, episode)
    targets = []
    for t in range(start, stop):
        total, discount, now = 0.0, 1.0, t
        for _ in range(n):
            now += 1
            total += discount * reward_of(actor, episode, now)
            discount *= gamma
            if now == stop:
                break
        if not (now == end and terminates):
            total += discount * value(now, actor, episode)
        targets.append(total)
    return np.array(targets)


def makers(mode):
    if mode == "sync":
        return [lambda i=i: AMAGOEnv(Rules(i), "rules") for i in range(N)], mode
    envs = [lambda i=i: Rules(i) for i in range(N)]
    how = AutoresetMode[mode]
    return [lambda: AMAGOEnv(gym.vector.SyncVectorEnv(envs, autoreset_mode=how), "rules", batched_envs=N)], "already_vectorized"


def collect(root, mode, **recorder):
    """Play in a pool, into the store of a dataset called "run"."""
    make_envs, env_mode = makers(mode)
    options = {"save_trajs_to": str(root / "run" / "buffer" / "fifo"), "save_trajs_as": "segments"} | recorder
    with closing(make_pool(make_envs, env_mode, parallel_actors=N, recorder=options, seed=1)) as pool:
        pool.reset()
        for _ in range(STEPS):
            pool.step(np.zeros((N, 1), np.int64))


def opened(root, max_seq_len, padded_sampling="none"):
    dataset = DiskTrajDataset(root, "run")
    dataset.configure(DatasetSettings(max_seq_len, padded_sampling))
    return dataset


def check(samples, n):
    """Targets of a batch against the oracle; returns how the episodes ended whose last transition was among them."""
    batch = collate(samples)
    obs = batch.obs["count"][..., :3].double()
    worth = value(*obs.unbind(-1))[:, 1:, None, None].expand(-1, -1, len(GAMMAS), 1)
    targets = ops.n_step_return(
        batch.rews.double()[..., None], batch.dones[..., None], worth, torch.tensor(GAMMAS).double()[:, None],
        batch.transition_mask[..., None], n,
    )  # fmt: skip
    seen = set()
    for sample, found in zip(samples, targets):
        start, actor, episode = (int(x) for x in sample.obs["count"][0, :3])
        stop = start + len(sample)
        for g, gamma in enumerate(torch.tensor(GAMMAS).double().tolist()):
            want = oracle(actor, episode, start, stop, n, gamma)
            np.testing.assert_allclose(found[: len(sample), g, 0].numpy(), want, rtol=1e-6, atol=1e-6)
        if stop == length_of(actor, episode):
            seen.add(ending(actor, episode))
    return seen


def whole(view):
    return [RLData.from_traj(view.read(i).derive(view.action_spec(i))) for i in range(len(view))]


@pytest.mark.parametrize("mode", ["sync", *(m.name for m in AutoresetMode)])
def test_every_way_of_collecting_gives_the_targets_of_the_oracle(tmp_path, mode):
    collect(tmp_path, mode)
    samples = whole(opened(tmp_path, 10).store.view())
    assert len(samples) > 5 * N
    for n in (1, 2, 3, 20):
        assert check(samples, n) == set(ENDINGS.values())


@pytest.mark.parametrize("mode", ["sync", "SAME_STEP", "NEXT_STEP"])
@pytest.mark.parametrize("stagger", [False, True])
def test_pieces_of_rollouts_do_too(tmp_path, mode, stagger):
    """A piece that ends where the rollout goes on is bootstrapped there."""
    collect(tmp_path, mode, save_every=3, stagger=stagger)
    samples = whole(opened(tmp_path, 10).store.view())
    assert max(map(len, samples)) <= 3
    for n in (1, 3):
        assert check(samples, n) == set(ENDINGS.values())


@pytest.mark.parametrize("padded_sampling", ["none", "both", "left", "right"])
def test_so_do_windows_drawn_from_the_store(tmp_path, padded_sampling):
    collect(tmp_path, "sync")
    dataset, rng = opened(tmp_path, 4, padded_sampling), np.random.default_rng(0)
    samples = [dataset.sample_random_trajectory(rng) for _ in range(300)]
    assert {len(s) for s in samples} >= ({1, 2, 3, 4} if padded_sampling in ("both", "left") else {2, 3, 4})
    for n in (1, 3):
        assert check(samples, n) == set(ENDINGS.values())


def test_the_oracle_against_sums_by_hand():
    """Actor 0, episode 0: two steps, rewards 1 and 2, terminated. Actor 1, episode 0: five steps, rewards 101 to 105, cut."""
    assert (length_of(0, 0), ending(0, 0)) == (2, (True, False))
    np.testing.assert_allclose(oracle(0, 0, 0, 2, 1, 0.5), [1.0 + 0.5 * 11.25, 2.0])
    np.testing.assert_allclose(oracle(0, 0, 0, 2, 2, 0.5), [1.0 + 0.5 * 2.0, 2.0])
    assert (length_of(1, 0), ending(1, 0)) == (5, (False, True))
    np.testing.assert_allclose(oracle(1, 0, 3, 5, 3, 0.5), [104.0 + 0.5 * 105.0 + 0.25 * 15.75, 105.0 + 0.5 * 15.75])
    assert ending(0, 2) == (True, True)
    assert oracle(0, 2, length_of(0, 2) - 1, length_of(0, 2), 9, 0.9)[0] == reward_of(0, 2, length_of(0, 2))
