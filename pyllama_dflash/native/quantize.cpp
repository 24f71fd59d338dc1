#include "quantize.h"

#include "error.h"
#include "ggml.h"
#include "llama.h"
#include "log.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <future>
#include <memory>

namespace pld {

namespace {

constexpr float F16_MAX = 65504.0f;

struct Free {
    void operator()(gguf_context * ctx) const { gguf_free(ctx); }
    void operator()(ggml_context * ctx) const { ggml_free(ctx); }
};

const ggml_type_traits * traits(int32_t type) {
    const auto * t = type >= 0 && type < GGML_TYPE_COUNT ? ggml_get_type_traits(static_cast<ggml_type>(type)) : nullptr;
    require(t && t->type_name && t->blck_size > 0, PLD_E_ARGUMENT, format("there is no tensor type %d", type));
    return t;
}

bool is_readable(int32_t type) {
    return type == GGML_TYPE_F32 || traits(type)->to_float != nullptr;
}

// Those of ggml_quantize_chunk() that need no importance matrix and that models are stored in.
bool is_writable(int32_t type) {
    switch (type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q2_K:
        case GGML_TYPE_Q3_K:
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q5_K:
        case GGML_TYPE_Q6_K:
        case GGML_TYPE_IQ4_NL: return true;
        default:               return false;
    }
}

int64_t rows_at_once(int64_t n_per_row) {
    constexpr int64_t WEIGHTS = 1 << 14;
    return std::max<int64_t>(1, WEIGHTS / n_per_row);
}

struct Rows {
    ggml_type    from, to;
    int64_t      n_per_row;
    const char * src;
    char *       dst;

    size_t src_size() const { return ggml_row_size(from, n_per_row); }
    size_t dst_size() const { return ggml_row_size(to, n_per_row); }

    // Some rows at a time, so that their floats stay in the cache; `values` has room for rows_at_once(n_per_row).
    void convert(int64_t first, int64_t last, std::vector<float> & values) const {
        const auto step = rows_at_once(n_per_row);
        for (int64_t row = first; row < last; row += step) {
            const auto   n   = std::min(step, last - row);
            const auto * in  = src + static_cast<size_t>(row) * src_size();
            auto *       out = dst + static_cast<size_t>(row) * dst_size();
            values.resize(static_cast<size_t>(n * n_per_row));
            if (from == GGML_TYPE_F32) {
                std::memcpy(values.data(), in, values.size() * sizeof(float));
            } else {
                ggml_get_type_traits(from)->to_float(in, values.data(), n * n_per_row);
            }
            if (to != GGML_TYPE_F32) {
                check(values);
            }
            ggml_quantize_chunk(to, values.data(), out, 0, n, n_per_row, nullptr);
        }
    }

    void check(const std::vector<float> & values) const {
        const auto bad = std::find_if(values.begin(), values.end(), [](float v) { return !(std::abs(v) <= F16_MAX); });
        if (bad != values.end()) {
            throw Error(PLD_E_LOAD, format("has the weight %g, which %s cannot hold", *bad, ggml_type_name(to)));
        }
    }
};

}  // namespace

pld_tensor_type tensor_type(int32_t type) {
    const auto *    t   = traits(type);
    pld_tensor_type out = {};
    std::snprintf(out.name, sizeof(out.name), "%s", t->type_name);
    out.block   = static_cast<int32_t>(t->blck_size);
    out.n_bytes = static_cast<int32_t>(t->type_size);
    return out;
}

std::string header_with_types(const Header & header, const std::vector<int32_t> & types, int32_t file_type, int32_t * alignment) {
    const auto all = header.tensors();
    const log::Opening opening;
    const std::unique_ptr<gguf_context, Free> out(gguf_init_empty());
    gguf_set_kv(out.get(), header.gguf());
    gguf_set_val_u32(out.get(), "general.quantization_version", GGML_QNT_VERSION);
    gguf_set_val_u32(out.get(), "general.file_type", static_cast<uint32_t>(file_type));
    // A new file is laid out by the default whatever this key says, and read by the key.
    if (header.has("general.alignment")) {
        gguf_set_val_u32(out.get(), "general.alignment", GGUF_DEFAULT_ALIGNMENT);
    }
    *alignment = static_cast<int32_t>(gguf_get_alignment(out.get()));

    const std::unique_ptr<ggml_context, Free> ctx(ggml_init({all.size() * ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    require(ctx != nullptr, PLD_E_MEMORY, "out of memory");
    for (size_t i = 0; i < all.size(); ++i) {
        const auto * t = traits(types[i]);
        require(all[i].ne[0] % t->blck_size == 0, PLD_E_ARGUMENT,
                format("tensor %s has rows of %lld, no multiple of %lld: not for %s", all[i].name, (long long) all[i].ne[0],
                       (long long) t->blck_size, t->type_name));
        auto * tensor = ggml_new_tensor(ctx.get(), static_cast<ggml_type>(types[i]), GGML_MAX_DIMS, all[i].ne);
        ggml_set_name(tensor, all[i].name);
        gguf_add_tensor(out.get(), tensor);
    }
    std::string bytes(gguf_get_meta_size(out.get()), '\0');
    gguf_get_meta_data(out.get(), bytes.data());
    return bytes;
}

void convert_rows(int32_t from, int32_t to, int64_t n_per_row, int64_t n_rows, int32_t n_threads, const void * src, int64_t n_src,
                  void * dst, int64_t n_dst) {
    require(is_readable(from) && is_writable(to) && traits(to), PLD_E_ARGUMENT,
            format("%s cannot be made of %s", traits(to)->type_name, traits(from)->type_name));
    constexpr int64_t MAX_ROW = int64_t{1} << 40;  // bytes of a row do not overflow
    const auto        fits    = [&](int32_t type) { return n_per_row % traits(type)->blck_size == 0; };
    require(n_per_row > 0 && n_per_row <= MAX_ROW && fits(from) && fits(to), PLD_E_ARGUMENT,
            format("rows of %lld do not fit %s and %s", (long long) n_per_row, traits(from)->type_name, traits(to)->type_name));
    require(n_threads >= 1, PLD_E_ARGUMENT, format("n_threads=%d is below 1", n_threads));
    const Rows rows = {static_cast<ggml_type>(from), static_cast<ggml_type>(to), n_per_row, static_cast<const char *>(src),
                       static_cast<char *>(dst)};
    const auto holds = [&](int64_t n_bytes, size_t row) {  // divides, for a product could overflow
        return n_bytes / static_cast<int64_t>(row) == n_rows && n_bytes % static_cast<int64_t>(row) == 0;
    };
    require(n_rows >= 0 && holds(n_src, rows.src_size()) && holds(n_dst, rows.dst_size()), PLD_E_ARGUMENT,
            format("%lld and %lld bytes are not %lld rows", (long long) n_src, (long long) n_dst, (long long) n_rows));

    const auto n = std::max<int64_t>(1, std::min<int64_t>(n_threads, n_rows));
    const std::vector<float> room(static_cast<size_t>(rows_at_once(n_per_row) * n_per_row));
    std::vector<std::vector<float>> values(static_cast<size_t>(n), room);
    const auto work = [&](int64_t i) { rows.convert(n_rows * i / n, n_rows * (i + 1) / n, values[static_cast<size_t>(i)]); };
    std::vector<std::future<void>> others;  // each waits for its thread when it goes, on whatever way out of here
    for (int64_t i = 1; i < n; ++i) {
        others.push_back(std::async(std::launch::async, work, i));
    }
    work(0);
    for (auto & other : others) {
        other.get();
    }
}

}  // namespace pld
