// The devices that the backends found, as pld_device() counts them.
#pragma once

#include "ggml-backend.h"

#include <string>
#include <vector>

namespace pld {

bool is_gpu(ggml_backend_dev_t dev);

// What models lie on unless told otherwise: discrete GPUs, or integrated ones where there are no others.
std::vector<ggml_backend_dev_t> default_gpus();

// The index of a device; of the first of its parts for one that llama.cpp made of several. -1 for null.
int32_t device_index(ggml_backend_dev_t dev);

// "CUDA0, CUDA1", or "none".
std::string names_of(const std::vector<ggml_backend_dev_t> & devices);

// The device whose memory a buffer takes. Memory of the host is the CPU's, pinned or mapped or repacked.
ggml_backend_dev_t memory_of(ggml_backend_buffer_type_t buft);

}  // namespace pld
