"""Make each mistake of the table in the tests, and write its message to ``docs/errors.md``: ``python docs/make_errors.py``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "errors.md"
HEAD = """\
# Error messages

Wrong input is refused early. Each message names the argument or the environment, the value found, and what would be right.
`Experiment.start()` checks all fields before it creates anything, and raises one `SettingsError` with a line for each wrong field.

Observations, rewards and actions are checked in every step. In a pool of actors such an error is a fault of that environment: its
unfinished rollout is dropped, the environment is replaced, and the event is logged and counted (`Restarted Environments`,
`Dropped Rollouts`). After `max_env_restarts` faults within an hour the run stops with the last message. An error of
type or shape ends the run at once as long as no rollout has ended, since it would come again in every new environment
(`EnvironmentMistake`); `amago.check_env` finds such errors before a run. Steps are counted from 1 in each
rollout; step 0 is the observation of the reset.

If NaN or infinity still reaches the optimizer, for example from files written by other programs, the update is skipped and counted
(`Skipped Updates`), and parameters stay as they are. After 20 skipped updates in a row the run stops with `NonFiniteTraining`.

The tests make each of the mistakes below and compare the whole message. This page is written by `python docs/make_errors.py`.
"""


def page(cases: Iterable[Any], messages: Iterable[str]) -> str:
    """The page in Markdown; ``cases`` as in ``tests/bad_input_cases.py``."""
    groups: dict[str, list[str]] = {}
    for case, message in zip(cases, messages, strict=True):
        groups.setdefault(case.group, []).append(row(case, message))
    parts = [HEAD]
    for group, rows in groups.items():
        parts.append("\n".join([f"## {group}\n", "| mistake | error | message |", "| --- | --- | --- |", *rows]) + "\n")
    return "\n".join(parts)


def row(case: Any, message: str) -> str:
    """The line of a mistake in the table of its group."""
    return f"| {_cell(case.what)} | `{case.kind.__name__}` | {_cell(_shown(message))} |"


def _shown(message: str) -> str:
    """A message without the first line of a `SettingsError`."""
    return message.removeprefix("this Experiment cannot start:\n  - ")


def _cell(text: str) -> str:
    """Text escaped for one cell of a Markdown table, in which code between backquotes remains code."""
    for plain in ("\\", "|", "*", "_", "<", "[", "]"):
        text = text.replace(plain, "\\" + plain)
    return " ".join(text.split())


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    import tiny
    from bad_input_cases import CASES

    from amago import config

    messages = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as root:
            messages.append(case.message(Path(root)))
            tiny.close_all()
        config.clear()
    PAGE.write_text(page(CASES, messages))


if __name__ == "__main__":
    main()
