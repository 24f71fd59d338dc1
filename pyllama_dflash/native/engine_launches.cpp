// What an engine runs: prompts, drafts, verifies; several sequences in one launch.
#include "accept.h"
#include "engine.h"
#include "error.h"
#include "llama-context.h"
#include "llama-ext.h"

#include <algorithm>

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

int32_t Engine::prefill(int32_t seq) {
    require(at(seq).anchor >= 0, PLD_E_ORDER, "no prompt was given");
    if (at(seq).pending.empty()) {
        return 0;
    }
    return or_reset([&] {
        const std::vector<VerifyRequest> requests = {{seq, nullptr, 0}};
        std::vector<Verdict>             none;
        run_launch(next_launch(requests, requests.begin()), false, none);
        n_rows_ = 0;
        return at(seq).n_pending();
    });
}

std::vector<Verdict> Engine::verify(const std::vector<VerifyRequest> & requests, bool margins) {
    require_ascending(requests);
    require(!margins || !params_.backend_argmax, PLD_E_ARGUMENT, "margins need the logits: open with backend_argmax off");
    for (const auto & r : requests) {
        if (r.n > 0 || at(r.seq).pending.empty()) {
            require_ready(r.seq, "verify");
        }
        require(r.n >= 0 && r.n <= params_.n_max, PLD_E_ARGUMENT,
                format("%d drafted tokens are too many to verify at once; at most n_max=%d", r.n, params_.n_max));
        require_room(at(r.seq), r.n);
        for (int32_t i = 0; i < r.n; ++i) {
            target_->check_token(r.tokens[i]);
        }
    }
    return or_reset([&] {
        std::vector<Verdict> out;
        for (auto r = requests.begin(); r != requests.end();) {
            const auto launch = next_launch(requests, r);
            run_launch(launch, margins, out);
            r = launch.end;
        }
        n_rows_ = out.size() == 1 ? static_cast<int32_t>(out[0].chosen.size()) : 0;
        return out;
    });
}

// Whether llama.cpp can take these two at once. It splits a batch where sequences with buffers or states of their own are no
// neighbours or have not as many rows as the others, and features are those of its last part: there, rows are added that nothing
// reads.
bool Engine::joins(int32_t seq, int32_t next) const {
    const Stretch between = {seq + 1, next - 1};
    return !ctx_->wants_one() && (!ctx_->wants_neighbours() || between.size() == 0 ||
                                  (between.size() <= MOST_IN_VAIN && takes_surplus(between, params_.n_max + 1)));
}

// Whether all of these have room for n rows that leave with the next launch.
bool Engine::takes_surplus(Stretch seqs, int32_t n) const {
    bool all = params_.few_shapes != 0;
    for (auto seq = seqs.first; seq <= seqs.last; ++seq) {
        all = all && at(seq).n_past() + n <= params_.n_ctx + params_.n_max;
    }
    return all;
}

Engine::Launch Engine::next_launch(const std::vector<VerifyRequest> & requests, Requests begin) const {
    Launch out = {begin, begin + 1, {begin->seq, begin->seq}, 0, false};
    while (out.end != requests.end() && joins((out.end - 1)->seq, out.end->seq)) {
        ++out.end;
    }
    out.seqs.last = (out.end - 1)->seq;
    out.prompts   = std::all_of(out.begin, out.end, [this](const VerifyRequest & r) { return !at(r.seq).pending.empty(); });
    if (out.prompts) {
        out.width = prompt_width(out);
        return out;
    }
    for (auto r = out.begin; r != out.end; ++r) {
        out.width = std::max(out.width, r->n + 1);
    }
    const auto wider = aligned(out.seqs, params_.n_seq_max);
    const bool all   = out.begin == requests.begin() && out.end == requests.end();
    if (all && fills_ends(params_, *target_->llama()) && takes_surplus(wider, params_.n_max + 1)) {
        out.seqs = wider;
    }
    return out;
}

// Rows of each sequence in a launch of prompts alone. A GPU waits longer for the launches of a graph that is built anew than for
// rows that are then taken back, so there short prompts get one of few widths.
int32_t Engine::prompt_width(const Launch & launch) const {
    constexpr int32_t STEP = 16, MOST = 64;  // the most rows of a graph that is kept
    const bool        few  = params_.few_shapes != 0;
    auto              out  = few ? 1 : params_.n_ubatch;
    for (auto r = launch.begin; r != launch.end; ++r) {
        out = few ? std::max(out, at(r->seq).n_pending()) : std::min(out, at(r->seq).n_pending());
    }
    const auto seqs = seqs_of(launch);
    out             = few && out <= MOST ? GGML_PAD(out, STEP) : out;
    out             = std::min(out, std::max(params_.n_ubatch / static_cast<int32_t>(seqs.size()), 1));
    for (const auto seq : seqs) {
        out = std::min(out, params_.n_ctx + (params_.n_seq_max > 1 ? params_.n_max : 0) - at(seq).n_past());
    }
    return out;
}

