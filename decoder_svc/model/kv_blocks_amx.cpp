// New keys and values to a KV cache whose full blocks are compressed, as `kv_blocks_amx.h` says.
//
// Optional: `kernels.py` calls this through ctypes where it was built and the processor has AMX. Knows no Python and no
// torch: pointers and sizes only, all checked by the caller. A block is compressed when its last token is written; one
// that is written again, as when a step that failed is repeated, becomes plain first.

#include "kernels.h"
#include "kv_blocks_amx.h"

#ifdef TANDEM_AMX
#include <algorithm>

using namespace tandem;

namespace {

constexpr int64_t kMaxBlock = 128 << 10;  // bytes of a block; what is compressed in place needs a quarter beside it

// What lies behind the slots of a block.
struct Rests {
    uint8_t bytes[kMaxBlock / 4];
};

AMX inline int most_of(__m512i bytes) {
    alignas(64) uint8_t all[64];
    _mm512_store_si512(all, bytes);
    return *std::max_element(all, all + 64);
}

// Lower and upper bytes of a tile's numbers, 64 by 64.
template <int DIM>
struct Bytes {
    static constexpr int kCount = 2 * KvTile<DIM>::kParts;
    __m512i lower[kCount], upper[kCount];

    AMX explicit Bytes(const bf16 *numbers) {
        for (int i = 0; i < kCount; ++i) split(numbers + 64 * i, lower[i], upper[i]);
    }

    AMX __m512i exponents(int i) const { return _mm512_and_si512(upper[i], _mm512_set1_epi8(127)); }

    // The base from which most numbers are told: the largest exponents are the last ones that half a byte reaches.
    AMX int base() const {
        __m512i most = _mm512_setzero_si512();
        for (int i = 0; i < kCount; ++i) most = _mm512_max_epu8(most, exponents(i));
        return std::max(most_of(most) - kExponents + 1, 0);
    }

    // The numbers below a base. False when they are too many.
    AMX bool find_exceptions(const bf16 *numbers, int base, Exceptions &found) const {
        for (int i = 0; i < kCount; ++i) {
            uint64_t below = _mm512_cmplt_epu8_mask(exponents(i), _mm512_set1_epi8((char)base));
            for (; below; below &= below - 1) {
                if (found.count == Exceptions::kMost) return false;
                // `split` takes 8 numbers of the first 32 and of the second in turn.
                const int byte = __builtin_ctzll(below), place = 64 * i + byte / 16 * 8 + byte % 8 + (byte & 8) * 4;
                found.numbers[found.count++] = {(uint16_t)place, (uint16_t)(numbers[place] >> 8)};
            }
        }
        return true;
    }

