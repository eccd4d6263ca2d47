"""The example pictures are those that their script draws, and show what the documents say."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from demo.examples import draw
from encoder_svc.image_decode import load_rgb

NAMES = {"scene.png", "cut_out.png", "moving.gif", "photo.jpg"}


def test_the_folder_holds_these_pictures_and_is_small() -> None:
    files = [path for path in draw.FOLDER.iterdir() if path.suffix not in (".py", ".pyc") and path.is_file()]
    assert {path.name for path in files} == NAMES
    assert sum(path.stat().st_size for path in files) < 100_000


def test_the_scene_is_the_one_that_is_drawn() -> None:
    assert np.array_equal(np.asarray(Image.open(draw.FOLDER / "scene.png")), np.asarray(draw.paint(draw.SCENE)))


def test_the_scene_is_a_red_circle_left_of_a_blue_square_on_a_light_background() -> None:
    pixels = load_rgb((draw.FOLDER / "scene.png").read_bytes()).astype(int)
    is_red = (pixels[..., 0] > 180) & (pixels[..., 2] < 80)
    is_blue = (pixels[..., 2] > 180) & (pixels[..., 0] < 80)
    assert np.nonzero(is_red)[1].max() < np.nonzero(is_blue)[1].min()
    assert abs(is_red.sum() - np.pi * 44**2) < 200  # a circle
    assert abs(is_blue.sum() - 79**2) < 200  # a square
    assert pixels[0, 0].min() > 230


def test_the_cut_out_is_transparent_around_the_star_and_seen_on_white() -> None:
    assert Image.open(draw.FOLDER / "cut_out.png").getchannel("A").getextrema() == (0, 255)
    pixels = load_rgb((draw.FOLDER / "cut_out.png").read_bytes())
    assert tuple(pixels[0, 0]) == (255, 255, 255)
    assert tuple(pixels[128, 128]) == draw.GREEN_STAR.rgb


def test_the_photograph_lies_on_its_side_in_the_file_and_is_seen_upright() -> None:
    data = (draw.FOLDER / "photo.jpg").read_bytes()
    stored = Image.open(io.BytesIO(data))
    assert stored.getexif()[draw.ORIENTATION_TAG] == draw.ON_ITS_SIDE
    upright = load_rgb(data).astype(int)
    assert upright.shape[:2] == (400, 320)
    assert upright[:40, :, 2].mean() > upright[-40:, :, 2].mean() + 100  # sky above, a dark hill below
    assert np.abs(upright - np.asarray(draw.landscape(), int)).mean() < 8


def test_the_animation_moves_to_the_right() -> None:
    path: Path = draw.FOLDER / "moving.gif"
    image = Image.open(path)
    assert image.n_frames == draw.NUM_FRAMES
    centres = []
    for index in range(image.n_frames):
        image.seek(index)
        dark = np.asarray(image.convert("L")) < 160
        centres.append(np.nonzero(dark)[1].mean())
    assert np.diff(centres).min() > draw.STEP_PIXELS - 2
