// The small operations of a decoder layer on CPU, each in one pass over memory: norms, rotation into the KV cache,
// the gated activation, and attention of single tokens over the paged cache without gathering its blocks.
//
// Optional: `kernels.py` calls these through ctypes where they were built, and plain torch does the same elsewhere.
// Knows no Python and no torch: pointers, sizes and strides only, all checked by the caller. GCC's vectors of 16 floats
// become what the processor has; `target_clones` chooses when the library is loaded. Arithmetic is in float32; bfloat16
// is rounded to nearest even when it is stored, and NaN stays NaN, since the engine looks for it.

#include "kernels.h"
#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

// The lanes moved up by so many, round the end.
template <int BY>
INLINE void turned(const Floats &value, Floats &out) {
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    out = __builtin_shuffle(value, (lane + BY) & 15);
}

template <int BY>
INLINE void add_turned(Floats &value) {
    Floats other;
    turned<BY>(value, other);
    value += other;
}

template <int BY>
INLINE void raise_to_turned(Floats &value) {
    Floats other;
    turned<BY>(value, other);
    value = value > other ? value : other;
}

INLINE float sum(Floats value) {
    add_turned<8>(value);
    add_turned<4>(value);
    add_turned<2>(value);
    add_turned<1>(value);
    return value[0];
}

INLINE float largest(Floats value) {
    raise_to_turned<8>(value);
    raise_to_turned<4>(value);
    raise_to_turned<2>(value);
    raise_to_turned<1>(value);
    return value[0];
}

// exp(x) to 2 ulp: 2^n * e^r with |r| <= ln(2)/2. Below -87 it is 0, above 88 it is infinite, NaN stays NaN.
INLINE void exponential(Floats &x) {
    const Floats zero = {};
    const Floats clamped = x < -87.0f ? zero - 87.0f : (x > 88.0f ? zero + 88.0f : x);
    const Floats shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's last bits are the integer
    const Floats n = shifted - 12582912.0f;
    const Floats r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Words bits;
    memcpy(&bits, &shifted, sizeof bits);
    const Words power = (bits - 0x4b400000u + 127u) << 23;
    Floats scale;
    memcpy(&scale, &power, sizeof scale);
    x = x < -87.0f ? zero : (x > 88.0f ? zero + INFINITY : (x != x ? x : p * scale));
}

// Sums of the lanes of 16 vectors, lane i of the result being that of vector i.
INLINE void transpose_sum(Floats *v, Floats &out) {
    const Ints even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const Ints odd = even + 1;
    for (int count = kLanes / 2; count; count /= 2)
        for (int i = 0; i < count; ++i)
            v[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], even) + __builtin_shuffle(v[2 * i], v[2 * i + 1], odd);
    out = v[0];
}

// One row of `size` numbers: hidden += delta (when there is one), out = hidden / rms(hidden) * weight.
template <class T>
INLINE void norm_row(T *hidden, const T *delta, const T *weight, T *out, int64_t size, float eps) {
    Floats squares = {}, x, y;
    for (int64_t i = 0; i < size; i += kLanes) {
        load(x, hidden + i);
        if (delta) {
            load(y, delta + i);
            x += y;
            store(hidden + i, x);
            load(x, hidden + i);  // as rounded
        }
        squares += x * x;
    }
    const float scale = 1.0f / sqrtf(sum(squares) / size + eps);
    for (int64_t i = 0; i < size; i += kLanes) {
        load(x, hidden + i);
        load(y, weight + i);
        store(out + i, x * scale * y);
    }
}

struct Heads {
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    float eps;
};

// One head of one token: norm by `weight`, then rotation of the halves.
template <class T>
INLINE void rotate_head(const T *in, const T *weight, const float *cos, const float *sin, T *out, int64_t dim, float eps) {
    Floats squares = {}, x, y, w, v, c, s;
    for (int64_t i = 0; i < dim; i += kLanes) {
        load(x, in + i);
        squares += x * x;
    }
    const float scale = 1.0f / sqrtf(sum(squares) / dim + eps);
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += kLanes) {
        load(x, in + i);
        load(w, weight + i);
        load(y, in + half + i);
        load(v, weight + half + i);
        load(c, cos + i);
        load(s, sin + i);
        x *= scale * w;
        y *= scale * v;
        store(out + i, x * c - y * s);
        store(out + half + i, y * c + x * s);
    }
}

