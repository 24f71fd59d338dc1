#include "pairing.h"

#include "error.h"
#include "ggml.h"

#include <algorithm>
#include <cstring>
#include <set>

namespace pld {

namespace {

constexpr int32_t DEFAULT_BLOCK = 16;  // of a DFlash draft that does not say; llama.cpp's own default
constexpr int32_t MAX_BLOCK     = 256;

[[noreturn]] void damaged(const Header & h, const std::string & what) {
    throw Error(PLD_E_LOAD, h.path() + ": " + what + "; convert the draft again");
}

// A token as part of a sentence: on one line, and not all of a long one.
std::string quoted(const std::string & token) {
    constexpr size_t MOST = 32;
    size_t           end  = std::min(token.size(), MOST);
    while (end > 0 && end < token.size() && (token[end] & 0xC0) == 0x80) {
        --end;  // not inside a character
    }
    auto text = token.substr(0, end);
    std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c < ' ' || c == 127; }, '?');
    return "'" + text + (end < token.size() ? "...'" : "'");
}

int32_t positive(const Header & h, const char * name) {
    const auto key   = h.key(name);
    const auto value = h.integer(key);
    if (!value || *value < 1 || *value > (1 << 20)) {
        damaged(h, "key " + key + (value ? format(" = %lld is out of range", (long long) *value)
                                      : " is missing; a DFlash2 draft needs it"));
    }
    return static_cast<int32_t>(*value);
}

int32_t block_size(const Header & h) {
    const auto key = h.key("block_size");
    if (!h.has(key)) {
        return DEFAULT_BLOCK;
    }
    const auto value = h.integer(key);
    if (!value || *value < 2 || *value > MAX_BLOCK) {
        damaged(h, format("key %s = %s is out of range, 2 to %d", key.c_str(), h.meta(key).value_or("?").c_str(), MAX_BLOCK));
    }
    return static_cast<int32_t>(*value);
}

std::vector<int32_t> target_layers(const Header & h) {
    const auto key = h.key("target_layers");
    const auto ids = h.integers(key);
    if (ids.empty()) {
        damaged(h, "key " + key + " is missing or no list of whole numbers");
    }
    constexpr size_t MAX = sizeof(pld_model_info::target_layers) / sizeof(int32_t);
    if (ids.size() > MAX) {
        damaged(h, format("key %s lists %zu layers; at most %zu are supported", key.c_str(), ids.size(), MAX));
    }
    if (std::set<int64_t>(ids.begin(), ids.end()).size() != ids.size()) {
        damaged(h, "key " + key + " lists a layer twice");
    }
    if (std::any_of(ids.begin(), ids.end(), [](int64_t id) { return id < 0 || id > 65535; })) {
        damaged(h, "key " + key + " has a layer id out of range");
    }
    return {ids.begin(), ids.end()};
}

// The convolutions are added to F32 activations, and the CPU's add aborts on anything else.
void check_conv(const Header & h) {
    const auto n_layer = h.integer(h.key("block_count")).value_or(0);
    for (int64_t i = 0; i < n_layer; ++i) {
        for (const char * name : {"attn_conv_base", "ffn_conv_base"}) {
            const auto tensor = format("blk.%lld.%s", (long long) i, name);
            const auto type   = h.tensor_type(tensor.c_str());
            if (type != GGML_TYPE_COUNT && type != GGML_TYPE_F32) {
                damaged(h, "tensor " + tensor + " must be F32, it is " + ggml_type_name(type));
            }
        }
    }
}

// Layer id n_layer stands for the last layer's output. llama.cpp shows that for these targets only.
bool shows_output(const std::string & arch) {
    return arch == "deepseek4" || arch == "mimo2" || arch == "nemotron_h" || arch == "nemotron_h_moe";
}

