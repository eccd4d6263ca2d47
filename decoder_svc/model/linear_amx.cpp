// Products with packed weights in bfloat16, for processors with AMX: each weight is read from memory once for up to 64
// rows, tile by tile, which is what bounds a decode step; for more it is unpacked, and they go in blocks that stay in the
// core's cache.
//
// Optional: `linear.py` calls this through ctypes where it was built and the processor has AMX. Knows no Python and no
// torch: pointers and sizes only, all checked by the caller. Sums are in float32 and in the same order for any number
// of rows, so a row's result depends on nothing but the row. NaN stays NaN.

#include "amx.h"
#include "kernels.h"
#include "tiles_amx.h"

#ifdef TANDEM_AMX
#include <algorithm>
#include <cstring>
#include <new>

using namespace tandem;

namespace {

constexpr int kPanel = 2 * kTile;           // columns of the result at once
constexpr int64_t kRows = 2 * kTile;        // rows of the result at once
constexpr int64_t kFewRows = 4 * kTile;     // rows for which a weight is not kept unpacked
constexpr int64_t kChunkBytes = 1280 << 10;  // of rows that meet one panel after the other, from the second cache
constexpr int64_t kMaxPanels = 4;           // unpacked at once, if there is room
constexpr int64_t kRoomBytes = 512 << 10;   // for what is unpacked, beside the rows in the second cache

// x [rows, depth] times a weight [columns, depth], packed as panels of tiles [columns / 32, depth / 32, 2].
struct Product {
    const bf16 *x, *bias;
    TiledWeight weight;
    bf16 *out;
    int64_t depth, columns;

    int64_t panel_tiles() const { return depth / kDepth * 2; }
};

// Where a panel's tiles come from, two by two: from its slots, or from where they were unpacked. There is room for all of
// them, which stay, or for two pairs. Each pair is unpacked a turn before it is wanted, as tiles cannot be loaded before
// what was stored has left the core's queue.
struct Streamed {
    const TiledWeight &weight;
    int64_t tile, end;
    bf16 *room;
    int64_t pairs, pair = 0;

    AMX inline Streamed(const TiledWeight &weight, int64_t tile, int64_t count, bf16 *room, int64_t pairs)
        : weight(weight), tile(tile), end(tile + count), room(room), pairs(pairs) {
        unpack(room);
    }

    AMX inline const bf16 *next() {
        const bf16 *tiles = room + pair * 2 * kTileNumbers;
        if (++pair == pairs) pair = 0;
        if (tile < end) unpack(room + pair * 2 * kTileNumbers);
        return tiles;
    }

    AMX inline void unpack(bf16 *to) {
        weight.fetch_ahead(tile);
        weight.unpack(tile++, to);
        weight.unpack(tile++, to + kTileNumbers);
    }
};

struct Unpacked {
    const bf16 *at;

