"""Action spaces as text: every space that the syntax has comes back from its text, and a wrong text is told where it is wrong."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from messages import names

from amago.cli.space_syntax import DETAILS, parse_space, space_text
from amago.spaces.actions import action_spec

spaces = gym.spaces
FEW, FIRST = st.integers(1, 5), st.integers(-9, 9)
SHAPES = st.lists(FEW, min_size=1, max_size=3).map(tuple)
REAL = st.floats(-1e6, 1e6, width=32)
LEAVES = st.one_of(
    st.builds(lambda n, first: spaces.Discrete(n, start=first), FEW, FIRST),
    st.lists(st.tuples(FEW, FIRST), min_size=1, max_size=4).map(lambda x: spaces.MultiDiscrete([n for n, _ in x], start=[i for _, i in x])),
    st.builds(lambda ends, shape: spaces.Box(*sorted(ends), shape, np.float32), st.tuples(REAL, REAL).filter(lambda x: x[0] != x[1]), SHAPES),
    SHAPES.map(lambda s: spaces.MultiBinary(s if len(s) > 1 else s[0])),
)  # fmt: skip
SPACES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
        st.dictionaries(st.text("abcXYZ019_-.é", min_size=1, max_size=5), inner, min_size=1, max_size=3).map(spaces.Dict),
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(SPACES)
@example(spaces.Box(-0.1, 1e-30, (2, 3)))
@example(spaces.Dict({"b": spaces.Tuple([spaces.Discrete(2, start=-1)]), "a": spaces.MultiBinary((2, 2))}))
def test_a_space_comes_back_from_its_text(space: gym.Space) -> None:
    text = space_text(space)
    assert text is not None
    assert parse_space(text) == space


WRITTEN = [
    ("discrete:4", spaces.Discrete(4)),
    ("discrete:-1..2", spaces.Discrete(4, start=-1)),
    ("multidiscrete:3, 4,1..2", spaces.MultiDiscrete([3, 4, 2], start=[0, 0, 1])),
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
    example = DETAILS.split("--action-space '")[1].split("'")[0]
    assert action_spec(parse_space(example)).kind == "discrete(3)+continuous(1)+multibinary(2)"


WRONG = [
    ("", "discrete:N", "multidiscrete:N,N,..", "box:LOW,HIGH", "bits", "tuple(SPACE;SPACE;..)", "dict("),
    ("discreet:3", "discrete:N", "box:LOW,HIGH"),
    ("discrete", "discrete:N"),
    ("discrete:0", "discrete:N", "N at least 1", "discrete:FIRST..LAST"),
    ("discrete:5..4", "discrete:N", "discrete:FIRST..LAST"),
    ("discrete:99999999", "1,048,576"),
    ("multidiscrete:3,,4", "multidiscrete:N,N,..", "N at least 1"),
    ("box:1", "box:LOW,HIGH", "box:LOW,HIGH,SIZE"),
    ("box:2,1", "LOW below HIGH"),
    ("box:1,1.000000001", "LOW below HIGH"),
    ("box:-inf,1", "LOW below HIGH"),
    ("box:nan,1", "LOW below HIGH"),
    ("box:0,1e39", "LOW below HIGH"),
    ("box:0,1,", "box:LOW,HIGH,SIZE"),
    ("box:0,1,2,3", "box:LOW,HIGH,SIZE"),
    ("bits:0", "bits:SIZE"),
    ("bits:2x", "bits:SIZE"),
    ("bits:9999x9999", "1,048,576"),
    ("tuple()", "tuple(SPACE;SPACE;..)"),
    ("tuple(bits;)", "tuple(SPACE;SPACE;..)"),
    ("tuple:bits", "tuple(SPACE;SPACE;..)"),
    ("tuple(bits", "tuple(SPACE;SPACE;..)"),
    ("dict()", "dict(NAME=SPACE;..)"),
    ("dict(a b=bits)", "dict(NAME=SPACE;..)", "letters"),
    ("dict(a=bits;a=bits)", "different"),
]


def test_a_wrong_text_is_told_where_and_what_would_be_right() -> None:
    nested = [("tuple(bits;(bits)", "'(bits'"), ("dict(a=tuple(bits;discrete:x))", "'discrete:x'", "discrete:N")]
    for text, *right in [
        *((text, repr(text), *right) for text, *right in WRONG),
        *nested,
        ("tuple(" * 300, "1,000 characters"),
    ]:
        with pytest.raises(ValueError) as refused:
            parse_space(text)
        assert names(str(refused.value), *right), str(refused.value)


@settings(deadline=None)
@given(st.text("()=;:,.x0123456789-abcdeilmoprstu "))
@example("dict(=bits)")
@example("discrete:" + "9" * 400)
@example("tuple(" * 100 + ")" * 100)
def test_any_text_is_a_space_or_refused(text: str) -> None:
    try:
        space = parse_space(text)
    except ValueError as err:
        if "action space" not in str(err) or len(str(err)) > 800:
            raise AssertionError("such a refusal helps nobody") from err
    else:
        assert action_spec(space).dim > 0


WITHOUT_TEXT = {
    "bounds that differ": spaces.Box(np.array([0, 0]), np.array([1, 2]), dtype=np.float32),
    "another dtype": spaces.Box(0.0, 1.0, (2,), np.float64),
    "whole numbers": spaces.Box(0, 255, (2,), np.uint8),
    "one number alone": spaces.Box(-1.0, 1.0, ()),
    "a grid of choices": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "a name with a blank": spaces.Dict({"a b": spaces.Discrete(2)}),
    "an unbounded box": spaces.Box(-np.inf, np.inf, (2,)),
    "no actions": spaces.Text(5),
    "inside of a tuple": spaces.Tuple([spaces.Discrete(2), spaces.Text(5)]),
}


def test_what_the_syntax_cannot_say_is_not_said_wrongly() -> None:
    assert {name: space_text(space) for name, space in WITHOUT_TEXT.items()} == dict.fromkeys(WITHOUT_TEXT)
