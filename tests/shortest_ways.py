"""Breadth-first search, for tests that know the best a player can do."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any


def shortest_way(
    start: Hashable, is_end: Callable[[Any], bool], moves: Callable[[Any], Iterable[tuple[int, Any]]]
) -> list[int]:
    """Actions of a shortest way to a state that is an end; ``moves(state)``: each action, and the state to which it leads."""
    came: dict[Any, tuple[Any, int] | None] = {start: None}
    todo = deque([start])
    while not is_end(state := todo.popleft()):
        for action, after in moves(state):
            if after not in came:
                came[after] = (state, action)
                todo.append(after)
    way = []
    while (step := came[state]) is not None:
        state = step[0]
        way.append(step[1])
    return way[::-1]
