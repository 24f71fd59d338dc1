// The draft as one launch of our own graph. It reads the target's features where they lie: those of a verify wait there, and go
// to the cache with the next block.
#pragma once

#include "draft_graphs.h"
#include "drafter.h"

namespace pld {

class FusedDrafter : public Drafter {
public:
    // Throws Unsupported where only llama.cpp's graph will do.
    FusedDrafter(std::shared_ptr<Model> model, const Model & target, Context & ctx, const pld_engine_params & params);

    bool    fused() const override { return true; }
    int32_t n_candidates() const override { return n_candidates_; }
    int32_t n_past(int32_t) const override { return seq_.n_cached + seq_.n_kept; }
    int64_t n_injected() const override { return n_injected_; }
    void    counters(pld_engine_memory & out) const override;
    void    footprint(Footprint & out) const override;
    void    graphs(std::vector<pld_graph> & out) const override { graphs_.list(out); }

    void attach(const ThreadPool & pool, int32_t n_threads) override;
    void leak() noexcept override { static_cast<void>(backend_.release()); }

    void    release_features() override { inject(); }
    void    add_features(const std::vector<BatchRows> & rows) override;
    void    inject() override;
    std::vector<Draft> draft(const std::vector<DraftRequest> & requests) override;
    int32_t truncate(int32_t seq, int32_t pos) override;
    void    forget_all() override { seq_ = {}; }

private:
    // What belongs to one sequence, beside its cells.
    struct Sequence {
        int32_t                          n_cached = 0;  // positions in the cache
        std::vector<const ggml_tensor *> features;      // rows of the target's last batch that are not there yet
        int32_t                          n_kept = 0;    // so many of them, from the first, will be
    };

    // Features that lie on another device, copied to the draft's.
    struct Copy {
        ggml_backend_buffer_ptr buffer;
        ggml_tensor             tensor;
    };

    const ggml_tensor * local(const ggml_tensor * feature, size_t index);
    void                reserve_largest();
    size_t              n_copies() const;
    size_t              copy_size() const;  // of one layer's features
    int32_t             n_rows() const;
    // Write what waits and, with n > 0, run a block that drafts n tokens into out [n, 2k].
    void launch(int32_t anchor, int32_t n, float * out);

    std::shared_ptr<Model> model_;
    Context &              target_;
    int32_t                n_vocab_;
    int32_t                n_candidates_;
    int32_t                max_rows_;  // of a batch of the target
    bool                   flash_attn_;
    DraftModel             draft_;
    ggml_backend_ptr       backend_;
    bool                   cpu_;
    DraftCache             cache_;
    DraftInputs            inputs_;
    DraftGraphs            graphs_;
    Sequence               seq_;
    std::vector<Copy>      copies_;  // one for each layer read, made when first needed
    int64_t                n_injected_ = 0;
};

}  // namespace pld
