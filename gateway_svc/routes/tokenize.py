"""`/tokenize` and `/detokenize`: what a prompt or a conversation is in token ids, and the way back.

The shapes are vLLM's. A conversation is rendered as for an answer, its media one placeholder each, since nothing is
loaded. Knows nothing of decoders, but for the context's length. Rendering and tokenizing happen in threads.
"""

import asyncio
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from common.errors import InvalidRequest
from common.messages import MAX_TOKENS
from gateway_svc.routes.api import Api, documented, json_response
from gateway_svc.routes.text_run import TextService
from gateway_svc.schemas.chat_request import ChatCompletionRequest, Message, Tool, check_continuation
from gateway_svc.schemas.sampling_fields import TokenId
from gateway_svc.schemas.strict_model import NotServed, NotServedFields, RequestBody
from gateway_svc.text.conversation import conversation_of
from gateway_svc.text.prompt import PromptDraft

# The context, while no decoder has told it.
_DEFAULT_MODEL_LEN = 1 << 18


class TokenizeRequest(RequestBody):
    """A text, or a conversation as for an answer. `add_special_tokens` is accepted: the tokenizer has none to add."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]},
    )
    not_served: ClassVar[NotServedFields] = {
        "chat_template": NotServed((), "leave it out: the server's template is used")
    }

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @classmethod
    def refuse_multitudes(cls, body: dict[str, Any]) -> None:
        """See the base."""
        ChatCompletionRequest.refuse_multitudes(body)

    @model_validator(mode="after")
    def _check_combinations(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("either prompt or messages is needed, and not both", param="prompt")
        check_continuation(self.add_generation_prompt, self.continue_final_message)
        return self


class DetokenizeRequest(RequestBody):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]


def add_token_routes(api: Api) -> None:
    """`/tokenize` and `/detokenize`."""
    service = api.service

    @api.app.post("/tokenize", tags=["tokens"], **documented(TokenizeRequest, "count, tokens and max_model_len."))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text or a conversation; each medium counts as one."""
        body, _ = await api.read(request, TokenizeRequest)
        service.check_model(body.model or service.model_names[0])
        run_in_threads = asyncio.get_running_loop().run_in_executor
        return json_response(await run_in_threads(service.text_threads, _tokenized, service, body))

    @api.app.post("/detokenize", tags=["tokens"], **documented(DetokenizeRequest, "The text, as `prompt`."))
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens included."""
        body, _ = await api.read(request, DetokenizeRequest)
        service.check_model(body.model or service.model_names[0])
        for index, token_id in enumerate(body.tokens):
            if token_id >= service.table.size:
                raise InvalidRequest(
                    f"tokens[{index}] is {token_id}, but the tokenizer ends at {service.table.size - 1}",
                    param=f"tokens[{index}]",
                )
        return json_response({"prompt": service.table.text_of(body.tokens)})


def _tokenized(service: TextService, body: TokenizeRequest) -> dict[str, Any]:
    max_model_len = service.backend.max_model_len or _DEFAULT_MODEL_LEN
    ids = _draft(service, body, max_model_len).token_ids
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [service.table.text_of([token_id]) for token_id in ids]
    return answer


def _draft(service: TextService, body: TokenizeRequest, max_model_len: int) -> PromptDraft:
    if body.prompt is not None:
        return service.prompts.draft_text(body.prompt, max_model_len, has_media=True)
    request = ChatCompletionRequest.model_construct(
        messages=body.messages or [],
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    conversation, _ = conversation_of(request, body.tools or ())
    return service.prompts.draft(conversation, max_model_len)
