"""`check_dataset`: whether a data set's sequences are what training takes them for."""

from __future__ import annotations

import json
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from amago.data.batch import Batch, RLData
from amago.data.findings import Findings, StopChecking
from amago.loading.dataset import DatasetSettings, RLDataset
from amago.spaces import ActionSpec, action_spec, spaces_of

_LENGTH = 32


def check_dataset(
    dataset: RLDataset, spaces: Any = None, *, max_seq_len: int = _LENGTH, samples: int = 16, batch_size: int = 4, seed: int = 0
) -> None:
    """Draw sequences and a batch from a data set, and report what training would stumble over or learn wrongly from.

    Checked are: that it is ready; the types, shapes and dtypes of sequences; that lengths are at most ``max_seq_len``; NaN; that time
    indices count steps, that only a last step is terminated, and that ``rl2s`` holds reward and action of the transition before;
    that a batch has its padding at the end; that the same random generator draws the same sequence; that metrics are numbers and the
    state for checkpoints is JSON; and, with ``spaces``, that observations and actions are those of the environment.

    Args:
        dataset: configured or not. One that is not is configured, without the right to delete anything, and closed at the end.
        spaces: the environment, a function that makes it, or (observation space, action space); None: observations and actions are not
            compared with any.
        max_seq_len: transitions of a sequence, where the data set is not configured yet.
        samples: sequences to draw.
        batch_size: sequences of the batch to draw.
        seed: of the generators to draw with.

    Raises:
        CheckError: lists all faults that were found.
        TypeError: ``dataset`` is no `RLDataset`, or ``spaces`` is none of these.
    """
    if not isinstance(dataset, RLDataset):
        raise TypeError(f"dataset is {dataset!r}, but must be an amago.loading.RLDataset")
    findings = Findings(f"check_dataset found faults of the {type(dataset).__name__}")
    wanted = None if spaces is None else spaces_of(spaces)
    configured = hasattr(dataset, "settings")
    try:
        _open(dataset, configured, max_seq_len, wanted, findings)
        check = _SequenceCheck(dataset.settings.max_seq_len, wanted, findings)
        for i in range(samples):
            check(_draw(dataset, seed + i, findings))
            if findings:
                raise StopChecking  # the faults of the next would be the same
        if not _equal(_draw(dataset, seed, findings), _draw(dataset, seed, findings)):
            findings.add(
                "sample_random_trajectory(rng) gives two different sequences for the same rng: draw everything at random from rng, so that "
                "runs repeat and a resumed run goes on with the batches that it would have drawn"
            )
        _check_batch(dataset, batch_size, seed, findings)
        with findings.attempt("state_dict(), written as JSON,"):
            json.dumps(dataset.state_dict())
    except StopChecking:
        pass
    finally:
        if not configured:
            with findings.attempt("close()"):
                dataset.close()
    findings.finish()


def _open(dataset: RLDataset, configured: bool, max_seq_len: int, wanted: Any, findings: Findings) -> None:
    """Configure the data set, unless it is, and wait for nothing: what is not ready now is a fault."""
    if not configured:
        with findings.attempt("configure()"):
            dataset.configure(DatasetSettings(max_seq_len, has_edit_rights=False))
        if not findings and not hasattr(dataset, "settings"):
            findings.add("configure() does not keep the settings: call super().configure(settings) in it")
    if wanted is not None and not findings:
        with findings.attempt("check_spaces()"):
            dataset.check_spaces(*wanted)
    if findings:
        raise StopChecking
    with findings.attempt("on_end_of_collection()"):
        metrics = dataset.on_end_of_collection()
        if not isinstance(metrics, dict) or not all(isinstance(v, (int, float, np.number)) for v in metrics.values()):
            findings.add(f"on_end_of_collection() returned {metrics!r}, but must return a dict of numbers")
    with findings.attempt("ready_for_training"):
        if not dataset.ready_for_training:
            refused = "".join(f"; {path}: {reason}" for path, reason in dataset.refused_files().items())
            findings.add(f"there is nothing to train on: ready_for_training is {dataset.ready_for_training!r}{refused}")
    if findings:
        raise StopChecking


