// SHA-256 (FIPS 180-4), for topology fingerprints.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ferrum {

std::array<uint8_t, 32> sha256(const std::vector<uint8_t> &message);

}  // namespace ferrum
