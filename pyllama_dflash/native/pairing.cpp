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

[[noreturn]] void fail(const Header & h, const std::string & what) {
    throw Error(PLD_E_LOAD, h.path() + ": " + what);
}

[[noreturn]] void mismatch(const std::string & what) {
    throw Error(PLD_E_PAIR, what);
}

int32_t positive(const Header & h, const char * name) {
    const auto key   = h.key(name);
    const auto value = h.integer(key);
    if (!value || *value < 1 || *value > (1 << 20)) {
        fail(h, "key " + key + (value ? format(" = %lld is out of range", (long long) *value)
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
        fail(h, format("key %s = %s is out of range, 2 to %d", key.c_str(), h.meta(key).value_or("?").c_str(), MAX_BLOCK));
    }
    return static_cast<int32_t>(*value);
}

std::vector<int32_t> target_layers(const Header & h) {
    const auto key = h.key("target_layers");
    const auto ids = h.integers(key);
    if (ids.empty()) {
        fail(h, "key " + key + " is missing or no list of whole numbers; convert the draft again with a current converter");
    }
    constexpr size_t MAX = sizeof(pld_model_info::target_layers) / sizeof(int32_t);
    if (ids.size() > MAX) {
        fail(h, format("key %s lists %zu layers; at most %zu are supported", key.c_str(), ids.size(), MAX));
    }
    if (std::set<int64_t>(ids.begin(), ids.end()).size() != ids.size()) {
        fail(h, "key " + key + " lists a layer twice");
    }
    if (std::any_of(ids.begin(), ids.end(), [](int64_t id) { return id < 0 || id > 65535; })) {
        fail(h, "key " + key + " has a layer id out of range");
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
                fail(h, "tensor " + tensor + " must be F32, it is " + ggml_type_name(type));
            }
        }
    }
}

// Layer id n_layer stands for the last layer's output. llama.cpp shows that for these targets only.
bool shows_output(const std::string & arch) {
    return arch == "deepseek4" || arch == "mimo2" || arch == "nemotron_h" || arch == "nemotron_h_moe";
}

std::string other_draft(const Header & h) {
    const auto & arch = h.arch();
    if (arch == "dflash-draft") {
        return "was made by a converter from before DFlash was merged ('dflash-draft'); convert the draft again";
    }
    if (arch == "eagle3" || arch == "gemma4-assistant") {
        return "is a draft of kind '" + arch + "'; only DFlash and DFlash2 drafts are run here";
    }
    if (arch == "dflash" && (h.has_tensor("markov_w1.weight") || h.has(h.key("hyper_connection_count")))) {
        return "is a DSpark draft; only DFlash and DFlash2 drafts are run here";
    }
    return "";
}

