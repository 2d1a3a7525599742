"""The sections of a page about runs: figures and tables, and why something is missing."""

from __future__ import annotations

import html
import time
from collections.abc import Callable
from typing import Any

from amago.run.metric_names import AVERAGE_RETURN, RETURN_OF, ROLLOUT_LENGTH
from amago.run.report import episodes, figures
from amago.run.report.content import Content, Section, shown, table
from amago.run.report.curves import LATE, last_return, metric_names, rates, recent_rate
from amago.run.report.log import COUNTED, SUMMED
from amago.run.report.runs import NO_SETTINGS, Group, Run, differences
from amago.run.report.status import duration, status_of
from amago.store import StoreError

_LOSSES = ("Critic Loss", "Actor Loss", "Mean |TD Error| (main gamma)")
_POLICY = (
    "Policy Entropy", "Advantage (main gamma)", "Pct. of Actions Approved by Filter (main gamma)", "Learning Rate",
)  # fmt: skip
_OF_ROLLOUTS = (
    ("val", ROLLOUT_LENGTH, "Mean length of rollouts, evaluation"), ("rollout", ROLLOUT_LENGTH, "Mean length of rollouts, collection"),
    ("rollout", "Epsilon", "Epsilon of the exploration"),
)  # fmt: skip
_FAULTS = {
    "Skipped Updates": "skipped updates", "Restarted Environments": "restarted environments", "Dropped Rollouts": "dropped rollouts",
    "quarantined": "damaged files",
}  # fmt: skip
_VERSIONS = ("python", "amago", "torch", "numpy", "gymnasium", "accelerate")
_WIDE = 12
"""Beyond so many groups or runs, tables have a row for each instead of a column."""


# ---- sections --------------------------------------------------------------------------------------------------------------


def overview(content: Content) -> Section:
    """A row for each run: what it does, how far it is, its rates, its newest return."""
    rows, names = [], []
    now = time.time()
    for group in content.groups:
        for run in group.runs:
            status = status_of(run, now)
            epoch, steps, updates, seconds = run.log.highest
            score = last_return(run)
            of = f" of {status.epochs:,} ({100 * (status.share or 0):.0f}%)" if status.epochs else ""
            left = "" if status.left is None else f"{duration(status.left)} ({_clock(now + status.left)})"
            moving = status.state == "running" and content.live
            rows.append(
                [run.name, status.state, f"{status.done if status.epochs else epoch:,.0f}{of}", left,
                 "none yet" if score is None else f"{score[0]:.4g} ({score[1]})", f"{steps:,}", f"{updates:,}", duration(seconds),
                 *(_rate(run, what, moving) for what in ("env_steps", "grad_steps")), _fault_words(run), status.why, group.name]
            )  # fmt: skip
            names.append(group.name)
    heads = [
        "run", "state", "epochs", "time left", "mean return", "steps", "updates", "time", "steps/s", "updates/s", "faults", "sign of life",
        "group",
    ]  # fmt: skip
    section = Section("runs", "Runs", [table(heads, rows, names)] if rows else [])
    if not rows:
        section.missing.append("there is no run here yet")
    problems = [[p] for run in content.runs for p in run.problems]
    if problems:
        section.parts.append(table(["what could not be read"], problems))
    if any(status_of(run, now).epochs is None for run in content.runs):
        section.missing.append(f"how far some runs are: they have {NO_SETTINGS}")
    return section


def _clock(when: float) -> str:
    far = when - time.time() > 86_400 / 2
    return time.strftime("%a %d %b %H:%M" if far else "%H:%M", time.localtime(when))


def _rate(run: Run, what: str, recent: bool) -> str:
    if recent:
        rate = recent_rate(run, what)
    else:
        rate = rates(run).get("steps/s" if what == "env_steps" else "updates/s")
    return "" if not rate else f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _fault_words(run: Run) -> str:
    if not run.log.complete:
        return "being read"
    found = [f"{run.log.faults[k]:,.0f} {words}" for k, words in _FAULTS.items() if run.log.faults.get(k)]
    return ", ".join(found) or "none"


def learning(content: Content) -> Section:
    """The mean return over the run."""
    section = Section("learning", "Learning curves")
    for key, title, words in (
        ("val", "Mean return, evaluation", "no evaluation has ended yet"),
        ("rollout", "Mean return, collection (with exploration)", "no rollout has ended during collection"),
        ("test", "Mean return, tests", ""),
    ):
        if key == "test" and all(len(run.log.column(key, "env_steps", AVERAGE_RETURN)[0]) < 2 for run in content.runs):
            continue  # no curve: the table of runs has it
        made = figures.returns(content.groups, key, title, content.choices, content.points)
        if made is not None or words:
            section.add(made, f"{title[0].lower()}{title[1:]}: {words}")
    bands = [g for g in content.groups if len(g.runs) > 1]
    if bands:
        section.parts.append(
            "<p class=note>Lines are over the seeds of a group, bands 95% bootstrap intervals of them (1,000 resamples of runs).</p>"
        )
    return section


