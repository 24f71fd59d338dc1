#include "load_params.h"

#include "devices.h"
#include "error.h"

#include <algorithm>
#include <cmath>

namespace pld {

namespace {

static_assert(int{PLD_SPLIT_NONE} == LLAMA_SPLIT_MODE_NONE && int{PLD_SPLIT_LAYER} == LLAMA_SPLIT_MODE_LAYER &&
              int{PLD_SPLIT_ROW} == LLAMA_SPLIT_MODE_ROW && int{PLD_SPLIT_TENSOR} == LLAMA_SPLIT_MODE_TENSOR);

constexpr const char * SPLIT_NAMES[] = {"none", "layer", "row", "tensor"};

llama_load_mode load_mode(bool use_mmap, bool use_mlock) {
    if (use_mlock) {
        return use_mmap ? LLAMA_LOAD_MODE_MMAP_MLOCK : LLAMA_LOAD_MODE_MLOCK;
    }
    return use_mmap ? LLAMA_LOAD_MODE_AUTO : LLAMA_LOAD_MODE_NONE;  // auto: mapped unless a device can't
}

bool splits_rows(ggml_backend_dev_t dev) {
    return ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), "ggml_backend_split_buffer_type") != nullptr;
}

void check_proportions(const float * split, int32_t n, const std::vector<ggml_backend_dev_t> & devices) {
    require(static_cast<size_t>(n) == devices.size(), PLD_E_ARGUMENT,
            format("tensor_split has %d numbers and there are %zu GPUs to split over (%s); give one for each", n, devices.size(),
                   names_of(devices).c_str()));
    float sum = 0.0f;
    for (int32_t i = 0; i < n; ++i) {
        require(std::isfinite(split[i]) && split[i] >= 0.0f, PLD_E_ARGUMENT,
                format("tensor_split[%d]=%g is out of range; use a finite number >= 0", i, static_cast<double>(split[i])));
        sum += split[i];
    }
    require(sum > 0.0f && std::isfinite(sum), PLD_E_ARGUMENT,
            format("the proportions of tensor_split add up to %g; use numbers like 3,1", static_cast<double>(sum)));
}

}  // namespace

LoadParams::LoadParams(const pld_model_params & params) : llama_(llama_model_default_params()) {
    constexpr auto SPLITS = static_cast<int32_t>(std::size(SPLIT_NAMES));
    require(params.split_mode >= 0 && params.split_mode < SPLITS, PLD_E_ARGUMENT,
            format("split_mode=%d is out of range, 0 to %d", params.split_mode, SPLITS - 1));
    choose_devices(params);
    check_split(params);

    llama_.n_gpu_layers    = params.n_gpu_layers;
    llama_.use_extra_bufts = params.repack != 0;
    llama_.load_mode       = load_mode(params.use_mmap != 0, params.use_mlock != 0);
    llama_.split_mode      = static_cast<llama_split_mode>(params.split_mode);
    llama_.main_gpu        = params.main_gpu;
    if (params.n_devices > 0) {
        list_ = devices_;
        list_.push_back(nullptr);
        llama_.devices = list_.data();
    }
    if (params.n_split > 0) {
        split_.assign(llama_max_devices(), 0.0f);
        std::copy_n(params.tensor_split, params.n_split, split_.begin());
        llama_.tensor_split = split_.data();
    }
}

void LoadParams::choose_devices(const pld_model_params & params) {
    require(params.n_devices >= 0 && params.n_devices <= PLD_MAX_DEVICES, PLD_E_ARGUMENT,
            format("%d devices are too many; at most %d", params.n_devices, PLD_MAX_DEVICES));
    if (params.n_devices == 0) {
        devices_ = default_gpus();
        return;
    }
    for (int32_t i = 0; i < params.n_devices; ++i) {
        const auto index = params.devices[i];
        const auto n     = static_cast<int32_t>(ggml_backend_dev_count());
        require(index >= 0 && index < n, PLD_E_ARGUMENT, format("there is no device %d, only 0 to %d", index, n - 1));
        auto *       dev  = ggml_backend_dev_get(static_cast<size_t>(index));
        const char * name = ggml_backend_dev_name(dev);
        require(std::find(devices_.begin(), devices_.end(), dev) == devices_.end(), PLD_E_ARGUMENT,
                format("%s is named twice; name each device once", name));
        require(is_gpu(dev) || params.n_devices == 1, PLD_E_ARGUMENT,
                format("%s is no GPU and can't share a model; n_gpu_layers says how many layers stay on the CPU", name));
        if (is_gpu(dev)) {
            devices_.push_back(dev);
        }
    }
}

void LoadParams::check_split(const pld_model_params & params) const {
    const auto   n    = static_cast<int32_t>(devices_.size());
    const char * mode = SPLIT_NAMES[params.split_mode];
    require(params.main_gpu >= 0 && params.main_gpu < std::max(n, 1), PLD_E_ARGUMENT,
            format("main_gpu=%d is out of range, 0 to %d; the GPUs are: %s", params.main_gpu, std::max(n, 1) - 1,
                   names_of(devices_).c_str()));
    require(params.main_gpu == 0 || params.split_mode == PLD_SPLIT_NONE, PLD_E_ARGUMENT,
            format("main_gpu=%d has no effect with split_mode='%s'; use split_mode='none'", params.main_gpu, mode));
    require(params.n_split >= 0 && params.n_split <= PLD_MAX_DEVICES, PLD_E_ARGUMENT,
            format("tensor_split has %d numbers; at most %d", params.n_split, PLD_MAX_DEVICES));
    if (params.n_split > 0) {
        require(params.split_mode != PLD_SPLIT_NONE, PLD_E_ARGUMENT,
                "tensor_split has no effect with split_mode='none'; leave one of them out");
        check_proportions(params.tensor_split, params.n_split, devices_);
    }
    if (params.split_mode == PLD_SPLIT_ROW || params.split_mode == PLD_SPLIT_TENSOR) {
        require(n > 0, PLD_E_ARGUMENT, format("split_mode='%s' needs a GPU; use 'layer'", mode));
    }
    for (auto * dev : devices_) {
        require(params.split_mode != PLD_SPLIT_ROW || splits_rows(dev), PLD_E_ARGUMENT,
                format("%s does not split rows; use split_mode='layer' or 'tensor'", ggml_backend_dev_name(dev)));
    }
}

llama_model_params LoadParams::dry_run() const {
    auto out      = llama_;
    out.no_alloc  = true;
    out.load_mode = LLAMA_LOAD_MODE_NONE;
    return out;
}

}  // namespace pld
