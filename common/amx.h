// What the services' kernels for processors with AMX share: where they can be compiled and run, sizes of tiles, and their
// configuration.

#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && __has_include(<amxbf16intrin.h>)
#define TANDEM_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// GCC 12 warns of its own headers.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

// In front of loops over vectors that have to stay in registers, whatever the level of optimization.
#define UNROLLED _Pragma("GCC unroll 16")

// Of each function that uses them, so that the library loads everywhere; who calls asks `amx_is_there` first.
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

// Whether this processor can, and the kernel lets this process: it wants to be asked for the tiles' state.
inline bool amx_is_there() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512dq")) return false;
    unsigned int a, b, c, d = 0;
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    const bool has_amx = (d >> 22 & 1) && (d >> 24 & 1);  // AMX-BF16, AMX-TILE
    return has_amx && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace tandem
#endif
