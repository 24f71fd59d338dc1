#include "draft_cache.h"

#include "error.h"
#include "llama-model.h"

#include <cmath>

namespace pld {

namespace {

// Heads are rotated in pieces of this many values, the size that llama.cpp uses for V.
constexpr int64_t ROTATED = 64;

// The Walsh-Hadamard matrix, scaled to be orthonormal.
std::vector<float> hadamard(int64_t n) {
    std::vector<float> out(static_cast<size_t>(n * n));
    for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < n; ++j) {
            bool odd = false;
            for (int64_t bits = i & j; bits != 0; bits &= bits - 1) {
                odd = !odd;
            }
            out[static_cast<size_t>(i * n + j)] = (odd ? -1.0f : 1.0f) / std::sqrt(static_cast<float>(n));
        }
    }
    return out;
}

}  // namespace

DraftCache::DraftCache(const llama_hparams & h, bool dry_run, ggml_backend_t backend, ggml_type type_k, ggml_type type_v, int32_t n_ctx)
    : n_cells_(GGML_PAD(n_ctx + 1, KV_STEP)) {
    const auto n_layer = static_cast<int32_t>(h.n_layer());
    ctx_.reset(ggml_init({ggml_tensor_overhead() * static_cast<size_t>(2 * n_layer + 2), nullptr, /*no_alloc=*/true}));
    for (int32_t il = 0; il < n_layer; ++il) {
        k_.push_back(ggml_new_tensor_2d(ctx_.get(), type_k, h.n_embd_k_gqa(static_cast<uint32_t>(il)), n_cells_));
        v_.push_back(ggml_new_tensor_2d(ctx_.get(), type_v, h.n_embd_v_gqa(static_cast<uint32_t>(il)), n_cells_));
    }
    const bool rotatable = h.n_embd_head_k() % ROTATED == 0;
    if (rotatable && ggml_is_quantized(type_k)) {
        k_rotation_ = ggml_new_tensor_2d(ctx_.get(), GGML_TYPE_F32, ROTATED, ROTATED);
    }
    if (rotatable && ggml_is_quantized(type_v)) {
        v_rotation_ = ggml_new_tensor_2d(ctx_.get(), GGML_TYPE_F32, ROTATED, ROTATED);
    }
    memory_ = allocate(ctx_.get(), ggml_backend_get_default_buffer_type(backend), dry_run);
    require(memory_.buffer != nullptr, PLD_E_MEMORY, format("no memory for a draft's K/V cache of %d cells", n_cells_));
    if (dry_run) {
        return;
    }
    ggml_backend_buffer_clear(memory_.buffer.get(), 0);  // a masked cell counts for nothing only if it holds a number
    const auto rotation = hadamard(ROTATED);
    for (auto * t : {k_rotation_, v_rotation_}) {
        if (t) {
            ggml_backend_tensor_set(t, rotation.data(), 0, ggml_nbytes(t));
        }
    }
}

int32_t DraftCache::n_kv(int32_t pos) const {
    return std::min(n_cells_, GGML_PAD(std::max(pos, 1), KV_STEP));
}

}  // namespace pld
