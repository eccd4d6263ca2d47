"""Every message that Tandem's processes exchange, with its bounds.

A message is one msgspec struct, packed as one header frame by `common.wire`; media bytes and embedding chunks follow
as raw payload frames. Fields are validated while they are unpacked, so code behind the wire may rely on the bounds
given here. Time is seconds left, never a clock; peers are named by id, never by address. Unknown fields are ignored,
so a minor version may add some. Pure data: knows nothing of sockets, torch or clocks.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

MAX_TOKENS = 1 << 20  # token ids in one prompt or output; real models stop at 262,144
MAX_MEDIA_ITEMS = 4096
MAX_CHUNK_BYTES = 4 << 20
SCALE_BYTES = 4  # of a float32 scale of int8 embeddings

Id = Annotated[str, Meta(min_length=1, max_length=128)]
# The length as well: `$` also matches before a line break at the end.
MediaKey = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
Fingerprint = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Bias = Annotated[float, Meta(ge=-1000, le=1000)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
Side = Annotated[int, Meta(ge=1, le=1 << 16)]
Grid = tuple[Side, Side, Side]  # (t, h, w) in patches, before the spatial merge

Role = Literal["gateway", "encoder", "decoder"]
Modality = Literal["image", "video"]
WireDtype = Literal["float32", "float16", "bfloat16", "int8"]
FinishReason = Literal["stop", "length", "cancelled", "error", "hand_over"]


def payload_bytes(dtype: WireDtype, rows: int, width: int, levels: int) -> int:
    """Bytes of an embedding on the wire."""
    if dtype == "int8":
        return rows * (width + SCALE_BYTES * (1 + levels))
    return rows * width * (4 if dtype == "float32" else 2)


class Message(Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages. The `type` field on the wire is the class name."""


class ErrorDetail(Struct, frozen=True, kw_only=True):
    """An error of `common.errors` on the wire."""

    code: Id
    message: Text
    param: Text | None = None


class Limits(Struct, frozen=True, kw_only=True):
    """What a service accepts. Zero means that the limit does not apply to its role."""

    max_model_len: Count = 0
    max_sequences: Count = 0
    kv_cache_tokens: Count = 0
    max_media_bytes: Count = 0
    max_patches: Count = 0


class Hello(Message, frozen=True, kw_only=True, tag=True):
    """First message on every connection, both ways, then repeated as the heartbeat.

    `instance_id` changes when a process restarts, so that a peer knows that its work there is lost. An encoder's
    `fingerprint` and `wire_dtype` describe its embeddings; a decoder states the width (in elements) and levels
    that it expects.
    """

    role: Role
    instance_id: Id
    model: Id
    version: Text
    fingerprint: Fingerprint | None = None
    wire_dtype: WireDtype | None = None
    levels: Annotated[int, Meta(ge=0, le=64)] = 0
    width: Count = 0
    vocab_size: Count = 0
    limits: Limits = Limits()
    is_ready: bool = False
    is_draining: bool = False


class LoadReport(Message, frozen=True, kw_only=True, tag=True):
    """How busy a service is, sent to every gateway that said Hello.

    `queue_s` is how long the work that is there and has not run takes at the service's measured rate: an encoder's
    patches, a decoder's prompts as far as their embeddings have come. 0 while the rate is not known.
    """

    instance_id: Id
    queue_s: Seconds = 0.0
    patches_per_s: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    waiting: Count = 0
    running: Count = 0
    kv_used_tokens: Count = 0
    kv_total_tokens: Count = 0
    bytes_in_flight: Count = 0
    is_draining: bool = False

    @property
    def kv_share(self) -> float:
        """The part of the KV cache that is in use; 0 where there is none."""
        return self.kv_used_tokens / self.kv_total_tokens if self.kv_total_tokens else 0.0


class Refused(Message, frozen=True, kw_only=True, tag=True):
    """Answer to a frame that could not be accepted: malformed, another protocol version, or out of place.

    `request_id` is that of the refused message, where it has one that can be read: what it asked for has failed.
    """

    error: ErrorDetail
    request_id: Id | None = None