template <class T>
INLINE void heads_row(const T *qkv, const T *q_weight, const T *k_weight, const float *cos, const float *sin,
                      int64_t slot, T *q_out, T *pool, const Heads &h) {
    const int64_t dim = h.head_dim, unit = h.block_size * dim;
    for (int64_t i = 0; i < h.num_heads; ++i)
        rotate_head(qkv + i * dim, q_weight, cos, sin, q_out + i * dim, dim, h.eps);
    const T *k = qkv + h.num_heads * dim, *v = k + h.num_kv_heads * dim;
    const int64_t block = slot / h.block_size, offset = slot % h.block_size;
    for (int64_t i = 0; i < h.num_kv_heads; ++i) {
        T *keys = pool + (block * h.num_kv_heads + i) * 2 * unit + offset * dim;
        rotate_head(k + i * dim, k_weight, cos, sin, keys, dim, h.eps);
        memcpy(keys + unit, v + i * dim, dim * sizeof(T));
    }
}

template <class T>
INLINE void gate_row(const T *gate_up, T *out, int64_t size) {
    Floats gate, up, e;
    for (int64_t i = 0; i < size; i += kLanes) {
        load(gate, gate_up + i);
        load(up, gate_up + size + i);
        e = -gate;
        exponential(e);
        store(out + i, gate / (e + 1.0f) * up);
    }
}

// The running state of one query head: largest score, sums of weights by lane, and weighted sum of values.
constexpr int kMaxDim = 256;
struct Running {
    Floats total;
    float high;
    float mixed[kMaxDim];
};

// Scores of `count` keys, at most 16, against the scaled queries of N heads; lanes beyond `count` are -inf.
template <class T, int DIM, int N>
INLINE void score(const float *q, const T *keys, int count, int64_t dim, Floats *out) {
    Floats partial[N][kLanes] = {}, k, x;
    for (int t = 0; t < count; ++t)
UNROLL
        for (int64_t i = 0; i < (DIM ? DIM : dim); i += kLanes) {
            load(k, keys + t * dim + i);
UNROLL
            for (int n = 0; n < N; ++n) {
                load(x, q + n * dim + i);
                partial[n][t] += k * x;
            }
        }
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Floats never = Floats{} - INFINITY;
    for (int n = 0; n < N; ++n) {
        transpose_sum(partial[n], out[n]);
        out[n] = lane < count ? out[n] : never;
    }
}

// Turns scores into weights relative to the highest so far, after what was mixed before is scaled to it.
INLINE void weigh(Running &state, Floats &scores, int64_t dim) {
    const float high = largest(scores);
    // A NaN among the scores loses each comparison; the weights carry it.
    if (high > state.high) {
        Floats rescale = Floats{} + (state.high - high);
        exponential(rescale);
        state.total *= rescale;
        for (int64_t i = 0; i < dim; ++i) state.mixed[i] *= rescale[0];
        state.high = high;
    }
    scores -= state.high;
    exponential(scores);
    state.total += scores;
}

// Adds `count` values, weighted, to the states of N heads.
template <class T, int DIM, int N>
INLINE void mix(Running *states, const Floats *weights, const T *values, int count, int64_t dim) {
    constexpr int kParts = DIM ? DIM / kLanes : 1;
    for (int64_t i = 0; i < dim; i += kParts * kLanes) {
        Floats acc[N][kParts], v;
UNROLL
        for (int n = 0; n < N; ++n)
UNROLL
            for (int p = 0; p < kParts; ++p) load(acc[n][p], states[n].mixed + i + p * kLanes);
        for (int t = 0; t < count; ++t)
UNROLL
            for (int p = 0; p < kParts; ++p) {
                load(v, values + t * dim + i + p * kLanes);
UNROLL
                for (int n = 0; n < N; ++n) acc[n][p] += v * weights[n][t];
            }
UNROLL
        for (int n = 0; n < N; ++n)
UNROLL
            for (int p = 0; p < kParts; ++p) store(states[n].mixed + i + p * kLanes, acc[n][p]);
    }
}

