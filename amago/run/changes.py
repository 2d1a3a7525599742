"""Settings that differ between a training state and the run that resumes from it: applied and said, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from amago.run import parameters
from amago.run.checks import SettingsError
from amago.run.describe import described, flattened, shown
from amago.run.settings import ExperimentSettings

APPLIED, REFUSED, IRRELEVANT = "applied", "refused", "irrelevant"
_SCHEDULE = "the learning rate follows the new schedule from the current update on"

FIELDS: dict[str, tuple[str, str]] = {
    "run_name": (IRRELEVANT, "a run may be renamed"),
    "ckpt_base_dir": (IRRELEVANT, "a run may be moved"),
    "max_seq_len": (APPLIED, ""),  # where weights depend on it, loading them refuses the shapes
    "dataset": (APPLIED, "batches are others than those that the run would have drawn"),
    "tstep_encoder_type": (REFUSED, ""),
    "traj_encoder_type": (REFUSED, ""),
    "agent_type": (REFUSED, ""),
    "val_timesteps_per_epoch": (APPLIED, ""),
    "make_train_env": (APPLIED, ""),
    "make_val_env": (APPLIED, ""),
    "parallel_actors": (APPLIED, "actors keep their exploration schedules; new ones begin with the schedule of another"),
    "env_mode": (APPLIED, ""),
    "async_env_mp_context": (IRRELEVANT, "results do not depend on it"),
    "exploration_wrapper_type": (APPLIED, "schedules of exploration begin anew"),
    "sample_actions": (APPLIED, ""),
    "force_reset_train_envs_every": (APPLIED, ""),
    "log_to_wandb": (IRRELEVANT, "logging"),
    "wandb_project": (IRRELEVANT, "logging"),
    "wandb_entity": (IRRELEVANT, "logging"),
    "wandb_group_name": (IRRELEVANT, "logging"),
    "verbose": (IRRELEVANT, "console"),
    "log_interval": (APPLIED, ""),
    "traj_save_len": (APPLIED, "for rollouts from now on"),
    "has_dset_edit_rights": (APPLIED, ""),
    "stagger_traj_file_lengths": (APPLIED, ""),
    "save_trajs_as": (APPLIED, "for rollouts from now on"),
    "padded_sampling": (APPLIED, ""),
    "dloader_workers": (IRRELEVANT, "batches do not depend on it"),
    "epochs": (APPLIED, ""),
    "start_learning_at_epoch": (APPLIED, ""),
    "start_collecting_at_epoch": (APPLIED, ""),
    "train_timesteps_per_epoch": (APPLIED, ""),
    "train_batches_per_epoch": (APPLIED, ""),
    "val_interval": (APPLIED, ""),
    "ckpt_interval": (APPLIED, ""),
    "always_save_latest": (APPLIED, ""),
    "always_load_latest": (APPLIED, ""),
    "batch_size": (APPLIED, ""),
    "batches_per_update": (APPLIED, "an update that was begun with fewer batches begins anew"),
    "learning_rate": (APPLIED, ""),
    "critic_loss_weight": (APPLIED, ""),
    "lr_warmup_steps": (APPLIED, _SCHEDULE),
    "grad_clip": (APPLIED, ""),
    "l2_coeff": (APPLIED, ""),
    "mixed_precision": (APPLIED, ""),
    "l2_weights_only": (APPLIED, ""),
    "actor_learning_rate": (APPLIED, ""),
    "critic_learning_rate": (APPLIED, ""),
    "traj_learning_rate": (APPLIED, ""),
    "ema_decay": (APPLIED, "an average of the weights that was not kept before begins with the present ones"),
    "sample_actions_train": (APPLIED, ""),
    "sample_actions_val": (APPLIED, ""),
    "lr_cooldown": (APPLIED, _SCHEDULE),
    "seed": (APPLIED, "batches, networks and actors are seeded anew"),
    "resume": (IRRELEVANT, "how this process starts"),
    "log_to_tensorboard": (IRRELEVANT, "logging"),
    "env_workers": (APPLIED, ""),
    "env_step_timeout": (APPLIED, ""),
    "max_env_restarts": (APPLIED, ""),
    "keep_training_states": (APPLIED, ""),
    "dset_root": (IRRELEVANT, "part of dataset"),
    "dset_name": (IRRELEVANT, "part of dataset"),
    "dset_max_size": (IRRELEVANT, "part of dataset"),
    "extra_fields": (APPLIED, "for rollouts from now on"),
    "cut_short_trajectories": (APPLIED, ""),
    "refused_data_timeout": (APPLIED, ""),
    "dset_max_steps": (IRRELEVANT, "part of dataset"),
    "dset_max_bytes": (IRRELEVANT, "part of dataset"),
    "env_trial_steps": (IRRELEVANT, "how this process starts"),
    "val_episodes": (APPLIED, ""),
    "overwrite": (IRRELEVANT, "how this process starts"),
    "share_buffer": (IRRELEVANT, "how this process starts"),
    "init_from": (IRRELEVANT, "weights are those of the training state"),
    "progress": (IRRELEVANT, "console"),
    "callbacks": (IRRELEVANT, "their state is in the training state"),
}
"""What happens to each field that differs, and what is lost, or why it does not matter. Fields of subclasses are applied."""

APPLIED_PARAMETERS = {
    "amago.agent.": {
        "Agent": "critic_loss_weight num_critics_td critics_td_per_step online_coeff offline_coeff reward_multiplier tau n_step use_target_actor fake_filter fbc_filter_func "
        "targets trace_lambda advantage_learning expectile entropy_target entropy_coeff entropy_lr burn_in bootstrap_context num_actions_for_value_in_critic_loss num_actions_for_value_in_actor_loss rollout_gamma_idx",
        "binary_filter": "threshold",
        "exp_filter": "beta clip_adv_low clip_adv_high clip_weights_low clip_weights_high",
        "leaky_relu_filter": "beta tau neg_slope target_f0 add_binary clip_weights_low clip_weights_high",
    },
    "amago.nets.": {
        "actor_critic.Actor": "dropout_p",
        "actor_critic.ResidualActor": "dropout_p",
        "actor_critic.NCritics": "dropout_p",
        "actor_critic.StateValues": "dropout_p",
        "actor_critic.NCriticsTwoHot": "dropout_p label_type sigma decoding clamp_labels",
        "actor_critic.PopArtLayer": "beta",
        "dict_encoder.DictTstepEncoder": "drqv2_aug",
        "ff.InputNorm": "beta skip_below",
        "utils.InputNorm": "beta skip_below",
        "policy_dists.Beta": "clip_actions_on_log_prob",
        "policy_dists.Discrete": "clip_prob_low clip_prob_high gumbel_temperature clip_gradient",
        "policy_dists.TanhGaussian": "clip_actions_on_log_prob",
        "traj_encoders.FFTrajEncoder": "dropout",
        "traj_encoders.TformerTrajEncoder": "dropout_ff dropout_emb dropout_attn dropout_qkv attention_type",
        "transformer.ClippedSlidingSinkAttention": "dropout window_size sink_size",
        "transformer.FlashAttention": "dropout window_size",
        "transformer.FlexAttention": "dropout",
        "transformer.ScaledDotProductAttention": "dropout",
        "transformer.SlidingWindowFlexAttention": "dropout window_size",
        "transformer.SlidingWindowSinkFlexAttention": "dropout window_size sink_size",
        "transformer.VanillaAttention": "dropout",
        "transformer.VanillaFlexAttention": "dropout",
        "tstep_encoders.CNNTstepEncoder": "drqv2_aug aug_pct_of_batch",
    },
}
"""Parameters of agents and networks that may change. All others would make the weights not fit, or mean something else."""
SWITCHES = ("entropy_target", "entropy_coeff", "expectile")
"""Those of them that may change, but neither from nor to None: weights with them and without them are not the same."""
APPLIED_PARAMETERS["amago.agent."]["MultiTaskAgent"] = APPLIED_PARAMETERS["amago.agent."]["Agent"]
INITIAL_PARAMETERS = {
    "amago.nets.actor_critic.NCriticsTwoHot.init_value", "amago.nets.ff.InputNorm.init_nu", "amago.nets.ff.InputNorm.initial_samples",
    "amago.nets.utils.InputNorm.init_nu",
    "amago.nets.utils.InputNorm.initial_samples", "amago.nets.transformer.SigmaReparam.fast_init",
    "amago.nets.actor_critic.PopArtLayer.init_nu", "amago.nets.actor_critic.PopArtLayer.initial_samples", "amago.nets.traj_encoders.MambaTrajEncoder.dt_min",
    "amago.nets.traj_encoders.MambaTrajEncoder.dt_max", "amago.nets.traj_encoders.MambaTrajEncoder.A_scale",
    "amago.nets.traj_encoders.MinGRUTrajEncoder.longest", "amago.nets.traj_encoders.GRUTrajEncoder.longest",
}  # fmt: skip
"""Parameters that only count when an agent is built: what they were is in the training state."""


class Change(NamedTuple):
    """A setting that differs.

    Attributes:
        before, now: descriptions (`amago.run.describe`).
        kind: `APPLIED` or `REFUSED`.
        note: what is lost; may be empty.
    """

    name: str
    before: Any
    now: Any
    kind: str
    note: str

    def __str__(self) -> str:
        """ "learning_rate 0.001 -> 0.0001", and the note."""
        return f"{self.name} {shown(self.before)} -> {shown(self.now)}{f' ({self.note})' if self.note else ''}"


def changes(saved: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """The settings that differ, without those that do not matter.

    Args:
        saved, now: of `amago.run.record.settings_of`.
    """
    return [c for c in (*_fields(saved["fields"], now["fields"]), *_parameters(saved, now)) if c.kind != IRRELEVANT]


def refuse(found: list[Change], path: object) -> None:
    """Raise if a change cannot be applied.

    Args:
        path: of the training state.

    Raises:
        SettingsError: names every such setting with both values.
    """
    refused = [f"{c.name} was {shown(c.before)} and is now {shown(c.now)}" for c in found if c.kind == REFUSED]
    if refused:
        raise SettingsError(
            f"{path} cannot be resumed with other networks, whose weights would not fit or would mean something else:\n  - "
            + "\n  - ".join(refused)
            + "\nset these as they were, or begin a new run under another run_name"
        )


def _fields(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[Change]:
    for name, after in now.items():
        if name not in saved:  # by an earlier version of the library, or of the user's subclass
            continue
        kind, note = FIELDS.get(name, (APPLIED, ""))
        if kind == REFUSED and _moved(saved[name], after):
            kind = APPLIED
        before, after = flattened(saved[name], name), flattened(after, name)
        if before.get(name) != after.get(name):  # another class: its attributes are not comparable
            yield Change(name, before.get(name), after.get(name), kind, note)
            continue
        for part in sorted(before.keys() | after.keys()):
            was = before[part] if part in before else _default_of_part(part, after)
            if was != after.get(part):
                yield Change(part, was, after.get(part), kind, note)


def _default_of_part(part: str, now: dict[str, Any]) -> Any:
    """The default of a data set's argument that an earlier version of the library did not have; None if it is no such argument."""
    owner, _, argument = part.rpartition(".")
    cls = now.get(owner)
    return _default(f"amago.loading.{cls.rpartition('.')[2]}.{argument}") if isinstance(cls, str) else None


