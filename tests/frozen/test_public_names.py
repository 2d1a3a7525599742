"""Public names of commit 7e24746 and the arguments that they take are there, but for those of `GONE`."""

import importlib
import json
from pathlib import Path

import public_names
import pytest

SNAPSHOT = json.loads((Path(__file__).parent / "public_names.json").read_text(encoding="utf-8"))
IN_EXAMPLES = (
    "Nim", "crafter.VideoRecorder", "alchemy_by_colour.AlchemyByColour", "alchemy_shaping.AlchemyShaping", "dmc.DeepMindControl", "dmc.PREFIX", "nim.Nim",
    "PointRobot", "ToyMixture", "point_robot.GOAL_REGIONS", "point_robot.PointRobot", "point_robot.REWARDS", "toy_mixture.TASKS",
    "toy_mixture.ToyMixture", "d4rl_scores.NormalizedScore", "d4rl_scores.REFERENCE_RETURNS", "d4rl_scores.normalized_score",
    "d4rl_scores.reference_returns", "pokemon.BattleError", "pokemon.OPPONENTS", "pokemon.PokemonBattle", "pokemon.ShowdownServer", "pokemon.generation",
)  # fmt: skip
EXPLORATION = (
    "ExplorationWrapper", "envs.BilevelEpsilonGreedy", "envs.EpsilonGreedy", "envs.ExplorationWrapper", "envs.exploration.ExplorationWrapper",
    "envs.builtin.tmaze_exploration.TMazeExploration",
)  # fmt: skip
GONE = {
    **{f"amago.envs.builtin.{name}": "`examples/support/`" for name in IN_EXAMPLES},
    "amago.envs.builtin.mazerunner.MazeRunnerGymEnv.observation": "it is an environment, no wrapper",
    "amago.agent.AgentLoss": "`losses` returns a dict of losses by name",
    "critics_td_per_step": "no gain was measured",
    "advantage_learning": "no gain was measured",
    "expectile": "no gain was measured on either record",
    "decoding": "`NCriticsTwoHot.use_symlog = False`, whose values are expected returns",
    "amago.nets.actor_critic.StateValues": "the same",
    "amago.ops.expectile_loss": "the same",
    **{
        f"amago.{n}.action_probabilities": '"tree_backup"; Retrace was no sooner than the default on any task'
        for n in EXPLORATION
    },
    **dict.fromkeys((f"amago.data.extras.{n}" for n in ("BEHAVIOUR_LOG_PROB", "POINT_MASS")), "the same"),
    **dict.fromkeys(
        (f"amago.envs.noise.{n}" for n in ("legal_probabilities", "log_prob_of", "with_random_actions")), "the same"
    ),
    "refused_data_timeout": "a minute",
    "half_life": '`sampling="length"` or "priority"; or override `sample_random_trajectory`',
    "l2_weights_only": "override `Experiment.init_optimizer`",
    "traj_learning_rate": "`actor_learning_rate`, `critic_learning_rate`",
    "resets": "`dones`, the original's name",
    "amago.nets.ff.InputNorm.update": "`update_stats`, the original's name",
    "amago.nets.image_goal_encoder.ImageGoalTstepEncoder": "`amago.nets.tstep_encoders.ImageGoalTstepEncoder`",
    "amago.nets.traj_encoders.GRUTrajEncoder.train": "PyTorch's own",
    "amago.nets.transformer.TransformerLayer.train": "PyTorch's own",
    **dict.fromkeys((f"amago.nets.policy_dists.MultibinaryOutput.{n}" for n in ("entropy", "sample")), "PyTorch's own"),
    "amago.envs.builtin.atari.AtariGame.": "the original's `sticky_action_prob` in place of `sticky_actions`",
    "amago.envs.builtin.ale_retro.ALE.": "the original's arguments; those of before are keywords",
    "amago.envs.builtin.ale_retro.AtariGame.": "the original's arguments; those of before are keywords",
    "amago.envs.builtin.half_cheetah_v4_vel.HalfCheetahV4_MetaVelocity.": "the original's arguments; those of before are keywords",
    "amago.nets.transformer.Cache.": "the original's arguments",
    "amago.nets.transformer.TformerHiddenState.": "the original's arguments",
    **dict.fromkeys(
        (f"amago.distributed.{n}" for n in ("Answer", "Ingest", "Link", "LocalLink", "Parcel")), "`amago launch --bus`"
    ),
    "env_trial_steps": "a mistake in an environment ends the run at its first step; `amago.check_env` finds it before",
    "trial_steps": "the same",
    "horizon": "`self.amago_env.horizon`; hooks of exploration take (action, local_step), like the original's",
    "allow_pickle": "`amago buffer import --allow-pickle`, once, or `OriginalDataset(allow_pickle=True)`",
    "amago.store.TrajectoryStore.quarantine": "`refused`, and `delete(delete_quarantine=True)`",
    "amago.store.StoreView.file_range": "`StoreView.file_of`, and `files`",
    "amago.spaces.stored_width": "`action_spec(from_description(...)).stored_dim`",
    "node_dir": "`amago collect --node-dir`",
    "amago.envs.builtin._extras.require": "`amago.registry.require`",
    "amago.run.roles.Role": "`amago.Callback` has the moments",
    "detach_params": "`BaseCriticHead.frozen` holds the parameters of any critics out of the graph",
    "cache": "`Transformer.forward` takes and returns a hidden state, like the original's",
}
"""What is no longer there, by name of an argument, or by whole name (with a dot at the end: its arguments), and what stands in its place."""


MOVED = {
    f"amago.envs.builtin.{old}": f"amago.envs.builtin.{new}"
    for new, olds in {
        "_common": ["_extras"], "alchemy": ["alchemy_chemistry"], "ale_retro": ["atari", "retro"], "half_cheetah_v4_vel": ["half_cheetah_vel"],
        "mazerunner": ["maze_runner"], "metaworld_ml": ["metaworld_envs"], "procgen_envs": ["procgen"], "tmaze": ["tmaze_exploration"],
        "toy_gym": ["frozen_lake", "key_door", "toy_mixture"], "xland_minigrid": ["xland_envs", "xland_rulesets"],
    }.items()
    for old in olds
}  # fmt: skip
"""Modules whose names another has, one file for each kind of environment."""


def missing(name):
    """What has gone of a name of the snapshot: the name, its methods, or their arguments."""
    if name in GONE:
        return []
    module, _, attribute = name.rpartition(".")
    module = MOVED.get(module, module)
    value = getattr(importlib.import_module(module), attribute, None)
    if value is None:
        return [name]
    if not callable(value) or f"{name}." in GONE:
        return []
    now, gone = public_names.parameters(value), []
    for method, arguments in SNAPSHOT[name].items():
        if method not in now:
            gone.append(f"{name}.{method}")
        elif "kwargs" not in (now[method] or []):
            gone += [
                argument
                for argument in arguments or []
                if argument not in (now[method] or []) and argument not in ("args", "kwargs")
            ]
    return gone


@pytest.mark.parametrize("module", sorted({name.rpartition(".")[0] for name in SNAPSHOT}))
def test_public_names_are_there(module):
    names = [name for name in SNAPSHOT if name.rpartition(".")[0] == module]
    assert not [gone for name in names for gone in missing(name) if gone not in GONE]