    // Halves of 64 numbers: a sign, and a distance from the base.
    AMX __m512i halves(int i, int base) const {
        const __m512i distance = _mm512_sub_epi8(exponents(i), _mm512_set1_epi8((char)base));
        return _mm512_or_si512(_mm512_and_si512(distance, _mm512_set1_epi8(kExponents - 1)),
                               _mm512_and_si512(_mm512_srli_epi16(upper[i], 4), _mm512_set1_epi8(kExponents)));
    }
};

// A tile to its slot, and to `rest` what that has no room for. Returns what its base becomes.
template <int DIM>
AMX uint8_t compress_tile(const bf16 *numbers, uint8_t *slot, uint8_t *rest) {
    using Tile = KvTile<DIM>;
    const Bytes<DIM> bytes(numbers);
    const int base = bytes.base();
    Exceptions exceptions;
    if (!bytes.find_exceptions(numbers, base, exceptions)) {
        memcpy(slot, numbers, Tile::kSlot);
        memcpy(rest, numbers + Tile::kSlot / sizeof(bf16), Tile::kRest);
        return kWhole;
    }
    for (int part = 0; part < Tile::kParts; ++part) {
        const int i = 2 * part;
        _mm512_storeu_si512(slot + 128 * part, bytes.lower[i]);
        _mm512_storeu_si512(slot + 128 * part + 64, bytes.lower[i + 1]);
        _mm512_storeu_si512(slot + Tile::kNumbers + 64 * part,
                            _mm512_or_si512(bytes.halves(i, base), _mm512_slli_epi16(bytes.halves(i + 1, base), 4)));
    }
    if (!exceptions.count) return (uint8_t)base;
    memcpy(rest, &exceptions, sizeof exceptions);
    return (uint8_t)(base + kPatched);
}

// A plain block, in its place. Slots lie before the tiles that they are made of.
template <int DIM>
AMX void compress_block(uint8_t *block, uint8_t *bases, int64_t count) {
    using Tile = KvTile<DIM>;
    Rests rests;
    alignas(64) bf16 numbers[Tile::kNumbers];
    for (int64_t i = 0; i < count; ++i) {
        memcpy(numbers, block + i * sizeof numbers, sizeof numbers);
        bases[i] = compress_tile<DIM>(numbers, block + i * Tile::kSlot, rests.bytes + i * Tile::kRest);
    }
    for (int64_t i = 0; i < count; ++i) {
        const int64_t used = bases[i] == kWhole ? Tile::kRest : bases[i] < kPatched ? 0 : sizeof(Exceptions);
        memcpy(block + count * Tile::kSlot + i * Tile::kRest, rests.bytes + i * Tile::kRest, used);
    }
}

// A compressed block, in its place, as it was.
template <int DIM>
AMX void restore_block(uint8_t *block, uint8_t *bases, int64_t count) {
    using Tile = KvTile<DIM>;
    Rests rests;
    alignas(64) bf16 numbers[Tile::kNumbers];
    memcpy(rests.bytes, block + count * Tile::kSlot, count * Tile::kRest);
    for (int64_t i = count - 1; i >= 0; --i) {
        const Tile tile = {block + i * Tile::kSlot, rests.bytes + i * Tile::kRest, bases[i]};
        memcpy(block + i * sizeof numbers, tile.plain(numbers, tile), sizeof numbers);
        bases[i] = kPlain;
    }
}

}  // namespace

extern "C" {

// The largest block that can be compressed, in bytes.
int64_t tandem_max_compressed_block() { return kMaxBlock; }

// As `tandem_store_heads` of `kernels.cpp`, in bfloat16 alone, to a pool of such blocks and their bases
// [blocks, kv_heads, 2, block_size / 16]: heads of 64 or 128 numbers, blocks of a multiple of 16 tokens, written in order.
void tandem_store_heads_compressed(const void *qkv, const void *q_weight, const void *k_weight, const float *cos,
                                   const float *sin, const int64_t *slots, void *q_out, void *pool, uint8_t *bases,
                                   int64_t rows, int64_t num_heads, int64_t num_kv_heads, int64_t dim,
                                   int64_t block_size, float eps, int threads) {
    const int64_t count = num_kv_heads * 2 * block_size / kTile, bytes = count * kTile * dim * sizeof(bf16);
    const auto change = [&](int64_t slot, bool compress) {
        uint8_t *block = static_cast<uint8_t *>(pool) + slot / block_size * bytes;
        uint8_t *own = bases + slot / block_size * count;
        if ((*own == kPlain) != compress) return;
        if (dim == 64)
            compress ? compress_block<64>(block, own, count) : restore_block<64>(block, own, count);
        else
            compress ? compress_block<128>(block, own, count) : restore_block<128>(block, own, count);
    };
    for (int64_t row = 0; row < rows; ++row) {
        if (slots[row] % block_size == 0)
            memset(bases + slots[row] / block_size * count, kPlain, count);  // begun anew
        else
            change(slots[row], false);
    }
    tandem_store_heads(1, qkv, q_weight, k_weight, cos, sin, slots, q_out, pool, rows, num_heads, num_kv_heads, dim,
                       block_size, eps, threads);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows >= 2 * block_size)
    for (int64_t row = 0; row < rows; ++row)
        if (slots[row] % block_size == block_size - 1) change(slots[row], true);
}
}

#endif
