// A draft's weights as our graph needs them: where each lies, and whether the graph knows everything the model does.
#pragma once

#include "draft_head.h"
#include "model.h"

#include <stdexcept>
#include <vector>

struct llama_hparams;

namespace pld {

// Why our graph does not run a draft here; llama.cpp's does.
struct Unsupported : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// An F16 weight takes what it multiplies as F16, and the features of some targets reach beyond 65504. A norm follows the fusing
// layer, so a position's features may be divided by any number: here by sqrt(mean square + FEATURE_EPS), which is near 1 for small
// ones, where that norm's eps counts.
constexpr float FEATURE_EPS = 1.0f;
bool            scales_features(const llama_model & draft);

class DraftModel {
public:
    // Throws Unsupported. target: the model whose embeddings and head the draft shares if it has none. reduce: of a shared head,
    // only the rows of the tokens that the draft lists, if it does.
    DraftModel(const Model & draft, const Model & target, bool reduce);

    bool dry_run() const { return dry_run_; }

    const llama_model &   weights() const { return model_; }
    const llama_hparams & hparams() const;
    const DraftFacts &    facts() const { return facts_; }
    ggml_tensor *         head() const { return head_; }
    // Rows of the head that are tokens: all, or those before its padding.
    int64_t n_head() const { return vocab_.empty() ? head_->ne[1] : n_token_map(); }
    // Bytes of a head that was copied, since it lay on another device or only some of its rows are used.
    size_t n_copied() const { return copy_ ? copy_->memory.n_bytes : 0; }
    // The one device that holds every weight that the graph reads.
    ggml_backend_dev_t device() const { return device_; }

    int32_t n_layer() const;
    int64_t n_embd() const;
    bool    dflash2() const { return facts_.kind == PLD_KIND_DFLASH2; }
    // Whether some layer has a sliding window.
    bool any_window() const;

    // A token's embedding as the block takes it, written to out[n_embd].
    void embed(int32_t token, float * out) const;
    // The target's token of each row of a head of the draft's or the target's that was reduced; empty for a whole one.
    std::vector<int32_t> token_map() const;
    int64_t              n_token_map() const;

private:
    void place_head(const Model & draft, const Model & target, bool reduce);

    bool                             dry_run_;
    const llama_model &              model_;
    const DraftFacts &               facts_;
    ggml_tensor *                    embd_;
    ggml_tensor *                    head_;
    ggml_backend_dev_t               device_ = nullptr;
    std::shared_ptr<const DraftHead> copy_;
    std::vector<int32_t>             vocab_;  // the tokens of a copy of some rows
};

}  // namespace pld
