"""The claim that everything else rests on: through three real services, greedy tokens equal transformers', float32.

And the proof that the claim means something: outputs vary, and each of the mistakes that broken engines make (another
picture, a lost DeepStack level, misaligned position embeddings) changes the tokens of nearly every vision case.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from encoder_svc.video_decode import probe_video
from gateway_svc.text.detokenizer import TokenTable
from tests.integration.turns import generated, messages_of, telling_checkpoint
from tests.media_samples import DEMO_PROCESSOR, encoded, picture, video_file
from tests.reference import Media, Reference, Turn, without_aligned_corners, without_level
from tests.stack import Stack, running_stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MAX_TOKENS = 48
FIRST_TOKENS = 8  # where most mistakes show already
SIZES = [(128, 128), (200, 150), (96, 240), (320, 64), (150, 400), (256, 256), (90, 70), (500, 180)]


def image(size: int, seed: int) -> Media:
    """A PNG of one of the sizes."""
    width, height = SIZES[size % len(SIZES)]
    return Media("image", encoded(Image.fromarray(picture(width, height, seed))))


def video(num_frames: int, seed: int) -> Media:
    """A lossy MP4 at 2 frames a second, so that all frames are sampled."""
    frames = [picture(96, 64, seed * 100 + index) for index in range(num_frames)]
    return Media("video", video_file(frames, fps=2))


def text_cases() -> list[list[Turn]]:
    """Text alone: short, with a system prompt, and a conversation."""
    words = ["What is this?", "the lazy dog jumps", "compare 123", "Emoji 😀 and é", "A"]
    cases = [[Turn("user", [word])] for word in words]
    cases += [[Turn("system", ["the quick brown fox"]), Turn("user", [word])] for word in words[:3]]
    cases.append([Turn("user", ["First"]), Turn("assistant", ["blue square"]), Turn("user", ["and then?"])])
    return cases


def vision_cases() -> list[list[Turn]]:
    """One image, several of different shapes, images between texts and in several turns, odd and even videos."""
    cases = [[Turn("user", [image(i, i), "What is in the picture?"])] for i in range(10)]
    cases += [[Turn("user", [image(i, 20 + i), image(i + 3, 30 + i), "compare"])] for i in range(6)]
    cases += [[Turn("user", ["First ", image(i, 40 + i), " then ", image(i + 1, 50 + i), " what?"])] for i in range(4)]
    cases += [[Turn("user", [*(image(i + j, 60 + 4 * i + j) for j in range(4)), "all"])] for i in range(3)]
    cases += [[Turn("system", ["the fox"]), Turn("user", ["see ", image(i, 80 + i)])] for i in range(3)]
    cases += [[Turn("user", [video(n, n), "What moves?"])] for n in (3, 4, 5, 7)]
    cases += [
        [Turn("user", [image(2, 91), "and ", video(5, 92), "compare"])],
        [Turn("user", [video(3, 94), image(1, 95)])],
    ]
    cases.append([Turn("user", [image(0, 96), "one"]), Turn("assistant", ["red"]), Turn("user", [image(4, 97), "two"])])
    return cases


def swapped(media: Media) -> Media:
    """Another picture or video of the same size and length."""
    if media.kind == "video":
        return video(probe_video(media.data, DEMO_PROCESSOR).num_frames, 77)
    width, height = _size(media.data)
    return Media("image", encoded(Image.fromarray(picture(width, height, 12345))))


VIDEO_OF_SAME_LENGTH: dict[bytes, bytes] = {
    video(n, s).data: video(n, 77).data for n, s in [(3, 3), (4, 4), (5, 5), (7, 7), (5, 92), (3, 94)]
}


def _size(data: bytes) -> tuple[int, int]:
    import io

    with Image.open(io.BytesIO(data)) as opened:
        return opened.size


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    return telling_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def right(served: tuple[Path, Reference]) -> list[tuple[list[Turn], list[int]]]:
    """What the reference answers in each of the vision cases."""
    return [(turns, served[1].generate(turns, MAX_TOKENS)) for turns in vision_cases()]


@pytest.fixture
async def stack(served: tuple[Path, Reference], tmp_path: Path) -> AsyncIterator[Stack]:
    async with running_stack(tmp_path, served[0]) as stack:
        yield stack


def token_bytes(reference: Reference, ids: list[int]) -> list[list[int]]:
    """The bytes of the reference's tokens, by the same table that detokenizes."""
    table = TokenTable(reference.tokenizer)
    return [list(table.bytes_of(token)) for token in ids]


async def test_forty_generations_equal_transformers_token_for_token(
    stack: Stack, served: tuple[Path, Reference]
) -> None:
    reference = served[1]
    cases = text_cases() + vision_cases()
    assert len(cases) >= 40
    limit = asyncio.Semaphore(6)  # several sequences share the decoder's steps

    async def ask(turns: list[Turn]) -> list[list[int]]:
        async with limit:
            return await generated(stack, messages_of(turns), MAX_TOKENS)

    answers = await asyncio.gather(*(ask(turns) for turns in cases))
    expected = [await asyncio.to_thread(reference.generate, turns, MAX_TOKENS) for turns in cases]
    for turns, answer, tokens in zip(cases, answers, expected, strict=True):
        assert answer == token_bytes(reference, tokens), turns
        assert len(tokens) == MAX_TOKENS
        assert len(set(tokens)) >= 10, "an output that repeats itself proves little"


@pytest.mark.parametrize(
    ("name", "spoil", "swap"),
    [
        ("another picture", lambda model: nullcontext(), swapped),
        ("level 0 lost", lambda model: without_level(model, 0), lambda media: media),
        ("level 1 lost", lambda model: without_level(model, 1), lambda media: media),
        ("level 2 lost", lambda model: without_level(model, 2), lambda media: media),
        ("corners not aligned", without_aligned_corners, lambda media: media),
    ],
)
def test_the_reference_can_tell_a_broken_engine(
    served: tuple[Path, Reference],
    right: list[tuple[list[Turn], list[int]]],
    name: str,
    spoil: Callable[[Any], Any],
    swap: Callable[[Media], Media],
) -> None:
    reference = served[1]
    with spoil(reference.model):
        changed = sum(
            any(reference.generate(turns, length, swap) != tokens[:length] for length in (FIRST_TOKENS, MAX_TOKENS))
            for turns, tokens in right
        )
    assert changed >= 0.9 * len(right), f"{name}: only {changed} of {len(right)} outputs changed"
