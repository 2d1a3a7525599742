"""Default arguments changed by gin: binding them by name, listing them, handing them to other processes.

Every public constructor of the library is ``gin.configurable``, and no code of the library passes an optional argument of one,
so every default can be changed from outside.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
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
    """True if modules use their fast paths for CPUs (`amago.nets.blocked`) instead of the plain code beside them.

    Each module calls this once, when it is built, and keeps the result in its attribute ``fast``. To switch all of them off:
    ``amago.config.fast_paths.enabled = False`` in a gin file, or ``use_config({"amago.config.fast_paths.enabled": False})``.
    """
    return enabled


def bind(params: Mapping[str, Any]) -> None:
    """Change the defaults of parameters.

    Args:
        params: {"Class.parameter": value}. The class may be named in full (``amago.agent.Agent``) or by a unique suffix
            (``Agent``).

    Raises:
        ValueError: the class or the parameter does not exist; the message names the entry and the nearest known names. Or the
            value has another type than the parameter.
    """
    for name, given in params.items():
        value = given if isinstance(given, type) else plain(given)
        try:
            _check_type(name, value)
            with gin.unlock_config():
                gin.bind_parameter(name, value)
        except (KeyError, ValueError) as err:  # gin raises the first for an ambiguous name
            raise ValueError(f"cannot bind {name!r} = {value!r}: {_explain(name, err)}") from err


def plain(value: Any) -> Any:
    """A number or text of NumPy, PyTorch and the like as Python's own; an array as lists; within lists, tuples and dicts, too.

    Files hold the result, so that a setting is the same after it was saved and loaded. Everything else is returned as it is.
    """
    if type(value) in (list, tuple):
        return type(value)(plain(v) for v in value)
    if type(value) is dict:
        return {plain(k): plain(v) for k, v in value.items()}
    own = type(value).__module__.partition(".")[0] in ("builtins", "amago")
    return value.tolist() if not own and callable(getattr(value, "tolist", None)) else value


def reference(text: str) -> Any:
    """The class or function that "@Name" names; a ValueError if there is none, or several."""
    try:
        return gin.config.parse_value(text)
    except (KeyError, ValueError) as err:
        raise ValueError(_explain(f"{text[1:]}.", err)) from err


def parse_files(paths: Iterable[str | Mapping[str, Any]]) -> None:
    """Apply ``.gin`` files from left to right; of several bindings of one parameter the last counts.

    Args:
        paths: files, or "zoo/NAME" for the settings of that name that come with the library; or settings as of `bind`.

    Raises:
        ValueError: a file cannot be read, or has a mistake as for `bind`; there is no such name in the zoo.
    """
    for path in paths:
        if isinstance(path, Mapping):
            bind(path)
            continue
        try:
            with gin.unlock_config():
                gin.parse_config_file(str(zoo_file(path) if str(path).startswith("zoo/") else path))
        except OSError as err:
            raise ValueError(f"cannot read the gin file {str(path)!r}: {err}") from err
        except (KeyError, ValueError) as err:
            raise ValueError(_explain_file(str(path), err)) from err
        for name, value in bindings().items():
            try:
                _check_type(name, value)
            except ValueError as err:
                raise ValueError(f"{path}: cannot bind {name!r} = {value!r}: {err}") from err


def _explain_file(path: str, err: Exception) -> str:
    """The message for an error in a file: like `bind`'s, with the line that gin quotes."""
    where = re.search(r'In file "(.*)", line (\d+)\s+([^\s=]+)\s*=', str(err))
    if where is None:
        return f"{path}: {err}"
    return f"{where[1]}, line {where[2]}: cannot bind {where[3]!r}: {_explain(where[3], err)}"


def zoo_files() -> dict[str, Path]:
    """The settings that come with the library: {"zoo/NAME": their file}, by name."""
    return {f"zoo/{p.stem}": p for p in sorted((Path(__file__).parent / "zoo").glob("*.gin"))}


def zoo_file(name: str) -> Path:
    """The file of "zoo/NAME", or a ValueError that names similar ones."""
    known = zoo_files()
    if name not in known:
        hint = _did_you_mean(name, known, 0.7) or f"'amago list zoo' lists its {len(known)}"
        raise ValueError(f"the zoo has no settings called {name!r}; {hint}")
    return known[name]


def registry() -> Mapping[str, Any]:
    """gin's entries of all configurables that this process has imported, by full name."""
    return gin.config._REGISTRY._selector_map  # gin offers no public listing


