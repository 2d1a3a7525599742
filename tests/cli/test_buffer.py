"""`amago buffer`: import, export, info, verify, head."""

import os
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import recordings as rec
from messages import names
from run_inside import refusal
from terminal import Terminal

from amago import ExtraField
from amago.cli import main
from amago.data.trajectory import StoredTraj
from amago.loading import ArrayDataset, DatasetSettings, DiskTrajDataset, MinariDataset
from amago.loading.offline.base import Converter, InMemory, copy_to
from amago.store import TrajectoryStore, TrajectoryWriter

pytest.importorskip("h5py")
pytest.importorskip("minari")


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def buffer(*argv, quiet=True):
    return main(["buffer", *argv, *(["--quiet"] if quiet and argv[0] in ("import", "export", "verify") else [])])


def refused(capsys, *argv):
    """The message of a command that must not work, without its usage."""
    said = refusal(capsys, "buffer", *argv)
    return said.partition("error: ")[2] if said.startswith("usage: ") else said


def reports(out, *parts):
    """Whether one line of a command's output names all of these."""
    return any(names(line, *parts) for line in out.splitlines())


def lengths(run="run"):
    dataset = DiskTrajDataset(".", run)
    dataset.configure(DatasetSettings(4, has_edit_rights=False))
    return sorted(dataset.store.lengths.tolist())


def make_source(kind):
    episodes = rec.record()
    if kind == "minari":
        rec.write_minari("test/counting-v0", episodes)
        return "test/counting-v0"
    if kind == "minari path":
        rec.write_minari("test/counting-v0", episodes)
        return "minari/test/counting-v0"
    if kind == "d4rl":
        return str(rec.write_hdf5("d.hdf5", episodes))
    np.savez("a.npz", **rec.rows(episodes))
    return "a.npz"


COMPLETE, WITHOUT_LAST = [1, 3, 4, 5, 6, 6, 6], [1, 3, 3, 5, 5, 5, 6]


@pytest.mark.parametrize(
    ("kind", "want"), [("minari", COMPLETE), ("minari path", COMPLETE), ("d4rl", WITHOUT_LAST), ("npz", WITHOUT_LAST)]
)
@pytest.mark.parametrize("save_as", ["segments", "npz-compressed"])
def test_import_of_every_kind(capsys, kind, want, save_as):
    assert buffer("import", make_source(kind), "run", "--save-as", save_as) == 0
    out = capsys.readouterr().out
    assert f"imported 7 trajectories, {sum(want)} steps, into run/buffer/protected" in out
    assert "steps/s)" in out
    assert lengths() == want
    assert not os.listdir("run/buffer/fifo")
    files = os.listdir("run/buffer/protected")
    assert len(files) == (1 if save_as == "segments" else 7)
    assert all("import-" in name for name in files)


def test_progress_is_shown_in_a_terminal(capsys, monkeypatch):
    assert buffer("import", make_source("d4rl"), "run", quiet=False) == 0
    assert capsys.readouterr().err == ""

    monkeypatch.setattr(sys, "stderr", Terminal())
    assert buffer("import", "d.hdf5", "again", quiet=False) == 0
    err = sys.stderr.getvalue()
    assert "import: 100%" in err
    assert "28.0/28.0" in err


def test_a_second_import_is_refused_or_replaces_the_first(capsys):
    source = make_source("d4rl")
    assert buffer("import", source, "run", "--limit", "2") == 0
    assert lengths() == [3, 5]
    assert names(refused(capsys, "import", source, "run"), "run/buffer/protected", 1, "import-d-")
    assert buffer("import", source, "run", "--replace") == 0
    assert lengths() == WITHOUT_LAST
    rec.write_hdf5("e.hdf5", rec.record(1))
    assert buffer("import", "e.hdf5", "run") == 0
    assert len(lengths()) == 14


def test_what_is_imported_is_checked_against_what_is_there(capsys):
    assert buffer("import", make_source("d4rl"), "run") == 0
    rows = rec.rows(rec.record())
    np.savez("wide.npz", **(rows | {"observations": np.ones((31, 3), np.float32)}))
    message = refused(capsys, "import", "wide.npz", "run")
    assert names(message, {"observation": (3,)}, "run/buffer", {"observation": (2,)})
    assert "wide.npz" in message
    assert "ArrayDataset" not in message
    np.savez("b.npz", **rows)
    message = refused(capsys, "import", "b.npz", "run", "--action-space", "box:-2,2")
    assert names(message, "Box(-2.0, 2.0, (1,), float32)", str(rec.ACT))
    assert lengths() == WITHOUT_LAST


