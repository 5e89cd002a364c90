// The operations of a single launch: checks, the launch, a new output.
#include "operation.h"

using namespace ferrum;

int32_t ferrum_rms_norm(ferrum_device *device, const ferrum_tensor *x, const ferrum_tensor *weight, float epsilon,
                        ferrum_buffer **out_y) {
    return guard([&] {
        Operation op("rms_norm", device, true);
        required(out_y, "out_y");
        const auto &in = op.argument("x", x, {format_f16, format_f32}, 2);
        const auto &w = op.argument("weight", weight, {format_f16, format_f32}, 1);
        check_shape({"rms_norm", "weight"}, w, {in.shape[1]}, "the width of x");
        if (!(epsilon >= 0))
            fail(FERRUM_INVALID_ARGUMENT, "[rms_norm] epsilon: expected a number >= 0, got %g", epsilon);
        Ref<Buffer> y = op.output(in.shape[0], in.shape[1], 2);
        const auto rows = uint32_t(in.shape[0]), width = uint32_t(in.shape[1]);
        op.submit(rms_norm_launch(in.format, w.format, op.bind(in), op.bind(w), op.bind(y.get()), rows, width, width,
                                  epsilon),
                  uint64_t(rows) * width);
        give(std::move(y), out_y);
    });
}

int32_t ferrum_weight_prepare(ferrum_device *device, const ferrum_tensor *weight, uint64_t *out_bytes) {
    return guard([&] {
        Operation op("weight_prepare", device);
        const auto &w = op.argument("weight", weight, {}, 2);
        if (!weight_format(w.format))
            fail(FERRUM_UNSUPPORTED, "[weight_prepare] weight: no kernel reads format %s",
                 format_name(w.format).c_str());
        uint64_t &result = *required(out_bytes, "out_bytes");
        result = op.device()->prepare(w);
    });
}

int32_t ferrum_linear(ferrum_device *device, const ferrum_tensor *x, const ferrum_tensor *weight,
                      const ferrum_tensor *bias, uint32_t output_format, ferrum_buffer **out_y) {
    return guard([&] {
        Operation op("linear", device, true);
        required(out_y, "out_y");
        const auto &in = op.argument("x", x, {format_f16}, 2);
        const auto &w = op.argument("weight", weight, {}, 2);
        if (!weight_format(w.format))
            fail(FERRUM_UNSUPPORTED, "[linear] weight: no kernel reads format %s", format_name(w.format).c_str());
        if (w.shape[1] != in.shape[1])
            fail(FERRUM_INVALID_ARGUMENT, "[linear] weight: expected [*, %llu] for x %s, got %s",
                 (unsigned long long)in.shape[1], shape_text(in.shape, 2).c_str(), shape_text(w.shape, 2).c_str());
        if (output_format != format_f16 && output_format != format_f32)
            fail(FERRUM_INVALID_ARGUMENT, "[linear] output_format: expected F16 or F32, got %s",
                 format_name(output_format).c_str());
        LinearOperands linear{w.format, uint32_t(w.shape[1]), uint32_t(w.shape[0]), op.bind(w), false, false, {}};
        if (bias && bias->buffer) {
            const auto &b = op.argument("bias", bias, {format_f16, format_f32}, 1);
            check_shape({"linear", "bias"}, b, {w.shape[0]}, "the rows of weight");
            linear.has_bias = true;
            linear.bias_f32 = b.format == format_f32;
            linear.bias = op.bind(b);
        }
        const bool f32 = output_format == format_f32;
        Ref<Buffer> y = op.output(in.shape[0], w.shape[0], f32 ? 4 : 2);
        const auto rows = uint32_t(in.shape[0]);
        op.submit(linear_launch(linear, op.bind(in), linear.in_features, op.bind(y.get()), linear.out_features, f32,
                                rows, true, op.device()->traits().exact),
                  uint64_t(rows) * linear.out_features);
        give(std::move(y), out_y);
    });
}

