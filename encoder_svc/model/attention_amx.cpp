// Attention within segments in bfloat16, for processors with AMX: matrix products in tiles, scores that never leave the
// core's cache, and softmax in float32 as they pass.
//
// Optional: `attention_native.py` calls this through ctypes where it was built and the processor has AMX. Knows no
// Python and no torch: pointers, sizes and strides only, all checked by the caller. Scores, sums and results are
// accumulated in float32; what multiplies the values is rounded to bfloat16. NaN stays NaN.

#include "amx_vectors.h"

#ifdef TANDEM_AMX
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>

using namespace tandem;

namespace {

constexpr int kQueries = 2 * kTile;  // at once
constexpr int kKeys = 64;            // at once, so that all of a block stays in the first-level cache
constexpr int kMaxHeadDim = 128;
constexpr float kMaxExcess = 8.0f;   // powers of two by which a score may exceed what weights are relative to

// Takes 16 numbers of 16 bits of the one half and 16 of the other by turns.
alignas(64) constexpr uint16_t kInPairs[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                               8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

// Where q, k and v of one head and one segment begin; the distance of two patches is `stride` numbers.
struct Segment {
    const bf16 *q, *k, *v;
    bf16 *out;
    int64_t stride, out_stride, length;
    int head_dim;
    float scale;  // of the scores, for powers of two
};

// What one thread needs for one block of queries. Scores, weights and sums have one query a column.
struct Block {
    alignas(64) bf16 queries[kQueries * kMaxHeadDim];
    alignas(64) float scores[2][kKeys * kQueries];
    alignas(64) bf16 weights[kKeys * kQueries];
    alignas(64) float sums[kMaxHeadDim * kQueries];
    alignas(64) float relative_to[kQueries];
    alignas(64) float total[kQueries];
};

int64_t round_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

AMX void configure_tiles() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, kTile, 64);
    config.load();
}

// Swaps rows and columns of 16 x 16 numbers of 32 bits.
AMX inline void transpose(__m512i (&rows)[16]) {
    __m512i pairs[16], fours[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + 2 + j]);
            fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + 2 + j]);
        }
    for (int i = 0; i < 4; ++i) {
        const __m512i a = _mm512_shuffle_i32x4(fours[i], fours[4 + i], 0x88);
        const __m512i b = _mm512_shuffle_i32x4(fours[8 + i], fours[12 + i], 0x88);
        const __m512i c = _mm512_shuffle_i32x4(fours[i], fours[4 + i], 0xdd);
        const __m512i d = _mm512_shuffle_i32x4(fours[8 + i], fours[12 + i], 0xdd);
        rows[i] = _mm512_shuffle_i32x4(a, b, 0x88);
        rows[4 + i] = _mm512_shuffle_i32x4(c, d, 0x88);
        rows[8 + i] = _mm512_shuffle_i32x4(a, b, 0xdd);
        rows[12 + i] = _mm512_shuffle_i32x4(c, d, 0xdd);
    }
}

// Keys as the left-hand side of scores: their rows, with zeros where the head or the segment ends.
AMX void pack_keys(const Segment &s, bf16 *packed, int64_t padded_keys, int padded_dim) {
    for (int64_t key = 0; key < padded_keys; ++key)
        for (int start = 0; start < padded_dim; start += kDepth, packed += kDepth) {
            const __mmask32 mask = key < s.length ? lowest(s.head_dim - start) : 0;
            _mm512_store_si512(packed, _mm512_maskz_loadu_epi16(mask, s.k + key * s.stride + start));
        }
}

