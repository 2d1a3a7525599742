"""`naming` compares whole words and numbers."""

import re

import pytest
from messages import naming

MESSAGE = "batch_size must be at least 1, got -3.5\nin runs/demo[0]"


@pytest.mark.parametrize("parts", [(), ("batch_size",), (1, -3.5), (-3.5, 1), ("demo[0]", "runs"), ("got -3.5",)])
def test_what_a_message_names(parts):
    assert re.search(naming(*parts), MESSAGE)


@pytest.mark.parametrize(
    "parts", [("size",), (3.5,), (-3,), (3,), (5,), ("demo[1]",), (1, 2), ("'runs'",), ("batch_size", "epochs")]
)
def test_what_a_message_does_not_name(parts):
    assert not re.search(naming(*parts), MESSAGE)
