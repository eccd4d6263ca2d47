"""The fields that every generating route has: how tokens are chosen, what they must look like, how they are sent.

OpenAI's names, and those that vLLM added and its users rely on. Validation is strict: "10" and true are no integers,
NaN is no number, text is valid Unicode. A field that is not known, or that asks for something that this server cannot
do, is refused by name. Pure.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from common.errors import InvalidRequest
from gateway_svc.schemas.strict_model import ClosedModel, NotServed, NotServedFields, RequestBody

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_BAD_WORDS = 256
MAX_ALTERNATIVES = 1024  # of structured_outputs.choice

_INT64 = (-(1 << 63), (1 << 63) - 1)


class StreamOptions(ClosedModel):
    """`include_usage` adds a last chunk with the token counts, `continuous_usage_stats` the counts to every chunk.

    `include_obfuscation` is accepted: no chunk is padded.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(ClosedModel):
    """A schema that the answer follows. Whether it is a valid one is seen before anything runs."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(ClosedModel):
    """What the answer's text must be: anything, a JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(ClosedModel):
    """vLLM's name for constraints: exactly one of these."""

    not_served: ClassVar[NotServedFields] = {
        "disable_additional_properties": NotServed((False,)),
        "disable_any_whitespace": NotServed((False,)),
        "disable_fallback": NotServed((False, True)),  # another implementation is never tried
        "structural_tag": NotServed((), "use grammar"),
    }

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_ALTERNATIVES)] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None


class ProcessorKwargs(ClosedModel):
    """Processing of this request's media; a value beyond the model's own limit becomes the limit."""

    min_pixels: Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    max_pixels: Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    fps: Annotated[float, Field(gt=0, le=240)] | None = None
    num_frames: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    max_frames: Annotated[int, Field(ge=1, le=1 << 16)] | None = None


def _stop_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TopK = Annotated[int, Field(ge=-1, lt=1 << 31)]
Seed = Annotated[int, Field(ge=_INT64[0], le=_INT64[1])]
Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
PromptLimit = Annotated[int, Field(ge=-1, lt=1 << 31)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=256)]
Timeout = Annotated[float, Field(gt=0)]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]


# Fields that change the answer and that no generating route serves.
NOT_SERVED: NotServedFields = {
    "enable_thinking": NotServed((), "put it into chat_template_kwargs"),
    "best_of": NotServed((1,), "use n"),
    "extra_body": NotServed((), "put its fields where it is itself, as OpenAI's clients do"),
    "guided_choice": NotServed((), "use structured_outputs"),
    "guided_decoding_backend": NotServed(),
    "guided_grammar": NotServed((), "use structured_outputs"),
    "guided_json": NotServed((), "use structured_outputs"),
    "guided_regex": NotServed((), "use structured_outputs"),
    "length_penalty": NotServed((1,)),
    "logits_processors": NotServed(([],)),
    "no_stop_trim": NotServed((False,), "use include_stop_str_in_output"),
    "prompt_embeds": NotServed(),
    "return_token_ids": NotServed((False,), "leave it out, and ask /tokenize"),
    "return_tokens_as_token_ids": NotServed((False,)),
    "store": NotServed((False,), "leave it out: nothing is stored here"),
    "structural_tag": NotServed((), "use structured_outputs"),
    "thinking_token_budget": NotServed((-1,)),
    "truncation_side": NotServed(("left",), "leave it out: the end of a prompt is kept"),
    "use_beam_search": NotServed((False,)),
}


class SamplingFields(RequestBody):
    """The shared fields."""

    not_served: ClassVar[NotServedFields] = NOT_SERVED

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: (
        Annotated[
            list[StopString],
            Field(max_length=MAX_STOPS),
            BeforeValidator(_stop_list, json_schema_input_type=StopString | list[StopString]),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1 << 40)] | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=4096)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=1 << 20)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    truncate_prompt_tokens: PromptLimit | None = None
    priority: Priority | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: CacheSalt | None = None
    # Accepted without effect: there is one tier and no account, prefixes are found and chunks cut without being told.
    add_special_tokens: bool | None = None
    prompt_cache_key: str | None = None
    request_id: str | None = None
    safety_identifier: str | None = None
    service_tier: ServiceTier | None = None
    session_id: str | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None

    timeout: Timeout | None = None  # seconds, within the server's own limit

    @property
    def token_limit(self) -> int | None:
        """The most tokens of a choice, where the client states it."""
        return self.max_tokens

    def max_prompt_tokens(self, max_model_len: int) -> int | None:
        """How much of a longer prompt's end is kept; None where a longer one is refused."""
        if self.truncate_prompt_tokens == -1:
            return max(1, max_model_len - (self.token_limit or 1))
        return self.truncate_prompt_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives at each position; None without log probabilities."""
        return None

    @model_validator(mode="after")
    def _check_stream(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens is 0: keep at least 1, or say -1 for what fits", param="truncate_prompt_tokens"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs needs stream to be false", param="prompt_logprobs")
        return self
