"""Loading the vision tower: names, shapes, schemes, strictness, and the absence of the other half."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from common.errors import CheckpointError
from encoder_svc.model.vision import VisionTower
from encoder_svc.model.weights import load_vision_tower
from tests.paths import REPOSITORY
from tests.real_sizes import REAL_SIZES
from tests.tiny_models import DECODER_SHARD, ENCODER_SHARD, save_checkpoint, tiny_config, tiny_model


@pytest.fixture(scope="module")
def reference() -> Any:
    return tiny_model(tiny_config())


def load(directory: Path) -> VisionTower:
    return load_vision_tower(directory, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("size", REAL_SIZES)
def test_real_sizes_have_the_names_and_shapes_of_the_reference(size: str) -> None:
    config = REAL_SIZES[size]
    is_moe = isinstance(config, Qwen3VLMoeConfig)
    with torch.device("meta"):
        reference = (Qwen3VLMoeForConditionalGeneration if is_moe else Qwen3VLForConditionalGeneration)(config)
        tower = VisionTower(config.vision_config)
    expected = {name: tensor.shape for name, tensor in reference.model.visual.state_dict().items()}
    assert {name: tensor.shape for name, tensor in tower.state_dict().items()} == expected
    assert tower.out_width == config.text_config.hidden_size * 4


@pytest.mark.parametrize("scheme", ["new", "old"])
@pytest.mark.parametrize("shards", ["single", "by_half"])
def test_every_layout_gives_the_same_weights(
    reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: Any, shards: Any
) -> None:
    monkeypatch.setattr(VisionTower, "pack", lambda tower: tower)  # packed layers have no plain weights
    tower = load(save_checkpoint(reference, tmp_path, scheme=scheme, shards=shards))
    expected = reference.model.visual.state_dict()
    assert tower.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tower.state_dict().items())


def test_checkpoint_that_transformers_saved_loads(reference: Any, tmp_path: Path) -> None:
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert torch.equal(load(tmp_path).pos_embed.weight, reference.model.visual.pos_embed.weight)


def test_tower_loads_while_the_language_half_is_missing_from_the_disk(reference: Any, tmp_path: Path) -> None:
    save_checkpoint(reference, tmp_path, shards="by_half")
    (tmp_path / DECODER_SHARD).unlink()
    assert torch.equal(load(tmp_path).pos_embed.weight, reference.model.visual.pos_embed.weight)


def test_missing_own_shard_is_named(reference: Any, tmp_path: Path) -> None:
    save_checkpoint(reference, tmp_path, shards="by_half")
    (tmp_path / ENCODER_SHARD).unlink()
    with pytest.raises(CheckpointError, match=ENCODER_SHARD):
        load(tmp_path)


def test_missing_unknown_and_misshapen_tensors_are_listed_together(reference: Any, tmp_path: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.visual.merger.norm.weight"]
        tensors["model.visual.extra.weight"] = torch.zeros(2)
        tensors["model.visual.pos_embed.weight"] = torch.zeros(143, 32)
        tensors["model.visual.blocks.0.norm1.bias"] = torch.zeros(32, dtype=torch.int8)
        # The other half's faults are not the encoder's business.
        tensors["model.language_model.strange"] = torch.zeros(1)

    save_checkpoint(reference, tmp_path, change=damage)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    message = caught.value.message
    assert "1 missing tensors: visual.merger.norm.weight" in message
    assert "1 unknown tensors: model.visual.extra.weight" in message
    assert "model.visual.pos_embed.weight has [143, 32], expected [144, 32]" in message
    assert "model.visual.blocks.0.norm1.bias is I8" in message
    assert "strange" not in message


def test_weights_are_cast_and_need_no_gradient(reference: Any, tmp_path: Path) -> None:
    directory = save_checkpoint(reference, tmp_path, dtype=torch.float16)
    tower = load_vision_tower(directory, dtype=torch.bfloat16, device="cpu")
    assert {parameter.dtype for parameter in tower.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in tower.parameters())
    assert not tower.training


def test_encoder_process_imports_neither_the_decoder_nor_the_reference_model(reference: Any, tmp_path: Path) -> None:
    save_checkpoint(reference, tmp_path, shards="by_half")
    script = (
        "import sys, torch; from pathlib import Path; from encoder_svc.model.weights import load_vision_tower\n"
        "load_vision_tower(Path(sys.argv[1]), dtype=torch.float32, device='cpu')\n"
        "bad = [m for m in sys.modules if m.startswith(('decoder_svc', 'gateway_svc')) or 'modeling_qwen3_vl' in m]\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
