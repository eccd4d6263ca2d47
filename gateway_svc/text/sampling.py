"""How tokens are chosen: a request's fields, the checkpoint's defaults, and the room that the prompt leaves.

Owns `generation_config.json` as far as sampling goes. Pure but for reading that file once and drawing a seed where
the client gives none. Knows nothing of HTTP or prompts beyond their length.
"""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from common.errors import ConfigError, InvalidRequest
from common.messages import SamplingParams
from gateway_svc.schemas.sampling_fields import SamplingFields
from gateway_svc.text.grammar import Grammar

GenerationConfigMode = Literal["auto", "none"]


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values of requests that give none. These are OpenAI's; a checkpoint may state others."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None

    @classmethod
    def load(cls, checkpoint_dir: Path, mode: GenerationConfigMode = "auto") -> "SamplingDefaults":
        """From `generation_config.json` ("auto"), or neutral ("none" or no such file).

        `do_sample: false` is greedy, whatever temperature stands beside it, as in the reference. `max_new_tokens`
        bounds the output of requests that state no limit, and of those that state a larger one, as in vLLM.
        """
        path = checkpoint_dir / "generation_config.json"
        if mode == "none" or not path.is_file():
            return cls()
        try:
            values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            return cls._of(values)
        except (msgspec.MsgspecError, OSError) as exc:
            raise ConfigError(
                "generation_config.json of the checkpoint cannot be used: correct it, or ignore it with the setting "
                'generation_config "none"'
            ) from exc

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> "SamplingDefaults":
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        known = {name: values[name] for name in names if values.get(name) is not None}
        if values.get("do_sample") is False:
            known["temperature"] = 0.0
        if values.get("max_new_tokens") is not None:
            known["max_tokens"] = values["max_new_tokens"]
        defaults = msgspec.convert(known, cls)
        # The message's own bounds: an absurd value stops the start rather than every request.
        msgspec.convert(
            {**known, "max_tokens": 1 if defaults.max_tokens is None else defaults.max_tokens, "seed": 0},
            SamplingParams,
        )
        return defaults


def sampling_params(
    request: SamplingFields,
    defaults: SamplingDefaults,
    *,
    room: int,
    vocab_size: int,
    grammar: Grammar | None = None,
    bad_words_ids: list[list[int]] | None = None,
) -> SamplingParams:
    """The sampling of one request, with at most `room` tokens of output."""
    limits = (request.token_limit, defaults.max_tokens, room)
    params = SamplingParams(
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        max_tokens=min(limit for limit in limits if limit is not None),
        n=request.n or 1,
        temperature=_or(request.temperature, defaults.temperature),
        top_p=_or(request.top_p, defaults.top_p),
        top_k=max(0, _or(request.top_k, defaults.top_k)),
        min_p=_or(request.min_p, defaults.min_p),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        min_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=check_vocabulary(request.stop_token_ids or [], vocab_size, "stop_token_ids"),
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        allowed_token_ids=None
        if request.allowed_token_ids is None
        else check_vocabulary(request.allowed_token_ids, vocab_size, "allowed_token_ids"),
        bad_words_ids=bad_words_ids or [],
        num_logprobs=request.num_logprobs,
        num_prompt_logprobs=request.prompt_logprobs,
        grammar_kind=None if grammar is None else grammar.kind,
        grammar=None if grammar is None else grammar.text,
    )
    return with_room(params, room)


def with_room(params: SamplingParams, room: int) -> SamplingParams:
    """The same sampling with at most `room` tokens of output.

    Wishing for more than the context has left is no error: the answer then ends with finish_reason "length", as with
    vLLM. Requiring more (`min_tokens`) is one.
    """
    max_tokens = min(params.max_tokens, room)
    if params.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens {params.min_tokens} is above the {max_tokens} tokens that can be generated: "
            "send a smaller one",
            param="min_tokens",
        )
    return msgspec.structs.replace(params, max_tokens=max_tokens)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def check_vocabulary(token_ids: list[int], vocab_size: int, param: str) -> list[int]:
    """The ids. Raises InvalidRequest for one that is no token, by its place in `param`."""
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"{param}[{index}] is {token_id}, but the vocabulary ends at {vocab_size - 1}",
                param=f"{param}[{index}]",
            )
    return token_ids


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    result = {}
    for key, bias in biases.items():
        is_number = key.isascii() and key.isdigit() and len(key) <= 10
        if not is_number or int(key) >= vocab_size:
            raise InvalidRequest(
                f"logit_bias has the key {key[:20]!r}, but keys are token ids from 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        result[int(key)] = float(bias)
    return result
