"""Settings for `amago train`, chosen by what the environment shows: its spaces, its horizon, and whether it comes with Gymnasium."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from amago import config
from amago.agent import Agent, BaseAgent
from amago.envs import AMAGOEnv
from amago.nets.dict_encoder import is_image
from amago.nets.registry import TRAJ_ENCODERS
from amago.run.layout import fitted

ARGUMENTS: dict[str, Any] = {
    "traj_encoder": "transformer", "parallel_actors": 8, "timesteps_per_epoch": 500, "grads_per_epoch": 250, "epochs": 40, "memory_size": 64,
    "memory_layers": 2, "max_seq_len": 32, "batch_size": 24, "learning_rate": 3e-4,
}  # fmt: skip
"""The arguments of the command that are chosen unless the user gives them, with their values for agents with memory."""

TRIAL_STEPS = 1000
"""Most steps of random actions before settings are chosen."""

TRIAL_SECONDS = 10.0
"""Most time for them; an environment that takes longer counts as one of which they tell something."""

SMALL_REWARD = 0.05
"""Rewards up to this size are scaled before agents with memory observe them; `InputNorm` alone would leave most of them as they are."""

MULTIGAMMAS, EXPERIMENT = "amago.agent.Multigammas", "amago.experiment.Experiment"

Settings = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""Arguments of the command, options of the agent, and other default arguments."""


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
        bindings = [
            f"{k.removeprefix('amago.agent.').removeprefix('amago.experiment.')} = {v}" for k, v in self.settings.items()
        ]
        memory = "without memory" if self.arguments["traj_encoder"] == "ff" else "with memory"
        lines = [f"chosen for {env_id}: an agent {memory}, {self.reason}"]
        lines += ["  " + " ".join(words)] if words else []
        lines += ["  " + "; ".join(bindings)] if bindings else []
        return "\n".join(fitted(line) for line in lines)


def choose_settings(
    env: AMAGOEnv, horizon: int, memory: str = "auto", traj_encoder: str | None = None, agent_type: type[BaseAgent] = Agent
) -> Choice:
    """Choose settings for an environment.

    Args:
        env: the environment. Its spaces and its Gymnasium spec are read; where actions are choices or the agent has memory, random
            actions are tried for at most `TRIAL_STEPS` steps and `TRIAL_SECONDS`.
        horizon: most steps of a rollout.
        memory: "auto", "none", or the name of a sequence model with memory.
        traj_encoder: the sequence model, if the user names one; it decides, and "ff" means no memory.
        agent_type: receives those settings that it has.

    Raises:
        ValueError: ``memory`` and ``traj_encoder`` contradict each other.
    """
    _check_agreement(memory, traj_encoder)
    model, reason = _model(env, memory, traj_encoder)
    if model != "ff" or _has_images(env):
        chosen: Settings = {}, {"tau": 0.01}, {f"{EXPERIMENT}.lr_cooldown": 0.5}
    elif any(part.kind == "continuous" for part in env.action_spec.parts):
        chosen = _continuous(horizon)
        chosen[2][f"{EXPERIMENT}.sample_actions"] = (
            False  # where the observation is the state, some deterministic policy is optimal
        )
    else:
        chosen = _discrete(isinstance(env.raw_observation_space, gym.spaces.Discrete), chance_tells_nothing(env))
    arguments, options, settings = chosen
    if model != "ff" and rewards_are_small(env):
        settings["InputNorm.skip_below"] = 0.001
    settings |= {f"{EXPERIMENT}.ema_decay": 0.99}  # policies waver around good ones; their average does not
    if issubclass(agent_type, Agent):  # agents that classify returns have no outputs of their size
        options["rescale_critics"] = True
    selector = config.selector_of(agent_type)
    known = config.settable_parameters(selector)
    own = {f"{selector}.{name}": value for name, value in options.items() if name in known}
    return Choice(ARGUMENTS | {"traj_encoder": model} | arguments, own | settings, reason)


def _has_images(env: AMAGOEnv) -> bool:
    return any(is_image(space) for space in env.observation_space.spaces.values())


def _check_agreement(memory: str, traj_encoder: str | None) -> None:
    if traj_encoder is not None and memory not in ("auto", "none" if traj_encoder == "ff" else traj_encoder):
        raise ValueError(f"--memory {memory} and --traj_encoder {traj_encoder} contradict each other; leave out one of them")


def _model(env: AMAGOEnv, memory: str, traj_encoder: str | None) -> tuple[str, str]:
    """The name of the sequence model, and why."""
    if traj_encoder is not None:
        return traj_encoder, "as --traj_encoder says"
    if memory != "auto":
        return "ff" if memory == "none" else memory, "as --memory says"
    if _has_images(env):
        return ARGUMENTS["traj_encoder"], "because one image does not show what moves"
    if comes_with_gymnasium(env):
        return "ff", "because the vectors that Gymnasium's own environments return are their whole state"
    return (
        ARGUMENTS["traj_encoder"],
        "because its observations may be less than its state; --memory none is faster where they are not",
    )


