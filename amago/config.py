"""Default arguments changed by gin: binding them by name, listing them, handing them to other processes.

Every public constructor of the library is ``gin.configurable``, and no code of the library passes an optional argument of one, so
every default can be changed from outside.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any

import cloudpickle
import gin

log = logging.getLogger(__name__)
Binding = tuple[str, str, str, bytes | None]
"""(scope, selector, parameter, pickled value; None: it cannot be pickled)."""
_of_earlier_experiments: dict[str, Any] = {}  # bindings with which an Experiment has started since the last reset


@gin.configurable(module="amago.config")
def fast_paths(enabled: bool = True) -> bool:
    """Whether modules use their fast paths for CPUs (`amago.nets.cpu`) or the plain code beside them.

    Each module asks once, when it is built, and keeps the answer in its attribute ``fast``. To switch all of them off:
    ``amago.config.fast_paths.enabled = False`` in a gin file, or ``use_config({"amago.config.fast_paths.enabled": False})``.
    """
    return enabled


def bind(params: Mapping[str, Any]) -> None:
    """Change the defaults of parameters.

    Args:
        params: {"Class.parameter": value}. The class may be named in full (``amago.agent.Agent``) or by a unique suffix (``Agent``).

    Raises:
        ValueError: the class or the parameter does not exist; the message names the entry and the nearest known names. Or the value has
            another type than the parameter.
    """
    for name, value in params.items():
        try:
            _check_type(name, value)
            with gin.unlock_config():
                gin.bind_parameter(name, value)
        except ValueError as err:
            raise ValueError(f"cannot bind {name!r} = {value!r}: {_explain(name, err)}") from err


def parse_files(paths: Iterable[str]) -> None:
    """Apply ``.gin`` files from left to right; of several bindings of one parameter the last counts.

    Args:
        paths: files, or "zoo/NAME" for the settings of that name that come with the library.

    Raises:
        ValueError: a file cannot be read, or names a class or parameter that does not exist; there is no such name in the zoo.
    """
    for path in paths:
        try:
            with gin.unlock_config():
                gin.parse_config_file(str(zoo_file(path) if str(path).startswith("zoo/") else path))
        except OSError as err:
            raise ValueError(f"cannot read the gin file {str(path)!r}: {err}") from err
        except ValueError as err:
            raise ValueError(_explain_file(str(path), err)) from err
        for name, value in bindings().items():
            try:
                _check_type(name, value)
            except ValueError as err:
                raise ValueError(f"{path}: cannot bind {name!r} = {value!r}: {err}") from err


def _explain_file(path: str, err: ValueError) -> str:
    """The message for an error in a file: like that of `bind`, with the line that gin quotes."""
    where = re.search(r'In file "(.*)", line (\d+)\s+([^\s=]+)\s*=', str(err))
    if where is None:
        return f"{path}: {err}"
    return f"{where[1]}, line {where[2]}: cannot bind {where[3]!r}: {_explain(where[3], err)}"


def zoo_files() -> dict[str, Path]:
    """The settings that come with the library: {"zoo/NAME": their file}, by name."""
    return {f"zoo/{p.stem}": p for p in sorted((Path(__file__).parent / "zoo").glob("*.gin"))}


def zoo_file(name: str) -> Path:
    """The file of "zoo/NAME".

    Raises:
        ValueError: there is none; names similar ones.
    """
    known = zoo_files()
    if name not in known:
        near = difflib.get_close_matches(name.removeprefix("zoo/"), [k.removeprefix("zoo/") for k in known], n=3, cutoff=0.6)
        hint = (
            f"did you mean {' or '.join(f'zoo/{n}' for n in near)}?"
            if near
            else f"its {len(known)} settings are the .gin files in {Path(__file__).parent / 'zoo'}; 'amago zoo' lists them"
        )
        raise ValueError(f"the zoo has no settings called {name!r}; {hint}")
    return known[name]


def _registry() -> Mapping[str, Any]:
    """gin's entries of all configurables that this process has imported, by full name."""
    return gin.config._REGISTRY._selector_map  # gin offers no public listing


def run_finalize_hooks() -> None:
    """Do what ``gin.finalize`` does, without locking the config: parts that are imported later must still get their names."""
    was_locked = gin.config_is_locked()
    with gin.unlock_config():
        gin.finalize()
    gin.config._set_config_is_locked(was_locked)


def also_known_as(cls: Any, *selectors: str) -> None:
    """Let bindings name a configurable by other full names too, such as that of the module where it used to be.

    Give each spelling that shall be recognised: no parts of it are, so that names such as "InputNorm" stay unambiguous.
    """
    entry = _registry()[selector_of(cls)]
    for selector in selectors:
        gin.config._REGISTRY._selector_map.setdefault(selector, entry)


def is_registered(selector: str) -> bool:
    """Whether a configurable with this name, in full or a suffix of it, has been imported. A scope is ignored."""
    plain = selector.rpartition("/")[2]
    return any(full == plain or full.endswith("." + plain) for full in _registry())


