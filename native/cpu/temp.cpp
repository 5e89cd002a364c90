// How much temporary memory a launch takes, and how it is laid out.
#include <algorithm>

#include <iterator>

#include "kernels.h"
#include "packed.h"

namespace ferrum::cpu {

bool is_linear(uint32_t kernel) {
    return kernel >= kernel_linear_vector_f32 && kernel <= kernel_linear_tiles_bf16;
}

namespace {

struct FormatLayout {
    uint32_t format;
    bool dense;
    uint64_t (*group_bytes)(uint64_t width);
};

// In the order of FERRUM_FORMATS, as the linear kernels are.
constexpr FormatLayout kLayouts[] = {
#define FERRUM_LAYOUT(NAME, name, id, elements, bytes) \
    {id, elements == 1, portable::packed_group_bytes<portable::name>},
    FERRUM_FORMATS(FERRUM_LAYOUT)
#undef FERRUM_LAYOUT
};

const FormatLayout &layout_of(uint32_t kernel) {
    return kLayouts[(kernel - kernel_linear_vector_f32) % std::size(kLayouts)];
}

}  // namespace

uint32_t linear_format(uint32_t kernel) {
    return layout_of(kernel).format;
}

uint64_t packed_bytes(uint32_t format, uint64_t rows, uint64_t width) {
    for (const FormatLayout &layout : kLayouts)
        if (layout.format == format) return div_up(rows, kGroupOutputs) * layout.group_bytes(width);
    return 0;
}

LinearTemp linear_temp(const ferrum_launch &launch, unsigned threads) {
    const auto &p = *reinterpret_cast<const ferrum_linear_params *>(launch.params);
    const FormatLayout &layout = layout_of(launch.kernel);
    LinearTemp temp{};
    temp.fixed_point = !layout.dense;
    const uint64_t rows = p.rows, width = p.in_features;
    auto take = [&](uint64_t bytes) {
        uint64_t at = temp.bytes;
        temp.bytes = align_up(at + bytes, 64);
        return at;
    };
    temp.values = take(rows * align_up(width, 32) * (layout.dense ? 4 : 2));
    temp.sums = take(layout.dense ? 0 : rows * (width / 32) * kBlockSumsBytes);
    // As much for all formats that go together: projections that share their input may be under way side by side.
    const uint64_t widest =
        layout.dense ? width * kGroupOutputs * 4 : portable::packed_group_bytes<portable::q8_0>(width);
    temp.thread_bytes = align_up(kMostTileGroups * widest, 64);
    temp.groups = take(temp.thread_bytes * threads);
    return temp;
}

AttentionTemp attention_temp(const ferrum_causal_attention_params &p) {
    AttentionTemp temp{};
    temp.group = p.query_heads / p.key_value_heads;
    temp.padded_dim = uint32_t(align_up(p.head_dim, 16));
    const uint32_t most_rows = std::min(kAttentionRows, kAttentionFloats / temp.padded_dim);
    temp.block_tokens = std::min(p.tokens, std::max(1u, most_rows / temp.group));
    temp.score_stride = uint32_t(align_up(p.span_tokens, 16)) + 16;
    temp.scores = uint64_t(kGroupRows) * temp.score_stride;
    temp.key_stride = uint32_t(align_up(temp.score_stride, 32));
    temp.keys = uint64_t(temp.key_stride) * temp.padded_dim / 2;
    temp.values = align_up(p.span_tokens, 16) * temp.padded_dim / 2;
    auto floats_of_block = [&] {
        const uint64_t rows = align_up(temp.group * temp.block_tokens, kGroupRows);
        temp.acc = rows * temp.padded_dim;
        temp.sums = align_up(rows, 16) + 16;
        temp.query = rows * temp.padded_dim + 16;
        return temp.acc + 2 * temp.sums + temp.query + temp.scores + temp.keys + temp.values;
    };
    // For blocks as large as they get, whatever the spans: launches that come again at other positions keep their
    // place.
    temp.thread_bytes = align_up(4 * floats_of_block(), 64);
    // Smaller blocks, each with a copy of the keys, where there would not be enough for several threads.
    const uint64_t side_by_side = p.key_value_heads * (p.tokens <= FERRUM_FEW_ROWS ? p.spans : 1);
    while (temp.block_tokens * temp.group >= 4 * kGroupRows && div_up(p.tokens, temp.block_tokens) * side_by_side < 8)
        temp.block_tokens = (temp.block_tokens + 1) / 2;
    temp.blocks = uint32_t(div_up(p.tokens, temp.block_tokens));
    floats_of_block();
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
