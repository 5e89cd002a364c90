// The rest of a DFlash 2 draft layer: attention over a packed block, convolution, heads, and the candidate selector.
#include <cmath>

#include "operation.h"

using namespace ferrum;

int32_t ferrum_dflash2_attention(ferrum_device *device, const ferrum_tensor *queries, const ferrum_tensor *keys,
                                 const ferrum_tensor *values, const ferrum_tensor *mask, ferrum_buffer **out_context) {
    return guard([&] {
        constexpr const char *name = "dflash2_attention";
        Operation op(name, device);
        const auto &q = op.argument("q", queries, {format_bf16}, 4);
        const auto &k = op.argument("keys", keys, {format_bf16}, 4);
        const auto &v = op.argument("values", values, {format_bf16}, 4);
        const auto &m = op.argument("mask", mask, {format_bf16}, 4);
        const uint64_t lanes = q.shape[0], heads = q.shape[1], rows = q.shape[2], dim = q.shape[3];
        const uint64_t kv_heads = k.shape[1], columns = k.shape[2];
        if (lanes == 0 || lanes > FERRUM_DFLASH2_MAX_LANES || rows == 0 || rows > FERRUM_DFLASH2_MAX_ROWS)
            fail(FERRUM_INVALID_ARGUMENT, "[%s] q: expected [1…%d lanes, heads, 1…%d rows, head_dim], got %s", name,
                 FERRUM_DFLASH2_MAX_LANES, FERRUM_DFLASH2_MAX_ROWS, shape_text(q.shape, 4).c_str());
        if (dim != 64 && dim != 128 && dim != 256)
            fail(FERRUM_INVALID_ARGUMENT, "[%s] q: expected head_dim 64, 128 or 256, got %llu", name,
                 (unsigned long long)dim);
        if (kv_heads == 0 || heads == 0 || heads % kv_heads)
            fail(FERRUM_INVALID_ARGUMENT, "[%s] q: expected heads in multiples of the %llu of keys, got %llu", name,
                 (unsigned long long)kv_heads, (unsigned long long)heads);
        if (columns < rows)
            fail(FERRUM_INVALID_ARGUMENT, "[%s] keys: expected at least the %llu columns of the block, got %llu", name,
                 (unsigned long long)rows, (unsigned long long)columns);
        check_shape({name, "keys"}, k, {lanes, kv_heads, columns, dim}, "lanes and head_dim of q");
        check_shape({name, "values"}, v, {lanes, kv_heads, columns, dim}, "the shape of keys");
        check_shape({name, "mask"}, m, {lanes, heads, rows, columns}, "lanes, heads and rows of q, columns of keys");
        Ref<Buffer> y = op.output(lanes * rows, checked_multiply(heads, dim, name), 2);
        const float scale = 1.0f / std::sqrt(float(dim));
        Launch launch(kernel_dflash2_attention_bf16);
        launch.bind(FERRUM_DFLASH2_ATTENTION_QUERY, op.bind(q).resource)
            .bind(FERRUM_DFLASH2_ATTENTION_KEY, op.bind(k).resource)
            .bind(FERRUM_DFLASH2_ATTENTION_VALUE, op.bind(v).resource)
            .bind(FERRUM_DFLASH2_ATTENTION_MASK, op.bind(m).resource)
            .bind(FERRUM_DFLASH2_ATTENTION_Y, op.bind(y.get()).resource)
            .with(FERRUM_DFLASH2_ATTENTION_PARAMS,
                  ferrum_dflash2_attention_params{uint32_t(lanes), uint32_t(heads), uint32_t(kv_heads), uint32_t(dim),
                                                  uint32_t(rows), checked_u32({name, "keys"}, columns), scale, 0})
            .over(uint32_t(rows), checked_u32({name, "q"}, lanes * heads), 8 * FERRUM_SIMD_WIDTH);
        required(out_context, "out_context");
        op.submit(launch, 1);
        give(std::move(y), out_context);
    });
}

