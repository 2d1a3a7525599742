"""``amago push DIR USER/NAME``: upload a card to the Hugging Face Hub."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Upload a directory that 'amago card' wrote to the Hugging Face Hub, or to the server that the variable HF_ENDPOINT names. It needs "
        "pip install 'amago[hub]' and an access token (hf auth login, or the variable HF_TOKEN). A directory with other files than those "
        "of a card, or with anything that looks like a secret, is refused. Example: amago push demo_card USER/demo"
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory of the card")
    parser.add_argument("repository", metavar="USER/NAME", help="repository, which is created if there is none")
    parser.add_argument("--private", action="store_true", help="a new repository is seen by its owners alone")
    parser.add_argument("--message", default=None, help="of the commit")


def run(args: Namespace) -> int:
    from amago.policy.card import push_card  # imports torch, which --help does without

    print(f"pushed: {push_card(args.directory, args.repository, args.private, args.message)}")
    return 0
