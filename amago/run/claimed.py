"""The part of an experiment that claims the run's directory: a new run, one that continues an earlier one, or one that is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from amago import config
from amago.compat import accelerate_states
from amago.compat.paths import TextPath
from amago.loading import RLDataset
from amago.run.changes import Change, changes, refuse
from amago.run.checkpoint import identity, settings_in
from amago.run.logged import LoggedRun
from amago.run.ownership import Ownership
from amago.run.record import fields_of, has_learned, note_start, read_record, role_of, settings_of
from amago.run.rng import draw_seed, seed_process
from amago.run.run_checkpoints import RunCheckpoints


class ClaimedRun(LoggedRun):
    """Base class of `amago.Experiment`: its directory, and whether it continues what is there.

    Attributes:
        run_seed: the seed of the run, given or drawn.
        checkpoints: on disk.
        ckpt_dir: directory of the checkpoints.
    """

    run_seed: int
    checkpoints: RunCheckpoints
    ckpt_dir: TextPath

    def __post_init__(self) -> None:
        super().__post_init__()
        self._started = self._closed = self._prepared = False
        self._ownership: Ownership | None = None
        self._to_resume: Path | None = None
        self._log_is_open = False

    def _require_start(self, what: str, writes: bool = True) -> None:
        """Refuse a call that comes too early.

        Args:
            what: was called.
            writes: it writes to the run's directory or its buffer.

        Raises:
            RuntimeError: the model is not built, `close` was called, or a launched process does not call ``learn()``.
            RunExistsError: there is an earlier run, which no checkpoint was loaded of.
        """
        if self._closed or getattr(self, "policy_aclr", None) is None:
            raise RuntimeError(f"call Experiment.start() before {what}")
        self._role.check_call(what)
        if writes and self._refusal is not None:
            raise self._refusal

    def _claim(self) -> Path | None:
        """Claim the run's directory and buffer, and find the training state to resume from; None to begin.

        Raises:
            SettingsError: the buffer is another's, or the training state is of other networks. (That there is an earlier run is
                refused when something is to be written, as `load_checkpoint` may continue it.)
            CheckpointError: there is no training state to resume from.
        """
        self._settings = settings_of(self)
        failed, refusal, resumed = None, None, None
        if self.accelerator.is_main_process:
            self._ownership = Ownership(self, self._data)
            try:
                self._ownership.claim()
                refusal = self._ownership.refusal
                self._make_checkpoints()
                resumed = self.checkpoints.choose(self.resume)
            except Exception as err:
                failed = err
        failed, self._refusal, resumed = self._ranks.of_first((failed, refusal, resumed))
        if failed is not None:
            raise failed
        if not self.accelerator.is_main_process:
            self._make_checkpoints()
        self._to_resume = resumed
        if resumed is not None:
            refuse(self._changes(resumed), resumed)
        return resumed

    def _init_seeds(self, resumed: Path | None) -> None:
        self.run_seed = self._ranks.of_first(draw_seed()) if self.seed is None else int(self.seed)
        process_seed = (self.run_seed, self.accelerator.process_index, *self._role.seed_key)
        if self.seed is not None:
            seed_process(process_seed)
        # environments cannot be restored: after each resume they begin with new rollouts, from a seed of their own
        self._env_seed = (*process_seed, *(identity(resumed) if resumed else ()))

    def _replace_earlier_run(self) -> None:
        """Delete the earlier run of this name, if ``overwrite`` asks for it."""
        if self._ownership is not None and self._ownership.replace(self._data):
            self._make_checkpoints()
            self.print(f"deleted the earlier run in {self.run_dir} (overwrite=True)")
        self.accelerator.wait_for_everyone()

    def _open_log(self) -> None:
        """Write how the run was started, and open its log, unless that is refused or was done."""
        if self._refusal is None and getattr(self, "checkpoints", None) is not None and not self._log_is_open:
            self._log_is_open = True
            self._record_start(self._to_resume)
            if self.logger is None:
                self.init_logger()

    def _resume(self) -> None:
        """Load the training state that ``resume`` has chosen, once."""
        resumed, self._to_resume = self._to_resume, None
        if resumed is not None:
            self.load_checkpoint_from_path(str(resumed))

    def _resume_note(self, resumed: Path | None) -> str:
        """What ``resume`` has found, for the console."""
        if self._refusal is not None:
            return f"run {self.run_name!r} exists in {self.run_dir}: load_checkpoint(N) continues it, and otherwise learn() is refused"
        if resumed is not None:
            steps = f"{self.grad_update_counter} gradient steps, {self.env_steps} environment steps"
            return f"resumed {resumed} at epoch {self.epoch}, {steps}"
        if self.resume != "never":
            return f"nothing to resume in {self.ckpt_dir}; starting at epoch 0"
        return ""

    def load_checkpoint_from_path(self, path: str, is_accelerate_state: bool = True) -> None:
        """See `amago.Experiment.load_checkpoint_from_path`."""
        raise NotImplementedError

    def _continue_earlier_run(self, path: Path, is_state: bool) -> None:
        """If weights or a training state of the earlier run of this name were loaded, this process goes on with that run."""
        continues = self._refusal is not None and path.expanduser().resolve().is_relative_to(self.run_dir.resolve())
        if not continues:
            return
        self._refusal = None
        if self._ownership is not None:
            self._ownership.accept()
        loaded = self._epoch, self._epoch_is_over, self._collected, self._trained
        self.init_checkpoints()  # an override sets the epoch to 0
        self._epoch, self._epoch_is_over, self._collected, self._trained = loaded
        self._to_resume = path if is_state else None
        self._open_log()
        self._to_resume = None

    def init_checkpoints(self) -> None:
        """See `amago.Experiment.init_checkpoints`."""
        raise NotImplementedError

    def _make_checkpoints(self) -> None:
        self.checkpoints = RunCheckpoints(self.run_dir, self.run_name)
        self.checkpoints.prepare()
        self.ckpt_dir = TextPath(self.checkpoints.directory)

    # ---- how the run was started ------------------------------------------------------------------------------------------

    def _record_start(self, resumed: Path | None) -> None:
        """Write ``settings.json``, ``config.txt``, and remember the settings for training states."""
        self._settings = {**settings_of(self, self.policy, self._calls), "fields": self._settings["fields"]}
        config.mark_as_used()
        if not self.accelerator.is_main_process:
            return
        self._write_config()
        record = read_record(self.run_dir) or {"starts": []}
        resumed = None if resumed is not None and accelerate_states.is_one(resumed) else resumed
        before = settings_in(resumed) if resumed is not None else record if has_learned(record) and not self.learns else None
        changed = {c.name: [c.before, c.now] for c in changes(before, self._settings)} if before is not None else {}
        epoch = self.epoch if resumed is None else identity(resumed)[0]
        note_start(self.run_dir, self._settings, role_of(self), epoch, None if resumed is None else resumed.name, changed)

    def _write_config(self) -> None:
        """Write the gin configuration where both this library and the original system have it."""
        text = config.operative_config()
        for directory in (self.run_dir, self.run_dir / "ckpts"):
            (directory / "config.txt").write_text(text)

    def _settings_now(self) -> dict[str, Any]:
        """The settings with the fields that were changed since the start."""
        now = fields_of(self)
        self._settings = self._settings or settings_of(self, self.policy, self._calls)
        return {**self._settings, "fields": {**now, "dataset": self._settings["fields"]["dataset"]}}

    def _changes(self, path: Path) -> list[Change]:
        """How the settings differ from those of a training state; nothing for one of a version that did not save them."""
        saved = settings_in(path)
        return (
            []
            if saved is None
            else changes(saved, self._settings if self._settings and not self._started else self._settings_now())
        )

    def _close_parts(self) -> None:
        """Close what `start` has opened, and release the run's directory."""
        for name in ("_made_actors", "_used_loader", "train_dloader", "logger"):
            part = getattr(self, name, None)
            if part is not None and hasattr(part, "close"):
                part.close()
        if isinstance(self.dataset, RLDataset):  # start() may have refused another type
            self.dataset.close()
        if self._ownership is not None:
            self._ownership.release()
