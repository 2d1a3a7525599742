"""After a kill, a signal, damage or a full disk, a run resumes exactly from its newest complete checkpoint, or says why it cannot."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from fault_helpers import Threads, alive, count, damage, environment, kill_group, report, rng, say, small_disk
from messages import refused

from amago.run import checkpoint
from amago.run.rundir import RunCheckpoints
from amago.store import TrajectoryStore

SCRIPTS = Path(__file__).parent / "resume_scripts"
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 138}
PHASES = ("evaluate", "collect", "train", "save")
READY = 250.0  # seconds after which a test gives up


class Life:
    """A process, with a group of its own, that runs a function of `lives`; ``before``: words before its command."""

    def __init__(self, output: Path, before: Sequence[str], function: str, arguments: dict):
        self.output = output
        command = [*before, sys.executable, str(SCRIPTS / "lives.py"), function, json.dumps(arguments)]
        with output.open("ab") as said:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment(), start_new_session=True
            )
        self.pid = self.process.pid

    def wait(self):
        """The exit code; None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(READY)

    def kill(self):
        """Kill the process group, workers included."""
        kill_group(self.pid)
        return self.wait()

    def wait_for(self, condition):
        """Wait for a condition, while the process lives."""
        end = time.monotonic() + READY
        while not condition():
            assert time.monotonic() < end, f"{condition} did not become true: {self.output.read_text()}"
            assert alive(self.pid), self.output.read_text()
            time.sleep(0.001)

    def until(self, path):
        """What the process has written to a file."""
        self.wait_for(path.exists)
        return json.loads(path.read_text())


@pytest.fixture
def begin(tmp_path_factory):
    """Starts functions of `lives`, and kills their processes after the test."""
    directory, begun = tmp_path_factory.mktemp("lives"), []

    def start(function, before=(), **arguments):
        begun.append(Life(directory / f"output-{len(begun)}", before, function, arguments))
        return begun[-1]

    yield start
    for life in begun:
        life.kill()


def states_of(root):
    return root / "run" / "ckpts" / "training_states"


def newest(root):
    """(directory, state) of the newest complete checkpoint; None if there is none."""
    while True:
        found = checkpoint.newest_complete(states_of(root))
        if found is None:
            return None
        number = checkpoint.identity(found)
        try:
            return found, checkpoint.load_training_state(found)[2]
        except checkpoint.CheckpointError:
            if found.is_dir() and checkpoint.identity(found) == number:
                raise  # otherwise a newer state has replaced it while it was read


def standing(state):
    """The part of a training state that `lives.standing` reports."""
    actors = state["ranks"][0]["pools"]["train"]["actors"]
    return {
        **{k: state[k] for k in ("epoch", "collected", "trained", "seed", "frames_by_env", "updater", "next_batch")},
        "schedule": state["schedule"]["last_epoch"],
        "explored": {k: v["exploration"]["global_step"] for k, v in actors.items()},
    }


def assert_went_on(reported, state):
    """Check that a process has resumed with all schedules and counters of the newest checkpoint."""
    expected = standing(state)
    assert {k: reported[k] for k in expected} == expected


def readable(root):
    """{(file, position): transitions} of all trajectories in the buffer, which are read."""
    store = TrajectoryStore(root / "run" / "buffer", edit=False)
    store.refresh()
    assert store.info()["quarantined"] == 0
    found = Counter(len(store.read(i)) for i in range(len(store)))
    files = set(os.listdir(root / "run" / "buffer" / "fifo"))
    store.close()
    return found, {f for f in files if not f.startswith(".")}


def never_older(root):
    """Work of a thread, for ever: there is a complete checkpoint, and it is not older than the last time."""
    last = 0

    def look(_):
        nonlocal last
        time.sleep(0.002)
        found = checkpoint.newest_complete(states_of(root))
        assert found is not None, "there was none"
        number = checkpoint.identity(found)[1]
        if number != 1:  # otherwise it has just been replaced
            assert number >= last
            last = number
        return True

    return look


