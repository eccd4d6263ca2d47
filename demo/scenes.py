"""Draws the demo model's pictures: one to four solid shapes on a light plain background.

Owns the vocabulary (shapes, colours, regions), the geometry of a scene and its drawing; knows nothing of
questions (questions.py), clips (clips.py), tokens or tensors. Pure Pillow and `random.Random`: the same seed draws
the same picture. Used by training, evaluation, tests and anyone who wants a picture to ask about.
"""

import colorsys
import io
import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross")
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "black", "pink")
REGIONS = (
    ("top left", "top", "top right"),
    ("left", "center", "right"),
    ("bottom left", "bottom", "bottom right"),
)
REGION_MARGIN = 0.04  # a centre nearer than this to a third's border has no sure region
MIN_SIDE = 96
MAX_SIDE = 512

# Hue in degrees, saturation and value ranges that people call by the name without thinking.
COLOUR_RANGES: dict[str, tuple[tuple[tuple[float, float], tuple[float, float], tuple[float, float]], ...]] = {
    "red": (((-6, 7), (0.78, 1.0), (0.7, 1.0)),),
    "green": (((92, 146), (0.5, 1.0), (0.38, 1.0)),),
    "blue": (((206, 243), (0.6, 1.0), (0.5, 1.0)),),
    "yellow": (((48, 61), (0.7, 1.0), (0.88, 1.0)),),
    "purple": (((266, 301), (0.5, 1.0), (0.42, 0.95)),),
    "orange": (((22, 39.5), (0.78, 1.0), (0.9, 1.0)),),
    "black": (((0, 360), (0.0, 0.3), (0.0, 0.17)),),
    "pink": (((322, 352), (0.24, 0.62), (0.93, 1.0)), ((320, 334), (0.6, 0.92), (0.93, 1.0))),
}
PURE_COLOURS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "red": ((255, 0, 0), (220, 20, 30), (230, 25, 25), (200, 0, 0)),
    "green": ((0, 128, 0), (0, 255, 0), (0, 160, 0), (34, 139, 34), (40, 180, 60)),
    "blue": ((0, 0, 255), (30, 60, 220), (30, 144, 255), (65, 105, 225), (0, 90, 200)),
    "yellow": ((255, 255, 0), (255, 215, 0), (250, 220, 30), (240, 210, 20)),
    "purple": ((128, 0, 128), (160, 32, 240), (138, 43, 226), (148, 0, 211), (140, 40, 180)),
    "orange": ((255, 165, 0), (255, 140, 0), (255, 127, 0), (245, 130, 30)),
    "black": ((0, 0, 0), (10, 10, 10), (20, 20, 20), (30, 30, 30)),
    "pink": ((255, 192, 203), (255, 105, 180), (255, 150, 180), (250, 130, 170), (255, 20, 147)),
}


@dataclass(frozen=True)
class Shape:
    """One solid shape: centre and size (longest extent of the upright outline) in pixels, turn in degrees."""

    kind: str
    colour: str
    rgb: tuple[int, int, int]
    x: float
    y: float
    size: float
    turn: float
    variant: tuple[float, ...]


@dataclass(frozen=True)
class Scene:
    width: int
    height: int
    background: tuple[int, int, int]
    shapes: tuple[Shape, ...]


def region_of(shape: Shape, scene: Scene) -> tuple[str, bool]:
    """The nine-fold region of the shape's centre, and whether the centre is clear of the borders."""
    across, down = shape.x / scene.width, shape.y / scene.height
    clear = all(abs(v - edge) >= REGION_MARGIN for v in (across, down) for edge in (1 / 3, 2 / 3))
    return REGIONS[min(int(down * 3), 2)][min(int(across * 3), 2)], clear


def draw_colour(rng: random.Random, name: str) -> tuple[int, int, int]:
    if rng.random() < 0.4:
        red, green, blue = (min(255, max(0, v + rng.randint(-6, 6))) for v in rng.choice(PURE_COLOURS[name]))
        return red, green, blue
    hue, saturation, value = (rng.uniform(*span) for span in rng.choice(COLOUR_RANGES[name]))
    return from_hsv((hue % 360) / 360, saturation, value)


