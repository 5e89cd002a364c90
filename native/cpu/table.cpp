// The table of one instruction set's kernels.
#include "kernels.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

const KernelFunction kernels[kernel_count] = {
#define FERRUM_KERNEL_ENTRY(name) name,
    FERRUM_KERNELS(FERRUM_KERNEL_ENTRY)
#undef FERRUM_KERNEL_ENTRY
};

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
