"""What tests need to know of the processes of a pool that the pool itself does not say."""

import os
import signal


def pids(pool):
    """The process of each worker."""
    return [worker.process.pid for worker in pool._workers]


def actors_of(pool):
    """The actors of each worker."""
    return [list(worker.plan.make_envs) for worker in pool._workers]


def kill(pool, worker, number=signal.SIGKILL):
    os.kill(pids(pool)[worker], number)


def faults_of(pool):
    """(restarts, dropped rollouts) since the last call, without asking workers that may be broken."""
    return pool._budget.drain()
