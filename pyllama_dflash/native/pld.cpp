// The C boundary: each function checks its pointers, runs inside a guard and turns exceptions into a status.
#include "accept.h"
#include "api.h"
#include "devices.h"
#include "engine.h"
#include "error.h"
#include "ggml-backend.h"
#include "log.h"
#include "model.h"
#include "pld_build_info.h"

#include <chrono>
#include <cstring>
#include <map>
#include <new>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

struct pld_model {
    std::shared_ptr<pld::Model> model;
};

struct pld_engine {
    pld::Engine engine;
};

namespace {

using pld::format;
using pld::require;

thread_local std::string last_error;

int32_t fail(int32_t status, const char * message) noexcept {
    try {
        last_error = message;
    } catch (...) {
        last_error.clear();
    }
    return status;
}

template <typename F> int32_t guard(F && f) noexcept {
    try {
        return f();
    } catch (const pld::Error & e) {
        return fail(e.status, e.what());
    } catch (const std::bad_alloc &) {
        return fail(PLD_E_MEMORY, "out of memory");
    } catch (const std::exception & e) {
        return fail(PLD_E_INTERNAL, e.what());
    } catch (...) {
        return fail(PLD_E_INTERNAL, "an unknown C++ exception");
    }
}

template <typename... P> void require_pointers(const P *... pointers) {
    require((... && (pointers != nullptr)), PLD_E_ARGUMENT, "a required pointer is NULL");
}

int32_t write_text(const std::string & text, char * buf, int32_t cap) {
    if (buf && cap > 0) {
        std::memcpy(buf, text.data(), std::min(text.size(), static_cast<size_t>(cap)));
    }
    return static_cast<int32_t>(text.size());
}

int64_t now_us() {
    using namespace std::chrono;
    return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

template <size_t N> void copy(char (&dst)[N], const char * src) {
    std::snprintf(dst, N, "%s", src ? src : "");
}

// malloc keeps what was freed for the next allocation; who closes a model expects to see its memory again.
void give_back_memory() {
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
}

}  // namespace

int32_t pld_abi_version(void) {
    return PLD_ABI_VERSION;
}

int32_t pld_struct_size(const char * name) {
    static const std::map<std::string, size_t> sizes = {
        {"pld_device_info", sizeof(pld_device_info)},   {"pld_model_params", sizeof(pld_model_params)},
        {"pld_model_info", sizeof(pld_model_info)},     {"pld_engine_params", sizeof(pld_engine_params)},
        {"pld_engine_info", sizeof(pld_engine_info)},   {"pld_engine_state", sizeof(pld_engine_state)},
        {"pld_draft_params", sizeof(pld_draft_params)}, {"pld_verdict", sizeof(pld_verdict)},
        {"pld_engine_memory", sizeof(pld_engine_memory)},
        {"pld_graph", sizeof(pld_graph)},
    };
    const auto it = name ? sizes.find(name) : sizes.end();
    return it == sizes.end() ? -1 : static_cast<int32_t>(it->second);
}

int32_t pld_init(void) {
    return guard([] {
        pld::log::install();
        llama_backend_init();
        return PLD_OK;
    });
}

const char * pld_last_error(void) {
    return last_error.c_str();
}

const char * pld_build_info(const char * name) {
    static const std::map<std::string, const char *> facts = {
        {"version", PLD_VERSION}, {"upstream_commit", PLD_UPSTREAM_COMMIT}, {"patches", PLD_PATCHES}, {"options", PLD_BUILD_OPTIONS},
    };
    if (name && std::strcmp(name, "system_info") == 0) {
        pld::log::install();
        return llama_print_system_info();
    }
    const auto it = name ? facts.find(name) : facts.end();
    return it == facts.end() ? nullptr : it->second;
}

// Whatever looks for devices first makes the backends report what they find, so the log must be routed before.
int32_t pld_supports_gpu(void) {
    pld::log::install();
    return llama_supports_gpu_offload();
}

int32_t pld_n_devices(void) {
    pld::log::install();
    return static_cast<int32_t>(ggml_backend_dev_count());
}

int32_t pld_device(int32_t index, pld_device_info * out) {
    return guard([&] {
        require_pointers(out);
        require(index >= 0 && index < pld_n_devices(), PLD_E_ARGUMENT, format("there is no device %d", index));
        auto * dev  = ggml_backend_dev_get(static_cast<size_t>(index));
        size_t free = 0, total = 0;
        ggml_backend_dev_memory(dev, &free, &total);
        *out = {};
        copy(out->name, ggml_backend_dev_name(dev));
        copy(out->description, ggml_backend_dev_description(dev));
        copy(out->backend, ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)));
        out->is_gpu       = pld::is_gpu(dev);
        out->memory_free  = static_cast<int64_t>(free);
        out->memory_total = static_cast<int64_t>(total);
        return PLD_OK;
    });
}

