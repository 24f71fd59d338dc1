#include "draft_head.h"

#include "error.h"

#include <algorithm>

namespace pld {

namespace {

// Rows that the layouts for CPUs take together are this many or divide it.
constexpr int64_t GROUP = 32;

ggml_context_ptr context_of(size_t n_tensors) {
    return ggml_context_ptr(ggml_init({n_tensors * ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
}

DraftHead placed(ggml_context_ptr ctx, ggml_tensor * tensor, ggml_backend_buffer_type_t buft, bool dry_run) {
    DraftHead out;
    out.memory = allocate(ctx.get(), buft, dry_run);
    require(out.memory.buffer != nullptr, PLD_E_MEMORY, "no memory for the draft's copy of the target's head");
    ggml_backend_buffer_set_usage(out.memory.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    out.ctx    = std::move(ctx);
    out.tensor = tensor;
    return out;
}

// Whether the device multiplies such a weight in buffers of a type; llama.cpp asks the same way where it puts weights.
bool multiplies(ggml_backend_dev_t device, const ggml_tensor * weight, ggml_backend_buffer_type_t buft) {
    const auto ctx = context_of(3);
    auto *     w   = ggml_dup_tensor(ctx.get(), weight);
    auto *     op  = ggml_mul_mat(ctx.get(), w, ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, w->ne[0], GROUP));
    const ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(buft, 0));
    w->buffer = buffer.get();
    return buffer != nullptr && ggml_backend_dev_supports_op(device, op);
}

// A layout of the device's own, in its order of preference; null if there is none for such a weight.
ggml_backend_buffer_type_t layout_for(ggml_backend_dev_t device, const ggml_tensor * weight) {
    auto * get = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts"));
    for (auto * buft = get ? get(device) : nullptr; buft && *buft; ++buft) {
        if (multiplies(device, weight, *buft)) {
            return *buft;
        }
    }
    return nullptr;
}

}  // namespace

DraftHead copy_head(const ggml_tensor * head, ggml_backend_dev_t device, bool dry_run) {
    auto   ctx = context_of(1);
    auto * t   = ggml_dup_tensor(ctx.get(), head);
    auto   out = placed(std::move(ctx), t, ggml_backend_dev_buffer_type(device), dry_run);
    if (!dry_run) {
        ggml_backend_tensor_copy(head, out.tensor);
    }
    return out;
}

DraftHead rows_of_head(const ggml_tensor * head, const std::vector<int32_t> & tokens, const Header & target,
                       ggml_backend_dev_t device, bool repack, bool dry_run) {
    const char * name = ggml_get_name(head);
    if (target.tensor_type(name) != head->type || target.tensor_ne(name, 0) != head->ne[0] ||
        target.tensor_ne(name, 1) != head->ne[1]) {
        return {};
    }
    const auto n   = static_cast<int64_t>(tokens.size());
    auto       ctx = context_of(2);
    auto *     t   = ggml_new_tensor_2d(ctx.get(), head->type, head->ne[0], GGML_PAD(n, GROUP));
    auto *     buft = repack ? layout_for(device, t) : nullptr;
    if (buft == nullptr) {
        ctx  = context_of(1);
        t    = ggml_new_tensor_2d(ctx.get(), head->type, head->ne[0], n);
        buft = ggml_backend_dev_buffer_type(device);
    }
    auto out = placed(std::move(ctx), t, buft, dry_run);
    if (!dry_run) {
        auto rows = target.tensor_rows(name, tokens);
        rows.resize(ggml_nbytes(t));
        ggml_backend_tensor_set(t, rows.data(), 0, rows.size());
    }
    return out;
}

std::shared_ptr<const DraftHead> DraftHeads::get(const llama_model * target, bool rows, const std::function<DraftHead()> & make) {
    const std::lock_guard<std::mutex> lock(mutex_);
    kept_.erase(std::remove_if(kept_.begin(), kept_.end(), [](const Kept & k) { return k.head.expired(); }), kept_.end());
    for (const auto & k : kept_) {
        if (k.target == target && k.rows == rows) {
            if (auto head = k.head.lock()) {
                return head;
            }
        }
    }
    auto head = std::make_shared<const DraftHead>(make());
    if (head->tensor == nullptr) {
        return nullptr;
    }
    kept_.push_back({target, rows, head});
    return head;
}

}  // namespace pld
