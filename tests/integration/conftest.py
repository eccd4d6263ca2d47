"""What integration tests share: a tiny checkpoint, made once, and pictures as messages."""

import base64
from pathlib import Path
from typing import Any

import pytest

from tests.media_samples import png
from tests.servable import save_servable


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A servable checkpoint named `tiny`, its halves in two shards."""
    return save_servable(tmp_path_factory.mktemp("checkpoint") / "tiny", gain=3.0)[0]


def picture_message(seed: int, text: str = "What is it?", width: int = 200, height: int = 150) -> list[dict[str, Any]]:
    """A user's message with one picture of noise; another seed is another picture."""
    url = f"data:image/png;base64,{base64.b64encode(png(width, height, seed)).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def text_message(text: str) -> list[dict[str, Any]]:
    """A user's message of text alone."""
    return [{"role": "user", "content": text}]
