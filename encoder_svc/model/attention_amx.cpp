// Attention within segments in bfloat16, for processors with AMX: matrix products in tiles, scores that never leave the
// core's cache, and softmax as they pass.
//
// Optional: `attention_native.py` calls this through ctypes where it was built and the processor has AMX. Knows no
// Python and no torch: pointers, sizes and strides only, all checked by the caller. Scores, sums and results are
// accumulated in float32; what multiplies the values is rounded to bfloat16. NaN stays NaN, and what meets a
// query or key beyond 2^44 becomes NaN, so that no score in between can overflow.

#include "amx_vectors.h"

#ifdef TANDEM_AMX
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>

using namespace tandem;

namespace {

constexpr int kUnsound = (127 + 44) << 7;  // bits of 2^44

// Where q, k and v of one head and one segment begin; the distance of two patches is `stride` numbers.
struct Segment {
    const bf16 *q, *k, *v;
    bf16 *out;
    int64_t stride, out_stride, length;
    int head_dim;
    float scale;  // of the scores, for powers of two
};

int64_t round_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

AMX void configure_tiles() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, kTile, 64);
    config.load();
}

// Which of 32 numbers are NaN or beyond 2^44.
AMX inline __mmask32 unsound(__m512i numbers) {
    const __m512i bits = _mm512_and_si512(numbers, _mm512_set1_epi16(0x7fff));
    return _mm512_cmpge_epu16_mask(bits, _mm512_set1_epi16(static_cast<int16_t>(kUnsound)));
}

