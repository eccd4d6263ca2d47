"""The language model over several ranks, each a thread here: their shares give the logits of the whole."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.checkpoint import without_storage
from common.errors import ConfigError
from decoder_svc.model.parallel import Shard, check_split, local_config, pad_columns, vocabulary_range
from decoder_svc.model.text import TextModel
from decoder_svc.model.weights import load_text_model
from decoder_svc.model_input import ModelInput
from tests.decoder_svc.model.packing import Chunk, PagedRun
from tests.decoder_svc.model.pairs import make_case, make_pair
from tests.real_sizes import REAL_SIZES
from tests.tiny_models import ExpertLayout, save_checkpoint, tiny_config, tiny_model


class Table:
    """Where ranks of one process lay down their parts."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._parts: list[Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def all_of(self, rank: int, part: Tensor) -> list[Tensor]:
        self._parts[rank] = part.clone()
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts


class ThreadRanks:
    """A `Ranks` over threads."""

    is_in_step = False

    def __init__(self, table: Table, rank: int) -> None:
        self._table = table
        self.shard = Shard(rank, table.size)

    def begin_step(self, model_input: ModelInput) -> None:
        """Every rank has the step."""

    def sum(self, term: Tensor) -> Tensor:
        return term.copy_(torch.stack(self._table.all_of(self.shard.rank, term)).sum(0))

    def join_columns(self, part: Tensor, num_columns: int) -> Tensor:
        own = pad_columns(part, num_columns, self.shard.size)
        return torch.cat(self._table.all_of(self.shard.rank, own), dim=1)[:, :num_columns]


def load_ranks(directory: Path, size: int) -> list[TextModel]:
    table = Table(size)
    return [
        load_text_model(directory, dtype=torch.float32, device="cpu", ranks=ThreadRanks(table, rank))
        for rank in range(size)
    ]


def on_all(ranks: list[TextModel], run: Callable[[TextModel], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))


def logits_of(model: TextModel, prompts: list[Any]) -> Tensor:
    """All prompts in one step, then two tokens more of each in another."""
    paged = PagedRun(model, prompts)
    heads = [Chunk(i, 0, len(prompt) - 2) for i, prompt in enumerate(prompts)]
    tails = [Chunk(i, len(prompt) - 2, len(prompt)) for i, prompt in enumerate(prompts)]
    with torch.inference_mode():
        return torch.cat([model(paged.model_input(chunks), paged.cache) for chunks in (heads, tails)])


@pytest.mark.parametrize("is_moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["own-head", "tied"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_give_the_logits_of_the_whole(tmp_path: Path, size: int, is_tied: bool, is_moe: bool) -> None:
    """With four ranks each of the two KV heads is in two of them; 300 tokens divide by both."""
    pair = make_pair(tmp_path, is_moe=is_moe, is_tied=is_tied)
    cases = [make_case(pair, 1, [], []), make_case(pair, 2, [[1, 4, 6], [1, 8, 4]], [])]
    prompts = [case.prompt for case in cases]
    whole = logits_of(pair.model, prompts)
    for found in on_all(load_ranks(tmp_path, size), lambda model: logits_of(model, prompts)):
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("experts", ["published", "transformers", "per_expert"])
def test_experts_are_split_from_every_layout(tmp_path: Path, experts: ExpertLayout) -> None:
    reference = tiny_model(tiny_config(is_moe=True, text={"moe_intermediate_size": 28}))
    save_checkpoint(reference, tmp_path, experts=experts)
    shares = [dict(model.named_parameters()) for model in unpacked(tmp_path, 2)]
    whole = dict(load_text_model(tmp_path, dtype=torch.float32, device="cpu", pack=False).named_parameters())
    name = "layers.0.mlp.experts"
    gates, ups = whole[f"{name}.gate_up_proj"].chunk(2, dim=1)
    for rank, share in enumerate(shares):
        own = slice(14 * rank, 14 * (rank + 1))
        expected = torch.cat([gates[:, own], ups[:, own]], dim=1)
        assert torch.equal(share[f"{name}.gate_up_proj"], expected)
        assert torch.equal(share[f"{name}.down_proj"], whole[f"{name}.down_proj"][:, :, own])


def unpacked(directory: Path, size: int) -> list[TextModel]:
    table = Table(size)
    return [
        load_text_model(directory, dtype=torch.float32, device="cpu", pack=False, ranks=ThreadRanks(table, rank))
        for rank in range(size)
    ]


def test_biases_and_a_vocabulary_that_does_not_divide_are_right_too(tmp_path: Path) -> None:
    config = tiny_config(text={"attention_bias": True, "vocab_size": 301})
    save_checkpoint(tiny_model(config), tmp_path)
    whole = load_text_model(tmp_path, dtype=torch.float32, device="cpu")
    prompts = [make_case(make_pair(tmp_path / "other", is_moe=False, is_tied=False), 1, [], []).prompt]
    expected = logits_of(whole, prompts)
    assert expected.shape[1] == 301
    for found in on_all(load_ranks(tmp_path, 2), lambda model: logits_of(model, prompts)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_rank_holds_and_caches_its_share_only(tmp_path: Path) -> None:
    save_checkpoint(tiny_model(tiny_config()), tmp_path)
    whole = load_text_model(tmp_path, dtype=torch.float32, device="cpu", pack=False)
    sizes = {name: parameter.numel() for name, parameter in whole.named_parameters()}
    for model in unpacked(tmp_path, 2):
        assert model.config.num_key_value_heads == 1
        for name, parameter in model.named_parameters():
            is_shared_out = "proj" in name or name == "lm_head.weight"
            assert parameter.numel() * (2 if is_shared_out else 1) == sizes[name], name


@pytest.mark.parametrize("size", [3, 8, 5])
def test_a_number_of_ranks_that_does_not_divide_is_refused_with_those_that_do(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"--tp {size} does not divide .* use one of \[1, 2, 4\]"):
        check_split(tiny_config().text_config, size)


def test_the_largest_model_splits_over_eight() -> None:
    """The arithmetic of its values file: a rank's share of the weights, and one KV head of four."""
    config = REAL_SIZES["235B-A22B"].text_config
    check_split(config, 8)
    local = local_config(config, 8)
    assert (local.num_attention_heads, local.num_key_value_heads, local.head_dim) == (8, 1, 128)
    assert local.moe_intermediate_size == 192
    assert config.num_attention_heads == 64, "the whole configuration is left alone"
    with without_storage():
        share = TextModel(local, ranks=ThreadRanks(Table(8), 0))
    num_bytes = 2 * sum(parameter.numel() for parameter in share.parameters())
    assert num_bytes / 2**30 == pytest.approx(55.9, abs=0.05)
    kv_bytes = 2 * local.num_hidden_layers * local.num_key_value_heads * local.head_dim * 2
    assert kv_bytes == 47 * 1024


def test_every_row_of_the_vocabulary_has_one_owner() -> None:
    for vocab_size in (7, 8, 9, 301):
        ranges = [vocabulary_range(vocab_size, Shard(rank, 4)) for rank in range(4)]
        rows = [row for first, end in ranges for row in range(first, end)]
        assert rows == list(range(vocab_size))
