"""The drawn scenes and clips keep to their description, and no question about them is ambiguous."""

import random
from collections import Counter

import pytest

from demo.clips import MIN_TRAVEL, ask_clip, draw_clip, paint_clip
from demo.questions import KIND_WEIGHTS, MIN_OFFSET, ask, list_names, names_of, offsets
from demo.scenes import (
    COLOURS,
    MAX_SIDE,
    MIN_SIDE,
    REGIONS,
    SHAPES,
    Scene,
    Shape,
    as_file,
    draw_scene,
    paint,
    picture_of,
    polygon_of,
    region_of,
)

SEEDS = range(300)


def scenes() -> list[Scene]:
    return [draw_scene(random.Random(seed)) for seed in SEEDS]


def test_the_same_seed_draws_the_same_picture_and_asks_the_same() -> None:
    first, second = random.Random(5), random.Random(5)
    a, b = draw_scene(first), draw_scene(second)
    assert a == b
    assert paint(a, first).tobytes() == paint(b, second).tobytes()
    assert ask(a, first) == ask(b, second)


def test_sizes_counts_and_backgrounds_keep_to_the_description() -> None:
    for scene in scenes():
        assert MIN_SIDE <= min(scene.width, scene.height) <= max(scene.width, scene.height) <= MAX_SIDE
        assert 0.5 <= scene.width / scene.height <= 2
        assert 1 <= len(scene.shapes) <= 4
        assert min(scene.background) > 170
        for shape in scene.shapes:
            assert 0.18 <= shape.size / min(scene.width, scene.height) <= 0.43
            assert shape.kind in SHAPES
            assert shape.colour in COLOURS


def test_shapes_stay_inside_and_apart() -> None:
    for scene in scenes():
        for index, shape in enumerate(scene.shapes):
            slack = 0.08 * shape.size
            for x, y in polygon_of(shape):
                assert -slack <= x <= scene.width + slack
                assert -slack <= y <= scene.height + slack
            for other in scene.shapes[:index]:
                assert abs(complex(shape.x - other.x, shape.y - other.y)) > (shape.size + other.size) / 2


def test_every_shape_and_colour_and_count_is_drawn() -> None:
    drawn = Counter((s.kind, s.colour) for scene in scenes() for s in scene.shapes)
    assert {kind for kind, _ in drawn} == set(SHAPES)
    assert {colour for _, colour in drawn} == set(COLOURS)
    assert {len(scene.shapes) for scene in scenes()} == {1, 2, 3, 4}


@pytest.mark.parametrize("kind", KIND_WEIGHTS)
def test_questions_are_unambiguous_and_their_answers_follow_from_the_geometry(kind: str) -> None:
    asked = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        scene = draw_scene(rng)
        question = ask(scene, rng, kind)
        if question.kind == kind:
            asked += 1
            check(scene, kind, question.text, question.answer)
    assert asked > len(SEEDS) / 3


def named(scene: Scene, text: str) -> list[Shape]:
    """The shapes that a text names, in the order of the text."""
    found = []
    for shape in scene.shapes:
        for name in names_of(scene, shape):
            place = text.find(f"the {name}")
            if place >= 0:
                found.append((place, -len(name), shape))
                break
    return [shape for _, _, shape in sorted(found, key=lambda item: item[:2])]


def check(scene: Scene, kind: str, text: str, answer: str) -> None:
    if kind == "list":
        assert answer == list_names(scene)
        assert all(f"{s.colour} {s.kind}" in answer for s in scene.shapes)
    elif kind == "where":
        fits = [s for s in scene.shapes if region_of(s, scene)[0] == answer.rstrip(".").lower()]
        assert any(region_of(s, scene)[1] for s in fits)
        assert len(scene.shapes) == 1 or any(s in fits for s in named(scene, text))
    elif kind == "colour":
        fits = [s for s in scene.shapes if f"{s.colour.capitalize()}." == answer]
        assert fits
        assert len(scene.shapes) == 1 or sum(s.kind in text for s in scene.shapes) == 1
    elif kind == "shape":
        assert len([s for s in scene.shapes if s.colour in text]) == 1 or len(scene.shapes) == 1
        assert any(f"{s.kind.capitalize()}." == answer for s in scene.shapes)
    elif kind == "relation" and answer in ("Yes.", "No."):
        a, b = named(scene, text)
        across, down = offsets(scene, a, b)
        is_sideways = "left" in text or "right of" in text or "right side" in text
        assert abs(across if is_sideways else down) >= MIN_OFFSET
        if is_sideways:
            is_true = (across < 0) == ("left" in text)
        else:
            is_true = (down < 0) == any(word in text for word in (" above ", " over ", " higher than "))
        assert answer == ("Yes." if is_true else "No.")


def test_regions_are_the_nine_thirds() -> None:
    for row in range(3):
        for column in range(3):
            shape = Shape("circle", "red", (255, 0, 0), 50 + 100 * column, 50 + 100 * row, 60, 0, ())
            scene = Scene(300, 300, (255, 255, 255), (shape,))
            assert region_of(shape, scene) == (REGIONS[row][column], True)


def test_a_centre_near_a_border_has_no_sure_region() -> None:
    shape = Shape("circle", "red", (255, 0, 0), 102, 50, 60, 0, ())
    assert not region_of(shape, Scene(300, 300, (255, 255, 255), (shape,)))[1]


def test_lists_name_twins_together_and_sort_by_colour() -> None:
    def at(x: int, kind: str, colour: str) -> Shape:
        return Shape(kind, colour, (0, 0, 0), x, 50, 40, 0, ())

    shapes = (at(30, "square", "blue"), at(90, "circle", "red"), at(150, "square", "blue"))
    assert list_names(Scene(200, 100, (255, 255, 255), shapes)) == "A red circle and two blue squares."


def test_files_can_be_read_back_at_their_size() -> None:
    rng = random.Random(3)
    scene = draw_scene(rng)
    for file_format in ("PNG", "JPEG", "GIF"):
        assert as_file(paint(scene, rng), file_format, rng)
    assert picture_of(scene, rng).size == (scene.width, scene.height)


def test_clips_move_one_shape_far_enough_in_the_direction_they_claim() -> None:
    for seed in range(120):
        rng = random.Random(seed)
        clip = draw_clip(rng)
        first, last = clip.frames[0], clip.frames[-1]
        assert 4 <= len(clip.frames) <= 16
        assert 1 <= clip.fps <= 30
        across = (last.shapes[0].x - first.shapes[0].x) / first.width
        down = (last.shapes[0].y - first.shapes[0].y) / first.height
        along = {"left": -across, "right": across, "up": -down, "down": down}[clip.direction]
        assert along >= 0.95 * MIN_TRAVEL
        assert ask_clip(clip, rng, "video").answer == clip.direction.capitalize() + "."


def test_a_clip_s_frames_have_one_size_and_differ() -> None:
    clip = draw_clip(random.Random(1))
    frames = paint_clip(clip, random.Random(2))
    assert len({frame.size for frame in frames}) == 1
    assert frames[0].tobytes() != frames[-1].tobytes()
