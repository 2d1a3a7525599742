"""Pokemon battles: the server's life, and what poke-env, the rules and the player on the other side say of the same battle."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_helpers import wait_until
from run_inside import run_example
from tiny import rows

poke_env = pytest.importorskip("poke_env", reason="needs poke-env: make test-envs")

from poke_env.environment.singles_env import SinglesEnv  # noqa: E402
from support import pokemon_features as features  # noqa: E402
from support.pokemon import OPPONENTS, BattleError, PokemonBattle  # noqa: E402
from support.showdown import ShowdownServer, find_showdown  # noqa: E402

from amago.envs import AMAGO_ENV_LOG_PREFIX  # noqa: E402
from amago.store import TrajectoryStore  # noqa: E402

try:
    PACKAGE = find_showdown()
except ImportError as missing:
    pytest.skip(f"needs pokemon-showdown: make showdown ({missing})", allow_module_level=True)

TRAPPER = """Dugtrio @ Leftovers
Ability: Arena Trap
Level: 100
Jolly Nature
- Earthquake
- Stone Edge
- Sucker Punch
- Substitute

Snorlax @ Leftovers
Ability: Thick Fat
Adamant Nature
- Body Slam
- Crunch
- Rest
- Fire Punch
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ShowdownServer]:
    with ShowdownServer() as started:
        yield started


@pytest.fixture
def make(server: ShowdownServer) -> Iterator[Any]:
    made: list[PokemonBattle] = []

    def of(battle_format: str = "gen1randombattle", opponents: Any = ("random",), **kwargs: Any) -> PokemonBattle:
        made.append(PokemonBattle(server.url, battle_format, opponents, **kwargs))
        return made[-1]

    yield of
    for env in made:
        env.close()


def metric(info: dict[str, Any], name: str) -> float:
    return float(info[f"{AMAGO_ENV_LOG_PREFIX} {name}"])


def field(obs: dict[str, Any], name: str) -> float:
    return float(obs["field"][["progress", "force_switch", "trapped", "maybe_trapped", "teampreview"].index(name)])


def gone(pid: int) -> bool:
    """Whether a process has ended, within five seconds."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_nobody_outside_can_reach_it(server: ShowdownServer) -> None:
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            if state == "0A" and int(address.rpartition(":")[2], 16) == server.port:
                listening.append(address.partition(":")[0])
    assert listening == ["0100007F"]  # 127.0.0.1, in the byte order of the machine


def test_one_process_which_ends_and_leaves_nothing(server: ShowdownServer) -> None:
    with ShowdownServer() as other:
        assert other.running
        assert other.port != server.port
        assert other.url == f"ws://127.0.0.1:{other.port}/showdown/websocket"
        assert not Path(f"/proc/{other.pid}/task/{other.pid}/children").read_text().split()
    assert not other.running
    assert gone(other.pid)
    other.close()
    assert not (PACKAGE / "config" / "config.js").exists()
    assert not (PACKAGE / "logs").exists()


@pytest.mark.parametrize("battle_format", ["gen1randombattle", "gen7randombattle", "gen9randombattle"])
def test_agrees_with_poke_env_on_what_is_legal(battle_format: str, make: Any) -> None:
    env = make(battle_format, raise_if_illegal=True)
    rng, seen = np.random.default_rng(0), 0
    obs, _ = env.reset(seed=0)
    over = False
    while not over and seen < 60:
        assert env.observation_space.contains(obs)
        assert obs["action_mask"].tolist() == SinglesEnv.get_action_mask(env.battle)
        legal = np.flatnonzero(obs["action_mask"])
        assert len(legal)
        for action in legal:
            assert env._orders()[action] == SinglesEnv.action_to_order(np.int64(action), env.battle).message
        obs, _, over, _, info = env.step(rng.choice(legal))
        seen += 1
    assert seen > 10
    if over:
        assert not obs["action_mask"].any()
        assert metric(info, "Illegal Choices") == metric(info, "Refused Choices") == 0


def play(env: PokemonBattle, seed: int, policy: int) -> list[Any]:
    rng = np.random.default_rng(policy)
    obs, _ = env.reset(seed=seed)
    out: list[Any] = [env.opponent, *(obs[k] for k in sorted(obs))]
    over = False
    while not over:
        obs, reward, terminated, truncated, _ = env.step(rng.choice(np.flatnonzero(obs["action_mask"])))
        out += [reward, terminated, *(obs[k] for k in sorted(obs))]
        over = terminated or truncated
    return out


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b))


def test_a_seed_decides_everything(make: Any) -> None:
    one, other = make(opponents=OPPONENTS, max_steps=25), make(opponents=OPPONENTS, max_steps=25)
    first = play(one, seed=3, policy=0)
    assert same(first, play(other, seed=3, policy=0))
    assert same(first, play(one, seed=3, policy=0)), "whatever was played before"
    assert not same(first, play(one, seed=4, policy=0))
    assert not same(first, play(one, seed=3, policy=1))
    assert one.env_name == f"gen1randombattle-{one.opponent}"
    drawn = set()
    for seed in range(12):
        one.reset(seed=seed)
        drawn.add(one.env_name.rpartition("-")[2])
    assert drawn == set(OPPONENTS)


def test_rewards_add_up_and_the_game_is_zero_sum(make: Any) -> None:
    env = make(opponents=["max_power"], shaping=0.25)
    obs, _ = env.reset(seed=1)
    total, over, rivals = 0.0, False, env._table.rival.battles

    def sums_to_zero() -> bool:  # hit points are shown in per cent
        return any(abs(features.advantage(env.battle) + features.advantage(rival)) < 0.02 for rival in [*rivals.values()])

    while not over:
        wait_until(sums_to_zero, 30)  # the rival reads its messages by itself, and may not know its team yet
        obs, reward, over, truncated, info = env.step(env.scripted_action("random"))
        assert not truncated
        total += reward
    left = sum(mon.current_hp_fraction + (not mon.fainted) for mon in env.battle.opponent_team.values()) / 2
    left += 6 - len(env.battle.opponent_team)
    assert env.battle.lost
    assert all(mon.fainted for mon in env.battle.team.values())
    assert total == pytest.approx(-1 - 0.25 * left / 6)
    assert (metric(info, "Won"), metric(info, "Turns")) == (0.0, env.battle.turn)
    assert obs["own_team"][:, 1].tolist() == [0.0] * 6, "no hit points are left"
    with pytest.raises(Exception, match="reset"):
        env.step(0)


def test_illegal_choices(make: Any) -> None:
    env = make(max_steps=2)
    obs, _ = env.reset(seed=0)
    wrong = int(np.flatnonzero(obs["action_mask"] == 0)[0])
    assert wrong == 0, "who fights already cannot be sent in"
    env.step(wrong)
    _, _, terminated, truncated, info = env.step(env.scripted_action("max_power"))
    assert ((terminated, truncated), metric(info, "Illegal Choices")) == ((False, True), 1)
    assert metric(info, "Won") == 0.5
    strict = make(raise_if_illegal=True)
    strict.reset(seed=0)
    with pytest.raises(ValueError, match=r"action 0 is not legal now; these are: \[1, 2, 3, 4, 5, 6"):
        strict.step(0)
    with pytest.raises(ValueError, match=r"action must be in 0\.\.9, got 10"):
        strict.step(10)


def test_hidden_traps_and_facts_of_the_game(make: Any) -> None:
    """Dugtrio's Arena Trap shows itself when one tries to leave."""
    env = make("gen4customgame", teams=[TRAPPER], max_steps=3, render_mode="ansi")
    obs, _ = env.reset(seed=0)
    assert np.flatnonzero(obs["action_mask"]).tolist() == [1, 6, 7, 8, 9]
    assert (field(obs, "maybe_trapped"), field(obs, "trapped")) == (1, 0)
    earthquake, stone_edge, sucker_punch, substitute = obs["own_moves"]
    assert earthquake[5] * 200 == 100
    assert stone_edge[2] * 4 == 0.5, "rock on ground"
    assert sucker_punch[7] * 5 == pytest.approx(1), "it comes first"
    assert substitute[10] == 1, "of category status"
    assert obs["own_team"][0, 21 - 6 + len(features.TYPES) :].tolist() == pytest.approx(
        [v / 255 for v in (35, 80, 50, 50, 70, 120)]
    )
    before = env.battle.turn
    obs, reward, _, _, _ = env.step(1)
    assert env.battle.turn == before, "the server asks again"
    assert (reward, np.flatnonzero(obs["action_mask"]).tolist()) == (0, [6, 7, 8, 9])
    assert field(obs, "trapped") == 1
    assert env.render().splitlines()[1].startswith("own: *dugtrio 100%, snorlax 100%")
    env.step(9)
    *_, info = env.step(9)
    assert (metric(info, "Refused Choices"), metric(info, "Illegal Choices")) == (1, 0)


