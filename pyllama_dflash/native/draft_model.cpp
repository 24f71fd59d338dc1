#include "draft_model.h"

#include "devices.h"
#include "error.h"
#include "llama-graph.h"
#include "llama-model.h"
#include "log.h"

#include <cmath>
#include <string>

namespace pld {

namespace {

void unless(bool ok, const char * reason) {
    if (!ok) {
        throw Unsupported(reason);
    }
}

// The device that computes with a tensor. Memory of the host is the CPU's, pinned or mapped or repacked.
ggml_backend_dev_t device_of(const ggml_tensor * t) {
    unless(t->buffer != nullptr, "a weight is not loaded");
    auto * buft = ggml_backend_buffer_get_type(t->buffer);
    auto * dev  = ggml_backend_buft_get_device(buft);
    if (dev == nullptr || ggml_backend_buft_is_host(buft)) {
        unless(ggml_backend_buft_is_host(buft), "its weights are split over several devices");
        return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    }
    return dev;
}

void check_hparams(const llama_hparams & h) {
    unless(h.dsv4_hc_mult == 0, "it has hyper-connections");
    unless(h.rope_type == LLAMA_ROPE_TYPE_NEOX, "its RoPE has sections or another order");
    unless(h.rope_scaling_type_train == LLAMA_ROPE_SCALING_TYPE_NONE || h.rope_scaling_type_train == LLAMA_ROPE_SCALING_TYPE_LINEAR,
           "its RoPE is scaled in a way that is not linear");
    unless(h.yarn_ext_factor <= 0.0f, "its RoPE is scaled by YaRN");
    unless(!h.attn_soft_cap && h.f_max_alibi_bias == 0.0f, "its attention has a cap or a bias");
    unless(h.llm_ffn_op == LLM_FFN_SILU || h.llm_ffn_op == LLM_FFN_GELU, "its activation is neither SiLU nor GELU");
    unless(h.swa_type == LLAMA_SWA_TYPE_NONE || h.swa_type == LLAMA_SWA_TYPE_STANDARD, "its sliding window is of another kind");
    unless(h.n_embd_head_k() == h.n_embd_head_v(), "its keys and values differ in width");
    for (uint32_t il = 1; il < h.n_layer(); ++il) {
        unless(h.n_head(il) == h.n_head() && h.n_head_kv(il) == h.n_head_kv(), "its layers differ in their heads");
    }
    for (uint32_t il = 0; il < h.n_layer(); ++il) {
        unless(h.swiglu_clamp_shexp[il] == 0.0f, "its activation is clamped");
    }
}

void check_layer(const llama_layer & l) {
    unless(l.wv != nullptr, "its layers share keys and values");
    unless(l.attn_sinks == nullptr, "its attention has sinks");
    unless(l.attn_post_norm == nullptr && l.ffn_post_norm == nullptr, "its layers have post norms");
    unless(l.out_scale == nullptr, "its layers scale their output");
    for (const auto * scale : {l.wq_s, l.wk_s, l.wv_s, l.wo_s, l.ffn_up_s, l.ffn_gate_s, l.ffn_down_s}) {
        unless(scale == nullptr, "its weights have scales of their own");
    }
}

}  // namespace

bool scales_features(const llama_model & draft) {
    return draft.fc != nullptr && draft.fc->type == GGML_TYPE_F16;
}

DraftModel::DraftModel(const Model & draft, const Model & target, bool reduce)
    : dry_run_(draft.dry_run()),
      model_(*draft.llama()),
      facts_(draft.facts()),
      embd_(model_.tok_embd ? model_.tok_embd : target.llama()->tok_embd),
      head_(model_.output ? model_.output : target.llama()->output) {
    unless(facts_.kind == PLD_KIND_DFLASH || facts_.kind == PLD_KIND_DFLASH2, "it is of another kind");
    check_hparams(model_.hparams);
    unless(embd_ != nullptr && head_ != nullptr, "the target shares no embeddings or no head");
    unless(model_.fc_s == nullptr && (model_.output ? model_.output_s : target.llama()->output_s) == nullptr,
           "its weights have scales of their own");
    unless(embd_->type == GGML_TYPE_F32 || ggml_get_type_traits(embd_->type)->to_float != nullptr,
           "its embeddings are of a type that is not read here");

    std::vector<const ggml_tensor *> used = {model_.fc, model_.output_norm_enc, model_.output_norm};
    if (model_.output) {  // else the target's, which may lie elsewhere
        used.push_back(model_.output);
    }
    if (dflash2()) {
        used.insert(used.end(), {model_.dflash_selector_prev, model_.dflash_selector_next, model_.dflash_selector_hidden});
    }
    for (const auto & l : model_.layers) {
        check_layer(l);
        used.insert(used.end(), {l.attn_norm, l.wq, l.wk, l.wv, l.wo, l.attn_q_norm, l.attn_k_norm, l.ffn_norm, l.ffn_gate, l.ffn_up,
                                 l.ffn_down});
        if (dflash2()) {
            used.insert(used.end(), {l.dflash_attn_conv_base, l.dflash_attn_conv_proj, l.dflash_ffn_conv_base,
                                     l.dflash_ffn_conv_proj});
        }
    }
    if (model_.layers[0].rope_freqs) {
        used.push_back(model_.layers[0].rope_freqs);
    }
    for (const auto * t : used) {
        unless(t != nullptr, "a weight is missing");
        auto * dev = device_of(t);
        unless(device_ == nullptr || dev == device_, "its weights lie on more than one device");
        device_ = dev;
    }
    place_head(draft, target, reduce);
}

// Where the draft computes: as it lies, only the rows that are drafted from, or a copy.
void DraftModel::place_head(const Model & draft, const Model & target, bool reduce) {
    if (reduce && !facts_.draft_vocab.empty()) {
        copy_ = draft.heads().get(target.llama(), /*rows=*/true, [&] {
            return rows_of_head(head_, facts_.draft_vocab, target.header(), device_, draft.repack(), dry_run_);
        });
        if (copy_) {
            head_  = copy_->tensor;
            vocab_ = facts_.draft_vocab;
            return;
        }
        log::write(log::INFO, draft.header().name() + ": its draft vocabulary is not used, because " + target.header().name() +
                                  " does not hold the target's head itself");
    }
    if (auto * dev = device_of(head_); dev != device_) {
        // Its own buffer knows how to give its rows back, unless they were laid out anew for a CPU.
        unless(ggml_backend_buffer_is_host(head_->buffer) || is_gpu(dev), "the head it shares is laid out for the CPU");
        copy_ = draft.heads().get(target.llama(), /*rows=*/false, [&] { return copy_head(head_, device_, dry_run_); });
        head_ = copy_->tensor;
    }
}

const llama_hparams & DraftModel::hparams() const {
    return model_.hparams;
}

int32_t DraftModel::n_layer() const {
    return static_cast<int32_t>(model_.layers.size());
}

int64_t DraftModel::n_embd() const {
    return model_.hparams.n_embd;
}

bool DraftModel::any_window() const {
    for (int32_t il = 0; il < n_layer(); ++il) {
        if (model_.hparams.is_swa(static_cast<uint32_t>(il))) {
            return true;
        }
    }
    return false;
}

void DraftModel::embed(int32_t token, float * out) const {
    const auto           n    = embd_->ne[0];
    const auto           size = ggml_row_size(embd_->type, n);
    const auto           at   = static_cast<size_t>(token) * embd_->nb[1];
    std::vector<uint8_t> copy;
    const void *         row = static_cast<const char *>(embd_->data) + at;
    if (!ggml_backend_buffer_is_host(embd_->buffer)) {
        copy.resize(size);
        ggml_backend_tensor_get(embd_, copy.data(), at, size);
        row = copy.data();
    }
    if (embd_->type == GGML_TYPE_F32) {
        std::copy_n(static_cast<const float *>(row), n, out);
    } else {
        ggml_get_type_traits(embd_->type)->to_float(row, out, n);
    }
    const auto scale = model_.hparams.f_embedding_scale;
    for (int64_t i = 0; scale != 0.0f && i < n; ++i) {
        out[i] *= scale;
    }
}

int64_t DraftModel::n_token_map() const {
    return model_.d2t ? model_.d2t->ne[0] : static_cast<int64_t>(vocab_.size());
}

std::vector<int32_t> DraftModel::token_map() const {
    if (model_.d2t == nullptr) {
        return vocab_;
    }
    std::vector<int64_t> ids(static_cast<size_t>(model_.d2t->ne[0]));
    ggml_backend_tensor_get(model_.d2t, ids.data(), 0, ids.size() * sizeof(int64_t));
    return {ids.begin(), ids.end()};
}

}  // namespace pld
