// Launches: how a planner writes them, and the tables of kernels and formats that go with them.
#pragma once

#include <cstring>

#include "arena.h"
#include "kernel_ids.h"

namespace ferrum {

struct FormatInfo {
    const char *name;
    uint32_t block_elements;
    uint32_t block_bytes;
    Kernel linear_vector;
    Kernel linear_rows;
    Kernel linear_tiles;
    Kernel embed;
};
// NULL for a format that is not a weight's.
const FormatInfo *weight_format(uint32_t format);
// "Q4_1", "I32", "type 99"
std::string format_name(uint32_t format);

// a * b, or a failure that names `what`.
uint64_t checked_multiply(uint64_t a, uint64_t b, const char *what);

struct Launch : ferrum_launch {
    explicit Launch(Kernel kernel, uint32_t constants = 0, bool barrier = true) : ferrum_launch() {
        this->kernel = kernel;
        this->constants = constants;
        this->barrier = barrier;
    }
    Launch &bind(uint32_t slot, uint32_t resource, uint64_t offset = 0) {
        bindings[binding_count++] = {slot, resource, offset};
        return *this;
    }
    template <class Params>
    Launch &with(uint32_t slot, const Params &value) {
        static_assert(sizeof(Params) <= FERRUM_MAX_PARAMS && sizeof(Params) % 8 == 0);
        memcpy(params, &value, sizeof(value));
        params_slot = slot;
        params_bytes = sizeof(value);
        return *this;
    }
    Launch &over(uint32_t x, uint32_t y, uint32_t threads_x, uint32_t threads_y = 1, uint32_t z = 1) {
        grid[0] = x, grid[1] = y, grid[2] = z;
        threads[0] = threads_x, threads[1] = threads_y, threads[2] = 1;
        return *this;
    }
};

// ---- Launches that more than one operation makes. Operands are (resource, offset) pairs.

struct Operand {
    uint32_t resource;
    uint64_t offset;
};

Launch rms_norm_launch(uint32_t x_format, uint32_t weight_format, Operand x, Operand weight, Operand y, uint32_t rows,
                       uint32_t width, uint32_t output_stride, float epsilon);

struct LinearOperands {
    uint32_t format;
    uint32_t in_features;
    uint32_t out_features;
    Operand weight;
    bool has_bias;
    bool bias_f32;
    Operand bias;
};
// One of the three shapes by the number of rows; `exact` keeps every row's order of sums.
Launch linear_launch(const LinearOperands &linear, Operand x, uint32_t input_stride, Operand y, uint32_t output_stride,
                     bool output_f32, uint32_t rows, bool barrier, bool exact);

Launch residual_add_launch(uint32_t x_format, Operand x, Operand branch, uint32_t branch_stride, Operand y,
                           uint32_t rows, uint32_t width);

// Copies of shared tail pages; they come before everything else of a call.
void add_page_copies(Submission &work, const KVLayout &layout, const std::vector<PageCopy> &copies, Device *device);

// ---- Checks of tensor arguments. `op` and `name` make the message: "[op] name: expected …, got …".

struct Expected {
    const char *op;
    const char *name;
};
// Buffer of this device, offset and size inside the buffer; returns the tensor's bytes.
uint64_t check_storage(Expected what, const Device *device, const ferrum_tensor &tensor);
void check_format(Expected what, const ferrum_tensor &tensor, std::initializer_list<uint32_t> allowed);
// `why` explains the expected shape, or is empty.
void check_shape(Expected what, const ferrum_tensor &tensor, std::initializer_list<uint64_t> shape,
                 const std::string &why = "");
void check_rank(Expected what, const ferrum_tensor &tensor, uint32_t rank);
uint32_t checked_u32(Expected what, uint64_t value);

}  // namespace ferrum
