"""The order in which the parts of an `amago.Experiment` are built, resumed and closed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from amago.run.callbacks import CallbackList
from amago.run.checkpoint import identity
from amago.run.collect import RunActors
from amago.run.console import COLLECT, TRAIN, Console
from amago.run.data import REFUSED_SECONDS, wait_for_data
from amago.run.group import Ranks, Signals, Stopped
from amago.run.launched.roles import Collector, Learner, join
from amago.run.process import draw_seed, keep_freed_memory, seed_process
from amago.run.rundir import check_buffer
from amago.run.settings import check_settings
from amago.run.state import restore


class Building:
    """Builds the parts of an experiment, through its methods ``init_...``, which a program may override, or call by themselves.

    Attributes:
        started, closed: ``start()``, or ``close()``, has ended.
    """

    def __init__(self, experiment: Any):
        self.e = experiment
        self.started = self.closed = self._prepared = False
        self._actors: RunActors | None = None
        self._env_seed: tuple[int, ...] = ()
        self._at_close = ExitStack()  # restores the settings of the process

    @functools.cached_property
    def launch(self) -> Learner | Collector | None:
        """The part of this process in a launch, whose processes share collection and evaluation; None if no launcher has started it. It changes
        the settings when it is first read: before anything is built."""
        return join(self.e)

    def prepare(self) -> None:
        """Check the settings, and make the parts that need no other, before the first part is built."""
        e = self.e
        e.resolve()
        if self._prepared:
            return
        launch = self.launch
        check_settings(e)
        e.learner.renew_accelerator()
        factors = {COLLECT: float(e.accelerator.num_processes), TRAIN: 1 / e.batches_per_update}
        e.console = Console(e.progress, e.verbose and e.accelerator.is_main_process, factors)
        e.moments = CallbackList([e.console, *([] if launch is None else [launch]), *e.callbacks])
        e.group = Ranks(e.accelerator)
        e.plan_epochs(e.group.count)
        e.signals = Signals(e.group)
        if e.DEVICE.type == "cuda":
            self._at_close.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision(e.matmul_precision)
        self._seed()
        self._prepared = True

    def _seed(self, resumed: Path | None = None) -> None:
        e, launch = self.e, self.launch
        e.run_seed = e.group.of_first(draw_seed()) if e.seed is None else int(e.seed)
        key = (e.run_seed, e.group.index, *(() if launch is None else launch.process_key))
        if e.seed is not None:
            seed_process(key)
        # environments cannot be restored: after each resume they begin with new rollouts, from a new seed
        self._env_seed = key if resumed is None else (*key, *identity(resumed))

    @property
    def actors(self) -> RunActors:
        """The actors of the run."""
        if self._actors is None:
            self.prepare()
            self._actors = RunActors(self.e, self.e, self.e.data.save_new_trajs_to, self._env_seed)
        return self._actors

    def start(self, load_initial: Callable[[], object]) -> None:
        """`amago.Experiment.start`. ``load_initial`` loads the weights of ``init_from``."""
        e = self.e
        if self.started:
            raise RuntimeError("start() was called before; build a new Experiment")
        self._prepared = False  # settings may have changed since parts were built
        self.prepare()
        try:
            resumed = e.rundir.claim(e.data, e.group)
            self._seed(resumed)
            dataset = e.init_dsets()
            env_summary = e.init_envs()
            if e.rundir.replace():
                e.print(f"deleted the earlier run in {e.run_dir} (overwrite=True)")
            e.accelerator.wait_for_everyone()
            check_buffer(dataset, e.actors.spaces.observation, e.actors.spaces.action)
            e.batches.renew(e.init_dloaders, e.DEVICE)
            e.init_model()
            if e.init_from is not None and resumed is None:
                load_initial()
            e.init_checkpoints()
            if e.DEVICE.type == "cpu" and e.train_batches_per_epoch and keep_freed_memory(True):
                self._at_close.callback(keep_freed_memory, False)
            self.started = True
            self.resume()
            steps = f"{e.grad_update_counter} gradient steps, {e.env_steps} environment steps"
            e.print(e.rundir.describe_start(resumed, e.epoch, steps))
            e.moments.start(e)
        except BaseException:
            e.close()
            raise
        if e.verbose and e.accelerator.is_main_process:
            e.summary(env_summary=env_summary)

    def require(self, what: str, writes: bool = True) -> None:
        """Refuse a call before `start`, or, if it writes, before the earlier run in the directory was loaded."""
        if self.closed or self.e.policy_aclr is None:
            raise RuntimeError(
                f"{what} after close(): build a new Experiment" if self.closed else f"call Experiment.start() before {what}"
            )
        if self.launch is not None:
            self.launch.check_call(what)
        if writes:
            self.e.rundir.check_writable()

    def open_log(self, resumed: Path | None = None) -> None:
        """Record the start of the run, with the training state that it resumes, and open its log, unless refused or done."""
        e = self.e
        if e.rundir.note_start(e.policy, e.learner.calls, e.epoch, resumed or e.rundir.to_resume) and e.logger is None:
            e.init_logger()

    def resume(self) -> None:
        """Open the log, and load the training state that ``resume`` has chosen, once."""
        self.open_log()
        resumed, self.e.rundir.to_resume = self.e.rundir.to_resume, None
        if resumed is not None:
            self.e.load_checkpoint_from_path(str(resumed))

    def load(self, path: str, load_weights: Callable[[], object] | None) -> None:
        """Load a training state, or, by ``load_weights``, weights only."""
        e = self.e
        self.require("load_checkpoint_from_path()", writes=False)
        if not e.rundir.claimed:
            e.init_checkpoints()
        if load_weights is None:
            for note in restore(e, Path(path), self.started):
                e.print(note)
        else:
            load_weights()
            e.learner.restart_average()
        e.policy.on_checkpoint_loaded(is_resume=load_weights is None)
        if e.rundir.continues(Path(path)):
            loaded = copy.copy(e.position)
            e.init_checkpoints()  # an override sets the epoch to 0
            e.position = loaded
            self.open_log(Path(path) if load_weights is None else None)

    def wait_for_data(self) -> bool:
        """True if all ranks have data to train on. A process that never collects waits for the data of other processes."""
        e = self.e
        ready = e.group.all(e.data.ready_for_training)
        if ready or e.collects or not e.data.can_become_ready:
            return bool(ready)
        with e.console.phase("waiting for data", None, "s") as phase:

            def pause() -> None:
                e.signals.wait(1.0)
                e.moments.step(e, 0, "wait")
                phase.update(1)
                e.signals.check()

            wait_for_data(e.data, REFUSED_SECONDS, pause, e.group)
        return True

    def leave(self, stop: Stopped) -> None:
        """Save after a signal; and call the callbacks and close, unless the process goes on."""
        e, before = self.e, self.e.rundir.saved
        e.position.has_collected = False  # the next call collects the rest of the epoch
        try:
            if e.ckpt_interval:
                e.save_checkpoint()
            if e.always_save_latest:
                e.write_latest_policy()
            saved = "saved" if e.rundir.saved > before else "nothing was saved"
            if stop.is_interrupt:
                e.print(f"interrupted in epoch {e.epoch}; {saved}; learn() goes on from here")
                return
            how = "; continue with resume='auto'" if e.rundir.saved > before else ""
            e.print(f"stopped by a signal in epoch {e.epoch}; {saved}{how} (exit code {stop.code})")
            e.moments.call("on_exception", e, stop)
        finally:
            if not stop.is_interrupt:
                e.close()

    def close(self) -> None:
        """Close all parts but the callbacks; twice is fine."""
        for part in (self._actors, self.e.batches, self.e.run_log):
            if part is not None:
                part.close()
        self.e.rundir.release()
        self._at_close.close()
        self.started, self.closed = False, True
