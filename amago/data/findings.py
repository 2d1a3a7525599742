"""The findings of a check of an environment, a network or a dataset."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIBRARIES = str(Path(__file__).parents[1]), str(Path(traceback.__file__).parent), "<"
"""The beginnings of the file names of frames of this library, of Python itself and of generated code."""


class CheckError(ValueError):
    """Raised for faults that a check found.

    Attributes:
        problems: one text for each.
    """

    def __init__(self, what: str, problems: tuple[str, ...]):
        self.what, self.problems = what, problems
        super().__init__(f"{what}:\n  - " + "\n  - ".join(problems))

    def __reduce__(self) -> tuple[type[CheckError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.what, self.problems)


class StopChecking(Exception):
    """Raised if nothing more can be checked; the reason is among the findings."""


class Findings:
    """Collect faults, each once.

    Args:
        what: name of the checked object, for the first line of the message.
    """

    def __init__(self, what: str):
        self.what = what
        self.problems: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.problems)

    def add(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    @contextmanager
    def attempt(self, doing: str) -> Iterator[None]:
        """Note an exception in the block as a fault: ``doing`` ("forward with ...") raised it."""
        try:
            yield
        except StopChecking:
            raise
        except Exception as err:
            self.add(f"{doing} raised {of_exception(err)}")

    def stop_if_any(self) -> None:
        """Raise `StopChecking` if there is any fault."""
        if self.problems:
            raise StopChecking

    def finish(self) -> None:
        """Raise `CheckError` if there is any fault."""
        if self.problems:
            raise CheckError(self.what, tuple(self.problems))


def of_exception(err: BaseException) -> str:
    """An exception in one line, with the line of the user's program that raised it, if there is one."""
    frames = traceback.extract_tb(err.__traceback__)
    of_user = [f for f in frames if not f.filename.startswith(_LIBRARIES) and "site-packages" not in f.filename]
    inner = of_user or [f for f in frames[-1:] if not f.filename.startswith(_LIBRARIES)]
    where = f" ({inner[-1].filename}, line {inner[-1].lineno})" if inner else ""
    return f"{type(err).__name__}: {' '.join(str(err).split()) or 'no message'}{where}"