// Keys as the left-hand side of scores: their rows, with zeros where the head or the segment ends. Whether all are
// sound.
AMX bool pack_keys(const Segment &s, bf16 *packed, int64_t padded_keys, int padded_dim) {
    __mmask32 found = 0;
    for (int64_t key = 0; key < padded_keys; ++key)
        for (int start = 0; start < padded_dim; start += kDepth, packed += kDepth) {
            const __mmask32 mask = key < s.length ? lowest(s.head_dim - start) : 0;
            const __m512i line = _mm512_maskz_loadu_epi16(mask, s.k + key * s.stride + start);
            found |= unsound(line);
            _mm512_store_si512(packed, line);
        }
    return !found;
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
// The total of a query that is not sound begins as NaN.
AMX void pack_queries(const Segment &s, QueryBlock &b, int64_t first, int64_t rows, int padded_dim) {
    bf16 *packed = b.queries;
    for (int64_t tile = 0; tile < kQueries; tile += kTile)
        for (int start = 0; start < padded_dim; start += kDepth, packed += kTileNumbers) {
            __m512i lines[16];
            for (int i = 0; i < kTile; ++i) {
                const __mmask32 mask = tile + i < rows ? lowest(s.head_dim - start) : 0;
                lines[i] = _mm512_maskz_loadu_epi16(mask, s.q + (first + tile + i) * s.stride + start);
                if (unsound(lines[i])) b.total[tile + i] = NAN;
            }
            transpose(lines);
            for (int i = 0; i < kTile; ++i) _mm512_store_si512(packed + i * kDepth, lines[i]);
        }
}

// Scores of 32 keys to weights, in tiles whose rows are pairs of keys: powers of two of what a score exceeds
// `relative_to` by, in numbers of 16 bits, two keys of a query side by side, since bfloat16 holds no more.
//
// An exponent in fixed point is nearly the power's bfloat16 number by its bits: for a fraction f they say 1 + f where
// 2^f is meant. A polynomial in t = 2f - 1 makes up for it, with the rms error of rounding to bfloat16, 0.17 %.
// Exponents below -32 count as -32.
AMX inline void weigh_two(QueryBlock &b, const float *scores, bf16 *weights, float scale) {
    constexpr float kUnit = 1024.0f, kUpper = 65536.0f;  // of an exponent; of what stands in the upper half of 32 bits
    constexpr float kMagic = 12582912.0f;                // 1.5 * 2^23: a sum's lower half is the number added, rounded
    constexpr int16_t kOne = 127 * 128 - 75;             // bits of 1; 600 / 8 are in the exponents, and not meant
    const __m512 even_factor = _mm512_set1_ps(scale * kUnit * kUpper), odd_factor = _mm512_set1_ps(scale * kUnit);
    const __m512 least = _mm512_set1_ps(kMagic - 32768.0f);
    const __m512i cubic = _mm512_set1_epi16(10), square = _mm512_set1_epi16(87), linear = _mm512_set1_epi16(-10);
    const __m512i eighth = _mm512_set1_epi16(4096), one = _mm512_set1_epi16(kOne);
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (int half = 0; half < kQueries; half += kTile) {
        // 512 more, so that the lowest ten bits are t.
        const __m512 relative_to = _mm512_load_ps(b.relative_to + half);
        const __m512 offset = _mm512_fmsub_ps(relative_to, _mm512_set1_ps(kUnit), _mm512_set1_ps(512.0f));
        const __m512 odd_offset = _mm512_sub_ps(_mm512_set1_ps(kMagic), offset);
        const __m512 even_offset = _mm512_fmsub_ps(offset, _mm512_set1_ps(kUpper), _mm512_set1_ps(kUpper / 2));
        __m512 total = _mm512_load_ps(b.total + half);
        bf16 *tile = weights + half * kKeys;
#pragma GCC unroll 4
        for (int key = 0; key < kDepth; key += 2) {
            const float *pair = scores + key * kQueries + half;
            const __m512 even = _mm512_fmsub_ps(_mm512_load_ps(pair), even_factor, even_offset);
            const __m512 odd = _mm512_fmadd_ps(_mm512_load_ps(pair + kQueries), odd_factor, odd_offset);
            const __m512i lower = _mm512_srli_epi32(_mm512_cvtps_epi32(even), 16);
            const __m512i upper = _mm512_slli_epi32(_mm512_castps_si512(_mm512_max_ps(odd, least)), 16);
            const __m512i exponent = _mm512_or_si512(lower, upper);
            const __m512i t = _mm512_slli_epi16(exponent, 6);
            __m512i p = _mm512_add_epi16(_mm512_mulhrs_epi16(t, cubic), square);
            p = _mm512_add_epi16(_mm512_mulhrs_epi16(t, p), linear);
            p = _mm512_add_epi16(_mm512_mulhrs_epi16(t, p), exponent);
            const __m512i weight = _mm512_add_epi16(_mm512_mulhrs_epi16(p, eighth), one);
            total = _mm512_dpbf16_ps(total, (__m512bh)weight, ones);
            _mm512_store_si512(tile + key * kTile, weight);
        }
        _mm512_store_ps(b.total + half, total);
    }
}

AMX void store_results(const Segment &s, const QueryBlock &b, int64_t first, int64_t rows, int padded_dim) {
    for (int half = 0; half < kQueries; half += kTile) {
        for (int start = 0; start < padded_dim; start += kTile) {
            __m512i lines[16];
            results(b, half, start, lines);
            const __mmask16 mask = lowest(s.head_dim - start);
            for (int i = 0; i < kTile && half + i < rows; ++i)
                store_bf16(mask, s.out + (first + half + i) * s.out_stride + start, _mm512_castsi512_ps(lines[i]));
        }
    }
}

// Scores of 32 keys, whose rows lie together.
AMX inline void multiply_rows(const QueryBlock &b, const bf16 *keys, int dim, float *scores) {
    multiply_keys(b.queries, keys, keys + kTile * dim, dim, scores);
}

// Queries [first, end) of one head and segment. The scores of the next keys are computed as these keys are weighed: the
// one is work of the tiles, the other of the vector units.
AMX void attend_queries(const Segment &s, int64_t first, int64_t end, QueryBlock &b, const bf16 *keys,
                        const bf16 *values, bool are_keys_sound) {
    const int dim = static_cast<int>(round_up(s.head_dim, kDepth));
    const int64_t padded_keys = round_up(s.length, kDepth);
    for (; first < end; first += kQueries) {
        const int64_t rows = std::min<int64_t>(kQueries, end - first);
        begin_queries(b, dim);
        if (!are_keys_sound) std::fill(b.total, b.total + kQueries, NAN);
        pack_queries(s, b, first, rows, dim);
        for (int64_t i = 0; i < std::min<int64_t>(kKeys, padded_keys); i += kDepth)
            multiply_rows(b, keys + i * dim, dim, b.scores[0] + i * kQueries);
        for (int64_t key = 0; key < padded_keys; key += kKeys) {
            const int64_t count = std::min<int64_t>(kKeys, padded_keys - key);
            float *scores = b.scores[key / kKeys % 2], *next = b.scores[1 - key / kKeys % 2];
            for (int64_t i = std::max<int64_t>(0, s.length - key); i < count; ++i)
                std::fill(scores + i * kQueries, scores + (i + 1) * kQueries, -INFINITY);
            follow_largest(b, scores, count, dim, s.scale);
            for (int64_t i = 0; i < count; i += kDepth) {
                if (key + kKeys + i < padded_keys)
                    multiply_rows(b, keys + (key + kKeys + i) * dim, dim, next + i * kQueries);
                weigh_two(b, scores + i * kQueries, b.weights + i * kTile, s.scale);
            }
            multiply_values(b, values + key * dim, count, dim);
        }
        store_results(s, b, first, rows, dim);
    }
}

// What one thread needs: keys and values of one head and segment in tiles, which cross no line of the cache, and a
// block.
struct Memory {
    std::unique_ptr<bf16[], decltype(&free)> packed;
    std::unique_ptr<QueryBlock> block;

    explicit Memory(int64_t numbers)
        : packed(static_cast<bf16 *>(aligned_alloc(64, numbers * sizeof(bf16))), &free),
          block(new (std::nothrow) QueryBlock) {}

    bool is_there() const { return packed && block; }
};

// One part of one head and segment.
AMX void attend_part(const Segment &s, int64_t first, int64_t end, const Memory &memory) {
    const int dim = static_cast<int>(round_up(s.head_dim, kDepth));
    const int64_t padded_keys = round_up(s.length, kDepth);
    bf16 *keys = memory.packed.get(), *values = keys + padded_keys * dim;
    const bool are_keys_sound = pack_keys(s, keys, padded_keys, dim);
    pack_values(s, values, padded_keys, dim);
    attend_queries(s, first, end, *memory.block, keys, values, are_keys_sound);
}

AMX void release_tiles() { _tile_release(); }

}  // namespace

