// The rules of speculative decoding, free of llama.cpp and of I/O: how a draft is cut and how much of it is accepted.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace pld {

// k candidates of one drafted position, by descending score; equal scores keep the order they came in.
struct Candidates {
    std::vector<int32_t> tokens;
    std::vector<float>   scores;

    // Raw top-1 minus top-2 score. A lone candidate has no rival.
    float margin() const {
        return scores.size() < 2 ? std::numeric_limits<float>::infinity() : scores[0] - scores[1];
    }

    // Softmax probability of the first candidate among the k.
    float probability() const {
        double sum = 0.0;
        for (const auto s : scores) {
            sum += std::exp(static_cast<double>(s) - scores[0]);
        }
        return static_cast<float>(1.0 / sum);
    }

    // False for what no healthy draft produces: an id outside the vocabulary, or a top score that is not a number.
    bool valid(int32_t n_vocab) const {
        return !tokens.empty() && std::isfinite(scores[0]) &&
               std::all_of(tokens.begin(), tokens.end(), [&](int32_t t) { return t >= 0 && t < n_vocab; });
    }
};

using Draft = std::vector<Candidates>;

// Tokens of the draft that are worth verifying: up to the first unsure one, none if fewer than n_min remain.
inline int32_t cut(const Draft & draft, int32_t n_min, float margin, float p_min) {
    int32_t n = 0;
    for (const auto & c : draft) {
        if ((margin > 0.0f && c.margin() < margin) || (p_min > 0.0f && c.probability() < p_min)) {
            break;
        }
        n++;
    }
    return n < n_min ? 0 : n;
}

// The longest prefix of the drafted tokens that the target would have chosen itself. chosen[i] follows drafted[i-1].
inline int32_t accepted(const int32_t * drafted, int32_t n, const int32_t * chosen) {
    int32_t i = 0;
    while (i < n && drafted[i] == chosen[i]) {
        i++;
    }
    return i;
}

// The index of the largest value, the lowest one among equals. NaN never wins against a number.
inline int32_t argmax(const float * x, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; ++i) {
        if (x[i] > x[best] || (std::isnan(x[best]) && !std::isnan(x[i]))) {
            best = i;
        }
    }
    return best;
}

// The k best of a row of scores as candidates.
inline Candidates top_k(const float * x, int32_t n, int32_t k) {
    std::vector<int32_t> ids(n);
    for (int32_t i = 0; i < n; ++i) {
        ids[i] = i;
    }
    const auto key    = [&](int32_t i) { return std::isnan(x[i]) ? -std::numeric_limits<float>::infinity() : x[i]; };
    const auto before = [&](int32_t a, int32_t b) { return key(a) != key(b) ? key(a) > key(b) : a < b; };
    k                 = std::min(k, n);
    std::partial_sort(ids.begin(), ids.begin() + k, ids.end(), before);
    Candidates out;
    for (int32_t i = 0; i < k; ++i) {
        out.tokens.push_back(ids[i]);
        out.scores.push_back(x[ids[i]]);
    }
    return out;
}

// The same for candidates that are already few, in any order.
inline Candidates sorted(const int32_t * tokens, const float * scores, int32_t k) {
    auto out = top_k(scores, k, k);
    for (auto & t : out.tokens) {
        t = tokens[t];
    }
    return out;
}

// Top-1 minus top-2 of a row.
inline float row_margin(const float * x, int32_t n) {
    const int32_t best  = argmax(x, n);
    float         other = -std::numeric_limits<float>::infinity();
    for (int32_t i = 0; i < n; ++i) {
        if (i != best && x[i] > other) {
            other = x[i];
        }
    }
    return x[best] - other;
}

}  // namespace pld
