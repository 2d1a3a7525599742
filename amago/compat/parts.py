"""Parts that a client gives to an `amago.Experiment`, as a run uses its own: policies, loaders of batches, training states of Accelerate; and
paths as text.

Facts served: an agent overrides ``get_actions(obs, rl2s, time_idxs, hidden_state=None, sample=True)`` and expects a dimension of one
timestep after N; ``Experiment.policy_aclr`` is replaced by any module with ``get_actions``, ``eval()`` and a ``traj_encoder`` with
``init_hidden_state`` and ``reset_hidden_state``. ``Experiment.init_dloaders`` is overridden and sets ``train_dloader`` to, or returns, any
iterable of batches; each epoch trains on all that one pass over it yields. ``Experiment.ckpt_dir`` is a str, joined with ``+`` and
`os.path.join`. ``save_checkpoint`` is overridden with ``accelerator.save_state(directory, safe_serialization=False)``, and the original system
saves so itself: weights, the optimizer's state, and the schedule as ``scheduler.bin`` or as the first custom object; random states are
pickles, and are not read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence, Sized
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from accelerate.scheduler import AcceleratedScheduler
from safetensors.torch import load_file
from torch import Tensor, nn

from amago.agent import BaseAgent
from amago.data.batch import Batch
from amago.loading import SequenceLoader
from amago.nets.traj_base import Dones
from amago.run.checkpoint import MANIFEST, CheckpointError, check_archive, load_into


def as_actor(policy: object) -> BaseAgent:
    """The object that acts in a rollout: the policy itself if `BaseAgent.get_actions` is amago's, else an adapter around it."""
    if isinstance(policy, BaseAgent) and "get_actions" not in vars(policy):
        owner = next(c for c in type(policy).__mro__ if "get_actions" in vars(c))
        if owner.__module__.partition(".")[0] == "amago":
            return policy
    return StepwiseActor(policy)  # type: ignore[return-value]


class StepwiseActor:
    """Calls ``policy.get_actions`` with a dimension of one timestep after N, and takes it away from the actions."""

    def __init__(self, policy: Any):
        if not callable(getattr(policy, "get_actions", None)):
            raise TypeError(
                f"{type(policy).__name__} cannot act: it has no get_actions(obs, rl2s, time_idxs, hidden_state, sample)"
            )
        self.policy = policy
        self._memory = policy if hasattr(policy, "init_hidden_state") else policy.traj_encoder

    @property
    def training(self) -> bool:
        return isinstance(self.policy, nn.Module) and self.policy.training

    def eval(self) -> None:
        self.policy.eval()

    def train(self, mode: bool) -> None:
        if isinstance(self.policy, nn.Module):
            self.policy.train(mode)

    def init_hidden_state(self, batch_size: int, device: torch.device | str) -> Any:
        return self._memory.init_hidden_state(batch_size, device)

    def reset_hidden_state(self, hidden_state: object, dones: Dones) -> Any:
        return self._memory.reset_hidden_state(hidden_state, dones)

    def can_slice_hidden_state(self, hidden_state: object) -> bool:
        return isinstance(self.policy, BaseAgent) and self.policy.can_slice_hidden_state(hidden_state)

    def slice_hidden_state(self, hidden_state: object, start: int, stop: int) -> Any:
        return self.policy.slice_hidden_state(hidden_state, start, stop)

    def get_actions(
        self, obs: dict[str, Tensor], rl2s: Tensor, time_idxs: Tensor, hidden_state: object = None, sample: bool = True
    ) -> tuple[Tensor, Any]:
        """As `BaseAgent.get_actions` with (N, ...)."""
        steps = {key: value.unsqueeze(1) for key, value in obs.items()}
        chosen, hidden_state = self.policy.get_actions(
            obs=steps, rl2s=rl2s.unsqueeze(1), time_idxs=time_idxs.unsqueeze(1), hidden_state=hidden_state, sample=sample
        )
        actions = torch.as_tensor(chosen)
        if actions.shape[:1] != rl2s.shape[:1]:
            raise ValueError(
                f"{type(self.policy).__name__}.get_actions returned actions of shape {tuple(actions.shape)} for {len(rl2s)} actors; "
                "they must be (N, 1, S), or (N, S)"
            )
        return actions.reshape(len(actions), -1), hidden_state

    def get_actions_and_extras(
        self, obs: object, rl2s: object, time_idxs: object, hidden_state: object, names: Sequence[str], sample: bool = True
    ) -> tuple[Tensor, dict[str, Tensor], Any]:
        """Extra fields are computed by amago's own `BaseAgent.get_actions_and_extras` only."""
        raise TypeError(
            f"the extra fields {', '.join(names)} are computed with the actions, but {type(self.policy).__name__} has a get_actions of its "
            "own, which returns none: override BaseAgent.act_with_extras instead"
        )


