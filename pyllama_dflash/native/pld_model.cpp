// The C boundary: models.
#include "boundary.h"

using pld::format;
using pld::guard;
using pld::require;
using pld::require_pointers;
using pld::write_text;

int32_t pld_model_open(const char * path, const pld_model_params * params, pld_model ** out) {
    return guard([&] {
        require_pointers(path, params, out);
        *out = new pld_model{std::make_shared<pld::Model>(path, *params)};
        return PLD_OK;
    });
}

void pld_model_free(pld_model * model) {
    delete model;
    pld::give_back_memory();
}

int32_t pld_model_get_info(const pld_model * model, pld_model_info * out) {
    return guard([&] {
        require_pointers(model, out);
        *out = model->model->info();
        return PLD_OK;
    });
}

int32_t pld_model_n_meta(const pld_model * model) {
    return guard([&] {
        require_pointers(model);
        return static_cast<int32_t>(model->model->header().n_meta());
    });
}

int32_t pld_model_meta_key(const pld_model * model, int32_t index, char * buf, int32_t cap) {
    return guard([&] {
        require_pointers(model);
        require(index >= 0 && index < pld_model_n_meta(model), PLD_E_ARGUMENT, format("there is no metadata key %d", index));
        return write_text(model->model->header().meta_key(index), buf, cap);
    });
}

int32_t pld_model_meta(const pld_model * model, const char * key, char * buf, int32_t cap) {
    return guard([&] {
        require_pointers(model, key);
        const auto text = model->model->header().meta(key);
        require(text.has_value(), PLD_E_ARGUMENT, format("%s has no key '%s'", model->model->header().name().c_str(), key));
        return write_text(*text, buf, cap);
    });
}

int32_t pld_model_token(const pld_model * model, int32_t token, char * buf, int32_t cap) {
    return guard([&] {
        require_pointers(model);
        const auto & header = model->model->header();
        require(token >= 0 && token < header.n_vocab(), PLD_E_ARGUMENT,
                format("token %d is outside the vocabulary of %lld tokens", token, (long long) header.n_vocab()));
        return write_text(header.token(token), buf, cap);
    });
}

int32_t pld_model_tensors(const pld_model * model, pld_tensor_info * out, int32_t cap) {
    return guard([&] {
        require_pointers(model);
        return pld::write_rows(model->model->header().tensors(), out, cap);
    });
}

int32_t pld_model_check_pair(const pld_model * target, const pld_model * draft) {
    return guard([&] {
        require_pointers(target, draft);
        pld::check_pair(target->model->header(), draft->model->header());
        return PLD_OK;
    });
}

int32_t pld_model_mismatch(const pld_model * target, const pld_model * draft, int32_t aspect, char * buf, int32_t cap) {
    return guard([&] {
        require_pointers(target, draft);
        require(aspect >= PLD_ASPECT_KIND && aspect <= PLD_ASPECT_MASK, PLD_E_ARGUMENT,
                format("aspect %d is none of enum pld_aspect", aspect));
        return write_text(
            pld::mismatch(target->model->header(), draft->model->header(), static_cast<pld_aspect>(aspect)), buf, cap);
    });
}

int32_t pld_model_tokenize(const pld_model * model, const char * text, int32_t n_bytes, int32_t add_special,
                           int32_t parse_special, int32_t * tokens, int32_t cap) {
    return guard([&] {
        require_pointers(model, text);
        require(n_bytes >= 0, PLD_E_ARGUMENT, "the text's length is negative");
        const auto ids = model->model->tokenize({text, static_cast<size_t>(n_bytes)}, add_special, parse_special);
        if (tokens && static_cast<int64_t>(ids.size()) <= cap) {
            std::copy(ids.begin(), ids.end(), tokens);
        }
        return static_cast<int32_t>(ids.size());
    });
}

int32_t pld_model_piece(const pld_model * model, int32_t token, int32_t special, char * buf, int32_t cap) {
    return guard([&] {
        require_pointers(model);
        return write_text(model->model->piece(token, special), buf, cap);
    });
}

int32_t pld_model_is_eog(const pld_model * model, int32_t token) {
    return guard([&] {
        require_pointers(model);
        return static_cast<int32_t>(model->model->is_eog(token));
    });
}
