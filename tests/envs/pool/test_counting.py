"""Through the pool, exploration, the recorder and the disk: every number comes out where it belongs, in every env_mode."""

from collections import defaultdict
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from counting_env import (
    ACTIONS,
    EXTRAS,
    check_extras,
    check_traj,
    is_terminated,
    length_of,
    make_counting,
    make_vector,
    policy_value,
    reward_of,
)
from store_helpers import stored

from amago import config
from amago.envs import ActorError, EpsilonGreedy, make_pool
from amago.hindsight import Relabeler
from amago.loading import DatasetSettings, DiskTrajDataset
from amago.spaces import action_spec

N = 4
AutoresetMode = gym.vector.AutoresetMode
MODES = {
    "sync": ("sync", {}),
    "async": ("async", {"workers": 2}),
    "async-one": ("async", {"workers": 1}),
    "next_step": ("already_vectorized", AutoresetMode.NEXT_STEP),
    "same_step": ("already_vectorized", AutoresetMode.SAME_STEP),
    "disabled": ("already_vectorized", AutoresetMode.DISABLED),
}


def start(mode, kind, root, bad=None, max_env_restarts=100, **recorder):
    env_mode, how = MODES[mode]
    options = {"save_trajs_to": str(root / "fifo"), "save_trajs_as": "segments"} | recorder
    common = {
        "parallel_actors": N, "exploration": EpsilonGreedy, "recorder": options, "seed": 5,
        "max_env_restarts": max_env_restarts,
    }  # fmt: skip
    env = {"kind": kind, "extras": "extra_fields" in recorder, "bad": bad}
    if env_mode == "already_vectorized":
        return make_pool([make_vector(N, how, **env)], env_mode, **common)
    return make_pool([make_counting(i, **env) for i in range(N)], env_mode, **common, **how)


def random_actions(kind, n, rng):
    if kind == "discrete":
        return rng.integers(5, size=(n, 1))
    if kind == "continuous":
        return rng.uniform(-1, 1, size=(n, 2)).astype(np.float32)
    return rng.integers(2, size=(n, 4)).astype(np.int8)


def check_arrays(pool, rows, kind, previous):
    """The policy's inputs agree with the environment's own account of them."""
    spec = action_spec(ACTIONS[kind])
    for i in range(rows.start, rows.stop):
        t, actor, episode, _ = (int(x) for x in pool.obs["count"][i])
        assert (actor, pool.time_idxs[i, 0]) == (i, t)
        assert pool.resets[i] == (t == 0)
        if t == 0:
            assert not pool.rl2s[i].any()
            assert previous[i] in (None, episode - 1)
            previous[i] = episode
        else:
            assert previous[i] == episode
            assert pool.rl2s[i, 0] == np.float32(reward_of(actor, episode, t))
            took = np.reshape(spec.to_env(spec.from_vector(pool.rl2s[i, 1:])), -1)
            np.testing.assert_array_equal(took.astype(np.float32), pool.obs["took"][i])


def play(pool, kind, steps, seed=0):
    """Groups take turns in some steps and step together in others."""
    rng, joint = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    previous = [None] * N
    pool.reset()
    check_arrays(pool, slice(0, N), kind, previous)
    for step in range(steps):
        actions, together = random_actions(kind, N, rng), joint.random() < 0.5
        for g, rows in enumerate(pool.groups):
            if step:
                pool.wait(g)
                check_arrays(pool, rows, kind, previous)
            for i in range(rows.start, rows.stop) if pool.extras else ():
                t, actor, episode, _ = (int(x) for x in pool.obs["count"][i])
                pool.extras["from_policy"][i] = policy_value(actor, episode, t)
            if not together:
                pool.send(g, actions[rows])
        if together:
            pool.send_all(actions)
    for g, rows in enumerate(pool.groups):
        pool.wait(g)
        check_arrays(pool, rows, kind, previous)


def read(root, kind):
    """{(actor, episode): [(start time, length), ...]} of all trajectories on disk, each checked."""
    pieces = defaultdict(list)
    for traj in stored(root):
        assert traj.env_name == "counting"
        actor, episode, begin, n = check_traj(traj, kind)
        pieces[actor, episode].append((begin, n))
    return {k: sorted(v) for k, v in pieces.items()}


