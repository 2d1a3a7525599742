"""What each rank does in `tests/run/test_ranks.py`: ``torchrun rank_programs.py PROGRAM DIRECTORY``. A start costs seconds, so each does much."""

import atexit
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import tiny
import torch
from tiny import EPISODE
from torch._dynamo.utils import counters

import amago
from amago.agent import MultiTaskAgent, exp_filter
from amago.envs import AMAGOEnv
from amago.loading import DiskTrajDataset
from amago.loading.loader import Batch
from amago.run.group import Stopped
from amago.run.metrics import to_floats

AGENTS = {"agent": amago.Agent, "multitask": MultiTaskAgent}
KINDS = {"discrete": tiny.tmaze, "continuous": tiny.pendulum, "multibinary": tiny.bits}
CASES = [(agent, kind, "mean") for agent in AGENTS for kind in KINDS] + [
    ("agent", "discrete", "entropy"),
    ("agent", "discrete", "rescaled"),
    ("agent", "continuous", "weights"),
]
ROWS, LENGTH, UPDATES = 8, EPISODE, 3
LEARNS = {"train_timesteps_per_epoch": 0, "share_buffer": True, "ckpt_interval": 1, "train_batches_per_epoch": 6, "epochs": 2}
"""A run that learns from what another has collected."""


class Watched(amago.Experiment):
    """Updates by plain gradient descent, and keeps the gradients: Adam would turn rounding into steps where a gradient is almost 0."""

    weights = "mean"

    def init_optimizer(self, policy):
        self.gradients = []
        optimizer = torch.optim.SGD(list(policy.trainable_params), lr=0.05)
        optimizer.register_step_pre_hook(lambda *_: self.gradients.append(self._gradients()))
        return optimizer

    def _gradients(self):
        return {name: p.grad.clone() for name, p in self.policy.named_parameters() if p.grad is not None}

    def edit_critic_mask(self, batch, critic_loss, pad_mask):
        if self.weights != "weights":
            return pad_mask
        return pad_mask * (1.0 + batch.time_idxs[:, :-1, :, None, None])  # later steps count more


