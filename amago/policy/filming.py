"""Films of rollouts, and `RecordVideo`, the callback that makes them while a run trains."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from amago.agent import BaseAgent
from amago.envs import AMAGOEnv
from amago.fields import Rule, one_of, whole
from amago.policy.playing import EpisodeResult, play
from amago.run import video
from amago.run.callbacks import Callback
from amago.run.process import draw_seed, rng_state, set_rng_state
from amago.run.rundir import FILMS

if TYPE_CHECKING:
    from amago.experiment import Experiment

log = logging.getLogger(__name__)
MODE = "rgb_array"
DEFAULT_FPS = 10.0
"""Pictures a second of environments whose metadata names no ``render_fps``."""


def draw(env: AMAGOEnv) -> NDArray[Any]:
    """The picture of an environment after `reset` or a step; ValueError, with its name, if it does not draw itself as an array."""
    # pygame, with which many environments draw, would look for a sound card and a missing screen, and print errors
    screen = any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    quiet = {"SDL_AUDIODRIVER": "dummy"} | ({} if screen else {"SDL_VIDEODRIVER": "dummy"})
    picture = None
    with mock.patch.dict(os.environ, quiet | os.environ), suppress(NotImplementedError):
        picture = env.render()
    if not isinstance(picture, np.ndarray):
        raise ValueError(
            f"{env.env_name} does not draw itself with render_mode={MODE!r} (it returns {picture!r}), so it cannot be filmed"
        )
    return picture


def film(
    agent: BaseAgent, env: AMAGOEnv, max_steps: int, *, sample: bool, device: torch.device | str, seed: int
) -> tuple[EpisodeResult, list[Any], float]:
    """Play one rollout with `play` and draw each of its steps.

    Args:
        env: of one row, made with ``render_mode="rgb_array"``.

    Returns:
        the rollout, its pictures (one more than it has steps), and how many of them make a second.
    """
    pictures: list[Any] = []
    options: dict[str, Any] = {"sample": sample, "device": device, "seed": seed}
    (played,) = play(agent, [env], [seed], max_steps, on_step=lambda _: pictures.append(draw(env)), **options)
    return played, pictures, float(env.metadata.get("render_fps") or DEFAULT_FPS)


class RecordVideo(Callback):
    """Films a rollout of the policy, without exploration, every few epochs.

    The films are ``videos/epoch_N.mp4`` (or ``.gif``) in the run's directory, where N is the number of finished epochs. Runs that log to
    TensorBoard or Weights & Biases show them there as ``val/video``. Filming changes nothing in the run: the environment is one of its
    own, and the random streams are put back. A film that fails is reported as a warning, and the run goes on.

    The main process films; of processes with ``--mode``, the one that learns.

    Args:
        interval: epochs between films. There is also one after the last epoch.
        make_env: makes the environment, an `AMAGOEnv`, as ``make_val_env`` of the experiment does, which is used if this is None (the first, if
            there are several). If the function takes an argument ``render_mode``, it is called with "rgb_array". An
            environment whose ``render_mode`` is None is set to "rgb_array", if its metadata lists that.
        suffix: ".mp4" (needs ``pip install 'amago[video]'``) or ".gif" (needs Pillow). None: ".mp4", or ".gif" where its package is missing.
        max_steps: a longer rollout is broken off after so many steps.
        sample: draw actions from the policy; else take its mode. None: as evaluations of the run do.
        seed: of the environment and of the policy's samples, the same in each film, so that they can be compared. None: a new one for each.

    Raises:
        ValueError: an argument is outside its range. Also `on_start`, if the environment does not draw itself or has several rows.
        ImportError: no package is installed that writes such films; names the extra.
    """

    def __init__(
        self,
        interval: int = 10,
        make_env: Callable[..., Any] | None = None,
        suffix: str | None = None,
        max_steps: int = 1000,
        sample: bool | None = None,
        seed: int | None = 0,
    ):
        for name, value, rule in (
            ("interval", interval, whole(1)), ("max_steps", max_steps, whole(1)), ("suffix", suffix, one_of(None, *video.SUFFIXES)),
            ("make_env", make_env, Rule("None or a function that makes an environment", lambda v: v is None or callable(v))),
        ):  # fmt: skip
            if fault := rule(name, value):
                raise ValueError(fault)
        self.interval, self.make_env, self.max_steps, self.sample, self.seed = interval, make_env, max_steps, sample, seed
        self.suffix = suffix or video.best_suffix()
        video.check_video_path(f"film{self.suffix}")

    def on_start(self, experiment: Experiment) -> None:
        if self._films(experiment):
            with self._environment(experiment) as env:
                if env.vectorized:
                    raise ValueError(
                        "RecordVideo films environments of one row, and that of make_val_env has several: pass make_env=..., which makes such a one"
                    )
                env.reset(seed=0)
                draw(env)

    def on_epoch_end(self, experiment: Experiment, metrics: Mapping[str, float]) -> None:
        due = experiment.epoch % self.interval == 0 or experiment.epoch == experiment.epochs or experiment.should_stop
        if due and self._films(experiment):
            try:
                self._film(experiment)
            except Exception as err:  # of any renderer or encoder: training is worth more than a film
                log.warning("no film of epoch %d: %s: %s", experiment.epoch, type(err).__name__, err)

    @staticmethod
    def _films(experiment: Experiment) -> bool:
        return experiment.accelerator.is_main_process and experiment.builds_optimizer

    def _film(self, experiment: Experiment) -> None:
        sample = experiment.sample_actions and experiment.sample_actions_val if self.sample is None else self.sample
        seed = draw_seed() if self.seed is None else self.seed
        with self._environment(experiment) as env, experiment.caster(), experiment.acting_weights():
            steps = min(self.max_steps, env.horizon or self.max_steps)
            played, pictures, fps = film(experiment.policy, env, steps, sample=sample, device=experiment.DEVICE, seed=seed)
        width = max(4, len(str(experiment.epochs)))
        path = Path(experiment.run_dir) / FILMS / f"epoch_{experiment.epoch:0{width}}{self.suffix}"
        video.write_video(pictures, path, fps)
        experiment.print(f"video: {path} ({len(played.rewards)} steps, return {sum(played.rewards):.4g})")
        if experiment.logger is not None:
            experiment.logger.log_video("val/video", path, pictures, fps, experiment.env_steps)

    @contextmanager
    def _environment(self, experiment: Experiment) -> Iterator[AMAGOEnv]:
        """An environment that draws itself; the random streams of the process are restored afterwards."""
        before, makers = rng_state(), self.make_env or experiment.make_val_env
        try:
            with closing(_drawing(makers if callable(makers) else next(iter(makers)))) as env:
                yield env
        finally:
            set_rng_state(before)


def _drawing(make_env: Callable[..., Any]) -> AMAGOEnv:
    """Make an environment that draws itself as arrays, if it can."""
    takes_mode = "render_mode" in inspect.signature(make_env).parameters
    env: AMAGOEnv = make_env(render_mode=MODE) if takes_mode else make_env()
    inner = env.unwrapped
    if inner.render_mode is None and MODE in (inner.metadata.get("render_modes") or ()):
        inner.render_mode = MODE
    return env
