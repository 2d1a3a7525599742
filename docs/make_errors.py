"""Write ``docs/errors.md`` from the table of mistakes that the tests cause: ``python docs/make_errors.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "errors.md"
HEAD = """\
# What is refused, and what you are told

Wrong input is refused by name before work is wasted: each message says which argument or which environment it is about, what was
found there, and what would be right. `Experiment.start()` looks at all fields before it makes anything, and raises one `SettingsError`
with a line for each field that is wrong.

What an environment returns, and the actions that it is given, are looked at in every step. In a pool of actors such an error counts as
a fault of that environment like any other: its unfinished rollout is dropped, the environment is made anew, the event is logged and
counted (`Restarted Environments`, `Dropped Rollouts`), and after `max_env_restarts` of them within an hour the run stops with the last
message. Steps are counted from 1 in each rollout; step 0 is the observation of the reset.

NaN or infinity that gets past that, from files written by hand say, meets the optimizer: an update whose loss or gradient is not finite
is skipped and counted (`Skipped Updates`), with all parameters as they were, and after 20 in a row the run stops with `NonFiniteTraining`.

The tests cause each of the mistakes below and compare the whole message. This page is written by `python docs/make_errors.py`.
"""


def page(cases: Iterable[Any]) -> str:
    """The page in Markdown; ``cases`` as in ``tests/bad_input_cases.py``."""
    groups: dict[str, list[Any]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    parts = [HEAD]
    for group, members in groups.items():
        rows = [f"| {_cell(c.what)} | `{c.kind.__name__}` | {_cell(_shown(c.message))} |" for c in members]
        parts.append("\n".join([f"## {group}\n", "| you give | you get | which says |", "| --- | --- | --- |", *rows]) + "\n")
    return "\n".join(parts)


def _shown(message: str) -> str:
    """A message without the line above the list of a `SettingsError`."""
    return message.removeprefix("this Experiment cannot start:\n  - ")


def _cell(text: str) -> str:
    """Text that Markdown shows as it is, in one cell; what stands between backquotes stays so."""
    for plain in ("\\", "|", "*", "_", "<", "[", "]"):
        text = text.replace(plain, "\\" + plain)
    return " ".join(text.split())


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from bad_input_cases import CASES

    PAGE.write_text(page(CASES))


if __name__ == "__main__":
    main()
