// A GGUF file opened: its checked header, and its weights unless only the header was asked for.
#pragma once

#include "api.h"
#include "draft_head.h"
#include "header.h"
#include "llama.h"
#include "load_params.h"
#include "pairing.h"

#include <memory>
#include <string>
#include <vector>

namespace pld {

class Model {
public:
    // dry_run: no weight is read, only what they would take is known.
    Model(const std::string & path, const pld_model_params & params, bool dry_run = false);

    const Header &     header() const { return header_; }
    const DraftFacts & facts() const { return facts_; }
    DraftHeads &       heads() const { return heads_; }
    pld_model_info     info() const;
    bool               dry_run() const { return dry_run_; }
    bool               repack() const { return load_.llama().use_extra_bufts; }

    // The weights; throws Error(PLD_E_ARGUMENT) if only the header was opened.
    llama_model *       llama() const;
    const llama_vocab * vocab() const { return llama_model_get_vocab(llama()); }
    int32_t             n_vocab() const { return llama_vocab_n_tokens(vocab()); }

    std::vector<int32_t> tokenize(const std::string & text, bool add_special, bool parse_special) const;
    std::string          piece(int32_t token, bool special) const;
    bool                 is_eog(int32_t token) const;
    // Throws Error(PLD_E_ARGUMENT) for an id that is no token of this model.
    void check_token(int32_t token) const;

private:
    std::vector<int32_t> tokens_of(const std::string & text, bool add_special, bool parse_special) const;

    struct Free {
        void operator()(llama_model * m) const { llama_model_free(m); }
    };

    Header                             header_;
    DraftFacts                         facts_;
    LoadParams                         load_;
    bool                               dry_run_;
    mutable DraftHeads                 heads_;  // of targets, if this is a draft
    std::unique_ptr<llama_model, Free> llama_;
};

}  // namespace pld
