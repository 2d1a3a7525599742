"""Pokemon battles: the server's life, and what poke-env, the rules and the player on the other side say of the same battle."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_inside import run_script

poke_env = pytest.importorskip("poke_env", reason="needs poke-env: make test-envs")

from poke_env.environment.singles_env import SinglesEnv  # noqa: E402

from amago.envs import AMAGO_ENV_LOG_PREFIX, AMAGOEnv  # noqa: E402
from amago.envs.builtin import _pokemon_features as features  # noqa: E402
from amago.envs.builtin import showdown  # noqa: E402
from amago.envs.builtin.pokemon import OPPONENTS, BattleError, PokemonBattle  # noqa: E402
from amago.envs.builtin.showdown import ShowdownServer, find_showdown  # noqa: E402
from amago.store import TrajectoryStore  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "15_pokemon.py"
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


# ---- the server ------------------------------------------------------------------------------------------------------------


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


SCRIPT = """
import sys, time
from amago.envs.builtin.showdown import ShowdownServer
server = ShowdownServer()
print(server.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "terminate"])
def test_ends_with_its_script(number: int) -> None:
    script = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    assert script.stdout is not None
    pid = int(script.stdout.readline())
    os.kill(pid, 0)
    script.send_signal(number)
    script.wait(10)
    script.stdout.close()
    assert gone(pid)


def package(root: Path, code: str, version: str = showdown.VERSION) -> Path:
    (root / "dist" / "server").mkdir(parents=True)
    (root / "dist" / "server" / "index.js").write_text(code)
    (root / "package.json").write_text(json.dumps({"version": version}))
    return root


def test_says_how_to_install_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(showdown.VARIABLE, raising=False)
    monkeypatch.setattr(showdown, "_CHECKOUT", tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    words = "make showdown.*npm install --omit=optional --ignore-scripts pokemon-showdown@.*AMAGO_SHOWDOWN"
    with pytest.raises(ImportError, match=words):
        ShowdownServer()
    with pytest.raises(ImportError, match=f"{re.escape(str(tmp_path / 'x'))}.*{words}"):
        ShowdownServer(tmp_path / "x")
    here = package(tmp_path / "node_modules" / "pokemon-showdown", "")
    assert find_showdown() == here
    other = package(tmp_path / "other", "", version="0.0.1")
    monkeypatch.setenv(showdown.VARIABLE, str(other))
    with pytest.warns(RuntimeWarning, match=rf"version 0\.0\.1 .* tested with {re.escape(showdown.VERSION)}"):
        assert find_showdown() == other
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImportError, match="apt-get install nodejs npm"):
        ShowdownServer(here)


def test_says_why_the_server_did_not_start(tmp_path: Path) -> None:
    broken = package(tmp_path / "broken", "throw new Error('no such luck')")
    with pytest.raises(RuntimeError, match=r"(?s)exit code 1.*no such luck"):
        ShowdownServer(broken)
    pid = tmp_path / "pid"
    silent = package(tmp_path / "silent", f"require('fs').writeFileSync({str(pid)!r}, String(process.pid)); console.log('hm')")
    with pytest.raises(TimeoutError, match=r"(?s)within 2\.0 s.*hm"):
        ShowdownServer(silent, timeout=2.0)
    assert gone(int(pid.read_text()))


# ---- battles ---------------------------------------------------------------------------------------------------------------


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
    total, over = 0.0, False
    while not over:
        rival = next(iter(env._table.rival.battles.values()))
        assert abs(features.advantage(env.battle) + features.advantage(rival)) < 0.02  # hit points are shown in per cent
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


def test_scripted_players_are_as_strong_as_they_should_be(make: Any) -> None:
    """poke-env's documentation: its heuristics win nearly always against random players, as do those that hit hardest."""
    outcomes = {}
    for player, opponent in (("heuristic", "random"), ("max_power", "random"), ("random", "heuristic")):
        env, won = make(opponents=[opponent], shaping=0.0), []
        for seed in range(3):
            env.reset(seed=seed)
            over, rewards = False, []
            while not over:
                _, reward, over, _, _ = env.step(env.scripted_action(player))
                rewards.append(reward)
            assert set(rewards[:-1]) <= {0.0}
            won.append(rewards[-1])
        outcomes[player, opponent] = won
    assert outcomes["heuristic", "random"] == [1.0] * 3
    assert outcomes["random", "heuristic"] == [-1.0] * 3
    assert sorted(outcomes["max_power", "random"])[1:] == [1.0] * 2


