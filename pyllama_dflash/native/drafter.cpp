#include "drafter.h"

#include "error.h"
#include "fused_drafter.h"
#include "llama-context.h"
#include "llama-ext.h"
#include "llama-model.h"
#include "llama_drafter.h"
#include "log.h"

#include <algorithm>

namespace pld {

void Drafter::warn_invalid() {
    if (!warned_) {
        warned_ = true;
        log::write(log::WARN, "the draft gave a score that is not a number or a token that does not exist; drafts are cut there");
    }
}

void require_layers(const Model & target, const std::vector<int32_t> & ids, Context & ctx) {
    const auto shown = [&](int32_t id) { return ctx.shows_layer(id); };
    if (!std::all_of(ids.begin(), ids.end(), shown)) {  // some models compute only those that are asked for
        const log::Opening opening;
        for (const auto id : ids) {
            llama_set_embeddings_layer_inp(ctx.get(), static_cast<uint32_t>(id), true);
        }
        ctx.get()->sched_reserve();
    }
    const auto hidden = std::find_if_not(ids.begin(), ids.end(), shown);
    require(hidden == ids.end(), PLD_E_PAIR,
            target.header().name() + ": models of kind '" + target.header().arch() + "' do not show a draft the input of layer " +
                std::to_string(hidden == ids.end() ? 0 : *hidden) + "; run it without a draft");
}

void require_layers(const Model & target, const Model & draft, Context & ctx) {
    require_layers(target, draft.facts().target_layers, ctx);
}

std::vector<int32_t> token_ids(const float * ids, int32_t n, int32_t n_vocab) {
    std::vector<int32_t> out(static_cast<size_t>(n));
    std::transform(ids, ids + n, out.begin(),
                   [&](float id) { return id >= 0 && id < static_cast<float>(n_vocab) ? static_cast<int32_t>(id) : -1; });
    return out;
}

std::unique_ptr<Drafter> make_drafter(std::shared_ptr<Model> model, const Model & target, Context & ctx,
                                      const pld_engine_params & params) {
    if (params.fused_draft) {
        try {
            const log::Opening opening;  // ggml checks shapes by assertion
            return std::make_unique<FusedDrafter>(model, target, ctx, params);
        } catch (const Unsupported & e) {
            log::write(log::INFO, model->header().name() + ": llama.cpp's own draft graph is used, because " + e.what());
        }
    }
    return std::make_unique<LlamaDrafter>(std::move(model), ctx, params);
}

}  // namespace pld
