"""A hook of MkDocs: names such as `amago.agent.Agent` between backquotes become links into the API reference."""

from __future__ import annotations

import re
from typing import Any

_CODE = re.compile(r"<code>(amago(?:\.\w+)+)</code>")
_LINKED = re.compile(r"<(a|autoref|pre|h[1-6])\b.*?</\1>", flags=re.DOTALL)


def on_page_content(html: str, **_: Any) -> str:
    """Mark dotted names for the plugin `autorefs`, which makes links of those that the reference has."""
    parts, end = [], 0
    for taken in _LINKED.finditer(html):  # no link within a link, a heading or a listing
        parts += [_marked(html[end : taken.start()]), taken.group()]
        end = taken.end()
    return "".join([*parts, _marked(html[end:])])


def _marked(html: str) -> str:
    return _CODE.sub(r'<autoref optional identifier="\1"><code>\1</code></autoref>', html)
