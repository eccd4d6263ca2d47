// Causal attention of several new tokens of a sequence over its paged cache in bfloat16, for processors with AMX: keys
// are read where they lie, or unpacked if compressed, and values transposed, once for all queries of a KV head.
//
// Optional: `kernels.py` calls this through ctypes where it was built and the processor has AMX. Knows no Python and no
// torch: pointers and sizes only, all checked by the caller. What a block holds beyond its sequence's context is never
// used. NaN stays NaN.

#include "kernels.h"
#include "kv_blocks_amx.h"

#ifdef TANDEM_AMX
#include "../../common/amx_attention.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

using namespace tandem;

namespace {

constexpr int64_t kMinQueries = 256;  // of one part of a KV head's queries, since each part transposes the values

// The new tokens of one sequence with one KV head. `q` and `out` point at its first query head in the first new token,
// whose rows are `stride` numbers apart. Of the `tiles` of a block the first of this KV head's is `first_tile`.
struct Sequence {
    const bf16 *q;
    const uint8_t *pool, *bases;
    bf16 *out;
    const int32_t *table;
    int64_t stride, num_new, context, block_size, tiles, first_tile;
    int group;
    float scale;  // of scores, for powers of two
};

// 16 tokens of one query head, which are 16 columns of a block of queries.
struct Column {
    int64_t token, count, offset;  // of the head's numbers in a token's row
};

using Numbers = std::unique_ptr<bf16[], decltype(&free)>;

// Where each 16 keys of a sequence lie, and its values in tiles of 16 numbers of 32 keys.
struct Cached {
    std::unique_ptr<const bf16 *[]> keys;
    Numbers unpacked{nullptr, &free}, values{nullptr, &free};  // keys that were compressed
};

// Aligned so that a tile's line crosses no line of the cache; null when there is no memory.
Numbers allocate(int64_t count) { return {static_cast<bf16 *>(aligned_alloc(64, count * sizeof(bf16))), &free}; }

int64_t round_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

// Columns go through the heads of the group before they go through tokens: then the two of a block see about as much.
inline Column column_of(const Sequence &s, int64_t index, int dim) {
    const int64_t token = index / s.group * kTile;
    return {token, std::clamp<int64_t>(s.num_new - token, 0, kTile), index % s.group * dim};
}

// The first key that a column's first query does not see.
inline int64_t seen_by_first(const Sequence &s, const Column &column) {
    return s.context - s.num_new + column.token + 1;
}

AMX void configure_tiles() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, kTile, 64);
    config.load();
}

// Values of 32 keys, of which each half is 16 rows, tile by tile of a head's numbers; zeros beyond the context, since zero
// times NaN is NaN.
template <int DIM>
AMX void transpose_values(const Sequence &s, const bf16 *const (&halves)[2], int64_t first, bf16 *packed) {
    for (int start = 0; start < DIM; start += kTile, packed += kTileNumbers) {
        __m512i rows[16];
UNROLLED
        for (int pair = 0; pair < kTile; ++pair) {
            __m512i two[2];
UNROLLED
            for (int i = 0; i < 2; ++i) {
                const int64_t key = 2 * pair + i;
                const bf16 *value = halves[key / kTile] + key % kTile * DIM + start;
                const __mmask16 mask = first + key < s.context ? 0xffff : 0;
                two[i] = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, value));
            }
            rows[pair] = _mm512_or_si512(two[0], _mm512_slli_epi32(two[1], 16));
        }
        transpose(rows);
UNROLLED
        for (int i = 0; i < kTile; ++i) _mm512_store_si512(packed + i * kDepth, rows[i]);
    }
}

