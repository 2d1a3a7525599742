"""Generation of tasks for XLand-MiniGrid: a goal, and rules by which the objects of the goal can be made from others."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common

Bytes = NDArray[np.uint8]
Tile = tuple[int, int]

HOLD, NEAR, TILES_NEAR = 1, 3, 4
"""Goals of XLand-MiniGrid: hold an object, stand beside an object, place two objects side by side."""
HOLD_RULE, NEAR_RULE, TILES_NEAR_RULE = 1, 2, 3
"""Triggers of rules, which turn objects into another: picking an object up, standing beside one, placing two side by side."""
_GOAL_SIZE, _RULE_SIZE = 5, 7

OBJECTS: tuple[Tile, ...] = tuple((shape, colour) for shape in (3, 4, 5, 11, 12) for colour in (1, 2, 3, 4, 5, 6, 8, 9, 10, 11))
"""Balls, squares, pyramids, hexes and stars in ten colours, as (tile, colour)."""


class Size(NamedTuple):
    """The difficulty of tasks.

    Attributes:
        depth: maximum number of rules in the chain that makes an object of the goal.
        decoys: number of rules whose products are useless.
        others: number of objects that occur in no rule.
    """

    depth: int
    decoys: int
    others: int


SIZES = {"trivial": Size(0, 0, 3), "small": Size(1, 1, 2), "medium": Size(2, 2, 2), "high": Size(3, 3, 1)}
SPLITS = ("train", "test")
_TEST_SHARE = 5


@dataclass(frozen=True)
class Rulesets:
    """N tasks in the encoding of XLand-MiniGrid, padded with zeros.

    Attributes:
        goals: (N, 5) uint8.
        rules: (N, R, 7) uint8.
        init_tiles: (N, T, 2) uint8, the objects at the start of a shot.
    """

    goals: Bytes
    rules: Bytes
    init_tiles: Bytes

    def __post_init__(self) -> None:
        n = len(self.goals)
        for name, value, shape in (
            ("goals", self.goals, (n, _GOAL_SIZE)), ("rules", self.rules, (n, None, _RULE_SIZE)),
            ("init_tiles", self.init_tiles, (n, None, 2)),
        ):  # fmt: skip
            right = len(value.shape) == len(shape) and all(s is None or s == v for s, v in zip(shape, value.shape))
            if value.dtype != np.uint8 or not right or 0 in value.shape:
                raise ValueError(f"{name} must be uint8 of shape {shape}, got {value.dtype} of shape {value.shape}")

    def __len__(self) -> int:
        return len(self.goals)

    def split(self, which: str) -> Rulesets:
        """The tasks of the split ``which``, "train" or "test".

        The split of a task depends on its goal and rules alone, so that no task is in both splits, whatever the seed or the
        file.

        Raises:
            ValueError: there is no such split, or it contains none of these tasks.
        """
        common.check_choice("split", which, SPLITS)
        tests = np.array([in_test(goal, rules) for goal, rules in zip(self.goals, self.rules)], dtype=bool)
        chosen = tests == (which == "test")
        if not chosen.any():
            raise ValueError(f"none of the {len(self)} tasks is in the split {which!r}")
        return Rulesets(self.goals[chosen], self.rules[chosen], self.init_tiles[chosen])

    def save(self, path: str | Path) -> None:
        """Write an ``.npz`` file for `load_rulesets`."""
        np.savez_compressed(path, goals=self.goals, rules=self.rules, init_tiles=self.init_tiles)


def in_test(goal: Bytes, rules: Bytes) -> bool:
    """Whether a task belongs to the test split, to which one task in five belongs."""
    used = sorted(bytes(rule) for rule in rules if rule.any())
    return zlib.crc32(bytes(goal) + b"".join(used)) % _TEST_SHARE == 0


def load_rulesets(path: str | Path) -> Rulesets:
    """Read tasks from an ``.npz`` file with the arrays ``goals``, ``rules`` and ``init_tiles``, as written by `Rulesets.save`.

    The benchmark files of XLand-MiniGrid are pickles, which can run arbitrary code. Convert those that you trust with
    ``numpy.savez(path, goals=..., rules=..., init_tiles=...)``.

    Raises:
        ValueError: the file has other contents.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return Rulesets(*(np.asarray(file[name]) for name in ("goals", "rules", "init_tiles")))
    except (KeyError, ValueError, AttributeError, TypeError) as err:
        raise ValueError(f"{path} contains no tasks: {err}. It must be an .npz file with goals, rules and init_tiles") from err


