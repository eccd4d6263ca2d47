"""The request body of `/v1/responses`, the common subset, and what it says as a chat.

Items become messages, instructions a system message, flat tools OpenAI's nested ones; everything after that is the
chat's own. Stateless: what would need a store is refused by name. Pure; knows nothing of answers.
"""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, ValidationError

from common.errors import InvalidRequest
from gateway_svc.schemas.chat_request import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, ChatCompletionRequest, ReasoningEffort
from gateway_svc.schemas.sampling_fields import MAX_TOP_LOGPROBS, ProcessorKwargs
from gateway_svc.schemas.strict_model import ClosedModel, NotServed, NotServedFields, RequestBody, check_count

_MESSAGE_PLACE = re.compile(r"messages\[(\d+)\]")
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
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
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
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    seed: int | None = None
    top_k: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None
    cache_salt: str | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None  # seconds, within the server's own limit

    @classmethod
    def refuse_multitudes(cls, body: dict[str, Any]) -> None:
        """See the base."""
        check_count(body.get("input"), MAX_MESSAGES, "input")
        check_count(body.get("tools"), MAX_TOOLS, "tools")

    @property
    def has_logprobs(self) -> bool:
        """Whether log probabilities are wanted."""
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)


def chat_request(request: ResponsesRequest) -> tuple[ChatCompletionRequest, list[str]]:
    """The same as a chat completion, and the place in `request` that each message is from. Raises InvalidRequest."""
    messages, places = _messages(request)
    body: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": request.has_logprobs or None,
        "top_logprobs": request.top_logprobs if request.has_logprobs else None,
        "response_format": _response_format(request.text),
        "tools": [_tool(tool) for tool in request.tools] if request.tools else None,
        "tool_choice": _tool_choice(request.tool_choice),
        "truncate_prompt_tokens": -1 if request.truncation == "auto" else None,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        **request.model_dump(
            include={
                "temperature",
                "top_p",
                "top_k",
                "seed",
                "parallel_tool_calls",
                "stream",
                "user",
                "metadata",
                "chat_template_kwargs",
                "cache_salt",
                "mm_processor_kwargs",
                "timeout",
            }
        ),
    }
    try:
        return ChatCompletionRequest.model_validate(body), places
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        raise InvalidRequest(f"{param}: {first['msg']}", param=param) from exc


def place_of(param: str | None, places: list[str]) -> str | None:
    """A place in a chat's messages as one in the items of a response; `text.format` for its response_format."""
    if param == "response_format":
        return "text.format"
    match = _MESSAGE_PLACE.match(param or "")
    if match is None or param is None:
        return "input" if param == "messages" else param
    return places[int(match[1])] + param[match.end() :]


def _messages(request: ResponsesRequest) -> tuple[list[dict[str, Any]], list[str]]:
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
        places.append("instructions")
    items = [InputMessage(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    thoughts: str | None = None
    for index, item in enumerate(items):
        if isinstance(item, InputReasoning):
            thoughts = "".join(part.text for part in item.content or ())
            continue
        message = _message(item)
        is_own = message["role"] == "assistant"
        if is_own and thoughts:
            message["reasoning_content"] = thoughts
        thoughts = None
        last = messages[-1] if messages else {}
        if "tool_calls" in message and last.get("role") == "assistant":  # one turn: its text, then its calls
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
            continue
        messages.append(message)
        places.append("input" if isinstance(request.input, str) else f"input[{index}]")
    if not messages:
        raise InvalidRequest("input has no message: send at least one", param="input")
    return messages, places


def _message(item: InputMessage | InputCall | InputCallOutput) -> dict[str, Any]:
    if isinstance(item, InputMessage):
        return {"role": item.role, "content": _content(item.content)}
    if isinstance(item, InputCallOutput):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
    function = {"name": item.name, "arguments": item.arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": item.call_id, "type": "function", "function": function}],
    }


def _content(content: Any) -> Any:
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: InputText | InputRefusal | InputImage | InputVideo) -> dict[str, Any]:
    if isinstance(part, InputText):
        return {"type": "text", "text": part.text}
    if isinstance(part, InputRefusal):
        return {"type": "text", "text": part.refusal}
    if isinstance(part, InputImage):
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    return {"type": "video_url", "video_url": {"url": part.video_url}}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    """OpenAI's flat form of a named function, as the nested one."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named = [_tool_choice(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    return choice


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    if text.format.type != "json_schema":
        return {"type": text.format.type}
    return {"type": "json_schema", "json_schema": {"name": text.format.name, "schema": text.format.schema_}}