// N heads over the same `count` keys and values, which are then converted once.
template <class T, int DIM, int N>
INLINE void attend_some(Running *states, const float *q, const T *keys, const T *values, int count, int64_t dim) {
    Floats scores[N];
    score<T, DIM, N>(q, keys, count, dim, scores);
    for (int n = 0; n < N; ++n) weigh(states[n], scores[n], dim);
    mix<T, DIM, N>(states, scores, values, count, dim);
}

struct Paged {
    const int32_t *table;
    int64_t context, block_size, block_stride, head_dim, group;  // strides in elements
    float scale;
};

constexpr int64_t kMaxGroup = 16;

// All query heads of one KV head of one sequence. `pool` points at this head in block 0: keys, then values.
template <class T, int DIM>
INLINE void attend_head(const T *q, const T *pool, T *out, const Paged &p) {
    const int64_t dim = DIM ? DIM : p.head_dim, unit = p.block_size * dim;
    alignas(64) float queries[kMaxGroup * kMaxDim];
    alignas(64) Running states[kMaxGroup];
    for (int64_t i = 0; i < p.group * dim; i += kLanes) {
        Floats x;
        load(x, q + i);
        store(queries + i, x * p.scale);
    }
    for (int64_t g = 0; g < p.group; ++g) {
        states[g].high = -INFINITY;
        states[g].total = Floats{};
        std::fill_n(states[g].mixed, dim, 0.0f);
    }
    const int64_t line = 64 / sizeof(T);
    for (int64_t start = 0, block = 0; start < p.context; start += p.block_size, ++block) {
        const T *keys = pool + p.table[block] * p.block_stride;
        const int64_t length = std::min(p.block_size, p.context - start);
        const T *next = start + p.block_size < p.context ? pool + p.table[block + 1] * p.block_stride : nullptr;
        for (int64_t from = 0; from < length; from += kLanes) {
            const int count = (int)std::min<int64_t>(kLanes, length - from);
            if (next)  // the pool is far larger than the caches, and blocks lie anywhere in it
                for (int64_t i = from * dim; i < (from + count) * dim; i += line) {
                    __builtin_prefetch(next + i);
                    __builtin_prefetch(next + unit + i);
                }
            const T *k = keys + from * dim, *v = k + unit;
            int64_t g = 0;
            for (; g + 2 <= p.group; g += 2)
                attend_some<T, DIM, 2>(states + g, queries + g * dim, k, v, count, dim);
            if (g < p.group) attend_some<T, 0, 1>(states + g, queries + g * dim, k, v, count, dim);
        }
    }
    for (int64_t g = 0; g < p.group; ++g) {
        const float scale = 1.0f / sum(states[g].total);
        for (int64_t i = 0; i < dim; i += kLanes) {
            Floats x;
            load(x, states[g].mixed + i);
            store(out + g * dim + i, x * scale);
        }
    }
}

template <class T>
INLINE void attend_any(const T *q, const T *pool, T *out, const Paged &p) {
    if (p.head_dim == 64) return attend_head<T, 64>(q, pool, out, p);
    if (p.head_dim == 128) return attend_head<T, 128>(q, pool, out, p);
    attend_head<T, 0>(q, pool, out, p);
}

// What is cloned for each kind of processor: one row or one head, for both dtypes.
CLONES void norm_f32(float *h, const float *d, const float *w, float *o, int64_t n, float e) { norm_row(h, d, w, o, n, e); }
CLONES void norm_b16(bf16 *h, const bf16 *d, const bf16 *w, bf16 *o, int64_t n, float e) { norm_row(h, d, w, o, n, e); }
CLONES void gate_f32(const float *g, float *o, int64_t n) { gate_row(g, o, n); }
CLONES void gate_b16(const bf16 *g, bf16 *o, int64_t n) { gate_row(g, o, n); }
CLONES void heads_f32(const float *x, const float *qw, const float *kw, const float *c, const float *s, int64_t slot,
                      float *q, float *pool, const Heads &h) {
    heads_row(x, qw, kw, c, s, slot, q, pool, h);
}
CLONES void heads_b16(const bf16 *x, const bf16 *qw, const bf16 *kw, const float *c, const float *s, int64_t slot,
                      bf16 *q, bf16 *pool, const Heads &h) {
    heads_row(x, qw, kw, c, s, slot, q, pool, h);
}
CLONES void attend_f32(const float *q, const float *pool, float *o, const Paged &p) { attend_any(q, pool, o, p); }
CLONES void attend_b16(const bf16 *q, const bf16 *pool, bf16 *o, const Paged &p) { attend_any(q, pool, o, p); }

}  // namespace