def test_spaces_of_bare_arrays(capsys):
    rows = rec.rows(rec.record())
    np.savez("d.npz", **(rows | {"actions": np.arange(31) % 3}))
    message = refused(capsys, "import", "d.npz", "r")
    assert names(message, "d.npz", "int64", (31,), "--action-space", "discrete:N", "tuple(")
    assert buffer("import", "d.npz", "one", "--action-space", "discrete:3") == 0
    np.savez("c.npz", **(rows | {"actions": np.arange(31) % 2, "observations": np.ones((31, 4))}))
    assert buffer("import", "c.npz", "two", "--env", "CartPole-v1", "--env-name", "poles") == 0
    np.savez("m.npz", **(rows | {"actions": np.ones((31, 2), np.int8)}))
    assert buffer("import", "m.npz", "three", "--action-space", "bits") == 0
    capsys.readouterr()
    for run, space in (("one", "Discrete(3)"), ("two", "Discrete(2)"), ("three", "MultiBinary(2)")):
        assert buffer("info", run) == 0
        assert f"actions       {space}" in capsys.readouterr().out


MOVE_TURN_GRIP = "dict(move=discrete:4; turn=box:-30,30; grip=bits:2)"


def recorded_by_a_robot():
    """Rows in which the columns are move, turn and two bits of grip, and what the buffer is to hold: grip, move, turn."""
    n, rows = 31, rec.rows(rec.record(), next_observations=True)
    move, turn, grip = np.arange(n) % 4, np.linspace(-30, 30, n), np.stack([np.arange(n) % 2, np.arange(n) // 2 % 2], axis=1)
    stored = np.column_stack([grip, move, turn / 30])
    return rows, {"move": move, "turn": turn, "grip": grip}, stored


def stored_actions(run):
    dataset = DiskTrajDataset(".", run)
    dataset.configure(DatasetSettings(4, has_edit_rights=False))
    view = dataset.store.view()
    return np.concatenate([view.read(i).actions for i in range(len(view))]), view.action_spec(0).space


def write_robot(kind):
    rows, parts, _ = recorded_by_a_robot()
    if kind == "npz by name":
        del rows["actions"]
        np.savez("robot.npz", **rows, **{f"actions/{name}": part for name, part in parts.items()})
        return "robot.npz"
    rows["actions"] = np.column_stack(list(parts.values()))
    if kind == "npz":
        np.savez("robot.npz", **rows)
        return "robot.npz"
    import h5py

    with h5py.File("robot.hdf5", "w") as file:
        for name, theirs in (("terminations", "terminals"), ("truncations", "timeouts")):
            rows[theirs] = rows.pop(name)
        for name, values in rows.items():
            file[name] = values
    return "robot.hdf5"


@pytest.mark.parametrize("kind", ["npz", "npz by name", "d4rl"])
def test_actions_of_several_parts_arrive_as_they_were_recorded(capsys, kind):
    assert buffer("import", write_robot(kind), "run", "--action-space", MOVE_TURN_GRIP) == 0
    found, space = stored_actions("run")
    np.testing.assert_allclose(found, recorded_by_a_robot()[2], atol=1e-6)
    spaces = gym.spaces
    assert space == spaces.Dict({"move": spaces.Discrete(4), "turn": spaces.Box(-30, 30, (1,)), "grip": spaces.MultiBinary(2)})
    assert buffer("verify", "run") == 0


def test_actions_of_several_parts_that_do_not_fit_are_refused(capsys):
    source = write_robot("npz by name")
    message = refused(capsys, "import", source, "run")
    assert names(message, "robot.npz", "actions/grip, actions/move, actions/turn", "--action-space 'dict(")
    message = refused(capsys, "import", source, "run", "--action-space", "dict(move=discrete:4;turn=box:-1)")
    assert names(message, "--action-space", "'box:-1'", "'dict(move=discrete:4;turn=box:-1)'", "box:LOW,HIGH")
    message = refused(capsys, "import", write_robot("npz"), "run", "--action-space", "multidiscrete:4,4")
    assert names(message, "actions", "MultiDiscrete([4 4])")
    assert not os.path.exists("run/buffer/protected") or not os.listdir("run/buffer/protected")


WRONG = [
    ("import", ("SOURCE", "RUN")),
    ("import missing.hdf5 run", ("SOURCE", "missing.hdf5")),
    ("import a/b-v0 run", ("Minari", "'a/b-v0'")),
    ("import a.npz run --limit 0", ("--limit", 1, 0)),
    ("import a.npz run --max-episode-steps 3", ("--max-episode-steps", "a.npz")),
    ("import x-v0 run --env CartPole-v1", ("--env", "x-v0", "minari")),
    ("import a.npz run --action-space box:2,1", ("--action-space", "'box:2,1'", "box:LOW,HIGH")),
    ("import a.npz run --env Nothing-v0", ("Nothing-v0",)),
    ("info nowhere", ("RUN", "nowhere", "nowhere/buffer", "protected", "fifo")),
    ("export nowhere a-v0", ("RUN", "nowhere")),
    ("dance run", ("ACTION", "'dance'")),
]


def test_wrong_arguments_name_themselves(capsys):
    np.savez("a.npz", **rec.rows(rec.record()))
    for argv, named in WRONG:
        message = refused(capsys, *argv.split())
        assert names(message, *named), message
    assert not os.path.exists("nowhere")


def test_a_file_without_timeouts_asks_for_the_time_limit(capsys):
    rec.write_hdf5("d.hdf5", rec.record(), timeouts=False)
    assert "max_episode_steps" in refused(capsys, "import", "d.hdf5", "run")
    assert buffer("import", "d.hdf5", "run", "--max-episode-steps", "6") == 0
    assert lengths() == WITHOUT_LAST


def test_an_import_that_fails_or_is_stopped_leaves_what_was_there(capsys, monkeypatch):
    rows = rec.rows(rec.record())
    rows["rewards"][20] = np.nan
    np.savez("a.npz", **rows)
    assert names(refused(capsys, "import", "a.npz", "run"), "rewards", "step 4")
    assert buffer("import", make_source("d4rl"), "run", "--save-as", "npz") == 0
    before, source = os.listdir("run/buffer/protected"), make_source("minari")
    convert = Converter.convert

    def stop(self, where, *args):
        if "episode 5" in where:
            raise KeyboardInterrupt
        return convert(self, where, *args)

    monkeypatch.setattr(Converter, "convert", stop)
    assert buffer("import", source, "run", "--save-as", "npz") == 130
    assert "stopped" in capsys.readouterr().err
    assert os.listdir("run/buffer/protected") == before


def test_export_gives_back_what_was_imported(capsys):
    assert buffer("import", make_source("minari"), "run", "--env-name", "mine") == 0
    assert buffer("export", "run", "test/again-v0") == 0
    assert "exported 7 episodes as the Minari dataset test/again-v0" in capsys.readouterr().out
    import minari

    ours = minari.load_dataset("test/again-v0")
    for mine, theirs in zip(ours, minari.load_dataset("test/counting-v0"), strict=True):
        np.testing.assert_array_equal(mine.observations, theirs.observations)
        np.testing.assert_allclose(mine.actions, theirs.actions, atol=1e-7)
        np.testing.assert_array_equal(mine.rewards, theirs.rewards)
        np.testing.assert_array_equal(mine.terminations, theirs.terminations)
        cut = np.arange(len(theirs)) == (-1 if theirs.terminations[-1] else len(theirs) - 1)
        np.testing.assert_array_equal(mine.truncations, cut)
    assert ours.observation_space == rec.OBS
    assert ours.action_space == rec.ACT
    assert {traj.env_name for traj in MinariDataset("test/again-v0").source} == {"mine"}
    assert len(MinariDataset("test/again-v0")) == 7
    assert "test/again-v0" in refused(capsys, "export", "run", "test/again-v0")
    assert "no version" in refused(capsys, "export", "run", "no version")


def test_export_of_a_part_and_of_pieces(capsys):
    assert buffer("import", make_source("minari"), "run") == 0
    assert buffer("export", "run", "test/x-v0", "--limit", "3") == 0
    assert len(MinariDataset("test/x-v0")) == 3
    source = ArrayDataset(**rec.rows(rec.record(), next_observations=True), action_space=rec.ACT).source
    whole = source.read(1)
    pieces = InMemory([whole.slice(0, 2), whole.slice(2, 6)], source.obs_space, source.action_spec)
    copy_to(pieces, "pieces/buffer/fifo", "w")
    assert buffer("export", "pieces", "test/y-v0") == 0
    assert "1 of these episodes continue the one before" in capsys.readouterr().out


def test_info_and_head(capsys):
    buffer("import", make_source("minari"), "run", "--env-name", "counting")
    capsys.readouterr()
    returns = [float(e.rewards.sum()) for e in rec.record()]
    for place in ("run", "run/buffer"):
        assert buffer("info", place) == 0
        out = capsys.readouterr().out
        for line in (
            "trajectories  7 (7 in protected, 0 in fifo)", "steps         31 (4.4 a trajectory, 1 to 6)",
            "observation   'observation': (2,) float32", "actions       Box(-1.0, 1.0, (1,), float32)",
            f"counting: 7 trajectories, return {np.mean(returns):.4g} ({min(returns):.4g} to {max(returns):.4g}), 57% terminated",
        ):  # fmt: skip
            assert line in out
    assert buffer("head", "run", "-n", "2", "--steps", "1") == 0
    head, first, step, second, _ = capsys.readouterr().out.splitlines()
    assert head.split() == ["index", "steps", "return", "end", "environment", "file"]
    assert [first.split()[i] for i in (0, 1, 3, 4)] == ["0", "3", "terminated", "counting"]
    assert step.strip() == f"t=0: observation=[0. 0.]; action [0.] -> reward {rec.record()[0].rewards[0]:.4g}"
    assert second.split()[3] == "cut"


def test_an_empty_buffer(capsys):
    os.makedirs("run/buffer/fifo")
    assert [buffer(action, "run") for action in ("info", "verify", "head")] == [0, 0, 0]
    assert "(empty)" in capsys.readouterr().out
    assert "has no trajectories" in refused(capsys, "export", "run", "demo/x-v0")


def test_verify_names_what_is_wrong_and_changes_nothing(capsys):
    buffer("import", make_source("minari"), "run", "--save-as", "npz")
    assert buffer("verify", "run") == 0
    assert reports(capsys.readouterr().out, "7 files", "7 trajectories")
    directory = Path("run/buffer/protected")
    first, second = sorted(directory.iterdir())[:2]
    data = bytearray(first.read_bytes())
    data[data.index(rec.record()[0].rewards.tobytes())] ^= 1
    first.write_bytes(data)
    second.write_bytes(second.read_bytes()[:-10])
    (directory / "notes.txt").write_text("not ours")
    before = {p.name: p.read_bytes() for p in directory.iterdir()}
    assert buffer("verify", "run") == 1
    out = capsys.readouterr().out
    assert reports(out, f"protected/{first.name}")
    assert reports(out, f"protected/{second.name}")
    assert reports(out, "protected/notes.txt", ".safetensors", ".npz")
    assert reports(out, "8 files", "5 trajectories", "3 problems")
    assert {p.name: p.read_bytes() for p in directory.iterdir()} == before
    assert not os.path.exists("run/buffer/quarantine")


def test_verify_finds_what_no_checksum_can(capsys):
    obs = gym.spaces.Dict({"observation": rec.OBS})
    writer = TrajectoryWriter("run/buffer/fifo", writer="w", action_space=gym.spaces.Discrete(2), obs_space=obs, save_as="npz")

    def write(**changes):
        fields = {
            "obs": {"observation": np.zeros((3, 2), np.float32)}, "actions": np.zeros((2, 1), np.int64),
            "rews": np.zeros((2, 1), np.float32), "dones": np.zeros((2, 1), bool),
        }  # fmt: skip
        writer.write(StoredTraj(**(fields | changes)))

    write()
    write(rews=np.array([[0], [np.nan]], np.float32))
    write(dones=np.array([[True], [False]]))
    write(actions=np.array([[0], [2]]))
    writer.close()
    assert buffer("verify", "run") == 1
    out = capsys.readouterr().out
    assert reports(out, "trajectory 0", "rewards", "finite", "step 1")
    assert reports(out, "trajectory 0", "terminates", "step 0")
    assert reports(out, "trajectory 0", "action[1, 0]", 2)
    assert reports(out, "actions Discrete(2)")
    assert reports(out, "4 files", "4 trajectories", "3 problems")


def test_help_has_an_example_and_says_what_arguments_mean(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for action in ("import", "export", "info", "verify", "head"):
        with pytest.raises(SystemExit) as stop:
            buffer(action, "--help", quiet=False)
        assert stop.value.code == 0
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= 80
        assert ("multidiscrete:N,N,.." in printed) == (action == "import")
        assert names(" ".join(printed.split()), f"Example: amago buffer {action}", "run directory")


def test_extra_fields_survive_export_and_import(capsys):
    fields = [
        ExtraField("cue", "1", (2,)),
        ExtraField("label", "T", dtype="int64"),
        ExtraField("state", "T+1", (1, 2), "float64"),
    ]
    space = gym.spaces.Dict({"observation": gym.spaces.Box(-9, 9, (1,), np.float32)})
    options = {"action_space": gym.spaces.Discrete(2), "obs_space": space, "extra_fields": fields}
    for run, bad in (("run", False), ("bad", True)):
        with TrajectoryWriter(f"{run}/buffer/fifo", writer="w", **options) as writer:
            for steps in (1, 4):
                t = np.arange(steps + 1)
                state = np.zeros((steps + 1, 1, 2)) + steps
                extras = {"cue": np.full((1, 2), steps, np.float32), "label": 10 * t[:-1], "state": state}
                extras["state"][-1, 0, 0] = np.nan if bad else 0.5
                obs, rews = {"observation": t[:, None].astype(np.float32)}, np.ones((steps, 1), np.float32)
                writer.write(StoredTraj(obs, np.zeros((steps, 1), np.int64), rews, rews < 0, extras=extras))
    assert buffer("info", "run") == 0
    assert "extra field   'state': (1, 2) float64, rows T+1" in capsys.readouterr().out
    assert buffer("verify", "run") == 0
    assert buffer("verify", "bad") == 1
    assert reports(capsys.readouterr().out, "extras['state']", "finite", "step 4")
    assert buffer("export", "run", "demo/extras-v0") == 0
    assert buffer("import", "demo/extras-v0", "again") == 0
    stores = []
    for root in ("run", "again"):
        stores.append(TrajectoryStore(f"{root}/buffer"))
        stores[-1].refresh()
    for i in range(2):
        a, b = (store.read(i) for store in stores)
        assert a.extras.keys() == b.extras.keys() == {"cue", "label", "state"}
        for name, value in a.extras.items():
            assert value.dtype == b.extras[name].dtype
            np.testing.assert_array_equal(value, b.extras[name])


def test_damaged_episodes_are_left_out_where_asked(capsys):
    rows = rec.rows(rec.record())
    rows["observations"] = rows["observations"].astype(np.float32)
    rows["observations"][0] = np.nan
    np.savez("nan.npz", **rows)
    assert "skip_damaged" in refused(capsys, "import", "nan.npz", "run")
    assert buffer("import", "nan.npz", "run", "--skip-damaged") == 0
    assert lengths() == [1, 3, 5, 5, 5, 6]
    assert "skipped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"terminations": np.array(["False"] * 31)}, ("terminations", "False", "0 or 1")),
        ({"truncations": np.full(31, np.nan)}, ("truncations", "nan", "row 0")),
        ({"rewards": np.array(["1"] * 31)}, ("rewards", "<U1", "real numbers")),
        ({"next_observations": np.zeros((31, 3))}, ("next_observations", (31, 3), (31, 2))),
        ({k: v[:0] for k, v in rec.rows(rec.record()).items()}, ("no trajectory",)),
    ],
)
@pytest.mark.parametrize("source", ["a.npz", "files"])
def test_arrays_without_a_meaning_are_refused(capsys, source, changed, said):
    os.mkdir("files")
    np.savez("a.npz" if source == "a.npz" else "files/a.npz", **(rec.rows(rec.record()) | changed))
    assert names(refused(capsys, "import", source, "run"), source, *said)
    assert not os.path.exists("run/buffer/protected")


@pytest.mark.parametrize("kind", ["minari", "d4rl", "npz", "parquet"])
def test_damaged_files_of_every_kind_are_named(capsys, kind):
    source = make_source("npz" if kind == "parquet" else kind)
    if kind == "parquet":
        pytest.importorskip("pyarrow")
        assert buffer("import", source, "first") == buffer("export", "first", "pq", "--to", "parquet") == 0
        source = "pq"
    places = {"minari": "minari/test/counting-v0/data/main_data.hdf5", "parquet": "pq/data/train-00000.parquet"}
    file = Path(places.get(kind, source))
    whole = file.read_bytes()
    for end in range(0, len(whole), len(whole) // 25):
        file.write_bytes(whole[:end])
        assert source in refused(capsys, "import", source, "run")
    Path("letter.npz").write_text("To whom it may concern")
    assert "letter.npz" in refused(capsys, "import", "letter.npz", "run")
