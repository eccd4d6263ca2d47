"""Prompts: equal to the reference's whole-string tokenization, and closed to special tokens that clients write."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.errors import ConfigError, ContextTooLong, InvalidRequest
from common.messages import MediaOptions, VideoFacts
from common.processor_config import ProcessorConfig
from common.vision_grid import group_timestamps
from gateway_svc.media.item import LoadedMedia
from gateway_svc.media.store import MediaStore
from gateway_svc.schemas.chat_request import ChatCompletionRequest
from gateway_svc.text.chat_template import ChatTemplate, Conversation
from gateway_svc.text.conversation import conversation_of
from gateway_svc.text.prompt import PromptBuilder
from tests.paths import DEMO_MODEL, SHARED, needs_shared
from tests.tiny_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, media_token_ids, tiny_tokenizer

LONG = 1 << 20
NO_BYTES = MediaStore().hold(b"")
REFERENCE = tiny_tokenizer()
TOKENS = media_token_ids(REFERENCE)
SPECIAL_IDS = {REFERENCE.token_to_id(text) for text in SPECIAL_TOKENS}


def builder(
    template: str = CHAT_TEMPLATE, *, tokenizer: Tokenizer | None = None, outer_pair: bool = True
) -> PromptBuilder:
    return PromptBuilder(
        tokenizer or tiny_tokenizer(),
        ChatTemplate(template),
        TOKENS,
        merge_size=2,
        video_outer_pair=outer_pair,
    )


BUILDER = builder()
VERBATIM = builder("{{ messages[0].content }}")


def image(height: int = 4, width: int = 6) -> LoadedMedia:
    return LoadedMedia("a" * 64, "image", MediaOptions(), (1, height, width), NO_BYTES, "messages[0].content[0]")


def video(grid: tuple[int, int, int], timestamps: Sequence[float]) -> LoadedMedia:
    facts = VideoFacts(grid=grid, frame_indices=[], timestamps=list(timestamps))
    return LoadedMedia("b" * 64, "video", MediaOptions(), grid, NO_BYTES, "messages[0].content[0]", facts)


def ids_of(prompts: PromptBuilder, conversation: Conversation, media: Sequence[LoadedMedia] = ()) -> list[int]:
    return prompts.build(prompts.draft(conversation, LONG), media, LONG).token_ids


def user(content: Any, **fields: Any) -> Conversation:
    return Conversation([{"role": "user", "content": content}], **fields)


def text_of(token_ids: Sequence[int]) -> str:
    return REFERENCE.decode(list(token_ids), skip_special_tokens=False)


GOLDEN = SHARED / "golden" / "golden.json"


@needs_shared
@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()) if GOLDEN.exists() else [], ids=lambda c: c["name"])
def test_golden_prompts_expand_as_the_reference_does(case: dict[str, Any]) -> None:
    template = case["prompt"].replace("\n", "\\n").replace("'", "\\'")
    prompts = builder("{{ '" + template + "' }}")
    videos = [
        video(tuple(grid), group_timestamps(frames, fps, 2))
        for grid, frames, fps in zip(case["video_grid_thw"], case["sampled_frames"], case["fps"], strict=True)
    ]
    media = [*[image(*grid[1:]) for grid in case["image_grid_thw"]], *videos]
    prompt = prompts.build(prompts.draft(user(""), LONG), media, LONG)
    assert prompt.token_ids == REFERENCE.encode(case["expanded"], add_special_tokens=False).ids
    for item in prompt.media:
        pad = TOKENS.image_token_id if item.modality == "image" else TOKENS.video_token_id
        for span in item.spans:
            assert set(prompt.token_ids[span.offset : span.offset + span.num_tokens]) == {pad}
        assert len(item.spans) == item.grid[0]


def test_without_the_outer_pair_the_first_time_stamp_joins_the_text_before_it() -> None:
    prompts = builder("{{ 'go <|vision_start|><|video_pad|><|vision_end|> on' }}", outer_pair=False)
    ids = ids_of(prompts, user(""), [video((2, 2, 4), [0.3, 1.6])])
    groups = "".join(
        f"<{time} seconds><|vision_start|><|video_pad|><|video_pad|><|vision_end|>" for time in ("0.3", "1.6")
    )
    assert ids == REFERENCE.encode(f"go {groups} on", add_special_tokens=False).ids


def test_the_outer_pair_setting_leaves_images_alone() -> None:
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    ids = ids_of(builder("{{ '" + text + "' }}", outer_pair=False), user(""), [image(2, 2)])
    assert ids == REFERENCE.encode(text, add_special_tokens=False).ids


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=150, deadline=None)
def test_text_without_special_tokens_tokenizes_as_the_whole_string(text: str) -> None:
    assume(not any(special in text for special in SPECIAL_TOKENS))  # hypothesis tries strings that sources hold
    expected = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert ids_of(BUILDER, user(text)) == REFERENCE.encode(expected, add_special_tokens=False).ids


FRAGMENTS = [
    *SPECIAL_TOKENS,
    "<",
    "|",
    ">",
    "<|",
    "|>",
    "<|im",
    "_start|>",
    "image_",
    "pad|>",
    "im_end",
    "\ue000",
    "x",
    " ",
]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12))
@settings(max_examples=200, deadline=None)
def test_no_list_of_text_parts_makes_a_special_token_or_loses_text(fragments: list[str]) -> None:
    ids = ids_of(BUILDER, user([{"type": "text", "text": fragment} for fragment in fragments]))
    inner = ids[
        len(REFERENCE.encode("<|im_start|>user\n").ids) : -len(
            REFERENCE.encode("<|im_end|>\n<|im_start|>assistant\n").ids
        )
    ]
    assert not SPECIAL_IDS & set(inner)
    assert text_of(inner) == "".join(fragments)


@pytest.mark.parametrize("tail", ["|im_end|>", "|im_", "|"])
def test_a_template_that_writes_the_first_character_of_a_token_cannot_be_completed(tail: str) -> None:
    prompts = builder("{{ '<' ~ messages[0].content ~ messages[1].content ~ '>' }}")
    rest = "<|im_end|>"[1 + len(tail) :].removesuffix(">")
    conversation = Conversation([{"role": "user", "content": tail}, {"role": "user", "content": rest}])
    ids = ids_of(prompts, conversation)
    assert not SPECIAL_IDS & set(ids)


def test_special_tokens_in_tools_arguments_results_and_kwargs_stay_text() -> None:
    literal = "<|im_end|>"
    tool = {"type": "function", "function": {"name": "f", "parameters": {literal: {"description": literal}}}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": literal}}}
    conversation = Conversation(
        [
            {"role": "user", "content": literal},
            {"role": "assistant", "content": literal, "tool_calls": [call]},
            {"role": "tool", "content": literal},
        ],
        tools=[tool],
    )
    ids = ids_of(BUILDER, conversation)
    end = REFERENCE.token_to_id(literal)
    assert ids.count(end) == 4  # tools, user, assistant, tool: the template's own
    assert text_of(ids).count(literal) == 4 + 6


def test_added_tokens_that_are_not_special_tokenize_as_in_the_reference() -> None:
    text = "a<tool_call>b</tool_call> <think>"
    expected = REFERENCE.encode(
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    assert ids_of(BUILDER, user(text)) == expected.ids


def test_a_quoted_placeholder_is_not_a_place_for_the_image() -> None:
    parts = [{"type": "text", "text": "The token <|image_pad|> is special."}, {"type": "image"}]
    prompt = BUILDER.build(BUILDER.draft(user(parts), LONG), [image(4, 6)], LONG)
    assert prompt.token_ids.count(TOKENS.image_token_id) == 6
    span = prompt.media[0].spans[0]
    assert prompt.token_ids[span.offset - 1] == TOKENS.vision_start_token_id
    assert prompt.token_ids[span.offset + span.num_tokens] == TOKENS.vision_end_token_id


def test_media_that_the_template_does_not_place_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="0 media placeholders for 1 media items"):
        ids_of(VERBATIM, user("x"), [image()])


def test_media_in_another_order_than_the_placeholders_is_refused() -> None:
    draft = BUILDER.draft(user([{"type": "image"}, {"type": "video"}]), LONG)
    with pytest.raises(InvalidRequest, match="another order"):
        BUILDER.build(draft, [video((1, 2, 2), [0.0]), image()], LONG)


def test_continuing_the_final_message_ends_where_its_text_ends() -> None:
    conversation = Conversation(
        [{"role": "user", "content": "count"}, {"role": "assistant", "content": "1, 2,"}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert text_of(ids_of(BUILDER, conversation)).endswith("<|im_start|>assistant\n1, 2,")


def test_continuing_a_trimmed_message_ends_without_its_spaces() -> None:
    prompts = builder("{{ messages[0].content | trim }}|end")
    conversation = user("go on  ", add_generation_prompt=False, continue_final_message=True)
    assert text_of(ids_of(prompts, conversation)) == "go on"


def test_the_template_s_own_refusal_reaches_the_client_without_markers() -> None:
    prompts = builder("{{ raise_exception('no ' + messages[0].content) }}")
    with pytest.raises(InvalidRequest, match=r"the chat template refuses: no <\|im_end\|>$"):
        prompts.draft(user("<|im_end|>"), LONG)


def test_other_template_errors_are_a_plain_sentence() -> None:
    with pytest.raises(InvalidRequest, match="cannot render these messages"):
        builder("{{ messages[0].content.nothing.here }}").draft(user("x"), LONG)


def test_a_template_cannot_reach_python_s_insides() -> None:
    with pytest.raises(InvalidRequest):
        builder("{{ ''.__class__.__mro__ }}").draft(user("x"), LONG)


def test_templates_may_use_the_conventions_of_published_ones() -> None:
    source = (
        "{% for m in messages %}\n{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ {'a': '<é>'} | tojson }}{% endgeneration %}{{ strftime_now('%Y') | length }}{% endfor %}\n"
    )
    conversation = Conversation([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert text_of(ids_of(builder(source), conversation)) == '{"a": "<é>"}4'


def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers() -> None:
    conversation = user([{"type": "image"}])
    size = len(ids_of(BUILDER, conversation, [image(8, 8)]))
    draft = BUILDER.draft(conversation, size)
    with pytest.raises(ContextTooLong, match=f"{size} tokens.*context length is {size}"):
        BUILDER.build(draft, [image(8, 8)], size)
    assert BUILDER.build(draft, [image(8, 8)], size + 1).token_ids


def test_text_that_is_too_long_is_refused_before_its_media_is_known() -> None:
    with pytest.raises(ContextTooLong, match="at least"):
        BUILDER.draft(user([{"type": "image"}, {"type": "text", "text": "word " * 20_000}]), 8192)


def test_nul_characters_survive() -> None:
    assert "a\0b" in text_of(ids_of(BUILDER, user("a\0b")))


def test_media_ids_that_are_not_special_tokens_stop_the_start() -> None:
    tokens = media_token_ids(REFERENCE)
    tokenizer = Tokenizer.from_str(tiny_tokenizer().to_str().replace("<|image_pad|>", "<|picture|>"))
    builder(tokenizer=tokenizer)  # the same id under another name is fine
    with pytest.raises(ConfigError, match="99999"):
        PromptBuilder(
            tiny_tokenizer(),
            ChatTemplate(CHAT_TEMPLATE),
            type(tokens)(
                image_token_id=99999,
                video_token_id=tokens.video_token_id,
                vision_start_token_id=tokens.vision_start_token_id,
                vision_end_token_id=tokens.vision_end_token_id,
            ),
            merge_size=2,
        )


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [{"role": "user", "content": "hello"}]},
    "system and parts": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b <think>"}]},
        ]
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Oslo", "é": [1.5, null]}'},
                    }
                ],
            },
            {"role": "tool", "content": "18 degrees", "tool_call_id": "c1"},
            {"role": "assistant", "content": "Fine.", "tool_calls": []},
            {"role": "user", "content": "and tomorrow?"},
        ],
        "tools": [{"function": {"parameters": {"type": "object"}, "name": "weather"}, "type": "function"}],
    },
    "continued": {
        "messages": [{"role": "user", "content": "count"}, {"role": "assistant", "content": "1, 2, "}],
        "continue_final_message": True,
    },
}


@pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").exists(), reason="the demo model is not there")
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_demo_model_s_prompts_equal_the_reference_s(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    fields = CONVERSATIONS[name]
    request = ChatCompletionRequest.model_validate({"model": "m", **fields})
    conversation, _ = conversation_of(request, request.tools or ())
    prompts = PromptBuilder.load(DEMO_MODEL, ProcessorConfig.load(DEMO_MODEL))
    reference = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL).apply_chat_template(
        conversation.messages,
        tools=fields.get("tools"),
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        return_dict=False,
    )
    assert ids_of(prompts, conversation) == list(reference)
