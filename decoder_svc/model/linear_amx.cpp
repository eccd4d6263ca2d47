// Products with packed weights in bfloat16, for processors with AMX: each weight is read once, in one stream, for up to
// 32 rows, which is what bounds a decode step; more rows go in blocks that stay in the core's cache.
//
// Optional: `linear.py` calls this through ctypes where it was built and the processor has AMX. Knows no Python and no
// torch: pointers and sizes only, all checked by the caller. Sums are in float32 and in the same order for any number
// of rows, so a row's result depends on nothing but the row. NaN stays NaN.

#include "amx.h"
#include "kernels.h"

#ifdef TANDEM_AMX
#include <algorithm>
#include <cstring>

using namespace tandem;

namespace {

constexpr int kPanel = 2 * kTile;           // columns of the result at once
constexpr int64_t kRows = 2 * kTile;        // rows of the result at once
constexpr int64_t kAhead = 8192;            // bytes from what is read to what is fetched; hardware stops at 4 KiB
constexpr int64_t kChunkBytes = 512 << 10;  // of rows that meet one panel after the other, from the second cache

// x [rows, depth] times a weight [columns, depth], packed as panels [columns / 32, depth / 32, 2, 16, 16, 2].
struct Product {
    const bf16 *x, *weight, *bias;
    bf16 *out;
    int64_t depth, columns;
};

// Tiles 0 to 3 hold sums, 4 and 5 up to 32 rows of x, 6 and 7 two tiles of the weight. Up to 16 rows have sums with two
// panels instead of sums of 32 rows with one.
AMX void configure_tiles(int64_t rows) {
    const uint8_t upper = (uint8_t)std::min<int64_t>(rows, kTile), lower = (uint8_t)(rows - upper);
    const uint8_t others = lower ? lower : upper;
    const uint8_t heights[8] = {upper, upper, others, others, upper, lower, kTile, kTile};
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, heights[tile], 64);
    config.load();
}

AMX inline void fetch_ahead(const bf16 *weight) {
    const char *at = reinterpret_cast<const char *>(weight) + kAhead;
    for (int line = 0; line < 2 * kTile; ++line) _mm_prefetch(at + 64 * line, _MM_HINT_T1);
}

// Sums of up to 16 rows, or of 17 to 32 where TWO, with one panel, as the tiles are configured. sums [32, 32].
template <bool TWO>
AMX inline void multiply(const Product &p, const bf16 *x, const bf16 *panel, bool is_first, float *sums) {
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < p.depth; k += kDepth, panel += 2 * kTileNumbers) {
        if (is_first) fetch_ahead(panel);
        _tile_loadd(4, x + k, p.depth * 2);
        _tile_loadd(6, panel, 64);
        _tile_loadd(7, panel + kTileNumbers, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (TWO) {
            _tile_loadd(5, x + kTile * p.depth + k, p.depth * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, kPanel * 4);
    _tile_stored(1, sums + kTile, kPanel * 4);
    if (TWO) {
        _tile_stored(2, sums + kTile * kPanel, kPanel * 4);
        _tile_stored(3, sums + kTile * kPanel + kTile, kPanel * 4);
    }
}

// Sums of up to 16 rows with two panels, which are two streams to the hardware. sums [2, 16, 32].
AMX inline void multiply_two_panels(const Product &p, const bf16 *x, const bf16 *panel, float *sums) {
    const bf16 *other = panel + kPanel * p.depth;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < p.depth; k += kDepth, panel += 2 * kTileNumbers, other += 2 * kTileNumbers) {
        fetch_ahead(panel);
        fetch_ahead(other);
        _tile_loadd(4, x + k, p.depth * 2);
        _tile_loadd(6, panel, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + kTileNumbers, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, other, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, other + kTileNumbers, 64);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, sums, kPanel * 4);
    _tile_stored(1, sums + kTile, kPanel * 4);
    _tile_stored(2, sums + kTile * kPanel, kPanel * 4);
    _tile_stored(3, sums + kTile * kPanel + kTile, kPanel * 4);
}

AMX inline void store_sums(const Product &p, const float *sums, int64_t row, int64_t rows, int64_t column) {
    __m512 low = _mm512_setzero_ps(), high = low;
    if (p.bias) {
        const __m512i both = _mm512_loadu_si512(p.bias + column);
        low = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(both)), 16));
        high = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1)), 16));
    }
    for (int64_t i = 0; i < rows; ++i) {
        const __m512 first = _mm512_add_ps(_mm512_load_ps(sums + i * kPanel), low);
        const __m512 second = _mm512_add_ps(_mm512_load_ps(sums + i * kPanel + kTile), high);
        const __m512bh rounded = _mm512_cvtne2ps_pbh(second, first);
        memcpy(p.out + (row + i) * p.columns + column, &rounded, sizeof rounded);
    }
}

// Rows [first, end) with panels [panel, last): what a block of rows meets in turn lies side by side in the result.
AMX void multiply_panels(const Product &p, int64_t first, int64_t end, int64_t panel, int64_t last) {
    alignas(64) float sums[kRows * kPanel];
    for (int64_t row = first; row < end; row += kRows) {
        const int64_t rows = std::min(kRows, end - row);
        if (row == first || rows < kRows) configure_tiles(rows);
        for (int64_t i = panel; i < last; ++i) {
            const bf16 *x = p.x + row * p.depth, *weight = p.weight + i * kPanel * p.depth;
            const bool is_first = row == first;
            if (rows <= kTile && is_first && i + 1 < last) {
                multiply_two_panels(p, x, weight, sums);
                store_sums(p, sums, row, rows, i++ * kPanel);
                store_sums(p, sums + kTile * kPanel, row, rows, i * kPanel);
                continue;
            }
            if (rows > kTile)
                multiply<true>(p, x, weight, is_first, sums);
            else
                multiply<false>(p, x, weight, is_first, sums);
            store_sums(p, sums, row, rows, i * kPanel);
        }
    }
}

AMX void release_tiles() { _tile_release(); }

}  // namespace

// out [rows, columns] = x [rows, depth] . weight^T + bias [columns], where there is one. Depth and columns are
// multiples of 32.
extern "C" void tandem_linear_amx(const void *x, const void *weight, const void *bias, void *out, int64_t rows,
                                  int64_t depth, int64_t columns, int threads) {
    const Product p = {static_cast<const bf16 *>(x), static_cast<const bf16 *>(weight),
                       static_cast<const bf16 *>(bias), static_cast<bf16 *>(out), depth, columns};
    const int64_t panels = columns / kPanel;
    const int64_t chunk = std::max(kRows, kChunkBytes / (2 * depth) / kRows * kRows);
    const int64_t chunks = (rows + chunk - 1) / chunk;
    // Panels that a block of rows meets in turn: some, but enough units of work for all threads.
    const int64_t group = std::clamp<int64_t>(chunks * panels / (2 * threads), 1, 4);
    const int64_t groups = (panels + group - 1) / group;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < chunks * groups; ++unit) {
            const int64_t first = unit / groups * chunk, panel = unit % groups * group;
            multiply_panels(p, first, std::min(rows, first + chunk), panel, std::min(panels, panel + group));
        }
        release_tiles();
    }
}

#endif