int32_t ferrum_dflash2_conv(ferrum_device *device, const ferrum_tensor *x, const ferrum_tensor *base,
                            const ferrum_tensor *dynamic, uint32_t side, uint32_t rows, ferrum_buffer **out_y) {
    return guard([&] {
        constexpr const char *name = "dflash2_conv";
        Operation op(name, device);
        const auto &in = op.argument("x", x, {format_f16}, 2);
        const auto &b = op.argument("base_kernel", base, {format_f32}, 3);
        const auto &d = op.argument("dynamic", dynamic, {format_f32}, 2);
        const uint64_t width = in.shape[1], taps = b.shape[1], groups = taps ? d.shape[1] / (2 * taps) : 0;
        if (side > 1)
            fail(FERRUM_INVALID_ARGUMENT, "[%s] side: expected 0 (prepare) or 1 (finish), got %u", name, side);
        if (rows == 0 || in.shape[0] % rows)
            fail(FERRUM_INVALID_ARGUMENT, "[%s] rows: expected a divisor of the %llu rows of x, got %u", name,
                 (unsigned long long)in.shape[0], rows);
        if (taps == 0 || taps > FERRUM_DFLASH2_MAX_TAPS)
            fail(FERRUM_INVALID_ARGUMENT, "[%s] base_kernel: expected [2, 1…%d taps, width], got %s", name,
                 FERRUM_DFLASH2_MAX_TAPS, shape_text(b.shape, 3).c_str());
        check_shape({name, "base_kernel"}, b, {2, taps, width}, "sides, taps, the width of x");
        if (groups == 0 || width == 0 || width % groups || d.shape[1] != 2 * taps * groups)
            fail(FERRUM_INVALID_ARGUMENT,
                 "[%s] dynamic: expected 2 * %llu taps * groups columns, groups a divisor of the width of %llu, got "
                 "%llu",
                 name, (unsigned long long)taps, (unsigned long long)width, (unsigned long long)d.shape[1]);
        check_shape({name, "dynamic"}, d, {in.shape[0], d.shape[1]}, "the rows of x");
        Ref<Buffer> y = op.output(in.shape[0], width, 2);
        const auto count = uint32_t(in.shape[0]);
        Launch launch(kernel_dflash2_conv_f16);
        launch.bind(FERRUM_DFLASH2_CONV_X, op.bind(in).resource)
            .bind(FERRUM_DFLASH2_CONV_BASE, op.bind(b).resource)
            .bind(FERRUM_DFLASH2_CONV_DYNAMIC, op.bind(d).resource)
            .bind(FERRUM_DFLASH2_CONV_Y, op.bind(y.get()).resource)
            .with(FERRUM_DFLASH2_CONV_PARAMS,
                  ferrum_dflash2_conv_params{count, rows, uint32_t(width), uint32_t(taps), uint32_t(groups), side})
            .over(div_up(width, 256), count, 256);
        required(out_y, "out_y");
        op.submit(launch, count);
        give(std::move(y), out_y);
    });
}

int32_t ferrum_dflash2_heads(ferrum_device *device, const ferrum_tensor *x, const ferrum_tensor *norm,
                             const ferrum_tensor *angles, float epsilon, ferrum_buffer **out_y) {
    return guard([&] {
        constexpr const char *name = "dflash2_heads";
        Operation op(name, device);
        const auto &in = op.argument("x", x, {format_f32}, 2);
        const auto &a = op.argument("angles", angles, {format_f32}, 3);
        if (!(epsilon >= 0))
            fail(FERRUM_INVALID_ARGUMENT, "[%s] epsilon: expected a number >= 0, got %g", name, epsilon);
        const uint64_t half = a.shape[1];
        if (half == 0 || half > FERRUM_MAX_HEAD_DIM / 2 || in.shape[1] == 0 || in.shape[1] % (2 * half))
            fail(FERRUM_INVALID_ARGUMENT,
                 "[%s] angles: expected [tokens, head_dim / 2, 2] for x %s, rows of whole heads of at most %d, got %s",
                 name, shape_text(in.shape, 2).c_str(), FERRUM_MAX_HEAD_DIM, shape_text(a.shape, 3).c_str());
        check_shape({name, "angles"}, a, {in.shape[0], half, 2}, "the rows of x");
        uint32_t constants = 0;
        const ferrum_tensor *weight =
            norm && norm->buffer ? &op.argument("norm", norm, {format_f16, format_f32}, 1) : nullptr;
        if (weight) {
            check_shape({name, "norm"}, *weight, {2 * half}, "head_dim");
            constants =
                FERRUM_CONSTANT_QUERY_NORM | (weight->format == format_f32 ? FERRUM_CONSTANT_QUERY_NORM_F32 : 0);
        }
        Ref<Buffer> y = op.output(in.shape[0], in.shape[1], 4);
        const auto rows = uint32_t(in.shape[0]), heads = uint32_t(in.shape[1] / (2 * half));
        Launch launch(kernel_dflash2_heads_f32, constants);
        launch.bind(FERRUM_DFLASH2_HEADS_X, op.bind(in).resource);
        if (weight) launch.bind(FERRUM_DFLASH2_HEADS_NORM, op.bind(*weight).resource);
        launch.bind(FERRUM_DFLASH2_HEADS_ANGLES, op.bind(a).resource)
            .bind(FERRUM_DFLASH2_HEADS_Y, op.bind(y.get()).resource)
            .with(FERRUM_DFLASH2_HEADS_PARAMS, ferrum_dflash2_heads_params{rows, heads, uint32_t(2 * half), epsilon})
            .over(heads, rows, FERRUM_SIMD_WIDTH);
        required(out_y, "out_y");
        op.submit(launch, rows);
        give(std::move(y), out_y);
    });
}

