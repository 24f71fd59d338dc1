#include "draft_inputs.h"

#include "error.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>

namespace pld {

namespace {

constexpr size_t   ALIGNMENT = 256;
constexpr uint16_t HIDDEN = 0xfc00, SEEN = 0;  // minus infinity and zero as F16

size_t aligned(size_t n) {
    return GGML_PAD(n, ALIGNMENT);
}

}  // namespace

DraftInputs::DraftInputs(const DraftModel & model, const DraftCache & cache, ggml_backend_t backend, int32_t max_rows)
    : model_(model), cache_(cache), backend_(backend) {
    const auto n_block = static_cast<size_t>(model.facts().block_size);
    const auto n_embd  = static_cast<size_t>(model.n_embd());
    const auto n_map   = model.n_token_map();

    const auto rows = n_block + static_cast<size_t>(max_rows);
    const auto mask = aligned(n_block * static_cast<size_t>(cache.n_cells()) * sizeof(uint16_t));
    block_          = 2 * mask + aligned(rows * sizeof(int64_t)) + aligned(rows * sizeof(int32_t)) + aligned(sizeof(int32_t));
    tokens_         = aligned(block_ + n_block * n_embd * sizeof(float));
    n_tokens_       = n_map;
    const auto size = tokens_ + aligned(static_cast<size_t>(n_map) * sizeof(int32_t));

    ctx_.reset(ggml_init({ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    bytes_ = ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_I8, static_cast<int64_t>(size));
    memory_ = allocate(ctx_.get(), ggml_backend_get_default_buffer_type(backend), model.dry_run());
    require(memory_.buffer != nullptr, PLD_E_MEMORY, format("no memory for %zu bytes of a draft's inputs", size));
    if (model.dry_run()) {
        return;
    }
    ggml_backend_buffer_clear(memory_.buffer.get(), 0);

    // All slots but the anchor's hold the mask token, for good.
    std::vector<float> embeddings(n_block * n_embd);
    for (size_t i = 0; i < n_block; ++i) {
        model.embed(model.facts().mask_token, &embeddings[i * n_embd]);
    }
    ggml_backend_tensor_set(bytes_, embeddings.data(), block_, embeddings.size() * sizeof(float));
    if (const auto map = model.token_map(); !map.empty()) {
        ggml_backend_tensor_set(bytes_, map.data(), tokens_, map.size() * sizeof(int32_t));
    }
}

DraftInputs::Layout DraftInputs::layout(const DraftRows & rows) const {
    const auto n    = static_cast<size_t>(rows.total());
    const auto mask = aligned(static_cast<size_t>(rows.n_block) * static_cast<size_t>(rows.n_kv) * sizeof(uint16_t));
    Layout     out  = {};
    out.anchor      = block_ - aligned(sizeof(int32_t));
    out.position    = out.anchor - aligned(n * sizeof(int32_t));
    out.cell        = out.position - aligned(n * sizeof(int64_t));
    out.mask        = out.cell - mask;
    out.window      = out.mask - (model_.any_window() ? mask : 0);
    return out;
}

ggml_tensor * DraftInputs::leaf(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1, size_t offset) const {
    auto * t  = ggml_new_tensor_2d(ctx, type, ne0, ne1);
    t->buffer = memory_.buffer.get();
    t->data   = bytes_->data ? static_cast<char *>(bytes_->data) + offset : nullptr;
    return t;
}

DraftInputs::Leaves DraftInputs::leaves(ggml_context * ctx, const DraftRows & rows) const {
    const auto at = layout(rows);
    Leaves     out;
    out.cell     = leaf(ctx, GGML_TYPE_I64, rows.total(), 1, at.cell);
    out.position = leaf(ctx, GGML_TYPE_I32, rows.total(), 1, at.position);
    if (rows.n_block == 0) {
        return out;
    }
    out.mask   = leaf(ctx, GGML_TYPE_F16, rows.n_kv, rows.n_block, at.mask);
    out.window = model_.any_window() ? leaf(ctx, GGML_TYPE_F16, rows.n_kv, rows.n_block, at.window) : nullptr;
    out.anchor = leaf(ctx, GGML_TYPE_I32, 1, 1, at.anchor);
    out.block  = leaf(ctx, GGML_TYPE_F32, model_.n_embd(), rows.n_block, block_);
    out.tokens = n_tokens_ > 0 ? leaf(ctx, GGML_TYPE_I32, 1, n_tokens_, tokens_) : nullptr;
    return out;
}

// A row of the block sees the cells of all earlier positions and of the whole block, or of its own part of it if causal; with a
// window, of the n_swa positions up to its own.
void DraftInputs::fill_mask(uint16_t * out, const DraftRows & rows, int32_t pos, int32_t n_swa) const {
    for (int32_t i = 0; i < rows.n_block; ++i, out += rows.n_kv) {
        const auto lo = n_swa > 0 ? std::max(0, pos + i - n_swa + 1) : 0;
        const auto hi = pos + (model_.facts().causal ? i + 1 : rows.n_block);
        std::fill(out, out + lo, HIDDEN);
        std::fill(out + lo, out + hi, SEEN);
        std::fill(out + hi, out + rows.n_kv, HIDDEN);
    }
}

void DraftInputs::upload(const DraftRows & rows, int32_t pos, int32_t n_kept, int32_t anchor) {
    const auto at    = layout(rows);
    const auto begin = at.window;
    const auto row   = rows.n_block > 0 ? static_cast<size_t>(model_.n_embd()) * sizeof(float) : 0;
    staging_.resize(std::max(staging_.size(), block_ - begin + row));
    const auto place = [&](size_t offset) { return staging_.data() + (offset - begin); };

    auto * cell     = reinterpret_cast<int64_t *>(place(at.cell));
    auto * position = reinterpret_cast<int32_t *>(place(at.position));
    for (int32_t i = 0; i < rows.n_block; ++i) {
        *position++ = pos + n_kept + i;
        *cell++     = pos + n_kept + i;
    }
    for (int32_t i = 0; i < rows.n_rows; ++i) {
        *position++ = pos + i;
        *cell++     = i < n_kept ? pos + i : cache_.spare();
    }
    if (rows.n_block > 0) {
        fill_mask(reinterpret_cast<uint16_t *>(place(at.mask)), rows, pos + n_kept, 0);
        if (model_.any_window()) {
            fill_mask(reinterpret_cast<uint16_t *>(place(at.window)), rows, pos + n_kept,
                      static_cast<int32_t>(model_.hparams().n_swa));
        }
        std::memcpy(place(at.anchor), &anchor, sizeof(anchor));
        model_.embed(anchor, reinterpret_cast<float *>(place(block_)));
    }
    ggml_backend_tensor_set_async(backend_, bytes_, staging_.data(), begin, block_ - begin + row);
}

}  // namespace pld
