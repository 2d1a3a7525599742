"""``.traj`` files: pickles of older systems, read only with ``allow_pickle=True`` and never written.

Unpickling can run any code. Even with ``allow_pickle=True``, only numpy arrays in plain containers and the classes of
`amago.data.trajectory` are created: a file with any other name is refused before that name is imported.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from amago.data.trajectory import FrozenTraj, StoredTraj
from amago.spaces import ActionSpec, action_spec
from amago.store.errors import BadFileError, PickleRefusedError
from amago.store.files import open_regular
from amago.store.schema import CODE_OF, key_problem
from amago.store.segment import read_exactly

SUFFIX = ".traj"
MAX_BYTES = 1 << 30
FIELDS = ("obs", "rl2s", "time_idxs", "rews", "dones", "actions")


def refuse(path: str | os.PathLike[str], count: int = 1) -> PickleRefusedError:
    """The error for pickles that were not allowed."""
    more = f" (and {count - 1} more)" if count > 1 else ""
    return PickleRefusedError(
        f"{os.fspath(path)}{more} is a .traj pickle: reading one could run any code that its author put into it. If you "
        "trust where it comes from, convert it for good ('amago buffer import DIRECTORY RUN --allow-pickle') and move it away, or "
        "pass allow_pickle=True; otherwise move it away."
    )


# The functions that numpy's pickles call, taken from such pickles because their modules differ between versions of numpy.
_NUMPY = {
    "_reconstruct": np.zeros(1).__reduce__()[0],
    "_frombuffer": np.zeros(1).__reduce_ex__(5)[0],
    "scalar": np.float32(0).__reduce__()[0],
}


class _Trajectory:
    """Stands for the original's ``amago.hindsight.Trajectory``: an attribute ``timesteps``, a list of `_Timestep`."""


class _Timestep:
    """Stands for the original's ``Timestep``: obs, prev_action, reward, time_idx and terminal, each with a leading axis of one."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "amago.hindsight" and name in ("Trajectory", "Timestep"):
            return _Trajectory if name == "Trajectory" else _Timestep
        if module in ("amago.hindsight", "amago.data.trajectory") and name == "FrozenTraj":
            return FrozenTraj
        if module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric"):
            if name in ("ndarray", "dtype"):
                return getattr(np, name)
            if name in _NUMPY:
                return _NUMPY[name]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        raise BadFileError(f"the pickle names {module}.{name}, which is not part of a trajectory")


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1")


def read_traj(path: str | Path, *, allow_pickle: bool = False) -> tuple[StoredTraj, ActionSpec]:
    """Read a pickled `amago.data.trajectory.FrozenTraj`, a dict of its six fields, or a trajectory of the original system.

    Such a file has actions in vector form and does not record the spaces. Its actions are returned as vectors, with the spec of a
    box of their width; `StoredTraj.derive` restores the arrays that were pickled.

    Raises:
        PickleRefusedError: without ``allow_pickle=True``.
        BadFileError: the file is not a pickle of a trajectory; nothing in it has been run.
    """
    if not allow_pickle:
        raise refuse(path)
    fd, _ = open_regular(path)
    try:
        return read_open_traj(fd)
    finally:
        os.close(fd)


def read_open_traj(fd: int) -> tuple[StoredTraj, ActionSpec]:
    """`read_traj` of an open file, with pickles allowed."""
    size = os.fstat(fd).st_size
    if size > MAX_BYTES:
        raise BadFileError(f"{size} bytes are more than the {MAX_BYTES} that a .traj file may have")
    raw = read_exactly(fd, size, 0)
    try:
        content = _Unpickler(io.BytesIO(raw)).load()
    except BadFileError:
        raise
    except Exception as err:  # a damaged pickle raises almost anything
        raise BadFileError(f"the pickle cannot be read: {err!r:.200}") from err
    if isinstance(content, _Trajectory):
        content = _from_timesteps(content)
    fields = content if isinstance(content, dict) else getattr(content, "__dict__", {})
    missing = [name for name in FIELDS if name not in fields]
    if missing or not isinstance(fields["obs"], dict):
        raise BadFileError(f"the pickle holds {type(content).__name__}, which lacks {missing or 'a dict of observations'}")
    return _convert(fields)


def _from_timesteps(traj: _Trajectory) -> dict[str, Any]:
    """The six fields of a trajectory that was pickled step by step."""
    try:
        steps: list[Any] = vars(traj)["timesteps"]
        obs = {k: np.stack([np.asarray(s.obs[k])[0] for s in steps]) for k in steps[0].obs}
        columns = {name: np.stack([np.asarray(getattr(s, name)).reshape(-1) for s in steps]) for name in _STEP}
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as err:
        raise BadFileError(f"the pickled timesteps do not fit together: {err!r:.200}") from err
    rewards, actions = columns["reward"], columns["prev_action"]
    return {
        "obs": obs, "rl2s": np.concatenate((rewards, actions), axis=1), "time_idxs": columns["time_idx"], "rews": rewards[1:],
        "dones": columns["terminal"][1:], "actions": actions[1:],
    }  # fmt: skip


_STEP = ("prev_action", "reward", "time_idx", "terminal")


def _convert(fields: dict[str, Any]) -> tuple[StoredTraj, ActionSpec]:
    try:
        obs = {str(k): np.ascontiguousarray(v) for k, v in fields["obs"].items()}
        rews = np.asarray(fields["rews"], dtype=np.float32).reshape(-1, 1)
        frozen = FrozenTraj(
            obs=obs,
            rl2s=np.asarray(fields["rl2s"], dtype=np.float32),
            time_idxs=np.asarray(fields["time_idxs"], dtype=np.int64).reshape(-1, 1),
            rews=rews,
            dones=np.asarray(fields["dones"]).astype(bool).reshape(-1, 1),
            actions=np.asarray(fields["actions"], dtype=np.float32).reshape(len(rews), -1),
        ).validate()
    except (ValueError, TypeError, AttributeError) as err:
        raise BadFileError(f"the pickled fields do not fit together: {err}") from err
    bad = [k for k, v in obs.items() if v.dtype not in CODE_OF or key_problem(k)]
    width = frozen.actions.shape[1]
    if bad or not len(frozen) or frozen.rl2s.shape != (len(frozen) + 1, 1 + width) or frozen.time_idxs[0, 0] < 0:
        raise BadFileError(f"observations {bad} or the shapes of rl2s, time_idxs and actions are wrong")
    spec = action_spec(gym.spaces.Box(-1.0, 1.0, shape=(width,), dtype=np.float32))
    return frozen.to_stored(spec, env_name=str(fields.get("env_name", ""))), spec
