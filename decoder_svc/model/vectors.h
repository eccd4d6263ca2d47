// What the kernels for any processor share: GCC's vectors of 16 floats, which become what the processor has, and how they
// are read from and written to float32 and bfloat16. Rounding is to nearest even, and NaN stays NaN.

#pragma once

#include <cstdint>
#include <cstring>

// Only these loops have to be unrolled, to stay in registers; unrolling everything takes the compiler a minute.
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

// A loop over rows, or over what else is independent, on so many threads.
#define ROWS(count) _Pragma("omp parallel for num_threads(threads) if (threads > 1)") \
    for (int64_t row = 0; row < (count); ++row)
#define AT(type, pointer, offset) ((type *)(pointer) + (offset))

namespace {

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint16_t bf16;

INLINE void load(Floats &out, const float *from) { memcpy(&out, from, sizeof out); }

INLINE void load(Floats &out, const bf16 *from) {
    Halves raw;
    memcpy(&raw, from, sizeof raw);
    const Words wide = __builtin_convertvector(raw, Words) << 16;
    memcpy(&out, &wide, sizeof out);
}

INLINE void store(float *to, const Floats &value) { memcpy(to, &value, sizeof value); }

INLINE void store(bf16 *to, const Floats &value) {
    Words bits;
    memcpy(&bits, &value, sizeof bits);
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Words is_nan = (Words)(value != value);
    const Halves raw = __builtin_convertvector((is_nan & 0x7fc0u) | (~is_nan & rounded), Halves);
    memcpy(to, &raw, sizeof raw);
}

}  // namespace
