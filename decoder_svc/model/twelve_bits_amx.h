// Numbers of bfloat16 in twelve bits, to the last bit the same: the lower byte of each as it is, and half a byte for the
// upper one, where the exponents of what is kept together lie close to each other. Weights are kept so, and the KV cache.

#pragma once

#include "amx.h"

#ifdef TANDEM_AMX

namespace tandem {

constexpr int kExponents = 8;  // values of an exponent's upper seven bits that half a byte tells, beside the sign

// Upper bytes by what half a byte says: a sign, and a distance from the base.
AMX inline __m512i uppers_from(uint8_t base) {
    const __m128i signs = _mm_set_epi8(-121, -122, -123, -124, -125, -126, -127, -128, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_add_epi8(_mm512_broadcast_i32x4(signs), _mm512_set1_epi8((char)base));
}

// 64 numbers of their lower and upper bytes: 32 and 32, in the order in which `split` took them.
AMX inline void join(__m512i lower, __m512i upper, __m512i &first, __m512i &second) {
    first = _mm512_unpacklo_epi8(lower, upper);
    second = _mm512_unpackhi_epi8(lower, upper);
}

// 128 numbers of 128 lower bytes and 64 bytes of halves.
AMX inline void join_halves(const uint8_t *low, const uint8_t *halves, __m512i uppers, __m512i (&out)[4]) {
    const __m512i both = _mm512_loadu_si512(halves), half = _mm512_set1_epi8(15);
    join(_mm512_loadu_si512(low), _mm512_shuffle_epi8(uppers, _mm512_and_si512(both, half)), out[0], out[1]);
    join(_mm512_loadu_si512(low + 64), _mm512_shuffle_epi8(uppers, _mm512_and_si512(_mm512_srli_epi16(both, 4), half)),
         out[2], out[3]);
}

// Lower and upper bytes of 64 numbers.
AMX inline void split(const bf16 *from, __m512i &lower, __m512i &upper) {
    const __m512i first = _mm512_loadu_si512(from), second = _mm512_loadu_si512(from + kDepth);
    const __m512i low = _mm512_set1_epi16(255);
    lower = _mm512_packus_epi16(_mm512_and_si512(first, low), _mm512_and_si512(second, low));
    upper = _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
}

// GCC 12 does not know that loading a tile reads what was stored before.
inline void wrote_tile() { __asm__ volatile("" : : : "memory"); }

}  // namespace tandem

#endif