def _draw(dataset: RLDataset, seed: int, findings: Findings) -> RLData:
    with findings.attempt("sample_random_trajectory(rng)"):
        found = dataset.sample_random_trajectory(np.random.default_rng(seed))
        if isinstance(found, RLData):
            return found
        findings.add(
            f"sample_random_trajectory(rng) returned a {type(found).__name__}, but must return an amago.loading.RLData"
        )
    raise StopChecking


def _tensors(data: RLData) -> dict[str, Tensor]:
    fixed = {name: getattr(data, name) for name in ("rl2s", "time_idxs", "rews", "dones", "actions")}
    return {f"obs[{key!r}]": value for key, value in data.obs.items()} | fixed


def _equal(a: RLData, b: RLData) -> bool:
    x, y = _tensors(a), _tensors(b)
    return x.keys() == y.keys() and all(v.shape == y[k].shape and torch.equal(v, y[k]) for k, v in x.items())


class _SequenceCheck:
    """The checks of one sequence: of L transitions and A numbers of an action."""

    def __init__(self, max_seq_len: int, wanted: tuple[gym.spaces.Dict, gym.Space[Any]] | None, findings: Findings):
        self.max_seq_len, self.findings = max_seq_len, findings
        self.obs_space = None if wanted is None else wanted[0]
        self.spec = None if wanted is None else action_spec(wanted[1])

    def __call__(self, data: RLData) -> None:
        self._check_shapes(data)
        for name, x in _tensors(data).items():
            if x.is_floating_point() and not torch.isfinite(x).all():
                self.findings.add(f"{name} of a sequence holds {x[~torch.isfinite(x)][0].item()}")
        self._check_time(data)
        if self.obs_space is not None:
            self._check_observations(data, self.obs_space)
        if self.spec is not None:
            self._check_actions(data.actions, self.spec)

    def _check_shapes(self, data: RLData) -> None:
        """Stop where the rest cannot be read."""
        tensors, before = _tensors(data), len(self.findings.problems)
        for name, x in tensors.items():
            if not isinstance(x, Tensor) or x.ndim < 1:
                self.findings.add(f"{name} of a sequence is {x!r:.80}, but must be a tensor with one row a step")
                raise StopChecking
        length = len(data)
        if not 1 <= length <= self.max_seq_len:
            self.findings.add(
                f"a sequence has {length} transitions (rows of rews), but must have 1 to max_seq_len={self.max_seq_len}"
            )
        width = data.actions.shape[-1]
        rows = {"rl2s": (length + 1, 1 + width), "time_idxs": (length + 1, 1), "rews": (length, 1), "dones": (length, 1)}
        rows |= {"actions": (length, width)}
        for name, x in tensors.items():
            expected = rows.get(name, (length + 1, *x.shape[1:]))
            if tuple(x.shape) != expected:
                self.findings.add(
                    f"{name} has shape {tuple(x.shape)}, but must have {expected} in a sequence of {length} transitions"
                )
        for name, right, what in (
            ("rl2s", data.rl2s.is_floating_point(), "float32"), ("rews", data.rews.is_floating_point(), "float32"),
            ("actions", data.actions.is_floating_point(), "float32, in vector form (one-hot, [-1, 1] or bits)"),
            ("dones", data.dones.dtype == torch.bool, "bool"), ("time_idxs", data.time_idxs.dtype == torch.int64, "int64"),
        ):  # fmt: skip
            if not right:
                self.findings.add(f"{name} has dtype {getattr(data, name).dtype}, but must have {what}")
        if len(self.findings.problems) > before:
            raise StopChecking

    def _check_time(self, data: RLData) -> None:
        steps = data.time_idxs[:, 0]
        if steps[0] < 0 or not torch.equal(steps, steps[0] + torch.arange(len(steps))):
            self.findings.add(f"time_idxs must count the steps of a rollout, one by one, got {steps.tolist()[:6]}...")
        if data.dones[:-1].any():
            at = int(data.dones[:-1, 0].nonzero()[0])
            self.findings.add(f"dones is True at transition {at} of {len(data)}: a sequence must end where its rollout does")
        expected = torch.cat((data.rews, data.actions), -1)
        if not torch.allclose(data.rl2s[1:], expected.to(data.rl2s), rtol=1e-4, atol=1e-4):
            self.findings.add(
                "rl2s must hold, beside each observation, the reward and the action that led to it: rl2s[t + 1] = [rews[t], actions[t]], "
                "as amago.loading.RLData.from_traj makes it"
            )
        elif steps[0] == 0 and data.rl2s[0].any():
            self.findings.add(f"rl2s must be 0 where a rollout begins (time index 0), got {data.rl2s[0].tolist()}")

    def _check_observations(self, data: RLData, space: gym.spaces.Dict) -> None:
        if data.obs.keys() != space.spaces.keys():
            self.findings.add(f"a sequence has observations {sorted(data.obs)}, but the environment has {sorted(space.spaces)}")
            return
        for key, x in data.obs.items():
            box: Any = space[key]
            found, right = (tuple(x.shape[1:]), x.numpy().dtype), (tuple(box.shape), np.dtype(box.dtype))
            if found != right:
                self.findings.add(
                    f"obs[{key!r}] has shape {found[0]} and dtype {found[1]}, but the environment has {right[0]} and {right[1]}"
                )
                continue
            low, high = (b.astype(np.float64) for b in (box.low, box.high))
            array = x.numpy().astype(np.float64)
            far = (array < low - 1e-4 * (1.0 + np.abs(low))) | (array > high + 1e-4 * (1.0 + np.abs(high)))
            if far.any():
                self.findings.add(
                    f"obs[{key!r}] is {array[far][0]:g}, outside of the environment's space, {low.min():g} to {high.max():g}"
                )

    def _check_actions(self, actions: Tensor, spec: ActionSpec) -> None:
        if actions.shape[-1] != spec.dim:
            self.findings.add(
                f"actions have {actions.shape[-1]} numbers, but those of the environment, {spec.space}, have {spec.dim}"
            )
            return
        for part in spec.parts:
            x = actions[:, part.vector]
            if part.kind == "continuous":
                wrong, right = (x.abs() > 1.0 + 1e-4).any(), "numbers from -1 to 1"
            else:
                wrong, right = ((x != 0) & (x != 1)).any(), "bits, 0 or 1"
            if part.kind == "discrete":
                wrong, right = wrong | (x.sum(-1) != 1).any(), f"one-hot vectors of {part.dim}"
            if wrong:
                self.findings.add(
                    f"actions {part.vector.start} to {part.vector.stop - 1} must be {right}, got such as {_odd(x)}"
                )


