"""Share a trained agent: a directory with its weights, settings, scores and a page about it, and its upload to the Hugging Face Hub.

``HF_ENDPOINT`` names another server with the Hub's interface.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData

from amago import __version__
from amago.envs import AMAGOEnv
from amago.policy.acting import Policy
from amago.policy.load import load_policy
from amago.policy.playing import play
from amago.policy.spec import SPEC_FILE, modules_of, without_run
from amago.run.checkpoint import load_weight_file, save_weights
from amago.run.plots import read_metrics
from amago.run.record import read_record
from amago.run.results import Estimate, Figures
from amago.spaces import from_description

WEIGHTS_FILE, PAGE_FILE = "policy.safetensors", "README.md"
FILES = (
    PAGE_FILE, WEIGHTS_FILE, SPEC_FILE, "settings.json", "results.json", "settings.yaml", "train_args.json", "replay.mp4", "replay.gif", "LICENSE", "memory.png",
)  # fmt: skip
"""The files of cards that are sent and fetched; others are not. The Hub plays ``replay.mp4`` beside the page."""
LEFT_OUT = "(left out)"
"""Replacement of a private value."""
_PRIVATE_FIELDS = {
    "ckpt_base_dir", "dset_root", "dset_name", "wandb_project", "wandb_entity", "wandb_group_name", "init_from", "run_name",
}  # fmt: skip
_PACKAGES = ("python", "amago", "torch", "gymnasium", "numpy", "accelerate", "gin-config", "safetensors")
_MOST_METRICS = 30  # on the page; ``results.json`` has all
Score = Estimate


class HubError(RuntimeError):
    """The Hub could not be reached, refused a request, or has no such card."""


# ---- results ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results(Figures):
    """Results of an agent without exploration.

    Attributes:
        returns, metrics: of `amago.run.results.Figures`.
        steps: of all rollouts.
        greedy: actions were the mode of the policy; else they were sampled from it.
        seed: of the first environment (the others have the numbers that follow) and of the policy's samples.
        broken_off: rollouts that had not ended after the most steps that were allowed; their rewards until then count.
    """

    returns: dict[str, list[float]]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    steps: int = 0
    greedy: bool = False
    seed: int = 0
    broken_off: int = 0

    def as_json(self) -> dict[str, Any]:
        about = {"actions": "mode" if self.greedy else "sampled", "seed": self.seed, "rollouts_broken_off": self.broken_off}
        return {**super().as_json(), "steps": self.steps, **about}


def measure(
    policy: Policy,
    envs: Sequence[AMAGOEnv],
    episodes: int,
    max_steps: int,
    greedy: bool = False,
    seed: int = 0,
    on_step: Callable[[int], object] | None = None,
) -> Results:
    """Play complete rollouts.

    Args:
        envs: of one row each, played side by side; they stay open.
        episodes: rollouts, at least 2, since an interval needs two.
        max_steps: a rollout that has not ended after so many is broken off.
        greedy: take the mode of the policy instead of sampling from it.
        seed: the environment of rollout i is reset with ``seed + i``.
        on_step: see `amago.policy.playing.play`.
    """
    if episodes < 2:
        raise ValueError(f"an interval needs at least 2 rollouts, got episodes={episodes}")
    seeds = [seed + i for i in range(episodes)]
    rollouts = play(policy.agent, envs, seeds, max_steps, sample=not greedy, device=policy.device, seed=seed, on_step=on_step)
    returns: dict[str, list[float]] = {}
    metrics: dict[str, list[float]] = {}
    for rollout in rollouts:
        returns.setdefault(rollout.name, []).append(float(sum(rollout.rewards)))
        for name, value in rollout.metrics.items():
            metrics.setdefault(name, []).append(value)
    broken_off = sum(not r.ended for r in rollouts)
    return Results(returns, metrics, sum(len(r.rewards) for r in rollouts), greedy, seed, broken_off)


# ---- writing ---------------------------------------------------------------------------------------------------------------


def write_card(
    policy: Policy,
    results: Results,
    out: str | Path,
    *,
    run_dir: str | Path | None = None,
    name: str | None = None,
    environment: str | None = None,
    licence: str | None = None,
    modules: Sequence[str] = (),
    film: Callable[[Path], tuple[str | None, str]] | None = None,
    extra_files: dict[str, str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a directory with everything that others need of a trained agent.

    It holds ``policy.safetensors`` and ``policy.json`` (weights; classes, spaces and sizes), ``settings.json`` and ``results.json``, a
    film, and ``README.md``, a page in the Hub's format. It appears at once and complete, and never holds a pickled object, a command line,
    the host's name, or anything that looks like a secret.

    Args:
        results: of `measure`.
        out: the directory, which is created and returned.
        run_dir: the run, from which the settings and the extent of training are taken; None: they are left out.
        name: of the agent; None: the name of the run's directory.
        environment: how to name it, for the page.
        licence: identifier on the Hub, such as "mit".
        modules: see `amago.load_policy`.
        film: called with a directory; makes a video in it, and returns (its file's name, ""), or (None, why there is none).
        extra_files: {name: text} of more files.
        overwrite: replace an earlier card at ``out``.

    Raises:
        ValueError: ``out`` exists (and is no card, or ``overwrite`` is not set), the agent has classes of the script itself (``__main__``),
            or something looks like a secret.
    """
    out = Path(out).expanduser()
    replaces = out.exists() and not (out.is_dir() and not any(out.iterdir()))
    if replaces and not overwrite:
        raise ValueError(f"{out} exists already: name another directory, or replace it with overwrite=True (--overwrite)")
    if replaces and (lacking := _missing_in(out)):
        raise ValueError(f"{out} is no card (it lacks {', '.join(lacking)}), so it is not replaced")
    description = without_run(policy.full_description())
    needs = modules_of(description)
    if "__main__" in needs:
        raise ValueError(
            "the agent has classes that were defined in the training script itself (__main__), which nobody else can import: move them "
            "to a module of their own, and train again"
        )
    run_dir = None if run_dir is None else Path(run_dir)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".card-") as scratch:
        card = Path(scratch, "card")
        card.mkdir()
        settings = None if run_dir is None else public_settings(run_dir)
        contents = {SPEC_FILE: description, "results.json": results.as_json(), "settings.json": settings}
        texts = {file: json.dumps(content, indent=1) + "\n" for file, content in contents.items() if content} | (
            extra_files or {}
        )
        save_weights(policy.agent.state_dict(), card / WEIGHTS_FILE, policy.version, description)
        video, reason = (None, "none was asked for") if film is None else film(card)
        title = name or (out.name if run_dir is None else run_dir.resolve().name)
        scores = {f"return in {_code(name)}": score for name, score in results.scores.items()}
        scores |= {_escape(name): Estimate.of(v) for name, v in list(results.metrics.items())[:_MOST_METRICS]}
        page = ModelCard.from_template(
            _header(title, results, licence), str(Path(__file__).with_name("card.md")), title=_escape(title),
            environments=", ".join(map(_code, results.returns)), video=video, reason=_escape(reason), results=results, scores=scores,
            rollouts=sum(map(len, results.returns.values())), needs=needs, packages=", ".join(map(_code, needs)), environment=environment,
            agent=_about_agent(description, settings, run_dir), settings=settings,
        )  # fmt: skip
        for file, text in (texts | {PAGE_FILE: page.content}).items():
            (card / file).write_text(text, encoding="utf-8")
        refuse_secrets(card)
        load_policy(card, modules=[*needs, *modules])  # the card that is shared can be loaded
        if replaces:
            os.rename(out, card.with_name("earlier"))
        os.rename(card, out)
    return out


