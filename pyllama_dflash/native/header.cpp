#include "header.h"

#include "error.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "log.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace pld {

namespace {

constexpr int64_t MAX_LAYERS = 512;  // llama.cpp's own limit

double element(gguf_type type, const void * data, size_t i) {
    switch (type) {
        case GGUF_TYPE_UINT8:   return static_cast<const uint8_t *>(data)[i];
        case GGUF_TYPE_INT8:    return static_cast<const int8_t *>(data)[i];
        case GGUF_TYPE_BOOL:    return static_cast<const int8_t *>(data)[i] != 0;
        case GGUF_TYPE_UINT16:  return static_cast<const uint16_t *>(data)[i];
        case GGUF_TYPE_INT16:   return static_cast<const int16_t *>(data)[i];
        case GGUF_TYPE_UINT32:  return static_cast<const uint32_t *>(data)[i];
        case GGUF_TYPE_INT32:   return static_cast<const int32_t *>(data)[i];
        case GGUF_TYPE_UINT64:  return static_cast<double>(static_cast<const uint64_t *>(data)[i]);
        case GGUF_TYPE_INT64:   return static_cast<double>(static_cast<const int64_t *>(data)[i]);
        case GGUF_TYPE_FLOAT32: return static_cast<const float *>(data)[i];
        case GGUF_TYPE_FLOAT64: return static_cast<const double *>(data)[i];
        default:                return NAN;
    }
}

bool is_float(gguf_type type) {
    return type == GGUF_TYPE_FLOAT32 || type == GGUF_TYPE_FLOAT64;
}

bool is_whole(double v) {
    return std::abs(v) <= 9007199254740992.0 && v == std::floor(v);  // 2^53: exact as a double
}

// Weights that a matrix product reads; hash tables of token ids have the same ending.
bool is_matrix(const std::string & tensor) {
    const std::string end = ".weight";
    return tensor.size() > end.size() && tensor.compare(tensor.size() - end.size(), end.size(), end) == 0 &&
           tensor.find("tid2eid") == std::string::npos;
}

std::string element_text(gguf_type type, const void * data, size_t i) {
    if (type == GGUF_TYPE_BOOL) {
        return element(type, data, i) != 0 ? "true" : "false";
    }
    return is_float(type) ? format("%.9g", element(type, data, i)) : format("%.0f", element(type, data, i));
}

}  // namespace

Header::Header(const std::string & path) : path_(path) {
    namespace fs = std::filesystem;
    std::error_code ec;
    const auto      status = fs::status(path_, ec);
    constexpr auto  FIX    = "; give the path of a .gguf file";
    if (status.type() == fs::file_type::none) {  // a link to itself, a name too long, a folder that is closed to us
        fail("cannot be read (" + ec.message() + ")" + FIX);
    }
    if (!fs::exists(status)) {
        fail(std::string("no such file") + FIX);
    }
    if (!fs::is_regular_file(status)) {
        fail(std::string(fs::is_directory(status) ? "is a directory" : "is no regular file") + FIX);
    }
    const auto size = static_cast<int64_t>(fs::file_size(path_, ec));
    if (ec) {
        fail("cannot be read (" + ec.message() + ")" + FIX);
    }

    const log::Opening opening;
    gguf_.reset(gguf_init_from_file(path_.c_str(), {/*no_alloc=*/true, /*ctx=*/nullptr}));
    if (!gguf_) {
        damaged("not a readable GGUF file" + opening.reason());
    }
    arch_ = text("general.architecture").value_or("");
    if (arch_.empty()) {
        damaged("key general.architecture is missing: not a model");
    }
    check_extents(size);
    check_hparams();
    check_vocab();
}

std::string Header::name() const {
    return std::filesystem::path(path_).filename().string();
}

void Header::fail(const std::string & what) const {
    throw Error(PLD_E_LOAD, path_ + ": " + what);
}

void Header::damaged(const std::string & what) const {
    fail(what + "; download or convert the file again");
}

