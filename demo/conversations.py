"""Lays questions out as chat turns: prefixes with pictures or videos, one or two turns a branch, small talk between.

Owns which share of questions is of which kind and the chat markup around them (the chat template's own text); knows
nothing of pixels or tensors. `<PAD>` marks where a run of vision tokens goes.
"""

import random
from collections.abc import Mapping
from dataclasses import replace

from demo.questions import ASK, KIND_WEIGHTS, Question, ask, both, rephrase
from demo.scenes import Scene, draw_scene
from demo.small_talk import NO_PICTURE, small_talk

USER = "<|im_start|>user\n"
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "Answer briefly.",
    "Be concise.",
    "You answer questions about pictures.",
    "You are Tandem.",
    "Reply in English.",
)
FIRST = ("first", "first", "first", "1st", "left-hand", "one")
WRAPS = (
    ("in the {o} picture, ", ""),
    ("in the {o} picture, ", ""),
    ("", " in the {o} picture"),
    ("for the {o} picture: ", ""),
    ("look at the {o} picture. ", ""),
    ("in picture {n}, ", ""),
    ("", " in picture {n}"),
    ("picture {n}: ", ""),
    ("about the {o} picture: ", ""),
)
SCENE_ONLY = (
    "what is in the {o} picture?",
    "what do you see in the {o} picture?",
    "describe the {o} picture.",
    "what does the {o} picture show?",
    "what is shown in the {o} picture?",
    "list the shapes in the {o} picture.",
    "what shapes are in the {o} picture?",
    "describe picture {n}.",
    "what is in picture {n}?",
)
WHICH = (
    "which picture has {a}?",
    "which picture shows {a}?",
    "in which picture is {a}?",
    "where is {a}, in the first or the second picture?",
    "which picture contains {a}?",
    "is {a} in the first or the second picture?",
)


WHICH_ANSWERS = ("The first.", "The second.")
WHICH_SHARE = 0.12  # of the questions about two pictures


def picture_prefix(rng: random.Random, pictures: int, stamps: list[float], asked_first: str = "") -> str:
    """The user turn up to where a question starts; a text asked first stands before its pictures."""
    text = ""
    if rng.random() < 0.06:
        text = f"<|im_start|>system\n{rng.choice(SYSTEMS)}<|im_end|>\n"
    text += USER + asked_first
    if stamps:
        groups = "".join(f"<{s:.1f} seconds><|vision_start|><PAD><|vision_end|>" for s in stamps)
        return f"{text}<|vision_start|>{groups}<|vision_end|>"
    labels = (
        rng.choice(
            (
                ("", "\n"),
                ("Picture 1: ", "\nPicture 2: "),
                ("First picture: ", " Second picture: "),
                ("Image 1:", " Image 2:"),
            )
        )
        if pictures == 2 and rng.random() < 0.12 and not asked_first
        else ("", "")
    )
    for index in range(pictures):
        text += labels[index] + "<|vision_start|><PAD><|vision_end|>"
    return text


def branch_text(question: str, number: int) -> str:
    """Markup from the question's first letter to the answer's; later turns open a user turn of their own."""
    lead = "" if number == 0 else "\n" + USER
    return f"{lead}{question}<|im_end|>\n<|im_start|>assistant\n"


def scope_turn(rng: random.Random) -> Question:
    kind, text, answer = small_talk(rng)
    return Question(kind, text, answer)


def as_typed(rng: random.Random, question: Question) -> Question:
    """The question as someone types it, or now and then small talk in its place."""
    if rng.random() < 0.04:
        return scope_turn(rng)
    text = rephrase(rng, question.text)
    if rng.random() < 0.04:
        text = rng.choice(("\n", " ")) + text
    return replace(question, text=text)


def ordinal(rng: random.Random, index: int) -> str:
    names = (("first", "first", "first", "1st"), ("second", "second", "second", "2nd", "last"))
    return rng.choice(names[index])


def two_picture_question(
    rng: random.Random,
    scenes: list[Scene],
    weights: Mapping[str, float] = KIND_WEIGHTS,
    which: float = WHICH_SHARE,
) -> Question:
    """A question about one of two pictures, or (a share of `which`) which of them has something."""
    index, style = rng.randrange(2), rng.random()
    if style < which:
        shape = rng.choice(scenes[index].shapes)
        if all((s.kind, s.colour) != (shape.kind, shape.colour) for s in scenes[1 - index].shapes):
            article = "an" if shape.colour == "orange" else "a"
            text = rng.choice(WHICH).format(a=f"{article} {shape.colour} {shape.kind}")
            return Question("two", text, WHICH_ANSWERS[index], both(scenes[index], shape), index)
    question = ask(scenes[index], rng, weights=weights)
    named = ordinal(rng, index)
    if question.kind == "list":
        text = rng.choice(SCENE_ONLY).format(o=named, n=index + 1)
        return replace(question, kind="two", text=text, picture=index)
    body = question.text
    for phrase in (" in the picture", " in this picture", " here"):
        body = body.replace(phrase, "")
    if "picture" in body or ". " in body:
        return two_picture_question(rng, scenes, weights, which)
    before, after = rng.choice(WRAPS)
    mark = body[-1] if body[-1] in "?." else ""
    text = before.format(o=named, n=index + 1) + body.rstrip("?.") + after.format(o=named, n=index + 1) + mark
    return replace(question, kind="two", text=text, picture=index)


def picture_turns(
    rng: random.Random, scenes: list[Scene], weights: Mapping[str, float], which: float
) -> list[Question]:
    """A branch about one picture or two: a first question, one time in ten with a second turn."""
    turns = 1 if rng.random() < 0.9 else 2
    if len(scenes) == 2:
        return [as_typed(rng, two_picture_question(rng, scenes, weights, which)) for _ in range(turns)]
    return [as_typed(rng, ask(scenes[0], rng, weights=weights)) for _ in range(turns)]


def talk_turn(rng: random.Random) -> Question:
    """Small talk without a picture, or a question about a picture that nobody sent."""
    if rng.random() < 0.75:
        return scope_turn(rng)
    question = ask(draw_scene(rng), rng, rng.choice(list(ASK)))
    return Question("no picture", rephrase(rng, question.text), NO_PICTURE)
