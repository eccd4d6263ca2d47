// Whether the kernels for processors with AMX may run here.

#include "../../common/amx.h"

extern "C" int tandem_amx_is_there() {
#ifdef TANDEM_AMX
    return tandem::amx_is_there();
#else
    return 0;
#endif
}
