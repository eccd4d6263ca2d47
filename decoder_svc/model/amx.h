// What the decoder's kernels for processors with AMX share. They were never tried with Clang.

#pragma once

#include "../../common/amx.h"

#ifdef __clang__
#undef TANDEM_AMX
#endif
