#include "llama_drafter.h"

#include "cuda_graphs.h"
#include "devices.h"
#include "draft_model.h"
#include "engine_params.h"
#include "error.h"
#include "llama-ext.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>

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

void scale(float * row, size_t n) {
    double sum = 0;
    std::for_each(row, row + n, [&](double x) { sum += x * x; });
    const auto factor = static_cast<float>(1 / std::sqrt(sum / static_cast<double>(n) + FEATURE_EPS));
    std::for_each(row, row + n, [&](float & x) { x *= factor; });
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
      n_ctx_(params.n_ctx),
      window_(draft_sight(params, *model_->llama())),
      type_k_(static_cast<ggml_type>(params.type_k_draft)),
      type_v_(static_cast<ggml_type>(params.type_v_draft)),
      ctx_(with_head_in_reach(*model_, *llama_get_model(target.get())).llama(), draft_context(model_->facts(), target.get(), params), "draft"),
      seqs_(static_cast<size_t>(params.n_seq_max)) {
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
    std::vector<const float *> layers;
    for (const auto id : model_->facts().target_layers) {
        layers.push_back(llama_get_embeddings_layer_inp(target_.get(), static_cast<uint32_t>(id)));
        require(layers.back() != nullptr, PLD_E_INTERNAL, format("the target gave no input of layer %d", id));
    }
    size_t row = 0;
    for (const auto & r : rows) {
        auto & s = at(r.seq);
        for (size_t i = row; i < row + static_cast<size_t>(r.n_kept); ++i) {
            for (const auto * layer : layers) {
                s.pending.insert(s.pending.end(), layer + i * n_embd_, layer + (i + 1) * n_embd_);
            }
            if (scales_features(*model_->llama())) {
                scale(s.pending.data() + s.pending.size() - width_, width_);
            }
        }
        row += static_cast<size_t>(r.n);
        // Plain rounds never draft, so nothing else would bound what waits.
        if (n_pending(s) >= n_ubatch_) {
            inject(r.seq);
        }
    }
}

void LlamaDrafter::inject() {
    for (int32_t seq = 0; seq < static_cast<int32_t>(seqs_.size()); ++seq) {
        inject(seq);
    }
}

void LlamaDrafter::inject(int32_t seq) {
    auto &     s     = at(seq);
    const auto total = n_pending(s);
    for (int32_t done = 0; done < total; done += n_ubatch_) {
        const auto n = std::min(n_ubatch_, total - done);
        drop_before(seq, s.n_cached + n - window_);
        ctx_.clear();
        for (int32_t i = 0; i < n; ++i) {
            ctx_.add_features(seq, &s.pending[static_cast<size_t>(done + i) * width_], width_, s.n_cached + i);
        }
        ctx_.run();
        s.n_cached += n;
        n_injected_ += n;
    }
    s.pending.clear();
}

// What no block will see again makes room: a cell is free as soon as nothing is in it. A batch may take more rows than the window
// has positions, so some may only go with the next.
void LlamaDrafter::drop_before(int32_t seq, int32_t pos) {
    auto & s = at(seq);
    pos      = std::min(pos, s.n_cached);
    if (pos > s.low) {
        llama_memory_seq_rm(ctx_.memory(), seq, 0, pos);
        s.low = pos;
    }
}

std::vector<Draft> LlamaDrafter::draft(const std::vector<DraftRequest> & requests) {
    const auto most = [](const auto & a, const auto & b) { return a.n < b.n; };
    const auto n    = std::max_element(requests.begin(), requests.end(), most)->n;
    std::vector<Draft> out;
    for (const auto & r : requests) {
        out.push_back(draft(r, n));
    }
    return out;
}

// A block of n tokens, of which so many as are asked for are read.
Draft LlamaDrafter::draft(const DraftRequest & r, int32_t n) {
    auto & s = at(r.seq);
    inject(r.seq);
    drop_before(r.seq, s.n_cached - window_);
    const bool dflash2 = model_->facts().kind == PLD_KIND_DFLASH2;
    ctx_.clear();
    for (int32_t i = 0; i <= n; ++i) {
        ctx_.add_token(r.seq, i == 0 ? r.anchor : model_->facts().mask_token, s.n_cached + i, /*output=*/!dflash2);
    }
    ctx_.run();

    Draft   out;
    int32_t predecessor = 0;
    for (int32_t row = 1; row <= r.n; ++row) {
        auto c = candidates(row, &predecessor);
        if (!c.valid(n_vocab_)) {
            warn_invalid();
            break;
        }
        out.push_back(std::move(c));
    }
    // The block's own K/V is noise: only verified features stay.
    require(ctx_.truncate(r.seq, s.n_cached), PLD_E_INTERNAL, "the draft's cache could not drop the block");
    return out;
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
    auto & s = at(seq);
    if (pos >= n_past(seq)) {
        return n_past(seq);
    }
    if (positions_kept(pos, s.low, window_) < pos || pos == 0) {
        forget(seq);
        return 0;
    }
    if (pos >= s.n_cached) {
        s.pending.resize(static_cast<size_t>(pos - s.n_cached) * width_);
        return pos;
    }
    // A layer with a sliding window may have lost more than the others.
    const auto n_swa = llama_model_n_swa(model_->llama());
    const bool lost  = n_swa > 0 && llama_memory_seq_pos_min(ctx_.memory(), seq) > std::max(s.low, pos - n_swa);
    if (lost || !ctx_.truncate(seq, pos)) {
        forget(seq);
        return 0;
    }
    s.pending.clear();
    s.n_cached = pos;
    return pos;
}

void LlamaDrafter::forget(int32_t seq) {
    ctx_.forget(seq);
    at(seq) = {};
}

void LlamaDrafter::forget_all() {
    ctx_.forget_all();
    seqs_.assign(seqs_.size(), {});
}

DraftState LlamaDrafter::header(int32_t seq) const {
    const auto & h   = model_->llama()->hparams;
    DraftState   out = {};
    out.kind         = model_->facts().kind;
    out.n_layer      = static_cast<int32_t>(h.n_layer());
    out.type_k       = type_k_;
    out.type_v       = type_v_;
    out.n_embd_k     = static_cast<int32_t>(h.n_embd_k_gqa(0));
    out.n_embd_v     = static_cast<int32_t>(h.n_embd_v_gqa(0));
    out.low          = at(seq).low;
    out.n_past       = at(seq).n_cached;
    return out;
}

size_t LlamaDrafter::state_size(int32_t seq) {
    inject(seq);
    return sizeof(DraftState) + llama_state_seq_get_size_ext(ctx_.get(), seq, LLAMA_STATE_SEQ_FLAGS_NONE);
}

void LlamaDrafter::state_write(int32_t seq, uint8_t * out) {
    const auto size = state_size(seq) - sizeof(DraftState);
    const auto n    = llama_state_seq_get_data_ext(ctx_.get(), out + sizeof(DraftState), size, seq, LLAMA_STATE_SEQ_FLAGS_NONE);
    require(n == size, PLD_E_INTERNAL, "the draft's cache could not be written out");
    write_draft_state(out, header(seq), size);
}

void LlamaDrafter::state_read(int32_t seq, const uint8_t * data, size_t size) {
    forget(seq);
    const auto s = read_draft_state(data, size, header(seq), n_ctx_, window_);
    const auto n = llama_state_seq_set_data_ext(ctx_.get(), data + sizeof(s), s.n_bytes, seq, LLAMA_STATE_SEQ_FLAGS_NONE);
    if (n != s.n_bytes) {
        forget(seq);
        throw Error(PLD_E_ARGUMENT, "the draft's cache could not be read back: it is another draft's, or has no room for it");
    }
    at(seq).n_cached = s.n_past;
    at(seq).low      = s.low;
}

}  // namespace pld
