"""Writes questions about a scene and their answers, in the one form that the demo model answers each kind.

Owns the kinds, the phrasings and the rule that no ambiguous question is written: names that fit two shapes, centres
near a region's border and small offsets are left out. Pure Python over scenes.py; knows nothing of drawing or tokens.
"""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from demo.phrasings import (
    CHOICE_TEXTS,
    COLOUR_EXISTS_TEXTS,
    COLOUR_ONLY_TEXTS,
    COLOUR_TEXTS,
    COUNT_NAME_TEXTS,
    COUNT_TEXTS,
    EXISTS_TEXTS,
    LIST_TEXTS,
    RELATION_TEXTS,
    RELATIVE_TEXTS,
    SHAPE_ONLY_TEXTS,
    SHAPE_TEXTS,
    SIDE,
    WHERE_TEXTS,
    WHICH_TEXTS,
)
from demo.scenes import COLOURS, SHAPES, Scene, Shape, region_of
from demo.talk_phrasings import THINGS

NOTHING = -1
NUMBERS = ("Zero", "One", "Two", "Three", "Four")
OPPOSITE = {"left": "right", "right": "left", "above": "below", "below": "above"}
MIN_OFFSET = 0.09  # of the picture's side: a relation needs at least this between centres
KIND_WEIGHTS = {
    "list": 1.0,
    "colour": 1.5,
    "shape": 1.1,
    "where": 1.5,
    "count": 0.9,
    "exists": 1.3,
    "relation": 1.8,
}


@dataclass(frozen=True)
class Question:
    """`about` names the shapes (indices of the scene) that an answer needs: those of the first name and of the second.

    Training guides attention by it; `picture` counts from 0. `exact` is what the whole name fits, (NOTHING,) where that
    is nothing, and empty where the question has no such name.
    `listed` has a list's shapes in its order, twins together.
    """

    kind: str
    text: str
    answer: str
    about: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    picture: int = 0
    exact: tuple[int, ...] = ()
    listed: tuple[tuple[int, ...], ...] = ()


