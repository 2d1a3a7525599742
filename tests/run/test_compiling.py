"""`Experiment.compile`: the same updates, with a line in the log and eager losses where compilation fails."""

import pytest
import tiny
import torch

import amago
from amago.agent import MultiTaskAgent
from amago.data.batch import MAGIC_PAD_VAL


def replace_compiler(monkeypatch, compiled):
    """Replace the compiler by a function of what is compiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function))


@pytest.mark.parametrize(("agent_type", "traj"), [(amago.Agent, "transformer"), (MultiTaskAgent, "gru")])
def test_what_is_tried_before_the_first_update_changes_nothing(agent_type, traj, tmp_path, monkeypatch):
    calls = []
    replace_compiler(monkeypatch, lambda function: lambda *args: calls.append(args) or function(*args))
    runs = [
        tiny.learned(
            tmp_path / str(on), traj=traj, agent_type=agent_type, compile=on, log_interval=2, train_batches_per_epoch=4
        )
        for on in (False, True)
    ]
    assert calls
    assert not tiny.differing(*map(tiny.weights, runs))


def test_a_failure_is_logged_once_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("no such kernel\nand more")

    expected = tiny.weights(tiny.learned(tmp_path / "eager", train_batches_per_epoch=4))
    replace_compiler(monkeypatch, lambda _: broken)
    e = tiny.learned(tmp_path / "compiled", compile=True, train_batches_per_epoch=4, log_interval=0)
    (line,) = [r.getMessage() for r in caplog.records if "compil" in r.getMessage()]
    assert "no such kernel" in line
    assert "\n" not in line
    assert not tiny.differing(expected, tiny.weights(e))


def test_more_padding_changes_no_value(tmp_path):
    e = tiny.learned(tmp_path, tiny.cartpole, "transformer", max_seq_len=40, batch_size=3, train_timesteps_per_epoch=62)
    (batch,) = e.batches.take(1)
    length = batch.rews.shape[1]
    longer = batch.lengthened(length + 7)
    assert longer.rews.shape[1] == length + 7
    assert longer.mask.sum() == batch.mask.sum()
    assert (longer.rl2s[:, length + 1 :] == MAGIC_PAD_VAL).all()
    e.policy.eval()
    values = [e.policy.get_values(b)["q_sa"][:, :length][batch.transition_mask[:, :, 0]] for b in (batch, longer)]
    torch.testing.assert_close(*values)