def signature_of(selector: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of a configurable, which is given by its full name."""
    wrapped = registry()[selector].wrapped
    found = dict(inspect.signature(wrapped.__init__ if inspect.isclass(wrapped) else wrapped).parameters)
    found.pop("self", None)
    return found


def settable_parameters(selector: str) -> list[str]:
    """The parameters of a configurable that have a default, or wait for a binding: others are given by the code that calls
    it."""
    return [name for name, p in signature_of(selector).items() if p.default is not p.empty]


def selectors_of(part: object) -> list[str]:
    """The full names of a class or function; [] without the decorator ``@gin.configurable``."""
    return [selector for selector, entry in registry().items() if part in (entry.wrapped, entry.wrapper)]


def selector_of(cls: Any) -> str:
    """The full name of a configurable, such as "amago.agent.Agent"; a ValueError without the decorator ``@gin.configurable``."""
    if not (found := selectors_of(cls)):
        raise ValueError(
            f"{cls.__module__}.{cls.__qualname__} is not marked @gin.configurable, so its defaults cannot be changed"
        )
    return found[0]


def _matches(name: str) -> list[str]:
    """The full names that a name, in full or a suffix of one, may mean. A scope is ignored."""
    scopeless = name.rpartition("/")[2]
    return [full for full in registry() if full == scopeless or full.endswith("." + scopeless)]


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with its bindings of now as defaults, for calls that do not ask gin; one without the decorator as it is."""
    if isinstance(function, type) or not (names := selectors_of(function)):
        return function
    return partial(registry()[names[0]].wrapped, **gin.get_bindings(function))


def is_registered(selector: str) -> bool:
    """True if a configurable with this name, in full or a suffix of it, has been imported. A scope is ignored."""
    return bool(_matches(selector))


def also_known_as(cls: object, *selectors: str) -> None:
    """Let bindings name a configurable by other full names too, such as the name in its former module.

    Give each spelling that shall be recognised: no parts of it are, so that names such as "InputNorm" stay unambiguous.
    """
    entry = registry()[selector_of(cls)]
    for selector in selectors:
        gin.config._REGISTRY._selector_map.setdefault(selector, entry)


def run_finalize_hooks() -> None:
    """Do what ``gin.finalize`` does, without locking the config: parts that are imported later must still get their names."""
    was_locked = gin.config_is_locked()
    with gin.unlock_config():
        gin.finalize()
    gin.config._set_config_is_locked(was_locked)


# ---- bindings in force ------------------------------------------------------------------------------------------------------


def bindings() -> dict[str, Any]:
    """All bindings in force, {"scope/selector.parameter": value}."""
    return {_key(*binding): value for *binding, value in _in_force()}


def _in_force() -> Iterator[tuple[str, str, str, Any]]:
    for (scope, selector), params in gin.config._CONFIG.items():
        yield from ((scope, selector, parameter, value) for parameter, value in params.items())


def _key(scope: str, selector: str, parameter: str) -> str:
    return f"{scope}/{selector}.{parameter}" if scope else f"{selector}.{parameter}"


def export_bindings(dumps: Callable[[Any], bytes] = cloudpickle.dumps) -> list[Binding]:
    """All bindings in force, each pickled separately by ``dumps``, for `import_bindings` in a child process."""
    out: list[Binding] = []
    for scope, selector, parameter, value in _in_force():
        try:
            blob = dumps(value)
        except Exception:  # harmless if the parameter is not used there: networks have bindings too
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
        key = _key(scope, selector, parameter)
        if not is_registered(selector):
            skipped.append(binding)
        elif blob is None:
            raise ValueError(f"the value bound to {key} cannot be pickled, so this worker process cannot have it")
        else:
            with gin.unlock_config():
                gin.bind_parameter(key, cloudpickle.loads(blob))
    return skipped


def reset_config() -> None:
    """Remove all bindings: every default argument is again as in its signature.

    Bindings belong to the process, not to an `Experiment`: without this, a second experiment in a notebook is built with the
    bindings of the first. Experiments that have started keep the bindings they were built with.
    """
    gin.clear_config()
    _of_earlier_experiments.clear()


clear = reset_config


def mark_as_used() -> None:
    """Remember that an `Experiment` was built with the bindings in force, for the messages of `change`."""
    _of_earlier_experiments.update(bindings())


def change(params: Mapping[str, Any], files: Iterable[str | Mapping[str, Any]] = ()) -> list[str]:
    """`bind` and then `parse_files`: all of it, or nothing if a part is wrong.

    Returns:
        the replaced bindings, and the bindings that an earlier `Experiment` has left in force; one line each.
    """
    before = bindings()
    with temporary(params):
        parse_files(files)
        new, added = bindings(), {key: dict(values) for key, values in gin.config._CONFIG.items()}
    for key, values in added.items():
        gin.config._CONFIG[key] = {**gin.config._CONFIG.get(key, {}), **values}
    replaced = [k for k, v in new.items() if k in before and _differ(before[k], v)]
    lines = [f"{k} was {_text(before[k])} and is now {_text(new[k])}" for k in replaced]
    kept = [k for k, v in _of_earlier_experiments.items() if k not in new and k in before and not _differ(v, before[k])]
    if kept:
        listed = ", ".join(f"{k} = {_text(before[k])}" for k in kept)
        lines.append(
            f"still in force from an earlier experiment of this process: {listed}; reset_config() removes all bindings"
        )
    return lines


@contextmanager
def temporary(params: Mapping[str, Any]) -> Iterator[None]:
    """Bind only ``params`` within the block. Afterwards the earlier bindings are restored."""
    saved = {key: dict(values) for key, values in gin.config._CONFIG.items()}
    gin.config._CONFIG.clear()
    try:
        bind(params)
        yield
    finally:
        gin.config._CONFIG.clear()
        gin.config._CONFIG.update(saved)


def _differ(a: object, b: object) -> bool:
    try:
        return type(a) is not type(b) or not bool(a == b)
    except Exception:  # values that cannot be compared, arrays above all
        return True


def operative_config() -> str:
    """All bindings in force as the text of ``config.txt``: sorted, one a line, classes by name."""
    return "".join(f"{name} = {_text(value)}\n" for name, value in sorted(bindings().items()))


def _text(value: object) -> str:
    return f"@{value.__module__}.{value.__qualname__}" if isinstance(value, type) else repr(plain(value))


# ---- mistakes in names and types of arguments ---------------------------------------------------------------------------------

_SYNONYMS = {
    "lr": "learning_rate", "discount": "gamma", "discount_factor": "gamma", "polyak": "tau", "hidden_size": "d_hidden",
    "hidden_dim": "d_hidden", "num_layers": "n_layers", "layers": "n_layers", "num_heads": "n_heads", "dim": "d_model",
    "context_length": "max_seq_len", "seq_len": "max_seq_len", "num_envs": "parallel_actors", "n_envs": "parallel_actors",
    "weight_decay": "l2_coeff", "max_grad_norm": "grad_clip", "num_epochs": "epochs", "buffer_size": "dset_max_size",
    "warmup_steps": "lr_warmup_steps", "name": "env_name",
}  # fmt: skip
"""The names of arguments in other libraries, in lower case."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Suggest a replacement for a name that does not exist: "did you mean X?", or the list of existing names."""
    known, synonym = list(known), _SYNONYMS.get(name.lower())
    near = _did_you_mean(synonym if synonym in known else name, known, 0.5)
    return near or f"it has {', '.join(known) or 'none'}"


def _did_you_mean(name: str, known: Iterable[str], cutoff: float) -> str:
    """The known names that are near, as a question; nothing if none is."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else ""


def _explain(name: str, err: Exception) -> str:
    selector, _, parameter = name.rpartition(".")
    scopeless, matches = selector.rpartition("/")[2], _matches(selector)
    if not matches:
        known = sorted({full.rpartition(".")[2] for full in registry()} | set(registry()))
        hint = _did_you_mean(scopeless, known, 0.5) or "if its module is not imported yet, import that first"
        return f"no configurable is called {scopeless!r}; {hint}"
    if len(matches) > 1:
        users_first = " or ".join(sorted(matches, key=lambda full: (full.startswith("amago."), full)))
        return f"{scopeless!r} is ambiguous: write the full name, {users_first}"
    if parameter not in signature_of(matches[0]):
        return f"{matches[0]} has no parameter {parameter!r}; {suggestion(parameter, settable_parameters(matches[0]))}"
    return str(err)


_PLAIN: dict[str, Callable[[Any], bool]] = {
    "int": lambda v: isinstance(v, Real) and not isinstance(v, bool) and float(v).is_integer(),
    "float": lambda v: isinstance(v, Real) and not isinstance(v, bool),
    "bool": lambda v: isinstance(v, bool),
    "str": lambda v: isinstance(v, str),
    "None": lambda v: v is None,
}


def _check_type(name: str, value: object) -> None:
    """Refuse a value for a parameter that is annotated with another plain type (int, float, bool, str, None).

    Names that do not exist are left to gin, and so are references (``@Class``, ``%MACRO``).
    """
    selector, _, parameter = name.rpartition(".")
    matches = _matches(selector)
    if len(matches) != 1 or type(value).__module__.startswith("gin"):
        return
    found = signature_of(matches[0]).get(parameter)
    kinds = found.annotation.replace(" ", "").split("|") if found is not None and isinstance(found.annotation, str) else []
    if kinds and all(kind in _PLAIN for kind in kinds) and not any(_PLAIN[kind](value) for kind in kinds):
        raise ValueError(f"{matches[0]}.{parameter} must be {' or '.join(kinds)}, got {value!r} ({type(value).__name__})")


class Default(int):
    """The default of an argument that neither a script nor its user has replaced. It is here, since functions that make environments often hold all
    arguments, and the workers that receive them need no torch."""