def finished(mode, steps):
    """Episodes of each actor that end within so many steps, and the number of steps that moved an actor."""
    out, moved = set(), 0
    for actor in range(N):
        t = episode = 0
        while t < steps:
            n = length_of(actor, episode)
            moved += min(n, steps - t)
            if t + n <= steps:
                out.add((actor, episode))
            t += n + (mode == "next_step")  # which takes a step to begin the next
            episode += 1
    return out, moved


@pytest.mark.parametrize("kind", list(ACTIONS))
@pytest.mark.parametrize("mode", list(MODES))
def test_every_number_is_where_it_belongs(mode, kind, tmp_path):
    steps = 60
    with closing(start(mode, kind, tmp_path)) as pool:
        play(pool, kind, steps)
        if mode.startswith("async"):
            assert not pool.obs["count"][:, 3].any(), "a worker's process has imported torch"
        expected, moved = finished(mode, steps)
        assert pool.flush() == len(expected)
        stats = pool.drain()
    assert read(tmp_path, kind) == {(a, e): [(0, length_of(a, e))] for a, e in expected}
    told = {(r.actor, int(r.metrics["Episode Number"])): r for r in stats.episodes}
    assert told.keys() == expected
    for (actor, episode), record in told.items():
        n = length_of(actor, episode)
        assert (record.length, record.env_name) == (n, "counting")
        assert record.terminated == is_terminated(actor, episode)
        assert record.ret == pytest.approx(sum(np.float32(reward_of(actor, episode, t)) for t in range(1, n + 1)), rel=1e-6)
        assert record.metrics.keys() == {"Episode Number", "time"}
        assert record.metrics["time"] == pytest.approx(np.mean(range(1, n + 1)))
    assert stats.frames == {"counting": moved}


@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("mode", ["sync", "async", "next_step", "same_step"])
def test_pieces_join(mode, stagger, tmp_path):
    """With save_every, pieces cover each rollout without gap; each begins with the last observation of the one before."""
    with closing(start(mode, "continuous", tmp_path, save_every=3, stagger=stagger)) as pool:
        play(pool, "continuous", 50)
    pieces = read(tmp_path, "continuous")
    expected, _ = finished(mode, 50)
    assert expected <= pieces.keys()
    firsts = set()
    for (actor, episode), found in pieces.items():
        at = 0
        for begin, n in found:
            assert begin == at
            at += n
            assert n <= 3
        if (actor, episode) in expected:
            assert at == length_of(actor, episode)
            assert all(n == 3 for _, n in found[1:-1])
            if len(found) > 1:
                firsts.add(found[0][1])
        else:  # still under way when the pool closed
            assert at < length_of(actor, episode)
    assert firsts == ({1, 2, 3} if stagger else {3})


@pytest.mark.parametrize("mode", ["sync", "async", "same_step", "next_step"])
def test_unfinished_rollouts_are_committed_on_request(mode, tmp_path):
    with closing(start(mode, "discrete", tmp_path)) as pool:
        play(pool, "discrete", 20)
        at = {i: tuple(int(x) for x in pool.obs["count"][i, [0, 2]]) for i in range(N)}
        pool.flush(partial=True)
        under_way = {(i, e): t for i, (t, e) in at.items() if 0 < t < length_of(i, e)}
        pieces = read(tmp_path, "discrete")
        assert under_way
        for key, t in under_way.items():
            assert pieces[key] == [(0, t)]


