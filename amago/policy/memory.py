"""Measure how much an agent depends on its memory, and on which earlier steps: play the same tasks with more and with less of the past."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amago.agent import BaseAgent
from amago.agent.base import evaluating
from amago.describe import text_table
from amago.envs import AMAGOEnv
from amago.nets.traj_encoders import TformerTrajEncoder
from amago.policy.playing import FULL, THIS_ATTEMPT, EpisodeResult, Steps, View, play
from amago.registry import require
from amago.run.plots import COLORS, MARKERS
from amago.run.results import Estimate, by_attempt

Array = NDArray[np.float64]
NONE = View(context=1)
MOST_QUERIES = 64
ENOUGH = 0.1
"""A context is enough if it loses at most this share of the score that memory adds."""
_PARTS = 10


class Stages(NamedTuple):
    """Scores within rollouts, by attempt or (where there are no attempts) by time.

    Attributes:
        score: its name, such as "Attempt # Success".
        stage: "attempt" or "tenth of the rollout".
        values: {view: (rollouts, stages)}, NaN where a rollout had no such stage.
    """

    score: str
    stage: str
    values: dict[View, Array]

    def estimates(self, view: View) -> list[Estimate]:
        """An estimate for each stage that at least half of the rollouts had."""
        return [Estimate.of(column) for column in self.values[view].T if np.mean(~np.isnan(column)) >= 0.5]


class Influence(NamedTuple):
    """The influence of earlier steps on the actions of one rollout.

    Attributes:
        queries: (Q,) the steps whose actions are explained: all, or `MOST_QUERIES` of them, evenly spaced.
        share: (Q, T) the norm of the gradient of the log-probability of an action drawn at step ``queries[i]`` with respect to the
            embedding of each step, divided by the row's sum; 0 where nothing has an influence.
        attempts: (T,) the number of the attempt that each step belongs to, from 0.
    """

    queries: NDArray[np.int64]
    share: Array
    attempts: NDArray[np.int64]

    def by_distance(self) -> tuple[float, float, float]:
        """The mean share of the current step, of earlier steps in the same attempt, and of earlier attempts."""
        now = np.arange(self.share.shape[1]) == self.queries[:, None]
        same = self.attempts[None] == self.attempts[self.queries][:, None]
        rows = max(1, np.count_nonzero(self.share.sum(axis=1)))
        current, attempt, earlier = (float((self.share * p).sum() / rows) for p in (now, same & ~now, ~same))
        return current, attempt, earlier


class Attention(NamedTuple):
    """The attention of each head of a transformer in one rollout, by the steps of `Influence.queries`.

    Attributes:
        entropy: (layers, heads) in nats, the mean over queries.
        uniform: the mean entropy of attention that weighs all steps alike.
        lags: the first number of steps back of each range: 0, 1, 2, 4, 8 ...; a range ends where the next begins.
        weight: (layers, heads, lags) the attention's share in each range, the mean over queries.
        first: (layers, heads) its share on the rollout's first step, likewise.
    """

    entropy: Array
    uniform: float
    lags: tuple[int, ...]
    weight: Array
    first: Array


class MemoryStudy(NamedTuple):
    """Scores of an agent with longer and shorter contexts.

    Attributes:
        name: of the environment.
        returns: {view: (rollouts,)}, in the same order of tasks for each view.
        lengths: {view: (rollouts,)} steps.
        stages: scores within rollouts.
        influence: of earlier steps on actions, in the first rollout; None where the agent gives no log-probabilities.
        broken_off: rollouts of all views that did not end within the limit of steps.
        attention: of each head in the first rollout; None where the agent has no transformer.
    """

    name: str
    returns: dict[View, Array]
    lengths: dict[View, Array]
    stages: Stages
    influence: Influence | None
    broken_off: int
    attention: Attention | None = None

    @property
    def contexts(self) -> list[int]:
        """The lengths of context that were tried, in increasing order."""
        return sorted(v.context for v in self.returns if v.context is not None)

    def estimate(self, view: View) -> Estimate:
        """The mean return."""
        return Estimate.of(self.returns[view])

    def gain(self, view: View, over: View) -> Estimate:
        """The mean difference of returns on the same tasks."""
        return Estimate.of(self.returns[view] - self.returns[over])


def default_contexts(longest: int) -> list[int]:
    """Powers of two from 1 to below ``longest``."""
    return [2**i for i in range(max(1, (longest - 1).bit_length()))]


def study_memory(
    agent: BaseAgent,
    envs: Sequence[AMAGOEnv],
    episodes: int = 40,
    max_steps: int = 1000,
    contexts: Sequence[int] | None = None,
    sample: bool = True,
    device: torch.device | str = "cpu",
    seed: int = 0,
    on_view: Callable[[str], Callable[[int], object]] | None = None,
) -> MemoryStudy:
    """Play the same tasks with all of the memory, with memory erased at the end of each attempt, and with contexts of several lengths.

    A context of n steps is computed anew in each step from the last n steps, for every sequence model. A shortened memory can
    differ from all memories in training, which costs return by itself: the loss of return is an upper bound on the value of the
    information. A comparison with an agent trained without memory gives the value itself.

    Args:
        agent: on ``device``.
        envs: of one row each; rollouts are played in so many at a time. They should obey ``reset(seed=...)``, so that all views are
            compared on the same tasks.
        episodes: rollouts for each view.
        max_steps: rollouts are broken off after so many steps.
        contexts: lengths in steps, the current one included; 1 (no memory) is always among them. None: powers of two below the
            longest rollout, and up to the agent's ``max_seq_len``.
        sample: draw actions from the policy; else take its mode.
        seed: of tasks and of the policy's samples.
        on_view: called with the name of each view before it is played; returns a function that is called with the number of
            steps taken.

    Raises:
        ValueError: ``episodes`` is below 2, or a context below 1.
    """
    if episodes < 2:
        raise ValueError(f"episodes={episodes}: an interval needs at least 2")
    shorter = [View(context=n) for n in sorted({1, *(contexts or ())})]
    seeds = [int(s) for s in np.random.SeedSequence(seed).generate_state(episodes)]
    rollouts: dict[View, list[EpisodeResult]] = {}

    def add(view: View) -> None:
        on_step = None if on_view is None else on_view(describe(view))
        first = not rollouts
        rollouts[view] = play(agent, envs, seeds, max_steps, view, sample, device, seed, keep_first=first, on_step=on_step)

    add(FULL)
    longest = max(len(r.rewards) for r in rollouts[FULL])
    if any(len(r.attempt_ends) > 1 for r in rollouts[FULL]):
        add(THIS_ATTEMPT)
    if contexts is None:
        shorter = [View(context=n) for n in default_contexts(min(longest, agent.max_seq_len + 1))]
    for view in shorter:
        add(view)
    first = rollouts[FULL][0]
    assert first.steps is not None
    return MemoryStudy(
        name=first.name,
        returns={v: np.array([sum(r.rewards) for r in rs]) for v, rs in rollouts.items()},
        lengths={v: np.array([float(len(r.rewards)) for r in rs]) for v, rs in rollouts.items()},
        stages=_stages(rollouts, longest),
        influence=influence(agent, first.steps, first.attempt_ends, device, seed),
        broken_off=sum(not r.ended for rs in rollouts.values() for r in rs),
        attention=attention(agent, first.steps, device),
    )


def _stages(rollouts: dict[View, list[EpisodeResult]], longest: int) -> Stages:
    """Scores by attempt, if rollouts have several, else rewards by tenths of the longest rollout."""
    names = dict.fromkeys(name for rs in rollouts.values() for r in rs for name in r.metrics)
    scores = {title: own for title, own in by_attempt([*names]).items() if re.search("(Attempt|Trial) #", title)}
    if scores:
        score = next((title for word in ("Success", "Return") for title in scores if word in title), next(iter(scores)))
        columns = scores[score].values()
        values = {view: np.array([[r.metrics.get(n, np.nan) for n in columns] for r in rs]) for view, rs in rollouts.items()}
        return Stages(score, "attempt", values)
    edges = np.linspace(0, longest, min(_PARTS, longest) + 1).round().astype(int).tolist()
    ranges = list(zip(edges, edges[1:]))
    parts = {view: [[r.rewards[a:b] for a, b in ranges] for r in rs] for view, rs in rollouts.items()}
    values = {v: np.array([[np.mean(part) if part else np.nan for part in r] for r in rs]) for v, rs in parts.items()}
    return Stages("reward per step", "tenth of the rollout", values)


def attention(agent: BaseAgent, steps: Steps, device: torch.device | str) -> Attention | None:
    """The attention of each head; None for an agent without a transformer. ``agent`` and ``steps`` as of `influence`."""
    if not isinstance(agent.traj_encoder, TformerTrajEncoder):
        return None
    length = min(len(steps.rl2s), agent.max_seq_len)
    queries = _queries(length)
    with torch.no_grad(), evaluating(agent):
        _, embedded, times = _embedded(agent, steps, len(steps.rl2s) - length, device)
        found = agent.traj_encoder.attention(embedded, times, torch.from_numpy(queries).to(device))
    weights = found[:, 0].double().cpu().numpy()  # (layers, heads, Q, L)
    entropy = -(weights * np.log(weights, out=np.zeros_like(weights), where=weights > 0)).sum(axis=-1)
    lags = (0, *(2**i for i in range((length - 1).bit_length())))
    back = queries[:, None] - np.arange(length)
    ranges = [(back >= a) & (back < b) for a, b in zip(lags, (*lags[1:], length))]
    weight = np.stack([(weights * part).sum(axis=-1).mean(axis=-1) for part in ranges], axis=-1)
    uniform = float(np.log(queries + 1.0).mean())
    return Attention(entropy.mean(axis=-1), uniform, lags, weight, weights[..., 0].mean(axis=-1))


def influence(
    agent: BaseAgent, steps: Steps, attempt_ends: list[int], device: torch.device | str, seed: int = 0
) -> Influence | None:
    """The influence of each step of a rollout on later actions; None for an agent that does not give log-probabilities of its actions.

    A gradient measures how much an action would change with a step, not whether the change is of use. ``steps`` are cut to the last
    ``max_seq_len``; ``attempt_ends`` are the steps taken when each attempt ended; ``seed`` is used to draw the actions anew.
    """
    if "log_prob" not in agent.policy_extras:
        return None
    length = min(len(steps.rl2s), agent.max_seq_len)
    first = len(steps.rl2s) - length
    attempts = np.searchsorted(np.array(attempt_ends), np.arange(first, first + length), side="right")
    torch.manual_seed(seed)
    queries = _queries(length)
    # cuDNN computes no gradients of recurrent networks in evaluation mode
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False), evaluating(agent):
        obs, embedded, times = _embedded(agent, steps, first, device)
        embedded.requires_grad_()
        states, _ = agent.traj_encoder(seq=embedded, time_idxs=times, hidden_state=None)
        _, extras = agent.act_with_extras(states[0], obs, True, ("log_prob",))
        log_prob = extras["log_prob"].reshape(length)
        gradients = [torch.autograd.grad(log_prob[q], embedded, retain_graph=True)[0][0] for q in queries.tolist()]
    norms = torch.stack(gradients).double().norm(dim=-1).cpu().numpy()
    total = norms.sum(axis=1, keepdims=True)
    return Influence(queries, np.divide(norms, total, out=np.zeros_like(norms), where=total > 0), attempts)


def _queries(length: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, length - 1, min(length, MOST_QUERIES)).round().astype(np.int64))


def _embedded(
    agent: BaseAgent, steps: Steps, first: int, device: torch.device | str
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Observations (T, ...), embeddings (1, T, E) and time indices (1, T, 1) of the steps from number ``first`` on."""

    def tensor(rows: list[NDArray[np.generic]]) -> Tensor:
        return torch.from_numpy(np.stack(rows[first:])).to(device)

    obs, rl2s = {k: tensor([o[k] for o in steps.obs]) for k in steps.obs[0]}, tensor(steps.rl2s)
    with torch.no_grad():
        embedded = agent.tstep_encoder(obs={k: v[None] for k, v in obs.items()}, rl2s=rl2s[None])
    return obs, embedded, torch.arange(first, first + len(rl2s), device=device)[None, :, None]


