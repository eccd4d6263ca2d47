// Tiles of a weight as `tiles.py` lays them out: twelve bits a number where the exponents of a tile lie close together,
// which is nearly everywhere, and the same numbers to the last bit. A third more tiles come from memory in a second, and
// memory is what bounds a decode step.

#pragma once

#include "amx.h"
#include "twelve_bits_amx.h"

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
        const __m512i uppers = uppers_from(base);
UNROLLED
        for (int i = 0; i < 4; ++i, out += 4 * kDepth) {
            __m512i lines[4];
            join_halves(slot + 128 * i, slot + kLow + 64 * i, uppers, lines);
UNROLLED
            for (int line = 0; line < 4; ++line) _mm512_store_si512(out + line * kDepth, lines[line]);
        }
        wrote_tile();
    }

    // Asks for what will be read soon after a tile, and the one behind it.
    AMX inline void fetch_ahead(int64_t tile) const {
        const char *at = reinterpret_cast<const char *>(slots) + tile * kSlot + kAhead;
        for (int64_t i = 0; i < 2 * kSlot; i += 64) _mm_prefetch(at + i, _MM_HINT_T1);
    }

private:
    AMX __attribute__((noinline)) void unpack_raw(const uint8_t *slot, bf16 *out) const {
        int64_t place;
        memcpy(&place, slot + kLow, sizeof place);
        for (int i = 0; i < 8; ++i, out += 2 * kDepth) {
            __m512i lines[2];
            join(_mm512_loadu_si512(slot + 64 * i), _mm512_loadu_si512(start + place + 64 * i), lines[0], lines[1]);
            for (int line = 0; line < 2; ++line) _mm512_store_si512(out + line * kDepth, lines[line]);
        }
        wrote_tile();
    }
};

}  // namespace tandem

#endif
