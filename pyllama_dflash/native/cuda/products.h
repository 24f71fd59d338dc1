// Matrix products of plain floats for machines without cuBLAS: right on any card, fast enough for what is left to it. Sums are
// kept in float32.
#pragma once

#include <cuda_runtime.h>
#include <library_types.h>

#include <cstdint>

namespace pld::cuda {

// C [m, n] = alpha * A [m, k] B [k, n] + beta * C, element (row, col) of X at row * X.row + col * X.col, counted in elements.
// Batched: a list of addresses in device memory, or a base and a distance.
struct Operand {
    const void *         base;
    const void * const * list;  // if not null, one address a product
    int64_t              distance;
    int64_t              row;
    int64_t              col;
};

struct Product {
    Operand a;
    Operand b;
    Operand c;
    int     m;
    int     n;
    int     k;
    int     count;
    float   alpha;
    float   beta;
};

// in: type of A and B, out: of C; float32, float16 or bfloat16, and C of A's type or float32. Else cudaErrorNotSupported.
cudaError_t multiply(const Product & p, cudaDataType in, cudaDataType out, cudaStream_t stream);

// X A = alpha B for X, which replaces B [m, n]; A [n, n] is upper triangular. Column-major, addresses in device memory.
cudaError_t solve(int m, int n, float alpha, const float * const * a, int lda, float * const * b, int ldb, int count,
                  cudaStream_t stream);

}  // namespace pld::cuda
