#include "draft_inputs.h"

#include "error.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <tuple>

namespace pld {

namespace {

constexpr size_t   ALIGNMENT = 256;
constexpr uint16_t HIDDEN = 0xfc00, SEEN = 0;  // minus infinity and zero as F16

size_t aligned(size_t n) {
    return GGML_PAD(n, ALIGNMENT);
}

}  // namespace

bool operator==(const DraftRows & a, const DraftRows & b) {
    const auto key = [](const DraftRows & r) { return std::tie(r.n_block, r.n_rows, r.n_kv, r.first, r.n_seqs, r.gather); };
    return key(a) == key(b);
}

DraftInputs::DraftInputs(const DraftModel & model, const DraftCache & cache, ggml_backend_t backend, int32_t n_seqs,
                         int32_t max_rows)
    : model_(model), cache_(cache), backend_(backend), max_rows_(max_rows) {
    const auto n_block = static_cast<size_t>(model.facts().block_size);
    n_tokens_          = model.n_token_map();

    DraftRows most;
    most.n_block = model.facts().block_size;
    most.n_rows  = max_rows;
    most.n_kv    = cache.n_cells();
    most.n_seqs  = n_seqs;
    most.gather  = true;
    last_           = layout(most).window;
    tokens_         = aligned(last_ + n_block * row_size());
    const auto size = tokens_ + aligned(static_cast<size_t>(n_tokens_) * sizeof(int32_t));

    ctx_.reset(ggml_init({ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    bytes_ = ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_I8, static_cast<int64_t>(size));
    memory_ = allocate(ctx_.get(), ggml_backend_get_default_buffer_type(backend), model.dry_run());
    require(memory_.buffer != nullptr, PLD_E_MEMORY, format("no memory for %zu bytes of a draft's inputs", size));
    if (model.dry_run()) {
        return;
    }
    ggml_backend_buffer_clear(memory_.buffer.get(), 0);

    // All slots but the anchors' hold the mask token, for good.
    const auto         n_embd = static_cast<size_t>(model.n_embd());
    std::vector<float> embeddings(n_block * n_embd);
    for (size_t i = 0; i < n_block; ++i) {
        model.embed(model.facts().mask_token, &embeddings[i * n_embd]);
    }
    ggml_backend_tensor_set(bytes_, embeddings.data(), last_, embeddings.size() * sizeof(float));
    if (const auto map = model.token_map(); !map.empty()) {
        ggml_backend_tensor_set(bytes_, map.data(), tokens_, map.size() * sizeof(int32_t));
    }
}

DraftInputs::Layout DraftInputs::layout(const DraftRows & rows) const {
    const auto n_total = static_cast<size_t>(rows.total());
    const auto n_seqs  = static_cast<size_t>(rows.n_seqs);
    const auto n_slots = rows.n_seqs > 1 ? static_cast<size_t>(rows.blocks()) : 0;
    const auto mask    = aligned(static_cast<size_t>(rows.blocks()) * static_cast<size_t>(rows.n_kv) * sizeof(uint16_t));
    Layout     out     = {};
    out.embd           = (n_seqs - 1) * row_size();
    out.anchor         = aligned(out.embd) + aligned(n_seqs * sizeof(int32_t));
    out.slot           = out.anchor + aligned(n_slots * sizeof(int32_t));
    out.source         = out.slot + (rows.gather ? aligned(static_cast<size_t>(rows.n_rows) * sizeof(int32_t)) : 0);
    out.position       = out.source + aligned(n_total * sizeof(int32_t));
    out.cell           = out.position + aligned(n_total * sizeof(int64_t));
    out.mask           = out.cell + mask;
    out.window         = out.mask + (model_.any_window() ? mask : 0);
    return out;
}

ggml_tensor * DraftInputs::leaf(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1, size_t offset, int64_t ne3) const {
    auto * t  = ggml_new_tensor_4d(ctx, type, ne0, ne1, 1, ne3);
    t->buffer = memory_.buffer.get();
    t->data   = bytes_->data ? static_cast<char *>(bytes_->data) + offset : nullptr;
    return t;
}

DraftInputs::Leaves DraftInputs::leaves(ggml_context * ctx, const DraftRows & rows) const {
    const auto at = layout(rows);
    Leaves     out;
    out.cell     = leaf(ctx, GGML_TYPE_I64, rows.total(), 1, last_ - at.cell);
    out.position = leaf(ctx, GGML_TYPE_I32, rows.total(), 1, last_ - at.position);
    out.source   = rows.gather ? leaf(ctx, GGML_TYPE_I32, rows.n_rows, 1, last_ - at.source) : nullptr;
    if (rows.n_block == 0) {
        return out;
    }
    out.mask   = leaf(ctx, GGML_TYPE_F16, rows.n_kv, rows.n_block, last_ - at.mask, rows.n_seqs);
    out.window = model_.any_window() ? leaf(ctx, GGML_TYPE_F16, rows.n_kv, rows.n_block, last_ - at.window, rows.n_seqs) : nullptr;
    out.anchor = leaf(ctx, GGML_TYPE_I32, rows.n_seqs, 1, last_ - at.anchor);
    out.tokens = n_tokens_ > 0 ? leaf(ctx, GGML_TYPE_I32, 1, n_tokens_, tokens_) : nullptr;
    if (rows.n_seqs == 1) {
        out.block = leaf(ctx, GGML_TYPE_F32, model_.n_embd(), rows.n_block, last_);
    } else {
        out.embd = leaf(ctx, GGML_TYPE_F32, model_.n_embd(), rows.n_seqs + 1, last_ - at.embd);
        out.slot = leaf(ctx, GGML_TYPE_I32, rows.blocks(), 1, last_ - at.slot);
    }
    return out;
}

// A row of a block sees the cells of earlier positions, from low on, and of the whole block, or of its own part of it if causal;
// with a window, of the n_swa positions up to its own. In a ring they may begin near its end and go on at its start. What nobody
// asked for sees a cell that holds a number, whatever it is: a row that sees nothing has no softmax.
void DraftInputs::fill_mask(uint16_t * out, const DraftRows & rows, const DraftBlock & block, int32_t n_swa) const {
    for (int32_t i = 0; i < rows.n_block; ++i, out += rows.n_kv) {
        const auto last  = block.pos + (model_.facts().causal ? i : rows.n_block - 1);
        const auto first = block.anchor < 0 ? last : std::max(block.low, n_swa > 0 ? block.pos + i - n_swa + 1 : 0);
        const auto lo = first % cache_.n_cells(), hi = last % cache_.n_cells() + 1;
        const bool wraps = lo >= hi;
        std::fill(out, out + std::min(lo, hi), wraps ? SEEN : HIDDEN);
        std::fill(out + std::min(lo, hi), out + std::max(lo, hi), wraps ? HIDDEN : SEEN);
        std::fill(out + std::max(lo, hi), out + rows.n_kv, wraps ? SEEN : HIDDEN);
    }
}

void DraftInputs::upload_blocks(const DraftRows & rows, const std::vector<DraftBlock> & blocks) {
    const auto at     = layout(rows);
    const auto n_mask = static_cast<size_t>(rows.n_block) * static_cast<size_t>(rows.n_kv);
    auto *     mask   = reinterpret_cast<uint16_t *>(place(at.window, at.mask));
    auto *     window = reinterpret_cast<uint16_t *>(place(at.window, at.window));
    auto *     anchor = reinterpret_cast<int32_t *>(place(at.window, at.anchor));
    auto *     slot   = reinterpret_cast<int32_t *>(place(at.window, at.slot));
    auto *     embd   = place(at.window, at.embd);
    for (int32_t s = 0; s < rows.n_seqs; ++s, mask += n_mask, window += n_mask, embd += row_size()) {
        const auto & b = blocks[static_cast<size_t>(s)];
        fill_mask(mask, rows, b, 0);
        if (model_.any_window()) {
            fill_mask(window, rows, b, static_cast<int32_t>(model_.hparams().n_swa));
        }
        *anchor++ = b.anchor < 0 ? model_.facts().mask_token : b.anchor;
        if (b.anchor >= 0) {
            model_.embed(b.anchor, reinterpret_cast<float *>(embd));
        }
        for (int32_t i = 0; rows.n_seqs > 1 && i < rows.n_block; ++i) {
            *slot++ = i == 0 && b.anchor >= 0 ? s : rows.n_seqs;
        }
    }
}

void DraftInputs::upload(const DraftRows & rows, const std::vector<DraftBlock> & blocks, const std::vector<DraftSource> & sources) {
    const auto at    = layout(rows);
    const auto begin = last_ - at.window;
    const auto end   = last_ + (rows.n_block > 0 ? row_size() : 0);
    staging_.resize(std::max(staging_.size(), end - begin));

    auto * cell     = reinterpret_cast<int64_t *>(place(at.window, at.cell));
    auto * position = reinterpret_cast<int32_t *>(place(at.window, at.position));
    for (int32_t s = 0; rows.n_block > 0 && s < rows.n_seqs; ++s) {
        const auto & b = blocks[static_cast<size_t>(s)];
        for (int32_t i = 0; i < rows.n_block; ++i) {
            *position++ = b.pos + i;
            *cell++     = b.anchor < 0 ? cache_.spare() : cache_.cell(rows.first + s, b.pos + i);
        }
    }
    auto * source = reinterpret_cast<int32_t *>(place(at.window, at.source));
    for (const auto & row : sources) {
        *position++ = row.position;
        *cell++     = row.cell;
        if (rows.gather) {
            *source++ = row.row;
        }
    }
    if (rows.n_block > 0) {
        upload_blocks(rows, blocks);
    }
    ggml_backend_tensor_set_async(backend_, bytes_, staging_.data(), begin, end - begin);
}

}  // namespace pld
