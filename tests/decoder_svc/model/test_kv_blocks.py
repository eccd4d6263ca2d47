"""Compressed blocks of the KV cache against plain ones: the same numbers and the same attention, to the last bit."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decoder_svc.kv_cache import PLAIN, WHOLE, KVCache
from decoder_svc.model.amx import amx_library
from decoder_svc.model.kernels import Heads, NativeKernels, compiled_library

pytestmark = pytest.mark.skipif(amx_library() is None, reason="no kernels for AMX, or no processor that has it")

NUM_HEADS, KV_HEADS = 6, 3
MOST_EXCEPTIONS = 15  # of a tile, as in `kv_blocks_amx.h`
LAYER = 1


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    library = compiled_library()
    assert library is not None
    return NativeKernels(library)


class Pair:
    """A plain cache and a compressed one that are given the same keys and values."""

    def __init__(self, kernels: NativeKernels, num_blocks: int, block_size: int, dim: int) -> None:
        sizes = (2, num_blocks, block_size, KV_HEADS, dim, torch.bfloat16, "cpu")
        self.plain, self.compressed = KVCache(*sizes), KVCache(*sizes, compress=True)
        self.kernels = kernels
        self.num_slots = num_blocks * block_size
        self.qkv = torch.randn(self.num_slots, NUM_HEADS + 2 * KV_HEADS, dim).to(torch.bfloat16)

    @property
    def values(self) -> Tensor:
        """The values [slots, kv_heads, dim], which are written as they are."""
        return self.qkv[:, -KV_HEADS:]

    def write(self, slots: Tensor) -> None:
        """Write the keys and values of some slots to both."""
        dim = self.plain.head_dim
        ones = torch.ones(dim, dtype=torch.bfloat16)
        heads = Heads(NUM_HEADS, KV_HEADS, dim, ones, ones, 1e-6)
        angles = slots[:, None] * torch.linspace(0.01, 1.0, dim // 2)
        rows = self.qkv[slots].flatten(1)
        for cache in (self.plain, self.compressed):
            self.kernels.store_heads(rows, heads, angles.cos(), angles.sin(), slots, cache, LAYER)

    def restore(self) -> None:
        """Write one token of each full block again, in its middle, which makes the block plain."""
        size = self.plain.block_size
        self.write(torch.arange(self.num_slots // size) * size + 3)

    def bases(self, block: int) -> Tensor:
        """How the tiles of a block are kept: [kv_heads, 2, tiles]."""
        assert self.compressed.bases is not None
        return self.compressed.bases[LAYER, block]

    def assert_bits_are_equal(self) -> None:
        """Of all blocks, which must be plain."""
        assert self.compressed.bases is not None
        assert self.compressed.bases.eq(PLAIN).all()
        assert torch.equal(self.compressed.pool.view(torch.int16), self.plain.pool.view(torch.int16))

    def assert_attention_is_equal(self, lengths: list[tuple[int, int]]) -> None:
        """Of sequences with (context, new tokens) each, in blocks dealt at random."""
        size, dim = self.plain.block_size, self.plain.head_dim
        tables = torch.stack([torch.randperm(self.num_slots // size) for _ in lengths]).int()
        contexts = torch.tensor([context for context, _ in lengths], dtype=torch.int32)
        starts = torch.tensor([0, *(new for _, new in lengths)]).cumsum(0).int()
        q = torch.randn(int(starts[-1]), NUM_HEADS, dim).to(torch.bfloat16)
        decoding = torch.tensor([i for i, (_, new) in enumerate(lengths) if new == 1], dtype=torch.int64)
        prefilling = torch.tensor([i for i, (_, new) in enumerate(lengths) if new > 1], dtype=torch.int64)
        results = []
        for cache in (self.plain, self.compressed):
            out = torch.zeros_like(q)
            rows = starts[decoding].long()
            self.kernels.attend_decode(q, cache, LAYER, tables, contexts, decoding, rows, out)
            self.kernels.attend_prefill(q, cache, LAYER, tables, contexts, starts, prefilling, out)
            results.append(out.view(torch.int16))
        assert results[0].any()
        assert torch.equal(*results)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_over_compressed_blocks_is_the_same(
    kernels: NativeKernels, block_size: int, dim: int, threads: int
) -> None:
    torch.manual_seed(dim + block_size)
    pair = Pair(kernels, 5, block_size, dim)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pair.write(torch.arange(pair.num_slots))
        assert pair.compressed.count_tiles() == (5 * KV_HEADS * 2 * block_size // 16, 0)
        contexts = (1, 15, 16, 17, 31, 33, pair.num_slots - 1, pair.num_slots)
        pair.assert_attention_is_equal([(context, 1) for context in contexts])
        pair.assert_attention_is_equal([(context, min(context, 19)) for context in contexts[1:]])
    finally:
        torch.set_num_threads(before)
    assert not pair.compressed.pool[0].any()
    assert not torch.equal(pair.compressed.pool.view(torch.int16), pair.plain.pool.view(torch.int16))
    pair.restore()
    pair.assert_bits_are_equal()


def test_a_block_is_plain_until_its_last_token_is_there_and_again_when_it_is_begun_anew(kernels: NativeKernels) -> None:
    pair = Pair(kernels, 3, 16, 64)
    for first in (0, 16, 16):
        for slot in range(first, first + 15):
            pair.write(torch.tensor([slot]))
            assert pair.bases(first // 16).eq(PLAIN).all()
        pair.write(torch.tensor([first + 15]))
        assert pair.bases(first // 16).ne(PLAIN).all()
        assert pair.bases(2).eq(PLAIN).all()
    pair.write(torch.arange(32, 40))
    assert pair.bases(2).eq(PLAIN).all()
    pair.assert_attention_is_equal([(8, 1), (8, 7)])
    pair.write(torch.arange(40, 48))
    pair.assert_attention_is_equal([(48, 1), (40, 7)])


def test_tokens_written_again_to_a_full_block_replace_the_former_ones(kernels: NativeKernels) -> None:
    pair = Pair(kernels, 2, 16, 64)
    pair.write(torch.arange(32))
    pair.qkv[10:16] = torch.randn(pair.qkv[10:16].shape).to(torch.bfloat16)
    pair.write(torch.arange(10, 16))  # as when a step is repeated
    assert pair.bases(0).ne(PLAIN).all()
    pair.assert_attention_is_equal([(32, 1), (32, 2)])
    pair.restore()
    pair.assert_bits_are_equal()


def tiny(count: int) -> Callable[[Tensor], None]:
    """Makes so many numbers of each head's values far smaller than the others."""

    def change(values: Tensor) -> None:
        places = torch.randperm(values.shape[0] * values.shape[2])[:count]
        for head in range(KV_HEADS):
            values[places % 16, head, places // 16] *= 2.0**-40

    return change


def spread(values: Tensor) -> None:
    exponents = torch.arange(values.numel()).view(values.shape) % 200 - 100
    values.copy_(torch.randn(values.shape) * 2.0**exponents)


def huge_and_small(values: Tensor) -> None:
    values[0] = 3e38
    values[1:] = 1e-38


def special(values: Tensor) -> None:
    values[3, :, :4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])


