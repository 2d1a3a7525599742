"""The benchmark of GPUs in miniature, on a simulated device."""

import json
import sys

import pytest
from gpu.devices import CUDA

from benchmarks.__main__ import main

pytestmark = pytest.mark.skipif("simcuda" not in sys.modules, reason="on a GPU the benchmark itself is run")


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_updates_and_steps_are_counted(device, tmp_path):
    assert main(["gpu", "--smoke", "--out", str(tmp_path)]) == 0
    rows = {row["case"]: row for row in json.loads((tmp_path / "gpu.json").read_text())}
    assert list(rows) == [
        "update, agent, discrete, transformer, length 8, eager",
        "update, agent, discrete, mamba, length 8, eager",
        "step, agent, discrete, transformer, 4 actors",
    ]
    for case, row in rows.items():
        found = row["details"]
        assert row["note"].startswith("predicted")
        assert (found["waits"], found["copies"]) == ((0, 0) if case.startswith("update") else (1, 1))
        assert found["pageable"] == 0
        assert min(found["kernels"], found["operations"], found["bytes"], found["timesteps/s"]) > 0
        assert row["ceiling"] < row["ours"]


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    from benchmarks import gpu

    monkeypatch.delitem(sys.modules, "simcuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("AMAGO_SIMCUDA", str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit, match="no GPU, and no simulated device in"):
        gpu.simulated_device()
