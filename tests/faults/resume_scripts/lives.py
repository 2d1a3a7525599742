"""The processes that `test_resume_faults` kills, stops or deprives of disk space."""

import json
import logging
import os
import resource
import sys
import threading
import time
from pathlib import Path

import gymnasium as gym
import tiny
import torch
import tqdm
from tiny import EPISODE

import amago
from amago.loading import DiskTrajDataset, SequenceLoader
from amago.loading import disk as disk_module
from amago.loading.loader import BatchBuffers
from amago.run import checkpoint
from amago.run.checkpoint import load_weight_file

INF = float("inf")
TINY = {
    "epochs": 10**6, "ckpt_interval": 1, "keep_training_states": 3, "always_save_latest": True, "save_trajs_as": "segments",
    "train_timesteps_per_epoch": EPISODE, "train_batches_per_epoch": 1, "resume": "auto",
}  # fmt: skip


def write_json(path, value):
    """Write a file atomically."""
    Path(f"{path}.tmp").write_text(json.dumps(value))
    os.replace(f"{path}.tmp", path)


def standing(e):
    """The progress of an experiment, named as in a training state."""
    return {
        "epoch": e.epoch, "collected": e.position.collected, "trained": e.position.trained, "seed": e.run_seed,
        "frames_by_env": e.frames_by_env, "updater": e.learner.state_dict()[0]["updater"], "schedule": e.lr_schedule.last_epoch,
        "next_batch": e.train_dloader.next_batch, "explored": explored(e.actors.pools["train"].pool.state_dict()),
        "trajectories": len(e.dataset.store),
    }  # fmt: skip


def explored(pool_state):
    """{actor: steps of its exploration schedule}."""
    return {k: v["exploration"]["global_step"] for k, v in pool_state["actors"].items()}


def checkpoints_all_the_time(root, report, context):
    """Resume from the newest checkpoint, report the progress, and save after each small epoch, endlessly."""
    e = tiny.started(root, env_mode="async", env_workers=2, async_env_mp_context=context, seed=None, **TINY)
    write_json(report, standing(e))
    e.learn()


class Slow(gym.Wrapper):
    def step(self, action):
        time.sleep(0.004)
        return self.env.step(action)


def slow_tmaze():
    return amago.envs.AMAGOEnv(Slow(tiny.TMazePassive(tiny.CORRIDOR)), env_name="TMaze")


class Phases(amago.Experiment):
    """Every phase takes a tenth of a second or more, and is written to a file."""

    def _in(self, phase, call):
        write_json(self.run_dir / "phase", phase)
        call()

    def evaluate_val(self):
        self._in("evaluate", super().evaluate_val)

    def collect_new_training_data(self):
        self._in("collect", super().collect_new_training_data)

    def train_epoch(self):
        self._in("train", super().train_epoch)

    def save_checkpoint(self):
        self._in("save", super().save_checkpoint)

    def train_step(self, batch, log_step):
        time.sleep(0.01)
        return super().train_step(batch, log_step)


def stops_when_asked(root, report, env_mode):
    sync = os.fsync

    def slow_sync(fd):
        time.sleep(0.02)
        sync(fd)

    os.fsync = slow_sync
    fields = TINY | {"train_timesteps_per_epoch": 4 * EPISODE, "train_batches_per_epoch": 10, "val_interval": 1}
    fields |= {"val_timesteps_per_epoch": 4 * EPISODE, "env_workers": 2, "async_env_mp_context": "fork"}
    e = tiny.started(root, slow_tmaze, experiment_type=Phases, env_mode=env_mode, verbose=True, **fields)
    write_json(report, standing(e))
    e.learn()


class NotingBuffers(BatchBuffers):
    """Records which trajectory was drawn, and begin and length of the window."""

    here = threading.local()

    def read(self, i, view, index, start, stop):
        super().read(i, view, index, start, stop)
        self.here.drawn.append(f"{index}:{start}+{stop - start}")


class Noted(SequenceLoader):
    """Writes a line for each batch: its number and its samples."""

    log = None

    def draw(self, number):
        NotingBuffers.here.drawn = []
        batch = super().draw(number)
        os.write(self.log, f"{number} {' '.join(NotingBuffers.here.drawn)}\n".encode())
        return batch


class Offline(amago.Experiment):
    def init_dloaders(self):
        self.train_dloader = Noted(
            self.dataset, self.batch_size, self.dloader_workers, self.run_seed, self.accelerator.process_index, self.DEVICE
        )
        return self.train_dloader

    def train_step(self, batch, log_step):
        order = self.run_dir.parent / "hold"  # an update of the second epoch, in which to be killed
        while self.epoch and order.exists() and self.position.trained >= int(order.read_text()):
            write_json(order.with_name("holds"), True)
            time.sleep(0.01)
        return super().train_step(batch, log_step)


