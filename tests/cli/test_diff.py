"""`amago diff RUN RUN`."""

import json

import pytest
import tiny
from tiny import learned

from amago import config
from amago.cli import main


def diff(capsys, *runs):
    code = main(["diff", *map(str, runs)])
    return code, capsys.readouterr().out


def test_runs_that_differ_in_name_alone_do_not_differ(tmp_path, capsys):
    for name in ("a", "b"):
        learned(tmp_path / name, name=name).close()
    assert diff(capsys, tmp_path / "a" / "a", tmp_path / "b" / "b") == (0, "")


def test_what_differs_and_nothing_else(tmp_path, capsys):
    learned(tmp_path, name="a").close()
    config.bind({"Agent.tau": 0.5, "MambaTrajEncoder.d_state": 3})
    learned(tmp_path, tiny.cartpole, name="b", learning_rate=0.25, train_timesteps_per_epoch=40).close()
    code, out = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert sorted(out.splitlines()) == [
        "amago.agent.Agent.tau: 0.003 -> 0.5",
        "learning_rate: 0.001 -> 0.25",
        "make_train_env: tiny.tmaze -> tiny.cartpole",
        "make_val_env: tiny.tmaze -> tiny.cartpole",
        "train_timesteps_per_epoch: 12 -> 40",
    ]


def test_parts_that_one_of_them_lacks(tmp_path, capsys):
    learned(tmp_path, name="a").close()
    learned(tmp_path, name="b", traj="gru").close()
    path = tmp_path / "b" / "settings.json"
    record = json.loads(path.read_text())
    record["starts"][-1]["versions"] |= {"torch": "1.0", "only-there": "3"}
    path.write_text(json.dumps(record))
    code, out = diff(capsys, tmp_path / "a", tmp_path / "b")
    lines = out.splitlines()
    assert code == 1
    assert "traj_encoder_type: amago.nets.traj_encoders.FFTrajEncoder -> amago.nets.traj_encoders.GRUTrajEncoder" in lines
    assert "amago.nets.traj_encoders.FFTrajEncoder.d_model: 16 -> (none)" in lines
    assert "amago.nets.traj_encoders.GRUTrajEncoder.d_hidden: (none) -> 16" in lines
    assert "versions.only-there: (none) -> 3" in lines
    assert [line for line in lines if line.startswith("versions.torch: ") and line.endswith(" -> 1.0")]


@pytest.mark.parametrize("content", [None, "{"])
def test_no_record_to_compare(tmp_path, capsys, content):
    learned(tmp_path, name="a").close()
    (tmp_path / "b").mkdir()
    if content is not None:
        (tmp_path / "b" / "settings.json").write_text(content)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "settings.json" in captured.err
    assert str(tmp_path / "b") in captured.err
