// What the host tells a draft graph: one stretch of device memory, filled by one upload a launch.
#pragma once

#include "draft_cache.h"
#include "draft_model.h"

#include <cstdint>
#include <vector>

namespace pld {

// Rows of a launch: those of the blocks first, one for each of a stretch of neighbouring sequences, then the target's, whose
// features are written to the cache.
struct DraftRows {
    int32_t n_block = 0;      // of each block, anchor included; 0: injection only
    int32_t n_rows  = 0;      // of the target's batch
    int32_t n_kv    = 0;      // cells of its sequence that a block sees; 0 without one
    int32_t first   = 0;      // sequence of the first block
    int32_t n_seqs  = 1;      // blocks
    bool    gather  = false;  // the target's rows are picked by index; else they are the first ones

    int32_t blocks() const { return n_block * n_seqs; }
    int32_t total() const { return blocks() + n_rows; }
};

bool operator==(const DraftRows & a, const DraftRows & b);

// A sequence's block in a launch. It stands at pos, and sees positions from low on.
struct DraftBlock {
    int32_t anchor = -1;  // -1: nobody asked for it, and it leaves no trace
    int32_t pos    = 0;
    int32_t low    = 0;
};

// A row of the target in a launch.
struct DraftSource {
    int32_t row;  // of the target's batch
    int32_t position;
    int64_t cell;
};

class DraftInputs {
public:
    // For up to n_seqs blocks and max_rows rows of the target. Throws Error(PLD_E_MEMORY).
    DraftInputs(const DraftModel & model, const DraftCache & cache, ggml_backend_t backend, int32_t n_seqs, int32_t max_rows);

    int32_t max_rows() const { return max_rows_; }
    size_t  n_bytes() const { return memory_.n_bytes; }

    // Leaves of a graph, at the places that upload() fills for the same rows. S blocks of B rows.
    struct Leaves {
        ggml_tensor * mask     = nullptr;  // F16 [n_kv, B, 1, S]
        ggml_tensor * window   = nullptr;  // the same for layers with a sliding window; null if there are none
        ggml_tensor * cell     = nullptr;  // I64 [total]
        ggml_tensor * position = nullptr;  // I32 [total]
        ggml_tensor * source   = nullptr;  // I32 [n_rows]: rows of the target's batch; null unless they are gathered
        ggml_tensor * anchor   = nullptr;  // I32 [S]
        ggml_tensor * block    = nullptr;  // F32 [n_embd, B]: embeddings of the only block; null for several
        ggml_tensor * embd     = nullptr;  // F32 [n_embd, S + 1]: for several, the embeddings of the anchors and the mask token
        ggml_tensor * slot     = nullptr;  // I32 [B*S]: which of them each row takes
        ggml_tensor * tokens   = nullptr;  // I32 [1, rows of a reduced head]: the target's token of each; null without one
    };
    Leaves leaves(ggml_context * ctx, const DraftRows & rows) const;

    // One block for each sequence of the stretch, and a source for each row.
    void upload(const DraftRows & rows, const std::vector<DraftBlock> & blocks, const std::vector<DraftSource> & sources);

private:
    // Bytes before last_. The embeddings of the last anchor and of mask tokens after it have a fixed place, all else lies right
    // before it.
    struct Layout {
        size_t embd, anchor, slot, source, position, cell, mask, window;
    };
    Layout        layout(const DraftRows & rows) const;
    size_t        row_size() const { return static_cast<size_t>(model_.n_embd()) * sizeof(float); }  // of embeddings
    ggml_tensor * leaf(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1, size_t offset, int64_t ne3 = 1) const;
    void          upload_blocks(const DraftRows & rows, const std::vector<DraftBlock> & blocks);
    uint8_t *     place(size_t begin, size_t before) { return staging_.data() + (begin - before); }  // Layout's, in the host's copy
    void          fill_mask(uint16_t * out, const DraftRows & rows, const DraftBlock & block, int32_t n_swa) const;

    const DraftModel &      model_;
    const DraftCache &      cache_;
    ggml_backend_t          backend_;
    int32_t                 max_rows_;
    size_t                  last_   = 0;  // offset of the last anchor's embedding
    size_t                  tokens_ = 0;  // of the map of a reduced head
    int64_t                 n_tokens_ = 0;
    ggml_context_ptr        ctx_;
    Allocation              memory_;
    ggml_tensor *           bytes_ = nullptr;  // all of it
    std::vector<uint8_t>    staging_;          // the host's copy of what the last upload sent
};

}  // namespace pld
