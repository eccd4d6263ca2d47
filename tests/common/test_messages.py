"""The bytes of every message, and the bounds of their fields."""

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from common import messages
from common.errors import ProtocolError
from common.messages import AnyMessage, EmbeddingHeader, MediaItem, PromptSpan
from common.wire import PREFIX_BYTES, pack, unpack

GOLDEN = Path(__file__).with_name("golden_messages.json")
KEY, OTHER_KEY = "ab" * 32, "cd" * 32
MESSAGE_CLASSES: tuple[type[Any], ...] = get_args(AnyMessage)

ERROR = messages.ErrorDetail(code="overloaded", message="try later", param="messages[0]")
HEADER = EmbeddingHeader(
    key=KEY,
    grid=(1, 4, 6),
    dtype="bfloat16",
    rows=6,
    width=192,
    levels=3,
    fingerprint=OTHER_KEY,
    checksum=0xDEADBEEF,
    chunk_bytes=1 << 20,
)
SAMPLING = messages.SamplingParams(
    seed=-5,
    max_tokens=32,
    n=2,
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.5,
    min_tokens=3,
    ignore_eos=True,
    stop_token_ids=[7],
    logit_bias={9: -1.5},
    allowed_token_ids=[1, 2],
    bad_words_ids=[[3, 4]],
    num_logprobs=5,
    num_prompt_logprobs=1,
    grammar_kind="regex",
    grammar="[ab]+",
)
OPTIONS = messages.MediaOptions(min_pixels=1, max_pixels=2, fps=2.5, num_frames=4, max_frames=8)
EXAMPLES: list[AnyMessage] = [
    messages.Hello(
        role="encoder",
        instance_id="e-1",
        model="tandem-demo",
        version="0.1.0",
        fingerprint=KEY,
        wire_dtype="float32",
        levels=3,
        width=192,
        vocab_size=300,
        limits=messages.Limits(
            max_model_len=4096, max_sequences=64, kv_cache_tokens=8192, max_media_bytes=1 << 20, max_patches=16384
        ),
        is_ready=True,
        is_draining=True,
    ),
    messages.LoadReport(
        instance_id="e-1",
        queue_s=0.5,
        patches_per_s=1000.0,
        waiting=1,
        running=2,
        kv_used_tokens=3,
        kv_total_tokens=4,
        bytes_in_flight=5,
        is_draining=True,
    ),
    messages.Refused(error=ERROR, request_id="r-1"),
    messages.Cancel(request_id="r-1", choice=1),
    messages.ProbeRequest(request_id="r-1", key=KEY, options=OPTIONS, time_left_s=1.5),
    messages.ProbeReply(
        request_id="r-1",
        key=KEY,
        facts=messages.VideoFacts(grid=(2, 4, 6), frame_indices=[0, 1, 2, 3], timestamps=[0.25, 1.25]),
        error=ERROR,
    ),
    messages.EncodeRequest(
        request_id="r-1",
        key=KEY,
        modality="video",
        options=OPTIONS,
        expected_grid=(2, 4, 6),
        fingerprint=OTHER_KEY,
        time_left_s=1.5,
    ),
    messages.EncodeReply(
        request_id="r-1",
        key=KEY,
        was_held=True,
        num_bytes=100,
        times=messages.EncodeTimes(queue_s=0.1, preprocess_s=0.2, forward_s=0.3),
        error=ERROR,
    ),
    messages.Release(request_id="r-1"),
    messages.Fetch(fetch_id="f-1", key=KEY, fingerprint=OTHER_KEY, credit=8, time_left_s=1.5),
    messages.FetchCredit(fetch_id="f-1", chunks=1),
    messages.FetchReply(fetch_id="f-1", header=HEADER, error=ERROR),
    messages.FetchChunk(fetch_id="f-1", index=3),
    messages.GenerateRequest(
        request_id="r-1",
        attempt=1,
        model="tandem-demo",
        fingerprint=OTHER_KEY,
        wire_dtype="bfloat16",
        prompt_token_ids=[1, 2, 3],
        outputs=[[4], [5, 6]],
        media=[
            MediaItem(
                key=KEY, modality="image", grid=(1, 4, 4), spans=[PromptSpan(offset=1, num_tokens=4, grid=(1, 4, 4))]
            )
        ],
        sampling=SAMPLING,
        priority=-1,
        cache_salt="tenant",
        time_left_s=30.0,
        finished=[1],
        pooling="last",
    ),
    messages.MediaNeeded(request_id="r-1", attempt=1, keys=[KEY, OTHER_KEY], failed_source="redis"),
    messages.MediaAt(request_id="r-1", key=KEY, source="e-1"),
    messages.MediaFailed(request_id="r-1", key=KEY, error=ERROR),
    messages.TokenBatch(
        sequences=[
            messages.SequenceTokens(
                request_id="r-1",
                attempt=1,
                choice=1,
                offset=2,
                tokens=[7, 8],
                logprobs=[messages.TokenLogprobs(logprob=-0.5, top=[(7, -0.5), (9, float("-inf"))])],
                finish_reason="stop",
                stop_token_id=2,
                error=ERROR,
                usage=messages.Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=1),
                times=messages.SequenceTimes(queue_s=0.1, media_wait_s=0.2, prefill_s=0.3, decode_s=0.4),
                prompt_logprobs=[messages.TokenLogprobs(logprob=-1.5, top=[(3, -0.5)])],
                embedding=[0.5, -0.5],
            )
        ]
    ),
]