extern "C" {

// Attention of all segments and heads. `stride` and `head_stride` are of q, k and v alike; `out` is [P, heads,
// head_dim]. 0 when all is well, 1 when there was no memory.
int tandem_attend_segments(const void *q, const void *k, const void *v, void *out, int64_t stride, int64_t head_stride,
                           const int64_t *starts, const int64_t *lengths, int64_t num_segments, int heads, int head_dim,
                           float scale, int threads) {
    // As many parts of each head and segment as keep all threads busy, of at least 256 queries: each packs all keys.
    const int64_t whole = num_segments * heads;
    const int64_t wanted = threads == 1 ? 1 : (4 * threads + whole - 1) / whole;
    const int64_t longest = round_up(*std::max_element(lengths, lengths + num_segments), kDepth);
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
    {
        const Memory memory(2 * longest * round_up(head_dim, kDepth));
        failed = !memory.is_there();
        configure_tiles();
#pragma omp for schedule(dynamic, 1)
        for (int64_t unit = 0; unit < whole * wanted; ++unit) {
            const int64_t part = unit % wanted, head = unit / wanted % heads, segment = unit / wanted / heads;
            const int64_t length = lengths[segment], start = starts[segment];
            const int64_t step = std::max<int64_t>(256, round_up((length + wanted - 1) / wanted, kQueries));
            if (failed || part * step >= length) continue;
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
            attend_part(s, part * step, std::min(length, (part + 1) * step), memory);
        }
        release_tiles();
    }
    return failed;
}
}

#endif
