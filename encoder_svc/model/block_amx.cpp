// The tower's layers that treat rows alone, in bfloat16 for processors with AMX. What a block does around its
// attention: norm, projection to q, k and v with their rotation; then output projection, norm, MLP, and both sums with
// the residual stream. And the merger: norm and MLP. A thread takes some rows through all of it, so that what lies
// between stays in its core's cache and nothing waits for other threads.
//
// Optional: `block_native.py` calls this through ctypes where it was built and the processor has AMX. Knows no Python
// and no torch: pointers and sizes only, all checked by the caller. Sums are in float32; what enters a product is
// rounded to bfloat16, as is the residual stream. A row's result depends on nothing but the row. NaN stays NaN.

#include "amx_vectors.h"

#ifdef TANDEM_AMX
#include <cstdlib>
#include <memory>
#include <new>

using namespace tandem;

namespace {

constexpr int64_t kRows = 2 * kTile;  // rows of a product at once, and its columns

// A weight in tiles [columns / 32, depth / 32, 2, 16 pairs of depth, 16 columns, 2], and its bias [columns].
struct Layer {
    const bf16 *weight;
    const float *bias;
    int64_t depth, columns;
};

struct Norm {
    const float *weight, *bias;
    int64_t width;
    float eps;
};

// Where a line of a matrix in tiles [rows / 16, columns / 32, 16, 32] is.
AMX inline bf16 *line_of(bf16 *tiles, int64_t columns, int64_t row, int64_t column) {
    return tiles + (row / kTile * (columns / kDepth) + column / kDepth) * kTileNumbers + row % kTile * kDepth;
}

AMX void pack_rows(const bf16 *x, int64_t rows, int64_t columns, bf16 *tiles) {
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < columns; i += kDepth)
            _mm512_store_si512(line_of(tiles, columns, row, i), _mm512_loadu_si512(x + row * columns + i));
}

// Layer norm of rows [rows, columns] to tiles, of each part of the norm's width apart.
AMX void normalise(const bf16 *x, int64_t rows, int64_t columns, const Norm &norm, bf16 *tiles) {
    const int64_t parts = columns / norm.width;
    for (int64_t part = 0; part < rows * parts; ++part, x += norm.width) {
        const int64_t row = part / parts, column = part % parts * norm.width;
        __m512 low = _mm512_setzero_ps(), high = low;
        for (int64_t i = 0; i < norm.width; i += kDepth) {
            low = _mm512_add_ps(low, load_bf16(x + i));
            high = _mm512_add_ps(high, load_bf16(x + i + kTile));
        }
        const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_add_ps(low, high)) / (float)norm.width);
        low = high = _mm512_setzero_ps();
        for (int64_t i = 0; i < norm.width; i += kDepth) {
            const __m512 a = _mm512_sub_ps(load_bf16(x + i), mean), b = _mm512_sub_ps(load_bf16(x + i + kTile), mean);
            low = _mm512_fmadd_ps(a, a, low);
            high = _mm512_fmadd_ps(b, b, high);
        }
        const float variance = _mm512_reduce_add_ps(_mm512_add_ps(low, high)) / (float)norm.width;
        const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(variance + norm.eps));
        for (int64_t i = 0; i < norm.width; i += kDepth) {
            __m512 halves[2];
            for (int j = 0; j < 2; ++j) {
                const int64_t at = i + j * kTile;
                const __m512 factor = _mm512_mul_ps(scale, _mm512_loadu_ps(norm.weight + at));
                const __m512 centred = _mm512_sub_ps(load_bf16(x + at), mean);
                halves[j] = _mm512_fmadd_ps(centred, factor, _mm512_loadu_ps(norm.bias + at));
            }
            store_bf16(line_of(tiles, columns, row, column + i), halves[0], halves[1]);
        }
    }
}

// What becomes of a line of a product's sums, 32 columns of one row, bias included.

struct StoreLine {
    bf16 *out;
    int64_t stride, rows;

    AMX void operator()(int64_t row, int64_t column, __m512 low, __m512 high) const {
        if (row < rows) store_bf16(out + row * stride + column, low, high);
    }
};

struct AddLine {
    bf16 *out;
    int64_t columns, rows;

    AMX void operator()(int64_t row, int64_t column, __m512 low, __m512 high) const {
        if (row >= rows) return;
        bf16 *at = out + row * columns + column;
        store_bf16(at, _mm512_add_ps(low, load_bf16(at)), _mm512_add_ps(high, load_bf16(at + kTile)));
    }
};

template <__m512 (*activate)(__m512)>
struct ActivateLine {
    bf16 *tiles;
    int64_t columns;

    AMX void operator()(int64_t row, int64_t column, __m512 low, __m512 high) const {
        store_bf16(line_of(tiles, columns, row, column), activate(low), activate(high));
    }
};

