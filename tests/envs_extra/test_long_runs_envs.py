"""The long runs of docs/long_runs.md in their environments: the spaces that are written down, and each command made tiny."""

import importlib
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from run_inside import run_script
from tiny import rows

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.long_run_cases import RUNS  # noqa: E402

PACKAGES = {"metaworld_ml45": "metaworld", "crafter_long": "crafter", "atari_multigame": "ale_py"}
SMALL = (
    "--memory_size 16 --memory_layers 1 --max_seq_len 8 --epochs 1 --grads_per_epoch 2 --batch_size 4 --parallel_actors 2 --no_async "
    "--start_learning_at_epoch 0 --mixed_precision no --seed 0 --quiet"
)
TINY = {
    "tmaze_10k": "--horizon 8 --timesteps_per_epoch 16 --eval_timesteps 9",
    "metaworld_ml45": "--benchmark reach-v3 --k 2 --episode_length 6 --timesteps_per_epoch 12",
    "crafter_long": "--time_limit 12 --timesteps_per_epoch 12",
    "atari_multigame": "--games Pong Breakout --time_limit 10 --resolution 36 --timesteps_per_epoch 24",
}


def needs(name: str) -> None:
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason=f"needs {PACKAGES[name]}: make test-envs")


def environment(name: str) -> gym.Env[Any, Any]:
    def module(of: str) -> Any:
        return importlib.import_module(f"amago.envs.builtin.{of}")

    worlds = module("metaworld_ml")
    return {
        "tmaze_10k": lambda: module("tmaze").TMazePassive(9_999),
        "crafter_long": lambda: module("crafter").CrafterInstructions(obs_kind="crop"),
        "atari_multigame": lambda: module("ale_retro").AtariGame("Qbert"),
        "metaworld_ml45": lambda: worlds.MetaWorld(worlds.metaworld_tasks("reach-v3"), k_episodes=3),
    }[name]()  # type: ignore[no-any-return]


@pytest.mark.parametrize("run", RUNS, ids=[run.name for run in RUNS])
def test_spaces_are_those_of_the_environment(run: Any) -> None:
    needs(run.name)
    env = environment(run.name)
    spaces = env.observation_space
    given = dict(spaces.spaces) if isinstance(spaces, gym.spaces.Dict) else {"observation": spaces}
    assert {k: (s.shape, s.dtype) for k, s in given.items()} == {k: (s.shape, s.dtype) for k, s in run.obs.items()}
    for key, space in run.obs.items():
        if space.dtype == "uint8":  # a token has a row of its own in the embedding
            assert given[key] == space, key
    assert env.action_space == run.actions
    longest = getattr(env, "time_limit", getattr(env, "horizon", None))
    assert longest == run.rollout
    env.close()


@pytest.mark.parametrize("run", RUNS, ids=[run.name for run in RUNS])
def test_the_command_runs(run: Any, tmp_path: Path) -> None:
    """With its settings of the zoo, and all of its arguments but those that are made small."""
    needs(run.name)
    where = f"--run_name {run.name} --buffer_dir ."
    arguments = [*run.command.split()[2:], *where.split(), *SMALL.split(), *TINY[run.name].split()]
    outcome = run_script(ROOT / "examples" / run.script, arguments, tmp_path)
    assert outcome.code == 0, outcome.text
    sections = {row["section"] for row in rows(tmp_path / run.name)}
    assert {"train", "val", "test"} <= sections