def _missing_in(directory: Path) -> list[str]:
    """The files of every card that a directory lacks."""
    return [name for name in (WEIGHTS_FILE, SPEC_FILE, PAGE_FILE) if not (directory / name).is_file()]


def _header(title: str, results: Results, licence: str | None) -> ModelCardData:
    """Data of the page, with one result for each name of environment (https://huggingface.co/docs/hub/model-cards)."""
    found = [
        EvalResult(
            task_type="reinforcement-learning", task_name="reinforcement-learning", dataset_name=name, dataset_type=name, verified=False,
            metric_type="mean_reward", metric_name="mean return", metric_value=f"{score.mean:.2f} +/- {score.std:.2f}",
            metric_args={"rollouts": score.rollouts, "interval_95": score.as_json()["interval_95"]},
        )
        for name, score in results.scores.items()
    ]  # fmt: skip
    tags = list(dict.fromkeys(["reinforcement-learning", "deep-reinforcement-learning", "amago", *results.returns]))
    return ModelCardData(
        model_name=title, eval_results=found, license=licence, library_name="amago", pipeline_tag="reinforcement-learning", tags=tags
    )  # fmt: skip


def _about_agent(description: Mapping[str, Any], settings: dict[str, Any] | None, run_dir: Path | None) -> dict[str, str]:
    """The table about the agent."""
    spaces = description.get("raw_observation_space") or description["observation_space"], description["action_space"]
    rows = {p.replace("_", " "): _code(description[p].replace(":", ".")) for p in ("agent", "tstep_encoder", "traj_encoder")}
    rows["context in training, steps"] = str(description["max_seq_len"])
    rows |= {name: _code(str(from_description(space))) for name, space in zip(("observations", "actions"), spaces)}
    if run_dir is not None and (run_dir / "metrics.jsonl").is_file() and (log := read_metrics(run_dir)):
        steps, updates, seconds = (max(row[name] for row in log) for name in ("env_steps", "grad_steps", "wall_time"))
        rows |= {"environment steps": f"{steps:,.0f}", "updates": f"{updates:,.0f}", "training, hours": f"{seconds / 3600:.2f}"}
    if settings is not None:
        rows["versions"] = ", ".join(f"{k} {v}" for k, v in settings["versions"].items())
        machine = [settings["machine"].get("cpu") or "", *(settings["machine"].get("gpus") or [])]
        rows["machine"] = _escape(", ".join(filter(None, machine)))
    return rows


