#include "llama_drafter.h"

#include "cuda_graphs.h"
#include "devices.h"
#include "engine_params.h"
#include "error.h"
#include "llama-ext.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>

namespace pld {

namespace {

// A context computes on the devices of its model and on the CPU. A head that lies elsewhere would end the process.
const Model & with_head_in_reach(const Model & draft, const llama_model & target) {
    auto * dev = target.dev_output();
    const auto & own = draft.llama()->devices;
    const bool reached = std::any_of(own.begin(), own.end(), [&](const auto & d) { return d.dev == dev; });
    require(draft.facts().own_head || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU || reached, PLD_E_ARGUMENT,
            format("%s has no head of its own and llama.cpp's graph can't read the target's on %s; name that in devices_draft",
                   draft.header().name().c_str(), ggml_backend_dev_name(dev)));
    return draft;
}

}  // namespace

LlamaDrafter::LlamaDrafter(std::shared_ptr<Model> model, Context & target, const pld_engine_params & params)
    : model_(std::move(model)),
      target_(target),
      n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(target.get())))),
      n_candidates_(candidates_of(model_->facts(), n_vocab_)),
      n_embd_(static_cast<size_t>(llama_model_n_embd(model_->llama()))),
      width_(n_embd_ * model_->facts().target_layers.size()),
      n_ubatch_(draft_ubatch(model_->facts())),
      ctx_(with_head_in_reach(*model_, *llama_get_model(target.get())).llama(), draft_context(model_->facts(), target.get(), params), "draft") {
    set_cuda_graphs(ctx_.get(), params.cuda_graphs);
    for (const auto id : model_->facts().target_layers) {
        llama_set_embeddings_layer_inp(target.get(), static_cast<uint32_t>(id), true);
    }
    // DFlash2 hands its candidates and scores over where a next-token head would put its embeddings, a row for each token.
    const bool dflash2 = model_->facts().kind == PLD_KIND_DFLASH2;
    llama_set_embeddings_nextn(ctx_.get(), true, /*masked=*/!dflash2);
    llama_set_causal_attn(ctx_.get(), model_->facts().causal);
}

void LlamaDrafter::add_features(const std::vector<BatchRows> & rows) {
    const auto n     = rows.at(0).n_kept;
    const auto begin = pending_.size();
    pending_.resize(begin + static_cast<size_t>(n) * width_);
    size_t column = begin;
    for (const auto id : model_->facts().target_layers) {
        const float * layer = llama_get_embeddings_layer_inp(target_.get(), static_cast<uint32_t>(id));
        require(layer != nullptr, PLD_E_INTERNAL, format("the target gave no input of layer %d", id));
        for (int32_t i = 0; i < n; ++i) {
            std::memcpy(&pending_[column + static_cast<size_t>(i) * width_], layer + static_cast<size_t>(i) * n_embd_,
                        n_embd_ * sizeof(float));
        }
        column += n_embd_;
    }
    // Plain rounds never draft, so nothing else would bound what waits.
    if (n_pending() >= n_ubatch_) {
        inject();
    }
}

void LlamaDrafter::inject() {
    const auto total = n_pending();
    for (int32_t done = 0; done < total; done += n_ubatch_) {
        const auto n = std::min(n_ubatch_, total - done);
        ctx_.clear();
        for (int32_t i = 0; i < n; ++i) {
            ctx_.add_features(0, &pending_[static_cast<size_t>(done + i) * width_], width_, n_cached_ + i);
        }
        ctx_.run();
        n_cached_ += n;
        n_injected_ += n;
    }
    pending_.clear();
}

std::vector<Draft> LlamaDrafter::draft(const std::vector<DraftRequest> & requests) {
    const auto anchor = requests.at(0).anchor;
    const auto n      = requests.at(0).n;
    inject();
    const bool dflash2 = model_->facts().kind == PLD_KIND_DFLASH2;
    ctx_.clear();
    for (int32_t i = 0; i <= n; ++i) {
        ctx_.add_token(0, i == 0 ? anchor : model_->facts().mask_token, n_cached_ + i, /*output=*/!dflash2);
    }
    ctx_.run();

    Draft   out;
    int32_t predecessor = 0;
    for (int32_t row = 1; row <= n; ++row) {
        auto c = candidates(row, &predecessor);
        if (!c.valid(n_vocab_)) {
            warn_invalid();
            break;
        }
        out.push_back(std::move(c));
    }
    // The block's own K/V is noise: only verified features stay.
    require(ctx_.truncate(0, n_cached_), PLD_E_INTERNAL, "the draft's cache could not drop the block");
    return {out};
}

// Row of the last pass. DFlash2: [k ids as float][k x k scores, one line for each predecessor candidate]; *predecessor is the
// line to read, and is set to the candidate chosen here.
Candidates LlamaDrafter::candidates(int32_t row, int32_t * predecessor) const {
    if (model_->facts().kind == PLD_KIND_DFLASH) {
        const float * logits = llama_get_logits_ith(ctx_.get(), row);
        require(logits != nullptr, PLD_E_INTERNAL, "the draft gave no logits");
        return top_k(logits, n_vocab_, n_candidates_);
    }
    const auto    k       = n_candidates_;
    const float * lattice = llama_get_embeddings_nextn(ctx_.get());
    require(lattice != nullptr, PLD_E_INTERNAL, "the draft gave no candidates");
    const float * line   = lattice + static_cast<size_t>(row) * n_embd_;
    const float * scores = line + k + static_cast<ptrdiff_t>(*predecessor) * k;
    *predecessor         = argmax(scores, k);
    return sorted(token_ids(line, k, n_vocab_).data(), scores, k);
}

int32_t LlamaDrafter::truncate(int32_t seq, int32_t pos) {
    if (pos >= n_past(seq)) {
        return n_past(seq);
    }
    if (pos >= n_cached_) {
        pending_.resize(static_cast<size_t>(pos - n_cached_) * width_);
        return pos;
    }
    pending_.clear();
    if (!ctx_.rewind(0, pos)) {
        forget_all();
        return 0;
    }
    n_cached_ = pos;
    return pos;
}

void LlamaDrafter::forget_all() {
    ctx_.forget_all();
    pending_.clear();
    n_cached_ = 0;
}

}  // namespace pld