int32_t ferrum_dflash2_select(ferrum_device *device, const ferrum_tensor *ids, const ferrum_tensor *scores,
                              const ferrum_tensor *hidden, const ferrum_tensor *predecessors,
                              const ferrum_tensor *successors, const ferrum_tensor *uniforms, float temperature,
                              ferrum_buffer **out_tokens, ferrum_buffer **out_probabilities) {
    return guard([&] {
        constexpr const char *name = "dflash2_select";
        Operation op(name, device);
        const auto &i = op.argument("ids", ids, {format_i32}, 3);
        const auto &s = op.argument("scores", scores, {format_f32}, 3);
        const auto &h = op.argument("hidden", hidden, {format_f32}, 3);
        const auto &p = op.argument("predecessors", predecessors, {format_f32}, 3);
        const auto &n = op.argument("successors", successors, {format_f32}, 3);
        const uint64_t lanes = i.shape[0], steps = i.shape[1], k = i.shape[2], rank = h.shape[2];
        if (lanes == 0 || lanes > FERRUM_DFLASH2_MAX_LANES || steps == 0 || steps > FERRUM_DFLASH2_MAX_ROWS || k == 0 ||
            k > FERRUM_DFLASH2_MAX_CANDIDATES)
            fail(FERRUM_INVALID_ARGUMENT, "[%s] ids: expected [1…%d lanes, 1…%d steps, 1…%d candidates], got %s", name,
                 FERRUM_DFLASH2_MAX_LANES, FERRUM_DFLASH2_MAX_ROWS, FERRUM_DFLASH2_MAX_CANDIDATES,
                 shape_text(i.shape, 3).c_str());
        if (!(temperature >= 0) || std::isinf(temperature))
            fail(FERRUM_INVALID_ARGUMENT, "[%s] temperature: expected a number >= 0, got %g", name, temperature);
        check_shape({name, "scores"}, s, {lanes, steps, k}, "the shape of ids");
        check_shape({name, "hidden"}, h, {lanes, steps, checked_u32({name, "hidden"}, rank)}, "lanes and steps of ids");
        check_shape({name, "predecessors"}, p, {lanes, 1 + (steps - 1) * k, rank},
                    "the anchor and all but the last step");
        check_shape({name, "successors"}, n, {lanes, steps * k, rank}, "every candidate");
        Ref<Buffer> tokens = op.output(lanes * steps, 1, 4), q = op.output(lanes * steps, k, 4);
        Launch launch(kernel_dflash2_select_f32);
        launch.bind(FERRUM_DFLASH2_SELECT_IDS, op.bind(i).resource)
            .bind(FERRUM_DFLASH2_SELECT_VALUES, op.bind(s).resource)
            .bind(FERRUM_DFLASH2_SELECT_HIDDEN, op.bind(h).resource)
            .bind(FERRUM_DFLASH2_SELECT_PREDECESSORS, op.bind(p).resource)
            .bind(FERRUM_DFLASH2_SELECT_SUCCESSORS, op.bind(n).resource);
        const ferrum_tensor *draws = &s;  // a slot is never empty
        if (temperature > 0) {
            draws = &op.argument("uniforms", uniforms, {format_f32}, 2);
            check_shape({name, "uniforms"}, *draws, {lanes, steps}, "lanes and steps of ids");
        }
        launch.bind(FERRUM_DFLASH2_SELECT_UNIFORMS, op.bind(*draws).resource)
            .bind(FERRUM_DFLASH2_SELECT_TOKENS, op.bind(tokens.get()).resource)
            .bind(FERRUM_DFLASH2_SELECT_PROBABILITIES, op.bind(q.get()).resource)
            .with(FERRUM_DFLASH2_SELECT_PARAMS,
                  ferrum_dflash2_select_params{uint32_t(lanes), uint32_t(steps), uint32_t(k), uint32_t(rank),
                                               temperature, 0})
            .over(uint32_t(lanes), 1, 8 * FERRUM_SIMD_WIDTH);
        required(out_tokens, "out_tokens");
        required(out_probabilities, "out_probabilities");
        op.submit(launch, 1);
        give(std::move(tokens), out_tokens);
        give(std::move(q), out_probabilities);
    });
}
