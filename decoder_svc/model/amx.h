// What the kernels for processors with AMX share: where they can be compiled, sizes of tiles, and their configuration.

#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define TANDEM_AMX
#include <immintrin.h>

// GCC 12 warns of its own headers.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

// Of each function that uses them, so that the library loads everywhere; who calls asks `tandem_amx_is_there` first.
#define AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

namespace tandem {

typedef uint16_t bf16;

constexpr int kTile = 16;          // rows of a tile, and its columns of float32
constexpr int kDepth = 32;         // bfloat16 numbers in a row of a tile
constexpr int kTileNumbers = 512;  // bfloat16 numbers in a tile

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t columns[16] = {};  // bytes
    uint8_t rows[16] = {};

    void set(int tile, int height, int row_bytes) {
        rows[tile] = (uint8_t)height;
        columns[tile] = (uint16_t)(height ? row_bytes : 0);
    }

    AMX void load() const {
        // GCC 12 takes the instruction to read eight bytes, and drops what is stored behind them.
        __asm__ volatile("" : : "r"(this) : "memory");
        _tile_loadconfig(this);
    }
};

}  // namespace tandem
#endif
