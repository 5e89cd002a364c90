// How much temporary memory a launch takes, and how it is laid out.
#include <algorithm>

#include "../include/ferrum_kv_layout.h"
#include "kernels.h"

namespace ferrum::cpu {

bool is_linear(uint32_t kernel) {
    return kernel >= kernel_linear_f32 && kernel <= kernel_linear_q6_k;
}

LinearTemp linear_temp(const ferrum_launch &launch, unsigned threads) {
    const auto &p = *reinterpret_cast<const ferrum_linear_params *>(launch.params);
    LinearTemp temp{};
    temp.fixed_point =
        launch.kernel != kernel_linear_f32 && launch.kernel != kernel_linear_f16 && launch.kernel != kernel_linear_bf16;
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

AttentionTemp attention_temp(const ferrum_causal_attention_params &p, unsigned threads) {
    AttentionTemp temp{};
    temp.group = p.query_heads / p.key_value_heads;
    temp.block_tokens = std::max(1u, 32 / temp.group);
    temp.blocks = div_up(p.tokens, temp.block_tokens);
    temp.padded_dim = uint32_t(align_up(p.head_dim, 16));
    const uint64_t end = uint64_t(p.position_start) + p.tokens;
    uint64_t first = p.window && p.position_start + 1 > p.window ? p.position_start + 1 - p.window : 0;
    for (uint64_t at = first; at < end; at = ferrum_kv_span_end(p.tokens_per_page, at)) temp.spans++;
    temp.split = temp.spans > 1 && uint64_t(temp.blocks) * p.key_value_heads < 4 * uint64_t(threads);
    temp.workspace_bytes = attention_workspace(temp.group * temp.block_tokens, temp.padded_dim);
    temp.workspace = 0;
    temp.bytes = align_up(temp.workspace_bytes * threads, 64);
    temp.partials = temp.bytes;
    if (temp.split) temp.bytes += uint64_t(p.tokens) * p.query_heads * temp.spans * (temp.padded_dim + 16) * 4;
    return temp;
}

uint64_t temp_bytes(const ferrum_launch &launch, unsigned threads) {
    if (is_linear(launch.kernel)) return linear_temp(launch, threads).bytes;
    if (launch.kernel == kernel_causal_attention_f16)
        return attention_temp(*reinterpret_cast<const ferrum_causal_attention_params *>(launch.params), threads).bytes;
    return 0;
}

}  // namespace ferrum::cpu
