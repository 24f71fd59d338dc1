// The draft as one launch of our own graph, for all sequences that are neighbours. It reads the target's features where they lie:
// those of a verify wait there, and go to the cache with the next blocks.
#pragma once

#include "draft_graphs.h"
#include "draft_state.h"
#include "drafter.h"
#include "stretch.h"

namespace pld {

class FusedDrafter : public Drafter {
public:
    // Throws Unsupported where only llama.cpp's graph will do.
    FusedDrafter(std::shared_ptr<Model> model, const Model & target, Context & ctx, const pld_engine_params & params);

    bool    fused() const override { return true; }
    int32_t n_candidates() const override { return n_candidates_; }
    int32_t n_ctx() const override { return sight_; }
    int32_t n_past(int32_t seq) const override { return at(seq).n_cached + at(seq).n_kept; }
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
    void    forget_all() override;
    size_t  state_size(int32_t seq) override;
    void    state_write(int32_t seq, uint8_t * out) override;
    void    state_read(int32_t seq, const uint8_t * data, size_t size) override;

private:
    // What belongs to one sequence, beside its cells.
    struct Sequence {
        int32_t n_cached = 0;  // positions up to which the cache was written
        int32_t low      = 0;  // the first that it still holds
        int32_t row      = 0;  // of the target's last batch, the sequence's first
        int32_t n_kept   = 0;  // rows from there on that are to be written
    };
    using Requests = std::vector<DraftRequest>::const_iterator;

    // Features that lie on another device, copied to the draft's.
    struct Copy {
        ggml_backend_buffer_ptr buffer;
        ggml_tensor             tensor;
    };

    const ggml_tensor * local(const ggml_tensor * feature, size_t index);
    void                reserve_largest();
    size_t              n_copies() const;
    size_t              copy_size() const;  // of one layer's features
    Requests            stretch_end(Requests begin, Requests end) const;
    std::vector<DraftSource> sources(DraftRows & rows) const;
    // Write what waits and run a block of n tokens for each sequence of the stretch, which has those of the requests: out
    // [sequences, n, 2k].
    void       launch(Requests begin, Requests end, Stretch seqs, int32_t n, std::vector<float> & out);
    DraftState header(int32_t seq) const;

    Sequence &       at(int32_t seq) { return seqs_[static_cast<size_t>(seq)]; }
    const Sequence & at(int32_t seq) const { return seqs_[static_cast<size_t>(seq)]; }

    std::shared_ptr<Model> model_;
    Context &              target_;
    int32_t                n_vocab_;
    int32_t                n_candidates_;
    int32_t                n_ctx_;
    int32_t                sight_;     // positions before a block that it sees
    int32_t                widest_;    // rows of a block
    int32_t                max_rows_;  // of a batch of the target
    bool                   flash_attn_;
    DraftModel             draft_;
    ggml_backend_ptr       backend_;
    bool                   cpu_;
    bool                   fills_ends_;
    DraftCache             cache_;
    DraftInputs            inputs_;
    DraftGraphs            graphs_;
    std::vector<Sequence>  seqs_;
    std::vector<const ggml_tensor *> features_;  // of the target's last batch, as long as rows of it wait; one for each layer read
    std::vector<Copy>      copies_;              // one for each of those, made when first needed
    int64_t                n_injected_ = 0;
};

}  // namespace pld