def both(scene: Scene, *shapes: Shape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`about` of a question with one name, which may fit several shapes."""
    indices = tuple(scene.shapes.index(shape) for shape in shapes)
    return indices, indices


def article(name: str) -> str:
    return ("an " if name[0] in "aeiou" else "a ") + name


def full_name(shape: Shape) -> str:
    return f"{shape.colour} {shape.kind}"


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def list_names(scene: Scene) -> str:
    """'A red circle and a blue square.': by colour, then by kind, in the order of COLOURS and SHAPES."""
    counts = Counter((COLOURS.index(s.colour), SHAPES.index(s.kind)) for s in scene.shapes)
    names = []
    for (colour, kind), count in sorted(counts.items()):
        name = f"{COLOURS[colour]} {SHAPES[kind]}"
        plural = name + ("es" if name.endswith("s") else "s")
        names.append(article(name) if count == 1 else f"{NUMBERS[count].lower()} {plural}")
    return sentence(names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1])


def names_of(scene: Scene, shape: Shape) -> list[str]:
    """The names that fit this shape alone: 'red circle', and 'circle' or 'red shape' where unique."""
    names = []
    if sum(s.kind == shape.kind and s.colour == shape.colour for s in scene.shapes) == 1:
        names.append(full_name(shape))
    if sum(s.kind == shape.kind for s in scene.shapes) == 1:
        names.append(shape.kind)
    if sum(s.colour == shape.colour for s in scene.shapes) == 1:
        names.append(f"{shape.colour} {'shape' if len(scene.shapes) % 2 else 'one'}")
    return names


def plural(name: str) -> str:
    return name + ("es" if name.endswith("s") else "s")


def ask_list(scene: Scene, rng: random.Random) -> Question:
    order = sorted({(COLOURS.index(s.colour), SHAPES.index(s.kind)) for s in scene.shapes})
    names = [(COLOURS[colour], SHAPES[kind]) for colour, kind in order]
    listed = tuple(tuple(i for i, s in enumerate(scene.shapes) if (s.colour, s.kind) == name) for name in names)
    return Question("list", rng.choice(LIST_TEXTS), list_names(scene), listed=listed)


def ask_colour(scene: Scene, rng: random.Random) -> Question | None:
    if len(scene.shapes) == 1 and rng.random() < 0.3:
        return Question("colour", rng.choice(COLOUR_ONLY_TEXTS), sentence(scene.shapes[0].colour), ((0,), (0,)))
    if rng.random() < 0.03:
        return ask_absent(scene, rng)
    unique = [s for s in scene.shapes if sum(o.kind == s.kind for o in scene.shapes) == 1]
    if not unique:
        return None
    shape = rng.choice(unique)
    return Question("colour", rng.choice(COLOUR_TEXTS).format(n=shape.kind), sentence(shape.colour), both(scene, shape))


def ask_absent(scene: Scene, rng: random.Random) -> Question:
    """A question about a shape that is not there says so instead of inventing one."""
    kind = rng.choice([k for k in SHAPES if all(s.kind != k for s in scene.shapes)])
    texts = rng.choice((COLOUR_TEXTS, WHERE_TEXTS))
    return Question("absent", rng.choice(texts).format(n=kind), f"There is no {kind}.", exact=(NOTHING,))


def ask_shape(scene: Scene, rng: random.Random) -> Question | None:
    if len(scene.shapes) == 1 and rng.random() < 0.3:
        return Question("shape", rng.choice(SHAPE_ONLY_TEXTS), sentence(scene.shapes[0].kind), ((0,), (0,)))
    unique = [s for s in scene.shapes if sum(o.colour == s.colour for o in scene.shapes) == 1]
    if not unique:
        return None
    shape = rng.choice(unique)
    return Question("shape", rng.choice(SHAPE_TEXTS).format(c=shape.colour), sentence(shape.kind), both(scene, shape))


def ask_where(scene: Scene, rng: random.Random) -> Question | None:
    shape = rng.choice(scene.shapes)
    names, (region, is_clear) = names_of(scene, shape), region_of(shape, scene)
    if not names or not is_clear:
        return None
    name = "shape" if len(scene.shapes) == 1 and rng.random() < 0.2 else rng.choice(names)
    return Question("where", rng.choice(WHERE_TEXTS).format(n=name), sentence(region), both(scene, shape))


def ask_count(scene: Scene, rng: random.Random) -> Question:
    if rng.random() < 0.6:
        return Question("count", rng.choice(COUNT_TEXTS), NUMBERS[len(scene.shapes)] + ".", both(scene, *scene.shapes))
    seen = rng.choice(scene.shapes)
    kind = seen.kind if rng.random() < 0.7 else rng.choice(SHAPES)
    colour = seen.colour if rng.random() < 0.7 else rng.choice(COLOURS)
    if rng.random() < 0.6:
        counted, name = [s for s in scene.shapes if s.kind == kind], plural(kind)
    else:
        counted, name = [s for s in scene.shapes if s.colour == colour], f"{colour} shapes"
    about = both(scene, *counted)
    text, answer = rng.choice(COUNT_NAME_TEXTS).format(p=name), NUMBERS[len(counted)] + "."
    return Question("count", text, answer, about, exact=about[0] or (NOTHING,))


def ask_exists(scene: Scene, rng: random.Random) -> Question:
    """Yes and no about equally often; most wrong names share a colour or a kind with a shape that is there."""
    seen, style = rng.choice(scene.shapes), rng.random()
    if style < 0.04:
        name = rng.choice(THINGS)
        return Question(
            "exists", rng.choice(EXISTS_TEXTS[:16]).format(a=article(name), n=name), "No.", exact=(NOTHING,)
        )
    is_there = rng.random() < 0.5
    if style < 0.3:
        kind = seen.kind if is_there else rng.choice([k for k in SHAPES if all(s.kind != k for s in scene.shapes)])
        return exists_question(scene, rng, "", kind)
    if style < 0.48:
        absent = [c for c in COLOURS if all(s.colour != c for s in scene.shapes)]
        colour = seen.colour if is_there else rng.choice(absent)
        about = both(scene, *(s for s in scene.shapes if s.colour == colour))
        text, answer = rng.choice(COLOUR_EXISTS_TEXTS).format(c=colour), "Yes." if is_there else "No."
        return Question("exists", text, answer, about, exact=about[0] or (NOTHING,))
    if is_there:
        return exists_question(scene, rng, seen.colour, seen.kind)
    while True:
        other, wrong = rng.choice(scene.shapes), rng.random()
        colour = seen.colour if wrong < 0.75 else rng.choice(COLOURS)
        kind = other.kind if wrong < 0.4 or wrong > 0.75 else rng.choice(SHAPES)
        if all((s.colour, s.kind) != (colour, kind) for s in scene.shapes):
            return exists_question(scene, rng, colour, kind)


def exists_question(scene: Scene, rng: random.Random, colour: str, kind: str) -> Question:
    """Is there such a kind, in this colour where one is given; about what has the colour and what has the kind."""
    name = f"{colour} {kind}" if colour else kind
    text = rng.choice(EXISTS_TEXTS).format(a=article(name), n=name, p=plural(name))
    of_kind = tuple(i for i, s in enumerate(scene.shapes) if s.kind == kind)
    of_colour = tuple(i for i, s in enumerate(scene.shapes) if s.colour == colour) if colour else of_kind
    exact = tuple(i for i in of_kind if i in of_colour)
    return Question("exists", text, "Yes." if exact else "No.", (of_colour, of_kind), exact=exact or (NOTHING,))


def offsets(scene: Scene, a: Shape, b: Shape) -> tuple[float, float]:
    """From b to a, as fractions of the picture's sides."""
    return (a.x - b.x) / scene.width, (a.y - b.y) / scene.height


def ask_relation(scene: Scene, rng: random.Random) -> Question | None:
    if len(scene.shapes) < 2:
        return None
    a, b = rng.sample(scene.shapes, 2)
    names = names_of(scene, a), names_of(scene, b)
    if not names[0] or not names[1]:
        return None
    style, name_a, name_b = rng.random(), pick_name(rng, names[0]), pick_name(rng, names[1])
    across, down = offsets(scene, a, b)
    axis = rng.choice("xy")
    offset = across if axis == "x" else down
    if abs(offset) < MIN_OFFSET:
        return None
    about = (scene.shapes.index(a),), (scene.shapes.index(b),)
    truth = ("left" if offset < 0 else "right") if axis == "x" else ("above" if offset < 0 else "below")
    if style < 0.7:
        asked = truth if rng.random() < 0.5 else OPPOSITE[truth]
        text = rng.choice(RELATION_TEXTS).format(a=name_a, b=name_b, r=rng.choice(SIDE[asked]))
        return Question("relation", text, "Yes." if asked == truth else "No.", about)
    if style < 0.85:
        return Question("relation", rng.choice(CHOICE_TEXTS[axis]).format(a=name_a, b=name_b), sentence(truth), about)
    if style < 0.93 and abs(offset) > 2.5 * abs(down if axis == "x" else across):
        return Question("relation", rng.choice(RELATIVE_TEXTS).format(a=name_a, b=name_b), sentence(truth), about)
    if style >= 0.93 and len(scene.shapes) == 2:
        text = rng.choice(WHICH_TEXTS).format(b=name_b, r=rng.choice(SIDE[truth][:3]))
        return Question("relation", text, sentence(article(full_name(a))), about)
    return None


def pick_name(rng: random.Random, names: list[str]) -> str:
    return names[0] if rng.random() < 0.6 else rng.choice(names)


ASK = {
    "list": ask_list,
    "colour": ask_colour,
    "shape": ask_shape,
    "where": ask_where,
    "count": ask_count,
    "exists": ask_exists,
    "relation": ask_relation,
}


def ask(scene: Scene, rng: random.Random, kind: str = "", weights: Mapping[str, float] = KIND_WEIGHTS) -> Question:
    """One unambiguous question, of the given kind where the scene allows it, else by the kinds' weights."""
    for attempt in range(40):
        chosen = kind if kind and attempt < 20 else rng.choices(list(weights), list(weights.values()))[0]
        question = ASK[chosen](scene, rng)
        if question is not None:
            return question
    return ask_list(scene, rng)


def rephrase(rng: random.Random, text: str) -> str:
    """Spelling, capitals and marks as different people type them; the meaning stays."""
    if rng.random() < 0.5:
        text = text.replace("colour", "color")
    if rng.random() < 0.5:
        text = text.replace("picture", rng.choice(("image", "image", "photo", "drawing")))
    style = rng.random()
    if style < 0.04:
        text = "please " + text if text.endswith(".") else "please tell me, " + text
    elif style < 0.07:
        text = rng.choice(("tell me: ", "question: ", "hi! ", "hello, ", "ok, ", "and ", "so, ")) + text
    elif style < 0.1:
        text += rng.choice((" answer briefly.", " answer in one word.", " please.", " answer shortly.", " be brief."))
    if rng.random() < 0.7:
        text = ". ".join(part[:1].upper() + part[1:] for part in text.split(". "))
    if rng.random() < 0.2:
        text = text.rstrip("?.")
    return text
