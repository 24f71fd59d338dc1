// The DFlash and DFlash2 drafter: it reads features of the target's layers, keeps their K/V in its own cache, and drafts a
// block in one pass. Runs llama.cpp's own graph for the draft; features cross over the host.
#pragma once

#include "accept.h"
#include "context.h"
#include "model.h"

#include <memory>
#include <vector>

namespace pld {

class Drafter {
public:
    // params: those of the target's context, from which the draft's are derived. Turns on the target's layer taps.
    Drafter(std::shared_ptr<Model> model, Context & target, const pld_engine_params & params, int32_t n_ctx);

    Context & context() { return ctx_; }
    int32_t   n_candidates() const { return n_candidates_; }
    // Positions whose features are here: in the cache, or waiting to be written there.
    int32_t n_past() const { return n_cached_ + n_pending(); }
    int64_t n_injected() const { return n_injected_; }

    // Take the features of rows [0, n) of the target's last batch; they follow those already here.
    void add_features(int32_t n);
    // Write what waits into the cache.
    void inject();
    // Draft n tokens after the anchor, which stands at position n_past().
    Draft draft(int32_t anchor, int32_t n);

    // Keep positions [0, pos), or nothing at all where the cache has lost what that needs. Returns the positions kept.
    int32_t truncate(int32_t pos);
    void    forget();

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
    bool                   warned_     = false;
};

}  // namespace pld