# ---- in words --------------------------------------------------------------------------------------------------------------


def describe(view: View) -> str:
    """A view in words."""
    if view.this_attempt:
        return "erased after each attempt"
    if view.context is None:
        return "all of it"
    return "none (the current step)" if view.context == 1 else f"the last {view.context} steps"


def table(study: MemoryStudy) -> str:
    """Mean returns with intervals, a line for each view."""
    rows = [(describe(v), str(study.estimate(v)), "" if v == FULL else str(study.gain(FULL, v))) for v in study.returns]
    return indent(text_table(["memory in sight", "return", "lost by that"], rows), "  ")


def attention_table(found: Attention) -> str:
    """Entropy and weight by steps back of each head, a line each."""
    ends = [f"{a}" if b - a == 1 else f"{a}-{b - 1}" for a, b in zip(found.lags, found.lags[1:])] + [f"{found.lags[-1]}-"]
    lines = [
        f"Attention in one rollout: entropy in nats ({found.uniform:.2f}: all steps alike), and weight by steps back",
        f"  layer, head  entropy  {'  '.join(f'{end:>9}' for end in ends)}  first step",
    ]
    for at in np.ndindex(found.entropy.shape):
        shares = "  ".join(f"{x:>9.2f}" for x in found.weight[at])
        lines.append(f"  {at[0] + 1:>5}, {at[1] + 1:<4}  {found.entropy[at]:>7.2f}  {shares}  {found.first[at]:>10.2f}")
    return "\n".join(lines)


