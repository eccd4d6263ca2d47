"""The fields that every generating route has: how tokens are chosen, what they must look like, how they are sent.

OpenAI's names, and those that vLLM added and its users rely on. Validation is strict: "10" and true are no integers,
NaN is no number, text is valid Unicode. Unknown fields are ignored, but a field that asks for something that this
server cannot do is refused by name, as an `InvalidRequest` that passes through pydantic untouched. Pure.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from common.errors import InvalidRequest
from gateway_svc.schemas.plain_json import check_plain

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_BAD_WORDS = 256
MAX_ALTERNATIVES = 1024  # of structured_outputs.choice

_INT64 = (-(1 << 63), (1 << 63) - 1)


class StrictModel(BaseModel):
    """Base of all request bodies and what is in them."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(StrictModel):
    """`include_usage` adds a last chunk with the token counts, `continuous_usage_stats` the counts to every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(StrictModel):
    """A schema that the answer follows. Whether it is a valid one is seen before anything runs."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """What the answer's text must be: anything, a JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(StrictModel):
    """vLLM's name for constraints: exactly one of these."""

    model_config = ConfigDict(extra="forbid")

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_ALTERNATIVES)] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None


class ProcessorKwargs(StrictModel):
    """Processing of this request's media; a value beyond the model's own limit becomes the limit."""

    model_config = ConfigDict(extra="forbid")

    min_pixels: Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    max_pixels: Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    fps: Annotated[float, Field(gt=0, le=240)] | None = None
    num_frames: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    max_frames: Annotated[int, Field(ge=1, le=1 << 16)] | None = None


def _stop_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class SamplingFields(StrictModel):
    """The shared fields."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=_INT64[0], le=_INT64[1])] | None = None
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
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    user: str | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None  # seconds, within the server's own limit

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

    @model_validator(mode="before")
    @classmethod
    def _check_values(cls, body: object) -> object:
        if isinstance(body, dict):
            cls.refuse_multitudes(body)
        check_plain(body)
        if isinstance(body, dict):
            _refuse_unsupported(body, cls.model_fields.keys())
        return body

    @classmethod
    def refuse_multitudes(cls, body: dict[str, Any]) -> None:
        """Refuse lists that are too long while they are still plain: an object of each item would cost far more."""

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


# Fields that change the answer and that are not served, with the values that ask for nothing.
NOT_SERVED: dict[str, tuple[object, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "chat_template": (None,),
    "documents": (None, []),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "prompt_embeds": (None,),
    "store": (None, False),
    "structural_tag": (None,),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}


def _refuse_unsupported(body: dict[str, Any], known: Any) -> None:
    for name, harmless in NOT_SERVED.items():
        if name in body and body[name] not in harmless and (name == "store" or name not in known):
            instead = "use structured_outputs" if name.startswith("guided_") else "leave it out"
            raise InvalidRequest(f"{name} is not supported: {instead}", param=name)


def check_count(value: object, limit: int, param: str) -> int:
    """The number of items of a list; anything else has none. Raises InvalidRequest for too many."""
    if not isinstance(value, list):
        return 0
    if len(value) > limit:
        raise InvalidRequest(f"{param} has {len(value)} items, above the limit of {limit}: send fewer", param=param)
    return len(value)
