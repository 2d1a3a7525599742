"""Secrets in files that are about to be shared."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_PATTERNS = {
    "a token of the Hugging Face Hub": rb"\bhf_[A-Za-z0-9]{20,}",
    "a GitHub token": rb"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})",
    "a GitLab token": rb"\bglpat-[A-Za-z0-9_-]{16,}",
    "an API key that begins with sk-": rb"\bsk-[A-Za-z0-9_-]{20,}",
    "a key of Weights & Biases": rb"\bwandb_v1_[A-Za-z0-9_-]{20,}|\blocal-[0-9a-f]{40}\b",
    "an AWS access key": rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a Google API key": rb"\bAIza[0-9A-Za-z_-]{35}",
    "a Slack token": rb"\bxox[abeprs]-[A-Za-z0-9-]{10,}",
    "a JSON web token": rb"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.",
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "an address with a password": rb"\b[a-z][a-z0-9+.-]*://[^\s/:@\"']+:[^\s/:@\"']+@",
}
_SECRET = r"(?:token|secret|password|passwd|passphrase|credentials?|(?:api|private|access|secret)[_-]?key)"
SECRET_NAME = re.compile(rf"(?:^|[._-]){_SECRET}$", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(_SECRET, re.IGNORECASE)
# a string under such a name in JSON; also as [name, value], and in JSON inside of a string (headers of weights)
_SECRET_IN_JSON = re.compile(rf'\\*"((?:[^"\\]*[._-])?{_SECRET})\\*"\s*[:,]\s*\\*"(?!\\*"|\(left out\))', re.IGNORECASE)


class Secret(NamedTuple):
    """Place and kind of a value that looks like a secret, without the value."""

    file: str
    what: str


def find_secrets(directory: str | Path) -> list[Secret]:
    """Everything in the files of a directory that looks like a secret.

    Secrets are found by the form of known kinds of tokens, as strings in JSON under names such as "api_key", and by the values of
    variables of this process such as HF_TOKEN. A secret of another form is not found.
    """
    found = []
    for path in sorted(p for p in Path(directory).rglob("*") if p.is_file()):
        content, name = path.read_bytes(), str(path.relative_to(directory))
        if path.suffix == ".safetensors":  # the header alone is text; its length is in the first eight bytes
            content = content[8 : 8 + int.from_bytes(content[:8], "little")]
        found += [Secret(name, what) for what in secrets_in(content)]
        if path.suffix in (".json", ".safetensors"):
            keys = {match[1] for match in _SECRET_IN_JSON.finditer(content.decode(errors="replace"))}
            found += [Secret(name, f"a value of {key!r}") for key in sorted(keys)]
    return found


def secrets_in(content: bytes) -> list[str]:
    """The kinds of what looks like a secret in some bytes."""
    found = [what for what, pattern in _PATTERNS.items() if re.search(pattern, content)]
    for name, value in os.environ.items():  # short values, such as "true", occur by accident; and paths are no secrets
        if len(value) >= 8 and _SECRET_VARIABLE.search(name) and value.encode() in content and not os.path.exists(value):
            found.append(f"the value of the variable {name}")
    return found
