#include "launch.h"

#include "program.h"

namespace ferrum {

namespace {

const char *const kKernelNames[] = {
#define FERRUM_KERNEL_NAME(name) #name,
    FERRUM_KERNELS(FERRUM_KERNEL_NAME)
#undef FERRUM_KERNEL_NAME
};

const ferrum_format_info kFormats[] = {
#define FERRUM_FORMAT_ROW(NAME, name, id, elements, bytes) {#NAME, id, elements, bytes},
    FERRUM_FORMATS(FERRUM_FORMAT_ROW)
#undef FERRUM_FORMAT_ROW
};

}  // namespace

const FormatInfo *weight_format(uint32_t format) {
    switch (format) {
#define FERRUM_FORMAT_CASE(NAME, name, id, elements, bytes)          \
    case id: {                                                       \
        static const FormatInfo info = {#NAME,                       \
                                        elements,                    \
                                        bytes,                       \
                                        kernel_linear_vector_##name, \
                                        kernel_linear_rows_##name,   \
                                        kernel_linear_tiles_##name,  \
                                        kernel_embed_##name};        \
        return &info;                                                \
    }
        FERRUM_FORMATS(FERRUM_FORMAT_CASE)
#undef FERRUM_FORMAT_CASE
        default:
            return nullptr;
    }
}

std::string format_name(uint32_t format) {
    if (const FormatInfo *info = weight_format(format)) return info->name;
    return format == format_i32 ? "I32" : "type " + std::to_string(format);
}

uint64_t checked_multiply(uint64_t a, uint64_t b, const char *what) {
    uint64_t product;
    if (__builtin_mul_overflow(a, b, &product))
        fail(FERRUM_INVALID_ARGUMENT, "%s: %llu * %llu does not fit 64 bits", what, (unsigned long long)a,
             (unsigned long long)b);
    return product;
}

Launch rms_norm_launch(uint32_t x_format, uint32_t weight_format, Operand x, Operand weight, Operand y, uint32_t rows,
                       uint32_t width, uint32_t output_stride, float epsilon) {
    Launch launch(x_format == format_f32 ? kernel_rms_norm_f32 : kernel_rms_norm_f16,
                  weight_format == format_f32 ? FERRUM_CONSTANT_NORM_F32 : 0);
    launch.bind(FERRUM_RMS_NORM_X, x.resource, x.offset)
        .bind(FERRUM_RMS_NORM_WEIGHT, weight.resource, weight.offset)
        .bind(FERRUM_RMS_NORM_Y, y.resource, y.offset)
        .with(FERRUM_RMS_NORM_PARAMS, ferrum_rms_norm_params{rows, width, output_stride, epsilon})
        .over(rows, 1, 8 * FERRUM_SIMD_WIDTH);
    return launch;
}

Launch linear_launch(const LinearOperands &linear, Operand x, uint32_t input_stride, Operand y, uint32_t output_stride,
                     bool output_f32, uint32_t rows, bool barrier, bool exact) {
    const FormatInfo *info = weight_format(linear.format);
    const bool tiles = rows > FERRUM_FEW_ROWS && !exact;
    uint32_t constants = (output_f32 ? FERRUM_CONSTANT_OUTPUT_F32 : 0) | (linear.has_bias ? FERRUM_CONSTANT_BIAS : 0) |
                         (linear.has_bias && linear.bias_f32 ? FERRUM_CONSTANT_BIAS_F32 : 0);
    Launch launch(rows == 1 ? info->linear_vector : tiles ? info->linear_tiles : info->linear_rows, constants, barrier);
    launch.bind(FERRUM_LINEAR_X, x.resource, x.offset)
        .bind(FERRUM_LINEAR_WEIGHT, linear.weight.resource, linear.weight.offset);
    if (linear.has_bias) launch.bind(FERRUM_LINEAR_BIAS, linear.bias.resource, linear.bias.offset);
    launch.bind(FERRUM_LINEAR_Y, y.resource, y.offset)
        .with(FERRUM_LINEAR_PARAMS,
              ferrum_linear_params{uint64_t(linear.in_features / info->block_elements) * info->block_bytes, rows,
                                   linear.in_features, linear.out_features, input_stride, output_stride, 0});
    if (tiles)
        launch.over(div_up(linear.out_features, FERRUM_LINEAR_TILE_OUTPUTS), div_up(rows, FERRUM_LINEAR_TILE_ROWS),
                    FERRUM_SIMD_WIDTH, 4);
    else
        launch.over(div_up(linear.out_features, FERRUM_LINEAR_VECTOR_OUTPUTS), div_up(rows, FERRUM_FEW_ROWS),
                    FERRUM_SIMD_WIDTH, 2);
    return launch;
}

Launch residual_add_launch(uint32_t x_format, Operand x, Operand branch, uint32_t branch_stride, Operand y,
                           uint32_t rows, uint32_t width) {
    Launch launch(x_format == format_f32 ? kernel_residual_add_f32 : kernel_residual_add_f16);
    launch.bind(FERRUM_RESIDUAL_ADD_X, x.resource, x.offset)
        .bind(FERRUM_RESIDUAL_ADD_BRANCH, branch.resource, branch.offset)
        .bind(FERRUM_RESIDUAL_ADD_Y, y.resource, y.offset)
        .with(FERRUM_RESIDUAL_ADD_PARAMS, ferrum_residual_add_params{rows, width, branch_stride, 0})
        .over(div_up(width, 256), rows, 256);
    return launch;
}

void add_page_copies(Submission &work, const KVLayout &layout, const std::vector<PageCopy> &copies, Device *device) {
    if (copies.empty()) return;
    Ref<Buffer> table = device->allocate(copies.size() * 16);
    auto *addresses = static_cast<uint64_t *>(table->host());
    uint32_t resource = work.add(table.get());
    for (size_t i = 0; i < copies.size(); i++) {
        addresses[2 * i] = copies[i].source;
        addresses[2 * i + 1] = copies[i].target;
        Launch launch(kernel_kv_copy_f16, 0, i == 0);
        launch.bind(FERRUM_KV_COPY_PAGES, resource, i * 16)
            .with(FERRUM_KV_COPY_PARAMS, ferrum_kv_params{0, copies[i].tokens, layout.key_value_heads, layout.head_dim,
                                                          layout.tokens_per_page, 0})
            .over(layout.key_value_heads, 1, 8 * FERRUM_SIMD_WIDTH);
        work.launches.push_back(launch);
    }
    work.keep.push_back(table);
}

uint64_t check_storage(Expected what, const Device *device, const ferrum_tensor &tensor) {
    if (!tensor.buffer) fail(FERRUM_INVALID_ARGUMENT, "[%s] %s: expected a tensor, got none", what.op, what.name);
    auto *buffer = reinterpret_cast<Buffer *>(tensor.buffer);
    check_known(what, *buffer);
    if (buffer->device() != device)
        fail(FERRUM_INVALID_ARGUMENT, "[%s] %s: lives on another device; copy it first", what.op, what.name);
    if (tensor.rank > FERRUM_MAX_RANK)
        fail(FERRUM_INVALID_ARGUMENT, "[%s] %s: expected at most %d dimensions, got %u", what.op, what.name,
             FERRUM_MAX_RANK, tensor.rank);
    const FormatInfo *info = weight_format(tensor.format);
    if (!info && tensor.format != format_i32)
        fail(FERRUM_UNSUPPORTED, "[%s] %s: no kernel reads format %s", what.op, what.name,
             format_name(tensor.format).c_str());
    const uint32_t block_elements = info ? info->block_elements : 1, block_bytes = info ? info->block_bytes : 4;
    uint64_t elements = 1;
    for (uint32_t i = 0; i < tensor.rank; i++) elements = checked_multiply(elements, tensor.shape[i], what.name);
    const uint64_t row = tensor.rank ? tensor.shape[tensor.rank - 1] : 1;
    if (row % block_elements)
        fail(FERRUM_INVALID_ARGUMENT, "[%s] %s: rows of format %s come in blocks of %u elements, got rows of %llu",
             what.op, what.name, info->name, block_elements, (unsigned long long)row);
    uint64_t bytes = checked_multiply(elements / block_elements, block_bytes, what.name);
    if (tensor.offset > buffer->bytes() || bytes > buffer->bytes() - tensor.offset)
        fail(FERRUM_INVALID_ARGUMENT, "[%s] %s: %s of format %s needs %llu bytes at offset %llu, the buffer has %llu",
             what.op, what.name, shape_text(tensor.shape, tensor.rank).c_str(), format_name(tensor.format).c_str(),
             (unsigned long long)bytes, (unsigned long long)tensor.offset, (unsigned long long)buffer->bytes());
    if (block_elements == 1 && tensor.offset % block_bytes)
        fail(FERRUM_INVALID_ARGUMENT, "[%s] %s: offset %llu is not a multiple of the element size %u", what.op,
             what.name, (unsigned long long)tensor.offset, block_bytes);
    if (block_elements == 1 && reinterpret_cast<uintptr_t>(buffer->host()) % block_bytes)
        fail(FERRUM_INVALID_ARGUMENT, "[%s] %s: its buffer's memory is not aligned to the element size %u", what.op,
             what.name, block_bytes);
    return bytes;
}

void check_format(Expected what, const ferrum_tensor &tensor, std::initializer_list<uint32_t> allowed) {
    std::string names;
    for (uint32_t format : allowed) {
        if (tensor.format == format) return;
        names += (names.empty() ? "" : " or ") + format_name(format);
    }
    fail(FERRUM_INVALID_ARGUMENT, "[%s] %s: expected %s, got %s", what.op, what.name, names.c_str(),
         format_name(tensor.format).c_str());
}

void check_shape(Expected what, const ferrum_tensor &tensor, std::initializer_list<uint64_t> shape,
                 const std::string &why) {
    bool same = tensor.rank == shape.size();
    for (size_t i = 0; same && i < shape.size(); i++) same = tensor.shape[i] == shape.begin()[i];
    if (same) return;
    std::string reason = why.empty() ? "" : " for " + why;
    fail(FERRUM_INVALID_ARGUMENT, "[%s] %s: expected %s%s, got %s", what.op, what.name,
         shape_text(shape.begin(), uint32_t(shape.size())).c_str(), reason.c_str(),
         shape_text(tensor.shape, std::min<uint32_t>(tensor.rank, FERRUM_MAX_RANK)).c_str());
}

void check_rank(Expected what, const ferrum_tensor &tensor, uint32_t rank) {
    if (tensor.rank != rank)
        fail(FERRUM_INVALID_ARGUMENT, "[%s] %s: expected %u dimensions, got %s", what.op, what.name, rank,
             shape_text(tensor.shape, std::min<uint32_t>(tensor.rank, FERRUM_MAX_RANK)).c_str());
}

uint32_t checked_u32(Expected what, uint64_t value) {
    if (value > UINT32_MAX)
        fail(FERRUM_INVALID_ARGUMENT, "[%s] %s: expected at most %u, got %llu", what.op, what.name, UINT32_MAX,
             (unsigned long long)value);
    return uint32_t(value);
}

}  // namespace ferrum

const char *ferrum_kernel_name(uint32_t kernel) {
    return kernel < ferrum::kernel_count ? ferrum::kKernelNames[kernel] : nullptr;
}

int32_t ferrum_format_at(uint32_t index, ferrum_format_info *out_info) {
    return ferrum::guard([&] {
        if (index >= std::size(ferrum::kFormats))
            ferrum::fail(FERRUM_INVALID_ARGUMENT, "index: expected less than %zu, got %u", std::size(ferrum::kFormats),
                         index);
        *ferrum::required(out_info, "out_info") = ferrum::kFormats[index];
    });
}
