"""Pokemon single battles on a local Showdown server.

Needs ``pip install 'amago[pokemon]'``, Node.js, and the server's package (``make showdown``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX
from amago.registry import require
from support.showdown import BattleError, ShowdownServer

Observation = dict[str, NDArray[Any]]

OPPONENTS = ("random", "max_power", "heuristic")
"""The scripted players: a random legal choice; the move with the highest base power; poke-env's SimpleHeuristicsPlayer."""
_SEVERAL = ("doubles", "vgc", "triples", "multi", "freeforall", "2v2", "rotation", "bo3", "metronome")


def generation(battle_format: str) -> int:
    """The generation of a format of single battles, such as "gen1randombattle".

    Raises:
        ValueError: it is not the id of a format, or not of single battles.
    """
    match = re.match(r"gen([1-9])[a-z0-9]+$", str(battle_format))
    if match is None:
        raise ValueError(f"battle_format must be the id of a format, such as gen1randombattle or gen9ou, got {battle_format!r}")
    several = [word for word in _SEVERAL if word in battle_format]
    if several:
        raise ValueError(f"battle_format must be one of single battles, but {battle_format!r} is {several[0]}")
    return int(match[1])


@gin.configurable(module="amago.envs.builtin")
class PokemonBattle(gym.Env[Observation, np.int64]):
    """Battles against scripted players. Each rollout is one battle against an opponent drawn from ``opponents``.

    Teams, random events and the opponent's choices depend on the seed and on the actions alone.

    Actions, ``Discrete(n)``, numbered as in poke-env: 0 to 5 switch to a member of the team (or choose the lead in a team
    preview), 6 to 9 use a move. Further groups of four use a move with mega evolution (from generation 6), as a Z-move (7),
    dynamaxed (8) or terastallized (9). n is 10 up to generation 5, and grows by 4 per generation to 26 in generation 9.

    Observation, a dict of the player's information, float32 in [-1, 1] with the shapes of `pokemon_features.SHAPES`:
    "own_team" and "opponent_team", a row per member (0 for opponents not seen yet); "active", boosts and conditions of both
    active Pokemon; "own_moves" and "opponent_moves", the moves of the active Pokemon; "field", weather, hazards and remaining
    team sizes. In addition "action_mask", ``MultiBinary(n)``, the legal actions: bind ``ActionMask.key = "action_mask"``.

    Reward: 1 for a win and -1 for a loss, plus ``shaping`` times the change of the advantage. The advantage is the mean of the
    fraction of hit points left and the fraction of the team not fainted, own minus opponent's. The rollout terminates with the
    battle. It truncates after ``max_steps`` choices, and the battle is forfeited.

    Metrics at the end of a rollout: ``Won`` (0.5 for a draw or a truncated battle), ``Turns``, ``Illegal Choices``, and
    ``Refused Choices``, the choices that the server rejected. The latter includes legal actions that turn out to be impossible,
    because the opponent has a hidden ability that prevents switching, for example.

    Args:
        server: a `ShowdownServer` or its url.
        battle_format: id of a format of single battles, such as "gen1randombattle". Formats without "random" need ``teams``.
        opponents: names from `OPPONENTS`; a name that occurs several times is drawn more often.
        shaping: weight of the change of the advantage in the reward.
        max_steps: maximum choices per rollout.
        teams: teams in Showdown's export format or packed format; each side draws one per battle.
        raise_if_illegal: raise ValueError for an illegal action; otherwise the server chooses instead.
        timeout: maximum seconds to wait for the server.
        render_mode: None or "ansi".

    Attributes:
        env_name: the format and the opponent of this rollout, which separates metrics by opponent.
        opponent: the opponent of this rollout.
        horizon: ``max_steps``.
        battle: the battle as a poke-env object, None before the first `reset`.

    Raises:
        ImportError: poke-env is missing.
        TypeError, ValueError: an argument has the wrong type or is out of range.
        BattleError: `reset` or `step` failed, because the server has ended, or rejects the format or a team.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(
        self,
        server: str | ShowdownServer,
        battle_format: str = "gen1randombattle",
        opponents: Sequence[str] = OPPONENTS,
        shaping: float = 0.5,
        max_steps: int = 200,
        teams: Sequence[str] = (),
        raise_if_illegal: bool = False,
        timeout: float = 30.0,
        render_mode: str | None = None,
    ) -> None:
        url = server.url if isinstance(server, ShowdownServer) else server
        if not isinstance(url, str) or not url.startswith("ws"):
            raise TypeError(f"server must be a ShowdownServer or its url (ws://...), got {server!r}")
        self.url, self.battle_format, self.gen = url, battle_format, generation(battle_format)
        self.opponents = _check_opponents(opponents)
        self.shaping = common.check_real("shaping", shaping)
        self.horizon = common.check_int("max_steps", max_steps, 1)
        if isinstance(teams, str) or not all(isinstance(team, str) for team in teams):
            raise TypeError(f"teams must be a list of strings, got {teams!r}")
        if bool(teams) == ("random" in battle_format):
            raise ValueError(
                f"teams must be given for formats without random teams, and only for those; got {teams!r} with {battle_format}"
            )
        self.teams = tuple(teams)
        self.raise_if_illegal = common.check_bool("raise_if_illegal", raise_if_illegal)
        self.timeout = common.check_real("timeout", timeout)
        self.render_mode = common.check_render_mode(render_mode, self.metadata["render_modes"])  # type: ignore[arg-type]
        require("poke_env", "pokemon")
        from support import pokemon_features as features
        from support import pokemon_players as players

        self._features, self._players = features, players
        n = players.SWITCHES + players.MOVES * len(players.gimmicks(self.gen))
        self.action_space = gym.spaces.Discrete(n)
        boxes = {key: gym.spaces.Box(-1.0, 1.0, shape, np.float32) for key, shape in features.SHAPES.items()}
        self.observation_space = gym.spaces.Dict({"action_mask": gym.spaces.MultiBinary(n), **boxes})
        self.opponent = self.opponents[0]
        self.battle: Any = None
        self._table: Any = None
        self._steps, self._illegal, self._advantage, self._under_way = 0, 0, 0.0, False

    @property
    def env_name(self) -> str:
        return f"{self.battle_format}-{self.opponent}"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.opponent = self.opponents[int(self.np_random.integers(len(self.opponents)))]
        if self._table is None:
            self._table = self._players.Table(self.url, self.battle_format, self.gen, self.timeout)
        self._under_way = False
        battle_seed = f"gen5,{int(self.np_random.integers(2**63)):016x}"
        rng = np.random.default_rng(self.np_random.integers(2**63))
        teams = [self.teams[i] for i in self.np_random.integers(len(self.teams), size=2)] if self.teams else []
        self.battle = self._or_leave(self._table.begin, self.opponent, battle_seed, rng, teams)
        self._steps, self._illegal, self._advantage, self._under_way = 0, 0, self._features.advantage(self.battle), True
        return self._observe(), {}

    def legal(self) -> NDArray[np.int8]:
        """The mask of the position as it is; 0 everywhere when nothing is to be chosen any more."""
        mask = np.zeros(int(self.action_space.n), dtype=np.int8)  # type: ignore[attr-defined]
        mask[list(self._orders())] = 1
        return mask

    def scripted_action(self, kind: str) -> int:
        """The action of the scripted player ``kind`` in the present state, to record its battles."""
        _check_opponents([kind])
        if not self._under_way:
            common.refuse_step("PokemonBattle")
        orders = self._orders()
        wanted = self._players.scripted_order(kind, self.battle, self.gen, self.np_random)
        return next((action for action, order in sorted(orders.items()) if order == wanted), min(orders))

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Make a choice, and continue to the next position that requires one."""
        index = common.check_action(action, int(self.action_space.n))  # type: ignore[attr-defined]
        if not self._under_way:
            common.refuse_step("PokemonBattle")
        order = self._orders().get(index)
        if order is None:
            self._illegal += 1
            if self.raise_if_illegal:
                raise ValueError(f"action {index} is not legal now; these are: {sorted(self._orders())}")
            order = "/choose default"
        self.battle = self._or_leave(self._table.play, order)
        self._steps += 1
        before, self._advantage = self._advantage, self._features.advantage(self.battle)
        reward = self.shaping * (self._advantage - before)
        terminated = bool(self.battle.finished)
        truncated = not terminated and self._steps >= self.horizon
        if terminated:
            reward += float(bool(self.battle.won)) - float(bool(self.battle.lost))
        self._under_way = not (terminated or truncated)
        return self._observe(), reward, terminated, truncated, {} if self._under_way else self._metrics()

    def _or_leave(self, do: Callable[..., Any], *arguments: object) -> Any:
        try:
            return do(*arguments)
        except BaseException:  # including KeyboardInterrupt: the state of the battle is unknown
            self.close()
            raise

    def _orders(self) -> dict[int, str]:
        return self._players.legal_orders(self.battle, self.gen) if self.battle is not None else {}

    def _metrics(self) -> dict[str, float]:
        won = 0.5 + (float(bool(self.battle.won)) - float(bool(self.battle.lost))) / 2
        numbers = {
            "Won": won, "Turns": float(self.battle.turn), "Illegal Choices": float(self._illegal),
            "Refused Choices": float(self._table.agent.refused),
        }  # fmt: skip
        return {f"{AMAGO_ENV_LOG_PREFIX} {name}": value for name, value in numbers.items()}

    def _observe(self) -> Observation:
        return {"action_mask": self.legal(), **self._features.encode(self.battle, self._steps / self.horizon)}

    def render(self) -> Any:
        """Both teams with their hit points, with ``render_mode="ansi"``."""
        if self.render_mode != "ansi" or self.battle is None:
            return None
        lines = [f"turn {self.battle.turn} of {self.env_name}"]
        for side, team in (("own", self.battle.team), ("opponent", self.battle.opponent_team)):
            mons = (f"{'*' if mon.active else ''}{mon.species} {mon.current_hp_fraction:.0%}" for mon in team.values())
            lines.append(f"{side}: {', '.join(mons)}")
        return "\n".join(lines)

    def close(self) -> None:
        """Disconnect from the server; `reset` connects again."""
        table, self._table, self._under_way = self._table, None, False
        if table is not None:
            table.close()


def _check_opponents(opponents: Sequence[str]) -> tuple[str, ...]:
    if isinstance(opponents, str):
        raise TypeError(f"opponents must be a list of names, got {opponents!r}")
    unknown = [name for name in opponents if name not in OPPONENTS]
    if unknown or not opponents:
        raise ValueError(f"opponents must be names from {', '.join(OPPONENTS)}, got {list(opponents)!r}")
    return tuple(opponents)


__all__ = ["OPPONENTS", "BattleError", "PokemonBattle", "ShowdownServer", "generation"]