def adaptation(content: Content) -> Section:
    """Scores by attempt, and rewards by time in the rollout."""
    section = Section("adaptation", "Adaptation")
    by_attempt = figures.adaptations(content.groups)
    section.parts += by_attempt
    if by_attempt:
        late = f"Means of the evaluations in the last {100 * LATE:.0f}% of each run's updates; intervals are over seeds."
        section.parts.append(f"<p class=note>{late}</p>")
    else:
        section.missing.append("scores by attempt: no metric of these environments has a number (such as 'Attempt 0 Success')")
    if content.live:
        section.missing.append("rewards by time in the rollout: amago report draws them, from the replay buffer")
        return section
    found: dict[str, list[tuple[Group, list[Any]]]] = {}
    for group in content.groups:
        for name, parts in _by_time(group, section).items():
            found.setdefault(name, []).append((group, parts))
    drawn = []
    for name, own in found.items():
        data: list[Any] = []
        for group, parts in own:
            curve = episodes.by_time(group, parts)
            if curve is not None:
                data += figures.line(curve, group.name, figures.style(list(content.groups).index(group)))
        if data:
            drawn.append(
                figures.figure(f"Reward by time in the rollout: {name}", data, "time in the rollout (steps)", "reward a step")
            )
    section.parts += drawn[: figures.MOST_NAMES]
    if drawn:
        section.parts.append(
            f"<p class=note>From the newest {episodes.NEWEST} trajectories in each run's buffer, exploration included; at each time, of "
            "those that last so long. Intervals are over seeds, or over trajectories where there is one run.</p>"
        )
    else:
        section.missing.append(
            "rewards by time in the rollout: no replay buffer of these runs was found, or none has rollouts of several steps"
        )
    return section


def _by_time(group: Group, section: Section) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for run in group.runs:
        try:
            for name, parts in episodes.rewards_by_time(run).items():
                found.setdefault(name, []).append(parts)
        except (OSError, StoreError) as err:
            section.missing.append(f"rewards by time of {run.name}: its buffer cannot be read ({err})")
    return found


def environments(content: Content) -> Section:
    """Returns by environment name."""
    section = Section("environments", "Returns by environment")
    names = [n for n in metric_names(content.runs, "val") if n.startswith(RETURN_OF)]
    if len(names) < 2:
        section.missing.append("the runs evaluate a single environment name" if names else "no evaluation has ended yet")
        return section
    section.parts.append(figures.by_environment(content.groups, names))
    for name in names[: figures.MOST_NAMES]:
        made = figures.curves(content.groups, [("val", name)], name.removeprefix(RETURN_OF), content.choices, content.points)
        section.add(made, f"{name}: no value")
    if len(names) > figures.MOST_NAMES:
        section.missing.append(f"{len(names) - figures.MOST_NAMES} of {len(names)} environments, so that the page can be read")
    return section


def rollouts(content: Content) -> Section:
    """How long rollouts are, and how much is explored."""
    section = Section("rollouts", "Rollouts: length, exploration")
    for key, name, title in _OF_ROLLOUTS:
        made = figures.curves(content.groups, [(key, name)], title, content.choices, content.points)
        section.add(made, f"{title[0].lower()}{title[1:]}: not in the logs")
    return section


def updates(content: Content) -> Section:
    """Losses, gradient norms, values against returns, and the policy."""
    section = Section("updates", "Updates: losses, gradients, values")
    names = metric_names(content.runs, "train")
    if not names:
        section.missing.append("no update was logged")
        return section
    gradients = [n for n in names if n.endswith(("Gradient Norm", "Grad Norm"))]
    section.add(
        figures.values_and_returns(content.groups, content.choices, content.points), "values: the agent logs no 'Q(s, a)'"
    )
    unknown = [run.name for run in content.runs if run.settings is None]
    if unknown:
        section.parts.append(
            "<p class=note>Values are those of the critics, times Agent.reward_multiplier where no settings.json names it.</p>"
        )
    for name in (*_LOSSES, *gradients, *_POLICY):
        made = figures.curves(content.groups, [("train", name)], name, content.choices, content.points)
        if made is not None:
            if name in gradients:
                made["layout"]["yaxis"]["type"] = "log"
            section.parts.append(made)
    absent = [n for n in (*_LOSSES, *_POLICY) if n not in names]
    if not gradients:
        absent.append("gradient norms")
    if absent:
        section.missing.append(f"{', '.join(absent)}: not in the logs")
    return section


def throughput(content: Content) -> Section:
    """Where the time went, and rates."""
    section = Section("throughput", "Throughput")
    section.add(figures.time_spent(content.runs), "where the time went: the logs do not say, or are still being read")
    speed = figures.speed(content.groups)
    section.parts += speed
    if not speed:
        section.missing.append("rates over time: the logs are too short, or are still being read")
    mixed = [run.name for run in content.runs if run.log.several]
    if mixed:
        section.missing.append(
            f"where the time of {', '.join(mixed)} went: a learner and collectors write one log, each with a clock of its own"
        )
    return section