def _code(text: str) -> str:
    return "`" + " ".join(text.replace("`", "'").replace("|", "/").split()) + "`"


def _escape(text: str) -> str:
    return " ".join(text.replace("|", "/").replace("<", "&lt;").split())


def public_settings(run_dir: Path) -> dict[str, Any] | None:
    """The agent, the training and the kind of machine in the ``settings.json`` of a run; None without this file.

    Without the command line, the directory, the host's name, the git commit and the names of places. Values that are absolute paths or
    look like secrets are replaced by "(left out)".
    """
    record = read_record(run_dir)
    if record is None:
        return None
    newest = ([s for s in record["starts"] if "learn" in s["role"]] or record["starts"] or [{}])[-1]
    versions, machine = newest.get("versions", {}), newest.get("machine", {})
    return {
        **_public({k: record[k] for k in ("experiment", "fields", "parameters", "bound", "unused") if k in record}),
        "versions": {k: versions[k] for k in _PACKAGES if k in versions},
        "machine": {k: machine[k] for k in ("system", "cpu", "cores", "memory_gb", "gpus") if k in machine},
        "starts": len(record["starts"]),
    }


def _public(value: object) -> Any:
    if isinstance(value, Mapping):
        return {
            k: LEFT_OUT if v and isinstance(v, str) and _SECRET_NAME.search(k) else _public(v)
            for k, v in value.items() if k not in _PRIVATE_FIELDS
        }  # fmt: skip
    if isinstance(value, list):
        return [_public(v) for v in value]
    private = isinstance(value, str) and (value.startswith(("/", "~")) or value[1:3] == ":\\" or _secrets_in(value.encode()))
    return LEFT_OUT if private else value


# ---- secrets ---------------------------------------------------------------------------------------------------------------

