#include "devices.h"

namespace pld {

bool is_gpu(ggml_backend_dev_t dev) {
    const auto type = ggml_backend_dev_type(dev);
    return type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
}

std::vector<ggml_backend_dev_t> default_gpus() {
    std::vector<ggml_backend_dev_t> found[2];
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        auto * dev = ggml_backend_dev_get(i);
        if (is_gpu(dev)) {
            found[ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_IGPU].push_back(dev);
        }
    }
    return found[0].empty() ? found[1] : found[0];
}

int32_t device_index(ggml_backend_dev_t dev) {
    if (dev == nullptr) {
        return -1;
    }
    const auto parts = ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_META;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        if (parts ? is_gpu(ggml_backend_dev_get(i)) : ggml_backend_dev_get(i) == dev) {
            return static_cast<int32_t>(i);
        }
    }
    return -1;
}

std::string names_of(const std::vector<ggml_backend_dev_t> & devices) {
    std::string out;
    for (auto * dev : devices) {
        out += (out.empty() ? "" : ", ") + std::string(ggml_backend_dev_name(dev));
    }
    return out.empty() ? "none" : out;
}

ggml_backend_dev_t memory_of(ggml_backend_buffer_type_t buft) {
    auto * dev = ggml_backend_buft_get_device(buft);
    return dev == nullptr || ggml_backend_buft_is_host(buft) ? ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) : dev;
}

}  // namespace pld
