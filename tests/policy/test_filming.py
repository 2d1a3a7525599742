"""`amago.RecordVideo`: films of the policy while a run trains."""

import io
import os
import sys
import warnings

import gymnasium as gym
import numpy as np
import pytest
import tiny
from messages import naming
from tiny import EPISODE, experiment, learned, rows, tmaze, weights

import amago
from amago.envs import AMAGOEnv
from amago.envs.builtin import TMazePassive

image = pytest.importorskip("PIL.Image")


def films(run):
    return sorted(p.name for p in (run.run_dir / "videos").iterdir())


def milliseconds(film):
    total = 0
    for i in range(film.n_frames):  # pictures that are alike are one
        film.seek(i)
        total += film.info["duration"]
    return total


def gif_recorder(**options):
    return amago.RecordVideo(**{"interval": 1, "suffix": ".gif", **options})


def test_a_film_every_interval_and_one_of_the_last_epoch(tmp_path, capsys):
    run = learned(tmp_path, callbacks=[gif_recorder(interval=2)], epochs=3, verbose=True, progress="plain")
    assert films(run) == ["epoch_0002.gif", "epoch_0003.gif"]
    with image.open(run.run_dir / "videos" / "epoch_0003.gif") as film:
        assert milliseconds(film) == pytest.approx((EPISODE + 1) * 1000 / TMazePassive.metadata["render_fps"], rel=0.1)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("video: ")]
    assert len(said) == 2
    assert f"epoch_0003.gif ({EPISODE} steps, return" in said[1]


def test_filming_changes_nothing_in_the_run(tmp_path):
    plain = learned(tmp_path / "a", epochs=2, val_interval=1)
    filmed = learned(tmp_path / "b", epochs=2, val_interval=1, callbacks=[gif_recorder(seed=None)])
    assert len(films(filmed)) == 2
    assert tiny.differing(weights(plain), weights(filmed)) == []
    assert [r["values"] for r in rows(plain.run_dir)] == [r["values"] for r in rows(filmed.run_dir)]


def test_one_policy_and_one_seed_make_one_film(tmp_path):
    run = learned(tmp_path, callbacks=[gif_recorder()], epochs=2, train_batches_per_epoch=0)
    first, second = (run.run_dir / "videos" / f"epoch_000{i}.gif" for i in (1, 2))
    assert first.read_bytes() == second.read_bytes()


def test_an_environment_of_ones_own_with_an_argument_render_mode(tmp_path):
    modes = []

    def make(render_mode=None):
        modes.append(render_mode)
        return AMAGOEnv(TMazePassive(EPISODE, render_mode=render_mode), env_name="T")

    run = learned(tmp_path, callbacks=[gif_recorder(make_env=make, max_steps=3)])
    assert set(modes) == {"rgb_array"}
    assert films(run) == ["epoch_0001.gif"]


def test_of_several_validation_environments_the_first_is_filmed(tmp_path):
    run = learned(tmp_path, make_val_env=[tmaze, tiny.bits], make_train_env=tmaze, callbacks=[gif_recorder()])
    assert films(run) == ["epoch_0001.gif"]


@pytest.mark.parametrize(
    ("make", "said"),
    [(tiny.bits, r"does not draw itself with render_mode='rgb_array'"), (tiny.cartpoles, r"one row.*make_env")],
)
def test_what_cannot_be_filmed_is_refused_before_training(tmp_path, make, said):
    mode = "already_vectorized" if make is tiny.cartpoles else "sync"
    run = experiment(tmp_path, make, callbacks=[gif_recorder()], env_mode=mode)
    with pytest.raises(ValueError, match=said):
        run.start()
    assert not (run.run_dir / "videos").exists()


class Torn(TMazePassive):
    """Draws itself when it is new, and fails in its fourth picture."""

    pictures = 0

    def render(self):
        Torn.pictures += 1
        if Torn.pictures == 4:
            raise RuntimeError("no more ink")
        return super().render()


def test_a_film_that_fails_costs_no_training(tmp_path, caplog):
    Torn.pictures = 0
    run = learned(tmp_path, lambda: AMAGOEnv(Torn(EPISODE), env_name="T"), callbacks=[gif_recorder()], epochs=2)
    assert run.epoch == 2
    assert films(run) == ["epoch_0002.gif"]
    (warning,) = (r.getMessage() for r in caplog.records if "film" in r.getMessage())
    assert "epoch 1" in warning
    assert "no more ink" in warning


