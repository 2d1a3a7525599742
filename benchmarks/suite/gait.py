"""How fast the cheetahs ran that a run of `examples/12_half_cheetah_vel.py` collected, and whether they followed their hidden targets.

    python -m benchmarks.suite.gait RUN
    python -m benchmarks.suite.gait RUN --files 5

Prints a row of JSON for each ten files of the run's buffer, oldest first; a file is a collection phase, unless a phase collected too much
for one. Returns of a few rollouts hide small steps forward, because their targets move them by a third; these rows show them:

- "rollouts": their number, and "steps": of all collected rollouts up to here that are still in the buffer.
- "error": mean |velocity - target|, in m/s, after step 80 of an attempt; "standing": that of a cheetah that stands still.
- "velocity": its mean, in m/s, and "slope": that of velocities over targets, 0 if the target changes nothing, 1 if it is followed.
- "stuck": the share of numbers of actions beyond .95.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

VELOCITY = 8
"""The observation's velocity along x (Gymnasium's HalfCheetah-v5)."""
CTRL_COST_WEIGHT = 0.05
STARTED = 80
"""Steps of an attempt that do not count: a cheetah begins at rest."""
BOUND = 0.95
FASTEST, RESOLUTION = 10.0, 0.05
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Rollout:
    """What was collected, one row a step: (T,) velocities in m/s after the step, (T, 6) actions, (T,) rewards."""

    velocities: Array
    actions: Array
    rewards: Array


def target_of(rollout: Rollout) -> float:
    """The hidden target in m/s, to 0.05: rewards are -|velocity - target| less the cost of the actions.

    A reward's velocity is the mean over its step, that of an observation the one at its end, so the target is the one whose error differs
    least from the reward's in half of the steps.
    """
    errors = -rollout.rewards - CTRL_COST_WEIGHT * (rollout.actions**2).sum(-1)
    targets = np.arange(0.0, FASTEST, RESOLUTION)
    apart = np.abs(np.abs(rollout.velocities[:, None] - targets) - errors[:, None])
    return float(targets[np.median(apart, 0).argmin()])


def rollouts_in(path: Path) -> Iterator[Rollout]:
    """The rollouts of a file of a buffer (docs/files.md).

    Raises:
        ValueError: another environment's.
    """
    fields = load_file(path)
    observed = fields.get("obs/observation")
    if observed is None or observed.ndim != 2 or observed.shape[1] <= VELOCITY:
        raise ValueError(f"RUN: {path} has no rollouts of HalfCheetahVel, but {', '.join(sorted(fields))}")
    velocities, actions, rewards = (
        x.astype(np.float64) for x in (observed[:, VELOCITY], fields["actions"], fields["rews"][:, 0])
    )
    ends = fields["ep_offsets"].tolist()
    for i, (start, stop) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        # a rollout of T steps has T + 1 observations, the first before any step
        yield Rollout(velocities[start + i + 1 : stop + i + 1], actions[start:stop], rewards[start:stop])


def summary(rollouts: list[Rollout]) -> dict[str, float]:
    """Means over rollouts; the keys are those of a printed row."""
    targets = np.array([target_of(r) for r in rollouts])
    late = [r.velocities[STARTED:] for r in rollouts]
    velocities = np.array([v.mean() for v in late])
    spread = targets.var()
    return {
        "rollouts": len(rollouts),
        "error": float(np.mean([np.abs(v - t).mean() for v, t in zip(late, targets, strict=True)])),
        "standing": float(targets.mean()),
        "velocity": float(velocities.mean()),
        "slope": float(((targets - targets.mean()) * velocities).mean() / spread) if spread else 0.0,
        "stuck": float(np.mean([(np.abs(r.actions) > BOUND).mean() for r in rollouts])),
    }


def rows(run: Path, files: int = 10) -> Iterator[dict[str, float]]:
    """A summary of each so many files; those of rollouts that are too short to tell are left out.

    Raises:
        ValueError: no files, or files of other environments.
    """
    found = sorted((run / "buffer" / "fifo").glob("*.safetensors"))
    steps = 0
    for i in range(0, len(found), files):
        rollouts = [r for path in found[i : i + files] for r in rollouts_in(path)]
        steps += sum(len(r.rewards) for r in rollouts)
        if whole := [r for r in rollouts if len(r.rewards) > STARTED]:
            yield {"steps": steps, **{key: round(value, 3) for key, value in summary(whole).items()}}
    if not steps:
        raise ValueError(f"RUN: no rollouts in {run / 'buffer' / 'fifo'}, which has {len(found)} .safetensors files")


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(
        prog="python -m benchmarks.suite.gait", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of the run, with its buffer")
    parser.add_argument("--files", type=int, default=10, help="files for a row (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.files < 1:
        parser.error(f"--files must be at least 1, got {args.files}")
    try:
        for row in rows(args.run, args.files):
            print(json.dumps(row))
    except ValueError as err:
        parser.error(str(err))
    return 0


if __name__ == "__main__":
    sys.exit(main())
