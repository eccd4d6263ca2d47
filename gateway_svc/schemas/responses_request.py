"""The request body of `/v1/responses`, the common subset, and what it says as a chat.

Items become messages, instructions a system message, flat tools OpenAI's nested ones; everything after that is the
chat's own. Stateless: what would need a store is refused by name. Pure; knows nothing of answers.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from common.errors import InvalidRequest
from gateway_svc.schemas.chat_request import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, ChatCompletionRequest
from gateway_svc.schemas.plain_json import check_plain
from gateway_svc.schemas.sampling_fields import MAX_TOP_LOGPROBS, ProcessorKwargs, StrictModel, check_count

_MESSAGE_PLACE = re.compile(r"messages\[(\d+)\]")
# What needs a store or a hosted tool, with the values that ask for nothing.
_NOT_SERVED: dict[str, tuple[object, ...]] = {
    "background": (None, False),
    "context_management": (None, []),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "store": (None, False),
}


class InputText(StrictModel):
    """A piece of text."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputImage(StrictModel):
    """An image by its URL or data URI."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class InputVideo(StrictModel):
    """A video by its URL or data URI; not among OpenAI's items."""

    type: Literal["input_video"]
    video_url: str


InputPart = Annotated[InputText | InputImage | InputVideo, Field(discriminator="type")]
InputContent = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[InputPart], Field(max_length=MAX_PARTS), Tag("parts")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "parts"),
]


class InputMessage(StrictModel):
    """A turn."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: InputContent


class InputCall(StrictModel):
    """A call that an answer made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputCallOutput(StrictModel):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: InputContent


class ReasoningText(StrictModel):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(StrictModel):
    """The reasoning of an answer."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


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


class FunctionTool(StrictModel):
    """A function that may be called."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(StrictModel):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(StrictModel):
    """How text is written."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(StrictModel):
    """A response, as OpenAI's API has it, without a store."""

    model: str
    input: Input
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[str] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: dict[str, Any] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    store: bool | None = None
    seed: int | None = None
    top_k: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None
    cache_salt: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_values(cls, body: object) -> object:
        if isinstance(body, dict):
            check_count(body.get("input"), MAX_MESSAGES, "input")
            check_count(body.get("tools"), MAX_TOOLS, "tools")
        check_plain(body)
        if isinstance(body, dict):
            _refuse_unsupported(body)
        return body

    @property
    def has_logprobs(self) -> bool:
        """Whether log probabilities are wanted."""
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)


def _refuse_unsupported(body: dict[str, Any]) -> None:
    for name, harmless in _NOT_SERVED.items():
        if name in body and body[name] not in harmless:
            raise InvalidRequest(
                f"{name} is not supported, since nothing is stored here: leave it out, and send all turns as input",
                param=name,
            )


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


def _part(part: InputText | InputImage | InputVideo) -> dict[str, Any]:
    if isinstance(part, InputText):
        return {"type": "text", "text": part.text}
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