std::string other_draft(const Header & h) {
    const std::string only = "; only DFlash and DFlash2 drafts are run here: use one of those made for the same target";
    const auto &      arch = h.arch();
    if (arch == "dflash-draft") {
        return "was made by a converter from before DFlash was merged ('dflash-draft'); convert the draft again";
    }
    if (arch == "eagle3" || arch == "gemma4-assistant") {
        return "is a draft of kind '" + arch + "'" + only;
    }
    if (arch == "dflash" && (h.has_tensor("markov_w1.weight") || h.has(h.key("hyper_connection_count")))) {
        return "is a DSpark draft" + only;
    }
    return "";
}

// A reduced vocabulary names each of its tokens once.
void check_tokens(const Header & h, const std::vector<int64_t> & tokens, const char * where) {
    std::vector<bool> seen(static_cast<size_t>(h.n_vocab()));
    for (const auto token : tokens) {
        if (token < 0 || token >= h.n_vocab()) {
            damaged(h, format("its reduced vocabulary (%s) names token %lld; there are %lld", where, (long long) token,
                           (long long) h.n_vocab()));
        }
        if (seen[static_cast<size_t>(token)]) {
            damaged(h, format("its reduced vocabulary (%s) names token %lld twice", where, (long long) token));
        }
        seen[static_cast<size_t>(token)] = true;
    }
}

std::vector<int32_t> draft_vocab(const Header & h, bool own_head) {
    const auto key = h.key("draft_vocab");
    if (!h.has(key)) {
        return {};
    }
    if (own_head) {
        damaged(h, "key " + key + " lists rows of the target's head, and it has an output head of its own");
    }
    const auto tokens = h.integers(key);
    if (tokens.empty()) {
        damaged(h, "key " + key + " is no list of token ids");
    }
    check_tokens(h, tokens, key.c_str());
    return {tokens.begin(), tokens.end()};
}

// Of a list in the metadata: a draft whose candidates were fewer would be another model.
void check_enough(const Header & h, const DraftFacts & f) {
    const auto n = candidates_of(f, static_cast<int32_t>(h.n_vocab()));
    if (!f.draft_vocab.empty() && f.n_vocab_draft < n) {
        damaged(h, format("its reduced vocabulary (%s) names %d tokens, fewer than its %d candidates", h.key("draft_vocab").c_str(),
                       f.n_vocab_draft, n));
    }
}

}  // namespace

int32_t candidates_of(const DraftFacts & facts, int32_t n_vocab) {
    // DFlash has no selector: its candidates are the best few logits, as many as llama.cpp's own DFlash loop looks at.
    constexpr int32_t DFLASH_CANDIDATES = 10;
    return facts.kind == PLD_KIND_DFLASH2 ? facts.selector_top_k : std::min(DFLASH_CANDIDATES, n_vocab);
}

