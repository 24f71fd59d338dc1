#include "launches.h"

#include <cuda_runtime.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

// The linker's --wrap sends all calls of these functions here; __real_ is what they are in the runtime. A runtime has one of the
// two ways to launch by <<<>>>, and what it lacks stays null.
extern "C" {
cudaError_t __real_cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t);
cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *, void **);
cudaError_t __real_cudaGraphLaunch(cudaGraphExec_t, cudaStream_t);
void __real___cudaRegisterFunction(void **, const char *, char *, const char *, int, uint3 *, uint3 *, dim3 *, dim3 *, int *);
__attribute__((weak)) cudaError_t __real___cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t);
__attribute__((weak)) cudaError_t __real___cudaGetKernel(const void **, const void *);
}

namespace pld::cuda {

namespace {

struct Notes {
    std::mutex                                     mutex;
    std::unordered_map<const void *, const char *> names;  // of stubs and of kernel handles
    std::unordered_map<const void *, int64_t>      counts;
};

// Kernels are registered by the constructors of other files, which may run first; and never freed, since their destructors
// may run last.
Notes & notes() {
    static auto * const made = new Notes;
    return *made;
}

std::atomic<int64_t> launches{0};
std::atomic<bool>    tracing{false};

constexpr char GRAPH[] = "cudaGraphLaunch";

void count(const void * kernel) {
    launches.fetch_add(1, std::memory_order_relaxed);
    if (tracing.load(std::memory_order_relaxed)) {
        const std::lock_guard<std::mutex> lock(notes().mutex);
        ++notes().counts[kernel];
    }
}

void name(const void * kernel, const char * text) {
    const std::lock_guard<std::mutex> lock(notes().mutex);
    notes().names[kernel] = text;
}

}  // namespace

int64_t n_launches() {
    return launches.load(std::memory_order_relaxed);
}

void trace(bool on) {
    const std::lock_guard<std::mutex> lock(notes().mutex);
    notes().counts.clear();
    tracing = on;
}

std::map<std::string, int64_t> traced() {
    const std::lock_guard<std::mutex> lock(notes().mutex);
    std::map<std::string, int64_t>    out;
    for (const auto & [kernel, n] : notes().counts) {
        const auto found = notes().names.find(kernel);
        out[kernel == GRAPH ? GRAPH : found == notes().names.end() ? "unknown" : found->second] += n;
    }
    return out;
}

}  // namespace pld::cuda

extern "C" {

cudaError_t __wrap_cudaLaunchKernel(const void * kernel, dim3 grid, dim3 block, void ** args, size_t shared, cudaStream_t stream) {
    pld::cuda::count(kernel);
    return __real_cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}

cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t * config, const void * kernel, void ** args) {
    pld::cuda::count(kernel);
    return __real_cudaLaunchKernelExC(config, kernel, args);
}

cudaError_t __wrap_cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    pld::cuda::count(pld::cuda::GRAPH);
    return __real_cudaGraphLaunch(graph, stream);
}

void __wrap___cudaRegisterFunction(void ** module, const char * stub, char * device, const char * text, int limit, uint3 * tid,
                                   uint3 * bid, dim3 * block, dim3 * grid, int * warp) {
    pld::cuda::name(stub, text);
    __real___cudaRegisterFunction(module, stub, device, text, limit, tid, bid, block, grid, warp);
}

cudaError_t __wrap___cudaLaunchKernel(const void * kernel, dim3 grid, dim3 block, void ** args, size_t shared, cudaStream_t stream) {
    pld::cuda::count(kernel);
    return __real___cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}

cudaError_t __wrap___cudaGetKernel(const void ** kernel, const void * stub) {
    const auto result = __real___cudaGetKernel(kernel, stub);
    if (result == cudaSuccess) {
        const char * text = nullptr;
        {
            const std::lock_guard<std::mutex> lock(pld::cuda::notes().mutex);
            const auto                        found = pld::cuda::notes().names.find(stub);
            text = found == pld::cuda::notes().names.end() ? nullptr : found->second;
        }
        if (text) {
            pld::cuda::name(*kernel, text);
        }
    }
    return result;
}

}  // extern "C"