void Header::check_extents(int64_t file_size) {
    const auto data = static_cast<int64_t>(gguf_get_data_offset(gguf_.get()));
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf_.get()); ++i) {
        const auto offset = static_cast<int64_t>(gguf_get_tensor_offset(gguf_.get(), i));
        const auto size   = static_cast<int64_t>(gguf_get_tensor_size(gguf_.get(), i));
        if (size < 0 || offset < 0 || offset > file_size - data || size > file_size - data - offset) {
            damaged(format("tensor %s ends at byte %lld but the file has %lld: truncated or damaged",
                           gguf_get_tensor_name(gguf_.get(), i), (long long) (data + offset + size), (long long) file_size));
        }
        const auto * ne = gguf_get_tensor_ne(gguf_.get(), i);
        const auto type = gguf_get_tensor_type(gguf_.get(), i);
        const std::string name = gguf_get_tensor_name(gguf_.get(), i);
        if (ne[1] > 1 && is_matrix(name) && !ggml_get_type_traits_cpu(type)->vec_dot) {
            damaged(format("tensor %s has type %s, which no matrix product takes", name.c_str(), ggml_type_name(type)));
        }
        n_bytes_ += size;
        n_params_ += ne[0] * ne[1] * ne[2] * ne[3];
    }
}

void Header::check_range(const char * name, double lo, double hi, bool required) const {
    const auto k = key(name);
    if (!has(k)) {
        if (required) {
            damaged("key " + k + " is missing: not a language model, or incomplete");
        }
        return;
    }
    const auto id    = gguf_find_key(gguf_.get(), k.c_str());
    const auto array = gguf_get_kv_type(gguf_.get(), id) == GGUF_TYPE_ARRAY;
    const auto type  = array ? gguf_get_arr_type(gguf_.get(), id) : gguf_get_kv_type(gguf_.get(), id);
    const auto n     = array ? gguf_get_arr_n(gguf_.get(), id) : 1;
    if (type == GGUF_TYPE_STRING || type == GGUF_TYPE_ARRAY) {
        damaged("key " + k + " is not a number");
    }
    const auto * data = array ? gguf_get_arr_data(gguf_.get(), id) : gguf_get_val_data(gguf_.get(), id);
    for (size_t i = 0; i < n; ++i) {
        const auto v = element(type, data, i);
        if (!(v >= lo && v <= hi)) {
            damaged(format("%s = %g is out of range, %g to %g", k.c_str(), v, lo, hi));
        }
    }
}

// The ranges that upstream checks by assertion only, some of them first inside a compute thread.
void Header::check_hparams() const {
    constexpr double INT = 2147483647.0;
    if (integer("split.no").value_or(0) > 0) {
        return;  // a later part of a split file has no metadata of its own
    }
    check_range("block_count", 1, MAX_LAYERS, true);
    check_range("context_length", 1, INT, true);
    check_range("embedding_length", 1, 1 << 20, true);
    check_range("feed_forward_length", 0, 1 << 24, false);
    check_range("attention.head_count", 0, 65536, false);
    check_range("attention.head_count_kv", 0, 65536, false);
    check_range("attention.key_length", 1, 65536, false);
    check_range("attention.value_length", 1, 65536, false);
    check_range("attention.layer_norm_rms_epsilon", 0, 1, false);
    check_range("attention.layer_norm_epsilon", 0, 1, false);
    check_range("attention.sliding_window", 0, INT, false);
    check_range("rope.dimension_count", arch_ == "glm5-next" ? 0 : 2, 65536, false);  // that one rotates nothing
    check_range("rope.freq_base", 1e-6, 1e18, false);
    check_range("rope.scaling.factor", 0, 1e9, false);
    check_range("expert_count", 0, 65536, false);
    check_range("expert_used_count", 0, 65536, false);

    const auto n_embd  = integer(key("embedding_length")).value_or(0);
    const auto n_head  = integer(key("attention.head_count")).value_or(0);
    const auto n_kv    = integer(key("attention.head_count_kv")).value_or(n_head);
    const auto d_key   = integer(key("attention.key_length")).value_or(n_head > 0 ? n_embd / n_head : 0);
    const auto d_value = integer(key("attention.value_length")).value_or(n_head > 0 ? n_embd / n_head : 0);
    const auto n_rot   = integer(key("rope.dimension_count")).value_or(d_key);
    if (const auto n = integer(key("wkv.head_size")).value_or(64); n <= 0 || n % 64 != 0) {
        damaged(format("wkv.head_size %lld is no multiple of 64, in which its kernels write", (long long) n));
    }
    if (n_head > 0 && n_kv > 0 && n_head % n_kv != 0) {
        damaged(format("%lld attention heads cannot share %lld key/value heads", (long long) n_head, (long long) n_kv));
    }
    if (n_head > 0 && !has(key("attention.key_length")) && n_embd % n_head != 0) {
        damaged(format("embedding_length %lld is no multiple of head_count %lld", (long long) n_embd, (long long) n_head));
    }
    if (n_head > 0 && (n_rot > d_key || n_rot % 2 != 0)) {
        damaged(format("rope.dimension_count %lld must be even and at most the head's %lld", (long long) n_rot,
                       (long long) d_key));
    }
    if (n_embd > 0 && (d_key > n_embd * 64 || d_value > n_embd * 64)) {
        damaged("attention key or value length is out of proportion to embedding_length");
    }
}