def generate_rulesets(size: str = "trivial", num: int = 1000, split: str = "train", seed: int = 0) -> Rulesets:
    """Generate ``num`` different solvable tasks.

    Each object of the goal is present from the start, or is the product of a rule whose inputs are present or products
    themselves. No object occurs twice in a task, so that decoy rules and unused objects do not make it unsolvable.

    Args:
        size: "trivial" (no rules), "small", "medium" or "high", see `SIZES`.
        num: number of tasks.
        split: "train" or "test", see `Rulesets.split`.
        seed: determines the tasks.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """
    common.check_choice("size", size, SIZES)
    common.check_choice("split", split, SPLITS)
    num, seed = common.check_int("num", num, 1), common.check_int("seed", seed, 0)
    rng, how = np.random.default_rng(seed), SIZES[size]
    most_rules, most_tiles = _most(how)
    seen: set[bytes] = set()
    goals: list[Bytes] = []
    rules: list[Bytes] = []
    tiles: list[Bytes] = []
    while len(goals) < num:
        goal, made_by, lying = _draw(how, rng)
        padded = np.zeros((most_rules, _RULE_SIZE), dtype=np.uint8)
        padded[: len(made_by)] = np.array(made_by, dtype=np.uint8).reshape(-1, _RULE_SIZE)
        there = np.zeros((most_tiles, 2), dtype=np.uint8)
        there[: len(lying)] = lying
        encoded = np.array(goal, dtype=np.uint8)
        key = bytes(encoded) + bytes(padded) + bytes(there)
        if key in seen or in_test(encoded, padded) != (split == "test"):
            continue
        seen.add(key)
        goals.append(encoded)
        rules.append(padded)
        tiles.append(there)
    return Rulesets(np.stack(goals), np.stack(rules), np.stack(tiles))


def _most(how: Size) -> tuple[int, int]:
    """The maximum number of rules (at least 1, so that arrays are not empty) and of objects of a task."""
    made = 2 * (2**how.depth - 1)
    return max(1, made + how.decoys), 2 * 2**how.depth + 2 * how.decoys + how.others


def _draw(how: Size, rng: np.random.Generator) -> tuple[list[int], list[list[int]], list[Tile]]:
    """A random goal, its rules, and the objects at the start."""
    fresh = [OBJECTS[i] for i in rng.permutation(len(OBJECTS))]
    kind = (HOLD, NEAR, TILES_NEAR)[rng.integers(3)]
    wanted = [fresh.pop() for _ in range(2 if kind == TILES_NEAR else 1)]
    goal = _padded([kind, *wanted[0], *(wanted[1] if kind == TILES_NEAR else ())], _GOAL_SIZE)
    rules: list[list[int]] = []
    for _ in range(int(rng.integers(1, how.depth + 1)) if how.depth else 0):
        inputs: list[Tile] = []
        for product in wanted:
            inputs += _rule(rules, product, fresh, rng)
        wanted = inputs
    lying = list(wanted)
    for _ in range(how.decoys):
        lying += _rule(rules, fresh.pop(), fresh, rng)
    lying += [fresh.pop() for _ in range(how.others)]
    return goal, [rules[i] for i in rng.permutation(len(rules))], [lying[i] for i in rng.permutation(len(lying))]


def _rule(rules: list[list[int]], product: Tile, fresh: list[Tile], rng: np.random.Generator) -> list[Tile]:
    """Add a rule with the product ``product`` to ``rules``; returns its inputs."""
    kind = (HOLD_RULE, NEAR_RULE, TILES_NEAR_RULE)[rng.integers(3)]
    inputs = [fresh.pop() for _ in range(2 if kind == TILES_NEAR_RULE else 1)]
    rules.append(_padded([kind, *(number for tile in (*inputs, product) for number in tile)], _RULE_SIZE))
    return inputs


def _padded(numbers: list[int], size: int) -> list[int]:
    return numbers + [0] * (size - len(numbers))


__all__ = ["OBJECTS", "SIZES", "SPLITS", "Rulesets", "generate_rulesets", "in_test", "load_rulesets"]