    AMX inline const bf16 *next() {
        const bf16 *tiles = at;
        at += 2 * kTileNumbers;
        return tiles;
    }
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

// Sums of up to 16 rows, or of 17 to 32 where TWO, with one panel, as the tiles are configured. sums [32, 32].
template <bool TWO, class Tiles>
AMX inline void multiply(const Product &p, const bf16 *x, Tiles &panel, float *sums) {
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < p.depth; k += kDepth) {
        const bf16 *tiles = panel.next();
        _tile_loadd(4, x + k, p.depth * 2);
        _tile_loadd(6, tiles, 64);
        _tile_loadd(7, tiles + kTileNumbers, 64);
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

template <class Tiles>
AMX inline void multiply(const Product &p, const bf16 *x, int64_t rows, Tiles &panel, float *sums) {
    if (rows > kTile)
        multiply<true>(p, x, panel, sums);
    else
        multiply<false>(p, x, panel, sums);
}

// Sums of up to 16 rows with two panels, which are two streams to the hardware. sums [2, 16, 32].
AMX inline void multiply_two_panels(const Product &p, const bf16 *x, Streamed &panel, Streamed &other, float *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < p.depth; k += kDepth) {
        const bf16 *tiles = panel.next(), *others = other.next();
        _tile_loadd(4, x + k, p.depth * 2);
        _tile_loadd(6, tiles, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, tiles + kTileNumbers, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, others, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, others + kTileNumbers, 64);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, sums, kPanel * 4);
    _tile_stored(1, sums + kTile, kPanel * 4);
    _tile_stored(2, sums + kTile * kPanel, kPanel * 4);
    _tile_stored(3, sums + kTile * kPanel + kTile, kPanel * 4);
}

// As above, for 33 to 64 rows: tiles 0 to 3 hold their sums with half a panel, 4, 5 and 7 rows of x, 7 the last of them.
AMX void configure_tiles_for_many(int64_t rows) {
    const uint8_t last = (uint8_t)((rows - 1) % kTile + 1);
    const bool has_four = rows > 3 * kTile;
    const uint8_t heights[8] = {kTile, kTile, has_four ? (uint8_t)kTile : last, last, kTile, kTile, kTile, last};
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, heights[tile], 64);
    config.load();
}

// Sums of 33 to 64 rows with one panel, of which each half is read by itself. sums [64, 32].
template <bool FOUR>
AMX inline void multiply_many(const Product &p, const bf16 *x, int64_t panel, float *sums) {
    alignas(64) bf16 places[2][kTileNumbers];
    const int64_t stride = p.depth * 2;
    for (int half = 0; half < 2; ++half) {
        int64_t tile = panel * p.panel_tiles() + half;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        p.weight.unpack(tile, places[0]);
        for (int64_t k = 0; k < p.depth; k += kDepth, tile += 2) {
            const bf16 *own = places[k / kDepth % 2], *at = x + k;
            if (half == 0) p.weight.fetch_ahead(tile);
            if (k + kDepth < p.depth) p.weight.unpack(tile + 2, places[(k / kDepth + 1) % 2]);
            _tile_loadd(6, own, 64);
            _tile_loadd(4, at, stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, at + kTile * p.depth, stride);
            _tile_dpbf16ps(1, 5, 6);
            if (FOUR) {
                _tile_loadd(4, at + 2 * kTile * p.depth, stride);
                _tile_dpbf16ps(2, 4, 6);
                _tile_loadd(7, at + 3 * kTile * p.depth, stride);
                _tile_dpbf16ps(3, 7, 6);
            } else {
                _tile_loadd(7, at + 2 * kTile * p.depth, stride);
                _tile_dpbf16ps(2, 7, 6);
            }
        }
        float *to = sums + half * kTile;
        _tile_stored(0, to, kPanel * 4);
        _tile_stored(1, to + kTile * kPanel, kPanel * 4);
        _tile_stored(2, to + 2 * kTile * kPanel, kPanel * 4);
        if (FOUR) _tile_stored(3, to + 3 * kTile * kPanel, kPanel * 4);
    }
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

// Up to 64 rows from `row` on with panels [panel, last), two at a time where that can be.
AMX void multiply_once(const Product &p, int64_t row, int64_t rows, int64_t panel, int64_t last) {
    alignas(64) float sums[kFewRows * kPanel];
    alignas(64) bf16 room[2][4 * kTileNumbers];
    const bf16 *x = p.x + row * p.depth;
    if (rows > kRows) {
        configure_tiles_for_many(rows);
        for (; panel < last; ++panel) {
            if (rows > 3 * kTile)
                multiply_many<true>(p, x, panel, sums);
            else
                multiply_many<false>(p, x, panel, sums);
            store_sums(p, sums, row, rows, panel * kPanel);
        }
        return;
    }
    configure_tiles(rows);
    for (; panel < last; ++panel) {
        Streamed tiles(p.weight, panel * p.panel_tiles(), p.panel_tiles(), room[0], 2);
        if (rows <= kTile && panel + 1 < last) {
            Streamed others(p.weight, (panel + 1) * p.panel_tiles(), p.panel_tiles(), room[1], 2);
            multiply_two_panels(p, x, tiles, others, sums);
            store_sums(p, sums, row, rows, panel++ * kPanel);
            store_sums(p, sums + kTile * kPanel, row, rows, panel * kPanel);
            continue;
        }
        multiply(p, x, rows, tiles, sums);
        store_sums(p, sums, row, rows, panel * kPanel);
    }
}

// Rows [first, end), more than 64, with panels [panel, last): the first 32 rows leave them unpacked in `room`. What a
// block of rows meets in turn lies side by side in the result.
AMX void multiply_panels(const Product &p, int64_t first, int64_t end, int64_t panel, int64_t last, bf16 *room) {
    alignas(64) float sums[kRows * kPanel];
    for (int64_t row = first; row < end; row += kRows) {
        const int64_t rows = std::min(kRows, end - row);
        const bf16 *x = p.x + row * p.depth;
        if (row == first || rows < kRows) configure_tiles(rows);
        for (int64_t i = panel; i < last; ++i) {
            bf16 *own = room + (i - panel) * p.panel_tiles() * kTileNumbers;
            if (row == first) {
                Streamed tiles(p.weight, i * p.panel_tiles(), p.panel_tiles(), own, p.panel_tiles() / 2);
                multiply(p, x, rows, tiles, sums);
            } else {
                Unpacked tiles = {own};
                multiply(p, x, rows, tiles, sums);
            }
            store_sums(p, sums, row, rows, i * kPanel);
        }
    }
}

AMX void release_tiles() { _tile_release(); }

}  // namespace

// out [rows, columns] = x [rows, depth] . weight^T + bias [columns], where there is one. Depth and columns are
// multiples of 32. 0 when all is well, 1 when there was no memory.
extern "C" int tandem_linear_amx(const void *x, const void *weight, const void *bias, void *out, int64_t rows,
                                 int64_t depth, int64_t columns, int threads) {
    const int64_t panels = columns / kPanel;
    const Product p = {static_cast<const bf16 *>(x), static_cast<const bf16 *>(bias),
                       TiledWeight(weight, panels * (depth / kDepth) * 2), static_cast<bf16 *>(out), depth, columns};
    const int64_t chunk = std::max(kRows, kChunkBytes / (2 * depth) / kRows * kRows);
    const int64_t chunks = (rows + chunk - 1) / chunk;
    // Panels that a block of rows meets in turn: some, but enough units of work for all threads.
    const int64_t most = std::clamp<int64_t>(kRoomBytes / (2 * kPanel * depth), 1, kMaxPanels);
    const int64_t group = std::clamp<int64_t>(chunks * panels / (2 * threads), 1, most);
    const int64_t groups = (panels + group - 1) / group;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed) if (threads > 1)
    {
        bf16 *room = nullptr;
        if (std::min(rows, chunk) > kFewRows) {
            const size_t bytes = group * p.panel_tiles() * kTileNumbers * sizeof(bf16);
            room = static_cast<bf16 *>(operator new(bytes, std::align_val_t(64), std::nothrow));
            failed = room == nullptr;
        }
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < chunks * groups; ++unit) {
            const int64_t first = unit / groups * chunk, panel = unit % groups * group;
            const int64_t end = std::min(rows, first + chunk), last = std::min(panels, panel + group);
            if (end - first <= kFewRows)
                multiply_once(p, first, end - first, panel, last);
            else if (room)
                multiply_panels(p, first, end, panel, last, room);
        }
        operator delete(room, std::align_val_t(64));
        release_tiles();
    }
    return failed;
}

#endif
