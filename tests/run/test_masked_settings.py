"""Secrets do not reach settings.json."""

import functools
import json
import sys

import pytest
import tiny

from amago.run.record import masked


def make(api_key, corridor_keys=3):
    return tiny.tmaze()


def test_keys_and_tokens_of_a_run_are_masked(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--hub-token", "abc-1", "--api_key=abc-2", "--lr", "1"])
    experiment = tiny.experiment(tmp_path, functools.partial(make, api_key="abc-3"))
    experiment.start()
    experiment.close()
    text = (experiment.run_dir / "settings.json").read_text()
    assert "abc-" not in text
    assert json.loads(text)["starts"][-1]["command"][-2:] == ["--lr", "1"]


@pytest.mark.parametrize(
    "value", [{"qk_norm": "key"}, {"monkey": "x"}, {"n_keys": 3}, ["--lr", "1"], "keys of a dict", {"a": None}]
)
def test_other_settings_stay(value):
    assert masked(value) == value
