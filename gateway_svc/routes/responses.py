"""`/v1/responses`: a chat in OpenAI's later shape, as one object or as typed events. Nothing is stored.

Owns the output items and the order of events; the conversation, tools and reasoning are the chat's. The object that a
stream ends with is the one that is answered without a stream. Runs in the request's task.
"""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.errors import TandemError
from gateway_svc.http.middleware import RequestIds
from gateway_svc.http.sse import EventFormat, Puller, collect
from gateway_svc.routes.api import Api, documented, json_response
from gateway_svc.routes.chat import Chat
from gateway_svc.routes.text_run import TextService
from gateway_svc.schemas.response_as_chat import chat_request, place_of
from gateway_svc.schemas.responses_request import ResponsesRequest
from gateway_svc.text.answer import AnswerDelta
from gateway_svc.text.choice import ChoiceDelta

Event = dict[str, Any]


def encode_typed(value: object) -> bytes:
    """An event with its type as its name. An error object becomes an event of type "error"."""
    if isinstance(value, dict) and "error" in value and "type" not in value:
        value = {**value["error"], "type": "error", "error": value["error"]}
    name = str(value["type"]) if isinstance(value, dict) else "message"
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


TYPED = EventFormat(encode_typed, b"")


class _Item:
    """One output item as it grows: a message, reasoning, or a call. Knows its own events."""

    def __init__(self, index: int, kind: str, item_id: str, **fields: Any) -> None:
        self.index = index
        self.kind = kind
        self.item_id = item_id
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []
        self._fields = fields

    def item(self, status: str) -> dict[str, Any]:
        """The item as JSON."""
        fields: dict[str, Any] = {"id": self.item_id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {**fields, **self._fields, "arguments": self.text}
        if self.kind == "reasoning":
            return {**fields, "summary": [], "content": [self._part()] if status != "in_progress" else []}
        return {**fields, "role": "assistant", "content": [self._part()] if status != "in_progress" else []}

    def opened(self) -> Iterator[Event]:
        """What announces it."""
        yield {"type": "response.output_item.added", "output_index": self.index, "item": self.item("in_progress")}
        if self.kind != "function_call":
            yield {"type": "response.content_part.added", **self._place(), "part": self._part()}

    def added(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Iterator[Event]:
        """More of its text."""
        self.text += text
        self.logprobs += logprobs
        delta: Event = {"type": f"response.{self._noun}.delta", **self._place(), "delta": text}
        yield {**delta, "logprobs": list(logprobs)} if self.kind == "message" else delta

    def closed(self, status: str) -> Iterator[Event]:
        """What ends it."""
        whole: Event = {"type": f"response.{self._noun}.done", **self._place()}
        if self.kind == "function_call":
            yield {**whole, "name": self._fields["name"], "arguments": self.text}
        else:
            yield {**whole, "text": self.text, **({"logprobs": self.logprobs} if self.kind == "message" else {})}
            yield {"type": "response.content_part.done", **self._place(), "part": self._part()}
        yield {"type": "response.output_item.done", "output_index": self.index, "item": self.item(status)}

    @property
    def _noun(self) -> str:
        nouns = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
        return nouns[self.kind]

    def _place(self) -> Event:
        place: Event = {"item_id": self.item_id, "output_index": self.index}
        return place if self.kind == "function_call" else {**place, "content_index": 0}

    def _part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}


class ModelResponse:
    """One response, not started: iterate `deltas` once. Raises InvalidRequest, ModelNotFound."""

    def __init__(self, service: TextService, request: ResponsesRequest, ids: RequestIds) -> None:
        self._request = request
        self._id = ids.internal
        self._places: list[str] = []
        try:
            chat, self._places = chat_request(request)
            self._chat = Chat(service, chat, ids.internal, ids.label, name="response")
        except TandemError as error:
            raise self._placed(error) from error
        self._created = int(time.time())
        self._items: list[_Item] = []
        self._number = 0
        self._finish_reason: str | None = None

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """What the model says. Raises TandemError, which names places of `input`."""
        try:
            async with aclosing(self._chat.run.deltas()) as deltas:
                async for delta in deltas:
                    yield delta
        except TandemError as error:
            raise self._placed(error) from error

    def response(self, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        """The whole."""
        for delta in deltas:
            for _ in self.events(delta):
                pass  # the items grow with their events
        return self._object(self._status)

    def opening(self) -> Iterator[Event]:
        """That it has begun."""
        for kind in ("response.created", "response.in_progress"):
            yield self._numbered({"type": kind, "response": self._object("in_progress")})

    def events(self, item: ChoiceDelta) -> Iterator[Event]:
        """What a delta adds."""
        return map(self._numbered, self._grown(self._chat.parsed(item)))

    def closing(self) -> Iterator[Event]:
        """The whole, once more."""
        kind = "response.completed" if self._status == "completed" else "response.incomplete"
        yield self._numbered({"type": kind, "response": self._object(self._status)})

    def _grown(self, delta: AnswerDelta) -> Iterator[Event]:
        if delta.reasoning:
            yield from self._item("reasoning", "rs")
            yield from self._items[-1].added(delta.reasoning, [])
        if delta.content:
            yield from self._item("message", "msg")
            yield from self._items[-1].added(delta.content, delta.logprobs)
        for call in delta.calls:
            if call.name is not None:
                yield from self._ended("completed")
                yield from self._begun("function_call", "fc", call_id=call.call_id, name=call.name)
            if call.arguments:
                yield from self._items[-1].added(call.arguments, [])
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            if not self._items:
                yield from self._begun("message", "msg")
            yield from self._items[-1].closed("completed" if self._status == "completed" else "incomplete")

    def _item(self, kind: str, prefix: str) -> Iterator[Event]:
        """Make the last item one of this kind."""
        if not self._items or self._items[-1].kind != kind:
            yield from self._ended("completed")
            yield from self._begun(kind, prefix)

    def _begun(self, kind: str, prefix: str, **fields: Any) -> Iterator[Event]:
        index = len(self._items)
        self._items.append(_Item(index, kind, f"{prefix}_{self._id}{index:04d}", **fields))
        yield from self._items[-1].opened()

    def _ended(self, status: str) -> Iterator[Event]:
        if self._items:
            yield from self._items[-1].closed(status)

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _object(self, status: str) -> dict[str, Any]:
        request = self._request
        is_done = status != "in_progress"
        items = [item.item("completed" if item is not self._items[-1] else status) for item in self._items]
        sampled = request.model_dump(
            include={"instructions", "max_output_tokens", "temperature", "top_p", "metadata", "user", "reasoning"}
        )
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": request.model,
            "output": items if is_done else [],
            **sampled,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "text": {"format": self._text_format()},
            "tool_choice": self._tool_choice(),
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "truncation": request.truncation or "disabled",
            "usage": self._usage() if is_done else None,
        }

    def _tool_choice(self) -> str | dict[str, Any]:
        choice = self._request.tool_choice or "auto"
        return choice if isinstance(choice, str) else choice.model_dump()

    def _text_format(self) -> dict[str, Any]:
        text = self._request.text
        if text is None or text.format is None:
            return {"type": "text"}
        return text.format.model_dump(by_alias=True, exclude_none=True)

    def _usage(self) -> dict[str, Any]:
        counts = self._chat.run.counts
        return {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": counts.cached_tokens,
                "cached_media_tokens": counts.cached_media_tokens,
                "encoded_media_tokens": counts.encoded_media_tokens,
            },
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._chat.num_reasoning_tokens or 0},
            "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        }

    def _numbered(self, event: Event) -> Event:
        self._number += 1
        return {**event, "sequence_number": self._number - 1}

    def _placed(self, error: TandemError) -> TandemError:
        place = place_of(error.param, self._places)
        message = error.message.replace(error.param, place) if error.param and place else error.message
        return type(error)(message, param=place, retry_after_s=error.retry_after_s)


def add_response_route(api: Api) -> None:
    """`/v1/responses`."""

    @api.app.post("/v1/responses", tags=["responses"], **documented(ResponsesRequest, "The response.", has_stream=True))
    async def create_response(request: Request) -> Response:
        """Answer items, as one JSON object or, with `stream`, as typed server-sent events. Nothing is stored."""
        body, ids = await api.read(request, ResponsesRequest)
        response = ModelResponse(api.service, body, ids)
        puller = Puller(response.deltas(), request.receive)
        if body.stream:
            return await api.stream(puller, response, ids, TYPED)
        return json_response(response.response(await collect(puller)))
