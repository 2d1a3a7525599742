"""`amago.envs.builtin.half_cheetah_vel` under the name that scripts for the original system import."""

from __future__ import annotations

from amago.envs.builtin.half_cheetah_vel import HalfCheetahVel

__all__ = ["HalfCheetahV4_MetaVelocity"]

HalfCheetahV4_MetaVelocity = HalfCheetahVel
"""HalfCheetah with a hidden target velocity."""