def wait_for_saves(life, root, n):
    """Wait until so many more checkpoints are saved."""
    first = checkpoint.identity(newest(root)[0])[1]
    life.wait_for(lambda: checkpoint.identity(newest(root)[0])[1] >= first + n)


def test_killed_at_any_moment_it_goes_on_from_the_newest_complete_checkpoint(tmp_path, begin):
    random, wanted = rng("killed"), count(3, 50)
    life = begin("checkpoints_all_the_time", root=str(tmp_path), report=str(tmp_path / "first"), context="fork")
    life.until(tmp_path / "first")
    life.wait_for(lambda: newest(tmp_path) is not None)
    with Threads(never_older(tmp_path), 1) as watcher:
        epochs, trajectories = 0, 0
        for i in range(wanted):
            wait_for_saves(life, tmp_path, int(random.integers(4)))
            time.sleep(random.uniform(0.0, 0.2))
            if random.random() < 0.4:  # while it saves after a signal, and replaces the state before
                kill_group(life.pid, signal.SIGTERM)
                time.sleep(random.uniform(0.0, 0.1))
            life.kill()
            if random.random() < 0.3:  # also while it starts
                early = tmp_path / f"early-{i}"
                second = begin("checkpoints_all_the_time", root=str(tmp_path), report=str(early), context="fork")
                time.sleep(random.uniform(0.0, 0.5))
                second.kill()
            state = newest(tmp_path)[1]
            lengths, files = readable(tmp_path)
            context = "fork" if i % 5 else "forkserver"
            said = tmp_path / f"life-{i}"
            life = begin("checkpoints_all_the_time", root=str(tmp_path), report=str(said), context=context)
            reported = life.until(said)
            assert_went_on(reported, state)
            assert state["epoch"] >= epochs, "the number of epochs fell"
            assert sum(lengths.values()) >= trajectories
            assert reported["trajectories"] >= sum(lengths.values()), "a trajectory that could be read is lost"
            assert files <= readable(tmp_path)[1]
            epochs, trajectories = state["epoch"], sum(lengths.values())
        life.kill()
    say(f"{watcher.done[0]} looks at the checkpoints, each found a complete one; {epochs} epochs, {trajectories} trajectories")
    report("kills survived, from the newest complete checkpoint", wanted)


def test_killed_at_every_line_of_a_save_a_complete_one_is_there(tmp_path, begin):
    stride = count(8, 1)  # the short version takes lines chosen by the seed
    first = int(rng("every line").integers(stride))
    life = begin("killed_at_every_line", root=str(tmp_path), report=str(tmp_path / "report"), first=first, stride=stride)
    found = life.until(tmp_path / "report")
    assert life.wait() == 0, life.output.read_text()
    assert found["left"] == [name for name in found["left"] if name.startswith("run_epoch_")], "nothing half done is left"
    assert len(found["left"]) == 1
    assert found["lines"] > 200 // stride
    say("; ".join(found["problems"][:3]) or "each end left the state before or the one after")
    report("lines of a save at which a kill leaves a complete state", found["lines"] - len(found["problems"]), found["lines"])


EXACT = [
    {"dloader_workers": 2},
    {"dloader_workers": 0, "batches_per_update": 3},
    {"dloader_workers": 0, "traj": "gru"},
    {"dloader_workers": 0, "traj": "lstm"},
]


