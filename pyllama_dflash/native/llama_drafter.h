// The draft through llama.cpp's own graph, in a context of its own: features cross over the host, and injection and block are
// two batches. The reference for our graph, and what runs where ours does not.
#pragma once

#include "drafter.h"

namespace pld {

class LlamaDrafter : public Drafter {
public:
    LlamaDrafter(std::shared_ptr<Model> model, Context & target, const pld_engine_params & params);

    bool    fused() const override { return false; }
    int32_t n_candidates() const override { return n_candidates_; }
    int32_t n_past(int32_t) const override { return n_cached_ + n_pending(); }
    int64_t n_injected() const override { return n_injected_; }
    void    counters(pld_engine_memory &) const override {}
    void    footprint(Footprint & out) const override { out.add(llama_get_memory_breakdown(ctx_.get()), /*draft=*/true); }
    void    graphs(std::vector<pld_graph> &) const override {}

    void attach(const ThreadPool & pool, int32_t n_threads) override { ctx_.attach(pool, n_threads); }
    void leak() noexcept override { ctx_.leak(); }

    void    release_features() override {}  // they were copied
    void    add_features(const std::vector<BatchRows> & rows) override;
    void    inject() override;
    std::vector<Draft> draft(const std::vector<DraftRequest> & requests) override;
    int32_t truncate(int32_t seq, int32_t pos) override;
    void    forget_all() override;

private:
    int32_t    n_pending() const { return static_cast<int32_t>(pending_.size() / width_); }
    Candidates candidates(int32_t row, int32_t * predecessor) const;

    std::shared_ptr<Model> model_;
    Context &              target_;
    int32_t                n_vocab_;
    int32_t                n_candidates_;
    size_t                 n_embd_;   // of one layer's features
    size_t                 width_;    // of one position's features, all layers
    int32_t                n_ubatch_;
    Context                ctx_;
    std::vector<float>     pending_;  // [n_pending, width]
    int32_t                n_cached_   = 0;
    int64_t                n_injected_ = 0;
};

}  // namespace pld
