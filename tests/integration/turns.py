"""Turns of a conversation through the services and through the reference: the same weights, and tokens to compare."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.processor_config import ProcessorConfig
from tests.reference import Media, Reference, Turn
from tests.servable import save_servable
from tests.stack import Stack
from tests.tiny_tokenizer import tiny_tokenizer


def telling_checkpoint(folder: Path, *, is_moe: bool = False) -> tuple[Path, Reference]:
    """A servable checkpoint named `tiny` whose tokens vary, and whose pictures tell; and its reference."""
    directory, model = save_servable(folder / "tiny", gain=3.5, deepstack_gain=2.5, is_moe=is_moe)
    return directory, Reference(model, tiny_tokenizer(), ProcessorConfig.load(directory))


def messages_of(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The turns as OpenAI messages."""
    return [{"role": turn.role, "content": [_part(part) for part in turn.parts]} for turn in turns]


def _part(part: str | Media) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    mime = "image/png" if part.kind == "image" else "video/mp4"
    url = f"data:{mime};base64,{base64.b64encode(part.data).decode()}"
    return {"type": f"{part.kind}_url", f"{part.kind}_url": {"url": url}}


async def generated(stack: Stack, messages: Any, max_tokens: int) -> list[list[int]]:
    """The bytes of each token of the answer."""
    async with stack.client() as client:
        response = await client.chat.completions.create(
            model="tiny", messages=messages, max_completion_tokens=max_tokens, logprobs=True
        )
    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    return [token.bytes or [] for token in logprobs.content]
