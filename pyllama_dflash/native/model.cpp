#include "model.h"

#include "devices.h"
#include "error.h"
#include "llama-model.h"
#include "log.h"
#include "stack.h"

#include <algorithm>

namespace pld {

Model::Model(const std::string & path, const pld_model_params & params, bool dry_run)
    : header_(path), facts_(draft_facts(header_)), load_(params), dry_run_(dry_run) {
    if (params.header_only && !dry_run) {
        return;
    }
    require(facts_.kind != PLD_KIND_OTHER, PLD_E_LOAD, path + ": " + facts_.refusal);

    const log::Opening opening;
    llama_.reset(llama_model_load_from_file(path.c_str(), dry_run ? load_.dry_run() : load_.llama()));
    require(llama_ != nullptr || !opening.out_of_memory(), PLD_E_MEMORY, path + ": llama.cpp could not load it" + opening.reason());
    require(llama_ != nullptr, PLD_E_LOAD,
            path + ": llama.cpp could not load it" + opening.reason() +
                "; convert the file again, or upgrade this package if the model is newer");
    require(!llama_model_has_encoder(llama_.get()) || facts_.kind != PLD_KIND_TARGET, PLD_E_LOAD,
            path + ": encoder-decoder models are not supported; give a model that only decodes");
    if (facts_.kind == PLD_KIND_TARGET && llama_->output == nullptr) {
        llama_->output = llama_->tok_embd;  // some models multiply by their embeddings; a draft asks for the head
    }
}

llama_model * Model::llama() const {
    require(llama_ != nullptr, PLD_E_ARGUMENT, header_.name() + " was opened for its header only; open it whole");
    return llama_.get();
}

pld_model_info Model::info() const {
    const auto get = [&](const char * name) { return static_cast<int32_t>(header_.integer(header_.key(name)).value_or(0)); };
    const auto special = [&](const char * key) { return static_cast<int32_t>(header_.integer(key).value_or(-1)); };

    pld_model_info out  = {};
    out.kind            = facts_.kind;
    out.n_vocab         = static_cast<int32_t>(header_.n_vocab());
    out.n_ctx_train     = get("context_length");
    out.n_embd          = get("embedding_length");
    out.n_layer         = get("block_count");
    out.block_size      = facts_.block_size;
    out.n_target_layers = static_cast<int32_t>(facts_.target_layers.size());
    std::copy(facts_.target_layers.begin(), facts_.target_layers.end(), out.target_layers);
    out.selector_rank  = facts_.selector_rank;
    out.selector_top_k = facts_.selector_top_k;
    out.mask_token     = facts_.mask_token;
    out.own_embd       = facts_.own_embd;
    out.own_head       = facts_.own_head;
    out.n_vocab_draft  = facts_.n_vocab_draft;
    out.n_swa          = get("attention.sliding_window");
    out.causal         = facts_.causal;
    out.bos            = special("tokenizer.ggml.bos_token_id");
    out.eos            = special("tokenizer.ggml.eos_token_id");
    out.add_bos        = header_.integer("tokenizer.ggml.add_bos_token").value_or(0) != 0;
    out.device         = llama_ ? device_index(llama_->dev_output()) : -1;
    out.n_params       = header_.n_params();
    out.n_bytes        = header_.n_bytes();
    if (llama_) {  // llama.cpp knows the defaults of each tokenizer
        out.bos     = llama_vocab_bos(vocab());
        out.eos     = llama_vocab_eos(vocab());
        out.add_bos = llama_vocab_get_add_bos(vocab());
    }
    return out;
}

void Model::check_token(int32_t token) const {
    require(token >= 0 && token < n_vocab(), PLD_E_ARGUMENT,
            format("token %d is outside the vocabulary of %d tokens", token, n_vocab()));
}

std::vector<int32_t> Model::tokenize(const std::string & text, bool add_special, bool parse_special) const {
    std::vector<int32_t> tokens;
    // Some tokenizers split text by a regular expression whose matcher recurses once a character.
    constexpr size_t MAX_TEXT = 1 << 22, STACK_PER_BYTE = 1024;
    require(text.size() <= MAX_TEXT, PLD_E_ARGUMENT,
            format("the text has %zu bytes; at most %zu are tokenized at once", text.size(), MAX_TEXT));
    with_stack(text.size() * STACK_PER_BYTE, [&] { tokens = tokens_of(text, add_special, parse_special); });
    return tokens;
}

std::vector<int32_t> Model::tokens_of(const std::string & text, bool add_special, bool parse_special) const {
    const auto size = static_cast<int32_t>(text.size());
    // Most tokens are longer than a byte; a few special ones are added.
    std::vector<int32_t> tokens(text.size() + 8);
    auto n = llama_tokenize(vocab(), text.data(), size, tokens.data(), static_cast<int32_t>(tokens.size()), add_special,
                            parse_special);
    require(n != INT32_MIN, PLD_E_ARGUMENT, "the text is too long to be tokenized");
    if (n < 0) {
        tokens.resize(static_cast<size_t>(-n));
        n = llama_tokenize(vocab(), text.data(), size, tokens.data(), -n, add_special, parse_special);
    }
    tokens.resize(static_cast<size_t>(std::max(n, 0)));
    return tokens;
}

std::string Model::piece(int32_t token, bool special) const {
    check_token(token);
    std::string out(64, '\0');
    auto n = llama_token_to_piece(vocab(), token, out.data(), static_cast<int32_t>(out.size()), 0, special);
    if (n < 0) {
        out.resize(static_cast<size_t>(-n));
        n = llama_token_to_piece(vocab(), token, out.data(), -n, 0, special);
    }
    out.resize(static_cast<size_t>(std::max(n, 0)));
    return out;
}

bool Model::is_eog(int32_t token) const {
    check_token(token);
    return llama_vocab_is_eog(vocab(), token);
}

}  // namespace pld
