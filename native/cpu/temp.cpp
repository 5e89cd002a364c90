// How much temporary memory a launch takes, and how it is laid out.
#include <algorithm>

#include "kernels.h"

namespace ferrum::cpu {

bool is_linear(uint32_t kernel) {
    return kernel >= kernel_linear_vector_f32 && kernel <= kernel_linear_tiles_bf16;
}

LinearTemp linear_temp(const ferrum_launch &launch, unsigned threads) {
    const auto &p = *reinterpret_cast<const ferrum_linear_params *>(launch.params);
    LinearTemp temp{};
    const uint32_t formats = kernel_linear_rows_f32 - kernel_linear_vector_f32;
    const uint32_t format = (launch.kernel - kernel_linear_vector_f32) % formats;  // in the order of FERRUM_FORMATS
    temp.fixed_point = format > 1 && format != formats - 1;                        // all but float32, float16, bfloat16
    const uint64_t rows = p.rows, width = p.in_features;
    auto take = [&](uint64_t bytes) {
        uint64_t at = temp.bytes;
        temp.bytes = align_up(at + bytes, 64);
        return at;
    };
    if (temp.fixed_point) {
        temp.values = take(rows * width * 2);
        temp.scales = take(rows * (width / 32) * 4);
        temp.sums = take(rows * (width / 32) * 4);
        // 16 outputs of at most kPanelWidth inputs as 16-bit pairs, their scales and minima, and the running sums.
        temp.panel_bytes =
            align_up(kPanelWidth * 32 + kPanelWidth / 16 * 64 + kPanelWidth / 32 * 64 + kPanelRows * 64, 64);
        temp.panels = take(temp.panel_bytes * threads);
    } else {
        temp.values = take(rows * align_up(width, 16) * 4);
    }
    return temp;
}

AttentionTemp attention_temp(const ferrum_causal_attention_params &p) {
    AttentionTemp temp{};
    temp.group = p.query_heads / p.key_value_heads;
    temp.block_tokens = std::max(1u, 32 / temp.group);
    temp.blocks = div_up(p.tokens, temp.block_tokens);
    temp.padded_dim = uint32_t(align_up(p.head_dim, 16));
    temp.score_stride = uint32_t(align_up(p.span_tokens, 16)) + 16;
    const uint64_t rows = uint64_t(temp.group) * temp.block_tokens;
    // Queries, running and span sums; scores; four scalars a row; a tile of keys and one of values.
    temp.thread_bytes =
        align_up(4 * (rows * (3 * temp.padded_dim + temp.score_stride + 4) + 2 * 16 * temp.padded_dim), 64);
    return temp;
}

uint64_t temp_bytes(const ferrum_launch &launch, unsigned threads) {
    if (is_linear(launch.kernel)) return linear_temp(launch, threads).bytes;
    switch (launch.kernel) {
        case kernel_causal_attention_decode_f16:
        case kernel_causal_attention_split_f16:
        case kernel_causal_attention_tiles_f16:
            return attention_temp(*reinterpret_cast<const ferrum_causal_attention_params *>(launch.params))
                       .thread_bytes *
                   threads;
        default:
            return 0;
    }
}

}  // namespace ferrum::cpu
