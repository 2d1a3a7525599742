"""What comes before the first step: imports, processes, memory. The ceiling of all is a fresh interpreter that imports torch.

Every figure is of a process of its own, from before it is started until it reports: the interpreter's own start is in both sides. ``seconds over
torch`` in the details is what the targets speak of: an import may take 1 s more than torch's, the first step of an environment 3 s more. The
target ratios follow from these.

"first step" is the README's program (8 CartPoles) until an environment takes its first step, wherever that environment lives. Models are those
of its defaults, 256 wide.

"idle pool" is the proportional set size (what is shared counts in parts) of this process and all below it, once a pool of CartPoles has been reset and
the policy's process has torch and `Experiment` imported. Its ceiling is the same of a process that has imported torch.
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
    """What a fresh interpreter prints."""
    process = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        process, capture_output=True, text=True, cwd=ROOT, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise RuntimeError(f"{code!r:.200} failed:\n{done.stderr[-2000:]}")
    return done.stdout.split()


def until_imported(statement: str) -> Callable[[], float]:
    """Seconds from before the interpreter is started until the statement is done."""

    def measure() -> float:
        began = time.time()
        return float(run(f"import time\n{statement}\nprint(time.time())")[-1]) - began

    return measure


def until_first_step(mode: str, encoder: str) -> Callable[[], float]:
    """The same until an environment steps for the first time."""

    def measure() -> float:
        began = time.time()
        return float(run("from benchmarks import startup; startup.first_step()", mode, encoder)[-1]) - began

    return measure


def first_step() -> None:
    """Run by the child: the README's program as far as its first step; prints when that was."""
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
    """MiB of a process and of all below it (this one by default), shared pages in parts."""
    total = 0.0
    for process in family(os.getpid() if pid is None else pid):
        try:
            with open(f"/proc/{process}/smaps_rollup") as f:
                total += next(float(line.split()[1]) / 1024.0 for line in f if line.startswith("Pss:"))
        except (FileNotFoundError, ProcessLookupError, StopIteration):  # it has ended
            continue
    return total


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def idle_pool() -> None:
    """Run by the child: prints the memory of a pool, and of its processes alone."""
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
    """The row with the target ratio that so many seconds more than torch come to."""
    over = {"seconds over torch": row.ours - row.ceiling, "seconds allowed over torch": seconds}
    return replace(row, target=row.ceiling / (row.ceiling + seconds), details={**row.details, **over})


def rows(options: Namespace) -> Iterator[Row]:
    """Imports, first steps, memory."""
    rounds = options.rounds or (1 if options.smoke else 5)
    torch = until_imported("import torch")
    if not options.smoke:
        torch()  # from the disk
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
