"""``amago.train``: train an agent on an environment in one call, with the settings that ``amago train`` chooses."""

from __future__ import annotations

import copy
import functools
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gymnasium as gym

from amago import config
from amago.cli import train as command
from amago.cli.eval import evaluate_policy
from amago.cli.gym_env import GymEnv
from amago.cli_utils.settings import record_settings
from amago.policy import Policy, load_policy
from amago.run.console import metrics_table
from amago.run.results import Evaluation

Env = str | gym.Env[Any, Any] | gym.vector.VectorEnv[Any, Any, Any] | Callable[[], Any]


class TrainedPolicy(Policy):
    """A `Policy` that knows the environment on which it was trained.

    Attributes:
        make_env: makes an `amago.envs.AMAGOEnv`.
    """

    make_env: GymEnv

    def evaluate(self, episodes: int = 20, actors: int = 8, seed: int | None = None, verbose: bool = True) -> Evaluation:
        """Play rollouts from their beginning; the memory of `act` is left alone.

        Args:
            episodes: number of rollouts, of which each actor has its share.
            actors: environments side by side, at most.
            seed: of environments and actions; None: random.
            verbose: print the metrics, too.

        Returns:
            the metrics by name, and the figures of each rollout, as of `amago.Experiment.evaluate_test`.

        Raises:
            ValueError: ``episodes`` or ``actors`` is below 1, or no rollout ended.
        """
        for name, value in (("episodes", episodes), ("actors", actors)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        metrics = evaluate_policy(self, self.make_env, episodes, actors, seed)
        if verbose:
            print(metrics_table(metrics, title=f"{self.make_env.env_id}, {episodes} rollouts"))
        return metrics


def train(
    env: Env,
    steps: int = 100_000,
    memory: str = "auto",
    directory: str | Path | None = None,
    seed: int | None = None,
    verbose: bool = True,
    **arguments: object,
) -> TrainedPolicy:
    """Train an agent.

    Args:
        env: id of a registered environment, "module:function", or a function that makes a Gymnasium environment, a `VectorEnv` or an
            `amago.envs.AMAGOEnv`; or an environment or a `VectorEnv` of Gymnasium, which is copied.
        steps: environment steps of all actors together.
        memory: "auto", "none", or the sequence model: "transformer", "gru", "lstm", "mamba" or "mingru". "auto": none for Gymnasium's own
            environments with vectors as observations, else a Transformer.
        directory: of the run, with its log, training states and replay buffer. A run that is there goes on from its newest training
            state. None: a temporary directory, which is deleted.
        seed: of all random numbers; None: random.
        verbose: print what was chosen, and progress.
        arguments: further arguments of ``amago train`` by name, such as ``learning_rate=1e-4`` or ``env_mode="async"`` (here "sync"
            unless given, so that a program needs no ``if __name__ == "__main__"``).

    Returns:
        the policy: ``act``, ``evaluate``, ``save``, ``export``.

    Raises:
        TypeError: ``amago train`` has no such argument, or ``env`` is none of the above.
        ValueError: an argument has a wrong value.
    """
    with ExitStack() as at_end:
        at_end.enter_context(config.temporary(config.bindings()))  # the choice is no setting of this process
        home = (
            Path(at_end.enter_context(tempfile.TemporaryDirectory()), "run")
            if directory is None
            else Path(directory).absolute()
        )
        parser = ArgumentParser()
        command.add_arguments(parser)
        args = parser.parse_args(
            [env if isinstance(env, str) else "", "--run_name", home.name, "--buffer_dir", str(home.parent)]
        )
        if unknown := arguments.keys() - vars(args).keys():
            known = sorted(vars(args))
            raise TypeError("; ".join(f"train() has no argument {k!r}; {config.suggestion(k, known)}" for k in sorted(unknown)))
        resume = "never" if directory is None else "auto"
        given = {"steps": steps, "memory": memory, "seed": seed, "quiet": not verbose, "resume": resume}
        vars(args).update({"env_mode": "sync", **given, **arguments})
        make_env = _gym_env(env, args.horizon)
        experiment = command.make_experiment(args, make_env)
        at_end.callback(experiment.close)
        experiment.start()
        record_settings(experiment, args)
        experiment.learn()
        experiment.write_latest_policy()
        loaded = load_policy(experiment.run_dir, experiment.DEVICE)
        policy = TrainedPolicy(loaded.agent, None, experiment.sample_actions, loaded.device, loaded.version, loaded.description)
    policy.make_env = make_env
    return policy


def _gym_env(env: Env, max_steps: int | None) -> GymEnv:
    if isinstance(env, str):
        return GymEnv(env, max_steps)
    if isinstance(env, gym.Env) and env.spec is not None:
        return GymEnv(type(env.unwrapped).__name__, max_steps, functools.partial(gym.make, env.spec))
    if isinstance(env, gym.Env | gym.vector.VectorEnv):
        try:
            kept = copy.deepcopy(env)
        except Exception as err:
            raise TypeError(
                f"env is copied, which {type(env).__name__} refuses ({err}); give a function that makes it"
            ) from err
        return GymEnv(type(env.unwrapped).__name__, max_steps, functools.partial(copy.deepcopy, kept))
    if callable(env):
        return GymEnv(getattr(env, "__name__", type(env).__name__), max_steps, env)
    raise TypeError(f"env must be an id, a function that makes an environment, or an environment of Gymnasium, got {env!r}")
