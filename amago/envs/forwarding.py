"""Attributes of wrappers: what a wrapper lacks is looked up in the environment inside it, and subclasses may assign what they like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class Forwarding:
    """A wrapper whose missing public attributes are those of ``self.env``, as in Gymnasium before 1.0."""

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):  # a property of this class has raised AttributeError: raise that again, not another
            return object.__getattribute__(self, name)
        if name.startswith("_") or "env" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.env, name)


class assignable(Generic[T]):
    """A property in whose place an object may be given a value of its own, so that subclasses are free to use the name."""

    def __init__(self, getter: Callable[[Any], T]):
        self._getter, self.__doc__ = getter, getter.__doc__

    @overload
    def __get__(self, obj: None, owner: Any = None) -> assignable[T]: ...
    @overload
    def __get__(self, obj: object, owner: Any = None) -> T: ...
    def __get__(self, obj: Any, owner: Any = None) -> assignable[T] | T:
        return self if obj is None else self._getter(obj)
