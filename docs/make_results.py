"""Write the tables of ``docs/results.md``, and their pictures, from the rows in ``benchmarks/results/``: ``python docs/make_results.py``.

A table stands between ``<!-- table: COMMAND -->`` and ``<!-- end -->``. It is the last table that the command prints, with what follows it.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results.md"
BLOCK = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def page(text: str, pictures: bool = True) -> str:
    """A page with its tables as their commands print them now.

    Args:
        text: the page in Markdown.
        pictures: also draw the pictures that the commands name.

    Raises:
        RuntimeError: a command fails, or prints no table.
    """
    commands = [command for _, command, _ in BLOCK.findall(text)]
    with ThreadPoolExecutor(2) as pool:
        tables = iter(list(pool.map(lambda c: _table(c, pictures), commands)))
    return BLOCK.sub(lambda found: f"{found[1]}{next(tables)}\n{found[3]}", text)


def _table(command: str, pictures: bool) -> str:
    words = shlex.split(command if pictures else re.sub(r" --picture \S+", "", command))
    ended = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, cwd=ROOT)
    if ended.returncode:
        raise RuntimeError(f"{command} failed:\n{ended.stderr}")
    starts = [found.start() for found in re.finditer(r"(?:^|(?<=\n\n))\|", ended.stdout)]
    if not starts:
        raise RuntimeError(f"{command} printed no table, but\n{ended.stdout}")
    return ended.stdout[starts[-1] :].strip()


def main() -> None:
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
