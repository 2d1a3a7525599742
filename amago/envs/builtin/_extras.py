"""Import of optional packages at the time an environment needs them."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Import ``module``, which ``pip install 'amago[extra]'`` installs.

    Raises:
        ImportError: the module or one of its dependencies is missing; the message names the command that installs it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecation warnings about the packages' own code
            return importlib.import_module(module)
    except ImportError as err:
        package = module.partition(".")[0]
        raise ImportError(f"{package} could not be imported ({err}). Install it: pip install 'amago[{extra}]'") from err
