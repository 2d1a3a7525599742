"""Rules of the environments of other packages: what they refuse is named, with its value or the extra that is missing; seeds decide."""

import importlib
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from messages import naming

B = "amago.envs.builtin."
ATARI, RETRO = (B + "ale_retro", "AtariGame"), (B + "ale_retro", "RetroArcade")
PROCGEN = (B + "procgen_envs", "TwoAttemptMTProcgen")
GAME, DOMAINS = (B + "popgym_envs", "POPGymGame"), (B + "popgym_envs", "MultiDomainPOPGym")
BABYAI, CRAFTER = (B + "babyai", "MultitaskMetaBabyAI"), (B + "crafter", "CrafterInstructions")
CHEETAH, XLAND = (B + "half_cheetah_v4_vel", "HalfCheetahVel"), (B + "xland_minigrid", "XLandMiniGrid")
TASKS, RULES = (B + "metaworld_ml", "metaworld_tasks"), (B + "xland_minigrid", "generate_rulesets")
DMC, POKEMON = ("support.dmc", "DeepMindControl"), ("support.pokemon", "PokemonBattle")
NEEDS: dict[tuple[str, str], list[tuple[str, str]]] = {  # (module, the extra that installs it)
    ATARI: [("ale_py", "atari"), ("cv2", "atari")], RETRO: [("stable_retro", "retro"), ("cv2", "retro")], PROCGEN: [("envpool", "procgen")],
    GAME: [("popgym", "popgym")], DOMAINS: [("popgym", "popgym")], BABYAI: [("minigrid", "minigrid")], CRAFTER: [("crafter", "crafter")],
    CHEETAH: [("mujoco", "mujoco")], XLAND: [("xminigrid", "xland")], TASKS: [("metaworld", "metaworld")], RULES: [],
    DMC: [("dm_control", "dmc"), ("shimmy", "dmc")], POKEMON: [("poke_env", "pokemon")],
}  # fmt: skip
GIVEN: dict[tuple[str, str], tuple[Any, ...]] = {
    XLAND: (2,), TASKS: ("reach-v3",), DMC: ("cartpole-balance",), POKEMON: ("ws://127.0.0.1:1/x",),
}  # fmt: skip

