#include "draft_graph.h"

#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <cmath>

namespace pld {

namespace {

// Symbols in the shapes: H width of the model, d of a head, h query heads, g key heads, B rows of a block, S blocks, W rows of the
// target, V head.
class Builder {
public:
    Builder(const DraftModel & model, const DraftCache & cache, const DraftInputs & inputs, const DraftRows & rows, int32_t k,
            bool flash_attn)
        : model_(model), w_(model.weights()), h_(model.hparams()), cache_(cache), rows_(rows), max_rows_(inputs.max_rows()), k_(k),
          flash_attn_(flash_attn) {
        const auto size = static_cast<size_t>(64 * model.n_layer() + 128);
        out_.ctx.reset(ggml_init({2 * size * ggml_tensor_overhead() + ggml_graph_overhead_custom(size, false), nullptr, true}));
        ctx_       = out_.ctx.get();
        out_.graph = ggml_new_graph_custom(ctx_, size, false);
        in_        = inputs.leaves(ctx_, rows);
    }

    DraftGraph build(const std::vector<const ggml_tensor *> & features) {
        auto * c = rows_.n_rows > 0 ? fuse(features) : nullptr;  // [H, W], the same for all layers
        auto * x = rows_.n_seqs > 1 ? ggml_get_rows(ctx_, in_.embd, in_.slot) : in_.block;  // [H, B*S]
        for (int32_t il = 0; il < model_.n_layer(); ++il) {
            if (x) {
                x = layer(il, x, c);
            } else {
                write(il, c);
            }
        }
        if (x) {
            out_.out = candidates(norm(x, w_.output_norm));
            ggml_set_output(out_.out);
            expand(out_.out);
        }
        return std::move(out_);
    }

private:
    void expand(ggml_tensor * t) { ggml_build_forward_expand(out_.graph, t); }

    ggml_tensor * norm(ggml_tensor * x, ggml_tensor * weight) {
        return ggml_mul(ctx_, ggml_rms_norm(ctx_, x, h_.f_norm_rms_eps), weight);
    }

    // All rows but the first of each block: [H, (B-1)*S].
    ggml_tensor * tail(ggml_tensor * x) {
        if (rows_.n_seqs == 1) {
            return ggml_view_2d(ctx_, x, x->ne[0], x->ne[1] - 1, x->nb[1], x->nb[1]);
        }
        auto * t = ggml_view_3d(ctx_, x, x->ne[0], rows_.n_block - 1, rows_.n_seqs, x->nb[1], rows_.n_block * x->nb[1], x->nb[1]);
        return ggml_cont_2d(ctx_, t, x->ne[0], (rows_.n_block - 1) * rows_.n_seqs);
    }

    // The target's features of all layers side by side, through the fusing layer.
    ggml_tensor * fuse(const std::vector<const ggml_tensor *> & features) {
        ggml_tensor * all = nullptr;
        for (const auto * f : features) {
            // By index from as many rows as a batch may have, so that one graph serves batches of all sizes.
            auto * leaf  = ggml_new_tensor_2d(ctx_, f->type, f->ne[0], rows_.gather ? max_rows_ : rows_.n_rows);
            leaf->data   = f->data;
            leaf->buffer = f->buffer;
            if (rows_.gather) {
                leaf = ggml_get_rows(ctx_, leaf, in_.source);
            }
            all = all ? ggml_concat(ctx_, all, leaf, 0) : leaf;
        }
        if (scales_features(w_)) {
            all = ggml_rms_norm(ctx_, all, FEATURE_EPS);
        }
        return norm(ggml_mul_mat(ctx_, w_.fc, all), w_.output_norm_enc);
    }

