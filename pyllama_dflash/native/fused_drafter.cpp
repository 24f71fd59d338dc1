#include "fused_drafter.h"

#include "cuda_graphs.h"
#include "engine_params.h"
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

// Sequences that come and go make for more shapes: of the stretch, and of the rows that are kept.
size_t most_graphs(const pld_engine_params & params) {
    return params.n_seq_max > 1 ? 48 : 16;
}

}  // namespace

FusedDrafter::FusedDrafter(std::shared_ptr<Model> model, const Model & target, Context & ctx, const pld_engine_params & params)
    : model_(std::move(model)),
      target_(ctx),
      n_vocab_(target.n_vocab()),
      n_candidates_(candidates_of(model_->facts(), n_vocab_)),
      n_ctx_(params.n_ctx),
      sight_(draft_sight(params, *model_->llama())),
      widest_(std::min(model_->facts().block_size, std::max(params.n_max, 1) + 1)),
      max_rows_(std::max(params.n_ubatch, params.n_seq_max * (params.n_max + 1))),
      flash_attn_(params.flash_attn != 0),
      draft_(*model_, target, params.draft_vocab != 0),
      backend_(open_backend(draft_.device(), params.cuda_graphs)),
      cpu_(ggml_backend_is_cpu(backend_.get())),
      fills_ends_(fills_ends(params, *llama_get_model(ctx.get()))),
      cache_(draft_.hparams(), draft_.dry_run(), backend_.get(), model_->facts().block_size, params),
      inputs_(draft_, cache_, backend_.get(), params.n_seq_max, max_rows_),
      graphs_(backend_.get(), model_->dry_run(), most_graphs(params),
              [this](const DraftShape & s) {
                  return build_draft_graph(draft_, cache_, inputs_, s.rows, s.features, n_candidates_, flash_attn_);
              }),
      seqs_(static_cast<size_t>(params.n_seq_max)) {
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
    DraftRows batch, round;
    batch.n_rows  = max_rows_;
    round.n_seqs  = static_cast<int32_t>(seqs_.size());
    round.n_block = widest_;
    round.n_rows  = std::min(round.blocks(), max_rows_);
    round.n_kv    = cache_.n_cells();
    for (auto rows : {batch, round}) {
        rows.gather = cpu_ && (seqs_.size() > 1 || cache_.n_cells() < max_rows_);
        // Stand-ins for the target's features; no data is read.
        ggml_tensor feature = *cache_.k(0);
        feature.type        = GGML_TYPE_F32;
        feature.ne[0]       = draft_.n_embd();
        feature.ne[1]       = max_rows_;
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
    require(features_.empty(), PLD_E_INTERNAL, "features of a batch before were not taken");
    int32_t n = 0;
    for (const auto & r : rows) {
        at(r.seq).row    = n;
        at(r.seq).n_kept = r.n_kept;
        n += r.n;
    }
    for (const auto id : model_->facts().target_layers) {
        const auto * f = llama_get_embeddings_layer_inp_tensor(target_.get(), static_cast<uint32_t>(id));
        require(f != nullptr, PLD_E_INTERNAL, format("the target gave no input of layer %d", id));
        require(f->type == GGML_TYPE_F32 && ggml_is_contiguous(f) && f->ne[0] == draft_.n_embd() && f->ne[1] == n && n <= max_rows_ &&
                    ggml_nrows(f) == f->ne[1],
                PLD_E_INTERNAL, format("the target's input of layer %d is not as it should be", id));
        features_.push_back(local(f, features_.size()));
    }
}

// The target's rows of a launch that writes what waits and runs these blocks. A GPU takes all of them, so that shapes stay the same;
// a CPU only those that are kept, in fours. Of a ring's worth of rows and more, the last ones are.
std::vector<DraftSource> FusedDrafter::sources(DraftRows & rows) const {
    std::vector<DraftSource> kept;
    for (int32_t seq = 0; seq < static_cast<int32_t>(seqs_.size()); ++seq) {
        const auto & s     = at(seq);
        const bool   block = rows.n_block > 0 && seq >= rows.first && seq < rows.first + rows.n_seqs;
        const auto   end   = n_past(seq) + (block ? rows.n_block : 0);
        for (int32_t i = std::max(0, end - cache_.n_cells() - s.n_cached); i < s.n_kept; ++i) {
            kept.push_back({s.row + i, s.n_cached + i, cache_.cell(seq, s.n_cached + i)});
        }
    }
    if (kept.empty()) {
        return kept;
    }
    const auto all = static_cast<int32_t>(features_[0]->ne[1]);
    const auto n   = static_cast<int32_t>(kept.size());
    rows.gather    = cpu_ && kept.back().row != n - 1;  // they ascend: else they are the first ones
    rows.n_rows    = cpu_ ? GGML_PAD(n, 4) : all;
    rows.n_rows    = rows.gather ? rows.n_rows : std::min(rows.n_rows, all);
    std::vector<DraftSource> out;
    for (int32_t i = 0; i < rows.n_rows; ++i) {
        out.push_back({rows.gather ? 0 : i, 0, cache_.spare()});
    }
    for (int32_t i = 0; i < n; ++i) {
        const auto & row                                        = kept[static_cast<size_t>(i)];
        out[static_cast<size_t>(rows.gather ? i : row.row)] = row;
    }
    return out;
}

void FusedDrafter::launch(Requests begin, Requests end, Stretch seqs, int32_t n, std::vector<float> & out) {
    DraftShape              shape;
    auto &                  rows = shape.rows;
    std::vector<DraftBlock> blocks;
    if (begin != end) {
        rows.n_block = n + 1;
        rows.first   = seqs.first;
        rows.n_seqs  = seqs.size();
        blocks.resize(static_cast<size_t>(rows.n_seqs));
    }
    for (auto r = begin; r != end; ++r) {
        const auto pos = n_past(r->seq);
        rows.n_kv      = std::max(rows.n_kv, cache_.n_kv(pos + rows.n_block));
        blocks[static_cast<size_t>(r->seq - rows.first)] = {r->anchor, pos, std::max(at(r->seq).low, pos - sight_)};
    }
    const auto source = sources(rows);
    if (rows.n_rows > 0) {
        shape.features = features_;
    }

    const auto & g = graphs_.get(shape);
    inputs_.upload(rows, blocks, source);
    const auto status = ggml_backend_graph_compute_async(backend_.get(), g.graph);
    if (g.out && status == GGML_STATUS_SUCCESS) {
        out.resize(static_cast<size_t>(ggml_nelements(g.out)));
        ggml_backend_tensor_get_async(backend_.get(), g.out, out.data(), 0, ggml_nbytes(g.out));
    }
    // Before anything else: the target may overwrite its features as soon as it runs.
    ggml_backend_synchronize(backend_.get());
    require(status == GGML_STATUS_SUCCESS, PLD_E_DECODE, format("the draft's graph could not run (code %d)", status));

    for (auto & s : seqs_) {
        n_injected_ += s.n_kept;
        s.n_cached += s.n_kept;
        s.n_kept = 0;
        s.low    = std::max(s.low, s.n_cached - cache_.n_cells());
    }
    for (auto r = begin; r != end; ++r) {
        at(r->seq).low = std::max(at(r->seq).low, at(r->seq).n_cached + rows.n_block - cache_.n_cells());
    }
    features_.clear();
}

void FusedDrafter::inject() {
    if (std::any_of(seqs_.begin(), seqs_.end(), [](const auto & s) { return s.n_kept > 0; })) {
        const std::vector<DraftRequest> none;
        std::vector<float>              nothing;
        launch(none.begin(), none.end(), {0, 0}, 0, nothing);
    }
    features_.clear();
}

// The requests from begin on that one launch serves: sequences that are neighbours, or nearly.
FusedDrafter::Requests FusedDrafter::stretch_end(Requests begin, Requests end) const {
    const auto most = cpu_ ? 1 : MOST_IN_VAIN;
    auto       r    = begin + 1;
    while (r != end && r->seq - (r - 1)->seq - 1 <= most) {
        ++r;
    }
    return r;
}

std::vector<Draft> FusedDrafter::draft(const std::vector<DraftRequest> & requests) {
    const auto k    = static_cast<size_t>(n_candidates_);
    const auto most = [](const auto & a, const auto & b) { return a.n < b.n; };
    const auto n    = std::max_element(requests.begin(), requests.end(), most)->n;
    std::vector<Draft> out;
    std::vector<float> rows;
    for (auto begin = requests.begin(); begin != requests.end();) {
        const auto end  = stretch_end(begin, requests.end());
        Stretch    seqs = {begin->seq, (end - 1)->seq};
        if (fills_ends_ && begin == requests.begin() && end == requests.end()) {
            seqs = aligned(seqs, static_cast<int32_t>(seqs_.size()));
        }
        launch(begin, end, seqs, n, rows);
        for (auto r = begin; r != end; ++r) {
            const float * row = &rows[static_cast<size_t>((r->seq - seqs.first) * n) * 2 * k];
            Draft         draft;
            for (int32_t i = 0; i < r->n; ++i, row += 2 * k) {
                auto c = sorted(token_ids(row, n_candidates_, n_vocab_).data(), row + k, n_candidates_);
                if (!c.valid(n_vocab_)) {
                    warn_invalid();
                    break;
                }
                draft.push_back(std::move(c));
            }
            out.push_back(std::move(draft));
        }
        begin = end;
    }
    return out;
}

int32_t FusedDrafter::truncate(int32_t seq, int32_t pos) {
    auto & s = at(seq);
    if (pos >= n_past(seq)) {
        return n_past(seq);
    }
    if (positions_kept(pos, s.low, sight_) < pos || pos == 0) {
        s = {};
        return 0;
    }
    s.n_kept   = std::max(0, pos - s.n_cached);
    s.n_cached = std::min(s.n_cached, pos);
    return pos;
}

void FusedDrafter::forget_all() {
    cache_.clear();
    seqs_.assign(seqs_.size(), {});
    features_.clear();
}

DraftState FusedDrafter::header(int32_t seq) const {
    DraftState out = {};
    out.fused      = 1;
    out.kind       = model_->facts().kind;
    out.n_layer    = cache_.n_layer();
    out.type_k     = cache_.k(0)->type;
    out.type_v     = cache_.v(0)->type;
    out.n_embd_k   = static_cast<int32_t>(cache_.k(0)->ne[0]);
    out.n_embd_v   = static_cast<int32_t>(cache_.v(0)->ne[0]);
    out.low        = at(seq).low;
    out.n_past     = at(seq).n_cached;
    return out;
}

size_t FusedDrafter::state_size(int32_t seq) {
    inject();
    return sizeof(DraftState) + static_cast<size_t>(at(seq).n_cached - at(seq).low) * cache_.row_size();
}

void FusedDrafter::state_write(int32_t seq, uint8_t * out) {
    const auto size = state_size(seq);
    cache_.get(seq, at(seq).low, at(seq).n_cached, out + sizeof(DraftState));
    write_draft_state(out, header(seq), size - sizeof(DraftState));
}

void FusedDrafter::state_read(int32_t seq, const uint8_t * data, size_t size) {
    at(seq)      = {};
    const auto s = read_draft_state(data, size, header(seq), n_ctx_, sight_);
    require(s.n_bytes == static_cast<size_t>(s.n_past - s.low) * cache_.row_size(), PLD_E_ARGUMENT,
            "the draft's state is damaged: its rows are not as many as its positions");
    cache_.set(seq, s.low, s.n_past, data + sizeof(s));
    at(seq).n_cached = s.n_past;
    at(seq).low      = std::max(s.low, s.n_past - cache_.n_cells());
}

}  // namespace pld
