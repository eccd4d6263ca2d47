"""The held-out questions that the demo model is measured on: seeds that training never uses, each a first question.

Owns the list of cases (picture files, clips, question, expected answer) and the rule for "right"; knows nothing of how
a model is asked. Pure Python and Pillow, deterministic by seed.
"""

import io
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from demo.clips import ask_clip, draw_clip, paint_clip
from demo.conversations import two_picture_question
from demo.questions import ask, rephrase
from demo.scenes import as_file, draw_format, draw_scene, paint
from demo.small_talk import small_talk

CASES = {
    "list": 60,
    "colour": 60,
    "shape": 50,
    "where": 60,
    "count": 50,
    "exists": 60,
    "relation": 60,
    "two": 50,
    "video": 50,
}
MIN_VIDEO_FRAMES = 4


@dataclass(frozen=True)
class Case:
    """One question with the files that come with it; `frames` is a video's, at `fps`."""

    kind: str
    text: str
    answer: str
    pictures: tuple[bytes, ...] = ()
    media_types: tuple[str, ...] = ()
    frames: tuple[Image.Image, ...] = ()
    fps: float = 0.0


def normalised(text: str) -> str:
    """Lower case without punctuation: how answers are compared."""
    return " ".join(text.lower().translate(str.maketrans("", "", string.punctuation)).split())


def is_right(case: Case, answer: str) -> bool:
    return normalised(answer) == normalised(case.answer)


def picture_file(picture: Image.Image, rng: random.Random) -> tuple[bytes, str]:
    file_format = draw_format(rng)
    return as_file(picture, file_format, rng), f"image/{file_format.lower()}"


def draw_case(kind: str, rng: random.Random) -> Case:
    if kind == "video":
        clip = draw_clip(rng)
        question = ask_clip(clip, rng, "video")
        frames = tuple(paint_clip(clip, rng))
        return Case(kind, rephrase(rng, question.text), question.answer, frames=frames, fps=clip.fps)
    if kind == "talk":
        _, text, answer = small_talk(rng)
        return Case(kind, text, answer)
    scenes = [draw_scene(rng) for _ in range(2 if kind == "two" else 1)]
    question = two_picture_question(rng, scenes) if kind == "two" else ask(scenes[0], rng, kind)
    if question.kind != kind:
        return draw_case(kind, rng)
    files = [picture_file(paint(scene, rng), rng) for scene in scenes]
    pictures, media_types = tuple(f for f, _ in files), tuple(t for _, t in files)
    return Case(kind, rephrase(rng, question.text), question.answer, pictures, media_types)


def cases(seed: int = 2_000_001, share: float = 1.0, extra: Sequence[str] = ("talk",)) -> list[Case]:
    """500 cases of the kinds in CASES (or a share of them), then forty of small talk."""
    counts = {**CASES, **dict.fromkeys(extra, 40)}
    drawn = []
    for kind, count in counts.items():
        drawn += [draw_case(kind, random.Random(f"heldout/{seed}/{kind}/{i}")) for i in range(round(count * share))]
    return drawn


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def table(results: list[tuple[Case, str]]) -> str:
    """Right answers by kind, as lines of text."""
    lines = []
    for kind in dict.fromkeys(case.kind for case, _ in results):
        right = [is_right(case, answer) for case, answer in results if case.kind == kind]
        lines.append(f"{kind:10} {sum(right):4} of {len(right):4}  {sum(right) / len(right):6.1%}")
    asked = [is_right(c, a) for c, a in results if c.kind != "talk"]
    lines.append(f"{'all':10} {sum(asked):4} of {len(asked):4}  {sum(asked) / len(asked):6.1%}")
    return "\n".join(lines)
