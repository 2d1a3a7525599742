"""Reading the metrics of a run, and plotting them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from messages import naming

from amago.run.plots import plot_adaptation, read_metrics

CURVES = {"memory": [(0, 0.1), (10_000, 0.5), (20_000, 0.9)], "none": [(20_000, 0.2), (0, 0.1), (10_000, 0.15)]}
BY_ATTEMPT = {"memory": [0.2, 0.6, 0.9], "none": [0.2, 0.2, 0.21]}


def row(epoch: int, **values: float) -> dict[str, Any]:
    axes = {"epoch": epoch, "env_steps": 100 * epoch, "grad_steps": 10 * epoch, "wall_time": 1.5 * epoch}
    return axes | {"section": "val", "values": values}


def write(run_dir: Path, rows: list[dict[str, Any]]) -> bytes:
    blob = b"".join(json.dumps(r, ensure_ascii=False).encode() + b"\n" for r in rows)
    (run_dir / "metrics.jsonl").write_bytes(blob)
    return blob


def test_cut_anywhere_the_whole_rows_before_remain(tmp_path: Path) -> None:
    rows = [row(i, Größe=float(i)) for i in range(3)]
    blob = write(tmp_path, rows)
    assert read_metrics(str(tmp_path)) == rows
    ends = [i for i, byte in enumerate(blob) if byte == ord("\n")]
    for cut in range(len(blob) + 1):
        (tmp_path / "metrics.jsonl").write_bytes(blob[:cut])
        whole = sum(cut >= end for end in ends)  # a row is complete with its last brace
        assert read_metrics(tmp_path) == rows[:whole], cut


@pytest.mark.parametrize("line", [{"epoch": 1}, [1], row(0) | {"values": [1.0]}])
def test_what_is_no_metrics_file_is_refused(tmp_path: Path, line: Any) -> None:
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path / "absent")
    write(tmp_path, [row(0), line])
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


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.ticker"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=naming("plot_adaptation", "pip install 'amago[plots]'")):
        plot_adaptation(CURVES, BY_ATTEMPT, tmp_path / "p.png")
