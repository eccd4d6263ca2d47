"""Loading the language model: real sizes, naming schemes, expert layouts, tying, strictness, the other half absent."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from common.checkpoint import StoredTensor
from common.checkpoint_names import canonical_name, role_of
from common.errors import CheckpointError
from decoder_svc.model.text import TextModel
from decoder_svc.model.weights import load_text_model, text_destinations
from tests.paths import REPOSITORY
from tests.real_sizes import REAL_SIZES
from tests.tiny_models import (
    DECODER_SHARD,
    ENCODER_SHARD,
    ExpertLayout,
    save_checkpoint,
    tiny_config,
    tiny_model,
)

LAYOUTS: list[ExpertLayout] = ["published", "transformers", "per_expert"]


def load(directory: Path) -> TextModel:
    return load_text_model(directory, dtype=torch.float32, device="cpu", pack=False)


def stored_shapes(reference: Any, layout: ExpertLayout) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes of the language half as a checkpoint of this layout stores them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in reference.state_dict().items():
        if role_of(name) != "decoder" or (name == "lm_head.weight" and reference.config.tie_word_embeddings):
            continue
        canonical, shape = canonical_name(name), tuple(tensor.shape)
        if ".mlp.experts." not in name or layout == "transformers":
            shapes[canonical] = shape
        elif layout == "published":
            shapes[canonical] = (shape[0], shape[2], shape[1])
        else:
            prefix, _, leaf = canonical.rpartition(".")
            parts = (
                {"down_proj": shape[1]}
                if leaf == "down_proj"
                else dict.fromkeys(["gate_proj", "up_proj"], shape[1] // 2)
            )
            for expert in range(shape[0]):
                shapes |= {f"{prefix}.{expert}.{part}.weight": (rows, shape[2]) for part, rows in parts.items()}
    return shapes


@pytest.mark.parametrize(
    ("size", "layout"),
    [(size, "published") for size in REAL_SIZES] + [("30B-A3B", "transformers"), ("30B-A3B", "per_expert")],
)
def test_real_sizes_take_exactly_the_tensors_that_are_stored(size: str, layout: ExpertLayout) -> None:
    config = REAL_SIZES[size]
    is_moe = isinstance(config, Qwen3VLMoeConfig)
    with torch.device("meta"):
        reference = (Qwen3VLMoeForConditionalGeneration if is_moe else Qwen3VLForConditionalGeneration)(config)
        model = TextModel(config.text_config, tie_word_embeddings=config.tie_word_embeddings)
    shapes = stored_shapes(reference, layout)
    stored = {name: StoredTensor(Path("x"), name, shape, "BF16") for name, shape in shapes.items()}
    destinations = text_destinations(model, stored)
    parameters = dict(model.named_parameters())
    taken = {name: tuple(d.view(parameters[d.parameter]).shape) for name, d in destinations.items()}
    assert taken == shapes
    # Every element of every parameter is filled once.
    assert sum(map(torch.Size.numel, map(torch.Size, taken.values()))) == sum(p.numel() for p in parameters.values())


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "moe"])
def reference(request: pytest.FixtureRequest) -> Any:
    return tiny_model(tiny_config(is_moe=request.param))


def assert_same_weights(model: TextModel, reference: Any) -> None:
    """Split the fused parameters again and compare with the reference's."""
    expected = {canonical_name(name): tensor for name, tensor in reference.state_dict().items()}
    destinations = text_destinations(model, {})
    parameters = dict(model.named_parameters())
    assert destinations.keys() == {name for name in expected if not name.startswith("visual.")}
    for name, destination in destinations.items():
        assert torch.equal(destination.view(parameters[destination.parameter]), expected[name]), name


@pytest.mark.parametrize("scheme", ["new", "old"])
@pytest.mark.parametrize("shards", ["single", "by_half"])
def test_every_layout_gives_the_same_weights(reference: Any, tmp_path: Path, scheme: Any, shards: Any) -> None:
    for layout in LAYOUTS:
        directory = tmp_path / layout
        save_checkpoint(reference, directory, scheme=scheme, shards=shards, experts=layout)
        assert_same_weights(load(directory), reference)


def test_checkpoint_that_transformers_saved_loads(reference: Any, tmp_path: Path) -> None:
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert_same_weights(load(tmp_path), reference)


def test_model_loads_while_the_vision_half_is_missing_from_the_disk(reference: Any, tmp_path: Path) -> None:
    save_checkpoint(reference, tmp_path, shards="by_half")
    (tmp_path / ENCODER_SHARD).unlink()
    assert_same_weights(load(tmp_path), reference)


def test_missing_own_shard_is_named(reference: Any, tmp_path: Path) -> None:
    save_checkpoint(reference, tmp_path, shards="by_half")
    (tmp_path / DECODER_SHARD).unlink()
    with pytest.raises(CheckpointError, match=DECODER_SHARD):
        load(tmp_path)


