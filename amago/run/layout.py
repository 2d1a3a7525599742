"""Lines that fit into a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap

LEAST = 40


def fitted(line: str, hang: int = 4) -> str:
    """A line broken between words to the width of the terminal; as it is where standard output is a file or a pipe, for grep.

    Args:
        line: may begin with spaces, and have runs of them.
        hang: spaces before what follows in further lines.
    """
    if not sys.stdout.isatty():
        return line
    width = shutil.get_terminal_size().columns - 1
    if len(line) <= width or width < LEAST:
        return line
    return textwrap.fill(
        line, width, subsequent_indent=" " * min(hang, width // 2), break_long_words=False, break_on_hyphens=False,
        replace_whitespace=False, drop_whitespace=True,
    )  # fmt: skip
