// Where an engine's sequences stand: take a prompt, roll back, catch up. engine_launches.cpp has what runs them.
#include "engine.h"
#include "error.h"
#include "llama-context.h"
#include "llama-ext.h"

#include <algorithm>
#include <cstring>

namespace pld {

Engine::Sequence & Engine::at(int32_t seq) {
    require(seq >= 0 && seq < params_.n_seq_max, PLD_E_ARGUMENT,
            format("sequence %d is out of range, 0 to %d", seq, params_.n_seq_max - 1));
    return seqs_[static_cast<size_t>(seq)];
}

void Engine::reset() {
    seqs_.assign(seqs_.size(), {});
    n_rows_ = 0;
    rollback_->forget_all();
    if (drafter_) {
        drafter_->forget_all();
    }
}

void Engine::reset(int32_t seq) {
    at(seq).anchor = -1;
    at(seq).pending.clear();
    n_rows_ = 0;
    or_reset([&] { roll_back(seq, 0); });
}

void Engine::require_ready(int32_t seq, const char * what) const {
    const auto & s = at(seq);
    require(s.anchor >= 0, PLD_E_ORDER, format("%s needs a prompt: call prefill first", what));
    require(s.pending.empty(), PLD_E_ORDER,
            format("%s needs the whole prompt: %zu tokens still wait for prefill", what, s.pending.size()));
}

void Engine::require_room(const Sequence & s, int32_t n) const {
    require(s.n_past() + 1 + n <= params_.n_ctx, PLD_E_CONTEXT_FULL,
            format("%d tokens after position %d do not fit in n_ctx=%d", n + 1, s.n_past(), params_.n_ctx));
}

int32_t Engine::begin(int32_t seq, const int32_t * tokens, int32_t n) {
    auto & s = at(seq);
    require(n >= 1, PLD_E_ARGUMENT, "the prompt has no tokens; give at least one");
    require(n <= params_.n_ctx, PLD_E_CONTEXT_FULL,
            format("the prompt has %d tokens but n_ctx is %d; shorten it or raise n_ctx", n, params_.n_ctx));
    for (int32_t i = 0; i < n; ++i) {
        target_->check_token(tokens[i]);
    }
    return or_reset([&] {
        // The last token is the anchor: it is evaluated by the first round, so it is never taken from the cache.
        const auto limit = std::min<size_t>(s.cached.size(), static_cast<size_t>(n - 1));
        const auto same  = std::mismatch(tokens, tokens + limit, s.cached.begin()).first - tokens;
        roll_back(seq, static_cast<int32_t>(same));
        s.pending.assign(tokens + s.n_past(), tokens + n - 1);
        s.anchor = tokens[n - 1];
        n_rows_  = 0;
        return s.n_past();
    });
}

// The only place that runs the target: no batch overwrites features that a drafter still needs. whole: those of this batch are
// for the draft, so it must not run in parts.
void Engine::run_target(bool whole) {
    if (drafter_) {
        drafter_->release_features();
    }
    ctx_->run();
    if (whole && drafter_ && drafter_->fused()) {
        const auto * rows = ctx_->get()->get_embeddings_layer_inp_tensor(static_cast<uint32_t>(draft_->facts().target_layers.at(0)));
        require(rows && rows->ne[1] == ctx_->n_rows(), PLD_E_INTERNAL,
                format("the last part of a batch of %d rows has %d", ctx_->n_rows(), rows ? static_cast<int32_t>(rows->ne[1]) : 0));
    }
}

// Before a batch: what was rejected in the last one leaves the memory, and what that takes with it is run again for the sequences
// of this batch. The others' states are brought into order, too, because a batch may move them to another place.
void Engine::catch_up(const std::vector<int32_t> & seqs) {
    for (int32_t seq = 0; seq < params_.n_seq_max; ++seq) {
        rollback_->settle(seq, at(seq).n_past());
    }
    ctx_->clear();
    for (const auto seq : seqs) {
        const auto & s = at(seq);
        for (auto pos = rollback_->n_run(seq); pos < s.n_past(); ++pos) {
            ctx_->add_token(seq, s.cached[static_cast<size_t>(pos)], pos, /*output=*/false);
        }
        if (ctx_->n_rows() > 0 && (ctx_->wants_one() || seq == seqs.back())) {
            run_target(/*whole=*/false);  // the draft has had the features of these rows
            ctx_->clear();
        }
        rollback_->ran(seq, s.n_past());
    }
}

// Keep positions [0, pos) of a sequence in both caches, or fewer where one of them has lost what that needs.
void Engine::roll_back(int32_t seq, int32_t pos) {
    auto & s = at(seq);
    if (pos < s.n_past() && !rollback_->rewind(seq, pos)) {
        pos = 0;
    }
    if (drafter_) {
        pos = drafter_->truncate(seq, pos) < pos ? 0 : pos;
    }
    if (pos == 0) {
        rollback_->forget(seq);
    }
    s.cached.resize(static_cast<size_t>(pos));
}

void Engine::logits(int32_t row, float * out) const {
    require(!params_.backend_argmax, PLD_E_ARGUMENT, "logits are not read back: open with backend_argmax off");
    require(n_rows_ > 0, PLD_E_ORDER, "logits are those of the last verify, of one sequence: call verify first");
    require(row >= 0 && row < n_rows_, PLD_E_ARGUMENT, format("row %d is out of range, 0 to %d", row, n_rows_ - 1));
    const float * x = llama_get_logits_ith(ctx_->get(), row);
    require(x != nullptr, PLD_E_INTERNAL, "the last batch left no logits");
    std::memcpy(out, x, sizeof(float) * static_cast<size_t>(n_vocab_));
}

}  // namespace pld
