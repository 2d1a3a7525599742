"""Adapters for code written for the original system, each naming the fact it serves."""
