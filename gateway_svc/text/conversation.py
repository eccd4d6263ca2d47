"""From a validated request to what the template sees and which media it refers to.

Messages become plain dictionaries without absent keys, in the shapes that published templates expect; media parts
keep their place and lose their bytes. Pure. Knows nothing of template engines, fetching or tokens.
"""

import json
from collections.abc import Sequence
from typing import Any

from common.errors import InvalidRequest
from common.messages import MediaOptions, Modality
from gateway_svc.media.item import MediaReference
from gateway_svc.schemas.chat_request import (
    ChatCompletionRequest,
    ImagePart,
    Message,
    ReasoningEffort,
    RefusalPart,
    TextPart,
    Tool,
    ToolCall,
    VideoPart,
)
from gateway_svc.schemas.plain_json import MAX_NESTING, check_plain
from gateway_svc.schemas.sampling_fields import ProcessorKwargs
from gateway_svc.text.chat_template import Conversation

_RESERVED_KWARGS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "conversation",
        "self",
    }
)


def conversation_of(request: ChatCompletionRequest, tools: Sequence[Tool]) -> tuple[Conversation, list[MediaReference]]:
    """The conversation, which shows these tools, and its media in prompt order."""
    references: list[MediaReference] = []
    messages = [_message(message, index, references) for index, message in enumerate(request.messages)]
    kwargs = {**_effort(request.reasoning_effort), **(request.chat_template_kwargs or {})}
    for name in sorted(_RESERVED_KWARGS & kwargs.keys()):
        raise InvalidRequest(
            f"chat_template_kwargs may not set {name}: use the request's own field, where there is one",
            param=f"chat_template_kwargs.{name}",
        )
    is_continued = bool(request.continue_final_message)
    add_generation_prompt = request.add_generation_prompt
    return Conversation(
        messages=messages,
        tools=[tool.as_sent for tool in tools] if tools else None,
        template_kwargs=kwargs,
        add_generation_prompt=not is_continued if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=is_continued,
    ), references


def _effort(effort: ReasoningEffort | None) -> dict[str, Any]:
    """How much to reason, in the variables that templates know; most of Qwen3-VL's know none."""
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def media_options(kwargs: ProcessorKwargs | None, modality: Modality) -> MediaOptions:
    """The options that concern a modality, so that `fps` does not change an image's key."""
    if kwargs is None:
        return MediaOptions()
    if kwargs.fps is not None and kwargs.num_frames is not None:
        raise InvalidRequest(
            "mm_processor_kwargs has both fps and num_frames, which exclude each other: send only one",
            param="mm_processor_kwargs",
        )
    if kwargs.min_pixels is not None and kwargs.max_pixels is not None and kwargs.min_pixels > kwargs.max_pixels:
        raise InvalidRequest(
            f"mm_processor_kwargs has min_pixels {kwargs.min_pixels} above max_pixels {kwargs.max_pixels}",
            param="mm_processor_kwargs",
        )
    if modality == "image":
        return MediaOptions(min_pixels=kwargs.min_pixels, max_pixels=kwargs.max_pixels)
    return MediaOptions(**kwargs.model_dump())


def _message(message: Message, index: int, references: list[MediaReference]) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    _refuse_unsupported(message, index)
    if isinstance(message.content, str):
        plain["content"] = message.content
    elif message.content is None and message.refusal is not None:
        plain["content"] = message.refusal
    elif message.content is None and message.role != "assistant":
        raise InvalidRequest(
            f"messages[{index}].content is missing: a message of role {message.role} needs one",
            param=f"messages[{index}].content",
        )
    elif message.content is not None:
        plain["content"] = [
            _part(part, f"messages[{index}].content[{number}]", references)
            for number, part in enumerate(message.content)
        ]
    if message.tool_calls:
        plain["tool_calls"] = [
            _tool_call(call, f"messages[{index}].tool_calls[{number}]")
            for number, call in enumerate(message.tool_calls)
        ]
    replayed = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning if message.reasoning_content is None else message.reasoning_content,
    }
    return plain | {name: value for name, value in replayed.items() if value is not None}


def _refuse_unsupported(message: Message, index: int) -> None:
    """Parts of a turn that the model would not see."""
    for name, value, remedy in (
        ("audio", message.audio, "send its transcript as content"),
        ("function_call", message.function_call, "send it as one of tool_calls"),
    ):
        if value is not None:
            raise InvalidRequest(
                f"messages[{index}].{name} is not supported: {remedy}", param=f"messages[{index}].{name}"
            )


def _part(
    part: TextPart | RefusalPart | ImagePart | VideoPart, param: str, references: list[MediaReference]
) -> dict[str, str]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, RefusalPart):
        return {"type": "text", "text": part.refusal}
    if isinstance(part, ImagePart):
        is_low_detail = part.image_url.detail == "low"
        references.append(MediaReference(part.image_url.take(), "image", param, is_low_detail))
        return {"type": "image"}
    references.append(MediaReference(part.video_url.take(), "video", param))
    return {"type": "video"}


def _tool_call(call: ToolCall, param: str) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments, param)}
    plain: dict[str, Any] = {"type": "function", "function": function}
    return plain if call.id is None else {"id": call.id, **plain}


def _arguments(arguments: str | dict[str, Any], param: str) -> str | dict[str, Any]:
    """OpenAI sends arguments as JSON text, templates expect an object; text that is no object stays text."""
    if isinstance(arguments, dict):
        return arguments
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    except RecursionError as exc:
        raise InvalidRequest(
            f"{param}.function.arguments is nested deeper than {MAX_NESTING} levels", param=param
        ) from exc
    if not isinstance(value, dict):
        return arguments
    check_plain(value, f"{param}.function.arguments")
    return value
