// The functions of cuBLAS that ggml calls. They forward to libcublas if the first call finds one, of whichever version, so that
// the library neither needs it to load nor brings its 600 MB; without it our own products serve. Quantised weights never get here.

#include "products.h"

#include <cublas_v2.h>
#include <cuda_fp16.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>

namespace {

using namespace pld::cuda;

// The parts of the interface that are used have not changed between these.
constexpr int MAJORS[] = {CUBLAS_VER_MAJOR, 13, 12, 11};

void * open_library() {
    if (const char * off = std::getenv("PYLLAMA_DFLASH_CUBLAS"); off && std::string(off) == "off") {
        return nullptr;
    }
    for (const int major : MAJORS) {
        char name[64];
        std::snprintf(name, sizeof(name), "libcublas.so.%d", major);
        if (void * found = dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
            return found;
        }
    }
    return nullptr;
}

// A function of the real library, nullptr without it.
void * real(const char * name) {
    static void * const library = open_library();
    return library ? dlsym(library, name) : nullptr;
}

struct Handle {
    cublasHandle_t blas   = nullptr;  // null: our own products
    cudaStream_t   stream = nullptr;
};

Handle * ours(cublasHandle_t handle) {
    return reinterpret_cast<Handle *>(handle);
}

// Our parameters have the types of the real function's, so they spell out its signature.
template <typename... Args> cublasStatus_t forward(const char * name, cublasHandle_t handle, Args... args) {
    const auto function = reinterpret_cast<cublasStatus_t (*)(cublasHandle_t, Args...)>(real(name));
    return function ? function(ours(handle)->blas, args...) : CUBLAS_STATUS_NOT_SUPPORTED;
}

// Leave for the real function if this handle has the library behind it.
#define FORWARD(handle, name, ...)                            \
    if (ours(handle)->blas) {                                 \
        return forward(TEXT(name), (handle), __VA_ARGS__);    \
    }
#define TEXT(name) TEXT_(name)  // after expansion: cublasCreate is itself a macro for cublasCreate_v2
#define TEXT_(name) #name

cublasStatus_t status(cudaError_t error) {
    return error == cudaSuccess             ? CUBLAS_STATUS_SUCCESS
           : error == cudaErrorNotSupported ? CUBLAS_STATUS_NOT_SUPPORTED
                                            : CUBLAS_STATUS_EXECUTION_FAILED;
}

float scalar(const void * value, cublasComputeType_t type) {
    const bool half = type == CUBLAS_COMPUTE_16F || type == CUBLAS_COMPUTE_16F_PEDANTIC;
    return half ? __half2float(*static_cast<const __half *>(value)) : *static_cast<const float *>(value);
}

// Matrices are column-major: op(X)[row, col] lies at row + col * ld, transposed at row * ld + col.
Operand operand(const void * base, const void * const * list, int64_t distance, int ld, bool transposed) {
    return {base, list, distance, transposed ? ld : 1, transposed ? 1 : ld};
}

cublasStatus_t run_as(cublasHandle_t handle, const Product & p, cudaDataType in, cudaDataType out) {
    return status(multiply(p, in, out, ours(handle)->stream));
}

}  // namespace

extern "C" {

cublasStatus_t cublasCreate(cublasHandle_t * handle) {
    auto * made = new (std::nothrow) Handle;
    if (!made) {
        return CUBLAS_STATUS_ALLOC_FAILED;
    }
    const auto create = reinterpret_cast<cublasStatus_t (*)(cublasHandle_t *)>(real(TEXT(cublasCreate)));
    if (create && create(&made->blas) != CUBLAS_STATUS_SUCCESS) {
        made->blas = nullptr;  // too new for the driver, say
    }
    *handle = reinterpret_cast<cublasHandle_t>(made);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy(cublasHandle_t handle) {
    const auto result = ours(handle)->blas ? forward(TEXT(cublasDestroy), handle) : CUBLAS_STATUS_SUCCESS;
    delete ours(handle);
    return result;
}

cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
    ours(handle)->stream = stream;
    FORWARD(handle, cublasSetStream, stream)
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
    FORWARD(handle, cublasSetMathMode, mode)
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void * workspace, size_t size) {
    FORWARD(handle, cublasSetWorkspace, workspace, size)
    return CUBLAS_STATUS_SUCCESS;
}

const char * cublasGetStatusString(cublasStatus_t code) {
    const auto text = reinterpret_cast<const char * (*)(cublasStatus_t)>(real(TEXT(cublasGetStatusString)));
    return text ? text(code) : code == CUBLAS_STATUS_NOT_SUPPORTED ? "a product that only cuBLAS has" : "a product failed";
}

cublasStatus_t cublasSgemm(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                           const float * alpha, const float * a, int lda, const float * b, int ldb, const float * beta,
                           float * c, int ldc) {
    FORWARD(handle, cublasSgemm, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)
    return run_as(handle, {operand(a, nullptr, 0, lda, ta), operand(b, nullptr, 0, ldb, tb), operand(c, nullptr, 0, ldc, false),
                           m, n, k, 1, *alpha, *beta}, CUDA_R_32F, CUDA_R_32F);
}

cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                                         const float * alpha, const float * a, int lda, long long sa, const float * b, int ldb,
                                         long long sb, const float * beta, float * c, int ldc, long long sc, int count) {
    FORWARD(handle, cublasSgemmStridedBatched, ta, tb, m, n, k, alpha, a, lda, sa, b, ldb, sb, beta, c, ldc, sc, count)
    return run_as(handle, {operand(a, nullptr, sa, lda, ta), operand(b, nullptr, sb, ldb, tb), operand(c, nullptr, sc, ldc, false),
                           m, n, k, count, *alpha, *beta}, CUDA_R_32F, CUDA_R_32F);
}