def comes_with_gymnasium(env: AMAGOEnv) -> bool:
    """Whether the environment's code is Gymnasium's, whose environments are fully observed (spaces do not tell that)."""
    spec = env.spec
    entry = getattr(spec, "entry_point", None)
    module = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    return module.startswith("gymnasium.envs.") and not getattr(spec, "additional_wrappers", ())


def chance_tells_nothing(env: AMAGOEnv, steps: int = TRIAL_STEPS, clock: Callable[[], float] = time.monotonic) -> bool:
    """Whether random actions meet one reward only, and no end other than that of time, within some steps.

    False if `TRIAL_SECONDS` by ``clock`` are not enough for the steps.
    """
    rewards, done = set(), 0
    for reward, terminated in _random_steps(env, steps, clock):
        rewards.add(reward)
        if terminated or len(rewards) > 1:
            return False
        done += 1
    return done == steps


def rewards_are_small(env: AMAGOEnv, steps: int = TRIAL_STEPS, clock: Callable[[], float] = time.monotonic) -> bool:
    """Whether random actions meet rewards, but none above `SMALL_REWARD`, within some steps and `TRIAL_SECONDS` by ``clock``."""
    any_reward = False
    for reward, _ in _random_steps(env, steps, clock):
        if abs(reward) > SMALL_REWARD:
            return False
        any_reward |= reward != 0.0
    return any_reward


def _random_steps(env: AMAGOEnv, steps: int, clock: Callable[[], float]) -> Iterator[tuple[float, bool]]:
    """The reward of each of some random steps, and whether it terminated a rollout; none of environments that step in batches.

    Ends at an error of the environment: `Experiment.start` meets it again, and says what is wrong.
    """
    if env.batched_envs > 1:
        return
    inner = env.env.env  # without the conversion of actions
    inner.action_space.seed(0)
    until, over = clock() + TRIAL_SECONDS, True
    for step in range(steps):
        if clock() > until:
            return
        try:
            if over:
                inner.reset(seed=0 if step == 0 else None)
            _, reward, terminated, truncated, _ = inner.step(inner.action_space.sample())
            found, over = (float(reward), bool(terminated)), bool(terminated or truncated)
        except Exception:
            return
        yield found


def _discrete(counted_states: bool, hard_to_explore: bool) -> Settings:
    arguments = {
        "parallel_actors": 16, "grads_per_epoch": 125, "memory_layers": 1, "max_seq_len": 16, "batch_size": 48, "learning_rate": 6e-4,
    }  # fmt: skip
    options = {"gamma": 0.99, "tau": 0.05, "n_step": 10}
    settings: dict[str, Any] = {
        f"{MULTIGAMMAS}.discrete": [0.9], f"{MULTIGAMMAS}.continuous": [0.9], f"{EXPERIMENT}.lr_cooldown": 0.6, "FFTstepEncoder.n_layers": 1,
    }  # fmt: skip
    if counted_states:  # moves are often random there: FrozenLake needs targets of the trained policy, not of the exploring one
        options |= {"n_step": 1, "offline_coeff": 1.0}
        settings["EpsilonGreedy.repeat"] = 4.0
    elif hard_to_explore:  # choices that are held reach further (Acrobot), and end rollouts early where that is easy (CartPole)
        settings |= {"EpsilonGreedy.repeat": (1.0, 16.0), "EpsilonGreedy.randomize_eps": False}
        arguments["epochs"] = 60  # what is found later is learned later
    return arguments, options, settings


def _continuous(horizon: int) -> Settings:
    arguments = {
        "parallel_actors": 12, "epochs": 48, "memory_layers": 1, "max_seq_len": 8, "batch_size": 32, "learning_rate": 5e-4,
    }  # fmt: skip
    # a tenth of a rollout: critics need as many rounds of updates as they look ahead, and noise in actions blurs what is further away
    gamma = round(1.0 - 1.0 / min(max(horizon / 10, 20), 100), 4)
    options = {"gamma": gamma, "tau": 0.02}
    settings = {
        f"{MULTIGAMMAS}.continuous": [0.8], f"{EXPERIMENT}.lr_cooldown": 0.5, "TanhGaussian.std_low": 0.29, "TanhGaussian.std_high": 0.3,
        "EpsilonGreedy.repeat": (1.0, round(max(4.0, horizon / 20), 1)),  # swinging up a hill takes dozens of steps in one direction
    }  # fmt: skip
    return arguments, options, settings


MEMORIES = ("auto", "none", *sorted(set(TRAJ_ENCODERS) - {"ff"}))
"""What ``--memory`` may be."""


def library_settings(
    env: AMAGOEnv, horizon: int, memory: str = "auto", traj_encoder: str | None = None, agent_type: type[BaseAgent] = Agent
) -> Choice:
    """The arguments of agents with memory and no settings (``--no_choices``). Takes what `choose_settings` takes.

    Raises:
        ValueError: ``memory`` and ``traj_encoder`` contradict each other.
    """
    _check_agreement(memory, traj_encoder)
    named = {"auto": ARGUMENTS["traj_encoder"], "none": "ff"}.get(memory, memory)
    return Choice(ARGUMENTS | {"traj_encoder": traj_encoder or named}, {}, "with the library's settings, as --no_choices says")
