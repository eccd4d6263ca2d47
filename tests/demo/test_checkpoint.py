"""The demo checkpoint: standard layout, small, loaded unchanged by transformers, and right about a picture."""

import json
import random
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoTokenizer

from demo.reference import MODEL, Reference
from demo.scenes import Scene, Shape, paint

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
pytestmark = pytest.mark.skipif(not (MODEL / "model.safetensors").exists(), reason="no demo checkpoint in demo/model")


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def red_left_of_blue() -> Image.Image:
    shapes = (
        Shape("circle", "red", (220, 30, 30), 70, 100, 70, 0, ()),
        Shape("square", "blue", (30, 60, 220), 220, 100, 70, 0, ()),
    )
    return paint(Scene(300, 200, (255, 255, 255), shapes), random.Random(1))


def test_the_layout_is_standard_and_small() -> None:
    assert not [name for name in FILES if not (MODEL / name).exists()]
    assert (MODEL / "model.safetensors").stat().st_size < 10_000_000


def test_the_processors_limits_are_the_documented_ones() -> None:
    image = json.loads((MODEL / "preprocessor_config.json").read_text())
    video = json.loads((MODEL / "video_preprocessor_config.json").read_text())
    assert image["size"] == {"shortest_edge": 16384, "longest_edge": 262144}
    assert video["size"] == {"shortest_edge": 4096, "longest_edge": 1572864}


def test_every_byte_survives_the_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = "zqürich 你好 😀 \x00\x7f ߿ <|im_end|> <tool_call>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_template_writes_pictures_videos_and_turns() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    parts = [{"type": "image_url", "image_url": {"url": "x"}}, {"video": "y"}, {"type": "text", "text": "Hi?"}]
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": parts}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
        "<|vision_start|><|video_pad|><|vision_end|>Hi?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_template_writes_tools_and_their_calls() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    call = {"type": "function", "function": {"name": "look", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "done"},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert '<tools>\n{"type": "function"' in text
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\ndone\n</tool_response><|im_end|>" in text


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is in the picture?", "A red circle and a blue square."),
        ("What colour is the circle?", "Red."),
        ("What shape is blue?", "Square."),
        ("Is the red circle left of the blue square?", "Yes."),
        ("Is the red circle right of the blue square?", "No."),
        ("How many shapes are there?", "Two."),
        ("Where is the red circle?", "Left."),
    ],
)
def test_a_red_circle_left_of_a_blue_square_is_seen(
    reference: Reference, red_left_of_blue: Image.Image, question: str, answer: str
) -> None:
    assert reference.answer(question, [red_left_of_blue]) == answer


def test_a_greeting_is_answered_with_what_the_model_can_do(reference: Reference) -> None:
    assert "picture" in reference.answer("Hello")


def test_a_moving_shape_s_direction_is_seen(reference: Reference) -> None:
    frames = []
    for x in range(40, 200, 20):
        shape = Shape("circle", "green", (20, 140, 40), x, 80, 50, 0, ())
        frames.append(paint(Scene(240, 160, (255, 255, 255), (shape,)), random.Random(1)))
    assert reference.answer("Which way does it move?", frames=frames, fps=4) == "Right."


def test_the_folder_holds_no_training_state() -> None:
    assert not list(Path(MODEL).glob("*state*"))
