// The header of a GGUF file: metadata and tensor descriptions, read without weights and checked before llama.cpp sees it.
#pragma once

#include "api.h"
#include "gguf.h"

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace pld {

class Header {
public:
    // Throws Error(PLD_E_LOAD) for what is missing, damaged or out of range.
    explicit Header(const std::string & path);

    const std::string & path() const { return path_; }
    std::string         name() const;  // the file's name alone, for messages

    const std::string & arch() const { return arch_; }
    int64_t             n_bytes() const { return n_bytes_; }
    int64_t             n_params() const { return n_params_; }

    bool has_tensor(const char * name) const { return gguf_find_tensor(gguf_.get(), name) >= 0; }
    // ne[dim] of a tensor, 0 if the file does not have it.
    int64_t tensor_ne(const char * name, int dim) const;
    ggml_type   tensor_type(const char * name) const;  // GGML_TYPE_COUNT if the file does not have it
    // The values of an I64 tensor, read from the file. Throws Error(PLD_E_LOAD) if it has another type or can't be read.
    std::vector<int64_t> tensor_integers(const char * name) const;
    // The bytes of some rows of a matrix, read from the file; each is less than ne[1]. Throws Error(PLD_E_LOAD).
    std::vector<char> tensor_rows(const char * name, const std::vector<int32_t> & rows) const;
    std::vector<pld_tensor_info> tensors() const;

    bool has(const std::string & key) const { return gguf_find_key(gguf_.get(), key.c_str()) >= 0; }
    std::optional<int64_t>     integer(const std::string & key) const;  // a whole number or a bool
    std::optional<double>      number(const std::string & key) const;
    std::optional<std::string> text(const std::string & key) const;
    std::vector<int64_t>       integers(const std::string & key) const;  // an array, or one number as an array of one

    // Keys of this architecture: get("block_count") reads "<arch>.block_count".
    std::string key(const char * name) const { return arch_ + "." + name; }

    int64_t n_vocab() const { return n_vocab_; }
    // The text of token i as the file stores it; i < n_vocab().
    const char * token(int64_t i) const { return gguf_get_arr_str(gguf_.get(), tokens_, static_cast<size_t>(i)); }

    const gguf_context * gguf() const { return gguf_.get(); }

    int64_t     n_meta() const { return gguf_get_n_kv(gguf_.get()); }
    std::string meta_key(int64_t index) const { return gguf_get_key(gguf_.get(), index); }
    // A value as text: whole strings, arrays cut after a few items.
    std::optional<std::string> meta(const std::string & key) const;

private:
    struct Free {
        void operator()(gguf_context * ctx) const { gguf_free(ctx); }
    };

    [[noreturn]] void fail(const std::string & what) const;
    [[noreturn]] void damaged(const std::string & what) const;  // and the fix is added
    // n bytes of a tensor, from a place in it on.
    void              read(std::ifstream & file, const char * tensor, size_t at, char * out, size_t n) const;
    void              check_extents(int64_t file_size);
    void              check_hparams() const;
    void              check_vocab();
    void              check_range(const char * name, double lo, double hi, bool required) const;

    std::string                         path_;
    std::unique_ptr<gguf_context, Free> gguf_;
    std::string                         arch_;
    int64_t                             tokens_   = -1;  // key id of the token list
    int64_t                             n_vocab_  = 0;
    int64_t                             n_bytes_  = 0;
    int64_t                             n_params_ = 0;
};

}  // namespace pld
