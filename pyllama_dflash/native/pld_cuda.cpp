// The part of the C boundary that looks at CUDA's launches; without CUDA there are none.
#include "api.h"

#include <algorithm>
#include <cstring>
#include <string>

#ifdef PLD_CUDA
#include "cuda/launches.h"
#endif

int64_t pld_cuda_launches(void) {
#ifdef PLD_CUDA
    return pld::cuda::n_launches();
#else
    return 0;
#endif
}

void pld_cuda_trace(int32_t on) {
#ifdef PLD_CUDA
    pld::cuda::trace(on != 0);
#else
    (void) on;
#endif
}

int32_t pld_cuda_traced(char * buf, int32_t cap) {
    try {
        std::string text;
#ifdef PLD_CUDA
        for (const auto & [name, n] : pld::cuda::traced()) {
            text += name + ' ' + std::to_string(n) + '\n';
        }
#endif
        if (buf && cap > 0) {
            std::memcpy(buf, text.data(), std::min(text.size(), static_cast<size_t>(cap)));
        }
        return static_cast<int32_t>(text.size());
    } catch (...) {
        return PLD_E_MEMORY;
    }
}
