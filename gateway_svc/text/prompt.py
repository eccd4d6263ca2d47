"""From a conversation and its media's grids to token ids and the spans of vision tokens.

Special tokens in a prompt come from the template's structure only. Before rendering, a marker character that occurs
nowhere in the inputs breaks every special token that a client wrote; those found in the rendered text are therefore
the template's, and the text between them is tokenized with special tokens off. The ids equal a whole-string
tokenization by the reference whenever the client wrote no special token. Knows nothing of HTTP or media bytes; pure
CPU work, to be run in a thread.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
from tokenizers import Tokenizer

from common.errors import ConfigError, ContextTooLong, InvalidRequest
from common.messages import Grid, MediaItem, Modality, PromptSpan
from common.processor_config import MediaTokenIds, ProcessorConfig
from common.vision_grid import num_vision_tokens, video_frame_groups
from gateway_svc.media.item import LoadedMedia
from gateway_svc.text.chat_template import ChatTemplate, Conversation
from gateway_svc.text.special_tokens import SpecialTokenShield, any_of, special_token_ids, without


@dataclass(frozen=True)
class Pads:
    """A run of placeholder tokens of item number `item`."""

    token_id: int
    num_tokens: int
    item: int
    grid: Grid


Piece = str | int | Pads  # text to tokenize, a special token's id, placeholders
_P = TypeVar("_P", str | int, Piece)


@dataclass(frozen=True)
class PromptDraft:
    """A rendered conversation whose placeholders are not expanded yet: text runs and special token ids."""

    pieces: tuple[str | int, ...]
    ids_of_run: dict[str, list[int]] = field(repr=False)
    max_tokens: int | None = None  # of the prompt: longer ones lose their beginning

    @property
    def num_tokens(self) -> int:
        """Tokens without the expansion of media, so a lower bound of the prompt's length."""
        num_tokens = sum(len(self.ids_of_run[piece]) if isinstance(piece, str) else 1 for piece in self.pieces)
        return num_tokens if self.max_tokens is None else min(num_tokens, self.max_tokens)

    @property
    def token_ids(self) -> list[int]:
        """All tokens, each placeholder as one."""
        return [
            token_id
            for piece in self.pieces
            for token_id in (self.ids_of_run[piece] if isinstance(piece, str) else (piece,))
        ]

    def ends_with(self, mark: str) -> bool:
        """Whether the prompt's last words are `mark`, but for white space."""
        return bool(self.pieces) and isinstance(self.pieces[-1], str) and self.pieces[-1].rstrip().endswith(mark)


@dataclass(frozen=True)
class Prompt:
    """What a decoder needs: token ids, and for each media item the spans of its placeholders."""

    token_ids: list[int]
    media: list[MediaItem]