@pytest.mark.parametrize("case", range(count(1, len(EXACT))))
def test_two_hundred_updates_equal_a_hundred_a_kill_and_a_hundred_more(tmp_path, begin, case):
    fields, updates = {"traj": "transformer"} | EXACT[case], 200
    assert begin("fill", root=str(tmp_path), name="run").wait() == 0
    shutil.copytree(tmp_path, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    roots = tmp_path / "whole", tmp_path / "parts"
    arguments = {"name": "run", "updates": updates, **fields}
    train = lambda root: begin("trains_on_what_is_there", root=str(root), samples=str(root / "samples"), **arguments)  # noqa: E731
    whole = train(roots[0])
    assert whole.wait() == 0, whole.output.read_text()
    (roots[1] / "hold").write_text(str(int(rng("bit by bit").integers(updates // 2))))
    life = train(roots[1])
    life.until(roots[1] / "holds")
    assert life.kill() == -signal.SIGKILL
    (roots[1] / "hold").unlink()
    assert newest(roots[1])[1]["next_batch"] == updates // 2
    again = train(roots[1])
    assert again.wait() == 0, again.output.read_text()
    one, two = (checkpoint.load_training_state(states_of(r) / "run_epoch_1") for r in roots)
    assert one[2]["updater"]["grad_steps"] == updates // fields.get("batches_per_update", 1)
    assert all(one[0][k].equal(two[0][k]) for k in one[0].keys() | two[0].keys()), "parameters differ"
    assert same(one[1], two[1]), "the optimizer differs"
    differing = [k for k in one[2] if one[2][k] != two[2][k] and k not in ("wall_time", "dataset", "settings")]
    assert not differing, "random streams, counters and schedules differ"
    assert one[2]["dataset"]["store"]["order"] == two[2]["dataset"]["store"]["order"]
    drawn = [samples(r / "samples") for r in roots]
    assert drawn[0].keys() == drawn[1].keys() == set(range(updates))
    report("batches of the same sampled indices", sum(drawn[0][n] == drawn[1][n] for n in range(updates)), updates)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.equal(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def samples(path):
    """{batch: its samples}. A batch drawn both before and after the kill must have the same samples."""
    found: dict[int, str] = {}
    for line in path.read_text().splitlines():
        number, _, drawn = line.partition(" ")
        assert found.setdefault(int(number), drawn) == drawn, f"batch {number} was drawn in two ways"
        assert len(drawn.split()) == 4
    return found


KINDS_OF_DAMAGE = ["flip", "cut", "empty", "delete", "foreign"]


def test_a_damaged_checkpoint_is_noticed_wherever_it_is_damaged(tmp_path, caplog):
    random, wanted = rng("damage"), count(60, 1000)
    names = ("model.safetensors", "optimizer.pt", "state.json", "manifest.json")
    for i in range(wanted):
        run = RunCheckpoints(tmp_path / str(i), "run")
        run.prepare()
        for epoch in (7, 8):
            tensors = {"m": torch.full((20,), float(epoch))}
            checkpoint.save_training_state(run.states / f"run_epoch_{epoch}", {"w": torch.ones(20)}, tensors, {"epoch": epoch})
        newer, older = (run.states / f"run_epoch_{n}" for n in (8, 7))
        first = random.choice(names)
        how = damage(newer / first, random.choice(KINDS_OF_DAMAGE), random)
        caplog.clear()
        assert run.choose("auto") == older, how
        assert len([r for r in caplog.records if f"{newer.name}" in r.getMessage()]) == 1, how
        assert checkpoint.load_training_state(older)[2] == {"epoch": 7}
        second = random.choice(names)
        how += f", {damage(older / second, random.choice(KINDS_OF_DAMAGE), random)}"
        with refused(checkpoint.CheckpointError, "checkpoint") as err:
            run.choose("auto")
        blamed = [str(d / name) if name != "manifest.json" else str(d) for d, name in ((newer, first), (older, second))]
        assert all(path in str(err.value) for path in blamed), how
        assert sorted(p.name for p in run.states.iterdir()) == ["run_epoch_7", "run_epoch_8"], "and nothing is deleted"
        shutil.rmtree(tmp_path / str(i))
    report("damaged checkpoints passed over with a warning, then refused by name", wanted)


def test_signals_save_and_end_a_run_wherever_they_hit(tmp_path, begin):
    random, wanted, longest, hit = rng("signals"), count(4, 48), 0.0, Counter()
    signals = list(SIGNALS)
    for i in range(wanted):
        said = tmp_path / f"life-{i}"
        (tmp_path / "run" / "phase").unlink(missing_ok=True)
        before = newest(tmp_path)
        life = begin("stops_when_asked", root=str(tmp_path), report=str(said), env_mode=("async", "sync")[i % 2])
        reported = life.until(said)
        if before is not None:
            assert_went_on(reported, before[1])
        phase, wanted_phase = tmp_path / "run" / "phase", json.dumps(PHASES[i % len(PHASES)])
        life.wait_for(lambda: phase.exists() and phase.read_text() == wanted_phase)  # noqa: B023
        time.sleep(random.uniform(0.0, 0.1))
        first, second = signals[i % 3], signals[int(random.integers(3))]
        hit[json.loads(phase.read_text())] += 1
        began = time.monotonic()
        (os.killpg if random.random() < 0.7 else os.kill)(life.pid, first)  # terminals and schedulers signal the whole group
        for _ in range(random.integers(4)):
            time.sleep(random.uniform(0.0, 0.4))
            kill_group(life.pid, second)
        code = life.wait()
        longest = max(longest, time.monotonic() - began)
        text = life.output.read_text()
        assert code == SIGNALS[first], (code, first, text)
        assert "saved; continue with resume='auto'" in text
        assert "Traceback" not in text, text
        state = newest(tmp_path)[1]
        assert not [p for p in states_of(tmp_path).iterdir() if p.name.startswith(".")]
        if before is not None:
            order = [(s["epoch"], s["collected"], s["trained"]) for s in (before[1], state)]
            assert order[0] <= order[1]
    say(f"longest {longest:.1f} s; " + ", ".join(f"{n} while in {phase}" for phase, n in sorted(hit.items())))
    report("signals saved a complete checkpoint and ended with the documented code", wanted)


@pytest.mark.parametrize("how", ["tmpfs", "file size"])
def test_a_full_disk_costs_no_checkpoint_and_does_not_end_the_run(tmp_path, begin, how):
    root = tmp_path / "root"
    root.mkdir()
    before = small_disk(root, "3m") if how == "tmpfs" else []
    if before is None:
        pytest.skip("this machine does not let a test mount a small file system")
    life = begin("outlasts_a_full_disk", before, root=str(root), report=str(tmp_path / "report"), how=how)
    found = life.until(tmp_path / "report")
    assert life.wait() == 0, life.output.read_text()
    before, during, after = found["before"], found["during"], found["after"]
    assert before["states"] == during["states"] == [0, 1], "earlier ones are intact, and none is half there"
    assert (during["grad_steps"], during["env_steps"]) == (2 * before["grad_steps"], 2 * before["env_steps"])
    assert (during["temporary"], during["newest"]) == ([], "run_epoch_1")
    assert during["published"] == before["published"] == 2
    failed = [s for s in found["said"] if "could not be saved" in s]
    assert len(failed) == 2, "one warning for each epoch"
    assert all("left" in s and "Earlier checkpoints are intact" in s for s in failed)
    assert after["states"] == [0, 1, 4, 5], "with space, saving goes on"
    assert after["newest"] == "run_epoch_5"
    assert after["version"] == after["published"] > during["published"]
    assert after["trajectories"] == after["env_steps"] // 6, "the buffer has lost nothing"
    assert [epoch for section, epoch in found["rows"] if section == "train"] == list(range(6)), "nor has the log"
    report("full disks outlasted", 1)


def test_the_latest_policy_is_never_torn_and_never_older(tmp_path, begin):
    wanted, done, last, versions = count(100, 10_000), 0, 0, set()
    life = begin("publishes", root=str(tmp_path / "run"), report=str(tmp_path / "report"))
    life.until(tmp_path / "report")
    run = RunCheckpoints(tmp_path / "run", "run")
    while done < wanted and alive(life.pid):
        weights = run.read_latest()
        if weights is None:  # nothing newer yet
            continue
        assert sorted(weights) == ["w0", "w1", "w2", "w3"]
        values = {float(v) for w in weights.values() for v in np.unique(w.numpy())}
        assert values == {float(run.version)}, "half of one and half of another"
        assert run.version > last
        last = run.version
        versions.add(last)
        done += 1
    assert alive(life.pid), f"all that was read was published meanwhile: {life.output.read_text()}"
    life.kill()
    assert len(versions) > 10
    say(f"{len(versions)} versions met, of {last} published")
    report("reads of the latest policy, whole and never older than the one before", done, wanted)
