"""The request body of `/v1/responses`, the common subset.

Stateless: what would need a store is refused by name. Items are closed, as OpenAI's are, but take all that an answer
has when it is sent back. Pure; knows nothing of answers. `response_as_chat` says the same as a chat.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from gateway_svc.schemas.chat_request import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    ReasoningEffort,
    choice_kind,
)
from gateway_svc.schemas.sampling_fields import (
    MAX_TOP_LOGPROBS,
    CacheSalt,
    ProcessorKwargs,
    Seed,
    ServiceTier,
    Timeout,
    TopK,
)
from gateway_svc.schemas.strict_model import ClosedModel, NotServed, NotServedFields, RequestBody, check_count

_NOTHING_STORED = "leave it out, and send all turns as input, since nothing is stored here"


class InputText(ClosedModel):
    """A piece of text."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class InputRefusal(ClosedModel):
    """What an assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str


class InputImage(ClosedModel):
    """An image by its URL or data URI."""

    not_served: ClassVar[NotServedFields] = {"file_id": NotServed((), "send the image as image_url")}

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class InputVideo(ClosedModel):
    """A video by its URL or data URI; not among OpenAI's items."""

    type: Literal["input_video"]
    video_url: str


InputPart = Annotated[InputText | InputRefusal | InputImage | InputVideo, Field(discriminator="type")]
InputContent = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[InputPart], Field(max_length=MAX_PARTS), Tag("parts")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "parts"),
]


class Item(ClosedModel):
    """What items of answers have when they are sent back, and what is not looked at then."""

    id: str | None = None
    status: str | None = None


class InputMessage(Item):
    """A turn."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: InputContent
    phase: str | None = None


class InputCall(Item):
    """A call that an answer made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputCallOutput(Item):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: InputContent
    name: str | None = None


class ReasoningText(ClosedModel):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(Item):
    """The reasoning of an answer. A summary, or what another server encrypted, tells the model nothing."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] | None = None
    encrypted_content: str | None = None


def _item_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if kind in ("function_call", "function_call_output", "reasoning") else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_item_kind),
]
Input = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES), Tag("items")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "items"),
]


class FunctionTool(ClosedModel):
    """A function that may be called."""

    not_served: ClassVar[NotServedFields] = {
        "async": NotServed((False,)),
        "defer_loading": NotServed((False,)),
        "output_schema": NotServed(),
    }

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(ClosedModel):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(ClosedModel):
    """How text is written."""

    not_served: ClassVar[NotServedFields] = {"verbosity": NotServed(("medium",))}

    format: TextFormat | None = None


class ReasoningOptions(ClosedModel):
    """How much to reason. A summary is never made: the reasoning itself is answered."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamingOptions(ClosedModel):
    """No event is padded, whatever this says."""

    include_obfuscation: bool | None = None


class NamedFunction(ClosedModel):
    """A function by its name."""

    type: Literal["function"]
    name: str


class AllowedFunctions(ClosedModel):
    """Those of the functions that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS)]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedFunction, Tag("named")]
    | Annotated[AllowedFunctions, Tag("allowed")],
    Discriminator(choice_kind),
]
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponsesRequest(RequestBody):
    """A response, as OpenAI's API has it, without a store."""

    not_served: ClassVar[NotServedFields] = {
        "background": NotServed((False,), _NOTHING_STORED),
        "context_management": NotServed(([],), _NOTHING_STORED),
        "conversation": NotServed((), _NOTHING_STORED),
        "max_tool_calls": NotServed((), "leave it out: no tool runs here"),
        "moderation": NotServed(),
        "previous_response_id": NotServed((), _NOTHING_STORED),
        "prompt": NotServed((), _NOTHING_STORED),
        "store": NotServed((False,), _NOTHING_STORED),
    }

    model: str
    input: Input
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[Includable] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    stream_options: StreamingOptions | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    safety_identifier: str | None = None
    service_tier: ServiceTier | None = None
    seed: Seed | None = None
    top_k: TopK | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None
    cache_salt: CacheSalt | None = None
    timeout: Timeout | None = None  # seconds, within the server's own limit

    @classmethod
    def refuse_multitudes(cls, body: dict[str, Any]) -> None:
        """See the base."""
        check_count(body.get("input"), MAX_MESSAGES, "input")
        check_count(body.get("tools"), MAX_TOOLS, "tools")

    @property
    def has_logprobs(self) -> bool:
        """Whether log probabilities are wanted."""
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)
