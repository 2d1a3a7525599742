"""Lines that are broken to the width of a terminal, and left alone in files and pipes."""

import os
import subprocess
import sys

import pytest
import tiny

from amago.describe import fit_width

LINE = "  note   video    one two three four five six seven eight nine ten eleven twelve"


@pytest.mark.parametrize("width", [60, 80])
def test_in_a_terminal_lines_are_broken_between_words(monkeypatch, width):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    lines = fit_width(LINE, hang=18).split("\n")
    assert all(len(line) < width for line in lines)
    assert len(lines) == (2 if width == 60 or len(LINE) >= width - 1 else 1)
    assert lines[0].startswith("  note   video    one two")
    assert all(line.startswith(" " * 18) and line[18] != " " for line in lines[1:])
    assert " ".join(fit_width(LINE, hang=18).split()) == " ".join(LINE.split())


def test_commands_in_a_real_terminal():
    """A pseudo-terminal of 80 columns, which `amago list zoo` fills without a line that is too long."""
    pty = pytest.importorskip("pty")
    import fcntl
    import struct
    import termios

    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {k: v for k, v in tiny.environment().items() if k != "COLUMNS"}
    process = subprocess.Popen([sys.executable, "-m", "amago.cli", "list", "zoo"], env=env, stdout=other, close_fds=True)
    os.close(other)
    said = b""
    while True:
        try:
            part = os.read(main, 65_536)
        except OSError:  # Linux, at the end
            break
        if not part:
            break
        said += part
    os.close(main)
    assert process.wait(timeout=60) == 0
    lines = said.decode().splitlines()
    assert len(lines) > 40
    assert max(map(len, lines)) < 80
