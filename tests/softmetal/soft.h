// SoftMetal's classes: what is behind tests/softmetal/Metal/Metal.h.
#import <Metal/Metal.h>

#include "emulator/emulator.h"
#include "memory.h"
#include "softmetal.h"

// Counts itself among the live objects.
@interface SoftObject : NSObject
@end

@interface SoftDevice : SoftObject <MTLDevice>
@end

@interface SoftBuffer : SoftObject <MTLBuffer> {
   @public
    soft_range *range;
}
- (id)initWithRange:(soft_range *)aRange;
@end

@interface SoftLibrary : SoftObject <MTLLibrary>
@end

@interface SoftFunction : SoftObject <MTLFunction> {
   @public
    const emu_kernel *kernel;
    uint32_t constants;
}
@end

@interface SoftPipeline : SoftObject <MTLComputePipelineState> {
   @public
    const emu_kernel *kernel;
    uint32_t constants;
    BOOL wholeSimdgroups;
}
@end

@interface SoftArchive : SoftObject <MTLBinaryArchive> {
   @public
    NSMutableSet *entries;  // "kernel constants"
}
@end

@interface SoftQueue : SoftObject <MTLCommandQueue>
@end

// One dispatch as it was encoded.
typedef struct soft_dispatch {
    SoftPipeline *pipeline;
    uint64_t bound;                       // mask of indices
    soft_range *ranges[EMU_MAX_BUFFERS];  // NULL: bytes
    void *addresses[EMU_MAX_BUFFERS];
    void *bytes[EMU_MAX_BUFFERS];
    uint32_t groups[3];
    uint32_t threads[3];
    uint32_t threadgroup_bytes;
    uint32_t declared;  // leading entries of the encoder's declarations that hold for it
    uint32_t signposts;
    uint32_t phase;  // barriers before it
} soft_dispatch;

@class SoftCommandBuffer;

@interface SoftEncoder : SoftObject <MTLComputeCommandEncoder> {
   @public
    SoftCommandBuffer *owner;  // not retained
    NSString *name;
    NSMutableArray *signposts;
    soft_dispatch *dispatches;
    uint32_t count;
    soft_access *declarations;
    uint32_t declared;
    soft_dispatch next;  // what has been set for the next dispatch
    uint32_t groupDepth;
    BOOL ended, concurrent;
}
@end

@interface SoftEncoder (Run)
// nil, or what went wrong, and how many signposts had been passed.
- (NSString *)runToSignposts:(NSUInteger *)passed;
@end

@interface SoftCommandBuffer : SoftObject <MTLCommandBuffer> {
   @public
    SoftQueue *queue;
    NSMutableArray *encoders;
    NSMutableArray *handlers;
    NSMutableArray *held;  // buffers, with retainedReferences
    NSString *mistake;     // the first one, made while encoding
    NSUInteger mistakeSignposts;
    NSError *failure;
    MTLCommandBufferErrorOption errorOptions;
    MTLCommandBufferStatus state;
}
// Remembers the first mistake: it becomes the command buffer's error.
- (void)mistake:(NSString *)format, ... NS_FORMAT_FUNCTION(1, 2);
@end

@interface SoftCommandBuffer (Run)
- (void)run;  // on the GPU's thread
@end

@interface SoftEncoderInfo : SoftObject <MTLCommandBufferEncoderInfo> {
   @public
    NSString *name;
    NSArray *signposts;
    MTLCommandEncoderErrorState state;
}
@end

// ---- Shared state

extern uint64_t softmetal_order;
extern uint32_t softmetal_simd_width, softmetal_threads;

void soft_complain(NSString *format, ...) NS_FORMAT_FUNCTION(1, 2);
NSError *soft_error(NSInteger code, NSString *message);
void soft_count(uint64_t dispatches, uint64_t command_buffers, uint64_t compiled);
BOOL soft_should_fail(const char *kernel);

// Gives the command buffer, retained, to the GPU's thread.
void soft_gpu_enqueue(SoftCommandBuffer *buffer);
