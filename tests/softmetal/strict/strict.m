// SoftMetal, held to what it promises: `strict CASE` does one thing wrong (or nothing), and prints what came of it.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#import <Metal/Metal.h>

#include "../softmetal.h"

static id<MTLDevice> device;
static id<MTLCommandQueue> queue;
static id<MTLLibrary> library;

static NSString *reason(NSError *error) {
    return error ? [error localizedDescription] : @"no reason";
}

static id<MTLLibrary> new_library(NSString *source, NSError **error) {
    MTLCompileOptions *options = [[[MTLCompileOptions alloc] init] autorelease];
    [options setLanguageVersion:MTLLanguageVersion3_0];
    [options setFastMathEnabled:NO];
    return [device newLibraryWithSource:source options:options error:error];
}

static id<MTLComputePipelineState> pipeline(NSString *name, BOOL bias) {
    MTLFunctionConstantValues *values = [[[MTLFunctionConstantValues alloc] init] autorelease];
    for (NSUInteger i = 0; i < 10; i++) {
        BOOL value = bias && i == 2;
        [values setConstantValue:&value type:MTLDataTypeBool atIndex:i];
    }
    NSError *error = nil;
    id<MTLFunction> function = [[library newFunctionWithName:name constantValues:values error:&error] autorelease];
    if (!function) {
        printf("%s\n", [reason(error) UTF8String]);
        return nil;
    }
    MTLComputePipelineDescriptor *descriptor = [[[MTLComputePipelineDescriptor alloc] init] autorelease];
    [descriptor setComputeFunction:function];
    [descriptor setThreadGroupSizeIsMultipleOfThreadExecutionWidth:YES];
    return [[device newComputePipelineStateWithDescriptor:descriptor options:0 reflection:NULL error:NULL] autorelease];
}

static id<MTLBuffer> buffer(NSUInteger floats, float first, NSString *label) {
    id<MTLBuffer> made = [device newBufferWithLength:floats * 4 options:MTLResourceStorageModeShared];
    for (NSUInteger i = 0; i < floats; i++) ((float *)[made contents])[i] = first + (float)i;
    [made setLabel:label];
    return made;
}

// Encodes, runs, waits, and prints the error, or `result`'s first number.
static void run(id<MTLBuffer> result, void (^encode)(id<MTLComputeCommandEncoder>)) {
    __block pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    __block pthread_cond_t finished = PTHREAD_COND_INITIALIZER;
    __block BOOL done = NO;
    MTLCommandBufferDescriptor *descriptor = [[[MTLCommandBufferDescriptor alloc] init] autorelease];
    [descriptor setRetainedReferences:NO];
    [descriptor setErrorOptions:MTLCommandBufferErrorOptionEncoderExecutionStatus];
    id<MTLCommandBuffer> commands = [queue commandBufferWithDescriptor:descriptor];
    id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoderWithDispatchType:MTLDispatchTypeConcurrent];
    encode(encoder);
    [encoder endEncoding];
    [commands addCompletedHandler:^(id<MTLCommandBuffer> ended) {
      (void)ended;
      pthread_mutex_lock(&lock);
      done = YES;
      pthread_cond_signal(&finished);
      pthread_mutex_unlock(&lock);
    }];
    [commands commit];
    pthread_mutex_lock(&lock);
    while (!done) pthread_cond_wait(&finished, &lock);
    pthread_mutex_unlock(&lock);
    if ([commands status] == MTLCommandBufferStatusError)
        printf("%s\n", [reason([commands error]) UTF8String]);
    else
        printf("%g\n", (double)*(const float *)[result contents]);
    for (id<MTLCommandBufferEncoderInfo> info in
         [[[commands error] userInfo] objectForKey:MTLCommandBufferEncoderInfoErrorKey])
        if ([info errorState] == MTLCommandEncoderErrorStateFaulted && [[info debugSignposts] count])
            printf("after %s\n", [[[info debugSignposts] lastObject] UTF8String]);
}

static void dispatch(id<MTLComputeCommandEncoder> encoder, NSUInteger threads) {
    [encoder dispatchThreadgroups:MTLSizeMake(1, 1, 1) threadsPerThreadgroup:MTLSizeMake(threads, 1, 1)];
}

static void complaint(void) {
    printf("%s\n", softmetal_complaint());
}

// ---- Dispatches

