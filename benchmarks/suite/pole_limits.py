"""How long a Kalman filter with a linear regulator balances POPGym's noisy poles, whose physics and noise it knows.

    python -m benchmarks.suite.pole_limits

Of 180 pairs of a regulator's weights and a filter's process noise, the best of 800 rollouts is played 8,000 times. It is no upper limit:
the regulator is linear, and its force, like the agents', is all to the left or all to the right.
"""

from __future__ import annotations

from itertools import product

import numpy as np

NOISE = {"Easy": 0.1, "Medium": 0.2, "Hard": 0.3}
"""Standard deviation of what is observed of position (m) and angle (rad)."""
STEPS, SECONDS, FORCE = 200, 0.02, 10.0
GRAVITY, CART, POLE, HALF_LENGTH = 9.8, 1.0, 0.1, 0.5
ENDS = np.array([2.4, np.deg2rad(12)])
SEEN = [0, 2]
"""Of the state (position, speed, angle, its speed)."""


def moved(states: np.ndarray, pushes: np.ndarray) -> np.ndarray:
    """The states (N, 4) one step after pushes (N,) of -1 or 1; CartPole-v1."""
    _, speed, angle, turning = states.T
    mass = CART + POLE
    pushed = (FORCE * pushes + POLE * HALF_LENGTH * turning**2 * np.sin(angle)) / mass
    bend = (GRAVITY * np.sin(angle) - np.cos(angle) * pushed) / (HALF_LENGTH * (4 / 3 - POLE * np.cos(angle) ** 2 / mass))
    pull = pushed - POLE * HALF_LENGTH * bend * np.cos(angle) / mass
    return states + SECONDS * np.stack([speed, pull, turning, bend], 1)


def linear() -> tuple[np.ndarray, np.ndarray]:
    """The derivatives of `moved` by state and push, at rest: (4, 4), (4,)."""
    h = 1e-5
    by_state = [moved(sign * h * np.eye(4), np.zeros(4)) for sign in (1, -1)]
    by_push = moved(np.zeros((2, 4)), np.array([h, -h]))
    return (by_state[0] - by_state[1]).T / (2 * h), (by_push[0] - by_push[1]) / (2 * h)


def regulator(weights: tuple[float, ...], of_push: float) -> np.ndarray:
    """The gains (4,) of the linear regulator that minimises the weighted squares of the state and of the push."""
    a, b = linear()
    value = cost = np.diag(weights)
    for _ in range(3000):
        gains = (b @ value @ a) / (of_push + b @ value @ b)
        value = cost + a.T @ value @ (a - np.outer(b, gains))
    return gains


def played(noise: float, gains: np.ndarray, process: float, rollouts: int, seed: int) -> float:
    """The mean share of the steps until the pole or the cart is lost."""
    rng = np.random.default_rng(seed)
    a, _ = linear()
    states, guess, spread = rng.uniform(-0.05, 0.05, (rollouts, 4)), np.zeros((rollouts, 4)), np.eye(4) * 0.05**2 / 3
    up, lasted = np.ones(rollouts, bool), np.zeros(rollouts)
    for _ in range(STEPS):
        seen = np.clip(states[:, SEEN] + rng.normal(0, noise, (rollouts, 2)), -2 * ENDS, 2 * ENDS)
        gain = spread[:, SEEN] @ np.linalg.inv(spread[np.ix_(SEEN, SEEN)] + noise**2 * np.eye(2))
        guess, spread = guess + (seen - guess[:, SEEN]) @ gain.T, spread - gain @ spread[SEEN]
        pushes = np.where(guess @ gains < 0, 1.0, -1.0)
        # what is lost stays bounded
        states, guess = (np.clip(moved(x, pushes), -50, 50) for x in (states, guess))
        spread = a @ spread @ a.T + process * np.eye(4)
        lasted += up
        up &= (abs(states[:, SEEN]) < ENDS).all(1)
    return float(lasted.mean() / STEPS)


def main() -> None:
    weights = product((0.01, 0.1, 1.0), (0.0, 0.1), (1.0, 10.0), (0.0,))
    gains = [regulator(w, of_push) for w in weights for of_push in (0.001, 0.1, 10.0)]
    pairs = list(product(gains, (0.0, 1e-6, 1e-5, 1e-4, 1e-3)))
    for name, noise in NOISE.items():
        best = max(pairs, key=lambda pair: played(noise, *pair, rollouts=800, seed=0))
        print(f"NoisyPositionOnlyCartPole{name}: {played(noise, *best, rollouts=8000, seed=1):.3f}", flush=True)


if __name__ == "__main__":
    main()