def _odd(x: Tensor) -> list[float]:
    """The row of actions that is furthest from legal."""
    return x[int(((x - x.round()).abs().sum(-1) + (x.abs().sum(-1) - 1).abs()).argmax())].tolist()


def _check_batch(dataset: RLDataset, batch_size: int, seed: int, findings: Findings) -> None:
    with findings.attempt(f"sample_batch(rng, {batch_size})"):
        batch = dataset.sample_batch(np.random.default_rng(seed), batch_size)
        if not isinstance(batch, Batch):
            findings.add(
                f"sample_batch(rng, {batch_size}) returned a {type(batch).__name__}, but must return an amago.loading.Batch"
            )
            return
        rows, length = batch.rews.shape[:2]
        if rows != batch_size:
            findings.add(f"sample_batch(rng, {batch_size}) returned {rows} sequences")
        if length > dataset.settings.max_seq_len:
            findings.add(f"a batch has sequences of {length} transitions, more than max_seq_len={dataset.settings.max_seq_len}")
        mask = batch.mask[..., 0]
        if not mask[:, :2].all() or (mask[:, 1:] & ~mask[:, :-1]).any():
            findings.add(
                "the mask of a batch must be True for the first observations of each sequence, two or more, and then False"
            )
            return
        real = {"rews": (batch.rews, mask[:, 1:]), "rl2s": (batch.rl2s, mask), "actions": (batch.actions, mask[:, 1:])}
        for name, (x, where) in (real | {f"obs[{k!r}]": (v, mask) for k, v in batch.obs.items()}).items():
            if x.is_floating_point() and not torch.isfinite(x[where]).all():
                findings.add(f"{name} of a batch holds NaN or infinity at real steps")
