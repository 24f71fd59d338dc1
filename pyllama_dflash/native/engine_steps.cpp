// The steps of an engine: take a prompt, evaluate it, draft, verify and roll back.
#include "accept.h"
#include "engine.h"
#include "error.h"
#include "llama-context.h"
#include "llama-ext.h"

#include <algorithm>
#include <cstring>

namespace pld {

namespace {

// By ascending sequence, so that none comes twice.
template <typename T> void require_ascending(const std::vector<T> & requests) {
    for (size_t i = 1; i < requests.size(); ++i) {
        require(requests[i - 1].seq < requests[i].seq, PLD_E_ARGUMENT,
                format("sequence %d comes after %d; give requests by ascending sequence, each once", requests[i].seq, requests[i - 1].seq));
    }
}

}  // namespace

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

// After a failure in a batch nothing is known of the caches.
template <typename F> auto Engine::or_reset(F && step) -> decltype(step()) {
    try {
        return step();
    } catch (...) {
        reset();
        throw;
    }
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

// Rows after n of a short prompt that make its batch one of few sizes: a GPU waits longer for the launches of a graph that is
// built anew than for rows that are then taken back.
int32_t Engine::n_padding(int32_t seq, int32_t n) const {
    constexpr int32_t STEP = 16, MOST = 64;  // the most rows of a graph that is kept
    const auto        room = std::min(params_.n_ctx - at(seq).n_past(), params_.n_ubatch) - n;
    return pads_ && n <= MOST ? std::min(GGML_PAD(n, STEP) - n, room) : 0;
}

int32_t Engine::prefill(int32_t seq) {
    auto & s = at(seq);
    require(s.anchor >= 0, PLD_E_ORDER, "no prompt was given");
    const auto n = std::min(params_.n_ubatch, static_cast<int32_t>(s.pending.size()));
    if (n == 0) {
        return 0;
    }
    return or_reset([&] {
        catch_up({seq});
        const auto padding = n_padding(seq, n);
        for (int32_t i = 0; i < n + padding; ++i) {
            ctx_->add_token(seq, s.pending[static_cast<size_t>(std::min(i, n - 1))], s.n_past() + i, /*output=*/false);
        }
        run_target(/*whole=*/true);
        if (padding > 0) {
            rollback_->keep(seq, s.n_past(), n + padding);
        } else {
            rollback_->ran(seq, s.n_past() + n);
        }
        if (drafter_) {
            drafter_->add_features({{seq, n + padding, n}});
            drafter_->inject();
        }
        s.cached.insert(s.cached.end(), s.pending.begin(), s.pending.begin() + n);
        s.pending.erase(s.pending.begin(), s.pending.begin() + n);
        n_rows_ = 0;
        n_prefilled_ += n;
        if (s.pending.empty()) {
            llama_synchronize(ctx_->get());  // or a GPU's work on the prompt would count as the first round's
        }
        return static_cast<int32_t>(s.pending.size());
    });
}

std::vector<Draft> Engine::draft(std::vector<DraftRequest> requests) {
    require(drafter_ != nullptr || requests.empty(), PLD_E_ORDER, "there is no draft model: open the engine with one");
    require_ascending(requests);
    for (auto & r : requests) {
        require_ready(r.seq, "draft");
        require(r.n >= 0 && r.n <= params_.n_max, PLD_E_ARGUMENT, format("n_max=%d is out of range, 0 to %d", r.n, params_.n_max));
        require_room(at(r.seq), r.n);
        r.anchor = at(r.seq).anchor;
    }
    std::vector<DraftRequest> asked;
    std::copy_if(requests.begin(), requests.end(), std::back_inserter(asked), [](const auto & r) { return r.n > 0; });
    if (asked.empty()) {
        return std::vector<Draft>(requests.size());
    }
    return or_reset([&] {
        auto               made = drafter_->draft(asked);
        std::vector<Draft> out;
        size_t             next = 0;
        for (const auto & r : requests) {
            out.push_back(r.n > 0 ? std::move(made[next++]) : Draft{});
        }
        return out;
    });
}

int32_t Engine::choose(int32_t row) const {
    if (params_.backend_argmax) {
        const auto token = llama_get_argmax_ith(ctx_->get(), row);
        require(token >= 0 && token < n_vocab_, PLD_E_DECODE, format("row %d of the batch chose no token (%d)", row, token));
        return token;
    }
    const float * x = llama_get_logits_ith(ctx_->get(), row);
    require(x != nullptr, PLD_E_DECODE, format("row %d of the batch has no logits", row));
    return argmax(x, n_vocab_);
}

// The requests from begin on that one launch takes, and how many rows each gets in it. llama.cpp splits a batch where sequences
// with buffers or states of their own are no neighbours or have not as many rows as the others, and features are those of its
// last part: there, rows are added that nothing reads.
int32_t Engine::launch_end(const std::vector<VerifyRequest> & requests, int32_t begin, int32_t * width) const {
    auto       end = begin;
    const auto n   = static_cast<int32_t>(requests.size());
    *width         = 0;
    do {
        *width = std::max(*width, requests[static_cast<size_t>(end)].n + 1);
        ++end;
    } while (end < n && !ctx_->wants_one() &&
             (!ctx_->wants_neighbours() || requests[static_cast<size_t>(end)].seq == requests[static_cast<size_t>(end - 1)].seq + 1));
    return end;
}

std::vector<Verdict> Engine::verify(const std::vector<VerifyRequest> & requests, bool margins) {
    require_ascending(requests);
    require(!margins || !params_.backend_argmax, PLD_E_ARGUMENT, "margins need the logits: open with backend_argmax off");
    for (const auto & r : requests) {
        require_ready(r.seq, "verify");
        require(r.n >= 0 && r.n <= params_.n_max, PLD_E_ARGUMENT,
                format("%d drafted tokens are too many to verify at once; at most n_max=%d", r.n, params_.n_max));
        require_room(at(r.seq), r.n);
        for (int32_t i = 0; i < r.n; ++i) {
            target_->check_token(r.tokens[i]);
        }
    }
    return or_reset([&] {
        std::vector<Verdict> out;
        for (int32_t i = 0, end = 0; i < static_cast<int32_t>(requests.size()); i = end) {
            int32_t width = 0;
            end           = launch_end(requests, i, &width);
            verify_launch(requests.begin() + i, requests.begin() + end, width, margins, out);
        }
        n_rows_ = requests.size() == 1 ? requests[0].n + 1 : 0;
        return out;
    });
}

void Engine::verify_launch(Requests begin, Requests end, int32_t width, bool margins, std::vector<Verdict> & out) {
    std::vector<int32_t> seqs;
    std::transform(begin, end, std::back_inserter(seqs), [](const auto & r) { return r.seq; });
    catch_up(seqs);
    const auto n_rows = [&](const VerifyRequest & r) { return ctx_->wants_equal_rows() ? width : r.n + 1; };
    for (auto r = begin; r != end; ++r) {
        const auto & s = at(r->seq);
        const auto   n = n_rows(*r);
        rollback_->keep(r->seq, s.n_past(), n);
        for (int32_t i = 0; i < n; ++i) {
            ctx_->add_token(r->seq, i == 0 || i > r->n ? s.anchor : r->tokens[i - 1], s.n_past() + i, /*output=*/true);
        }
    }
    run_target(/*whole=*/true);

    std::vector<BatchRows> rows;
    int32_t                row = 0;
    for (auto r = begin; r != end; ++r) {
        Verdict v;
        for (int32_t i = 0; i <= r->n; ++i) {
            v.chosen.push_back(choose(row + i));
            if (margins) {
                v.margins.push_back(row_margin(llama_get_logits_ith(ctx_->get(), row + i), n_vocab_));
            }
        }
        v.n_accepted = accepted(r->tokens, r->n, v.chosen.data());
        rows.push_back({r->seq, n_rows(*r), v.n_accepted + 1});
        row += rows.back().n;
        out.push_back(std::move(v));
    }
    if (drafter_) {
        drafter_->add_features(rows);
    }
    const auto * v = &out[out.size() - rows.size()];
    for (auto r = begin; r != end; ++r, ++v) {
        auto & s = at(r->seq);
        s.cached.push_back(s.anchor);
        s.cached.insert(s.cached.end(), r->tokens, r->tokens + v->n_accepted);
        s.anchor = v->chosen[static_cast<size_t>(v->n_accepted)];
    }
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
