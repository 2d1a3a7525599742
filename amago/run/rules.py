"""Rules that find in the log of a run why it may learn nothing: in the run a line each, once, and later by `amago doctor RUN`.

`docs/common_mistakes.md` explains them, under their names.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean

from amago.run.callbacks import LogRow
from amago.run.metric_names import AVERAGE_RETURN, NUMBER_OF_ROLLOUTS

Rows = Sequence[LogRow]
ENTROPY, CRITIC_LOSS = "Policy Entropy", "Critic Loss"
APPROVED = "Pct. of Actions Approved by Filter (main gamma)"
HIGHEST, LOWEST = "Reward in Batch (max)", "Reward in Batch (min)"


def _column(rows: Rows, section: str, name: str) -> list[float]:
    found = [row.values.get(name) for row in rows if row.section == section]
    return [v for v in found if v is not None and math.isfinite(v)]


def _gained_nothing(rows: Rows) -> bool:
    """True unless the newest return of evaluations, or else of collection, is above the first."""
    columns = (_column(rows, section, AVERAGE_RETURN) for section in ("val", "rollout"))
    returns = next((column for column in columns if len(column) > 1), [0.0])
    return returns[-1] <= returns[0]


def _huge_rewards(rows: Rows) -> str | None:
    rewards = max(map(abs, _column(rows, "train", HIGHEST) + _column(rows, "train", LOWEST)), default=0.0)
    loss = max(_column(rows, "train", CRITIC_LOSS)[-1:], default=0.0)
    return f"rewards of up to {rewards:.3g}, and a critic loss of {loss:.3g}" if min(rewards, loss) >= 1_000 else None


def _no_reward(rows: Rows) -> str | None:
    highest, lowest = _column(rows, "train", HIGHEST), _column(rows, "train", LOWEST)
    updates = max((row.grad_steps for row in rows), default=0)
    never = highest and lowest and not any(highest + lowest)
    return f"no reward was seen in {updates:,} updates" if updates >= 500 and never else None


def _collapsed_policy(rows: Rows) -> str | None:
    entropy = _column(rows, "train", ENTROPY)
    first, last = max(entropy, default=0.0), fmean(entropy[-3:] or [0.0])
    if first < 0.05 or last > 0.02 * first or not _gained_nothing(rows):
        return None
    return f"the policy's entropy fell from {first:.2g} to {last:.2g}, and the return is no better than at first"


def _few_approved(rows: Rows) -> str | None:
    approved = _column(rows, "train", APPROVED)
    if len(approved) < 5 or fmean(approved[-5:]) >= 20.0 or not _gained_nothing(rows):
        return None
    return f"the actor learns from {fmean(approved[-5:]):.0f}% of the actions, and the return is no better than at first"


def _few_rollouts(rows: Rows) -> str | None:
    rollouts = _column(rows, "val", NUMBER_OF_ROLLOUTS)[-1:]
    return (
        f"the newest evaluation has {rollouts[0]:.0f} rollout{'s' * (rollouts[0] != 1)}"
        if rollouts and rollouts[0] < 5
        else None
    )


def _slow_environments(rows: Rows) -> str | None:
    seconds: Counter[str] = Counter()
    for before, row in pairwise(rows):
        seconds[row.section] += max(0.0, row.wall_time - before.wall_time)  # type: ignore[assignment]
    collecting, spent = seconds["rollout"], sum(seconds.values())
    trains = bool(_column(rows, "train", CRITIC_LOSS))
    return f"{collecting / spent:.0%} of the time is collection" if trains and collecting > max(60.0, 0.9 * spent) else None


def _growing_memory(rows: Rows) -> str | None:
    memory = [row.memory for row in rows if row.memory]
    n = len(memory) // 4
    if n < 10:
        return None
    second, third, last = (fmean(memory[i * n : (i + 1) * n]) for i in (1, 2, 3))
    grows = third > 1.1 * second and last > 1.1 * third and last - second > 0.5
    return f"memory grew from {second:.1f} to {last:.1f} GiB, and does not stop" if grows else None


RULES = {
    "huge rewards": (_huge_rewards, "Agent.rescale_critics = True, or divide them in the environment"),
    "no reward": (_no_reward, "more exploration, an easier start, or goals in hindsight"),
    "collapsed policy": (_collapsed_policy, "a lower learning_rate or tau, more data for each update"),
    "few approved": (_few_approved, "more exploration, or another filter (Agent.fbc_filter_func)"),
    "few rollouts": (_few_rollouts, "a larger val_timesteps_per_epoch, or val_episodes=20"),
    "slow environments": (_slow_environments, "env_mode='async', more parallel_actors, or more updates an epoch"),
    "growing memory": (_growing_memory, "look for a leak in the environment, or limit what it keeps"),
}
"""{name: (what it finds in the rows of a log, the newest last, in words or None; what to do)}."""


def findings(rows: Rows) -> Iterator[tuple[str, str, str]]:
    """The name, words and advice of each rule that finds something."""
    for name, (find, advice) in RULES.items():
        if words := find(rows):
            yield name, words, advice
