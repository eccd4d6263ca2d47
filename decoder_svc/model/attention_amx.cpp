// Attention of single tokens over the paged cache in bfloat16, for processors with AMX: scores by tiles, values by
// vectors, straight from the blocks, which may be compressed. Memory bounds it, so nothing is read twice, and what comes
// next, also of another head or sequence, is fetched meanwhile.
//
// Optional: `kernels.py` calls this through ctypes where it was built and the processor has AMX. Knows no Python and no
// torch: pointers and sizes only, all checked by the caller. Scores, weights and sums are in float32. What a block
// holds beyond its sequence's context is never used. NaN stays NaN.

#include "kernels.h"
#include "kv_blocks_amx.h"
#include "vectors_amx.h"

#ifdef TANDEM_AMX
#include <algorithm>

using namespace tandem;

namespace {

constexpr int kMaxGroup = 16;   // query heads of one KV head
constexpr int64_t kChunk = 128;  // tokens, at most, whose scores are turned into weights together
constexpr int kEarly = 2;        // tiles of the next chunk's keys that are asked for between scores and values

// Some tokens of one KV head: the keys of each 16, and their values.
template <int DIM>
struct Chunk {
    KvTile<DIM> keys[kChunk / kTile], values[kChunk / kTile];
    int64_t count = 0;
};

// `tiles` are those of a block; `heads` are the group's, up to the next power of two.
struct Shape {
    int64_t block_size, tiles;
    int group, heads;
    float scale;  // of scores, for powers of two
};

template <int DIM>
struct Work {
    alignas(64) bf16 queries[DIM / kDepth * kTile * kMaxGroup * 2];
    alignas(64) float scores[kChunk * kMaxGroup];
    alignas(64) float sums[kMaxGroup * DIM];
    alignas(64) float rescale[kTile];
    alignas(64) bf16 rooms[2][kTile * DIM];  // for what is compressed, in turns
};

AMX inline __m512 rotated(__m512 x, int lanes) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_permutexvar_ps(_mm512_and_si512(_mm512_add_epi32(lane, _mm512_set1_epi32(lanes)), _mm512_set1_epi32(15)), x);
}

// Queries [group, DIM] as the right-hand side of scores: rows are pairs of a head's numbers, columns heads.
template <int DIM>
AMX void pack_queries(const bf16 *q, const Shape &s, Work<DIM> &w) {
    memset(w.queries, 0, sizeof w.queries);
    for (int head = 0; head < s.group; ++head)
        for (int i = 0; i < DIM; i += 2) memcpy(w.queries + i * s.heads + 2 * head, q + head * DIM + i, 2 * sizeof(bf16));
}

template <int DIM>
AMX inline void load_queries(const Shape &s, const Work<DIM> &w) {
    const int tile = kTile * s.heads * 2, row_bytes = s.heads * 4;
    _tile_loadd(4, w.queries, row_bytes);
    _tile_loadd(5, w.queries + tile, row_bytes);
    if constexpr (DIM > 2 * kDepth) {
        _tile_loadd(6, w.queries + 2 * tile, row_bytes);
        _tile_loadd(7, w.queries + 3 * tile, row_bytes);
    }
}

// Scores of 16 keys with all heads: [16, heads].
template <int DIM>
AMX inline void score(const bf16 *keys, float *scores, const Shape &s) {
    _tile_zero(0);
    _tile_loadd(1, keys, DIM * 2);
    _tile_loadd(2, keys + kDepth, DIM * 2);
    _tile_dpbf16ps(0, 1, 4);
    _tile_dpbf16ps(0, 2, 5);
    if constexpr (DIM > 2 * kDepth) {
        _tile_loadd(1, keys + 2 * kDepth, DIM * 2);
        _tile_loadd(2, keys + 3 * kDepth, DIM * 2);
        _tile_dpbf16ps(0, 1, 6);
        _tile_dpbf16ps(0, 2, 7);
    }
    _tile_stored(0, scores, s.heads * 4);
}

