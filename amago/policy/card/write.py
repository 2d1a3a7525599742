"""Writing a card: a directory that `amago.load_policy` opens on any machine."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from amago.policy.acting import Policy
from amago.policy.card.page import About, page
from amago.policy.card.results import Results
from amago.policy.card.secrets import find_secrets
from amago.policy.card.settings import public_settings
from amago.policy.files import save_policy_file
from amago.policy.load import load_policy
from amago.policy.spec import SPEC_FILE, modules_of, without_run
from amago.run.plots import read_metrics

WEIGHTS_FILE, RESULTS_FILE, PAGE_FILE, SETTINGS_FILE = "policy.safetensors", "results.json", "README.md", "settings.json"
Film = Callable[[Path], tuple[str | None, str]]


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
    film: Film | None = None,
    extra_files: dict[str, str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a directory with everything that others need of a trained agent.

    It holds ``policy.safetensors`` and ``policy.json`` (weights; classes, spaces and sizes), ``settings.json`` and ``results.json``, a
    film, and ``README.md``, a page in the Hub's format. It appears at once and complete, and never holds a pickled object, a command line,
    the host's name, or anything that looks like a secret.

    Args:
        results: of `measure`.
        out: the directory, which is created.
        run_dir: the run, from which the settings and the extent of training are taken; None: they are left out.
        name: of the agent; None: that of the run's directory.
        environment: how to name it, for the page.
        licence: identifier on the Hub, such as "mit".
        modules: see `amago.load_policy`.
        film: called with a directory; makes a video in it, and returns (its file's name, ""), or (None, why there is none).
        extra_files: {name: text} of more files.
        overwrite: replace an earlier card at ``out``.

    Returns:
        ``out``.

    Raises:
        ValueError: ``out`` exists (and is no card, or ``overwrite`` is not set), the agent has classes of the script itself (``__main__``),
            or something looks like a secret.
    """
    out = Path(out).expanduser()
    _check_out(out, overwrite)
    chosen = {} if policy.gamma is None else {"gamma": policy.gamma}
    description = without_run(policy.description) | chosen
    needs = modules_of(description)
    if "__main__" in needs:
        raise ValueError(
            "the agent has classes that were defined in the training script itself (__main__), which nobody else can import: move them "
            "to a module of their own, and train again"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".card-") as scratch:
        card = Path(scratch, "card")
        card.mkdir()
        save_policy_file(policy.agent, description, card / WEIGHTS_FILE, policy.version)
        _write_json(card / SPEC_FILE, description)
        _write_json(card / RESULTS_FILE, results.as_json())
        settings = None if run_dir is None else public_settings(Path(run_dir))
        if settings is not None:
            _write_json(card / SETTINGS_FILE, settings)
        for file, text in (extra_files or {}).items():
            (card / file).write_text(text, encoding="utf-8")
        video, reason = (None, "none was asked for") if film is None else film(card)
        trained = None if run_dir is None else _training(Path(run_dir))
        title = name or (Path(run_dir).resolve().name if run_dir is not None else out.name)
        about = About(title, description, environment, settings, trained, needs, video, reason, licence)
        (card / PAGE_FILE).write_text(page(about, results), encoding="utf-8")
        refuse_secrets(card)
        load_policy(card, modules=[*needs, *modules])  # what is handed on opens
        _put(card, out)
    return out


def _check_out(out: Path, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"{out} exists already: name another directory, or replace it with overwrite=True (--overwrite)")
    if not is_card(out):
        raise ValueError(f"{out} is no card (it lacks {WEIGHTS_FILE}, {SPEC_FILE} or {PAGE_FILE}), so it is not replaced")


def is_card(directory: Path) -> bool:
    """Whether a directory has what every card has."""
    return all((directory / name).is_file() for name in (WEIGHTS_FILE, SPEC_FILE, PAGE_FILE))


def refuse_secrets(directory: Path) -> None:
    """Check a directory before it is handed on.

    Raises:
        ValueError: something in it looks like a secret; names file and kind, never the secret.
    """
    found = find_secrets(directory)
    if found:
        listed = "; ".join(f"{s.file} holds {s.what}" for s in found)
        raise ValueError(
            f"this looks like secrets, which are not handed on: {listed}. Remove them, and revoke them where they were shown"
        )


def _training(run_dir: Path) -> dict[str, float] | None:
    if not (run_dir / "metrics.jsonl").is_file():
        return None
    rows = read_metrics(run_dir)
    if not rows:
        return None
    names = {"env_steps": "env_steps", "grad_steps": "grad_steps", "seconds": "wall_time"}
    return {k: max(float(r[v]) for r in rows) for k, v in names.items()}


def _put(card: Path, out: Path) -> None:
    """Rename the finished directory to ``out``; an older one is gone only when the new one is there."""
    if out.exists() and any(out.iterdir()):
        older = card.with_name("older")
        os.rename(out, older)
        try:
            os.rename(card, out)
        except OSError:
            os.rename(older, out)
            raise
        shutil.rmtree(older)
    else:
        os.rename(card, out)  # replaces an empty directory


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