def fields_of(message: AnyMessage) -> dict[str, Any]:
    """A message as plain data, to be spoilt and packed again."""
    fields: dict[str, Any] = msgspec.msgpack.decode(pack(message)[PREFIX_BYTES:])
    return fields


def frame_of(fields: dict[str, Any]) -> bytes:
    return pack(EXAMPLES[0])[:PREFIX_BYTES] + msgspec.msgpack.encode(fields)


def test_every_message_has_an_example() -> None:
    assert {type(example) for example in EXAMPLES} == set(MESSAGE_CLASSES)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_the_bytes_of_a_message_do_not_change_by_accident(message: AnyMessage) -> None:
    """To change the protocol on purpose, raise its version, and write these bytes anew."""
    assert pack(message).hex() == json.loads(GOLDEN.read_text())[type(message).__name__]
    assert unpack(pack(message)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_field_of_a_later_minor_version_is_ignored(message: AnyMessage) -> None:
    later = {**fields_of(message), "of_a_later_version": [{"deep": [1, 2, 3]}]}
    assert unpack(frame_of(later)) == message


@pytest.mark.parametrize(
    ("message_class", "path", "value"),
    [
        (messages.Hello, ["role"], "attacker"),
        (messages.Hello, ["fingerprint"], "AB" * 32),
        (messages.Hello, ["levels"], 65),
        (messages.Hello, ["limits", "max_patches"], -1),
        (messages.Hello, ["instance_id"], ""),
        (messages.Hello, ["instance_id"], "x" * 129),
        (messages.LoadReport, ["queue_s"], -0.5),
        (messages.LoadReport, ["queue_s"], float("nan")),
        (messages.LoadReport, ["queue_s"], float("inf")),
        (messages.LoadReport, ["patches_per_s"], float("nan")),
        (messages.LoadReport, ["patches_per_s"], float("inf")),
        (messages.Refused, ["error", "message"], "x" * 4097),
        (messages.ProbeRequest, ["options", "fps"], 0.0),
        (messages.ProbeRequest, ["options", "num_frames"], 0),
        (messages.ProbeReply, ["facts", "timestamps"], [0.0] * ((1 << 16) + 1)),
        (messages.EncodeRequest, ["key"], "a" * 63),
        (messages.EncodeRequest, ["key"], "a" * 64 + "\n"),
        (messages.EncodeRequest, ["key"], "z" * 64),
        (messages.EncodeRequest, ["expected_grid"], [1, 4]),
        (messages.EncodeRequest, ["expected_grid"], [1, 0, 4]),
        (messages.EncodeRequest, ["expected_grid"], [1, 1 << 17, 4]),
        (messages.EncodeRequest, ["time_left_s"], float("nan")),
        (messages.Fetch, ["credit"], 0),
        (messages.Fetch, ["credit"], 1 << 20),
        (messages.FetchReply, ["header", "rows"], 1 << 30),
        (messages.FetchReply, ["header", "width"], 0),
        (messages.FetchReply, ["header", "dtype"], "float64"),
        (messages.FetchReply, ["header", "chunk_bytes"], 1 << 30),
        (messages.FetchChunk, ["index"], -1),
        (messages.GenerateRequest, ["prompt_token_ids"], []),
        (messages.GenerateRequest, ["prompt_token_ids"], [-1]),
        (messages.GenerateRequest, ["prompt_token_ids"], [1 << 31]),
        (messages.GenerateRequest, ["prompt_token_ids"], [0] * (messages.MAX_TOKENS + 1)),
        (messages.GenerateRequest, ["media"], [{}]),
        (messages.GenerateRequest, ["sampling", "temperature"], float("nan")),
        (messages.GenerateRequest, ["sampling", "top_p"], 0.0),
        (messages.GenerateRequest, ["sampling", "n"], 0),
        (messages.GenerateRequest, ["sampling", "seed"], 1 << 63),
        (messages.GenerateRequest, ["sampling", "logit_bias"], {5: float("nan")}),
        (messages.MediaNeeded, ["keys"], [KEY] * (messages.MAX_MEDIA_ITEMS + 1)),
        (messages.MediaAt, ["key"], "../../etc/passwd"),
    ],
)
def test_a_value_out_of_bounds_is_refused(message_class: type[Any], path: list[str], value: object) -> None:
    example = next(message for message in EXAMPLES if type(message) is message_class)
    fields = fields_of(example)
    inner = fields
    for name in path[:-1]:
        inner = inner[name]
    assert path[-1] in inner
    inner[path[-1]] = value
    with pytest.raises(ProtocolError, match="not a valid message"):
        unpack(frame_of(fields))


def test_a_missing_field_is_refused() -> None:
    fields = fields_of(messages.Cancel(request_id="r-1"))
    del fields["request_id"]
    with pytest.raises(ProtocolError, match="request_id"):
        unpack(frame_of(fields))


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_a_header_knows_its_bytes_and_chunks(dtype: Any, itemsize: int) -> None:
    header = msgspec.structs.replace(HEADER, dtype=dtype, rows=10, width=100, chunk_bytes=300)
    assert header.num_bytes == 1000 * itemsize
    assert header.num_chunks == -(-1000 * itemsize // 300)
    assert msgspec.structs.replace(header, chunk_bytes=1000 * itemsize).num_chunks == 1


def test_an_item_has_the_tokens_of_all_its_spans() -> None:
    span = PromptSpan(offset=0, num_tokens=6, grid=(1, 4, 6))
    assert MediaItem(key=KEY, modality="video", grid=(2, 4, 6), spans=[span, span]).num_tokens == 12
