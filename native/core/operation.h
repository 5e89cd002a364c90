// What the operations of a single launch share: checks of arguments, a new output, the launch.
#pragma once

#include "program.h"

namespace ferrum {

constexpr uint64_t kMaxRows = uint64_t(1) << 31;

inline void check_index_range(const char *op, const char *name, Buffer *buffer, uint64_t offset, uint64_t count,
                              uint64_t limit) {
    buffer->wait();
    const auto *values = reinterpret_cast<const int32_t *>(static_cast<uint8_t *>(buffer->host()) + offset);
    if (limit == 0 && count)
        fail(FERRUM_INVALID_ARGUMENT, "[%s] %s: expected none, since there is nothing to choose from, got %llu", op,
             name, (unsigned long long)count);
    for (uint64_t i = 0; i < count; i++)
        if (values[i] < 0 || uint64_t(values[i]) >= limit)
            fail(FERRUM_INVALID_ARGUMENT, "[%s] %s: expected 0…%llu, got %d at position %llu", op, name,
                 (unsigned long long)(limit - 1), values[i], (unsigned long long)i);
}

class Operation {
   public:
    // `replayable`: the call is its launches and outputs, and nothing of the host's.
    Operation(const char *op, ferrum_device *device, bool replayable = false)
        : op_(op), device_(reinterpret_cast<Device *>(required(device, "device"))) {
        device_->check_usable(op, replayable);
        work_.label = op;
    }
    Device *device() const { return device_; }

    // A checked tensor argument, bound as a resource.
    const ferrum_tensor &argument(const char *name, const ferrum_tensor *tensor,
                                  std::initializer_list<uint32_t> formats, uint32_t rank) {
        const ferrum_tensor &t = *required(tensor, name);
        if (formats.size()) check_format({op_, name}, t, formats);
        check_rank({op_, name}, t, rank);
        check_storage({op_, name}, device_, t);
        if (rank && t.shape[0] >= kMaxRows)
            fail(FERRUM_INVALID_ARGUMENT, "[%s] %s: expected fewer than 2^31 rows, got %llu", op_, name,
                 (unsigned long long)t.shape[0]);
        if (rank > 1 && t.shape[1] >= kMaxRows)
            fail(FERRUM_INVALID_ARGUMENT, "[%s] %s: expected fewer than 2^31 columns, got %llu", op_, name,
                 (unsigned long long)t.shape[1]);
        return t;
    }

    Operand bind(const ferrum_tensor &t) { return bind(reinterpret_cast<Buffer *>(t.buffer), t.offset); }
    Operand bind(Buffer *buffer, uint64_t offset = 0) {
        work_.keep.push_back(Ref<Buffer>::share(buffer));
        return {work_.add(buffer, offset), 0};
    }

    void keep(RefCounted *object) { work_.keep.push_back(Ref<RefCounted>::share(object)); }

    Ref<Buffer> output(uint64_t rows, uint64_t width, uint64_t element_bytes) {
        Ref<Buffer> y =
            Recorder::allocate(device_, checked_multiply(checked_multiply(rows, width, op_), element_bytes, op_));
        outputs_.push_back(y);
        return y;
    }

    // An empty input makes an empty output and no launch.
    void submit(const Launch &launch, uint64_t elements) {
        if (elements) work_.launches.push_back(launch);
        Recorder *recorder = Recorder::on(device_);
        if (recorder) {
            if (check_) recorder->check_in_runs(*std::move(check_));
            recorder->operation(work_, outputs_);
        }
        if (elements && (!recorder || recorder->runs)) device_->submit(std::move(work_));
    }

    void check_indices(const char *name, const ferrum_tensor &t, uint64_t limit) {
        // First: it refuses values that will be others in a run, whatever they are now.
        if (Recorder *recorder = Recorder::on(device_)) check_ = recorder->check_of(op_, name, t, limit);
        check_index_range(op_, name, reinterpret_cast<Buffer *>(t.buffer), t.offset, t.shape[0], limit);
    }

   private:
    const char *op_;
    Device *device_;
    Submission work_;
    std::vector<Ref<Buffer>> outputs_;
    std::optional<IndexCheck> check_;
};

inline void give(Ref<Buffer> buffer, ferrum_buffer **out) {
    *out = reinterpret_cast<ferrum_buffer *>(buffer.detach());
}

}  // namespace ferrum
