"""Videos of rollouts: MP4 with Gymnasium's recorder, GIF with Pillow; also into TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib.util
import io
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amago.registry import require

Frame = NDArray[np.uint8]
LEAST_SIDE = 256  # smaller pictures are enlarged by a whole number, until their longer side is about so many pixels
SUFFIXES = (".mp4", ".gif")


def check_video_path(path: str | Path) -> Path:
    """``path`` as a Path, if a video can be written there: ValueError for another suffix, ImportError without its packages."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"a video must end in .mp4 or .gif, got {str(path)!r}")
    require("moviepy" if path.suffix.lower() == ".mp4" else "PIL.Image", "video", f"writing {path.suffix}")
    return path


def best_suffix() -> str:
    """The first of `SUFFIXES` whose packages are installed; ".gif" if there is none, for which `check_video_path` names the extra."""
    return ".mp4" if importlib.util.find_spec("moviepy") is not None else ".gif"


def as_frames(pictures: Sequence[Any]) -> list[Frame]:
    """Pictures of one size for a video: small ones enlarged, and the sides made even, which MP4 needs.

    Args:
        pictures: at least one, (height, width, 3) uint8 each, the results of ``env.render()`` with ``render_mode="rgb_array"``.
    """
    if not pictures:
        raise ValueError("a video needs at least one picture")
    arrays = [np.asarray(p) for p in pictures]
    for i, a in enumerate(arrays):
        if a.dtype != np.uint8 or a.ndim != 3 or a.shape[-1] != 3:
            raise ValueError(
                f"picture {i} must be uint8 (height, width, 3), got {a.dtype} {a.shape}; environments draw so with render_mode='rgb_array'"
            )
    height, width = max(a.shape[0] for a in arrays), max(a.shape[1] for a in arrays)
    scale = max(1, round(LEAST_SIDE / max(height, width)))
    height, width = -(-height * scale // 2) * 2, -(-width * scale // 2) * 2
    large = [a.repeat(scale, axis=0).repeat(scale, axis=1) for a in arrays]
    return [np.pad(a, ((0, height - a.shape[0]), (0, width - a.shape[1]), (0, 0))) for a in large]


def write_video(pictures: Sequence[Any], path: str | Path, fps: float) -> Path:
    """Write a video; an existing file is replaced only once the new one is complete. Returns ``path``.

    Args:
        pictures: see `as_frames`.
        path: ends in .mp4 (extra ``video``) or .gif (Pillow), and is returned. Missing directories are created.
        fps: pictures a second.
    """
    path, frames = check_video_path(path), as_frames(pictures)
    if not fps > 0:
        raise ValueError(f"fps must be positive, got {fps!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".video-") as scratch, warnings.catch_warnings():
        if path.suffix.lower() == ".gif":
            written = Path(scratch, "v.gif")
            written.write_bytes(gif(frames, fps))
        else:
            from gymnasium.utils.save_video import save_video

            warnings.simplefilter("ignore")  # of moviepy, about its own use of ffmpeg
            save_video(frames, scratch, episode_trigger=lambda _: True, fps=fps, name_prefix="video")
            (written,) = Path(scratch).glob("*.mp4")
        os.replace(written, path)
    return path


def gif(frames: Sequence[Frame], fps: float) -> bytes:
    """An animated GIF that repeats. Pillow merges equal pictures that follow each other into one that is shown for longer."""
    image = require("PIL.Image", "video", "writing GIF")
    first, *rest = [image.fromarray(f).quantize() for f in frames]
    out = io.BytesIO()
    first.save(out, "GIF", save_all=True, append_images=rest, duration=max(20, round(1000 / fps)), loop=0, optimize=False)
    return out.getvalue()


def add_to_events(writer: Any, tag: str, pictures: Sequence[Any], fps: float, step: int) -> None:
    """Add a video to an open ``SummaryWriter``, under TensorBoard's tab of images, as an animated GIF."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    frames = as_frames(pictures)
    height, width, channels = frames[0].shape
    data = gif(frames, fps)
    image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=data)
    # SummaryWriter.add_video would need moviepy, and encodes a GIF, too
    writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)


def log_to_wandb(run_dir: Path, name: str, path: Path) -> None:
    """Log a video file to Weights & Biases, as a separate run named RUN-eval, in the group of the run's name.

    Project and entity come from the environment variables AMAGO_WANDB_PROJECT and AMAGO_WANDB_ENTITY.
    """
    wandb = require("wandb", "wandb", "--log")
    with wandb.init(
        dir=str(run_dir), project=os.environ.get("AMAGO_WANDB_PROJECT"), entity=os.environ.get("AMAGO_WANDB_ENTITY"),
        name=f"{run_dir.name}-eval", group=run_dir.name, job_type="eval",
    ) as run:  # fmt: skip
        run.log({name: wandb.Video(str(path))})
