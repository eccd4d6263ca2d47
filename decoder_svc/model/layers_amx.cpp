// The dense layers of a step of single tokens in bfloat16, for processors with AMX: one call for all of them, whose
// intermediate results share a few buffers. Each operation is the one that Python calls for itself in other steps, so
// results are equal to the last bit.
//
// Optional: `fused.py` calls this through ctypes where it was built and the processor has AMX. Knows no Python and no
// torch: pointers and sizes only, all checked by the caller.

#include "amx.h"
#include "kernels.h"

#ifdef TANDEM_AMX

using namespace tandem;

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
// The layers' pools follow each other at `pool_stride` bytes. `scratch` has room for each row's
// intermediate results, in the order below.
struct TandemStep {
    void *hidden, *normed, *scratch, *pool;
    const float *cos, *sin;
    const int64_t *slots;
    const int32_t *tables, *contexts;
    const int64_t *sequences, *sequence_rows;
    int64_t rows, count, table_width, pool_stride, threads;
};

// Runs `count` layers and the norm behind them.
void tandem_run_layers(const TandemShape *shape, const TandemLayer *layers, int64_t count, const void *last_norm,
                       const TandemStep *step) {
    const TandemShape &s = *shape;
    const TandemStep &t = *step;
    const int64_t rows = t.rows, heads = s.num_heads * s.dim, qkv_size = heads + 2 * s.num_kv_heads * s.dim;
    const int threads = (int)t.threads;
    const float eps = (float)s.eps;
    bf16 *delta = static_cast<bf16 *>(t.scratch), *qkv = delta + rows * s.hidden, *q = qkv + rows * qkv_size;
    bf16 *mixed = q + rows * heads, *gate_up = mixed + rows * heads, *gated = gate_up + rows * 2 * s.inner;
    char *pool = static_cast<char *>(t.pool);
    for (int64_t i = 0; i < count; ++i, pool += t.pool_stride) {
        const TandemLayer &w = layers[i];
        tandem_rms_norm(1, t.hidden, i ? delta : nullptr, w.input_norm, t.normed, rows, s.hidden, eps, threads);
        tandem_linear_amx(t.normed, w.qkv, w.qkv_bias, qkv, rows, s.hidden, qkv_size, threads);
        tandem_store_heads(1, qkv, w.q_norm, w.k_norm, t.cos, t.sin, t.slots, q, pool, rows, s.num_heads,
                           s.num_kv_heads, s.dim, s.block_size, (float)s.heads_eps, threads);
        tandem_attend_decode_amx(q, pool, mixed, t.tables, t.table_width, t.contexts, t.sequences, t.sequence_rows,
                                 t.count, s.num_heads, s.num_kv_heads, s.dim, s.block_size, threads);
        tandem_linear_amx(mixed, w.o, w.o_bias, delta, rows, heads, s.hidden, threads);
        tandem_rms_norm(1, t.hidden, delta, w.post_norm, t.normed, rows, s.hidden, eps, threads);
        tandem_linear_amx(t.normed, w.gate_up, nullptr, gate_up, rows, s.hidden, 2 * s.inner, threads);
        tandem_silu_gate(1, gate_up, gated, rows, s.inner, threads);
        tandem_linear_amx(gated, w.down, nullptr, delta, rows, s.inner, s.hidden, threads);
    }
    tandem_rms_norm(1, t.hidden, delta, last_norm, t.normed, rows, s.hidden, eps, threads);
}
}

#endif
