"""Whose a run's directory and buffer are: starting over another run, two processes at once, sharing a buffer."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
import tiny
from messages import names, refused
from tiny import EPISODE, experiment, learned, started

from amago.cli_utils import switch_async_mode
from amago.loading import DiskTrajDataset, MixtureOfDatasets
from amago.run.rundir import RunExistsError, RunInUseError


def contents(directory):
    """{file: bytes} below a directory, without locks."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file() and p.name != ".lock"}


def broken():
    raise OSError("no display")


def fifo(root, name="run"):
    return sorted(p.name for p in (root / name / "buffer" / "fifo").iterdir() if not p.name.startswith("."))


@pytest.mark.parametrize("fields", [{"ckpt_interval": 1}, {"ckpt_interval": None}], ids=["checkpoints", "metrics alone"])
def test_a_second_run_of_a_name_is_refused_with_the_ways_out(tmp_path, fields):
    learned(tmp_path, **fields).close()
    before = contents(tmp_path)
    e = started(tmp_path)
    with refused(RunExistsError, "'run'", "resume='auto'", "run_name", "overwrite=True", "--overwrite"):
        e.learn()
    e.close()
    with pytest.raises(Exception, match="no display"):
        started(tmp_path, broken, overwrite=True)
    assert contents(tmp_path) == before, "nothing is lost"
    for way in ({"resume": "auto"}, {"name": "other"}, {"overwrite": True}):
        started(tmp_path, **way).close()


def test_start_says_what_learn_will_refuse_and_how_to_go_on(tmp_path, capsys):
    learned(tmp_path, ckpt_interval=1).close()
    e = started(tmp_path, verbose=True)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "will be refused" in line]
    assert names(line, "learn()", "load_checkpoint(N)", "resume='auto'", "run_name", "overwrite=True")
    e.load_checkpoint(0)
    e.epochs = 2
    e.learn()
    assert e.epoch == 2, "load_checkpoint() continues the run, as scripts of the original system do"


def test_overwriting_deletes_the_run_and_what_it_collected(tmp_path, capsys):
    e = learned(tmp_path, ckpt_interval=1, always_save_latest=True, log_to_tensorboard=True, epochs=2)
    protected = e.run_dir / "buffer" / "protected"
    (e.run_dir / "notes.txt").write_text("mine")
    e.close()
    protected.mkdir(exist_ok=True)
    source = e.run_dir / "buffer" / "fifo" / fifo(tmp_path)[0]
    (protected / source.name).write_bytes(source.read_bytes())
    kept = contents(protected)
    old = fifo(tmp_path)
    e = started(tmp_path, overwrite=True, verbose=True)
    assert "deleted the earlier run" in capsys.readouterr().out
    assert e.epoch == 0
    assert not fifo(tmp_path)
    assert contents(protected) == kept
    assert (e.run_dir / "notes.txt").read_text() == "mine"
    assert not list((e.ckpt_dir / "training_states").iterdir())
    assert not (e.run_dir / "tensorboard").exists()
    assert (e.run_dir / "metrics.jsonl").read_bytes() == b""
    e.learn()
    assert fifo(tmp_path)
    assert fifo(tmp_path) != old
    assert {r["epoch"] for r in tiny.rows(e.run_dir)} == {0}
    assert len(json.loads((e.run_dir / "settings.json").read_text())["starts"]) == 1
    e.close()
    started(tmp_path, resume="auto").close()  # the buffer is that of the new run


def theirs(root):
    return DiskTrajDataset(root, "first")


def test_a_buffer_of_another_run_is_refused_unless_it_is_to_be_shared(tmp_path):
    learned(tmp_path, name="first").close()
    before, old = contents(tmp_path), fifo(tmp_path, "first")
    with refused(RunExistsError, "'first'", "'second'", "dset_name", "share_buffer=True", "protected"):
        started(tmp_path, name="second", dataset=theirs(tmp_path))
    assert contents(tmp_path) == before
    e = learned(tmp_path, name="second", dataset=theirs(tmp_path), share_buffer=True)
    assert len(fifo(tmp_path, "first")) == 2  # a file of each
    assert e.learner.grad_steps == 2
    e.close()
    assert json.loads((tmp_path / "first" / "buffer" / "owner.json").read_text())["run"] == "first"
    learned(tmp_path, name="second", dataset=theirs(tmp_path), share_buffer=True, overwrite=True).close()
    assert set(old) <= set(fifo(tmp_path, "first")), "overwriting never deletes a shared buffer"
    with refused(RunExistsError, "share_buffer=True"):
        started(tmp_path, name="second", dataset=theirs(tmp_path), overwrite=True)
    started(tmp_path, name="first", resume="auto").close()  # the first still owns it


