// Tiles of a weight as `tiles.py` lays them out: twelve bits a number where the exponents of a tile lie close together,
// which is nearly everywhere, and the same numbers to the last bit. A third more tiles come from memory in a second, and
// memory is what bounds a decode step.

#pragma once

#include "amx.h"

#ifdef TANDEM_AMX
#include <cstring>

namespace tandem {

constexpr int64_t kSlot = 768;      // bytes: 512 lower bytes of numbers, then half a byte of each upper one
constexpr int64_t kLow = 512;
constexpr uint8_t kRaw = 255;       // a base that says: the upper bytes are whole, and where the slot says
constexpr int64_t kAhead = 8192;    // bytes from what is read to what is fetched; hardware stops at 4 KiB

struct TiledWeight {
    const uint8_t *start, *slots;

    TiledWeight(const void *data, int64_t tiles)
        : start(static_cast<const uint8_t *>(data)), slots(start + (tiles + 63) / 64 * 64) {}

    // Lines [16, 32] of a tile.
    AMX inline void unpack(int64_t tile, bf16 *out) const {
        const uint8_t *slot = slots + tile * kSlot, base = start[tile];
        if (__builtin_expect(base == kRaw, 0)) return unpack_raw(slot, out);
        const __m512i half = _mm512_set1_epi8(15);
        // What half a byte says: a sign, and a distance from the base.
        const __m128i signs = _mm_set_epi8(-121, -122, -123, -124, -125, -126, -127, -128, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512i uppers = _mm512_add_epi8(_mm512_broadcast_i32x4(signs), _mm512_set1_epi8((char)base));
UNROLLED
        for (int i = 0; i < 4; ++i, out += 4 * kDepth) {
            const __m512i halves = _mm512_loadu_si512(slot + kLow + 64 * i);
            interleave(slot + 128 * i, _mm512_shuffle_epi8(uppers, _mm512_and_si512(halves, half)), out);
            interleave(slot + 128 * i + 64,
                       _mm512_shuffle_epi8(uppers, _mm512_and_si512(_mm512_srli_epi16(halves, 4), half)),
                       out + 2 * kDepth);
        }
        wrote();
    }

    // Asks for what will be read soon after a tile, and the one behind it.
    AMX inline void fetch_ahead(int64_t tile) const {
        const char *at = reinterpret_cast<const char *>(slots) + tile * kSlot + kAhead;
        for (int64_t i = 0; i < 2 * kSlot; i += 64) _mm_prefetch(at + i, _MM_HINT_T1);
    }

private:
    AMX static inline void interleave(const uint8_t *low, __m512i upper, bf16 *out) {
        const __m512i lower = _mm512_loadu_si512(low);
        _mm512_store_si512(out, _mm512_unpacklo_epi8(lower, upper));
        _mm512_store_si512(out + kDepth, _mm512_unpackhi_epi8(lower, upper));
    }

    AMX __attribute__((noinline)) void unpack_raw(const uint8_t *slot, bf16 *out) const {
        int64_t place;
        memcpy(&place, slot + kLow, sizeof place);
        for (int i = 0; i < 8; ++i, out += 2 * kDepth)
            interleave(slot + 64 * i, _mm512_loadu_si512(start + place + 64 * i), out);
        wrote();
    }

    // GCC 12 does not know that loading a tile reads what was stored here.
    static inline void wrote() { __asm__ volatile("" : : : "memory"); }
};

}  // namespace tandem

#endif
