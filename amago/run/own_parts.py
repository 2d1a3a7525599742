"""Checks, at the start of a run, of the parts of an agent that a user wrote."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

from amago.agent import BaseAgent, check_traj_encoder, check_tstep_encoder
from amago.data.findings import CheckError

log = logging.getLogger(__name__)


def warn_of_faulty_parts(agent: BaseAgent) -> None:
    """Check the timestep encoder and the sequence model of an agent, and warn of faults.

    Only classes that are not this library's own are checked; copies of them, in evaluation mode and without the exported step. Neither
    the agent nor the process's random numbers change.
    """
    spaces = agent.obs_space, agent.action_space
    parts: list[tuple[Any, Callable[[Any], None]]] = [
        (agent.tstep_encoder, lambda part: check_tstep_encoder(part, spaces)),
        (agent.traj_encoder, lambda part: check_traj_encoder(part, export=False)),
    ]
    for part, check in parts:
        if type(part).__module__.partition(".")[0] == "amago":
            continue
        name = f"{type(part).__module__}.{type(part).__qualname__}"
        try:
            check(part)
        except CheckError as err:
            warnings.warn(f"{name}: {err}\nTraining begins all the same, and may learn little or act otherwise.", stacklevel=2)
        except Exception as err:  # a part that cannot be copied may train all the same
            log.info("%s could not be checked: %r", name, err)
