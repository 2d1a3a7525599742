"""Each mistake of the table is refused with exactly the message that the docs promise."""

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest
from bad_input_cases import CASES

DOCS = Path(__file__).parent.parent / "docs"


def slug(case):
    return re.sub(r"[^a-z0-9]+", "-", f"{case.group} {case.what}".lower()).strip("-")


@pytest.mark.parametrize("case", CASES, ids=slug)
def test_the_mistake_is_refused_as_documented(case, tmp_path):
    catch = pytest.warns if issubclass(case.kind, Warning) else pytest.raises
    with catch(case.kind) as caught:
        case.cause(tmp_path)
    err = caught[0].message if isinstance(caught, list) or hasattr(caught, "list") else caught.value
    assert isinstance(err, case.kind)
    assert type(err).__name__ == case.kind.__name__  # gin raises a subclass of the same name
    assert str(err).replace(str(tmp_path), "runs") == case.message


def test_every_mistake_is_listed_once():
    assert max(Counter(map(slug, CASES)).values()) == 1


def test_the_page_is_what_the_table_says():
    spec = importlib.util.spec_from_file_location("make_errors", DOCS / "make_errors.py")
    make_errors = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_errors)
    assert (DOCS / "errors.md").read_text() == make_errors.page(CASES), "run: python docs/make_errors.py"


def test_messages_name_the_value_and_fit_on_a_screen():
    """No message is a bare complaint: it is a sentence of some length, and short enough to be read.

    The list of the files of the zoo, which grows, does not count.
    """
    for case in CASES:
        assert 30 < len(re.sub(r"(, zoo/\w+)+", "", case.message)) < 500, case.what
