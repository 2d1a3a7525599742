"""``amago pull USER/NAME``: download a card from the Hugging Face Hub."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Download an agent that 'amago push' uploaded to the Hugging Face Hub, or to the server that the variable HF_ENDPOINT names. Only the "
        "files of a card are fetched, none of which can hold a pickled object. Example: amago pull USER/demo --out demo"
    )
    parser.add_argument("repository", metavar="USER/NAME", help="repository")
    parser.add_argument("--out", type=Path, default=None, metavar="DIR", help="directory to write; if not given, NAME")
    parser.add_argument("--revision", default=None, help="branch, tag or commit; if not given, the newest")


def run(args: Namespace) -> int:
    from amago.policy import load_policy
    from amago.policy.card import pull_card

    out = pull_card(args.repository, args.out, args.revision)
    print(f"pulled: {out} ({', '.join(sorted(p.name for p in out.iterdir()))})")
    try:
        load_policy(out)
    except ValueError as err:  # classes of somebody's own, which are not imported unasked
        print(f"to load it, more is needed: {err}")
    else:
        print(f'to load it: amago.load_policy("{out}"); to evaluate it: amago eval {out}')
    return 0