// The sequences of a launch: all of its stretch, or those that it is for.
std::vector<int32_t> Engine::seqs_of(const Launch & launch) const {
    std::vector<int32_t> out;
    for (auto seq = launch.seqs.first; seq <= launch.seqs.last; ++seq) {
        const auto asked = [seq](const VerifyRequest & r) { return r.seq == seq; };
        if (ctx_->wants_neighbours() || std::any_of(launch.begin, launch.end, asked)) {
            out.push_back(seq);
        }
    }
    return out;
}

// Put the rows of a sequence into the batch. r: null where nobody asked for it.
BatchRows Engine::add_rows(int32_t seq, const VerifyRequest * r, const Launch & launch) {
    const auto & s     = at(seq);
    const bool   waits = r && !s.pending.empty();
    const auto   own   = !r ? 0 : waits ? std::min(launch.width, s.n_pending()) : r->n + 1;
    const auto   n     = ctx_->wants_equal_rows() || launch.prompts ? launch.width : own;
    for (int32_t i = 0; i < n; ++i) {
        auto token = std::max(s.anchor, 0);
        if (waits) {
            token = s.pending[static_cast<size_t>(std::min(i, own - 1))];
        } else if (i > 0 && i < own) {
            token = r->tokens[i - 1];
        }
        ctx_->add_token(seq, token, s.n_past() + i, /*output=*/!launch.prompts);
    }
    if (waits && own == n) {
        rollback_->ran(seq, s.n_past() + n);
    } else {
        rollback_->keep(seq, s.n_past(), n);
    }
    return {seq, n, waits ? own : 0};
}

void Engine::run_launch(const Launch & launch, bool margins, std::vector<Verdict> & out) {
    const auto seqs = seqs_of(launch);
    catch_up(seqs);
    std::vector<BatchRows> rows;
    auto                   r = launch.begin;
    for (const auto seq : seqs) {
        const bool asked = r != launch.end && r->seq == seq;
        rows.push_back(add_rows(seq, asked ? &*r : nullptr, launch));
        r += asked ? 1 : 0;
    }
    run_target(/*whole=*/true);

    int32_t row = 0;
    r           = launch.begin;
    for (auto & of : rows) {
        if (r != launch.end && r->seq == of.seq) {
            out.push_back(take_rows(*r++, row, margins, of));
        }
        row += of.n;
    }
    if (drafter_) {
        drafter_->add_features(rows);
    }
    if (launch.prompts) {
        if (drafter_) {
            drafter_->inject();
        }
        const auto ready = [this](const VerifyRequest & request) { return at(request.seq).pending.empty(); };
        if (std::any_of(launch.begin, launch.end, ready)) {
            llama_synchronize(ctx_->get());  // or a GPU's work on its prompt would count as the first round's
        }
    }
}

// What the rows of a request came to, from the first of them on; of.n_kept is set to those that stay.
Verdict Engine::take_rows(const VerifyRequest & r, int32_t row, bool margins, BatchRows & of) {
    auto &  s = at(r.seq);
    Verdict out;
    if (!s.pending.empty()) {
        const auto end = s.pending.begin() + of.n_kept;
        s.cached.insert(s.cached.end(), s.pending.begin(), end);
        s.pending.erase(s.pending.begin(), end);
        n_prefilled_ += of.n_kept;
        return out;
    }
    for (int32_t i = 0; i <= r.n; ++i) {
        out.chosen.push_back(choose(row + i));
        if (margins) {
            out.margins.push_back(row_margin(llama_get_logits_ith(ctx_->get(), row + i), n_vocab_));
        }
    }
    out.n_accepted = accepted(r.tokens, r.n, out.chosen.data());
    of.n_kept      = out.n_accepted + 1;
    s.cached.push_back(s.anchor);
    s.cached.insert(s.cached.end(), r.tokens, r.tokens + out.n_accepted);
    s.anchor = out.chosen[static_cast<size_t>(out.n_accepted)];
    return out;
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

}  // namespace pld