DraftFacts draft_facts(const Header & h) {
    DraftFacts f;
    f.own_embd      = h.has_tensor("token_embd.weight");
    f.own_head      = h.has_tensor("output.weight");
    f.n_vocab_draft = static_cast<int32_t>(h.n_vocab());
    f.refusal       = other_draft(h);
    if (!f.refusal.empty()) {
        f.kind = PLD_KIND_OTHER;
        return f;
    }
    if (h.arch() != "dflash") {
        return f;
    }

    f.block_size    = block_size(h);
    f.target_layers = target_layers(h);
    f.mask_token    = static_cast<int32_t>(h.integer("tokenizer.ggml.mask_token_id").value_or(-1));
    f.causal        = h.integer(h.key("attention.causal")).value_or(0) != 0;
    if (h.n_vocab() == 0) {
        damaged(h, "has no tokenizer (tokenizer.ggml.tokens); a draft carries its target's");
    }
    if (f.mask_token < 0) {
        damaged(h, "key tokenizer.ggml.mask_token_id is missing; the block is drafted from mask tokens");
    }
    if (h.has_tensor("d2t")) {
        f.n_vocab_draft = static_cast<int32_t>(h.tensor_ne("d2t", 0));
        if (!f.own_head || f.n_vocab_draft > h.n_vocab()) {
            damaged(h, format("maps %d draft tokens (d2t) onto %lld, and %s an output head", f.n_vocab_draft,
                           (long long) h.n_vocab(), f.own_head ? "has" : "lacks"));
        }
        check_tokens(h, h.tensor_integers("d2t"), "d2t");
    }
    f.draft_vocab = draft_vocab(h, f.own_head);
    if (!f.draft_vocab.empty()) {
        f.n_vocab_draft = static_cast<int32_t>(f.draft_vocab.size());
    }

    const bool v2_keys = h.has(h.key("selector_rank")) || h.has(h.key("selector_top_k"));
    if (!h.has_tensor("selector_hidden.weight")) {
        if (v2_keys) {
            damaged(h, "has DFlash2 keys but no tensor selector_hidden.weight: incomplete DFlash2 draft");
        }
        f.kind = PLD_KIND_DFLASH;
        check_enough(h, f);
        return f;
    }
    f.kind           = PLD_KIND_DFLASH2;
    f.selector_rank  = positive(h, "selector_rank");
    f.selector_top_k = positive(h, "selector_top_k");
    check_enough(h, f);
    const auto n_embd = h.integer(h.key("embedding_length")).value_or(0);
    const auto group  = positive(h, "conv_group_size");
    const auto taps   = positive(h, "conv_kernel_size");
    if (n_embd % group != 0) {
        damaged(h, format("%s = %d does not divide embedding_length %lld", h.key("conv_group_size").c_str(), group,
                       (long long) n_embd));
    }
    if (taps > f.block_size) {
        damaged(h, format("%s = %d is wider than the block of %d", h.key("conv_kernel_size").c_str(), taps, f.block_size));
    }
    if (int64_t{f.selector_top_k} * (f.selector_top_k + 1) > n_embd || f.selector_top_k > f.n_vocab_draft) {
        damaged(h, format("%s = %d is too many for embedding_length %lld and %d tokens", h.key("selector_top_k").c_str(),
                       f.selector_top_k, (long long) n_embd, f.n_vocab_draft));
    }
    check_conv(h);
    return f;
}