def conclusion(study: MemoryStudy) -> list[str]:
    """Sentences about whether memory is used, across attempts and within them, how far back, and where the gradients point."""
    worth, found = study.gain(FULL, NONE), []
    across = study.gain(FULL, THIS_ATTEMPT) if THIS_ATTEMPT in study.returns else None
    scores = f"the return is {study.estimate(FULL)} with all of it, and {study.estimate(NONE)} where the policy sees the current step alone"
    if worth.low > 0:
        limit = "a policy whose memory is cut short may also fail because it has never been trained so"
        found.append(f"Memory is used: {scores}. On the same tasks it is worth {worth}, at most: {limit}.")
    elif worth.high < 0:
        found.append(f"Memory does harm: {scores}, a difference of {worth} on the same tasks.")
    elif (study.returns[FULL] == study.returns[NONE]).all():
        found.append(f"Memory is not used: without it, each rollout has the same return ({study.estimate(FULL)}).")
    elif across is not None and across.low > 0:
        found.append(
            f"Memory is used, but there is no sign that it gains anything all in all: {scores}, a difference of {worth}."
        )
    else:
        found.append(f"There is no sign that memory is used: {scores}. On the same tasks the difference is {worth}.")
    if across is not None and (worth.low > 0 or across.low > 0):
        within, lost = study.gain(THIS_ATTEMPT, NONE), f"{across} is lost if memory is erased after each attempt"
        used = f"{lost}, so what earlier attempts showed is used" if across.low > 0 else f"no sign of use; {lost}"
        sign = "" if within.low > 0 else "no sign of use; "
        found.append(f"Across attempts: {used}.")
        found.append(f"Within an attempt: {sign}memory of the present attempt alone is worth {within}.")
    if worth.low > 0:
        lost_with = {n: study.gain(FULL, View(context=n)) for n in study.contexts}
        short = [n for n, lost in lost_with.items() if lost.mean > ENOUGH * worth.mean]
        enough, longest = [n for n in study.contexts if n > max(short, default=0)], study.contexts[-1]
        tail = f", with {short[-1]} it loses {lost_with[short[-1]]}" if short else ""
        found.append(
            f"How far back: the last {enough[0]} steps are enough; with them the return loses {lost_with[enough[0]]}{tail}."
            if enough
            else f"How far back: a context of {longest} steps is not enough; {lost_with[longest]} of the return is lost with it."
        )
    stages, several = study.stages.estimates(FULL), study.stages.stage == "attempt"
    if several and len(stages) > 1:
        values = study.stages.values[FULL]
        ends = f"from {stages[0].mean:.3g} in attempt 1 to {stages[-1].mean:.3g} in attempt {len(stages)}"
        rise = Estimate.of(values[:, len(stages) - 1] - values[:, 0])
        found.append(f"Adaptation: the score ({study.stages.score}) goes {ends}, by {rise}.")
    if study.influence is not None:
        now, attempt, earlier = study.influence.by_distance()
        past = f"{attempt:.0%} on earlier ones of the same attempt, {earlier:.0%} on earlier attempts"
        past = past if several else f"{attempt + earlier:.0%} on earlier ones"
        shares = f"{now:.0%} of the gradient of the actions' log-probability lies on the current step, {past}"
        alone = "no action depends on any step but the current one"
        found.append(f"Influence: in one rollout {shares if attempt or earlier else alone}.")
    if study.broken_off:
        limit = "broken off at the limit of steps, and count with their return until then"
        found.append(f"{study.broken_off} rollouts were {limit}.")
    return found


