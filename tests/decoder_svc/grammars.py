"""A vocabulary of single bytes that fits the tiny model, and JSON schemas of many kinds."""

import json
import random
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from decoder_svc.grammar import GrammarCompiler

VOCAB_SIZE = 300
EOS_ID = 256


@cache
def byte_tokenizer() -> Tokenizer:
    """Token ids 0 to 255 are bytes in some order, 256 is the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    return tokenizer


@cache
def compiler() -> GrammarCompiler:
    """A compiler for the tiny model."""
    return GrammarCompiler(byte_tokenizer().to_str(), VOCAB_SIZE, [EOS_ID])


def ids_of(text: str) -> list[int]:
    """The tokens of a text."""
    return list(byte_tokenizer().encode(text).ids)


def text_of(token_ids: list[int]) -> str:
    """The text of tokens."""
    return str(byte_tokenizer().decode(token_ids))


def varied_schema(seed: int) -> dict[str, Any]:
    """A schema of chance, small enough that even a model without sense comes to its end."""
    chance = random.Random(seed)
    schema = _object(chance, 0)
    if seed % 5 == 0:
        schema["properties"]["node"] = {"$ref": "#/$defs/node"}
        schema["$defs"] = {"node": {"anyOf": [{"type": "null"}, _object(chance, 2)]}}
    return schema


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(["a", "name", "x y", "größe", "count", 'q"', "items"], chance.randint(1, 3))
    properties = {name: _part(chance, depth + 1) for name in names}
    required = names if chance.random() < 0.5 else names[:1]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _part(chance: random.Random, depth: int) -> dict[str, Any]:
    makers = [_integer, _number, _string, _pattern, _enum, _constant, _boolean, _nullable, _formatted]
    if depth < 3:
        makers += [_array, _object, _any_of]
    return chance.choice(makers)(chance, depth)


def _integer(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randint(-50, 50)
    return {"type": "integer", "minimum": least, "maximum": least + chance.randint(0, 200)}


def _number(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number", "exclusiveMinimum": 0, "maximum": chance.choice([1, 2.5, 100])}


def _string(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "minLength": chance.randint(0, 2), "maxLength": chance.randint(2, 6)}


def _pattern(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": chance.choice(["^[A-Z]{2}[0-9]{3}$", "^(on|off)$", "^a+b?$"])}


def _enum(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": chance.sample(["red", "blue", 1, 2.5, None, True, "ü\n"], 3)}


def _constant(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"const": chance.choice(["fixed", 7, {"k": [1, 2]}])}


def _boolean(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _nullable(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": ["integer", "null"], "minimum": 0, "maximum": 9}


def _formatted(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "format": chance.choice(["date", "uuid", "ipv4"])}


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "array", "items": _part(chance, depth + 1), "minItems": 1, "maxItems": chance.randint(1, 3)}


def _any_of(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_part(chance, depth + 1), _part(chance, depth + 1)]}


def schema_text(schema: Any) -> str:
    """A schema as it goes over the wire."""
    return json.dumps(schema)