@pytest.mark.parametrize("kind", list(ACTIONS))
def test_async_equals_sync_bit_for_bit(kind, tmp_path):
    config.bind({"EpsilonGreedy.steps_anneal": 50, "EpsilonGreedy.eps_end": 0.5})
    seen, trajs, stats, states = {}, {}, {}, {}
    for mode in ("sync", "async-one", "async"):
        with closing(start(mode, kind, tmp_path / mode, save_every=4, stagger=True)) as pool:
            rng = np.random.default_rng(3)
            pool.reset()
            arrays = []
            for _ in range(40):
                pool.step(random_actions(kind, N, rng))
                obs = [a[:, :3] if key == "count" else a for key, a in pool.obs.items()]  # not whether torch is imported here
                arrays.append([a.copy() for a in (*obs, pool.rl2s, pool.time_idxs, pool.resets)])
            seen[mode] = [np.stack(a) for a in zip(*arrays)]
            states[mode] = pool.state_dict()
            drained = pool.drain()
            stats[mode] = (drained.episodes, drained.frames)
        trajs[mode] = stored(tmp_path / mode)
    for mode in ("async-one", "async"):
        for a, b in zip(seen["sync"], seen[mode], strict=True):
            np.testing.assert_array_equal(a, b)
        assert (stats[mode], states[mode]) == (stats["sync"], states["sync"])
    assert len(trajs["async-one"]) == len(trajs["sync"]) > 10
    for a, b in zip(trajs["sync"], trajs["async-one"]):  # one worker: in the same order, too
        np.testing.assert_array_equal(a.obs["count"][:, :3], b.obs["count"][:, :3])
        for name in ("actions", "rews", "dones"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def check_batch(batch):
    """Every number of a batch, extra fields included, is where it belongs; padding is not looked at."""
    assert list(batch.extras) == sorted(x.name for x in EXTRAS)
    for i in range(len(batch.rews)):
        n = int(batch.mask[i].sum())
        t, actor, episode = (int(x) for x in batch.obs["count"][i, 0, :3])
        times = t + np.arange(n)
        np.testing.assert_array_equal(batch.obs["count"][i, :n, 0], times)
        rows = {"task": 1, "privileged": n, "label": n - 1, "from_policy": n - 1}
        check_extras({k: v[i, : rows[k]] for k, v in batch.extras.items()}, actor, episode, times)


@pytest.mark.parametrize(
    ("mode", "save_as"), [*((mode, "segments") for mode in MODES), ("sync", "npz"), ("same_step", "npz-compressed")]
)
def test_extra_fields_of_each_kind_of_rows_reach_the_batch(mode, save_as, tmp_path):
    fields = tuple(sorted(EXTRAS, key=lambda x: x.name))
    root = tmp_path / "counting" / "buffer"
    with closing(start(mode, "discrete", root, extra_fields=fields, save_trajs_as=save_as, save_every=4)) as pool:
        play(pool, "discrete", 40)
    pieces = read(root, "discrete")
    assert len(pieces) > N
    assert any(len(found) > 1 for found in pieces.values())

    def opened(cls=DiskTrajDataset, padded="both", **options):
        dataset = cls(tmp_path, "counting", **options)
        dataset.configure(DatasetSettings(3, padded, extra_fields=fields))
        return dataset

    class OneByOne(DiskTrajDataset):
        pass

    class Shorter(Relabeler):
        def relabel(self, traj):
            return traj.slice(len(traj) // 3, len(traj))

    rng = np.random.default_rng(0)
    for dataset in (opened(), opened(padded="left"), opened(OneByOne), opened(relabeler=Shorter())):
        check_batch(dataset.sample_batch(rng, 50))


def without(name, at):
    return lambda t, info: {k: v for k, v in info.items() if k != name or t != at}


@pytest.mark.parametrize("mode", ["sync", "same_step", "next_step"])
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (without("label", 2), ["'label'", "step 2", "found none"]),
        (without("task", 0), ["'task'", "step 0", "found none"]),
        (
            lambda t, info: info | {"privileged": np.full((1, 3), np.nan if t == 1 else 1.0)},
            ["'privileged'", "step 1", "finite", "nan"],
        ),
        (lambda t, info: info | {"privileged": np.zeros((1, 4))}, ["'privileged'", "(1, 3)", "(1, 4)"]),
        (lambda t, info: info | ({"label": 1.5} if t else {}), ["'label'", "int32", "1.5"]),
    ],
    ids=["missing", "missing at reset", "not finite", "shape", "dtype"],
)
def test_a_wrong_extra_is_a_fault_of_its_environment(mode, bad, words, tmp_path):
    with closing(start(mode, "discrete", tmp_path, bad=bad, max_env_restarts=2, extra_fields=EXTRAS)) as pool:
        with pytest.raises(ActorError) as raised:
            pool.reset()
            for _ in range(9):
                pool.step(np.zeros((N, 1), np.int64))
        text = str(raised.value)
        assert all(word in text for word in [*words, "counting"]), text
