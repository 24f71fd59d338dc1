// The C boundary: engines.
#include "accept.h"
#include "boundary.h"
#include "plan.h"

#include <chrono>

namespace {

using pld::format;
using pld::guard;
using pld::require;
using pld::require_pointers;

int64_t now_us() {
    using namespace std::chrono;
    return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

int32_t pld_plan(const char * target, const pld_model_params * target_params, const char * draft,
                 const pld_model_params * draft_params, const pld_engine_params * params, int32_t * n_ctx,
                 pld_device_memory * out, int32_t cap) {
    return guard([&] {
        require_pointers(n_ctx, target ? target_params : draft_params);
        const auto planned = [&] {
            if (!target) {
                require_pointers(draft);
                return pld::plan_draft({draft, *draft_params}, params);
            }
            if (!draft) {
                return pld::plan({target, *target_params}, nullptr, params);
            }
            require_pointers(draft_params);
            const pld::PlanFile draft_file{draft, *draft_params};
            return pld::plan({target, *target_params}, &draft_file, params);
        };
        const auto found = planned();
        *n_ctx           = found.n_ctx;
        return pld::write_rows(found.rows, out, cap);
    });
}

int32_t pld_kv_type(const char * name) {
    return name ? pld::kv_type(name) : -1;
}

int32_t pld_engine_open(pld_model * target, pld_model * draft, const pld_engine_params * params, pld_engine ** out) {
    return guard([&] {
        require_pointers(target, params, out);
        *out = new pld_engine{{target->model, draft ? draft->model : nullptr, *params}};
        return PLD_OK;
    });
}

void pld_engine_free(pld_engine * engine) {
    delete engine;
    pld::give_back_memory();
}

int32_t pld_engine_get_info(const pld_engine * engine, pld_engine_info * out) {
    return guard([&] {
        require_pointers(engine, out);
        *out = engine->engine.info();
        return PLD_OK;
    });
}

int32_t pld_engine_get_state(const pld_engine * engine, pld_engine_state * out) {
    return guard([&] {
        require_pointers(engine, out);
        *out = engine->engine.state();
        return PLD_OK;
    });
}

int32_t pld_engine_get_memory(const pld_engine * engine, pld_engine_memory * out) {
    return guard([&] {
        require_pointers(engine, out);
        *out = engine->engine.memory();
        return PLD_OK;
    });
}

int32_t pld_engine_graphs(pld_engine * engine, pld_graph * out, int32_t cap) {
    return guard([&] {
        require_pointers(engine);
        return pld::write_rows(engine->engine.graphs(), out, cap);
    });
}

int32_t pld_engine_devices(const pld_engine * engine, pld_device_memory * out, int32_t cap) {
    return guard([&] {
        require_pointers(engine);
        return pld::write_rows(engine->engine.devices(), out, cap);
    });
}

int32_t pld_engine_reset(pld_engine * engine) {
    return guard([&] {
        require_pointers(engine);
        engine->engine.reset();
        return PLD_OK;
    });
}

int32_t pld_engine_begin(pld_engine * engine, const int32_t * tokens, int32_t n, int32_t * n_reused) {
    return guard([&] {
        require_pointers(engine, tokens, n_reused);
        *n_reused = engine->engine.begin(tokens, n);
        return PLD_OK;
    });
}

int32_t pld_engine_prefill(pld_engine * engine) {
    return guard([&] {
        require_pointers(engine);
        return engine->engine.prefill();
    });
}

int32_t pld_engine_draft(pld_engine * engine, const pld_draft_params * params, int32_t * tokens, float * margins,
                         int32_t * candidates, float * scores, int64_t * t_us) {
    return guard([&] {
        require_pointers(engine, params, tokens);
        require(params->n_min >= 0 && params->n_min <= params->n_max, PLD_E_ARGUMENT,
                format("n_min=%d is out of range, 0 to n_max=%d", params->n_min, params->n_max));
        require(params->margin >= 0.0f, PLD_E_ARGUMENT, format("margin=%g is negative or not a number", params->margin));
        require(params->p_min >= 0.0f && params->p_min <= 1.0f, PLD_E_ARGUMENT,
                format("p_min=%g is outside 0 to 1", params->p_min));
        const auto start = now_us();
        const auto draft = engine->engine.draft(params->n_max);
        const auto n     = pld::cut(draft, params->n_min, params->margin, params->p_min);
        const auto k     = static_cast<size_t>(engine->engine.info().n_candidates);
        for (int32_t i = 0; i < n; ++i) {
            const auto & c = draft[static_cast<size_t>(i)];
            tokens[i]      = c.tokens[0];
            if (margins) {
                margins[i] = c.margin();
            }
            if (candidates) {
                std::copy(c.tokens.begin(), c.tokens.end(), candidates + static_cast<size_t>(i) * k);
            }
            if (scores) {
                std::copy(c.scores.begin(), c.scores.end(), scores + static_cast<size_t>(i) * k);
            }
        }
        if (t_us) {
            *t_us = now_us() - start;
        }
        return n;
    });
}

int32_t pld_engine_verify(pld_engine * engine, const int32_t * tokens, int32_t n, int32_t * chosen, float * margins,
                          pld_verdict * out) {
    return guard([&] {
        require_pointers(engine, out);
        require(n == 0 || tokens != nullptr, PLD_E_ARGUMENT, "a required pointer is NULL");
        const auto start   = now_us();
        const auto verdict = engine->engine.verify(tokens, n, margins != nullptr);
        if (chosen) {
            std::copy(verdict.chosen.begin(), verdict.chosen.end(), chosen);
        }
        if (margins) {
            std::copy(verdict.margins.begin(), verdict.margins.end(), margins);
        }
        *out = {verdict.n_accepted, verdict.chosen[static_cast<size_t>(verdict.n_accepted)], now_us() - start};
        return PLD_OK;
    });
}

int32_t pld_engine_logits(const pld_engine * engine, int32_t row, float * out) {
    return guard([&] {
        require_pointers(engine, out);
        engine->engine.logits(row, out);
        return PLD_OK;
    });
}
