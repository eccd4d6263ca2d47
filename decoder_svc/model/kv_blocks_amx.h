// Blocks of the KV cache as kernels for processors with AMX keep and read them: plain while they are written, and
// compressed once they are full, since memory bounds attention of single tokens. A third more of a compressed block comes
// from memory in a second. Its numbers are the same to the last bit.
//
// A block [kv_heads, 2, block_size, dim] is a row of tiles of 16 tokens of one head, keys or values. For each there is a
// byte in `bases`. Compressed, a tile is a slot of three quarters of its size: the lower bytes of its numbers, then half
// a byte for each upper one. Behind all slots of the block there is room for a rest of each tile. There the few numbers
// of a tile that are far smaller than the others have their upper bytes, and a tile that has more of them, which stays
// whole, its last quarter. So a block never takes more than it would plain.

#pragma once

#include "amx.h"
#include "twelve_bits_amx.h"

#ifdef TANDEM_AMX
#include <cstring>

namespace tandem {

constexpr uint8_t kPlain = 255;    // a base that says: this block is not compressed, so none of its tiles is
constexpr uint8_t kWhole = 254;    // a base that says: of a compressed block, a tile that is not
constexpr uint8_t kPatched = 128;  // added to the base of a compressed tile that has exceptions

// Numbers that half a byte cannot tell: where they are in their tile, and what their upper bytes are. A line of the cache.
struct alignas(64) Exceptions {
    static constexpr int kMost = 15;
    struct {
        uint16_t place, upper;
    } numbers[kMost] = {};
    uint32_t count = 0;
};

template <int DIM>
struct KvTile {
    static constexpr int kNumbers = kTile * DIM;
    static constexpr int kSlot = kNumbers * 3 / 2, kRest = kNumbers / 2;  // bytes
    static constexpr int kParts = kNumbers / 128;  // each two lines of lower bytes, and a line of halves

    const uint8_t *slot, *rest;
    uint8_t base;

    // Tile `i` of a block of a pool, which has `count` tiles. Without bases all blocks are plain.
    static inline KvTile of(const uint8_t *pool, const uint8_t *bases, int64_t block, int64_t i, int64_t count) {
        const uint8_t *start = pool + block * count * (kSlot + kRest), base = bases ? bases[block * count + i] : kPlain;
        if (base == kPlain) return {start + i * (kSlot + kRest), start + i * (kSlot + kRest) + kSlot, kPlain};
        return {start + i * kSlot, start + count * kSlot + i * kRest, base};
    }

    // Whether `read` gives all its numbers.
    inline bool is_regular() const { return base < kPatched; }

    // The cache is far larger than what the core holds, and blocks lie anywhere in it: asks for what will be read. Part
    // by part between other work, since the core asks for few lines at a time. GCC 12 drops calls that do nothing else.
    AMX __attribute__((always_inline)) inline void fetch(int part) const {
        const char *at = reinterpret_cast<const char *>(slot) + 192 * part;
        for (int i = 0; i < 192; i += 64) _mm_prefetch(at + i, _MM_HINT_T1);
        if (base >= kWhole || (base >= kPatched && part == 0))
            _mm_prefetch(reinterpret_cast<const char *>(rest) + 64 * part, _MM_HINT_T1);
    }

    AMX __attribute__((always_inline)) inline void fetch() const {
UNROLLED
        for (int part = 0; part < kParts; ++part) fetch(part);
    }

    // 128 numbers of a compressed tile.
    AMX inline void read(int part, __m512i uppers, __m512i (&out)[4]) const {
        join_halves(slot + 128 * part, slot + kNumbers + 64 * part, uppers, out);
    }

    // Its numbers [16, DIM] in one piece, where they are or in `room`; meanwhile asks for another tile.
    AMX inline const bf16 *plain(bf16 *room, const KvTile &next) const {
        if (base >= kWhole) {
            next.fetch();
            if (base == kPlain) return reinterpret_cast<const bf16 *>(slot);
            memcpy(room, slot, kSlot);
            memcpy(room + kSlot / sizeof(bf16), rest, kRest);
        } else {
            const __m512i uppers = uppers_from(base & (kPatched - 1));
UNROLLED
            for (int part = 0; part < kParts; ++part) {
                __m512i lines[4];
                next.fetch(part);
                read(part, uppers, lines);
UNROLLED
                for (int i = 0; i < 4; ++i) _mm512_store_si512(room + 128 * part + kDepth * i, lines[i]);
            }
            if (!is_regular()) patch(room);
        }
        wrote_tile();
        return room;
    }

private:
    void patch(bf16 *room) const {
        Exceptions exceptions;
        memcpy(&exceptions, rest, sizeof exceptions);
        for (uint32_t i = 0; i < exceptions.count; ++i) {
            bf16 &number = room[exceptions.numbers[i].place];
            number = (bf16)(exceptions.numbers[i].upper << 8 | (number & 255));
        }
    }
};

}  // namespace tandem

#endif
