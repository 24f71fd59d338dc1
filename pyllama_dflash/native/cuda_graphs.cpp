#include "cuda_graphs.h"

#include "llama-context.h"

namespace pld {

void set_cuda_graphs(ggml_backend_t backend, int32_t mode) {
    auto * device = ggml_backend_get_device(backend);
    auto * reg    = device ? ggml_backend_dev_backend_reg(device) : nullptr;
    auto * found  = reg ? ggml_backend_reg_get_proc_address(reg, "ggml_backend_cuda_set_graphs") : nullptr;
    if (found) {
        reinterpret_cast<void (*)(ggml_backend_t, int)>(found)(backend, mode);
    }
}

void set_cuda_graphs(llama_context * ctx, int32_t mode) {
    auto * sched = ctx->get_sched();
    for (int i = 0; sched && i < ggml_backend_sched_get_n_backends(sched); ++i) {
        set_cuda_graphs(ggml_backend_sched_get_backend(sched, i), mode);
    }
}

}  // namespace pld
