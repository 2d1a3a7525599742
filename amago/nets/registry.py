"""Names of the sequence models, for command lines and `amago.cli_utils.switch_traj_encoder`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from amago.registry import Registry

if TYPE_CHECKING:
    from amago.nets.traj_encoders import TrajEncoder

C = TypeVar("C", bound="type[TrajEncoder]")

TRAJ_ENCODERS: Registry[type[TrajEncoder]] = Registry("traj_encoder")
"""The sequence model of each name."""
_SIZES: dict[type[TrajEncoder], Callable[[int], dict[str, int]]] = {}


def _width(size: int) -> dict[str, int]:
    return {"d_model": size}


def named_traj_encoder(*names: str, sizes: Callable[[int], dict[str, int]] = _width) -> Callable[[C], C]:
    """Decorate a sequence model to make it known by name.

    Args:
        names: what command lines call it.
        sizes: from the width of the model (``--memory_size``) to the arguments of the class that set it. Subclasses do not
            inherit this.

    Raises:
        ValueError: a name is taken.
    """
    register = TRAJ_ENCODERS.register(*names)

    def add(cls: C) -> C:
        _SIZES[cls] = sizes
        return register(cls)

    return add


def size_arguments(cls: type[TrajEncoder], size: int) -> dict[str, int]:
    """The arguments that make a sequence model ``size`` wide; ``d_model`` for a class that is not decorated."""
    return _SIZES.get(cls, _width)(size)
