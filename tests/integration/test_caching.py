"""A picture is encoded once: not again through another gateway, after a restart, or with no encoder left."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.conftest import picture_message, text_message
from tests.stack import Stack, running_stack

pytestmark = pytest.mark.slow


@pytest.fixture
async def stack(tiny_checkpoint: Path, tmp_path: Path) -> AsyncIterator[Stack]:
    environment = {"TANDEM_ENCODER_WAIT_S": "1"}
    async with running_stack(tmp_path, tiny_checkpoint, environment, gateways=2, decoders=2) as stack:
        yield stack


async def ask(stack: Stack, messages: list[dict[str, Any]], gateway: int = 0) -> tuple[str, dict[str, int]]:
    """The answer and the details of its prompt's tokens."""
    async with stack.client(gateway) as client:
        response = await client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=16)
    assert response.usage is not None
    details = response.usage.prompt_tokens_details
    assert details is not None
    return response.choices[0].message.content or "", details.model_dump()


async def work_done(stack: Stack) -> tuple[float, float]:
    """How many items the encoder prepared, and how many forwards it ran."""
    return (
        await stack.metric("encoder-0", "tandem_encoder_preprocess_seconds_count"),
        await stack.metric("encoder-0", "tandem_encoder_forward_seconds_count"),
    )


async def kill_the_decoder_that_knows(stack: Stack) -> None:
    """Kill the decoder that has served, so that the other one must get the picture from elsewhere."""
    served = {name: await stack.metric(name, "tandem_decoder_requests_total") for name in ("decoder-0", "decoder-1")}
    await stack.kill(max(served, key=served.__getitem__))


async def test_a_repeated_picture_does_no_vision_work_wherever_it_arrives(stack: Stack) -> None:
    first, details = await ask(stack, picture_message(1))
    assert (details["encoded_media_tokens"], details["cached_media_tokens"]) == (30, 0)
    done = await work_done(stack)
    assert done == (1, 1)
    for gateway in (0, 1, 1):
        again, details = await ask(stack, picture_message(1), gateway)
        assert again == first
        assert (details["encoded_media_tokens"], details["cached_media_tokens"]) == (0, 30)
    assert await work_done(stack) == done
    for name in ("decoder-0", "decoder-1"):  # load decides which has served; with both gone, none has the picture
        await stack.kill(name)
    await stack.local.children["decoder-1"].start()
    await stack.wait_for(encoders=1, decoders=1, gateway=1)
    again, details = await ask(stack, picture_message(1), 1)
    assert again == first
    assert (details["encoded_media_tokens"], details["cached_media_tokens"]) == (0, 30)
    assert await work_done(stack) == done
    assert "image:encoded" in stack.log("gateway-0")
    assert "image:cache" in stack.log("gateway-1")
    assert "image:encoded" not in stack.log("gateway-1")


async def test_cached_pictures_and_text_are_answered_with_every_encoder_killed(stack: Stack) -> None:
    first, _ = await ask(stack, picture_message(2))
    await stack.kill("encoder-0")
    await kill_the_decoder_that_knows(stack)
    await stack.wait_for(encoders=0, decoders=1)
    await stack.wait_for(encoders=0, decoders=1, gateway=1)
    for gateway in (0, 1):
        again, details = await ask(stack, picture_message(2), gateway)
        assert again == first
        assert details["encoded_media_tokens"] == 0
    answer, _ = await ask(stack, text_message("What is this?"))
    assert answer
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(stack, picture_message(3))
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) >= 1


async def test_a_restarted_encoder_does_not_encode_again_what_redis_holds(stack: Stack) -> None:
    first, _ = await ask(stack, picture_message(4))
    await stack.kill("encoder-0")
    await stack.local.children["encoder-0"].start()
    await kill_the_decoder_that_knows(stack)
    await stack.wait_for(encoders=1, decoders=1, gateway=1)
    again, details = await ask(stack, picture_message(4), 1)
    assert again == first
    assert details["encoded_media_tokens"] == 0
    assert await work_done(stack) == (0, 0)
    fresh, details = await ask(stack, picture_message(5))
    assert details["encoded_media_tokens"] == 30
    assert fresh != first


async def test_a_restarted_gateway_serves_cached_pictures_with_no_encoder_alive(stack: Stack) -> None:
    first, _ = await ask(stack, picture_message(6))
    await stack.kill("encoder-0")
    await stack.kill("gateway-1")
    await kill_the_decoder_that_knows(stack)
    await stack.local.children["gateway-1"].start()
    await stack.wait_for(encoders=0, decoders=1, gateway=1)
    again, details = await ask(stack, picture_message(6), 1)
    assert again == first
    assert details["encoded_media_tokens"] == 0


async def test_the_next_turn_of_a_conversation_needs_neither_redis_nor_an_encoder(stack: Stack) -> None:
    messages = picture_message(7)
    first, details = await ask(stack, messages)
    assert details["encoded_media_tokens"] == 30
    served = {name: await stack.metric(name, "tandem_decoder_requests_total") for name in ("decoder-0", "decoder-1")}
    knows, other = sorted(served, key=served.__getitem__, reverse=True)
    fetches = await stack.metric(knows, "tandem_decoder_fetches_total")
    for name in ("valkey", "encoder-0", other):
        await stack.kill(name)
    await stack.wait_for(encoders=0, decoders=1)
    messages += [{"role": "assistant", "content": first}, *text_message("And what else?")]
    second, details = await ask(stack, messages)
    assert second
    assert details["encoded_media_tokens"] == 0
    assert details["cached_tokens"] >= 30
    assert await stack.metric(knows, "tandem_decoder_fetches_total") == fetches