// Values as the left-hand side of results: tiles of 16 of a head's numbers, each a row of 32 keys.
AMX void pack_values(const Segment &s, bf16 *packed, int64_t padded_keys, int padded_dim) {
    for (int64_t first = 0; first < padded_keys; first += kDepth)
        for (int start = 0; start < padded_dim; start += kTile, packed += kTileNumbers) {
            __m512i rows[16];
            for (int pair = 0; pair < 16; ++pair) {
                __m512i two[2];
                for (int i = 0; i < 2; ++i) {
                    const int64_t key = first + 2 * pair + i;
                    const __mmask16 mask = key < s.length ? lowest(s.head_dim - start) : 0;
                    two[i] = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, s.v + key * s.stride + start));
                }
                rows[pair] = _mm512_or_si512(two[0], _mm512_slli_epi32(two[1], 16));
            }
            transpose(rows);
            for (int i = 0; i < 16; ++i) _mm512_store_si512(packed + i * kDepth, rows[i]);
        }
}

// Queries [first, first + rows) as the right-hand side of scores: tiles of 16 queries, whose rows are pairs of numbers.
AMX void pack_queries(const Segment &s, bf16 *packed, int64_t first, int64_t rows, int padded_dim) {
    for (int64_t tile = 0; tile < kQueries; tile += kTile)
        for (int start = 0; start < padded_dim; start += kDepth, packed += kTileNumbers) {
            __m512i lines[16];
            for (int i = 0; i < kTile; ++i) {
                const __mmask32 mask = tile + i < rows ? lowest(s.head_dim - start) : 0;
                lines[i] = _mm512_maskz_loadu_epi16(mask, s.q + (first + tile + i) * s.stride + start);
            }
            transpose(lines);
            for (int i = 0; i < kTile; ++i) _mm512_store_si512(packed + i * kDepth, lines[i]);
        }
}

// Tiles 0 to 3 hold 32 rows of 32 queries.
AMX inline void load_accumulators(const float *numbers) {
    _tile_loadd(0, numbers, kQueries * 4);
    _tile_loadd(1, numbers + kTile, kQueries * 4);
    _tile_loadd(2, numbers + kTile * kQueries, kQueries * 4);
    _tile_loadd(3, numbers + kTile * kQueries + kTile, kQueries * 4);
}

AMX inline void store_accumulators(float *numbers) {
    _tile_stored(0, numbers, kQueries * 4);
    _tile_stored(1, numbers + kTile, kQueries * 4);
    _tile_stored(2, numbers + kTile * kQueries, kQueries * 4);
    _tile_stored(3, numbers + kTile * kQueries + kTile, kQueries * 4);
}

