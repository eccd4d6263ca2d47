// Attention within segments in bfloat16, for processors with AMX: matrix products in tiles, scores that never leave the
// core's cache, and softmax in float32 as they pass.
//
// Optional: `attention_native.py` calls this through ctypes where it was built and the processor has AMX. Knows no
// Python and no torch: pointers, sizes and strides only, all checked by the caller. Scores, sums and results are
// accumulated in float32; what multiplies the values is rounded to bfloat16. NaN stays NaN.

#include <cstdint>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

// GCC 12 warns of its own headers.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#define AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

namespace {

typedef uint16_t bf16;

constexpr int kTile = 16;            // rows of a tile, and its columns of float32
constexpr int kDepth = 32;           // bfloat16 numbers in a row of a tile
constexpr int kTileNumbers = 512;    // bfloat16 numbers in a tile
constexpr int kQueries = 2 * kTile;  // at once
constexpr int kKeys = 256;           // at once
constexpr int kMaxHeadDim = 128;

// Where q, k and v of one head and one segment begin; the distance of two patches is `stride` numbers.
struct Segment {
    const bf16 *q, *k, *v;
    bf16 *out;
    int64_t stride, out_stride, length;
    int head_dim;
    float scale;  // of the scores, for powers of two
};

// What one thread needs for one block of queries.
struct Block {
    alignas(64) bf16 queries[kQueries * kMaxHeadDim];
    alignas(64) float scores[kQueries * kKeys];
    alignas(64) bf16 weights[kQueries * kKeys];
    alignas(64) float sums[kQueries * kMaxHeadDim];
    float largest[kQueries], total[kQueries];
};

int64_t round_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t columns[16] = {};
    uint8_t rows[16] = {};
};

AMX void configure_tiles() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
        config.columns[tile] = 64;
        config.rows[tile] = kTile;
    }
    _tile_loadconfig(&config);
}

// Keys as the right-hand side of scores: tiles of 16 keys, whose rows are pairs of a head's numbers, zero beyond it.
void pack_keys(const Segment &s, bf16 *packed, int64_t padded_keys, int padded_dim) {
    for (int64_t first = 0; first < padded_keys; first += kTile)
        for (int start = 0; start < padded_dim; start += kDepth, packed += kTileNumbers)
            for (int key = 0; key < kTile; ++key)
                for (int i = 0; i < kDepth; ++i) {
                    const bool is_there = first + key < s.length && start + i < s.head_dim;
                    packed[(i / 2) * kDepth + key * 2 + i % 2] =
                        is_there ? s.k[(first + key) * s.stride + start + i] : 0;
                }
}

// Values as the right-hand side of results: tiles of 16 columns, whose rows are pairs of keys.
void pack_values(const Segment &s, bf16 *packed, int64_t padded_keys, int padded_dim) {
    for (int64_t first = 0; first < padded_keys; first += kDepth)
        for (int start = 0; start < padded_dim; start += kTile, packed += kTileNumbers)
            for (int key = 0; key < kDepth; ++key)
                for (int i = 0; i < kTile; ++i) {
                    const bool is_there = first + key < s.length && start + i < s.head_dim;
                    packed[(key / 2) * kDepth + i * 2 + key % 2] =
                        is_there ? s.v[(first + key) * s.stride + start + i] : 0;
                }
}

// scores[32, count] = queries[32, dim] . keys[count, dim]; `keys` is packed, count a multiple of 32.
AMX void multiply_keys(Block &b, const bf16 *keys, int64_t count, int padded_dim) {
    const int depth = padded_dim / kDepth;
    for (int64_t first = 0; first < count; first += 2 * kTile) {
        const bf16 *left = keys + first / kTile * depth * kTileNumbers, *right = left + depth * kTileNumbers;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int i = 0; i < depth; ++i) {
            _tile_loadd(4, b.queries + i * kDepth, padded_dim * 2);
            _tile_loadd(5, b.queries + kTile * padded_dim + i * kDepth, padded_dim * 2);
            _tile_loadd(6, left + i * kTileNumbers, 64);
            _tile_loadd(7, right + i * kTileNumbers, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, b.scores + first, kKeys * 4);
        _tile_stored(1, b.scores + first + kTile, kKeys * 4);
        _tile_stored(2, b.scores + kTile * kKeys + first, kKeys * 4);
        _tile_stored(3, b.scores + kTile * kKeys + first + kTile, kKeys * 4);
    }
}

