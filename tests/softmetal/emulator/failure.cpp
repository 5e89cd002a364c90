// The messages of a threadgroup that cannot go on.
#include <cstring>

#include "threadgroup.h"

namespace emu {

static std::string at(const Place &place) {
    const char *slash = strrchr(place.file, '/');
    return std::string(place.what) + " (" + (slash ? slash + 1 : place.file) + ":" + std::to_string(place.line) + ")";
}

static std::string three(const uint32_t *of) {
    return "(" + std::to_string(of[0]) + ", " + std::to_string(of[1]) + ", " + std::to_string(of[2]) + ")";
}

std::string Threadgroup::describe() const {
    const std::string one = "thread " + three(failure_.one->arguments.thread_position_in_threadgroup);
    const std::string other = "thread " + three(failure_.other->arguments.thread_position_in_threadgroup);
    const Place &one_at = failure_.one_at, &other_at = failure_.other_at;
    std::string what;
    switch (failure_.kind) {
        case Failure::none:
            break;
        case Failure::two_meetings:
            what = "of one SIMD-group, " + one + " is at " + at(one_at) + " and " + other + " at " + at(other_at);
            break;
        case Failure::meeting_and_end:
            what = one + " waits in " + at(one_at) + ", but " + other + " of the same SIMD-group has ended";
            break;
        case Failure::meeting_and_barrier:
            what = one + " waits in " + at(one_at) + ", but " + other + " of the same SIMD-group at " + at(other_at);
            break;
        case Failure::uneven_matrices:
            what = "before " + at(one_at) + ", " + one + " has loaded or stored " +
                   std::to_string(failure_.one->matrix_moves) + " matrices, and " + other + " " +
                   std::to_string(failure_.other->matrix_moves);
            break;
        case Failure::two_barriers:
            what = one + " waits at " + at(one_at) + " and " + other + " at " + at(other_at);
            break;
        case Failure::barrier_and_end:
            what = one + " waits at " + at(one_at) + ", but " + other + " has ended";
            break;
        case Failure::threadgroup_memory:
            what = "threadgroup memory: " + std::to_string(memory_asked_) + " bytes with array " + one_at.what +
                   ", the limit is " + std::to_string(EMU_MAX_THREADGROUP_BYTES);
            break;
    }
    return std::string(dispatch_->kernel->face.name) + ", threadgroup " + three(position_) + ": " + what;
}

}  // namespace emu
