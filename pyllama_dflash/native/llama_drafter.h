// The draft through llama.cpp's own graph, in a context of its own: features cross over the host, and injection and block are
// two batches, for one sequence after the other. The reference for our graph, and what runs where ours does not.
#pragma once

#include "draft_state.h"
#include "drafter.h"

namespace pld {

class LlamaDrafter : public Drafter {
public:
    LlamaDrafter(std::shared_ptr<Model> model, Context & target, const pld_engine_params & params);

    bool    fused() const override { return false; }
    int32_t n_candidates() const override { return n_candidates_; }
    int32_t n_ctx() const override { return window_; }
    int32_t n_past(int32_t seq) const override { return at(seq).n_cached + n_pending(at(seq)); }
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
    size_t  state_size(int32_t seq) override;
    void    state_write(int32_t seq, uint8_t * out) override;
    void    state_read(int32_t seq, const uint8_t * data, size_t size) override;

private:
    struct Sequence {
        std::vector<float> pending;  // [n_pending, width]
        int32_t            n_cached = 0;
        int32_t            low      = 0;  // the first position that the cache still holds
    };

    Sequence &       at(int32_t seq) { return seqs_[static_cast<size_t>(seq)]; }
    const Sequence & at(int32_t seq) const { return seqs_[static_cast<size_t>(seq)]; }

    int32_t    n_pending(const Sequence & s) const { return static_cast<int32_t>(s.pending.size() / width_); }
    void       inject(int32_t seq);
    void       drop_before(int32_t seq, int32_t pos);
    void       forget(int32_t seq);
    Draft      draft(const DraftRequest & request, int32_t n);
    Candidates candidates(int32_t row, int32_t * predecessor) const;
    DraftState header(int32_t seq) const;

    std::shared_ptr<Model> model_;
    Context &              target_;
    int32_t                n_vocab_;
    int32_t                n_candidates_;
    size_t                 n_embd_;   // of one layer's features
    size_t                 width_;    // of one position's features, all layers
    int32_t                n_ubatch_;
    int32_t                n_ctx_;
    int32_t                window_;   // positions before a block that it sees
    ggml_type              type_k_;
    ggml_type              type_v_;
    Context                ctx_;
    std::vector<Sequence>  seqs_;
    int64_t                n_injected_ = 0;
};

}  // namespace pld
