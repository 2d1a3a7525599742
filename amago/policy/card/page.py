"""The page of a card, README.md: Markdown below a header in YAML, in the Hub's format of model cards."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amago.policy.card.results import Results

MOST_METRICS = 30
"""Rows of the environments' own metrics; ``results.json`` has all."""


@dataclass(frozen=True)
class About:
    """What a page says about an agent, beside its results.

    Attributes:
        name: of the agent.
        description: of the policy (`amago.policy.describe_agent`).
        environment: how to name it: the id of a registered environment, or "module:function"; None: not known.
        settings: of `amago.policy.card.settings.public_settings`; None: not known.
        training: {"env_steps", "grad_steps", "seconds"} of the run, as far as they are known.
        modules: of the user's own that the agent's classes come from.
        video: name of the file with a filmed rollout; None: there is none.
        no_video: why.
        licence: identifier on the Hub, such as "mit".
    """

    name: str
    description: Mapping[str, Any]
    environment: str | None = None
    settings: Mapping[str, Any] | None = None
    training: Mapping[str, float] | None = None
    modules: Sequence[str] = ()
    video: str | None = None
    no_video: str = ""
    licence: str | None = None


def page(about: About, results: Results) -> str:
    """The content of README.md."""
    return "\n".join([*_header(about, results), "", *_body(about, results)]) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a string of JSON is one of YAML


def _header(about: About, results: Results) -> list[str]:
    """The YAML, with one result a name of environment (https://huggingface.co/docs/hub/model-cards)."""
    tags = ["reinforcement-learning", "deep-reinforcement-learning", "amago", *results.returns]
    lines = ["---", "library_name: amago", "pipeline_tag: reinforcement-learning"]
    lines += [f"license: {_quoted(about.licence)}"] if about.licence else []
    lines += ["tags:", *[f"- {_quoted(t)}" for t in dict.fromkeys(tags)]]
    lines += ["model-index:", f"- name: {_quoted(about.name)}", "  results:"]
    for name, score in results.scores.items():
        lines += [
            "  - task:", "      type: reinforcement-learning", "      name: reinforcement-learning",
            "    dataset:", f"      name: {_quoted(name)}", f"      type: {_quoted(name)}",
            "    metrics:", "    - type: mean_reward", '      name: "mean return"',
            f'      value: "{score.mean:.2f} +/- {score.std:.2f}"', "      verified: false",
            "      args:", f"        rollouts: {score.rollouts}", f"        interval_95: [{_yaml(score.low)}, {_yaml(score.high)}]",
        ]  # fmt: skip
    return [*lines, "---"]


def _yaml(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else "null"


def _body(about: About, results: Results) -> list[str]:
    where = ", ".join(_code(name) for name in results.returns)
    lines = [
        f"# {_escaped(about.name)}", "",
        f"An agent that was trained with amago, by reinforcement learning, to act in {where}.", "",
    ]  # fmt: skip
    if about.video is not None:
        shown = (
            f"![One rollout]({about.video})"
            if about.video.endswith(".gif")
            else f'<video src="{about.video}" controls></video>'
        )
        lines += [shown, ""]
    else:
        lines += [f"There is no video: {_escaped(about.no_video)}.", ""]
    lines += ["## Results", "", *_table(results), ""]
    lines += ["## Use", "", *_use(about), ""]
    lines += ["## The agent", "", *_agent(about), ""]
    return lines[:-1]


def _table(results: Results) -> list[str]:
    scores = results.scores
    count = sum(s.rollouts for s in scores.values())
    how = "the policy's most likely actions" if results.greedy else "actions sampled from the policy"
    lines = [
        f"{count} rollouts with {how}, without exploration, seed {results.seed}. Intervals are 95% percentile-bootstrap intervals of the mean over "
        "rollouts of this one agent; they say nothing about other seeds of training. `results.json` has each return.",
        "",
    ]
    if results.broken_off:
        lines += [f"{results.broken_off} of them had not ended when they were broken off; their rewards until then count.", ""]
    lines += ["| | mean | 95% interval | standard deviation | rollouts |", "| --- | --- | --- | --- | --- |"]
    lines += [_row(f"return in {_code(n)}", s) for n, s in scores.items()]
    lines += [_row(_escaped(n), Results({n: v}).scores[n]) for n, v in list(results.metrics.items())[:MOST_METRICS]]
    return lines


def _row(label: str, s: Any) -> str:
    return f"| {label} | {s.mean:.4g} | {s.low:.4g} to {s.high:.4g} | {s.std:.3g} | {s.rollouts} |"


def _use(about: About) -> list[str]:
    needs = [m for m in about.modules if m != "__main__"]
    argument = f", modules={needs!r}" if needs else ""
    lines = [
        "```python", "import amago", "",
        f'policy = amago.load_policy("DIRECTORY"{argument})  # where these files are', "obs, _ = env.reset()", "action = policy.act(obs)",
        "obs, reward, terminated, truncated, _ = env.step(action)",
        "action = policy.act(obs, reward)  # it remembers; policy.reset() before a new rollout", "```", "",
        "`amago pull REPOSITORY` downloads the directory. It holds no pickled objects: weights are in `policy.safetensors`, the spaces, sizes and "
        "classes of the agent in `policy.json`.",
    ]  # fmt: skip
    if needs:
        lines += [
            "",
            f"The agent has parts of its own: the Python package {', '.join(_code(m) for m in needs)} must be installed.",
        ]
    if about.environment is not None:
        lines += ["", f"To play the results again: `amago eval DIRECTORY --env {about.environment}`."]
    return lines


def _agent(about: About) -> list[str]:
    d = about.description
    rows = [(part.replace("_", " "), _code(d[part].replace(":", "."))) for part in ("agent", "tstep_encoder", "traj_encoder")]
    rows += [("context in training, steps", str(d["max_seq_len"]))]
    rows += [("observations", _code(_space(d.get("raw_observation_space") or d["observation_space"])))]
    rows += [("actions", _code(_space(d["action_space"])))]
    t = about.training or {}
    rows += [(label, f"{t[k]:,.0f}") for k, label in (("env_steps", "environment steps"), ("grad_steps", "updates")) if k in t]
    rows += [("training, hours", f"{t['seconds'] / 3600:.2f}")] if "seconds" in t else []
    if about.settings is not None:
        rows += [("versions", ", ".join(f"{k} {v}" for k, v in about.settings["versions"].items()))]
        cpu, gpus = about.settings["machine"].get("cpu"), about.settings["machine"].get("gpus") or []
        rows += [("machine", _escaped(", ".join([*filter(None, [cpu]), *gpus])))] if cpu or gpus else []
    lines = ["| | |", "| --- | --- |", *[f"| {a} | {b} |" for a, b in rows]]
    return [*lines, "", "All settings are in `settings.json`."] if about.settings is not None else lines


def _space(described: Mapping[str, Any]) -> str:
    """A space in one line."""
    kind = described.get("kind", "?")
    if "spaces" in described:
        inner = described["spaces"]
        parts = [f"{k}: {_space(v)}" for k, v in inner.items()] if isinstance(inner, Mapping) else [_space(v) for v in inner]
        return f"{kind}({', '.join(parts)})"
    inside = [f"{described[k]}" for k in ("n", "nvec", "shape", "dtype") if k in described]
    return f"{kind}({', '.join(inside)})"


def _code(text: str) -> str:
    return "`" + " ".join(text.replace("`", "'").replace("|", "/").split()) + "`"


def _escaped(text: str) -> str:
    return " ".join(text.replace("|", "/").replace("<", "&lt;").split())