_PATTERNS = {
    "a token of the Hugging Face Hub": rb"\bhf_[A-Za-z0-9]{20,}",
    "a GitHub token": rb"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})",
    "a GitLab token": rb"\bglpat-[A-Za-z0-9_-]{16,}",
    "an API key that begins with sk-": rb"\bsk-[A-Za-z0-9_-]{20,}",
    "a key of Weights & Biases": rb"\bwandb_v1_[A-Za-z0-9_-]{20,}|\blocal-[0-9a-f]{40}\b",
    "an AWS access key": rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a Google API key": rb"\bAIza[0-9A-Za-z_-]{35}",
    "a Slack token": rb"\bxox[abeprs]-[A-Za-z0-9-]{10,}",
    "a JSON web token": rb"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.",
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "an address with a password": rb"\b[a-z][a-z0-9+.-]*://[^\s/:@\"']+:[^\s/:@\"']+@",
}
_SECRET = r"(?:token|secret|password|passwd|passphrase|credentials?|(?:api|private|access|secret)[_-]?key)"
_SECRET_NAME = re.compile(rf"(?:^|[._-]){_SECRET}$", re.IGNORECASE)
# a string under such a name in JSON; also as [name, value], and in JSON inside of a string (headers of weights)
_SECRET_IN_JSON = re.compile(rf'\\*"((?:[^"\\]*[._-])?{_SECRET})\\*"\s*[:,]\s*\\*"(?!\\*"|\(left out\))', re.IGNORECASE)


def refuse_secrets(directory: Path) -> None:
    """Raise ValueError if something in a directory looks like a secret; names file and kind, never the secret."""
    if found := "; ".join(f"{file} holds {what}" for file, what in find_secrets(directory)):
        raise ValueError(
            f"this looks like secrets, which are not shared: {found}. Remove them, and revoke them where they were shown"
        )


def find_secrets(directory: str | Path) -> list[tuple[str, str]]:
    """(file, kind) of everything in the files of a directory that looks like a secret.

    Secrets are found by the form of known kinds of tokens, as strings in JSON under names such as "api_key", and by the values of
    variables of this process such as HF_TOKEN. A secret of another form is not found.
    """
    found = []
    for path in sorted(p for p in Path(directory).rglob("*") if p.is_file()):
        content, name = path.read_bytes(), str(path.relative_to(directory))
        if path.suffix == ".safetensors":  # the header alone is text; its length is in the first eight bytes
            content = content[8 : 8 + int.from_bytes(content[:8], "little")]
        found += [(name, what) for what in _secrets_in(content)]
        if path.suffix in (".json", ".safetensors"):
            keys = {match[1] for match in _SECRET_IN_JSON.finditer(content.decode(errors="replace"))}
            found += [(name, f"a value of {key!r}") for key in sorted(keys)]
    return found


def _secrets_in(content: bytes) -> list[str]:
    """The kinds of what looks like a secret in some bytes."""
    # short values, such as "true", occur by accident; and paths are no secrets
    secret = {
        k: v for k, v in os.environ.items() if len(v) >= 8 and re.search(_SECRET, k, re.IGNORECASE) and not os.path.exists(v)
    }
    of_variables = [f"the value of the variable {k}" for k, v in secret.items() if v.encode() in content]
    return [what for what, pattern in _PATTERNS.items() if re.search(pattern, content)] + of_variables


# ---- the Hub ---------------------------------------------------------------------------------------------------------------


@contextmanager
def _hub(request: str, token: str | None) -> Iterator[HfApi]:
    """A client of the Hub; errors of its requests become `HubError`."""
    # the endpoint by hand: the package reads the variable once, when something first imports it
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token, library_name="amago", library_version=__version__)
    try:
        yield api
    except (HubError, ValueError):
        raise
    except Exception as err:  # requests, httpx and hf_xet have different kinds, by version
        reasons = dict.fromkeys(str(e).strip().partition("\n")[0] or type(e).__name__ for e in (err, err.__cause__) if e)
        raise HubError(
            f"{request} failed at {api.endpoint} ({'; '.join(reasons)}): is the name right, and does your access token (HF_TOKEN, or "
            "'hf auth login') allow it?"
        ) from err


