"""Metrics in metrics.jsonl, TensorBoard and Weights & Biases."""

import json
import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import tiny
import torch
from messages import naming
from tiny import EPISODE, learned, rows

from amago.run.metrics import MetricsLogger, RunningMeans, to_floats

X = {"epoch": 3, "env_steps": 40, "grad_steps": 7}


def lines(run_dir):
    return (run_dir / "metrics.jsonl").read_text().splitlines()


def test_a_row(tmp_path):
    logger = MetricsLogger(tmp_path / "run")
    logger.log({"a": 1, "b": torch.tensor(2.5), "c": np.float32(0.5), "d": torch.tensor([1.0, 3.0])}, "train", X, {})
    logger.close()
    row = json.loads(lines(tmp_path / "run")[0])
    assert 0 <= row.pop("wall_time") < 60
    assert row == {
        "epoch": 3,
        "env_steps": 40,
        "grad_steps": 7,
        "section": "train",
        "values": {"a": 1.0, "b": 2.5, "c": 0.5, "d": 2.0},
    }


def test_rows_can_be_read_while_the_run_goes_on(tmp_path):
    logger = MetricsLogger(tmp_path)
    logger.log({"a": 1}, "val", X, {})
    assert len(lines(tmp_path)) == 1
    logger.log({"a": 2}, "val", X, {})
    assert [json.loads(line)["values"]["a"] for line in lines(tmp_path)] == [1.0, 2.0]
    logger.close()
    logger.close()


def test_what_is_not_finite_becomes_null(tmp_path):
    logger = MetricsLogger(tmp_path)
    logger.log({"nan": math.nan, "inf": torch.tensor(math.inf), "low": -np.inf, "ok": 1}, "train", X, {})
    logger.close()
    (line,) = lines(tmp_path)
    assert json.loads(line, parse_constant=pytest.fail)["values"] == {"nan": None, "inf": None, "low": None, "ok": 1.0}


def test_nothing_to_say_is_no_row(tmp_path):
    logger = MetricsLogger(tmp_path)
    logger.log({}, "val", X, {})
    logger.close()
    assert lines(tmp_path) == []


@pytest.mark.parametrize("torn", ['{"epoch": 3, "env_st', '{"epoch": 1, "values": {"ä'])
def test_a_torn_last_line_does_not_swallow_the_next(tmp_path, torn):
    first = MetricsLogger(tmp_path)
    first.log({"a": 1}, "val", X, {})
    first.close()
    with open(tmp_path / "metrics.jsonl", "ab") as f:
        f.write(torn.encode()[:-1])
    second = MetricsLogger(tmp_path)
    second.log({"a": 2}, "val", X, {})
    second.close()
    third = MetricsLogger(tmp_path)
    third.log({"a": 3}, "val", X, {})
    third.close()
    found = (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")
    assert len(found) == 5
    assert [json.loads(found[i])["values"]["a"] for i in (0, 2, 3)] == [1.0, 2.0, 3.0]
    with pytest.warns(UserWarning, match="metrics.jsonl:2"):
        assert [r["values"]["a"] for r in rows(tmp_path)] == [1.0, 2.0, 3.0]


def test_the_clock_goes_on_after_a_resume(tmp_path):
    logger = MetricsLogger(tmp_path)
    logger.rewind(1000.0)
    logger.log({"a": 1}, "val", X, {})
    logger.close()
    assert 1000.0 <= rows(tmp_path)[0]["wall_time"] < 1060.0


def test_to_floats_keeps_every_name():
    values = {"t": torch.ones(2, requires_grad=True), "b": torch.tensor(True), "i": torch.tensor(3), "f": 2, "n": np.int64(4)}
    assert to_floats(values) == {"t": 1.0, "b": 1.0, "i": 3.0, "f": 2.0, "n": 4.0}


def test_running_means_count_each_name_by_itself():
    means = RunningMeans()
    means.add({"a": torch.tensor(1.0, requires_grad=True), "b": 10})
    means.add({"a": torch.tensor(3.0)})
    assert means.take() == {"a": 2.0, "b": 10.0}
    assert means.take() == {}
    means.add({"a": 7})
    assert means.take() == {"a": 7.0}


def test_losses_are_averaged_between_rows(tmp_path):
    seen = []

    class Watch(tiny.amago.Experiment):
        def compute_loss(self, batch, log_step):
            loss = super().compute_loss(batch, log_step)
            seen.append((log_step, float(loss["Critic Loss"].detach())))
            return loss

    e = learned(tmp_path, experiment_type=Watch, train_batches_per_epoch=7, log_interval=3)
    train = rows(e.run_dir, "train")
    assert [s for s, _ in seen] == [True, False, False, True, False, False, True]
    assert [r["grad_steps"] for r in train] == [4, 7]
    losses = [loss for _, loss in seen]
    assert [r["values"]["Critic Loss"] for r in train] == pytest.approx([np.mean(losses[:4]), np.mean(losses[4:])], rel=1e-5)


def test_tensorboard(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        e = learned(tmp_path, log_to_tensorboard=True, val_interval=1)
        e.close()
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(e.run_dir / "tensorboard"))
        events.Reload()
    tags = events.Tags()["scalars"]
    assert {"train/Critic Loss", "val/Number of Rollouts", "rollout/Number of Rollouts"} <= set(tags)
    assert {"rollout/Average Rollout Length", "val/Average Rollout Length", "rollout/Epsilon"} <= set(tags)
    assert {"rollout/Steps per Second", "train/Updates per Second"} <= set(tags)
    (point,) = events.Scalars("rollout/Number of Rollouts")
    assert (point.step, point.value) == (4 * EPISODE, 4.0)


def test_only_the_wall_time_depends_on_the_clock(tmp_path):
    """In ``metrics.jsonl``; steps a second follow from it."""
    e = learned(tmp_path, val_interval=1)
    names = {name for r in rows(e.run_dir) for name in r["values"]}
    assert {"Average Rollout Length", "Epsilon"} <= names
    assert not [name for name in names if "Second" in name]


def test_no_tensorboard_unless_asked(tmp_path):
    e = learned(tmp_path)
    assert not (e.run_dir / "tensorboard").exists()
    assert not (e.run_dir / "wandb").exists()


SCRIPT = """
import sys, tiny
e = tiny.learned(sys.argv[1], log_to_wandb=True, val_interval=1, wandb_project="p", wandb_group_name="g")
e.close()
"""


def test_weights_and_biases_offline(tmp_path):
    """In a separate process, because wandb leaves threads and warnings behind."""
    env = {
        **tiny.environment(),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "HOME": str(tmp_path),
        "AMAGO_WANDB_ENTITY": "me",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    content = log.read_bytes()
    for wanted in (
        b"Critic Loss",
        b"val/Number of Rollouts",
        b"rollout/Average Rollout Length",
        b"rollout/Steps per Second",
        b"rollout/Epsilon",
        b"total_frames-TMaze",
        b"run",
        b"lr_warmup_steps",
        b"amago.agent.Agent.tau",
    ):
        assert wanted in content, wanted


@pytest.mark.parametrize(("field", "module", "extra"), [("log_to_tensorboard", "torch.utils.tensorboard", "tensorboard"), ("log_to_wandb", "wandb", "wandb")])  # fmt: skip
def test_what_is_not_installed_is_named(tmp_path, monkeypatch, field, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=naming(f"{field}=True", f"pip install 'amago[{extra}]'")):
        tiny.started(tmp_path, **{field: True})
