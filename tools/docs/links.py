"""A hook of MkDocs: `amago.agent.Agent` and `Agent` between backquotes become links into the API reference."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_CODE = re.compile(r"<code>(amago(?:\.\w+)+|[A-Z]\w+)</code>")
_LINKED = re.compile(r"<(a|autoref|pre|h[1-6])\b.*?</\1>", flags=re.DOTALL)


def on_page_content(html: str, **_: Any) -> str:
    """Mark names for the plugin `autorefs`, which makes links of those that the reference has."""
    parts, end = [], 0
    for taken in _LINKED.finditer(html):  # no link within a link, a heading or a listing
        parts += [_CODE.sub(_marked, html[end : taken.start()]), taken.group()]
        end = taken.end()
    return "".join([*parts, _CODE.sub(_marked, html[end:])])


def _marked(code: re.Match[str]) -> str:
    name = code.group(1)
    target = name if "." in name else _classes().get(name)
    return f'<autoref optional identifier="{target}">{code.group()}</autoref>' if target else code.group()


@cache
def _classes() -> dict[str, str]:
    """Where each public class of the library is defined, if its name is not taken twice."""
    found = defaultdict(list)
    for path in (_ROOT / "amago").rglob("*.py"):
        module = ".".join(path.relative_to(_ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(f"{module}.{node.name}")
    return {name: places[0] for name, places in found.items() if len(places) == 1}
