"""Classes by name, one registry for each kind of part of an agent; and packages that an extra installs."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
C = TypeVar("C", bound=type)


class Registry(dict[str, T]):
    """The classes of one kind by name, a dict.

    Args:
        kind: their name in messages, such as "agent".
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self._replaceable = kind, frozenset[str]()

    def register(self, *names: str, replaceable: bool = False) -> Callable[[C], C]:
        """Decorate a class to make it known by these names.

        Args:
            replaceable: another class may take the names over.

        Raises:
            TypeError: a name is no text, as where the decorator was used without one.
            ValueError: a name is taken.
        """
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"the name of a {self.kind} must be a str, got {name!r}; write @register_{self.kind}('name')")
            if name in self and name not in self._replaceable:
                raise ValueError(f"the name {name!r} is taken by the {self.kind} {getattr(self[name], '__name__', self[name])}")

        def add(cls: C) -> C:
            self._replaceable = self._replaceable.difference(names).union(names if replaceable else ())
            self.update(dict.fromkeys(names, cls))  # type: ignore[arg-type]
            return cls

        return add

    def find(self, name: str) -> T:
        """The class of that name.

        Raises:
            KeyError: there is none; the message lists the names.
        """
        if name not in self:
            raise KeyError(f"no {self.kind} is called {name!r}; there are {', '.join(self.names())}")
        return self[name]

    def names(self) -> list[str]:
        """All names, in alphabetical order."""
        return sorted(self)


def require(module: str, extra: str | None = None, what: str = "") -> Any:
    """Import a module; if it or a dependency is missing, an ImportError says ``what`` needs it, and the command that installs the extra, or
    for None the package."""
    if (found := sys.modules.get(module)) is not None:  # warnings are left alone then
        return found
    package = module.partition(".")[0]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecation warnings about the packages' own code
            return importlib.import_module(module)
    except ImportError as err:
        needed = package if extra is None else f"'amago[{extra}]'"
        needs = f"{what} needs {module}, which" if what else package
        raise ImportError(f"{needs} could not be imported ({err}). Install it: pip install {needed}") from err
