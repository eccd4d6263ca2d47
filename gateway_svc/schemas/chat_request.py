"""The request body of `/v1/chat/completions`: messages, tools, and what only a chat has.

Sampling fields come from `sampling_fields`, with the same strictness. Messages are open, since clients send back what
they were answered, by whatever server; tools are not. Limits on the number of messages, parts and tools hold before any
object of them is made. Knows nothing of templates, media bytes or sampling defaults. Pure.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    WithJsonSchema,
    model_validator,
)

from common.errors import InvalidRequest
from gateway_svc.schemas.sampling_fields import (
    MAX_TOP_LOGPROBS,
    NOT_SERVED,
    ProcessorKwargs,
    SamplingFields,
)
from gateway_svc.schemas.strict_model import ClosedModel, NotServed, NotServedFields, StrictModel, check_count

MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of one message; tool calls too
MAX_PARTS_IN_ALL = 16_384
MAX_TOOLS = 4096
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _url_object(value: object) -> object:
    """A bare string where an object with `url` belongs is taken as the URL."""
    return {"url": value} if isinstance(value, str) else value


class MediaUrl(StrictModel):
    """Where media is: a data URI or an http(s) URL. An image of `detail` "low" is seen in at most 512 x 512 pixels."""

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


class RefusalPart(StrictModel):
    """What an assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str


class ImagePart(StrictModel):
    """An image."""

    type: Literal["image_url"]
    image_url: UrlObject


class VideoPart(StrictModel):
    """A video: MP4, WebM or GIF."""

    type: Literal["video_url"]
    video_url: UrlObject


Part = Annotated[TextPart | RefusalPart | ImagePart | VideoPart, Field(discriminator="type")]


def _content_kind(value: object) -> str:
    return "text" if isinstance(value, str) else "parts"


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Tag("parts")],
    Discriminator(_content_kind),
]


# Read, to be refused with the message's place, when it is anything else.
Null = Annotated[Any, WithJsonSchema({"type": "null"})]


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
    """One turn. `developer` is another word for `system`, `reasoning` for `reasoning_content`.

    A `refusal` stands for the content that is not there. `audio` and `function_call` may only be null.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: Null = None
    function_call: Null = None


class FunctionDefinition(ClosedModel):
    """What a tool is called and takes, and returns as transformers' schemas of functions have it."""

    not_served: ClassVar[NotServedFields] = {"defer_loading": NotServed((False,))}

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    return_: Annotated[dict[str, Any] | None, Field(alias="return")] = None


class Tool(ClosedModel):
    """A tool that the template may show to the model."""

    not_served: ClassVar[NotServedFields] = {"defer_loading": NotServed((False,))}

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


class FunctionName(ClosedModel):
    """A function by its name."""

    name: str


class NamedTool(ClosedModel):
    """One tool, as `tool_choice` names it."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(ClosedModel):
    """Those of the tools that may be called in this turn."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(ClosedModel):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_kind(value: object) -> str:
    """Which of its three forms a choice of tools has."""
    if not isinstance(value, dict):
        return "word"
    return "allowed" if value.get("type") == "allowed_tools" else "named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[AllowedToolsChoice, Tag("allowed")],
    Discriminator(choice_kind),
]


class ChatCompletionRequest(SamplingFields):
    """A chat completion, as OpenAI's API has it."""

    not_served: ClassVar[NotServedFields] = {
        **NOT_SERVED,
        "audio": NotServed(),
        "chat_template": NotServed((), "leave it out: the server's template is used"),
        "documents": NotServed(([],)),
        "echo": NotServed((False,)),
        "function_call": NotServed(("none", "auto"), "use tool_choice"),
        "functions": NotServed(([],), "use tools"),
        "include_reasoning": NotServed((True,)),
        "media_io_kwargs": NotServed(({},), "use mm_processor_kwargs"),
        "modalities": NotServed((["text"],)),
        "moderation": NotServed(),
        "prediction": NotServed(),
        "separate_reasoning": NotServed((True,)),
        "stream_reasoning": NotServed((True,)),
        "verbosity": NotServed(("medium",)),
        "web_search_options": NotServed(),
    }

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
    reasoning_effort: ReasoningEffort | None = None
    metadata: dict[str, Any] | None = None  # without effect, as the next two
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

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
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        check_continuation(self.add_generation_prompt, self.continue_final_message)
        return self


def check_continuation(add_generation_prompt: bool | None, continue_final_message: bool | None) -> None:
    """A prompt ends with the last message's text or with the opening of another. Raises InvalidRequest for both."""
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other: set only one to true",
            param="continue_final_message",
        )
