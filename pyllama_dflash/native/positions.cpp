#include "positions.h"

#include "error.h"
#include "llama-io.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-dsv4.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-recurrent.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace pld {

namespace {

// Takes what a cache writes out: of each number its size and its value, of tensors nothing.
class Numbers : public llama_io_write_i {
public:
    void write(const void * src, size_t size) override {
        int32_t value = 0;
        std::memcpy(&value, src, std::min(size, sizeof(value)));
        values_.push_back(value);
        sizes_.push_back(size);
    }
    void   write_tensor(ggml_tensor *, size_t, size_t) override {}
    size_t n_bytes() override { return 0; }

    // Number of streams; of each the number of cells; of each cell its position, its number of sequences, in some caches more of
    // its position, its sequence. Only one stream has cells of a sequence.
    std::vector<int32_t> positions() const {
        std::vector<int32_t> out;
        size_t               i = 1;
        while (i < values_.size() && values_[i] == 0) {
            ++i;
        }
        const auto n = i < values_.size() ? values_[i++] : 0;
        for (int32_t cell = 0; cell < n && i + 2 < values_.size(); ++cell) {
            out.push_back(values_[i]);
            i += sizes_[i + 2] > sizeof(int32_t) ? 4 : 3;
        }
        return out;
    }

private:
    std::vector<int32_t> values_;
    std::vector<size_t>  sizes_;
};

struct Cache {
    const llama_kv_cache * kv;
    bool                   windowed;  // or perhaps so
};

// Those whose cells stand for positions.
std::vector<Cache> caches(llama_memory_t memory) {
    const auto both = [](const llama_kv_cache_iswa & m) { return std::vector<Cache>{{m.get_base(), false}, {m.get_swa(), true}}; };
    if (auto * m = dynamic_cast<llama_memory_hybrid_idx *>(memory)) {
        return {{m->get_mem_attn(), false}, {m->get_mem_idx(), false}};
    }
    if (auto * m = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return {{m->get_mem_attn(), false}};
    }
    if (auto * m = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        return both(*m->get_mem_attn());
    }
    if (auto * m = dynamic_cast<llama_kv_cache_iswa *>(memory)) {
        return both(*m);
    }
    if (auto * m = dynamic_cast<llama_kv_cache_dsv4 *>(memory)) {
        return both(*m->get_raw());
    }
    if (auto * m = dynamic_cast<llama_kv_cache_dsa *>(memory)) {
        return {{m->get_mla(), false}, {m->get_lid(), false}};
    }
    if (auto * m = dynamic_cast<llama_kv_cache_dsa_iswa *>(memory)) {
        return {{m->get_dsa()->get_mla(), false}, {m->get_dsa()->get_lid(), false}, {m->get_swa(), true}};
    }
    if (auto * m = dynamic_cast<llama_kv_cache_msa *>(memory)) {
        return {{m->get_base(), false}, {m->get_idx(), false}};
    }
    if (auto * m = dynamic_cast<llama_kv_cache *>(memory)) {
        return {{m, false}};
    }
    require(dynamic_cast<llama_memory_recurrent *>(memory) != nullptr, PLD_E_INTERNAL,
            "what a state holds cannot be checked for a memory of this kind; evaluate the text again");
    return {};
}

}  // namespace

void require_positions(llama_memory_t memory, int32_t seq, int32_t n_past) {
    for (const auto & cache : caches(memory)) {
        Numbers numbers;
        cache.kv->state_write(numbers, seq);
        auto found = numbers.positions();
        std::sort(found.begin(), found.end());
        const auto n = static_cast<int32_t>(found.size());
        for (int32_t i = 0; i < n; ++i) {
            require(found[static_cast<size_t>(i)] == n_past - n + i, PLD_E_ARGUMENT,
                    format("the target's cache has position %d where %d belongs", found[static_cast<size_t>(i)], n_past - n + i));
        }
        require(cache.windowed || n == n_past, PLD_E_ARGUMENT,
                format("the target's cache has %d positions, not %d", n, n_past));
    }
}

}  // namespace pld