WRONG: list[tuple[tuple[str, str], dict[str, Any], tuple[Any, ...]]] = [  # what the message names; the error is a ValueError or TypeError
    (ATARI, {"game": "Pacmann"}, ("game", "Pacmann", "Pacman")), (ATARI, {"action_space": "box"}, ("action_space", "minimal", "box")),
    (ATARI, {"resolution": 84}, ("resolution", 84)), (ATARI, {"resolution": (0, 84)}, ("resolution", 0)),
    (ATARI, {"grayscale": 1}, ("grayscale", 1)), (ATARI, {"sticky_action_prob": 1.0}, ("sticky_action_prob", "[0, 1)", 1.0)),
    (ATARI, {"frame_skip": 0}, ("frame_skip", 0)), (ATARI, {"time_limit": 0}, ("time_limit", 0)), (ATARI, {"render_mode": "human"}, ("human",)),
    (RETRO, {"levels": "Airstriker-Genesis-v0"}, ("levels", "Airstriker-Genesis-v0")),
    (RETRO, {"levels": ["Airstrike-Genesis"]}, ("levels", "Airstrike-Genesis", "Airstriker-Genesis")),
    (RETRO, {"levels": ["1942-Nes"]}, ("levels", "1942-Nes", "stable_retro.import")),
    (RETRO, {"levels": ["Airstriker-Genesis:Level2"]}, ("levels", "Level1")),
    (RETRO, {"levels": ["Airstriker-Genesis", "Airstriker-Genesis:Level1"]}, ("levels", "once")),
    (RETRO, {"buttons": ["A", "A"]}, ("buttons", "['A', 'A']")), (RETRO, {"resolution": (4, 84)}, ("resolution", 5, 4)),
    (RETRO, {"border": -1}, ("border", -1)), (RETRO, {"sticky_actions": -0.1}, ("sticky_actions", -0.1)),
    (RETRO, {"directory": "/nowhere"}, ("directory", "/nowhere")),
    (PROCGEN, {"games": "maze"}, ("games", "maze")), (PROCGEN, {"games": []}, ("games", [])), (PROCGEN, {"games": ["maize"]}, ("maize", "maze")),
    (PROCGEN, {"games": ["maze", "Maze"]}, ("games", "twice")), (PROCGEN, {"mode": "memory"}, ("mode", "memory-hard", "memory")),
    (PROCGEN, {"split": "val"}, ("split", "val")), (PROCGEN, {"num_levels": 2**31 - 1}, ("num_levels", 2**31 - 1)),
    (PROCGEN, {"border": 17}, ("border", 16)),
    (GAME, {"game": "AutoencodeEasier"}, ("game", "AutoencodeEasier", "AutoencodeEasy")), (GAME, {"timer": 1}, ("timer", 1)),
    (DOMAINS, {"games": ["PositionOnlyCartPoleEasy"]}, ("discrete", "PositionOnlyCartPoleEasy")),
    (DOMAINS, {"warmup_episodes": -1}, ("warmup_episodes", -1)),
    (BABYAI, {"split": "valid"}, ("split", "valid")), (BABYAI, {"obs_kind": "pixels"}, ("obs_kind", "pixels")),
    (BABYAI, {"levels": "GoToLokal"}, ("levels", "GoToLokal", "GoToLocal")), (BABYAI, {"levels": []}, ("levels", [])),
    (BABYAI, {"grid_size": 2}, ("grid_size", 3, 2)), (BABYAI, {"num_seeds": 2**30 + 1}, ("num_seeds", 2**30)),
    (CRAFTER, {"instructions": ["collect_wod"]}, ("instructions", "collect_wod", "collect_wood")), (CRAFTER, {"instructions": []}, ("instructions",)),
    (CRAFTER, {"instructions": "eat_cow"}, ("instructions", "eat_cow")), (CRAFTER, {"goals": "eat_cow"}, ("goals", "eat_cow")),
    (CRAFTER, {"min_goals": 3, "max_goals": 2}, ("min_goals", "max_goals=2", 3)), (CRAFTER, {"goals": ["fly"]}, ("goals", "fly")),
    (CRAFTER, {"goals": ["eat_cow"] * 3, "max_goals": 2}, ("goals", "max_goals=2")), (CRAFTER, {"goals": []}, ("goals", [])),
    (CHEETAH, {"target_range": (2.0, 1.0)}, ("target_range", (2.0, 1.0))), (CHEETAH, {"target_range": 1.0}, ("target_range", 1.0)),
    (CHEETAH, {"target_range": (0.0, float("inf"))}, ("target_range[1]", "inf")), (CHEETAH, {"ctrl_cost_weight": -0.1}, ("ctrl_cost_weight", -0.1)),
    (XLAND, {"rulesets": "huge"}, ("rulesets", "trivial", "huge")), (XLAND, {"grid": "R1-9x9"}, ("grid", "XLand-MiniGrid-R1-9x9", "R1-9x9")),
    (XLAND, {"shot_length": 0}, ("shot_length", 0)), (RULES, {"num": 0}, ("num", 0)), (RULES, {"split": "val"}, ("split", "val")),
    *((TASKS, {"benchmark": name}, ("benchmark", "ML45", name)) for name in ("ml11", "reach", "reech-v2", "reach-v4")),
    (DMC, {"name": "cartpole-balanse"}, ("cartpole-balanse", "dm_control/cartpole-balance-v0")),
    (DMC, {"max_episode_steps": 0}, ("max_episode_steps", 0)),
    (POKEMON, {"server": 8000}, ("server", 8000)), (POKEMON, {"battle_format": "gen9vgc2024regg"}, ("gen9vgc2024regg", "vgc")),
    (POKEMON, {"opponents": ["best"]}, ("opponents", "best")), (POKEMON, {"teams": ["x"]}, ("teams", "gen1randombattle")),
    (POKEMON, {"battle_format": "gen1ou"}, ("teams", "gen1ou")), (POKEMON, {"timeout": "long"}, ("timeout", "long")),
]  # fmt: skip


def make(of: tuple[str, str], **arguments: Any) -> Any:
    made = getattr(importlib.import_module(of[0]), of[1])
    return made(**arguments) if {"name", "server", "benchmark"} & set(arguments) else made(*GIVEN.get(of, ()), **arguments)