# ---- as a picture ----------------------------------------------------------------------------------------------------------


def plot_memory(study: MemoryStudy, path: str | Path) -> Path:
    """Draw scores by attempt, returns by length of the context, and the influence of earlier steps, in three panels of a PNG.

    Bands and bars are 95% intervals. Missing directories of ``path``, which is returned, are created. Without matplotlib, an ImportError
    names the extra.
    """
    figure = require("matplotlib.figure", "plots", "the picture of --memory").Figure(figsize=(15.0, 4.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for i, view in enumerate(v for v in (FULL, NONE, THIS_ATTEMPT) if v in study.returns):
        means, low, high, *_ = np.array(study.stages.estimates(view)).reshape(-1, 5).T
        x = range(1, len(means) + 1)
        left.plot(x, means, color=COLORS[i], marker=MARKERS[i], label=describe(view))
        left.fill_between(x, low, high, color=COLORS[i], alpha=0.15, linewidth=0)
        if view != NONE:
            middle.axhline(study.estimate(view).mean, color=COLORS[i], linestyle="--", label=describe(view))
    left.set(title=f"Score by {study.stages.stage}", xlabel=study.stages.stage, ylabel=study.stages.score)
    left.xaxis.get_major_locator().set_params(integer=True)
    means, low, high, *_ = np.array([study.estimate(View(context=n)) for n in study.contexts]).T
    bars = [means - low, high - means]
    middle.errorbar(study.contexts, means, yerr=bars, capsize=3, color=COLORS[4], marker="o", label="the last n steps")
    middle.set_xscale("log", base=2)
    middle.set_xticks(study.contexts, [str(n) for n in study.contexts])
    middle.set(title="Return by length of the context", xlabel="n, steps in sight (1: no memory)", ylabel="mean return")
    for axes in (left, middle):
        axes.legend(title="memory in sight", frameon=False)
        axes.grid(alpha=0.3)
    if (found := study.influence) is not None:
        length = found.share.shape[1]
        image = np.where(np.arange(length) <= found.queries[:, None], found.share, np.nan)
        box = (-0.5, length - 0.5, length - 0.5, -0.5)
        drawn = right.imshow(image, vmin=0.0, extent=box, aspect="auto", interpolation="none")
        for end in np.flatnonzero(np.diff(found.attempts)) + 0.5:
            right.axvline(end, color="w", linewidth=0.8, linestyle=":")
            right.axhline(end, color="w", linewidth=0.8, linestyle=":")
        figure.colorbar(drawn, ax=right, label="share of the gradient's norm")
    right.set(title="Influence of each step on later actions", xlabel="step that was seen", ylabel="step of the action")
    figure.suptitle(f"Memory in {study.name}".replace("$", r"\$"), fontsize=14)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120)
    return path
