"""One run of the suite: a task, a configuration and a seed, until its budget of processor time is spent.

A run may be interrupted at any time: started again, it continues from its last training state, with the processor time spent until
then. Its result is a file of `benchmarks.suite.recorded`.
"""

from __future__ import annotations

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
from benchmarks.suite.recorded import BudgetSpent, Recorder, append, claimed, is_done
from benchmarks.suite.tasks import Task, bindings, classes

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


def result_path(results: Path, config_name: str, task: str, seed: int) -> Path:
    return results / config_name / task / f"seed{seed}.jsonl"


def build(task: Task, chosen: Config, seed: int, work: Path, recorder: Recorder) -> Experiment:
    """The experiment of a run, with the present gin bindings, not started."""
    traj_encoder, exploration = classes(task, chosen.base)
    if chosen.traj_encoder is not None:
        traj_encoder = _same_size(chosen.traj_encoder)

    def make_env() -> AMAGOEnv:
        return AMAGOEnv(task.make(), env_name=task.name)

    run = Experiment(
        run_name="run", ckpt_base_dir=str(work), dataset=DiskTrajDataset(work, "buffer", task.buffer), max_seq_len=task.context,
        tstep_encoder_type=FFTstepEncoder, traj_encoder_type=traj_encoder, agent_type=Agent, exploration_wrapper_type=exploration,
        make_train_env=make_env, make_val_env=make_env, val_timesteps_per_epoch=1, epochs=ENDLESS, lr_cooldown=0.0, ckpt_interval=20,
        keep_training_states=1, always_save_latest=False, save_trajs_as="segments", env_mode="sync", seed=seed, verbose=False,
        dloader_workers=0, resume="auto", callbacks=[recorder],
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


def _within(file: str) -> str:
    """The path of a file of this repository from its root; other paths as they are."""
    path, root = Path(file).absolute(), Path(__file__).parents[2]
    return str(path.relative_to(root)) if path.is_relative_to(root) else file


def train(
    task: Task, chosen: Config, seed: int, results: Path, work: Path, budget: float | None = None, until_solved: bool = False
) -> None:
    """Run, or continue, one run; does nothing if it is done.

    Args:
        results: folder of results.
        work: folder for the replay buffer and training states of this run alone.
        budget: processor seconds; None: ``task.cpu_seconds``.
        until_solved: end the run earlier when `benchmarks.suite.recorded.IN_A_ROW` evaluations have reached the task's threshold.
    """
    path = result_path(results, chosen.name, task.name, seed)
    if is_done(path):
        return
    bound, zoo = bindings(task, chosen.base)
    with claimed(path), config.temporary({}):
        cli_utils.use_config(bound, zoo)
        cli_utils.use_config(bound, list(chosen.files))
        head = {"task": task.name, "seed": seed, "config": asdict(chosen) | {"files": [_within(file) for file in chosen.files]}}
        goal = task.threshold if until_solved else None
        recorder = Recorder(path, head, task.cpu_seconds if budget is None else budget, goal)
        run = build(task, chosen, seed, work, recorder)
        try:
            run.start()
            run.learn()
        except BudgetSpent:
            append(path, {"done": True})
        finally:
            run.close()
