"""The request body of `/v1/chat/completions`: messages, tools, and what only a chat has.

Sampling fields come from `sampling_fields`, with the same strictness. Limits on the number of messages, parts and
tools hold before any object of them is made. Knows nothing of templates, media bytes or sampling defaults. Pure.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, ModelWrapValidatorHandler, PrivateAttr, Tag, model_validator

from common.errors import InvalidRequest
from gateway_svc.schemas.sampling_fields import (
    MAX_TOP_LOGPROBS,
    ProcessorKwargs,
    SamplingFields,
    StrictModel,
    check_count,
)

MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of one message; tool calls too
MAX_PARTS_IN_ALL = 16_384
MAX_TOOLS = 4096


def _url_object(value: object) -> object:
    """A bare string where an object with `url` belongs is taken as the URL."""
    return {"url": value} if isinstance(value, str) else value


class MediaUrl(StrictModel):
    """Where media is: a data URI or an http(s) URL. `detail` is accepted; the model has one resolution rule."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None

    def take(self) -> str:
        """The URL, once: a data URI is not to be held for as long as the answer takes."""
        url, self.url = self.url, ""
        return url


UrlObject = Annotated[MediaUrl, BeforeValidator(_url_object, json_schema_input_type=str | MediaUrl)]


class TextPart(StrictModel):
    """A piece of text."""

    type: Literal["text"]
    text: str


class ImagePart(StrictModel):
    """An image."""

    type: Literal["image_url"]
    image_url: UrlObject


class VideoPart(StrictModel):
    """A video: MP4, WebM or GIF."""

    type: Literal["video_url"]
    video_url: UrlObject


Part = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


def _content_kind(value: object) -> str:
    return "text" if isinstance(value, str) else "parts"


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Tag("parts")],
    Discriminator(_content_kind),
]


class FunctionCall(StrictModel):
    """A function that an assistant called. `arguments` is JSON, as a string or already an object."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(StrictModel):
    """A call in an assistant's history."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(StrictModel):
    """One turn. `developer` is another word for `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(StrictModel):
    """What a tool is called and takes."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(StrictModel):
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


class FunctionName(StrictModel):
    """A function by its name."""

    name: str


class NamedTool(StrictModel):
    """One tool, as `tool_choice` names it."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(StrictModel):
    """Those of the tools that may be called in this turn."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(StrictModel):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_kind(value: object) -> str:
    if not isinstance(value, dict):
        return "word"
    return "allowed_tools" if value.get("type") == "allowed_tools" else "function"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedToolsChoice, Tag("allowed_tools")],
    Discriminator(_choice_kind),
]


class ChatCompletionRequest(SamplingFields):
    """A chat completion, as OpenAI's API has it."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens` is the later name of the same."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives at each position; None without log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @classmethod
    def refuse_multitudes(cls, body: dict[str, Any]) -> None:
        """See the base."""
        check_count(body.get("messages"), MAX_MESSAGES, "messages")
        check_count(body.get("tools"), MAX_TOOLS, "tools")
        num_parts = 0
        messages = body.get("messages")
        for index, message in enumerate(messages if isinstance(messages, list) else ()):
            for name in ("content", "tool_calls") if isinstance(message, dict) else ():
                param = f"messages[{index}].{name}"
                num_parts += check_count(message.get(name), MAX_PARTS, param)
                if num_parts > MAX_PARTS_IN_ALL:
                    raise InvalidRequest(
                        f"{param} is where the messages exceed {MAX_PARTS_IN_ALL} content parts and tool calls in all: "
                        "send fewer",
                        param=param,
                    )

    @model_validator(mode="after")
    def _check_combinations(self) -> "ChatCompletionRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other: set only one to true",
                param="continue_final_message",
            )
        return self
