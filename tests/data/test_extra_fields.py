"""Declared extra fields: what is refused, and what slicing, relabelling and collating keep."""

import dataclasses

import gymnasium as gym
import numpy as np
import tiny
import torch
from messages import check_refused, naming, refused

import amago
from amago.data.extras import check_extra_fields
from amago.data.trajectory import FrozenTraj, StoredTraj
from amago.loading import DatasetSettings, RLData, RLDataset, collate
from amago.loading.dataset import sample_window
from amago.relabeling import Relabeler
from amago.run.settings import SettingsError
from amago.spaces import action_spec

SPEC = action_spec(gym.spaces.Discrete(3))
FIELDS = (
    amago.ExtraField("each", "T+1", (2,)),
    amago.ExtraField("step", "T", dtype="int64"),
    amago.ExtraField("once", "1", (1,)),
)


def stored(steps: int = 5) -> StoredTraj:
    t = np.arange(steps + 1)
    return StoredTraj(
        obs={"t": t[:, None].astype(np.float32)},
        actions=(t[:-1, None] % 3),
        rews=t[1:, None].astype(np.float32),
        dones=np.zeros((steps, 1), bool),
        extras={"each": np.stack([t, -t], 1).astype(np.float32), "step": t[:-1], "once": np.full((1, 1), 9, np.float32)},
    )


class Rebuilt(Relabeler):
    """Returns a trajectory that was built by hand, without extras."""

    def __init__(self, steps):
        self.steps = steps

    def relabel(self, traj):
        piece = traj.slice(0, self.steps)
        return FrozenTraj(piece.obs, piece.rl2s, piece.time_idxs, piece.rews, piece.dones, piece.actions)


def test_relabelling_keeps_them_or_is_refused():
    def window(relabeler):
        settings = DatasetSettings(10, extra_fields=FIELDS)
        return sample_window(5, SPEC, lambda *_: stored(), relabeler, settings, np.random.default_rng(0))

    kept, t = window(Rebuilt(5)).extras, np.arange(6)
    assert (kept["each"].tolist(), kept["step"].tolist(), kept["once"].tolist()) == (
        [[i, -i] for i in t],
        t[:-1].tolist(),
        [[9]],
    )
    with refused(ValueError, 5, 3, "'each', 'step'"):
        window(Rebuilt(3))


def sequence(steps):
    return RLData.from_traj(stored(steps).derive(SPEC))


def test_batches_have_exactly_the_declared_fields():
    plain = dataclasses.replace(sequence(2), extras={})
    given = iter([sequence(4), plain, sequence(1)])
    dataset = type("Given", (RLDataset,), {"sample_random_trajectory": lambda self, rng: next(given)})()
    fields = (dataclasses.replace(FIELDS[0], default=7.0), dataclasses.replace(FIELDS[1], default=5))
    dataset.configure(DatasetSettings(10, extra_fields=fields))
    batch = dataset.sample_batch(np.random.default_rng(0), 3)
    assert {k: tuple(v.shape) for k, v in batch.extras.items()} == {"each": (3, 5, 2), "step": (3, 4)}
    assert batch.extras["step"].tolist() == [[0, 1, 2, 3], [5, 5, 0, 0], [0, 0, 0, 0]]
    assert (batch.extras["each"][1, :3] == 7).all()
    moved = batch.to("cpu")
    assert all(torch.equal(moved.extras[k], batch.extras[k]) for k in batch.extras)


def test_an_experiment_checks_its_extra_fields_before_it_starts(tmp_path):
    unknown = amago.ExtraField("value", rows="T", source="policy")
    check_refused(
        SettingsError,
        (
            naming("extra_fields", "'value'", "source='policy'", "agent_type", "Agent"),
            lambda: tiny.started(tmp_path, extra_fields=[unknown]),
        ),
        (naming("extra_fields", "'once'"), lambda: tiny.started(tmp_path, extra_fields=[FIELDS[2], FIELDS[2]])),
    )


def test_wrong_declarations_are_refused():
    wrong = {
        ("name", "'a/b'"): {"name": "a/b"}, ("rows", "'L'", "'T+1'"): {"rows": "L"}, ("shape", (2, 0)): {"shape": (2, 0)},
        ("dtype", "complex64"): {"dtype": "complex64"}, ("dtype", "nonsense"): {"dtype": "nonsense"},
        ("source", "'agent'", "'policy'"): {"source": "agent"}, ("rows", "'T'"): {"source": "policy", "rows": "T+1"},
        ("default", 1000): {"dtype": "int8", "default": 1000}, ("default", "nan"): {"default": float("nan")},
    }  # fmt: skip
    short, one = stored().derive(SPEC), sequence(2)
    short.extras["step"] = np.zeros(3)
    check_refused(
        ValueError,
        *((naming("ExtraField", *words), lambda kw=kw: amago.ExtraField(**{"name": "x"} | kw)) for words, kw in wrong.items()),
        ("'x'", lambda: check_extra_fields([amago.ExtraField("x"), amago.ExtraField("x", rows="1")])),
        (naming("extra_fields[0]", "'x'"), lambda: DatasetSettings(4, extra_fields=["x"])),
        (naming("extras['step']", 3), short.validate),
        (naming("extras['each']", (3, 2), (3, 1)), lambda: collate([one], [amago.ExtraField("each", "T+1", (1,))])),
        (naming("extras", [], ["each", "once", "step"]), lambda: collate([one, dataclasses.replace(one, extras={})])),
    )