    ggml_tensor * rope(ggml_tensor * x, ggml_tensor * position) {
        const auto n_ctx = static_cast<int>(h_.n_ctx_orig_yarn ? h_.n_ctx_orig_yarn : h_.n_ctx_train);
        const bool plain = h_.rope_scaling_type_train == LLAMA_ROPE_SCALING_TYPE_NONE;
        return ggml_rope_ext(ctx_, x, position, w_.layers[0].rope_freqs, static_cast<int>(h_.n_rot()), h_.rope_type, n_ctx,
                             h_.rope_freq_base_train, plain ? 1.0f : h_.rope_freq_scale_train, /*ext_factor=*/0.0f,
                             h_.yarn_attn_factor * h_.rope_attn_factor, h_.yarn_beta_fast, h_.yarn_beta_slow);
    }

    ggml_tensor * rotate(ggml_tensor * x, ggml_tensor * rotation) {
        return rotation ? llama_mul_mat_hadamard(ctx_, x, rotation) : x;
    }

    ggml_tensor * heads(ggml_tensor * x) { return ggml_reshape_3d(ctx_, x, head(), x->ne[0] / head(), x->ne[1]); }
    int64_t       head() const { return h_.n_embd_head_k(); }

    // Write K and V of the rows x [H, n], those of the block first, to their cells.
    void write(int32_t il, ggml_tensor * x) {
        const auto & l = w_.layers[static_cast<size_t>(il)];
        auto *       k = rotate(rope(norm(heads(ggml_mul_mat(ctx_, l.wk, x)), l.attn_k_norm), in_.position), cache_.k_rotation());
        auto *       v = ggml_mul_mat(ctx_, l.wv, x);
        if (cache_.v_rotation()) {
            v = ggml_reshape_2d(ctx_, rotate(v, cache_.v_rotation()), v->ne[0], v->ne[1]);
        }
        expand(v);
        // A rope right before the view and the write is one kernel on CUDA.
        k = ggml_view_2d(ctx_, k, k->ne[0] * k->ne[1], k->ne[2], k->nb[2], 0);
        expand(ggml_set_rows(ctx_, cache_.k(il), k, in_.cell));
        expand(ggml_set_rows(ctx_, cache_.v(il), v, in_.cell));
    }

    // Cells [0, n_kv) of each sequence as [d, n_kv, g, S].
    ggml_tensor * cells(ggml_tensor * cache) {
        const auto stride = cache->nb[1] * static_cast<size_t>(cache_.n_cells());
        auto *     t = ggml_view_4d(ctx_, cache, head(), cache->ne[0] / head(), rows_.n_kv, rows_.n_seqs,
                                    ggml_row_size(cache->type, head()), cache->nb[1], stride, stride * static_cast<size_t>(rows_.first));
        return ggml_permute(ctx_, t, 0, 2, 1, 3);
    }

    // u [H, B*S] normalised, c [H, W] or null.
    ggml_tensor * attention(int32_t il, ggml_tensor * u, ggml_tensor * c) {
        const auto & l = w_.layers[static_cast<size_t>(il)];
        auto *       q = norm(heads(ggml_mul_mat(ctx_, l.wq, u)), l.attn_q_norm);
        q              = rope(q, ggml_view_1d(ctx_, in_.position, rows_.blocks(), 0));
        q              = rotate(q, cache_.k_rotation());
        expand(q);
        write(il, c ? ggml_concat(ctx_, u, c, 1) : u);

        const auto scale = h_.f_attention_scale != 0.0f ? h_.f_attention_scale : 1.0f / std::sqrt(static_cast<float>(head()));
        auto *     mask  = h_.is_swa(static_cast<uint32_t>(il)) ? in_.window : in_.mask;
        q                = ggml_reshape_4d(ctx_, q, q->ne[0], q->ne[1], rows_.n_block, rows_.n_seqs);
        q                = ggml_permute(ctx_, q, 0, 2, 1, 3);  // [d, B, h, S]
        auto * k         = cells(cache_.k(il));
        auto * v         = cells(cache_.v(il));
        auto * o         = flash_attn_ ? flash(q, k, v, mask, scale) : plain(q, k, v, mask, scale);
        if (cache_.v_rotation()) {
            o = ggml_reshape_2d(ctx_, rotate(o, cache_.v_rotation()), o->ne[0], o->ne[1]);
        }
        o = ggml_mul_mat(ctx_, l.wo, o);
        return h_.f_attn_value_scale != 0.0f ? ggml_scale(ctx_, o, h_.f_attn_value_scale) : o;
    }

