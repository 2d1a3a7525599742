"""Time and memory of a start: imports, worker processes. The ceiling of each case is a new interpreter that imports torch.

Every figure is from a new process and includes the start of its interpreter. Targets limit ``seconds over torch`` in the
details: 1 s for an import of the library, 3 s for the first step of an environment. Target ratios are derived from these
limits.

"first step" is the README's program (8 CartPoles, default models of width 256) until the first step of an environment in any
process.

"idle pool" is the proportional set size of a process and its descendants after a pool of CartPoles has been reset, with torch
and `Experiment` imported in the main process. Proportional means that shared pages are divided among the processes that share
them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, compare

IMPORTS = {
    "import amago (all that an actor needs)": "import amago, amago.envs",
    "import amago, Experiment and Agent": "import amago; amago.Experiment; amago.Agent",
}
ROOT = str(Path(__file__).parent.parent)


def run(code: str, *arguments: str) -> list[str]:
    """The words that a new interpreter prints when it runs ``code``."""
    process = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        process, capture_output=True, text=True, cwd=ROOT, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise RuntimeError(f"{code!r:.200} failed:\n{done.stderr[-2000:]}")
    return done.stdout.split()


def until_imported(statement: str) -> Callable[[], float]:
    """A contender that measures the seconds from the start of an interpreter to the end of ``statement``."""

    def measure() -> float:
        began = time.time()
        return float(run(f"import time\n{statement}\nprint(time.time())")[-1]) - began

    return measure


def until_first_step(mode: str, encoder: str) -> Callable[[], float]:
    """A contender that measures the seconds from the start of an interpreter to the first step of an environment."""

    def measure() -> float:
        began = time.time()
        return float(run("from benchmarks import startup; startup.first_step()", mode, encoder)[-1]) - began

    return measure


def first_step() -> None:
    """Run in a new interpreter: the README's program; prints the time of the first step of an environment."""
    import gymnasium

    import amago
    from amago.loading import DiskTrajDataset
    from amago.nets.traj_encoders import FFTrajEncoder, TformerTrajEncoder
    from amago.nets.tstep_encoders import FFTstepEncoder

    mode, encoder = sys.argv[1:]
    encoders: dict[str, Any] = {"FF": FFTrajEncoder, "Transformer": TformerTrajEncoder}
    with tempfile.TemporaryDirectory() as folder:

        class Stamped(gymnasium.Wrapper[Any, Any, Any, Any]):
            def step(self, action: Any) -> Any:
                Path(folder, f"{time.time()}-{id(self)}.stamp").touch()
                return self.env.step(action)

        def make_env() -> amago.envs.AMAGOEnv:
            return amago.envs.AMAGOEnv(Stamped(gymnasium.make("CartPole-v1")), env_name="CartPole")

        experiment = amago.Experiment(
            run_name="startup", ckpt_base_dir=folder, max_seq_len=64, dataset=DiskTrajDataset(folder, "startup"),
            tstep_encoder_type=FFTstepEncoder, traj_encoder_type=encoders[encoder],
            agent_type=amago.Agent, make_train_env=make_env, make_val_env=make_env, val_timesteps_per_epoch=501, parallel_actors=8,
            train_timesteps_per_epoch=1, env_mode=mode, verbose=False,
        )  # fmt: skip
        experiment.start()
        experiment.collect_new_training_data()
        stamps = [float(p.name.split("-")[0]) for p in Path(folder).glob("*.stamp")]
        experiment.close()
    print(min(stamps))


# ---- memory ----------------------------------------------------------------------------------------------------------------


def resident(pid: int | None = None) -> float:
    """Proportional set size in MiB of a process (this one by default) and its descendants."""
    total = 0.0
    for process in family(os.getpid() if pid is None else pid):
        try:
            with open(f"/proc/{process}/smaps_rollup") as f:
                total += next(float(line.split()[1]) / 1024.0 for line in f if line.startswith("Pss:"))
        except (FileNotFoundError, ProcessLookupError, StopIteration):  # it has ended
            continue
    return total


def family(pid: int) -> list[int]:
    """The process ids of a process and its descendants."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def idle_pool() -> None:
    """Run in a new interpreter: prints the memory with an idle pool, the memory of its workers alone, and the number of
    processes."""
    import gymnasium

    import amago
    from amago.envs import AMAGOEnv, make_pool

    assert amago.Experiment is not None
    actors = int(sys.argv[1])
    pool = make_pool(lambda: AMAGOEnv(gymnasium.make("CartPole-v1"), env_name="CartPole"), "async", parallel_actors=actors)
    try:
        pool.reset()
        below = sum(resident(pid) for pid in family(os.getpid())[1:] if os.path.exists(f"/proc/{pid}"))
        print(resident(), below, len(family(os.getpid())))
    finally:
        pool.close()


def memory(actors: int) -> Callable[[], float]:
    return lambda: float(run("from benchmarks import startup; startup.idle_pool()", str(actors))[0])


def memory_of_torch() -> float:
    return float(run("import torch\nfrom benchmarks import startup\nprint(startup.resident())")[0])


def with_limit(row: Row, seconds: float) -> Row:
    """The row with the target ratio that corresponds to a limit of ``seconds`` over torch."""
    over = {"seconds over torch": row.ours - row.ceiling, "seconds allowed over torch": seconds}
    return replace(row, target=row.ceiling / (row.ceiling + seconds), details={**row.details, **over})


def rows(options: Namespace) -> Iterator[Row]:
    """Imports, first steps, memory."""
    rounds = options.rounds or (1 if options.smoke else 5)
    torch = until_imported("import torch")
    if not options.smoke:
        torch()  # loads the files into the page cache
    for case, statement in IMPORTS.items():
        if options.only in case and not (options.smoke and "Agent" not in case):
            yield with_limit(compare(case, "s", {"ours": until_imported(statement), "ceiling": torch}, rounds), 1.0)
    for mode in ("sync", "async"):
        for encoder in ("FF", "Transformer"):
            case = f"first step of an environment, {mode}, {encoder}"
            if options.only in case and not (options.smoke and (mode, encoder) != ("async", "FF")):
                yield with_limit(compare(case, "s", {"ours": until_first_step(mode, encoder), "ceiling": torch}, rounds), 3.0)
    for actors in (2,) if options.smoke else (16, 64):
        case = f"idle pool of {actors} actors"
        if options.only in case:
            rows_of = {"ours": memory(actors), "ceiling": memory_of_torch}
            yield compare(case, "MiB", rows_of, 1 if options.smoke else min(rounds, 3))