def fill(root, name):
    tiny.learned(
        root, tiny.cartpole, name=name, start_learning_at_epoch=9, train_timesteps_per_epoch=120, save_trajs_as="segments"
    ).close()


def trains_on_what_is_there(root, name, samples, updates, traj, **fields):
    """Run two epochs, from the beginning or from the newest checkpoint."""
    disk_module.BatchBuffers = NotingBuffers
    dataset = DiskTrajDataset(root, name)
    settings = {
        "start_collecting_at_epoch": INF, "epochs": 2, "train_batches_per_epoch": updates // 2, "ckpt_interval": 1,
        "max_seq_len": 10, "resume": "auto", "lr_warmup_steps": 150,
    }  # fmt: skip
    e = tiny.started(root, tiny.cartpole, traj, experiment_type=Offline, name=name, dataset=dataset, **(settings | fields))
    Noted.log = os.open(samples, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    e.learn()
    e.close()


def outlasts_a_full_disk(root, report, how):
    """Run two epochs, two without space, and two with space again; report the files after each."""
    warned, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("amago").addHandler(handler)
    fields = TINY | {"epochs": 2, "train_timesteps_per_epoch": 2 * EPISODE, "keep_training_states": None}
    e = tiny.learned(root, **fields)
    before = look(e)
    limits, ballast = resource.getrlimit(resource.RLIMIT_FSIZE), Path(root) / "ballast"
    if how == "tmpfs":
        with open(ballast, "wb", buffering=0) as f:
            try:
                while f.write(bytes(4096)):
                    continue
            except OSError:
                print("the disk is full", flush=True)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, limits[1]))
    e.epochs = 4
    e.learn()
    during, said = look(e), list(warned)
    if how == "tmpfs":
        ballast.unlink()
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    e.epochs = 6
    e.learn()
    after = look(e)
    e.close()
    rows = [(r["section"], r["epoch"]) for r in tiny.rows(e.run_dir)]
    write_json(report, {"before": before, "during": during, "after": after, "said": said, "rows": rows})


def look(e):
    states = checkpoint.training_states(e.checkpoints.states)
    for path in states:
        checkpoint.verify(path)
    return {
        "states": sorted(map(checkpoint.epoch_of, states)), "grad_steps": e.learner.grad_steps, "env_steps": e.env_steps,
        "temporary": [str(p) for p in e.run_dir.rglob(".*") if p.name.startswith((".tmp-", ".old-"))], "version": e.checkpoints.version,
        "published": load_weight_file(e.checkpoints.latest).version, "trajectories": len(e.dataset.store),
        "newest": checkpoint.newest_complete(e.checkpoints.states).name,
    }  # fmt: skip


def killed_at_every_line(root, report, first, stride):
    """Save, replace and prune training states, killed at each ``stride``-th line of code."""
    states, problems, n, lines = Path(root) / "states", [], first, 0
    save(states, 1, 1.0)
    save(states, 2, 2.0)
    held = [2.0]
    while True:
        pid = os.fork()
        if pid == 0:
            end_at_line(n)
            save(states, 2 + lines % 2, held[-1] + 1.0)  # replaces a state, or adds one
            os._exit(0)
        finished = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        found = checkpoint.newest_complete(states)
        value = checkpoint.load_training_state(found)[2]["value"]
        if value not in (held[-1], held[-1] + 1.0):
            problems.append(f"line {n}: {found} holds {value}, after {held[-1]}")
        held.append(value)
        if finished:
            break
        n, lines = n + stride, lines + 1
    write_json(report, {"lines": lines, "problems": problems, "left": sorted(p.name for p in states.iterdir())})


def save(states, epoch, value):
    checkpoint.prune(states, None)
    checkpoint.save_training_state(states / f"run_epoch_{epoch}", {"w": torch.full((9,), value)}, {}, {"value": value})
    checkpoint.prune(states, 1)


def end_at_line(n):
    passed = 0

    def trace(frame, event, arg):
        nonlocal passed
        if not frame.f_code.co_filename.endswith(("amago/run/checkpoint.py", "shutil.py")):
            return None
        if event == "line":
            if passed == n:
                os._exit(9)
            passed += 1
        return trace

    sys.settrace(trace)


def publishes(root, report):
    """Publish weights whose values are their version, endlessly, and sometimes restart as after a kill."""
    from amago.run.rundir import RunCheckpoints

    version = 0
    while True:
        run = RunCheckpoints(Path(root), "run")
        run.prepare()
        for _ in range(50):
            version += 1
            assert run.publish({f"w{i}": torch.full((4000,), float(version)) for i in range(4)})
            assert run.version == version, (run.version, version)
            if version == 1:
                write_json(report, version)


if __name__ == "__main__":
    tqdm.tqdm.monitor_interval = 0  # forked workers would lose its thread
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