class Cancel(Message, frozen=True, kw_only=True, tag=True):
    """Stop everything done for a request, or at a decoder only for one `choice`. An id that is not known is no error.

    An encoder refuses a request that arrives after its Cancel, since the two travel on different sockets.
    """

    request_id: Id
    choice: Annotated[int, Meta(ge=0, le=128)] | None = None


class MediaOptions(Struct, frozen=True, kw_only=True):
    """Per-item processing options that change the result, and so are part of the media key."""

    min_pixels: Count | None = None
    max_pixels: Count | None = None
    fps: Annotated[float, Meta(gt=0, le=240)] | None = None
    num_frames: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    max_frames: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None


class ProbeRequest(Message, frozen=True, kw_only=True, tag=True):
    """Ask an encoder for a video's grid. One payload frame: the source bytes."""

    request_id: Id
    key: MediaKey
    options: MediaOptions = MediaOptions()
    time_left_s: Seconds


class VideoFacts(Struct, frozen=True, kw_only=True):
    """What the prompt needs to know of a video. One timestamp (seconds) for each of the grid's frame groups."""

    grid: Grid
    frame_indices: Annotated[list[Count], Meta(max_length=1 << 16)]
    timestamps: Annotated[list[Seconds], Meta(max_length=1 << 16)]


class ProbeReply(Message, frozen=True, kw_only=True, tag=True):
    """Answer to `ProbeRequest`: exactly one of `facts` and `error`."""

    request_id: Id
    key: MediaKey
    facts: VideoFacts | None = None
    error: ErrorDetail | None = None


class EncodeRequest(Message, frozen=True, kw_only=True, tag=True):
    """Ask an encoder to hold an item's embedding under a lease of `request_id`. One payload frame: the source bytes.

    With `take_over` it encodes also what another encoder, or Redis, is said to have: they could not give it.
    """

    request_id: Id
    key: MediaKey
    modality: Modality
    options: MediaOptions = MediaOptions()
    expected_grid: Grid
    fingerprint: Fingerprint
    time_left_s: Seconds
    take_over: bool = False


class EncodeTimes(Struct, frozen=True, kw_only=True):
    """Seconds that an encode spent in each phase."""

    queue_s: Seconds = 0.0
    preprocess_s: Seconds = 0.0
    forward_s: Seconds = 0.0


class EncodeReply(Message, frozen=True, kw_only=True, tag=True):
    """The embedding is held here and may be fetched, or `error` says why not. Carries no payload.

    With `elsewhere` nothing is held here: the word `redis`, or the id of the encoder that is at work on the item.
    """

    request_id: Id
    key: MediaKey
    was_held: bool = False
    num_bytes: Count = 0
    times: EncodeTimes = EncodeTimes()
    error: ErrorDetail | None = None
    elsewhere: Id | None = None


class Release(Message, frozen=True, kw_only=True, tag=True):
    """The request no longer needs what the encoder holds for it: its leases end."""

    request_id: Id


class Fetch(Message, frozen=True, kw_only=True, tag=True):
    """Ask an encoder for a held embedding. The receiver is ready for `credit` chunks.

    One that can map memory of processes on its `host` says so: an encoder of the same host may then answer with a
    place instead of chunks.
    """

    fetch_id: Id
    key: MediaKey
    fingerprint: Fingerprint
    credit: Annotated[int, Meta(ge=1, le=4096)]
    time_left_s: Seconds
    host: Id | None = None


class FetchCredit(Message, frozen=True, kw_only=True, tag=True):
    """The receiver of a fetch is ready for `chunks` more chunks; 0 ends the fetch, early unless it `is_mapped`."""

    fetch_id: Id
    chunks: Annotated[int, Meta(ge=0, le=4096)]
    is_mapped: bool = False


class SharedMemory(Struct, frozen=True, kw_only=True):
    """Where a process of the same host finds a payload: a descriptor of its owner, and what it must be called."""

    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    fd: Annotated[int, Meta(ge=0, lt=1 << 31)]
    name: Annotated[str, Meta(pattern="^[0-9a-f]{32}$", max_length=32)]