int32_t pld_log_set_level(int32_t level) {
    return guard([&] {
        require(level >= pld::log::DEBUG, PLD_E_ARGUMENT, format("log level %d is below 1 (debug)", level));
        pld::log::set_level(level);
        return PLD_OK;
    });
}

int32_t pld_log_next(int32_t * level, char * buf, int32_t cap) {
    return level && buf ? pld::log::next(level, buf, cap) : -1;
}

int64_t pld_log_dropped(void) {
    return pld::log::dropped();
}

int32_t pld_model_open(const char * path, const pld_model_params * params, pld_model ** out) {
    return guard([&] {
        require_pointers(path, params, out);
        *out = new pld_model{std::make_shared<pld::Model>(path, *params)};
        return PLD_OK;
    });
}

void pld_model_free(pld_model * model) {
    delete model;
    give_back_memory();
}

int32_t pld_model_get_info(const pld_model * model, pld_model_info * out) {
    return guard([&] {
        require_pointers(model, out);
        *out = model->model->info();
        return PLD_OK;
    });
}

int32_t pld_model_n_meta(const pld_model * model) {
    return guard([&] {
        require_pointers(model);
        return static_cast<int32_t>(model->model->header().n_meta());
    });
}

int32_t pld_model_meta_key(const pld_model * model, int32_t index, char * buf, int32_t cap) {
    return guard([&] {
        require_pointers(model);
        require(index >= 0 && index < pld_model_n_meta(model), PLD_E_ARGUMENT, format("there is no metadata key %d", index));
        return write_text(model->model->header().meta_key(index), buf, cap);
    });
}

int32_t pld_model_meta(const pld_model * model, const char * key, char * buf, int32_t cap) {
    return guard([&] {
        require_pointers(model, key);
        const auto text = model->model->header().meta(key);
        require(text.has_value(), PLD_E_ARGUMENT, format("%s has no key '%s'", model->model->header().name().c_str(), key));
        return write_text(*text, buf, cap);
    });
}

int32_t pld_model_tensor_types(const pld_model * model, char * buf, int32_t cap) {
    return guard([&] {
        require_pointers(model);
        return write_text(model->model->header().tensor_types(), buf, cap);
    });
}

int32_t pld_model_check_pair(const pld_model * target, const pld_model * draft) {
    return guard([&] {
        require_pointers(target, draft);
        pld::check_pair(target->model->header(), draft->model->header());
        return PLD_OK;
    });
}

int32_t pld_model_tokenize(const pld_model * model, const char * text, int32_t n_bytes, int32_t add_special,
                           int32_t parse_special, int32_t * tokens, int32_t cap) {
    return guard([&] {
        require_pointers(model, text);
        require(n_bytes >= 0, PLD_E_ARGUMENT, "the text's length is negative");
        const auto ids = model->model->tokenize({text, static_cast<size_t>(n_bytes)}, add_special, parse_special);
        if (tokens && static_cast<int64_t>(ids.size()) <= cap) {
            std::copy(ids.begin(), ids.end(), tokens);
        }
        return static_cast<int32_t>(ids.size());
    });
}

int32_t pld_model_piece(const pld_model * model, int32_t token, int32_t special, char * buf, int32_t cap) {
    return guard([&] {
        require_pointers(model);
        return write_text(model->model->piece(token, special), buf, cap);
    });
}

int32_t pld_model_is_eog(const pld_model * model, int32_t token) {
    return guard([&] {
        require_pointers(model);
        return static_cast<int32_t>(model->model->is_eog(token));
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
    give_back_memory();
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
        const auto graphs = engine->engine.graphs();
        if (out) {
            std::copy_n(graphs.begin(), std::min(graphs.size(), static_cast<size_t>(std::max(cap, 0))), out);
        }
        return static_cast<int32_t>(graphs.size());
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
