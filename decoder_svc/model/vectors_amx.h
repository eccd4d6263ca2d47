// Vectors of bfloat16 and of float32 on processors with AMX: 32 numbers at once, of which the even ones are the lower
// halves of a vector's words and the odd ones the upper halves.

#pragma once

#include "amx.h"

#ifdef TANDEM_AMX
#include <cmath>
#include <cstring>

namespace tandem {

// 32 numbers in float32.
struct Pair {
    __m512 even, odd;
};

AMX inline Pair widen(__m512i numbers) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(numbers, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(numbers, _mm512_set1_epi32((int)0xffff0000)))};
}

// Rounded to nearest even.
AMX inline __m512i narrow(const Pair &pair) {
    const __m512i in_turns = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                              21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512bh rounded = _mm512_cvtne2ps_pbh(pair.odd, pair.even);
    __m512i raw;
    memcpy(&raw, &rounded, sizeof raw);
    return _mm512_permutexvar_epi16(in_turns, raw);
}

// 2^x, to 3e-6 of it; below -126 it is 0, as numbers that are not normal are, and above 128 infinite; NaN stays.
AMX inline __m512 power_of_two(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-127.0f), x);  // the second operand is taken when one is NaN
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(1.3333558146e-3f);
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(9.6181291076e-3f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(5.5504108665e-2f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(2.4022650696e-1f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(6.9314718056e-1f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

}  // namespace tandem

#endif
