"""Where a chat template and its special tokens are found in a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from gateway_svc.text.chat_template import ChatTemplate, Conversation


def render(template: ChatTemplate) -> str:
    return template.render(Conversation([{"role": "user", "content": "x"}]), tag="\ue000")


def write(folder: Path, **files: Any) -> Path:
    for name, value in files.items():
        stem, _, suffix = name.rpartition("_")
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / f"{stem}.{suffix}").write_text(text)
    return folder


def test_the_file_of_its_own_comes_first_then_the_older_places(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}]
    write(tmp_path, tokenizer_config_json={"chat_template": named})
    assert render(ChatTemplate.load(tmp_path)) == "named"
    write(tmp_path, tokenizer_config_json={"chat_template": "config"})
    assert render(ChatTemplate.load(tmp_path)) == "config"
    write(tmp_path, chat_template_json={"chat_template": "json"})
    assert render(ChatTemplate.load(tmp_path)) == "json"
    write(tmp_path, chat_template_jinja="jinja")
    assert render(ChatTemplate.load(tmp_path)) == "jinja"
    write(tmp_path, mine_jinja="mine")
    assert render(ChatTemplate.load(tmp_path, tmp_path / "mine.jinja")) == "mine"


def test_templates_may_name_special_tokens_of_the_tokenizer(tmp_path: Path) -> None:
    write(
        tmp_path,
        tokenizer_config_json={
            "chat_template": "{{ eos_token }}{{ bos_token }}{{ image_token }}",
            "eos_token": {"content": "<|im_end|>"},
            "bos_token": None,
            "extra_special_tokens": {"image_token": "<|image_pad|>"},
        },
    )
    assert render(ChatTemplate.load(tmp_path)) == "<|im_end|><|image_pad|>"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no chat template"),
        ({"chat_template_jinja": "{% if %}"}, "not valid Jinja"),
        ({"tokenizer_config_json": "5"}, "JSON object"),
        ({"chat_template_json": "{"}, "JSON object"),
    ],
)
def test_a_checkpoint_without_a_usable_template_stops_the_start(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    write(tmp_path, **files)
    with pytest.raises(ConfigError, match=message):
        ChatTemplate.load(tmp_path)


def test_an_override_that_does_not_exist_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        ChatTemplate.load(tmp_path, tmp_path / "none.jinja")