class EmbeddingHeader(Struct, frozen=True, kw_only=True):
    """What an embedding payload is. Its bytes are `rows * width` elements of `dtype`, row-major, little-endian.

    A row of `int8` begins with `1 + levels` float32 scales: of the first `out_hidden` elements, then of each level's.
    `width` is `out_hidden * (1 + levels)`; `checksum` is the CRC-32 of the payload bytes.
    """

    key: MediaKey
    grid: Grid
    dtype: WireDtype
    rows: Annotated[int, Meta(ge=1, le=1 << 24)]
    width: Annotated[int, Meta(ge=1, le=1 << 20)]
    levels: Annotated[int, Meta(ge=0, le=64)]
    fingerprint: Fingerprint
    checksum: Annotated[int, Meta(ge=0, lt=1 << 32)]
    chunk_bytes: Annotated[int, Meta(ge=1, le=MAX_CHUNK_BYTES)]

    @property
    def num_bytes(self) -> int:
        """Payload size in bytes."""
        return payload_bytes(self.dtype, self.rows, self.width, self.levels)

    @property
    def num_chunks(self) -> int:
        """Payload frames that follow, each of `chunk_bytes` but the last."""
        return -(-self.num_bytes // self.chunk_bytes)


class FetchReply(Message, frozen=True, kw_only=True, tag=True):
    """Answer to `Fetch`: a header, after which chunks follow, or an error.

    With `shared` no chunks follow: the payload is there, until the receiver says that it `is_mapped`, or that it wants
    chunks after all.
    """

    fetch_id: Id
    header: EmbeddingHeader | None = None
    error: ErrorDetail | None = None
    shared: SharedMemory | None = None


class FetchChunk(Message, frozen=True, kw_only=True, tag=True):
    """One payload frame: bytes `[index * chunk_bytes, ...)` of a fetched embedding."""

    fetch_id: Id
    index: Annotated[int, Meta(ge=0, lt=1 << 16)]


class PromptSpan(Struct, frozen=True, kw_only=True):
    """A run of placeholder tokens in the prompt: `grid` is that of this run (t = 1 for a video's frame group)."""

    offset: Annotated[int, Meta(ge=0, lt=MAX_TOKENS)]
    num_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    grid: Grid


class MediaItem(Struct, frozen=True, kw_only=True):
    """One picture or video of a prompt. Its spans consume its embedding's rows in order."""

    key: MediaKey
    modality: Modality
    grid: Grid
    spans: Annotated[list[PromptSpan], Meta(min_length=1, max_length=1 << 16)]

    @property
    def num_tokens(self) -> int:
        """Rows of the embedding, which is the number of placeholder tokens over all spans."""
        return sum(span.num_tokens for span in self.spans)


GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How tokens are chosen; the semantics of OpenAI's API and vLLM's names. The seed is always set.

    `grammar` is the JSON text of a schema for "json_schema", a JSON list of texts for "choice", the expression for
    "regex", a Lark grammar in llguidance's dialect for "grammar", and absent for "json_object".
    """

    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] = msgspec.field(default_factory=list)
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=4096)] = msgspec.field(default_factory=dict)
    allowed_token_ids: TokenIds | None = None
    bad_words_ids: Annotated[list[TokenIds], Meta(max_length=1024)] = msgspec.field(default_factory=list)
    num_logprobs: Annotated[int, Meta(ge=0, le=1024)] | None = None
    num_prompt_logprobs: Annotated[int, Meta(ge=0, le=1024)] | None = None
    grammar_kind: GrammarKind | None = None
    grammar: Annotated[str, Meta(max_length=1 << 20)] | None = None


class GenerateRequest(Message, frozen=True, kw_only=True, tag=True):
    """Ask a decoder for tokens.

    `outputs` holds each choice's tokens so far: empty at first, filled when a request is resumed elsewhere, and
    always apart from the prompt so that penalties and limits are right over the seam. `attempt` grows with each
    resumption; answers to an older attempt are dropped by the gateway. Choices in `finished` have ended: nothing is
    said of them. With `pooling` the answer is no text but the prompt's embedding. `fingerprint` and `wire_dtype` are
    those of the encoders whose embeddings it uses.
    """

    request_id: Id
    attempt: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    model: Id
    fingerprint: Fingerprint | None = None
    wire_dtype: WireDtype | None = None
    prompt_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS)]
    outputs: Annotated[list[TokenIds], Meta(max_length=128)] = msgspec.field(default_factory=list)
    media: Annotated[list[MediaItem], Meta(max_length=MAX_MEDIA_ITEMS)] = msgspec.field(default_factory=list)
    sampling: SamplingParams
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] = 0
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    time_left_s: Seconds
    finished: Annotated[list[Annotated[int, Meta(ge=0, le=128)]], Meta(max_length=128)] = msgspec.field(
        default_factory=list
    )
    pooling: Literal["last"] | None = None


class MediaNeeded(Message, frozen=True, kw_only=True, tag=True):
    """Keys that the decoder has neither in its KV cache nor in memory; `failed_source` names a fetch that failed."""

    request_id: Id
    attempt: Annotated[int, Meta(ge=0, le=1 << 16)]
    keys: Annotated[list[MediaKey], Meta(max_length=MAX_MEDIA_ITEMS)]
    failed_source: Id | None = None


class MediaAt(Message, frozen=True, kw_only=True, tag=True):
    """An embedding can be fetched from `source`: the word `redis`, or an encoder's instance id."""

    request_id: Id
    key: MediaKey
    source: Id


class MediaFailed(Message, frozen=True, kw_only=True, tag=True):
    """An item will not come: the decoder drops the request."""

    request_id: Id
    key: MediaKey
    error: ErrorDetail


class TokenLogprobs(Struct, frozen=True, kw_only=True, array_like=True):
    """Log probabilities at one generated position: the chosen token's, then the most likely ones."""

    logprob: float
    top: Annotated[list[tuple[TokenId, float]], Meta(max_length=1024)]


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts of one choice so far. Sent with its first token and with its end."""

    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count


class SequenceTimes(Struct, frozen=True, kw_only=True):
    """Seconds of one finished choice: waiting for room, waiting for media, prefill, decode."""

    queue_s: Seconds = 0.0
    media_wait_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    decode_s: Seconds = 0.0


class SequenceTokens(Struct, frozen=True, kw_only=True):
    """New tokens of one choice. `offset` is the output position of the first, so duplicates can be dropped.

    With `finish_reason` "stop", `stop_token_id` is the token that ended it (not part of `tokens`). `prompt_logprobs`
    comes with the first event of choice 0 where it was asked for: one entry for each prompt token but the first.
    `embedding` is the whole answer to a request with `pooling`: the last token's hidden state, of length 1.
    """

    request_id: Id
    attempt: Annotated[int, Meta(ge=0, le=1 << 16)]
    choice: Annotated[int, Meta(ge=0, le=128)]
    offset: Count
    tokens: TokenIds
    logprobs: Annotated[list[TokenLogprobs], Meta(max_length=MAX_TOKENS)] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: TokenId | None = None
    error: ErrorDetail | None = None
    usage: Usage | None = None
    times: SequenceTimes | None = None
    prompt_logprobs: Annotated[list[TokenLogprobs], Meta(max_length=MAX_TOKENS)] | None = None
    embedding: Annotated[list[float], Meta(max_length=1 << 20)] | None = None


class TokenBatch(Message, frozen=True, kw_only=True, tag=True):
    """What one decoder step gave to one gateway."""

    sequences: Annotated[list[SequenceTokens], Meta(max_length=1 << 16)]


ControlMessage = (
    Hello | LoadReport | Refused | Cancel | Release | GenerateRequest | MediaNeeded | MediaAt | MediaFailed | TokenBatch
)
DataMessage = (
    Hello
    | Refused
    | ProbeRequest
    | ProbeReply
    | EncodeRequest
    | EncodeReply
    | Fetch
    | FetchCredit
    | FetchReply
    | FetchChunk
)
AnyMessage = ControlMessage | DataMessage