// Adds rows [32, 32 numbers] . columns [32 numbers, 32 queries], each of two tiles; a tile's rows are `stride` apart.
AMX inline void accumulate(const bf16 *upper, const bf16 *lower, int stride, const bf16 *left, const bf16 *right) {
    _tile_loadd(4, upper, stride * 2);
    _tile_loadd(5, lower, stride * 2);
    _tile_loadd(6, left, 64);
    _tile_loadd(7, right, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

// scores[32 keys, 32 queries] = keys[32, dim] . queries[dim, 32]
AMX inline void multiply_keys(const bf16 *queries, const bf16 *keys, int padded_dim, float *scores) {
    const bf16 *lower = keys + kTile * padded_dim, *right = queries + kTile * padded_dim;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int i = 0; i < padded_dim; i += kDepth)
        accumulate(keys + i, lower + i, padded_dim, queries + i * kTile, right + i * kTile);
    store_accumulators(scores);
}

// sums[dim, 32 queries] += values[dim, count] . weights[count, 32]
AMX inline void multiply_values(Block &b, const bf16 *values, int64_t count, int padded_dim) {
    for (int start = 0; start < padded_dim; start += kDepth) {
        load_accumulators(b.sums + start * kQueries);
        for (int64_t first = 0; first < count; first += kDepth) {
            const bf16 *upper = values + (first * padded_dim + start * kDepth), *left = b.weights + first * kTile;
            accumulate(upper, upper + kTileNumbers, kDepth, left, left + kKeys * kTile);
        }
        store_accumulators(b.sums + start * kQueries);
    }
}

// Keeps weights within bounds: `relative_to` follows the largest score, and what was summed up is scaled to it.
AMX inline void follow_largest(Block &b, const float *scores, int64_t count, int padded_dim, float scale) {
    for (int half = 0; half < kQueries; half += kTile) {
        __m512 most = _mm512_load_ps(scores + half), other = _mm512_load_ps(scores + kQueries + half);
        for (int64_t key = 2; key < count; key += 2) {
            most = _mm512_max_ps(most, _mm512_load_ps(scores + key * kQueries + half));
            other = _mm512_max_ps(other, _mm512_load_ps(scores + (key + 1) * kQueries + half));
        }
        most = _mm512_mul_ps(_mm512_max_ps(most, other), _mm512_set1_ps(scale));
        const __m512 before = _mm512_load_ps(b.relative_to + half);
        const __m512 bound = _mm512_add_ps(before, _mm512_set1_ps(kMaxExcess));
        if (!_mm512_cmp_ps_mask(most, bound, _CMP_GT_OQ)) continue;
        const __m512 after = _mm512_max_ps(most, before);  // `before` where `most` is NaN
        const __m512 shrink = power_of_two(_mm512_sub_ps(before, after));
        _mm512_store_ps(b.relative_to + half, after);
        _mm512_store_ps(b.total + half, _mm512_mul_ps(_mm512_load_ps(b.total + half), shrink));
        for (int i = 0; i < padded_dim; ++i) {
            float *sums = b.sums + i * kQueries + half;
            _mm512_store_ps(sums, _mm512_mul_ps(_mm512_load_ps(sums), shrink));
        }
    }
}

// Scores of 32 keys to weights, in tiles whose rows are pairs of keys.
AMX inline void weigh(Block &b, const float *scores, bf16 *weights, float scale) {
    const __m512i in_pairs = _mm512_load_si512(kInPairs);
    const __m512 factor = _mm512_set1_ps(scale);
    for (int half = 0; half < kQueries; half += kTile) {
        const __m512 relative_to = _mm512_load_ps(b.relative_to + half);
        __m512 total = _mm512_load_ps(b.total + half);
        bf16 *tile = weights + half * kKeys;
#pragma GCC unroll 4
        for (int key = 0; key < kDepth; key += 2) {
            const float *pair = scores + key * kQueries + half;
            const __m512 even = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(pair), factor, relative_to));
            const __m512 odd = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(pair + kQueries), factor, relative_to));
            total = _mm512_add_ps(total, _mm512_add_ps(even, odd));
            const __m512bh both = _mm512_cvtne2ps_pbh(odd, even);
            _mm512_store_si512(tile + key * kTile, _mm512_permutexvar_epi16(in_pairs, (__m512i)both));
        }
        _mm512_store_ps(b.total + half, total);
    }
}

AMX void store_results(const Segment &s, const Block &b, int64_t first, int64_t rows, int padded_dim) {
    for (int half = 0; half < kQueries; half += kTile) {
        const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(b.total + half));
        for (int start = 0; start < padded_dim; start += kTile) {
            __m512i lines[16];
            for (int i = 0; i < kTile; ++i) {
                const __m512 sums = _mm512_load_ps(b.sums + (start + i) * kQueries + half);
                lines[i] = _mm512_castps_si512(_mm512_mul_ps(sums, inverse));
            }
            transpose(lines);
            const __mmask16 mask = lowest(s.head_dim - start);
            for (int i = 0; i < kTile && half + i < rows; ++i) {
                const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_castsi512_ps(lines[i]));
                _mm256_mask_storeu_epi16(s.out + (first + half + i) * s.out_stride + start, mask, (__m256i)rounded);
            }
        }
    }
}

