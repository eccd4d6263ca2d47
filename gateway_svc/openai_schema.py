"""The request body of `/v1/chat/completions`: OpenAI's fields, and those that vLLM added and its users rely on.

Validation is strict: "10" and true are no integers, NaN and infinities are no numbers, text must be valid Unicode and
nesting is bounded. Unknown fields are ignored, but a field that asks for something this server cannot do is refused
by name, as an `InvalidRequest` that passes through pydantic untouched. Knows nothing of templates, media bytes or
sampling defaults.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    model_validator,
)

from common.errors import InvalidRequest
from gateway_svc.plain_json import check_plain

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of one message; tool calls too
MAX_PARTS_IN_ALL = 16_384
MAX_TOOLS = 4096

_INT64 = (-(1 << 63), (1 << 63) - 1)


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def _url_object(value: object) -> object:
    """A bare string where an object with `url` belongs is taken as the URL."""
    return {"url": value} if isinstance(value, str) else value


class MediaUrl(_Model):
    """Where media is: a data URI or an http(s) URL. `detail` is accepted; the model has one resolution rule."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class TextPart(_Model):
    """A piece of text."""

    type: Literal["text"]
    text: str


class ImagePart(_Model):
    """An image."""

    type: Literal["image_url"]
    image_url: Annotated[MediaUrl, BeforeValidator(_url_object)]


class VideoPart(_Model):
    """A video: MP4, WebM or GIF."""

    type: Literal["video_url"]
    video_url: Annotated[MediaUrl, BeforeValidator(_url_object)]


Part = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


def _content_kind(value: object) -> str:
    return "text" if isinstance(value, str) else "parts"


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Tag("parts")],
    Discriminator(_content_kind),
]


class FunctionCall(_Model):
    """A function that an assistant called. `arguments` is JSON, as a string or already an object."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(_Model):
    """A call in an assistant's history."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Model):
    """One turn. `developer` is another word for `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(_Model):
    """What a tool is called and takes."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Model):
    """A tool that the template may show to the model."""

    type: Literal["function"]
    function: FunctionDefinition
    _as_sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def as_sent(self) -> dict[str, Any]:
        """The client's own object: a template writes it out with its keys in their order."""
        return self._as_sent

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, handler: ModelWrapValidatorHandler["Tool"]) -> "Tool":
        tool = handler(value)
        tool._as_sent = value
        return tool


class StreamOptions(_Model):
    """`include_usage` adds a last chunk with the token counts."""

    include_usage: bool | None = None


class ResponseFormat(_Model):
    """Only plain text so far."""

    type: str


class ProcessorKwargs(_Model):
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


class ChatCompletionRequest(_Model):
    """A chat completion, as OpenAI's API has it."""

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=_INT64[0], le=_INT64[1])] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Annotated[list[StopString], Field(max_length=MAX_STOPS), BeforeValidator(_stop_list)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1 << 40)] | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=4096)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_values(cls, body: object) -> object:
        if isinstance(body, dict):
            _refuse_multitudes(body)
        check_plain(body)
        if isinstance(body, dict):
            _refuse_unsupported(body)
        return body

    @model_validator(mode="after")
    def _check_combinations(self) -> "ChatCompletionRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other: set only one to true",
                param="continue_final_message",
            )
        if self.response_format is not None and self.response_format.type != "text":
            raise InvalidRequest('response_format supports only the type "text" so far', param="response_format")
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest('tool_choice supports only "none" and "auto" so far', param="tool_choice")
        return self


# Fields that change the answer and that are not served yet, with the values that ask for nothing.
_NOT_SERVED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": (None,),
    "audio": (None,),
    "bad_words": (None, []),
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
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "prompt_logprobs": (None,),
    "skip_special_tokens": (None, True),
    "store": (None, False),
    "structural_tag": (None,),
    "structured_outputs": (None,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}


def _refuse_multitudes(body: dict[str, Any]) -> None:
    """Refuse lists that are too long while they are still plain: an object of each item would cost far more."""
    _check_count(body.get("messages"), MAX_MESSAGES, "messages")
    _check_count(body.get("tools"), MAX_TOOLS, "tools")
    num_parts = 0
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        for name in ("content", "tool_calls") if isinstance(message, dict) else ():
            param = f"messages[{index}].{name}"
            num_parts += _check_count(message.get(name), MAX_PARTS, param)
            if num_parts > MAX_PARTS_IN_ALL:
                raise InvalidRequest(
                    f"{param} is where the messages exceed {MAX_PARTS_IN_ALL} content parts and tool calls in all: "
                    "send fewer",
                    param=param,
                )


def _check_count(value: object, limit: int, param: str) -> int:
    """The number of items of a list; anything else has none."""
    if not isinstance(value, list):
        return 0
    if len(value) > limit:
        raise InvalidRequest(f"{param} has {len(value)} items, above the limit of {limit}: send fewer", param=param)
    return len(value)


def _refuse_unsupported(body: dict[str, Any]) -> None:
    for name, harmless in _NOT_SERVED.items():
        if name in body and body[name] not in harmless:
            raise InvalidRequest(f"{name} is not supported yet: leave it out", param=name)
