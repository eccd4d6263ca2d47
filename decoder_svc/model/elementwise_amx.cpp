// The small operations of a layer in bfloat16 for processors with AMX, which round sixteen numbers in one instruction:
// a prompt spends a tenth of its time in them. A number too small to be a normal one is taken for zero.
//
// Optional: `kernels.py` calls this through ctypes where it was built and the processor has AMX. Knows no Python and no
// torch: pointers and sizes only, all checked by the caller. Sums are in float32. NaN stays NaN.

#include "kernels.h"
#include "vectors_amx.h"

#ifdef TANDEM_AMX

using namespace tandem;

namespace {

// One row of `size` numbers: hidden += delta (when there is one), out = hidden / rms(hidden) * weight.
AMX void norm_row(bf16 *hidden, const bf16 *delta, const bf16 *weight, bf16 *out, int64_t size, float eps) {
    Pair squares = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t i = 0; i < size; i += kDepth) {
        Pair x = widen(_mm512_loadu_si512(hidden + i));
        if (delta) {
            const Pair y = widen(_mm512_loadu_si512(delta + i));
            const __m512i sum = narrow({_mm512_add_ps(x.even, y.even), _mm512_add_ps(x.odd, y.odd)});
            _mm512_storeu_si512(hidden + i, sum);
            x = widen(sum);  // as rounded
        }
        squares = {_mm512_fmadd_ps(x.even, x.even, squares.even), _mm512_fmadd_ps(x.odd, x.odd, squares.odd)};
    }
    const float mean = _mm512_reduce_add_ps(_mm512_add_ps(squares.even, squares.odd)) / (float)size;
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean + eps));
    for (int64_t i = 0; i < size; i += kDepth) {
        const Pair x = widen(_mm512_loadu_si512(hidden + i)), w = widen(_mm512_loadu_si512(weight + i));
        _mm512_storeu_si512(out + i, narrow({_mm512_mul_ps(_mm512_mul_ps(x.even, scale), w.even),
                                             _mm512_mul_ps(_mm512_mul_ps(x.odd, scale), w.odd)}));
    }
}

// x / (1 + e^-x), whose inverse is taken for zero where it is not a normal number. One step of Newton's makes it exact to
// 2^-22.
AMX inline __m512 silu(__m512 x) {
    const __m512 power = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f));
    const __mmask16 is_normal = _mm512_cmp_ps_mask(power, _mm512_set1_ps(125.0f), _CMP_LE_OQ);
    const __m512 sum = _mm512_add_ps(power_of_two(power), _mm512_set1_ps(1.0f));
    const __m512 guess = _mm512_rcp14_ps(sum);
    const __m512 inverse = _mm512_maskz_mul_ps(is_normal, guess, _mm512_fnmadd_ps(sum, guess, _mm512_set1_ps(2.0f)));
    return _mm512_mul_ps(x, inverse);
}

AMX void gate_row(const bf16 *gate_up, bf16 *out, int64_t size) {
    for (int64_t i = 0; i < size; i += kDepth) {
        const Pair gate = widen(_mm512_loadu_si512(gate_up + i)), up = widen(_mm512_loadu_si512(gate_up + size + i));
        _mm512_storeu_si512(out + i, narrow({_mm512_mul_ps(silu(gate.even), up.even),
                                             _mm512_mul_ps(silu(gate.odd), up.odd)}));
    }
}

}  // namespace

extern "C" {

// As `tandem_rms_norm` of `kernels.cpp`, in bfloat16 alone, for sizes that are multiples of 32.
void tandem_rms_norm_amx(void *hidden, const void *delta, const void *weight, void *out, int64_t rows, int64_t size,
                         float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row)
        norm_row(static_cast<bf16 *>(hidden) + row * size,
                 delta ? static_cast<const bf16 *>(delta) + row * size : nullptr, static_cast<const bf16 *>(weight),
                 static_cast<bf16 *>(out) + row * size, size, eps);
}

// As `tandem_silu_gate` of `kernels.cpp`, in bfloat16 alone, for sizes that are multiples of 32.
void tandem_silu_gate_amx(const void *gate_up, void *out, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row)
        gate_row(static_cast<const bf16 *>(gate_up) + 2 * row * size, static_cast<bf16 *>(out) + row * size, size);
}
}

#endif
