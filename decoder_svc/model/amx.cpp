// Whether the kernels for processors with AMX may run here.

#include "amx.h"

#ifdef TANDEM_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Whether this processor can, and the kernel lets this process: it wants to be asked for the tiles' state.
extern "C" int tandem_amx_is_there() {
#ifdef TANDEM_AMX
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512dq")) return 0;
    unsigned int a, b, c, d = 0;
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    const bool has_amx = (d >> 22 & 1) && (d >> 24 & 1);  // AMX-BF16, AMX-TILE
    return has_amx && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return 0;
#endif
}
