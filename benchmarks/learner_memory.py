"""Peak resident memory of an update against the memory that it requires, for the cases of `benchmarks.learner`.

Each case runs in a process of its own, after a tiny case that loads libraries. *Ours* is the peak resident size during three
updates, minus the size before the agent is built.

The ceiling counts bytes of parameters, gradients, two moments of the optimizer, target networks, the batch, and the values that
each layer saves for the backward pass (see `activations`), in half precision under autocast. It leaves out temporary memory
within layers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from amago.loading import Batch
from benchmarks.harness import Row, share
from benchmarks.learner import Case, Learner, cases

TARGET = 1.0 / 1.5
MIB = 2.0**20


def activations(case: Case, agent: Any) -> float:
    """How many numbers the backward pass requires: inputs of linear layers and norms, outputs of activations and of attention.

    The output of an activation is the input of the next layer, and is counted once.
    """
    w, states, steps = case.width, case.batch * (case.length + 1), case.batch * case.length
    spec, G, C = agent.action_spec, len(agent.gammas), agent.critics.num_critics
    tstep = case.d_obs + 1 + spec.dim + 2 * case.d_timestep + w  # inputs of three linear layers and a norm
    layer = 2.0 * w  # the first norm's input and output
    layer += 3 * w + w + case.heads + w  # queries, keys, values; result and normalisers; the same scaled by head
    layer += w + 2 * w  # the second norm's input; the third's input and output
    layer += 4 * w + 4 * w + w / 4  # the feed-forward's activation and its norm; the mask of dropout, a byte per number
    encoders = states * (tstep + w + case.layers * layer + 2 * w)  # the input layer's, and the last norm's input and output
    actor = steps * (2 * w + 3 * agent.actor.d_output)  # hidden layers; parameters of the policies, samples, log-densities
    if agent.exact:
        return encoders + actor + C * steps * (2 * w + G * spec.dim)
    out = case.bins if hasattr(agent.critics, "bins") else 1
    return encoders + actor + C * steps * G * (2 * w + out)


def unavoidable(case: Case, learner: Learner) -> float:
    """The bytes that an update requires, see this module."""
    agent = learner.agent
    trained = sum(p.numel() for p in agent.trainable_params)  # type: ignore[attr-defined]
    others = sum(p.numel() for p in agent.parameters()) - trained
    values = (getattr(learner.batch, f.name) for f in fields(Batch))
    tensors = [x for value in values for x in (value.values() if isinstance(value, dict) else [value])]
    data = sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))
    size = 2 if case.bf16 else 4
    return 4.0 * (4 * trained + others) + data + size * activations(case, agent)


def _status(name: str) -> float:
    """An entry of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure(index: int, smoke: bool, threads: int) -> dict[str, float]:
    """The peak memory of case number ``index`` in this process, and its ceiling, in bytes."""
    torch.set_num_threads(threads)
    every = list(cases(smoke))
    tiny = next(c for c in cases(True) if (c.agent_type, c.bf16) == (every[index].agent_type, every[index].bf16))
    warm = Learner(tiny)
    for _ in range(3):
        warm.update()
    del warm
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    learner = Learner(every[index])
    for _ in range(3):
        learner.update()
    return {"ours": _status("VmHWM") - before, "ceiling": unavoidable(every[index], learner)}


def rows(options: Namespace) -> Iterator[Row]:
    """One row per case, from a single measurement, because sizes hardly vary."""
    for index, case in enumerate(cases(options.smoke)):
        if options.only not in case.name:
            continue
        code = f"import json; from benchmarks.learner_memory import measure; print(json.dumps(measure({index}, {options.smoke}, {options.threads})))"
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1]
        )
        if run.returncode:
            raise RuntimeError(f"{case.name}: {run.stderr}")
        found = {k: v / MIB for k, v in json.loads(run.stdout.splitlines()[-1]).items()}
        ratio = share(found["ours"], found["ceiling"], "MiB")
        yield Row(case.name, found["ours"], "MiB", found["ceiling"], ratio, TARGET)
