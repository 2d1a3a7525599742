"""Each mistake of the table is refused with exactly the message that the docs promise."""

import re
from collections import Counter
from pathlib import Path

import pytest
from bad_input_cases import CASES
from run_inside import module_of

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "errors.md").read_text("utf-8")
make_errors = module_of(DOCS / "make_errors.py")


def slug(case):
    return re.sub(r"[^a-z0-9]+", "-", f"{case.group} {case.what}".lower()).strip("-")


@pytest.mark.parametrize("case", CASES, ids=slug)
def test_the_mistake_is_refused_as_documented(case, tmp_path):
    rows = PAGE.partition(f"## {case.group}\n")[2].partition("## ")[0].splitlines()
    assert make_errors.row(case, case.message(tmp_path)) in rows, "if the message is right: python docs/make_errors.py"


def test_every_mistake_is_listed_once():
    assert max(Counter(map(slug, CASES)).values()) == 1
    assert len(re.findall(r"^\| .* \| `\w+` \| .* \|$", PAGE, re.MULTILINE)) == len(CASES)


def test_messages_name_the_value_and_fit_on_a_screen():
    """No message is a bare complaint: it is a sentence of some length, and short enough to be read.

    The list of the files of the zoo, which grows, does not count.
    """
    for message in re.findall(r"^\| .* \| `\w+` \| (.*) \|$", PAGE, re.MULTILINE):
        assert 30 < len(re.sub(r"(, zoo/\w+)+", "", message.replace("\\", ""))) < 500, message