// Scores of `count` tokens to weights, in their place, relative to the largest so far; what was summed up is scaled to it.
// Vectors hold 16 / heads tokens, token by token. Meanwhile memory is not left idle.
template <int DIM>
AMX inline void weigh(Work<DIM> &w, const Shape &s, int64_t count, const Chunk<DIM> &next, __m512 &high, __m512 &total) {
    const int64_t numbers = (count * s.heads + kTile - 1) / kTile * kTile;
    for (int64_t i = count * s.heads; i < numbers; ++i) w.scores[i] = -INFINITY;
    const __m512 scale = _mm512_set1_ps(s.scale);
    __m512 most = high;
    if (0 < next.count) next.keys[0].fetch();
    // Of a NaN and another the second operand is taken: a NaN among the scores is left out here, the weights carry it.
    for (int64_t i = 0; i < numbers; i += kTile)
        most = _mm512_max_ps(_mm512_mul_ps(_mm512_load_ps(w.scores + i), scale), most);
    for (int by = s.heads; by < kTile; by *= 2) most = _mm512_max_ps(most, rotated(most, by));
    const __m512 rescale = power_of_two(_mm512_sub_ps(high, most));
    _mm512_store_ps(w.rescale, rescale);
    total = _mm512_mul_ps(total, rescale);
    high = most;
    if (kTile < next.count) next.keys[1].fetch();
    for (int64_t i = 0; i < numbers; i += kTile) {
        const __m512 weights = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(w.scores + i), scale, most));
        total = _mm512_add_ps(total, weights);
        _mm512_store_ps(w.scores + i, weights);
    }
}

// Adds 32 numbers of a value, weighted, to the sums of HEADS heads, the 16 even and the 16 odd ones.
template <int HEADS, int SUMS>
AMX inline void add_weighted(__m512i numbers, const float *weights, int part, __m512 (&sums)[HEADS][SUMS]) {
    const Pair value = widen(numbers);
UNROLLED
    for (int h = 0; h < HEADS; ++h) {
        const __m512 weight = _mm512_set1_ps(weights[h]);
        sums[h][2 * part] = _mm512_fmadd_ps(value.even, weight, sums[h][2 * part]);
        sums[h][2 * part + 1] = _mm512_fmadd_ps(value.odd, weight, sums[h][2 * part + 1]);
    }
}

// Adds the weighted values of a chunk to the sums of HEADS heads from `first`, and asks for the next chunk's other keys.
template <int DIM, int HEADS>
AMX inline void mix(const Chunk<DIM> &chunk, const Chunk<DIM> &next, const Shape &s, Work<DIM> &w, int first) {
    constexpr int kParts = DIM / kDepth;
    __m512 sums[HEADS][2 * kParts];
UNROLLED
    for (int h = 0; h < HEADS; ++h)
UNROLLED
        for (int i = 0; i < 2 * kParts; ++i)
            sums[h][i] = _mm512_mul_ps(_mm512_load_ps(w.sums + (first + h) * DIM + i * kTile),
                                       _mm512_set1_ps(w.rescale[first + h]));
    const float *weights = w.scores + first;
    for (int tile = 0; tile * kTile < chunk.count; ++tile) {
        const bool is_ahead = first == 0 && tile >= kEarly && tile * kTile < next.count;
        const KvTile<DIM> &values = chunk.values[tile];
        const int64_t tokens = std::min<int64_t>(kTile, chunk.count - tile * kTile);
        if (values.is_regular() && tokens == kTile) {
            const __m512i uppers = uppers_from(values.base);
            for (int part = 0; part < values.kParts; ++part) {
                __m512i lines[4];
                values.read(part, uppers, lines);
                if (is_ahead) next.keys[tile].fetch(part);
UNROLLED
                for (int i = 0; i < 4; ++i)
                    add_weighted(lines[i], weights + i / kParts * s.heads, i % kParts, sums);
                weights += 4 / kParts * s.heads;
            }
            continue;
        }
        const bf16 *numbers = values.plain(w.rooms[0], is_ahead ? next.keys[tile] : values);
        for (int64_t t = 0; t < tokens; ++t, numbers += DIM, weights += s.heads)
UNROLLED
            for (int i = 0; i < kParts; ++i) add_weighted(_mm512_loadu_si512(numbers + i * kDepth), weights, i, sums);
    }
UNROLLED
    for (int h = 0; h < HEADS; ++h)
UNROLLED
        for (int i = 0; i < 2 * kParts; ++i) _mm512_store_ps(w.sums + (first + h) * DIM + i * kTile, sums[h][i]);
}

