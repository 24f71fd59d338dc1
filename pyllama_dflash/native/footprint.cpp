#include "footprint.h"

#include "devices.h"
#include "ggml-alloc.h"

#include <algorithm>
#include <cstdio>
#include <string>

namespace pld {

namespace {

bool is_mapped(ggml_backend_buffer_type_t buft) {
    return std::string(ggml_backend_buft_name(buft)) == "CPU_Mapped";
}

}  // namespace

void Footprint::add(ggml_backend_buffer_type_t buft, Kind kind, size_t bytes) {
    auto *     dev = memory_of(buft);
    const auto it  = std::find_if(rows_.begin(), rows_.end(), [&](const auto & row) { return row.first == dev; });
    auto &     row = it == rows_.end() ? rows_.emplace_back(dev, pld_device_memory{}).second : it->second;
    row.*kind += static_cast<int64_t>(bytes);
    if (is_mapped(buft)) {
        row.mapped += static_cast<int64_t>(bytes);
    }
}

void Footprint::add(const llama_memory_breakdown & breakdown, bool draft) {
    for (const auto & [buft, data] : breakdown) {
        add(buft, draft ? &pld_device_memory::draft_weights : &pld_device_memory::target_weights, data.model);
        // What a context holds is not in the mapping of a file, and buffers of that kind hold nothing else.
        add(buft, draft ? &pld_device_memory::draft_kv : &pld_device_memory::target_kv, data.context);
        add(buft, draft ? &pld_device_memory::draft_compute : &pld_device_memory::target_compute, data.compute);
    }
}

void Footprint::add(const std::map<ggml_backend_buffer_type_t, size_t> & weights, Kind kind) {
    for (const auto & [buft, bytes] : weights) {
        add(buft, kind, bytes);
    }
}

std::vector<pld_device_memory> Footprint::rows() const {
    const auto is_cpu = [](ggml_backend_dev_t dev) { return ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU; };
    auto       sorted = rows_;
    std::sort(sorted.begin(), sorted.end(), [&](const auto & a, const auto & b) {
        return std::pair(is_cpu(a.first), device_index(a.first)) < std::pair(is_cpu(b.first), device_index(b.first));
    });
    std::vector<pld_device_memory> out;
    for (auto & [dev, row] : sorted) {
        size_t free = 0, total = 0;
        ggml_backend_dev_memory(dev, &free, &total);
        std::snprintf(row.device, sizeof(row.device), "%s", ggml_backend_dev_name(dev));
        row.is_host      = is_cpu(dev);
        row.memory_free  = static_cast<int64_t>(free);
        row.memory_total = static_cast<int64_t>(total);
        out.push_back(row);
    }
    return out;
}

Allocation allocate(ggml_context * ctx, ggml_backend_buffer_type_t buft, bool dry_run) {
    Allocation out;
    if (!dry_run) {
        out.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft));
        out.n_bytes = out.buffer ? ggml_backend_buffer_get_size(out.buffer.get()) : 0;
        return out;
    }
    out.n_bytes = ggml_backend_alloc_ctx_tensors_from_buft_size(ctx, buft);
    out.buffer.reset(ggml_backend_buft_alloc_buffer(buft, 0));
    for (auto * t = ggml_get_first_tensor(ctx); t != nullptr; t = ggml_get_next_tensor(ctx, t)) {
        t->buffer = out.buffer.get();  // marks it as placed, as llama.cpp does in its dry runs
    }
    return out;
}

}  // namespace pld
