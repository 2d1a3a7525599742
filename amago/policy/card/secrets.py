"""Looking for passwords and access tokens in files that are about to be handed on."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

LEFT_OUT = "(left out)"
"""What stands for a value that is not handed on."""
PATTERNS = {
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
"""What secrets look like."""
_NAMED = re.compile(
    r"(?:^|[._-])(?:token|secret|password|passwd|passphrase|credentials?|(?:api|private|access|secret)[_-]?key)$", re.IGNORECASE
)
_VARIABLE = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|PRIVATE_?KEY|ACCESS_?KEY", re.IGNORECASE)
_SHORTEST = 8  # characters of a variable's value: shorter ones, such as "true", occur by accident


class Secret(NamedTuple):
    """Where something looks like a secret, and what it is; the secret itself is not in it."""

    file: str
    what: str


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret, as ``wandb_api_key`` and ``hub.token`` do."""
    return _NAMED.search(name) is not None


def looks_secret(text: str) -> bool:
    """Whether a text holds one of `PATTERNS`, or the value of a secret variable of the environment."""
    return bool(_in_bytes(text.encode(errors="replace"), secret_variables()))


def secret_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of the process's environment whose names say that they hold a secret, such as HF_TOKEN."""
    found = os.environ if environment is None else environment
    return {k: v for k, v in found.items() if _VARIABLE.search(k) and len(v) >= _SHORTEST and not os.path.exists(v)}


def find_secrets(directory: str | Path) -> list[Secret]:
    """Everything in the files of a directory that looks like a secret.

    Read are all files below it, of weights only the header. What counts is the form of known kinds of tokens (`PATTERNS`), strings in
    JSON under names such as "api_key", and the values of variables of this process such as HF_TOKEN. A secret of another form is
    not found.
    """
    variables = secret_variables()
    found = []
    for path in sorted(p for p in Path(directory).rglob("*") if p.is_file()):
        content = _readable(path)
        name = str(path.relative_to(directory))
        found += [Secret(name, what) for what in _in_bytes(content, variables)]
        if path.suffix in (".json", ".safetensors"):
            found += [Secret(name, f"a value of {key!r}") for key in _in_json(content)]
    return found


def _readable(path: Path) -> bytes:
    """The bytes of a file that may hold text: of weights the header, whose length is in the first eight bytes."""
    if path.suffix != ".safetensors":
        return path.read_bytes()
    with open(path, "rb") as f:
        head = f.read(8)
        return f.read(min(struct.unpack("<Q", head)[0], 100_000_000)) if len(head) == 8 else head


def _in_bytes(content: bytes, variables: Mapping[str, str]) -> list[str]:
    found = [what for what, pattern in PATTERNS.items() if re.search(pattern, content)]
    return found + [f"the value of the variable {name}" for name, value in variables.items() if value.encode() in content]


def _in_json(content: bytes) -> list[str]:
    try:
        return sorted(set(_named(json.loads(content))))
    except ValueError:
        return []


def _named(value: Any) -> list[str]:
    """Names of strings that are secrets by their names; in strings that are JSON themselves, too (headers of weights)."""
    if isinstance(value, list):
        pair = len(value) == 2 and all(isinstance(v, str) and v for v in value) and is_secret_name(value[0])
        return [value[0]] if pair else [name for v in value for name in _named(v)]
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return _named(json.loads(value))
        except ValueError:
            return []
    if not isinstance(value, dict):
        return []
    here = [k for k, v in value.items() if isinstance(v, str) and v not in ("", LEFT_OUT) and is_secret_name(k)]
    return here + [name for v in value.values() for name in _named(v)]
