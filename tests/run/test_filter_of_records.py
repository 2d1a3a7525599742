"""The filter of imitated actions in runs that only learn from records."""

import math
import shutil

import pytest
import tiny

from amago import cli_utils
from amago.agent import Agent, MultiTaskAgent, binary_filter, exp_filter, leaky_relu_filter

NEVER = {"start_collecting_at_epoch": math.inf, "val_interval": None, "epochs": 1}


@pytest.fixture(scope="module")
def buffer(tmp_path_factory):
    e = tiny.learned(tmp_path_factory.mktemp("recorder"), name="recorder", epochs=1)
    e.close()
    return e.run_dir / "buffer" / "fifo"


@pytest.mark.parametrize(
    ("agent_type", "given", "folder"),
    [
        (Agent, None, "protected"), (MultiTaskAgent, None, "protected"), (Agent, None, "fifo"),
        (MultiTaskAgent, binary_filter, "protected"), (Agent, leaky_relu_filter, "protected"),
    ],
)  # fmt: skip
def test_records_are_imitated_by_weights_unless_a_filter_is_given(tmp_path, buffer, capsys, agent_type, given, folder):
    shutil.copytree(buffer, tmp_path / "run" / "buffer" / folder)
    settings = {}
    if given is not None:
        cli_utils.switch_agent(settings, agent_type, fbc_filter_func=given)
    cli_utils.use_config(settings)
    e = tiny.started(tmp_path, agent_type=agent_type, verbose=True, share_buffer=True, **NEVER)
    assert e.policy.fbc_filter_func is (given or binary_filter)
    e.learn()
    weighted = given is None and folder == "protected"  # files in fifo were collected by another process
    assert e.policy.fbc_filter_func is (exp_filter if weighted else given or binary_filter)
    assert ("fbc_filter_func is exp_filter" in capsys.readouterr().out) == weighted
