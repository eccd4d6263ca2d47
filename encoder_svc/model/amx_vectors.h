// What the tower's kernels for processors with AMX share: vectors of 16 numbers, to and from bfloat16, and functions of
// them.

#pragma once

#include "../../common/amx_attention.h"

#ifdef TANDEM_AMX
#include <algorithm>
#include <cstring>

namespace tandem {

AMX inline __m512 widen(__m256i numbers) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

AMX inline __m512 load_bf16(const bf16 *x) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(x)));
}

AMX inline __m512 load_bf16(__mmask16 mask, const bf16 *x) { return widen(_mm256_maskz_loadu_epi16(mask, x)); }

AMX inline void store_bf16(__mmask16 mask, bf16 *out, __m512 numbers) {
    _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(numbers));
}

AMX inline void store_bf16(bf16 *out, __m512 low, __m512 high) {
    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// GELU in its tanh form, which is x / (1 + e^-2y) with y = sqrt(2 / pi) (x + 0.044715 x^3); NaN stays.
AMX inline __m512 gelu_tanh(__m512 x) {
    constexpr float kScale = -2 * 1.44269504f * 0.79788456f;
    const __m512 cubic = _mm512_set1_ps(kScale * 0.044715f);
    const __m512 inner = _mm512_fmadd_ps(_mm512_mul_ps(x, x), cubic, _mm512_set1_ps(kScale));
    const __m512 power = _mm512_min_ps(_mm512_set1_ps(126.0f), _mm512_mul_ps(x, inner));  // a NaN is taken
    const __m512 below = _mm512_add_ps(rough_power_of_two(power), _mm512_set1_ps(1.0f));
    return _mm512_mul_ps(x, _mm512_rcp14_ps(below));
}

// GELU by the error function: what is missing to x, or for x < 0 all of it, is |x| / 2 * erfc(|x| / sqrt(2)). By
// formula 7.1.26 of Abramowitz and Stegun, to 1.5e-7 of 1; NaN stays.
AMX inline __m512 gelu_erf(__m512 x) {
    constexpr float kHalfSqrt = 0.70710678f, kHalfLog2 = 0.5f * 1.44269504f;
    const __m512 size = _mm512_abs_ps(x);
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 t = _mm512_rcp14_ps(_mm512_fmadd_ps(size, _mm512_set1_ps(0.3275911f * kHalfSqrt), one));
    __m512 p = _mm512_fmadd_ps(t, _mm512_set1_ps(1.061405429f), _mm512_set1_ps(-1.453152027f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.421413741f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.284496736f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(0.254829592f));
    const __m512 power = rough_power_of_two(_mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(-kHalfLog2)));
    const __m512 twice = _mm512_mul_ps(_mm512_mul_ps(_mm512_mul_ps(p, t), power), size);
    const __m512 missing = _mm512_mul_ps(twice, _mm512_set1_ps(0.5f));
    return _mm512_sub_ps(_mm512_max_ps(_mm512_setzero_ps(), x), missing);
}

}  // namespace tandem
#endif