def _explain(name: str, err: Exception) -> str:
    selector, _, parameter = name.rpartition(".")
    scopeless = selector.rpartition("/")[2]
    matches = [full for full in _registry() if full == scopeless or full.endswith("." + scopeless)]
    if not matches:
        known = {full.rpartition(".")[2] for full in _registry()} | set(_registry())
        near = difflib.get_close_matches(scopeless, sorted(known), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "if its module is not imported yet, import that first"
        return f"no configurable is called {scopeless!r}; {hint}"
    if len(matches) > 1:
        return f"{scopeless!r} is ambiguous: it may be {' or '.join(sorted(matches))}; use the full name"
    if parameter not in parameters_of(matches[0]):
        return f"{matches[0]} has no parameter {parameter!r}; {suggestion(parameter, settable_parameters(matches[0]))}"
    return str(err)


def selector_of(cls: Any) -> str:
    """The full name of a configurable, such as "amago.agent.Agent".

    Raises:
        ValueError: the class does not have the decorator ``@gin.configurable``.
    """
    for full, entry in _registry().items():
        if entry.wrapped is cls or entry.wrapper is cls:
            return full
    raise ValueError(f"{cls.__module__}.{cls.__qualname__} is not marked @gin.configurable, so its defaults cannot be changed")


def parameters_of(selector: str) -> list[str]:
    """The names of the parameters of a configurable, which is given by its full name."""
    wrapped = _registry()[selector].wrapped
    signature = inspect.signature(wrapped.__init__ if inspect.isclass(wrapped) else wrapped)
    return [p for p in signature.parameters if p != "self"]


def bindings() -> dict[str, Any]:
    """All bindings in force, {"scope/selector.parameter": value}."""
    out = {}
    for (scope, selector), params in gin.config._CONFIG.items():
        prefix = f"{scope}/{selector}" if scope else selector
        out.update({f"{prefix}.{p}": v for p, v in params.items()})
    return out


def export_bindings(dumps: Callable[[Any], bytes] = cloudpickle.dumps) -> list[Binding]:
    """All bindings in force, each pickled separately by ``dumps``, for `import_bindings` in a child process."""
    out: list[Binding] = []
    for (scope, selector), params in gin.config._CONFIG.items():
        for parameter, value in params.items():
            try:
                blob = dumps(value)
            except Exception:  # of no matter where nobody asks for it: networks have bindings too
                blob = None
            out.append((scope, selector, parameter, blob))
    return out


def import_bindings(exported: Iterable[Binding]) -> list[Binding]:
    """Apply the bindings of the parent process, as `export_bindings` returned them.

    Bindings of configurables that this process has not imported are skipped without unpickling their values: an actor must not
    import torch because a network has a binding. Those are returned, for another call when more may have been imported.

    Raises:
        ValueError: a value could not be pickled.
    """
    skipped = []
    for binding in exported:
        scope, selector, parameter, blob = binding
        if not is_registered(selector):
            skipped.append(binding)
            continue
        key = f"{scope}/{selector}.{parameter}" if scope else f"{selector}.{parameter}"
        if blob is None:
            raise ValueError(f"the value bound to {key} cannot be pickled, so this worker process cannot have it")
        with gin.unlock_config():
            gin.bind_parameter(key, cloudpickle.loads(blob))
    return skipped


def reset_config() -> None:
    """Remove all bindings: every default argument is again what its signature says.

    Bindings belong to the process, not to an `Experiment`: without this, a second experiment in a notebook is built with the bindings
    of the first. Experiments that have started keep what they were built with.
    """
    gin.clear_config()
    _of_earlier_experiments.clear()


clear = reset_config


def mark_as_used() -> None:
    """Remember that an `Experiment` was built with the bindings in force, for the messages of `change`."""
    _of_earlier_experiments.update(bindings())


def change(params: Mapping[str, Any], files: Iterable[str] = ()) -> list[str]:
    """`bind` and then `parse_files`: all of it, or nothing if a part is wrong.

    Returns:
        what was replaced, and what an earlier `Experiment` has left in force; one line each.

    Raises:
        ValueError: as `bind` and `parse_files`.
    """
    before, saved = bindings(), _emptied()
    try:
        bind(params)
        parse_files(files)
        new = bindings()
    except BaseException:
        gin.config._CONFIG.clear()
        raise
    finally:
        for key, values in saved.items():
            gin.config._CONFIG[key] = {**values, **gin.config._CONFIG.get(key, {})}
    lines = [
        f"{k} was {_shown(before[k])} and is now {_shown(v)}" for k, v in new.items() if k in before and differ(before[k], v)
    ]
    kept = [k for k, v in _of_earlier_experiments.items() if k not in new and k in before and not differ(v, before[k])]
    if kept:
        lines.append(
            f"still in force from an earlier experiment of this process: {', '.join(f'{k} = {_shown(before[k])}' for k in kept)}; "
            "reset_config() removes all bindings"
        )
    return lines


def _emptied() -> dict[Any, dict[str, Any]]:
    """Remove the bindings, and return them as gin keeps them."""
    saved = {key: dict(values) for key, values in gin.config._CONFIG.items()}
    gin.config._CONFIG.clear()
    return saved


def differ(a: Any, b: Any) -> bool:
    """Whether two values of a parameter differ; values that cannot be compared do."""
    try:
        return type(a) is not type(b) or not bool(a == b)
    except Exception:  # arrays, above all
        return True


def operative_config() -> str:
    """All bindings in force as the text of ``config.txt``: sorted, one a line, classes by name."""
    lines = []
    for name, value in sorted(bindings().items()):
        lines.append(f"{name} = {_shown(value)}")
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return f"@{value.__module__}.{value.__qualname__}" if isinstance(value, type) else repr(value)


@contextmanager
def temporary(params: Mapping[str, Any]) -> Iterator[None]:
    """Within the block only ``params`` are bound. Afterwards the earlier bindings are restored."""
    saved = _emptied()
    try:
        bind(params)
        yield
    finally:
        gin.config._CONFIG.clear()
        gin.config._CONFIG.update(saved)


# ---- mistakes in names and types of arguments ---------------------------------------------------------------------------------

_SYNONYMS = {
    "lr": "learning_rate", "discount": "gamma", "discount_factor": "gamma", "polyak": "tau", "hidden_size": "d_hidden",
    "hidden_dim": "d_hidden", "num_layers": "n_layers", "layers": "n_layers", "num_heads": "n_heads", "dim": "d_model",
    "context_length": "max_seq_len", "seq_len": "max_seq_len", "num_envs": "parallel_actors", "n_envs": "parallel_actors",
    "weight_decay": "l2_coeff", "max_grad_norm": "grad_clip", "num_epochs": "epochs", "buffer_size": "dset_max_size",
    "warmup_steps": "lr_warmup_steps", "name": "env_name",
}  # fmt: skip
"""What other libraries call an argument, in lower case."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """What to write instead of a name that does not exist: "did you mean X?", or the list of what exists."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    synonym = _SYNONYMS.get(name.lower())
    if synonym in known and synonym not in near:
        near.insert(0, synonym)
    near = near or difflib.get_close_matches(name, known, n=2, cutoff=0.45)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"it has {', '.join(known)}" if known else "it has none"


def settable_parameters(selector: str) -> list[str]:
    """The parameters of a configurable that have a default, or wait for a binding: others are given by the code that calls it."""
    wrapped = _registry()[selector].wrapped
    signature = inspect.signature(wrapped.__init__ if inspect.isclass(wrapped) else wrapped)
    return [p.name for p in signature.parameters.values() if p.default is not p.empty]


class NamedArguments:
    """Base of classes whose constructor says, of an argument that it does not have, which one may have been meant.

    Subclasses inherit this for constructors of their own.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__} takes no arguments")
        if kwargs:
            _check_names(cls, kwargs)
        return super().__new__(cls)


def _check_names(cls: Any, given: Mapping[str, Any]) -> None:
    known = _argument_names(cls)
    unknown = [] if known is None else [name for name in given if name not in known]
    if known is not None and unknown:
        free = [name for name in known if name not in given]
        raise TypeError(f"{cls.__name__} has no argument {unknown[0]!r}; {suggestion(unknown[0], free)}")


@cache
def _argument_names(cls: Any) -> tuple[str, ...] | None:
    """The names of a constructor's arguments, in order, with those of its bases if it passes ``**kwargs`` on; None: it takes any."""
    names: dict[str, None] = {}
    constructors = [base for base in cls.__mro__ if "__init__" in base.__dict__ and base is not object]
    for base in constructors:
        parameters = list(inspect.signature(base.__dict__["__init__"]).parameters.values())[1:]
        names |= {p.name: None for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            return tuple(names)
    return None if constructors else ()


_PLAIN: dict[str, Callable[[Any], bool]] = {
    "int": lambda v: isinstance(v, Real) and not isinstance(v, bool) and float(v).is_integer(),
    "float": lambda v: isinstance(v, Real) and not isinstance(v, bool),
    "bool": lambda v: isinstance(v, bool) or type(v).__name__ in ("bool_", "bool"),
    "str": lambda v: isinstance(v, str),
    "None": lambda v: v is None,
}


def _check_type(name: str, value: Any) -> None:
    """Refuse a value for a parameter that is annotated with another plain type (int, float, bool, str, None).

    Names that do not exist are left to gin, and so are references (``@Class``, ``%MACRO``).
    """
    selector, _, parameter = name.rpartition(".")
    scopeless = selector.rpartition("/")[2]
    matches = [full for full in _registry() if full == scopeless or full.endswith("." + scopeless)]
    if len(matches) != 1 or type(value).__module__.startswith("gin"):
        return
    wrapped = _registry()[matches[0]].wrapped
    found = inspect.signature(wrapped.__init__ if inspect.isclass(wrapped) else wrapped).parameters.get(parameter)
    kinds = found.annotation.replace(" ", "").split("|") if found is not None and isinstance(found.annotation, str) else []
    if kinds and all(kind in _PLAIN for kind in kinds) and not any(_PLAIN[kind](value) for kind in kinds):
        raise ValueError(f"{matches[0]}.{parameter} must be {' or '.join(kinds)}, got {value!r} ({type(value).__name__})")