def test_overwriting_a_run_deletes_its_films_and_no_others(tmp_path):
    run = learned(tmp_path, callbacks=[gif_recorder()], epochs=2)
    mine = run.run_dir / "videos" / "mine.gif"
    mine.write_bytes(b"GIF")
    run.close()
    again = learned(tmp_path, overwrite=True)
    assert films(again) == ["mine.gif"]


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [({"interval": 0}, "interval", 0), ({"max_steps": 1.5}, "max_steps", 1.5), ({"suffix": ".avi"}, "suffix", ".avi"),
     ({"make_env": "CartPole-v1"}, "make_env", "CartPole-v1")],
)  # fmt: skip
def test_wrong_arguments_are_named(options, name, value):
    with pytest.raises(ValueError, match=naming(name, value)):
        gif_recorder(**options)


def test_without_a_package_that_writes_films(monkeypatch):
    monkeypatch.setitem(sys.modules, "moviepy", None)
    assert amago.RecordVideo().suffix == ".gif"
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"amago\[video\]"):
        amago.RecordVideo()


def test_pygame_looks_for_no_devices_while_it_draws(tmp_path, monkeypatch):
    """And the process is as before afterwards."""
    for name in ("SDL_AUDIODRIVER", "SDL_VIDEODRIVER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    seen = []

    class Looks(TMazePassive):
        def render(self):
            seen.append((os.environ.get("SDL_AUDIODRIVER"), os.environ.get("SDL_VIDEODRIVER")))
            return super().render()

    learned(tmp_path, lambda: AMAGOEnv(Looks(EPISODE), env_name="T"), callbacks=[gif_recorder()])
    assert set(seen) == {("dummy", "dummy")}
    assert not [name for name in os.environ if name.startswith("SDL_")]


def test_tensorboard_shows_the_films(tmp_path):
    pytest.importorskip("tensorboard")
    run = learned(tmp_path, callbacks=[gif_recorder()], epochs=2, log_to_tensorboard=True)
    run.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run.run_dir / "tensorboard"))
        events.Reload()
    shown = events.Images("val/video")
    assert [e.step for e in shown] == [4 * EPISODE, 8 * EPISODE], "environment steps of two actors"
    with image.open(io.BytesIO(shown[1].encoded_image_string)) as film:
        assert film.format == "GIF"
        assert milliseconds(film) > 1000 / TMazePassive.metadata["render_fps"], "more than one picture"


def test_a_script_films_when_asked(tmp_path):
    """``--video_interval`` of `add_common_cli`, beside callbacks of the script."""
    from argparse import ArgumentParser

    from amago import cli_utils

    parser = cli_utils.add_common_cli(ArgumentParser())
    args = parser.parse_args(["--run_name", "a", "--buffer_dir", str(tmp_path), "--video-interval", "3"])
    own = amago.Callback()
    run = cli_utils.create_experiment_from_cli(
        args, tmaze, tmaze, max_seq_len=EPISODE, val_timesteps_per_epoch=EPISODE, callbacks=[own]
    )
    assert run.callbacks[0] is own
    assert run.callbacks[1].interval == 3
    assert len(run.callbacks) == 2


def test_environments_that_gymnasium_makes_without_render_mode(tmp_path):
    """The environment that trains is not the one that is filmed, and stays without a render mode."""
    made = []

    def make():
        made.append(gym.make("CartPole-v1", max_episode_steps=EPISODE))
        return AMAGOEnv(made[-1], env_name="CartPole")

    pytest.importorskip("pygame")
    run = learned(tmp_path, make, callbacks=[gif_recorder(max_steps=5)], train_batches_per_epoch=0)
    assert [e.unwrapped.render_mode for e in made].count("rgb_array") == 2, "one to check, one to film"
    assert None in [e.unwrapped.render_mode for e in made]
    with image.open(run.run_dir / "videos" / "epoch_0001.gif") as film:
        assert film.n_frames > 1
        assert len(np.unique(np.asarray(film.convert("L")))) > 2, "the pole is drawn"