// Sums in the order of `mix` to a head's numbers.
template <int DIM>
AMX inline void store_results(const Work<DIM> &w, const Shape &s, __m512 total, bf16 *out) {
    for (int by = s.heads; by < kTile; by *= 2) total = _mm512_add_ps(total, rotated(total, by));
    alignas(64) float totals[kTile];
    _mm512_store_ps(totals, total);
    for (int h = 0; h < s.group; ++h) {
        const __m512 inverse = _mm512_set1_ps(1.0f / totals[h]);
        for (int i = 0; i < DIM; i += kDepth) {
            const __m512 even = _mm512_mul_ps(_mm512_load_ps(w.sums + h * DIM + i), inverse);
            const __m512 odd = _mm512_mul_ps(_mm512_load_ps(w.sums + h * DIM + i + kTile), inverse);
            _mm512_storeu_si512(out + h * DIM + i, narrow({even, odd}));
        }
    }
}

AMX void configure_tiles(int heads) {
    TileConfig config;
    config.set(0, kTile, heads * 4);
    for (int tile = 1; tile < 3; ++tile) config.set(tile, kTile, 64);
    for (int tile = 4; tile < 8; ++tile) config.set(tile, kTile, heads * 4);
    config.load();
}

struct Step {
    const bf16 *q;
    const uint8_t *pool, *bases;
    bf16 *out;
    const int32_t *tables, *contexts;
    int64_t table_width, num_heads, num_kv_heads;
    const int64_t *sequences, *rows;
    Shape shape;
};

// Goes through the chunks of items [item, end): KV heads of listed sequences, head by head.
template <int DIM>
struct Chunks {
    const Step &step;
    int64_t item, end, start = 0;

    // The next chunk, about as long as the others of its sequence; without tokens behind the last one.
    AMX Chunk<DIM> next() {
        Chunk<DIM> chunk;
        if (item == end) return chunk;
        const Shape &s = step.shape;
        const int64_t sequence = step.sequences[item / step.num_kv_heads], context = step.contexts[sequence];
        const int32_t *table = step.tables + sequence * step.table_width;
        const int64_t of_kind = s.block_size / kTile, first = item % step.num_kv_heads * 2 * of_kind;
        const int64_t parts = (context + kChunk - 1) / kChunk * kTile;
        chunk.count = std::min((context + parts - 1) / parts * kTile, context - start);
        int64_t block = start / s.block_size, offset = start % s.block_size;
        for (int tile = 0; tile * kTile < chunk.count; ++tile) {
            const int64_t i = first + offset / kTile;
            chunk.keys[tile] = KvTile<DIM>::of(step.pool, step.bases, table[block], i, s.tiles);
            chunk.values[tile] = KvTile<DIM>::of(step.pool, step.bases, table[block], i + of_kind, s.tiles);
            if ((offset += kTile) == s.block_size) ++block, offset = 0;
        }
        start += chunk.count;
        if (start == context) ++item, start = 0;
        return chunk;
    }
};

