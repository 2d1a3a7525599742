"""The settings that ``amago train`` chooses for an environment, from its spaces, its horizon, its origin, and a trial with random actions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from amago import config
from amago.agent import Agent, BaseAgent
from amago.describe import fit_width
from amago.envs import AMAGOEnv
from amago.nets.tstep_encoders import is_image

ARGUMENTS: dict[str, Any] = {
    "traj_encoder": "transformer", "parallel_actors": 8, "timesteps_per_epoch": 500, "grads_per_epoch": 250, "epochs": 40, "memory_size": 64,
    "memory_layers": 2, "max_seq_len": 32, "batch_size": 24, "learning_rate": 3e-4,
}  # fmt: skip
"""The arguments that are chosen unless the user gives them, with their values for agents that observe images."""
TRIAL_STEPS, TRIAL_SECONDS = 1000, 10.0
"""Most steps of random actions before settings are chosen, and their longest duration: of a slower environment little is known."""
LONGEST_WINDOW, SMOOTH = 128, 0.1
"""Most steps of a training sequence; the part of their variance by which smooth observations differ from one step to the next."""
MULTIGAMMAS, EXPERIMENT, GREEDY = (
    "amago.agent.Multigammas",
    "amago.experiment.Experiment",
    "amago.envs.exploration.EpsilonGreedy",
)
NETS = "amago.nets"  # names are given in full: a program may have an Actor of its own
Settings = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]  # arguments of the command, options of the agent, others


class Trial(NamedTuple):
    """What random actions have shown of an environment."""

    tells_nothing: bool  # there was only one value of reward, and no termination
    length: int  # of every rollout that ended, in steps; 0 where lengths differ, or none ended
    smooth: bool  # observations change little from step to step, as positions do, and cards do not


class Choice(NamedTuple):
    """Settings chosen for an environment."""

    arguments: dict[str, Any]  # of the command
    settings: dict[str, Any]  # {"Class.argument": value}; configuration files win over them
    reason: str  # why the agent has memory, or has none; a clause
    steps_per_update: int = 0  # environment steps, at least, where ``--steps`` spreads few of them over the epochs

    def describe(self, env_id: str, given: Mapping[str, Any]) -> str:
        """The choice as text, without the arguments that the user has set (values of ``given`` other than None)."""
        words = [f"--{k} {v}" for k, v in self.arguments.items() if given.get(k) is None]
        bindings = [f"{'.'.join(k.split('.')[-2:])} = {v}" for k, v in self.settings.items()]
        memory = "with memory" if remembers(self.arguments["traj_encoder"]) else "without memory"
        lines = f"chosen for {env_id}: an agent {memory}, {self.reason}", f"  {' '.join(words)}", f"  {'; '.join(bindings)}"
        return "\n".join(fit_width(line) for line in lines if line.strip())


def remembers(traj_encoder: str) -> bool:
    """Whether a sequence model of this name has memory."""
    return traj_encoder not in ("ff", "identity")


def choose_settings(
    env: AMAGOEnv,
    horizon: int,
    memory: str = "auto",
    traj_encoder: str | None = None,
    agent_type: type[BaseAgent] = Agent,
    plain: bool = False,
) -> Choice:
    """Choose settings for an environment.

    Args:
        env: the environment. Its spaces and its Gymnasium spec are read, and random actions are tried (`try_actions`).
        horizon: most steps of a rollout.
        memory: "auto", "none", or the name of a sequence model with memory.
        traj_encoder: the sequence model, if the user names one; it decides, and "ff" and "identity" mean no memory.
        agent_type: receives those settings that it has.
        plain: the arguments of agents with memory, and otherwise the library's defaults (``--no_choices``).
    """
    if traj_encoder is not None and memory not in ("auto", traj_encoder if remembers(traj_encoder) else "none"):
        raise ValueError(f"--memory {memory} and --traj_encoder {traj_encoder} contradict each other; leave out one of them")
    images = any(is_image(space) for space in env.observation_space.spaces.values())
    named = traj_encoder or {"none": "ff", "auto": None}.get(memory, memory)
    if plain:
        return Choice(
            ARGUMENTS | {"traj_encoder": named or "transformer"}, {}, "with the library's settings, as --no_choices says"
        )
    continuous = any(part.kind == "continuous" for part in env.action_spec.parts)
    model = named or ("transformer" if images or not comes_with_gymnasium(env) else "ff")
    trial = None if images or (continuous and not remembers(model)) else try_actions(env)
    if named is not None:
        reason = "as --traj_encoder says" if traj_encoder is not None else "as --memory says"
    elif images:
        reason = "because one image does not show what moves"
    elif not remembers(model):
        reason = "because the vectors that Gymnasium's own environments return are their whole state"
    elif trial is not None and trial.smooth:
        model, reason = "gru", "because observations that change little from step to step, as positions do, may lack velocities"
    else:
        reason = "because observations may be less than the state, and attention can single out a step"
    if named is None and remembers(model):
        reason += "; --memory none is faster where they are the whole state"
    if images:
        chosen: Settings = {}, {"tau": 0.01}, {f"{EXPERIMENT}.lr_cooldown": 0.5}
    elif continuous:
        chosen = _continuous(horizon, model)
    elif remembers(model) and (length := horizon if horizon <= LONGEST_WINDOW else trial.length if trial is not None else 0):
        chosen = _recalling(model, length)
    else:
        counted = isinstance(env.raw_observation_space, gym.spaces.Discrete)
        chosen = _discrete(counted, trial is not None and trial.tells_nothing, model)
    arguments, options, settings = chosen
    # values that rest on memory are lost again where a small buffer is trained on more often
    steps_per_update = 40 if remembers(model) and "targets" not in options and not continuous and not images else 0
    if images_use_little(env):
        settings |= {
            f"{NETS}.tstep_encoders.{encoder}.normalize_images": True for encoder in ("CNNTstepEncoder", "DictTstepEncoder")
        }
    settings[f"{EXPERIMENT}.ema_decay"] = 0.99  # policies waver around good ones; their average does not
    if issubclass(agent_type, Agent):  # agents that classify returns have no outputs of their size
        options["rescale_critics"] = True
    selector = config.selector_of(agent_type)
    known = config.settable_parameters(selector)
    own = {f"{selector}.{name}": value for name, value in options.items() if name in known}
    return Choice(ARGUMENTS | {"traj_encoder": model} | arguments, own | settings, reason, steps_per_update)


def comes_with_gymnasium(env: AMAGOEnv) -> bool:
    """True if the environment is part of Gymnasium, whose environments are fully observed (spaces do not show this)."""
    spec = env.spec
    if spec is None or spec.entry_point is None or spec.additional_wrappers:
        return False
    module = spec.entry_point if isinstance(spec.entry_point, str) else spec.entry_point.__module__
    return module.startswith("gymnasium.envs.")


def try_actions(env: AMAGOEnv) -> Trial | None:
    """Take up to `TRIAL_STEPS` random steps, for `TRIAL_SECONDS` at most.

    None where rows are stepped together, and after an error of the environment: `Experiment.start` raises it again, with an explanation.
    """
    if env.batched_envs > 1:
        return None
    inner, space = env.env.env, env.raw_observation_space  # without the conversion of actions
    inner.action_space.seed(0)
    until, over, ended = time.monotonic() + TRIAL_SECONDS, True, False
    rewards: set[float] = set()
    rollouts: list[list[Any]] = []
    try:
        for step in range(TRIAL_STEPS):
            if over:
                rollouts.append([gym.spaces.flatten(space, inner.reset(seed=0 if step == 0 else None)[0])])
            obs, reward, terminated, truncated, _ = inner.step(inner.action_space.sample())
            rollouts[-1].append(gym.spaces.flatten(space, obs))
            rewards.add(float(reward))
            over, ended = terminated or truncated, ended or bool(terminated)
            if time.monotonic() > until:
                break
    except Exception:
        return None
    complete = rollouts if over else rollouts[:-1]
    lengths = {len(rollout) - 1 for rollout in complete}
    tells_nothing = step == TRIAL_STEPS - 1 and len(rewards) == 1 and not ended
    return Trial(
        tells_nothing, lengths.pop() if len(lengths) == 1 else 0, _is_smooth([np.asarray(r, np.float64) for r in rollouts])
    )


def _is_smooth(rollouts: list[np.ndarray[Any, Any]]) -> bool:
    """True if observations (steps + 1, features) of one step and the next differ by little, in the mean over features that vary."""
    variance = np.concatenate(rollouts).var(0)
    varies = variance > 0
    changes = np.concatenate([np.diff(rollout, axis=0) for rollout in rollouts])[:, varies]
    return bool(varies.any() and ((changes**2).mean(0) / (2.0 * variance[varies])).mean() < SMOOTH)


def images_use_little(env: AMAGOEnv) -> bool:
    """True where the first images of an environment use less than a twentieth of the bounds of their space, as codes in a space of colours do.

    False after an error of the environment: `Experiment.start` raises it again, with an explanation.
    """
    spaces = {k: s for k, s in env.observation_space.spaces.items() if isinstance(s, gym.spaces.Box) and is_image(s)}
    try:
        observed = [env.reset(seed=seed)[0].obs for seed in range(4)] if spaces else []
    except Exception:
        return False
    used = {k: np.ptp(np.stack([obs[k] for obs in observed]).astype(np.float64)) for k in spaces}
    return any(0.0 < used[k] < (float(s.high.max()) - float(s.low.min())) / 20.0 for k, s in spaces.items())


def _discrete(counted_states: bool, hard_to_explore: bool, model: str) -> Settings:
    arguments = {
        "parallel_actors": 16, "grads_per_epoch": 125, "memory_layers": 1, "max_seq_len": 16, "batch_size": 48, "learning_rate": 6e-4,
    }  # fmt: skip
    options = {"gamma": 0.99, "tau": 0.05, "n_step": 10}
    settings: dict[str, Any] = {
        f"{MULTIGAMMAS}.discrete": [0.9], f"{MULTIGAMMAS}.continuous": [0.9], f"{EXPERIMENT}.lr_cooldown": 0.6,
        f"{NETS}.tstep_encoders.FFTstepEncoder.n_layers": 1,
    }  # fmt: skip
    if counted_states:  # moves are often random there: FrozenLake needs targets of the trained policy, not of the exploring one
        options |= {"n_step": 1, "offline_coeff": 1.0}
        settings[f"{GREEDY}.repeat"] = 4.0
    elif hard_to_explore:  # choices that are held reach further (Acrobot), and end rollouts early where that is easy (CartPole)
        settings |= {f"{GREEDY}.repeat": (1.0, 16.0), f"{GREEDY}.randomize_eps": False}
        arguments["epochs"] = 60  # actions that are found late are learned late
    if remembers(model):
        # values that rest on memory are lost again at a higher rate, and where memory grows older than in training
        arguments |= {"learning_rate": 2e-4, "max_seq_len": 64, "batch_size": 24}
        settings |= {f"{EXPERIMENT}.sample_actions": False} | _SHARP.get(model, {})
    return arguments, options, settings


def _recalling(model: str, length: int) -> Settings:
    """For choices that rest on memory, in rollouts of this length, or of this at most."""
    window = min(length, LONGEST_WINDOW)
    arguments = {
        "parallel_actors": 16, "grads_per_epoch": 125, "max_seq_len": window, "batch_size": min(48, max(12, 1600 // window)), "learning_rate": 1e-3,
        "memory_layers": 2 if model == "transformer" else 1,
    }  # fmt: skip
    # what was seen first may be rewarded last: targets reach over the whole window
    options = {
        "gamma": round(1.0 - 1.0 / min(max(length / 2, 10), 100), 4), "tau": 0.02, "num_critics": 2, "targets": "tree_backup", "trace_lambda": 1.0,
    }  # fmt: skip
    settings: dict[str, Any] = {
        # all that was observed in a rollout is the state: some deterministic policy is optimal
        f"{EXPERIMENT}.sample_actions": False, f"{MULTIGAMMAS}.discrete": [0.5, 0.9], f"{EXPERIMENT}.lr_cooldown": 0.5,
        f"{NETS}.tstep_encoders.FFTstepEncoder.n_layers": 1, f"{GREEDY}.steps_anneal": 30 * length, **_SHARP.get(model, {}),
    }  # fmt: skip
    return arguments, options, settings


_SHARP = {
    "transformer": {  # normalised queries and keys single out a step from the start, which dropout hides
        f"{NETS}.traj_encoders.TformerTrajEncoder.{name}": value
        for name, value in (("qk_norm", 8.0), ("dropout_ff", 0.0), ("dropout_emb", 0.0))
    }
}


def _continuous(horizon: int, model: str) -> Settings:
    arguments = {
        "parallel_actors": 12, "epochs": 48, "memory_layers": 1, "max_seq_len": 8, "batch_size": 32, "learning_rate": 5e-4,
    }  # fmt: skip
    # a tenth of a rollout: critics need as many rounds of updates as they look ahead, and noise in actions blurs later rewards
    gamma = round(1.0 - 1.0 / min(max(horizon / 10, 20), 100), 4)
    options = {"gamma": gamma, "tau": 0.02}
    settings: dict[str, Any] = {
        # where the observation is the state, some deterministic policy is optimal
        f"{EXPERIMENT}.sample_actions": False, f"{MULTIGAMMAS}.continuous": [0.8], f"{EXPERIMENT}.lr_cooldown": 0.5,
        f"{NETS}.policy_dists.TanhGaussian.std_low": 0.29, f"{NETS}.policy_dists.TanhGaussian.std_high": 0.3,
        f"{GREEDY}.repeat": (1.0, round(max(4.0, horizon / 20), 1)),  # swinging up a hill takes dozens of steps in one direction
    }  # fmt: skip
    if remembers(model):
        arguments |= {"max_seq_len": 32, "batch_size": 24}
        settings |= _SHARP.get(model, {})
    return arguments, options, settings
