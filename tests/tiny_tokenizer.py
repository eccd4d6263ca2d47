"""A small Qwen-like tokenizer and chat template, made in memory, for tests that need no checkpoint.

Byte-level BPE over a few sentences, Qwen's special tokens by their names, and a template in our own words that
renders what Qwen3-VL's renders: ChatML turns, media placeholders, tools and tool results.
"""

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from common.processor_config import MediaTokenIds

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
PLAIN_ADDED_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
TEXTS = [
    "What is in the picture? A red circle and a blue square.",
    "user assistant system seconds <0.3 seconds> <1.6 seconds>",
    "First and then compare. What moves? What is this?",
    "the quick brown fox jumps over the lazy dog 0123456789",
]
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content or [] -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- for tool in tools -%}{{ (tool | tojson) + '\\n' }}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + show(message.content) + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + show(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def tiny_tokenizer() -> Tokenizer:
    """A fresh tokenizer of about 400 tokens."""
    return Tokenizer.from_str(_trained())


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN_ADDED_TOKENS])
    return tokenizer.to_str()


def media_token_ids(tokenizer: Tokenizer) -> MediaTokenIds:
    """The ids that a checkpoint's config.json would name."""
    return MediaTokenIds(
        image_token_id=tokenizer.token_to_id("<|image_pad|>"),
        video_token_id=tokenizer.token_to_id("<|video_pad|>"),
        vision_start_token_id=tokenizer.token_to_id("<|vision_start|>"),
        vision_end_token_id=tokenizer.token_to_id("<|vision_end|>"),
    )
