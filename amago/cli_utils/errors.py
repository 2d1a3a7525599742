"""Telling errors of a run from mistakes in its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_MARK = "_amago_raised_while_running"


@contextmanager
def running() -> Iterator[None]:
    """Mark errors that leave the block as errors of training or evaluation, for `raised_while_running`."""
    try:
        yield
    except Exception as err:
        setattr(err, _MARK, True)
        raise


def raised_while_running(err: BaseException) -> bool:
    """Whether an error left a block of `running`. The `amago` command shows the traceback of such an error, and of others only
    the message, because they are about the arguments."""
    return getattr(err, _MARK, False)
