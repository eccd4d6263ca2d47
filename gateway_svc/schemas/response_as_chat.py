"""A request of `/v1/responses` as a chat, after which everything is the chat's own.

Items become messages, instructions a system message, flat tools OpenAI's nested ones. Pure.
"""

import re
from typing import Any

from common.errors import InvalidRequest
from gateway_svc.schemas.chat_request import ChatCompletionRequest
from gateway_svc.schemas.responses_request import (
    AllowedFunctions,
    FunctionTool,
    InputCall,
    InputCallOutput,
    InputImage,
    InputMessage,
    InputReasoning,
    InputRefusal,
    InputText,
    InputVideo,
    NamedFunction,
    ResponsesRequest,
    TextOptions,
)

_MESSAGE_PLACE = re.compile(r"messages\[(\d+)\]")
_RENAMED = {"messages": "input", "response_format": "text.format", "max_completion_tokens": "max_output_tokens"}


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
    return ChatCompletionRequest.model_validate(body), places


def place_of(param: str | None, places: list[str]) -> str | None:
    """A place in a chat as one in the response: items for its messages, flat tools for its nested ones."""
    if param is None:
        return None
    if param in _RENAMED:
        return _RENAMED[param]
    if param.startswith(("tools[", "tool_choice.")):
        return param.replace(".function", "").replace(".allowed_tools", "")
    match = _MESSAGE_PLACE.match(param)
    return param if match is None else places[int(match[1])] + param[match.end() :]


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
        return {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
    return {"type": "video_url", "video_url": {"url": part.video_url}}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "parameters", "strict"})
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _tool_choice(choice: str | NamedFunction | AllowedFunctions | None) -> Any:
    """OpenAI's flat form of a named function, as the nested one."""
    if isinstance(choice, NamedFunction):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedFunctions):
        named = [_tool_choice(tool) for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": named}}
    return choice


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    if text.format.type != "json_schema":
        return {"type": text.format.type}
    return {"type": "json_schema", "json_schema": {"name": text.format.name, "schema": text.format.schema_}}
