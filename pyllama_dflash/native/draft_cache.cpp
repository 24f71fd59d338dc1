#include "draft_cache.h"

#include "engine_params.h"
#include "error.h"
#include "llama-model.h"

#include <algorithm>
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

// What a draft sees and its block have cells of their own. A block that is wider than its sequence asked for, because another's
// is, may reach beyond the context.
int32_t cells_of(int32_t block_size, const pld_engine_params & params) {
    const auto all = params.n_ctx + (params.n_seq_max > 1 ? block_size - 1 : 0);
    return GGML_PAD(std::min(all, draft_window(params) + block_size), KV_STEP);
}

}  // namespace

DraftCache::DraftCache(const llama_hparams & h, bool dry_run, ggml_backend_t backend, int32_t block_size, const pld_engine_params & params)
    : n_cells_(cells_of(block_size, params)), spare_(static_cast<int64_t>(params.n_seq_max) * n_cells_) {
    const auto type_k  = static_cast<ggml_type>(params.type_k_draft);
    const auto type_v  = static_cast<ggml_type>(params.type_v_draft);
    const auto n_rows  = spare_ + 1;
    const auto n_layer = static_cast<int32_t>(h.n_layer());
    ctx_.reset(ggml_init({ggml_tensor_overhead() * static_cast<size_t>(2 * n_layer + 2), nullptr, /*no_alloc=*/true}));
    for (int32_t il = 0; il < n_layer; ++il) {
        k_.push_back(ggml_new_tensor_2d(ctx_.get(), type_k, h.n_embd_k_gqa(static_cast<uint32_t>(il)), n_rows));
        v_.push_back(ggml_new_tensor_2d(ctx_.get(), type_v, h.n_embd_v_gqa(static_cast<uint32_t>(il)), n_rows));
    }
    const bool rotatable = h.n_embd_head_k() % ROTATED == 0;
    if (rotatable && ggml_is_quantized(type_k)) {
        k_rotation_ = ggml_new_tensor_2d(ctx_.get(), GGML_TYPE_F32, ROTATED, ROTATED);
    }
    if (rotatable && ggml_is_quantized(type_v)) {
        v_rotation_ = ggml_new_tensor_2d(ctx_.get(), GGML_TYPE_F32, ROTATED, ROTATED);
    }
    memory_ = allocate(ctx_.get(), ggml_backend_get_default_buffer_type(backend), dry_run);
    require(memory_.buffer != nullptr, PLD_E_MEMORY, format("no memory for a draft's K/V cache of %lld cells", (long long) n_rows));
    if (dry_run) {
        return;
    }
    clear();
    const auto rotation = hadamard(ROTATED);
    for (auto * t : {k_rotation_, v_rotation_}) {
        if (t) {
            ggml_backend_tensor_set(t, rotation.data(), 0, ggml_nbytes(t));
        }
    }
}

void DraftCache::clear() {
    for (const auto & tensors : {k_, v_}) {
        for (auto * t : tensors) {
            ggml_backend_tensor_memset(t, 0, 0, ggml_nbytes(t));
        }
    }
}

int32_t DraftCache::n_kv(int32_t pos) const {
    return std::min(n_cells_, GGML_PAD(std::max(pos, 1), KV_STEP));
}

size_t DraftCache::row_size() const {
    size_t out = 0;
    for (size_t il = 0; il < k_.size(); ++il) {
        out += k_[il]->nb[1] + v_[il]->nb[1];
    }
    return out;
}

template <typename F> void DraftCache::pieces(int32_t seq, int32_t lo, int32_t from, int32_t hi, F && f) const {
    size_t begin = 0;  // of the tensor's rows
    for (size_t il = 0; il < k_.size(); ++il) {
        for (auto * t : {k_[il], v_[il]}) {
            for (int32_t pos = from, end = 0; pos < hi; pos = end) {
                end = std::min(hi, pos - pos % n_cells_ + n_cells_);
                f(t, static_cast<size_t>(cell(seq, pos)) * t->nb[1], begin + static_cast<size_t>(pos - lo) * t->nb[1],
                  static_cast<size_t>(end - pos) * t->nb[1]);
            }
            begin += static_cast<size_t>(hi - lo) * t->nb[1];
        }
    }
}

void DraftCache::get(int32_t seq, int32_t lo, int32_t hi, uint8_t * out) const {
    pieces(seq, lo, lo, hi, [&](ggml_tensor * t, size_t at, size_t to, size_t n) { ggml_backend_tensor_get(t, out + to, at, n); });
}

void DraftCache::set(int32_t seq, int32_t lo, int32_t hi, const uint8_t * data) {
    pieces(seq, lo, std::max(lo, hi - n_cells_), hi,
           [&](ggml_tensor * t, size_t at, size_t from, size_t n) { ggml_backend_tensor_set(t, data + from, at, n); });
}

}  // namespace pld