def push_card(
    directory: str | Path, repo_id: str, private: bool = False, message: str | None = None, token: str | None = None
) -> str:
    """Upload a card to a repository of models, or Parquet files to one of datasets, which is created if there is none; returns the address
    of the page.

    Args:
        directory: of `write_card`, or of ``amago buffer export --to parquet``.
        repo_id: "USER/NAME" or "ORGANISATION/NAME".
        private: of a new repository: only its owners see it.
        message: of the commit.
        token: to log in with; None: the variable HF_TOKEN, or the token of ``hf auth login``.

    Raises:
        ValueError: the directory is no card, holds files that cards do not have, or something that looks like a secret.
        CheckpointError: the weights are damaged.
        HubError: the Hub could not be reached, or refused.
    """
    directory = Path(directory).expanduser()
    kind, sent, tool = "dataset", [PAGE_FILE, "data/*.parquet"], "buffer export"
    if not (directory / PAGE_FILE).is_file() or not any((directory / "data").glob("*.parquet")):
        kind, sent, tool = "model", list(FILES), "card"
        if lacking := _missing_in(directory):
            raise ValueError(f"{directory} is no card: it lacks {', '.join(lacking)}; make one with 'amago card RUN'")
        files = [p for p in sorted(directory.iterdir()) if p.name not in (".cache", ".gitattributes", ".gitignore")]
        if others := [p.name for p in files if p.name not in FILES or not p.is_file() or p.is_symlink()]:
            raise ValueError(
                f"{directory} holds {', '.join(others)}, which are no files of a card ({', '.join(FILES)}): remove them, since only those are sent"
            )
        load_weight_file(directory / WEIGHTS_FILE)
    refuse_secrets(directory)
    with _hub(f"push to {repo_id}", token) as api:
        api.create_repo(repo_id, private=private, exist_ok=True, repo_type=kind)
        api.upload_folder(
            repo_id=repo_id, folder_path=directory, repo_type=kind, allow_patterns=sent, delete_patterns=sent if kind == "model" else None,
            commit_message=message or f"{directory.resolve().name}, with amago {tool}",
        )  # fmt: skip
    return f"{api.endpoint}/{'datasets/' if kind == 'dataset' else ''}{repo_id}"


def pull_card(repo_id: str, out: str | Path | None = None, revision: str | None = None, token: str | None = None) -> Path:
    """Download a card. Only files that cards have are fetched, none of which can hold a pickled object; nothing of them is run.

    Args:
        repo_id: "USER/NAME".
        out: the directory, which appears at once and complete, and is returned; None: NAME, in the current directory.
        revision: a branch, a tag or a commit; None: the newest.
        token: see `push_card`.

    Raises:
        ValueError: ``out`` exists, or ``repo_id`` cannot be a name.
        HubError: there is no such repository, it holds no card, or the Hub could not be reached.
        CheckpointError: the download is damaged.
    """
    out = Path(repo_id.rpartition("/")[2] if out is None else out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already: name another directory with out=... (--out)")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".pull-") as scratch:
        card = Path(scratch, "card")
        with _hub(f"pull of {repo_id}", token) as api:
            names = api.list_repo_files(repo_id, revision=revision)
            if missing := [n for n in (WEIGHTS_FILE, SPEC_FILE) if n not in names]:
                raise HubError(f"{repo_id} holds no agent of amago: it lacks {', '.join(missing)}")
            # by exact names: a repository may hold names that lead out of the directory
            api.snapshot_download(repo_id, revision=revision, allow_patterns=list(FILES), local_dir=card)
        shutil.rmtree(card / ".cache", ignore_errors=True)  # of huggingface_hub, about the download
        load_weight_file(card / WEIGHTS_FILE)
        os.rename(card, out)
    return out
