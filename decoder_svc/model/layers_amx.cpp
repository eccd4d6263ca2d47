// The dense layers of a step in bfloat16, for processors with AMX: one call for all of them, whose intermediate results
// share a few buffers. Each operation is the one that Python calls for itself elsewhere, and a row's result depends on
// nothing but the row and the cache, so results are equal to the last bit.
//
// Optional: `fused.py` calls this through ctypes where it was built and the processor has AMX. Knows no Python and no
// torch: pointers and sizes only, all checked by the caller.

#include "amx.h"
#include "kernels.h"

#ifdef TANDEM_AMX
#include <algorithm>

using namespace tandem;

namespace {

// Rows that go through an MLP, or to heads, together: few enough for what they become there to stay near the core, and so
// many that weights need not be read again and again.
constexpr int64_t kBlock = 384;

}  // namespace

extern "C" {

// Sizes that all layers share; `inner` is the MLP's.
struct TandemShape {
    int64_t hidden, inner, num_heads, num_kv_heads, dim, block_size;
    double eps, heads_eps;
};

// A layer's weights: norms plain, matrices packed for `tandem_linear_amx`; biases may be null.
struct TandemLayer {
    const void *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *post_norm, *gate_up, *down;
};

// What a step gives: hidden [rows, hidden] is the residual stream, and normed [rows, hidden] what leaves the last norm.
// `pool` is the first layer's, and the others' follow at `pool_stride` bytes, as do the `bases` of a cache whose full
// blocks are compressed, which else are null. Sequences are listed by whether they have
// one new token, whose rows are listed too, or several. `scratch` has room for what is below.
struct TandemStep {
    void *hidden, *normed, *scratch, *pool;
    uint8_t *bases;
    const float *cos, *sin;
    const int64_t *slots;
    const int32_t *tables, *contexts, *starts;
    const int64_t *decoding, *decoding_rows, *prefilling;
    int64_t rows, num_decoding, num_prefilling, table_width, pool_stride, bases_stride, threads;
};

// Numbers of bfloat16 in the scratch of so many rows.
int64_t tandem_layers_scratch(const TandemShape *shape, int64_t rows) {
    const int64_t heads = shape->num_heads * shape->dim, kv_heads = shape->num_kv_heads * shape->dim;
    const int64_t inside = std::max(heads + 2 * kv_heads, shape->hidden + 3 * shape->inner);
    return 2 * rows * heads + std::min(rows, kBlock) * inside;
}

// Runs `count` layers and the norm behind them. 0 when all is well, 1 when there was no memory.
int tandem_run_layers(const TandemShape *shape, const TandemLayer *layers, int64_t count, const void *last_norm,
                      const TandemStep *step) {
    const TandemShape &s = *shape;
    const TandemStep &t = *step;
    const int64_t heads = s.num_heads * s.dim, qkv_size = heads + 2 * s.num_kv_heads * s.dim;
    const int64_t block = std::min(t.rows, kBlock);
    const int threads = (int)t.threads;
    const float eps = (float)s.eps;
    bf16 *hidden = static_cast<bf16 *>(t.hidden), *normed = static_cast<bf16 *>(t.normed);
    bf16 *q = static_cast<bf16 *>(t.scratch), *mixed = q + t.rows * heads;
    bf16 *qkv = mixed + t.rows * heads;  // and in its place, later in a layer:
    bf16 *delta = qkv, *gate_up = delta + block * s.hidden, *gated = gate_up + block * 2 * s.inner;
    char *pool = static_cast<char *>(t.pool);
    uint8_t *bases = t.bases;
    int failed = 0;
    tandem_rms_norm_amx(hidden, nullptr, layers[0].input_norm, normed, t.rows, s.hidden, eps, threads);
    for (int64_t i = 0; i < count; ++i, pool += t.pool_stride, bases = bases ? bases + t.bases_stride : nullptr) {
        const TandemLayer &w = layers[i];
        for (int64_t row = 0; row < t.rows; row += kBlock) {
            const int64_t rows = std::min(kBlock, t.rows - row);
            failed |= tandem_linear_amx(normed + row * s.hidden, w.qkv, w.qkv_bias, qkv, rows, s.hidden, qkv_size, threads);
            const float *cos = t.cos + row * s.dim / 2, *sin = t.sin + row * s.dim / 2;
            if (bases)
                tandem_store_heads_compressed(qkv, w.q_norm, w.k_norm, cos, sin, t.slots + row, q + row * heads, pool,
                                              bases, rows, s.num_heads, s.num_kv_heads, s.dim, s.block_size,
                                              (float)s.heads_eps, threads);
            else
                tandem_store_heads(1, qkv, w.q_norm, w.k_norm, cos, sin, t.slots + row, q + row * heads, pool, rows,
                                   s.num_heads, s.num_kv_heads, s.dim, s.block_size, (float)s.heads_eps, threads);
        }
        if (t.num_prefilling)
            failed |= tandem_attend_prefill_amx(q, pool, bases, mixed, t.tables, t.table_width, t.contexts, t.starts,
                                                t.prefilling, t.num_prefilling, s.num_heads, s.num_kv_heads, s.dim,
                                                s.block_size, threads);
        if (t.num_decoding)
            tandem_attend_decode_amx(q, pool, bases, mixed, t.tables, t.table_width, t.contexts, t.decoding,
                                     t.decoding_rows, t.num_decoding, s.num_heads, s.num_kv_heads, s.dim,
                                     s.block_size, threads);
        const void *next_norm = i + 1 < count ? layers[i + 1].input_norm : last_norm;
        for (int64_t row = 0; row < t.rows; row += kBlock) {
            const int64_t rows = std::min(kBlock, t.rows - row);
            bf16 *own = hidden + row * s.hidden, *own_normed = normed + row * s.hidden;
            failed |= tandem_linear_amx(mixed + row * heads, w.o, w.o_bias, delta, rows, heads, s.hidden, threads);
            tandem_rms_norm_amx(own, delta, w.post_norm, own_normed, rows, s.hidden, eps, threads);
            failed |= tandem_linear_amx(own_normed, w.gate_up, nullptr, gate_up, rows, s.hidden, 2 * s.inner, threads);
            tandem_silu_gate_amx(gate_up, gated, rows, s.inner, threads);
            failed |= tandem_linear_amx(gated, w.down, nullptr, delta, rows, s.inner, s.hidden, threads);
            tandem_rms_norm_amx(own, delta, next_norm, own_normed, rows, s.hidden, eps, threads);
        }
    }
    return failed;
}
}

#endif
