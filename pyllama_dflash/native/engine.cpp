#include "engine.h"

#include "cuda_graphs.h"

#include "error.h"
#include "llama-ext.h"
#include "llama-model.h"
#include "log.h"

#include <algorithm>

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
      threads_(params_.n_threads),
      seqs_(static_cast<size_t>(params_.n_seq_max)) {
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
    const auto mode = rollback_mode(*target_->llama());
    // Only an attention's cache takes all rows back.
    params_.few_shapes =
        mode == PLD_ROLLBACK_CUT && (params_.few_shapes < 0 ? on_gpu(*target_->llama()) : params_.few_shapes != 0) ? 1 : 0;
    ctx_            = std::make_unique<Context>(target_->llama(), target_context(params_, mode), "target");
    ctx_->choose_rope_factors(params_.n_ctx_rope);
    require(params_.n_seq_max == 1 || !params_.kv_unified || !ctx_->blocks_of_cells(), PLD_E_ARGUMENT,
            target_->header().name() + " attends to blocks of its cache, which sequences would share with kv_unified; turn it off");
    if (llama_model_is_hybrid(target_->llama()) && mode == PLD_ROLLBACK_CHECKPOINT && params_.n_max > 0 && params_.n_seq_max > 1 &&
        !params_.kv_unified) {
        log::write(log::INFO, target_->header().name() + ": one K/V buffer for all sequences is used, so that checkpoints take none of it");
    }
    rollback_       = std::make_unique<Rollback>(*ctx_, mode, params_.n_seq_max, params_.n_max);
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
        begin(0, &token, 1);
        verify({{0, nullptr, 0}}, false);
        step = "draft";
        if (drafter_) {
            draft({{0, 0, std::clamp(params_.n_ctx - 2, 0, params_.n_max)}});
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
    const auto                 widest = [&](int32_t seq) { return std::min(params_.n_max, params_.n_ctx - 1 - at(seq).n_past()); };
    const auto                 draft_all = [&] {
        std::vector<DraftRequest> requests;
        for (int32_t seq = 0; drafter_ && seq < params_.n_seq_max; ++seq) {
            requests.push_back({seq, 0, widest(seq)});
        }
        draft(requests);
    };
    try {
        std::vector<VerifyRequest> requests;
        for (int32_t seq = 0; seq < params_.n_seq_max; ++seq) {
            begin(seq, tokens.data(), n + 1);
            prefill(seq);
            requests.push_back({seq, tokens.data(), widest(seq)});
        }
        draft_all();
        verify(requests, false);
        draft_all();  // with the rows of that verify
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
            drafter_ && drafter_->fused(),
            params_.n_seq_max,
            drafter_ ? drafter_->n_ctx() : 0,
            rollback_->mode(),
            params_.few_shapes};
}

pld_engine_state Engine::state(int32_t seq) const {
    const auto & s = at(seq);
    return {s.n_past(),
            static_cast<int32_t>(s.pending.size()),
            s.anchor,
            drafter_ ? drafter_->n_past(seq) : 0,
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

}  // namespace pld
