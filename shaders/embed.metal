// Embeddings: rows of a matrix in any weight format, dequantised exactly. A threadgroup a token.
#include "blocks.h"

template <typename F, bool kWide>
inline void embed_row(device const uchar *row, device uchar *y, ulong start, uint width, uint index) {
    const uint units = (width + F::unit - 1) / F::unit;
    for (uint unit = index; unit < units; unit += 256) {
        const uint count = F::dense ? min(width - unit * F::unit, 8u) : 8u;
        typename F::bits bits;
        if (kWide && count == 8)
            F::template load<true>(row, unit, count, bits);
        else
            F::template load<false>(row, unit, count, bits);
        FERRUM_UNROLL for (uint octet = 0; octet < F::octets; octet++) {
            float4 low, high;
            F::weights(bits, octet, low, high);
            const ulong at = start + F::element(unit, octet);
            if (kWide && count == 8) {
                if (constant_output_f32) {
                    *(device float4 *)((device float *)y + at) = low;
                    *(device float4 *)((device float *)y + at + 4) = high;
                } else {
                    *(device half4 *)((device half *)y + at) = half4(low);
                    *(device half4 *)((device half *)y + at + 4) = half4(high);
                }
            } else {
                FERRUM_UNROLL for (uint i = 0; i < 8; i++) {
                    if (i >= count) break;
                    const float value = i < 4 ? low[i % 4] : high[i % 4];
                    if (constant_output_f32)
                        ((device float *)y)[at + i] = value;
                    else
                        ((device half *)y)[at + i] = half(value);
                }
            }
        }
    }
}

template <typename F>
inline void embed(device const int *tokens, device const uchar *weight, device uchar *y,
                  constant ferrum_embed_params &p, uint row, uint index) {
    device const uchar *from = weight + ulong(uint(tokens[row])) * p.weight_row_bytes;
    const ulong start = ulong(row) * p.width;
    if (is_aligned(weight, F::alignment) && p.weight_row_bytes % F::alignment == 0 && is_aligned(y, 16) &&
        p.width % 4 == 0)
        embed_row<F, true>(from, y, start, p.width, index);
    else
        embed_row<F, false>(from, y, start, p.width, index);
}

#define KERNEL_EMBED(NAME, format, id, elements, bytes)                                                                \
    kernel void embed_##format(                                                                                        \
        device const int *tokens [[buffer(FERRUM_EMBED_TOKENS)]],                                                      \
        device const uchar *weight [[buffer(FERRUM_EMBED_WEIGHT)]], device uchar *y [[buffer(FERRUM_EMBED_Y)]],        \
        constant ferrum_embed_params &p [[buffer(FERRUM_EMBED_PARAMS)]], uint3 group [[threadgroup_position_in_grid]], \
        uint index [[thread_index_in_threadgroup]]) {                                                                  \
        embed<format>(tokens, weight, y, p, group.x, index);                                                           \
    }
FERRUM_FORMATS(KERNEL_EMBED)