cublasStatus_t cublasSgemmBatched(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                                  const float * alpha, const float * const a[], int lda, const float * const b[], int ldb,
                                  const float * beta, float * const c[], int ldc, int count) {
    FORWARD(handle, cublasSgemmBatched, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, count)
    const auto list = [](const float * const * x) { return reinterpret_cast<const void * const *>(x); };
    return run_as(handle, {operand(nullptr, list(a), 0, lda, ta), operand(nullptr, list(b), 0, ldb, tb),
                           operand(nullptr, list(c), 0, ldc, false), m, n, k, count, *alpha, *beta}, CUDA_R_32F, CUDA_R_32F);
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                            const void * alpha, const void * a, cudaDataType at, int lda, const void * b, cudaDataType bt,
                            int ldb, const void * beta, void * c, cudaDataType ct, int ldc, cublasComputeType_t type,
                            cublasGemmAlgo_t algo) {
    FORWARD(handle, cublasGemmEx, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, type, algo)
    return run_as(handle, {operand(a, nullptr, 0, lda, ta), operand(b, nullptr, 0, ldb, tb), operand(c, nullptr, 0, ldc, false),
                           m, n, k, 1, scalar(alpha, type), scalar(beta, type)}, at, ct);
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                                          const void * alpha, const void * a, cudaDataType at, int lda, long long sa,
                                          const void * b, cudaDataType bt, int ldb, long long sb, const void * beta, void * c,
                                          cudaDataType ct, int ldc, long long sc, int count, cublasComputeType_t type,
                                          cublasGemmAlgo_t algo) {
    FORWARD(handle, cublasGemmStridedBatchedEx, ta, tb, m, n, k, alpha, a, at, lda, sa, b, bt, ldb, sb, beta, c, ct, ldc, sc, count,
            type, algo)
    return run_as(handle, {operand(a, nullptr, sa, lda, ta), operand(b, nullptr, sb, ldb, tb), operand(c, nullptr, sc, ldc, false),
                           m, n, k, count, scalar(alpha, type), scalar(beta, type)}, at, ct);
}

cublasStatus_t cublasGemmBatchedEx(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                                   const void * alpha, const void * const a[], cudaDataType at, int lda, const void * const b[],
                                   cudaDataType bt, int ldb, const void * beta, void * const c[], cudaDataType ct, int ldc,
                                   int count, cublasComputeType_t type, cublasGemmAlgo_t algo) {
    FORWARD(handle, cublasGemmBatchedEx, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, count, type, algo)
    return run_as(handle, {operand(nullptr, a, 0, lda, ta), operand(nullptr, b, 0, ldb, tb), operand(nullptr, c, 0, ldc, false), m,
                           n, k, count, scalar(alpha, type), scalar(beta, type)}, at, ct);
}

cublasStatus_t cublasStrsmBatched(cublasHandle_t handle, cublasSideMode_t side, cublasFillMode_t fill, cublasOperation_t trans,
                                  cublasDiagType_t diag, int m, int n, const float * alpha, const float * const a[], int lda,
                                  float * const b[], int ldb, int count) {
    FORWARD(handle, cublasStrsmBatched, side, fill, trans, diag, m, n, alpha, a, lda, b, ldb, count)
    if (side != CUBLAS_SIDE_RIGHT || fill != CUBLAS_FILL_MODE_UPPER || trans != CUBLAS_OP_N || diag != CUBLAS_DIAG_NON_UNIT) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    return status(solve(m, n, *alpha, a, lda, b, ldb, count, ours(handle)->stream));
}

}  // extern "C"
