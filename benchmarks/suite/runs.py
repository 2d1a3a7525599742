"""One run of the suite: a task, a configuration and a seed, until its budget of processor time is spent.

A run may be interrupted at any time: started again, it continues from its last training state, with the processor time spent until
then. Its result is one file of JSON lines: first what the run is, then a row for each evaluation, at last ``{"done": true}``.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from amago import cli_utils, config
from amago.agent import Agent
from amago.envs import AMAGOEnv
from amago.experiment import Experiment
from amago.loading import DiskTrajDataset
from amago.nets.traj_encoders import TformerTrajEncoder, TrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from benchmarks.harness import machine
from benchmarks.suite.tasks import Task, bindings, classes

RETURN = "Average Total Return (Across All Env Names)"
ENDLESS = 1_000_000
"""Epochs of a run, which ends with its budget."""


@dataclass(frozen=True)
class Config:
    """A configuration: a base, "tuned" (the task's settings in the zoo) or "default" (the library's), and gin files on top.

    Attributes:
        name: name of its folder of results.
        traj_encoder: name of the sequence model, as wide and deep as the transformer would be; None: that of the base.
    """

    name: str
    base: str = "tuned"
    files: tuple[str, ...] = ()
    traj_encoder: str | None = None


@dataclass(frozen=True)
class Point:
    """An evaluation: processor seconds, environment steps and updates until then, and the mean return."""

    cpu: float
    steps: int
    updates: int
    score: float


class BudgetSpent(Exception):
    """Ends a run whose processor time is spent."""


class SuiteRun(Experiment):
    """An experiment that writes its evaluations to ``path`` and ends when ``budget`` processor seconds are spent."""

    path: Path
    budget: float = math.inf
    spent_before: float = 0.0
    began: float = 0.0

    @property
    def cpu(self) -> float:
        """Processor seconds of this run, those before it was interrupted included."""
        return self.spent_before + time.process_time() - self.began

    def log(self, metrics_dict: Any, key: str) -> None:
        super().log(metrics_dict, key)
        if key != "val" or RETURN not in metrics_dict:
            return
        point = Point(round(self.cpu, 2), self.env_steps, self.updater.grad_steps, float(metrics_dict[RETURN]))
        append(self.path, asdict(point))
        if self.cpu >= self.budget:
            raise BudgetSpent


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a result; an incomplete last line, of a run that was killed, does not count."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def is_done(path: Path) -> bool:
    found = rows(path)
    return bool(found) and bool(found[-1].get("done"))


def result_path(results: Path, config_name: str, task: str, seed: int) -> Path:
    return results / config_name / task / f"seed{seed}.jsonl"


def build(task: Task, chosen: Config, seed: int, work: Path) -> SuiteRun:
    """The experiment of a run, with the present gin bindings, not started."""
    traj_encoder, exploration = classes(task, chosen.base)
    if chosen.traj_encoder is not None:
        traj_encoder = _same_size(chosen.traj_encoder)

    def make_env() -> AMAGOEnv:
        return AMAGOEnv(task.make(), env_name=task.name)

    run = SuiteRun(
        run_name="run", ckpt_base_dir=str(work), dataset=DiskTrajDataset(work, "buffer", task.buffer), max_seq_len=task.context,
        tstep_encoder_type=FFTstepEncoder, traj_encoder_type=traj_encoder, agent_type=Agent, exploration_wrapper_type=exploration,
        make_train_env=make_env, make_val_env=make_env, val_timesteps_per_epoch=1, epochs=ENDLESS, lr_cooldown=0.0, ckpt_interval=20,
        keep_training_states=1, always_save_latest=False, save_trajs_as="segments", env_mode="sync", seed=seed, verbose=False,
        dloader_workers=0, resume="auto",
    )  # fmt: skip
    run.val_timesteps_per_epoch = -(-task.rollouts // run.parallel_actors) * task.horizon + 1
    return run


def _same_size(name: str) -> type[TrajEncoder]:
    """The sequence model of that name, bound to the width and depth that the present bindings give to the transformer."""
    transformer = TformerTrajEncoder(1, 1)
    size: dict[str, Any] = {}
    found = cli_utils.switch_traj_encoder(size, name, memory_size=transformer.emb_dim, layers=len(transformer.tformer.layers))
    config.bind(size)
    return found


def train(task: Task, chosen: Config, seed: int, results: Path, work: Path, budget: float | None = None) -> None:
    """Run, or continue, one run; does nothing if it is done.

    Args:
        results: folder of results.
        work: folder for the replay buffer and training states of this run alone.
        budget: processor seconds; None: ``task.cpu_seconds``.
    """
    path = result_path(results, chosen.name, task.name, seed)
    if is_done(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    bound, zoo = bindings(task, chosen.base)
    with config.temporary({}):
        cli_utils.use_config(bound, zoo)
        cli_utils.use_config(bound, list(chosen.files))
        run = build(task, chosen, seed, work)
        run.path, run.budget, run.began = path, task.cpu_seconds if budget is None else budget, time.process_time()
        run.start()
        earlier = [r for r in rows(path) if "score" in r and r["updates"] <= run.updater.grad_steps and run.epoch > 0]
        run.spent_before = earlier[-1]["cpu"] if earlier else 0.0
        head = {"task": task.name, "seed": seed, "config": asdict(chosen), "budget": run.budget, "machine": machine()}
        path.write_text("".join(json.dumps(r) + "\n" for r in [head, *earlier]))
        try:
            run.learn()
        except BudgetSpent:
            append(path, {"done": True})
        finally:
            run.close()