// Queries [first, end) of one head and segment. The scores of the next keys are computed as these keys are weighed: the
// one is work of the tiles, the other of the vector units.
AMX void attend_queries(const Segment &s, int64_t first, int64_t end, Block &b, const bf16 *keys, const bf16 *values) {
    const int dim = static_cast<int>(round_up(s.head_dim, kDepth));
    const int64_t padded_keys = round_up(s.length, kDepth);
    for (; first < end; first += kQueries) {
        const int64_t rows = std::min<int64_t>(kQueries, end - first);
        pack_queries(s, b.queries, first, rows, dim);
        memset(b.sums, 0, dim * kQueries * sizeof(float));
        std::fill(b.relative_to, b.relative_to + kQueries, -INFINITY);
        std::fill(b.total, b.total + kQueries, 0.0f);
        for (int64_t i = 0; i < std::min<int64_t>(kKeys, padded_keys); i += kDepth)
            multiply_keys(b.queries, keys + i * dim, dim, b.scores[0] + i * kQueries);
        for (int64_t key = 0; key < padded_keys; key += kKeys) {
            const int64_t count = std::min<int64_t>(kKeys, padded_keys - key);
            float *scores = b.scores[key / kKeys % 2], *next = b.scores[1 - key / kKeys % 2];
            for (int64_t i = std::max<int64_t>(0, s.length - key); i < count; ++i)
                std::fill(scores + i * kQueries, scores + (i + 1) * kQueries, -INFINITY);
            follow_largest(b, scores, count, dim, s.scale);
            for (int64_t i = 0; i < count; i += kDepth) {
                if (key + kKeys + i < padded_keys)
                    multiply_keys(b.queries, keys + (key + kKeys + i) * dim, dim, next + i * kQueries);
                weigh(b, scores + i * kQueries, b.weights + i * kTile, s.scale);
            }
            multiply_values(b, values + key * dim, count, dim);
        }
        store_results(s, b, first, rows, dim);
    }
}

// One part of one head and segment, with its own copy of keys and values in tiles.
AMX bool attend_part(const Segment &s, int64_t first, int64_t end) {
    const int dim = static_cast<int>(round_up(s.head_dim, kDepth));
    const int64_t padded_keys = round_up(s.length, kDepth), size = padded_keys * dim;
    // Tiles that cross no line of the cache.
    std::unique_ptr<bf16[], decltype(&free)> packed(
        static_cast<bf16 *>(aligned_alloc(64, 2 * size * sizeof(bf16))), &free);
    std::unique_ptr<Block> block(new (std::nothrow) Block);
    if (!packed || !block) return false;
    pack_keys(s, packed.get(), padded_keys, dim);
    pack_values(s, packed.get() + size, padded_keys, dim);
    configure_tiles();
    attend_queries(s, first, end, *block, packed.get(), packed.get() + size);
    _tile_release();
    return true;
}

}  // namespace

extern "C" {

// Attention of all segments and heads. `stride` and `head_stride` are of q, k and v alike; `out` is [P, heads, head_dim].
// 0 when all is well, 1 when there was no memory.
int tandem_attend_segments(const void *q, const void *k, const void *v, void *out, int64_t stride, int64_t head_stride,
                           const int64_t *starts, const int64_t *lengths, int64_t num_segments, int heads, int head_dim,
                           float scale, int threads) {
    // As many parts of each head and segment as keep all threads busy, of at least 256 queries: each packs all keys.
    const int64_t whole = num_segments * heads;
    const int64_t wanted = threads == 1 ? 1 : (4 * threads + whole - 1) / whole;
    int failed = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1) reduction(| : failed)
    for (int64_t unit = 0; unit < whole * wanted; ++unit) {
        const int64_t part = unit % wanted, head = unit / wanted % heads, segment = unit / wanted / heads;
        const int64_t length = lengths[segment], start = starts[segment];
        const int64_t step = std::max<int64_t>(256, round_up((length + wanted - 1) / wanted, kQueries));
        if (part * step >= length) continue;
        const int64_t offset = start * stride + head * head_stride;
        const int64_t out_stride = static_cast<int64_t>(heads) * head_dim;
        const Segment s = {static_cast<const bf16 *>(q) + offset,
                           static_cast<const bf16 *>(k) + offset,
                           static_cast<const bf16 *>(v) + offset,
                           static_cast<bf16 *>(out) + start * out_stride + head * head_dim,
                           stride,
                           out_stride,
                           length,
                           head_dim,
                           scale * 1.44269504f};
        failed |= !attend_part(s, part * step, std::min(length, (part + 1) * step));
    }
    return failed;
}
}

#endif
