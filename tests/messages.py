"""Comparison of error messages by what they name: a field, its value, a file. Their wording may change."""

import contextlib
import re
from collections.abc import Callable, Iterator

import pytest


def naming(*parts: object) -> str:
    """A regular expression for messages that contain every part, in any order.

    Args:
        parts: text as it is, other objects as their ``repr``. Words and numbers are matched whole: 1 is in neither 10, -1 nor 1.5.
    """
    return "(?s)^" + "".join(f"(?=.*{_whole(part)})" for part in parts)


def _whole(part: object) -> str:
    if isinstance(part, (int, float)):
        return rf"(?<![\w.-]){re.escape(repr(part))}(?!\w|\.\d)"
    text = part if isinstance(part, str) else repr(part)
    before = r"(?<!\w)" if re.match(r"\w", text) else ""
    after = r"(?!\w)" if re.search(r"\w$", text) else ""
    return before + re.escape(text) + after


def names(message: str, *parts: object) -> bool:
    """Whether a message contains every part, compared as in `naming`."""
    return re.search(naming(*parts), message) is not None


@contextlib.contextmanager
def refused(error: type[BaseException], *parts: object) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """A block that raises the error, with a message that contains every part, compared as in `naming`."""
    with pytest.raises(error) as caught:
        yield caught
    assert names(str(caught.value), *parts), f"{caught.value}\ndoes not name all of {parts}"


def check_refused(error: type[Exception], *cases: tuple[str, Callable[[], object]]) -> None:
    """Check that each call raises the error with a message that matches the regular expression beside it."""
    for words, call in cases:
        with pytest.raises(error, match=words):
            call()
