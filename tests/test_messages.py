"""`names` compares whole words and numbers."""

from messages import names


def test_what_a_message_names_and_what_not():
    message = "batch_size must be at least 1, got -3.5\nin runs/demo[0]"
    for parts in [(), ("batch_size",), (1, -3.5), (-3.5, 1), ("demo[0]", "runs"), ("got -3.5",)]:
        assert names(message, *parts), parts
    for parts in [("size",), (3.5,), (-3,), (3,), (5,), ("demo[1]",), (1, 2), ("'runs'",), ("batch_size", "epochs")]:
        assert not names(message, *parts), parts