    ggml_tensor * flash(ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask, float scale) {
        const auto half = [&](ggml_tensor * t) { return t->type == GGML_TYPE_F32 ? ggml_cast(ctx_, t, GGML_TYPE_F16) : t; };
        auto *     o    = ggml_flash_attn_ext(ctx_, q, half(k), half(v), mask, scale, 0.0f, 0.0f);
        ggml_prec_set_acc(o, GGML_PREC_F32);
        return ggml_reshape_2d(ctx_, o, o->ne[0] * o->ne[1], rows_.blocks());
    }

    ggml_tensor * plain(ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask, float scale) {
        auto * kq = ggml_mul_mat(ctx_, k, q);
        ggml_prec_set_acc(kq, GGML_PREC_F32);
        kq       = ggml_soft_max_ext(ctx_, kq, mask, scale, 0.0f);
        auto * o = ggml_mul_mat(ctx_, ggml_cont(ctx_, ggml_transpose(ctx_, v)), kq);
        o        = ggml_permute(ctx_, o, 0, 2, 1, 3);
        return ggml_cont_2d(ctx_, o, o->ne[0] * o->ne[1], rows_.blocks());
    }

    // Between two convolutions along the block, whose kernels both come from the input: x + conv(f(conv(u))), u = norm(x).
    template <typename F>
    ggml_tensor * residual(ggml_tensor * x, ggml_tensor * weight, ggml_tensor * base, ggml_tensor * projection, F && f) {
        auto * u = norm(x, weight);
        if (projection == nullptr) {
            return ggml_add(ctx_, f(u), x);
        }
        auto *     kernel = ggml_mul_mat(ctx_, projection, u);
        const auto conv   = [&](ggml_tensor * z, int side) {
            return ggml_block_conv(ctx_, z, kernel, base, static_cast<int>(h_.dflash_conv_group_size), rows_.n_block, side);
        };
        return ggml_add(ctx_, conv(f(conv(u, 0)), 1), x);
    }

    ggml_tensor * layer(int32_t il, ggml_tensor * x, ggml_tensor * c) {
        const auto & l = w_.layers[static_cast<size_t>(il)];
        x = residual(x, l.attn_norm, l.dflash_attn_conv_base, l.dflash_attn_conv_proj,
                     [&](ggml_tensor * u) { return attention(il, u, c); });
        return residual(x, l.ffn_norm, l.dflash_ffn_conv_base, l.dflash_ffn_conv_proj, [&](ggml_tensor * u) {
            auto * up   = ggml_mul_mat(ctx_, l.ffn_up, u);
            auto * gate = ggml_mul_mat(ctx_, l.ffn_gate, u);
            return ggml_mul_mat(ctx_, l.ffn_down, h_.llm_ffn_op == LLM_FFN_GELU ? ggml_geglu_split(ctx_, gate, up)
                                                                               : ggml_swiglu_split(ctx_, gate, up));
        });
    }

