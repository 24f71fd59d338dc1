// The draft's K/V: the cell of a row follows from its sequence and position, so nothing is ever searched, moved or removed. Rows
// that must not stay go to a spare cell that no query sees.
#pragma once

#include "api.h"
#include "footprint.h"
#include "ggml-cpp.h"

#include <vector>

struct llama_hparams;

namespace pld {

// The number of cells that a graph reads grows in steps, so that few graphs are made.
constexpr int32_t KV_STEP = 256;

class DraftCache {
public:
    // Throws Error(PLD_E_MEMORY).
    DraftCache(const llama_hparams & hparams, bool dry_run, ggml_backend_t backend, int32_t block_size, const pld_engine_params & params);

    // Cells of a sequence, a multiple of KV_STEP: one for each position, or a ring where a draft sees only the last ones.
    int32_t n_cells() const { return n_cells_; }
    int64_t cell(int32_t seq, int32_t pos) const { return static_cast<int64_t>(seq) * n_cells_ + pos % n_cells_; }
    int64_t spare() const { return spare_; }
    // Cells of a sequence that a graph reads to see positions up to pos.
    int32_t n_kv(int32_t pos) const;
    size_t  n_bytes() const { return memory_.n_bytes; }

    // Zero all cells: a masked one counts for nothing only if it holds a number.
    void clear();

    // Bytes of a position, all layers.
    size_t row_size() const;
    // Positions [lo, hi) of a sequence, by layer, K before V; of what is set, those that there are cells for.
    void get(int32_t seq, int32_t lo, int32_t hi, uint8_t * out) const;
    void set(int32_t seq, int32_t lo, int32_t hi, const uint8_t * data);

    int32_t n_layer() const { return static_cast<int32_t>(k_.size()); }
    // [heads * width, all cells] of a layer: those of a sequence together, by sequence, then the spare one.
    ggml_tensor * k(int32_t il) const { return k_[static_cast<size_t>(il)]; }
    ggml_tensor * v(int32_t il) const { return v_[static_cast<size_t>(il)]; }
    // A rotation that spreads what quantisation would lose in a few large values, or null: [n, n], its own inverse.
    ggml_tensor * k_rotation() const { return k_rotation_; }
    ggml_tensor * v_rotation() const { return v_rotation_; }

private:
    // Call f(tensor, offset in it, offset in [lo, hi)'s bytes, n bytes) for each piece of positions [from, hi) that lies together.
    template <typename F> void pieces(int32_t seq, int32_t lo, int32_t from, int32_t hi, F && f) const;

    int32_t                    n_cells_;
    int64_t                    spare_;
    ggml_context_ptr           ctx_;
    Allocation                 memory_;
    std::vector<ggml_tensor *> k_;
    std::vector<ggml_tensor *> v_;
    ggml_tensor *              k_rotation_ = nullptr;
    ggml_tensor *              v_rotation_ = nullptr;
};

}  // namespace pld
