"""Draws the demo model's short videos: one solid shape moving over a plain background, 4 to 16 frames.

Owns the clip's motion, its frames and the questions about it; knows nothing of containers or codecs (a caller writes
the frames to MP4 or GIF), tokens or tensors. Pure Pillow and `random.Random`, deterministic by seed.
"""

import io
import random
from dataclasses import dataclass, replace

from PIL import Image

from demo.questions import Question, article, full_name, sentence
from demo.scenes import Scene, as_file, draw_scene, paint_shape

DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
MIN_TRAVEL = 0.25  # of the picture's side along the motion
VIDEO_TEXTS = (
    "which way does it move?",
    "which way does the {n} move?",
    "which way does the shape move?",
    "where does it move?",
    "which direction does it move?",
    "which direction does the {n} move?",
    "in which direction does the {n} move?",
    "in which direction does it move?",
    "in what direction is the {n} moving?",
    "what direction does the shape move?",
    "which way is the {n} moving?",
    "which way is it moving?",
    "which way is the shape moving?",
    "where is it going?",
    "what direction is it moving?",
    "what is the direction of motion?",
    "which way does the object move?",
    "in which direction does the shape move?",
    "which direction is the shape moving in?",
    "how does the {n} move?",
    "does it move left, right, up or down?",
    "where does the {n} go?",
    "how does it move?",
    "where does the shape go?",
    "which way does it go?",
    "which way does the {n} go?",
    "does the {n} move left, right, up or down?",
    "what direction is the {n} moving in?",
    "in which direction is the shape moving?",
    "how does the shape move?",
    "which way does it move in the video?",
    "in this video, which way does the shape move?",
    "which way does the shape in the video move?",
    "in which direction does the object move in this video?",
)
SEE_TEXTS = (
    "what is in the video?",
    "what do you see?",
    "what happens?",
    "what happens in the video?",
    "describe the video.",
    "what is in this video?",
    "what does the video show?",
    "what do you see in the video?",
    "what is happening?",
    "describe this video.",
    "what is shown in the video?",
    "what can you see?",
    "what moves?",
    "what is moving?",
)
CLIP_COLOUR_TEXTS = (
    "what colour is the shape?",
    "what colour is it?",
    "what colour is the {k}?",
    "what is the colour of the {k}?",
    "which colour is the shape?",
    "what colour is the shape in the video?",
    "what colour is the moving shape?",
)
CLIP_SHAPE_TEXTS = (
    "what shape is it?",
    "what shape is moving?",
    "which shape is moving?",
    "what shape is in the video?",
    "what shape is this?",
    "which shape moves?",
    "what kind of shape is it?",
    "what shape moves in the video?",
)


@dataclass(frozen=True)
class Clip:
    """One scene a frame, with the file's frames per second and the direction of motion."""

    frames: tuple[Scene, ...]
    fps: float
    direction: str


def draw_clip(rng: random.Random, min_area: float = 96 * 96, max_area: float = 512 * 512) -> Clip:
    """A clip whose shape crosses at least MIN_TRAVEL of the picture, straight or with a slight drift."""
    scene = draw_scene(rng, min_area, max_area, count=1)
    shape, direction = scene.shapes[0], rng.choice(list(DIRECTIONS))
    step_x, step_y = DIRECTIONS[direction]
    length, breadth = (scene.width, scene.height) if step_x else (scene.height, scene.width)
    pad = shape.size * 0.52
    travel = rng.uniform(MIN_TRAVEL * length, max(length - 2 * pad, 1.02 * MIN_TRAVEL * length))
    travel = min(travel, length - 2 * pad)
    start = rng.uniform(pad, length - pad - travel)
    across = rng.uniform(pad, breadth - pad)
    drift = 0.0 if rng.random() < 0.7 else rng.uniform(-0.15, 0.15) * travel
    drift = min(max(drift, pad - across), breadth - pad - across)
    count, frames = rng.choice((4, 5, 6, 8, 8, 10, 12, 16, rng.randint(4, 16))), []
    for i in range(count):
        part = i / (count - 1)
        along = start + travel * (part if step_x + step_y > 0 else 1 - part)
        aside = across + drift * part
        x, y = (along, aside) if step_x else (aside, along)
        frames.append(replace(scene, shapes=(replace(shape, x=x, y=y),)))
    fps = rng.choice((1, 2, 2, 4, 5, 8, 10, 12, 15, 24, 25, 30, rng.randint(1, 30)))
    return Clip(tuple(frames), float(fps), direction)


def paint_clip(clip: Clip, rng: random.Random, wanted: list[int] | None = None) -> list[Image.Image]:
    """The wanted frames (all by default), with one edge style, half of them through a lossy codec's blur."""
    scale = rng.choice((1, 2, 3))
    is_lossy, pictures = rng.random() < 0.5, []
    for index in range(len(clip.frames)) if wanted is None else wanted:
        scene = clip.frames[index]
        picture = Image.new("RGB", (scene.width, scene.height), scene.background)
        paint_shape(picture, scene.shapes[0], scale, Image.Resampling.BOX)
        if is_lossy:
            picture = reread(picture, rng)
        pictures.append(picture)
    return pictures


def reread(picture: Image.Image, rng: random.Random) -> Image.Image:
    return Image.open(io.BytesIO(as_file(picture, "JPEG", rng))).convert("RGB")


def ask_clip(clip: Clip, rng: random.Random, kind: str = "") -> Question:
    """A question about a clip: mostly which way it moves."""
    shape = clip.frames[0].shapes[0]
    kind = kind or rng.choices(("video", "clip list", "clip colour", "clip shape"), (0.7, 0.12, 0.09, 0.09))[0]
    if kind == "video":
        name = rng.choice((shape.kind, full_name(shape)))
        return Question("video", rng.choice(VIDEO_TEXTS).format(n=name), sentence(clip.direction), ((0,), (0,)))
    if kind == "clip list":
        answer = sentence(f"{article(full_name(shape))} moving {clip.direction}")
        return Question(kind, rng.choice(SEE_TEXTS), answer)
    if kind == "clip colour":
        return Question(kind, rng.choice(CLIP_COLOUR_TEXTS).format(k=shape.kind), sentence(shape.colour), ((0,), (0,)))
    return Question(kind, rng.choice(CLIP_SHAPE_TEXTS), sentence(shape.kind), ((0,), (0,)))