def faults(content: Content) -> Section:
    """What went wrong, and was survived."""
    section = Section("faults", "Faults")
    rows, names = [], []
    for group in content.groups:
        for run in group.runs:
            counts = [run.log.faults.get(k, 0.0) for k in (*SUMMED, *COUNTED)]
            more = [run.log.went_back, run.log.not_finite, max(0, len(run.starts) - 1)]
            if any(counts) or any(more):
                rows.append([run.name, *(f"{v:,.0f}" for v in (*counts, *more))])
                names.append(group.name)
    heads = [
        "run",
        *(_FAULTS[k] for k in (*SUMMED, *COUNTED)),
        "resumed from an earlier state",
        "values that were not finite",
        "further starts",
    ]
    if rows:
        section.parts.append(table(heads, rows, names))
    else:
        section.missing.append(
            "no update was skipped, no environment restarted, no rollout dropped, no file damaged, and no run went back"
        )
    unread = [run.name for run in content.runs if not run.log.complete]
    if unread:
        section.missing.append(f"counts of {len(unread)} runs are those of a sample until their logs have been read")
    return section


def settings(content: Content) -> Section:
    """What differs between the runs, and what does not."""
    section = Section("settings", "Settings")
    known = [run for run in content.runs if run.settings is not None]
    if not known:
        section.missing.append(f"the runs have {NO_SETTINGS}")
        return section
    unknown = [run.name for run in content.runs if run.settings is None]
    if unknown:
        section.missing.append(f"settings of {', '.join(unknown)}: no settings.json")
    differ = differences(known)
    if len(known) > 1:
        cells = {name: [shown(v) for v in values] for name, values in differ.items()}
        if len(known) <= _WIDE:
            body = table(["setting", *(r.name for r in known)], [[name, *values] for name, values in cells.items()])
        else:
            body = table(["run", *cells], [[run.name, *(v[i] for v in cells.values())] for i, run in enumerate(known)])
        section.parts.append("<h3>What differs</h3>" + body)
    same = {k: v for k, v in (known[0].settings or {}).items() if k not in differ}
    whose = "all runs" if len(known) > 1 else "the run"
    body = table(["setting", "value"], [[k, shown(v)] for k, v in sorted(same.items())])
    section.parts.append(f"<details><summary>{len(same)} settings of {whose}</summary>{body}</details>")
    return section


def machines(content: Content) -> Section:
    """Where each run was started, and with which versions."""
    section = Section("machines", "Machine and versions")
    rows, names = [], []
    for group in content.groups:
        for run in group.runs:
            for start in run.starts:
                rows.append([run.name, *_start(start)])
                names.append(group.name)
    if not rows:
        section.missing.append(f"the runs have {NO_SETTINGS}")
        return section
    heads = ["run", "started", "role", "from", "host", "CPU", "cores", "memory", "GPUs", *_VERSIONS, "commit", "command"]
    kept = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    section.parts.append(table([heads[i] for i in kept], [[row[i] for i in kept] for row in rows], names))
    changes = [
        [run.name, shown(s.get("time", "")), shown(s["changed"])]
        for run in content.runs
        for s in run.starts
        if s.get("changed")
    ]
    if changes:
        section.parts.append(
            "<h3>Settings changed on resume</h3>" + table(["run", "started", "setting: [before, now]"], changes)
        )
    newest = next(s for run in content.runs for s in run.starts[-1:] if s)
    versions = newest.get("versions")
    if isinstance(versions, dict):
        packages = table(["package", "version"], [[k, shown(v)] for k, v in sorted(versions.items())])
        section.parts.append(
            f"<details><summary>all packages of the newest start of {html.escape(content.runs[0].name)}</summary>{packages}</details>"
        )
    return section


def _start(start: dict[str, Any]) -> list[str]:
    """Cells of the table of starts; "" for what is not known."""

    def get(*keys: str) -> str:
        value: Any = start
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, list):
            return " ".join(map(str, value))
        return "" if value is None else str(value)

    memory = get("machine", "memory_gb")
    commit = get("git", "commit")[:10] + (", and changes" if get("git", "changed") == "True" else "")
    resumed = get("resumed").rpartition("/")[2]
    where = [
        get("machine", "host") or get("host"),
        get("machine", "cpu"),
        get("machine", "cores"),
        f"{memory} GiB" if memory else "",
    ]
    return [
        get("time"),
        get("role"),
        resumed,
        *where,
        get("machine", "gpus"),
        *(get("versions", v) for v in _VERSIONS),
        commit,
        get("command"),
    ]


SECTIONS: dict[str, Callable[[Content], Section]] = {
    "runs": overview, "learning": learning, "adaptation": adaptation, "environments": environments, "rollouts": rollouts,
    "updates": updates,
    "throughput": throughput, "faults": faults, "settings": settings, "machines": machines,
}  # fmt: skip
"""In the order of the page."""
