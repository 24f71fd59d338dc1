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

void require_count(int32_t n, int32_t n_seq_max) {
    require(n >= 1 && n <= n_seq_max, PLD_E_ARGUMENT, format("%d requests are out of range, 1 to n_seq_max=%d", n, n_seq_max));
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

int32_t pld_engine_get_state(const pld_engine * engine, int32_t seq, pld_engine_state * out) {
    return guard([&] {
        require_pointers(engine, out);
        *out = engine->engine.state(seq);
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

int32_t pld_engine_reset(pld_engine * engine, int32_t seq) {
    return guard([&] {
        require_pointers(engine);
        if (seq == -1) {
            engine->engine.reset();
        } else {
            engine->engine.reset(seq);
        }
        return PLD_OK;
    });
}

int32_t pld_engine_begin(pld_engine * engine, int32_t seq, const int32_t * tokens, int32_t n, int32_t * n_reused) {
    return guard([&] {
        require_pointers(engine, tokens, n_reused);
        *n_reused = engine->engine.begin(seq, tokens, n);
        return PLD_OK;
    });
}

int32_t pld_engine_prefill(pld_engine * engine, int32_t seq) {
    return guard([&] {
        require_pointers(engine);
        return engine->engine.prefill(seq);
    });
}

int32_t pld_engine_draft(pld_engine * engine, const pld_draft_request * requests, int32_t n, int32_t * lengths, int32_t * tokens,
                         float * margins, int32_t * candidates, float * scores, int64_t * t_us) {
    return guard([&] {
        require_pointers(engine, requests, lengths, tokens);
        const auto start = now_us();
        const auto info  = engine->engine.info();
        const auto k     = static_cast<size_t>(info.n_candidates);
        require_count(n, info.n_seq_max);
        std::vector<pld::DraftRequest> asked;
        for (const auto * r = requests; r != requests + n; ++r) {
            require(r->n_min >= 0 && r->n_min <= r->n_max, PLD_E_ARGUMENT,
                    format("n_min=%d is out of range, 0 to n_max=%d", r->n_min, r->n_max));
            require(r->margin >= 0.0f, PLD_E_ARGUMENT, format("margin=%g is negative or not a number", r->margin));
            require(r->p_min >= 0.0f && r->p_min <= 1.0f, PLD_E_ARGUMENT, format("p_min=%g is outside 0 to 1", r->p_min));
            asked.push_back({r->seq, 0, r->n_max});
        }
        const auto drafts = engine->engine.draft(std::move(asked));
        for (int32_t j = 0; j < n; ++j) {
            const auto & draft = drafts[static_cast<size_t>(j)];
            const auto   line  = static_cast<size_t>(j) * static_cast<size_t>(info.n_max);
            lengths[j]         = pld::cut(draft, requests[j].n_min, requests[j].margin, requests[j].p_min);
            for (size_t i = 0; i < static_cast<size_t>(lengths[j]); ++i) {
                const auto & c   = draft[i];
                tokens[line + i] = c.tokens[0];
                if (margins) {
                    margins[line + i] = c.margin();
                }
                if (candidates) {
                    std::copy(c.tokens.begin(), c.tokens.end(), candidates + (line + i) * k);
                }
                if (scores) {
                    std::copy(c.scores.begin(), c.scores.end(), scores + (line + i) * k);
                }
            }
        }
        if (t_us) {
            *t_us = now_us() - start;
        }
        return PLD_OK;
    });
}

int32_t pld_engine_verify(pld_engine * engine, const pld_verify_request * requests, int32_t n, const int32_t * tokens,
                          int32_t * chosen, float * margins, pld_verdict * verdicts, int64_t * t_us) {
    return guard([&] {
        require_pointers(engine, requests, tokens, verdicts);
        const auto start = now_us();
        const auto info  = engine->engine.info();
        const auto w     = static_cast<size_t>(info.n_max);
        require_count(n, info.n_seq_max);
        std::vector<pld::VerifyRequest> asked;
        for (int32_t j = 0; j < n; ++j) {
            asked.push_back({requests[j].seq, tokens + static_cast<size_t>(j) * w, requests[j].n});
        }
        const auto found = engine->engine.verify(asked, margins != nullptr);
        for (size_t j = 0; j < found.size(); ++j) {
            const auto & v = found[j];
            if (chosen) {
                std::copy(v.chosen.begin(), v.chosen.end(), chosen + j * (w + 1));
            }
            if (margins) {
                std::copy(v.margins.begin(), v.margins.end(), margins + j * (w + 1));
            }
            const auto bonus = v.chosen.empty() ? -1 : v.chosen[static_cast<size_t>(v.n_accepted)];
            verdicts[j]      = {v.n_accepted, bonus, engine->engine.state(asked[j].seq).n_pending};
        }
        if (t_us) {
            *t_us = now_us() - start;
        }
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

int32_t pld_engine_tokens(const pld_engine * engine, int32_t seq, int32_t * out, int32_t cap) {
    return guard([&] {
        require_pointers(engine);
        return pld::write_rows(engine->engine.tokens(seq), out, cap);
    });
}

int64_t pld_engine_state_size(pld_engine * engine, int32_t seq) {
    int64_t    out    = 0;
    const auto status = guard([&] {
        require_pointers(engine);
        out = static_cast<int64_t>(engine->engine.state_size(seq));
        return PLD_OK;
    });
    return status == PLD_OK ? out : status;
}

int32_t pld_engine_state_get(pld_engine * engine, int32_t seq, uint8_t * out, int64_t n) {
    return guard([&] {
        require_pointers(engine, out);
        require(n >= 0, PLD_E_ARGUMENT, format("n=%lld is negative", (long long) n));
        engine->engine.state_write(seq, out, static_cast<size_t>(n));
        return PLD_OK;
    });
}

int32_t pld_engine_state_set(pld_engine * engine, int32_t seq, const uint8_t * data, int64_t n) {
    return guard([&] {
        require_pointers(engine, data);
        require(n >= 0, PLD_E_ARGUMENT, format("n=%lld is negative", (long long) n));
        engine->engine.state_read(seq, data, static_cast<size_t>(n));
        return PLD_OK;
    });
}