def need(of: tuple[str, str]) -> None:
    if missing := [module for module, _ in NEEDS[of] if find_spec(module) is None]:
        pytest.skip(f"needs {', '.join(missing)}: make test-envs")


@pytest.mark.parametrize(("of", "arguments", "named"), WRONG, ids=[f"{w[0][1]}-{w[1]}" for w in WRONG])
def test_wrong_arguments_are_named(of: tuple[str, str], arguments: dict[str, Any], named: tuple[Any, ...]) -> None:
    need(of)
    with pytest.raises((TypeError, ValueError), match=naming(*named)):
        make(of, **arguments)


PROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
MISSING = [(of, module, extra) for of, modules in NEEDS.items() for module, extra in modules]


@pytest.mark.parametrize(("of", "module", "extra"), MISSING)
def test_a_missing_package_is_named_with_its_extra(
    of: tuple[str, str], module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"\n{extra} = [" in PROJECT
    need(of)
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)  # Python's own way to say that there is none
    if of is BABYAI:
        importlib.import_module(of[0])._ids.cache_clear()
    with pytest.raises(ImportError, match=naming(module, f"pip install 'amago[{extra}]'")):
        make(of)


ACTIONS: list[tuple[tuple[str, str], dict[str, Any], Any]] = [
    (ATARI, {}, 18), (ATARI, {"action_space": "minimal"}, 6), (ATARI, {"action_space": "multibinary"}, [0, 0, 2, 0, 0]),
    (ATARI, {"action_space": "continuous"}, np.array([2, 0, 0], np.float32)), (RETRO, {"buttons": ["A", "B"]}, [0, 2]),
    (RETRO, {"buttons": ["A", "B"]}, [0, 1, 0]), (PROCGEN, {"games": ["maze"]}, 15), (BABYAI, {"levels": "GoToLocal"}, 7), (CRAFTER, {}, 17),
    *((CHEETAH, {}, a) for a in (np.zeros(5), np.full(6, 1.1), np.full(6, np.nan))),
]  # fmt: skip


@pytest.mark.parametrize(("of", "arguments", "action"), ACTIONS)
def test_wrong_actions_and_steps_without_a_rollout_are_refused(
    of: tuple[str, str], arguments: dict[str, Any], action: Any
) -> None:
    need(of)
    env = make(of, **arguments)
    with pytest.raises(gym.error.ResetNeeded, match=naming("step", "reset()")):
        env.step(action)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=naming("action")):
        env.step(action)
    env.close()


SEEDED: list[tuple[tuple[str, str], dict[str, Any]]] = [
    (ATARI, {"game": "Breakout", "time_limit": 60}), (PROCGEN, {"time_limit": 20}), (CHEETAH, {"k_episodes": 2, "episode_length": 5}),
    (BABYAI, {"levels": ["GoToLocal", "PickupLoc", "OpenRedDoor"], "mission_length": 9, "episode_length": 12}),
    *((CRAFTER, {"obs_kind": kind, "time_limit": 60}) for kind in ("render", "crop", "local")),
]  # fmt: skip


def plain(x: Any) -> Any:
    """With the bytes of arrays in their places: to print the numbers of images takes a minute."""
    if isinstance(x, Mapping):
        return {name: plain(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [plain(value) for value in x]
    return (x.dtype, x.shape, x.tobytes()) if isinstance(x, np.ndarray) else x


@pytest.mark.parametrize(("of", "arguments"), SEEDED, ids=[s[0][1] + s[1].get("obs_kind", "") for s in SEEDED])
def test_a_seed_decides_rollouts_whatever_was_before(of: tuple[str, str], arguments: dict[str, Any]) -> None:
    """This one and the next, whose observations, rewards and goals are those of a twin."""
    need(of)

    def rollouts(env: Any, seed: int) -> str:
        env.action_space.seed(1)
        seen: list[Any] = []
        for own in (seed, None):
            seen.append(env.reset(seed=own))
            over = False
            while not over:
                assert seen[-1][0] in env.observation_space
                seen.append(env.step(env.action_space.sample()))
                over = seen[-1][2] or seen[-1][3]
        return repr(plain(seen))

    one, two = make(of, **arguments), make(of, **arguments)
    first = [rollouts(one, seed) for seed in range(3)]
    assert [rollouts(two, seed) for seed in (2, 1, 0)] == first[::-1]
    assert len(set(first)) == 3
