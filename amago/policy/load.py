"""A trained agent as a function from observations to actions that keeps its own memory."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from amago import config
from amago.agent import BaseAgent
from amago.data.trajectory import rl2
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TstepEncoder
from amago.policy.export import export_policy
from amago.policy.original import adapt_weights
from amago.run import checkpoint
from amago.run.checkpoint import CheckpointError
from amago.run.weights import load_into, load_weights_and_version
from amago.spaces import action_spec, describe, from_description, rl2_space

SPEC_FILE = "policy.json"
_NO_PART_OF_A_POLICY = ("amago.experiment.", "amago.envs.", "amago.loading.")


def write_policy_spec(run_dir: Path, agent: BaseAgent) -> None:
    """Write ``policy.json``: all that is needed to build the agent again except its weights."""
    spec = {
        "schema": 1,
        "agent": _name(type(agent)),
        "tstep_encoder": _name(type(agent.tstep_encoder)),
        "traj_encoder": _name(type(agent.traj_encoder)),
        "max_seq_len": agent.max_seq_len,
        "observation_space": describe(agent.obs_space),
        "action_space": describe(agent.action_space),
        "bindings": {name: _encode(value) for name, value in config.bindings().items()},
    }

    def write(tmp: Path) -> None:
        tmp.write_text(json.dumps(spec, indent=1))

    checkpoint.atomic_write(run_dir / SPEC_FILE, write)


def _name(obj: Any) -> str:
    return f"{obj.__module__}:{obj.__qualname__}"


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_encode(v) for v in value]
    if isinstance(value, dict):
        return {"@dict": [[_encode(k), _encode(v)] for k, v in value.items()]}
    if hasattr(value, "__qualname__") and hasattr(value, "__module__"):
        return {"@name": _name(value)}
    return {"@unknown": repr(value)}


def _decode(value: Any, modules: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_decode(v, modules) for v in value]
    if isinstance(value, dict):
        if "@name" in value:
            return _resolve(value["@name"], modules)
        if "@dict" in value:
            return {_decode(k, modules): _decode(v, modules) for k, v in value["@dict"]}
        raise ValueError(f"the policy was configured with {value.get('@unknown')}, which cannot be written to a file")
    return value


def _resolve(name: str, modules: Sequence[str]) -> Any:
    """The object called "module:qualified.name", from amago, a module imported already, or one that the caller allows."""
    module, _, path = name.partition(":")
    if module not in sys.modules:
        if module.split(".")[0] not in ("amago", *(m.split(".")[0] for m in modules)):
            raise ValueError(
                f"the policy uses {name}; import that module first, or allow it: load_policy(..., modules=[{module!r}])"
            )
        importlib.import_module(module)
    found: Any = sys.modules[module]
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"the policy uses {name}, but {module} has no {path} in this process")
        found = getattr(found, part)
    return found


def _resolve_type(spec: dict[str, Any], part: str, base: type, modules: Sequence[str]) -> Any:
    found = _resolve(spec[part], modules)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"the policy names {spec[part]} as its {part}, which is no subclass of {base.__name__}")
    return found


def _read_spec(run_dir: Path) -> dict[str, Any]:
    path = run_dir / SPEC_FILE
    if not path.is_file():
        raise CheckpointError(f"{run_dir} is no run directory: it has no {SPEC_FILE}")
    try:
        spec = json.loads(path.read_text())
    except ValueError as err:
        raise CheckpointError(f"{path} is damaged: {err}") from err
    fields = ("agent", "tstep_encoder", "traj_encoder", "max_seq_len", "observation_space", "action_space", "bindings")
    missing = [k for k in fields if not isinstance(spec, dict) or k not in spec]
    if missing:
        raise CheckpointError(f"{path} is damaged: it lacks {', '.join(missing)}")
    return spec  # type: ignore[no-any-return]


def build_agent(run_dir: Path, modules: Sequence[str] = ()) -> BaseAgent:
    """The agent that ``policy.json`` describes, untrained.

    Bindings of classes that take no part in a policy (environments, exploration, the experiment) are left out.
    """
    spec = _read_spec(run_dir)
    bases = {"agent": BaseAgent, "tstep_encoder": TstepEncoder, "traj_encoder": TrajEncoder}
    types = [_resolve_type(spec, part, base, modules) for part, base in bases.items()]
    relevant = {}
    for name, value in spec["bindings"].items():
        if name.rpartition("/")[2].startswith(_NO_PART_OF_A_POLICY):
            continue
        try:
            relevant[name] = _decode(value, modules)
        except (ValueError, ImportError) as err:
            if config.is_registered(name.rpartition(".")[0]):
                raise ValueError(f"{name}: {err}") from err
    relevant = {k: v for k, v in relevant.items() if config.is_registered(k.rpartition(".")[0])}
    obs, act = from_description(spec["observation_space"]), from_description(spec["action_space"])
    with config.temporary(relevant):
        return types[0](  # type: ignore[no-any-return]
            obs_space=obs,
            rl2_space=rl2_space(action_spec(act)),
            action_space=act,
            max_seq_len=spec["max_seq_len"],
            tstep_encoder_type=types[1],
            traj_encoder_type=types[2],
        )


def _run_dir(path: str | Path) -> Path:
    path = Path(path).expanduser()
    run_dir = next((p for p in (path, *path.parents) if (p / SPEC_FILE).is_file()), None)
    if run_dir is None:
        raise CheckpointError(f"{path} is neither a run directory nor inside one (no {SPEC_FILE} there or above)")
    return run_dir


def find_run(path: str | Path) -> tuple[Path, Path]:
    """(run directory, weights) for a run directory, a weight file or a training state inside one.

    A run directory stands for its latest weights, else those of its newest training state.
    """
    path, run_dir = Path(path).expanduser(), _run_dir(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.is_file():
        return run_dir, path
    if (path / "model.safetensors").is_file():
        checkpoint.verify(path)
        return run_dir, path / "model.safetensors"
    if path != run_dir:
        raise CheckpointError(f"{path} is no training state: it has no model.safetensors")
    latest = run_dir / "ckpts" / "latest" / "policy.pt"
    if latest.is_file():
        return run_dir, latest
    newest = checkpoint.newest_complete(run_dir / "ckpts" / "training_states")
    if newest is None:
        raise CheckpointError(f"{run_dir} holds no weights yet: neither {latest} nor a training state")
    return run_dir, newest / "model.safetensors"


def load_agent_weights(agent: BaseAgent, path: str | Path) -> int:
    """Copy a file of weights into an agent: all of them or none. They may be our own or what the original system has trained.

    Returns:
        the version that the weights were published with; 0 where there is none.

    Raises:
        CheckpointError: no such file, damaged, or it does not fit; every name that has no counterpart is listed.
    """
    weights, version = load_weights_and_version(path)
    try:
        weights = adapt_weights(weights, agent)
    except CheckpointError as err:
        raise CheckpointError(f"{path}: {err}") from err
    load_into(agent, weights, path)
    return version


def discounts(agent: BaseAgent) -> tuple[float, ...]:
    """The discounts that an agent has a policy for, in its order; () where it knows none."""
    gammas = getattr(agent, "gammas", None)
    return () if gammas is None else tuple(round(float(g), 6) for g in gammas)


@contextmanager
def acting_by(agent: BaseAgent, gamma: float | None) -> Iterator[None]:
    """In the block, rollouts act by the policy of another of the agent's discounts; None: by the one that is set.

    Raises:
        ValueError: the agent has no such discount.
    """
    if gamma is None:
        yield
        return
    before: Any = getattr(agent, "rollout_gamma_idx", None)
    choose_discount(agent, gamma)
    try:
        yield
    finally:
        agent.rollout_gamma_idx = before


def choose_discount(agent: BaseAgent, gamma: float) -> None:
    """Let rollouts act by the policy of this one of the agent's discounts from now on.

    Raises:
        ValueError: the agent has no such discount; the message lists those that it has.
    """
    known = discounts(agent)
    near = [i for i, g in enumerate(known) if abs(g - gamma) < 1e-6]
    if not near:
        raise ValueError(
            f"gamma={gamma} is none of the discounts of the {type(agent).__name__}: {', '.join(map(str, known)) or 'none'}"
        )
    agent.rollout_gamma_idx = near[-1]  # type: ignore[assignment]


class Policy:
    """Acts with memory, one environment or several side by side. Made by `load_policy`.

    Args:
        agent: the trained agent.
        num_envs: None for one environment without a batch dimension, else the number of rows of every argument.
        sample: draw from the policy; else take its mode.
        device: where to compute.
        version: of the weights.

    Attributes:
        version: rises each time that a run publishes its policy; 0 for weights that were never published.
    """

    def __init__(self, agent: BaseAgent, num_envs: int | None, sample: bool, device: torch.device | str, version: int = 0):
        self.version = version
        self.agent = agent.to(device).eval()
        self.num_envs, self.sample, self.device = num_envs, sample, torch.device(device)
        self.action_space, self.observation_space = agent.action_space, agent.obs_space
        self.reset()

    def reset(self) -> None:
        """Forget everything: the next observations begin new rollouts."""
        n = self.num_envs or 1
        self._memory = self.agent.init_hidden_state(n, self.device)
        self._prev = np.zeros((n, self.agent.action_spec.dim), dtype=np.float32)
        self._time = np.zeros((n, 1), dtype=np.int64)

    @property
    def gammas(self) -> tuple[float, ...]:
        """The discounts that ``load_policy(..., gamma=...)`` may choose from."""
        return discounts(self.agent)

    @property
    def gamma(self) -> float | None:
        """The discount that acts; None for an agent that knows none."""
        gammas = self.gammas
        return gammas[self.agent.rollout_gamma_idx] if gammas else None  # type: ignore[index]

    def export(self, path: str | Path) -> Path:
        """Write a single step, (observation, memory) -> (action, memory), for programs without amago.

        It acts by the policy's mode, and gives the parameters of the distribution besides. It takes any number of environments.

        Args:
            path: ends in ``.onnx`` (for onnxruntime) or ``.pt2`` (for ``torch.export.load``); `amago.policy.export.export_policy` says what
                goes in and comes out.

        Returns:
            the path.

        Raises:
            ValueError: another suffix, or an agent that cannot be exported.
            ImportError: the packages that ONNX needs are missing (``pip install 'amago[export]'``).
        """
        return export_policy(self.agent, path)

    def act(self, obs: Any, reward: ArrayLike | None = None, done: ArrayLike | None = None) -> Any:
        """The action for an observation.

        Args:
            obs: as `AMAGOEnv` gives it, a dict of arrays; a plain array where there is one key.
            reward: what the last action earned; leave out (or None) at the first step.
            done: True where ``obs`` is the first of a new rollout; memory, time and reward begin anew there.

        Returns:
            an action of the environment's own action space (with a leading dimension if ``num_envs`` was given).

        Raises:
            ValueError: an observation key is missing or unknown, or has the wrong shape.
        """
        n = self.num_envs or 1
        arrays = self._check(obs)
        rewards = np.zeros((n, 1), np.float32) if reward is None else np.asarray(reward, np.float32).reshape(n, 1).copy()
        dones = np.zeros(n, bool) if done is None else np.asarray(done, bool).reshape(n)
        if dones.any():
            self._memory = self.agent.reset_hidden_state(self._memory, dones)
            self._prev[dones], self._time[dones], rewards[dones] = 0.0, 0, 0.0
        rl2s = rl2(rewards, self._prev)
        stored, self._memory = self.agent.get_actions(
            {k: self._tensor(v) for k, v in arrays.items()},
            self._tensor(rl2s),
            self._tensor(self._time),
            self._memory,
            self.sample,
        )
        actions = stored.cpu().numpy()
        self._prev = self.agent.action_spec.to_vector(actions)
        self._time += 1
        return self.agent.action_spec.to_env(actions if self.num_envs else actions[0])

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.copy()).to(self.device)

    def _check(self, obs: Any) -> dict[str, NDArray[Any]]:
        spaces = self.observation_space.spaces
        if not isinstance(obs, dict):
            if len(spaces) != 1:
                raise ValueError(f"obs must be a dict with keys {sorted(spaces)}, got {type(obs).__name__}")
            obs = {next(iter(spaces)): obs}
        if obs.keys() != spaces.keys():
            raise ValueError(f"obs has keys {sorted(obs)}, the policy was trained with {sorted(spaces)}")
        out = {}
        for key, space in spaces.items():
            array = np.asarray(obs[key], dtype=space.dtype)
            array = array if self.num_envs else array[None]
            want = (self.num_envs or 1, *(space.shape or ()))
            if array.shape != want:
                raise ValueError(
                    f"obs[{key!r}] has shape {array.shape[0 if self.num_envs else 1 :]}, it must be {want[0 if self.num_envs else 1 :]}"
                )
            out[key] = array
        return out


def load_policy(
    path: str | Path,
    device: torch.device | str = "cpu",
    num_envs: int | None = None,
    sample: bool = True,
    modules: Sequence[str] = (),
    gamma: float | None = None,
    weights: str | Path | None = None,
) -> Policy:
    """Load a trained agent that acts, without its environment, gin settings or loggers.

    Args:
        path: a run directory (its latest weights), a training state, or a file in ``ckpts/policy_weights``.
        device: where to compute.
        num_envs: environments side by side; None: one, without a batch dimension.
        sample: draw actions from the policy; else take its mode.
        modules: packages of your own that the agent's classes come from, which may be imported by name.
        gamma: of the discounts that the agent was trained for, the one that acts; None: the one of its rollouts.
        weights: a file of weights from elsewhere for the agent that the run describes, such as one that the original system has
            trained; None: the run's own, as ``path`` says.

    Raises:
        CheckpointError: no such run, or weights that are damaged or do not fit.
        ValueError: the agent uses classes of a module that is neither imported nor allowed, or has no such discount.
    """
    run_dir, own = find_run(path) if weights is None else (_run_dir(path), Path(weights).expanduser())
    agent = build_agent(run_dir, modules)
    version = load_agent_weights(agent, own)
    if gamma is not None:
        choose_discount(agent, gamma)
    return Policy(agent, num_envs, sample, device, version)
