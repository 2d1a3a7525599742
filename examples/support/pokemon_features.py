"""Encoding of a player's information about a single battle as numbers in [-1, 1].

This module imports poke-env, so `PokemonBattle` imports it when it is instantiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from poke_env.battle import Battle, Effect, Field, MoveCategory, PokemonType, SideCondition, Status, Weather

from support.pokemon_players import MOVES, SWITCHES, move_slots

if TYPE_CHECKING:
    from poke_env.battle import Move, Pokemon

TYPES = [t for t in PokemonType if t.name not in ("THREE_QUESTION_MARKS", "STELLAR")]
STATUSES = [s for s in Status if s is not Status.FNT]
STATS = ("hp", "atk", "def", "spa", "spd", "spe")
BOOSTS = ("atk", "def", "spa", "spd", "spe", "accuracy", "evasion")
EFFECTS = [
    Effect.CONFUSION, Effect.LEECH_SEED, Effect.SUBSTITUTE, Effect.REFLECT, Effect.MIST, Effect.FOCUS_ENERGY,
    Effect.PARTIALLY_TRAPPED, Effect.TRAPPED, Effect.TAUNT, Effect.ENCORE, Effect.DISABLE, Effect.ATTRACT, Effect.YAWN,
    Effect.CURSE, Effect.PERISH1, Effect.DESTINY_BOND, Effect.LOCKED_MOVE, Effect.SALT_CURE,
]  # fmt: skip
WEATHERS = [Weather.SUNNYDAY, Weather.RAINDANCE, Weather.SANDSTORM, Weather.HAIL, Weather.SNOWSCAPE]
FIELDS = [
    Field.ELECTRIC_TERRAIN, Field.GRASSY_TERRAIN, Field.MISTY_TERRAIN, Field.PSYCHIC_TERRAIN, Field.TRICK_ROOM, Field.GRAVITY,
]  # fmt: skip
SIDE = {
    SideCondition.SPIKES: 3, SideCondition.TOXIC_SPIKES: 2, SideCondition.STEALTH_ROCK: 1, SideCondition.STICKY_WEB: 1,
    SideCondition.REFLECT: 1, SideCondition.LIGHT_SCREEN: 1, SideCondition.AURORA_VEIL: 1, SideCondition.SAFEGUARD: 1,
    SideCondition.TAILWIND: 1, SideCondition.MIST: 1,
}  # fmt: skip
_LAYERS = {SideCondition.SPIKES, SideCondition.TOXIC_SPIKES}
_STRONGEST = 4.0  # the damage multiplier if both types of the target are weak to a move

SHAPES = {
    "own_team": (SWITCHES, 9 + len(STATUSES) + len(TYPES) + len(STATS)),
    "opponent_team": (SWITCHES, 9 + len(STATUSES) + len(TYPES) + len(STATS)),
    "active": (2, 7 + len(BOOSTS) + len(EFFECTS)),
    "own_moves": (MOVES, 20 + len(TYPES)),
    "opponent_moves": (MOVES, 20 + len(TYPES)),
    "field": (12 + len(WEATHERS) + len(FIELDS) + 2 * len(SIDE),),
}
"""The shapes of the arrays that `encode` returns, by key."""


def encode(battle: Battle, progress: float) -> dict[str, NDArray[np.float32]]:
    """The arrays of `SHAPES`, float32. Rows of "own_team" and "own_moves" are in the order of the actions; empty rows are 0.

    Args:
        battle: the battle from the player's point of view.
        progress: steps divided by the step limit.
    """
    me, foe = battle.active_pokemon, battle.opponent_active_pokemon
    own, theirs = list(battle.team.values())[:SWITCHES], list(battle.opponent_team.values())[:SWITCHES]
    rows = {
        "own_team": [_pokemon(mon, foe) for mon in own],
        "opponent_team": [_pokemon(mon, me) for mon in theirs],
        "active": [_active(mon) for mon in (me, foe)],
        "own_moves": _moves(me, foe, dict(move_slots(battle))),
        "opponent_moves": _moves(foe, me, {}),
        "field": _field(battle, progress, own, theirs),
    }
    out = {}
    for key, shape in SHAPES.items():
        array = np.zeros(shape, dtype=np.float32)
        values = np.asarray(rows[key], dtype=np.float32)
        array[: len(values)] = values
        out[key] = np.clip(array, -1.0, 1.0)
    return out


def _one_hot(value: object, among: Sequence[Any]) -> list[float]:
    return [float(value is one) for one in among]


def _pokemon(mon: Pokemon, against: Pokemon | None) -> list[float]:
    types = mon.types
    threat = max((mon.damage_multiplier(t) for t in against.types if t), default=1.0) if against else 1.0
    moves = list(mon.moves.values())[:MOVES]
    harm = (
        max((against.damage_multiplier(m) for m in moves if m.category is not MoveCategory.STATUS), default=1.0)
        if against
        else 1.0
    )
    stats = mon.base_stats
    return [
        1.0, float(mon.current_hp_fraction), float(mon.fainted), float(bool(mon.active)), mon.level / 100,
        float(mon.item not in (None, "", "unknown_item")), threat / _STRONGEST, harm / _STRONGEST, len(moves) / MOVES,
        *_one_hot(mon.status, STATUSES), *(float(t in types) for t in TYPES), *(stats.get(s, 0) / 255 for s in STATS),
    ]  # fmt: skip


def _active(mon: Pokemon | None) -> list[float]:
    if mon is None:
        return [0.0] * SHAPES["active"][1]
    effects = mon.effects
    return [
        mon.status_counter / 16, float(mon.first_turn), float(mon.must_recharge), float(bool(mon.preparing)),
        mon.protect_counter / 4, float(mon.is_terastallized), float(mon.is_dynamaxed), *(mon.boosts[b] / 6 for b in BOOSTS),
        *(float(effect in effects) for effect in EFFECTS),
    ]  # fmt: skip


def _moves(user: Pokemon | None, target: object, choices: dict[int, Any]) -> list[list[float]]:
    """A row for each known move of ``user``. A choice outside its known moves (such as Struggle) has the row of its action."""
    known = dict(enumerate(list(user.moves.values())[:MOVES])) if user else {}
    both = {**known, **choices}
    empty = [0.0] * SHAPES["own_moves"][1]
    return [_move(both[i], user, target, i in choices) if i in both else empty for i in range(MOVES)]


def _move(move: Move, user: Pokemon, target: Pokemon | None, offered: bool) -> list[float]:
    harm = target.damage_multiplier(move) if target and move.category is not MoveCategory.STATUS else 1.0
    pp = move.current_pp / max(1, move.max_pp)
    return [1.0, float(offered), harm / _STRONGEST, float(move.type in user.types), pp, *_nature(move)]


_natures: dict[tuple[str, int, int], list[float]] = {}


def _nature(move: Move) -> list[float]:
    """The features of a move that do not depend on the battle."""
    key = (move.id, move.gen, move.base_power)
    if key not in _natures:
        entry, category = move.entry, move.category
        hits = entry.get("multihit", 1)
        boosts, own_boosts = dict(entry.get("boosts") or {}), dict((entry.get("self") or {}).get("boosts") or {})
        own_boosts |= (entry.get("selfBoost") or {}).get("boosts") or {}
        if entry.get("target") in ("self", "allies", "adjacentAllyOrSelf"):
            boosts, own_boosts = {}, {**own_boosts, **boosts}
        _natures[key] = [
            move.base_power / 200, float(move.accuracy), entry.get("priority", 0) / 5, float(category is MoveCategory.PHYSICAL),
            float(category is MoveCategory.SPECIAL), float(category is MoveCategory.STATUS), float(np.mean(hits)) / 5,
            float(move.drain), float(move.heal), float(move.recoil), sum(own_boosts.values()) / 6, sum(boosts.values()) / 6,
            _chance(move, "status"), _chance(move, "volatileStatus"), float(bool(move.self_switch or move.force_switch)),
            *(float(move.type is t) for t in TYPES),
        ]  # fmt: skip
    return _natures[key]


def _chance(move: Move, what: str) -> float:
    """The probability that a hit causes ``what``: "status" or "volatileStatus"."""
    return max([float(what in move.entry), *(e.get("chance", 100) / 100 for e in move.secondary if what in e)])


def _field(battle: Battle, progress: float, own: list[Any], theirs: list[Any]) -> list[float]:
    alive = sum(not mon.fainted for mon in own)
    sides = [
        min(1.0, conditions.get(kind, 0) / most) if kind in _LAYERS else float(kind in conditions)
        for conditions in (battle.side_conditions, battle.opponent_side_conditions)
        for kind, most in SIDE.items()
    ]
    return [
        progress, float(battle.force_switch is True), float(battle.trapped), float(battle.maybe_trapped),
        float(battle.teampreview), float(battle.can_mega_evolve), float(battle.can_z_move), float(battle.can_dynamax),
        float(battle.can_tera), float(bool(battle.reviving)), alive / SWITCHES, opponents_left(battle) / SWITCHES,
        *(float(w in battle.weather) for w in WEATHERS), *(float(f in battle.fields) for f in FIELDS), *sides,
    ]  # fmt: skip


def opponents_left(battle: Battle) -> int:
    """The number of the opponent's Pokemon that have not fainted, including those not seen yet."""
    size = battle._team_size.get(battle.opponent_role or "", SWITCHES)
    return size - sum(bool(mon.fainted) for mon in battle.opponent_team.values())


def advantage(battle: Battle) -> float:
    """The mean of the fraction of hit points left and of the team not fainted, own minus opponent's; in [-1, 1]."""
    size = max(1, len(battle.team))
    ours = sum((float(mon.current_hp_fraction) + (not mon.fainted)) / 2 for mon in battle.team.values()) / size
    size = max(1, battle._team_size.get(battle.opponent_role or "", SWITCHES))
    seen = list(battle.opponent_team.values())
    lost = sum(1 - (float(mon.current_hp_fraction) + (not mon.fainted)) / 2 for mon in seen)
    return ours - (1 - lost / size)
