"""Declared extra fields in what environments hand over as ``info``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amago.data.extras import ExtraField, as_array
from amago.envs.autoreset import Info, Mask
from amago.envs.environment import AMAGOEnv

Array = NDArray[Any]


class InfoReader:
    """Reads the extra fields with ``source="info"`` of an environment of B rows.

    An ordinary environment's ``info`` holds one value under the field's name. A vectorised environment's holds an array (B, ...),
    valid where the mask under ``_NAME`` (if any) is True, as in Gymnasium; or it is the dict of a single row.

    Attributes:
        at_reset, at_step: the fields that are read from the info of a reset, and of a step.
    """

    def __init__(self, fields: Sequence[ExtraField], env: AMAGOEnv):
        self._env = env
        declared = [x for x in fields if x.source == "info"]
        self.at_reset = [x for x in declared if x.rows in ("T+1", "1")]
        self.at_step = [x for x in declared if x.rows in ("T+1", "T")]

    def read(
        self, fields: Sequence[ExtraField], infos: Sequence[Info], required: Mask, steps: Sequence[int]
    ) -> dict[str, Array]:
        """The values {name: (B, *shape)} of the ``required`` rows (B,); other rows are undefined.

        Args:
            infos: infos, each with the rows (B,) that it describes.
            steps: of each row, for messages: steps since the reset.

        Raises:
            ValueError: a value is missing, has another shape or dtype, or is not finite; the message names environment, row,
                step and field, and says what was expected and found.
        """
        out = {}
        for x in fields:
            values, found = np.zeros((len(required), *x.shape), x.dtype), np.zeros_like(required)
            for info, rows in infos:
                if x.name in info:
                    found |= self._take(x, info, rows & required, values, steps)
            if not found[required].all():
                row = int(np.flatnonzero(required & ~found)[0])
                raise self._error(x, row, steps, f"expected shape {x.shape} and dtype {x.dtype}, found none{self._hint()}")
            out[x.name] = values
        return out

    def _take(self, x: ExtraField, info: dict[str, Any], rows: Mask, out: Array, steps: Sequence[int]) -> Mask:
        """Write the values of some rows; returns the rows that had one."""
        value, dtype = info[x.name], np.dtype(x.dtype)
        if self._env.vectorized and f"_{x.name}" in info:
            rows = rows & np.asarray(info[f"_{x.name}"], dtype=bool)
        batched = self._env.vectorized and not (rows.sum() == 1 and np.shape(value) == x.shape)
        if batched and np.shape(value)[:1] != rows.shape:
            text = f"expected an array with one value for each of {len(rows)} rows, found shape {np.shape(value)}"
            raise self._error(x, None, steps, text)
        for row in np.flatnonzero(rows).tolist():
            try:
                out[row] = as_array(value[row] if batched else value, dtype, x.shape)
            except ValueError as err:
                raise self._error(x, row, steps, str(err)) from None
        return rows

    def _hint(self) -> str:
        return " (that of a rollout's last step belongs into info['final_info'])" if self._env.vectorized else ""

    def _error(self, x: ExtraField, row: int | None, steps: Sequence[int], text: str) -> ValueError:
        where = self._env.env_name if row is None else self._env.env_names[row]
        if row is not None:
            where += (f" (row {row})" if self._env.batched_envs > 1 else "") + f", step {steps[row]}"
        return ValueError(f"{where}: info[{x.name!r}], an extra field with rows {x.rows!r}: {text}")
