// The draft's K/V: the cell of a row is its position, so nothing is ever searched, moved or removed. Rows that must not stay go
// to a spare cell that no query sees.
#pragma once

#include "footprint.h"
#include "ggml-cpp.h"

#include <vector>

struct llama_hparams;

namespace pld {

// A cell for each position and a spare one; the number a graph reads grows in steps, so that few graphs are made.
constexpr int32_t KV_STEP = 256;

class DraftCache {
public:
    // Throws Error(PLD_E_MEMORY).
    DraftCache(const llama_hparams & hparams, bool dry_run, ggml_backend_t backend, ggml_type type_k, ggml_type type_v, int32_t n_ctx);

    int32_t n_cells() const { return n_cells_; }
    int32_t spare() const { return n_cells_ - 1; }
    // Cells that a graph reads to see positions [0, pos).
    int32_t n_kv(int32_t pos) const;
    size_t  n_bytes() const { return memory_.n_bytes; }

    // [heads * width, n_cells] of a layer.
    ggml_tensor * k(int32_t il) const { return k_[static_cast<size_t>(il)]; }
    ggml_tensor * v(int32_t il) const { return v_[static_cast<size_t>(il)]; }
    // A rotation that spreads what quantisation would lose in a few large values, or null: [n, n], its own inverse.
    ggml_tensor * k_rotation() const { return k_rotation_; }
    ggml_tensor * v_rotation() const { return v_rotation_; }

private:
    int32_t                    n_cells_;
    ggml_context_ptr           ctx_;
    Allocation                 memory_;
    std::vector<ggml_tensor *> k_;
    std::vector<ggml_tensor *> v_;
    ggml_tensor *              k_rotation_ = nullptr;
    ggml_tensor *              v_rotation_ = nullptr;
};

}  // namespace pld