def from_hsv(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    red, green, blue = (round(part * 255) for part in colorsys.hsv_to_rgb(hue, saturation, value))
    return red, green, blue


def draw_background(rng: random.Random) -> tuple[int, int, int]:
    style = rng.random()
    if style < 0.3:
        return 255, 255, 255
    if style < 0.5:
        grey = rng.randint(222, 254)
        return grey, grey, grey
    return from_hsv(rng.random(), rng.uniform(0.0, 0.16), rng.uniform(0.87, 1.0))


def contrast(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    return math.dist(a, b)


def draw_size(rng: random.Random, min_area: float, max_area: float) -> tuple[int, int]:
    """A picture size of 96 to 512 px a side, aspect 1:2 to 2:1, with an area near the given span."""
    while True:
        area = math.exp(rng.uniform(math.log(min_area), math.log(max_area)))
        aspect = 1.0 if rng.random() < 0.3 else math.exp(rng.uniform(-math.log(2), math.log(2)))
        width, height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if rng.random() < 0.3:
            width, height = max(1, round(width / 32)) * 32, max(1, round(height / 32)) * 32
        inside = all(MIN_SIDE <= side <= MAX_SIDE for side in (width, height))
        if inside and 0.5 <= width / height <= 2:
            return width, height


def draw_variant(rng: random.Random, kind: str) -> tuple[tuple[float, ...], float]:
    """Free parameters of a shape's outline, and its turn in degrees."""
    tilt = 0.0 if rng.random() < 0.5 else rng.uniform(-9, 9)
    if kind == "triangle":
        apex = 0.0 if rng.random() < 0.75 else rng.choice((-0.5, 0.5, rng.uniform(-0.4, 0.4)))
        turn = 180.0 if rng.random() < 0.12 else 0.0
        return (rng.uniform(0.78, 1.0), apex), turn + tilt
    if kind == "star":
        points = 5.0 if rng.random() < 0.9 else 6.0
        inner = 0.382 if rng.random() < 0.4 else rng.uniform(0.35, 0.5)
        return (points, inner), tilt if rng.random() < 0.8 else rng.uniform(0, 72)
    if kind == "diamond":
        return (1.0 if rng.random() < 0.45 else rng.uniform(0.58, 1.0),), tilt
    if kind == "cross":
        return (rng.uniform(0.24, 0.42),), tilt if rng.random() < 0.82 else 45 + tilt
    return (), tilt if kind == "square" else 0.0


def outline(kind: str, variant: tuple[float, ...], size: float) -> list[tuple[float, float]]:
    """The polygon of an upright shape around (0, 0); a circle is a polygon of 72 sides."""
    half = size / 2
    if kind == "circle":
        return [(half * math.cos(math.radians(a)), half * math.sin(math.radians(a))) for a in range(0, 360, 5)]
    if kind == "square":
        edge = half * 0.94
        return [(-edge, -edge), (edge, -edge), (edge, edge), (-edge, edge)]
    if kind == "triangle":
        tall, apex = variant
        return [(apex * size, -half * tall), (half, half * tall), (-half, half * tall)]
    if kind == "star":
        points, inner = int(variant[0]), variant[1]
        radii = (half, half * inner)
        angles = [(i * 180 / points - 90, radii[i % 2]) for i in range(2 * points)]
        return [(r * math.cos(math.radians(a)), r * math.sin(math.radians(a))) for a, r in angles]
    if kind == "diamond":
        wide = half * variant[0]
        return [(0, -half), (wide, 0), (0, half), (-wide, 0)]
    arm = half * variant[0]
    corners = [(-arm, -half), (arm, -half), (arm, -arm), (half, -arm), (half, arm), (arm, arm)]
    return corners + [(-x, -y) for x, y in corners]


def polygon_of(shape: Shape) -> list[tuple[float, float]]:
    """The shape's corners in picture coordinates."""
    cos, sin = math.cos(math.radians(shape.turn)), math.sin(math.radians(shape.turn))
    corners = outline(shape.kind, shape.variant, shape.size)
    return [(shape.x + x * cos - y * sin, shape.y + x * sin + y * cos) for x, y in corners]


def pick_names(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """(colour, kind) of each shape; now and then one colour or one kind repeats, as strangers draw."""
    style = rng.random()
    if style < 0.45:
        kinds, colours = rng.sample(SHAPES, count), rng.sample(COLOURS, count)
        return list(zip(colours, kinds, strict=True))
    names: list[tuple[str, str]] = []
    while len(names) < count:
        colour, kind = rng.choice(COLOURS), rng.choice(SHAPES)
        if names and rng.random() < 0.3:
            other = rng.choice(names)
            colour, kind = (other[0], kind) if rng.random() < 0.5 else (colour, other[1])
        if (colour, kind) not in names or rng.random() < 0.08:
            names.append((colour, kind))
    return names


def spot(rng: random.Random, width: int, height: int, size: float, layout: str) -> tuple[float, float]:
    """A candidate centre. `layout` is free, row, column or grid."""
    pad = size * 0.55
    x, y = rng.uniform(pad, width - pad), rng.uniform(pad, height - pad)
    jitter = 0.02 * min(width, height)
    if layout == "row":
        y = height / 2 + rng.uniform(-jitter, jitter)
    elif layout == "column":
        x = width / 2 + rng.uniform(-jitter, jitter)
    elif layout == "grid":
        column, row = rng.choice(((0.17, 0.5, 0.83), (0.25, 0.75))), rng.choice(((0.17, 0.5, 0.83), (0.25, 0.75)))
        x = min(max(width * rng.choice(column), pad), width - pad)
        y = min(max(height * rng.choice(row), pad), height - pad)
    return x, y


def place(rng: random.Random, width: int, height: int, count: int) -> list[tuple[float, float, float]] | None:
    """Centres and sizes of shapes that do not overlap, or None when these sizes do not fit."""
    short, placed = min(width, height), list[tuple[float, float, float]]()
    layout = rng.choices(("free", "row", "column", "grid"), (0.68, 0.11, 0.09, 0.12))[0]
    high = 0.42 if count < 3 else 0.36
    for _ in range(count):
        size = short * rng.uniform(0.185, high)
        for _ in range(12):
            x, y = spot(rng, width, height, size, layout)
            if all(math.hypot(x - a, y - b) > (size + other) * 0.54 + 2 for a, b, other in placed):
                placed.append((x, y, size))
                break
        else:
            return None
    return placed


def draw_scene(rng: random.Random, min_area: float = 96 * 96, max_area: float = 512 * 512, count: int = 0) -> Scene:
    """A scene within the description; `count` fixes the number of shapes, else one to four."""
    width, height = draw_size(rng, min_area, max_area)
    count = count or rng.choices((1, 2, 3, 4), (0.16, 0.34, 0.27, 0.23))[0]
    background = draw_background(rng)
    while (places := place(rng, width, height, count)) is None:
        pass
    shapes = []
    for (colour, kind), (x, y, size) in zip(pick_names(rng, count), places, strict=True):
        rgb = draw_colour(rng, colour)
        while contrast(rgb, background) < 58:
            rgb, background = draw_colour(rng, colour), background if rng.random() < 0.9 else (255, 255, 255)
        variant, turn = draw_variant(rng, kind)
        shapes.append(Shape(kind, colour, rgb, x, y, size, turn, variant))
    return Scene(width, height, background, tuple(shapes))


def paint_shape(picture: Image.Image, shape: Shape, scale: int, resample: Image.Resampling) -> None:
    """Fill one shape; `scale` 1 leaves hard edges, more draws its mask that much larger and shrinks it."""
    corners = polygon_of(shape)
    if scale == 1:
        if shape.kind == "circle":
            half = shape.size / 2
            box = (shape.x - half, shape.y - half, shape.x + half, shape.y + half)
            ImageDraw.Draw(picture).ellipse(box, fill=shape.rgb)
        else:
            ImageDraw.Draw(picture).polygon(corners, fill=shape.rgb)
        return
    left, top = math.floor(min(x for x, _ in corners)) - 1, math.floor(min(y for _, y in corners)) - 1
    right, bottom = math.ceil(max(x for x, _ in corners)) + 1, math.ceil(max(y for _, y in corners)) + 1
    mask = Image.new("L", ((right - left) * scale, (bottom - top) * scale), 0)
    ImageDraw.Draw(mask).polygon([((x - left) * scale, (y - top) * scale) for x, y in corners], fill=255)
    mask = mask.resize((right - left, bottom - top), resample)
    picture.paste(shape.rgb, (left, top), mask)


def paint(scene: Scene, rng: random.Random) -> Image.Image:
    """The scene as an RGB picture, before any file format."""
    picture = Image.new("RGB", (scene.width, scene.height), scene.background)
    scale = rng.choice((1, 2, 3, 4)) if scene.width * scene.height < 300 * 300 else rng.choice((1, 2, 3))
    resample = rng.choice((Image.Resampling.BOX, Image.Resampling.BILINEAR, Image.Resampling.LANCZOS))
    for shape in scene.shapes:
        paint_shape(picture, shape, scale, resample)
    return picture


def as_file(picture: Image.Image, file_format: str, rng: random.Random) -> bytes:
    """The picture as the bytes of a PNG, GIF or JPEG file (quality 60 to 95)."""
    buffer = io.BytesIO()
    if file_format == "JPEG":
        picture.save(buffer, "JPEG", quality=rng.randint(60, 95), subsampling=rng.choice((0, 2)))
    elif file_format == "GIF":
        picture.save(buffer, "GIF")
    else:
        picture.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def draw_format(rng: random.Random) -> str:
    return rng.choices(("PNG", "JPEG", "GIF"), (0.52, 0.45, 0.03))[0]


def picture_of(scene: Scene, rng: random.Random) -> Image.Image:
    """What a reader of the scene's file sees: painted, saved in some format and read back (PNG is exact)."""
    picture, file_format = paint(scene, rng), draw_format(rng)
    if file_format == "PNG":
        return picture
    return Image.open(io.BytesIO(as_file(picture, file_format, rng))).convert("RGB")
