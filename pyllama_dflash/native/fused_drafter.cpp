#include "fused_drafter.h"

#include "cuda_graphs.h"
#include "error.h"
#include "ggml-cpu.h"
#include "llama-ext.h"
#include "llama-model.h"

#include <algorithm>

namespace pld {

namespace {

ggml_backend_t open_backend(ggml_backend_dev_t device, int32_t cuda_graphs) {
    auto * backend = ggml_backend_dev_init(device, nullptr);
    require(backend != nullptr, PLD_E_MEMORY, format("%s could not be opened for the draft", ggml_backend_dev_name(device)));
    if (ggml_backend_is_cpu(backend)) {
        ggml_backend_cpu_set_n_threads(backend, 1);  // until a pool is attached
    }
    set_cuda_graphs(backend, cuda_graphs);
    return backend;
}

}  // namespace

FusedDrafter::FusedDrafter(std::shared_ptr<Model> model, const Model & target, Context & ctx, const pld_engine_params & params)
    : model_(std::move(model)),
      target_(ctx),
      n_vocab_(target.n_vocab()),
      n_candidates_(candidates_of(model_->facts(), n_vocab_)),
      max_rows_(std::max(params.n_ubatch, params.n_max + 1)),
      flash_attn_(params.flash_attn != 0),
      draft_(*model_, target, params.draft_vocab != 0),
      backend_(open_backend(draft_.device(), params.cuda_graphs)),
      cpu_(ggml_backend_is_cpu(backend_.get())),
      cache_(draft_.hparams(), draft_.dry_run(), backend_.get(), static_cast<ggml_type>(params.type_k_draft),
             static_cast<ggml_type>(params.type_v_draft), params.n_ctx),
      inputs_(draft_, cache_, backend_.get(), max_rows_),
      graphs_(backend_.get(), model_->dry_run(), [this](const DraftShape & s) {
          return build_draft_graph(draft_, cache_, inputs_, s.rows, s.features, n_candidates_, flash_attn_);
      }) {
    if (draft_.n_head() < n_candidates_) {
        throw Unsupported("its head has fewer tokens than a draft has candidates");
    }
    const bool choose = params.flash_attn < 0 && !ggml_is_quantized(static_cast<ggml_type>(params.type_v_draft));
    try {
        reserve_largest();
    } catch (const Unsupported &) {
        if (!choose) {
            throw;
        }
        flash_attn_ = false;
        reserve_largest();
    }
    for (const auto id : model_->facts().target_layers) {
        llama_set_embeddings_layer_inp(ctx.get(), static_cast<uint32_t>(id), true);
    }
    llama_set_embeddings_layer_inp_device(ctx.get(), true);
}

// The two graphs that need most room: a whole batch of the target's without a block, and the widest round.
void FusedDrafter::reserve_largest() {
    const auto block = model_->facts().block_size;
    for (const auto & rows : {DraftRows{0, max_rows_, 0}, DraftRows{block, std::min(block, max_rows_), cache_.n_cells()}}) {
        // Stand-ins for the target's features; no data is read.
        ggml_tensor feature = *cache_.k(0);
        feature.type        = GGML_TYPE_F32;
        feature.ne[0]       = draft_.n_embd();
        feature.ne[1]       = rows.n_rows;
        graphs_.reserve({rows, std::vector<const ggml_tensor *>(model_->facts().target_layers.size(), &feature)});
    }
}

void FusedDrafter::counters(pld_engine_memory & out) const {
    out.n_nodes        = graphs_.n_nodes();
    out.n_graph_hits   = graphs_.hits();
    out.n_graph_misses = graphs_.misses();
}

size_t FusedDrafter::copy_size() const {
    return static_cast<size_t>(draft_.n_embd()) * static_cast<size_t>(max_rows_) * sizeof(float);
}

void FusedDrafter::footprint(Footprint & out) const {
    auto * buft = ggml_backend_get_default_buffer_type(backend_.get());
    out.add(model_->llama()->memory_breakdown(), &pld_device_memory::draft_weights);
    out.add(buft, &pld_device_memory::draft_weights, draft_.n_copied());
    out.add(buft, &pld_device_memory::draft_kv, cache_.n_bytes());
    out.add(buft, &pld_device_memory::draft_compute, graphs_.n_bytes() + inputs_.n_bytes());
    out.add(buft, &pld_device_memory::draft_compute, n_copies() * copy_size());
}

// Features that are copied to the draft's device; for a dry run, those that would be.
size_t FusedDrafter::n_copies() const {
    if (!model_->dry_run()) {
        return static_cast<size_t>(std::count_if(copies_.begin(), copies_.end(), [](const Copy & c) { return c.buffer != nullptr; }));
    }
    const auto * tgt    = llama_get_model(target_.get());
    const auto & layers = model_->facts().target_layers;
    return static_cast<size_t>(std::count_if(layers.begin(), layers.end(), [&](int32_t id) {
        return tgt->dev_layer(std::clamp(id - 1, 0, llama_model_n_layer(tgt) - 1)) != draft_.device();  // what makes that input
    }));
}

void FusedDrafter::attach(const ThreadPool & pool, int32_t n_threads) {
    if (cpu_) {
        ggml_backend_cpu_set_n_threads(backend_.get(), n_threads);
        ggml_backend_cpu_set_threadpool(backend_.get(), pool.get());
    }
}

// A feature where the draft's device can read it: as it lies, or copied there.
const ggml_tensor * FusedDrafter::local(const ggml_tensor * feature, size_t index) {
    if (ggml_backend_supports_buft(backend_.get(), ggml_backend_buffer_get_type(feature->buffer))) {
        return feature;
    }
    copies_.resize(model_->facts().target_layers.size());
    auto & copy = copies_[index];
    if (copy.buffer == nullptr) {
        copy.buffer.reset(ggml_backend_alloc_buffer(backend_.get(), copy_size()));
        require(copy.buffer != nullptr, PLD_E_MEMORY, "no memory for a copy of the target's features");
    }
    copy.tensor          = *feature;
    copy.tensor.view_src = nullptr;
    copy.tensor.buffer   = copy.buffer.get();
    copy.tensor.data     = ggml_backend_buffer_get_base(copy.buffer.get());
    ggml_backend_tensor_copy(feature, &copy.tensor);
    return &copy.tensor;
}

void FusedDrafter::add_features(const std::vector<BatchRows> & rows) {
    const auto n = rows.at(0).n_kept;
    require(seq_.features.empty(), PLD_E_INTERNAL, "features of a batch before were not taken");
    std::vector<const ggml_tensor *> features;
    for (const auto id : model_->facts().target_layers) {
        const auto * f = llama_get_embeddings_layer_inp_tensor(target_.get(), static_cast<uint32_t>(id));
        require(f != nullptr, PLD_E_INTERNAL, format("the target gave no input of layer %d", id));
        require(f->type == GGML_TYPE_F32 && ggml_is_contiguous(f) && f->ne[0] == draft_.n_embd() && f->ne[1] >= n &&
                    f->ne[1] <= max_rows_ && ggml_nrows(f) == f->ne[1],
                PLD_E_INTERNAL, format("the target's input of layer %d is not as it should be", id));
        features.push_back(local(f, features.size()));
    }
    seq_.features = std::move(features);
    seq_.n_kept   = n;
}

// Rows of the target's last batch that a launch takes. A GPU waits for launches more than for rows: all of them, so that the
// shape does not depend on what was accepted. A CPU pays for each row; in fours, for few shapes.
int32_t FusedDrafter::n_rows() const {
    if (seq_.features.empty()) {
        return 0;
    }
    const auto all = static_cast<int32_t>(seq_.features[0]->ne[1]);
    return cpu_ ? std::min(all, GGML_PAD(seq_.n_kept, 4)) : all;
}

void FusedDrafter::launch(int32_t anchor, int32_t n, float * out) {
    const auto pos = seq_.n_cached;
    DraftShape shape;
    shape.features     = seq_.features;
    shape.rows.n_rows  = n_rows();
    shape.rows.n_block = n > 0 ? n + 1 : 0;
    shape.rows.n_kv    = n > 0 ? cache_.n_kv(n_past(0) + n + 1) : 0;

    const auto & g = graphs_.get(shape);
    inputs_.upload(shape.rows, pos, seq_.n_kept, anchor);
    const auto status = ggml_backend_graph_compute_async(backend_.get(), g.graph);
    if (g.out && status == GGML_STATUS_SUCCESS) {
        ggml_backend_tensor_get_async(backend_.get(), g.out, out, 0, ggml_nbytes(g.out));
    }
    // Before anything else: the target may overwrite its features as soon as it runs.
    ggml_backend_synchronize(backend_.get());
    require(status == GGML_STATUS_SUCCESS, PLD_E_DECODE, format("the draft's graph could not run (code %d)", status));

    n_injected_ += seq_.n_kept;
    seq_ = {pos + seq_.n_kept, {}, 0};
}

void FusedDrafter::inject() {
    if (seq_.n_kept > 0) {
        launch(/*anchor=*/0, 0, nullptr);
    }
    seq_.features.clear();
}

std::vector<Draft> FusedDrafter::draft(const std::vector<DraftRequest> & requests) {
    const auto         anchor = requests.at(0).anchor;
    const auto         n      = requests.at(0).n;
    const auto         k = static_cast<size_t>(n_candidates_);
    std::vector<float> rows(static_cast<size_t>(n) * 2 * k);
    launch(anchor, n, rows.data());

    Draft out;
    for (const float * row = rows.data(); row != rows.data() + rows.size(); row += 2 * k) {
        auto c = sorted(token_ids(row, n_candidates_, n_vocab_).data(), row + k, n_candidates_);
        if (!c.valid(n_vocab_)) {
            warn_invalid();
            break;
        }
        out.push_back(std::move(c));
    }
    return {out};
}

int32_t FusedDrafter::truncate(int32_t seq, int32_t pos) {
    if (pos < n_past(seq)) {
        seq_.n_cached = std::min(seq_.n_cached, pos);
        seq_.n_kept   = pos - seq_.n_cached;
    }
    return n_past(seq);
}

}  // namespace pld