template <typename Finish>
AMX inline void finish_lines(const Finish &finish, const float *sums, const float *bias, int64_t row, int64_t column,
                             int64_t first, int64_t end) {
    const __m512 low = _mm512_loadu_ps(bias + column), high = _mm512_loadu_ps(bias + column + kTile);
    for (int64_t i = first; i < end; ++i) {
        const float *line = sums + i * kRows;
        finish(row + i, column, _mm512_add_ps(_mm512_load_ps(line), low),
               _mm512_add_ps(_mm512_load_ps(line + kTile), high));
    }
}

// tiles [blocks * 32, depth] . weight^T + bias; what stands in rows that are none matters to no other. The lines of one
// block's sums are finished as the next block is multiplied: the one is work of the vector units, the other of the
// tiles.
template <typename Finish>
AMX void multiply(const Layer &layer, const bf16 *tiles, int64_t blocks, const Finish &finish) {
    alignas(64) float sums[2][kRows * kRows];
    const int64_t steps = layer.depth / kDepth, total = layer.columns / kRows * blocks;
    const int64_t lines = (kRows + steps - 1) / steps;
    for (int64_t unit = 0; unit <= total; ++unit) {
        const int64_t done = unit - 1, row = done % blocks * kRows, column = done / blocks * kRows;
        const float *finished = sums[done & 1];
        if (unit == total) {
            finish_lines(finish, finished, layer.bias, row, column, 0, kRows);
            break;
        }
        const bf16 *upper = tiles + unit % blocks * kRows * layer.depth, *lower = upper + kTile * layer.depth;
        const bf16 *weight = layer.weight + unit / blocks * kRows * layer.depth;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t step = 0; step < steps; ++step, weight += 2 * kTileNumbers) {
            _tile_loadd(4, upper + step * kTileNumbers, 64);
            _tile_loadd(6, weight, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, weight + kTileNumbers, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, lower + step * kTileNumbers, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            if (unit && step * lines < kRows)
                finish_lines(finish, finished, layer.bias, row, column, step * lines,
                             std::min(kRows, (step + 1) * lines));
        }
        float *next = sums[unit & 1];
        _tile_stored(0, next, kRows * 4);
        _tile_stored(1, next + kTile, kRows * 4);
        _tile_stored(2, next + kTile * kRows, kRows * 4);
        _tile_stored(3, next + kTile * kRows + kTile, kRows * 4);
    }
}

// Rotates the halves of each head of q and k of one row, and puts all three where attention reads them.
struct Heads {
    const float *cos, *sin;  // [patches, head_dim / 2]
    bf16 *out;               // [3, heads, patches, head_dim]
    int64_t patches, heads, head_dim;

    AMX void put(const bf16 *qkv, int64_t patch) const {
        const int64_t half = head_dim / 2;
        for (int64_t head = 0; head < 2 * heads; ++head, qkv += head_dim) {
            bf16 *to = out + (head * patches + patch) * head_dim;
            for (int64_t i = 0; i < half; i += kTile) {
                const __mmask16 mask = (__mmask16)lowest(std::min<int64_t>(half - i, kTile));
                const __m512 c = _mm512_maskz_loadu_ps(mask, cos + patch * half + i);
                const __m512 s = _mm512_maskz_loadu_ps(mask, sin + patch * half + i);
                const __m512 a = load_bf16(mask, qkv + i), b = load_bf16(mask, qkv + half + i);
                store_bf16(mask, to + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
                store_bf16(mask, to + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
            }
        }
        for (int64_t head = 2 * heads; head < 3 * heads; ++head, qkv += head_dim)
            memcpy(out + (head * patches + patch) * head_dim, qkv, head_dim * sizeof(bf16));
    }
};

typedef std::unique_ptr<bf16[], decltype(&free)> Memory;

Memory allocate(int64_t numbers) {
    return Memory(static_cast<bf16 *>(aligned_alloc(64, numbers * sizeof(bf16))), &free);
}

AMX void configure_tiles() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, kTile, 64);
    config.load();
}

AMX void release_tiles() { _tile_release(); }

AMX void project(const Layer &qkv, const Norm &norm, const bf16 *hidden, int64_t rows, const Heads &heads,
                 int64_t first, bf16 *memory) {
    const int64_t blocks = (rows + kRows - 1) / kRows;
    bf16 *out = memory + blocks * kRows * qkv.depth;
    normalise(hidden, rows, qkv.depth, norm, memory);
    multiply(qkv, memory, blocks, StoreLine{out, qkv.columns, rows});
    for (int64_t row = 0; row < rows; ++row) heads.put(out + row * qkv.columns, first + row);
}

AMX void finish(const Layer &proj, const Norm &norm, const Layer &fc1, const Layer &fc2, const bf16 *mixed,
                bf16 *hidden, int64_t rows, bf16 *memory) {
    const int64_t blocks = (rows + kRows - 1) / kRows, width = proj.depth;
    bf16 *wide = memory + blocks * kRows * width;
    pack_rows(mixed, rows, width, memory);
    multiply(proj, memory, blocks, AddLine{hidden, width, rows});
    normalise(hidden, rows, width, norm, memory);
    multiply(fc1, memory, blocks, ActivateLine<gelu_tanh>{wide, fc1.columns});
    multiply(fc2, wide, blocks, AddLine{hidden, width, rows});
}