class ForeignLoader:
    """An iterable of batches, with the methods of a `SequenceLoader` that a run needs. No checkpoint holds its position.

    Args:
        batches: yields batches. If it has a length, an epoch is one pass over it; else the number of batches of the experiment.
        device: batches are moved there.

    Attributes:
        next_batch: batches that were taken, ever.
        seed: of the run; not used.
    """

    def __init__(self, batches: Iterable[Batch], device: torch.device | str):
        self.given, self.device = batches, torch.device(device)
        self.next_batch = self.seed = 0

    def count(self, left: int, planned: int) -> int:
        """Number of batches left in an epoch of ``planned`` batches, of which ``left`` remain."""
        return left if not isinstance(self.given, Sized) else max(0, len(self.given) - (planned - left))

    def batches(self, count: int) -> Iterator[Batch]:
        """The first ``count`` batches of a new pass, on the device."""
        for batch in itertools.islice(self.given, count):
            self.next_batch += 1
            yield batch if batch.rl2s.device == self.device else batch.to(self.device)

    def close(self) -> None:
        """Do nothing: no file or thread is open."""


def as_loader(made: object, device: torch.device | str) -> SequenceLoader | ForeignLoader:
    """The source from which a run draws batches; TypeError if it cannot be iterated over."""
    if isinstance(made, SequenceLoader | ForeignLoader):
        return made
    if not isinstance(made, Iterable):
        raise TypeError(f"init_dloaders must make an iterable of batches, but train_dloader is {made!r}")
    return ForeignLoader(made, device)


class TextPath(str):
    """A path as a str that also has the ``/`` of `pathlib.Path`, which gives a `Path`."""

    def __new__(cls, path: str | PathLike[str]) -> TextPath:
        return super().__new__(cls, Path(path))

    def __truediv__(self, name: str | PathLike[str]) -> Path:
        return Path(self) / name


_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_SCHEDULES = ("scheduler.bin", "custom_checkpoint_0.pkl")


def is_accelerate_state(path: Path) -> bool:
    """True if a directory is a training state of Accelerate, and not one of this library's."""
    return not (path / MANIFEST).exists() and any((path / name).is_file() for name in _WEIGHTS)


def load_accelerate_state(path: Path, policy: BaseAgent, optimizer: object, schedule: object) -> int:
    """Load weights, the optimizer's state and the schedule; returns the updates that the schedule has counted.

    A CheckpointError names a file that is damaged, holds other objects than tensors and numbers, or does not fit.
    """
    weights = next(path / name for name in _WEIGHTS if (path / name).is_file())
    load_into(policy, _read(weights), weights)
    if (path / "optimizer.bin").is_file():
        _into(optimizer, path / "optimizer.bin")
    found = [path / name for name in _SCHEDULES if (path / name).is_file()]
    if not found:
        return 0
    state = _into(schedule.scheduler if isinstance(schedule, AcceleratedScheduler) else schedule, found[0])
    return int(state.get("last_epoch", 0))


def _into(part: Any, path: Path) -> dict[str, Any]:
    state = _read(path)
    try:
        part.load_state_dict(state)
    except (ValueError, KeyError, TypeError) as err:
        raise CheckpointError(
            f"{path} does not fit this run: {err}; load_checkpoint_from_path(WEIGHTS, is_accelerate_state=False) loads the weights alone"
        ) from err
    return state


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with open(path, "rb") as f:
            check_archive(f)
            found = torch.load(f, map_location="cpu", weights_only=True)
    except Exception as err:
        raise CheckpointError(f"{path} cannot be read: {(str(err) or repr(err)).splitlines()[0]}") from err
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a state dict")
    return found