def test_reading_another_buffer_in_a_mixture_asks_nothing(tmp_path):
    learned(tmp_path, name="first").close()
    data = MixtureOfDatasets([DiskTrajDataset(tmp_path, "first"), DiskTrajDataset(tmp_path, "second")], [1, 1], collect_into=1)
    e = learned(tmp_path, name="second", dataset=data)
    assert e.learner.grad_steps == 2
    e.close()
    data = MixtureOfDatasets([DiskTrajDataset(tmp_path, "first"), DiskTrajDataset(tmp_path, "x")], [1, 1], collect_into=0)
    with refused(RunExistsError, "'first'", "'third'"):
        started(tmp_path, name="third", dataset=data)


def test_a_buffer_that_only_has_protected_data_is_free(tmp_path):
    learned(tmp_path, name="first").close()
    buffer = tmp_path / "first" / "buffer"
    (buffer / "protected").rmdir()
    (buffer / "fifo").rename(buffer / "protected")
    e = learned(tmp_path, name="second", dataset=DiskTrajDataset(tmp_path, "first"))
    assert e.learner.grad_steps > 0


LEARNER = """
import sys, time
import tiny
e = tiny.started(sys.argv[1], **eval(sys.argv[2]))
print("started", flush=True)
time.sleep(60)
"""


@pytest.fixture
def other_learner(tmp_path):
    """Starts a process that learns, and waits until it has started."""
    running = []

    def start(**fields):
        command = [sys.executable, "-c", LEARNER, str(tmp_path), repr(fields)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=tiny.environment())
        running.append(process)
        assert process.stdout.readline() == "started\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_run_that_is_written_is_refused_until_its_writer_is_dead(tmp_path, other_learner):
    process = other_learner()
    for resume in ("auto", "never"):
        with refused(RunInUseError, "'run'", f"pid {process.pid}", socket.gethostname(), "since"):
            started(tmp_path, resume=resume)
    collector = switch_async_mode(experiment(tmp_path, seed=5), "collect")
    collector.epochs = 1
    collector.start()  # needs no lock
    collector.learn()
    collector.close()
    process.send_signal(signal.SIGKILL)
    process.wait()
    started(tmp_path, resume="auto").close()


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_that_outlive_a_learner_do_not_keep_its_lock(tmp_path, other_learner, context):
    process = other_learner(env_mode="async", env_workers=2, async_env_mp_context=context)
    process.send_signal(signal.SIGKILL)
    process.wait()
    started(tmp_path, resume="auto").close()  # at once, before the workers have noticed


def test_two_experiments_of_one_process(tmp_path):
    first = started(tmp_path)
    with refused(RunInUseError, "this process", "close()", os.getpid()):
        started(tmp_path, resume="auto")
    first.close()
    started(tmp_path, resume="auto").close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the files that it had open
def test_an_experiment_that_nobody_holds_any_more_keeps_no_lock(tmp_path):
    """In a notebook, whose cell is run again after an error."""
    e = started(tmp_path)
    tiny.opened.remove(e)
    del e
    started(tmp_path, resume="auto").close()


def test_disks_without_locks_are_mentioned(tmp_path, monkeypatch, caplog):
    def no_locks(fd, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    learned(tmp_path).close()
    assert "cannot be locked (" in caplog.text
    assert "No locks available" in caplog.text


def test_evaluation_alone_needs_no_lock(tmp_path):
    learned(tmp_path, always_save_latest=True)
    e = started(tmp_path, train_timesteps_per_epoch=0, train_batches_per_epoch=0, val_interval=1)
    e.read_latest_policy()
    assert e.evaluate_test(tiny.tmaze, timesteps=EPISODE + 1)