def denormal(values: Tensor) -> None:
    values.copy_(torch.full(values.shape, 1e-39))
    values[::2] *= -1


def every_bit(values: Tensor) -> None:
    values.view(torch.int16).copy_(torch.randint(-(2**15), 2**15, values.shape))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("change", "is_whole"),
    [
        (tiny(0), False),
        (tiny(1), False),
        (tiny(MOST_EXCEPTIONS), False),
        (tiny(MOST_EXCEPTIONS + 1), True),
        (Tensor.zero_, False),
        (denormal, False),
        (spread, True),
        (huge_and_small, True),
        (special, True),
        (every_bit, True),
    ],
)
def test_values_of_any_kind_come_back_to_the_last_bit(
    kernels: NativeKernels, dim: int, change: Callable[[Tensor], None], is_whole: bool
) -> None:
    torch.manual_seed(1)
    pair = Pair(kernels, 3, 16, dim)
    values = pair.values[16:32]
    values[values.abs() < 0.01] = 0.01
    change(values)
    pair.write(torch.arange(pair.num_slots))
    assert pair.bases(1)[:, 1].eq(WHOLE).all() == is_whole
    assert pair.bases(1)[:, 0].ne(WHOLE).all()
    assert pair.compressed.count_tiles() == (3 * KV_HEADS * 2 - KV_HEADS * is_whole, KV_HEADS * is_whole)
    pair.assert_attention_is_equal([(48, 1), (40, 1), (48, 5)])
    pair.restore()
    pair.assert_bits_are_equal()


def test_a_compressed_cache_is_for_its_kernels_alone(kernels: NativeKernels) -> None:
    cache = KVCache(1, 2, 16, 1, 64, torch.bfloat16, "cpu", compress=True)
    k = torch.zeros(1, 1, 64)
    with pytest.raises(AssertionError, match="compressed"):
        cache.pages(0)
    with pytest.raises(AssertionError, match="compressed"):
        cache.gather(0, torch.arange(2))
    with pytest.raises(AssertionError, match="compressed"):
        cache.write(0, torch.tensor([0]), k, k)


def test_what_can_be_compressed(kernels: NativeKernels) -> None:
    assert kernels.can_compress(torch.bfloat16, 16, 8, 128, 16)
    assert kernels.can_compress(torch.bfloat16, 8, 4, 64, 128)  # blocks of 128 KiB
    assert not kernels.can_compress(torch.bfloat16, 8, 4, 64, 144)
    assert not kernels.can_compress(torch.bfloat16, 17, 1, 64, 16)
    assert not kernels.can_compress(torch.bfloat16, 8, 4, 80, 16)
    assert not kernels.can_compress(torch.bfloat16, 8, 4, 64, 24)
    assert not kernels.can_compress(torch.float32, 8, 4, 64, 16)
