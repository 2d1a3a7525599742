"""Action spaces as text: what each text means, and where a wrong text is wrong."""

from __future__ import annotations

import gymnasium as gym
import pytest
from messages import names

from amago.cli.gym_env import SPACE_SYNTAX, parse_space
from amago.spaces.actions import action_spec

spaces = gym.spaces
WRITTEN = [
    ("discrete:4", spaces.Discrete(4)),
    ("multidiscrete:3, 4", spaces.MultiDiscrete([3, 4])),
    ("box:-1,1", spaces.Box(-1, 1, (7,))),
    ("box:-30,3e1,2x3", spaces.Box(-30, 30, (2, 3))),
    ("bits", spaces.MultiBinary(7)),
    ("bits:2x3", spaces.MultiBinary((2, 3))),
    ("tuple(discrete:3;box:-1,1)", spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (1,))])),
    (
        "dict(arm=dict(grip=bits:2; turn=box:0,1); legs=tuple(discrete:2; discrete:2))",
        spaces.Dict(
            arm=spaces.Dict(grip=spaces.MultiBinary(2), turn=spaces.Box(0, 1, (1,))),
            legs=spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)]),
        ),
    ),
]


def test_what_texts_mean() -> None:
    """A box or bits without a size have the size of the recording, here 7, unless they are part of something."""
    for text, space in WRITTEN:
        assert parse_space(text, (7,)) == space, text
    assert parse_space("bits", ()) == spaces.MultiBinary(1)
    ordered = parse_space("dict(b=discrete:2; a=bits:3)")
    assert isinstance(ordered, spaces.Dict)
    assert list(ordered.spaces) == ["b", "a"], "as in the text"
    example = SPACE_SYNTAX.split("--action-space '")[1].split("'")[0]
    assert action_spec(parse_space(example)).kind == "discrete(3)+continuous(1)+multibinary(2)"


WRONG = [
    ("", "discrete:N", "multidiscrete:N,N,..", "box:LOW,HIGH", "bits", "tuple(SPACE;SPACE;..)", "dict("),
    ("discreet:3", "discrete:N", "box:LOW,HIGH"),
    ("discrete", "discrete:N"),
    ("discrete4", "discrete:N"),
    ("discrete:0", "discrete:N", "N at least 1"),
    ("discrete:99999999", "1,048,576"),
    ("multidiscrete:3,,4", "multidiscrete:N,N,..", "N at least 1"),
    ("box:1", "box:LOW,HIGH", "box:LOW,HIGH,SIZE"),
    ("box:2,1", "LOW below HIGH"),
    ("box:-inf,1", "LOW below HIGH"),
    ("box:nan,1", "LOW below HIGH"),
    ("box:0,1,", "box:LOW,HIGH,SIZE"),
    ("box:0,1,2,3", "box:LOW,HIGH,SIZE"),
    ("bits:0", "bits:SIZE"),
    ("bits:9999x9999", "1,048,576"),
    ("tuple()", "tuple(SPACE;SPACE;..)"),
    ("tuple(bits;)", "tuple(SPACE;SPACE;..)"),
    ("tuple(bits", "tuple(SPACE;SPACE;..)"),
    ("dict()", "dict(NAME=SPACE;..)"),
    ("dict(a b=bits)", "dict(NAME=SPACE;..)", "letters"),
    ("dict(a=bits;a=bits)", "different"),
]


def test_a_wrong_text_is_told_where_and_what_would_be_right() -> None:
    nested = [("tuple(bits;(bits)", "'(bits'"), ("dict(a=tuple(bits;discrete:x))", "'discrete:x'", "discrete:N")]
    for text, *right in [*((text, repr(text), *right) for text, *right in WRONG), *nested]:
        with pytest.raises(ValueError) as refused:
            parse_space(text)
        assert names(str(refused.value), *right), str(refused.value)
