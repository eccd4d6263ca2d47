"""`/v1/embeddings`: one vector for each text, token list or conversation, where the model is an embedding model.

Owns the route's shapes, the default instruction and what is done to a vector: cut to `dimensions`, scaled to length 1.
A conversation may hold pictures and videos. Each input is a run of its own that generates nothing. Runs in the
request's task.
"""

import base64
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from common.errors import InvalidRequest, ModelFailure
from gateway_svc.http.middleware import RequestIds
from gateway_svc.http.sse import Puller, collect
from gateway_svc.routes.api import Api, documented, json_response
from gateway_svc.routes.completions import MAX_PROMPTS, Prompt, prompt_kind, prompts_of
from gateway_svc.routes.merged import merged
from gateway_svc.routes.openai_response import TokenCounts
from gateway_svc.routes.text_run import Drafted, RunSpec, TextRun, TextService
from gateway_svc.schemas.chat_request import ChatCompletionRequest, Message, check_continuation
from gateway_svc.schemas.sampling_fields import (
    CacheSalt,
    Priority,
    ProcessorKwargs,
    PromptLimit,
    SamplingFields,
    Timeout,
)
from gateway_svc.schemas.strict_model import NotServed, NotServedFields, RequestBody, check_count
from gateway_svc.text.choice import ChoiceDelta
from gateway_svc.text.conversation import conversation_of
from gateway_svc.text.sampling import check_vocabulary

# What the model was trained to be told when there is no task of its own.
DEFAULT_INSTRUCTION = "Represent the user's input."


