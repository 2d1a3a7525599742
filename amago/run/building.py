"""The parts of an `amago.Experiment`: the order in which they are built and closed, and the training state that all of them make up."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from amago.compat.parts import is_accelerate_state, load_accelerate_state
from amago.describe import describe
from amago.run.callbacks import CallbackList, Run
from amago.run.checkpoint import CheckpointError, Snapshot, epoch_of, identity, load_into, load_training_state
from amago.run.collect import RunActors
from amago.run.console import COLLECT, TRAIN, Console
from amago.run.data import REFUSED_SECONDS, wait_for_data
from amago.run.group import Ranks, Signals, Stopped
from amago.run.launched import roles
from amago.run.process import draw_seed, keep_freed_memory, rng_state, seed_process, set_rng_state
from amago.run.rundir import check_buffer
from amago.run.settings import ExperimentSettings, check_settings
from amago.run.state import load_pool_state, refuse


class Building:
    """Builds the parts of a run through its methods ``init_...``, which a program may override, or call by themselves; and saves and
    restores its training state.

    Args:
        run: the parts; settings: the fields. An `amago.Experiment` is both.

    Attributes:
        started, closed: ``start()``, or ``close()``, has ended.
    """

    def __init__(self, run: Run, settings: ExperimentSettings):
        self.run, self.settings = run, settings
        self.started = self.closed = self._prepared = False
        self._actors: RunActors | None = None
        self._env_seed: tuple[int, ...] = ()
        self._at_close = ExitStack()  # restores the settings of the process

    @functools.cached_property
    def launch(self) -> roles.Learner | roles.Collector | None:
        """The part of this process in a launch, whose processes share collection and evaluation; None if no launcher has started it. It changes
        the settings when it is first read: before anything is built."""
        return roles.join(self.settings)

    def prepare(self) -> None:
        """Check the settings, and make the parts that need no other, before the first part is built."""
        run, s = self.run, self.settings
        s.resolve()
        if self._prepared:
            return
        launch = self.launch
        check_settings(s)
        run.learner.renew_accelerator()
        accelerator = run.learner.accelerator
        factors = {COLLECT: float(accelerator.num_processes), TRAIN: 1 / s.batches_per_update}
        run.console = Console(s.progress, s.verbose and accelerator.is_main_process, factors)
        run.moments = CallbackList([run.console, *([] if launch is None else [launch]), *s.callbacks])
        run.group = Ranks(accelerator)
        s.plan_epochs(run.group.count)
        run.signals = Signals(run.group)
        if run.DEVICE.type == "cuda":
            self._at_close.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision(s.matmul_precision)
        self._seed()
        self._prepared = True

    def _seed(self, resumed: Path | None = None) -> None:
        run, seed, launch = self.run, self.settings.seed, self.launch
        run.run_seed = run.group.of_first(draw_seed()) if seed is None else int(seed)
        key = (run.run_seed, run.group.index, *(() if launch is None else launch.process_key))
        if seed is not None:
            seed_process(key)
        # environments cannot be restored: after each resume they begin with new rollouts, from a new seed
        self._env_seed = key if resumed is None else (*key, *identity(resumed))

    @property
    def actors(self) -> RunActors:
        """The actors of the run."""
        if self._actors is None:
            self.prepare()
            self._actors = RunActors(self.run, self.settings, self.run.data.save_new_trajs_to, self._env_seed)
        return self._actors

    def start(self, load_initial: Callable[[], object]) -> None:
        """`amago.Experiment.start`. ``load_initial`` loads the weights of ``init_from``."""
        run, s = self.run, self.settings
        if self.started:
            raise RuntimeError("start() was called before; build a new Experiment")
        self._prepared = False  # settings may have changed since parts were built
        self.prepare()
        try:
            resumed = run.rundir.claim(run.data, run.group)
            self._seed(resumed)
            dataset = run.init_dsets()
            env_summary = run.init_envs()
            if run.rundir.replace():
                run.print(f"deleted the earlier run in {s.run_dir} (overwrite=True)")
            run.learner.accelerator.wait_for_everyone()
            spaces = self.actors.spaces
            check_buffer(dataset, spaces.observation, spaces.action)
            run.batches.renew(run.init_dloaders, run.DEVICE)
            run.init_model()
            if s.init_from is not None and resumed is None:
                load_initial()
            run.init_checkpoints()
            if run.DEVICE.type == "cpu" and s.train_batches_per_epoch and keep_freed_memory(True):
                self._at_close.callback(keep_freed_memory, False)
            self.started = True
            self.resume()
            steps = f"{run.learner.grad_steps} gradient steps, {run.env_steps} environment steps"
            run.print(run.rundir.describe_start(resumed, run.epoch, steps))
            run.moments.start(run)
        except BaseException:
            run.close()
            raise
        if s.verbose and run.learner.accelerator.is_main_process:
            run.summary(env_summary=env_summary)

    def require(self, what: str, writes: bool = True) -> None:
        """Refuse a call before `start`, or, if it writes, before the earlier run in the directory was loaded."""
        if self.closed or self.run.learner.policy_aclr is None:
            raise RuntimeError(
                f"{what} after close(): build a new Experiment" if self.closed else f"call Experiment.start() before {what}"
            )
        if self.launch is not None:
            self.launch.check_call(what)
        if writes:
            self.run.rundir.check_writable()

    def open_log(self, resumed: Path | None = None) -> None:
        """Record the start of the run, with the training state that it resumes, and open its log, unless refused or done."""
        run, learner = self.run, self.run.learner
        noted = run.rundir.note_start(learner.policy, learner.calls, run.epoch, resumed or run.rundir.to_resume)
        if noted and run.run_log.logger is None:
            run.init_logger()

    def resume(self) -> None:
        """Open the log, and load the training state that ``resume`` has chosen, once."""
        self.open_log()
        resumed, self.run.rundir.to_resume = self.run.rundir.to_resume, None
        if resumed is not None:
            self.run.load_checkpoint_from_path(str(resumed))

    def load(self, path: str, load_weights: Callable[[], object] | None) -> None:
        """Load a training state, or, by ``load_weights``, weights only."""
        run = self.run
        self.require("load_checkpoint_from_path()", writes=False)
        if not run.rundir.claimed:
            run.init_checkpoints()
        if load_weights is None:
            for note in self._restore(Path(path)):
                run.print(note)
        else:
            load_weights()
            run.learner.restart_average()
        run.learner.policy.on_checkpoint_loaded(is_resume=load_weights is None)
        if run.rundir.continues(Path(path)):
            loaded = copy.copy(run.position)
            run.init_checkpoints()  # an override sets the epoch to 0
            run.position = loaded
            self.open_log(Path(path) if load_weights is None else None)

    def wait_for_data(self) -> bool:
        """True if all ranks have data to train on. A process that never collects waits for the data of other processes."""
        run = self.run
        ready = run.group.all(run.data.ready_for_training)
        if ready or self.settings.collects or not run.data.can_become_ready:
            return bool(ready)
        with run.console.phase("waiting for data", None, "s") as phase:

            def pause() -> None:
                run.signals.wait(1.0)
                run.moments.step(run, 0, "wait")
                phase.update(1)
                run.signals.check()

            wait_for_data(run.data, REFUSED_SECONDS, pause, run.group)
        return True

    def leave(self, stop: Stopped) -> None:
        """Save after a signal; and call the callbacks and close, unless the process goes on."""
        run, before = self.run, self.run.rundir.checkpoints.saved
        run.position.has_collected = False  # the next call collects the rest of the epoch
        try:
            if self.settings.ckpt_interval:
                run.save_checkpoint()
            if self.settings.always_save_latest:
                run.write_latest_policy()
            saved = run.rundir.checkpoints.saved > before
            if stop.is_interrupt:
                run.print(
                    f"interrupted in epoch {run.epoch}; {'saved' if saved else 'nothing was saved'}; learn() goes on from here"
                )
                return
            how = "saved; continue with resume='auto'" if saved else "nothing was saved"
            run.print(f"stopped by a signal in epoch {run.epoch}; {how} (exit code {stop.code})")
            run.moments.call("on_exception", run, stop)
        finally:
            if not stop.is_interrupt:
                run.close()

    def close(self) -> None:
        """Close all parts but the callbacks; twice is fine."""
        for part in (self._actors, self.run.batches, self.run.run_log):
            if part is not None:
                part.close()
        self.run.rundir.release()
        self._at_close.close()
        self.started, self.closed = False, True

    # ---- the training state ----------------------------------------------------------------------------------------------------

    def save(self) -> Path | None:
        """Save a training state, and a file of the policy's weights, those that act; with an average, the trained ones are beside them. All
        ranks call this together. Returns the directory, in the main process, if it could be written."""
        run, s = self.run, self.settings
        run.learner.average_gradients(run.group)
        local = {"rng": rng_state(), "pools": {kind: rollout.pool.state_dict() for kind, rollout in self.actors.pools.items()}}
        ranks, number, saved = run.group.gather([local]), run.position.file_epoch, False
        checkpoints = run.rundir.checkpoints
        if run.group.index == 0:
            saved = checkpoints.save(number, self._snapshot(ranks), s.keep_training_states, s.keep_policy_weights)
        run.learner.accelerator.wait_for_everyone()
        return checkpoints.path_of(number) if saved else None

    def _snapshot(self, ranks: list[dict[str, Any]]) -> Snapshot:
        """The training state, with what differs between ranks: random streams, and the exploration schedules of the actors."""
        run = self.run
        state, tensors = run.learner.state_dict()
        state |= {
            **run.position.state_dict(), "seed": run.run_seed, "next_batch": run.batches.loader.next_batch,
            "dataset": run.data.state_dict(), "wall_time": run.run_log.wall_time, "processes": len(ranks), "ranks": ranks,
            "settings": run.rundir.settings_now(),
        }  # fmt: skip
        if callbacks := run.moments.state_dict():
            tensors["callbacks"] = callbacks
        return run.learner.policy.state_dict(), tensors, state

    def _restore(self, path: Path) -> list[str]:
        """Load a training state into all parts; the present settings of optimizer and schedule remain. After ``start()``, fields that were
        changed since count. Returns notes on settings that differ and on lost state.

        Raises:
            SettingsError: a setting that differs cannot be applied.
            CheckpointError: it is incomplete or damaged, or was saved for another agent.
        """
        run, learner = self.run, self.run.learner
        if learner.optimizer is None:
            raise CheckpointError(
                "this process only collects, and has nothing into which a training state could be loaded: load the weights alone "
                "(resume_training_state=False)"
            )
        if is_accelerate_state(path):
            learner.grad_steps = load_accelerate_state(path, learner.policy, learner.optimizer, learner.lr_schedule)
            run.position.begin(1 + epoch_of(path))
            return [f"note: {path.name} was written by Accelerate: frames, batches and random numbers begin anew"]
        found = run.rundir.changes(path, self.started)
        refuse(found, path)
        notes = self._restore_parts(path, {c.name.partition(".")[0] for c in found})
        run.rundir.checkpoints.skip_latest()
        differing = [f"settings that differ from those of {path.name}:", *map(str, found)] if found else []
        return ["\n  ".join(differing)] * bool(found) + [f"note: {note}" for note in notes]

    def _restore_parts(self, path: Path, changed: set[str]) -> list[str]:
        """Load a training state of this library, after fields that have changed; returns notes on lost state."""
        run, s, rank, now = self.run, self.settings, self.run.group.index, self.run.group.count
        new_seed = int(s.seed) if "seed" in changed and s.seed is not None else None
        if new_seed is not None:
            seed_process((new_seed, rank, *identity(path)))
        weights, tensors, state = load_training_state(path)
        load_into(run.learner.policy, weights, path)
        try:
            notes, saved = [], state["processes"]
            run.learner.load_state_dict(state, tensors, saved == now and "batches_per_update" not in changed)
            run.run_seed = run.batches.loader.seed = state["seed"] if new_seed is None else new_seed
            run.batches.loader.next_batch = state["next_batch"]
            fields = state["settings"]["fields"]
            if _kind(describe(run.data), s.run_name) == _kind(fields["dataset"], fields["run_name"]):
                run.data.load_state_dict(state["dataset"])
            else:
                notes.append(
                    "datasets that are new begin with their files in the order of their names, and the proportions of a mixture anew"
                )
            run.run_log.rewind(state["wall_time"])
            self._restore_process(state["ranks"], rank, "exploration_wrapper_type" in changed, new_seed is not None)
            if saved != now:
                notes.append(f"{saved} processes saved it, and there are {now}: the run is not repeated exactly")
            run.position.load_state_dict(state)
        except KeyError as err:
            raise CheckpointError(f"{path} lacks {err}: it was not saved by this version of amago") from err
        except ValueError as err:
            raise CheckpointError(f"{path} does not fit this run: {err}") from err
        unused = run.moments.load_state_dict(tensors.get("callbacks", {}))
        return notes + [f"the state of the callback {key} is not used: this run has no such callback" for key in unused]

    def _restore_process(self, ranks: list[dict[str, Any]], rank: int, exploration_is_new: bool, reseeded: bool) -> None:
        """Restore random streams and actors; a new process takes the actors of an earlier one, with separate random streams."""
        local, is_new, pools = ranks[rank % len(ranks)], rank >= len(ranks), self.actors.pools
        for kind, saved in local["pools"].items():
            if kind in pools:
                known = {**saved, "actors": {f"-{k}": v for k, v in saved["actors"].items()}} if is_new else saved
                load_pool_state(pools[kind].pool, known, exploration_is_new)
        if is_new and not reseeded:
            seed_process((self.run.run_seed, rank, len(ranks)))
        elif not reseeded:
            set_rng_state(local["rng"])


def _kind(description: Mapping[str, Any], run_name: str) -> list[Any]:
    """The properties of a dataset that must agree for a state to fit: names of classes, which may be in another module now, and of buffers,
    which are renamed with their run."""
    name = description.get("dset_name")
    members = [_kind(d, run_name) for d in description.get("datasets", ())]
    return [str(description.get("type")).rpartition(".")[2], None if name == run_name else name, members]