    // x [H, B*S] -> [2k, n, S] for the n = B - 1 mask slots of each block: its anchor is known.
    ggml_tensor * candidates(ggml_tensor * x) {
        x                 = tail(x);
        const auto N      = x->ne[1];                              // n*S
        auto *     logits = ggml_mul_mat(ctx_, model_.head(), x);  // [V, N]
        if (logits->ne[0] > model_.n_head()) {
            logits = ggml_cont(ctx_, ggml_view_2d(ctx_, logits, model_.n_head(), N, logits->nb[1], 0));
        }
        if (model_.dflash2()) {
            logits = transform(logits);
        }
        auto * ids   = ggml_top_k(ctx_, logits, k_);  // I32 [k, N]
        auto * unary = ggml_get_rows(ctx_, ggml_reshape_3d(ctx_, logits, 1, logits->ne[0], N), ids);
        unary        = ggml_reshape_2d(ctx_, unary, k_, N);
        if (in_.tokens) {
            ids = ggml_get_rows(ctx_, in_.tokens, ggml_reshape_1d(ctx_, ids, k_ * N));
            ids = ggml_reshape_2d(ctx_, ids, k_, N);
        }
        if (!model_.dflash2()) {
            return ggml_concat(ctx_, ggml_cast(ctx_, ids, GGML_TYPE_F32), unary, 0);
        }
        auto * gate      = ggml_mul_mat(ctx_, w_.dflash_selector_hidden, x);
        auto * successor = ggml_get_rows(ctx_, w_.dflash_selector_next, ggml_reshape_1d(ctx_, ids, k_ * N));
        return ggml_block_walk(ctx_, of_blocks(ids), of_blocks(unary), of_blocks(gate),
                               ggml_reshape_4d(ctx_, successor, successor->ne[0], k_, rows_.n_block - 1, rows_.n_seqs),
                               predecessors(ids));
    }

    ggml_tensor * of_blocks(ggml_tensor * x) { return ggml_reshape_3d(ctx_, x, x->ne[0], x->ne[1] / rows_.n_seqs, rows_.n_seqs); }

    // ids I32 [k, n*S] -> [R, 1 + k*(n-1), S]: what each block may choose before a slot, the anchor first.
    ggml_tensor * predecessors(ggml_tensor * ids) {
        auto *     out  = of_blocks(ggml_get_rows(ctx_, w_.dflash_selector_prev, in_.anchor));
        const auto n_id = k_ * (rows_.n_block - 2);
        if (n_id == 0) {
            return out;
        }
        auto * earlier = ggml_view_2d(ctx_, ids, n_id, rows_.n_seqs, ids->nb[1] * static_cast<size_t>(rows_.n_block - 1), 0);
        earlier = rows_.n_seqs > 1 ? ggml_cont_1d(ctx_, earlier, n_id * rows_.n_seqs) : ggml_reshape_1d(ctx_, earlier, n_id);
        return ggml_concat(ctx_, out, of_blocks(ggml_get_rows(ctx_, w_.dflash_selector_prev, earlier)), 1);
    }

    // What the target does to its logits; DFlash's are read as they come.
    ggml_tensor * transform(ggml_tensor * logits) {
        if (h_.f_logit_scale != 0.0f) {
            logits = ggml_scale(ctx_, logits, h_.f_logit_scale);
        }
        if (h_.f_final_logit_softcapping > 0.0f) {
            logits = ggml_tanh(ctx_, ggml_scale(ctx_, logits, 1.0f / h_.f_final_logit_softcapping));
            logits = ggml_scale(ctx_, logits, h_.f_final_logit_softcapping);
        }
        return logits;
    }

    const DraftModel &    model_;
    const llama_model &   w_;
    const llama_hparams & h_;
    const DraftCache &    cache_;
    DraftRows             rows_;
    int32_t               max_rows_;
    int32_t               k_;
    bool                  flash_attn_;
    DraftGraph            out_;
    ggml_context *        ctx_;
    DraftInputs::Leaves   in_;
};

}  // namespace

DraftGraph build_draft_graph(const DraftModel & model, const DraftCache & cache, const DraftInputs & inputs, const DraftRows & rows,
                             const std::vector<const ggml_tensor *> & features, int32_t n_candidates, bool flash_attn) {
    return Builder(model, cache, inputs, rows, n_candidates, flash_attn).build(features);
}

}  // namespace pld