extern "C" {

// hidden, delta (or null), out [rows, size]; weight [size]. `hidden` takes `delta` in.
void tandem_rms_norm(int is_half, void *hidden, const void *delta, const void *weight, void *out, int64_t rows,
                     int64_t size, float eps, int threads) {
    ROWS(rows) {
        const int64_t at = row * size;
        if (is_half)
            norm_b16(AT(bf16, hidden, at), delta ? AT(const bf16, delta, at) : nullptr, (const bf16 *)weight,
                     AT(bf16, out, at), size, eps);
        else
            norm_f32(AT(float, hidden, at), delta ? AT(const float, delta, at) : nullptr, (const float *)weight,
                     AT(float, out, at), size, eps);
    }
}

// gate_up [rows, 2 * size] -> out [rows, size] = silu(gate) * up.
void tandem_silu_gate(int is_half, const void *gate_up, void *out, int64_t rows, int64_t size, int threads) {
    ROWS(rows) {
        if (is_half)
            gate_b16(AT(const bf16, gate_up, 2 * row * size), AT(bf16, out, row * size), size);
        else
            gate_f32(AT(const float, gate_up, 2 * row * size), AT(float, out, row * size), size);
    }
}

// qkv [rows, heads + 2 * kv_heads, dim] -> q_out [rows, heads, dim], and k and v into the slots of the pool
// [blocks, kv_heads, 2, block_size, dim]. q and k are normed and rotated by cos and sin [rows, dim / 2] float32.
void tandem_store_heads(int is_half, const void *qkv, const void *q_weight, const void *k_weight, const float *cos,
                        const float *sin, const int64_t *slots, void *q_out, void *pool, int64_t rows,
                        int64_t num_heads, int64_t num_kv_heads, int64_t dim, int64_t block_size, float eps,
                        int threads) {
    const Heads h = {num_heads, num_kv_heads, dim, block_size, eps};
    const int64_t width = (num_heads + 2 * num_kv_heads) * dim;
    ROWS(rows) {
        const float *c = cos + row * dim / 2, *s = sin + row * dim / 2;
        if (is_half)
            heads_b16(AT(const bf16, qkv, row * width), (const bf16 *)q_weight, (const bf16 *)k_weight, c, s,
                      slots[row], AT(bf16, q_out, row * num_heads * dim), (bf16 *)pool, h);
        else
            heads_f32(AT(const float, qkv, row * width), (const float *)q_weight, (const float *)k_weight, c, s,
                      slots[row], AT(float, q_out, row * num_heads * dim), (float *)pool, h);
    }
}

// For each listed sequence one query token over its context: rows[i] is its row of q and out [T, heads, dim],
// tables + sequences[i] * table_width its blocks in the pool [blocks, kv_heads, 2, block_size, dim].
void tandem_attend_decode(int is_half, const void *q, const void *pool, void *out, const int32_t *tables,
                          int64_t table_width, const int32_t *contexts, const int64_t *sequences, const int64_t *rows,
                          int64_t count, int64_t num_heads, int64_t num_kv_heads, int64_t dim, int64_t block_size,
                          int threads) {
    const int64_t group = num_heads / num_kv_heads, unit = 2 * block_size * dim;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
    for (int64_t item = 0; item < count * num_kv_heads; ++item) {
        const int64_t i = item / num_kv_heads, head = item % num_kv_heads, sequence = sequences[i];
        for (int64_t first = 0; first < group; first += kMaxGroup) {
            const Paged p = {tables + sequence * table_width,  contexts[sequence], block_size,
                             num_kv_heads * unit,              dim,                std::min(group - first, kMaxGroup),
                             1.0f / sqrtf((float)dim)};
            const int64_t at = (rows[i] * num_heads + head * group + first) * dim;
            if (is_half)
                attend_b16(AT(const bf16, q, at), AT(const bf16, pool, head * unit), AT(bf16, out, at), p);
            else
                attend_f32(AT(const float, q, at), AT(const float, pool, head * unit), AT(float, out, at), p);
        }
    }
}
}
