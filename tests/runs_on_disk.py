"""Runs as they lie on disk, without training any."""

import json

RETURN = "Average Total Return (Across All Env Names)"


def row(section, values, epoch=0, steps=0, updates=0, seconds=0.0):
    """A row of a log."""
    at = {"epoch": epoch, "env_steps": steps, "grad_steps": updates, "wall_time": seconds}
    return {**at, "section": section, "values": values}


def append(path, *rows):
    """Add rows to the log of a run."""
    path.mkdir(parents=True, exist_ok=True)
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(r) + "\n" for r in rows)


def phases(epoch, score, seconds=None, extra=(), attempts=(), train=()):
    """The rows of an epoch: evaluation (1 s), collection (20 s), training (9 s); 100 steps and 10 updates."""
    begin = 30.0 * epoch if seconds is None else seconds
    at = {"epoch": epoch, "steps": 100 * epoch, "updates": 10 * epoch}
    by_attempt = {f"Average Attempt {k} Success in lake": v for k, v in enumerate(attempts)}
    trained = {"Critic Loss": 1.0 / (epoch + 1), **dict(train), **dict(extra)}
    return [
        row("val", {RETURN: score, **by_attempt, **dict(extra)}, seconds=begin + 1, **at),
        row("rollout", {RETURN: score - 1}, seconds=begin + 21, **{**at, "steps": at["steps"] + 100}),
        row("train", trained, seconds=begin + 30, **{**at, "steps": at["steps"] + 100, "updates": at["updates"] + 10}),
    ]


def write_settings(path, starts=({"time": "2026-01-01T00:00:00", "host": "h"},), parameters=None, unused=(), **fields):
    """The settings of a run."""
    path.mkdir(parents=True, exist_ok=True)
    record = {
        "fields": {"run_name": path.name, "ckpt_base_dir": str(path.parent), **fields},
        "parameters": {"amago.agent.Agent.tau": 0.003, **(parameters or {})},
        "unused": list(unused),
        "starts": list(starts),
        "id": path.name,
    }
    (path / "settings.json").write_text(json.dumps(record))


def write_run(path, scores, seed=0, settings=True, learning_rate=1e-3, **more):
    """A run of one epoch for each score."""
    path.mkdir(parents=True)
    (path / "metrics.jsonl").touch()
    for epoch, score in enumerate(scores):
        append(path, *phases(epoch, score, **more))
    if settings:
        write_settings(path, seed=seed, learning_rate=learning_rate)
    return path
