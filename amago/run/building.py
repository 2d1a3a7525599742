"""The parts that a run is built from, each in a method that `amago.Experiment.start` calls and that may be called by itself."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from amago.loading import RLDataset, SequenceLoader
from amago.run import console
from amago.run.checks import check_required_extras, check_settings
from amago.run.collect import RunActors, Spaces
from amago.run.persistence import PersistentRun
from amago.run.roles.find import find_role
from amago.run.waiting import wait_for_data


class BuiltRun(PersistentRun):
    """Builds data set, environments, loader, model, checkpoints and log.

    `amago.Experiment.start` calls `init_dsets`, `init_envs`, `init_dloaders`, `init_model`, `init_checkpoints`, `init_logger` and `summary`.
    Each may be overridden. A program may also call them by itself in place of ``start()``, in this order or with the model before the
    loaders, and leave out those that it does not need; files are written from `init_checkpoints` on.
    """

    _made_actors: RunActors | None = None
    _has_role = False

    def _prepare(self) -> None:
        """Check the settings, before the first part is built."""
        self.resolve()
        if self._prepared:
            return
        self._take_role()
        check_settings(self)
        self._build_accelerator()
        self._init_callbacks()
        self._join_ranks()
        self._init_seeds(None)
        self._prepared = True

    @property
    def _actors(self) -> RunActors:
        if self._made_actors is None:
            self._prepare()
            self._made_actors = RunActors(self, self._data.save_new_trajs_to, self._env_seed, self.DEVICE, self.caster)
        return self._made_actors

    def _take_role(self) -> None:
        """Let a launcher's role change the settings, once, before anything is built of them."""
        if not self._has_role:
            self._has_role, self._role = True, find_role()
            self._role.apply(self)

    # ---- data -----------------------------------------------------------------------------------------------------------

    def init_dsets(self) -> RLDataset:
        """Configure the data set."""
        self.resolve()
        self._take_role()
        self._build_accelerator()
        self._data.configure_from_experiment(self)
        return self._data

    def init_dloaders(self) -> Any:
        """Create the loader of training batches, ``train_dloader``. Called again before each training phase.

        Override it to draw batches in another way: set ``train_dloader`` to, or return, any iterable of `amago.loading.Batch`, such as
        a `torch.utils.data.DataLoader` with ``collate_fn=RLData_pad_collate``. If that has a length, each epoch trains on one pass over
        it; else on ``train_batches_per_epoch`` batches.
        """
        self._prepare()
        before = getattr(self, "train_dloader", None)
        given = self._data, self.batch_size, self.dloader_workers
        if isinstance(before, SequenceLoader):
            if (before.dataset, before.batch_size, before.workers) == given:
                before.length = self.train_batches_per_epoch
                return before
            before.close()
        rank = self.accelerator.process_index
        made = SequenceLoader(*given, self.run_seed, rank, self.DEVICE, self.train_batches_per_epoch)
        made.next_batch = getattr(before, "next_batch", 0)
        self.train_dloader = made
        return made

    def _renew_loader(self) -> None:
        """Call `init_dloaders`. A new `SequenceLoader` goes on where the one before it was: it draws batches by their number."""
        before = getattr(self, "train_dloader", None)
        made = self.init_dloaders()
        now = self.train_dloader = made if made is not None else self.train_dloader
        if now is not before and isinstance(now, SequenceLoader) and isinstance(before, SequenceLoader):
            now.next_batch = max(now.next_batch, before.next_batch)
            before.close()

    def _wait_for_data(self) -> bool:
        """Whether there is data to train on, in all ranks. A process that never collects waits for the data of others.

        Raises:
            NoReadableDataError: for ``refused_data_timeout`` seconds there were refused files and no others.
        """
        dataset = self._data
        ready = self._ranks.all(dataset.ready_for_training)
        if ready or self.collects or not dataset.can_become_ready:
            return ready
        with self._phase("waiting for data", None, "s") as phase:

            def pause() -> bool:
                self._stop.wait(1.0)
                self._role.waiting(self)
                phase.update(1)
                return not self._stop.decide()

            return wait_for_data(dataset, self.refused_data_timeout, pause, self._ranks)

    # ---- environments ---------------------------------------------------------------------------------------------------

    def init_envs(self) -> str:
        """Start the training actors, or, if this run never collects, make one environment for its spaces.

        An override may make environments of its own: it sets ``train_envs``, ``val_envs`` or both.

        Returns:
            a description of the environments for `summary`.
        """
        self._prepare()
        spaces = self._actors.find_spaces()
        shapes = ", ".join(f"{k} {v.shape}" for k, v in spaces.observation.spaces.items())
        return f"{self.parallel_actors} actors ({self._actors.mode_text}); observations: {shapes}; actions: {spaces.action}"

    @property
    def train_envs(self) -> Any:
        """The training environments as one that steps them all (`PoolEnv`), which live until `close`.

        They are started when first needed. A program may set this to environments of its own: a `PoolEnv`, a pool of actors, or a vector
        environment whose environments are `amago.envs.SequenceWrapper` (`amago.compat.vector_envs`).
        """
        return self._actors.envs("train")

    @train_envs.setter
    def train_envs(self, envs: Any) -> None:
        self._actors.use("train", envs)

    @property
    def val_envs(self) -> Any:
        """The validation environments; see `train_envs`."""
        return self._actors.envs("val")

    @val_envs.setter
    def val_envs(self, envs: Any) -> None:
        self._actors.use("val", envs)

    @property
    def rl2_space(self) -> gym.spaces.Dict:
        """Dict {"obs": the flat observation space, "rl2": Box of the reward and the previous action}, which the agent is built for."""
        spaces = self._actors.spaces
        return gym.spaces.Dict({"obs": spaces.observation, "rl2": spaces.rl2})

    @rl2_space.setter
    def rl2_space(self, space: gym.spaces.Dict) -> None:
        self._actors.set_spaces(space)

    @property
    def hidden_state(self) -> Any:
        """The policy's memory of the training actors; None: empty."""
        return self._actors.pools["train"].hidden_state if "train" in self._actors.pools else None

    @hidden_state.setter
    def hidden_state(self, memory: Any) -> None:
        if memory is not None or "train" in self._actors.pools:
            self._actors.train.take_hidden_state(self.policy, memory)

    # ---- model ---------------------------------------------------------------------------------------------------

    def init_model(self) -> None:
        """Build the agent for ``rl2_space`` and the actions of the environments, its optimizer and schedule."""
        self._prepare()
        spaces: Spaces = self._actors.spaces
        self._data.check_spaces(spaces.observation, spaces.action)
        self._build_model(spaces)
        check_required_extras(self.policy, self.extra_fields)

    def summary(self, env_summary: str) -> None:
        """Print the most important settings.

        Args:
            env_summary: what `init_envs` returned.
        """
        processes = self.accelerator.num_processes
        self.print(console.summary(self, self.policy, env_summary, processes, self.epoch, self.run_seed))
