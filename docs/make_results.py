"""Write the tables of ``docs/results.md``, and their pictures, from the rows in ``benchmarks/results/``: ``python docs/make_results.py``.

A table stands between ``<!-- table: COMMAND -->`` and ``<!-- end -->``. It is the last table that the command prints, with what follows it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
import warnings
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results.md"
sys.path.insert(0, str(ROOT))
BLOCK = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def page(text: str, pictures: bool = True) -> str:
    """A page with its tables as their commands print them now.

    Args:
        text: the page in Markdown.
        pictures: also draw the pictures that the commands name.

    Raises:
        RuntimeError: a command ends with an exit code other than 0, or prints no table. Its own exceptions pass.
    """
    return BLOCK.sub(lambda found: f"{found[1]}{_table(found[2], pictures)}\n{found[3]}", text)


def _table(command: str, pictures: bool) -> str:
    """What ``python -m MODULE ...`` prints, run in this process: starting one costs more than most tables."""
    words = shlex.split(command if pictures else re.sub(r" --picture \S+", "", command))[2:]
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the module may have been imported by another
        try:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(f"{command} failed with {ended.code}") from ended
    starts = [found.start() for found in re.finditer(r"(?:^|(?<=\n\n))\|", printed.getvalue())]
    if not starts:
        raise RuntimeError(f"{command} printed no table, but\n{printed.getvalue()}")
    return printed.getvalue()[starts[-1] :].strip()


def main() -> None:
    os.chdir(ROOT)  # paths of pictures are relative to it
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