void Header::check_vocab() {
    tokens_ = gguf_find_key(gguf_.get(), "tokenizer.ggml.tokens");
    if (tokens_ < 0) {
        return;
    }
    if (gguf_get_kv_type(gguf_.get(), tokens_) != GGUF_TYPE_ARRAY ||
        gguf_get_arr_type(gguf_.get(), tokens_) != GGUF_TYPE_STRING) {
        damaged("tokenizer.ggml.tokens is not a list of strings");
    }
    n_vocab_ = static_cast<int64_t>(gguf_get_arr_n(gguf_.get(), tokens_));
    if (n_vocab_ < 1 || n_vocab_ > (1 << 24)) {
        damaged(format("tokenizer.ggml.tokens has %lld entries, 1 to %d are possible", (long long) n_vocab_, 1 << 24));
    }
    for (const char * list : {"tokenizer.ggml.scores", "tokenizer.ggml.token_type"}) {
        const auto id = gguf_find_key(gguf_.get(), list);
        if (id >= 0 && (gguf_get_kv_type(gguf_.get(), id) != GGUF_TYPE_ARRAY ||
                        static_cast<int64_t>(gguf_get_arr_n(gguf_.get(), id)) != n_vocab_)) {
            damaged(format("%s does not have one entry for each of %lld tokens", list, (long long) n_vocab_));
        }
    }
    for (const char * special : {"bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", "cls"}) {
        const auto k  = format("tokenizer.ggml.%s_token_id", special);
        const auto id = integer(k);
        if (id && (*id < 0 || *id >= n_vocab_)) {
            damaged(format("%s = %lld is no token: the vocabulary has %lld", k.c_str(), (long long) *id, (long long) n_vocab_));
        }
    }
}

int64_t Header::tensor_ne(const char * name, int dim) const {
    const auto id = gguf_find_tensor(gguf_.get(), name);
    return id < 0 ? 0 : gguf_get_tensor_ne(gguf_.get(), id)[dim];
}

ggml_type Header::tensor_type(const char * name) const {
    const auto id = gguf_find_tensor(gguf_.get(), name);
    return id < 0 ? GGML_TYPE_COUNT : gguf_get_tensor_type(gguf_.get(), id);
}

std::vector<int64_t> Header::tensor_integers(const char * name) const {
    const auto id = gguf_find_tensor(gguf_.get(), name);
    if (id < 0 || gguf_get_tensor_type(gguf_.get(), id) != GGML_TYPE_I64) {
        fail(format("tensor %s is not of type I64; convert the file again", name));
    }
    std::vector<int64_t> out(gguf_get_tensor_size(gguf_.get(), id) / sizeof(int64_t));
    std::ifstream        file(path_, std::ios::binary);
    read(file, name, 0, reinterpret_cast<char *>(out.data()), out.size() * sizeof(int64_t));
    return out;
}

std::vector<char> Header::tensor_rows(const char * name, const std::vector<int32_t> & rows) const {
    const auto        size = ggml_row_size(tensor_type(name), tensor_ne(name, 0));
    std::vector<char> out(rows.size() * size);
    std::ifstream     file(path_, std::ios::binary);
    for (size_t i = 0; i < rows.size(); ++i) {
        read(file, name, static_cast<size_t>(rows[i]) * size, &out[i * size], size);
    }
    return out;
}

void Header::read(std::ifstream & file, const char * tensor, size_t at, char * out, size_t n) const {
    const auto begin = gguf_get_data_offset(gguf_.get()) + gguf_get_tensor_offset(gguf_.get(), gguf_find_tensor(gguf_.get(), tensor));
    file.seekg(static_cast<std::streamoff>(begin + at));
    file.read(out, static_cast<std::streamsize>(n));
    if (!file) {
        fail(format("tensor %s could not be read", tensor));
    }
}

