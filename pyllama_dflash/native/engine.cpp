#include "engine.h"

#include "cuda_graphs.h"

#include "accept.h"
#include "error.h"
#include "llama-ext.h"
#include "llama-model.h"
#include "log.h"

#include <algorithm>
#include <cstring>

namespace pld {

namespace {

// Whether some layer is computed elsewhere than on the CPU.
bool on_gpu(const llama_model & model) {
    bool found = ggml_backend_dev_type(model.dev_output()) != GGML_BACKEND_DEVICE_TYPE_CPU;
    for (int32_t il = 0; il < llama_model_n_layer(&model); ++il) {
        found = found || ggml_backend_dev_type(model.dev_layer(il)) != GGML_BACKEND_DEVICE_TYPE_CPU;
    }
    return found;
}

}  // namespace

Engine::Engine(std::shared_ptr<Model> target, std::shared_ptr<Model> draft, const pld_engine_params & params)
    : target_(std::move(target)),
      draft_(std::move(draft)),
      params_(resolve(target_->header(), draft_ ? &draft_->header() : nullptr, params)),
      n_vocab_(target_->n_vocab()),
      threads_(params_.n_threads) {
    require_rollback(*target_, params_.n_max);
    open();
    trial();
    ctx_->attach(threads_, params_.n_threads);
    if (drafter_) {
        drafter_->attach(threads_, params_.n_threads);
    }
    if (on_gpu(*target_->llama()) || (draft_ && on_gpu(*draft_->llama()))) {
        warm_up();
    }
}

Engine::~Engine() = default;

void Engine::open() {
    ctx_ = std::make_unique<Context>(target_->llama(), target_context(params_), "target");
    set_cuda_graphs(ctx_->get(), params_.cuda_graphs);
    llama_set_argmax(ctx_->get(), params_.backend_argmax);
    if (draft_) {
        require_layers(*target_, *draft_, *ctx_);
        drafter_ = make_drafter(draft_, *target_, *ctx_, params_);
    }
}

// Run one token through both models while assertions still throw, on this thread alone: what a file's header could not show
// comes out here and not in the middle of a generation.
void Engine::trial() {
    const char *       step = "target";
    const log::Opening opening;
    try {
        const int32_t token = 0;
        begin(&token, 1);
        verify(nullptr, 0, false);
        step = "draft";
        if (drafter_) {
            drafter_->draft(token, std::clamp(params_.n_ctx - 1 - n_past(), 0, params_.n_max));
        }
        reset();
        n_trial_rows_ = drafter_ ? drafter_->n_injected() : 0;
    } catch (const Error & e) {
        abandon();
        throw Error(opening.out_of_memory() ? PLD_E_MEMORY : PLD_E_LOAD,
                    std::string("the ") + step + " fails at its first token: " + e.what());
    }
}

// Run the largest batches once. A GPU's backend takes memory for its kernels when they first need it, and ends the process where
// there is none; here that is an error. Only the calling thread meets it, so the others may work.
void Engine::warm_up() {
    const auto                 n = std::clamp(params_.n_ctx - params_.n_max - 2, 0, params_.n_ubatch);
    const std::vector<int32_t> tokens(static_cast<size_t>(std::max(n, params_.n_max)) + 1, 0);
    const log::Opening         opening;
    const auto                 draft_one = [&] {
        if (const auto n_draft = std::min(params_.n_max, params_.n_ctx - 1 - n_past()); drafter_ && n_draft > 0) {
            drafter_->draft(seq_.anchor, n_draft);
        }
    };
    try {
        begin(tokens.data(), n + 1);
        prefill();
        draft_one();
        verify(tokens.data(), std::min(params_.n_max, params_.n_ctx - 1 - n_past()), false);
        draft_one();  // with the rows of that verify
        reset();
    } catch (const Error & e) {
        abandon();
        throw opening.out_of_memory()
            ? Error(PLD_E_MEMORY, format("a GPU has no memory left for batches of %d tokens at n_ctx=%d; lower n_ctx or n_ubatch%s",
                                         params_.n_ubatch, params_.n_ctx, opening.reason().c_str()))
            : Error(PLD_E_LOAD, format("the models fail on their largest batch of %d tokens: %s", params_.n_ubatch, e.what()));
    }
    n_prefilled_  = 0;
    n_trial_rows_ = drafter_ ? drafter_->n_injected() : 0;
}

// After an assertion failed half way through a graph, nothing of it can be freed.
void Engine::abandon() noexcept {
    if (drafter_) {
        drafter_->leak();
    }
    ctx_->leak();
}

pld_engine_info Engine::info() const {
    return {params_.n_ctx,
            params_.n_ubatch,
            params_.n_threads,
            params_.n_max,
            drafter_ ? drafter_->n_candidates() : 0,
            n_vocab_,
            draft_ ? draft_->facts().kind : PLD_KIND_TARGET,
            params_.backend_argmax != 0,
            drafter_ && drafter_->fused()};
}

pld_engine_state Engine::state() const {
    return {n_past(),
            static_cast<int32_t>(seq_.pending.size()),
            seq_.anchor,
            drafter_ ? drafter_->n_past() : 0,
            drafter_ ? drafter_->n_injected() - n_trial_rows_ : 0,
            n_prefilled_};
}

pld_engine_memory Engine::memory() const {
    pld_engine_memory out = {};
    if (drafter_) {
        drafter_->counters(out);
    }
    return out;
}

std::vector<pld_device_memory> Engine::devices() const {
    Footprint out;
    out.add(llama_get_memory_breakdown(ctx_->get()), /*draft=*/false);
    if (drafter_) {
        drafter_->footprint(out);
    }
    return out.rows();
}

std::vector<pld_graph> Engine::graphs() {
    std::vector<llama_graph_cache_entry> kept(static_cast<size_t>(llama_graph_cache_get(ctx_->get(), nullptr, 0)));
    llama_graph_cache_get(ctx_->get(), kept.data(), static_cast<int32_t>(kept.size()));
    std::vector<pld_graph> out;
    for (const auto & g : kept) {
        out.push_back({0, static_cast<int32_t>(g.n_tokens), 0, static_cast<int64_t>(g.n_hits), static_cast<int64_t>(g.size)});
    }
    if (drafter_) {
        drafter_->graphs(out);
    }
    return out;
}

void Engine::reset() {
    seq_    = {};
    n_rows_ = 0;
    ctx_->forget();
    if (drafter_) {
        drafter_->forget();
    }
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

void Engine::require_ready(const char * what) const {
    require(seq_.anchor >= 0, PLD_E_ORDER, format("%s needs a prompt: call prefill first", what));
    require(seq_.pending.empty(), PLD_E_ORDER,
            format("%s needs the whole prompt: %zu tokens still wait for prefill", what, seq_.pending.size()));
}

int32_t Engine::begin(const int32_t * tokens, int32_t n) {
    require(n >= 1, PLD_E_ARGUMENT, "the prompt has no tokens; give at least one");
    require(n <= params_.n_ctx, PLD_E_CONTEXT_FULL,
            format("the prompt has %d tokens but n_ctx is %d; shorten it or raise n_ctx", n, params_.n_ctx));
    for (int32_t i = 0; i < n; ++i) {
        target_->check_token(tokens[i]);
    }
    return or_reset([&] {
        // The last token is the anchor: it is evaluated by the first round, so it is never taken from the cache.
        const auto limit = std::min<size_t>(seq_.cached.size(), static_cast<size_t>(n - 1));
        const auto same  = std::mismatch(tokens, tokens + limit, seq_.cached.begin()).first - tokens;
        roll_back(static_cast<int32_t>(same));
        seq_.pending.assign(tokens + n_past(), tokens + n - 1);
        seq_.anchor = tokens[n - 1];
        n_rows_     = 0;
        return n_past();
    });
}

// The only place that runs the target: no batch overwrites features that a drafter still needs.
void Engine::run_target() {
    if (drafter_) {
        drafter_->release_features();
    }
    ctx_->run();
}

// Keep positions [0, pos) in both caches, or fewer where one of them has lost what that needs.
void Engine::roll_back(int32_t pos) {
    if (pos < n_past()) {
        if (!ctx_->rewind(pos)) {
            pos = 0;
            ctx_->forget();
        }
    }
    if (drafter_ && drafter_->truncate(pos) < pos) {
        pos = 0;
        ctx_->forget();
    }
    seq_.cached.resize(static_cast<size_t>(pos));
}

int32_t Engine::prefill() {
    require(seq_.anchor >= 0, PLD_E_ORDER, "no prompt was given");
    const auto n = std::min(params_.n_ubatch, static_cast<int32_t>(seq_.pending.size()));
    if (n == 0) {
        return 0;
    }
    return or_reset([&] {
        ctx_->clear();
        for (int32_t i = 0; i < n; ++i) {
            ctx_->add_token(seq_.pending[static_cast<size_t>(i)], n_past() + i, /*output=*/false);
        }
        run_target();
        if (drafter_) {
            drafter_->add_features(n);
            drafter_->inject();
        }
        seq_.cached.insert(seq_.cached.end(), seq_.pending.begin(), seq_.pending.begin() + n);
        seq_.pending.erase(seq_.pending.begin(), seq_.pending.begin() + n);
        n_rows_ = 0;
        n_prefilled_ += n;
        if (seq_.pending.empty()) {
            llama_synchronize(ctx_->get());  // or a GPU's work on the prompt would count as the first round's
        }
        return static_cast<int32_t>(seq_.pending.size());
    });
}

Draft Engine::draft(int32_t n) {
    require(drafter_ != nullptr, PLD_E_ORDER, "there is no draft model: open the engine with one");
    require_ready("draft");
    require(n >= 0 && n <= params_.n_max, PLD_E_ARGUMENT, format("n_max=%d is out of range, 0 to %d", n, params_.n_max));
    require(n_past() + 1 + n <= params_.n_ctx, PLD_E_CONTEXT_FULL,
            format("a draft of %d tokens after position %d does not fit in n_ctx=%d", n, n_past(), params_.n_ctx));
    return n == 0 ? Draft{} : or_reset([&] { return drafter_->draft(seq_.anchor, n); });
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

Verdict Engine::verify(const int32_t * tokens, int32_t n, bool margins) {
    require_ready("verify");
    require(n >= 0 && n <= params_.n_max, PLD_E_ARGUMENT,
            format("%d drafted tokens are too many to verify at once; at most n_max=%d", n, params_.n_max));
    require(!margins || !params_.backend_argmax, PLD_E_ARGUMENT, "margins need the logits: open with backend_argmax off");
    require(n_past() + 1 + n <= params_.n_ctx, PLD_E_CONTEXT_FULL,
            format("%d tokens after position %d do not fit in n_ctx=%d", n + 1, n_past(), params_.n_ctx));
    for (int32_t i = 0; i < n; ++i) {
        target_->check_token(tokens[i]);
    }
    return or_reset([&] {
        ctx_->clear();
        ctx_->add_token(seq_.anchor, n_past(), /*output=*/true);
        for (int32_t i = 0; i < n; ++i) {
            ctx_->add_token(tokens[i], n_past() + 1 + i, /*output=*/true);
        }
        run_target();

        Verdict out;
        for (int32_t row = 0; row <= n; ++row) {
            out.chosen.push_back(choose(row));
            if (margins) {
                out.margins.push_back(row_margin(llama_get_logits_ith(ctx_->get(), row), n_vocab_));
            }
        }
        out.n_accepted = accepted(tokens, n, out.chosen.data());

        if (drafter_) {
            drafter_->add_features(out.n_accepted + 1);
        }
        seq_.cached.push_back(seq_.anchor);
        seq_.cached.insert(seq_.cached.end(), tokens, tokens + out.n_accepted);
        require(out.n_accepted == n || ctx_->truncate(n_past()), PLD_E_INTERNAL, "the target's cache could not roll back");
        seq_.anchor = out.chosen[static_cast<size_t>(out.n_accepted)];
        n_rows_     = n + 1;
        return out;
    });
}

void Engine::logits(int32_t row, float * out) const {
    require(!params_.backend_argmax, PLD_E_ARGUMENT, "logits are not read back: open with backend_argmax off");
    require(n_rows_ > 0, PLD_E_ORDER, "logits are those of the last verify: call verify first");
    require(row >= 0 && row < n_rows_, PLD_E_ARGUMENT, format("row %d is out of range, 0 to %d", row, n_rows_ - 1));
    const float * x = llama_get_logits_ith(ctx_->get(), row);
    require(x != nullptr, PLD_E_INTERNAL, "the last batch left no logits");
    std::memcpy(out, x, sizeof(float) * static_cast<size_t>(n_vocab_));
}

}  // namespace pld
