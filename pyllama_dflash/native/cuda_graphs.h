// Whether a CUDA backend captures its graphs; other backends know nothing of it.
#pragma once

#include "ggml-backend.h"
#include "llama.h"

#include <cstdint>

namespace pld {

// mode: of pld_engine_params.cuda_graphs. To be said before the backend computes.
void set_cuda_graphs(ggml_backend_t backend, int32_t mode);
// Of all backends of a context.
void set_cuda_graphs(llama_context * ctx, int32_t mode);

}  // namespace pld
