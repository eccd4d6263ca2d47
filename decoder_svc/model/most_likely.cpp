// The largest number of each row of logits and whether all of them are finite, in one pass over them, on CPU.
//
// Optional, as `kernels.cpp` is, and called in the same way. Of equal numbers the first is taken, and 0 equals -0.

#include "kernels.h"
#include "vectors.h"

#include <cmath>

namespace {

constexpr int kParts = 4;  // vectors at once, none of which waits for another

INLINE float widened(float value) { return value; }

INLINE float widened(bf16 value) {
    const uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

struct Best {
    float high = -INFINITY;
    int32_t at = 0;

    void offer(float value, int32_t place) {
        if (value > high || (value == high && place < at)) {
            high = value;
            at = place;
        }
    }
};

template <class T>
INLINE int32_t most_likely(const T *row, int64_t size, uint8_t *is_finite) {
    constexpr int kStep = kParts * kLanes;
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Floats high[kParts], odd[kParts] = {}, x;  // x - x is 0, but for what is not finite
    Ints at[kParts] = {};
    for (int p = 0; p < kParts; ++p) high[p] = Floats{} - INFINITY;
    const int64_t whole = size / kStep * kStep;
    for (int64_t i = 0; i < whole; i += kStep)
UNROLL
        for (int p = 0; p < kParts; ++p) {
            load(x, row + i + p * kLanes);
            const Ints is_more = x > high[p];
            high[p] = is_more ? x : high[p];
            at[p] = is_more ? lane + (int32_t)(i + p * kLanes) : at[p];
            odd[p] += x - x;
        }
    Best best;
    float rest = 0.0f;
    for (int p = 0; p < kParts; ++p)
        for (int i = 0; i < kLanes; ++i) {
            best.offer(high[p][i], at[p][i]);
            rest += odd[p][i];
        }
    for (int64_t i = whole; i < size; ++i) {
        const float value = widened(row[i]);
        best.offer(value, (int32_t)i);
        rest += value - value;
    }
    *is_finite = rest == 0.0f;
    return best.at;
}

CLONES int32_t most_likely_f32(const float *row, int64_t size, uint8_t *f) { return most_likely(row, size, f); }
CLONES int32_t most_likely_b16(const bf16 *row, int64_t size, uint8_t *f) { return most_likely(row, size, f); }

}  // namespace

// logits [rows, size] -> tokens [rows], and is_finite [rows], 0 or 1. A row that is not finite has any token.
extern "C" void tandem_most_likely(int is_half, const void *logits, int64_t *tokens, uint8_t *is_finite, int64_t rows,
                                   int64_t size, int threads) {
    ROWS(rows) {
        const int64_t at = row * size;
        tokens[row] = is_half ? most_likely_b16(AT(const bf16, logits, at), size, is_finite + row)
                              : most_likely_f32(AT(const float, logits, at), size, is_finite + row);
    }
}
