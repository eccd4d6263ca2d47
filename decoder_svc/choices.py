"""From a request that was checked to its sequences: one for each choice that has still to be generated.

Owns what of a request a sequence carries. Pure. Used in the engine thread.
"""

from common.errors import InvalidRequest
from common.messages import GenerateRequest
from decoder_svc.grammar import Grammar
from decoder_svc.sequence import Prompt, Sequence


def sequences_of(request: GenerateRequest, now: float, grammar: Grammar | None, merge_size: int) -> list[Sequence]:
    """The choices that have not ended. Raises InvalidRequest when it wants a grammar and none could be compiled."""
    if request.sampling.grammar_kind is not None and grammar is None:
        raise InvalidRequest("this decoder has no tokenizer.json in its checkpoint, which structured output needs")
    prompt = Prompt.of(request, merge_size)
    outputs = request.outputs or [[]] * request.sampling.n
    has_prompt_logprobs = request.sampling.num_prompt_logprobs is not None
    return [
        Sequence(
            request_id=request.request_id,
            attempt=request.attempt,
            choice=choice,
            prompt=prompt,
            sampling=request.sampling,
            deadline=now + request.time_left_s,
            arrived_at=now,
            output_token_ids=list(output),
            priority=request.priority,
            prompt_logprobs=[] if has_prompt_logprobs and choice == 0 and not output else None,
            is_pooled=request.pooling is not None,
            grammar=None if grammar is None else grammar.begin(output),
        )
        for choice, output in enumerate(outputs)
        if choice not in request.finished
    ]
