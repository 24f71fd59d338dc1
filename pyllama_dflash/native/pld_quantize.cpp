// The C boundary: quantising.
#include "boundary.h"
#include "quantize.h"

using pld::guard;
using pld::require;
using pld::require_pointers;

int32_t pld_get_tensor_type(int32_t type, pld_tensor_type * out) {
    return guard([&] {
        require_pointers(out);
        *out = pld::tensor_type(type);
        return PLD_OK;
    });
}

int32_t pld_quantize_header(const pld_model * model, const int32_t * types, int32_t n, int32_t file_type, int32_t * alignment,
                            char * buf, int32_t cap) {
    return guard([&] {
        require_pointers(model, types, alignment);
        const auto & header = model->model->header();
        require(n == gguf_get_n_tensors(header.gguf()), PLD_E_ARGUMENT,
                pld::format("%d types for the %lld tensors of %s", n, (long long) gguf_get_n_tensors(header.gguf()),
                            header.name().c_str()));
        const auto bytes = pld::header_with_types(header, {types, types + n}, file_type, alignment);
        require(bytes.size() <= INT32_MAX, PLD_E_LOAD, "the metadata is too large to be copied");
        return pld::write_text(bytes, buf, cap);
    });
}

int32_t pld_quantize_rows(int32_t from, int32_t to, int64_t n_per_row, int64_t n_rows, int32_t n_threads, const void * src,
                          int64_t n_src, void * dst, int64_t n_dst) {
    return guard([&] {
        require_pointers(src, dst);
        pld::convert_rows(from, to, n_per_row, n_rows, n_threads, src, n_src, dst, n_dst);
        return PLD_OK;
    });
}