// A reduced vocabulary names each of its tokens once.
void check_token_map(const Header & h) {
    std::vector<bool> seen(static_cast<size_t>(h.n_vocab()));
    for (const auto token : h.tensor_integers("d2t")) {
        if (token < 0 || token >= h.n_vocab()) {
            fail(h, format("its reduced vocabulary (d2t) names token %lld; there are %lld; convert the draft again", (long long) token,
                           (long long) h.n_vocab()));
        }
        if (seen[static_cast<size_t>(token)]) {
            fail(h, format("its reduced vocabulary (d2t) names token %lld twice; convert the draft again", (long long) token));
        }
        seen[static_cast<size_t>(token)] = true;
    }
}

}  // namespace

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
        fail(h, "has no tokenizer (tokenizer.ggml.tokens); a draft carries its target's");
    }
    if (f.mask_token < 0) {
        fail(h, "key tokenizer.ggml.mask_token_id is missing; the block is drafted from mask tokens");
    }
    if (h.has_tensor("d2t")) {
        f.n_vocab_draft = static_cast<int32_t>(h.tensor_ne("d2t", 0));
        if (!f.own_head || f.n_vocab_draft > h.n_vocab()) {
            fail(h, format("maps %d draft tokens (d2t) onto %lld, and %s an output head; convert the draft again", f.n_vocab_draft,
                           (long long) h.n_vocab(), f.own_head ? "has" : "lacks"));
        }
        check_token_map(h);
    }

    const bool v2_keys = h.has(h.key("selector_rank")) || h.has(h.key("selector_top_k"));
    if (!h.has_tensor("selector_hidden.weight")) {
        if (v2_keys) {
            fail(h, "has DFlash2 keys but no tensor selector_hidden.weight: incomplete DFlash2 draft");
        }
        f.kind = PLD_KIND_DFLASH;
        return f;
    }
    f.kind           = PLD_KIND_DFLASH2;
    f.selector_rank  = positive(h, "selector_rank");
    f.selector_top_k = positive(h, "selector_top_k");
    const auto n_embd = h.integer(h.key("embedding_length")).value_or(0);
    const auto group  = positive(h, "conv_group_size");
    const auto taps   = positive(h, "conv_kernel_size");
    if (n_embd % group != 0) {
        fail(h, format("%s = %d does not divide embedding_length %lld", h.key("conv_group_size").c_str(), group,
                       (long long) n_embd));
    }
    if (taps > f.block_size) {
        fail(h, format("%s = %d is wider than the block of %d; convert the draft again", h.key("conv_kernel_size").c_str(), taps, f.block_size));
    }
    if (int64_t{f.selector_top_k} * (f.selector_top_k + 1) > n_embd || f.selector_top_k > f.n_vocab_draft) {
        fail(h, format("%s = %d is too many for embedding_length %lld and %d tokens; convert the draft again", h.key("selector_top_k").c_str(),
                       f.selector_top_k, (long long) n_embd, f.n_vocab_draft));
    }
    check_conv(h);
    return f;
}

void check_target(const Header & target) {
    const auto facts = draft_facts(target);
    if (facts.kind == PLD_KIND_OTHER) {
        mismatch(target.name() + " " + facts.refusal);
    }
    if (facts.kind != PLD_KIND_TARGET) {
        mismatch(target.name() + " is a DFlash draft and cannot run alone: it reads a target's layers. Open the target and give "
                                 "this file as its draft: Speculator(target, draft)");
    }
    if (target.n_vocab() == 0) {
        mismatch(target.name() + " has no tokenizer (tokenizer.ggml.tokens)");
    }
}

void check_pair(const Header & target, const Header & draft) {
    check_target(target);
    const auto   facts = draft_facts(draft);
    const auto   d     = draft.name();
    const auto   t     = target.name();
    if (facts.kind == PLD_KIND_OTHER) {
        mismatch(d + " " + facts.refusal);
    }
    if (facts.kind == PLD_KIND_TARGET) {
        mismatch(d + " is a model of kind '" + draft.arch() + "', not a DFlash draft; give a draft made for " + t);
    }

    const auto h_t = target.integer(target.key("embedding_length")).value_or(0);
    const auto h_d = draft.integer(draft.key("embedding_length")).value_or(0);
    if (h_t != h_d) {
        mismatch(format("%s is %lld wide and %s is %lld: use a draft made for this target", d.c_str(), (long long) h_d, t.c_str(),
                        (long long) h_t));
    }
    const auto n_layer = target.integer(target.key("block_count")).value_or(0);
    const auto last = n_layer - (shows_output(target.arch()) ? 0 : 1);
    for (const auto id : facts.target_layers) {
        if (id > last) {
            mismatch(format("%s reads the input of layer %d but %s has %lld layers (dflash.target_layers): use a draft made for "
                            "this target", d.c_str(), id, t.c_str(), (long long) n_layer));
        }
    }
    if (draft.n_vocab() != target.n_vocab()) {
        mismatch(format("%s has %lld tokens and %s has %lld: they use different tokenizers", d.c_str(), (long long) draft.n_vocab(),
                        t.c_str(), (long long) target.n_vocab()));
    }
    for (int64_t i = 0; i < target.n_vocab(); ++i) {
        if (std::strcmp(draft.token(i), target.token(i)) != 0) {
            mismatch(format("token %lld is '%s' in %s and '%s' in %s: they use different tokenizers", (long long) i, draft.token(i),
                            d.c_str(), target.token(i), t.c_str()));
        }
    }
}

}  // namespace pld
