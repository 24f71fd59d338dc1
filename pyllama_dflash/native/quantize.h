// Weights in other types: rows converted, and the header of the file that they go into. No file is written here.
#pragma once

#include "api.h"
#include "header.h"

#include <string>
#include <vector>

namespace pld {

// Throws Error(PLD_E_ARGUMENT) for a number that is no tensor type.
pld_tensor_type tensor_type(int32_t type);

// The start of a file up to the first tensor's data: the metadata of `header`, its tensors in order in the types given, one
// for each. Each tensor's data is to be padded to *alignment bytes.
std::string header_with_types(const Header & header, const std::vector<int32_t> & types, int32_t file_type, int32_t * alignment);

// src [n_rows, n_per_row] of type `from` to dst of type `to`; both lengths are in bytes, and exact. A row's result depends on
// nothing but the row. Throws Error(PLD_E_LOAD) for a weight that F16, which quantised blocks have their scales in, cannot hold.
void convert_rows(int32_t from, int32_t to, int64_t n_per_row, int64_t n_rows, int32_t n_threads, const void * src, int64_t n_src,
                  void * dst, int64_t n_dst);

}  // namespace pld
