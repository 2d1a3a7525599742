"""Settings for `amago train`, chosen by what the environment shows: its spaces, its horizon, and whether it comes with Gymnasium."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from amago.envs import AMAGOEnv
from amago.nets.dict_encoder import is_image
from amago.nets.registry import TRAJ_ENCODERS

ARGUMENTS: dict[str, Any] = {
    "traj_encoder": "transformer", "parallel_actors": 8, "timesteps_per_epoch": 500, "grads_per_epoch": 250, "epochs": 40, "memory_size": 64,
    "memory_layers": 2, "max_seq_len": 32, "batch_size": 24, "learning_rate": 3e-4,
}  # fmt: skip
"""The arguments of the command that are chosen unless the user gives them, with their values for agents with memory."""

AGENT, MULTIGAMMAS, EXPERIMENT = "amago.agent.Agent", "amago.agent.Multigammas", "amago.experiment.Experiment"


@dataclass(frozen=True)
class Choice:
    """What was chosen for an environment.

    Attributes:
        arguments: values of the command's arguments, by name.
        settings: default arguments of classes, {"Class.argument": value}; configuration files win over them.
        reason: why the agent has memory, or has none; a clause.
    """

    arguments: dict[str, Any]
    settings: dict[str, Any]
    reason: str

    def describe(self, env_id: str, given: Mapping[str, Any]) -> str:
        """What was chosen, for people; without the arguments that the user has given (those of ``given`` that are not None)."""
        words = [f"--{k} {v}" for k, v in self.arguments.items() if given.get(k) is None]
        bindings = [f"{k.removeprefix('amago.agent.').removeprefix('amago.experiment.')} = {v}" for k, v in self.settings.items()]
        memory = "without memory" if self.arguments["traj_encoder"] == "ff" else "with memory"
        lines = [f"chosen for {env_id}: an agent {memory}, {self.reason} (--memory)"]
        lines += ["  " + " ".join(words)] if words else []
        lines += ["  " + "; ".join(bindings)] if bindings else []
        return "\n".join(lines)


def choose(env: AMAGOEnv, horizon: int, memory: str = "auto", traj_encoder: str | None = None) -> Choice:
    """Choose settings for an environment.

    Args:
        env: the environment; only its spaces and its Gymnasium spec are read.
        horizon: most steps of a rollout.
        memory: "auto", "none", or the name of a sequence model with memory.
        traj_encoder: the sequence model, if the user names one; it decides, and "ff" means no memory.

    Raises:
        ValueError: ``memory`` and ``traj_encoder`` contradict each other.
    """
    if traj_encoder is not None and memory != "auto" and traj_encoder != ("ff" if memory == "none" else memory):
        raise ValueError(f"--memory {memory} and --traj_encoder {traj_encoder} contradict each other; leave out one of them")
    model, reason = _model(env, memory, traj_encoder)
    images = any(is_image(space) for space in env.observation_space.spaces.values())
    if model != "ff" or images:
        return Choice(ARGUMENTS | {"traj_encoder": model}, {f"{AGENT}.tau": 0.01, f"{EXPERIMENT}.lr_cooldown": 0.5}, reason)
    discrete = env.action_spec.kind == "discrete"
    arguments, settings = _discrete(horizon) if discrete else _continuous(horizon)
    return Choice(ARGUMENTS | {"traj_encoder": model} | arguments, settings, reason)


def _model(env: AMAGOEnv, memory: str, traj_encoder: str | None) -> tuple[str, str]:
    """The name of the sequence model, and why."""
    if traj_encoder is not None:
        return traj_encoder, "as --traj_encoder says"
    if memory != "auto":
        return "ff" if memory == "none" else memory, "as --memory says"
    if any(is_image(space) for space in env.observation_space.spaces.values()):
        return ARGUMENTS["traj_encoder"], "because one image does not show what moves"
    if comes_with_gymnasium(env):
        return "ff", "because the vectors that Gymnasium's own environments return are their whole state"
    return ARGUMENTS["traj_encoder"], "because its observations may be less than its state; --memory none is faster where they are not"


def comes_with_gymnasium(env: AMAGOEnv) -> bool:
    """Whether the environment's code is Gymnasium's, whose environments are fully observed (spaces do not tell that)."""
    spec = getattr(env.unwrapped, "spec", None)
    entry = getattr(spec, "entry_point", None)
    module = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    return module.startswith("gymnasium.envs.") and not getattr(spec, "additional_wrappers", ())


def _horizon_gamma(horizon: int) -> float:
    """A discount whose time constant is a fifth of a rollout, from 20 to 100 steps: what happens later changes little now, and
    the critics need as many rounds of updates as they look ahead."""
    return round(1.0 - 1.0 / min(max(horizon / 5, 20), 100), 4)


def _discrete(horizon: int) -> tuple[dict[str, Any], dict[str, Any]]:
    arguments = {
        "parallel_actors": 16, "grads_per_epoch": 125, "epochs": 40, "memory_layers": 1, "max_seq_len": 16, "batch_size": 48,
        "learning_rate": 6e-4,
    }  # fmt: skip
    return arguments, {
        f"{AGENT}.gamma": _horizon_gamma(horizon), f"{MULTIGAMMAS}.discrete": [0.9], f"{AGENT}.tau": 0.05, f"{AGENT}.n_step": 5,
        f"{EXPERIMENT}.lr_cooldown": 0.5, "EpsilonGreedy.repeat": 4.0,
    }  # fmt: skip


def _continuous(horizon: int) -> tuple[dict[str, Any], dict[str, Any]]:
    arguments = {
        "parallel_actors": 12, "timesteps_per_epoch": 200, "grads_per_epoch": 250, "epochs": 40, "memory_size": 16, "memory_layers": 1,
        "max_seq_len": 8, "batch_size": 32, "learning_rate": 1e-3,
    }  # fmt: skip
    return arguments, {
        f"{AGENT}.gamma": _horizon_gamma(horizon), f"{AGENT}.use_multigamma": False, f"{AGENT}.tau": 0.02, f"{AGENT}.num_critics": 2,
        f"{AGENT}.n_step": 3, f"{EXPERIMENT}.lr_cooldown": 0.5, "amago.nets.policy_dists.TanhGaussian.std_low": 0.29,
        "amago.nets.policy_dists.TanhGaussian.std_high": 0.3, "EpsilonGreedy.repeat": 4.0,
    }  # fmt: skip


MEMORIES = ("auto", "none", *sorted(set(TRAJ_ENCODERS) - {"ff"}))
"""What ``--memory`` may be."""


def library_settings(traj_encoder: str | None) -> Choice:
    """The arguments of a laptop, and the library's own defaults for everything else (``--no_choices``)."""
    return Choice(ARGUMENTS | ({} if traj_encoder is None else {"traj_encoder": traj_encoder}), {}, "as --no_choices says")