class EmbeddingRequest(RequestBody):
    """Texts or token ids as `input`, or one conversation as `messages`."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["input"]}, {"required": ["messages"]}]},
    )
    not_served: ClassVar[NotServedFields] = {
        "embed_dtype": NotServed(("float32",)),
        "endianness": NotServed(("native", "little")),
        "normalize": NotServed((True,), "leave it out: vectors have length 1"),
        "truncation_side": NotServed(("left",), "leave it out: the end of a prompt is kept"),
        "use_activation": NotServed((True,)),
    }

    model: str
    input: Prompt | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    instruction: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    dimensions: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    truncate_prompt_tokens: PromptLimit | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None  # seconds, within the server's own limit
    add_special_tokens: bool | None = None  # without effect, as the next
    user: str | None = None

    @classmethod
    def refuse_multitudes(cls, body: dict[str, Any]) -> None:
        """See the base."""
        ChatCompletionRequest.refuse_multitudes(body)
        if prompt_kind(body.get("input")) != "tokens":
            check_count(body.get("input"), MAX_PROMPTS, "input")

    @model_validator(mode="after")
    def _check_combinations(self) -> "EmbeddingRequest":
        if (self.input is None) == (self.messages is None):
            raise InvalidRequest("either input or messages is needed, and not both", param="input")
        if self.messages is not None and self.instruction is not None:
            raise InvalidRequest("instruction goes with input: make it a system message", param="instruction")
        check_continuation(self.add_generation_prompt, self.continue_final_message)
        return self

    @property
    def inputs(self) -> list[str | list[int] | list[Message]]:
        """What each vector is of."""
        if self.messages is not None:
            return [self.messages]
        return [*prompts_of(self.input)] if self.input is not None else []


class Embeddings:
    """One request: a run for each input. Iterate `deltas` once. Raises InvalidRequest, ModelNotFound."""

    def __init__(self, service: TextService, request: EmbeddingRequest, ids: RequestIds) -> None:
        service.check_model(request.model)
        if not service.is_embedding_model:
            raise InvalidRequest(
                f"the model {request.model[:200]!r} is not an embedding model: ask it for completions", param="model"
            )
        self._service = service
        self._request = request
        # One token of room is all that a run without an answer needs.
        self._fields = SamplingFields(
            model=request.model,
            max_tokens=1,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
            cache_salt=request.cache_salt,
            priority=request.priority,
            timeout=request.timeout,
        )
        inputs = request.inputs
        self._runs = [self._run(item, index, len(inputs), ids) for index, item in enumerate(inputs)]

    def _run(self, item: str | list[int] | list[Message], index: int, count: int, ids: RequestIds) -> TextRun:
        param = "messages" if self._request.messages is not None else "input" if count == 1 else f"input[{index}]"
        spec = RunSpec(
            "embedding",
            self._fields,
            lambda max_model_len: self._draft(item, param, max_model_len),
            processor_kwargs=self._request.mm_processor_kwargs,
            prompt_param=param,
            is_pooled=True,
        )
        return self._service.run(spec, ids.internal if count == 1 else f"{ids.internal}-{index}", ids.label)

    def _draft(self, item: str | list[int] | list[Message], param: str, max_model_len: int) -> Drafted:
        """The prompt of one input. For a thread."""
        prompts, kept = self._service.prompts, self._fields.max_prompt_tokens(max_model_len)
        if isinstance(item, list) and item and isinstance(item[0], int):
            token_ids = [token_id for token_id in item if isinstance(token_id, int)]
            check_vocabulary(token_ids, self._service.backend.vocab_size, param)
            return Drafted(prompts.draft_tokens(token_ids, max_model_len, max_prompt_tokens=kept))
        if item in ("", []):
            raise InvalidRequest(f"{param} is empty: send at least one token", param=param)
        messages = self._as_messages(item) if isinstance(item, str) else item
        chat = ChatCompletionRequest.model_construct(
            messages=messages,
            chat_template_kwargs=self._request.chat_template_kwargs,
            add_generation_prompt=self._request.add_generation_prompt,
            continue_final_message=self._request.continue_final_message,
        )
        conversation, references = conversation_of(chat, ())
        return Drafted(prompts.draft(conversation, max_model_len, max_prompt_tokens=kept), references)

    def _as_messages(self, text: str) -> list[Message]:
        instruction = self._request.instruction or DEFAULT_INSTRUCTION
        return [Message(role="system", content=instruction), Message(role="user", content=text)]

    async def deltas(self) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
        """Until all have ended. Raises TandemError."""
        async with aclosing(merged([run.deltas() for run in self._runs])) as deltas:
            async for item in deltas:
                yield item

    def answer(self) -> dict[str, Any]:
        """The vectors, once all runs have ended."""
        counts = sum((run.counts for run in self._runs), TokenCounts()).usage()
        usage = {name: counts[name] for name in ("prompt_tokens", "prompt_tokens_details")}
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(run.embedding)}
            for index, run in enumerate(self._runs)
        ]
        usage["total_tokens"] = counts["prompt_tokens"]
        return {"object": "list", "data": data, "model": self._request.model, "usage": usage}

    def _encoded(self, vector: Sequence[float] | None) -> list[float] | str:
        if not vector:
            raise ModelFailure("the decoder ended the request without an embedding")
        wanted = self._request.dimensions
        if wanted is not None:
            if wanted > len(vector):
                raise InvalidRequest(
                    f"dimensions is {wanted}, but this model's vectors have {len(vector)}: ask for fewer",
                    param="dimensions",
                )
            vector = _unit(vector[:wanted])
        if self._request.encoding_format == "base64":
            return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()
        return list(vector)


def add_embedding_route(api: Api) -> None:
    """`/v1/embeddings`."""

    @api.app.post("/v1/embeddings", tags=["embeddings"], **documented(EmbeddingRequest, "The vectors."))
    async def create_embeddings(request: Request) -> Response:
        """A vector for each input, where the model is an embedding model."""
        body, ids = await api.read(request, EmbeddingRequest)
        embeddings = Embeddings(api.service, body, ids)
        await collect(Puller(embeddings.deltas(), request.receive))
        return json_response(embeddings.answer())


def _unit(vector: Sequence[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in vector))
    return [value / length for value in vector] if length > 0 else list(vector)
