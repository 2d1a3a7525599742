"""`check_dataset`: check that a dataset's sequences keep the contract that training relies on."""

from __future__ import annotations

import json

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from amago.data.batch import Batch, RLData
from amago.data.findings import Findings, StopChecking
from amago.data.trajectory import columns
from amago.loading.dataset import DatasetSettings, RLDataset
from amago.spaces import ActionSpec, action_spec, spaces_of

_LENGTH = 32


def check_dataset(
    dataset: RLDataset,
    spaces: object = None,
    *,
    max_seq_len: int = _LENGTH,
    samples: int = 16,
    batch_size: int = 4,
    seed: int = 0,
) -> None:
    """Draw sequences and a batch from a dataset, and report the faults that would break or mislead training.

    Checked are: that it is ready; the types, shapes and dtypes of sequences; that lengths are at most ``max_seq_len``; NaN;
    that time indices count steps, that only a last step is terminated, and that ``rl2s`` holds reward and action of the
    transition before; that a batch has its padding at the end; that the same random generator draws the same sequence; that
    metrics are numbers and the state for checkpoints is JSON; and, with ``spaces``, that observations and actions fit the
    environment.

    Args:
        dataset: configured or not. One that is not is configured, without the right to delete anything, and closed at the end.
        spaces: the environment, a function that makes it, or (observation space, action space); None: observations and actions
            are not compared with any.
        max_seq_len: transitions of a sequence, where the dataset is not configured yet.
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
    configured = dataset.configured
    try:
        if not configured:
            with findings.attempt("configure()"):
                dataset.configure(DatasetSettings(max_seq_len, has_edit_rights=False))
            if not findings and not dataset.configured:
                findings.add("configure() does not keep the settings: call super().configure(settings) in it")
        if wanted is not None and not findings:
            with findings.attempt("check_spaces()"):
                dataset.check_spaces(*wanted)
        findings.stop_if_any()
        _check_ready(dataset, findings)
        for i in range(samples):
            data = _draw(dataset, seed + i, findings)
            _check_sequence(data, dataset.settings.max_seq_len, findings)
            if wanted is not None:
                _check_fit(data, wanted[0], action_spec(wanted[1]), findings)
            findings.stop_if_any()  # the faults of the next would be the same
        first, second = (_tensors(_draw(dataset, seed, findings)) for _ in range(2))
        if first.keys() != second.keys() or not all(torch.equal(x, second[k]) for k, x in first.items()):
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


def _check_ready(dataset: RLDataset, findings: Findings) -> None:
    """Without waiting: a dataset that is not ready now is a fault."""
    with findings.attempt("on_end_of_collection()"):
        metrics = dataset.on_end_of_collection()
        if not isinstance(metrics, dict) or not all(isinstance(v, int | float | np.number) for v in metrics.values()):
            findings.add(f"on_end_of_collection() returned {metrics!r}, but must return a dict of numbers")
    with findings.attempt("ready_for_training"):
        if not dataset.ready_for_training:
            refused = "".join(f"; {path}: {reason}" for path, reason in dataset.refused_files().items())
            findings.add(f"there is nothing to train on: ready_for_training is {dataset.ready_for_training!r}{refused}")
    findings.stop_if_any()


def _draw(dataset: RLDataset, seed: int, findings: Findings) -> RLData:
    with findings.attempt("sample_random_trajectory(rng)"):
        found = dataset.sample_random_trajectory(np.random.default_rng(seed))
        if isinstance(found, RLData):
            return found
        findings.add(f"sample_random_trajectory(rng) returned a {type(found).__name__}, not an amago.loading.RLData")
    raise StopChecking


def _tensors(data: RLData | Batch) -> dict[str, Tensor]:
    return {f"obs[{key!r}]": value for key, value in data.obs.items()} | columns(data)


def _check_sequence(data: RLData, max_seq_len: int, findings: Findings) -> None:
    tensors = _tensors(data)
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or x.ndim < 1:
            findings.add(f"{name} of a sequence is {x!r:.80}, but must be a tensor with one row a step")
            raise StopChecking
    length, width = len(data), data.actions.shape[-1]
    if not 1 <= length <= max_seq_len:
        findings.add(f"a sequence has {length} transitions (rows of rews), but must have 1 to max_seq_len={max_seq_len}")
    real = torch.is_floating_point
    fields = {
        "rl2s": ((length + 1, 1 + width), real(data.rl2s), "float32"),
        "time_idxs": ((length + 1, 1), data.time_idxs.dtype == torch.int64, "int64"),
        "rews": ((length, 1), real(data.rews), "float32"),
        "dones": ((length, 1), data.dones.dtype == torch.bool, "bool"),
        "actions": ((length, width), real(data.actions), "float32, in vector form (one-hot, [-1, 1] or bits)"),
    }
    for name, x in tensors.items():
        shape, right, words = fields.get(name, ((length + 1, *x.shape[1:]), True, ""))
        if tuple(x.shape) != shape:
            findings.add(f"{name} has shape {tuple(x.shape)}, but must have {shape} in a sequence of {length} transitions")
        if not right:
            findings.add(f"{name} has dtype {x.dtype}, but must have {words}")
    findings.stop_if_any()
    for name, x in tensors.items():
        if not torch.isfinite(x).all():
            findings.add(f"{name} of a sequence holds {x[~torch.isfinite(x)][0].item()}")
    steps = data.time_idxs[:, 0]
    if steps[0] < 0 or not torch.equal(steps, steps[0] + torch.arange(len(steps))):
        findings.add(f"time_idxs must count the steps of a rollout, one by one, got {steps.tolist()[:6]}...")
    if data.dones[:-1].any():
        at = int(data.dones[:-1, 0].nonzero()[0])
        findings.add(f"dones is True at transition {at} of {length}: a sequence must end where its rollout does")
    expected = torch.cat((data.rews, data.actions), -1)
    if not torch.allclose(data.rl2s[1:], expected.to(data.rl2s), rtol=1e-4, atol=1e-4):
        findings.add(
            "rl2s must hold, beside each observation, the reward and the action that led to it: rl2s[t + 1] = [rews[t], actions[t]], "
            "as amago.loading.RLData.from_traj makes it"
        )
    elif steps[0] == 0 and data.rl2s[0].any():
        findings.add(f"rl2s must be 0 where a rollout begins (time index 0), got {data.rl2s[0].tolist()}")


def _check_fit(data: RLData, space: gym.spaces.Dict, spec: ActionSpec, findings: Findings) -> None:
    """Compare observations and actions with the environment's."""
    if data.obs.keys() != space.spaces.keys():
        findings.add(f"a sequence has observations {sorted(data.obs)}, but the environment has {sorted(space.spaces)}")
    for key in data.obs.keys() & space.spaces.keys():
        values, box = data.obs[key].numpy(), space[key]
        assert isinstance(box, gym.spaces.Box)
        if (values.shape[1:], values.dtype) != (box.shape, box.dtype):
            findings.add(
                f"obs[{key!r}] has shape {values.shape[1:]} and dtype {values.dtype}, but the environment has {box.shape} and {box.dtype}"
            )
            continue
        low, high, array = (np.asarray(b, np.float64) for b in (box.low, box.high, values))
        far = (array < low - 1e-4 * (1.0 + np.abs(low))) | (array > high + 1e-4 * (1.0 + np.abs(high)))
        if far.any():
            findings.add(
                f"obs[{key!r}] is {array[far][0]:g}, outside of the environment's space, {low.min():g} to {high.max():g}"
            )
    x = data.actions.numpy()
    if x.shape[-1] != spec.dim:
        findings.add(f"actions have {x.shape[-1]} numbers, but those of the environment, {spec.space}, have {spec.dim}")
        return
    wrong = (np.abs(x) > 1 + 1e-4) | ~np.isclose(spec.to_vector(spec.from_vector(x)), x, atol=1e-4)
    if wrong.any():
        found = x[wrong.any(-1)][0].tolist()
        findings.add(f"actions must be vectors of {spec.space}: one-hot, bits or numbers from -1 to 1, got such as {found}")


def _check_batch(dataset: RLDataset, batch_size: int, seed: int, findings: Findings) -> None:
    with findings.attempt(f"sample_batch(rng, {batch_size})"):
        batch = dataset.sample_batch(np.random.default_rng(seed), batch_size)
        if not isinstance(batch, Batch):
            findings.add(f"sample_batch(rng, {batch_size}) returned a {type(batch).__name__}, not an amago.loading.Batch")
            return
        rows, length = batch.rews.shape[:2]
        if rows != batch_size or length > dataset.settings.max_seq_len:
            findings.add(
                f"sample_batch(rng, {batch_size}) returned {rows} sequences of {length} transitions; "
                f"max_seq_len={dataset.settings.max_seq_len}"
            )
        mask = batch.mask[..., 0]
        if not mask[:, :2].all() or (mask[:, 1:] & ~mask[:, :-1]).any():
            findings.add("the mask of a batch must be True for two or more first observations of each sequence, and then False")
            return
        for name, x in _tensors(batch).items():
            if not torch.isfinite(x[mask if x.shape[1] == length + 1 else mask[:, 1:]]).all():
                findings.add(f"{name} of a batch holds NaN or infinity at real steps")
