"""Which node has which collectors, as pure functions."""

from __future__ import annotations

from collections.abc import Mapping


def shares(total: int, sizes: Mapping[str, float]) -> dict[str, int]:
    """Divide collectors among nodes in proportion to their sizes, by the largest remainder.

    Args:
        total: of the collectors.
        sizes: of the nodes, such as their CPUs, above 0. Equal remainders go to nodes in this order.
    """
    whole = sum(sizes.values())
    exact = {node: total * size / whole for node, size in sizes.items()}
    found = {node: int(share) for node, share in exact.items()}
    for node in sorted(exact, key=lambda n: found[n] - exact[n])[: total - sum(found.values())]:
        found[node] += 1
    return found


def assign(total: int, sizes: Mapping[str, float], before: Mapping[int, str]) -> dict[int, str]:
    """The node of each collector. As few as possible move.

    Args:
        total, sizes: see `shares`.
        before: the node of each collector until now.
    """
    room = shares(total, sizes)
    found: dict[int, str] = {}
    for index in range(total):
        node = before.get(index)
        if node is not None and room.get(node, 0) > 0:
            found[index] = node
            room[node] -= 1
    free = [node for node, n in room.items() for _ in range(n)]
    rest = [index for index in range(total) if index not in found]
    return dict(sorted((found | dict(zip(rest, free, strict=True))).items()))
