"""Draws the pictures in this folder: `python -m demo.examples.draw`.

Owns what each of them shows. The scenes lie within the demo model's description, drawn with `demo.scenes`; the
photograph is made by code as well, so every file here is ours. Deterministic, but for the encoders of Pillow's version.
"""

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from demo.scenes import Scene, Shape, paint_shape

FOLDER = Path(__file__).resolve().parent
EDGE_SCALE = 4  # edges are drawn so much larger, then shrunk
ORIENTATION_TAG = 0x0112
ON_ITS_SIDE = 6  # EXIF: turn a quarter clockwise to see it upright, as phones store portraits

RED_CIRCLE = Shape("circle", "red", (220, 20, 30), x=80, y=120, size=88, turn=0, variant=())
BLUE_SQUARE = Shape("square", "blue", (30, 60, 220), x=240, y=120, size=84, turn=0, variant=())
GREEN_STAR = Shape("star", "green", (0, 160, 0), x=128, y=128, size=96, turn=0, variant=(5, 0.42))
PURPLE_DIAMOND = Shape("diamond", "purple", (138, 43, 226), x=52, y=96, size=72, turn=0, variant=(0.9,))

SCENE = Scene(320, 240, (250, 248, 240), (RED_CIRCLE, BLUE_SQUARE))
CLIP = Scene(256, 192, (255, 255, 255), (PURPLE_DIAMOND,))
NUM_FRAMES, STEP_PIXELS, FRAME_MS = 8, 21, 250


def paint(scene: Scene) -> Image.Image:
    """A scene with smooth edges."""
    picture = Image.new("RGB", (scene.width, scene.height), scene.background)
    for shape in scene.shapes:
        paint_shape(picture, shape, EDGE_SCALE, Image.Resampling.BOX)
    return picture


def cut_out() -> Image.Image:
    """A green star with nothing around it. The hidden colour is black: whoever drops the transparency sees that."""
    mask = Image.new("RGB", (256, 256), (0, 0, 0))
    paint_shape(mask, replace(GREEN_STAR, rgb=(255, 255, 255)), EDGE_SCALE, Image.Resampling.BOX)
    alpha = mask.getchannel("R")
    is_star = alpha.point(lambda value: 255 if value else 0)
    colour = Image.new("RGB", mask.size, (0, 0, 0))
    colour.paste(GREEN_STAR.rgb, mask=is_star)
    colour.putalpha(alpha)
    return colour


def clip() -> list[Image.Image]:
    """A purple diamond that moves to the right, one picture a frame."""
    return [
        paint(replace(CLIP, shapes=(replace(PURPLE_DIAMOND, x=PURPLE_DIAMOND.x + STEP_PIXELS * index),)))
        for index in range(NUM_FRAMES)
    ]


def landscape() -> Image.Image:
    """What passes for a photograph: sky, sun, hills and grain, 320 x 400 pixels, upright."""
    width, height = 320, 400
    rows = np.linspace(0, 1, height)[:, None, None]
    sky = np.array([96, 150, 222]) * (1 - rows) + np.array([252, 214, 170]) * rows
    picture = Image.fromarray(np.broadcast_to(sky, (height, width, 3)).astype(np.uint8))
    draw = ImageDraw.Draw(picture)
    draw.ellipse((208, 96, 264, 152), fill=(255, 244, 204))
    rng = random.Random(1)
    for base, colour in ((240, (112, 128, 150)), (290, (74, 104, 92)), (340, (40, 66, 44))):
        phases = [rng.uniform(0, 6) for _ in range(3)]
        ridge = [
            (x, base + sum(24 / (k + 1) * math.sin(x * (k + 1) / 52 + phase) for k, phase in enumerate(phases)))
            for x in range(width + 1)
        ]
        draw.polygon([*ridge, (width, height), (0, height)], fill=colour)
    soft = np.asarray(picture.filter(ImageFilter.GaussianBlur(1.2)), np.float32)
    grain = np.random.default_rng(1).normal(0, 5, (height, width, 1))
    return Image.fromarray((soft + grain).clip(0, 255).astype(np.uint8))


def main() -> None:
    """Write all files."""
    paint(SCENE).save(FOLDER / "scene.png", optimize=True)
    cut_out().save(FOLDER / "cut_out.png", optimize=True)
    frames = clip()
    frames[0].save(FOLDER / "moving.gif", save_all=True, append_images=frames[1:], duration=FRAME_MS, loop=0)
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = ON_ITS_SIDE
    landscape().transpose(Image.Transpose.ROTATE_90).save(FOLDER / "photo.jpg", quality=80, exif=exif)


if __name__ == "__main__":
    main()