// Finds the keys of the first `count` tokens, and transposes their values. False when there is no memory.
template <int DIM>
AMX bool read_cache(const Sequence &s, int64_t count, Cached &cached) {
    const int64_t padded = round_up(count, kDepth), of_kind = s.block_size / kTile;
    cached.keys.reset(new (std::nothrow) const bf16 *[padded / kTile]);
    if (s.bases) cached.unpacked = allocate(padded * DIM);
    cached.values = allocate(padded * DIM);
    if (!cached.keys || !cached.values || (s.bases && !cached.unpacked)) return false;
    alignas(64) bf16 rooms[2][kTile * DIM];
    const bf16 *values[2];
    int64_t block = 0, offset = 0;
    for (int64_t key = 0; key < padded; key += kTile) {
        const int64_t half = key / kTile % 2;
        if (key < count) {
            const int64_t i = s.first_tile + offset / kTile;
            const auto keys = KvTile<DIM>::of(s.pool, s.bases, s.table[block], i, s.tiles);
            const auto own = KvTile<DIM>::of(s.pool, s.bases, s.table[block], i + of_kind, s.tiles);
            cached.keys[key / kTile] = keys.plain(s.bases ? cached.unpacked.get() + key * DIM : nullptr, own);
            values[half] = own.plain(rooms[half], own);
            if ((offset += kTile) == s.block_size) ++block, offset = 0;
        } else {  // of the last 32 the second half: read, and not used
            cached.keys[key / kTile] = cached.keys[key / kTile - 1];
            values[1] = values[0];
        }
        if (half) transpose_values<DIM>(s, values, key - kTile, cached.values.get() + (key - kTile) * DIM);
    }
    return true;
}

// Queries of one column as the right-hand side of scores: tiles whose rows are pairs of a head's numbers.
template <int DIM>
AMX void pack_queries(const Sequence &s, const Column &column, bf16 *packed) {
    for (int start = 0; start < DIM; start += kDepth, packed += kTileNumbers) {
        __m512i lines[16];
UNROLLED
        for (int i = 0; i < kTile; ++i) {
            const __mmask32 mask = i < column.count ? ~__mmask32{0} : 0;
            lines[i] = _mm512_maskz_loadu_epi16(mask, s.q + (column.token + i) * s.stride + column.offset + start);
        }
        transpose(lines);
UNROLLED
        for (int i = 0; i < kTile; ++i) _mm512_store_si512(packed + i * kDepth, lines[i]);
    }
}

// Scores of `count` keys from `key` on that a column's queries must not see become -inf.
AMX inline void hide_future(float *scores, int64_t key, int64_t count, int64_t seen) {
    const __m512 never = _mm512_set1_ps(-INFINITY);
    for (int64_t i = std::max<int64_t>(0, seen - key); i < count; ++i)
        _mm512_mask_store_ps(scores + i * kQueries, (__mmask16)lowest(std::min<int64_t>(kTile, key + i + 1 - seen)), never);
}

template <int DIM>
AMX void store_results(const Sequence &s, const Column &column, const QueryBlock &b, int half) {
    for (int start = 0; start < DIM; start += kTile) {
        __m512i lines[16];
        results(b, half, start, lines);
        for (int i = 0; i < column.count; ++i) {
            const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_castsi512_ps(lines[i]));
            memcpy(s.out + (column.token + i) * s.stride + column.offset + start, &rounded, sizeof rounded);
        }
    }
}

// Two columns of queries. The scores of the next keys are computed as these keys are weighed: the one is work of the
// tiles, the other of the vector units.
template <int DIM>
AMX void attend_columns(const Sequence &s, const Column (&columns)[2], const Cached &cached, QueryBlock &b) {
    const int64_t seen[2] = {seen_by_first(s, columns[0]), seen_by_first(s, columns[1])};
    const int64_t last = std::max(columns[0].token + columns[0].count, columns[1].token + columns[1].count);
    const int64_t keys = round_up(s.context - s.num_new + last, kDepth);
    const bf16 *const *tiles = cached.keys.get();
    for (int half = 0; half < 2; ++half) pack_queries<DIM>(s, columns[half], b.queries + half * kTile * DIM);
    begin_queries(b, DIM);
    for (int64_t i = 0; i < std::min<int64_t>(kKeys, keys); i += kDepth)
        multiply_keys(b.queries, tiles[i / kTile], tiles[i / kTile + 1], DIM, b.scores[0] + i * kQueries);
    for (int64_t key = 0; key < keys; key += kKeys) {
        const int64_t count = std::min<int64_t>(kKeys, keys - key);
        float *scores = b.scores[key / kKeys % 2], *next = b.scores[1 - key / kKeys % 2];
        for (int half = 0; half < 2; ++half) hide_future(scores + half * kTile, key, count, seen[half]);
        follow_largest(b, scores, count, DIM, s.scale);
        for (int64_t i = 0; i < count; i += kDepth) {
            const int64_t ahead = key + kKeys + i;
            if (ahead < keys)
                multiply_keys(b.queries, tiles[ahead / kTile], tiles[ahead / kTile + 1], DIM, next + i * kQueries);
            weigh(b, scores + i * kQueries, b.weights + i * kTile, s.scale);
        }
        multiply_values(b, cached.values.get() + key * DIM, count, DIM);
    }
    for (int half = 0; half < 2; ++half) store_results<DIM>(s, columns[half], b, half * kTile);
}