int32_t ferrum_embed(ferrum_device *device, const ferrum_tensor *tokens, const ferrum_tensor *weight,
                     uint32_t output_format, ferrum_buffer **out_y) {
    return guard([&] {
        Operation op("embed", device, true);
        required(out_y, "out_y");
        const auto &t = op.argument("tokens", tokens, {format_i32}, 1);
        const auto &w = op.argument("weight", weight, {}, 2);
        const FormatInfo *info = weight_format(w.format);
        if (!info) fail(FERRUM_UNSUPPORTED, "[embed] weight: no kernel reads format %s", format_name(w.format).c_str());
        if (output_format != format_f16 && output_format != format_f32)
            fail(FERRUM_INVALID_ARGUMENT, "[embed] output_format: expected F16 or F32, got %s",
                 format_name(output_format).c_str());
        op.check_indices("tokens", t, w.shape[0]);
        const auto rows = uint32_t(t.shape[0]), width = uint32_t(w.shape[1]);
        Ref<Buffer> y = op.output(rows, width, output_format == format_f32 ? 4 : 2);
        Launch launch(info->embed, output_format == format_f32 ? FERRUM_CONSTANT_OUTPUT_F32 : 0);
        launch.bind(FERRUM_EMBED_TOKENS, op.bind(t).resource)
            .bind(FERRUM_EMBED_WEIGHT, op.bind(w).resource)
            .bind(FERRUM_EMBED_Y, op.bind(y.get()).resource)
            .with(FERRUM_EMBED_PARAMS,
                  ferrum_embed_params{uint64_t(width / info->block_elements) * info->block_bytes, rows, width})
            .over(rows, 1, 8 * FERRUM_SIMD_WIDTH);
        op.submit(launch, uint64_t(rows) * width);
        give(std::move(y), out_y);
    });
}

int32_t ferrum_swiglu(ferrum_device *device, const ferrum_tensor *gate, const ferrum_tensor *up,
                      ferrum_buffer **out_y) {
    return guard([&] {
        Operation op("swiglu", device, true);
        required(out_y, "out_y");
        const auto &g = op.argument("gate", gate, {format_f16}, 2);
        const auto &u = op.argument("up", up, {format_f16}, 2);
        check_shape({"swiglu", "up"}, u, {g.shape[0], g.shape[1]}, "the shape of gate");
        const uint64_t elements = g.shape[0] * g.shape[1];
        Ref<Buffer> y = op.output(g.shape[0], g.shape[1], 2);
        Launch launch(kernel_swiglu_f16);
        launch.bind(FERRUM_SWIGLU_GATE, op.bind(g).resource)
            .bind(FERRUM_SWIGLU_UP, op.bind(u).resource)
            .bind(FERRUM_SWIGLU_Y, op.bind(y.get()).resource)
            .with(FERRUM_SWIGLU_PARAMS, ferrum_swiglu_params{elements})
            .over(div_up(elements, 256), 1, 256);
        op.submit(launch, elements);
        give(std::move(y), out_y);
    });
}

int32_t ferrum_residual_add(ferrum_device *device, const ferrum_tensor *x, const ferrum_tensor *branch,
                            ferrum_buffer **out_y) {
    return guard([&] {
        Operation op("residual_add", device, true);
        required(out_y, "out_y");
        const auto &in = op.argument("x", x, {format_f16, format_f32}, 2);
        const auto &b = op.argument("branch", branch, {format_f16}, 2);
        check_shape({"residual_add", "branch"}, b, {in.shape[0], in.shape[1]}, "the shape of x");
        const auto rows = uint32_t(in.shape[0]), width = uint32_t(in.shape[1]);
        Ref<Buffer> y = op.output(rows, width, in.format == format_f32 ? 4 : 2);
        op.submit(residual_add_launch(in.format, op.bind(in), op.bind(b), width, op.bind(y.get()), rows, width),
                  uint64_t(rows) * width);
        give(std::move(y), out_y);
    });
}

