// The C boundary: what drafts read of a target.
#include "boundary.h"
#include "llama-ext.h"
#include "log.h"

using pld::format;
using pld::guard;
using pld::require;
using pld::require_pointers;

namespace {

constexpr int32_t MOST = 4096;  // tokens, all in one batch

}  // namespace

int32_t pld_model_layer_input(pld_model * model, const int32_t * tokens, int32_t n, int32_t layer, float * out) {
    return guard([&] {
        require_pointers(model, tokens, out);
        const auto & target  = *model->model;
        const auto   n_layer = llama_model_n_layer(target.llama());
        pld::check_target(target.header());
        require(n >= 1 && n <= MOST, PLD_E_ARGUMENT, format("%d tokens are out of range, 1 to %d", n, MOST));
        require(layer >= 0 && layer < n_layer, PLD_E_ARGUMENT, format("layer %d is out of range, 0 to %d", layer, n_layer - 1));
        std::for_each_n(tokens, n, [&](int32_t token) { target.check_token(token); });

        pld_engine_params params{};
        params.n_ctx     = std::max(n, 64);
        params.n_ubatch  = n;
        params.n_seq_max = 1;
        params.type_k = params.type_v = params.type_k_draft = params.type_v_draft = GGML_TYPE_F32;
        params.flash_attn             = -1;
        const pld::log::Opening opening;  // llama.cpp checks much by assertion when a model first runs
        pld::Context            ctx(target.llama(), pld::target_context(params, PLD_ROLLBACK_CUT), "target");
        pld::require_layers(target, {layer}, ctx);
        llama_set_embeddings_layer_inp(ctx.get(), static_cast<uint32_t>(layer), true);
        for (int32_t i = 0; i < n; ++i) {
            ctx.add_token(0, tokens[i], i, /*output=*/i == n - 1);
        }
        ctx.run();
        const float * rows = llama_get_embeddings_layer_inp(ctx.get(), static_cast<uint32_t>(layer));
        std::copy_n(rows, static_cast<size_t>(n) * static_cast<size_t>(llama_model_n_embd(target.llama())), out);
        return PLD_OK;
    });
}
