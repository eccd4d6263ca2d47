// What attention of many queries needs in the services' kernels for processors with AMX: products of 32 queries with 64
// keys and their values in tiles, and softmax in float32 as scores pass.
//
// Scores, weights and sums have one query a column, so that a query's softmax never leaves its lane. What multiplies the
// values is rounded to bfloat16. NaN stays NaN. Knows nothing of where keys and values come from.

#pragma once

#include "amx.h"

#ifdef TANDEM_AMX
#include <cmath>
#include <cstring>

namespace tandem {

constexpr int kQueries = 2 * kTile;  // at once
constexpr int kKeys = 64;            // at once, so that all of a block stays in the first-level cache
constexpr int kMaxHeadDim = 128;
constexpr float kMaxExcess = 8.0f;  // powers of two by which a score may exceed what weights are relative to

// What one thread needs for one block of queries.
struct QueryBlock {
    alignas(64) bf16 queries[kQueries * kMaxHeadDim];
    alignas(64) float scores[2][kKeys * kQueries];
    alignas(64) bf16 weights[kKeys * kQueries];
    alignas(64) float sums[kMaxHeadDim * kQueries];
    alignas(64) float relative_to[kQueries];
    alignas(64) float total[kQueries];
};

// Takes 16 numbers of 16 bits of the one half and 16 of the other by turns.
alignas(64) constexpr uint16_t kInPairs[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                               8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

// The lowest `count` bits, of 0 to 32.
AMX inline __mmask32 lowest(int64_t count) {
    return count >= 32 ? ~__mmask32{0} : count <= 0 ? 0 : (__mmask32{1} << count) - 1;
}

// Swaps rows and columns of 16 x 16 numbers of 32 bits.
AMX inline void transpose(__m512i (&rows)[16]) {
    __m512i pairs[16], fours[16];
UNROLLED
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
UNROLLED
    for (int i = 0; i < 16; i += 4)
UNROLLED
        for (int j = 0; j < 2; ++j) {
            fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + 2 + j]);
            fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + 2 + j]);
        }
UNROLLED
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

// Forgets what was summed up.
AMX inline void begin_queries(QueryBlock &b, int dim) {
    memset(b.sums, 0, dim * kQueries * sizeof(float));
    for (int i = 0; i < kQueries; ++i) {
        b.relative_to[i] = -INFINITY;
        b.total[i] = 0.0f;
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

// scores[32 keys, 32 queries] = keys[32, dim] . queries[dim, 32]; the keys are two tiles of rows of `dim` numbers.
AMX inline void multiply_keys(const bf16 *queries, const bf16 *upper, const bf16 *lower, int dim, float *scores) {
    const bf16 *right = queries + kTile * dim;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int i = 0; i < dim; i += kDepth)
        accumulate(upper + i, lower + i, dim, queries + i * kTile, right + i * kTile);
    store_accumulators(scores);
}

// sums[dim, 32 queries] += values[dim, count] . weights[count, 32]; values are tiles of 16 of a head's numbers, each a
// row of 32 keys.
AMX inline void multiply_values(QueryBlock &b, const bf16 *values, int64_t count, int dim) {
    for (int start = 0; start < dim; start += kDepth) {
        load_accumulators(b.sums + start * kQueries);
        for (int64_t first = 0; first < count; first += kDepth) {
            const bf16 *upper = values + (first * dim + start * kDepth), *left = b.weights + first * kTile;
            accumulate(upper, upper + kTileNumbers, kDepth, left, left + kKeys * kTile);
        }
        store_accumulators(b.sums + start * kQueries);
    }
}

// 2^x for x up to 126, to 8e-5 of it, which rounding to bfloat16 exceeds; below -126 as good as 0; NaN stays.
AMX inline __m512 rough_power_of_two(__m512 x) {
    const __m512 magic = _mm512_set1_ps(12582912.0f);  // 1.5 * 2^23: the sum's last bits are x, rounded
    x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);     // the second operand is taken when one is NaN
    const __m512 shifted = _mm512_add_ps(x, magic);
    const __m512 rest = _mm512_sub_ps(x, _mm512_sub_ps(shifted, magic));
    __m512 p = _mm512_set1_ps(5.517166493e-2f);
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(2.426111219e-1f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(6.932609862e-1f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(9.999280736e-1f));
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent));
}

// Keeps weights within bounds: `relative_to` follows the largest score, and what was summed up is scaled to it.
AMX inline void follow_largest(QueryBlock &b, const float *scores, int64_t count, int dim, float scale) {
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
        const __m512 shrink = rough_power_of_two(_mm512_sub_ps(before, after));
        _mm512_store_ps(b.relative_to + half, after);
        _mm512_store_ps(b.total + half, _mm512_mul_ps(_mm512_load_ps(b.total + half), shrink));
        for (int i = 0; i < dim; ++i) {
            float *sums = b.sums + i * kQueries + half;
            _mm512_store_ps(sums, _mm512_mul_ps(_mm512_load_ps(sums), shrink));
        }
    }
}

// Scores of 32 keys to weights, in tiles whose rows are pairs of keys.
AMX inline void weigh(QueryBlock &b, const float *scores, bf16 *weights, float scale) {
    const __m512i in_pairs = _mm512_load_si512(kInPairs);
    const __m512 factor = _mm512_set1_ps(scale);
    for (int half = 0; half < kQueries; half += kTile) {
        const __m512 relative_to = _mm512_load_ps(b.relative_to + half);
        __m512 total = _mm512_load_ps(b.total + half);
        bf16 *tile = weights + half * kKeys;
#pragma GCC unroll 4
        for (int key = 0; key < kDepth; key += 2) {
            const float *pair = scores + key * kQueries + half;
            const __m512 even = rough_power_of_two(_mm512_fmsub_ps(_mm512_load_ps(pair), factor, relative_to));
            const __m512 odd = rough_power_of_two(_mm512_fmsub_ps(_mm512_load_ps(pair + kQueries), factor, relative_to));
            total = _mm512_add_ps(total, _mm512_add_ps(even, odd));
            const __m512bh both = _mm512_cvtne2ps_pbh(odd, even);
            _mm512_store_si512(tile + key * kTile, _mm512_permutexvar_epi16(in_pairs, (__m512i)both));
        }
        _mm512_store_ps(b.total + half, total);
    }
}

// The results of 16 queries of a half, 16 of their numbers from `start` on: lines[i] has those of query i, in float32.
AMX inline void results(const QueryBlock &b, int half, int start, __m512i (&lines)[16]) {
    const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(b.total + half));
UNROLLED
    for (int i = 0; i < kTile; ++i) {
        const __m512 sums = _mm512_load_ps(b.sums + (start + i) * kQueries + half);
        lines[i] = _mm512_castps_si512(_mm512_mul_ps(sums, inverse));
    }
    transpose(lines);
}

}  // namespace tandem
#endif