def test_illegal_choices(make: Any) -> None:
    env = make(max_steps=2)
    obs, _ = env.reset(seed=0)
    wrong = int(np.flatnonzero(obs["action_mask"] == 0)[0])
    assert wrong == 0, "who fights already cannot be sent in"
    env.step(wrong)
    _, _, terminated, truncated, info = env.step(env.scripted_action("max_power"))
    assert (terminated, truncated) == (False, True)
    assert metric(info, "Illegal Choices") == 1
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
    assert reward == 0
    assert np.flatnonzero(obs["action_mask"]).tolist() == [6, 7, 8, 9]
    assert field(obs, "trapped") == 1
    assert env.render().splitlines()[1].startswith("own: *dugtrio 100%, snorlax 100%")
    env.step(9)
    *_, info = env.step(9)
    assert metric(info, "Refused Choices") == 1
    assert metric(info, "Illegal Choices") == 0


@pytest.mark.parametrize("gen", [1, 6, 9])
def test_knows_every_pokemon_and_move(gen: int) -> None:
    data = poke_env.data.GenData.from_gen(gen)
    moves = [poke_env.battle.Move(name, gen=gen) for name in data.moves]
    natures = np.array([features._nature(move) for move in moves])
    assert natures.shape == (len(moves), features.SHAPES["own_moves"][1] - 5)
    assert np.isfinite(natures).all()
    known = dict(zip(data.moves, natures))
    assert known["swordsdance"][10] * 6 == 2, "it raises the attack by two"
    assert known["thunderwave"][12] == 1, "it always paralyses"
    assert known["thunderbolt"][12] == pytest.approx(0.1, abs=0.01), "seldom, this one"
    assert known["quickattack"][2] > 0
    assert known["doubleslap"][6] * 5 == pytest.approx(3 if gen < 5 else 3.5, abs=0.5), "two to five times"
    foe = poke_env.battle.Pokemon(gen=gen, species="charizard")
    real = [name for name in data.pokedex if name not in ("missingno", "vivillonfancy")]  # poke-env fails at these itself
    rows = np.array([features._pokemon(poke_env.battle.Pokemon(gen=gen, species=name), foe) for name in real])
    assert rows.shape == (len(real), features.SHAPES["own_team"][1])
    assert rows.min() >= 0
    assert rows.max() <= 1


def test_leads_are_chosen_in_a_team_preview(make: Any) -> None:
    env = make("gen9customgame", teams=[TRAPPER])
    for lead, species in enumerate(("dugtrio", "snorlax")):
        obs, _ = env.reset(seed=5)
        assert field(obs, "teampreview") == 1
        assert np.flatnonzero(obs["action_mask"]).tolist() == [0, 1]
        obs, *_ = env.step(lead)
        assert env.battle.active_pokemon.species == species
        assert env.battle.opponent_active_pokemon.species in ("dugtrio", "snorlax")
        assert field(obs, "teampreview") == 0


def test_sides_draw_their_teams(make: Any) -> None:
    backwards = "\n\n".join(reversed(TRAPPER.strip().split("\n\n")))
    env, leads = make("gen4customgame", teams=[TRAPPER, backwards]), []
    for seed in (*range(8), *range(8)):
        env.reset(seed=seed)
        leads.append((env.battle.active_pokemon.species, env.battle.opponent_active_pokemon.species))
    assert leads[:8] == leads[8:], "the seed draws them"
    assert len(set(leads)) == 4


