#include "plan.h"

#include "draft_cache.h"
#include "drafter.h"
#include "engine_params.h"
#include "error.h"
#include "llama-model.h"
#include "log.h"
#include "rollback.h"

#include <algorithm>

namespace pld {

namespace {

// A cache keeps some bytes of its own for each cell even in a dry run. Beyond this size everything grows in proportion.
constexpr int32_t MOST_MEASURED = 1 << 16;

// A GPU turns a quantised cache into F16 a layer at a time, in memory that no graph accounts for.
void add_dequantised(std::vector<pld_device_memory> & rows, const Model & target, const pld_engine_params & params) {
    const auto & h     = target.llama()->hparams;
    int64_t      width = 0;
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        const auto k = ggml_is_quantized(static_cast<ggml_type>(params.type_k)) ? h.n_embd_k_gqa(il) : 0;
        const auto v = ggml_is_quantized(static_cast<ggml_type>(params.type_v)) ? h.n_embd_v_gqa(il) : 0;
        width        = std::max<int64_t>(width, k + v);
    }
    for (auto & row : rows) {
        row.target_compute += row.is_host ? 0 : width * params.n_ctx * static_cast<int64_t>(sizeof(ggml_fp16_t));
    }
}

std::vector<pld_device_memory> measure(const Model & target, const std::shared_ptr<Model> & draft, const pld_engine_params & params) {
    Context ctx(target.llama(), target_context(params, rollback_mode(*target.llama())), "target");
    llama_set_argmax(ctx.get(), params.backend_argmax);
    Footprint out;
    out.add(llama_get_memory_breakdown(ctx.get()), /*draft=*/false);
    if (draft) {
        require_layers(target, *draft, ctx);
        make_drafter(draft, target, ctx, params)->footprint(out);
    }
    auto rows = out.rows();
    add_dequantised(rows, target, params);
    return rows;
}

// Weights would be mapped where they lie in plain memory of the host.
void mark_mapped(std::vector<pld_device_memory> & rows, const Model & model, bool use_mmap, bool use_mlock) {
    for (const auto & [buft, bytes] : model.llama()->memory_breakdown()) {
        if (use_mmap && !use_mlock && ggml_backend_buft_is_host(buft)) {
            for (auto & row : rows) {
                row.mapped += row.is_host ? static_cast<int64_t>(bytes) : 0;
            }
        }
    }
}

}  // namespace

Plan plan(const PlanFile & target_file, const PlanFile * draft_file, const pld_engine_params * params) {
    const log::Quiet   quiet;
    const log::Opening opening;
    const Model        target(target_file.path, target_file.params, /*dry_run=*/true);
    const auto draft = draft_file ? std::make_shared<Model>(draft_file->path, draft_file->params, /*dry_run=*/true) : nullptr;

    Plan out;
    if (params) {
        auto p    = resolve(target.header(), draft ? &draft->header() : nullptr, *params);
        out.n_ctx = p.n_ctx;
        // What grows with the context, and up to which size.
        const std::pair<Footprint::Kind, int32_t> growing[] = {
            {&pld_device_memory::target_kv, p.n_ctx},
            {&pld_device_memory::target_compute, p.n_ctx},
            {&pld_device_memory::draft_kv, draft_window(p)},
            {&pld_device_memory::draft_compute, draft_window(p)},
        };
        p.n_ctx = std::min(out.n_ctx, MOST_MEASURED);
        out.rows  = measure(target, draft, p);
        if (out.n_ctx > MOST_MEASURED) {
            p.n_ctx         = MOST_MEASURED / 2;
            const auto half = measure(target, draft, p);
            require(half.size() == out.rows.size(), PLD_E_INTERNAL, "a smaller context lies on other devices");
            for (size_t i = 0; i < half.size(); ++i) {
                for (const auto & [kind, n_ctx] : growing) {
                    out.rows[i].*kind += (out.rows[i].*kind - half[i].*kind) / p.n_ctx * std::max(0, n_ctx - MOST_MEASURED);
                }
            }
        }
    } else {
        Footprint weights;
        weights.add(target.llama()->memory_breakdown(), &pld_device_memory::target_weights);
        if (draft) {
            weights.add(draft->llama()->memory_breakdown(), &pld_device_memory::draft_weights);
        }
        out.rows = weights.rows();
    }
    mark_mapped(out.rows, target, target_file.params.use_mmap != 0, target_file.params.use_mlock != 0);
    if (draft) {
        mark_mapped(out.rows, *draft, draft_file->params.use_mmap != 0, draft_file->params.use_mlock != 0);
    }
    return out;
}

Plan plan_draft(const PlanFile & file, const pld_engine_params * params) {
    const log::Quiet   quiet;
    const log::Opening opening;
    const Model        draft(file.path, file.params, /*dry_run=*/true);
    require(draft.facts().kind != PLD_KIND_TARGET, PLD_E_PAIR, draft.header().name() + " is no draft; plan it as a target");

    Plan      out;
    Footprint sizes;
    sizes.add(draft.llama()->memory_breakdown(), &pld_device_memory::draft_weights);
    if (params && params->n_ctx != 0) {
        check_draft_cache(draft.header(), *params);
        auto *                 dev = draft.llama()->dev_output();
        const ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
        require(backend != nullptr, PLD_E_MEMORY, format("%s could not be opened for the draft", ggml_backend_dev_name(dev)));
        const DraftCache cache(draft.llama()->hparams, /*dry_run=*/true, backend.get(), draft.facts().block_size, *params);
        sizes.add(ggml_backend_get_default_buffer_type(backend.get()), &pld_device_memory::draft_kv, cache.n_bytes());
        out.n_ctx = params->n_ctx;
    }
    out.rows = sizes.rows();
    mark_mapped(out.rows, draft, file.params.use_mmap != 0, file.params.use_mlock != 0);
    return out;
}

}  // namespace pld