// sums[32, dim] += weights[32, count] . values[count, dim]
AMX void multiply_values(Block &b, const bf16 *values, int64_t count, int padded_dim) {
    const int columns = padded_dim / kTile;
    for (int column = 0; column < columns; column += 2) {
        float *sums = b.sums + column * kTile, *lower = sums + kTile * padded_dim;
        _tile_loadd(0, sums, padded_dim * 4);
        _tile_loadd(1, sums + kTile, padded_dim * 4);
        _tile_loadd(2, lower, padded_dim * 4);
        _tile_loadd(3, lower + kTile, padded_dim * 4);
        for (int64_t first = 0; first < count; first += kDepth) {
            const bf16 *tile = values + (first / kDepth * columns + column) * kTileNumbers;
            _tile_loadd(4, b.weights + first, kKeys * 2);
            _tile_loadd(5, b.weights + kTile * kKeys + first, kKeys * 2);
            _tile_loadd(6, tile, 64);
            _tile_loadd(7, tile + kTileNumbers, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sums, padded_dim * 4);
        _tile_stored(1, sums + kTile, padded_dim * 4);
        _tile_stored(2, lower, padded_dim * 4);
        _tile_stored(3, lower + kTile, padded_dim * 4);
    }
}

// 2^x for x <= 0, to 3e-6 of it; below -127 as good as 0; NaN stays.
AMX inline __m512 power_of_two(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-127.0f), x);  // the second operand is taken when one is NaN
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(1.3333558146e-3f);
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(9.6181291076e-3f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(5.5504108665e-2f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(2.4022650696e-1f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(6.9314718056e-1f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

// Scores of `count` more keys to weights, relative to the largest score so far; what was summed up is scaled to it.
AMX void weigh(Block &b, int64_t count, int padded_dim, float scale) {
    for (int row = 0; row < kQueries; ++row) {
        const float *scores = b.scores + row * kKeys;
        __m512 most = _mm512_loadu_ps(scores);
        for (int64_t i = kTile; i < count; i += kTile) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + i));
        const float before = b.largest[row];
        const float largest = std::max(before, _mm512_reduce_max_ps(most) * scale);
        const __m512 offset = _mm512_set1_ps(-largest), factor = _mm512_set1_ps(scale);
        __m512 total = _mm512_setzero_ps();
        for (int64_t i = 0; i < count; i += kDepth) {
            const __m512 low = power_of_two(_mm512_fmadd_ps(_mm512_loadu_ps(scores + i), factor, offset));
            const __m512 high = power_of_two(_mm512_fmadd_ps(_mm512_loadu_ps(scores + i + kTile), factor, offset));
            total = _mm512_add_ps(total, _mm512_add_ps(low, high));
            const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
            memcpy(b.weights + row * kKeys + i, &both, sizeof both);
        }
        b.largest[row] = largest;
        if (largest == before) {
            b.total[row] += _mm512_reduce_add_ps(total);
            continue;
        }
        const float shrink = std::exp2(before - largest);
        b.total[row] = b.total[row] * shrink + _mm512_reduce_add_ps(total);
        float *sums = b.sums + row * padded_dim;
        for (int i = 0; i < padded_dim; i += kTile)
            _mm512_storeu_ps(sums + i, _mm512_mul_ps(_mm512_loadu_ps(sums + i), _mm512_set1_ps(shrink)));
    }
}

AMX void store_results(const Segment &s, const Block &b, int64_t first, int64_t rows, int padded_dim) {
    for (int64_t row = 0; row < rows; ++row) {
        const __m512 inverse = _mm512_set1_ps(1.0f / b.total[row]);
        alignas(64) bf16 line[kMaxHeadDim];
        for (int i = 0; i < padded_dim; i += kTile) {
            const __m512 values = _mm512_mul_ps(_mm512_loadu_ps(b.sums + row * padded_dim + i), inverse);
            const __m256bh rounded = _mm512_cvtneps_pbh(values);
            memcpy(line + i, &rounded, sizeof rounded);
        }
        memcpy(s.out + (first + row) * s.out_stride, line, s.head_dim * sizeof(bf16));
    }
}

// Queries [first, end) of one head and segment.
AMX void attend_queries(const Segment &s, int64_t first, int64_t end, Block &b, const bf16 *keys, const bf16 *values) {
    const int dim = static_cast<int>(round_up(s.head_dim, kDepth));
    const int64_t padded_keys = round_up(s.length, kDepth);
    for (; first < end; first += kQueries) {
        const int64_t rows = std::min<int64_t>(kQueries, end - first);
        memset(b.queries, 0, sizeof b.queries);
        memset(b.sums, 0, sizeof b.sums);
        for (int64_t row = 0; row < rows; ++row)
            memcpy(b.queries + row * dim, s.q + (first + row) * s.stride, s.head_dim * sizeof(bf16));
        std::fill(b.largest, b.largest + kQueries, -INFINITY);
        std::fill(b.total, b.total + kQueries, 0.0f);
        for (int64_t key = 0; key < padded_keys; key += kKeys) {
            const int64_t count = std::min<int64_t>(kKeys, padded_keys - key);
            multiply_keys(b, keys + key * dim, count, dim);
            for (int row = 0; row < kQueries; ++row)
                for (int64_t i = s.length - key; i < count; ++i) b.scores[row * kKeys + i] = -INFINITY;
            weigh(b, count, dim, s.scale);
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

// Whether this processor can, and the kernel lets this process: it wants to be asked for the tiles' state.
int tandem_amx_is_there() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512dq")) return 0;
    unsigned int a, b, c, d = 0;
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    const bool has_amx = (d >> 22 & 1) && (d >> 24 & 1);  // AMX-BF16, AMX-TILE
    return has_amx && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

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

#else

extern "C" int tandem_amx_is_there() { return 0; }

#endif