class PromptBuilder:
    """Renders, expands and tokenizes conversations for one checkpoint."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        tokens: MediaTokenIds,
        *,
        merge_size: int,
        video_outer_pair: bool = True,
    ) -> None:
        """`video_outer_pair` keeps the template's vision_start and vision_end around a video's frame groups, as
        transformers does since 5.12; without it they are replaced together with the placeholder."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # "on" means: special tokens in text are encoded as text
        self._tokenizer = tokenizer
        self._template = template
        self._tokens = tokens
        self.merge_size = merge_size
        self._video_outer_pair = video_outer_pair
        self._special_ids = special_token_ids(tokenizer)
        self._added_tokens = frozenset(t.content for t in tokenizer.get_added_tokens_decoder().values())
        self._added_pattern = any_of(self._added_tokens)
        self._shield = SpecialTokenShield(self._special_ids, template)
        self._longest_token_bytes = max(map(len, tokenizer.get_vocab(with_added_tokens=True)))
        missing = set(_media_ids(tokens)) - set(self._special_ids.values())
        if missing:
            raise ConfigError(
                f"config.json names media token ids {sorted(missing)} that are not special tokens of tokenizer.json: "
                "take both files from the same checkpoint"
            )

    @classmethod
    def load(
        cls,
        checkpoint_dir: Path,
        config: ProcessorConfig,
        *,
        chat_template: Path | None = None,
        video_outer_pair: bool = True,
    ) -> "PromptBuilder":
        """From the files of a checkpoint folder."""
        return cls(
            load_tokenizer(checkpoint_dir),
            ChatTemplate.load(checkpoint_dir, chat_template),
            config.tokens,
            merge_size=config.image.merge_size,
            video_outer_pair=video_outer_pair,
        )

    @property
    def added_tokens(self) -> frozenset[str]:
        """The texts that are tokens of their own."""
        return self._added_tokens

    def mentions(self, mark: str) -> bool:
        """Whether the chat template has `mark` in it."""
        return mark in self._template.source

    def draft(
        self, conversation: Conversation, max_model_len: int, *, max_prompt_tokens: int | None = None
    ) -> PromptDraft:
        """Render and tokenize, with each placeholder still one token.

        Raises ContextTooLong as soon as the text alone cannot fit, which bounds the work of tokenization too. With
        `max_prompt_tokens`, the beginning of a longer prompt is left out instead.
        """
        marker, tag = self._shield.free_characters(conversation)
        shielded = self._shield.shielded(conversation, marker)
        try:
            text = self._template.render(shielded, tag=tag)
        except InvalidRequest as exc:
            raise InvalidRequest(without(exc.message, marker, tag), param=exc.param) from exc
        return self._drafted(text, marker, max_model_len, max_prompt_tokens)

    def draft_text(
        self, text: str, max_model_len: int, *, max_prompt_tokens: int | None = None, has_media: bool = False
    ) -> PromptDraft:
        """A prompt that a client has rendered by itself: special tokens in it are what they say.

        Raises InvalidRequest for placeholders of media, unless the prompt may have some.
        """
        draft = self._drafted(text, "", max_model_len, max_prompt_tokens)
        if not has_media:
            self._refuse_placeholders(draft.pieces)
        return draft

    def draft_tokens(
        self, token_ids: Sequence[int], max_model_len: int, *, max_prompt_tokens: int | None = None
    ) -> PromptDraft:
        """A prompt that a client has tokenized by itself."""
        self._refuse_placeholders(token_ids)
        draft = PromptDraft(tuple(token_ids), {}, max_prompt_tokens)
        _check_length(draft.num_tokens, max_model_len, is_exact=False)
        return draft

    def bad_words_ids(self, words: Sequence[str]) -> list[list[int]]:
        """How each text may be written: at a beginning, and after a space."""
        forms = dict.fromkeys(form for word in words for form in (word.lstrip(), " " + word.lstrip()) if form.strip())
        encodings = self._tokenizer.encode_batch_fast(list(forms), add_special_tokens=False)
        return list(map(list, dict.fromkeys(tuple(encoding.ids) for encoding in encodings)))

    def _drafted(self, text: str, marker: str, max_model_len: int, max_prompt_tokens: int | None) -> PromptDraft:
        self._refuse_endless(text, max_model_len)
        pieces = tuple(_joined(self._split(text, marker)))
        draft = PromptDraft(pieces, self._tokenized({}, pieces), max_prompt_tokens)
        _check_length(draft.num_tokens, max_model_len, is_exact=False)
        return draft

    def build(self, draft: PromptDraft, media: Sequence[LoadedMedia], max_model_len: int) -> Prompt:
        """Expand the placeholders of a draft to `media`, in order.

        Raises InvalidRequest when placeholders and media differ in order or number, and ContextTooLong when not one
        token would be left to generate.
        """
        self._check_placeholders(draft, media)
        pieces = list(_joined(self._expanded(draft.pieces, media)))
        ids_of_run = self._tokenized(draft.ids_of_run, pieces)
        num_tokens = _num_tokens(pieces, ids_of_run)
        num_cut = 0 if draft.max_tokens is None else max(0, num_tokens - draft.max_tokens)
        _check_length(num_tokens - num_cut, max_model_len, is_exact=True)
        prompt = _assemble(pieces, ids_of_run, media)
        return _without_beginning(prompt, num_cut, media) if num_cut else prompt

    def _split(self, text: str, marker: str) -> Iterator[str | int]:
        """Text and special token ids, in order. Added tokens that are not special stay part of the text."""
        start = 0
        for match in self._added_pattern.finditer(text):
            token_id = self._special_ids.get(match[0])
            if token_id is not None:
                yield text[start : match.start()].replace(marker, "")
                yield token_id
                start = match.end()
        yield text[start:].replace(marker, "")

    def _refuse_placeholders(self, pieces: Iterable[str | int]) -> None:
        """A prompt that comes without media can have no place for any."""
        if not {self._tokens.image_token_id, self._tokens.video_token_id}.isdisjoint(pieces):
            raise InvalidRequest(
                "the prompt has placeholders of images or videos: send media as parts of chat messages",
                param="messages",
            )

    def _check_placeholders(self, draft: PromptDraft, media: Sequence[LoadedMedia]) -> None:
        modality: dict[str | int, Modality] = {
            self._tokens.image_token_id: "image",
            self._tokens.video_token_id: "video",
        }
        placeholders = [modality[piece] for piece in draft.pieces if piece in modality]
        if placeholders != [item.modality for item in media]:
            raise InvalidRequest(
                f"the chat template made {len(placeholders)} media placeholders for {len(media)} media items, or put "
                "them in another order: give images and videos in user messages only",
                param="messages",
            )

    def _expanded(self, pieces: Sequence[str | int], media: Sequence[LoadedMedia]) -> Iterator[Piece]:
        tokens = self._tokens
        items = iter(enumerate(media))
        is_pair_dropped = False
        for index, piece in enumerate(pieces):
            following = pieces[index + 1] if index + 1 < len(pieces) else None
            if piece == tokens.image_token_id:
                number, item = next(items)
                yield Pads(tokens.image_token_id, num_vision_tokens(item.grid, self.merge_size), number, item.grid)
            elif piece == tokens.video_token_id:
                yield from self._frame_groups(*next(items))
            elif piece == tokens.vision_start_token_id and following == tokens.video_token_id:
                is_pair_dropped = not self._video_outer_pair
                if not is_pair_dropped:
                    yield piece
            elif piece == tokens.vision_end_token_id and is_pair_dropped and pieces[index - 1] == tokens.video_token_id:
                is_pair_dropped = False
            else:
                yield piece

    def _frame_groups(self, number: int, item: LoadedMedia) -> Iterator[Piece]:
        if item.facts is None:
            raise InvalidRequest("a video without time stamps cannot be placed in the prompt", param=item.param)
        grid = (1, item.grid[1], item.grid[2])
        for group in video_frame_groups(item.facts.timestamps, item.grid, self.merge_size):
            yield group.text
            yield self._tokens.vision_start_token_id
            yield Pads(self._tokens.video_token_id, group.num_vision_tokens, number, grid)
            yield self._tokens.vision_end_token_id

    def _tokenized(self, known: dict[str, list[int]], pieces: Iterable[Piece]) -> dict[str, list[int]]:
        """Token ids of every text run; those in `known` are not tokenized again."""
        runs = {piece for piece in pieces if isinstance(piece, str)}
        fresh = sorted(runs - known.keys())
        encodings = self._tokenizer.encode_batch_fast(fresh, add_special_tokens=False)
        return {
            **{run: known[run] for run in runs & known.keys()},
            **{run: encoding.ids for run, encoding in zip(fresh, encodings, strict=True)},
        }

    def _refuse_endless(self, text: str, max_model_len: int) -> None:
        """Refuse text that is too long whatever its tokens are, before a tokenizer spends memory on it."""
        limit = max_model_len * self._longest_token_bytes
        if len(text) > limit:
            num_bytes = len(unicodedata.normalize("NFC", text).encode())
            _check_length(num_bytes // self._longest_token_bytes, max_model_len, is_exact=False)


def load_tokenizer(checkpoint_dir: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder. Raises ConfigError."""
    path = checkpoint_dir / "tokenizer.json"
    if not path.is_file():
        raise ConfigError("tokenizer.json is missing from the checkpoint: the gateway needs a fast tokenizer")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises bare Exception for anything that it cannot read
        raise ConfigError("tokenizer.json of the checkpoint is not a tokenizer that can be read") from exc


def _media_ids(tokens: MediaTokenIds) -> tuple[int, ...]:
    return tokens.image_token_id, tokens.video_token_id, tokens.vision_start_token_id, tokens.vision_end_token_id


def _joined(pieces: Iterable[_P]) -> Iterator[_P | str]:
    """Neighbouring texts as one, since the tokenizer sees them as one; empty texts left out."""
    texts: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            texts.append(piece)
            continue
        if text := "".join(texts):
            yield text
        texts.clear()
        yield piece
    if text := "".join(texts):
        yield text


def _num_tokens(pieces: Iterable[Piece], ids_of_run: dict[str, list[int]]) -> int:
    sizes = (
        len(ids_of_run[piece]) if isinstance(piece, str) else piece.num_tokens if isinstance(piece, Pads) else 1
        for piece in pieces
    )
    return sum(sizes)


def _check_length(num_tokens: int, max_model_len: int, *, is_exact: bool) -> None:
    if num_tokens >= max_model_len:
        amount = f"{num_tokens}" if is_exact else f"at least {num_tokens}"
        raise ContextTooLong(
            f"the prompt has {amount} tokens, but this model's context length is {max_model_len} tokens for prompt and "
            "output together: shorten the messages, or send fewer or smaller media",
            param="messages",
        )


def _assemble(pieces: Iterable[Piece], ids_of_run: dict[str, list[int]], media: Sequence[LoadedMedia]) -> Prompt:
    token_ids: list[int] = []
    spans: list[list[PromptSpan]] = [[] for _ in media]
    for piece in pieces:
        if isinstance(piece, str):
            token_ids += ids_of_run[piece]
        elif isinstance(piece, Pads):
            spans[piece.item].append(PromptSpan(offset=len(token_ids), num_tokens=piece.num_tokens, grid=piece.grid))
            token_ids += [piece.token_id] * piece.num_tokens
        else:
            token_ids.append(piece)
    items = [
        MediaItem(key=item.key, modality=item.modality, grid=item.grid, spans=item_spans)
        for item, item_spans in zip(media, spans, strict=True)
    ]
    return Prompt(token_ids, items)


def _without_beginning(prompt: Prompt, num_cut: int, media: Sequence[LoadedMedia]) -> Prompt:
    """The prompt without its first tokens, none of which may be an item's."""
    items = []
    for item, loaded in zip(prompt.media, media, strict=True):
        if item.spans[0].offset < num_cut:
            raise InvalidRequest(
                f"truncate_prompt_tokens would cut into {loaded.param}: leave that item out, or keep more tokens",
                param="truncate_prompt_tokens",
            )
        spans = [msgspec.structs.replace(span, offset=span.offset - num_cut) for span in item.spans]
        items.append(msgspec.structs.replace(item, spans=spans))
    return Prompt(prompt.token_ids[num_cut:], items)