def test_square_experts_are_ambiguous_unless_stored_one_by_one(tmp_path: Path) -> None:
    reference = tiny_model(tiny_config(is_moe=True, text={"moe_intermediate_size": 24}))
    save_checkpoint(reference, tmp_path / "fused")
    with pytest.raises(CheckpointError, match=r"gate_up_proj is square .* one tensor for each expert"):
        load(tmp_path / "fused")
    assert_same_weights(load(save_checkpoint(reference, tmp_path / "each", experts="per_expert")), reference)


def test_absent_experts_are_missing_tensors(tmp_path: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "experts.3." in name or "layers.2.mlp.experts" in name]:
            del tensors[name]

    reference = tiny_model(tiny_config(is_moe=True))
    save_checkpoint(reference, tmp_path, experts="per_expert", change=damage)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert "language_model.layers.0.mlp.experts.3.up_proj.weight" in caught.value.message
    assert "language_model.layers.2.mlp.experts.gate_up_proj" in caught.value.message


def test_missing_unknown_and_misshapen_tensors_are_listed_together(tmp_path: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.language_model.layers.1.self_attn.k_proj.weight"]
        tensors["model.language_model.layers.9.strange.weight"] = torch.zeros(2)
        tensors["wholly.foreign"] = torch.zeros(2)
        tensors["model.language_model.layers.0.mlp.up_proj.weight"] = torch.zeros(81, 48)
        tensors["model.visual.strange"] = torch.zeros(1)

    save_checkpoint(tiny_model(tiny_config()), tmp_path, change=damage)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    message = caught.value.message
    assert "1 missing tensors: language_model.layers.1.self_attn.k_proj.weight" in message
    assert "2 unknown tensors: model.language_model.layers.9.strange.weight, wholly.foreign" in message
    assert "layers.0.mlp.up_proj.weight has [81, 48], expected [80, 48]" in message
    assert "visual" not in message


def test_untied_model_keeps_its_own_lm_head(tmp_path: Path) -> None:
    reference = tiny_model(tiny_config(is_tied=False))
    model = load(save_checkpoint(reference, tmp_path))
    assert model.lm_head is not None
    assert torch.equal(model.lm_head.weight, reference.lm_head.weight)
    assert not torch.equal(model.lm_head.weight, model.embed_tokens.weight)


def test_untied_model_without_lm_head_is_refused(tmp_path: Path) -> None:
    directory = save_checkpoint(
        tiny_model(tiny_config()), tmp_path, change=lambda tensors: tensors.pop("lm_head.weight")
    )
    with pytest.raises(CheckpointError, match=r"missing tensors: lm_head\.weight"):
        load(directory)


@pytest.mark.parametrize("has_copy", [False, True])
def test_tied_model_loads_with_or_without_a_copy_of_the_table(tmp_path: Path, has_copy: bool) -> None:
    def add_copy(tensors: dict[str, torch.Tensor]) -> None:
        if has_copy:
            tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()

    reference = tiny_model(tiny_config(is_tied=True))
    model = load(save_checkpoint(reference, tmp_path, change=add_copy))
    assert model.lm_head is None
    assert torch.equal(model.embed_tokens.weight, reference.model.language_model.embed_tokens.weight)


def test_tied_model_that_stores_only_the_lm_head_uses_it_for_both(tmp_path: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.language_model.embed_tokens.weight")

    reference = tiny_model(tiny_config(is_tied=True))
    model = load(save_checkpoint(reference, tmp_path, change=rename))
    assert model.lm_head is None
    assert torch.equal(model.embed_tokens.weight, reference.lm_head.weight)


def test_differing_lm_head_wins_over_a_wrong_tie_flag_as_in_the_reference(tmp_path: Path) -> None:
    def untie(raw: dict[str, Any]) -> None:
        raw["tie_word_embeddings"] = True

    reference = tiny_model(tiny_config(is_tied=False))
    directory = save_checkpoint(reference, tmp_path, config_change=untie)
    model = load(directory)
    assert model.lm_head is not None
    assert torch.equal(model.lm_head.weight, reference.lm_head.weight)
    reloaded = Qwen3VLForConditionalGeneration.from_pretrained(directory)
    assert torch.equal(reloaded.lm_head.weight, model.lm_head.weight)


def test_stored_rotary_frequencies_are_skipped(tmp_path: Path) -> None:
    def add_buffers(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.language_model.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    reference = tiny_model(tiny_config())
    assert_same_weights(load(save_checkpoint(reference, tmp_path, change=add_buffers)), reference)


def test_attention_biases_are_loaded_when_the_configuration_has_them(tmp_path: Path) -> None:
    reference = tiny_model(tiny_config(text={"attention_bias": True}))
    assert_same_weights(load(save_checkpoint(reference, tmp_path)), reference)


def test_decoder_process_imports_neither_the_encoder_nor_the_reference_model(reference: Any, tmp_path: Path) -> None:
    save_checkpoint(reference, tmp_path, shards="by_half")
    script = (
        "import sys, torch; from pathlib import Path; from decoder_svc.model.weights import load_text_model\n"
        "load_text_model(Path(sys.argv[1]), dtype=torch.float32, device='cpu')\n"
        "bad = [m for m in sys.modules if m.startswith(('encoder_svc', 'gateway_svc')) or 'modeling_qwen3_vl' in m]\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
