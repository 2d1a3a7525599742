"""Packages that single environments need, imported when one of those is made."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Import ``module``, which ``pip install 'amago[extra]'`` brings.

    Raises:
        ImportError: it, or something that it imports, is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they warn of what is old in their own code
            return importlib.import_module(module)
    except ImportError as err:
        package = module.partition(".")[0]
        raise ImportError(f"{package} could not be imported ({err}). Install it: pip install 'amago[{extra}]'") from err