AMX void merge(const Norm &norm, const Layer &fc1, const Layer &fc2, const bf16 *joined, int64_t rows, bf16 *out,
               int64_t stride, bf16 *memory) {
    const int64_t blocks = (rows + kRows - 1) / kRows;
    bf16 *wide = memory + blocks * kRows * fc1.depth;
    normalise(joined, rows, fc1.depth, norm, memory);
    multiply(fc1, memory, blocks, ActivateLine<gelu_erf>{wide, fc1.columns});
    multiply(fc2, wide, blocks, StoreLine{out, stride, rows});
}

// Calls `work(first, rows, memory)` for each `step` rows, with memory of `width` numbers a row and tiles configured. 0
// when all is well, 1 when there was no memory.
template <typename Work>
int for_rows(int64_t total, int64_t step, int64_t width, int threads, const Work &work) {
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
    {
        const Memory memory = allocate(step * width);
        failed = !memory;
        configure_tiles();
#pragma omp for schedule(dynamic, 1)
        for (int64_t first = 0; first < total; first += step)
            if (memory) work(first, std::min(step, total - first), memory.get());
        release_tiles();
    }
    return failed;
}

}  // namespace

extern "C" {

// out [3, heads, patches, head_dim] = q and k, rotated, and v of hidden [patches, width]. Weights are in tiles, with a
// bias; `step` is how many rows a thread takes at once, a multiple of 32, as is the width. 0 when all is well, 1 when
// there was no memory.
int tandem_project_qkv(const void *hidden, const float *norm_weight, const float *norm_bias, float eps,
                       const void *weight, const float *bias, const float *cos, const float *sin, void *out,
                       int64_t patches, int64_t width, int64_t heads, int64_t step, int threads) {
    const Norm norm = {norm_weight, norm_bias, width, eps};
    const Layer qkv = {static_cast<const bf16 *>(weight), bias, width, 3 * width};
    const Heads to = {cos, sin, static_cast<bf16 *>(out), patches, heads, width / heads};
    const auto *x = static_cast<const bf16 *>(hidden);
    return for_rows(patches, step, 4 * width, threads, [&](int64_t first, int64_t rows, bf16 *memory) {
        project(qkv, norm, x + first * width, rows, to, first, memory);
    });
}

// hidden [patches, width] += projection of mixed [patches, width]; then += the MLP of its norm, whose inner width is a
// multiple of 32. Otherwise as above.
int tandem_finish_block(const void *mixed, void *hidden, const void *proj_weight, const float *proj_bias,
                        const float *norm_weight, const float *norm_bias, float eps, const void *fc1_weight,
                        const float *fc1_bias, const void *fc2_weight, const float *fc2_bias, int64_t patches,
                        int64_t width, int64_t inner, int64_t step, int threads) {
    const Norm norm = {norm_weight, norm_bias, width, eps};
    const Layer proj = {static_cast<const bf16 *>(proj_weight), proj_bias, width, width};
    const Layer fc1 = {static_cast<const bf16 *>(fc1_weight), fc1_bias, width, inner};
    const Layer fc2 = {static_cast<const bf16 *>(fc2_weight), fc2_bias, inner, width};
    const auto *attended = static_cast<const bf16 *>(mixed);
    auto *x = static_cast<bf16 *>(hidden);
    return for_rows(patches, step, width + inner, threads, [&](int64_t first, int64_t rows, bf16 *memory) {
        finish(proj, norm, fc1, fc2, attended + first * width, x + first * width, rows, memory);
    });
}

// out [rows, out_width], rows `stride` apart, = MLP of the norm of joined [rows, width]; the norm is of each
// `norm_width` numbers of a row apart. All widths are multiples of 32. Otherwise as above.
int tandem_merge(const void *joined, const float *norm_weight, const float *norm_bias, float eps, int64_t norm_width,
                 const void *fc1_weight, const float *fc1_bias, const void *fc2_weight, const float *fc2_bias,
                 void *out, int64_t stride, int64_t rows, int64_t width, int64_t out_width, int64_t step, int threads) {
    const Norm norm = {norm_weight, norm_bias, norm_width, eps};
    const Layer fc1 = {static_cast<const bf16 *>(fc1_weight), fc1_bias, width, width};
    const Layer fc2 = {static_cast<const bf16 *>(fc2_weight), fc2_bias, width, out_width};
    const auto *x = static_cast<const bf16 *>(joined);
    auto *to = static_cast<bf16 *>(out);
    return for_rows(rows, step, 2 * width, threads, [&](int64_t first, int64_t count, bf16 *memory) {
        merge(norm, fc1, fc2, x + first * width, count, to + first * stride, stride, memory);
    });
}
}

#endif
