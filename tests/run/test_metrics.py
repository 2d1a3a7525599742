"""Metrics in metrics.jsonl and other loggers, read again and plotted."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from messages import naming
from runs_on_disk import row
from tiny import EPISODE, learned, rows

from amago.run.metrics import RunLog
from amago.run.plots import plot_adaptation, read_metrics

X = {"epoch": 3, "env_steps": 40, "grad_steps": 7}


def lines(run_dir):
    return (run_dir / "metrics.jsonl").read_text().splitlines()


def test_a_row(tmp_path):
    logger = RunLog()
    logger.open(tmp_path / "run")
    several = {"b": torch.tensor(2.5), "c": np.float32(0.5), "d": torch.tensor([1.0, 3.0])}
    logger.row({"a": 1, "nan": math.nan, "low": -np.inf} | several, "train", X)
    logger.close()
    row = json.loads(lines(tmp_path / "run")[0], parse_constant=pytest.fail)
    assert 0 <= row.pop("wall_time") < 60
    numbers = {"a": 1.0, "b": 2.5, "c": 0.5, "d": 2.0, "nan": None, "low": None}
    assert row == {**X, "section": "train", "values": numbers}


@pytest.mark.parametrize("torn", ['{"epoch": 3, "env_st', '{"epoch": 1, "values": {"ä'])
def test_a_torn_last_line_does_not_swallow_the_next(tmp_path, torn):
    for value in (1, 2, 3):
        logger = RunLog()
        logger.open(tmp_path)
        logger.row({"a": value}, "val", X)
        logger.close()
        if value == 1:
            with open(tmp_path / "metrics.jsonl", "ab") as f:
                f.write(torn.encode()[:-1])
    found = (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")
    assert len(found) == 5
    assert [json.loads(found[i])["values"]["a"] for i in (0, 2, 3)] == [1.0, 2.0, 3.0]
    with pytest.warns(UserWarning, match="metrics.jsonl:2"):
        assert [r["values"]["a"] for r in rows(tmp_path)] == [1.0, 2.0, 3.0]


def test_losses_are_averaged_between_rows(tmp_path):
    seen = []

    class Watch(tiny.amago.Experiment):
        def compute_loss(self, batch, log_step):
            loss = super().compute_loss(batch, log_step)
            seen.append((log_step, float(loss["Critic Loss"].detach())))
            return loss

    e = learned(tmp_path, experiment_type=Watch, train_batches_per_epoch=7, log_interval=3)
    assert not [name for r in rows(e.run_dir) for name in r["values"] if "Second" in name], "they depend on the clock"
    train = rows(e.run_dir, "train")
    assert [s for s, _ in seen] == [True, False, False, True, False, False, True]
    assert [r["grad_steps"] for r in train] == [4, 7]
    losses = [loss for _, loss in seen]
    assert [r["values"]["Critic Loss"] for r in train] == pytest.approx([np.mean(losses[:4]), np.mean(losses[4:])], rel=1e-5)


def test_curves_of_tensorboard_go_on_over_a_resume(tmp_path):
    """They lose what was abandoned, and nothing else."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def events():
        found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
        found.Reload()
        return found

    def steps(tag):
        return [point.step for point in events().Scalars(tag)]

    fields = {"log_to_tensorboard": True, "val_interval": 1, "ckpt_interval": 1}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        learned(tmp_path, epochs=4, **fields).close()
        epoch = 4 * EPISODE
        assert steps("val/Number of Rollouts") == [0, epoch, 2 * epoch, 3 * epoch]
        tags = {"train/Critic Loss", "rollout/Epsilon", "rollout/Steps per Second", "train/Updates per Second"}
        assert {*tags, "rollout/Average Rollout Length", "val/Average Rollout Length"} <= set(events().Tags()["scalars"])
        first = events().Scalars("rollout/Number of Rollouts")[0]
        assert (first.step, first.value) == (epoch, 4.0)
        for resume, epochs in ((2, 5), ("auto", 6)):
            learned(tmp_path, epochs=epochs, resume=resume, **fields).close()
            assert steps("val/Number of Rollouts") == [i * epoch for i in range(epochs)]
            ends = [(i + 1) * epoch for i in range(epochs)]
            assert steps("rollout/Number of Rollouts") == steps("buffer/trajectories_fifo") == ends