// New tokens [first, end), of which `first` is a multiple of 16. False when there is no memory.
template <int DIM>
AMX bool attend_part(const Sequence &s, int64_t first, int64_t end) {
    Cached cached;
    std::unique_ptr<QueryBlock> block(new (std::nothrow) QueryBlock);
    if (!block || !read_cache<DIM>(s, s.context - s.num_new + end, cached)) return false;
    configure_tiles();
    const int64_t last = (end + kTile - 1) / kTile * s.group;
    for (int64_t index = first / kTile * s.group; index < last; index += 2) {
        const Column one = column_of(s, index, DIM);
        // An odd one is paired with itself.
        const Column other = index + 1 < last ? column_of(s, index + 1, DIM) : one;
        attend_columns<DIM>(s, {one, other}, cached, *block);
    }
    _tile_release();
    return true;
}

}  // namespace

// For each listed sequence its new tokens over its context, the last of which they are: rows starts[i] to starts[i + 1]
// of q and out [T, heads, dim], tables + i * table_width its blocks in the pool [blocks, kv_heads, 2, block_size, dim].
// Heads of 64 or 128 numbers, blocks of a multiple of 16 tokens. With `bases`, full blocks are compressed. 0 when all is well, 1 when there was no memory.
extern "C" int tandem_attend_prefill_amx(const void *q, const void *pool, const uint8_t *bases, void *out,
                                         const int32_t *tables, int64_t table_width, const int32_t *contexts,
                                         const int32_t *starts, const int64_t *sequences, int64_t count,
                                         int64_t num_heads, int64_t num_kv_heads, int64_t dim, int64_t block_size,
                                         int threads) {
    const int64_t group = num_heads / num_kv_heads, tiles = 2 * block_size / kTile;
    int failed = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t sequence = sequences[i], num_new = starts[sequence + 1] - starts[sequence];
        // As many parts of a KV head as keep all threads busy.
        const int64_t wanted = threads == 1 ? 1 : (4 * threads + num_kv_heads - 1) / num_kv_heads;
        const int64_t size = std::max(kMinQueries, round_up((num_new + wanted - 1) / wanted, kTile));
        const int64_t parts = (num_new + size - 1) / size;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1) reduction(| : failed)
        for (int64_t item = 0; item < num_kv_heads * parts; ++item) {
            const int64_t head = item % num_kv_heads, part = parts - 1 - item / num_kv_heads;  // the longest first
            const int64_t at = (starts[sequence] * num_heads + head * group) * dim;
            const Sequence s = {static_cast<const bf16 *>(q) + at,
                                static_cast<const uint8_t *>(pool),
                                bases,
                                static_cast<bf16 *>(out) + at,
                                tables + sequence * table_width,
                                num_heads * dim,
                                num_new,
                                contexts[sequence],
                                block_size,
                                num_kv_heads * tiles,
                                head * tiles,
                                (int)group,
                                1.44269504f / std::sqrt((float)dim)};
            const int64_t first = part * size, end = std::min(num_new, first + size);
            failed |= dim == 64 ? !attend_part<64>(s, first, end) : !attend_part<128>(s, first, end);
        }
    }
    return failed;
}

#endif
