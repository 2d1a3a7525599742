"""Handing a trained agent on: a directory with its weights, settings, scores and a page about it, and its way to the Hugging Face Hub."""

from amago.policy.card.hub import HubError, pull_card, push_card
from amago.policy.card.results import Results, Score, measure
from amago.policy.card.secrets import find_secrets
from amago.policy.card.write import write_card

__all__ = ["HubError", "Results", "Score", "find_secrets", "measure", "pull_card", "push_card", "write_card"]
