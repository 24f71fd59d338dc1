#include "products.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace pld::cuda {

namespace {

constexpr int TILE = 64, DEPTH = 16, THREADS = 256, EACH = 4;

inline __device__ float to_float(float x) { return x; }
inline __device__ float to_float(__half x) { return __half2float(x); }
inline __device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
inline __device__ void  store(float * at, float x) { *at = x; }
inline __device__ void  store(__half * at, float x) { *at = __float2half(x); }
inline __device__ void  store(__nv_bfloat16 * at, float x) { *at = __float2bfloat16(x); }

template <typename T> inline __device__ T * address(const Operand & x, int index) {
    const void * base = x.list ? x.list[index] : x.base;
    return static_cast<T *>(const_cast<void *>(base)) + (x.list ? 0 : index * x.distance);
}

// Fill a tile whose first index is a row of A, or a column of B; threads walk along what lies together in memory.
template <typename T>
inline __device__ void load(float (*tile)[TILE + 1], const T * x, int64_t outer, int64_t inner, int first, int n, int depth, int k) {
    for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
        const int at = inner == 1 ? i / DEPTH : i % TILE;
        const int p  = inner == 1 ? i % DEPTH : i / TILE;
        const bool in = first + at < n && depth + p < k;
        tile[p][at]   = in ? to_float(x[(first + at) * outer + (depth + p) * inner]) : 0.0f;
    }
}

template <typename T, typename TC> __global__ void __launch_bounds__(THREADS) multiply_tiles(const Product p) {
    __shared__ float as[DEPTH][TILE + 1];
    __shared__ float bs[DEPTH][TILE + 1];
    const int row = blockIdx.x * TILE, col = blockIdx.y * TILE;
    const int ty = threadIdx.x / (TILE / EACH), tx = threadIdx.x % (TILE / EACH);

    for (int index = blockIdx.z; index < p.count; index += gridDim.z) {
        const T * a = address<const T>(p.a, index);
        const T * b = address<const T>(p.b, index);
        TC *      c = address<TC>(p.c, index);
        float     sums[EACH][EACH] = {};
        for (int depth = 0; depth < p.k; depth += DEPTH) {
            load(as, a, p.a.row, p.a.col, row, p.m, depth, p.k);
            load(bs, b, p.b.col, p.b.row, col, p.n, depth, p.k);
            __syncthreads();
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
#pragma unroll
                    for (int j = 0; j < EACH; ++j) {
                        sums[i][j] += as[d][tx + i * (TILE / EACH)] * bs[d][ty + j * (TILE / EACH)];
                    }
                }
            }
            __syncthreads();
        }
        for (int i = 0; i < EACH; ++i) {
            for (int j = 0; j < EACH; ++j) {
                const int r = row + tx + i * (TILE / EACH), s = col + ty + j * (TILE / EACH);
                if (r < p.m && s < p.n) {
                    TC *        at  = c + r * p.c.row + s * p.c.col;
                    const float was = p.beta == 0.0f ? 0.0f : p.beta * to_float(*at);  // C may hold NaN that beta = 0 drops
                    store(at, p.alpha * sums[i][j] + was);
                }
            }
        }
    }
}

// A thread a row: rows do not depend on each other.
__global__ void solve_right_upper(int m, int n, float alpha, const float * const * as, int lda, float * const * bs, int ldb) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= m) {
        return;
    }
    const float * a = as[blockIdx.y];
    float *       b = bs[blockIdx.y] + row;
    for (int j = 0; j < n; ++j) {
        float sum = alpha * b[int64_t(j) * ldb];
        for (int p = 0; p < j; ++p) {
            sum -= b[int64_t(p) * ldb] * a[p + int64_t(j) * lda];
        }
        b[int64_t(j) * ldb] = sum / a[j + int64_t(j) * lda];
    }
}

template <typename T, typename TC> cudaError_t launch(const Product & p, cudaStream_t stream) {
    if (p.m <= 0 || p.n <= 0 || p.count <= 0) {
        return cudaSuccess;
    }
    constexpr int MOST = 65535;  // of a grid's y and z
    const dim3    grid((p.m + TILE - 1) / TILE, (p.n + TILE - 1) / TILE, p.count < MOST ? p.count : MOST);
    multiply_tiles<T, TC><<<grid, THREADS, 0, stream>>>(p);
    return cudaGetLastError();
}

}  // namespace

cudaError_t multiply(const Product & p, cudaDataType in, cudaDataType out, cudaStream_t stream) {
    if (in == CUDA_R_32F && out == CUDA_R_32F) {
        return launch<float, float>(p, stream);
    }
    if (in == CUDA_R_16F && out == CUDA_R_16F) {
        return launch<__half, __half>(p, stream);
    }
    if (in == CUDA_R_16F && out == CUDA_R_32F) {
        return launch<__half, float>(p, stream);
    }
    if (in == CUDA_R_16BF && out == CUDA_R_16BF) {
        return launch<__nv_bfloat16, __nv_bfloat16>(p, stream);
    }
    if (in == CUDA_R_16BF && out == CUDA_R_32F) {
        return launch<__nv_bfloat16, float>(p, stream);
    }
    return cudaErrorNotSupported;
}

cudaError_t solve(int m, int n, float alpha, const float * const * a, int lda, float * const * b, int ldb, int count,
                  cudaStream_t stream) {
    if (m <= 0 || n <= 0 || count <= 0) {
        return cudaSuccess;
    }
    constexpr int ROWS = 64;
    solve_right_upper<<<dim3((m + ROWS - 1) / ROWS, count), ROWS, 0, stream>>>(m, n, alpha, a, lda, b, ldb);
    return cudaGetLastError();
}

}  // namespace pld::cuda