SCRIPT = """
import sys, amago, tiny
from pathlib import Path
import numpy as np
from amago.run import video
root, films = Path(sys.argv[1]), amago.RecordVideo(1, suffix=".gif")
tiny.learned(root, log_to_wandb=True, val_interval=1, wandb_project="p", wandb_group_name="g", callbacks=[films]).close()
(root / "demo").mkdir()
path = video.write_video([np.full((8, 8, 3), i, np.uint8) for i in (0, 255)], root / "demo" / "a.gif", 4)
video.log_to_wandb(root / "demo", "eval/video", path)
"""


def test_weights_and_biases_offline(tmp_path):
    """In a separate process, because wandb leaves threads and warnings behind."""
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path), "AMAGO_WANDB_ENTITY": "me"}
    tiny.run_program(SCRIPT, tmp_path, cwd=tmp_path, **offline)
    (log,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    identity = json.loads((tmp_path / "run" / "settings.json").read_text())["id"]
    assert log.stem == f"run-{identity}", "a process that resumes the run goes on with this one"
    content = log.read_bytes()
    names = "Critic Loss", "val/Number of Rollouts", "rollout/Steps per Second", "total_frames-TMaze", "amago.agent.Agent.tau"
    assert all(name.encode() in content for name in names)
    for where, section, film in (("run", "val", "run/videos/epoch_0001.gif"), ("demo", "eval", "demo/a.gif")):
        (kept,) = (tmp_path / where / "wandb").glob(f"offline-run-*/files/media/videos/{section}/*.gif")
        assert kept.read_bytes() == (tmp_path / film).read_bytes()
    (log,) = (tmp_path / "demo" / "wandb").glob("offline-run-*/*.wandb")
    assert b"demo-eval" in log.read_bytes()


@pytest.mark.parametrize("name", ["mlflow", "trackio", "tensorboard", "wandb"])
def test_a_logger_that_is_not_installed_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(ImportError, match=naming(f"log_to=['{name}']", f"--log_to {name}", f"pip install 'amago[{name}]'")):
        tiny.started(tmp_path, log_to=[name])


def test_a_csv_file_has_what_metrics_jsonl_has(tmp_path):
    learned(tmp_path, epochs=1, ckpt_interval=1, log_to=["csv"]).close()
    run = learned(tmp_path, epochs=2, resume="auto", log_to=["csv"])
    run.close()
    with open(run.run_dir / "metrics.csv", newline="", encoding="utf-8") as file:
        found = {
            (int(r["epoch"]), int(r["env_steps"]), r["section"], r["name"]): float(r["value"]) for r in csv.DictReader(file)
        }
    logged = {
        (r["epoch"], r["env_steps"], r["section"], k): math.nan if v is None else v
        for r in rows(run.run_dir)
        for k, v in r["values"].items()
    }
    assert {place for place in found if "per Second" not in place[-1]} == set(logged)
    assert all(found[place] == value or math.isnan(value) for place, value in logged.items())


OFFLINE = """
import os, socket, sys, tiny
from pathlib import Path
from amago.run.metrics import RunLog

def refuse(*args):
    raise AssertionError(f"a connection to {args[-1]}")

socket.socket.connect = socket.getaddrinfo = refuse
root, name = Path(sys.argv[1]), sys.argv[2]
for epochs in (1, 2):
    tiny.learned(root, log_to=[name], epochs=epochs, ckpt_interval=1, resume="auto").close()
if name == "mlflow":
    import mlflow
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("amago").experiment_id])
    assert run.data.params["amago.agent.Agent.tau"] and run.info.status == "FINISHED" and run.info.run_name == "run", run
    found = [(p.step, p.value) for p in client.get_metric_history(run.info.run_id, "train/Critic Loss")]
else:
    from trackio.sqlite_storage import SQLiteStorage
    (name,) = SQLiteStorage.get_runs("amago")
    assert name.startswith("run-"), name
    found = [(r["step"], r["train/Critic Loss"]) for r in SQLiteStorage.get_logs("amago", name) if "train/Critic Loss" in r]
logged = [(r["env_steps"], r["values"]["Critic Loss"]) for r in tiny.rows(root / "run", "train")]
assert found == logged, (found, logged)
"""


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_a_logger_gets_all_rows_without_a_network(tmp_path, name):
    """In a separate process, because their threads stay behind."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    own = {"HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio"), "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/m.db"}
    tiny.run_program(OFFLINE, tmp_path, name, cwd=tmp_path, **own)


CURVES = {"memory": [(0, 0.1), (10_000, 0.5), (20_000, 0.9)], "none": [(20_000, 0.2), (0, 0.1), (10_000, 0.15)]}
BY_ATTEMPT = {"memory": [0.2, 0.6, 0.9], "none": [0.2, 0.2, 0.21]}


def write(run_dir: Path, rows: list[dict[str, Any]]) -> bytes:
    blob = b"".join(json.dumps(r, ensure_ascii=False).encode() + b"\n" for r in rows)
    (run_dir / "metrics.jsonl").write_bytes(blob)
    return blob


def test_cut_anywhere_the_whole_rows_before_remain(tmp_path: Path) -> None:
    rows = [row("val", {"Größe": float(i)}, i) for i in range(3)]
    blob = write(tmp_path, rows)
    assert read_metrics(str(tmp_path)) == rows
    ends = [i for i, byte in enumerate(blob) if byte == ord("\n")]
    for cut in range(len(blob) + 1):
        (tmp_path / "metrics.jsonl").write_bytes(blob[:cut])
        whole = sum(cut >= end for end in ends)  # a row is complete with its last brace
        assert read_metrics(tmp_path) == rows[:whole], cut


@pytest.mark.parametrize("line", [{"epoch": 1}, [1], row("val", [1.0])])
def test_what_is_no_metrics_file_is_refused(tmp_path: Path, line: Any) -> None:
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path / "absent")
    write(tmp_path, [row("val", {}), line])
    with pytest.raises(ValueError, match=naming("metrics.jsonl:2", "values")):
        read_metrics(tmp_path)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved during the test."""
    figure = pytest.importorskip("matplotlib.figure")
    kept: list[Any] = []
    save = figure.Figure.savefig

    def keep(self: Any, *args: Any, **kwargs: Any) -> None:
        kept.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(figure.Figure, "savefig", keep)
    return kept


def test_the_picture_shows_every_number_once(tmp_path: Path, drawn: list[Any]) -> None:
    path = plot_adaptation(CURVES, BY_ATTEMPT, tmp_path / "new" / "dir" / "a.picture", title="Lake")
    assert path == tmp_path / "new" / "dir" / "a.picture"
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    (figure,) = drawn
    right, left = figure.axes
    for axes, data in ((left, {k: sorted(v) for k, v in CURVES.items()}), (right, BY_ATTEMPT)):
        assert len(axes.lines) == 2
        for line, values in zip(axes.lines, data.values()):
            points = values if axes is left else list(enumerate(values, start=1))
            assert [tuple(p) for p in line.get_xydata().tolist()] == points
    assert [line.get_color() for line in left.lines] == [line.get_color() for line in right.lines]
    assert len({line.get_color() for line in left.lines}) == 2
    assert [t.get_text() for t in figure.legends[0].texts] == ["memory", "none"]
    assert figure.get_suptitle() == "Lake"
    assert (left.get_xlabel(), left.get_ylabel()) == ("environment steps", "mean return per rollout")
    assert (right.get_xlabel(), right.get_ylabel()) == ("attempt", "success rate")


def test_an_empty_panel_says_so_and_odd_names_stay_as_they_are(tmp_path: Path, drawn: list[Any]) -> None:
    plot_adaptation({"_x $1": [(0, 1.0), (5, float("nan")), (9, 2.0)]}, {}, tmp_path / "p.png", title="$ and $")
    assert [t.get_text() for t in drawn[0].axes[0].texts] == ["no data"]
    assert not drawn[0].axes[1].texts
    assert [t.get_text().strip() for t in drawn[0].legends[0].texts] == [r"_x \$1"]
    plot_adaptation({"a": []}, {"a": [0.0, 1.0]}, tmp_path / "p.png")
    assert len(drawn[1].axes[0].lines) == 1
    assert [t.get_text() for t in drawn[1].axes[0].texts] == ["100%"]
    with pytest.raises(ValueError, match="empty"):
        plot_adaptation({"a": []}, {}, tmp_path / "q.png")


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.ticker"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=naming("plot_adaptation", "pip install 'amago[plots]'")):
        plot_adaptation(CURVES, BY_ATTEMPT, tmp_path / "p.png")