def test_gives_up_and_comes_back(make: Any) -> None:
    env = make()
    for seed in range(3):
        env.reset(seed=seed)
        env.step(env.scripted_action("random"))
    env.close()
    with pytest.raises(Exception, match="reset"):
        env.step(6)
    obs, _ = env.reset(seed=0)
    assert obs["action_mask"].any()


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


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"server": 8000}, r"server must be a ShowdownServer or its url .*, got 8000"),
        ({"battle_format": "randombattle"}, r"battle_format must be the id of a format, .* got 'randombattle'"),
        ({"battle_format": "gen9vgc2024regg"}, r"one of single battles, but 'gen9vgc2024regg' is vgc"),
        ({"opponents": []}, r"opponents .* got \[\]"),
        ({"opponents": ["best"]}, r"opponents .* got \['best'\]"),
        ({"opponents": "random"}, r"opponents must be a list of names, got 'random'"),
        ({"shaping": float("nan")}, r"shaping must be finite, got nan"),
        ({"max_steps": 0}, r"max_steps must be at least 1, got 0"),
        ({"teams": ["x"]}, r"teams must .* got \['x'\] with gen1randombattle"),
        ({"battle_format": "gen1ou"}, r"teams must .* got \(\) with gen1ou"),
        ({"teams": "x"}, r"teams must be a list of strings, got 'x'"),
        ({"raise_if_illegal": 1}, r"raise_if_illegal must be True or False, got 1"),
        ({"timeout": "long"}, r"timeout must be a number, got 'long'"),
        ({"render_mode": "human"}, r"render_mode must be None or one of \['ansi'\], got 'human'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(map(str, [*value, *value.values()])),
)
def test_wrong_arguments_are_named(kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        PokemonBattle(**{"server": "ws://127.0.0.1:1/x", **kwargs})


def test_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "poke_env", None)  # Python's own way to say that there is none
    with pytest.raises(ImportError, match=r"poke_env could not be imported.*pip install 'amago\[pokemon\]'"):
        PokemonBattle("ws://127.0.0.1:1/x")


# ---- the example -----------------------------------------------------------------------------------------------------------

FEW = (
    "--run_name tiny --buffer_dir . --grads_per_epoch 2 --timesteps_per_epoch 24 --parallel_actors 2 --batch_size 4 "
    "--memory_size 16 --memory_layers 1 --no_async --seed 0 --quiet --max_steps 8 --players heuristic random"
)


def rows(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "tiny" / "metrics.jsonl").read_text().splitlines()]


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
    outcome = run_script(EXAMPLE, [*FEW.split(), "--epochs", "1", "--record", "2", "--online_after", "1"], tmp_path)
    assert outcome.code == 0, outcome.text
    assert re.search(r"recorded battles: heuristic won \d+% of 1, random won \d+% of 1", outcome.text)
    assert {row["env_steps"] for row in rows(tmp_path)} == {0}
    buffer = tmp_path / "tiny" / "buffer"
    assert check_actions(buffer) == {"protected": 2 * 8, "fifo": 0}

    more = [*FEW.split(), "--epochs", "2", "--resume", "auto", "--record", "3", "--online_after", "1"]
    outcome = run_script(EXAMPLE, more, tmp_path)
    assert outcome.code == 0, outcome.text
    assert "recorded battles: heuristic won" in outcome.text
    assert check_actions(buffer) == {"protected": 3 * 8, "fifo": 2 * 24}, "exploration too makes legal choices only"
    last = [row for row in rows(tmp_path) if row["section"] == "test"][-1]["values"]
    assert any(re.fullmatch(r"Average Won in gen1randombattle-\w+", name) for name in last)
    assert all(value == 0 for name, value in last.items() if name.startswith("Average Illegal Choices"))
    mine = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    assert sum("showdown.js" in Path(f"/proc/{pid}/cmdline").read_text() for pid in mine) <= 1, "but for that of this file"


def test_amago_env_has_its_spaces(make: Any) -> None:
    env = AMAGOEnv(make("gen9randombattle"))
    assert env.action_space.n == 26
    assert env.horizon == 200
    timestep, _ = env.reset(seed=0)
    assert timestep.obs["action_mask"].shape == (1, 26)
    assert env.env_name == "gen9randombattle-random"