// add_one, then double: 3 becomes 8, or 7 where no barrier keeps them apart.
static void add_then_double(BOOL barrier) {
    id<MTLBuffer> y = [buffer(32, 3, @"y") autorelease];
    run(y, ^(id<MTLComputeCommandEncoder> encoder) {
      [encoder setComputePipelineState:pipeline(@"strict_add_one", NO)];
      [encoder setBuffer:y offset:0 atIndex:0];
      dispatch(encoder, 32);
      if (barrier) [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
      [encoder setComputePipelineState:pipeline(@"strict_double", NO)];
      [encoder setBuffer:y offset:0 atIndex:0];
      dispatch(encoder, 32);
    });
}

static void copy(uint32_t first, NSUInteger threads, BOOL bind_x, BOOL extra) {
    id<MTLBuffer> x = [buffer(64, 5, @"x") autorelease], y = [buffer(64, 0, @"y") autorelease];
    run(y, ^(id<MTLComputeCommandEncoder> encoder) {
      [encoder pushDebugGroup:@"a copy"];
      [encoder insertDebugSignpost:@"a copy"];
      [encoder setComputePipelineState:pipeline(@"strict_copy", NO)];
      if (bind_x) [encoder setBuffer:x offset:0 atIndex:0];
      if (extra) [encoder setBuffer:x offset:0 atIndex:5];
      [encoder setBuffer:y offset:0 atIndex:1];
      [encoder setBytes:&first length:4 atIndex:2];
      dispatch(encoder, threads);
      [encoder popDebugGroup];
    });
}

static void stale_binding(void) {
    id<MTLBuffer> x = [buffer(64, 5, @"x") autorelease], y = [buffer(64, 0, @"y") autorelease];
    run(y, ^(id<MTLComputeCommandEncoder> encoder) {
      const uint32_t first = 0;
      [encoder setComputePipelineState:pipeline(@"strict_copy", NO)];
      for (int time = 0; time < 2; time++) {
          if (time == 0) [encoder setBuffer:x offset:0 atIndex:0];
          [encoder setBuffer:y offset:0 atIndex:1];
          [encoder setBytes:&first length:4 atIndex:2];
          dispatch(encoder, 32);
      }
    });
}

static void optional_argument(BOOL bias) {
    id<MTLBuffer> y = [buffer(32, 0, @"y") autorelease];
    run(y, ^(id<MTLComputeCommandEncoder> encoder) {
      [encoder setComputePipelineState:pipeline(@"strict_optional", bias)];
      [encoder setBuffer:y offset:0 atIndex:1];
      dispatch(encoder, 32);
    });
}

// A page table of two slabs; `declared` of them are declared, with `usage`.
static void pages(NSUInteger declared, MTLResourceUsage usage) {
    id<MTLBuffer> from = [buffer(64, 9, @"slab 0") autorelease], to = [buffer(64, 0, @"slab 1") autorelease];
    id<MTLBuffer> table = [[device newBufferWithLength:16 options:0] autorelease];
    ((uint64_t *)[table contents])[0] = [from gpuAddress];
    ((uint64_t *)[table contents])[1] = [to gpuAddress];
    run(to, ^(id<MTLComputeCommandEncoder> encoder) {
      const id<MTLResource> slabs[] = {from, to};
      [encoder useResources:slabs count:declared usage:usage];
      [encoder setComputePipelineState:pipeline(@"strict_pages", NO)];
      [encoder setBuffer:table offset:0 atIndex:0];
      dispatch(encoder, 32);
    });
}

static void freed(BOOL bound) {
    id<MTLBuffer> x = buffer(64, 5, @"gone"), y = [buffer(64, 0, @"y") autorelease];
    id<MTLBuffer> table = [[device newBufferWithLength:16 options:0] autorelease];
    ((uint64_t *)[table contents])[0] = [x gpuAddress];
    ((uint64_t *)[table contents])[1] = [y gpuAddress];
    run(y, ^(id<MTLComputeCommandEncoder> encoder) {
      const uint32_t first = 0;
      const id<MTLResource> slabs[] = {y};
      if (bound) {
          [encoder setComputePipelineState:pipeline(@"strict_copy", NO)];
          [encoder setBuffer:x offset:0 atIndex:0];
          [encoder setBuffer:y offset:0 atIndex:1];
          [encoder setBytes:&first length:4 atIndex:2];
      } else {
          [encoder useResources:slabs count:1 usage:MTLResourceUsageRead | MTLResourceUsageWrite];
          [encoder setComputePipelineState:pipeline(@"strict_pages", NO)];
          [encoder setBuffer:table offset:0 atIndex:0];
      }
      dispatch(encoder, 32);
      [x release];
    });
}

static void threadgroup_memory(void) {
    id<MTLBuffer> y = [buffer(32, 0, @"y") autorelease];
    run(y, ^(id<MTLComputeCommandEncoder> encoder) {
      [encoder setComputePipelineState:pipeline(@"strict_memory", NO)];
      [encoder setBuffer:y offset:0 atIndex:0];
      dispatch(encoder, 32);
    });
}

static void undefined_contents(void) {
    id<MTLBuffer> y = [[device newBufferWithLength:64 options:0] autorelease];
    printf("%g\n", (double)((float *)[y contents])[15]);
}

// ---- Everything else

static void no_copy(NSUInteger shift, NSUInteger length) {
    const NSUInteger page = (NSUInteger)getpagesize();
    char *memory = aligned_alloc(page, 4 * page);
    id<MTLBuffer> made = [device newBufferWithBytesNoCopy:memory + shift
                                                   length:length ? length : page
                                                  options:0
                                              deallocator:nil];
    printf("%s ", made ? "made" : "nil");
    complaint();
    [made release];
    free(memory);
}

static void unmapped(void) {
    const NSUInteger page = (NSUInteger)getpagesize();
    char *memory = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    id<MTLBuffer> x = [[device newBufferWithBytesNoCopy:memory length:page options:0 deallocator:nil] autorelease];
    id<MTLBuffer> y = [buffer(64, 0, @"y") autorelease];
    munmap(memory, page);
    run(y, ^(id<MTLComputeCommandEncoder> encoder) {
      const uint32_t first = 0;
      [encoder setComputePipelineState:pipeline(@"strict_copy", NO)];
      [encoder setBuffer:x offset:0 atIndex:0];
      [encoder setBuffer:y offset:0 atIndex:1];
      [encoder setBytes:&first length:4 atIndex:2];
      dispatch(encoder, 32);
    });
}

static void library_with(NSString *source) {
    NSError *error = nil;
    id<MTLLibrary> made = new_library(source, &error);
    printf("%s\n", made ? "made" : [reason(error) UTF8String]);
    [made release];
}

static void missing_constant(void) {
    MTLFunctionConstantValues *values = [[[MTLFunctionConstantValues alloc] init] autorelease];
    NSError *error = nil;
    id<MTLFunction> function = [library newFunctionWithName:@"strict_optional" constantValues:values error:&error];
    printf("%s\n", function ? "made" : [reason(error) UTF8String]);
    [function release];
}

static void twice(void) {
    id<MTLCommandBuffer> commands =
        [queue commandBufferWithDescriptor:[[[MTLCommandBufferDescriptor alloc] init] autorelease]];
    [commands commit];
    [commands commit];
    complaint();
}

// Asked for nothing, names itself.
static BOOL is(const char *asked, const char *name) {
    if (!asked) printf("%s\n", name);
    return asked && strcmp(asked, name) == 0;
}

static void run_case(const char *name) {
    if (is(name, "barrier")) add_then_double(YES);
    if (is(name, "no barrier")) add_then_double(NO);
    if (is(name, "copy")) copy(0, 32, YES, NO);
    if (is(name, "read past the end")) copy(40, 32, YES, NO);
    if (is(name, "unbound")) copy(0, 32, NO, NO);
    if (is(name, "bound where nothing is")) copy(0, 32, YES, YES);
    if (is(name, "too many threads")) copy(0, 2048, YES, NO);
    if (is(name, "half a SIMD-group")) copy(0, 48, YES, NO);
    if (is(name, "bound for the dispatch before")) stale_binding();
    if (is(name, "optional absent")) optional_argument(NO);
    if (is(name, "optional unbound")) optional_argument(YES);
    if (is(name, "slabs")) pages(2, MTLResourceUsageRead | MTLResourceUsageWrite);
    if (is(name, "undeclared slab")) pages(1, MTLResourceUsageRead | MTLResourceUsageWrite);
    if (is(name, "slab declared read-only")) pages(2, MTLResourceUsageRead);
    if (is(name, "freed while bound")) freed(YES);
    if (is(name, "freed but in a table")) freed(NO);
    if (is(name, "fresh threadgroup memory")) threadgroup_memory();
    if (is(name, "fresh buffer")) undefined_contents();
    if (is(name, "no-copy")) no_copy(0, 0);
    if (is(name, "no-copy unmapped")) unmapped();
    if (is(name, "no-copy unaligned")) no_copy(64, 0);
    if (is(name, "no-copy with half a page")) no_copy(0, 100);
    if (is(name, "no such function")) pipeline(@"strict_nothing", NO);
    if (is(name, "missing constant")) missing_constant();
    if (is(name, "source")) library_with(@"kernel void f() {}");
    if (is(name, "source with an include")) library_with(@"#include \"common.h\"\nkernel void f() {}");
    if (is(name, "commit twice")) twice();
}

int main(int argc, char **argv) {
    @autoreleasepool {
        device = MTLCreateSystemDefaultDevice();
        queue = [device newCommandQueue];
        library = new_library(@"kernel", NULL);
        @autoreleasepool {
            run_case(argc > 1 ? argv[1] : NULL);
        }
        [library release];
        [queue release];
        [device release];
    }
    // The GPU's thread lets go of a command buffer after it has told its handlers.
    for (int i = 0; i < 100 && softmetal_live_objects(); i++) usleep(1000);
    if (argc > 1) printf("alive: %llu\n", (unsigned long long)softmetal_live_objects());
    return 0;
}
