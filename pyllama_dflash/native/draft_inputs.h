// What the host tells a draft graph: one stretch of device memory, filled by one upload a launch.
#pragma once

#include "draft_cache.h"
#include "draft_model.h"

#include <cstdint>
#include <vector>

namespace pld {

// Rows of a launch: those of the block first, then the target's, whose features are written to the cache.
struct DraftRows {
    int32_t n_block = 0;  // anchor included; 0: injection only
    int32_t n_rows  = 0;  // of the target's batch
    int32_t n_kv    = 0;  // cells that the block sees; 0 without one

    int32_t total() const { return n_block + n_rows; }
};

class DraftInputs {
public:
    // Throws Error(PLD_E_MEMORY).
    DraftInputs(const DraftModel & model, const DraftCache & cache, ggml_backend_t backend, int32_t max_rows);

    size_t n_bytes() const { return memory_.n_bytes; }

    // Leaves of a graph, at the places that upload() fills for the same rows.
    struct Leaves {
        ggml_tensor * mask     = nullptr;  // F16 [n_kv, n_block]
        ggml_tensor * window   = nullptr;  // the same for layers with a sliding window; null if there are none
        ggml_tensor * cell     = nullptr;  // I64 [total]
        ggml_tensor * position = nullptr;  // I32 [total]
        ggml_tensor * anchor   = nullptr;  // I32 [1]
        ggml_tensor * block    = nullptr;  // F32 [n_embd, n_block]: embeddings
        ggml_tensor * tokens   = nullptr;  // I32 [1, rows of a reduced head]: the target's token of each; null without one
    };
    Leaves leaves(ggml_context * ctx, const DraftRows & rows) const;

    // pos: of the first row of the target's; n_kept of them stay. The block stands after those.
    void upload(const DraftRows & rows, int32_t pos, int32_t n_kept, int32_t anchor);

private:
    // Offsets into the buffer. The embeddings of the block have a fixed place, all else lies right before it.
    struct Layout {
        size_t mask, window, cell, position, anchor;
    };
    Layout        layout(const DraftRows & rows) const;
    ggml_tensor * leaf(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1, size_t offset) const;
    void          fill_mask(uint16_t * out, const DraftRows & rows, int32_t pos, int32_t n_swa) const;

    const DraftModel &      model_;
    const DraftCache &      cache_;
    ggml_backend_t          backend_;
    size_t                  block_  = 0;  // offset of the block's embeddings
    size_t                  tokens_ = 0;  // of the map of a reduced head
    int64_t                 n_tokens_ = 0;
    ggml_context_ptr        ctx_;
    Allocation              memory_;
    ggml_tensor *           bytes_ = nullptr;  // all of it
    std::vector<uint8_t>    staging_;          // the host's copy of what the last upload sent
};

}  // namespace pld