std::vector<pld_tensor_info> Header::tensors() const {
    std::vector<pld_tensor_info> out(static_cast<size_t>(gguf_get_n_tensors(gguf_.get())));
    for (size_t i = 0; i < out.size(); ++i) {
        const auto   id = static_cast<int64_t>(i);
        const auto * ne = gguf_get_tensor_ne(gguf_.get(), id);
        std::snprintf(out[i].name, sizeof(out[i].name), "%s", gguf_get_tensor_name(gguf_.get(), id));
        std::snprintf(out[i].type, sizeof(out[i].type), "%s", ggml_type_name(gguf_get_tensor_type(gguf_.get(), id)));
        std::copy_n(ne, 4, out[i].ne);
        out[i].offset   = static_cast<int64_t>(gguf_get_data_offset(gguf_.get()) + gguf_get_tensor_offset(gguf_.get(), id));
        out[i].n_params = ne[0] * ne[1] * ne[2] * ne[3];
        out[i].n_bytes  = static_cast<int64_t>(gguf_get_tensor_size(gguf_.get(), id));
    }
    return out;
}

std::optional<double> Header::number(const std::string & key) const {
    const auto id = gguf_find_key(gguf_.get(), key.c_str());
    if (id < 0) {
        return std::nullopt;
    }
    const auto type = gguf_get_kv_type(gguf_.get(), id);
    if (type == GGUF_TYPE_STRING || type == GGUF_TYPE_ARRAY) {
        return std::nullopt;
    }
    return element(type, gguf_get_val_data(gguf_.get(), id), 0);
}

std::optional<int64_t> Header::integer(const std::string & key) const {
    const auto v = number(key);
    if (!v || !is_whole(*v)) {
        return std::nullopt;
    }
    return static_cast<int64_t>(*v);
}

std::optional<std::string> Header::text(const std::string & key) const {
    const auto id = gguf_find_key(gguf_.get(), key.c_str());
    if (id < 0 || gguf_get_kv_type(gguf_.get(), id) != GGUF_TYPE_STRING) {
        return std::nullopt;
    }
    return std::string(gguf_get_val_str(gguf_.get(), id));
}

std::vector<int64_t> Header::integers(const std::string & key) const {
    const auto id = gguf_find_key(gguf_.get(), key.c_str());
    if (id < 0) {
        return {};
    }
    if (gguf_get_kv_type(gguf_.get(), id) != GGUF_TYPE_ARRAY) {
        const auto v = integer(key);
        return v ? std::vector<int64_t>{*v} : std::vector<int64_t>{};
    }
    const auto type = gguf_get_arr_type(gguf_.get(), id);
    if (type == GGUF_TYPE_STRING || type == GGUF_TYPE_ARRAY || is_float(type)) {
        return {};
    }
    std::vector<int64_t> out(gguf_get_arr_n(gguf_.get(), id));
    for (size_t i = 0; i < out.size(); ++i) {
        out[i] = static_cast<int64_t>(element(type, gguf_get_arr_data(gguf_.get(), id), i));
    }
    return out;
}

std::optional<std::string> Header::meta(const std::string & key) const {
    constexpr size_t MAX_ITEMS = 16;
    const auto       id        = gguf_find_key(gguf_.get(), key.c_str());
    if (id < 0) {
        return std::nullopt;
    }
    const auto type = gguf_get_kv_type(gguf_.get(), id);
    if (type == GGUF_TYPE_STRING) {
        return text(key);
    }
    if (type != GGUF_TYPE_ARRAY) {
        return element_text(type, gguf_get_val_data(gguf_.get(), id), 0);
    }
    const auto  n    = gguf_get_arr_n(gguf_.get(), id);
    const auto  item = gguf_get_arr_type(gguf_.get(), id);
    std::string out  = "[";
    for (size_t i = 0; i < std::min(n, MAX_ITEMS); ++i) {
        out += i ? ", " : "";
        out += item == GGUF_TYPE_STRING ? gguf_get_arr_str(gguf_.get(), id, i)
                                        : element_text(item, gguf_get_arr_data(gguf_.get(), id), i);
    }
    return out + (n > MAX_ITEMS ? format(", ... (%zu items)]", n) : "]");
}

}  // namespace pld
