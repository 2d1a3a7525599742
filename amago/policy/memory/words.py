"""What a study of memory has found, in words and as a table."""

from __future__ import annotations

import numpy as np

from amago.policy.memory.study import NONE, Estimate, MemoryStudy, describe, stage_estimates
from amago.policy.playing import FULL, THIS_ATTEMPT, View

ENOUGH = 0.1
"""A context is enough where at most this share of what memory is worth is lost."""


def table(study: MemoryStudy) -> str:
    """Mean returns with intervals, a line for each view."""
    rows = [("memory in sight", "return", "lost by that")]
    for view in study.returns:
        lost = "" if view == FULL else str(study.gain(FULL, view))
        rows.append((describe(view), str(study.estimate(view)), lost))
    width = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"  {a:<{width[0]}}  {b:<{width[1]}}  {c}".rstrip() for a, b, c in rows)


def conclusion(study: MemoryStudy) -> list[str]:
    """Sentences about whether memory is used, across attempts and within them, how far back, and where the gradients point."""
    worth = study.gain(FULL, NONE)
    found = [_verdict(study, worth)]
    if worth.low > 0 or _across(study):
        found += _attempts(study)
    if worth.low > 0:
        found.append(_reach(study, worth.mean))
    found += _adaptation(study)
    found += _influence(study)
    if study.broken_off:
        found.append(
            f"{study.broken_off} rollouts were broken off at the limit of steps, and count with their return until then."
        )
    return found


def _across(study: MemoryStudy) -> bool:
    """Whether erasing the memory after each attempt costs something."""
    return THIS_ATTEMPT in study.returns and study.gain(FULL, THIS_ATTEMPT).low > 0


def _verdict(study: MemoryStudy, worth: Estimate) -> str:
    scores = f"the return is {study.estimate(FULL)} with all of it, and {study.estimate(NONE)} where the policy sees the current step alone"
    if worth.low > 0:
        return (
            f"Memory is used: {scores}. On the same tasks it is worth {worth}, at most: a policy whose memory is cut short may also fail "
            "because it has never been trained so."
        )
    if worth.high < 0:
        return f"Memory does harm: {scores}; on the same tasks it costs {Estimate(-worth.mean, -worth.high, -worth.low)}."
    if (study.returns[FULL] == study.returns[NONE]).all():
        return f"Memory is not used: without it, each of the {len(study.returns[FULL])} rollouts has the same return ({study.estimate(FULL)})."
    if _across(study):
        return f"Memory is used, but there is no sign that it gains anything all in all: {scores}, a difference of {worth} on the same tasks."
    return f"There is no sign that memory is used: {scores}. On the same tasks the difference is {worth}, an interval that contains 0."


def _attempts(study: MemoryStudy) -> list[str]:
    if THIS_ATTEMPT not in study.returns:
        return []
    across, within = study.gain(FULL, THIS_ATTEMPT), study.gain(THIS_ATTEMPT, NONE)
    out = []
    if across.low > 0:
        out.append(
            f"Across attempts: {across} is lost if memory is erased after each attempt, so what earlier attempts showed is used."
        )
    else:
        out.append(f"Across attempts: no sign of use; {across} is lost if memory is erased after each attempt.")
    if within.low > 0:
        out.append(f"Within an attempt: memory of the present attempt alone is worth {within}.")
    else:
        out.append(f"Within an attempt: no sign of use; memory of the present attempt alone is worth {within}.")
    return out


def _reach(study: MemoryStudy, worth: float) -> str:
    lost = {n: study.gain(FULL, View(context=n)) for n in study.contexts}
    enough = None
    for n in reversed(study.contexts):
        if lost[n].mean > ENOUGH * worth:
            break
        enough = n
    if enough is None:
        n = study.contexts[-1]
        return f"How far back: a context of {n} steps is not enough; {lost[n]} of the return is lost with it."
    shorter = max((n for n in study.contexts if n < enough), default=None)
    tail = "" if shorter is None else f", with {shorter} it loses {lost[shorter]}"
    return f"How far back: the last {enough} steps are enough; with them the return loses {lost[enough]}{tail}."


def _adaptation(study: MemoryStudy) -> list[str]:
    if study.stages.stage != "attempt":
        return []
    values = study.stages.values[FULL]
    last = len(stage_estimates(values)) - 1
    if last < 1:
        return []
    rise = Estimate.of(values[:, last] - values[:, 0])
    ends = f"from {np.nanmean(values[:, 0]):.3g} in attempt 1 to {np.nanmean(values[:, last]):.3g} in attempt {last + 1}, by {rise}"
    if rise.low > 0:
        return [f"Adaptation: the score ({study.stages.score}) rises {ends}."]
    if rise.high < 0:
        return [f"Adaptation: none; the score ({study.stages.score}) falls {ends}."]
    return [f"Adaptation: no sign of it; the score ({study.stages.score}) goes {ends}."]


def _influence(study: MemoryStudy) -> list[str]:
    if study.influence is None:
        return []
    now, attempt, earlier = study.influence.by_distance()
    if not now + attempt + earlier:
        return ["Influence: not measurable; the policy is so sure of its actions that gradients vanish."]
    if not attempt and not earlier:
        return ["Influence: in one rollout no action depends on any step but the current one."]
    if study.stages.stage == "attempt":
        past = f"{attempt:.0%} on earlier ones of the same attempt, {earlier:.0%} on earlier attempts"
    else:
        past = f"{attempt + earlier:.0%} on earlier ones"
    return [
        f"Influence: in one rollout {now:.0%} of the gradient of the actions' log-probability lies on the current step, {past}."
    ]