namespace {

// Why a file cannot be a target; empty if it can.
std::string target_refusal(const Header & target) {
    const auto facts = draft_facts(target);
    if (facts.kind == PLD_KIND_OTHER) {
        return target.name() + " " + facts.refusal;
    }
    if (facts.kind != PLD_KIND_TARGET) {
        return target.name() + " is a DFlash draft and cannot run alone, for it reads a target's layers; open the target and "
                               "give this file as its draft: Speculator(target, draft)";
    }
    if (target.n_vocab() == 0) {
        return target.name() + " has no tokenizer (tokenizer.ggml.tokens); convert the target again with its tokenizer";
    }
    return "";
}

struct Names {
    std::string target, draft;
};

// Their paths where the files' names alone do not tell them apart.
Names names(const Header & target, const Header & draft) {
    const bool same = target.name() == draft.name();
    return {same ? target.path() : target.name(), same ? draft.path() : draft.name()};
}

std::string of_kind(const Header & target, const Header & draft) {
    const auto t = draft_facts(target), d = draft_facts(draft);
    const auto n = names(target, draft);
    if (t.kind != PLD_KIND_TARGET && t.kind != PLD_KIND_OTHER && d.kind == PLD_KIND_TARGET) {
        return format("target and draft are swapped: %s is a DFlash draft and %s is a model; give %s as the target and %s as the draft",
                      n.target.c_str(), n.draft.c_str(), n.draft.c_str(), n.target.c_str());
    }
    auto refusal = target_refusal(target);
    if (!refusal.empty()) {
        return refusal;
    }
    if (d.kind == PLD_KIND_OTHER) {
        return n.draft + " " + d.refusal;
    }
    if (d.kind == PLD_KIND_TARGET) {
        return n.draft + " is a model of kind '" + draft.arch() + "', not a DFlash draft; give a draft made for " + n.target;
    }
    return "";
}

std::string of_width(const Header & target, const Header & draft) {
    const auto t = target.integer(target.key("embedding_length")).value_or(0);
    const auto d = draft.integer(draft.key("embedding_length")).value_or(0);
    const auto n = names(target, draft);
    return t == d ? "" : format("%s is %lld wide and %s is %lld: use a draft made for this target", n.draft.c_str(), (long long) d,
                                n.target.c_str(), (long long) t);
}

std::string of_layers(const Header & target, const Header & draft) {
    const auto n_layer = target.integer(target.key("block_count")).value_or(0);
    const auto n       = names(target, draft);
    const auto last    = n_layer - (shows_output(target.arch()) ? 0 : 1);
    for (const auto id : draft_facts(draft).target_layers) {
        if (id > last) {
            return format("%s reads the input of layer %d but %s has %lld layers (dflash.target_layers): use a draft made for "
                          "this target", n.draft.c_str(), id, n.target.c_str(), (long long) n_layer);
        }
    }
    return "";
}

std::string of_tokenizer(const Header & target, const Header & draft) {
    const auto [t, d] = names(target, draft);
    const std::string fix = "they use different tokenizers; use a draft made for " + t;
    if (draft.n_vocab() != target.n_vocab()) {
        return format("%s has %lld tokens and %s has %lld: ", d.c_str(), (long long) draft.n_vocab(), t.c_str(),
                      (long long) target.n_vocab()) + fix;
    }
    int64_t first = -1, others = -1;
    for (int64_t i = 0; i < target.n_vocab(); ++i) {
        if (std::strcmp(draft.token(i), target.token(i)) != 0) {
            first = first < 0 ? i : first;
            ++others;
        }
    }
    if (first < 0) {
        return "";
    }
    return format("token %lld is %s in %s and %s in %s", (long long) first, quoted(draft.token(first)).c_str(), d.c_str(),
                  quoted(target.token(first)).c_str(), t.c_str()) +
           (others > 0 ? format(", and %lld more differ: ", (long long) others) : ": ") + fix;
}

std::string of_mask(const Header & target, const Header & draft) {
    const auto facts = draft_facts(draft);
    const auto [t, d] = names(target, draft);
    if (facts.mask_token >= target.n_vocab()) {
        return format("%s drafts from mask token %d and %s has %lld tokens; use a draft made for this target", d.c_str(),
                      facts.mask_token, t.c_str(), (long long) target.n_vocab());
    }
    const auto declared = target.integer("tokenizer.ggml.mask_token_id").value_or(-1);
    // With embeddings of its own a draft has its own row for the mask, whatever the target calls so.
    if (declared < 0 || facts.mask_token < 0 || facts.own_embd || declared == facts.mask_token) {
        return "";
    }
    return format("%s drafts from mask token %d %s and the mask token of %s is %lld %s; use a draft made for this target, or convert "
                  "it again with that mask token", d.c_str(), facts.mask_token, quoted(draft.token(facts.mask_token)).c_str(),
                  t.c_str(), (long long) declared, quoted(target.token(declared)).c_str());
}

}  // namespace

void check_target(const Header & target) {
    const auto refusal = target_refusal(target);
    require(refusal.empty(), PLD_E_PAIR, refusal);
}

std::string mismatch(const Header & target, const Header & draft, pld_aspect aspect) {
    switch (aspect) {
        case PLD_ASPECT_KIND:      return of_kind(target, draft);
        case PLD_ASPECT_WIDTH:     return of_width(target, draft);
        case PLD_ASPECT_LAYERS:    return of_layers(target, draft);
        case PLD_ASPECT_TOKENIZER: return of_tokenizer(target, draft);
        case PLD_ASPECT_MASK:      return of_mask(target, draft);
    }
    return "";
}

void check_pair(const Header & target, const Header & draft) {
    for (const auto aspect : {PLD_ASPECT_KIND, PLD_ASPECT_WIDTH, PLD_ASPECT_LAYERS, PLD_ASPECT_TOKENIZER, PLD_ASPECT_MASK}) {
        const auto sentence = mismatch(target, draft, aspect);
        require(sentence.empty(), PLD_E_PAIR, sentence);
    }
}

}  // namespace pld
