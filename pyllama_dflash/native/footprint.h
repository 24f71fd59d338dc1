// Bytes that a pair takes, by the device whose memory they lie in. The figures are the allocators' own.
#pragma once

#include "api.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "llama-ext.h"

#include <map>
#include <vector>

namespace pld {

class Footprint {
public:
    using Kind = int64_t pld_device_memory::*;

    void add(ggml_backend_buffer_type_t buft, Kind kind, size_t bytes);
    void add(const llama_memory_breakdown & breakdown, bool draft);
    // A model's weights: its memory_breakdown().
    void add(const std::map<ggml_backend_buffer_type_t, size_t> & weights, Kind kind);

    // A row for each device, the CPU last, with what is free there as the backend sees it.
    std::vector<pld_device_memory> rows() const;

private:
    std::vector<std::pair<ggml_backend_dev_t, pld_device_memory>> rows_;
};

// Memory of a context's tensors. For a dry run there is none, only what it would take.
struct Allocation {
    ggml_backend_buffer_ptr buffer;
    size_t                  n_bytes = 0;
};

// The buffer is null if there is no memory.
Allocation allocate(ggml_context * ctx, ggml_backend_buffer_type_t buft, bool dry_run);

}  // namespace pld
