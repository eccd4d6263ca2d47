"""Reading checkpoints: names, configuration, the index, strictness of files, the vision fingerprint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from common.checkpoint import MAX_LISTED, read_model_config, role_tensors, vision_fingerprint
from common.checkpoint_names import canonical_name, role_of
from common.errors import CheckpointError
from common.hub import INDEX_FILE
from decoder_svc.model.weights import load_text_model
from tests.tiny_models import DECODER_SHARD, ENCODER_SHARD, save_checkpoint, tiny_config, tiny_model


@pytest.fixture(scope="module")
def reference() -> Any:
    return tiny_model(tiny_config())


@pytest.mark.parametrize(
    ("stored", "canonical", "role"),
    [
        ("model.visual.pos_embed.weight", "visual.pos_embed.weight", "encoder"),
        ("visual.pos_embed.weight", "visual.pos_embed.weight", "encoder"),
        ("model.language_model.norm.weight", "language_model.norm.weight", "decoder"),
        ("model.norm.weight", "language_model.norm.weight", "decoder"),
        ("lm_head.weight", "lm_head.weight", "decoder"),
        ("foreign", "foreign", "decoder"),
        ("model.language_model.rotary_emb.inv_freq", "language_model.rotary_emb.inv_freq", None),
        ("model.visual.rotary_pos_emb.inv_freq", "visual.rotary_pos_emb.inv_freq", None),
    ],
)
def test_both_naming_schemes_give_one_name_and_one_role(stored: str, canonical: str, role: str | None) -> None:
    assert canonical_name(stored) == canonical
    assert role_of(stored) == role


@pytest.mark.parametrize("scheme", ["new", "old"])
def test_roles_divide_the_tensors_without_rest(reference: Any, tmp_path: Path, scheme: Any) -> None:
    save_checkpoint(reference, tmp_path, scheme=scheme)
    encoder, decoder = role_tensors(tmp_path, "encoder"), role_tensors(tmp_path, "decoder")
    names = {canonical_name(name) for name in reference.state_dict()}
    assert encoder.keys() | decoder.keys() == names
    assert not encoder.keys() & decoder.keys()
    assert all(name.startswith("visual.") for name in encoder)
    stored = encoder["visual.pos_embed.weight"]
    assert (stored.shape, stored.dtype) == ((144, 32), "F32")


def test_only_the_shards_of_a_role_are_opened(reference: Any, tmp_path: Path) -> None:
    save_checkpoint(reference, tmp_path, shards="by_half")
    (tmp_path / DECODER_SHARD).write_bytes(b"not a safetensors file")
    assert {tensor.file.name for tensor in role_tensors(tmp_path, "encoder").values()} == {ENCODER_SHARD}
    with pytest.raises(CheckpointError, match=f"{DECODER_SHARD} is not a valid safetensors file"):
        role_tensors(tmp_path, "decoder")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "*.safetensors", "model.bin", 7, None])
def test_index_that_names_no_plain_safetensors_file_is_refused(reference: Any, tmp_path: Path, name: Any) -> None:
    save_checkpoint(reference, tmp_path)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.visual.x": name}}))
    with pytest.raises(CheckpointError, match="plain"):
        role_tensors(tmp_path, "encoder")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "\ud83d"])
def test_damaged_index_is_refused(reference: Any, tmp_path: Path, text: str) -> None:
    save_checkpoint(reference, tmp_path)
    (tmp_path / INDEX_FILE).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match="index"):
        role_tensors(tmp_path, "encoder")


def test_index_that_promises_more_than_its_shard_holds_is_refused(reference: Any, tmp_path: Path) -> None:
    save_checkpoint(reference, tmp_path, shards="by_half")
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    index["weight_map"]["model.visual.promised.weight"] = ENCODER_SHARD
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks tensors .* model\.visual\.promised\.weight"):
        role_tensors(tmp_path, "encoder")


def test_same_tensor_under_both_schemes_is_refused(reference: Any, tmp_path: Path) -> None:
    def duplicate(tensors: dict[str, torch.Tensor]) -> None:
        tensors["visual.pos_embed.weight"] = torch.zeros(144, 32)

    save_checkpoint(reference, tmp_path, change=duplicate)
    with pytest.raises(CheckpointError, match="the same tensor"):
        role_tensors(tmp_path, "encoder")


def test_checkpoint_without_weights_or_without_the_role_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors"):
        role_tensors(tmp_path, "encoder")
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no tensor for the encoder"):
        role_tensors(tmp_path, "encoder")


def test_long_lists_are_cut_with_a_count(reference: Any, tmp_path: Path) -> None:
    def add_many(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({f"foreign.{idx:03}": torch.zeros(1) for idx in range(100)})

    save_checkpoint(reference, tmp_path, change=add_many)
    with pytest.raises(CheckpointError) as caught:
        load_text_model(tmp_path, dtype=torch.float32, device="cpu")
    assert "100 unknown tensors: foreign.000" in caught.value.message
    assert caught.value.message.count("foreign.") == MAX_LISTED
    assert f"and {100 - MAX_LISTED} more" in caught.value.message


@pytest.mark.parametrize("part", [None, "text_config", "vision_config"])
def test_quantised_checkpoint_is_refused_by_name(reference: Any, tmp_path: Path, part: str | None) -> None:
    def quantise(raw: dict[str, Any]) -> None:
        (raw if part is None else raw[part])["quantization_config"] = {"quant_method": "fp8", "bits": 8}

    save_checkpoint(reference, tmp_path, config_change=quantise)
    with pytest.raises(CheckpointError, match=r"'fp8' .* not supported"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"{", "not JSON"),
        (b"[]", "no object"),
        (b'{"model_type": "llama"}', "'llama'"),
        (b"{}", "model_type None"),
        (b'{"model_type": [1]}', "model_type"),
        (b'{"model_type": "qwen3_vl", "text_config": {"hidden_size": "wide"}}', "not a valid qwen3_vl"),
    ],
)
def test_damaged_or_foreign_configuration_is_refused(tmp_path: Path, raw: bytes, words: str) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(CheckpointError, match=words):
        read_model_config(tmp_path)


def test_absent_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_model_config(tmp_path)


def test_published_spelling_of_the_rotary_settings_is_understood(tmp_path: Path) -> None:
    raw = tiny_config().to_dict()
    del raw["text_config"]["rope_parameters"]
    raw["text_config"]["rope_theta"] = 5000000
    raw["text_config"]["rope_scaling"] = {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}
    raw["vision_config"]["model_type"] = "qwen3_vl"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_model_config(tmp_path)
    rope = config.text_config.rope_parameters  # type: ignore[union-attr]
    assert rope["rope_theta"] == 5000000
    assert rope["mrope_section"] == [4, 2, 2]
    assert config.vision_config.depth == 5  # type: ignore[union-attr]


def test_fingerprint_is_the_same_for_the_same_weights_in_any_layout(reference: Any, tmp_path: Path) -> None:
    one = save_checkpoint(reference, tmp_path / "one")
    two = save_checkpoint(reference, tmp_path / "two", scheme="old", shards="by_half")
    assert vision_fingerprint(one, b"settings", "float32") == vision_fingerprint(two, b"settings", "float32")
    assert len(vision_fingerprint(one, b"settings", "float32")) == 64


def test_fingerprint_ignores_the_language_half(reference: Any, tmp_path: Path) -> None:
    one = save_checkpoint(reference, tmp_path / "one")
    two = save_checkpoint(reference, tmp_path / "two", change=lambda tensors: tensors["lm_head.weight"].zero_())
    assert vision_fingerprint(one, b"", "float32") == vision_fingerprint(two, b"", "float32")


def test_fingerprint_differs_when_anything_that_decides_an_embedding_differs(reference: Any, tmp_path: Path) -> None:
    def nudge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.visual.merger.linear_fc2.bias"][0] += 1e-3

    def reshape(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.visual.pos_embed.weight"] = tensors["model.visual.pos_embed.weight"].view(72, 64)

    plain = save_checkpoint(reference, tmp_path / "plain")
    fingerprints = {
        vision_fingerprint(plain, b"settings", "float32"),
        vision_fingerprint(plain, b"settings", "bfloat16"),
        vision_fingerprint(plain, b"setting", "sfloat32"),
        vision_fingerprint(save_checkpoint(reference, tmp_path / "nudged", change=nudge), b"settings", "float32"),
        vision_fingerprint(save_checkpoint(reference, tmp_path / "shape", change=reshape), b"settings", "float32"),
        vision_fingerprint(save_checkpoint(reference, tmp_path / "half", dtype=torch.bfloat16), b"settings", "float32"),
    }
    assert len(fingerprints) == 6
