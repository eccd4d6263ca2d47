// The functions of this library that Python calls, and that run one behind the other in `layers_amx.cpp`. Pointers to
// bfloat16 or float32 numbers are `void *`; each definition says what they point at.

#pragma once

#include <cstdint>

extern "C" {

void tandem_rms_norm(int is_half, void *hidden, const void *delta, const void *weight, void *out, int64_t rows,
                     int64_t size, float eps, int threads);

void tandem_silu_gate(int is_half, const void *gate_up, void *out, int64_t rows, int64_t size, int threads);

void tandem_store_heads(int is_half, const void *qkv, const void *q_weight, const void *k_weight, const float *cos,
                        const float *sin, const int64_t *slots, void *q_out, void *pool, int64_t rows,
                        int64_t num_heads, int64_t num_kv_heads, int64_t dim, int64_t block_size, float eps,
                        int threads);

void tandem_attend_decode(int is_half, const void *q, const void *pool, void *out, const int32_t *tables,
                          int64_t table_width, const int32_t *contexts, const int64_t *sequences, const int64_t *rows,
                          int64_t count, int64_t num_heads, int64_t num_kv_heads, int64_t dim, int64_t block_size,
                          int threads);

void tandem_rms_norm_amx(void *hidden, const void *delta, const void *weight, void *out, int64_t rows, int64_t size,
                         float eps, int threads);

void tandem_silu_gate_amx(const void *gate_up, void *out, int64_t rows, int64_t size, int threads);

void tandem_store_heads_compressed(const void *qkv, const void *q_weight, const void *k_weight, const float *cos,
                                   const float *sin, const int64_t *slots, void *q_out, void *pool, uint8_t *bases,
                                   int64_t rows, int64_t num_heads, int64_t num_kv_heads, int64_t dim,
                                   int64_t block_size, float eps, int threads);

void tandem_attend_decode_amx(const void *q, const void *pool, const uint8_t *bases, void *out, const int32_t *tables,
                              int64_t table_width, const int32_t *contexts, const int64_t *sequences, const int64_t *rows, int64_t count,
                              int64_t num_heads, int64_t num_kv_heads, int64_t dim, int64_t block_size, int threads);

int tandem_attend_prefill_amx(const void *q, const void *pool, const uint8_t *bases, void *out, const int32_t *tables,
                              int64_t table_width, const int32_t *contexts, const int32_t *starts, const int64_t *sequences, int64_t count,
                              int64_t num_heads, int64_t num_kv_heads, int64_t dim, int64_t block_size, int threads);

void tandem_most_likely(int is_half, const void *logits, int64_t *tokens, uint8_t *is_finite, int64_t rows, int64_t size,
                        int threads);

int tandem_linear_amx(const void *x, const void *weight, const void *bias, void *out, int64_t rows, int64_t depth,
                      int64_t columns, int threads);
}