def test_faults_are_told_at_once(make: Any) -> None:
    with pytest.raises(BattleError, match="nosuchthing"):
        make("gen1nosuchthing", teams=[TRAPPER]).reset()
    begun = time.monotonic()
    with ShowdownServer() as brief:
        env = PokemonBattle(brief)
        env.reset(seed=0)
    with pytest.raises(BattleError, match=re.escape(brief.url)):
        env.step(env.scripted_action("random"))
    with pytest.raises(BattleError, match=re.escape(brief.url)):
        env.reset()
    env.close()
    assert time.monotonic() - begun < 10


FEW = "--max_steps 8 --players heuristic random --online_after 1"


def check_actions(buffer: Path) -> dict[str, int]:
    """How many recorded actions there are in each part of the buffer; each must have been legal."""
    store, counts = TrajectoryStore(buffer), {"protected": 0, "fifo": 0}
    store.refresh()
    for i in range(len(store)):
        traj = store.read(i)
        masks, actions = traj.obs["action_mask"], traj.actions[:, 0]
        assert (masks[np.arange(len(actions)), actions] == 1).all()
        counts[Path(store.view().path(i)).parent.name] += len(actions)
    store.close()
    return counts


def test_offline_from_a_record_then_online(tmp_path: Path) -> None:
    text = run_example("15_pokemon.py", tmp_path, f"{FEW} --record 2")
    assert re.search(r"recorded battles: heuristic won \d+% of 1, random won \d+% of 1", text)
    assert {row["env_steps"] for row in rows(tmp_path / "tiny")} == {0}
    buffer = tmp_path / "tiny" / "buffer"
    assert check_actions(buffer) == {"protected": 2 * 8, "fifo": 0}

    text = run_example("15_pokemon.py", tmp_path, f"{FEW} --record 3 --epochs 2 --resume auto")
    assert "recorded battles: heuristic won" in text
    assert check_actions(buffer) == {"protected": 3 * 8, "fifo": 2 * 24}, "exploration too makes legal choices only"
    last = rows(tmp_path / "tiny", "test")[-1]["values"]
    assert any(re.fullmatch(r"Average Won in gen1randombattle-\w+", name) for name in last)
    assert all(value == 0 for name, value in last.items() if name.startswith("Average Illegal Choices"))
    mine = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    assert sum("showdown.js" in Path(f"/proc/{pid}/cmdline").read_text() for pid in mine) <= 1, "but for that of this file"