int32_t ferrum_cross_entropy(ferrum_device *device, const ferrum_tensor *logits, const ferrum_tensor *targets,
                             ferrum_buffer **out_loss) {
    return guard([&] {
        Operation op("cross_entropy", device, true);
        required(out_loss, "out_loss");
        const auto &l = op.argument("logits", logits, {format_f32}, 2);
        const auto &t = op.argument("targets", targets, {format_i32}, 1);
        check_shape({"cross_entropy", "targets"}, t, {l.shape[0]}, "the rows of logits");
        op.check_indices("targets", t, l.shape[1]);
        const auto rows = uint32_t(l.shape[0]), width = uint32_t(l.shape[1]);
        Ref<Buffer> loss = op.output(rows, 1, 4);
        Launch launch(kernel_cross_entropy_f32);
        launch.bind(FERRUM_CROSS_ENTROPY_LOGITS, op.bind(l).resource)
            .bind(FERRUM_CROSS_ENTROPY_TARGETS, op.bind(t).resource)
            .bind(FERRUM_CROSS_ENTROPY_LOSS, op.bind(loss.get()).resource)
            .with(FERRUM_CROSS_ENTROPY_PARAMS, ferrum_rows_params{rows, width, 0, 0})
            .over(rows, 1, 8 * FERRUM_SIMD_WIDTH);
        op.submit(launch, rows);
        give(std::move(loss), out_loss);
    });
}

int32_t ferrum_argmax(ferrum_device *device, const ferrum_tensor *x, ferrum_buffer **out_indices) {
    return guard([&] {
        Operation op("argmax", device, true);
        required(out_indices, "out_indices");
        const auto &in = op.argument("x", x, {format_f32}, 2);
        if (in.shape[1] == 0) fail(FERRUM_INVALID_ARGUMENT, "[argmax] x: expected at least one column, got none");
        const auto rows = uint32_t(in.shape[0]), width = uint32_t(in.shape[1]);
        Ref<Buffer> indices = op.output(rows, 1, 4);
        Launch launch(kernel_argmax_f32);
        launch.bind(FERRUM_TOP_K_X, op.bind(in).resource)
            .bind(FERRUM_TOP_K_INDICES, op.bind(indices.get()).resource)
            .with(FERRUM_TOP_K_PARAMS, ferrum_rows_params{rows, width, 1, 0})
            .over(rows, 1, 8 * FERRUM_SIMD_WIDTH);
        op.submit(launch, rows);
        give(std::move(indices), out_indices);
    });
}

int32_t ferrum_top_k(ferrum_device *device, const ferrum_tensor *x, uint32_t k, ferrum_buffer **out_indices,
                     ferrum_buffer **out_values) {
    return guard([&] {
        Operation op("top_k", device, true);
        required(out_indices, "out_indices");
        required(out_values, "out_values");
        const auto &in = op.argument("x", x, {format_f32}, 2);
        if (k == 0 || k > FERRUM_MAX_TOP_K || k > in.shape[1])
            fail(FERRUM_INVALID_ARGUMENT, "[top_k] k: expected 1…%llu, got %u",
                 (unsigned long long)std::min<uint64_t>(FERRUM_MAX_TOP_K, in.shape[1]), k);
        const auto rows = uint32_t(in.shape[0]), width = uint32_t(in.shape[1]);
        Ref<Buffer> indices = op.output(rows, k, 4), values = op.output(rows, k, 4);
        Launch launch(kernel_top_k_f32);
        launch.bind(FERRUM_TOP_K_X, op.bind(in).resource)
            .bind(FERRUM_TOP_K_INDICES, op.bind(indices.get()).resource)
            .bind(FERRUM_TOP_K_VALUES, op.bind(values.get()).resource)
            .with(FERRUM_TOP_K_PARAMS, ferrum_rows_params{rows, width, k, 0})
            .over(rows, 1, 8 * FERRUM_SIMD_WIDTH);
        op.submit(launch, rows);
        give(std::move(indices), out_indices);
        give(std::move(values), out_values);
    });
}
