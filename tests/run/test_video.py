"""Videos of rollouts on disk and in the loggers."""

import numpy as np
import pytest
from messages import naming

from amago.run import video


def pictures(n=6, height=20, width=30):
    """A white square that moves to the right."""
    out = np.zeros((n, height, width, 3), np.uint8)
    for i in range(n):
        out[i, 5:10, 4 * i : 4 * i + 5] = 255
    return list(out)


def test_a_gif_shows_the_pictures_in_order(tmp_path):
    image = pytest.importorskip("PIL.Image")
    path = video.write_video(pictures(), tmp_path / "new" / "a.gif", fps=5)
    with image.open(path) as film:
        assert (film.n_frames, film.info["duration"], film.info["loop"]) == (6, 200, 0)
        scale = film.width // 30
        assert scale > 1, "small pictures are enlarged"
        for i in range(6):
            film.seek(i)
            columns = np.nonzero(np.asarray(film.convert("L")).max(axis=0) > 128)[0]
            assert (columns.min(), columns.max()) == (4 * i * scale, (4 * i + 5) * scale - 1)
    assert [p.name for p in path.parent.iterdir()] == ["a.gif"], "nothing else is left"


def test_an_mp4_shows_the_pictures_in_order(tmp_path):
    pytest.importorskip("moviepy", reason="MP4 needs moviepy (pip install 'amago[video]')")
    from moviepy import VideoFileClip

    path = video.write_video(pictures(n=12, height=21, width=31), tmp_path / "a.mp4", fps=4)
    with VideoFileClip(str(path)) as film:
        assert film.duration == pytest.approx(3.0, abs=0.3)
        assert film.size[0] % 2 == film.size[1] % 2 == 0
        first, later = film.get_frame(0.1), film.get_frame(1.1)
    at = [np.nonzero(f.max(axis=(0, 2)) > 128)[0].mean() for f in (first, later)]
    assert at[0] < at[1]
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]


def test_pictures_of_several_sizes_and_odd_sides():
    frames = video.as_frames([np.full((301, 7, 3), 9, np.uint8), np.full((300, 9, 3), 9, np.uint8)])
    assert {f.shape for f in frames} == {(302, 10, 3)}
    assert [int((f == 9).all(axis=-1).sum()) for f in frames] == [301 * 7, 300 * 9]


@pytest.mark.parametrize("bad", [np.zeros((4, 4)), np.zeros((4, 4, 3)), np.zeros((4, 4, 4), np.uint8), "text", None])
def test_what_is_no_picture_is_named(bad):
    with pytest.raises(ValueError, match=r"picture 1 must be uint8 \(height, width, 3\)"):
        video.as_frames([np.zeros((4, 4, 3), np.uint8), bad])


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"\.mp4 or \.gif"):
        video.write_video(pictures(), tmp_path / "a.avi", 4)
    with pytest.raises(ValueError, match="at least one"):
        video.write_video([], tmp_path / "a.gif", 4)
    with pytest.raises(ValueError, match=naming("fps", 0)):
        video.write_video(pictures(), tmp_path / "a.gif", 0)
    assert not list(tmp_path.iterdir())
