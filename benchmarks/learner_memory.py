"""Peak resident memory of an update against what has to be there at once; cases are those of `benchmarks.learner`.

Each case runs in a process of its own, after a tiny case has loaded what is loaded once. *Ours* is the highest resident size within
three updates less the size before the agent was built.

The ceiling counts bytes: parameters, their gradients, two moments of the optimizer, targets; the batch; and of every layer what its
backward cannot do without (see `activations`), in half precision where autocast computes in it. It leaves out whatever lives only within
a layer: results that are not kept, gradients on their way, scratch space.
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
    """Numbers that backward must find: the inputs of linear layers and norms, and what activations and attention gave.

    An activation needs its own output alone, which is the next layer's input.
    """
    w, states, steps = case.width, case.batch * (case.length + 1), case.batch * case.length
    spec, G, C = agent.action_spec, len(agent.gammas), agent.critics.num_critics
    tstep = case.d_obs + 1 + spec.dim + 2 * case.d_timestep + w  # inputs of three linear layers and a norm
    layer = 2.0 * w  # the first norm's input and output
    layer += 3 * w + w + case.heads + w  # queries, keys, values; result and normalisers; the same scaled by head
    layer += w + 2 * w  # the second norm's input; the third's input and output
    layer += 4 * w + 4 * w + w / 4  # the feed-forward's activation and its norm; which outputs dropout has left, a byte each
    encoders = states * (tstep + w + case.layers * layer + 2 * w)  # the input layer's, and the last norm's input and output
    actor = steps * (2 * w + 3 * agent.actor.d_output)  # hidden layers; parameters of the policies, samples, log-densities
    if agent.exact:
        return encoders + actor + C * steps * (2 * w + G * spec.dim)
    out = case.bins if hasattr(agent.critics, "bins") else 1
    return encoders + actor + C * steps * G * (2 * w + out)


def unavoidable(case: Case, learner: Learner) -> float:
    """Bytes."""
    agent = learner.updater.agent
    trained = sum(p.numel() for p in agent.trainable_params)  # type: ignore[attr-defined]
    others = sum(p.numel() for p in agent.parameters()) - trained
    batch = (getattr(learner.batch, f.name) for f in fields(Batch) if f.name != "obs")
    data = sum(x.numel() * x.element_size() for x in (*batch, *learner.batch.obs.values()))
    size = 2 if case.bf16 else 4
    return 4.0 * (4 * trained + others) + data + size * activations(case, agent)


def _status(name: str) -> float:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure(index: int, smoke: bool, threads: int) -> dict[str, float]:
    """Of case number ``index``, in this process: bytes used and bytes that are unavoidable."""
    torch.set_num_threads(threads)
    every = list(cases(smoke))
    tiny = next(c for c in cases(True) if (c.agent_type, c.bf16) == (every[index].agent_type, every[index].bf16))
    warm = Learner(tiny)
    for _ in range(3):
        warm.update()
    del warm
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest size begins anew
    learner = Learner(every[index])
    for _ in range(3):
        learner.update()
    return {"ours": _status("VmHWM") - before, "ceiling": unavoidable(every[index], learner)}


def rows(options: Namespace) -> Iterator[Row]:
    """A row for each case; one measurement, as sizes hardly vary."""
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
