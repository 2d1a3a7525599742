"""Updates, and steps of the policy, on a GPU: kernels, waits, copies, operations, bytes, and time.

Without a GPU all of these are counted on a simulated device (the folder ``$AMAGO_SIMCUDA``, by default ``../shared/simcuda``, which needs g++), and
*ours* is a prediction: the host starts a kernel every 4 us, and a roofline of an H100 bounds each kernel. Compiled updates are counted if
the package triton can be imported (also from the folder ``$SIMCUDA_TRITON``). With a GPU *ours* is the median of updates measured by events, after
a warm-up; kernels, their time, copies and waits are those of PyTorch's profiler, and bytes within kernels are not counted.

The ceiling is the same work without starts: simulated, the sum of the kernels' times; measured, the operations at the peak of the data sheet.
*Share of the peak* counts products of matrices and attention, against dense TF32 or bf16.

Sizes: observations of 20 floats, 4 actions or 6 numbers, timestep encoder of width 512, models of width 256 (Transformer: 3 layers; others: 2),
24 sequences; actors without ends of rollouts.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from benchmarks.harness import Row

ROOT = Path(__file__).parents[1]
MODELS = ("ff", "transformer", "gru", "mingru", "mamba")
PEAKS = {"H100": (495e12, 989e12), "H200": (495e12, 989e12), "A100": (156e12, 312e12), "L40S": (183e12, 362e12)}
"""Operations a second of data sheets, without sparsity: (TF32, bf16)."""
STEPS = 4, 256
"""Steps of the policy that are counted together; with graphs: a phase, of which three steps are ordinary ones and one is captured."""


@dataclass(frozen=True)
class Case:
    """An update (``actors`` 0) or a step of the policy, and its sizes; ``small`` in tests."""

    agent: str
    actions: str
    model: str
    length: int = 128
    precision: str = "no"
    compiled: bool = False
    graphs: bool = False
    actors: int = 0
    batch: int = 24
    small: bool = False

    @property
    def name(self) -> str:
        what = f"{self.agent}, {self.actions}, {self.model}"
        if self.actors:
            return f"step, {what}, {self.actors} actors{', graphs' * self.graphs}"
        half = "" if self.precision == "no" else f"{self.precision}, "
        return (
            f"update, {what}, {half}length {self.length}, {'compiled' if self.compiled else 'eager'}{', graphs' * self.graphs}"
        )

    @property
    def timesteps(self) -> int:
        return self.actors or self.batch * self.length


def cases(smoke: bool) -> Iterator[Case]:
    """All cases."""
    if smoke:
        for model in ("transformer", "mamba"):
            yield Case("agent", "discrete", model, length=8, batch=2, small=True)
        yield Case("agent", "discrete", "transformer", actors=4, small=True)
        return
    for length in (128, 512):
        for compiled in (False, True):
            for agent in ("agent", "multitask"):
                for actions in ("discrete", "continuous"):
                    yield Case(agent, actions, "transformer", length, compiled=compiled)
            yield Case("agent", "discrete", "transformer", length, "bf16", compiled)
            yield Case("agent", "discrete", "transformer", length, compiled=compiled, graphs=True)
            for model in MODELS:
                if model != "transformer":
                    yield Case("agent", "discrete", model, length, compiled=compiled)
    for model in MODELS:
        for actors in (16, 512, 4096):
            yield Case("agent", "discrete", model, actors=actors)
            yield Case("agent", "discrete", model, actors=actors, graphs=True)


# ---- the work -----------------------------------------------------------------------------------------------------------


class Noise(gym.vector.VectorEnv):
    """Rows of random observations without end, which cost nothing."""

    def __init__(self, rows: int, action_space: gym.Space[Any]) -> None:
        self.num_envs, self.metadata = rows, {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
        self.single_observation_space = gym.spaces.Box(-1.0, 1.0, (20,), np.float32)
        self.single_action_space = action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, rows)
        self.action_space = gym.vector.utils.batch_space(action_space, rows)
        self._obs = self.observation_space.sample()
        self._zeros = np.zeros(rows, np.float32), np.zeros(rows, bool), np.zeros(rows, bool)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._obs, {}

    def step(self, actions: Any) -> tuple[Any, ...]:
        return (self._obs, *self._zeros, {})


@contextmanager
def work_of(case: Case) -> Iterator[Callable[[], Any]]:
    """A function that makes one update, or some steps, of a run whose agent is on the GPU."""
    import amago
    from amago import cli_utils, config
    from amago.envs import AMAGOEnv
    from amago.loading import DiskTrajDataset
    from benchmarks import learner

    width, rows = (16 if case.small else 256), case.actors or 1
    space: gym.Space[Any] = (
        gym.spaces.Discrete(4) if case.actions == "discrete" else gym.spaces.Box(-1.0, 1.0, (6,), np.float32)
    )
    bound: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root, config.temporary({}):
        traj = cli_utils.switch_traj_encoder(
            bound, case.model, memory_size=width, layers=3 if case.model == "transformer" else 2
        )
        tstep = cli_utils.switch_tstep_encoder(bound, "ff", n_layers=2, d_hidden=2 * width, d_output=width // 2)
        agent = cli_utils.switch_agent(bound, case.agent)
        cli_utils.use_config(bound)
        make = partial(make_env, AMAGOEnv, rows, space)
        e = amago.Experiment(
            run_name="gpu", ckpt_base_dir=root, max_seq_len=case.length, dataset=DiskTrajDataset(root, "gpu"), tstep_encoder_type=tstep,
            traj_encoder_type=traj, agent_type=agent, make_train_env=make, make_val_env=make, parallel_actors=rows, seed=0,
            env_mode="already_vectorized", verbose=False, dloader_workers=0, epochs=1, val_interval=None, ckpt_interval=None,
            always_save_latest=False, train_timesteps_per_epoch=1, train_batches_per_epoch=1, val_timesteps_per_epoch=1,
            compile=case.compiled, cuda_graphs=case.graphs, mixed_precision=case.precision,
        )  # fmt: skip
        e.start()
        assert e.DEVICE.type == "cuda"
        try:
            if case.actors:
                yield lambda: e.actors.train.run(e.policy, STEPS[case.graphs])
                return
            sizes: Any = Namespace(action_space=space, batch=case.batch, length=case.length, d_obs=20)
            batch = learner.make_batch(sizes).to(e.DEVICE)
            e.policy_aclr.train()
            yield lambda: e.train_step(batch, log_step=False)
        finally:
            e.close()
            if case.compiled:
                torch._dynamo.reset()
            gc.collect()


def make_env(wrapper: Any, rows: int, space: gym.Space[Any]) -> Any:
    return wrapper(Noise(rows, space), env_name="noise", batched_envs=rows)


# ---- counts -------------------------------------------------------------------------------------------------------------


def simulated_device() -> ModuleType | None:
    """The simulated device, installed, or None where there is a GPU; SystemExit says what is missing."""
    if "simcuda" in sys.modules:
        return sys.modules["simcuda"]
    if torch.cuda.is_available():
        return None
    folder = ROOT / os.environ.get("AMAGO_SIMCUDA", "../shared/simcuda")
    if not folder.is_dir():
        raise SystemExit(f"no GPU, and no simulated device in {folder} (AMAGO_SIMCUDA)")
    if shutil.which("g++") is None:
        raise SystemExit("no GPU, and the simulated device needs g++")
    sys.path.insert(0, str(folder.resolve().parent))
    simcuda = importlib.import_module("simcuda")
    simcuda.install()
    return simcuda


def can_compile(simcuda: ModuleType | None) -> bool:
    """True if losses can be compiled here, after which a simulated device counts their kernels without computing them."""
    sys.path.append(os.environ.get("SIMCUDA_TRITON", os.devnull))
    if importlib.util.find_spec("triton") is None:
        return False
    if simcuda is not None:
        inductor = importlib.import_module("simcuda.inductor")
        inductor.install(simcuda.E)
    return True


def predicted(simcuda: ModuleType, work: Callable[[], Any]) -> tuple[float, float, dict[str, float]]:
    """Milliseconds of a piece of work on an H100, those of its kernels alone, and its counts."""
    model = importlib.import_module("simcuda.model")
    with simcuda.Recorder() as recorder:
        work()
    found = model.summary(recorder.events)
    counts = {
        "kernels": found["kernels"], "waits": found["syncs"], "copies": found["h2d_n"], "pageable": found["pageable"], "bytes to it": found["h2d"],
        "bytes from it": found["d2h"], "operations": found["flops"], "bytes": found["bytes"], "as one graph": 1e3 * found["graph_tf32"],
    }  # fmt: skip
    return 1e3 * found["t_tf32"], 1e3 * found["busy_tf32"], counts


def measured(work: Callable[[], Any], rounds: int) -> tuple[float, dict[str, float]]:
    """Milliseconds of a piece of work on the GPU, the median of ``rounds``, and its counts."""
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.flop_counter import FlopCounterMode

    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with FlopCounterMode(display=False) as operations, torch.compiler.set_stance("force_eager"):
        work()
    on_gpu = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    ms: Counter[str] = Counter()
    for event in on_gpu:
        ms[event.name] += 1e-3 * event.time_range.elapsed_us()
    counts = {
        "kernels": sum(not event.name.startswith(("Memcpy", "Memset")) for event in on_gpu),
        "waits": sum(event.name.endswith("Synchronize") for event in profiler.events() if event.device_type.name == "CPU") - 1,
        "copies": sum("HtoD" in event.name for event in on_gpu),
        "pageable": sum("HtoD (Pageable" in event.name for event in on_gpu),
        "operations": operations.get_total_flops(),
        "ms in kernels": sum(ms.values()),
        **{f"ms in {name[:80]}": spent for name, spent in ms.most_common(8)},
    }
    return median(times), counts


def rows(options: Namespace) -> Iterator[Row]:
    """One row a case."""
    simcuda = simulated_device()
    wanted = [case for case in cases(options.smoke) if options.only in case.name]
    if simcuda is not None:  # it counts no kernels in a replay, but predicts its time from those of an ordinary update
        wanted = [case for case in wanted if not case.graphs]
    if any(case.compiled for case in wanted) and not can_compile(simcuda):
        print(
            "compiled updates are left out: the package triton is missing (pip install --target DIR triton; SIMCUDA_TRITON=DIR)"
        )
        wanted = [case for case in wanted if not case.compiled]
    card = "H100" if simcuda is not None else torch.cuda.get_device_name()
    peak = next((p for name, p in PEAKS.items() if name in card), PEAKS["H100"])
    operations: dict[Case, float] = {}  # of ordinary calls: a replay shows none
    for case in wanted:
        each = STEPS[case.graphs] if case.actors else 1
        with work_of(case) as work:
            for _ in range(3 if simcuda is not None else 10):
                work()
            if simcuda is not None:
                ms, least, counts = predicted(simcuda, work)
            else:
                ms, counts = measured(work, options.rounds or 20)
                same = replace(case, graphs=False, compiled=False)
                one = operations.setdefault(same, counts["operations"] / each) if case.graphs else counts["operations"] / each
                operations[same], counts["operations"] = one, one * each
                least = 1e3 * counts["operations"] / peak[case.precision != "no"]
        ms, least, counts = ms / each, max(least / each, 1e-9), {name: x / each for name, x in counts.items()}
        counts["timesteps/s"] = 1e3 * case.timesteps / ms
        counts["share of the peak"] = counts["operations"] / (1e-3 * ms * peak[case.precision != "no"])
        note = f"{'predicted' if simcuda is not None else 'measured'}, {card}: {counts['kernels']:.0f} kernels, {counts['waits']:.0f} waits"
        yield Row(case.name, ms, "ms", least, least / ms, note=note, details=counts)
