"""A chat completion: from its body to a run, and from the run's deltas to OpenAI's answer or the chunks of a stream.

Owns what only a chat has: the conversation, tools, reasoning, and the constraint that follows from them together.
Knows nothing of HTTP responses or of peers. Drafting happens in a thread, everything else in the request's task.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gateway_svc.routes.openai_response import CompletionHead, prompt_logprobs_field
from gateway_svc.routes.text_run import Drafted, RunSpec, TextRun, TextService
from gateway_svc.schemas.chat_request import ChatCompletionRequest
from gateway_svc.text import reasoning
from gateway_svc.text.answer import AnswerDelta, AnswerParser, Message, Thinking
from gateway_svc.text.choice import ChoiceDelta
from gateway_svc.text.conversation import conversation_of
from gateway_svc.text.grammar import after_reasoning, grammar_of
from gateway_svc.text.tools import tool_use


class Chat:
    """One chat completion, not started: iterate the deltas of `run` once. Raises InvalidRequest, ModelNotFound."""

    def __init__(
        self,
        service: TextService,
        request: ChatCompletionRequest,
        request_id: str,
        client_label: str | None,
        *,
        name: str = "chat completion",
    ) -> None:
        self._service = service
        self._request = request
        self._use = tool_use(request)
        self._thinking: Thinking = "never"
        spec = RunSpec(name, request, self._draft, stops=self._use.stops, processor_kwargs=request.mm_processor_kwargs)
        self.run: TextRun = service.run(spec, request_id, client_label)
        self._parsers: list[AnswerParser] = []

    @property
    def num_choices(self) -> int:
        """How many answers are wanted."""
        return self._request.n or 1

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens of reasoning so far; None for a model that does not reason."""
        if self._thinking == "never":
            return None
        return sum(parser.num_reasoning_tokens for parser in self._parsers)

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage` object, as it is now."""
        return self.run.counts.usage(self.num_reasoning_tokens)

    def parsed(self, delta: ChoiceDelta) -> AnswerDelta:
        """What a delta of the run says. Each delta once, in order."""
        if not self._parsers:
            has_tools, is_named = bool(self._use.tools), self._use.mode == "named"
            self._parsers = [
                AnswerParser(self._thinking, has_tools=has_tools, is_named=is_named) for _ in range(self.num_choices)
            ]
        return self._parsers[delta.index].feed(delta)

    def messages(self, deltas: Sequence[ChoiceDelta]) -> list[Message]:
        """The whole answers from all deltas of the run."""
        of_choice: list[list[AnswerDelta]] = [[] for _ in range(self.num_choices)]
        for delta in deltas:
            of_choice[delta.index].append(self.parsed(delta))
        return [Message.of(own) for own in of_choice]

    def _draft(self, max_model_len: int) -> Drafted:
        """The prompt, and the constraint of its answer. For a thread."""
        request, prompts = self._request, self._service.prompts
        grammar = self._use.grammar(grammar_of(request), prompts.added_tokens)
        conversation, references = conversation_of(request, self._use.shown)
        draft = prompts.draft(conversation, max_model_len, max_prompt_tokens=request.max_prompt_tokens(max_model_len))
        if draft.ends_with(reasoning.OPEN):
            self._thinking = "open"
        elif prompts.mentions(reasoning.OPEN):
            self._thinking = "perhaps"
        if grammar is not None and self._thinking == "open":
            grammar = after_reasoning(grammar, reasoning.CLOSE, prompts.added_tokens)
        return Drafted(draft, references, grammar)


class ChatAnswer:
    """OpenAI's JSON for one chat: the whole, or the chunks of a stream."""

    def __init__(self, chat: Chat, request: ChatCompletionRequest, completion_id: str, service: TextService) -> None:
        options = request.stream_options
        self._chat = chat
        self._table = service.table
        self._head = CompletionHead(completion_id, request.model, has_logprobs=bool(request.logprobs))
        self._include_usage = bool(options and options.include_usage)
        self._is_continuous = bool(options and options.continuous_usage_stats)

    def completion(self, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        """The whole answer."""
        messages = self._chat.messages(deltas)
        body = self._head.completion(messages, self._chat.usage())
        run = self._chat.run
        if run.prompt_logprobs is not None and run.prompt is not None:
            body["prompt_logprobs"] = prompt_logprobs_field(run.prompt.token_ids, run.prompt_logprobs, self._table)
        return body

    def opening(self) -> Iterator[dict[str, Any]]:
        """The role of each choice."""
        return self._with_usage(self._head.role_chunk(index) for index in range(self._chat.num_choices))

    def events(self, item: ChoiceDelta) -> Iterator[dict[str, Any]]:
        """What a delta adds."""
        return self._with_usage(self._head.delta_chunks(item.index, self._chat.parsed(item)))

    def closing(self) -> Iterator[dict[str, Any]]:
        """The usage, where it was asked for."""
        if self._include_usage:
            yield self._head.usage_chunk(self._chat.usage())

    def _with_usage(self, chunks: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """With include_usage, every chunk but the last has a null usage, as OpenAI documents."""
        for chunk in chunks:
            if self._is_continuous:
                chunk["usage"] = self._chat.usage()
            elif self._include_usage:
                chunk["usage"] = None
            yield chunk