// All query heads of one KV head of one sequence, whose first chunk `chunk` is; leaves the next one's there.
template <int DIM>
AMX void attend_head(const Step &step, int64_t item, Chunks<DIM> &chunks, Chunk<DIM> &chunk, Work<DIM> &w) {
    const Shape &s = step.shape;
    const int64_t i = item / step.num_kv_heads, k = item % step.num_kv_heads;
    const int64_t at = (step.rows[i] * step.num_heads + k * s.group) * DIM;
    pack_queries<DIM>(step.q + at, s, w);
    load_queries<DIM>(s, w);
    memset(w.sums, 0, s.heads * DIM * sizeof(float));
    __m512 high = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    int64_t left = step.contexts[step.sequences[i]];
    while (left > 0) {
        const Chunk<DIM> next = chunks.next();
        for (int tile = 0; tile * kTile < chunk.count; ++tile) {
            const bf16 *keys = chunk.keys[tile].plain(w.rooms[tile % 2], chunk.values[tile]);
            score<DIM>(keys, w.scores + tile * kTile * s.heads, s);
        }
        weigh<DIM>(w, s, chunk.count, next, high, total);
        constexpr int kOnce = DIM > 2 * kDepth ? 2 : 4;  // heads whose sums fit into registers
        int first = 0;
        for (; first + kOnce <= s.heads; first += kOnce) mix<DIM, kOnce>(chunk, next, s, w, first);
        for (; first + 2 <= s.heads; first += 2) mix<DIM, 2>(chunk, next, s, w, first);
        for (; first < s.heads; ++first) mix<DIM, 1>(chunk, next, s, w, first);
        left -= chunk.count;
        chunk = next;
    }
    store_results<DIM>(w, s, total, step.out + at);
}

template <int DIM>
AMX void attend_items(const Step &step, int64_t item, int64_t end, Work<DIM> &work) {
    Chunks<DIM> chunks = {step, item, end};
    Chunk<DIM> chunk = chunks.next();
    for (; item < end; ++item) attend_head<DIM>(step, item, chunks, chunk, work);
}

AMX void release_tiles() { _tile_release(); }

// While it lives, this thread takes numbers that are not normal for zero, as tiles do: vectors stumble over each of them.
class FlushToZero {
public:
    FlushToZero() : before(_mm_getcsr()) { _mm_setcsr(before | 0x8040); }
    ~FlushToZero() { _mm_setcsr(before); }

private:
    const unsigned before;
};

template <int DIM>
void attend_all(const Step &step, int64_t count, int threads) {
    const int64_t items = count * step.num_kv_heads;
    // What follows is fetched ahead as far as one thread goes on with it.
    const int64_t span = std::max<int64_t>(1, threads == 1 ? items : items / (4 * threads));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const FlushToZero flushing;
        Work<DIM> work;
        configure_tiles(step.shape.heads);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < items; item += span)
            attend_items<DIM>(step, item, std::min(items, item + span), work);
        release_tiles();
    }
}

}  // namespace

// As `tandem_attend_decode` of `kernels.cpp`, in bfloat16 alone: heads of 64 or 128 numbers, blocks of a multiple of 16
// tokens, at most 16 query heads for a KV head, contexts of a token or more. With `bases`, full blocks are compressed.
extern "C" void tandem_attend_decode_amx(const void *q, const void *pool, const uint8_t *bases, void *out,
                                         const int32_t *tables, int64_t table_width, const int32_t *contexts, const int64_t *sequences,
                                         const int64_t *rows, int64_t count, int64_t num_heads, int64_t num_kv_heads,
                                         int64_t dim, int64_t block_size, int threads) {
    const int group = (int)(num_heads / num_kv_heads);
    int heads = 1;
    while (heads < group) heads *= 2;
    const Shape shape = {block_size, num_kv_heads * 2 * block_size / kTile, group, heads,
                         1.44269504f / std::sqrt((float)dim)};
    const Step step = {static_cast<const bf16 *>(q), static_cast<const uint8_t *>(pool), bases, static_cast<bf16 *>(out),
                       tables, contexts, table_width, num_heads, num_kv_heads, sequences, rows, shape};
    if (dim == 64)
        attend_all<64>(step, count, threads);
    else
        attend_all<128>(step, count, threads);
}

#endif
