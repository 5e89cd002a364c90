// A submission as the CPU device runs it.
#pragma once

#include "../core/launch.h"
#include "kernels.h"
#include "pool.h"

namespace ferrum::cpu {

// The kernels of one instruction set.
struct InstructionSet {
    const char *name;
    const KernelFunction *kernels;
    RowFunction (*row_function)(uint32_t kernel);
    void (*pack)(const Packing &job, uint64_t group);
    bool available;
};

// A submission with its buffers resolved and its temporary memory laid out.
class Launches : public Job {
   public:
    Launches(Submission &&submission, const InstructionSet &set, unsigned threads);
    void run(Worker &worker) override;
    bool warm_up(Cursor &at) override;

    // Done before a second thread would have noticed.
    bool is_small() const;
    uint64_t temp_bytes() const { return temp_bytes_; }
    // Before it runs.
    void set_temp(uint8_t *memory) {
        for (Call &call : calls_) call.temp = memory + call.temp_offset;
    }
    // When it has run: a thread may still be leaving the job, but what the call kept alive goes while the caller is
    // here.
    void let_go() {
        work_.keep.clear();
        work_.list.reset();
    }

   private:
    void resolve(const InstructionSet &set, unsigned threads);
    void merge(size_t i, RowFunction (*row_function)(uint32_t));
    void find_next();
    bool recall();
    void remember() const;
    const uint8_t *prepared_weight(const ferrum_launch &launch) const;

    Submission work_;
    const KernelFunction *const kernels_;
    std::vector<Call> calls_;
    uint64_t temp_bytes_ = 0;
};

}  // namespace ferrum::cpu