def batch_of(spaces, kind, number, rows):
    """Rows of a random batch. The sequences of its first half are whole, and those of its second half have one or two steps."""
    rng = np.random.default_rng(number)
    observations, actions = spaces.observation, spaces.action
    width = spaces.rl2.shape[0] - 1
    obs = {k: rng.normal(3.0, 2.0, (ROWS, LENGTH + 1, *s.shape)).astype(np.float32) for k, s in observations.spaces.items()}
    if kind == "discrete":
        acts = np.eye(width, dtype=np.float32)[rng.integers(0, actions.n, (ROWS, LENGTH))]
    elif kind == "multibinary":
        acts = rng.integers(0, 2, (ROWS, LENGTH, width)).astype(np.float32)
    else:
        acts = rng.uniform(-0.5, 0.5, (ROWS, LENGTH, width)).astype(np.float32)  # at the bounds the density hangs on rounding
    lengths = np.array([LENGTH] * (ROWS // 2) + [1, 2] * (ROWS // 4))
    arrays = {
        "rl2s": rng.normal(size=(ROWS, LENGTH + 1, width + 1)).astype(np.float32),
        "rews": rng.normal(0.5, 1.0, (ROWS, LENGTH, 1)).astype(np.float32),
        "dones": rng.random((ROWS, LENGTH, 1)) < 0.1,
        "actions": acts,
        "time_idxs": np.tile(np.arange(LENGTH + 1)[:, None], (ROWS, 1, 1)),
        "mask": np.arange(LENGTH + 1)[None, :, None] <= lengths[:, None, None],
    }
    tensors = {k: torch.as_tensor(v[rows]) for k, v in arrays.items()}
    batch = Batch(obs={k: torch.as_tensor(v[rows]).double() for k, v in obs.items()}, **tensors)
    return dataclasses.replace(batch, rl2s=batch.rl2s.double(), rews=batch.rews.double(), actions=batch.actions.double())


@contextlib.contextmanager
def joint_noise(rank, count):
    """Random numbers of the agents that a row of a batch gets wherever it is: rank r of n has the r-th of n parts of the rows.

    What the agents compute in float32 at least is in float64, so that differences are not those of rounding.
    """
    calls = iter(range(10**9))

    def noise(draw, like):
        generator = torch.Generator().manual_seed(next(calls))
        n = like.shape[0]
        return draw((n * count, *like.shape[1:]), generator=generator, dtype=like.dtype)[rank * n : (rank + 1) * n]

    def exponential_(self):
        return self.copy_(-noise(torch.rand, self).clamp(min=1e-12).log())

    fakes = [
        (torch.Tensor, "float", lambda x: x.double()),
        (torch, "randn_like", lambda x: noise(torch.randn, x)),
        (torch, "bernoulli", lambda p: (noise(torch.rand, p) < p).to(p.dtype)),
        (torch, "randint", lambda high, size, device: torch.arange(size[0]) + next(calls) % (high - size[0] + 1)),
        (torch.Tensor, "exponential_", exponential_),
    ]
    real = [(owner, name, getattr(owner, name)) for owner, name, _ in fakes]
    try:
        for owner, name, fake in fakes:
            setattr(owner, name, fake)
        yield
    finally:
        for owner, name, function in real:
            setattr(owner, name, function)


def updates(directory, agent, kind, weights, rank=0, count=1):
    """The metrics and gradients of a few updates, and the running statistics after the first; the weights after the last."""
    run = {
        "agent_type": AGENTS[agent],
        "experiment_type": Watched,
        "name": f"{agent}-{kind}-{weights}-{count}",
        "grad_clip": 1e9,
    }
    no_dropout = {"TformerTrajEncoder.dropout_ff": 0.0, "TformerTrajEncoder.dropout_emb": 0.0}
    smooth = {
        f"{name}.fbc_filter_func": exp_filter for name in ("Agent", "MultiTaskAgent")
    }  # else rounding decides where an advantage is 0
    tiny.config.bind(
        {**tiny.TWO_HOT, **no_dropout, **smooth, "exp_filter.clip_weights_high": 5.0, "MultiTaskAgent.online_coeff": 0.5}
        | {"Agent.entropy_target": 0.5 if weights == "entropy" else None, "Agent.rescale_critics": weights == "rescaled"}
    )
    torch.set_default_dtype(torch.float64)
    try:
        e = tiny.started(
            directory, KINDS[kind], "transformer", max_seq_len=LENGTH, train_timesteps_per_epoch=12, ema_decay=0.5, **run
        )
    finally:
        torch.set_default_dtype(torch.float32)
    e.weights = weights
    with torch.no_grad():  # ranks draw weights of their own, and take those of rank 0; here they must be those of one process
        generator = torch.Generator().manual_seed(0)
        for p in [*e.policy.tstep_encoder.parameters(), *e.policy.traj_encoder.parameters(), *e.policy.trainable_params]:
            if p.ndim > 1:
                p.copy_(torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5)
        for module in e.policy.modules():
            if isinstance(module, amago.nets.transformer.SigmaReparam):
                left, _, right = torch.linalg.svd(module.weight, full_matrices=False)
                module.u.copy_(left[:, 0])
                module.v.copy_(right[0])
        e.policy.hard_sync_targets()
    e.policy_aclr.train()
    metrics, statistics = [], []
    rows = slice(rank * ROWS // count, (rank + 1) * ROWS // count)
    with joint_noise(rank, count):
        for number in range(UPDATES):
            found = e.train_step(batch_of(e.actors.spaces, kind, number, rows), True)
            metrics.append(to_floats(found))
            statistics.append({k: v.clone() for k, v in tiny.weights(e).items() if k.endswith((".mu", ".nu", "_t", "_scale"))})
    with e.acting_weights():
        acting = tiny.weights(e)
    e.close()
    return {
        "metrics": metrics, "gradients": e.gradients, "statistics": statistics, "weights": tiny.weights(e),
        "acting": acting,
    }  # fmt: skip


def slow(seconds):
    """An environment that is slow in rank 0: one phase of the runs below takes it a minute."""

    class Slow(gym.Wrapper):
        def step(self, action):
            time.sleep(seconds if os.environ["RANK"] == "0" else 0.0)
            return super().step(action)

    return lambda: AMAGOEnv(Slow(tiny.TMazePassive(tiny.CORRIDOR)), env_name="TMaze")


class Signalled(amago.Experiment):
    """Gets a signal in some phase, in some ranks."""

    case = {}

    def signal(self, phase, delay=0.0):
        number = self.case["signals"].get(self.group.index)
        if phase != self.case["phase"] or number is None:
            return
        timer = threading.Timer(delay, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()

    def collect_new_training_data(self):
        self.signal("collect", 1.0)
        super().collect_new_training_data()

    def evaluate_val(self):
        self.signal("evaluate", 1.0)
        super().evaluate_val()

    def train_step(self, batch, log_step):
        if self.position.trained == 3:
            self.signal("train")
            time.sleep(0.05)
        return super().train_step(batch, log_step)

    def save_checkpoint(self):
        self.signal("save")
        time.sleep(0.1)
        super().save_checkpoint()


class AtWait(amago.Callback):
    """Lets a run that waits for data get its signal."""

    waits = False

    def on_step(self, experiment, steps, phase):
        if phase == "wait" and not self.waits:
            self.waits = True
            experiment.signal("wait", 0.5)


PHASE = 3000  # steps of each actor
COLLECTS = {"train_timesteps_per_epoch": PHASE, "make_train_env": slow(0.01)}
PHASES = {
    "collect": COLLECTS,
    "evaluate": {
        "val_interval": 1, "val_timesteps_per_epoch": PHASE, "make_val_env": slow(0.01), "train_timesteps_per_epoch": 12,
    },
    "wait": {"start_collecting_at_epoch": float("inf"), "callbacks": [AtWait()]},
    "train": {"train_batches_per_epoch": 50, "train_timesteps_per_epoch": 12},
    "save": {"epochs": 3, "train_timesteps_per_epoch": 12},
}  # fmt: skip


def stopped(directory, name, phase, signals):
    """A run that signals stop: what this rank knows at its end."""
    Signalled.case = {"phase": phase, "signals": signals}
    fields = {"epochs": 2, "ckpt_interval": 1, "log_interval": 1} | PHASES[phase]
    e = tiny.started(directory, experiment_type=Signalled, name=name, **fields)
    code = None
    try:
        e.learn()
    except Stopped as stop:
        code = stop.code
    finally:
        e.close()
    total = sum(float(v.double().sum()) for v in tiny.weights(e).values())
    progress = [e.epoch, e.position.collected, e.position.trained, e.env_steps, e.learner.grad_steps]
    return {"code": code, "progress": progress, "weights": total}


def fed(directory, rank):
    """A run that learns from what comes while it waits, after its ranks have waited for it differently long."""

    def feed():
        for path in (directory / "one-two-one" / "buffer" / "fifo").glob("*.safetensors"):
            shutil.copy(path, directory / "fed" / "buffer" / f".tmp-{path.name}")
            os.rename(directory / "fed" / "buffer" / f".tmp-{path.name}", directory / "fed" / "buffer" / "fifo" / path.name)

    e = tiny.started(directory, name="fed", start_collecting_at_epoch=float("inf"), epochs=1)
    time.sleep(0.7 * rank)  # ranks look into the buffer at different times
    if rank == 0:
        timer = threading.Timer(1.5, feed)
        timer.start()
    e.learn()
    e.close()
    return e.learner.grad_steps


def everything(directory, rank, count):
    """Updates, the resume of a run of one process, resumes of runs of two, a normal run, and signals."""
    # registered before the library's own, so that it is called afterwards
    atexit.register(lambda: (directory / f"left-{rank}").write_text(str(not torch.distributed.is_initialized())))
    for case in CASES:
        torch.save(updates(directory, *case, rank, count), directory / f"{'-'.join(case)}-{rank}.pt")
    lives = {}
    e = tiny.learned(directory, name="one-two-one", resume="auto", ckpt_interval=1, epochs=2)
    lives["one-two-one"] = [e.epoch, e.env_steps, e.learner.grad_steps]
    e.close()
    for per_update, name, at in ((1, "straight", None), (1, "halved", 3), (2, "straight-2", None), (2, "halved-2", 3)):
        for _ in range(1 if at is None else 2):
            e = tiny.started(
                directory, experiment_type=StopAt, name=name, dataset=DiskTrajDataset(directory, "one-two-one"), resume="auto",
                batches_per_update=per_update, **LEARNS,
            )  # fmt: skip
            e.at, at = at, None
            with contextlib.suppress(Stopped):
                e.learn()
            e.close()
        torch.save(tiny.weights(e), directory / f"{name}-{rank}.pt")
    e = tiny.learned(
        directory, name="normal", val_interval=1, val_episodes=5, epochs=2, ckpt_interval=1, log_interval=1, seed=None, val_timesteps_per_epoch=60
    )  # fmt: skip
    test = e.evaluate_test(tiny.tmaze, timesteps=60, episodes=7)
    lives["normal"] = [e.run_seed, e.env_steps, e.learner.grad_steps, test]
    torch.save(tiny.weights(e), directory / f"normal-{rank}.pt")
    with torch.no_grad():
        for p in e.policy.parameters():
            p.add_(rank)
    e.write_latest_policy()
    e.read_latest_policy()
    torch.save(tiny.weights(e), directory / f"published-{rank}.pt")
    e.close()
    lives["fed"] = fed(directory, rank)
    for name, (phase, signals) in STOPS.items():
        lives[name] = stopped(directory, name, phase, signals)
    (directory / f"lives-{rank}.json").write_text(json.dumps(lives))


def compiled(directory, rank, count):
    """The losses and weights of a few updates with and without the compiler, and the messages of one without it."""
    smooth = {"Agent.fbc_filter_func": exp_filter, "exp_filter.clip_weights_high": 5.0}
    tiny.config.bind({"TformerTrajEncoder.dropout_ff": 0.0, "TformerTrajEncoder.dropout_emb": 0.0, **smooth})
    rows = slice(rank * ROWS // count, (rank + 1) * ROWS // count)
    sent, all_reduce = [], torch.distributed.all_reduce
    counted = lambda tensor, *args, **kwargs: (sent.append(tensor.numel()), all_reduce(tensor, *args, **kwargs))[1]  # noqa: E731
    found = {}
    for on in (False, True):
        e = tiny.started(
            directory, tiny.tmaze, "transformer", Watched, name=f"compiled-{on}", max_seq_len=LENGTH, compile=on, grad_clip=1e9, lr_warmup_steps=1
        )  # fmt: skip
        e.policy_aclr.train()
        torch.manual_seed(rank)
        counters.clear()
        torch.distributed.all_reduce = all_reduce if on else counted
        with torch._inductor.config.patch(fallback_random=True):  # the random numbers of code that is not compiled
            losses = []
            for number in range(UPDATES):
                sent.clear()
                batch = batch_of(e.actors.spaces, "discrete", number, rows)
                floats = {k: getattr(batch, k).float() for k in ("rl2s", "rews", "actions")}
                batch = dataclasses.replace(batch, obs={k: v.float() for k, v in batch.obs.items()}, **floats)
                losses.append(e.train_step(batch, False)["Loss"].double())
        found[on] = {
            "weights": tiny.weights(e), "losses": torch.stack(losses), "sent": list(sent),
            "graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values()),
        }  # fmt: skip
        e.close()
    torch.save(found, directory / f"compiled-{rank}.pt")


class StopAt(amago.Experiment):
    """Signals itself in one rank before some batch."""

    at = None

    def train_step(self, batch, log_step):
        if self.position.trained == self.at and self.group.index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().train_step(batch, log_step)


STOPS = {
    "collect in the slow rank": ("collect", {0: signal.SIGINT}),
    "collect in both, of which one waits": ("collect", {0: signal.SIGTERM, 1: signal.SIGTERM}),
    "evaluate": ("evaluate", {0: signal.SIGTERM}),
    "wait": ("wait", {1: signal.SIGINT}),
    "train": ("train", {0: signal.SIGUSR1}),
    "both": ("train", {0: signal.SIGINT, 1: signal.SIGTERM}),
    "save": ("save", {1: signal.SIGTERM}),
}


def endless(directory, rank, count):
    """A run that ends by a signal from outside; it resumes, if it can."""
    e = tiny.started(
        directory, name="endless", resume="auto", ckpt_interval=1, epochs=10**6, log_interval=1, train_batches_per_epoch=20,
        keep_training_states=2,
    )  # fmt: skip
    (directory / f"pid-{rank}").write_text(str(os.getpid()))
    try:
        e.learn()
    except Stopped as stop:
        (directory / f"code-{rank}").write_text(str(stop.code))
        raise


if __name__ == "__main__":
    program, where = sys.argv[1:]
    {"everything": everything, "compiled": compiled, "endless": endless}[program](
        Path(where), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    )
