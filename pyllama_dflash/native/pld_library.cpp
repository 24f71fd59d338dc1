// The C boundary: the library itself, its devices and its log.
#include "boundary.h"
#include "devices.h"
#include "ggml-backend.h"
#include "log.h"
#include "pld_build_info.h"

#include <map>

namespace {

using pld::format;
using pld::guard;
using pld::require;
using pld::require_pointers;

template <size_t N> void copy(char (&dst)[N], const char * src) {
    std::snprintf(dst, N, "%s", src ? src : "");
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
        {"pld_draft_request", sizeof(pld_draft_request)}, {"pld_verify_request", sizeof(pld_verify_request)},
        {"pld_verdict", sizeof(pld_verdict)},
        {"pld_engine_memory", sizeof(pld_engine_memory)},
        {"pld_graph", sizeof(pld_graph)},
        {"pld_device_memory", sizeof(pld_device_memory)},
        {"pld_tensor_type", sizeof(pld_tensor_type)},
        {"pld_tensor_info", sizeof(pld_tensor_info)},
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

int32_t pld_log_next(int32_t * level, int32_t * ours, char * buf, int32_t cap) {
    return level && ours && buf ? pld::log::next(level, ours, buf, cap) : -1;
}

int64_t pld_log_dropped(void) {
    return pld::log::dropped();
}