def _moved(before: Any, now: Any) -> bool:
    """Whether two classes differ in their modules only: a script was imported, or a class was moved to another file."""
    return isinstance(before, str) and isinstance(now, str) and before.rpartition(".")[2] == now.rpartition(".")[2]


def _parameters(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[Change]:
    for name in sorted({*saved["parameters"], *now["bound"]}):
        if _is_field(name) or not _matters(name, saved, now):
            continue
        before = saved["parameters"][name] if name in saved["parameters"] else _default(name)
        after = now["parameters"][name] if name in now["parameters"] else _default(name)
        kind = kind_of(name)
        if kind == APPLIED and name.rpartition(".")[2] in SWITCHES and (before is None) != (after is None):
            kind = REFUSED
        if before != after and not (kind == REFUSED and _moved(before, after)):
            yield Change(name, before, after, kind, "")


def _matters(name: str, saved: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether the run uses a parameter. Which of those of networks it used, the saved settings know: an agent had been built."""
    if name in saved["unused"] or name not in saved["parameters"]:
        return name in now["parameters"] and name not in now["unused"]
    return name in now["parameters"] or not name.startswith("amago.envs.exploration.")  # of another class than now


def kind_of(parameter: str) -> str:
    """What happens to a parameter that differs, "scope/selector.parameter"."""
    plain = parameter.rpartition("/")[2]
    if plain in INITIAL_PARAMETERS:
        return IRRELEVANT
    selector, _, name = plain.rpartition(".")
    for prefix, applied in APPLIED_PARAMETERS.items():
        if selector.startswith(prefix):
            return APPLIED if name in applied.get(selector.removeprefix(prefix), "").split() else REFUSED
    return APPLIED


def _default(parameter: str) -> Any:
    try:
        return described(parameters.default_of(parameter))
    except KeyError:
        return None


def _is_field(parameter: str) -> bool:
    """Whether this is the default of a field of an experiment, which `FIELDS` treats."""
    selector, _, name = parameter.rpartition("/")[2].rpartition(".")
    cls = parameters.configurable(selector)
    return isinstance(cls, type) and issubclass(cls, ExperimentSettings) and name in cls.__dataclass_fields__
